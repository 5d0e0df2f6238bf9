"""Which GPU, CPU cores and threads a rank uses, by its place on its host.

All of it is decided from the environment, before TensorFlow, Horovod or MPI start, and
told to them through the environment. What the user or the launcher has set stays.
"""

import glob
import os
import re
import sys
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from replica import JobError

# Where launchers tell a process its rank, the number of ranks, and both for its host.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    + ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


SEGMENT = 4 << 20  # bytes of shared memory that Open MPI takes for a rank


@dataclass(frozen=True)
class Slot:
    """A process's place in the job and on its host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def slot(environ: MutableMapping[str, str] = os.environ) -> Slot:
    """This process's slot, as its launcher told it; alone without a launcher."""
    for names in LAUNCHERS:
        if all(name in environ for name in names):
            return Slot(*(int(environ[name]) for name in names))
    return Slot()


def share(cores: list[int], local_rank: int, local_size: int) -> list[int]:
    """The cores of one rank: an equal part, or one core each when ranks outnumber."""
    if local_size >= len(cores):
        return [cores[local_rank % len(cores)]]
    first, end = (len(cores) * r // local_size for r in (local_rank, local_rank + 1))
    return cores[first:end]


def neighbours_first(cores: Iterable[int]) -> list[int]:
    """``cores`` with the hardware threads of one core, and of one socket, in a row."""

    def place(core: int) -> tuple[int, ...]:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            names = ("physical_package_id", "core_id")
            return *(int((topology / name).read_text()) for name in names), core
        except (OSError, ValueError):
            return 0, core, core

    return sorted(cores, key=place)


def bound_already(cores: set[int], environ: MutableMapping[str, str]) -> bool:
    """Whether somebody has given this very process its cores.

    Open MPI says so; otherwise a process that was bound has other cores than the
    launcher that started it.
    """
    if "OMPI_MCA_orte_bound_at_launch" in environ:
        return True
    try:
        return os.sched_getaffinity(os.getppid()) != cores
    except OSError:  # the parent has gone
        return False


def visible_gpus(environ: MutableMapping[str, str]) -> list[str]:
    """The GPUs that this process may use, by the names that CUDA gives them."""
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(n) for n in range(len(glob.glob("/proc/driver/nvidia/gpus/*")))]
    names = [name.strip() for name in listed.split(",")]
    hidden = next((i for i, name in enumerate(names) if name in ("", "-1")), None)
    return names[:hidden]  # CUDA too stops at the first name that is none


def choose_gpu(gpus: list[str], local_rank: int, num_gpus: int) -> str | None:
    """The GPU of a rank among the first ``num_gpus`` of ``gpus``; None for the CPU."""
    usable = gpus[:num_gpus]
    return usable[local_rank % len(usable)] if usable else None


def missing_gpus(missing: Iterable[bool]) -> list[str]:
    """Lines about the ranks, by number, whose GPU TensorFlow cannot use."""
    ranks = [rank for rank, is_missing in enumerate(missing) if is_missing]
    if not ranks:
        return []
    return [f"device: TensorFlow finds no GPU on ranks {ranks}: CPU (GPU=1 in README)"]


def check_shared_memory(here: Slot, environ: MutableMapping[str, str]) -> None:
    """Refuse to start where Open MPI's segments do not fit into shared memory.

    It would end in a bus error, and that only when messages come to fill them.
    """
    folder = environ.get("OMPI_MCA_btl_vader_backing_directory", "/dev/shm")
    if "OMPI_COMM_WORLD_RANK" not in environ or not os.path.isdir(folder):
        return
    state = os.statvfs(folder)
    found, needed = state.f_bavail * state.f_frsize, here.local_size * SEGMENT
    if here.local_size > 1 and found < needed:
        raise JobError(
            f"{folder}: expected {needed >> 20} MB of shared memory for "
            f"{here.local_size} ranks on this host, found {found >> 20} "
            f"(docker run --shm-size={max(64, 2 * needed >> 20)}m)"
        )


def servers_here(here: Slot, servers: int) -> int:
    """How many of this host's processes serve, if ranks 0 to ``servers`` - 1 do.

    Launchers number the processes of a host in a row.
    """
    first = here.rank - here.local_rank
    return min(max(servers - first, 0), here.local_size)


def settle(
    num_gpus: int,
    stall_timeout: int,
    servers: int = 0,
    environ: MutableMapping[str, str] = os.environ,
) -> list[str]:
    """Place this process; returns lines that say what was decided.

    Args:
        num_gpus: GPUs of each machine; 0 for the CPU.
        stall_timeout: seconds after which Horovod ends a job that waits for a rank;
            0 for never.
        servers: the first ranks of the job, which serve parameters: they get no GPU,
            and a core only if there are enough for all.

    Raises:
        JobError: a variable that the user has set is no number (exit code 2), or
            there is too little shared memory.
    """
    here = slot(environ)
    check_shared_memory(here, environ)
    serving = servers_here(here, servers)
    trainers, number = here.local_size - serving, here.local_rank - serving

    def default(name: str, value: object, pattern: str = r"\d+") -> str:
        """Set a variable unless it is set; returns how that reads in a line."""
        if name in environ:
            if not re.fullmatch(pattern, environ[name]):
                raise JobError(
                    f"{name}: expected a number, found {environ[name]!r}", code=2
                )
            return f"{environ[name]} (as set by {name})"
        environ[name] = str(value)
        return str(value)

    cores = os.sched_getaffinity(0)
    if here.local_size == 1:
        mine, how = sorted(cores), "all of them"
    elif bound_already(cores, environ):
        mine, how = sorted(cores), "as bound by the launcher"
    else:
        all_cores = neighbours_first(cores)
        own = serving if len(cores) >= here.local_size else 0  # cores for the servers
        if number >= 0:
            mine = share(all_cores[own:], number, trainers)
        else:
            mine = [all_cores[here.local_rank]] if own else all_cores
        os.sched_setaffinity(0, mine)
        how = f"of {len(cores)}, split by local rank"
    # Bound to a socket with other ranks, a rank still gets no more than its part.
    threads = min(len(mine), max(1, (os.cpu_count() or 1) // here.local_size))
    threads_line = default("TF_NUM_INTRAOP_THREADS", threads)
    default("TF_NUM_INTEROP_THREADS", threads)
    default("OMP_NUM_THREADS", threads, r"\d+(,\d+)*")
    lines = [f"cores: {_ranges(mine)} on rank 0, {how}; threads: {threads_line}"]

    # A rank has two busy threads, TensorFlow's and Horovod's. On fewer than two cores
    # a wait that spins takes the core from a computation, its own or a neighbour's.
    # One that yields does not, so there Horovod need not sleep between its cycles:
    # it sleeps longest when the gradient has just become ready.
    crowded = here.size > 1 and (len(mine) < 2 or servers > 0)
    yields = default("OMPI_MCA_mpi_yield_when_idle", int(crowded), r"\w+")
    lines.append(f"MPI yields when idle: {yields}")
    if not servers:
        # Horovod's own is 1
        cycle = default("HOROVOD_CYCLE_TIME", 0 if crowded else 0.2, r"\d*\.?\d+")
        lines[-1] += f"; Horovod cycle: {cycle} ms"
        # Horovod ends no job earlier than it warns.
        stall = default("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", stall_timeout)
        if stall_timeout:
            default("HOROVOD_STALL_CHECK_TIME_SECONDS", max(1, stall_timeout // 2))
        lines.append(f"stalled job ends after: {stall} s")

    gpus = visible_gpus(environ)
    gpu = choose_gpu(gpus, number, num_gpus) if number >= 0 else None
    environ["CUDA_VISIBLE_DEVICES"] = "-1" if gpu is None else gpu
    default("TF_FORCE_GPU_ALLOW_GROWTH", "true", r"\w+")
    why = f"--num_gpus {num_gpus}, {len(gpus)} visible"
    lines.append(f"device: {'CPU' if gpu is None else f'GPU {gpu} for rank 0'} ({why})")

    # Each rank would tell of its CPU's instructions, and that it finds no GPU driver.
    default("TF_CPP_MIN_LOG_LEVEL", 3 if gpu is None else 2)
    if Path(sys.prefix, "lib", "libmpi.so").exists():
        # Open MPI from its wheel looks where it was built, unless mpirun starts it.
        environ.setdefault("OPAL_PREFIX", sys.prefix)
    return lines


def _ranges(cores: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
