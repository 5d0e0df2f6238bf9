"""What a run was asked to do: one frozen dataclass a script, one field a flag.

The names, meanings and defaults of the flags that TensorFlow 1's example had are kept.
"""

import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar, TypeVar

from replica import UsageError, flags, policy, report
from replica.fetch import MIRRORS
from replica.flags import COUNT, COUNT_OR_0, SWITCH, Straggler

_data = partial(flags.flag, "data")
_training = partial(flags.flag, "model and training")
_evaluation = partial(flags.flag, "evaluation")
_placement = partial(flags.flag, "placement")
_processes = partial(flags.flag, "several processes")


@dataclass(frozen=True)
class Options:
    """The flags of both scripts."""

    data_dir: str | None = _data(
        None,
        flags.FOLDER,
        "folder with the four IDX files (plain or .gz) or mnist.npz; if it holds none, "
        "the full MNIST is fetched into it (default: $REPLICA_DATA_DIR, or else the "
        "sample in the repository)",
    )
    download_only: bool = _data(
        False, SWITCH, "fetch the data into --data_dir, then stop"
    )
    mirrors: str = _data(
        ",".join(MIRRORS),
        flags.ADDRESSES,
        "folders to fetch the four .gz files from, tried in order",
    )
    num_classes: int = _data(10, flags.CLASSES, "labels are 0 to this less 1")
    hidden_units: int = _training(100, COUNT, "units in the hidden layer")
    train_steps: int = _training(200, COUNT, "updates to make")
    batch_size: int = _training(100, COUNT, "samples per replica or worker")
    learning_rate: float = _training(0.01, flags.RATE, "of the optimizer")
    optimizer: str = _training("adam", ("adam", "sgd"), "how a gradient is used")
    momentum: float = _training(0.0, flags.MOMENTUM, "of --optimizer sgd")
    seed: int = _training(
        0, flags.SEED, "draws the initial values and the order of samples"
    )
    eval_every: int = _evaluation(
        100, COUNT_OR_0, "steps between evaluations; 0 evaluates at the end only"
    )
    target_accuracy: float | None = _evaluation(
        None,
        flags.FRACTION,
        "stop at the first evaluation with this validation accuracy "
        "(default: make all steps)",
    )
    num_gpus: int = _placement(
        1, COUNT_OR_0, "GPUs of each machine, shared out by local rank; 0 uses the CPU"
    )
    stall_timeout: int = _processes(
        120,
        flags.SECONDS,
        "end the job when a rank has kept the others waiting this long; 0 never does",
    )
    compression: str = _processes(
        "none", ("none", "fp16"), "send numbers as they are or in half precision"
    )
    straggler: Straggler | None = _processes(  # noqa: RUF009
        None,
        flags.STRAGGLER,
        "make a rank that trains wait so long at every step, as a slow machine would "
        "(default: none waits)",
    )

    def check_samples(self, samples: int, replicas: int, batches: int) -> None:
        """Refuse a training set that is smaller than what one update takes."""
        needed = batches * self.batch_size
        if samples < needed:
            raise UsageError(
                f"expected at least {needed} training samples for one update "
                f"({replicas} replicas x {batches // replicas} batches x batch_size "
                f"{self.batch_size}), found {samples}"
            )

    def next_evaluation(self, step: int) -> int:
        """The first step after ``step`` to evaluate at; the last one always is."""
        every = self.eval_every or self.train_steps
        return min((step // every + 1) * every, self.train_steps)

    def check(self) -> None:
        """Refuse values that do not fit together.

        Raises:
            UsageError: two do not (exit code 2).
        """
        if self.download_only and self.data_dir is None:
            raise UsageError("--download_only: expected --data_dir too, found none")
        if self.momentum and self.optimizer != "sgd":
            raise UsageError("--momentum: expected --optimizer sgd too")

    def check_straggler(self, trainers: range) -> None:
        """Refuse a straggler that is none of the ranks that train."""
        late = self.straggler
        if late and late.rank not in trainers:
            where = f"a rank that trains, {trainers[0]} to {trainers[-1]}"
            raise UsageError(f"--straggler: expected {where}, found {late.rank}")

    def delay(self, rank: int) -> float:
        """Seconds that ``rank`` waits at every step."""
        late = self.straggler and self.straggler.rank == rank
        return self.straggler.milliseconds / 1000 if late else 0.0

    def identity(self) -> dict:
        """What must be equal on all ranks: the options and the program itself."""
        return asdict(self) | {"code": report.code_version()}


@dataclass(frozen=True)
class AllreduceOptions(Options):
    """The flags of train.py."""

    PROG: ClassVar[str] = "train.py"
    LAUNCH: ClassVar[str] = "horovodrun -np 4 python train.py"
    LAUNCH_ON_HOSTS: ClassVar[str] = (
        "horovodrun -np 4 -H host1:2,host2:2 python train.py"
    )
    DESCRIPTION: ClassVar[str] = (
        "Train a small network on MNIST with synchronous replicas: every rank computes "
        "a gradient, Horovod averages them."
    )

    lr_scaling: str = _training(
        "none",
        ("none", "sqrt", "linear"),
        "multiply the rate by 1, by the square root of, or by the number of batches "
        "that one update averages",
    )
    clip_norm: float = _training(
        0.0, flags.NORM, "scale a longer averaged gradient to this norm; 0 does not"
    )
    deterministic: bool = _training(
        False, SWITCH, "the same bytes from the same command"
    )
    sync_replicas: bool = _processes(
        True, SWITCH, "always on here: ps_mode.py is the asynchronous one"
    )
    replicas_to_aggregate: int | None = _processes(
        None,
        COUNT,
        "batches averaged by one update, a multiple of the replicas "
        "(default: one from each)",
    )

    def check(self) -> None:  # noqa: D102
        super().check()
        if not self.sync_replicas:
            raise UsageError(
                "--no-sync_replicas: train.py is always synchronous; for asynchronous "
                "training run mpirun -np 4 python ps_mode.py"
            )

    def passes_per_update(self, replicas: int) -> int:
        """How many gradients a replica accumulates before each update.

        Raises:
            UsageError: ``replicas_to_aggregate`` is not a multiple of ``replicas``.
        """
        wanted = self.replicas_to_aggregate or replicas
        if wanted % replicas:
            raise UsageError(
                f"--replicas_to_aggregate: expected a multiple of the {replicas} "
                f"replicas, found {wanted}; to go on without the slowest replicas "
                f"run ps_mode.py --sync_replicas --replicas_to_aggregate {wanted}"
            )
        return wanted // replicas


@dataclass(frozen=True)
class ServerOptions(Options):
    """The flags of ps_mode.py."""

    PROG: ClassVar[str] = "ps_mode.py"
    LAUNCH: ClassVar[str] = "mpirun -np 4 python ps_mode.py"
    LAUNCH_ON_HOSTS: ClassVar[str] = (
        "mpirun -np 4 -H host1:2,host2:2 python ps_mode.py (--num_ps sets how many of "
        "them are servers)"
    )
    DESCRIPTION: ClassVar[str] = (
        "Train a small network on MNIST with a parameter server: rank 0 holds the "
        "parameters, every other rank sends it gradients."
    )

    staleness_lr: bool = _training(
        True,
        SWITCH,
        "divide the rate by 1 + the gradient's staleness, unless --sync_replicas",
    )
    num_ps: int = _processes(
        1, COUNT, "the first ranks serve, each a slice of the parameters"
    )
    sync_replicas: bool = _processes(
        False, SWITCH, "average gradients of the same parameters"
    )
    replicas_to_aggregate: int | None = _processes(
        None,
        COUNT,
        "with --sync_replicas: gradients averaged by one update; later ones are "
        "dropped (default: as many as workers)",
    )
    max_staleness: int | None = _processes(
        None,
        COUNT_OR_0,
        "hold a worker back that is more than so many updates ahead of the slowest "
        "(default: nobody is held back)",
    )
    push_every: int = _processes(
        1, COUNT, "batches that a worker averages before it sends"
    )
    overlap: bool = _processes(
        False,
        SWITCH,
        "compute the next gradient while the answer to the last is under way, on "
        "parameters that miss it: one more update of staleness",
    )

    @property
    def copies(self) -> int:
        """How many messages may be under way to a worker, and from it."""
        return 1 + self.overlap

    @property
    def wire_type(self) -> str:
        """The type of the numbers in a message."""
        return "<f2" if self.compression == "fp16" else "<f4"

    def check(self) -> None:  # noqa: D102
        super().check()
        bounded, sync = self.max_staleness is not None, self.sync_replicas
        wrong = None
        if self.replicas_to_aggregate and not sync:
            wrong = "--replicas_to_aggregate: expected --sync_replicas too"
        if bounded and sync:
            wrong = "--max_staleness: expected --no-sync_replicas, which is never stale"
        if self.overlap and sync:
            wrong = "--overlap: expected --no-sync_replicas, or all would be late"
        if self.overlap and bounded:
            wrong = "--overlap: expected no --max_staleness, which holds workers back"
        if wrong:
            raise UsageError(wrong)

    def check_ranks(self, ranks: int) -> int:
        """The number of servers, if ``ranks`` are enough for them and a worker.

        Raises:
            UsageError: they are not.
        """
        if ranks <= self.num_ps:
            raise UsageError(
                f"expected at least {self.num_ps + 1} ranks, {self.num_ps} to serve "
                f"(--num_ps) and one to train, found {ranks}: "
                f"mpirun -np {self.num_ps + 2} python ps_mode.py"
            )
        self.check_straggler(range(self.num_ps, ranks))
        return self.num_ps

    def policy(self, workers: int) -> policy.Asynchronous | policy.Synchronous:
        """The policy that these options ask for."""
        if self.sync_replicas:
            return policy.Synchronous(workers, self.replicas_to_aggregate or workers)
        return policy.Asynchronous(workers, self.max_staleness)

    def rate(self, staleness: int) -> float:
        """The learning rate for a gradient of ``staleness``."""
        if self.staleness_lr and not self.sync_replicas:
            return policy.scaled_rate(self.learning_rate, staleness)
        return self.learning_rate


Kind = TypeVar("Kind", bound=Options)


def parse(argv: list[str] | None, kind: type[Kind]) -> Kind:
    """The options of a script that ``argv`` (default: the command line) gives.

    Raises:
        UsageError: a flag or value is not valid (exit code 2).
        SystemExit: ``--help`` was asked for.
    """
    argv = sys.argv[1:] if argv is None else argv
    if folder := os.environ.get("REPLICA_DATA_DIR"):
        argv = [f"--data_dir={folder}", *argv]
    options = flags.read(kind, argv)
    options.check()
    return options
