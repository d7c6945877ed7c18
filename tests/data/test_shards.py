"""data/shards.py: many token files as one array, and their formats."""

import json
import os
import pickle
import resource
import shutil
import zlib
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from scripts import FEW, Forked, run, torch_load, training

from data import common
from data.dataset import Dataset
from data.shards import Shards, paths_of
from data.vocabulary import DataError

BLOCK = 8


def llm_c(tokens, magic=20240520, version=1, dtype=np.uint16, count=None):
    header = np.zeros(256, dtype=np.int32)
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, dtype=dtype).tobytes()


def plain(tokens, dtype=np.uint16):
    return np.asarray(tokens, dtype=dtype).tobytes()


PAIRS = np.random.default_rng(0).integers((40_000, 8), size=(1000, 2)).ravel()  # uint16 tokens that look like uint32

FORMATS = {
    "plain": [plain],
    "llm.c": [llm_c],
    "uint32": [lambda tokens: llm_c(tokens, 20240801, 7, np.uint32)],
    "mixed": [plain, llm_c, lambda tokens: llm_c(tokens, version=7, dtype=np.uint32)],
}


def write_shards(folder, tokens, number, formats, val=range(1000)):
    """Cut tokens into files of different lengths."""
    cuts = np.linspace(0, len(tokens), number + 1).astype(int) + np.arange(number + 1) % 3
    cuts[0], cuts[-1] = 0, len(tokens)
    os.makedirs(folder, exist_ok=True)
    for i, (begin, end) in enumerate(pairwise(cuts)):
        (folder / f"text_train_{i + 1:06d}.bin").write_bytes(FORMATS[formats][i % len(FORMATS[formats])](tokens[begin:end]))
    (folder / "text_val_000000.bin").write_bytes(FORMATS[formats][0](val))
    return str(folder)


def test_slices_cross_files(tmp_path):
    tokens = np.arange(20_000)
    data = Dataset(write_shards(tmp_path / "d", tokens, 200, "mixed"), BLOCK)
    shards = data.tokens["train"]
    for start, stop in ((0, 5), (95, 110), (0, 20_000), (19_990, 30_000), (7, 7), (20_000, 20_005), (150, 420)):
        assert np.array_equal(shards[start:stop], tokens[start:stop])
    with pytest.raises(DataError, match=r"train_000200\.bin holds token 19999, but the model's vocabulary has 19999"):
        data.check(19_999, part=1, parts=2)


def test_half_of_the_files_that_may_be_open_are_of_shards(tmp_path):
    write_shards(tmp_path / "d", range(20_000), 200, "mixed")
    (tmp_path / "script.py").write_text(f"""
import json
import os
from data.dataset import Dataset
data = Dataset({str(tmp_path / "d")!r}, {BLOCK})
for tokens in data.tokens.values():
    for start in range(0, len(tokens), 10):
        tokens[start : start + 10]
print(sum(os.path.realpath("/proc/self/fd/" + number).endswith(".bin") for number in os.listdir("/proc/self/fd")))
""")
    limited = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (100, 100))
    assert run(str(tmp_path / "script.py"), before=limited).succeeded().stdout == "50\n"


def test_a_file_that_was_replaced_is_read_again_and_a_header_tells_what_seems_to_be_uint32(tmp_path):
    uint32 = llm_c(PAIRS[::2], version=7, dtype=np.uint32)
    for content, tokens in ((plain(range(100)), range(100)), (llm_c(PAIRS), PAIRS), (uint32, PAIRS[::2])):
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").replace(tmp_path / "train.bin")
        assert Shards([str(tmp_path / "train.bin")], None)[:].tolist() == list(tokens)


@pytest.mark.parametrize(
    ("content", "vocab_size", "message"),
    [
        (llm_c(range(300), version=2), None, "has a header of version 2; write version 1"),
        (llm_c(range(300), count=301), None, "has 1624 bytes, but 301 uint16 tokens and the header would take 1626"),
        (llm_c(range(300), version=7), None, "has 1624 bytes, but 300 uint32 tokens and the header would take 2224"),
        (llm_c(range(300), count=-100)[:824], None, "has 824 bytes, but 4294967196 uint16 tokens"),
        (llm_c(range(300))[:600], None, "has 600 bytes, but 300 uint16 tokens"),
        (llm_c(range(300)), 70_000, "holds uint16 tokens, too small for a vocabulary of 70000"),
        (plain(range(300))[:-1], None, "has 599 bytes, but each uint16 token takes 2"),
        (plain(range(301)), 70_000, "has 602 bytes, but each uint32 token takes 4"),
        (plain(range(300), np.uint32), None, "seems to hold uint32 tokens, but GPT-2's vocabulary has uint16 tokens"),
        (plain(range(300), np.uint32), 300, "seems to hold uint32 tokens, but a vocabulary of 300 has uint16 tokens"),
        (plain(range(0, 120_000, 401), np.uint32), None, "seems to hold uint32 tokens"),
        (plain([0] * 9000 + [*range(5000)], np.uint32), None, "seems to hold uint32 tokens"),
        (plain(PAIRS), None, r"seems to hold uint32 .*; write the header of llm.c before them \(version 1 if they are"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, content, vocab_size, message):
    folder = write_shards(tmp_path / "d", range(3000), 3, "uint32")
    (tmp_path / "d" / "text_train_000002.bin").write_bytes(content)
    if vocab_size:
        (tmp_path / "d" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
    with pytest.raises(DataError, match=f"text_train_000002.bin {message}"):
        Dataset(folder, BLOCK)


OTHERS = {
    "NumPy": lambda path: np.save(path, np.arange(1000, dtype=np.uint16)),
    "NumPy, several": lambda path: np.savez(path, np.arange(1000)),
    "torch": lambda path: torch.save(torch.arange(1000), path),
    "Parquet": lambda path: path.write_bytes(b"PAR1" * 20),
    "text": lambda path: path.write_text("To be, or not to be\n" * 50),
    "text in another script": lambda path: path.write_text("в начале было слово " * 50),
    "numbers as text": lambda path: path.write_text(", ".join(map(str, range(200)))),
    "an error page": lambda path: path.write_text("<!DOCTYPE html>\n<html>" + 20 * "not found "),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_of_another_kind_is_no_token_file(kind, tmp_path):
    other = tmp_path / ("other.npz" if kind == "NumPy, several" else "other.npy")
    OTHERS[kind](other)
    for split in ("train", "val"):
        (tmp_path / f"{split}.bin").write_bytes(other.read_bytes()[: other.stat().st_size // 2 * 2])
    with pytest.raises(DataError, match=r"train.bin is no token file, but a text or a file of another program"):
        Dataset(str(tmp_path), BLOCK)


def test_a_large_vocabulary_has_uint32_files(tmp_path):
    tokens = np.arange(0, 200_000, 100)
    common.write_dataset(str(tmp_path), tokens, tokens, {"vocab_size": 200_000})
    assert (tmp_path / "train.bin").stat().st_size == 8000
    data = Dataset(str(tmp_path), BLOCK)
    assert np.array_equal(data.batch("train", np.array([3]))[1, 0], tokens[4 : 4 + BLOCK])
    data.check(200_000)


@pytest.mark.parametrize(
    ("names", "train"),
    [
        (["train.bin", "val.bin"], ["train.bin"]),
        (["b_train_2.bin", "b_train_1.bin", "a_train_3.bin", "val.bin", "x.bin", "train.txt"], None),
        (["train.bin", "val.bin", "train_1.bin", "train_mask.bin", "constraints.bin", "train_val.bin"], ["train.bin"]),
        (["retrieval_train_1.bin", "constraints.bin", "training.bin", "train2.bin"], ["retrieval_train_1.bin", "train2.bin"]),
        (["a_train.bin", "a_val-train.bin"], "a_val-train.bin has both train and val in its name; rename the file"),
        ([], []),
    ],
)
def test_which_files_are_of_a_split(tmp_path, names, train):
    for name in names:
        (tmp_path / name).touch()
    if isinstance(train, str):
        with pytest.raises(DataError, match=train):
            paths_of(str(tmp_path), "train")
    else:
        expected = ["a_train_3.bin", "b_train_1.bin", "b_train_2.bin"] if train is None else train
        assert paths_of(str(tmp_path), "train") == [str(tmp_path / name) for name in expected]


def test_the_fingerprint_names_files_and_reads_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr("data.dataset._PIECE", 10)
    monkeypatch.setattr("data.dataset._PIECES", 4)  # 40 tokens of a split: 4 of each of 10 files
    tokens = np.arange(3000)

    def fingerprint(name, change=None, files=10):
        changed = tokens.copy()
        if change is not None:
            changed[change] += 1
        return Dataset(write_shards(tmp_path / name, changed, files, "plain"), BLOCK).fingerprint

    read = []
    checksum = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda content, value=0: read.append(len(content)) or checksum(content, value))
    first = fingerprint("same")
    assert (len(first), sum(read)) == (11, 10 * 4 + 40)
    assert first == fingerprint("again") == fingerprint("between", 100)
    assert fingerprint("two", files=2) != fingerprint("the end of one of two", 1500, files=2), "two pieces of each"
    assert [name for name, value in fingerprint("other", 301).items() if value != first[name]] == ["text_train_000002.bin"]


@pytest.mark.parametrize("formats", FORMATS)
def test_sequences_of_200_shards_are_those_of_one_file(tmp_path, formats):
    tokens = np.random.default_rng(0).permutation(60_004)
    shards = Dataset(write_shards(tmp_path / "d", tokens, 200, formats), BLOCK)
    (tmp_path / "one").mkdir()
    for split, values in (("train", tokens), ("val", range(1000))):
        (tmp_path / "one" / f"{split}.bin").write_bytes(plain(values))
    one = Dataset(str(tmp_path / "one"), BLOCK)
    offsets = one.offsets("train", (7, 0), 0, 8000)  # more than an epoch
    assert np.array_equal(shards.offsets("train", (7, 0), 0, 8000), offsets)
    assert np.array_equal(shards.batch("train", offsets), one.batch("train", offsets))


def test_a_file_that_is_rewritten_in_place_ends_a_run_with_one_line(data, tmp_path):
    """Where it was mapped into memory, the process ended by SIGBUS, without a word."""
    folder, out = shutil.copytree(data, tmp_path / "own"), tmp_path / "out"
    with Forked(*training(out, folder, FEW, "--max_iters=100000", "--eval_interval=4")) as started:
        started.wait_for("iter 8:")
        os.truncate(folder / "train.bin", 1000)
        why, remedy = "became shorter while it was read", "prepare it, then go on from the last checkpoint"
        assert started.finish().refusal() == f"error: {folder}/train.bin {why}; {remedy}"
    assert json.loads((out / "run.json").read_text())["state"] == "failed"
    assert torch_load(out)["iter_num"] >= 8
