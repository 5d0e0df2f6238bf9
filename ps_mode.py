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
import gc
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from replica import (
    JobError,
    data,
    describe,
    fetch,
    optimizer,
    options,
    params,
    placement,
    report,
)
from replica.coordinator import NOBODY, Command, Coordinator, Order, order_size
from replica.link import Message, Peers


class Tag(enum.IntEnum):
    """What a message is."""

    GRADIENT = 1
    PARAMETERS = 2
    EVALUATION = 3
    DECISION = 4


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
    peers, sizes, found = connect(opts, dataset, watchdog)
    placed += found + describe.workers(opts, sizes, layout.size, here.size - servers)
    for line in placed:
        report.say(line)
    if serving:
        result = Server(opts, peers, layout, watchdog).serve()
    else:
        result = work(opts, peers, layout, dataset, watchdog)
    # all ranks: what each has measured
    results = peers.comm.gather(result)
    if here.rank == 0:
        report.final(summary(results[:servers], results[servers:]))
    # all ranks: leave together, as long as the watchdog looks on
    peers.barrier()


def summary(servers: list[dict], workers: list[dict]) -> dict:
    """The final line, from what server 0 and each worker have counted."""
    if not any(server.pop("changed") for server in servers):
        raise JobError("expected the updates to change the parameters, found none")
    moved = sum(worker["bytes"] for worker in workers)
    return servers[0] | {"bytes_moved": moved, "per_worker": workers}


def connect(
    opts: options.ServerOptions, dataset: data.Dataset | None, watchdog: report.Watchdog
) -> tuple[Peers, data.Sizes, list[str]]:
    """Import MPI, on workers TensorFlow too, and meet the other ranks.

    Returns them, what the data set holds, and lines about what was found.
    """
    with watchdog.without_threads(), report.importing("mpi4py"):
        from mpi4py import MPI
    missing = False
    if dataset:
        with report.importing("TensorFlow"), report.quiet_stderr():
            from replica import model
        missing = model.gpu_is_missing()
    peers = Peers(MPI.COMM_WORLD)
    # all ranks: a rank with other options or data would train something else, or hang
    mine = opts.identity() | (dataset.sizes.content() if dataset else {})
    everyone = peers.comm.allgather((mine, dataset and dataset.sizes, missing))
    everyone, sizes, missing = zip(*everyone, strict=True)
    if found := report.disagreement(everyone):
        raise JobError(found)
    watchdog.beat("all ranks met")
    return peers, sizes[-1], placement.missing_gpus(missing)


class Server:
    """Holds a slice of the parameters, and the optimizer's state for it."""

    def __init__(
        self, opts, peers: Peers, layout: params.Layout, watchdog: report.Watchdog
    ):
        self.opts, self.peers, self.watchdog = opts, peers, watchdog
        self.rank = peers.comm.Get_rank()
        mine = params.slices(layout.size, opts.num_ps)[self.rank]
        self.vector = layout.initial(opts.seed)[mine].copy()
        size = len(self.vector)
        self.optimizer = optimizer.create(opts.optimizer, size, opts.momentum)
        self.total = np.zeros(size, np.float32)  # of gradients to be averaged
        self.snapshots: deque[np.ndarray] = deque()  # to be evaluated
        self.version = 0
        # server: no links with the other servers, only decisions
        sizes = dict.fromkeys(range(opts.num_ps, peers.comm.Get_size()), size)
        self.links = peers.links(sizes, opts.wire_type, opts.copies)
        self.order = np.zeros(order_size(len(self.links)))  # to or from server 0

    def serve(self) -> dict:
        """Serve until every worker has been told to stop; returns what was counted."""
        first = self.vector.copy()
        for link in self.links:
            link.post(Tag.GRADIENT)
        # all ranks: start together, when the workers have compiled
        self.peers.barrier()
        counted = self.lead() if self.rank == 0 else self.follow()
        for link in self.links:
            link.close()
        return counted | {"changed": not np.array_equal(first, self.vector)}

    def lead(self) -> dict:
        """Server 0: decide, order, and do the same here."""
        decider, busy = Coordinator(self.opts, len(self.links)), 0.0
        for order in decider.start():
            self.send(order)
        for worker, message in self.arrivals(decider):
            began = time.monotonic()
            if isinstance(message, Message):
                version, _, _, loss = message.header()
                order = decider.gradient(worker, version, loss)
                self.send(order, message)
            else:
                sums = report.Evaluation(*message[:3]), report.Evaluation(*message[3:])
                self.send(decider.evaluated(*sums))
            busy += time.monotonic() - began
            self.watchdog.beat(f"step {self.version}")
        counted = decider.report()
        return counted | {"server_busy": round(busy / counted["seconds"], 3)}

    def arrivals(self, decider: Coordinator) -> Iterator[tuple[int, object]]:
        """Workers with a gradient, in rotating order, or with sums of evaluations."""
        sums, first = np.zeros(6), 0
        source = self.opts.num_ps, Tag.EVALUATION
        evaluation = self.peers.comm.Irecv(sums, *source)
        idle = looked = time.monotonic()
        while decider.stopped < len(self.links):
            found = evaluation.Test()
            if found:
                yield 0, sums.copy()
                evaluation = self.peers.comm.Irecv(sums, *source)
            for worker in [*range(first, len(self.links)), *range(first)]:
                if message := self.links[worker].arrived():
                    found, first = True, (worker + 1) % len(self.links)
                    yield worker, message
            now = time.monotonic()
            if now > looked + 1:
                looked = now
                decider.refuse_silence()
            if found:
                idle = now
            else:
                self.peers.pause(now - idle)
        evaluation.Cancel()

    def follow(self) -> dict:
        """Carry out server 0's orders, in its order."""
        stopped = 0
        while stopped < len(self.links):
            self.peers.receive(self.order, 0, Tag.DECISION)
            order, message = Order.from_numbers(self.order.tolist()), None
            if order.worker != NOBODY:
                message = self.links[order.worker].wait()
            self.carry_out(order, message)
            self.watchdog.beat(f"step {self.version}")
            stopped += sum(command == Command.STOP for _, command, _ in order.release)
        return {}

    def send(self, order: Order, message: Message | None = None) -> None:
        """Server 0: order the other servers, then do the same here."""
        if self.opts.num_ps > 1:
            numbers = order.numbers()
            self.order[: len(numbers)] = numbers
            for server in range(1, self.opts.num_ps):
                self.peers.send(self.order, server, Tag.DECISION)
        self.carry_out(order, message)

    def carry_out(self, order: Order, message: Message | None) -> None:
        """Do to this slice what ``order`` says, and answer whom it releases."""
        if message and order.use:
            gradient = np.asarray(message.vector, np.float32)
            if order.averaged != 1:
                self.total += gradient
            if order.averaged > 1:
                gradient = self.total / np.float32(order.averaged)
                self.total[:] = 0
            if order.averaged:
                self.optimizer.update(self.vector, gradient, order.rate)
                self.version += 1
        if message:
            self.links[order.worker].post(Tag.GRADIENT)
        if order.snapshot:
            self.snapshots.append(self.vector.copy())
        for worker, command, ticket in order.release:
            newest = command != Command.EVALUATE
            vector = self.vector if newest else self.snapshots.popleft()
            header = self.version, ticket, command, 0.0
            self.links[worker].send(Tag.PARAMETERS, vector, *header)


def work(
    opts, peers: Peers, layout: params.Layout, dataset: data.Dataset, watchdog
) -> dict:
    """Train until told to stop; returns where the time went, in seconds, and bytes."""
    from replica import model

    parts = params.slices(layout.size, opts.num_ps)
    sizes = {server: part.stop - part.start for server, part in enumerate(parts)}
    links = peers.links(sizes, opts.wire_type, opts.copies)
    for link in links:
        link.post(Tag.PARAMETERS)
    batch, passes = opts.batch_size, opts.push_every
    compute = model.build_gradient(layout, dataset.train, batch, passes, opts.wire_type)
    evaluate = model.build_evaluation(layout)
    sampler = data.Sampler(len(dataset.train), batch, opts.seed)
    delay = opts.delay(peers.comm.Get_rank())
    compute(layout.initial(opts.seed), np.zeros([passes, batch], np.int32))
    # The collector need not look at what TensorFlow has made so far, again and again.
    gc.freeze()
    # all ranks: start together, when the workers have compiled
    peers.barrier()
    spent, gradients = report.Stopwatch(), 0
    while True:
        messages = [link.wait() for link in links]
        spent.lap("wait")
        watchdog.beat("the servers' last message")
        version, ticket, command, _ = messages[0].header()
        versions = [message.header()[0] for message in messages]
        if versions != [version] * len(messages):
            raise JobError(f"the servers have sent versions {versions} of one vector")
        if command == Command.STOP:
            break
        for link in links:
            link.post(Tag.PARAMETERS)
        vector = params.join([message.vector for message in messages])
        spent.lap("exchange")
        if command == Command.EVALUATE:
            sums = [evaluate(vector, s) for s in (dataset.validation, dataset.test)]
            peers.send(np.concatenate(sums), 0, Tag.EVALUATION)
            spent.lap("evaluate")
            continue
        tickets = range(ticket * passes, (ticket + 1) * passes)
        gradient, loss = compute(vector, sampler.batches(tickets))
        if delay:  # --straggler
            time.sleep(delay)
        spent.lap("compute")
        for link, part in zip(links, parts, strict=True):
            link.send(Tag.GRADIENT, gradient[part], version, ticket, command, loss)
        if opts.overlap:  # or it would not be under way before the next is computed
            for link in links:
                link.flush()
        spent.lap("exchange")
        gradients += 1
    counted = {"gradients": gradients, "bytes": sum(link.moved for link in links)}
    return spent.report() | counted


if __name__ == "__main__":
    report.run(main, "ps_mode.py")
