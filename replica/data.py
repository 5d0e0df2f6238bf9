"""Verify, load and split a data set in MNIST's format, and draw batches of it.

Images stay uint8 everywhere. A data set is four IDX files, plain or .gz, or one
``mnist.npz`` as Keras has it. The sample in the repository needs no network.
"""

import functools
import gzip
import hashlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replica import JobError
from replica.params import IMAGE_PIXELS

SAMPLE = Path(__file__).with_name("sample")
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


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
class Sizes:
    """Where a data set came from, the samples in its parts, and a digest of all."""

    source: str
    train: int
    validation: int
    test: int
    sha256: str

    def content(self) -> dict:
        """What must be equal on all ranks, by the names that an error gives it."""
        return {
            "training samples": self.train,
            "validation samples": self.validation,
            "test samples": self.test,
            "the data's SHA-256": self.sha256,
        }


@dataclass(frozen=True)
class Dataset:
    """The three parts of a data set, and where it came from."""

    train: Split
    validation: Split
    test: Split
    source: str

    @functools.cached_property
    def sizes(self) -> Sizes:
        """What a rank without the data set needs to know of it."""
        parts = (self.train, self.validation, self.test)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.images)
            digest.update(part.labels)
        return Sizes(self.source, *map(len, parts), digest.hexdigest()[:16])


def load(data_dir: str | None, num_classes: int = 10) -> Dataset:
    """The data set in ``data_dir``, or the sample in the repository.

    The first twelfth of the training samples, 5,000 at the most, is for validation.

    Raises:
        JobError: a file is missing, damaged or does not fit the model.
    """
    folder = Path(data_dir) if data_dir else SAMPLE
    archive = folder / "mnist.npz"
    if not missing(folder):
        splits = [_load_idx(folder, prefix) for prefix in ("train", "t10k")]
        source = str(folder) if data_dir else "the repository's sample"
    elif archive.exists():
        if len(missing(folder)) < len(FILES):
            raise JobError(
                f"{folder}: expected mnist.npz or the four IDX files, found mnist.npz "
                f"and some of them, without {missing_text(folder)}"
            )
        splits = _load_npz(archive)
        source = str(archive)
    else:
        raise JobError(f"{folder}: these files are missing: {missing_text(folder)}")
    train, test = (
        _checked(split, num_classes, f"{source}: {name} set")
        for split, name in zip(splits, ("training", "test"), strict=True)
    )
    held_out = min(len(train) // 12, 5000)
    if not held_out:
        raise JobError(
            f"{source}: expected at least 12 training samples, found {len(train)}"
        )
    return Dataset(train[held_out:], train[:held_out], test, source)


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


def find(folder: Path, name: str) -> Path | None:
    """The file ``name``, plain or .gz."""
    paths = (folder / name, folder / f"{name}.gz")
    return next((path for path in paths if path.exists()), None)


def missing(folder: Path) -> list[str]:
    """Those of the four files that are not in ``folder``."""
    return [name for name in FILES if find(folder, name) is None]


def missing_text(folder: Path) -> str:
    """The missing files as an error names them."""
    return f"{', '.join(missing(folder))} (plain or .gz)"


def unpack(path: Path, limit: int | None = None) -> bytes:
    """The content of a plain or gzip file; gzip's own checksum is verified."""
    if not path.is_file():  # a pipe would be waited for
        raise OSError("not a regular file")
    if path.suffix not in (".gz", ".part"):
        return path.read_bytes()
    with gzip.open(path) as file:
        content = file.read() if limit is None else file.read(limit + 1)
    if limit is not None and len(content) != limit:
        raise ValueError(f"expected {limit} bytes, found {len(content)} or more")
    return content


def _load_idx(folder: Path, prefix: str) -> Split:
    images = _read_idx(find(folder, f"{prefix}-images-idx3-ubyte"), dimensions=3)
    labels = _read_idx(find(folder, f"{prefix}-labels-idx1-ubyte"), dimensions=1)
    return Split(images, labels)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array in an IDX file: magic number, big-endian sizes, values."""
    try:
        content = unpack(path)
    except (OSError, EOFError, zlib.error) as error:
        raise JobError(
            f"{path}: damaged or unreadable ({error}); replace it, or remove it to "
            "have MNIST's fetched if the others are MNIST's"
        ) from error
    head = 4 + 4 * dimensions
    magic = 0x0800 + dimensions  # unsigned bytes, so many dimensions
    found = struct.unpack(">I", content[:4])[0] if len(content) >= head else None
    if found != magic:
        raise JobError(
            f"{path}: expected an IDX file with magic number {magic}, "
            f"found {found if found is not None else f'{len(content)} bytes'}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    expected = head + math.prod(shape)
    if len(content) != expected or 0 in shape:
        raise JobError(
            f"{path}: expected {expected} bytes for {shape}, and no size 0, "
            f"found {len(content)}"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _load_npz(path: Path) -> list[Split]:
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        with np.load(path, allow_pickle=False) as arrays:
            return [
                Split(arrays[f"x_{part}"], arrays[f"y_{part}"])
                for part in ("train", "test")
            ]
    except KeyError as error:
        raise JobError(
            f"{path}: expected x_train, y_train, x_test and y_test: {error}"
        ) from error
    except Exception as error:  # a damaged file can raise any, in zipfile and NumPy
        text = f"{path}: damaged or unreadable: {type(error).__name__}: {error}"
        raise JobError(" ".join(text.split())) from error


def _checked(split: Split, num_classes: int, what: str) -> Split:
    """One row a sample, as the model takes them, if images and labels fit it."""
    images, labels = split.images, split.labels
    for array, kind in ((images, "images"), (labels, "labels")):
        if array.dtype != np.uint8:
            raise JobError(f"{what}: expected uint8 {kind}, found {array.dtype}")
    size = (IMAGE_PIXELS, IMAGE_PIXELS)
    if images.ndim != 3 or images.shape[1:] != size:
        raise JobError(
            f"{what}: expected images of shape {size}, found {images.shape[1:]}"
        )
    if labels.shape != (len(images),):
        raise JobError(
            f"{what}: expected one label for each of the {len(images)} images, "
            f"found {labels.shape}"
        )
    if not len(labels):
        raise JobError(f"{what}: expected at least one sample, found none")
    if labels.max() >= num_classes:
        raise JobError(
            f"{what}: expected labels from 0 to {num_classes - 1}, found "
            f"{labels.max()} at sample {labels.argmax()}; --num_classes sets the number"
        )
    return Split(images.reshape(len(images), -1), labels)
