"""Adam and SGD on one flat vector, in place: the parameter server's. NumPy only.

They go through the vector in blocks that stay in the core's cache; whole-vector
operations would fetch a large vector from memory a dozen times for one update.
"""

import math

import numpy as np

BLOCK = 1 << 15  # values; the arrays of one block take 128 kB each
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's defaults in TensorFlow 1
# The slots of weights without gradient, as those of a picture's margin, decay to
# denormal numbers, with which a core computes five times slower. Added and taken away
# again, this makes zeros of them and changes nothing else by more than 1e-27.
SMALL = np.float32(1e-20)


class Optimizer:
    """What an optimizer remembers: its slots, float32 [size], and its updates."""

    slot_names: tuple[str, ...] = ()

    def __init__(self, size: int):
        self.slots = {name: np.zeros(size, np.float32) for name in self.slot_names}
        self.updates = 0
        self._scratch = np.empty((2, min(size, BLOCK)), np.float32)

    def update(self, vector: np.ndarray, gradient: np.ndarray, rate: float) -> None:
        """Change ``vector`` [size] in place by one step along ``gradient`` [size].

        Args:
            vector: the parameters, float32.
            gradient: float32; left as it is.
            rate: the learning rate of this update.
        """
        self.updates += 1
        arrays = (vector, gradient, *self.slots.values())
        for first in range(0, len(vector), BLOCK):
            block = [array[first : first + BLOCK] for array in arrays]
            scratch = self._scratch[:, : len(block[0])]
            self._update_block(rate, *scratch, *block)

    def _update_block(self, rate: float, *arrays: np.ndarray) -> None:
        raise NotImplementedError


class Adam(Optimizer):
    """Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.

    In the form of its section 2's end, which TensorFlow uses too: both bias corrections
    go into the rate.
    """

    slot_names = ("adam_mean", "adam_variance")

    def _update_block(self, rate, step, root, vector, gradient, mean, variance) -> None:
        corrected = (
            rate * math.sqrt(1 - BETA2**self.updates) / (1 - BETA1**self.updates)
        )
        np.subtract(gradient, mean, out=step)
        step *= 1 - BETA1
        mean += step
        mean += SMALL
        mean -= SMALL
        np.multiply(gradient, gradient, out=step)
        step -= variance
        step *= 1 - BETA2
        variance += step
        variance += SMALL
        variance -= SMALL
        np.sqrt(variance, out=root)
        root += EPSILON
        np.divide(mean, root, out=step)
        step *= corrected
        vector -= step


class Sgd(Optimizer):
    """Gradient descent, with Polyak's momentum where it is not 0."""

    def __init__(self, size: int, momentum: float = 0.0):
        self.momentum = momentum
        self.slot_names = ("momentum",) if momentum else ()
        super().__init__(size)

    def _update_block(self, rate, step, _, vector, gradient, *velocity) -> None:
        direction = gradient
        if velocity:
            (direction,) = velocity
            direction *= self.momentum
            direction += gradient
            direction += SMALL
            direction -= SMALL
        np.multiply(direction, rate, out=step)
        vector -= step


def create(name: str, size: int, momentum: float = 0.0) -> Optimizer:
    """The optimizer ``name``, "adam" or "sgd", for a vector [size]."""
    return Adam(size) if name == "adam" else Sgd(size, momentum)
