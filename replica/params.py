"""Names, shapes and initial values of the parameters, and one flat vector of them all.

NumPy only: a parameter server needs nothing else.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IMAGE_PIXELS = 28  # width and height of an image, as in the seed's program


@dataclass(frozen=True)
class Layout:
    """Where each named parameter lies in the flat vector."""

    shapes: dict[str, tuple[int, ...]]
    stddevs: dict[str, float]  # of the initial values; 0 starts at zero

    @property
    def sizes(self) -> list[int]:
        """Number of values of each parameter, in the vector's order."""
        return [math.prod(shape) for shape in self.shapes.values()]

    @property
    def size(self) -> int:
        """Number of values of the flat vector."""
        return sum(self.sizes)

    def unflatten(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """Views of ``vector`` [size], one for each parameter, by name."""
        if vector.shape != (self.size,):
            raise ValueError(f"expected shape ({self.size},), found {vector.shape}")
        pieces = np.split(vector, np.cumsum(self.sizes)[:-1])
        return {
            name: piece.reshape(shape)
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def flatten(self, arrays: dict[str, np.ndarray]) -> np.ndarray:
        """The float32 vector [size] that holds a copy of ``arrays``."""
        for name, shape in self.shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(
                    f"{name}: expected {shape}, found {arrays[name].shape}"
                )
        return np.concatenate(
            [np.ravel(arrays[name]) for name in self.shapes], dtype=np.float32
        )

    def initial(self, seed: int) -> np.ndarray:
        """Initial values, float32 [size]: weights truncated normal, biases zero."""
        rng = np.random.default_rng(seed)
        return self.flatten(
            {
                name: truncated_normal(rng, shape, self.stddevs[name])
                for name, shape in self.shapes.items()
            }
        )


def mlp(hidden_units: int, classes: int = 10) -> Layout:
    """The seed's network: one hidden layer of ReLU units and a softmax layer."""
    pixels = IMAGE_PIXELS * IMAGE_PIXELS
    return Layout(
        shapes={
            "hid_w": (pixels, hidden_units),
            "hid_b": (hidden_units,),
            "sm_w": (hidden_units, classes),
            "sm_b": (classes,),
        },
        stddevs={
            "hid_w": 1.0 / IMAGE_PIXELS,
            "hid_b": 0.0,
            "sm_w": 1.0 / math.sqrt(hidden_units),
            "sm_b": 0.0,
        },
    )


def slices(size: int, parts: int) -> list[slice]:
    """``parts`` contiguous parts of a vector [size], as even as can be."""
    ends = [size * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The float32 vector of which ``parts`` are the slices; the only one is no copy."""
    vector = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return vector.astype(np.float32, copy=False)


def truncated_normal(
    rng: np.random.Generator, shape: tuple[int, ...], stddev: float
) -> np.ndarray:
    """Normal values of mean 0; those beyond two ``stddev`` are drawn again."""
    values = rng.standard_normal(shape)
    while (outside := np.abs(values) > 2).any():
        values[outside] = rng.standard_normal(np.count_nonzero(outside))
    return values * stddev
