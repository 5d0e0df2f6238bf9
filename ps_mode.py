"""Asynchronous data-parallel training: rank 0 serves the parameters, the others train.

    mpirun --hostfile hostfile.example -np 4 python ps_mode.py

A worker computes the gradient of its batch on the parameters that it was last sent, and
sends it to the server, which updates the parameters and sends them back. Nobody waits
for a slower worker, so a gradient may be stale: computed on parameters that have been
updated since. --sync_replicas and --max_staleness wait, each in its own way.

    worker -> server   GRADIENT     version, ticket, loss | gradient
    server -> worker   PARAMETERS   version, ticket, command | parameters
    worker -> server   EVALUATION   the sums of two data sets

With --num_ps K, ranks 0 to K-1 each serve a slice. Server 0 decides alone, and tells
the others by a DECISION, which they carry out in its order on their slices.

Lines that exist only because there is more than one process are marked
`# all ranks:`, `# server:` or `# worker:`.
"""

import enum
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from replica import (
    JobError,
    data,
    fetch,
    optimizer,
    options,
    params,
    placement,
    policy,
    report,
)

# Imported by connect(), once the flags are read and the cores are chosen.
MPI = tf = model = None

HEADER = np.dtype(
    [("version", "<i8"), ("ticket", "<i8"), ("command", "<i8"), ("loss", "<f8")]
)
# Who waits for a message looks again and again, leaving the core to any other thread
# in between, for so many seconds; then naps a tenth of the time waited, 5 ms at most.
EAGER, LONGEST_NAP = 0.002, 0.005
MOST_REFUSED = 5  # gradients that are no numbers, before training counts as diverged
EVALUATION_BATCH = 2500  # samples, so that a large set needs no large memory


class Tag(enum.IntEnum):
    """What a message is."""

    GRADIENT = 1
    PARAMETERS = 2
    EVALUATION = 3
    DECISION = 4


class Command(enum.IntEnum):
    """What a worker does with the parameters that it is sent."""

    HOLD = 0  # never sent: the worker is sent nothing
    TRAIN = 1
    EVALUATE = 2
    STOP = 3


class Message:
    """A header and a vector in one buffer, which one send or receive moves."""

    def __init__(self, size: int, dtype: str):
        self.buffer = np.zeros(HEADER.itemsize + size * np.dtype(dtype).itemsize, "u1")
        self.header = self.buffer[: HEADER.itemsize].view(HEADER)[0]
        self.vector = self.buffer[HEADER.itemsize :].view(dtype)


class Link:
    """Buffers and requests between this rank and one other, for one message each way.

    One message is under way in each direction at the most, so the buffers are reused.
    """

    def __init__(self, comm, peer: int, size: int, dtype: str, tags: tuple[Tag, Tag]):
        self.comm, self.peer, (self.out_tag, self.in_tag) = comm, peer, tags
        self.out, self.into = Message(size, dtype), Message(size, dtype)
        self.sending = self.receiving = MPI.REQUEST_NULL
        self.moved = 0  # bytes, both ways

    def post(self) -> None:
        """Be ready to receive, before the other side sends."""
        self.receiving = self.comm.Irecv(self.into.buffer, self.peer, self.in_tag)

    def send(self, vector: np.ndarray, **header) -> None:
        """Send a copy of ``vector``, in the type of the wire."""
        self.sending.Wait()
        for name, value in header.items():
            self.out.header[name] = value
        self.out.vector[:] = vector
        self.sending = self.comm.Isend(self.out.buffer, self.peer, self.out_tag)
        self.moved += self.out.buffer.nbytes

    def arrived(self) -> bool:
        """Whether a whole message is here."""
        status = MPI.Status()
        if self.receiving == MPI.REQUEST_NULL or not self.receiving.Test(status):
            return False
        found = status.Get_count(MPI.BYTE)
        if found != self.into.buffer.nbytes:
            raise JobError(
                f"message from rank {self.peer}: expected "
                f"{self.into.buffer.nbytes} bytes, found {found}"
            )
        self.moved += found
        return True


def main(argv: list[str] | None = None) -> None:
    """Serve or train as ``argv`` (default: the command line) says, and report."""
    opts = options.parse(argv, options.ServerOptions)
    here = placement.slot()
    servers = opts.check_ranks(here.size)
    serving = here.rank < servers
    # all ranks: cores, threads and GPU by local rank, before anything else starts
    placed = placement.settle(opts.num_gpus, opts.stall_timeout, servers)
    # all ranks: the first rank of each host fetches, the others wait for the files
    fetch.mnist(opts.data_dir, opts.mirrors.split(","), here.local_rank == 0)
    if opts.download_only:
        report.say(f"data: {opts.data_dir} is complete")
        return
    # worker: a server holds no data
    dataset = None if serving else data.load(opts.data_dir, opts.num_classes)
    layout = params.mlp(opts.hidden_units, opts.num_classes)
    # all ranks: server 0 names a silent worker earlier; this sees all the rest
    watchdog = report.Watchdog(2 * opts.stall_timeout, opts.PROG)
    comm, sizes, found = connect(opts, dataset, watchdog)
    placed += found + opts.describe(sizes, layout.size, here.size - servers)
    for line in placed:
        report.say(line)
    if serving:
        result = Shard(opts, comm, layout, watchdog).serve()
    else:
        result = work(opts, comm, layout, dataset, watchdog)
    # all ranks: what each has measured
    results = comm.gather(result)
    if here.rank == 0:
        workers = results[servers:]
        moved = sum(worker["bytes"] for worker in workers)
        report.final(results[0] | {"bytes_moved": moved, "per_worker": workers})
    # all ranks: leave together, as long as the watchdog looks on
    wait(comm.Ibarrier().Test)


def connect(opts, dataset: data.Dataset | None, watchdog: report.Watchdog):
    """Import MPI, on workers TensorFlow too, and meet the other ranks.

    Returns the communicator, what the data set holds, and lines about what was found.
    """
    global MPI, tf, model
    with watchdog.without_threads():
        from mpi4py import MPI
    if dataset:
        with report.quiet_stderr():
            import tensorflow as tf

            from replica import model
    comm = MPI.COMM_WORLD
    wait(comm.Ibarrier().Test)  # asleep, which allgather is not
    # all ranks: a rank with other options or data would train something else, or hang
    mine, sizes, missing = opts.identity(), None, False
    if dataset:
        sizes, missing = dataset.sizes, model.gpu_is_missing()
        mine |= sizes.content()
    everyone, sizes, missing = zip(*comm.allgather((mine, sizes, missing)), strict=True)
    if found := options.disagreement(everyone):
        raise JobError(found)
    watchdog.beat("all ranks met")
    return comm, sizes[-1], placement.missing_gpus(missing)


def pause(waited: float) -> None:
    """Leave the core to others for a moment, after ``waited`` seconds of waiting."""
    if waited < EAGER:
        os.sched_yield()
    else:
        time.sleep(min(waited / 10, LONGEST_NAP))


def wait(ready: Callable[[], bool]) -> None:
    """Return when ``ready()`` is true; the watchdog ends a wait that is too long."""
    began = time.monotonic()
    while not ready():
        pause(time.monotonic() - began)


def slices(size: int, servers: int) -> list[slice]:
    """The contiguous part of a vector [size] that each server holds."""
    ends = [size * server // servers for server in range(servers + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


class Shard:
    """A server: a slice of the parameters with its optimizer's state."""

    def __init__(self, opts, comm, layout: params.Layout, watchdog: report.Watchdog):
        self.opts, self.comm, self.rank = opts, comm, comm.Get_rank()
        self.watchdog = watchdog
        self.servers = opts.num_ps
        self.workers = comm.Get_size() - self.servers
        mine = slices(layout.size, self.servers)[self.rank]
        self.vector = layout.initial(opts.seed)[mine].copy()
        size = len(self.vector)
        self.optimizer = optimizer.create(opts.optimizer, size, opts.momentum)
        self.total = np.zeros(size, np.float32)  # of gradients to be averaged
        self.snapshots: deque[np.ndarray] = deque()  # to be evaluated
        self.version = 0
        tags = Tag.PARAMETERS, Tag.GRADIENT
        self.links = [
            Link(comm, self.servers + worker, size, opts.wire_type, tags)
            for worker in range(self.workers)
        ]
        # What server 0 tells the others about one gradient.
        self.order = np.zeros(
            1,
            [("worker", "<i8"), ("use", "<i8"), ("averaged", "<i8"), ("rate", "<f8")]
            + [("snapshot", "<i8"), ("commands", "<i8", (self.workers,))],
        )

    def serve(self) -> dict:
        """Serve until every worker has been told to stop; returns what was counted."""
        for link in self.links:
            link.post()
        # all ranks: start together, when the workers have compiled
        wait(self.comm.Ibarrier().Test)
        return Lead(self).serve() if self.rank == 0 else self.follow()

    def carry_out(self, order, tickets: Iterator[int] = itertools.repeat(0)) -> None:  # noqa: B008
        """Do to this slice what ``order`` says, and answer whom it releases."""
        if order["worker"] >= 0:
            link = self.links[order["worker"]]
            if order["use"] and order["averaged"] == 1:
                self.update(np.asarray(link.into.vector, np.float32), order["rate"])
            elif order["use"]:
                self.total += link.into.vector
                if order["averaged"]:
                    self.total /= np.float32(order["averaged"])
                    self.update(self.total, order["rate"])
                    self.total[:] = 0
            link.post()
        if order["snapshot"]:
            self.snapshots.append(self.vector.copy())
        for worker, command in enumerate(order["commands"]):
            if command == Command.HOLD:
                continue
            evaluate = command == Command.EVALUATE
            vector = self.snapshots.popleft() if evaluate else self.vector
            ticket = next(tickets) if command == Command.TRAIN else 0
            self.links[worker].send(
                vector, version=self.version, ticket=ticket, command=command
            )

    def update(self, gradient: np.ndarray, rate: float) -> None:
        """One update of this slice: the next version."""
        self.optimizer.update(self.vector, gradient, float(rate))
        self.version += 1

    def follow(self) -> dict:
        """Carry out server 0's orders, in its order."""
        stopped = 0
        while stopped < self.workers:
            wait(self.comm.Irecv(self.order.view("u1"), 0, Tag.DECISION).Test)
            order = self.order[0]
            if order["worker"] >= 0:
                wait(self.links[order["worker"]].arrived)
            self.carry_out(order)
            self.watchdog.beat(f"step {self.version}")
            stopped += int((order["commands"] == Command.STOP).sum())
        for link in self.links:
            link.sending.Wait()
        return {}


class Lead:
    """Server 0: issues the tickets, asks the policy, decides the end."""

    def __init__(self, shard: Shard):
        self.shard, self.opts, self.workers = shard, shard.opts, shard.workers
        self.rule = self.opts.policy(self.workers)
        self.tickets = itertools.count()
        self.count: Counter[str] = Counter()
        self.updates = [0] * self.workers  # gradients used, of each worker
        self.staleness: Counter[int] = Counter()
        self.last = self.opts.train_steps  # the version to end with
        self.evaluations: deque[int] = deque()  # versions that wait for worker 0
        self.evaluation_link = np.zeros(6)
        self.since = [time.monotonic()] * self.workers  # released; inf while held
        self.results: dict = {}

    def serve(self) -> dict:
        """Until every worker has stopped; returns the report."""
        self.began = time.perf_counter()
        self.ended, busy, self.stopped = self.began, 0.0, 0
        self.decide(-1, policy.Decision(False, release=list(range(self.workers))))
        for worker in self.arrivals():
            now = time.perf_counter()
            if worker is None:
                self.evaluated()
            else:
                self.gradient(worker)
            busy += time.perf_counter() - now
            self.shard.watchdog.beat(f"step {self.rule.version}")
        for link in self.shard.links:
            link.sending.Wait()
            link.receiving.Cancel()
        return self.report(busy)

    def arrivals(self) -> Iterator[int | None]:
        """Workers whose gradient is here, in rotating order; None for an evaluation."""
        links, first = self.shard.links, 0
        idle = looked = time.monotonic()
        evaluation = self.shard.comm.Irecv(
            self.evaluation_link, self.shard.servers, Tag.EVALUATION
        )
        while self.stopped < self.workers:
            found = False
            if time.monotonic() > looked + 1:
                self.refuse_silence()
                looked = time.monotonic()
            if evaluation.Test():
                yield None
                found = True
                evaluation = self.shard.comm.Irecv(
                    self.evaluation_link, self.shard.servers, Tag.EVALUATION
                )
            for worker in [*range(first, self.workers), *range(first)]:
                if links[worker].arrived():
                    found, first = True, (worker + 1) % self.workers
                    yield worker
            if found:
                idle = time.monotonic()
                continue
            pause(time.monotonic() - idle)
        evaluation.Cancel()

    def refuse_silence(self) -> None:
        """End the job if a worker has kept what it owes for too long."""
        if not self.opts.stall_timeout:
            return
        limit = time.monotonic() - self.opts.stall_timeout
        silent = [w + self.shard.servers for w, t in enumerate(self.since) if t < limit]
        if silent:
            raise JobError(
                f"nothing from ranks {silent} for {self.opts.stall_timeout} s "
                f"(--stall_timeout) at step {self.rule.version}"
            )

    def gradient(self, worker: int) -> None:
        """Decide on the gradient that has arrived from ``worker``."""
        header = self.shard.links[worker].into.header
        version, loss = int(header["version"]), float(header["loss"])
        self.since[worker] = np.inf
        self.count["sent"] += 1
        if self.rule.version >= self.last:
            decision = policy.Decision(False, release=[worker])
        elif not np.isfinite(loss):
            self.count["refused"] += 1
            if self.count["refused"] > MOST_REFUSED:
                raise JobError(
                    f"step {self.rule.version}: expected finite gradients, found "
                    f"{self.count['refused']} that are not, the last of rank "
                    f"{worker + self.shard.servers}; training has diverged"
                )
            decision = self.rule.refused(worker, version)
        else:
            decision = self.rule.arrived(worker, version)
            self.loss = loss
        self.count["dropped"] += not decision.use
        self.count["held"] += worker not in decision.release
        if decision.use:
            self.updates[worker] += 1
            self.staleness[decision.staleness] += 1
        self.decide(worker, decision)

    def decide(self, worker: int, decision: policy.Decision) -> None:
        """Carry the decision out, here and on the other servers."""
        order, version = self.shard.order[0], self.rule.version
        release = decision.release
        finished = version >= self.last
        order["worker"], order["use"] = worker, decision.use
        order["averaged"], order["snapshot"] = decision.averaged, 0
        order["rate"] = self.opts.rate(decision.staleness)
        if decision.averaged:
            if finished:
                self.ended = time.perf_counter()
                release = [*release, *self.rule.drain()]
            if finished or version == self.opts.next_evaluation(version - 1):
                order["snapshot"] = 1
                self.evaluations.append(version)
        order["commands"] = Command.HOLD
        for released in release:
            order["commands"][released] = self.command(released, finished)
        self.send(order)

    def command(self, worker: int, finished: bool) -> Command:
        """What a released worker does next."""
        self.since[worker] = time.monotonic()
        if worker == 0 and self.evaluations:
            return Command.EVALUATE
        if finished:
            self.stopped += 1
            self.since[worker] = np.inf
            return Command.STOP
        return Command.TRAIN

    def send(self, order) -> None:
        """Order the other servers, then do the same here."""
        for server in range(1, self.shard.servers):
            self.shard.comm.Send(self.shard.order.view("u1"), server, Tag.DECISION)
        self.shard.carry_out(order, self.tickets)

    def evaluated(self) -> None:
        """Worker 0 has evaluated the version that it was sent last."""
        version = self.evaluations.popleft()
        validation = report.Evaluation(*self.evaluation_link[:3])
        test = report.Evaluation(*self.evaluation_link[3:])
        seconds = time.perf_counter() - self.began
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
        order = self.shard.order[0]
        order["worker"], order["use"], order["averaged"] = -1, 0, 0
        order["snapshot"], order["commands"] = 0, Command.HOLD
        if validation.accuracy >= (self.opts.target_accuracy or np.inf):
            if self.rule.version < self.last and version < self.rule.version:
                order["snapshot"] = 1
                self.evaluations.append(self.rule.version)
            self.last = min(self.last, self.rule.version)
            self.ended = time.perf_counter()
            for waiting in self.rule.drain():
                order["commands"][waiting] = self.command(waiting, True)
        finished = self.rule.version >= self.last
        order["commands"][0] = self.command(0, finished)
        self.send(order)

    def report(self, busy: float) -> dict:
        """The final line."""
        seconds, used = self.ended - self.began, sum(self.updates)
        steps = self.rule.version
        total = sum(s * n for s, n in self.staleness.items())
        return {
            "mode": "sync_replicas" if self.opts.sync_replicas else "async",
            "ranks": self.workers + self.shard.servers,
            "workers": self.workers,
            "steps": steps,
            "seconds": round(seconds, 3),
            "steps_per_second": round(steps / seconds, 1),
            "examples_per_second": round(used * self.opts.batch_size / seconds, 1),
            "learning_rate": self.opts.learning_rate,
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
            "server_busy": round(busy / seconds, 3),
        }


def work(opts, comm, layout: params.Layout, dataset: data.Dataset, watchdog) -> dict:
    """Train until told to stop; returns where the time went, in seconds, and bytes."""
    parts = slices(layout.size, opts.num_ps)
    tags = Tag.GRADIENT, Tag.PARAMETERS
    links = [
        Link(comm, server, part.stop - part.start, opts.wire_type, tags)
        for server, part in enumerate(parts)
    ]
    for link in links:
        link.post()
    compute, sampler = build_gradient(opts, layout, dataset.train)
    vector = layout.initial(opts.seed)
    compute(tf.constant(vector), tf.zeros([opts.push_every, opts.batch_size], tf.int32))
    # all ranks: start together, when the workers have compiled
    wait(comm.Ibarrier().Test)
    spent: Counter[str] = Counter()
    mark = time.perf_counter()

    def lap(what: str) -> None:
        nonlocal mark
        now = time.perf_counter()
        spent[what] += now - mark
        mark = now

    while True:
        for link, part in zip(links, parts, strict=True):
            wait(link.arrived)
            lap("wait")
            vector[part] = link.into.vector
        watchdog.beat("the servers' last message")
        header = links[0].into.header.copy()
        versions = [int(link.into.header["version"]) for link in links]
        if len(set(versions)) > 1:
            raise JobError(f"the servers have sent versions {versions} of one vector")
        if header["command"] == Command.STOP:
            break
        for link in links:
            link.post()
        lap("exchange")
        if header["command"] == Command.EVALUATE:
            sums = [evaluate(layout, vector, dataset.validation)]
            sums += [evaluate(layout, vector, dataset.test)]
            comm.Send(np.concatenate(sums), 0, Tag.EVALUATION)
            lap("evaluate")
            continue
        first = int(header["ticket"]) * opts.push_every
        indices = sampler.batches(range(first, first + opts.push_every))
        gradient = compute(tf.constant(vector), tf.constant(indices)).numpy()
        # Their sum is finite if all are, but for an overflow, which is no better.
        loss = gradient[-1] if np.isfinite(gradient.sum()) else np.nan
        lap("compute")
        for link, part in zip(links, parts, strict=True):
            link.send(
                gradient[part], version=versions[0], ticket=header["ticket"], loss=loss
            )
        lap("exchange")
        spent["gradients"] += 1
    moved = sum(link.moved for link in links)
    return {key: round(value, 3) for key, value in spent.items()} | {"bytes": moved}


def build_gradient(opts, layout: params.Layout, samples: data.Split):
    """A function (vector, indices) -> gradient and loss [size + 1], and the sampler."""
    images, labels = tf.constant(samples.images), tf.constant(samples.labels)

    @tf.function(
        input_signature=[
            tf.TensorSpec([layout.size], tf.float32),
            tf.TensorSpec([opts.push_every, opts.batch_size], tf.int32),
        ]
    )
    def compute(vector, indices):
        x, y = tf.gather(images, indices), tf.gather(labels, indices)
        total = model.gradient_and_loss(layout, vector, x[0], y[0])
        for i in range(1, opts.push_every):
            total += model.gradient_and_loss(layout, vector, x[i], y[i])
        return total / opts.push_every if opts.push_every > 1 else total

    # Called as it is, without a look at its arguments: a tenth of the time of a call.
    compute = compute.get_concrete_function()
    return compute, data.Sampler(len(samples), opts.batch_size, opts.seed)


def evaluate(layout: params.Layout, vector: np.ndarray, samples: data.Split):
    """Summed loss, right answers and samples: float64 [3]."""
    total = np.zeros(3)
    for first in range(0, len(samples), EVALUATION_BATCH):
        part = samples[first : first + EVALUATION_BATCH]
        total += model.evaluate(layout, vector, part.images, part.labels).numpy()
    return total


if __name__ == "__main__":
    report.run(main, "ps_mode.py")
