"""Every policy with made-up workers: a heap of arrival times, no messages."""

import heapq
import random

import pytest

from replica.policy import Asynchronous, Synchronous, scaled_rate


def simulate(policy, speeds: list[float], arrivals: int):
    """Let workers compute at ``speeds`` (gradients a second); the log of decisions.

    Yields (worker, version, decision). Fails if no worker is left to wait for.
    """
    rng = random.Random(0)
    due = [(1 / speed, w, 0) for w, speed in enumerate(speeds)]
    heapq.heapify(due)
    for _ in range(arrivals):
        assert due, "every worker is held: nobody would ever send again"
        now, worker, version = heapq.heappop(due)
        decision = policy.arrived(worker, version)
        yield worker, version, decision
        for w in decision.release:
            took = rng.uniform(0.9, 1.1) / speeds[w]
            heapq.heappush(due, (now + took, w, policy.version))
        assert len({w for _, w, _ in due}) == len(due)  # one under way at the most


SPEEDS = [[1.0], [1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0, 0.1], [3, 1, 2, 5, 4]]


@pytest.mark.parametrize("speeds", SPEEDS)
def test_asynchronous_applies_every_gradient_and_answers_its_sender(speeds):
    log = list(simulate(Asynchronous(len(speeds)), speeds, 200))
    for number, (worker, version, decision) in enumerate(log):
        assert decision.use
        assert decision.averaged == 1
        assert decision.release == [worker]
        assert decision.staleness == number - version


def test_one_worker_is_never_stale():
    log = simulate(Asynchronous(1), [1.0], 50)
    assert {decision.staleness for _, _, decision in log} == {0}


def test_equal_workers_are_stale_by_the_number_of_the_others():
    policy = Asynchronous(4)
    found = []
    versions = [0] * 4
    for step in range(40):
        worker = step % 4
        found.append(policy.arrived(worker, versions[worker]).staleness)
        versions[worker] = policy.version
    assert found == [0, 1, 2] + [3] * 37


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_no_worker_gets_further_ahead_than_the_bound_allows(speeds, bound):
    updates = [0] * len(speeds)
    ahead = 0
    for worker, _, _ in simulate(Asynchronous(len(speeds), bound), speeds, 300):
        ahead = max(ahead, updates[worker] - min(updates))
        updates[worker] += 1
    assert ahead <= bound
    # The bound is used to the full by those who could go on without it.
    if len(set(speeds)) > 1:
        assert ahead == bound


def test_a_bound_of_0_is_lock_step():
    workers = [w for w, _, _ in simulate(Asynchronous(3, 0), [1.0, 9.0, 3.0], 300)]
    rounds = [workers[first : first + 3] for first in range(0, 300, 3)]
    assert all(sorted(each) == [0, 1, 2] for each in rounds)


def test_a_held_worker_is_released_by_the_slowest():
    policy = Asynchronous(2, max_staleness=1)
    assert policy.arrived(0, 0).release == [0]
    assert policy.arrived(0, 1).release == []
    assert policy.arrived(1, 0).release == [0, 1]


@pytest.mark.parametrize("speeds", SPEEDS)
@pytest.mark.parametrize("aggregate", [1, 2, 3, 4, 5, 7, 12])
def test_synchronous_averages_the_first_of_the_newest_version(speeds, aggregate):
    policy = Synchronous(len(speeds), aggregate)
    used, version = 0, 0
    for worker, computed_on, decision in simulate(policy, speeds, 400):
        assert decision.use == (computed_on == version)
        assert decision.staleness == version - computed_on
        used += decision.use
        if not decision.use:
            assert decision.release == [worker]
            assert decision.averaged == 0
        if decision.averaged:
            assert decision.averaged == aggregate == used
            used, version = 0, version + 1
        assert policy.version == version
    assert version >= 400 // aggregate // len(speeds)


@pytest.mark.parametrize(("workers", "aggregate"), [(1, 1), (3, 3), (2, 6), (4, 8)])
def test_nothing_is_dropped_without_back_up_workers(workers, aggregate):
    speeds = [1.0 + w for w in range(workers)]
    log = simulate(Synchronous(workers, aggregate), speeds, 240)
    assert all(decision.use for _, _, decision in log)


def test_a_slow_worker_is_not_waited_for_where_there_is_a_back_up():
    policy = Synchronous(4, 3)
    counts = [0] * 4
    for worker, _, decision in simulate(policy, [1.0, 1.0, 1.0, 0.01], 600):
        counts[worker] += decision.use
    assert policy.version > 190
    assert counts[3] < 5


def test_accumulation_gives_the_faster_worker_more_of_it():
    policy = Synchronous(2, 8)
    counts = [0] * 2
    for worker, _, _ in simulate(policy, [1.0, 3.0], 400):
        counts[worker] += 1
    assert counts[1] > 2 * counts[0]


def test_no_more_gradients_are_asked_for_than_are_needed():
    policy = Synchronous(3, 4)
    assert policy.arrived(0, 0).release == [0]  # 3 + 1 are needed
    assert policy.arrived(1, 0).release == []
    assert policy.arrived(2, 0).release == []
    assert policy.arrived(0, 0).release == [1, 2, 0]


def test_the_rate_is_divided_by_one_and_the_staleness():
    assert [scaled_rate(0.6, s) for s in (0, 1, 2)] == pytest.approx([0.6, 0.3, 0.2])
