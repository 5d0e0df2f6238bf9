"""A parameter server as one writes it first with mpi4py, to measure ps_mode.py against.

Pickled objects, one message for each variable, a blocking receive from whoever is next,
Adam in whole-array NumPy, no placement. The network, data and batch are ps_mode.py's.
"""

import argparse
import json
import sys
import time

import numpy as np
from mpi4py import MPI

from replica import data, params

parser = argparse.ArgumentParser()
parser.add_argument("--train_steps", type=int, default=200)
parser.add_argument("--batch_size", type=int, default=100)
parser.add_argument("--data_dir")
args = parser.parse_args()

comm = MPI.COMM_WORLD
layout = params.mlp(100)
parameters = list(layout.unflatten(layout.initial(0)).values())


def serve() -> None:
    """Rank 0."""
    means = [np.zeros_like(p) for p in parameters]
    variances = [np.zeros_like(p) for p in parameters]
    status = MPI.Status()
    workers = comm.Get_size() - 1
    comm.barrier()
    began = time.perf_counter()
    for step in range(1, args.train_steps + workers + 1):
        comm.recv(source=MPI.ANY_SOURCE, tag=0, status=status)
        worker = status.Get_source()
        gradients = [comm.recv(source=worker, tag=1) for _ in parameters]
        if step > args.train_steps:
            comm.send(False, dest=worker)
            continue
        for p, m, v, g in zip(parameters, means, variances, gradients, strict=True):
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            rate = 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            p -= rate * m / (np.sqrt(v) + 1e-8)
        comm.send(True, dest=worker)
        for p in parameters:
            comm.send(p, dest=worker, tag=1)
    seconds = time.perf_counter() - began
    rate = args.train_steps / seconds
    sys.stdout.write(json.dumps({"steps_per_second": rate}) + "\n")


def work() -> None:
    """Every other rank."""
    import tensorflow as tf

    train = data.load(args.data_dir).train
    pixels = train.images.astype(np.float32) / 255
    labels = train.labels.astype(np.int32)

    @tf.function
    def gradient(variables, images, labels):
        with tf.GradientTape() as tape:
            tape.watch(variables)
            hid_w, hid_b, sm_w, sm_b = variables
            hidden = tf.nn.relu(images @ hid_w + hid_b)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels=labels, logits=hidden @ sm_w + sm_b
            )
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, variables), loss

    rng = np.random.default_rng(comm.Get_rank())
    variables, more = parameters, True
    some = slice(args.batch_size)
    gradient([tf.constant(v) for v in variables], pixels[some], labels[some])  # compile
    comm.barrier()
    while more:
        batch = rng.integers(0, len(train), args.batch_size)
        tensors = [tf.constant(v) for v in variables]
        found, loss = gradient(tensors, pixels[batch], labels[batch])
        comm.send(float(loss), dest=0, tag=0)
        for g in found:
            comm.send(g.numpy(), dest=0, tag=1)
        more = comm.recv(source=0)
        if more:
            variables = [comm.recv(source=0, tag=1) for _ in parameters]


serve() if comm.Get_rank() == 0 else work()
