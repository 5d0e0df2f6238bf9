"""The download against a local HTTP server that behaves as mirrors do."""

import collections
import functools
import gzip
import hashlib
import http.server
import threading
import time
from pathlib import Path

import pytest

from replica import JobError, data, fetch

CONTENT = {
    name: gzip.decompress((data.SAMPLE / f"{name}.gz").read_bytes())
    for name in data.FILES
}


@functools.cache
def answer(how: str, name: str) -> bytes:
    """What a mirror of that kind sends for a file."""
    content = CONTENT[name]
    changed = {
        "wrong": b"something else",
        "longer": content + b"!",
        "flipped": bytes([1]) + content[1:],
    }
    packed = gzip.compress(changed.get(how, content), compresslevel=1)
    if how == "page":
        return b"<html>Please log in</html>"
    return packed[: len(packed) // 2] if how == "half" else packed


class Mirror(http.server.BaseHTTPRequestHandler):
    """The first part of the path says how it behaves: /good, /forbidden, ..."""

    def do_GET(self):
        _, how, name = self.path.split("/")
        self.server.gets[self.path] += 1
        if how == "forbidden":
            return self.send_error(403)
        if how == "silent":
            self.server.over.wait(30)
            return None
        body = answer(how, name.removesuffix(".gz"))
        self.send_response(200)
        if how != "half":  # no length: a connection that just ends
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if how == "cut":
            body = body[: len(body) // 2]
        if how == "slow":
            for start in range(0, len(body), 1 + len(body) // 5):
                self.wfile.write(body[start : start + 1 + len(body) // 5])
                time.sleep(0.1)
        else:
            self.wfile.write(body)
        return None

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    """A mirror of the sample, which stands for MNIST here."""
    monkeypatch.setattr(
        fetch,
        "MNIST",
        {n: (hashlib.sha256(c).hexdigest(), len(c)) for n, c in CONTENT.items()},
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    server.gets, server.over = collections.Counter(), threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def fetch_from(server, folder, *behaviours, **how):
    mirrors = [f"{server.url}/{behaviour}" for behaviour in behaviours]
    fetch.mnist(str(folder), mirrors, **how)


def assert_complete(folder):
    assert {p.name for p in folder.iterdir()} - {".fetch.lock"} == {
        f"{name}.gz" for name in data.FILES
    }
    assert len(data.load(str(folder)).train) == 5500


def test_fetches_each_file_once_and_then_never_again(server, tmp_path):
    folder = tmp_path / "new" / "folder"
    fetch_from(server, folder, "good")
    assert_complete(folder)
    fetch_from(server, folder, "good")
    assert sorted(server.gets.values()) == [1, 1, 1, 1]


def test_a_slow_mirror_is_waited_for(server, tmp_path):
    fetch_from(server, tmp_path, "slow", silence=5)
    assert_complete(tmp_path)


BAD = ["forbidden", "silent", "page", "wrong", "longer", "flipped", "half", "cut"]


@pytest.mark.parametrize("behaviour", BAD)
def test_a_bad_mirror_is_passed_over(server, tmp_path, behaviour):
    fetch_from(server, tmp_path, behaviour, "good", silence=1)
    assert_complete(tmp_path)
    assert sum(server.gets.values()) == 8


def test_a_dead_mirror_is_passed_over(server, tmp_path):
    fetch.mnist(str(tmp_path), ["http://127.0.0.1:9", "nonsense", f"{server.url}/good"])
    assert_complete(tmp_path)


def test_all_mirrors_down_is_one_message_that_says_why(server, tmp_path):
    with pytest.raises(JobError) as caught:
        fetch_from(server, tmp_path, "forbidden", "page", "cut")
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(tmp_path), "train-images-idx3-ubyte", "Forbidden", "not the file"):
        assert part in message
    assert {p.name for p in tmp_path.iterdir()} <= {".fetch.lock"}


def test_what_was_fetched_before_a_failure_is_kept(server, tmp_path):
    fetch_from(server, tmp_path, "good")
    (tmp_path / f"{data.FILES[3]}.gz").unlink()
    fetch_from(server, tmp_path, "good")
    assert sorted(server.gets.values()) == [1, 1, 1, 2]
    assert_complete(tmp_path)


def test_another_data_set_is_not_completed_with_mnist(server, tmp_path):
    fetch_from(server, tmp_path, "good")
    (tmp_path / f"{data.FILES[3]}.gz").unlink()
    (tmp_path / f"{data.FILES[1]}.gz").write_bytes(gzip.compress(b"fashion"))
    with pytest.raises(JobError, match=f"missing: {data.FILES[3]}.*{data.FILES[1]}"):
        fetch_from(server, tmp_path, "good")
    assert sum(server.gets.values()) == 4


def test_files_that_are_there_need_no_network(server, tmp_path):
    fetch_from(server, tmp_path, "good")
    fetch.mnist(str(tmp_path), ["http://127.0.0.1:9"])
    fetch.mnist(None, ["http://127.0.0.1:9"])
    (tmp_path / "npz").mkdir()
    (tmp_path / "npz" / "mnist.npz").touch()
    fetch.mnist(str(tmp_path / "npz"), ["http://127.0.0.1:9"])


def test_four_at_once_make_one_get_a_file(server, tmp_path):
    args = (str(tmp_path), [f"{server.url}/slow"])
    threads = [threading.Thread(target=fetch.mnist, args=args) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert_complete(tmp_path)
    assert sorted(server.gets.values()) == [1, 1, 1, 1]


def test_followers_wait_for_the_leader(server, tmp_path):
    args = (str(tmp_path), [f"{server.url}/good"])
    follower = threading.Thread(target=fetch.mnist, args=(*args, False))
    follower.start()
    time.sleep(0.3)
    assert follower.is_alive()
    assert not server.gets
    fetch.mnist(*args)
    follower.join(timeout=10)
    assert not follower.is_alive()


def test_a_file_in_the_folders_place_is_told(tmp_path):
    (tmp_path / "mnist").write_text("")
    for leader in (True, False):
        with pytest.raises(JobError, match="expected a folder, found the file"):
            fetch.mnist(str(tmp_path / "mnist"), ["http://127.0.0.1:9"], leader)


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), None])
def test_a_folder_that_cannot_be_read_is_told(monkeypatch, tmp_path, error):
    folder = tmp_path / ("x" * 300 if error is None else "mine")  # or too long a name
    if error:  # root, as whom tests may run, reads all

        def stat(*_, **__):
            raise error

        monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(JobError, match=r"^/.*: user \d+ cannot look into it: ") as told:
        fetch.mnist(str(folder), [], leader=True)
    assert (error.strerror if error else "File name too long") in str(told.value)


def test_a_folder_that_cannot_be_written_is_told(server, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="cannot store"):
        fetch_from(server, tmp_path / "file" / "mnist", "good")


def test_the_built_in_digests_are_mnists(full_mnist):
    for name, (digest, size) in fetch.MNIST.items():
        content = data.unpack(data.find(Path(full_mnist), name))
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (digest, size)
