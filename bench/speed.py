"""Steps per second of train.py, without communication, and of a plain Horovod loop.

    make bench ARGS="--rounds 5 --data_dir DIR"

All in one run, in turns (A B C, A B C, ...), since a machine's speed drifts: compare
the figures of one run only. Prints medians, their spread and ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OURS, LIMIT, PEER = (
    "train.py",
    "bench/no_allreduce.py",
    "bench/peers/horovod_loop.py",
)
# Program, ranks, steps: each takes a few seconds at the rate that it reaches.
RUNS = [
    *((OURS, 1, 2000), (OURS, 2, 2000), (LIMIT, 2, 2000), (PEER, 2, 200)),
    *((OURS, 4, 1000), (LIMIT, 4, 1000), (PEER, 4, 40)),
]
RATIOS = [
    ("2 ranks against no communication (target 0.7)", (OURS, 2), (LIMIT, 2)),
    ("2 ranks against the plain loop (target 2)", (OURS, 2), (PEER, 2)),
    ("4 ranks against no communication", (OURS, 4), (LIMIT, 4)),
    ("4 ranks against the plain loop (target 20)", (OURS, 4), (PEER, 4)),
]


def rate(program: str, ranks: int, steps: int, more: list[str]) -> float:
    """Global steps per second of one run, as the program itself reports them."""
    launcher = ["horovodrun", "-np", str(ranks)] if ranks > 1 else []
    command = [*launcher, "python", program, "--train_steps", str(steps), *more]
    if program != PEER:
        command += ["--eval_every", "0"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if "steps_per_second" in line]
    if done.returncode or not lines:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(lines[-1][lines[-1].index("{") :])["steps_per_second"]


def main() -> None:
    """Measure, then print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--data_dir", help="default: the sample")
    args = parser.parse_args()
    more = ["--data_dir", args.data_dir] if args.data_dir else []
    rates: dict[tuple[str, int], list[float]] = {run[:2]: [] for run in RUNS}
    for number in range(args.rounds):
        for program, ranks, steps in RUNS:
            rates[program, ranks].append(rate(program, ranks, steps, more))
            found = rates[program, ranks][-1]
            print(
                f"round {number + 1}: {program} {ranks}: {found:.0f}", file=sys.stderr
            )
    print(f"{os.cpu_count()} cores, {args.rounds} rounds, batch 100 per rank\n")
    print(f"{'steps per second':32} ranks  median      min      max")
    for (program, ranks), found in rates.items():
        median = statistics.median(found)
        spread = f"{min(found):7.0f}  {max(found):7.0f}"
        print(f"{program:32} {ranks:5} {median:7.0f}  {spread}")
    print()
    for what, ours, other in RATIOS:
        each = [a / b for a, b in zip(rates[ours], rates[other], strict=True)]
        print(
            f"{what}: {statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})"
        )


if __name__ == "__main__":
    main()
