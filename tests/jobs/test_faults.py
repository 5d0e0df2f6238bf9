"""train.py when something is wrong: one clear line, non-zero, no rank left waiting."""

import os
import signal
import subprocess
import time

import pytest
from conftest import FREEZE, ROOT, different_data, environment, fault, run

LAUNCHERS = ["mpirun -np 2", "horovodrun -np 2", "horovodrun --gloo -np 2"]

# Makes the rank do something when it draws the batch of its 40th step or so.
AT_STEP_40 = """
import os, sys, time
import replica.data as data
def batches(self, tickets, batches=data.Sampler.batches):
    if tickets.start >= 80:
        {}
    return batches(self, tickets)
data.Sampler.batches = batches
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_raises_ends_the_job_with_its_traceback(launcher):
    job = run(
        f"{launcher} python train.py --train_steps 100000",
        **fault(1, AT_STEP_40.format("raise RuntimeError('made up')")),
    )
    assert job.code != 0
    assert job.count("rank 1 failed:") == 1
    assert job.count("RuntimeError: made up") == 1
    assert "{" not in job.out
    assert job.seconds < 40


@pytest.mark.parametrize(
    "how", ["sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), 9)"]
)
def test_a_rank_that_leaves_early_ends_the_job(how):
    job = run(
        "mpirun -np 2 python train.py --train_steps 1000000 --stall_timeout 8",
        **fault(1, AT_STEP_40.format(how)),
    )
    assert job.code != 0
    assert "{" not in job.out


def test_a_rank_that_is_stuck_ends_the_job_in_the_time_set():
    job = run(
        "mpirun -np 2 python train.py --train_steps 100000 --stall_timeout 6",
        **fault(1, AT_STEP_40.format("time.sleep(1000)")),
    )
    assert job.code != 0
    assert "stalled job ends after: 6 s" in job.err
    assert "{" not in job.out


def test_a_frozen_rank_ends_the_job_in_the_time_set():
    job = run(
        "mpirun -np 2 python train.py --train_steps 100000 --stall_timeout 6",
        **fault(1, AT_STEP_40.format(FREEZE)),
    )
    assert job.code != 0
    assert job.count("a rank is frozen, out of reach or gone") == 1


@pytest.mark.parametrize("when", ["data.load", "report.final"])
def test_a_rank_frozen_before_or_after_training_ends_the_job(when):
    # two seconds later than the other rank, which must not leave without it
    patch = f"""
import os, time
from replica import data, report
def late(*_):
    time.sleep(2)
    {FREEZE}
{when} = late
"""
    job = run("mpirun -np 2 python train.py --stall_timeout 8", **fault(1, patch))
    assert job.code == 1
    assert job.count("error: rank 0: nothing since ") == 1


def test_a_rank_that_left_before_it_met_the_others_ends_the_job():
    command = "python train.py --stall_timeout 6"
    job = run(f"mpirun -np 1 {command} : -np 1 {command} --help")
    assert job.code == 1
    assert job.count("nothing since the start for 6 s (see --stall_timeout)") == 1


def test_ranks_with_different_data_are_told_apart(tmp_path):
    different_data(tmp_path)
    train = f"python {ROOT / 'train.py'} --data_dir data"
    job = run(
        f"mpirun -np 1 -wdir {tmp_path / 'a'} {train} "
        f": -np 1 -wdir {tmp_path / 'b'} {train}"
    )
    assert job.code == 1
    assert job.count("error: ranks disagree on the data's SHA-256: ") == 1


NO_UPDATE = """
import sys, replica.report as report
def patched(main, prog, run=report.run):
    def update(state, gradient, step, rate, momentum):
        state.vector.assign_add(0 * gradient)
    sys.modules["__main__"].update = update
    run(main, prog)
report.run = patched
"""


def test_no_update_that_changes_anything_is_an_error():
    job = run("mpirun -np 2 python train.py --train_steps 5", **fault("all", NO_UPDATE))
    assert job.code == 1
    assert "expected 5 steps to change the parameters, found none" in job.err


NAN_ON_ONE_RANK = """
import sys, replica.report as report
def patched(main, prog, run=report.run):
    script = sys.modules["__main__"]
    def connect(opts, dataset, connect=script.connect):
        connect(opts, dataset)
        tf, model = script.tf, script.model
        seen, gradient_and_loss = tf.Variable(0), model.gradient_and_loss
        def poisoned(*args):
            late = seen.assign_add(1) > 30
            return gradient_and_loss(*args) * tf.where(late, float("nan"), 1.0)
        model.gradient_and_loss = poisoned
        return []
    script.connect = connect
    run(main, prog)
report.run = patched
"""


def test_nan_on_one_rank_stops_all_and_names_the_step():
    job = run("mpirun -np 2 python train.py", **fault(1, NAN_ON_ONE_RANK))
    assert job.code == 1
    assert job.count("step 31: expected a finite loss, found nan") == 1
    assert "{" not in job.out


def test_divergence_stops_all_and_names_the_step():
    job = run("mpirun -np 2 python train.py --learning_rate 1e38")
    assert job.code == 1
    assert job.count("expected a finite loss") == 1
    assert "{" not in job.out


@pytest.mark.parametrize(
    "launcher", ["mpirun --hostfile hostfile.example -np 4", "horovodrun -np 4"]
)
def test_help_and_a_bad_flag_are_told_once(launcher):
    job = run(f"{launcher} python train.py --help", limit=30)
    assert job.code == 0
    assert job.count("usage: train.py") == 1
    job = run(f"{launcher} python train.py --batch_size=none", limit=30)
    assert job.code == 2
    assert job.count("train.py: error: argument --batch_size") == 1
    assert job.count("found 'none'") == 1


def test_help_and_a_bad_flag_answer_without_tensorflow():
    job = run("python -X importtime train.py --help")
    assert job.code == 0
    assert "tensorflow" not in job.err
    job = run("python -X importtime train.py --nothing")
    assert job.code == 2
    assert "tensorflow" not in job.err


def test_a_bad_flag_of_one_rank_alone_is_told_by_it():
    job = run(
        "mpirun -np 1 python train.py : -np 1 python train.py --batch_size none",
        limit=40,
    )
    assert job.code == 2
    assert job.count("error: rank 1: argument --batch_size") == 1


def test_ranks_with_different_options_are_told_apart():
    job = run(
        "mpirun -np 1 python train.py : -np 1 python train.py --hidden_units 64",
    )
    assert job.code == 1
    assert job.count("ranks disagree on hidden_units: 100 (rank 0), 64 (rank 1)") == 1


def test_wrong_numbers_of_replicas_ranks_and_samples_are_refused():
    job = run("mpirun -np 2 python train.py --replicas_to_aggregate 3")
    assert job.code == 2
    assert job.count("expected a multiple of the 2 replicas, found 3") == 1
    assert job.count("ps_mode.py --sync_replicas --replicas_to_aggregate 3") == 1
    job = run("mpirun -np 2 python train.py --straggler 2:50")
    assert job.code == 2
    assert job.count("expected a rank that trains, 0 to 1, found 2") == 1
    job = run("mpirun -np 2 python train.py --batch_size 2751")
    assert job.code == 2
    assert job.count("expected at least 5502 training samples") == 1
    assert job.count("found 5500") == 1


def test_missing_data_is_told_once_with_folder_and_files(tmp_path):
    command = (
        f"mpirun --hostfile hostfile.example -np 4 python train.py "
        f"--data_dir {tmp_path} --mirrors http://127.0.0.1:9/a,http://127.0.0.1:9/b"
    )
    job = run(command, limit=30)
    assert job.code == 1
    assert job.count("train.py: error: ") == 1
    assert job.count(f"{tmp_path}: train-images-idx3-ubyte is missing") == 1


def test_damaged_data_is_told_once(tmp_path):
    for path in (ROOT / "replica" / "sample").glob("*.gz"):
        content = path.read_bytes()
        (tmp_path / path.name).write_bytes(content[: len(content) // 2])
    job = run(f"mpirun -np 2 python train.py --data_dir {tmp_path}", limit=30)
    assert job.code == 1
    assert job.count("train.py: error: ") == 1
    assert job.count("train-images-idx3-ubyte.gz: damaged") == 1


def test_horovod_without_tensorflow_is_one_line(tmp_path):
    broken = tmp_path / "horovod"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "tensorflow.py").write_text(
        "raise ImportError('Extension horovod.tensorflow has not been built')"
    )
    job = run("mpirun -np 2 python train.py", PYTHONPATH=str(tmp_path))
    assert job.code == 1
    assert job.count("train.py: error: ") == 1
    assert job.count("run ./install.sh") == 1
    assert "Traceback" not in job.err


def test_nothing_is_left_running_after_an_interrupt():
    process = subprocess.Popen(
        ["mpirun", "-np", "2", "python", "train.py"]
        + ["--train_steps", "1000000", "--eval_every", "50"],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stderr:
        if line.startswith("step "):
            break
    ranks = children(process.pid)
    assert len(ranks) >= 2
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode != 0
    time.sleep(1)
    assert [pid for pid in ranks if alive(pid)] == []


def children(pid: int) -> list[int]:
    return [
        int(child)
        for task in os.listdir(f"/proc/{pid}/task")
        for child in open(f"/proc/{pid}/task/{task}/children").read().split()
    ]


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
