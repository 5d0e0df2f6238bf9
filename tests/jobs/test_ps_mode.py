"""ps_mode.py as users start it, by mpirun: what it counts, learns and refuses."""

import os
import signal
import subprocess
import time

import numpy as np
import pytest
from conftest import FREEZE, ROOT, different_data, environment, fault, run
from test_train import parameters

MPIRUN = "mpirun --oversubscribe -np"
KEYS = (
    *("mode", "ranks", "workers", "steps", "seconds", "steps_per_second"),
    *("examples_per_second", "validation_loss", "validation_loss_sum"),
    *("validation_accuracy", "test_loss", "test_accuracy", "applied", "dropped"),
    *("updates_per_worker", "staleness_mean", "staleness_max", "server_busy"),
)


def served(tmp_path, ranks: int, flags: str, servers: int = 1) -> np.ndarray:
    """The parameters at the end of a run."""
    job = run(
        f"{MPIRUN} {ranks} python tests/jobs/ps_parameters.py {tmp_path}/ {flags} "
        f"--num_ps {servers}",
        PYTHONPATH=str(ROOT),
    )
    assert job.code == 0, job.err
    assert job.final["applied"] == job.final["steps"]
    parts = [np.load(tmp_path / f"{server}.npy") for server in range(servers)]
    return np.concatenate(parts)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "sgd --momentum 0.9"])
def test_one_worker_trains_as_the_plain_loop(tmp_path, optimizer):
    flags = "--train_steps 100 --learning_rate 0.001 --seed 2"
    flags += f" --optimizer {optimizer}"
    expected, _ = parameters(tmp_path / "p.npz", "", flags)
    found = served(tmp_path, 2, flags)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # In slices it is the very same arithmetic.
    sliced = served(tmp_path, 4, flags, servers=3)
    np.testing.assert_array_equal(sliced, found)


def test_synchronous_workers_train_as_replicas(tmp_path):
    flags = "--train_steps 60 --learning_rate 0.001 --batch_size 40"
    expected, _ = parameters(tmp_path / "p.npz", "mpirun -np 2", flags)
    # Which worker gets which ticket differs; what the average is of does not.
    found = served(tmp_path, 3, f"{flags} --sync_replicas")
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, ""),
        (6, "--batch_size 50"),
        (5, "--num_ps 2 --max_staleness 2"),
        (4, "--max_staleness 0 --push_every 2"),
        (4, "--sync_replicas --replicas_to_aggregate 2 --compression fp16"),
        (6, "--num_ps 3 --sync_replicas --replicas_to_aggregate 5"),
        (4, "--optimizer sgd --momentum 0.9 --learning_rate 0.05 --num_ps 2"),
    ],
)
def test_the_sums_add_up(ranks, flags):
    job = run(f"{MPIRUN} {ranks} python ps_mode.py --train_steps 150 {flags}")
    assert job.code == 0, job.err
    final = job.final
    assert [key for key in KEYS if key not in final] == []
    assert final["applied"] == final["steps"] == 150
    assert final["used"] + final["dropped"] == final["sent"]
    assert sum(final["updates_per_worker"]) == final["used"]
    assert sum(final["staleness_histogram"].values()) == final["used"]
    each = 1
    if "--sync_replicas" in flags:
        each = int(flags.partition("aggregate ")[2][0])
    assert final["used"] == 150 * each
    assert (
        len(final["per_worker"]) == final["workers"] == len(final["updates_per_worker"])
    )
    assert sum(w["gradients"] for w in final["per_worker"]) == final["sent"]
    assert final["bytes_moved"] == sum(w["bytes"] for w in final["per_worker"])
    # One message each way for a gradient; to a worker, also to evaluate twice and stop.
    width = 2 if "fp16" in flags else 4
    servers = final["ranks"] - final["workers"]
    message = 32 * servers + 79510 * width
    messages = 2 * final["sent"] + final["workers"] + 2
    assert final["bytes_moved"] == message * messages
    assert final["validation_accuracy"] > 0.8
    assert job.count("step 150: ") == 1


def test_the_target_ends_the_job():
    job = run(
        f"{MPIRUN} 3 python ps_mode.py --train_steps 100000 --eval_every 20 "
        "--target_accuracy 0.8"
    )
    assert job.code == 0, job.err
    assert (
        job.final["validation_accuracy"] >= 0.7
    )  # of the last version, a little later
    assert job.final["applied"] == job.final["steps"] < 2000


def test_a_straggler_makes_fewer_updates_and_is_stated():
    job = run(f"{MPIRUN} 3 python ps_mode.py --straggler 2:20")
    assert job.code == 0, job.err
    assert job.final["straggler"] == {"rank": 2, "milliseconds": 20}
    fast, slow = job.final["updates_per_worker"]
    assert 0 < slow < fast / 2
    assert job.final["per_worker"][1]["compute"] >= 0.02 * slow


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("python ps_mode.py", 2, "expected at least 2 ranks"),
        (f"{MPIRUN} 3 python ps_mode.py --num_ps 3", 2, "expected at least 4 ranks"),
        (f"{MPIRUN} 2 python ps_mode.py --max_staleness -1", 2, "at least 0"),
        (f"{MPIRUN} 2 python ps_mode.py --momentum 0.5", 2, "--optimizer sgd"),
        (f"{MPIRUN} 3 python ps_mode.py --straggler 0:9", 2, "trains, 1 to 2, found 0"),
        (f"{MPIRUN} 3 python ps_mode.py --straggler 3:9", 2, "trains, 1 to 2, found 3"),
        (f"{MPIRUN} 2 python ps_mode.py --replicas_to_aggregate 0", 2, "at least 1"),
        (f"{MPIRUN} 2 python ps_mode.py --ps_hosts a:1", 2, "name the hosts"),
        (f"{MPIRUN} 2 python ps_mode.py --learning_rate 1e30", 1, "has diverged"),
        (
            "mpirun -np 1 python ps_mode.py "
            ": -np 1 python ps_mode.py --hidden_units 64",
            1,
            "ranks disagree on hidden_units: 100 (rank 0), 64 (rank 1)",
        ),
    ],
)
def test_bad_input_is_one_line(command, code, message):
    job = run(command)
    assert job.code == code
    assert job.count("error: ") == 1
    assert message in job.err
    assert "Traceback" not in job.err
    assert "{" not in job.out


def test_help_comes_once():
    job = run(f"{MPIRUN} 3 python ps_mode.py --help")
    assert job.code == 0
    assert job.count("usage: ps_mode.py") == 1


# Makes the worker do something when it draws the batch of ticket 40 or a later one.
AT_TICKET_40 = """
import time
import replica.data as data
def batches(self, tickets, batches=data.Sampler.batches):
    if tickets.start >= 40:
        {}
    return batches(self, tickets)
data.Sampler.batches = batches
"""


def test_a_worker_that_raises_ends_the_job_with_its_traceback():
    job = run(
        f"{MPIRUN} 3 python ps_mode.py --train_steps 100000",
        **fault(1, AT_TICKET_40.format("raise RuntimeError('made up')")),
    )
    assert job.code != 0
    assert job.count("rank 1 failed:") == 1
    assert job.count("RuntimeError: made up") == 1
    assert "{" not in job.out


def test_a_silent_worker_is_named():
    job = run(
        f"{MPIRUN} 3 python ps_mode.py --train_steps 10000000 --stall_timeout 4",
        **fault(2, AT_TICKET_40.format("time.sleep(99)")),
    )
    assert job.code == 1
    assert job.count("nothing from ranks [2] for 4 s (--stall_timeout)") == 1


@pytest.mark.parametrize("when", ["data.load", "report.Watchdog.beat"])
def test_a_worker_frozen_before_or_after_it_met_the_others_ends_the_job(when):
    patch = f"{when} = lambda *_: {FREEZE}"
    job = run(
        f"{MPIRUN} 3 python ps_mode.py --stall_timeout 4",
        **fault(2, f"import os\nfrom replica import data, report\n{patch}"),
    )
    assert job.code == 1
    assert job.count("error: ") == 1 or "Timeout" in job.err


def test_a_worker_that_left_before_it_met_the_others_ends_the_job():
    command = "python ps_mode.py --stall_timeout 4"
    job = run(f"{MPIRUN} 2 {command} : -np 1 {command} --help")
    assert job.code == 1
    # mpirun sees it where another rank is in MPI already, or else the watchdog does
    assert "process rank 2" in job.err or "Timeout" in job.err
    assert "{" not in job.out


def test_workers_with_different_data_are_told_apart(tmp_path):
    different_data(tmp_path)
    program = f"python {ROOT / 'ps_mode.py'} --data_dir data"
    job = run(
        f"{MPIRUN} 2 -wdir {tmp_path / 'a'} {program} "
        f": -np 1 -wdir {tmp_path / 'b'} {program}"
    )
    assert job.code == 1
    assert job.count("error: ranks disagree on the data's SHA-256: ") == 1
    assert "(rank 1)" in job.err


# Makes the worker compute on parameters that are no numbers, at some of its calls.
NAN_FOR_A_WHILE = """
import replica.data as data
def load(*how, load=data.load):
    import replica.model as model
    def build(*how, build=model.build_gradient):
        compute, calls = build(*how), iter(range(10**9))
        def poisoned(vector, indices):
            return compute(vector * float("nan") if {} else vector, indices)
        return poisoned
    model.build_gradient = build
    return load(*how)
data.load = load
"""


def test_a_few_gradients_that_are_no_numbers_are_refused_and_counted():
    code = NAN_FOR_A_WHILE.format("next(calls) in (5, 9, 12)")
    job = run(f"{MPIRUN} 3 python ps_mode.py", **fault(1, code))
    assert job.code == 0, job.err
    assert job.final["refused"] == 3
    assert job.final["used"] + job.final["dropped"] == job.final["sent"]
    assert job.final["applied"] == 200
    assert job.final["validation_accuracy"] > 0.85


def test_many_of_them_end_the_job():
    job = run(f"{MPIRUN} 3 python ps_mode.py", **fault(2, NAN_FOR_A_WHILE.format(True)))
    assert job.code == 1
    assert job.count("the last of rank 2; training has diverged") == 1
    assert "{" not in job.out


def test_a_server_without_work_is_idle_and_small():
    with subprocess.Popen(
        f"{MPIRUN} 2 python ps_mode.py --train_steps 10000000".split(),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        for line in job.stderr:
            if line.startswith("step 100:"):
                break
        children = f"/proc/{job.pid}/task/{job.pid}/children"
        with open(children) as file:
            server, worker = [int(pid) for pid in file.read().split()][:2]
        os.kill(worker, signal.SIGSTOP)
        time.sleep(1)
        used = [cpu_seconds(server)]
        time.sleep(4)
        used.append(cpu_seconds(server))
        with open(f"/proc/{server}/status") as file:
            (memory,) = (
                int(entry.split()[1]) for entry in file if entry.startswith("VmRSS:")
            )
        os.kill(worker, signal.SIGCONT)
        job.terminate()
        job.stderr.read()
    assert used[1] - used[0] < 0.05 * 4
    assert memory < 100_000  # kB


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
