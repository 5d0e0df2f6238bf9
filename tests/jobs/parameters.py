"""Trains as train.py does and keeps the parameters: parameters.py FILE [flags]."""

import sys

import numpy as np

import train
from replica import data, options, placement, report


def main() -> None:
    path, *flags = sys.argv[1:]
    opts = options.parse(flags, options.AllreduceOptions)
    placement.settle(opts.num_gpus, opts.stall_timeout)
    dataset = data.load(opts.data_dir, opts.num_classes)
    train.connect(opts, dataset)
    watchdog = report.Watchdog(opts.stall_timeout, "parameters.py")
    vector, summary = train.train(opts, dataset, watchdog)
    if placement.slot().rank == 0:
        np.savez(path, vector=vector, train_loss=summary["train_loss"])


if __name__ == "__main__":
    report.run(main, "parameters.py")
