"""The README says what the programs do, and what it tells one to type works."""

import functools
import json
import re
import shlex
import subprocess

import pytest
from conftest import ROOT, environment, run

from replica.fetch import MIRRORS

README = (ROOT / "README.md").read_text()
OPTIONS = re.search(r"\n## Options\n(.*?)\n## ", README, re.DOTALL)[1]
# A row of a table: flag with its value, default, text; "\|" is no end of a cell.
ROW = re.compile(r"^\| `--(\[no-\])?(\w+) ?([^`]*)` \| (.*?) \| (.*) \|$", re.MULTILINE)
BOTH, TRAIN, PS = (
    ROW.findall(part) for part in re.split(r"^`\w+\.py` alone:$", OPTIONS, flags=re.M)
)
TABLES = {"train.py": BOTH + TRAIN, "ps_mode.py": BOTH + PS}


def commands() -> list[str]:
    """What the README's shell blocks say, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines]


@functools.cache
def help_text(script: str) -> str:
    """Flag by flag, on one line each, whatever the width of the terminal."""
    job = run(f"python {script} --help", COLUMNS="500")
    assert job.code == 0
    return re.sub(r"\n {10,}", " ", job.out)


@pytest.mark.parametrize("script", TABLES)
def test_the_tables_have_the_flags_of_the_help(script):
    flags = re.findall(r"^ +--(\w+)", help_text(script), re.MULTILINE)
    assert sorted(row[1] for row in TABLES[script]) == sorted(flags)
    assert OPTIONS.count("\n| `") == len(BOTH + TRAIN + PS)


@pytest.mark.parametrize(
    ("script", "row"),
    [(script, row) for script, rows in TABLES.items() for row in rows],
    ids=lambda part: part if isinstance(part, str) else part[1],
)
def test_a_row_of_the_tables_says_what_the_help_says(script, row):
    switch, name, value, default, text = (cell.replace("\\|", "|") for cell in row)
    (told,) = re.findall(rf"^ +(--{name}\b.*)$", help_text(script), re.M)
    if switch:
        value = f", --no-{name}"
        default = str(default == "on")
    elif "|" in value:
        value = " {" + value.replace("|", ",") + "}"
    else:
        value = f" {value}"
    if name == "mirrors":
        assert default == "three public ones"
        assert len(MIRRORS) == 3
        default = ",".join(MIRRORS)
    default = default.strip("`")
    expected = f"--{name}{value} {text} (default: {default})"
    assert " ".join(told.split()) == expected


def test_the_retired_and_the_kept_flags_are_all_named():
    seed = "data_dir download_only task_index num_gpus replicas_to_aggregate"
    seed += " hidden_units train_steps batch_size learning_rate sync_replicas"
    seed += " existing_servers ps_hosts worker_hosts job_name"
    section = README[README.index("## From the TensorFlow 1 program") :]
    section = section[: section.index("\n## ", 1)]
    assert [name for name in seed.split() if f"`--{name}`" not in section] == []


def test_the_first_commands_are_the_two_that_do_everything():
    assert commands()[:2] == ["make train", "make test"]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = set(re.findall(r"`make ([a-z]+)", README)) | {"train", "test"}
    assert named <= set(targets)


def test_make_train_writes_our_lines_and_no_others():
    target = (ROOT / "Makefile").read_text().partition("\ntrain:")[2]
    command = re.search(r"horovodrun.*", target)[0]
    command = command.replace("$(NP)", "2").replace("$(ARGS)", "--train_steps 20")
    job = subprocess.run(
        shlex.split(command),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert job.returncode == 0, job.stderr
    ours = "cores|MPI yields|stalled job|device|data|model|replicas|learning rate"
    ours = re.compile(f"({ours}|options|step 20)\\b")
    assert [line for line in job.stderr.splitlines() if not ours.match(line)] == []
    assert json.loads(job.stdout)["ranks"] == 2


@pytest.mark.parametrize("command", [c for c in commands() if ".py" in c])
def test_a_command_of_the_readme_works_as_printed(command):
    job = run(command)
    assert job.code == 0, job.err
    assert job.final["ranks"] == (4 if "-np 4" in command else 1)
    assert job.final["validation_accuracy"] > (0.85 if "ps_mode" in command else 0.9)


def test_the_hostfile_has_only_what_both_launchers_read():
    lines = (ROOT / "hostfile.example").read_text().splitlines()
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w.-]+ slots=\d+", line), line


def test_files_that_the_readme_names_are_there():
    names = re.findall(r"`([\w./-]+(?:/|\.(?:py|sh|txt|example)))`", README)
    assert len(names) > 5
    gone = [n for n in names if not (ROOT / n).exists()]
    assert gone == []
