import numpy as np
import tensorflow as tf

import train


def test_ten_fused_steps_are_those_of_tensorflows_optimizer(monkeypatch):
    monkeypatch.setattr(train, "tf", tf)
    rng = np.random.default_rng(0)
    start = rng.normal(size=1000).astype(np.float32)
    zeros = np.zeros_like(start)
    state = train.State(tf.Variable(start), tf.Variable(zeros), tf.Variable(zeros))
    reference = tf.Variable(start)
    adam = tf.compat.v1.train.AdamOptimizer(0.01)
    for step in range(10):
        # From huge to tiny, as the gradients of a network are.
        gradient = tf.constant(
            rng.normal(size=1000) * 10.0 ** rng.integers(-9, 3, 1000)
        )
        gradient = tf.cast(gradient, tf.float32)
        train.adam(state, gradient, step + 1, 0.01)
        adam.apply_gradients([(gradient, reference)])
        np.testing.assert_allclose(state.vector, reference, rtol=0, atol=1e-6)
    assert np.abs(state.vector - start).max() > 0.05
