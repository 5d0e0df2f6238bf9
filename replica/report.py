"""What a run tells: lines, a progress bar, the final JSON line, and how it fails.

The root rank alone writes to the terminal: text to stderr, the final line to stdout.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from replica import JobError, placement

# How long a rank waits before it tells of an error: if all ranks have the same one,
# the root has told it by then and the launcher has ended the rest.
HOLD_BACK_SECONDS = 3.0


@dataclass(frozen=True)
class Evaluation:
    """Sums over the samples of a set, and the means that they give."""

    loss_sum: float  # the figure that the seed's program reports
    correct: float
    samples: float

    @property
    def loss(self) -> float:
        """Mean cross-entropy."""
        return self.loss_sum / self.samples

    @property
    def accuracy(self) -> float:
        """Share of right answers, 0 to 1."""
        return self.correct / self.samples


def say(line: str) -> None:
    """Write one line to stderr, from the root rank only."""
    if placement.slot().rank == 0:
        write(line)


def write(text: str) -> None:
    """Write ``text`` and a newline to stderr from any rank, in one piece."""
    try:
        with tqdm.external_write_mode(file=sys.stderr):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
    except OSError:  # full: no reason to lose a run, nor to try again at the exit
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def final(report: dict) -> None:
    """Write the one line of a run that goes to stdout, from the root rank only.

    Raises:
        JobError: stdout is closed or full; the line has gone to stderr instead.
    """
    line = json.dumps(report)
    try:
        out(f"{line}\n")
    except JobError:
        write(line)
        raise


def out(text: str) -> None:
    """Write ``text`` to stdout, from the root rank only.

    Raises:
        JobError: stdout is closed or full.
    """
    if placement.slot().rank != 0:
        return
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = None  # or Python tries again at the exit
        raise JobError(f"stdout: cannot write to it: {error}") from error


def progress(total: int, unit: str, scale: bool = False) -> tqdm:
    """A bar on the root's terminal; nothing elsewhere."""
    shown = placement.slot().rank == 0 and sys.stderr.isatty()
    return tqdm(
        total=total, unit=unit, unit_scale=scale, disable=not shown, leave=False
    )


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop what C++ code writes to stderr, unless the block raises.

    TensorFlow 2.18 writes some lines about CUDA plug-ins at import, on every rank.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        except BaseException:
            log.seek(0)
            os.write(kept, log.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Make one line of the failure of an import."""
    try:
        yield
    except Exception as error:
        told = f"{what} does not work here ({type(error).__name__}: {error})"
        raise JobError(f"{told}; run ./install.sh".replace("\n", " ")) from error


def run(main: Callable[[], object], prog: str) -> None:
    """Call ``main`` and leave the process, so that a failing rank ends the job.

    Leaves without the clean-up at exit: Horovod and MPI wait there for the ranks that
    have not failed, and those wait for this one.
    """
    rank, code = placement.slot().rank, 0
    if sys.stderr is None:  # closed, and what opens a file next would get its number
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w")
    try:
        main()
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(bool(leave.code))
    except JobError as error:
        code = error.code
        told_by = "" if rank == 0 else f"rank {rank}: "
        _tell(f"{prog}: error: {told_by}{error}", rank != 0)
    except MemoryError as error:
        code = 1
        _tell(f"{prog}: error: rank {rank}: not enough memory: {error}", rank != 0)
    except KeyboardInterrupt:
        code = 130
        _tell(f"{prog}: interrupted", rank != 0)
    except BaseException as error:
        code = 1
        consequence = type(error).__name__ == "HorovodInternalError"
        _tell(
            f"{prog}: rank {rank} failed:\n{traceback.format_exc().rstrip()}",
            rank != 0 or consequence,
        )
    if code:
        with contextlib.suppress(AttributeError, OSError):  # closed, or full
            sys.stdout.flush()
        os._exit(code)


def code_version() -> str:
    """Digest of the program's source, the same on ranks that run the same code."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*package.glob("*.py"), *package.parent.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def disagreement(all_ranks: Sequence[dict]) -> str | None:
    """Where a rank tells other than the first rank that tells of it, or None."""
    told: dict[str, tuple[int, object]] = {}
    for rank, theirs in enumerate(all_ranks):
        for name, value in theirs.items():
            first, ours = told.setdefault(name, (rank, value))
            if value != ours:
                return (
                    f"ranks disagree on {name}: {ours} (rank {first}), "
                    f"{value} (rank {rank})"
                )
    return None


class Stopwatch:
    """Where the time goes: seconds by name, each since the last lap."""

    def __init__(self):
        self.seconds: Counter[str] = Counter()
        self._mark = time.perf_counter()

    def lap(self, what: str) -> None:
        """Count the time since the last lap for ``what``."""
        now = time.perf_counter()
        self.seconds[what] += now - self._mark
        self._mark = now

    def report(self) -> dict[str, float]:
        """All of it, in milliseconds' precision."""
        return {what: round(seconds, 3) for what, seconds in self.seconds.items()}


class Watchdog:
    """Ends the process when nothing has happened for too long.

    For the waits that no error and no signal handler can end: a rank that is frozen,
    out of reach or gone holds the others inside MPI. Watches to the end of the process.
    """

    def __init__(self, seconds: int, prog: str):
        self.seconds, self.prog = seconds, prog
        self.beat("the start")
        if seconds:  # 0: wait for ever
            threading.Thread(target=self._watch, daemon=True).start()

    def beat(self, what: str) -> None:
        """Tell that ``what`` has been done."""
        self.last = what, time.monotonic()

    @contextlib.contextmanager
    def without_threads(self) -> Iterator[None]:
        """Watch a block that keeps Python's threads from running, this one's too."""
        if self.seconds:
            faulthandler.dump_traceback_later(self.seconds + 1, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while (left := self.last[1] + self.seconds - time.monotonic()) > 0:
            time.sleep(left)
        rank = placement.slot().rank
        _tell(
            f"{self.prog}: error: rank {rank}: nothing since {self.last[0]} for "
            f"{self.seconds} s (see --stall_timeout): a rank is frozen, out of reach "
            "or gone",
            rank != 0,
        )
        os._exit(1)


def _tell(text: str, hold_back: bool) -> None:
    if hold_back:
        time.sleep(HOLD_BACK_SECONDS)
    write(text)
