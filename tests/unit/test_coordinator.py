"""What server 0 decides, from lists of arrivals: no messages, no processes."""

import math
import random
import time

import pytest

from replica import JobError, coordinator, options, report
from replica.coordinator import NOBODY, Command, Coordinator, Order

RIGHT = report.Evaluation(loss_sum=1.0, correct=9.0, samples=10.0)


def decider(workers: int, *flags: str) -> Coordinator:
    return Coordinator(options.parse(list(flags), options.ServerOptions), workers)


class Workers:
    """Answers orders in an order drawn from a seed, as workers of any speed would."""

    def __init__(self, decides: Coordinator, workers: int, seed: int):
        self.decides, self.random = decides, random.Random(seed)
        self.asked: list[list[tuple]] = [[] for _ in range(workers)]
        self.version, self.tickets, self.stops = 0, [], []
        self.loss = 1.0

    def take(self, order: Order) -> None:
        self.version += bool(order.averaged)
        for worker, command, ticket in order.release:
            assert worker not in self.stops
            if command == Command.STOP:
                self.stops.append(worker)
                assert not self.asked[worker]
                continue
            self.asked[worker].append((command, self.version))
            if command == Command.TRAIN:
                self.tickets.append(ticket)

    def run(self) -> dict:
        for order in self.decides.start():
            self.take(order)
        while any(self.asked):
            some = [w for w, asked in enumerate(self.asked) if asked]
            worker = self.random.choice(some)
            command, version = self.asked[worker].pop(0)
            if command == Command.TRAIN:
                self.take(self.decides.gradient(worker, version, self.loss))
            else:
                self.take(self.decides.evaluated(RIGHT, RIGHT))
        assert sorted(self.stops) == list(range(len(self.asked)))
        return self.decides.report()


POLICIES = ["", "--overlap", "--max_staleness=0", "--max_staleness=3"]
POLICIES += ["--sync_replicas", "--sync_replicas --replicas_to_aggregate=2"]
POLICIES += ["--sync_replicas --replicas_to_aggregate=7"]


@pytest.mark.parametrize("flags", POLICIES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_the_sums_add_up_in_any_order_of_arrival(flags, workers):
    if "=2" in flags and workers == 1:
        workers = 6
    for seed in range(10):
        decides = decider(workers, "--train_steps=60", "--eval_every=7", *flags.split())
        ran = Workers(decides, workers, seed)
        found = ran.run()
        assert found["applied"] == found["steps"] == ran.version == 60
        assert found["used"] + found["dropped"] == found["sent"]
        assert sum(found["updates_per_worker"]) == found["used"]
        assert sum(found["staleness_histogram"].values()) == found["used"]
        each = int(flags[-1]) if "aggregate" in flags else workers
        assert found["used"] == 60 * (each if "sync" in flags else 1)
        assert len(set(ran.tickets)) == len(ran.tickets)
        assert found["validation_accuracy"] == 0.9
        if "--max_staleness=0" in flags:
            assert max(found["updates_per_worker"]) <= 60 / workers + 1


def test_every_version_that_is_due_is_evaluated_by_worker_0():
    decides = decider(2, "--train_steps=5", "--eval_every=2")
    list(decides.start())
    snapshots = []
    for version in range(5):
        order = decides.gradient(1, version, 1.0)
        snapshots.append(order.snapshot)
        assert [worker for worker, _, _ in order.release] == [1]
    assert snapshots == [False, True, False, True, True]
    release = decides.gradient(0, 0, 1.0).release
    assert release == [(0, Command.EVALUATE, 0)]
    for _ in range(2):
        assert decides.evaluated(RIGHT, RIGHT).release == [(0, Command.EVALUATE, 0)]
    assert decides.evaluated(RIGHT, RIGHT).release == [(0, Command.STOP, 0)]


def test_a_reached_target_ends_it_at_that_version():
    decides = decider(2, "--train_steps=500", "--eval_every=10", "--target_accuracy=.8")
    found = Workers(decides, 2, 0).run()
    assert 10 <= found["applied"] < 30


def test_a_gradient_that_is_no_numbers_is_dropped_and_many_end_the_job():
    decides = decider(1, "--num_ps=2")
    list(decides.start())
    for _ in range(coordinator.MOST_REFUSED):
        order = decides.gradient(0, 0, math.nan)
        assert (order.use, order.averaged, len(order.release)) == (False, 0, 1)
    with pytest.raises(JobError, match="the last of rank 2; training has diverged"):
        decides.gradient(0, 0, math.inf)


def test_a_worker_without_a_part_in_the_training_is_an_error():
    decides = decider(2, "--train_steps=40")
    list(decides.start())
    for version in range(40):
        decides.gradient(1, version, 1.0)
    with pytest.raises(JobError, match=r"all 2 workers in 40, found none of ranks \[1"):
        decides.report()


def test_a_worker_that_owes_an_answer_for_too_long_is_named(monkeypatch):
    decides = decider(3, "--stall_timeout=5")
    list(decides.start())
    later = time.monotonic() + 4
    monkeypatch.setattr(time, "monotonic", lambda: later)
    decides.gradient(1, 0, 1.0)
    decides.refuse_silence()
    monkeypatch.setattr(time, "monotonic", lambda: later + 2)
    with pytest.raises(JobError, match=r"ranks \[1, 3\] for 5 s .* at step 1"):
        decides.refuse_silence()


def test_an_order_is_the_same_after_it_was_sent():
    release = [(0, Command.EVALUATE, 0), (2, Command.TRAIN, 12345)]
    for order in (Order(), Order(2, True, 3, 0.01, True, release)):
        numbers = order.numbers()
        assert len(numbers) <= coordinator.order_size(3)
        assert Order.from_numbers([*numbers, 0.0, 0.0]) == order
    assert Order().worker == NOBODY
