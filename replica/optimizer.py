"""Adam and SGD on one flat vector, in place: the parameter server's.

train.py has TensorFlow's own, which remember the same slots. The arithmetic is in
optimizer.cpp, which install.sh compiles.
"""

import ctypes
import math
import sys
from pathlib import Path

import numpy as np

from replica import JobError

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8  # Adam's defaults in TensorFlow 1
LIBRARY = Path(sys.prefix, "lib", "replica_optimizer.so")


class Optimizer:
    """Gradient descent; what it remembers between updates are slots, float32 [size].

    Raises:
        JobError: the library is missing.
    """

    function = "sgd"
    slot_names: tuple[str, ...] = ()

    def __init__(self, size: int):
        try:
            self._update = getattr(ctypes.CDLL(str(LIBRARY)), self.function)
        except OSError as error:
            raise JobError(f"expected {LIBRARY}: run ./install.sh ({error})") from error
        self.slots = {name: np.zeros(size, np.float32) for name in self.slot_names}
        self.updates = 0

    def update(self, vector: np.ndarray, gradient: np.ndarray, rate: float) -> None:
        """Change ``vector`` [size] in place by one step along ``gradient`` [size].

        Args:
            vector: the parameters, float32.
            gradient: float32; left as it is.
            rate: the learning rate of this update.
        """
        self.updates += 1
        arrays = (vector, gradient, *self.slots.values())
        for array in arrays:
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise TypeError(f"expected a float32 vector, found {array.dtype}")
            if array.shape != vector.shape:
                raise ValueError(f"expected {vector.shape}, found {array.shape}")
        self._update(
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            ctypes.c_long(len(vector)),
            *(ctypes.c_float(number) for number in self._numbers(rate)),
        )

    def _numbers(self, rate: float) -> tuple[float, ...]:
        return (rate,)


class Momentum(Optimizer):
    """Gradient descent with Polyak's momentum.

    Polyak, "Some methods of speeding up the convergence of iteration methods", 1964.
    """

    function, slot_names = "momentum", ("momentum",)

    def __init__(self, size: int, momentum: float):
        super().__init__(size)
        self.momentum = momentum

    def _numbers(self, rate: float) -> tuple[float, ...]:
        return rate, self.momentum


class Adam(Optimizer):
    """Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.

    In the form of its section 2's end, which TensorFlow uses too: both bias corrections
    go into the rate.
    """

    function, slot_names = "adam", ("adam_mean", "adam_variance")

    def _numbers(self, rate: float) -> tuple[float, ...]:
        first, second = 1 - BETA1**self.updates, 1 - BETA2**self.updates
        return rate * math.sqrt(second) / first, 1 - BETA1, 1 - BETA2, EPSILON


def create(name: str, size: int, momentum: float = 0.0) -> Optimizer:
    """The optimizer ``name``, "adam" or "sgd", for a vector [size]."""
    if name == "adam":
        return Adam(size)
    return Momentum(size, momentum) if momentum else Optimizer(size)
