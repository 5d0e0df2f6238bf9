"""What carries bytes between ranks: messages, links and waiting, over mpi4py.

A message is a header and a vector. Between hosts both go in one MPI message. On one
host the vector lies in shared memory, where the sender writes and the receiver reads
it; the header alone is sent, and a bell wakes the receiver.
"""

import contextlib
import itertools
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from replica import JobError

HEADER = struct.Struct("<qqqd")  # version, ticket, command, loss
ALIGNMENT = 64  # bytes; TensorFlow reads an array so placed where it lies
# Who waits for ranks without a bell looks again and again for so many seconds, leaving
# the core to any other thread in between. All naps last a tenth of the time waited.
EAGER, SHORTEST_NAP, LONGEST_NAP = 0.002, 0.0005, 0.005


Found = TypeVar("Found")


class Message:
    """A header and a vector, the vector in the same buffer or where ``vector`` lies."""

    def __init__(self, size: int, dtype: str, vector: np.ndarray | None = None):
        inside = size * np.dtype(dtype).itemsize if vector is None else 0
        self.buffer = np.zeros(HEADER.size + inside, "u1")  # what MPI moves
        self.vector = self.buffer[HEADER.size :].view(dtype) if inside else vector
        self.nbytes = HEADER.size + self.vector.nbytes
        self.sent: Callable[[], bool] = lambda: True  # whether the buffer is free

    def header(self) -> tuple[int, int, int, float]:
        """Version, ticket, command and loss."""
        return HEADER.unpack_from(self.buffer)

    def fill(self, vector: np.ndarray, *header: float) -> None:
        """Take a copy of ``vector``, in the type of the wire."""
        HEADER.pack_into(self.buffer, 0, *header)
        self.vector[:] = vector


class Peers:
    """The other ranks of a communicator, and how to wait for them."""

    def __init__(self, comm):
        from mpi4py import MPI  # starts MPI, so not before the rank has its cores

        self.comm, self._mpi = comm, MPI
        self._host = comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._bell, self._rope = (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)
        )
        self._bell.bind("")  # to a free name in the abstract name space
        self._rope.setblocking(False)
        mine = comm.Get_rank(), self._bell.getsockname()
        self._bells = dict(self._host.allgather(mine))  # rank -> its bell
        self._all_here = len(self._bells) == comm.Get_size()

    def ring(self, peer: int) -> None:
        """Wake ``peer``, to which a message has been sent, if it is on this host."""
        if peer in self._bells:
            # A full queue is as good; nobody there is found out by its silence.
            with contextlib.suppress(BlockingIOError, ConnectionRefusedError):
                self._rope.sendto(b"!", self._bells[peer])

    def pause(self, waited: float) -> None:
        """Leave the core to others for a moment, having waited ``waited`` seconds."""
        if waited < EAGER and not self._all_here:
            os.sched_yield()
            return
        self._bell.settimeout(min(max(waited / 10, SHORTEST_NAP), LONGEST_NAP))
        with contextlib.suppress(TimeoutError):
            self._bell.recv(1)

    def wait(self, ready: Callable[[], Found]) -> Found:
        """What ``ready()`` gives once it is true; the watchdog ends too long a wait."""
        began = time.monotonic()
        while not (found := ready()):
            self.pause(time.monotonic() - began)
        return found

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.wait(self.comm.Ibarrier().Test)

    def send(self, numbers: np.ndarray, peer: int, tag: int) -> None:
        """Send a few numbers."""
        self.comm.Send(numbers, peer, tag)
        self.ring(peer)

    def receive(self, numbers: np.ndarray, peer: int, tag: int) -> None:
        """Receive what ``send`` sends."""
        self.wait(self.comm.Irecv(numbers, peer, tag).Test)

    def links(self, sizes: dict[int, int], dtype: str, copies: int) -> list["Link"]:
        """A link with each of some ranks. All ranks of the communicator call this.

        Args:
            sizes: the length of the vectors that go both ways, by rank.
            dtype: their type on the wire.
            copies: how many messages may be under way in one direction.
        """
        width = np.dtype(dtype).itemsize
        strides = {
            peer: -(-size * width // ALIGNMENT) * ALIGNMENT
            for peer, size in sizes.items()
        }
        local = [peer for peer in sizes if peer in self._bells]
        ends = [0, *itertools.accumulate(copies * strides[peer] for peer in local)]
        starts = dict(zip(local, ends, strict=False))
        window = self._window(ends[-1])
        theirs = dict(zip(self._bells, self._host.allgather(starts), strict=True))
        me, order = self.comm.Get_rank(), list(self._bells)

        def messages(sender: int, receiver: int) -> list[Message]:
            peer = receiver if sender == me else sender
            size, stride = sizes[peer], strides[peer]
            if window is None or peer not in starts:
                return [Message(size, dtype) for _ in range(copies)]
            memory = np.frombuffer(window.Shared_query(order.index(sender))[0], "u1")
            first = theirs[sender][receiver]
            places = range(first, first + copies * stride, stride)
            return [
                Message(size, dtype, memory[p : p + size * width].view(dtype))
                for p in places
            ]

        sync = window.Sync if window else None
        return [
            Link(self, peer, messages(me, peer), messages(peer, me), sync)
            for peer in sizes
        ]

    def _window(self, nbytes: int):
        """Memory that the ranks of this host share, ``nbytes`` of it for this rank.

        None where there is no use or too little of it; all ranks of a host agree.
        """
        needed = self._host.allreduce(nbytes)
        free = os.statvfs("/dev/shm")
        fits = needed + (1 << 20) < free.f_bavail * free.f_frsize
        if not needed or not self._host.bcast(fits):
            return None
        window = self._mpi.Win.Allocate_shared(nbytes, 1, comm=self._host)
        window.Lock_all()
        return window


class Link:
    """Messages between this rank and one other, both ways.

    The messages of one direction are used in turn: the last but ``copies`` has been
    read when its place is written again, since the protocol has it answered by then.
    """

    def __init__(self, peers: Peers, peer: int, out, into, sync=None):
        from mpi4py import MPI

        self.peers, self.peer = peers, peer
        self._out, self._into = deque(out), deque(into)
        self._sync = sync or (lambda: None)  # of the shared memory
        self._receiving, self._status = None, MPI.Status()
        self.moved = 0  # bytes, both ways

    def post(self, tag: int) -> None:
        """Be ready to receive, before the other side sends."""
        self._into.rotate(-1)
        buffer = self._into[0].buffer
        self._receiving = self.peers.comm.Irecv(buffer, self.peer, tag)

    def arrived(self) -> Message | None:
        """The message that was waited for, if it is here and was not returned yet."""
        if not self._receiving or not self._receiving.Test(self._status):
            return None
        self._receiving, message = None, self._into[0]
        found, expected = self._status.Get_count(), message.buffer.nbytes
        if found != expected:
            raise JobError(
                f"message from rank {self.peer}: expected {expected} bytes, "
                f"found {found}"
            )
        self._sync()
        self.moved += message.nbytes
        return message

    def wait(self) -> Message:
        """The message that was waited for, once it is here."""
        return self.peers.wait(self.arrived)

    def send(self, tag: int, vector: np.ndarray, *header: float) -> None:
        """Send a copy of ``vector`` and version, ticket, command and loss."""
        message = self._out[0]
        self._out.rotate(-1)
        self.peers.wait(message.sent)
        message.fill(vector, *header)
        self._sync()
        message.sent = self.peers.comm.Isend(message.buffer, self.peer, tag).Test
        self.peers.ring(self.peer)
        self.moved += message.nbytes

    def flush(self) -> None:
        """Return when all that was sent has been received, or is about to be."""
        for message in self._out:
            self.peers.wait(message.sent)

    def close(self) -> None:
        """End what was begun: nothing is under way after it."""
        self.flush()
        if self._receiving:
            self._receiving.Cancel()
