"""install.sh: what it says is missing, and what it leaves alone."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

OURS = Path(sys.prefix, ".installed").exists()


def fake(folder: Path, name: str, text: str) -> str:
    """A PATH on which the program ``name`` writes ``text``."""
    folder.mkdir()
    (folder / name).write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\n")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def refused(tmp_path, **env: str) -> str:
    """The one line with which it ends, having made nothing."""
    env = {"VENV": str(tmp_path / "new"), "PYTHON": sys.executable} | env
    job = run("./install.sh", **env)
    assert job.code == 1
    assert not (tmp_path / "new").exists()
    (line,) = (job.out + job.err).splitlines()
    return line


def test_no_compiler(tmp_path):
    line = refused(tmp_path, CXX="no-such-compiler")
    assert "C++17 compiler is needed" in line
    assert "apt install g++" in line


def test_a_compiler_that_is_too_old(tmp_path):
    line = refused(tmp_path, CXX="false")
    assert "false cannot compile C++17" in line


def test_no_python(tmp_path):
    path = fake(tmp_path / "bin", "python3", "")
    for name in ("python3.10", "python3.11", "python3.12"):
        fake_name = tmp_path / "bin" / name
        fake_name.write_text("#!/bin/sh\nexit 1\n")
        fake_name.chmod(0o755)
    (tmp_path / "bin" / "python3").write_text("#!/bin/sh\nexit 1\n")
    line = refused(tmp_path, PYTHON="", PATH=path)
    assert "Python 3.10, 3.11 or 3.12 is needed" in line
    assert "apt install python3" in line


def test_a_python_of_another_version(tmp_path):
    line = refused(tmp_path, PYTHON="false")
    assert line.endswith("PYTHON=false is not a Python 3.10, 3.11 or 3.12")


def test_too_little_disk(tmp_path):
    table = "Filesystem 1M-blocks Used Available Capacity Mounted\n/dev/x 9 8 1 99% /"
    line = refused(tmp_path, PATH=fake(tmp_path / "bin", "df", table))
    assert "MB of disk are needed" in line
    assert "1 MB are free" in line


def test_a_folder_that_it_did_not_make_is_left_alone(tmp_path):
    work = tmp_path / "thesis"
    work.mkdir()
    (work / "chapter1").write_text("it was a dark and stormy night")
    job = run("./install.sh", VENV=str(work))
    assert job.code == 1
    assert "install.sh did not make it" in job.err
    assert (work / "chapter1").exists()


ours = pytest.mark.skipif(
    not OURS, reason="not run in an environment made by install.sh"
)


@ours
@pytest.mark.parametrize("launcher", ["mpirun", "horovodrun"])
def test_one_machine_needs_no_ssh(tmp_path, launcher):
    for folder in map(Path, ("/usr/bin", "/bin")):
        for program in folder.iterdir():
            link = tmp_path / program.name
            if program.name not in ("ssh", "rsh") and not link.is_symlink():
                link.symlink_to(program)
    activated = f". {sys.prefix}/bin/activate && exec {launcher} -np 2 hostname"
    done = subprocess.run(
        ["bash", "-c", activated],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(socket.gethostname()) == 2


@ours
def test_a_second_run_does_nothing():
    # Relative to the repository, as it was made: the name is part of the recipe.
    prefix = Path(sys.prefix)
    venv = prefix.relative_to(ROOT) if prefix.is_relative_to(ROOT) else prefix
    before = sorted(p.name for p in prefix.iterdir())
    # Without a Python it cannot begin to make it anew, should it find a fault in it.
    job = run("./install.sh", VENV=str(venv), PYTHON="false")
    assert (job.code, job.out) == (0, f"install: {venv} is complete\n")
    assert sorted(p.name for p in prefix.iterdir()) == before
