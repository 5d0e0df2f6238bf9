"""Fetch the full MNIST, once on each host, from the first mirror that has it right."""

import gzip
import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock

from replica import JobError, data, report

# Name -> SHA-256 and bytes of the content, without gzip: mirrors may pack differently.
MNIST = {
    "train-images-idx3-ubyte": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        47_040_016,
    ),
    "train-labels-idx1-ubyte": (
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        60_008,
    ),
    "t10k-images-idx3-ubyte": (
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        7_840_016,
    ),
    "t10k-labels-idx1-ubyte": (
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        10_008,
    ),
}
MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
    "https://raw.githubusercontent.com/fgnt/mnist/master",
)
SILENCE_SECONDS = 20  # a mirror that sends nothing for so long is given up
FILE_SECONDS = 600  # and one that has not sent a whole file by then


def mnist(
    data_dir: str | None,
    mirrors: Sequence[str] = MIRRORS,
    leader: bool = True,
    silence: float = SILENCE_SECONDS,
) -> None:
    """Put the full MNIST into ``data_dir`` if it holds no data set.

    One process on each host, the leader, fetches; the others wait for it. If it fails
    it raises, and the launcher ends those who wait.

    Args:
        data_dir: the folder; None is the sample in the repository, always there.
        mirrors: addresses of folders, tried in order.
        leader: whether this process fetches.
        silence: seconds after which a mirror that sends nothing is given up.

    Raises:
        JobError: no mirror gave a file, or the folder cannot be read or written.
    """
    if data_dir is None:
        return
    folder = Path(data_dir)
    try:
        if _complete(folder):
            return
    except OSError as error:
        raise JobError(
            f"{folder}: user {os.getuid()} cannot look into it: {error.strerror}"
        ) from error
    if folder.exists() and not folder.is_dir():
        raise JobError(f"--data_dir: expected a folder, found the file {folder}")
    if not leader:
        deadline = time.monotonic() + len(MNIST) * len(mirrors) * FILE_SECONDS
        while not _complete(folder):
            if time.monotonic() > deadline:
                raise JobError(f"{folder}: nobody has fetched the data set")
            time.sleep(0.1)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".fetch.lock"):  # two jobs on one host
            _refuse_mixture(folder)
            for name in data.missing(folder):
                _fetch_file(folder, name, mirrors, silence)
    except OSError as error:
        raise JobError(f"{folder}: cannot store the data set: {error}") from error


def _complete(folder: Path) -> bool:
    return not data.missing(folder) or (folder / "mnist.npz").exists()


def _refuse_mixture(folder: Path) -> None:
    """Files that are there already must be MNIST's, or a fetch would mix two sets."""
    for name in MNIST:
        path = data.find(folder, name)
        if path is None:
            continue
        try:
            digest = hashlib.sha256(data.unpack(path)).hexdigest()
        except (OSError, EOFError, zlib.error):
            digest = "damaged"
        if digest != MNIST[name][0]:
            raise JobError(
                f"{folder}: these files are missing: {data.missing_text(folder)}; they "
                f"are not fetched, since {path.name} is not MNIST's"
            )


def _fetch_file(
    folder: Path, name: str, mirrors: Sequence[str], silence: float
) -> None:
    """Fetch one file from the first mirror that has it with the right content."""
    failures = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}.gz"
        partial = folder / f".{name}.{os.getpid()}.part"
        try:
            _download(url, partial, silence)
            content = data.unpack(partial, limit=MNIST[name][1])
            found = hashlib.sha256(content).hexdigest()
            if found != MNIST[name][0]:
                raise ValueError(
                    f"expected SHA-256 {MNIST[name][0][:12]}..., found {found[:12]}..."
                )
            partial.replace(folder / f"{name}.gz")
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', None) or error}")
        except (
            *(ValueError, EOFError, zlib.error, gzip.BadGzipFile),
            http.client.HTTPException,
        ) as error:
            failures.append(f"{url}: not the file ({error})")
        finally:
            partial.unlink(missing_ok=True)
        report.say(f"fetch: {failures[-1]}")
    raise JobError(
        f"{folder}: {name} is missing and no mirror gave it: {'; '.join(failures)}; "
        "put the files there yourself, or leave out --data_dir to use the sample"
    )


def _download(url: str, path: Path, silence: float) -> None:
    deadline = time.monotonic() + FILE_SECONDS
    with urllib.request.urlopen(url, timeout=silence) as answer, path.open("wb") as out:
        size = int(answer.headers.get("Content-Length") or 0)
        with report.progress(size, "B", scale=True) as bar:
            bar.set_description(path.name.split(".")[1])
            while block := answer.read1(1 << 16):
                out.write(block)
                bar.update(len(block))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not complete after {FILE_SECONDS} s")
    if size and path.stat().st_size != size:
        raise EOFError(f"expected {size} bytes, found {path.stat().st_size}")
