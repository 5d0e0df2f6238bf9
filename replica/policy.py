"""When a parameter server applies, averages, delays or drops a gradient. No messages.

A policy is told of each gradient that arrives and answers with a Decision. It counts
the workers from 0. Each worker has one gradient under way at the most: it sends one,
and computes the next when it is released.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from replica import UsageError


@dataclass(frozen=True)
class Decision:
    """What becomes of one gradient, and who gets the parameters after it."""

    use: bool  # False: dropped
    averaged: int = 0  # gradients that the update made now averages; 0 makes none
    staleness: int = 0  # updates since the parameters that it was computed on
    release: list[int] = field(default_factory=list)  # workers, in the order they came


class Asynchronous:
    """Each gradient is applied on arrival.

    With ``max_staleness``, a worker that has made more than so many updates more than
    the slowest one is held back until that one has caught up. Ho et al., "More
    Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", 2013.
    0 is lock-step: every worker makes its n-th update before any makes the next.
    """

    def __init__(self, workers: int, max_staleness: int | None = None):
        self.version = 0  # updates made
        self.max_staleness = max_staleness
        self._updates = [0] * workers  # of each worker
        self._waiting: list[int] = []

    def arrived(self, worker: int, version: int) -> Decision:
        """Decide on ``worker``'s gradient of the parameters of ``version``."""
        staleness = self.version - version
        self.version += 1
        self._updates[worker] += 1
        self._waiting.append(worker)
        slowest = min(self._updates)
        release = [
            w
            for w in self._waiting
            if self.max_staleness is None
            or self._updates[w] - slowest <= self.max_staleness
        ]
        self._waiting = [w for w in self._waiting if w not in release]
        return Decision(True, averaged=1, staleness=staleness, release=release)

    def refused(self, worker: int, version: int) -> Decision:
        """Drop a gradient that is no numbers; ``worker`` tries again."""
        return Decision(False, staleness=self.version - version, release=[worker])

    def drain(self) -> list[int]:
        """The workers that are held back, who are so no longer."""
        waiting, self._waiting = self._waiting, []
        return waiting


class Synchronous:
    """The first ``aggregate`` gradients of the newest version are averaged into one.

    Those of an older version are dropped, and their workers get the newest parameters
    at once: with fewer gradients than workers the others are back-ups. Chen et al.,
    "Revisiting Distributed Synchronous SGD", 2016. With more gradients than workers
    they accumulate: a worker computes several of the same version.
    """

    def __init__(self, workers: int, aggregate: int):
        self.version = 0  # updates made
        self.aggregate = aggregate
        self._computing = workers  # gradients of the newest version that are to come
        self._received = 0  # and that are here
        self._waiting: list[int] = []

    def arrived(self, worker: int, version: int) -> Decision:
        """Decide on ``worker``'s gradient of the parameters of ``version``."""
        if version != self.version:
            return self.refused(worker, version)
        self._computing -= 1
        self._received += 1
        self._waiting.append(worker)
        averaged, release = 0, []
        if self._received == self.aggregate:
            averaged, release = self.aggregate, self._waiting
            self.version += 1
            self._received, self._computing = 0, len(release)
            self._waiting = []
        elif self._received + self._computing < self.aggregate:
            release = [self._waiting.pop(0)]
            self._computing += 1
        return Decision(True, averaged=averaged, release=release)

    def refused(self, worker: int, version: int) -> Decision:
        """Drop a late gradient, or one that is no numbers; ``worker`` tries again."""
        self._computing += version != self.version
        return Decision(False, staleness=self.version - version, release=[worker])

    def drain(self) -> list[int]:
        """The workers that wait for an update, who do so no longer."""
        waiting, self._waiting = self._waiting, []
        return waiting


def scaled_rate(rate: float, staleness: int) -> float:
    """The rate for a gradient of ``staleness``: divided by 1 + staleness.

    Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning", 2016,
    divide by the staleness, which they count from 1.
    """
    return rate / (1 + staleness)


def batch_scaled_rate(rate: float, rule: str, batches: int) -> float:
    """The rate for an update that averages ``batches`` batches, by --lr_scaling.

    Linear: Goyal et al., "Accurate, Large Minibatch SGD", 2017. Square root:
    Krizhevsky, "One weird trick for parallelizing CNNs", 2014.

    Raises:
        UsageError: it does not fit into 32 bits.
    """
    factors = {"none": 1.0, "sqrt": math.sqrt(batches), "linear": float(batches)}
    scaled, most = rate * factors[rule], float(np.finfo(np.float32).max)
    if scaled > most:
        raise UsageError(
            f"--lr_scaling {rule}: expected a rate of at most {most}, found {scaled}"
        )
    return scaled
