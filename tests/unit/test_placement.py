import os
from types import SimpleNamespace

import pytest

from replica import JobError, placement
from replica.placement import Slot


@pytest.fixture
def affinity(monkeypatch):
    """Stands for the machine: eight cores, and what is bound in the end."""
    state = {"mine": set(range(8)), "parent": set(range(8)), "bound": None}
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: state["parent" if pid else "mine"]
    )
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda pid, cores: state.update(bound=set(cores))
    )
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(placement, "neighbours_first", sorted)
    return state


def launched(rank: int, size: int, **more: str) -> dict[str, str]:
    names = placement.LAUNCHERS[0]
    return dict(zip(names, map(str, (rank, size, rank, size)), strict=True)) | more


def settle(environ: dict, num_gpus: int = 1, stall_timeout: int = 60) -> list[str]:
    return placement.settle(num_gpus, stall_timeout, environ=environ)


@pytest.mark.parametrize("names", placement.LAUNCHERS)
def test_slot_is_read_from_each_launcher(names):
    environ = dict(zip(names, ["5", "8", "1", "4"], strict=True))
    assert placement.slot(environ) == Slot(5, 8, 1, 4)


def test_alone_is_rank_0_of_1():
    assert placement.slot({}) == Slot(0, 1, 0, 1)


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 20])
def test_shares_are_disjoint_complete_and_even(cores, ranks):
    shares = [placement.share(list(range(cores)), r, ranks) for r in range(ranks)]
    if ranks <= cores:
        assert [core for share in shares for core in share] == list(range(cores))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        counts = [sum(share == [core] for share in shares) for core in range(cores)]
        assert sum(counts) == ranks
        assert max(counts) - min(counts) <= 1


def test_cores_and_threads_are_split_by_local_rank(affinity):
    environ = launched(1, 2)
    lines = settle(environ)
    assert affinity["bound"] == {4, 5, 6, 7}
    assert environ["TF_NUM_INTRAOP_THREADS"] == environ["OMP_NUM_THREADS"] == "4"
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "0"
    assert "4-7" in lines[0]


@pytest.mark.parametrize("ranks", [8, 16])
def test_ranks_with_a_core_or_less_yield(affinity, ranks):
    environ = launched(ranks - 1, ranks)
    settle(environ)
    assert affinity["bound"] == {7}
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "1"
    assert environ["TF_NUM_INTRAOP_THREADS"] == "1"


def test_alone_keeps_all_cores(affinity):
    environ: dict[str, str] = {}
    settle(environ)
    assert affinity["bound"] is None
    assert environ["TF_NUM_INTRAOP_THREADS"] == "8"


@pytest.mark.parametrize("how", ["by name", "by cores"])
def test_what_the_launcher_bound_stays(affinity, how):
    affinity["mine"] = {3} if how == "by cores" else set(range(8))
    more = {} if how == "by cores" else {"OMPI_MCA_orte_bound_at_launch": "1"}
    environ = launched(1, 2, **more)
    lines = settle(environ)
    assert affinity["bound"] is None
    assert "as bound" in lines[0]
    # Bound to a socket with its neighbour, a rank still takes no more than its part.
    assert environ["TF_NUM_INTRAOP_THREADS"] == ("1" if how == "by cores" else "4")


def test_cores_of_the_whole_job_are_split_further(affinity):
    affinity["mine"] = affinity["parent"] = {2, 3}  # taskset -c 2,3 horovodrun ...
    settle(launched(1, 2))
    assert affinity["bound"] == {3}


def test_what_the_user_has_set_stays_and_is_told(affinity):
    users = {
        "TF_NUM_INTRAOP_THREADS": "3",
        "OMP_NUM_THREADS": "5",
        "OMPI_MCA_mpi_yield_when_idle": "0",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7",
        "TF_FORCE_GPU_ALLOW_GROWTH": "false",
        "TF_CPP_MIN_LOG_LEVEL": "0",
        "OPAL_PREFIX": "/somewhere",
    }
    environ = launched(0, 16, **users)
    lines = settle(environ)
    assert {name: environ[name] for name in users} == users
    for value, name in (("3", "TF_NUM_INTRAOP_THREADS"), ("2.5", "HOROVOD_CYCLE_TIME")):
        assert any(f"{value} (as set by {name})" in line for line in lines)


def test_horovods_stall_time_is_set_with_an_earlier_warning(affinity):
    environ: dict[str, str] = {}
    settle(environ, stall_timeout=30)
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "30"
    assert int(environ["HOROVOD_STALL_CHECK_TIME_SECONDS"]) < 30
    environ = {}
    settle(environ, stall_timeout=0)
    assert environ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "0"


@pytest.mark.parametrize(
    ("gpus", "num_gpus", "expected"),
    [
        (["0", "1"], 2, ["0", "1", "0", "1"]),
        (["0", "1", "2", "3"], 4, ["0", "1", "2", "3"]),
        (["0", "1"], 1, ["0", "0", "0", "0"]),
        (["0", "1"], 8, ["0", "1", "0", "1"]),  # asked for more than there are
        (["5"], 4, ["5", "5", "5", "5"]),  # the scheduler shows each rank one
        (["GPU-ab", "GPU-cd"], 2, ["GPU-ab", "GPU-cd", "GPU-ab", "GPU-cd"]),
        (["0", "1"], 0, [None] * 4),
        ([], 2, [None] * 4),
    ],
)
def test_gpu_by_local_rank(gpus, num_gpus, expected):
    chosen = [placement.choose_gpu(gpus, rank, num_gpus) for rank in range(4)]
    assert chosen == expected


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("0,1", ["0", "1"]),
        ("3", ["3"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        (" 0, 2 ", ["0", "2"]),
        ("GPU-ab", ["GPU-ab"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(listed, expected):
    assert placement.visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == expected


def test_gpus_are_counted_where_nothing_is_listed(monkeypatch):
    monkeypatch.setattr(placement.glob, "glob", lambda pattern: ["a", "b", "c"])
    assert placement.visible_gpus({}) == ["0", "1", "2"]


def test_settle_shows_tensorflow_one_gpu_and_lets_it_grow(affinity):
    environ = launched(1, 2, CUDA_VISIBLE_DEVICES="4,7")
    lines = settle(environ, num_gpus=2)
    assert environ["CUDA_VISIBLE_DEVICES"] == "7"
    assert environ["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert any("GPU 7" in line and "2 visible" in line for line in lines)


def test_settle_uses_the_cpu_when_asked_and_says_so(affinity):
    environ = launched(1, 2, CUDA_VISIBLE_DEVICES="4,7")
    lines = settle(environ, num_gpus=0)
    assert environ["CUDA_VISIBLE_DEVICES"] == "-1"
    assert any("CPU" in line and "--num_gpus 0" in line for line in lines)


def test_hardware_threads_of_a_core_stay_together(monkeypatch, tmp_path):
    # Four cores with two threads each, numbered as Intel's are: 0 and 4 share a core.
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 4}\n")
    real = placement.Path
    monkeypatch.setattr(
        placement,
        "Path",
        lambda path: real(str(path).replace("/sys/devices/system/cpu", str(tmp_path))),
    )
    assert placement.neighbours_first(range(8)) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert placement.neighbours_first([9, 8]) == [8, 9]  # no such files: by number


def test_the_machines_own_cores_are_ordered():
    cores = os.sched_getaffinity(0)
    assert set(placement.neighbours_first(cores)) == cores


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TF_NUM_INTRAOP_THREADS", "abc"),
        ("TF_NUM_INTEROP_THREADS", "-1"),
        ("OMP_NUM_THREADS", "1,"),
        ("HOROVOD_CYCLE_TIME", "1e"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", ""),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "60s"),
    ],
)
def test_a_variable_that_is_no_number_is_refused(affinity, name, value):
    with pytest.raises(JobError) as refused:
        settle(launched(0, 2, **{name: value}))
    assert refused.value.code == 2
    assert str(refused.value) == f"{name}: expected a number, found {value!r}"


def test_numbers_of_the_user_are_accepted(affinity):
    lines = settle(launched(0, 2, OMP_NUM_THREADS="4,2", HOROVOD_CYCLE_TIME="0.5"))
    assert "Horovod cycle: 0.5 (as set by HOROVOD_CYCLE_TIME) ms" in lines[1]


def test_ranks_without_their_gpu_are_named():
    assert placement.missing_gpus([False, False]) == []
    (line,) = placement.missing_gpus([False, True, False, True])
    expected = "device: TensorFlow finds no GPU on ranks [1, 3]: CPU"
    assert line == f"{expected} (GPU=1 in README)"


def test_too_little_shared_memory_is_refused_before_mpi_starts(affinity, monkeypatch):
    mb = 1 << 20
    state = SimpleNamespace(f_bavail=15 * mb, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda folder: state)
    settle(launched(0, 3))
    settle(dict(zip(placement.LAUNCHERS[1], "0404", strict=True)))  # Gloo needs none
    with pytest.raises(JobError) as refused:
        settle(launched(0, 4))
    assert str(refused.value) == (
        "/dev/shm: expected 16 MB of shared memory for 4 ranks on this host, found 15 "
        "(docker run --shm-size=64m)"
    )
