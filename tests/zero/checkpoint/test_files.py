"""zero/checkpoint/files.py: a file is whole or not there, and what is wrong with a file is said in one line."""

import os

import pytest

from zero.checkpoint.files import FileSum, atomic_write, corruption_message, file_sum, find_corruption, link_or_copy


def test_a_block_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    for content in ("first", "second"):
        with atomic_write(str(path)) as temporary:
            with open(temporary, "w") as file:
                file.write(content)
            assert path.exists() == (content == "second")
        assert path.read_text() == content

    def fail_halfway():
        with atomic_write(str(path)) as temporary, open(temporary, "w") as file:
            file.write("third")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail_halfway()
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("link", [False, True])
def test_another_name(tmp_path, link):
    """A linked file is one file under two names, a copied one is two files; both replace what had the name."""
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_text("new")
    other.write_text("old")
    (tmp_path / "other.tmp").write_text("left by a killed process")
    link_or_copy(str(path), str(other), link)
    assert other.read_text() == "new"
    assert path.samefile(other) == link
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]


def test_damage_is_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"123456789")
    sums = {name: file_sum(str(tmp_path / name)) for name in ("a", "b")}
    assert sums["a"] == FileSum(9, 0xCBF43926)  # the check value of CRC-32
    assert find_corruption(str(tmp_path), sums) is None
    (tmp_path / "b").write_bytes(b"123456780")
    assert find_corruption(str(tmp_path), sums) == f"the checksum of {tmp_path / 'b'} does not hold"
    (tmp_path / "b").write_bytes(b"1234567")
    assert find_corruption(str(tmp_path), sums) == f"{tmp_path / 'b'} has 7 bytes instead of 9"
    (tmp_path / "b").unlink()
    assert find_corruption(str(tmp_path), sums) == f"there is no {tmp_path / 'b'}"


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("first line\nsecond line", "x is damaged, or not a checkpoint: first line"),
        ("Weights only load failed. Read this\nbad magic", "x is damaged, or not a checkpoint: bad magic"),
        (EOFError(), "x is damaged, or not a checkpoint: EOFError"),
        (
            "Unsupported global: GLOBAL posix.system was not",
            "x asks for posix.system; a checkpoint holds tensors and plain values",
        ),
    ],
)
def test_one_line_on_a_damaged_file(reason, expected):
    assert corruption_message("x", reason).startswith(expected)
    assert "\n" not in corruption_message("x", reason)
