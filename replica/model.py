"""The network in TensorFlow: loss, gradient and evaluation on one flat vector.

The only file of the package that imports TensorFlow.
"""

import os

import tensorflow as tf

from replica.params import Layout


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
