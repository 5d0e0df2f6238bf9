"""Four real ranks that start at once in an empty folder."""

import collections
import hashlib
import http.server
import threading

import pytest
from conftest import ROOT, fault, run

from replica import data

# The sample stands for MNIST, so that no test needs the full set.
DIGESTS = {
    name: (
        hashlib.sha256(content).hexdigest(),
        len(content),
    )
    for name in data.FILES
    for content in [data.unpack(data.SAMPLE / f"{name}.gz")]
}
SAMPLE_IS_MNIST = f"import replica.fetch as fetch\nfetch.MNIST = {DIGESTS!r}"


@pytest.fixture
def mirror():
    class Sample(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(data.SAMPLE))

        def do_GET(self):
            server.gets[self.path] += 1
            super().do_GET()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sample)
    server.gets = collections.Counter()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_four_ranks_at_once_make_one_get_a_file(mirror, tmp_path):
    command = (
        "mpirun --hostfile hostfile.example -np 4 python train.py --train_steps 5 "
        f"--data_dir {tmp_path}/new --mirrors http://127.0.0.1:{mirror.server_port}"
    )
    job = run(command, **fault("all", SAMPLE_IS_MNIST))
    assert job.code == 0, job.err
    assert job.final["steps"] == 5
    assert mirror.gets == {f"/{name}.gz": 1 for name in data.FILES}
    assert "5500 training" in job.err


def test_download_only_fetches_and_stops(mirror, tmp_path):
    command = (
        f"mpirun -np 2 python train.py --download_only --data_dir {tmp_path} "
        f"--mirrors http://127.0.0.1:{mirror.server_port}"
    )
    job = run(command, limit=20, **fault("all", SAMPLE_IS_MNIST))
    assert job.code == 0, job.err
    assert sum(mirror.gets.values()) == 4
    assert job.out == ""
    assert job.count("is complete") == 1
    assert len(data.load(str(tmp_path)).train) == 5500


def test_the_sample_needs_no_network():
    assert (ROOT / "replica" / "sample" / "README.md").exists()
    job = run("python train.py --train_steps 1 --mirrors http://127.0.0.1:9")
    assert job.code == 0, job.err
