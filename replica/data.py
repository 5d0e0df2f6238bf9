"""Fetch, verify, load and split a data set in MNIST's format, and draw batches of it.

Images stay uint8 everywhere. A data set is four IDX files, plain or .gz, or one
``mnist.npz`` as Keras has it. The sample in the repository needs no network.
"""

import contextlib
import gzip
import hashlib
import os
import struct
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock

from replica import report
from replica.params import IMAGE_PIXELS
from replica.report import Refusal

SAMPLE = Path(__file__).with_name("sample")

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


@dataclass(frozen=True)
class Split:
    """Images, uint8 [samples, pixels], and their labels, uint8 [samples]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> "Split":
        return Split(self.images[part], self.labels[part])


@dataclass(frozen=True)
class Dataset:
    """The three parts of a data set, and where it came from."""

    train: Split
    validation: Split
    test: Split
    source: str


def load(data_dir: str | None, num_classes: int = 10) -> Dataset:
    """The data set in ``data_dir``, or the sample in the repository.

    The first twelfth of the training samples, 5,000 at the most, is for validation.

    Raises:
        Refusal: a file is missing, damaged or does not fit the model.
    """
    folder = Path(data_dir) if data_dir else SAMPLE
    archive = folder / "mnist.npz"
    if not _missing(folder):
        splits = [_load_idx(folder, prefix) for prefix in ("train", "t10k")]
        source = str(folder) if data_dir else "the repository's sample"
    elif archive.exists():
        splits = _load_npz(archive)
        source = str(archive)
    else:
        raise Refusal(f"{folder}: these files are missing: {_missing_text(folder)}")
    train, test = (
        _checked(split, num_classes, f"{source}: {name} set")
        for split, name in zip(splits, ("training", "test"), strict=True)
    )
    held_out = min(len(train) // 12, 5000)
    if not held_out:
        raise Refusal(f"{source}: expected 12 training samples, found {len(train)}")
    return Dataset(train[held_out:], train[:held_out], test, source)


def fetch(
    data_dir: str | None,
    mirrors: tuple[str, ...] = MIRRORS,
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
        Refusal: no mirror gave a file, or the folder cannot be written.
    """
    if data_dir is None:
        return
    folder = Path(data_dir)
    if _complete(folder):
        return
    if not leader:
        deadline = time.monotonic() + len(MNIST) * len(mirrors) * FILE_SECONDS
        while not _complete(folder):
            if time.monotonic() > deadline:
                raise Refusal(f"{folder}: nobody has fetched the data set")
            time.sleep(0.1)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".fetch.lock"):  # two jobs on one host
            _refuse_mixture(folder)
            for name in _missing(folder):
                _fetch_file(folder, name, mirrors, silence)
    except OSError as error:
        raise Refusal(f"{folder}: cannot store the data set: {error}") from error


class Sampler:
    """Which samples make up a batch, by the number of its ticket alone.

    The samples are a stream: one permutation of the data set for each epoch, drawn from
    (seed, epoch), one behind the other. Ticket t is the stream's positions t * batch to
    (t + 1) * batch. So nothing is dropped: each sample comes once in every epoch,
    however many workers draw tickets, and a batch may reach into the next epoch.
    """

    def __init__(self, size: int, batch: int, seed: int):
        self.size, self.batch_size, self.seed = size, batch, seed
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, ticket: int) -> np.ndarray:
        """Indices, int32 [batch], of the samples of one ticket."""
        return self.batches(range(ticket, ticket + 1))[0]

    def batches(self, tickets: range) -> np.ndarray:
        """Indices, int32 [tickets, batch], of the samples of several tickets."""
        positions = np.add.outer(
            np.asarray(tickets, np.int64) * self.batch_size, np.arange(self.batch_size)
        )
        epochs, offsets = np.divmod(positions, self.size)
        indices = np.empty(positions.shape, np.int32)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            inside = epochs == epoch
            indices[inside] = self._order(epoch)[offsets[inside]]
        return indices

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            for old in [e for e in self._orders if e < epoch - 1]:
                del self._orders[old]
            rng = np.random.default_rng((self.seed, epoch))
            self._orders[epoch] = rng.permutation(self.size).astype(np.int32)
        return self._orders[epoch]


def _find(folder: Path, name: str) -> Path | None:
    """The file ``name``, plain or .gz."""
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.exists()), None)


def _missing(folder: Path) -> list[str]:
    return [name for name in MNIST if _find(folder, name) is None]


def _missing_text(folder: Path) -> str:
    return f"{', '.join(_missing(folder))} (plain or .gz)"


def _complete(folder: Path) -> bool:
    return not _missing(folder) or (folder / "mnist.npz").exists()


def _refuse_mixture(folder: Path) -> None:
    """Files that are there already must be MNIST's, or a fetch would mix two sets."""
    for name in MNIST:
        path = _find(folder, name)
        if path is None:
            continue
        try:
            digest = hashlib.sha256(_unpack(path)).hexdigest()
        except (OSError, EOFError, zlib.error):
            digest = "damaged"
        if digest != MNIST[name][0]:
            raise Refusal(
                f"{folder}: these files are missing: {_missing_text(folder)}; they are "
                f"not fetched, since {path.name} is not MNIST's"
            )


def _fetch_file(
    folder: Path, name: str, mirrors: tuple[str, ...], silence: float
) -> None:
    """Fetch one file from the first mirror that has it with the right content."""
    failures = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{name}.gz"
        partial = folder / f".{name}.{os.getpid()}.part"
        try:
            _download(url, partial, silence)
            content = _unpack(partial, limit=MNIST[name][1])
            found = hashlib.sha256(content).hexdigest()
            if found != MNIST[name][0]:
                raise ValueError(
                    f"expected SHA-256 {MNIST[name][0][:12]}..., found {found[:12]}..."
                )
            partial.replace(folder / f"{name}.gz")
            return
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', None) or error}")
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            failures.append(f"{url}: not the file ({error})")
        finally:
            partial.unlink(missing_ok=True)
        report.say(f"fetch: {failures[-1]}")
    raise Refusal(
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


def _unpack(path: Path, limit: int | None = None) -> bytes:
    """The content of a plain or gzip file; gzip's own checksum is verified."""
    if path.suffix not in (".gz", ".part"):
        return path.read_bytes()
    with gzip.open(path) as file:
        content = file.read() if limit is None else file.read(limit + 1)
    if limit is not None and len(content) != limit:
        raise ValueError(f"expected {limit} bytes, found {len(content)} or more")
    return content


def _load_idx(folder: Path, prefix: str) -> Split:
    images = _read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"), dimensions=3)
    labels = _read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"), dimensions=1)
    return Split(images, labels)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array in an IDX file: magic number, big-endian sizes, values."""
    try:
        content = _unpack(path)
    except (OSError, EOFError, zlib.error) as error:
        raise Refusal(
            f"{path}: damaged or unreadable ({error}); remove it to fetch it again"
        ) from error
    head = 4 + 4 * dimensions
    magic = 0x0800 + dimensions  # unsigned bytes, so many dimensions
    found = struct.unpack(">I", content[:4])[0] if len(content) >= head else None
    if found != magic:
        raise Refusal(
            f"{path}: expected an IDX file with magic number {magic}, "
            f"found {found if found is not None else f'{len(content)} bytes'}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    expected = head + int(np.prod(shape, dtype=np.int64))
    if len(content) != expected:
        raise Refusal(
            f"{path}: expected {expected} bytes for {shape}, found {len(content)}"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _load_npz(path: Path) -> list[Split]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return [
                Split(arrays[f"x_{part}"], arrays[f"y_{part}"])
                for part in ("train", "test")
            ]
    except KeyError as error:
        raise Refusal(
            f"{path}: expected x_train, y_train, x_test and y_test: {error}"
        ) from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Refusal(f"{path}: damaged or unreadable: {error}") from error


def _checked(split: Split, num_classes: int, what: str) -> Split:
    """One row a sample, as the model takes them, if images and labels fit it."""
    images, labels = split.images, split.labels
    for array, kind in ((images, "images"), (labels, "labels")):
        if array.dtype != np.uint8:
            raise Refusal(f"{what}: expected uint8 {kind}, found {array.dtype}")
    size = (IMAGE_PIXELS, IMAGE_PIXELS)
    if images.ndim != 3 or images.shape[1:] != size:
        raise Refusal(
            f"{what}: expected images of shape {size}, found {images.shape[1:]}"
        )
    if labels.shape != (len(images),):
        raise Refusal(
            f"{what}: expected one label for each of the {len(images)} images, "
            f"found {labels.shape}"
        )
    if not len(labels):
        raise Refusal(f"{what}: expected at least one sample, found none")
    if labels.max() >= num_classes:
        raise Refusal(
            f"{what}: expected labels from 0 to {num_classes - 1}, found "
            f"{labels.max()} at sample {labels.argmax()}; --num_classes sets the number"
        )
    return Split(images.reshape(len(images), -1), labels)
