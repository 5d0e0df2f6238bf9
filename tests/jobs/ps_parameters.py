"""ps_mode.py, with the parameters of every server saved at the end, for tests.

mpirun -np 3 python tests/jobs/ps_parameters.py PREFIX [flags]
"""

import sys

import numpy as np

import ps_mode
from replica import report


def main() -> None:
    prefix, flags = sys.argv[1], sys.argv[2:]
    serve = ps_mode.Server.serve

    def saving(self):
        found = serve(self)
        np.save(f"{prefix}{self.rank}.npy", self.vector)
        return found

    ps_mode.Server.serve = saving
    ps_mode.main(flags)


if __name__ == "__main__":
    report.run(main, "ps_parameters.py")
