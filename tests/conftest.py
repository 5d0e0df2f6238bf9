"""What several tests use: the repository, the full data sets, and how jobs start."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # tests import the package as the scripts do
JOBS = ROOT / "tests" / "jobs"
MNIST = ROOT.parent / "shared" / "data" / "mnist"
FASHION = Path("/usr/share/datasets/fashion-mnist")


def pytest_report_header() -> list[str]:
    return [f"full MNIST: {MNIST if MNIST.exists() else 'not here, its tests skip'}"]


FREEZE = "os.kill(os.getpid(), 19)"  # code for fault(): SIGSTOP


@pytest.fixture(scope="session")
def full_mnist() -> str:
    if not MNIST.exists():
        pytest.skip(f"the full MNIST is not in {MNIST}")
    return str(MNIST)


@pytest.fixture(scope="session")
def fashion_mnist() -> str:
    if not FASHION.exists():
        pytest.skip(f"Debian's dataset-fashion-mnist is not installed ({FASHION})")
    return str(FASHION)


@dataclass
class Job:
    """A finished program: exit code, output without the launcher's prefixes."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def final(self) -> dict:
        lines = [line for line in self.out.splitlines() if line.startswith("{")]
        assert len(lines) == 1, f"expected one final line\n{self.out}\n{self.err}"
        return json.loads(lines[0])

    def count(self, text: str) -> int:
        return (self.out + self.err).count(text)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment as .venv/bin/activate would make it."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    if os.getuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if shutil.which("ssh") is None:
        env["OMPI_MCA_plm_rsh_agent"] = ""
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return env | extra


def run(command: str, *more: str, limit: float = 90, cwd: Path = ROOT, **env: str):
    """Run a program to its end, or kill all of it after ``limit`` seconds and fail."""
    words = [*command.split(), *more]
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # mpirun ends its ranks, which lead sessions of their own, when it is told to.
        process.terminate()
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        pytest.fail(f"{' '.join(words)}: not done after {limit} s\n{out}\n{err}")
    prefix = re.compile(r"^\[\d+(?:,\d+)?\]<std(?:out|err)>: ?", re.MULTILINE)
    seconds = time.monotonic() - began
    return Job(process.returncode, prefix.sub("", out), prefix.sub("", err), seconds)


def fault(rank: int | str, code: str) -> dict[str, str]:
    """Environment that makes ``rank`` of a job run ``code`` before the program."""
    path = os.pathsep.join([str(JOBS / "hooks"), str(ROOT)])
    return {"PYTHONPATH": path, "FAULT_RANK": str(rank), "FAULT": code}


def different_data(folder: Path) -> None:
    """Make a/data and b/data in ``folder``: the sample, and it with one other label."""
    for name in "ab":
        shutil.copytree(ROOT / "replica" / "sample", folder / name / "data")
    path = folder / "b" / "data" / "t10k-labels-idx1-ubyte.gz"
    labels = bytearray(gzip.decompress(path.read_bytes()))
    labels[-1] = (labels[-1] + 1) % 10
    path.write_bytes(gzip.compress(labels))
