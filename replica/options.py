"""Command-line flags -> one frozen dataclass, checked before TensorFlow is imported.

The names, meanings and defaults of the flags that TensorFlow 1's example had are kept.
Every flag may be written with hyphens too.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

from replica.data import MIRRORS, Dataset
from replica.report import Refusal

# Flags of the seed's program that the launcher has replaced, and what to do instead.
RETIRED = {
    "job_name": "the launcher gives each process its role: "
    "horovodrun -np 4 python train.py, or mpirun -np 4 python ps_mode.py",
    "task_index": "the launcher numbers the processes: "
    "horovodrun -np 4 python train.py, or mpirun -np 4 python ps_mode.py",
    "ps_hosts": "name the hosts to the launcher: "
    "mpirun --hostfile FILE -np 4 python ps_mode.py",
    "worker_hosts": "name the hosts to the launcher: "
    "horovodrun -np 4 -H host1:2,host2:2 python train.py",
    "existing_servers": "nothing runs beforehand, the launcher starts every process: "
    "horovodrun -np 4 python train.py",
}


@dataclass(frozen=True)
class Options:
    """What a run was asked to do; the defaults here are the defaults of the flags."""

    data_dir: str | None = None
    download_only: bool = False
    mirrors: tuple[str, ...] = MIRRORS
    num_classes: int = 10
    hidden_units: int = 100
    train_steps: int = 200
    batch_size: int = 100
    learning_rate: float = 0.01
    lr_scaling: str = "none"
    clip_norm: float = 0.0
    seed: int = 0
    deterministic: bool = False
    sync_replicas: bool = True
    replicas_to_aggregate: int | None = None
    compression: str = "none"
    stall_timeout: int = 120
    eval_every: int = 100
    target_accuracy: float | None = None
    num_gpus: int = 1

    def passes_per_update(self, replicas: int) -> int:
        """How many gradients a replica accumulates before each update.

        Raises:
            Refusal: ``replicas_to_aggregate`` is not a multiple of ``replicas``.
        """
        wanted = self.replicas_to_aggregate or replicas
        if wanted % replicas:
            raise Refusal(
                f"--replicas_to_aggregate: expected a multiple of the {replicas} "
                f"replicas, found {wanted}; to go on without the slowest replicas "
                f"run ps_mode.py --sync_replicas --replicas_to_aggregate {wanted}",
                code=2,
            )
        return wanted // replicas

    def check_samples(self, samples: int, replicas: int, batches: int) -> None:
        """Refuse a training set that is smaller than what one update takes."""
        needed = batches * self.batch_size
        if samples < needed:
            raise Refusal(
                f"expected at least {needed} training samples for one update "
                f"({replicas} replicas x {batches // replicas} batches x batch_size "
                f"{self.batch_size}), found {samples}",
                code=2,
            )

    def next_evaluation(self, step: int) -> int:
        """The first step after ``step`` to evaluate at; the last one always is."""
        every = self.eval_every or self.train_steps
        return min((step // every + 1) * every, self.train_steps)

    def scaled_learning_rate(self, batches: int) -> float:
        """The rate for an update that averages ``batches`` batches.

        Linear: Goyal et al., "Accurate, Large Minibatch SGD", 2017. Square root:
        Krizhevsky, "One weird trick for parallelizing CNNs", 2014.
        """
        factors = {"none": 1.0, "sqrt": math.sqrt(batches), "linear": float(batches)}
        return self.learning_rate * factors[self.lr_scaling]

    def describe(
        self, dataset: Dataset, size: int, replicas: int, batches: int, rate: float
    ) -> list[str]:
        """What these options come to for ``replicas`` replicas, in lines."""
        samples = len(dataset.train)
        batch = batches * self.batch_size
        told = {k: v for k, v in asdict(self).items() if k != "mirrors"}
        return [
            f"data: {dataset.source}: {samples} training, {len(dataset.validation)} "
            f"validation, {len(dataset.test)} test samples",
            f"model: {self.hidden_units} hidden units, {size} parameters, "
            f"seed {self.seed}",
            f"replicas: {replicas}, each {self.batch_size} samples x "
            f"{batches // replicas} per update; global batch {batch}, "
            f"{samples / batch:.2f} updates per epoch, "
            f"about {samples / replicas:.0f} samples per replica and epoch",
            f"learning rate: {rate:g} (--learning_rate {self.learning_rate:g}, "
            f"--lr_scaling {self.lr_scaling}, {batches} batches per update)",
            f"options: {' '.join(f'{k}={v}' for k, v in told.items())}",
        ]


def parse(argv: list[str] | None, prog: str) -> Options:
    """The options that ``argv`` (default: the command line) gives.

    Raises:
        Refusal: a flag or value is not valid (exit code 2).
        SystemExit: ``--help`` was asked for and printed.
    """
    argv = sys.argv[1:] if argv is None else argv
    options = Options(**vars(_parser(prog).parse_args(_respelled(argv))))
    if not options.sync_replicas:
        raise Refusal(
            "--no-sync_replicas: train.py is always synchronous; for asynchronous "
            "training run mpirun -np 4 python ps_mode.py",
            code=2,
        )
    if options.download_only and options.data_dir is None:
        raise Refusal("--download_only: expected --data_dir too, found none", code=2)
    return options


def disagreement(all_options: list[dict]) -> str | None:
    """Where the options of some rank differ from those of rank 0, or None."""
    for rank, theirs in enumerate(all_options):
        for name, ours in all_options[0].items():
            if theirs.get(name) != ours:
                return (
                    f"ranks disagree on {name}: {ours} (rank 0), "
                    f"{theirs.get(name)} (rank {rank})"
                )
    return None


class _Parser(argparse.ArgumentParser):
    """Errors are one line, told once for the whole job by the caller."""

    def error(self, message: str) -> None:
        raise Refusal(f"{message} (see --help)", code=2)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str:
        if action.default is None:
            return action.help  # the text itself says what happens without the flag
        return super()._get_help_string(action)


class _Retired(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        raise Refusal(
            f"{option_string} is a flag of the TensorFlow 1 program; here "
            f"{RETIRED[self.dest]}",
            code=2,
        )


def _respelled(argv: list[str]) -> list[str]:
    """Hyphens in names as underscores; --switch=true and =false as TensorFlow 1 had."""
    switches = {f"--{f.name}" for f in fields(Options) if f.type is bool}

    def respell(argument: str) -> str:
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            return argument
        name = "--" + name[2:].replace("-", "_")
        if name in switches and value.lower() in ("true", "1"):
            return name
        if name in switches and value.lower() in ("false", "0"):
            return f"--no-{name[2:]}"
        return name.replace("--no_", "--no-") + equals + value

    return [respell(argument) for argument in argv]


def _number(kind: type, accept: Callable[[float], bool], expected: str) -> Callable:
    """A type for argparse: a finite number that ``accept`` takes."""

    def convert(text: str):
        try:
            value = kind(text)
            if math.isfinite(value) and accept(value):
                return value
        except (ValueError, OverflowError):
            pass
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text!r}")

    return convert


def _parser(prog: str) -> argparse.ArgumentParser:
    default = {field.name: field.default for field in fields(Options)}
    count = _number(int, lambda n: n >= 1, "a whole number of at least 1")
    count_or_0 = _number(int, lambda n: n >= 0, "a whole number of at least 0")
    positive = _number(float, lambda x: x > 0, "a number above 0")
    positive_or_0 = _number(float, lambda x: x >= 0, "a number of at least 0")
    fraction = _number(float, lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    classes = _number(int, lambda n: 2 <= n <= 256, "a whole number from 2 to 256")
    switch = argparse.BooleanOptionalAction

    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        formatter_class=_Formatter,
        description="Train a small network on MNIST with synchronous replicas: "
        "every rank computes a gradient, Horovod averages them.",
        epilog="Start it alone (python train.py) or with a launcher "
        "(horovodrun -np 4 python train.py).",
    )

    def flag(group, name: str, help: str, **how) -> None:  # noqa: A002
        group.add_argument(f"--{name}", default=default[name], help=help, **how)

    data = parser.add_argument_group("data")
    flag(
        data,
        "data_dir",
        "folder with the four IDX files (plain or .gz) or mnist.npz; the full MNIST "
        "is fetched into it if it holds none (default: the sample in the repository)",
        metavar="DIR",
    )
    flag(
        data,
        "download_only",
        "fetch the data into --data_dir, then stop",
        action=switch,
    )
    flag(
        data,
        "mirrors",
        "folders to fetch the four .gz files from, tried in order",
        type=lambda text: tuple(text.split(",")),
        metavar="URL[,URL]",
    )
    flag(data, "num_classes", "labels are 0 to this less 1", type=classes, metavar="N")

    training = parser.add_argument_group("model and training")
    flag(training, "hidden_units", "units in the hidden layer", type=count, metavar="N")
    flag(training, "train_steps", "updates to make", type=count, metavar="N")
    flag(training, "batch_size", "samples per replica", type=count, metavar="N")
    flag(training, "learning_rate", "Adam's rate", type=positive, metavar="RATE")
    flag(
        training,
        "lr_scaling",
        "multiply the rate by 1, the square root of, or the number of batches that an "
        "update averages",
        choices=("none", "sqrt", "linear"),
    )
    flag(
        training,
        "clip_norm",
        "scale a longer averaged gradient to this norm; 0 does not",
        type=positive_or_0,
        metavar="NORM",
    )
    flag(
        training,
        "seed",
        "draws the initial values and the order of samples",
        type=count_or_0,
        metavar="N",
    )
    flag(
        training,
        "deterministic",
        "the same bytes from the same command",
        action=switch,
    )

    replicas = parser.add_argument_group("replicas")
    flag(
        replicas,
        "sync_replicas",
        "always on here: ps_mode.py is the asynchronous one",
        action=switch,
    )
    flag(
        replicas,
        "replicas_to_aggregate",
        "batches averaged per update, a multiple of the replicas (default: one each)",
        type=count,
        metavar="N",
    )
    flag(
        replicas,
        "compression",
        "send gradients as they are or in half precision",
        choices=("none", "fp16"),
    )
    flag(
        replicas,
        "stall_timeout",
        "end the job when a rank has kept the others waiting this long; 0 never does",
        type=count_or_0,
        metavar="SECONDS",
    )

    evaluation = parser.add_argument_group("evaluation")
    flag(
        evaluation,
        "eval_every",
        "steps between evaluations; 0 evaluates at the end only",
        type=count_or_0,
        metavar="N",
    )
    flag(
        evaluation,
        "target_accuracy",
        "stop at the first evaluation with this validation accuracy "
        "(default: train all steps)",
        type=fraction,
        metavar="FRACTION",
    )

    placement = parser.add_argument_group("placement")
    flag(
        placement,
        "num_gpus",
        "GPUs of each machine, shared out by local rank; 0 uses the CPU",
        type=count_or_0,
        metavar="N",
    )
    for name in RETIRED:
        parser.add_argument(
            f"--{name}",
            nargs="?",
            action=_Retired,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    return parser
