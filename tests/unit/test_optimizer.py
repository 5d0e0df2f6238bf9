"""The server's optimizers against TensorFlow's."""

import numpy as np
import pytest
import tensorflow as tf

from replica import JobError, optimizer
from replica.optimizer import Adam, Momentum, Optimizer

THEIRS = tf.compat.v1.train
PAIRS = [
    (Adam, THEIRS.AdamOptimizer),
    (Optimizer, THEIRS.GradientDescentOptimizer),
    (lambda n: Momentum(n, 0.9), lambda rate: THEIRS.MomentumOptimizer(rate, 0.9)),
]


@pytest.mark.parametrize("size", [1, 1000, 65543])
@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["adam", "sgd", "momentum"])
def test_ten_updates_are_tensorflows(size, ours, theirs):
    rng = np.random.default_rng(1)
    vector = rng.standard_normal(size).astype(np.float32)
    variable, expected = tf.Variable(vector), theirs(0.01)
    found = ours(size)
    for _ in range(10):
        gradient = rng.standard_normal(size).astype(np.float32)
        before = gradient.copy()
        found.update(vector, gradient, 0.01)
        expected.apply_gradients([(tf.constant(gradient), variable)])
        np.testing.assert_array_equal(gradient, before)
    np.testing.assert_allclose(vector, variable.numpy(), atol=1e-6)
    assert vector.dtype == np.float32
    assert found.updates == 10


def test_slots_are_named_vectors():
    assert [*Adam(5).slots] == ["adam_mean", "adam_variance"]
    assert [*Optimizer(5).slots] == []
    assert [*Momentum(5, 0.9).slots] == ["momentum"]
    assert all(slot.shape == (5,) for slot in Adam(5).slots.values())


def test_an_update_allocates_no_vector():
    import tracemalloc

    size = 1 << 20
    adam, vector = Adam(size), np.ones(size, np.float32)
    adam.update(vector, vector.copy(), 0.01)
    gradient = np.ones(size, np.float32)
    tracemalloc.start()
    adam.update(vector, gradient, 0.01)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    "ours", [Adam, lambda n: Momentum(n, 0.9)], ids=["adam", "momentum"]
)
def test_slots_without_gradient_decay_to_zero_not_to_denormal_numbers(ours):
    found, vector = ours(100), np.ones(100, np.float32)
    gradient = np.full(100, 1e-12, np.float32)
    found.update(vector, gradient, 0.01)
    gradient[:] = 0
    smallest = np.finfo(np.float32).tiny
    for _ in range(1500):
        found.update(vector, gradient, 0.01)
        for slot in found.slots.values():
            assert not ((np.abs(slot) < smallest) & (slot != 0)).any()


@pytest.mark.parametrize(
    ("gradient", "error"),
    [
        (np.ones(5), TypeError),
        (np.ones(10, np.float32)[::2], TypeError),
        (np.ones(4, np.float32), ValueError),
    ],
    ids=["float64", "strided", "short"],
)
def test_a_gradient_of_another_kind_is_refused(gradient, error):
    with pytest.raises(error, match="expected"):
        Adam(5).update(np.ones(5, np.float32), gradient, 0.01)


def test_a_missing_library_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(optimizer, "LIBRARY", tmp_path / "none.so")
    with pytest.raises(JobError, match=r"none.so: run ./install.sh"):
        Adam(5)
