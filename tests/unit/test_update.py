import numpy as np
import pytest
import tensorflow as tf

import train
from replica import optimizer

THEIRS = tf.compat.v1.train


@pytest.mark.parametrize(
    ("name", "momentum", "theirs"),
    [
        ("adam", 0.0, THEIRS.AdamOptimizer(0.01)),
        ("sgd", 0.0, THEIRS.GradientDescentOptimizer(0.01)),
        ("sgd", 0.9, THEIRS.MomentumOptimizer(0.01, 0.9)),
    ],
    ids=["adam", "sgd", "momentum"],
)
def test_ten_fused_updates_are_tensorflows(monkeypatch, name, momentum, theirs):
    monkeypatch.setattr(train, "tf", tf)
    rng = np.random.default_rng(0)
    start = rng.normal(size=1000).astype(np.float32)
    slots = optimizer.create(name, 1000, momentum).slots
    state = train.State(
        tf.Variable(start), {n: tf.Variable(zeros) for n, zeros in slots.items()}
    )
    reference = tf.Variable(start)
    for step in range(10):
        # From huge to tiny, as the gradients of a network are.
        gradient = rng.normal(size=1000) * 10.0 ** rng.integers(-9, 3, 1000)
        gradient = tf.constant(gradient, tf.float32)
        train.update(state, gradient, step + 1, 0.01, momentum)
        theirs.apply_gradients([(gradient, reference)])
        np.testing.assert_allclose(state.vector, reference, rtol=1e-6, atol=1e-6)
    assert np.abs(state.vector - start).max() > 0.05
