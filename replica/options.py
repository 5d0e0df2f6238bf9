"""Command-line flags -> one frozen dataclass, checked before TensorFlow is imported.

The names, meanings and defaults of the flags that TensorFlow 1's example had are kept.
Every flag may be written with hyphens too.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from replica import JobError, policy, report
from replica.data import Sizes
from replica.fetch import MIRRORS

# Flags of the seed's program that the launcher has replaced, and what to do instead.
RETIRED = {
    "job_name": "the launcher starts every process: {here}",
    "task_index": "the launcher numbers the processes: {here}",
    "ps_hosts": "name the hosts to the launcher: {hosts}",
    "worker_hosts": "name the hosts to the launcher: {hosts}",
    "existing_servers": "nothing runs beforehand, the launcher starts every process: "
    "{here}",
}

FLOAT32 = np.finfo(np.float32)
RANGES = {int: (1, 2**31 - 1), float: (float(FLOAT32.tiny), float(FLOAT32.max))}


def _number(kind: type, accept: Callable[[float], bool], expected: str) -> Callable:
    """A type for argparse: a number that ``accept`` takes and 32 bits hold."""

    def convert(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not accept(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")
        least, most = RANGES[kind]
        if value and not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a number from {least} to {most}, found {text!r}"
            )
        return value

    return convert


COUNT = _number(int, lambda n: n >= 1, "a whole number of at least 1")
COUNT_OR_0 = _number(int, lambda n: n >= 0, "a whole number of at least 0")
CLASSES = _number(int, lambda n: 2 <= n <= 256, "a whole number from 2 to 256")
SEED = _number(int, lambda n: 0 <= n < 2**31, "a whole number from 0 to 2147483647")
POSITIVE = _number(float, lambda x: x > 0, "a number above 0")
POSITIVE_OR_0 = _number(float, lambda x: x >= 0, "a number of at least 0")
MOMENTUM = _number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1")
FRACTION = _number(float, lambda x: 0 < x <= 1, "a number above 0 and at most 1")


def _folder(text: str) -> str:
    """A type for argparse: "" would mean the folder that one happens to be in."""
    if not text:
        raise argparse.ArgumentTypeError(f"expected a folder, found {text!r}")
    return text


def _addresses(text: str) -> str:
    """A type for argparse: addresses of folders, with commas between."""
    for address in text.split(","):
        if not address.startswith(("http://", "https://")):
            raise argparse.ArgumentTypeError(
                f"expected http:// or https:// addresses, found {address!r}"
            )
    return text


class Straggler(NamedTuple):
    """The rank that is made to wait, and for how long at every step."""

    rank: int
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.rank}:{self.milliseconds:g}"


def _straggler(text: str) -> Straggler:
    """A type for argparse: RANK:MILLISECONDS."""
    rank, _, milliseconds = text.partition(":")
    try:
        return Straggler(COUNT_OR_0(rank), POSITIVE_OR_0(milliseconds))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected RANK:MILLISECONDS, as 1:50, found {text!r}"
        ) from None


def _flag(group: str, default, help: str, **how):  # noqa: A002
    """A field of Options, with what argparse is told of its flag."""
    if isinstance(default, bool):
        how["action"] = argparse.BooleanOptionalAction
    return field(default=default, metadata={"group": group, "help": help, **how})


@dataclass(frozen=True)
class Options:
    """What a run was asked to do: one field a flag, with the flag's default.

    These are the flags of both scripts.
    """

    data_dir: str | None = _flag(
        "data",
        None,
        "folder with the four IDX files (plain or .gz) or mnist.npz; if it holds none, "
        "the full MNIST is fetched into it (default: $REPLICA_DATA_DIR, or else the "
        "sample in the repository)",
        type=_folder,
        metavar="DIR",
    )
    download_only: bool = _flag(
        "data", False, "fetch the data into --data_dir, then stop"
    )
    mirrors: str = _flag(
        "data",
        ",".join(MIRRORS),
        "folders to fetch the four .gz files from, tried in order",
        type=_addresses,
        metavar="URL[,URL]",
    )
    num_classes: int = _flag(
        "data", 10, "labels are 0 to this less 1", type=CLASSES, metavar="N"
    )
    hidden_units: int = _flag(
        "model and training", 100, "units in the hidden layer", type=COUNT, metavar="N"
    )
    train_steps: int = _flag(
        "model and training", 200, "updates to make", type=COUNT, metavar="N"
    )
    batch_size: int = _flag(
        "model and training",
        100,
        "samples per replica or worker",
        type=COUNT,
        metavar="N",
    )
    learning_rate: float = _flag(
        "model and training", 0.01, "of the optimizer", type=POSITIVE, metavar="RATE"
    )
    optimizer: str = _flag(
        "model and training", "adam", "how a gradient is used", choices=("adam", "sgd")
    )
    momentum: float = _flag(
        "model and training",
        0.0,
        "of --optimizer sgd",
        type=MOMENTUM,
        metavar="FRACTION",
    )
    seed: int = _flag(
        "model and training",
        0,
        "draws the initial values and the order of samples",
        type=SEED,
        metavar="N",
    )
    eval_every: int = _flag(
        "evaluation",
        100,
        "steps between evaluations; 0 evaluates at the end only",
        type=COUNT_OR_0,
        metavar="N",
    )
    target_accuracy: float | None = _flag(
        "evaluation",
        None,
        "stop at the first evaluation with this validation accuracy "
        "(default: make all steps)",
        type=FRACTION,
        metavar="FRACTION",
    )
    num_gpus: int = _flag(
        "placement",
        1,
        "GPUs of each machine, shared out by local rank; 0 uses the CPU",
        type=COUNT_OR_0,
        metavar="N",
    )
    stall_timeout: int = _flag(
        "several processes",
        120,
        "end the job when a rank has kept the others waiting this long; 0 never does",
        type=COUNT_OR_0,
        metavar="SECONDS",
    )
    compression: str = _flag(
        "several processes",
        "none",
        "send numbers as they are or in half precision",
        choices=("none", "fp16"),
    )
    straggler: Straggler | None = _flag(
        "several processes",
        None,
        "make a rank that trains wait so long at every step, as a slow machine would "
        "(default: none waits)",
        type=_straggler,
        metavar="RANK:MILLISECONDS",
    )

    def check_samples(self, samples: int, replicas: int, batches: int) -> None:
        """Refuse a training set that is smaller than what one update takes."""
        needed = batches * self.batch_size
        if samples < needed:
            raise JobError(
                f"expected at least {needed} training samples for one update "
                f"({replicas} replicas x {batches // replicas} batches x batch_size "
                f"{self.batch_size}), found {samples}",
                code=2,
            )

    def next_evaluation(self, step: int) -> int:
        """The first step after ``step`` to evaluate at; the last one always is."""
        every = self.eval_every or self.train_steps
        return min((step // every + 1) * every, self.train_steps)

    def check(self) -> None:
        """Refuse values that do not fit together.

        Raises:
            JobError: two do not (exit code 2).
        """
        if self.download_only and self.data_dir is None:
            raise JobError(
                "--download_only: expected --data_dir too, found none", code=2
            )
        if self.momentum and self.optimizer != "sgd":
            raise JobError("--momentum: expected --optimizer sgd too", code=2)

    def check_straggler(self, trainers: range) -> None:
        """Refuse a straggler that is none of the ranks that train."""
        if self.straggler and self.straggler.rank not in trainers:
            raise JobError(
                f"--straggler: expected a rank that trains, {trainers[0]} to "
                f"{trainers[-1]}, found {self.straggler.rank}",
                code=2,
            )

    def delay(self, rank: int) -> float:
        """Seconds that ``rank`` waits at every step."""
        late = self.straggler and self.straggler.rank == rank
        return self.straggler.milliseconds / 1000 if late else 0.0

    def identity(self) -> dict:
        """What must be equal on all ranks: the options and the program itself."""
        return asdict(self) | {"code": report.code_version()}

    def _describe(self, sizes: Sizes, parameters: int, how: list[str]) -> list[str]:
        """What these options come to, in lines; ``how`` is the script's own part."""
        told = {k: v for k, v in asdict(self).items() if k != "mirrors"}
        return [
            f"data: {sizes.source}: {sizes.train} training, {sizes.validation} "
            f"validation, {sizes.test} test samples",
            f"model: {self.hidden_units} hidden units, {parameters} parameters, "
            f"seed {self.seed}",
            *how,
            f"options: {' '.join(f'{k}={v}' for k, v in told.items())}",
        ]


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

    lr_scaling: str = _flag(
        "model and training",
        "none",
        "multiply the rate by 1, by the square root of, or by the number of batches "
        "that one update averages",
        choices=("none", "sqrt", "linear"),
    )
    clip_norm: float = _flag(
        "model and training",
        0.0,
        "scale a longer averaged gradient to this norm; 0 does not",
        type=POSITIVE_OR_0,
        metavar="NORM",
    )
    deterministic: bool = _flag(
        "model and training", False, "the same bytes from the same command"
    )
    sync_replicas: bool = _flag(
        "several processes", True, "always on here: ps_mode.py is the asynchronous one"
    )
    replicas_to_aggregate: int | None = _flag(
        "several processes",
        None,
        "batches averaged by one update, a multiple of the replicas "
        "(default: one from each)",
        type=COUNT,
        metavar="N",
    )

    def check(self) -> None:  # noqa: D102
        super().check()
        if not self.sync_replicas:
            raise JobError(
                "--no-sync_replicas: train.py is always synchronous; for asynchronous "
                "training run mpirun -np 4 python ps_mode.py",
                code=2,
            )

    def passes_per_update(self, replicas: int) -> int:
        """How many gradients a replica accumulates before each update.

        Raises:
            JobError: ``replicas_to_aggregate`` is not a multiple of ``replicas``.
        """
        wanted = self.replicas_to_aggregate or replicas
        if wanted % replicas:
            raise JobError(
                f"--replicas_to_aggregate: expected a multiple of the {replicas} "
                f"replicas, found {wanted}; to go on without the slowest replicas "
                f"run ps_mode.py --sync_replicas --replicas_to_aggregate {wanted}",
                code=2,
            )
        return wanted // replicas

    def scaled_learning_rate(self, batches: int) -> float:
        """The rate for an update that averages ``batches`` batches.

        Linear: Goyal et al., "Accurate, Large Minibatch SGD", 2017. Square root:
        Krizhevsky, "One weird trick for parallelizing CNNs", 2014.
        """
        factors = {"none": 1.0, "sqrt": math.sqrt(batches), "linear": float(batches)}
        rate = self.learning_rate * factors[self.lr_scaling]
        most = RANGES[float][1]
        if rate > most:
            raise JobError(
                f"--lr_scaling {self.lr_scaling}: expected a rate of at most {most}, "
                f"found {rate}",
                code=2,
            )
        return rate

    def describe(
        self, sizes: Sizes, size: int, replicas: int, batches: int, rate: float
    ) -> list[str]:
        """What these options come to for ``replicas`` replicas, in lines."""
        batch = batches * self.batch_size
        return self._describe(
            sizes,
            size,
            [
                f"replicas: {replicas}, each {self.batch_size} samples x "
                f"{batches // replicas} per update; global batch {batch}, "
                f"{sizes.train / batch:.2f} updates per epoch, "
                f"about {sizes.train / replicas:.0f} samples per replica and epoch",
                f"learning rate: {rate:g} (--learning_rate {self.learning_rate:g}, "
                f"--lr_scaling {self.lr_scaling}, batches per update: {batches})",
            ],
        )


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

    staleness_lr: bool = _flag(
        "model and training",
        True,
        "divide the rate by 1 + the gradient's staleness, unless --sync_replicas",
    )
    num_ps: int = _flag(
        "several processes",
        1,
        "the first ranks serve, each a slice of the parameters",
        type=COUNT,
        metavar="N",
    )
    sync_replicas: bool = _flag(
        "several processes", False, "average gradients of the same parameters"
    )
    replicas_to_aggregate: int | None = _flag(
        "several processes",
        None,
        "with --sync_replicas: gradients averaged by one update; later ones are "
        "dropped (default: as many as workers)",
        type=COUNT,
        metavar="N",
    )
    max_staleness: int | None = _flag(
        "several processes",
        None,
        "hold a worker back that is more than so many updates ahead of the slowest "
        "(default: nobody is held back)",
        type=COUNT_OR_0,
        metavar="N",
    )
    push_every: int = _flag(
        "several processes",
        1,
        "batches that a worker averages before it sends",
        type=COUNT,
        metavar="N",
    )

    overlap: bool = _flag(
        "several processes",
        False,
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
        refused = [
            (
                self.replicas_to_aggregate and not self.sync_replicas,
                "--replicas_to_aggregate",
                "--sync_replicas too",
            ),
            (
                self.max_staleness is not None and self.sync_replicas,
                "--max_staleness",
                "--no-sync_replicas: synchronous gradients are never stale",
            ),
            (
                self.overlap and self.sync_replicas,
                "--overlap",
                "--no-sync_replicas: its gradients would always be late",
            ),
            (
                self.overlap and self.max_staleness is not None,
                "--overlap",
                "no --max_staleness: a worker held back has none under way",
            ),
        ]
        for wrong, flag, expected in refused:
            if wrong:
                raise JobError(f"{flag}: expected {expected}", code=2)

    def check_ranks(self, ranks: int) -> int:
        """The number of servers, if ``ranks`` are enough for them and a worker.

        Raises:
            JobError: they are not.
        """
        if ranks <= self.num_ps:
            raise JobError(
                f"expected at least {self.num_ps + 1} ranks, {self.num_ps} to serve "
                f"(--num_ps) and one to train, found {ranks}: "
                f"mpirun -np {self.num_ps + 2} python ps_mode.py",
                code=2,
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

    def describe(self, sizes: Sizes, size: int, workers: int) -> list[str]:
        """What these options come to for ``workers`` workers, in lines."""
        batch = self.push_every * self.batch_size
        if self.sync_replicas:
            wanted = self.replicas_to_aggregate or workers
            how = f"the first {wanted} gradients of a version are averaged"
            batch *= wanted
        elif self.max_staleness is None:
            how = "each gradient is applied on arrival"
        else:
            how = f"no worker is more than {self.max_staleness} updates ahead"
        scaled = self.rate(1) < self.learning_rate
        return self._describe(
            sizes,
            size,
            [
                f"servers: {self.num_ps}; workers: {workers}, each {self.batch_size} "
                f"samples x {self.push_every} per gradient; {how}; an update takes "
                f"{batch} samples, {sizes.train / batch:.2f} updates per epoch",
                f"learning rate: {self.learning_rate:g}"
                + (" / (1 + staleness)" if scaled else ""),
            ],
        )


Kind = TypeVar("Kind", bound=Options)


def parse(argv: list[str] | None, kind: type[Kind]) -> Kind:
    """The options of a script that ``argv`` (default: the command line) gives.

    Raises:
        JobError: a flag or value is not valid (exit code 2).
        SystemExit: ``--help`` was asked for.
    """
    argv = sys.argv[1:] if argv is None else argv
    if folder := os.environ.get("REPLICA_DATA_DIR"):
        argv = [f"--data_dir={folder}", *argv]
    options = kind(**vars(_parser(kind).parse_args(_respelled(argv, kind))))
    options.check()
    return options


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


class _Parser(argparse.ArgumentParser):
    """Errors are one line, told once for the whole job by the caller."""

    def error(self, message: str) -> None:
        raise JobError(f"{message} (see --help)", code=2)

    def print_help(self, file=None) -> None:
        report.out(self.format_help())


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default unless it is none: then the text says what happens."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return (
            action.help if action.default is None else super()._get_help_string(action)
        )


def _respelled(argv: list[str], kind: type[Options]) -> list[str]:
    """Hyphens in names as underscores; --switch=true and =false as TensorFlow 1 had."""
    switches = {f"--{f.name}" for f in fields(kind) if f.type is bool}

    def respell(argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            return argument
        name = "--" + name[2:].replace("-", "_")
        if name in switches and value.lower() in ("true", "1"):
            return name
        if name in switches and value.lower() in ("false", "0"):
            return f"--no-{name[2:]}"
        if equals and name.replace("--no_", "--") in switches:
            raise JobError(f"{name}: expected true or false, found {value!r}", code=2)
        return name.replace("--no_", "--no-") + equals + value

    return [respell(argument) for argument in argv]


def _parser(kind: type[Options]) -> argparse.ArgumentParser:
    class Retired(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None):
            advice = RETIRED[self.dest].format(
                here=kind.LAUNCH, hosts=kind.LAUNCH_ON_HOSTS
            )
            raise JobError(
                f"{option_string} is a flag of the TensorFlow 1 program: here {advice}",
                code=2,
            )

    parser = _Parser(
        prog=kind.PROG,
        allow_abbrev=False,
        formatter_class=_Formatter,
        description=kind.DESCRIPTION,
        epilog=f"Start it with a launcher: {kind.LAUNCH}",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in fields(kind):
        how = dict(option.metadata)
        title = how.pop("group")
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(f"--{option.name}", default=option.default, **how)
    for name in RETIRED:
        parser.add_argument(
            f"--{name}",
            nargs="?",
            action=Retired,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    return parser
