import numpy as np
import pytest
import tensorflow as tf

from replica import model, params

LAYOUT = params.mlp(5, classes=4)
RNG = np.random.default_rng(3)
IMAGES = RNG.integers(0, 256, (6, 784), np.uint8)
LABELS = RNG.integers(0, 4, 6).astype(np.uint8)
VECTOR = RNG.normal(0, 0.1, LAYOUT.size)  # float64, for finite differences


def reference(vector: np.ndarray) -> np.ndarray:
    """Losses [batch] by NumPy, written anew from the definition."""
    hid_w, hid_b, sm_w, sm_b = LAYOUT.unflatten(vector).values()
    hidden = np.maximum(IMAGES / 255 @ hid_w + hid_b, 0)
    scores = np.exp(hidden @ sm_w + sm_b)
    return -np.log(scores[np.arange(len(LABELS)), LABELS] / scores.sum(axis=1))


def test_loss_is_the_mean_softmax_cross_entropy():
    found = model.gradient_and_loss(LAYOUT, tf.constant(VECTOR), IMAGES, LABELS)
    assert float(found[-1]) == pytest.approx(reference(VECTOR).mean(), rel=1e-12)


def test_gradient_is_that_of_finite_differences():
    found = model.gradient_and_loss(LAYOUT, tf.constant(VECTOR), IMAGES, LABELS)
    gradient = found.numpy()[:-1]
    step = 1e-6
    # Every kind of parameter: weights and biases of both layers.
    ends = np.cumsum(LAYOUT.sizes)
    places = np.concatenate(
        [
            RNG.choice(np.arange(e - s, e), min(s, 40))
            for s, e in zip(LAYOUT.sizes, ends, strict=True)
        ]
    )
    for place in places:
        shift = np.zeros(LAYOUT.size)
        shift[place] = step
        slope = reference(VECTOR + shift).mean() - reference(VECTOR - shift).mean()
        assert gradient[place] == pytest.approx(slope / (2 * step), abs=1e-8)
    assert np.abs(gradient[places]).max() > 1e-3


def test_evaluation_gives_sums_that_add_up_over_shares():
    vector = tf.constant(VECTOR)
    whole = model.evaluate(LAYOUT, vector, IMAGES, LABELS).numpy()
    shares = [
        model.evaluate(LAYOUT, vector, IMAGES[i::4], LABELS[i::4]) for i in range(4)
    ]
    np.testing.assert_allclose(np.sum(shares, axis=0), whole, rtol=1e-12)
    assert whole[0] == pytest.approx(reference(VECTOR).sum())
    assert whole[2] == 6


def test_large_scores_give_a_finite_loss():
    vector = tf.constant(VECTOR * 1e4)
    assert np.isfinite(model.gradient_and_loss(LAYOUT, vector, IMAGES, LABELS)).all()
