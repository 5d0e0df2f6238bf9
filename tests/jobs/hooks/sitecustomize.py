"""Runs $FAULT at the start of the rank $FAULT_RANK ("all": of every rank) of a job.

With this folder on PYTHONPATH, a test makes one rank misbehave in a program that is
started exactly as a user starts it.
"""

import os

rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK"))
if rank is not None and os.environ.get("FAULT_RANK") in (rank, "all"):
    exec(os.environ["FAULT"])
