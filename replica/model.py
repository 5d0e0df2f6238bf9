"""The network in TensorFlow: loss, gradient and evaluation on one flat vector.

The only file of the package that imports TensorFlow.
"""

import math
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from replica.data import Split
from replica.params import Layout

EVALUATION_BATCH = 2500  # samples, so that a large set needs no large memory


def gpu_is_missing() -> bool:
    """Whether this process was given a GPU that TensorFlow cannot use."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "-1") not in ("", "-1")
    return given and not tf.config.list_physical_devices("GPU")


def split(layout: Layout, vector: tf.Tensor) -> list[tf.Tensor]:
    """The parameters that the flat ``vector`` [size] holds, each in its shape."""
    pieces = tf.split(vector, layout.sizes)
    shapes = layout.shapes.values()
    return [tf.reshape(p, s) for p, s in zip(pieces, shapes, strict=True)]


def logits(parameters: list[tf.Tensor], images: tf.Tensor) -> tf.Tensor:
    """Scores [batch, classes] of uint8 ``images`` [batch, pixels]."""
    hid_w, hid_b, sm_w, sm_b = parameters
    # Pixels are 0 to 1: divided behind the product, where there are fewer numbers.
    products = tf.matmul(tf.cast(images, hid_w.dtype), hid_w) * (1.0 / 255.0)
    hidden = tf.nn.relu(tf.nn.bias_add(products, hid_b))
    return tf.nn.bias_add(tf.matmul(hidden, sm_w), sm_b)


def losses(scores: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Softmax cross-entropy [batch] of each sample, in its numerically stable form."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.cast(labels, tf.int32), logits=scores
    )


def gradient_and_loss(
    layout: Layout, vector: tf.Tensor, images: tf.Tensor, labels: tf.Tensor
) -> tf.Tensor:
    """Gradient of the batch's mean loss, and the loss itself: float32 [size + 1].

    One vector, so that one message or one allreduce carries both.

    Args:
        vector: the parameters, float32 [size].
        images: uint8 [batch, pixels].
        labels: uint8 [batch].
    """
    parameters = split(layout, vector)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(parameters)
        loss = tf.reduce_mean(losses(logits(parameters, images), labels))
    gradient = tape.gradient(loss, parameters)
    return tf.concat([tf.reshape(piece, [-1]) for piece in (*gradient, loss)], axis=0)


def build_gradient(
    layout: Layout, samples: Split, batch: int, passes: int = 1, dtype: str = "f4"
) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, float]]:
    """A function (vector [size], indices) -> gradient [size], loss.

    The loss is NaN if the gradient is not finite.

    Args:
        layout: of the vector.
        samples: what ``indices``, int32 [passes, batch], choose from.
        batch: samples of one pass.
        passes: batches that are averaged.
        dtype: of the gradient.
    """
    images, labels = tf.constant(samples.images), tf.constant(samples.labels)

    @tf.function(
        input_signature=[
            tf.TensorSpec([layout.size], tf.float32),
            tf.TensorSpec([passes, batch], tf.int32),
        ]
    )
    def compute(vector, indices):
        x, y = tf.gather(images, indices), tf.gather(labels, indices)
        total = gradient_and_loss(layout, vector, x[0], y[0])
        for i in range(1, passes):
            total += gradient_and_loss(layout, vector, x[i], y[i])
        return total / passes if passes > 1 else total

    # Called as it is, without a look at its arguments: a tenth of the time of a call.
    compute = compute.get_concrete_function()

    def gradient_of(vector: np.ndarray, indices: np.ndarray):
        total = compute(tf.convert_to_tensor(vector), tf.convert_to_tensor(indices))
        total = np.asarray(total)
        with np.errstate(over="ignore"):
            gradient, loss = total[:-1].astype(dtype, copy=False), float(total[-1])
        # Their sum is finite if all are, but for an overflow, which is no better.
        finite = np.isfinite(gradient.sum(dtype=np.float32))
        return gradient, loss if finite else math.nan

    return gradient_of


def build_evaluation(layout: Layout) -> Callable[..., np.ndarray]:
    """A function (vector [size], data.Split) -> summed loss, right answers, samples.

    Sums, float64 [3], so that shares of a set may be added up before the one division.
    """

    @tf.function(
        input_signature=[
            tf.TensorSpec([layout.size], tf.float32),
            tf.TensorSpec([None, layout.shapes["hid_w"][0]], tf.uint8),
            tf.TensorSpec([None], tf.uint8),
        ]
    )
    def sums(vector, images, labels):
        return evaluate(layout, vector, images, labels)

    def evaluation(vector, samples: Split) -> np.ndarray:
        total = np.zeros(3)
        for first in range(0, len(samples), EVALUATION_BATCH):
            part = samples[first : first + EVALUATION_BATCH]
            total += sums(vector, part.images, part.labels).numpy()
        return total

    return evaluation


def evaluate(
    layout: Layout, vector: tf.Tensor, images: tf.Tensor, labels: tf.Tensor
) -> tf.Tensor:
    """Summed loss, correct answers and samples: float64 [3].

    Sums, so that shares of a set may be added up before the one division.
    """
    scores = logits(split(layout, vector), images)
    answers = tf.argmax(scores, axis=1, output_type=tf.int32)
    correct = tf.equal(answers, tf.cast(labels, tf.int32))
    return tf.stack(
        [
            tf.reduce_sum(tf.cast(losses(scores, labels), tf.float64)),
            tf.reduce_sum(tf.cast(correct, tf.float64)),
            tf.cast(tf.shape(labels)[0], tf.float64),
        ]
    )
