import numpy as np
import pytest

from replica.data import Sampler


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("size", "batch"), [(600, 10), (103, 10), (7, 7), (50, 3)])
def test_each_sample_comes_once_in_every_epoch(ranks, size, batch):
    epochs = 3
    tickets = -(-epochs * size // batch)
    steps = -(-tickets // ranks)
    samplers = [Sampler(size, batch, seed=5) for _ in range(ranks)]
    drawn = {
        step * ranks + rank: samplers[rank].batch(step * ranks + rank)
        for step in range(steps)
        for rank in range(ranks)
    }
    stream = np.concatenate([drawn[ticket] for ticket in sorted(drawn)])
    for epoch in range(epochs):
        seen = stream[epoch * size : (epoch + 1) * size]
        assert sorted(seen.tolist()) == list(range(size))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_with_small_batches_draw_what_one_with_a_large_one_does(ranks):
    one, many = Sampler(101, 6 * ranks, seed=1), Sampler(101, 6, seed=1)
    for step in range(20):
        parts = [many.batch(step * ranks + rank) for rank in range(ranks)]
        np.testing.assert_array_equal(one.batch(step), np.concatenate(parts))


def test_a_ticket_gives_the_same_batch_at_any_time():
    forward, backward = Sampler(50, 7, seed=2), Sampler(50, 7, seed=2)
    batches = {ticket: forward.batch(ticket) for ticket in range(30)}
    for ticket in reversed(range(30)):
        np.testing.assert_array_equal(backward.batch(ticket), batches[ticket])


def test_batches_are_those_of_their_tickets():
    sampler = Sampler(50, 7, seed=2)
    tickets = range(3, 40, 4)
    rows = sampler.batches(tickets)
    assert rows.dtype == np.int32
    for row, ticket in zip(rows, tickets, strict=True):
        np.testing.assert_array_equal(row, sampler.batch(ticket))


def test_seed_and_epoch_change_the_order():
    orders = [
        tuple(Sampler(100, 100, seed).batch(epoch))
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_old_epochs_are_forgotten():
    sampler = Sampler(10, 10, seed=0)
    for ticket in range(100):
        sampler.batch(ticket)
    assert len(sampler._orders) <= 3
