import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replica import JobError, report
from replica.report import Evaluation

ROOT = Path(__file__).parents[2]


def process(code: str, rank: int = 0, **how) -> subprocess.CompletedProcess:
    """A process of its own, since what it shows is how a process ends."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    slot = {f"HOROVOD_{n}": str(v) for n, v in zip(names, (rank, 4) * 2, strict=True)}
    return subprocess.run(
        [sys.executable, "-c", f"from replica import report\n{code}"],
        cwd=ROOT,
        env=os.environ | slot,
        capture_output=True,
        text=True,
        timeout=30,
        **how,
    )


def test_means_are_of_sums():
    evaluation = Evaluation(loss_sum=30.0, correct=45.0, samples=60.0)
    assert (evaluation.loss, evaluation.accuracy) == (0.5, 0.75)


def test_only_the_root_writes(monkeypatch, capsys):
    report.say("a line")
    report.final({"steps": 3})
    monkeypatch.setenv("HOROVOD_RANK", "1")
    for name in ("SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"HOROVOD_{name}", "2")
    report.say("another line")
    report.final({"steps": 4})
    assert report.progress(3, "step").disable
    shown = capsys.readouterr()
    assert shown.err == "a line\n"
    assert json.loads(shown.out) == {"steps": 3}


def test_no_bar_without_a_terminal(monkeypatch):
    assert report.progress(3, "step").disable
    monkeypatch.setattr(sys, "stderr", type("Terminal", (io.StringIO,), {})())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert not report.progress(3, "step").disable


def test_each_line_is_one_write(monkeypatch):
    class Writes(list):
        write = list.append

        def flush(self):
            pass

    writes = Writes()
    monkeypatch.setattr(sys, "stderr", writes)
    report.say("one line")
    report.write("two\nlines")
    assert writes == ["one line\n", "two\nlines\n"]


def test_quiet_stderr_drops_unless_the_block_raises():
    noise = "import os\nwith report.quiet_stderr():\n    os.write(2, b'noise\\n')\n"
    assert process(noise).stderr == ""
    failed = process(f"{noise}    raise ValueError('why')")
    assert "noise" in failed.stderr
    assert "why" in failed.stderr


def test_a_refusal_is_one_line_and_its_code():
    code = (
        "def main():\n    raise report.JobError('what', code=2)\nreport.run(main, 'p')"
    )
    done = process(code)
    assert (done.returncode, done.stderr) == (2, "p: error: what\n")


def test_other_ranks_hold_their_errors_back_and_then_tell_the_rank():
    began = time.monotonic()
    code = "def main():\n    raise report.JobError('what')\nreport.run(main, 'p')"
    done = process(code, rank=3)
    assert (done.returncode, done.stderr) == (1, "p: error: rank 3: what\n")
    assert time.monotonic() - began > report.HOLD_BACK_SECONDS


@pytest.mark.parametrize(
    ("redirection", "why"), [(">&-", "closed"), (">/dev/full", "No space left")]
)
def test_a_final_line_that_cannot_be_written_goes_to_stderr(redirection, why):
    code = "report.run(lambda: report.final({'steps': 3}), 'p')"
    program = f'{sys.executable} -c "from replica import report; {code}" {redirection}'
    done = subprocess.run(
        program, shell=True, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=30
    )
    assert done.returncode == 1
    line, error = done.stderr.splitlines()
    assert json.loads(line) == {"steps": 3}
    assert "p: error: stdout: cannot write to it" in error
    assert why in error


def test_a_closed_stderr_stops_nothing():
    code = "report.run(lambda: (report.say('a'), report.final({'steps': 3})), 'p')"
    program = f'{sys.executable} -c "from replica import report; {code}" 2>&- <&-'
    done = subprocess.run(
        program, shell=True, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=30
    )
    assert (done.returncode, json.loads(done.stdout)) == (0, {"steps": 3})


@pytest.mark.parametrize(
    ("main", "code"),
    [
        ("report.final({'steps': 3})", 0),
        ("(report.say('a'), report.final({'steps': 3}))", 0),
        ("report._tell('a', False), 1 / 0", 1),
    ],
)
def test_a_full_stderr_costs_neither_the_final_line_nor_the_code(main, code):
    program = f"from replica import report; report.run(lambda: ({main}), 'p')"
    done = subprocess.run(
        f'{sys.executable} -c "{program}" 2>/dev/full',
        shell=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
    )
    assert done.returncode == code
    assert code or json.loads(done.stdout) == {"steps": 3}


def test_too_little_memory_is_one_line():
    code = "import numpy; report.run(lambda: numpy.zeros(1 << 58), 'p')"
    done = process(code)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("p: error: rank 0: not enough memory: Unable to allocate")


def test_an_unexpected_error_tells_rank_and_traceback():
    done = process("def main():\n    1 / 0\nreport.run(main, 'p')")
    assert done.returncode == 1
    assert done.stderr.startswith("p: rank 0 failed:\nTraceback")
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize(("leave", "code"), [("0", 0), ("3", 3), ("'text'", 1)])
def test_sys_exit_keeps_its_code(leave, code):
    done = process(f"import sys\nreport.run(lambda: sys.exit({leave}), 'p')")
    assert done.returncode == code


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "watchdog.beat('step 7')\ntime.sleep(20)",
            "rank 0: nothing since step 7 for 1 s (see --stall_timeout)",
        ),
        # a call that keeps all of Python's threads from running
        (
            "with watchdog.without_threads():\n    ctypes.PyDLL(None).sleep(20)",
            "Timeout",
        ),
    ],
)
def test_the_watchdog_ends_a_process_that_does_nothing_more(code, message):
    done = process(f"import ctypes, time\nwatchdog = report.Watchdog(1, 'p')\n{code}")
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "w = report.Watchdog(1, 'p')\nfor _ in range(8): time.sleep(0.2); w.beat('a')",
        "report.Watchdog(0, 'p')\ntime.sleep(1.5)",
    ],
)
def test_the_watchdog_leaves_others_alone(code):
    done = process(f"import time\n{code}")
    assert (done.returncode, done.stderr) == (0, "")


def test_job_error_has_a_code():
    assert JobError("a").code == 1
