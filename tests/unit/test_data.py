import contextlib
import gzip
import os
import shutil
import struct

import numpy as np
import pytest

from replica import JobError, data


def pack(array: np.ndarray) -> bytes:
    head = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write(folder, train=60, test=20, **changes) -> str:
    """A small random data set; ``changes`` replace arrays by name."""
    rng = np.random.default_rng(0)
    arrays = {}
    for prefix, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28))
        arrays[f"{prefix}-images-idx3-ubyte"] = images
        arrays[f"{prefix}-labels-idx1-ubyte"] = rng.integers(0, 10, count)
    for name, array in arrays.items():
        changed = changes.get(name.replace("-", "_"), array)
        content = changed if isinstance(changed, bytes) else pack(changed)
        (folder / name).write_bytes(content)
    return str(folder)


def refusal(folder, **how) -> str:
    with pytest.raises(JobError) as caught:
        data.load(str(folder), **how)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_sample_is_real_and_split():
    sample = data.load(None)
    assert [len(s) for s in (sample.train, sample.validation, sample.test)] == [
        *(5500, 500, 1000)
    ]
    assert sample.train.images.shape == (5500, 784)
    assert sample.train.images.dtype == sample.train.labels.dtype == np.uint8
    assert set(sample.test.labels.tolist()) == set(range(10))


def test_the_sample_is_the_head_of_mnist(full_mnist):
    full, sample = data.load(full_mnist), data.load(None)
    assert [len(s) for s in (full.train, full.validation, full.test)] == [
        *(55000, 5000, 10000)
    ]
    np.testing.assert_array_equal(
        sample.validation.images, full.validation[:500].images
    )
    np.testing.assert_array_equal(
        sample.train[:4500].images, full.validation[500:].images
    )
    np.testing.assert_array_equal(sample.train[4500:].labels, full.train[:1000].labels)
    np.testing.assert_array_equal(sample.test.images, full.test[:1000].images)


def test_plain_gzip_and_npz_load_alike(tmp_path):
    plain, packed, keras = (tmp_path / name for name in ("plain", "packed", "keras"))
    for folder in (plain, packed, keras):
        folder.mkdir()
    write(plain)
    for path in plain.iterdir():
        (packed / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    one, two = data.load(str(plain)), data.load(str(packed))
    both = [np.concatenate([one.validation.images, one.train.images])]
    both += [np.concatenate([one.validation.labels, one.train.labels])]
    np.savez(
        keras / "mnist.npz",
        x_train=both[0].reshape(-1, 28, 28),
        y_train=both[1],
        x_test=one.test.images.reshape(-1, 28, 28),
        y_test=one.test.labels,
    )
    three = data.load(str(keras))
    for other in (two, three):
        for part in ("train", "validation", "test"):
            ours, theirs = getattr(one, part), getattr(other, part)
            np.testing.assert_array_equal(ours.images, theirs.images)
            np.testing.assert_array_equal(ours.labels, theirs.labels)


def test_one_twelfth_is_for_validation_and_5000_at_the_most(tmp_path):
    loaded = data.load(write(tmp_path, train=120))
    assert (len(loaded.validation), len(loaded.train)) == (10, 110)


def test_missing_files_are_named_with_their_folder(tmp_path):
    write(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    message = refusal(tmp_path)
    assert str(tmp_path) in message
    assert "t10k-labels-idx1-ubyte" in message
    assert "train-images" not in message


def test_a_header_of_huge_sizes_is_not_believed(tmp_path):
    write(tmp_path)
    header = struct.pack(">4I", 0x803, *[2**32 - 1] * 3)
    (tmp_path / data.FILES[0]).write_bytes(header)
    assert f"expected {(2**32 - 1) ** 3 + 16} bytes" in refusal(tmp_path)


@pytest.mark.parametrize("name", data.FILES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_file_is_named(tmp_path, name, packed):
    write(tmp_path)
    path = tmp_path / name
    if packed:
        content = gzip.compress(path.read_bytes())
        path.unlink()
        path = tmp_path / f"{name}.gz"
    else:
        content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    assert path.name in refusal(tmp_path)


def test_any_flipped_bit_of_a_gzip_file_is_noticed_or_harmless(tmp_path):
    for path in data.SAMPLE.glob("*.gz"):
        shutil.copy(path, tmp_path)
    name = "t10k-labels-idx1-ubyte.gz"
    good = (data.SAMPLE / name).read_bytes()
    labels = data.load(None).test.labels
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        (tmp_path / name).write_bytes(bad)
        if place < 10:  # the header's time stamp and the like may change
            with contextlib.suppress(JobError):
                found = data.load(str(tmp_path)).test.labels
                np.testing.assert_array_equal(found, labels)
        else:
            assert name in refusal(tmp_path)


def test_wrong_magic_number_is_told(tmp_path):
    content = struct.pack(">IIII", 0x0801, 20, 28, 28) + bytes(20 * 784)
    message = refusal(write(tmp_path, t10k_images_idx3_ubyte=content))
    assert "magic number 2051" in message
    assert "2049" in message


def test_a_web_page_instead_of_data_is_told(tmp_path):
    page = b"<html>please log in</html>"
    assert "magic" in refusal(write(tmp_path, train_images_idx3_ubyte=page))


def test_more_bytes_than_the_header_says_are_told(tmp_path):
    content = pack(np.zeros(20, np.uint8)) + b"more"
    message = refusal(write(tmp_path, t10k_labels_idx1_ubyte=content))
    assert "expected 28 bytes" in message
    assert "found 32" in message


def test_labels_out_of_range_are_told_and_num_classes_allows_them(tmp_path):
    labels = np.zeros(60, np.uint8)
    labels[7] = 46
    write(tmp_path, train_labels_idx1_ubyte=labels)
    message = refusal(tmp_path)
    assert "0 to 9, found 46 at sample 7" in message
    assert "--num_classes" in message
    assert data.load(str(tmp_path), num_classes=47).train


def test_images_and_labels_of_different_number_are_told(tmp_path):
    labels = np.zeros(59, np.uint8)
    message = refusal(write(tmp_path, train_labels_idx1_ubyte=labels))
    assert "60 images" in message
    assert "59" in message


def test_images_of_another_size_are_told(tmp_path):
    images = np.zeros((60, 32, 32), np.uint8)
    message = refusal(write(tmp_path, train_images_idx3_ubyte=images))
    assert "(28, 28)" in message
    assert "(32, 32)" in message


def test_too_few_samples_for_validation_are_told(tmp_path):
    assert "12 training samples, found 11" in refusal(write(tmp_path, train=11))
    (tmp_path / "none").mkdir()
    assert "none" in refusal(write(tmp_path / "none", test=0))


@pytest.mark.parametrize("damage", ["truncated", "keys", "floats", "pickle"])
def test_a_bad_npz_is_told(tmp_path, damage):
    path = tmp_path / "mnist.npz"
    arrays = {
        "x_train": np.zeros((24, 28, 28), np.uint8),
        "y_train": np.zeros(24, np.uint8),
        "x_test": np.zeros((4, 28, 28), np.uint8),
        "y_test": np.zeros(4, np.uint8),
    }
    if damage == "keys":
        del arrays["y_test"]
    if damage == "floats":
        arrays["x_train"] = arrays["x_train"].astype(float)
    if damage == "pickle":
        arrays["x_test"] = np.array([{}], object)
    np.savez(path, **arrays)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-500])
    assert "mnist.npz" in refusal(tmp_path)


def test_an_unreadable_file_is_told(tmp_path):
    write(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").unlink()
    (tmp_path / "train-images-idx3-ubyte").mkdir()
    assert "train-images-idx3-ubyte" in refusal(tmp_path)


def encrypted(path):
    """Sets the flag of an encrypted member, in both of its headers."""
    content = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(signature) + flags] |= 1
    path.write_bytes(content)


def unknown_method(path):
    content = bytearray(path.read_bytes())
    for signature, method in ((b"PK\3\4", 8), (b"PK\1\2", 10)):
        content[content.index(signature) + method] = 99
    path.write_bytes(content)


def damaged_header(path):
    content = path.read_bytes().replace(b"'shape': (", b"'shape': ((((", 1)
    path.write_bytes(content)


def npy(path):
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


def nothing(path):
    path.write_bytes(b"")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "spoil", [encrypted, unknown_method, damaged_header, npy, nothing, pipe]
)
def test_an_archive_that_is_none_is_one_line(tmp_path, spoil):
    images, labels = np.zeros((60, 28, 28), np.uint8), np.zeros(60, np.uint8)
    path = tmp_path / "mnist.npz"
    np.savez(path, x_train=images, y_train=labels, x_test=images, y_test=labels)
    assert data.load(str(tmp_path)).train
    spoil(path)
    message = refusal(tmp_path)
    assert message.startswith(f"{path}: damaged or unreadable: ")
    assert "\n" not in message


def test_an_archive_beside_some_of_the_files_is_refused(tmp_path):
    write(tmp_path)
    (tmp_path / data.FILES[0]).unlink()
    (tmp_path / "mnist.npz").touch()
    message = refusal(tmp_path)
    assert "expected mnist.npz or the four IDX files" in message
    assert data.FILES[0] in message


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    write(tmp_path)
    pipe(tmp_path / data.FILES[1])
    assert "not a regular file" in refusal(tmp_path)


def test_sizes_of_0_are_refused(tmp_path):
    write(tmp_path)
    header = struct.pack(">4I", 0x803, 0, *[2**32 - 1] * 2)
    (tmp_path / data.FILES[0]).write_bytes(header)
    assert "no size 0" in refusal(tmp_path)


def test_the_content_of_two_data_sets_is_told_apart(tmp_path):
    one = data.load(write(tmp_path)).sizes
    again = data.load(write(tmp_path)).sizes
    labels = np.zeros(60, np.uint8)
    labels[-1] = 1
    other = data.load(write(tmp_path, train_labels_idx1_ubyte=labels)).sizes
    assert one == again
    assert [k for k in one.content() if one.content()[k] != other.content()[k]] == [
        "the data's SHA-256"
    ]
