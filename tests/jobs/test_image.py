"""The image, as far as that shows without Docker: its steps in a plain folder."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, run

STAGES = (ROOT / "Dockerfile").read_text().split("\nFROM ")
LAST = re.sub(r"\\\n|^#.*\n", "", STAGES[-1], flags=re.MULTILINE)


def steps(name: str) -> list[str]:
    """The arguments of the last stage's instructions of one kind."""
    return re.findall(rf"^{name} (.*)$", LAST, re.MULTILINE)


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Path:
    """What .dockerignore lets into the image, which is an allow list."""
    folder = tmp_path_factory.mktemp("app")
    first, *rules = (ROOT / ".dockerignore").read_text().splitlines()[1:]
    assert first == "*"
    for rule in rules:
        for path in ROOT.glob(rule[1:]) if rule.startswith("!") else ():
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(exist_ok=True)
            if path.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(path, target, ignore=ignored)
            else:
                shutil.copy(path, target)
    return folder


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    """What the image sets, but for the path of its own environment."""
    pairs = [word.split("=", 1) for line in steps("ENV") for word in shlex.split(line)]
    return {name: value for name, value in pairs if name != "PATH"}


def test_hadolint_finds_no_fault():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint has no wheel for this machine")
    job = run("hadolint --no-color Dockerfile")
    assert job.code == 0, job.out


def test_the_smoke_run_passes_in_a_plain_folder_not_in_a_container(app, variables):
    smoke = steps("RUN")[-1]
    assert "horovodrun -np 2" in smoke
    job = run("sh -c", smoke, cwd=app, **variables)
    assert job.code == 0, job.err
    assert job.out.count('"ranks": 2') == 2


def test_the_entry_point_runs_the_main_job_in_a_plain_folder_not_in_a_container(
    app, variables, tmp_path
):
    (entry,) = steps("ENTRYPOINT")
    (command,) = re.findall(r'"(.*?)"', entry)
    job = run(command, "--train_steps", "20", cwd=app, **variables)
    assert job.code == 0, job.err
    assert job.final["ranks"] == 4
    variables = variables | {"NP": "2"}
    job = run(command, "--nonsense", cwd=app, **variables)
    assert (job.code, job.count("unrecognized arguments: --nonsense")) == (2, 1)
    job = run(command, "python", "ps_mode.py", cwd=app, **variables)
    assert (job.code, job.count("expected at least 2 ranks")) == (2, 1)
    stopped = run("timeout 12", command, "--train_steps=999999", cwd=app, **variables)
    assert (stopped.code, stopped.seconds < 20) == (124, True)
    variables["REPLICA_DATA_DIR"] = str(tmp_path)  # as a folder mounted at /data
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"no images")
    job = run(command, "--train_steps", "20", cwd=app, **variables)
    assert (job.code, job.count(f"{tmp_path}: these files are missing")) == (1, 1)


def test_nothing_of_the_image_is_secret_or_unneeded(app):
    names = {p.name for p in app.iterdir()}
    assert names == {
        *("install.sh", "requirements.txt", "hostfile.example"),
        *("deploy", "replica", "train.py", "ps_mode.py"),
    }
