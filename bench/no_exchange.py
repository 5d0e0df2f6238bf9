"""ps_mode.py without its messages: the rate that they can only lower.

Every worker computes its share of the gradients on the parameters that it began with.
Takes the flags of ps_mode.py; as there, rank 0 serves: it waits for the others.
"""

import gc
import os
import time

import numpy as np

from replica import data, options, params, placement, report

opts = options.parse(None, options.ServerOptions)
rank, workers = placement.slot().rank, placement.slot().size - opts.num_ps
placement.settle(opts.num_gpus, opts.stall_timeout, opts.num_ps)
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

from mpi4py import MPI  # noqa: E402

from replica.link import Peers  # noqa: E402

peers = Peers(MPI.COMM_WORLD)
each = opts.train_steps // workers
if rank < opts.num_ps:
    peers.barrier()
    began = time.perf_counter()
    peers.barrier()
    seconds = time.perf_counter() - began
    if rank == 0:
        report.final({"steps_per_second": round(each * workers / seconds, 1)})
else:
    from replica import model

    train = data.load(opts.data_dir, opts.num_classes).train
    layout = params.mlp(opts.hidden_units, opts.num_classes)
    batch, passes = opts.batch_size, opts.push_every
    sampler = data.Sampler(len(train), batch, opts.seed)
    gradient = model.build_gradient(layout, train, batch, passes)
    vector = layout.initial(opts.seed)
    gradient(vector, np.zeros([passes, batch], np.int32))
    gc.freeze()
    peers.barrier()
    for step in range(each):
        ticket = (step * workers + rank - opts.num_ps) * passes
        gradient(vector, sampler.batches(range(ticket, ticket + passes)))
    peers.barrier()
