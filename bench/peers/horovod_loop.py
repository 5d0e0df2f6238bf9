"""Horovod as its examples use it, to measure train.py against.

DistributedGradientTape, one tensor a variable, the Keras optimizer, one step a call,
batches fed from NumPy, no placement. The network, data and batch are those of train.py.
"""

import argparse
import json
import sys
import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from replica import data, params

parser = argparse.ArgumentParser()
parser.add_argument("--train_steps", type=int, default=200)
parser.add_argument("--warm_up", type=int, default=10)
parser.add_argument("--batch_size", type=int, default=100)
parser.add_argument("--data_dir")
args = parser.parse_args()

hvd.init()
train = data.load(args.data_dir).train
layout = params.mlp(100)
arrays = layout.unflatten(layout.initial(0))
hid_w, hid_b, sm_w, sm_b = variables = [tf.Variable(a) for a in arrays.values()]
optimizer = keras.optimizers.Adam(0.01)


@tf.function
def step(images, labels, first):
    """One update; returns the loss."""
    with tf.GradientTape() as tape:
        hidden = tf.nn.relu(images @ hid_w + hid_b)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=hidden @ sm_w + sm_b
        )
        loss = tf.reduce_mean(losses)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    if first:
        hvd.broadcast_variables(variables, root_rank=0)
    return loss


pixels = train.images.astype(np.float32) / 255
labels = train.labels.astype(np.int32)
rng = np.random.default_rng(hvd.rank())
for number in range(args.warm_up + args.train_steps):
    if number == args.warm_up:
        began = time.perf_counter()
    batch = rng.integers(0, len(train), args.batch_size)
    loss = step(pixels[batch], labels[batch], number == 0)
float(loss)
seconds = time.perf_counter() - began
if hvd.rank() == 0:
    rate = args.train_steps / seconds
    sys.stdout.write(json.dumps({"steps_per_second": rate}) + "\n")
