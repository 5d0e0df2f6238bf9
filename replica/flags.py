"""A frozen dataclass -> command-line flags, with errors of one line.

One field is one flag: ``flag`` says what argparse is told of it. Every flag may be
written with hyphens too, and a switch as TensorFlow 1 had it, ``--switch=true``.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np

from replica import UsageError, report

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


@dataclass(frozen=True)
class Number:
    """A type for argparse: a number that ``accept`` takes and 32 bits hold."""

    kind: type
    accept: Callable[[float], bool]
    expected: str
    metavar: str = "N"

    def __call__(self, text: str) -> float:
        """The number that ``text`` is."""
        try:
            value = self.kind(text)
        except ValueError:
            value = math.nan
        if not self.accept(value):
            raise argparse.ArgumentTypeError(
                f"expected {self.expected}, found {text!r}"
            )
        least, most = RANGES[self.kind]
        if value and not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a number from {least} to {most}, found {text!r}"
            )
        return value


COUNT = Number(int, lambda n: n >= 1, "a whole number of at least 1")
COUNT_OR_0 = Number(int, lambda n: n >= 0, "a whole number of at least 0")
SECONDS = Number(int, lambda n: n >= 0, "a whole number of at least 0", "SECONDS")
CLASSES = Number(int, lambda n: 2 <= n <= 256, "a whole number from 2 to 256")
SEED = Number(int, lambda n: 0 <= n < 2**31, "a whole number from 0 to 2147483647")
RATE = Number(float, lambda x: x > 0, "a number above 0", "RATE")
NORM = Number(float, lambda x: x >= 0, "a number of at least 0", "NORM")
MOMENTUM = Number(float, lambda x: 0 <= x < 1, "a number from 0 to below 1", "FRACTION")
FRACTION = Number(
    float, lambda x: 0 < x <= 1, "a number above 0 and at most 1", "FRACTION"
)


@dataclass(frozen=True)
class Text:
    """A type for argparse: what ``convert`` makes of a text that is as ``expected``."""

    convert: Callable[[str], object]
    expected: str
    metavar: str

    def __call__(self, text: str) -> object:
        """What ``text`` means; ``convert`` raises ValueError if it means nothing."""
        try:
            return self.convert(text)
        except (ValueError, argparse.ArgumentTypeError):
            raise argparse.ArgumentTypeError(
                f"expected {self.expected}, found {text!r}"
            ) from None


class Straggler(NamedTuple):
    """The rank that is made to wait, and for how long at every step."""

    rank: int
    milliseconds: float

    def __str__(self) -> str:
        return f"{self.rank}:{self.milliseconds:g}"


def _folder(text: str) -> str:
    if not text:  # it would mean the folder that one happens to be in
        raise ValueError
    return text


def _addresses(text: str) -> str:
    if not all(a.startswith(("http://", "https://")) for a in text.split(",")):
        raise ValueError
    return text


def _straggler(text: str) -> Straggler:
    rank, _, milliseconds = text.partition(":")
    return Straggler(COUNT_OR_0(rank), NORM(milliseconds))


FOLDER = Text(_folder, "a folder", "DIR")
ADDRESSES = Text(_addresses, "http:// or https:// addresses", "URL[,URL]")
STRAGGLER = Text(_straggler, "RANK:MILLISECONDS, as 1:50", "RANK:MILLISECONDS")
SWITCH = "on or off"


def flag(group: str, default, kind, help: str):  # noqa: A002
    """A field of a dataclass, with what argparse is told of its flag.

    Args:
        group: the flags with which ``--help`` shows it.
        default: its value where the flag is not given.
        kind: SWITCH, a tuple of choices, or a type as above.
        help: what ``--help`` says.
    """
    how = {"group": group, "help": help}
    if kind is SWITCH:
        how["action"] = argparse.BooleanOptionalAction
    elif isinstance(kind, tuple):
        how["choices"] = kind
    else:
        how |= {"type": kind, "metavar": kind.metavar}
    return field(default=default, metadata=how)


def read(kind: type, argv: list[str]):
    """The ``kind`` that the flags in ``argv`` give.

    Args:
        kind: a dataclass whose fields ``flag`` has made, with ``PROG``, ``DESCRIPTION``
            and, to start it, ``LAUNCH`` and ``LAUNCH_ON_HOSTS``.
        argv: the words of the command line.

    Raises:
        UsageError: a flag or value is not valid.
        SystemExit: ``--help`` was asked for.
    """
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
    for name, advice in RETIRED.items():
        parser.add_argument(
            f"--{name}",
            nargs="?",
            action=_Retired,
            const=advice.format(here=kind.LAUNCH, hosts=kind.LAUNCH_ON_HOSTS),
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    return kind(**vars(parser.parse_args(_respelled(argv, kind))))


class _Retired(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        raise UsageError(
            f"{option_string} is a flag of the TensorFlow 1 program: here {self.const}"
        )


class _Parser(argparse.ArgumentParser):
    """Errors are one line, told once for the whole job by the caller."""

    def error(self, message: str) -> None:
        raise UsageError(f"{message} (see --help)")

    def print_help(self, file=None) -> None:
        report.out(self.format_help())


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default unless it is none: then the text says what happens."""

    def _get_help_string(self, action: argparse.Action) -> str:
        return (
            action.help if action.default is None else super()._get_help_string(action)
        )


def _respelled(argv: list[str], kind: type) -> list[str]:
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
            raise UsageError(f"{name}: expected true or false, found {value!r}")
        return name.replace("--no_", "--no-") + equals + value

    return [respell(argument) for argument in argv]
