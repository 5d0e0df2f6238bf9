import numpy as np
import pytest

from replica import params


def test_the_seeds_network_has_its_shapes_and_standard_deviations():
    layout = params.mlp(100)
    assert layout.size == 784 * 100 + 100 + 100 * 10 + 10 == 79510
    arrays = layout.unflatten(layout.initial(seed=0))
    # A normal distribution cut at two deviations has 0.8796 of its deviation.
    assert arrays["hid_w"].std() == pytest.approx(0.8796 / 28, rel=0.02)
    assert arrays["sm_w"].std() == pytest.approx(0.8796 / 10, rel=0.1)
    assert np.abs(arrays["hid_w"]).max() <= 2 / 28
    assert np.abs(arrays["sm_w"]).max() <= 2 / 10
    assert not arrays["hid_b"].any()
    assert not arrays["sm_b"].any()


def test_flatten_and_unflatten_are_inverse():
    layout = params.mlp(7, classes=3)
    vector = np.arange(layout.size, dtype=np.float32)
    arrays = layout.unflatten(vector)
    assert {name: a.shape for name, a in arrays.items()} == layout.shapes
    np.testing.assert_array_equal(layout.flatten(arrays), vector)


def test_unflatten_gives_views():
    layout = params.mlp(2)
    vector = np.zeros(layout.size, np.float32)
    layout.unflatten(vector)["sm_b"][:] = 1
    assert vector[-10:].all()
    assert not vector[:-10].any()


def test_wrong_shapes_are_refused():
    layout = params.mlp(2)
    with pytest.raises(ValueError, match="expected shape"):
        layout.unflatten(np.zeros(3, np.float32))
    arrays = layout.unflatten(np.zeros(layout.size, np.float32))
    with pytest.raises(ValueError, match="hid_b"):
        layout.flatten(arrays | {"hid_b": np.zeros(3, np.float32)})


def test_initial_values_depend_on_the_seed_alone():
    layout = params.mlp(5)
    np.testing.assert_array_equal(layout.initial(1), layout.initial(1))
    assert (layout.initial(1) != layout.initial(2)).any()
    assert layout.initial(1).dtype == np.float32
