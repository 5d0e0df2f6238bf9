"""train.py as users start it: alone, by horovodrun and by mpirun."""

import json
import os
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, fault, run

from replica import data, model, params

KEYS = (
    *("mode", "ranks", "workers", "steps", "seconds", "steps_per_second"),
    *("examples_per_second", "validation_loss", "validation_loss_sum"),
    *("validation_accuracy", "test_loss", "test_accuracy"),
)


def parameters(path, launcher: str, flags: str) -> tuple[np.ndarray, float]:
    """The vector and the last train loss of a run."""
    command = f"{launcher} python tests/jobs/parameters.py {path} {flags}"
    job = run(command, PYTHONPATH=str(ROOT))
    assert job.code == 0, job.err
    with np.load(path) as saved:
        return saved["vector"], float(saved["train_loss"])


@pytest.fixture(scope="module")
def four_ranks():
    return run("horovodrun -np 4 python train.py")


def test_four_replicas_learn_the_sample_in_200_steps(four_ranks):
    assert four_ranks.code == 0, four_ranks.err
    final = four_ranks.final
    assert [key for key in KEYS if key not in final] == []
    assert (final["mode"], final["ranks"], final["steps"]) == ("allreduce", 4, 200)
    assert final["validation_accuracy"] > 0.9
    assert final["test_accuracy"] > 0.9
    assert final["validation_loss_sum"] == pytest.approx(500 * final["validation_loss"])
    assert final["examples_per_second"] == pytest.approx(
        400 * final["steps_per_second"], rel=0.01
    )


def test_the_root_alone_writes_whole_lines_once(four_ranks):
    known = ("cores: ", "MPI yields", "stalled job", "device: ", "data: ", "model: ")
    known += ("replicas: ", "learning rate: ", "options: ")
    for start in known:
        assert len(re.findall(f"^{start}", four_ranks.out + four_ranks.err, re.M)) == 1
    assert len(re.findall(r"^step \d+: .* steps/s$", four_ranks.err, re.M)) == 2
    ours = [line for line in four_ranks.err.splitlines() if line.startswith(known)]
    assert len(ours) == len(known)


def test_the_sizes_of_batches_are_told(four_ranks):
    for text in ("4, each 100 samples", "global batch 400", "13.75 updates per epoch"):
        assert four_ranks.count(text) == 1
    assert "learning rate: 0.01 " in four_ranks.err


def test_alone_it_trains_too():
    job = run("python train.py --eval-every 0")
    assert job.code == 0, job.err
    assert (job.final["ranks"], job.final["steps"]) == (1, 200)
    assert job.final["validation_accuracy"] > 0.9
    assert job.err.count("steps/s") == 1
    assert "Traceback" not in job.err
    assert "%|" not in job.err  # no bar without a terminal


def test_every_launcher_gives_the_same_bytes():
    flags = "python train.py --deterministic --train_steps 60"
    launchers = (
        *("mpirun --hostfile hostfile.example -np 2", "mpirun -np 2"),
        *("horovodrun -np 2", "horovodrun --gloo -np 2"),
    )
    finals = []
    for launcher in launchers:
        job = run(f"{launcher} {flags}")
        assert job.code == 0, job.err
        finals.append(job.final)
    assert {final["ranks"] for final in finals} == {2}
    for key in ("parameters_sha256", "train_loss", "validation_loss", "test_accuracy"):
        assert len({final[key] for final in finals}) == 1, key


def test_ten_steps_are_the_plain_loop_with_tensorflows_adam(tmp_path):
    flags = "--train_steps 10 --seed 3 --learning_rate 0.001"
    found, loss = parameters(tmp_path / "p.npz", "", flags)
    layout, train = params.mlp(100), data.load(None).train
    sampler = data.Sampler(len(train), 100, seed=3)
    vector = tf.Variable(layout.initial(3))
    adam = tf.compat.v1.train.AdamOptimizer(0.001)
    for step in range(10):
        batch = sampler.batch(step)
        both = model.gradient_and_loss(
            layout, vector, train.images[batch], train.labels[batch]
        )
        adam.apply_gradients([(both[:-1], vector)])
    np.testing.assert_allclose(found, vector.numpy(), atol=1e-5)
    assert loss == pytest.approx(float(both[-1]), rel=1e-4)


@pytest.mark.parametrize(
    ("launcher", "flags"),
    [
        ("horovodrun -np 2", "--batch_size 60"),
        ("mpirun --hostfile hostfile.example -np 4", "--batch_size 30"),
        ("horovodrun -np 2", "--batch_size 20 --replicas_to_aggregate 6"),
    ],
)
def test_ranks_with_small_batches_train_as_one_with_a_large_one(
    tmp_path, one_rank, launcher, flags
):
    found, loss = parameters(tmp_path / "p.npz", launcher, f"{flags} {one_rank[2]}")
    np.testing.assert_allclose(found, one_rank[0], atol=1e-5)
    assert loss == pytest.approx(one_rank[1], rel=1e-3)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "p.npz"
    flags = "--train_steps 100 --eval_every 0 --clip_norm 1 --learning_rate 0.001"
    return (*parameters(path, "", f"--batch_size 120 {flags}"), flags)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_replicas_reach_96_5_percent_on_the_full_mnist(full_mnist, seed):
    job = run(
        f"mpirun -np 2 python train.py --data_dir {full_mnist} "
        f"--train_steps 2000 --eval_every 0 --seed {seed}"
    )
    assert job.code == 0, job.err
    assert job.final["validation_accuracy"] > 0.965


def test_fashion_mnist_trains(fashion_mnist):
    job = run(f"mpirun -np 2 python train.py --data_dir {fashion_mnist}")
    assert job.code == 0, job.err
    assert job.final["test_accuracy"] > 0.7


def test_the_result_of_an_evaluation_does_not_depend_on_the_ranks():
    flags = "python train.py --train_steps 1 --learning_rate 1e-30"
    finals = [run(f"{launcher} {flags}").final for launcher in ("", "mpirun -np 2")]
    for key in ("validation_loss_sum", "validation_accuracy", "test_accuracy"):
        assert finals[0][key] == pytest.approx(finals[1][key], rel=1e-6)


def test_half_precision_and_clipping_train_and_scaling_is_told():
    job = run(
        "mpirun -np 2 python train.py --compression fp16 --clip_norm 1 "
        "--lr_scaling sqrt --learning_rate 0.005"
    )
    assert job.code == 0, job.err
    assert job.final["validation_accuracy"] > 0.9
    assert job.final["learning_rate"] == pytest.approx(0.005 * 2**0.5)
    assert "learning rate: 0.00707107 (--learning_rate 0.005" in job.err


def test_all_wait_for_a_straggler_and_it_is_stated():
    job = run("mpirun -np 2 python train.py --straggler 1:20 --train_steps 50")
    assert job.code == 0, job.err
    assert job.final["straggler"] == {"rank": 1, "milliseconds": 20}
    assert job.final["seconds"] >= 50 * 0.02


def test_a_reached_target_stops_all_ranks_at_the_same_step():
    job = run(
        "mpirun -np 2 python train.py --train_steps 100000 --eval_every 20 "
        "--target_accuracy 0.85"
    )
    assert job.code == 0, job.err
    assert job.final["steps"] < 1000
    assert job.final["steps"] % 20 == 0
    assert job.final["validation_accuracy"] >= 0.85


@pytest.mark.parametrize(
    ("launcher", "ranks", "bound"),
    [
        ("horovodrun -np 2", 2, False),
        ("horovodrun -np 4", 4, False),
        ("horovodrun --gloo -np 4", 4, False),
        ("mpirun -np 2 --bind-to core", 2, True),
        ("mpirun --hostfile hostfile.example -np 4", 4, False),
    ],
)
def test_each_rank_really_has_its_cores(launcher, ranks, bound):
    allowed = os.sched_getaffinity(0)
    job = run(f"{launcher} python tests/jobs/places.py", PYTHONPATH=str(ROOT))
    assert job.code == 0, job.err
    lines = [json.loads(line) for line in job.out.splitlines()]
    lines.sort(key=lambda line: line["rank"])
    assert [line["rank"] for line in lines] == list(range(ranks))
    assert [line["local_rank"] for line in lines] == list(range(ranks))
    used = [core for line in lines for core in line["cores"]]
    if ranks <= len(allowed):
        assert len(set(used)) == len(used)  # no two ranks on one core
    if not bound:
        assert set(used) == allowed  # and no core idle
    for line in lines:
        alone = len(line["cores"]) < 2
        assert line["OMPI_MCA_mpi_yield_when_idle"] == ("1" if alone else "0")
        assert line["HOROVOD_CYCLE_TIME"] == ("0" if alone else "0.2")
        assert int(line["TF_NUM_INTRAOP_THREADS"]) <= len(line["cores"])


NO_BROADCAST = """
import sys, replica.report as report
def patched(main, prog, run=report.run):
    script = sys.modules["__main__"]
    def connect(opts, dataset, connect=script.connect):
        lines = connect(opts, dataset)
        script.hvd.broadcast = lambda tensor, root_rank, **more: tensor.read_value()
        return lines
    script.connect = connect
    run(main, prog)
report.run = patched
"""
NO_AVERAGE = NO_BROADCAST.replace(
    "script.hvd.broadcast = lambda tensor, root_rank, **more: tensor.read_value()",
    "script.hvd.allreduce = lambda tensor, **more: tensor",
)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (NO_BROADCAST, "at the start parameters or optimizer state differ"),
        (NO_AVERAGE, "at the end parameters or optimizer state differ"),
    ],
)
def test_ranks_that_are_not_equal_are_noticed(code, message):
    job = run("mpirun -np 2 python train.py --train_steps 5", **fault("all", code))
    assert job.code == 1
    assert job.count(f"{message} from those of rank 0 on ranks [1]") == 1
    assert "{" not in job.out
