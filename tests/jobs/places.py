"""Prints where a rank was placed and what the libraries are told, without training."""

import json
import os

from replica import placement

TOLD = ("OMPI_MCA_mpi_yield_when_idle", "HOROVOD_CYCLE_TIME", "TF_NUM_INTRAOP_THREADS")

placement.settle(num_gpus=1, stall_timeout=60)
here = placement.slot()
line = {"rank": here.rank, "local_rank": here.local_rank}
line |= {"cores": sorted(os.sched_getaffinity(0))}
line |= {name: os.environ.get(name) for name in TOLD}
os.write(1, (json.dumps(line) + "\n").encode())
