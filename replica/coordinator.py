"""What server 0 decides: who computes what next, what is evaluated, and the end.

No messages: the script brings in what has arrived and carries out the orders.
"""

import enum
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from replica import JobError, policy, report

MOST_REFUSED = 5  # gradients that are no numbers, before training counts as diverged
FAIR_SHARE = 20  # updates of a worker's share, before none at all is an error
NOBODY = -1


class Command(enum.IntEnum):
    """What a worker does with the parameters that it is sent."""

    TRAIN = 1
    EVALUATE = 2
    STOP = 3


@dataclass
class Order:
    """What every server does next to its slice."""

    worker: int = NOBODY  # whose gradient this is about
    use: bool = False
    averaged: int = 0  # gradients that the update made now averages; 0 makes none
    rate: float = 0.0
    snapshot: bool = False  # keep a copy of the parameters, to be evaluated
    release: list[tuple[int, Command, int]] = field(default_factory=list)
    """Workers that are sent the parameters, with a command and a ticket each."""

    def numbers(self) -> list[float]:
        """All of it as numbers, which ``from_numbers`` takes."""
        head = [self.worker, self.use, self.averaged, self.rate, self.snapshot]
        return [*head, len(self.release), *itertools.chain(*self.release)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> "Order":
        """The order that ``numbers``, of which more may follow, tell of."""
        worker, use, averaged, rate, snapshot, count = numbers[:6]
        rest = [int(number) for number in numbers[6 : 6 + 3 * int(count)]]
        release = list(
            zip(rest[::3], map(Command, rest[1::3]), rest[2::3], strict=True)
        )
        return cls(int(worker), bool(use), int(averaged), rate, bool(snapshot), release)


def order_size(workers: int) -> int:
    """The most numbers of an order."""
    return 6 + 3 * workers


class Coordinator:
    """Issues the tickets, asks the policy, keeps count.

    Args:
        opts: the options of ps_mode.py.
        workers: how many; they are counted from 0, and worker 0 evaluates.
    """

    def __init__(self, opts, workers: int):
        self.opts, self.workers = opts, workers
        self.rule = opts.policy(workers)
        self.last = opts.train_steps  # the version to end with
        self.tickets = itertools.count()
        self.stopped = 0
        # Messages that a worker has yet to answer, and since when it owes an answer.
        self.owed = [0] * workers
        self.since = [math.inf] * workers
        self.count: Counter[str] = Counter()
        self.updates = [0] * workers  # gradients used, of each worker
        self.staleness: Counter[int] = Counter()
        self.evaluations: deque[int] = deque()  # versions whose result is to come
        self.unsent = 0  # the last of them, of which worker 0 has not been told yet
        self.loss = math.nan
        self.results: dict = {}

    @property
    def finished(self) -> bool:
        """Whether the last update has been made."""
        return self.rule.version >= self.last

    def start(self) -> Iterator[Order]:
        """Release all workers; with --overlap twice, so that one reply is under way."""
        self.began = self.ended = time.monotonic()
        for _ in range(1 + self.opts.overlap):
            yield self._release(Order(), range(self.workers))

    def gradient(self, worker: int, version: int, loss: float) -> Order:
        """Decide on a gradient that ``worker`` computed on the parameters ``version``.

        Args:
            worker: its number.
            version: updates before it.
            loss: of its batches; NaN or infinite if the gradient is no numbers.

        Raises:
            JobError: training has diverged.
        """
        self._answered(worker)
        self.count["sent"] += 1
        if self.finished:
            decision = policy.Decision(False, release=[worker])
        elif not math.isfinite(loss):
            self._count_refused(worker)
            decision = self.rule.refused(worker, version)
        else:
            decision = self.rule.arrived(worker, version)
            self.loss = loss
        self.count["dropped"] += not decision.use
        self.count["held"] += worker not in decision.release
        if decision.use:
            self.updates[worker] += 1
            self.staleness[decision.staleness] += 1
        order = Order(worker, decision.use, decision.averaged)
        order.rate = self.opts.rate(decision.staleness)
        release = decision.release
        if decision.averaged:
            version = self.rule.version
            if self.finished:
                self.ended = time.monotonic()
                release = [*release, *self.rule.drain()]
            if self.finished or version == self.opts.next_evaluation(version - 1):
                self._evaluate(order, version)
        return self._release(order, release)

    def evaluated(
        self, validation: report.Evaluation, test: report.Evaluation
    ) -> Order:
        """Take the result of the oldest evaluation that is under way."""
        self._answered(0)
        version = self.evaluations.popleft()
        seconds = time.monotonic() - self.began
        report.say(
            f"step {version}: train loss {self.loss:.4f}, validation loss "
            f"{validation.loss:.4f}, accuracy {100 * validation.accuracy:.2f} %, "
            f"{self.rule.version / seconds:.0f} updates/s"
        )
        self.results = {
            "validation_loss": validation.loss,
            "validation_loss_sum": validation.loss_sum,
            "validation_accuracy": validation.accuracy,
            "test_loss": test.loss,
            "test_accuracy": test.accuracy,
        }
        order, release = Order(), [0]
        reached = validation.accuracy >= (self.opts.target_accuracy or math.inf)
        if reached and not self.finished:
            self.last, self.ended = self.rule.version, time.monotonic()
            release += self.rule.drain()
            if version < self.last:
                self._evaluate(order, self.last)
        return self._release(order, release)

    def refuse_silence(self) -> None:
        """End the job if workers have owed an answer for longer than --stall_timeout.

        Raises:
            JobError: they have.
        """
        timeout = self.opts.stall_timeout
        limit = time.monotonic() - (timeout or math.inf)
        silent = [w + self.opts.num_ps for w, t in enumerate(self.since) if t < limit]
        if silent:
            raise JobError(
                f"nothing from ranks {silent} for {timeout} s (--stall_timeout) at "
                f"step {self.rule.version}"
            )

    def report(self) -> dict:
        """The final line's part that server 0 knows.

        Raises:
            JobError: a worker has had no part in the training.
        """
        self._check_shares()
        seconds, used = self.ended - self.began, sum(self.updates)
        steps = self.rule.version
        total = sum(s * n for s, n in self.staleness.items())
        return {
            "mode": "sync_replicas" if self.opts.sync_replicas else "async",
            "ranks": self.workers + self.opts.num_ps,
            "workers": self.workers,
            "steps": steps,
            "seconds": round(seconds, 3),
            "steps_per_second": round(steps / seconds, 1),
            "examples_per_second": round(used * self.opts.batch_size / seconds, 1),
            "learning_rate": self.opts.learning_rate,
            "straggler": self.opts.straggler and self.opts.straggler._asdict(),
            "staleness_lr": self.opts.staleness_lr and not self.opts.sync_replicas,
            "train_loss": self.loss,
            **self.results,
            "applied": steps,
            "sent": self.count["sent"],
            "used": used,
            "dropped": self.count["dropped"],
            "refused": self.count["refused"],
            "held": self.count["held"],
            "updates_per_worker": self.updates,
            "staleness_mean": round(total / max(used, 1), 3),
            "staleness_max": max(self.staleness, default=0),
            "staleness_histogram": dict(sorted(self.staleness.items())),
        }

    def _evaluate(self, order: Order, version: int) -> None:
        order.snapshot = True
        self.evaluations.append(version)
        self.unsent += 1

    def _answered(self, worker: int) -> None:
        self.owed[worker] -= 1
        self.since[worker] = time.monotonic() if self.owed[worker] else math.inf

    def _release(self, order: Order, workers: Iterable[int]) -> Order:
        """Add to ``order`` what ``workers`` do next."""
        for worker in workers:
            command, ticket = Command.TRAIN, 0
            if worker == 0 and self.unsent:
                command = Command.EVALUATE
                self.unsent -= 1
            elif not self.finished:
                ticket = next(self.tickets)
            elif self.owed[worker]:
                continue  # it is stopped when that is here
            else:
                command = Command.STOP
            order.release.append((worker, command, ticket))
            if command == Command.STOP:
                self.stopped += 1
            else:
                self.owed[worker] += 1
                self.since[worker] = time.monotonic()
        return order

    def _count_refused(self, worker: int) -> None:
        self.count["refused"] += 1
        if self.count["refused"] > MOST_REFUSED:
            raise JobError(
                f"step {self.rule.version}: expected finite gradients, found "
                f"{self.count['refused']} that are not, the last of rank "
                f"{worker + self.opts.num_ps}; training has diverged"
            )

    def _check_shares(self) -> None:
        if self.opts.sync_replicas or sum(self.updates) < FAIR_SHARE * self.workers:
            return
        idle = [w + self.opts.num_ps for w, used in enumerate(self.updates) if not used]
        if self.opts.straggler and self.opts.straggler.rank in idle:
            idle.remove(self.opts.straggler.rank)
        if idle:
            raise JobError(
                f"expected gradients of all {self.workers} workers in "
                f"{sum(self.updates)}, found none of ranks {idle}"
            )
