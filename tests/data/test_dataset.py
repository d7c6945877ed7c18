"""data/dataset.py and vocabulary.py: what a batch holds, what can be wrong with the files, meta.pkl as others write it."""

import os
import pickle
from itertools import pairwise

import numpy as np
import pytest
from checkpoints import Hostile

from data import dataset
from data.dataset import DATA_DIR, Dataset
from data.vocabulary import DataError, expected_vocab_size, load_codec, load_meta


def write(folder, train, val=None, meta=None):
    folder.mkdir(exist_ok=True)
    np.asarray(train, dtype=np.uint16).tofile(folder / "train.bin")
    np.asarray(train if val is None else val, dtype=np.uint16).tofile(folder / "val.bin")
    if meta is not None:
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return str(folder)


def test_offsets_depend_on_their_arguments_alone(tmp_path):
    data = Dataset(write(tmp_path / "d", range(1000)), block_size=8)
    stream = data.offsets("train", (1337, 0), 0, 500)
    assert np.array_equal(stream[100:300], data.offsets("train", (1337, 0), 100, 200))
    assert not np.array_equal(stream, data.offsets("train", (1338, 0), 0, 500))
    assert not np.array_equal(stream, data.offsets("train", (1337, 1), 0, 500))
    assert not np.array_equal(stream, data.offsets("val", (1337, 0), 0, 500))


def test_an_epoch_has_each_token_once_in_another_order_on_any_number_of_ranks(tmp_path):
    tokens = np.random.default_rng(0).permutation(60_012)  # three more than whole windows and the last target
    data = Dataset(write(tmp_path / "d", tokens), block_size=8)
    windows, count, batch_size = 60_011 // 8 - 1, 12, 5
    orders = []
    for _ in range(3):
        epoch = data.micro_batches(7, windows * len(orders), batch_size, count)
        orders.append(np.concatenate([next(epoch) for _ in range(windows // batch_size)]))
        x, y = data.batch("train", orders[-1])
        assert np.array_equal(x[:, 1:], y[:, :-1])
        seen = np.bincount(x.ravel(), minlength=len(tokens))
        assert (seen == 1).sum() == windows * 8 > len(tokens) - 2 * 8, "all but less than two windows"
        assert seen.max() == 1
    for world_size in (1, 2, 3, 4):
        ranks = [data.micro_batches(7, 0, batch_size, count, rank, world_size) for rank in range(world_size)]
        shared = [next(ranks[step % world_size]) for step in range(3 * windows // batch_size)]
        assert np.array_equal(np.concatenate(shared), np.concatenate(orders))
    assert all(abs(np.corrcoef(a // 8, b // 8)[0, 1]) < 0.05 for a, b in pairwise(orders))
    resumed = data.micro_batches(7, windows + 60 * 3, batch_size, count, rank=1, world_size=2)
    assert np.array_equal(next(resumed), orders[1][60 * 3 + batch_size : 60 * 3 + 2 * batch_size])


@pytest.mark.parametrize("length", [9, 10, 16, 17, 24, 25, 26, 33, 100])
def test_epochs_of_a_short_file_cut_it_at_all_positions(tmp_path, length):
    data = Dataset(write(tmp_path / "d", range(length)), block_size=8)
    windows = max(1, (length - 1) // 8 - 1)
    epochs = data.offsets("train", (1337, 0), 10**12 * windows, 1000 * windows).reshape(1000, windows)
    assert epochs.min() == 0
    assert epochs.max() == length - 9, "the last window, with its last target"
    assert all((np.diff(np.sort(offsets)) == 8).all() for offsets in epochs)
    assert len(np.unique(epochs % 8)) == min(8, length - 8)


def test_an_evaluation_does_not_make_the_order_of_training_again(tmp_path):
    """An order of 10^10 tokens takes most of a second; four bytes per window."""
    data = Dataset(write(tmp_path / "d", np.arange(200_000) % 1000), block_size=2)
    dataset._epoch.cache_clear()
    training = data.micro_batches(7, 0, 5, 12)
    for _ in range(4):
        next(training)
        for split in ("train", "val"):
            data.evaluation(split, 7, 24, 5)
    assert dataset._epoch.cache_info().misses == 3
    assert dataset._epoch(200_000, 2, 99_998, (7, 0, 0, 0))[1].nbytes == 4 * 99_998


@pytest.mark.parametrize("count", [1, 24, 25])
def test_an_evaluation_has_the_same_sequences_on_any_number_of_ranks_in_any_batches(tmp_path, count):
    data = Dataset(write(tmp_path / "d", range(1000)), block_size=8)
    expected = sorted(data.offsets("val", (7, 1), 0, count))
    for world_size, batch_size in ((1, 12), (2, 5), (4, 64), (3, 1)):
        ranks = [data.evaluation("val", 7, count, batch_size, rank, world_size) for rank in range(world_size)]
        assert all(offsets.shape == (batch_size,) for batches in ranks for offsets in batches), "no other size to compile"
        assert sorted(offset for batches in ranks for offsets in batches for offset in offsets if offset >= 0) == expected
        assert all((offsets >= 0).any() for batches in ranks for offsets in batches)


def test_a_batch_is_the_tokens_and_the_next_ones(tmp_path):
    """A sequence that fills the batch of an evaluation has no targets. The shortest file has one sequence."""
    data = Dataset(write(tmp_path / "d", range(100), val=range(9)), block_size=8)
    x, y = batch = data.batch("train", np.array([0, 91, -1]))
    assert batch.dtype == np.int64
    assert batch.flags.c_contiguous, "a GPU would wait for the copy of anything else"
    assert np.array_equal(x, [np.arange(8), np.arange(91, 99), np.arange(8)])
    assert np.array_equal(y, [np.arange(1, 9), np.arange(92, 100), [-1] * 8])
    assert set(data.offsets("val", (0, 0), 0, 10)) == {0}


def test_the_fingerprint_of_a_vocabulary_is_that_of_its_tokens(tmp_path):
    """Not of the bytes of meta.pkl, which depend on the program that wrote it."""
    meta = {"vocab_size": 3, "itos": {0: "a", 1: "b", 2: "c"}, "stoi": {}}
    first = Dataset(write(tmp_path / "first", range(3), meta=meta), 2)
    again = Dataset(write(tmp_path / "again", range(3), meta={**meta, "itos": {2: "c", 0: "a", 1: "b"}, "more": 1}), 2)
    other = Dataset(write(tmp_path / "other", range(3), meta={**meta, "itos": {0: "a", 1: "c", 2: "b"}}), 2)
    bpe = Dataset(write(tmp_path / "bpe", range(3)), 2)
    assert dataset.vocabulary_of(first.meta) == dataset.vocabulary_of(again.meta)
    assert len({dataset.vocabulary_of(data.meta) for data in (first, other, bpe)}) == 3
    assert first.fingerprint["meta.pkl"] != other.fingerprint["meta.pkl"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: os.remove(folder / "val.bin"), "is missing"),
        (lambda folder: (folder / "val.bin").write_bytes(b"12" * 8), "too few for one sequence of block_size=8"),
        (lambda folder: (folder / "meta.pkl").write_bytes(b"junk"), "no vocabulary"),
        (lambda folder: (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": "many"})), "no vocabulary"),
        (lambda folder: (folder / "meta.pkl").write_bytes(pickle.dumps(Hostile())), "asks for posix.system"),
    ],
)
def test_bad_files_are_named(tmp_path, spoil, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "d"
    write(folder, range(100), meta={"vocab_size": 100, "stoi": {}, "itos": {}})
    spoil(folder)
    with pytest.raises(DataError, match=message):
        Dataset(str(folder), block_size=8)
    assert not os.path.exists("hostile-code-ran")


def test_a_dataset_that_does_not_exist_is_answered_with_those_that_do(tmp_path, monkeypatch):
    """Also with one that was made by hand, without a prepare.py; a folder without either file is no dataset."""
    for name, file in {"by_script": "prepare.py", "by_hand": "train.bin", "notes": "read.me"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    monkeypatch.setattr(dataset, "DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"foo/train.bin is missing; --dataset takes by_hand, by_script, or the absolute path"):
        Dataset("foo", block_size=8)
    with pytest.raises(DataError, match=r"by_script/train.bin is missing; run: python .*by_script/prepare.py$"):
        Dataset("by_script", block_size=8)


@pytest.mark.parametrize("script", ["", "VOCAB_SIZE = len(text)", "VOCAB_SIZE ="])
def test_a_script_says_its_vocabulary_before_it_is_run(tmp_path, script):
    assert [expected_vocab_size(os.path.join(DATA_DIR, name)) for name in ("stdlib_char", "openwebtext")] == [96, None]
    with pytest.raises(DataError, match=r"no/prepare.py has no line such as VOCAB_SIZE = 65"):
        expected_vocab_size(str(tmp_path / "no"))
    (tmp_path / "prepare.py").write_text(script)
    with pytest.raises(DataError, match=r"prepare.py has no line such as VOCAB_SIZE = 65"):
        expected_vocab_size(str(tmp_path))


LETTERS = {0: "a", 1: "b", 2: "\n"}
BACK = {text: token for token, text in LETTERS.items()}
# of a meta.pkl: its content, a text, the tokens of this, what they are as text, and the tokens to sample from
TABLES = {
    "nanoGPT's": ({"vocab_size": 3, "itos": LETTERS, "stoi": BACK}, "ab\n", [0, 1, 2], "ab\n", [0, 1, 2]),
    "no tables": ({"vocab_size": 5}, "3 1 4", [3, 1, 4], "3 1 4", [0, 1, 2, 3, 4]),
    "no tables, no prompt": ({"vocab_size": 5}, "\n", [0], "0", [0, 1, 2, 3, 4]),
    "padding": ({"vocab_size": 64, "itos": LETTERS, "stoi": BACK}, "ba", [1, 0], "ba", [0, 1, 2]),
    "a gap": ({"vocab_size": 8, "itos": {0: "a", 7: "b"}}, "ab", [0, 7], "ab", [0, 7]),
    "itos": ({"vocab_size": 3, "itos": LETTERS}, "ab", [0, 1], "ab", [0, 1, 2]),
    "itos, a list": ({"vocab_size": 3, "itos": ["a", "b", "c"]}, "cab", [2, 0, 1], "cab", [0, 1, 2]),
    "stoi": ({"vocab_size": 3, "stoi": BACK}, "ab", [0, 1], "ab", [0, 1, 2]),
    "keys that are text": ({"vocab_size": 3, "itos": {"0": "a", "1": "b", "2": "c"}}, "cab", [2, 0, 1], "cab", [0, 1, 2]),
    "bytes": ({"vocab_size": 256, "itos": {n: bytes([n]) for n in range(256)}}, "ü", [195, 188], "ü", list(range(256))),
    "bytes as keys": ({"vocab_size": 2, "stoi": {b"x": 0, b"yz": 1}}, "yzx", [1, 0], "yzx", [0, 1]),
    "words": ({"vocab_size": 3, "stoi": {"the": 0, "cat": 1, ".": 2}}, "the cat\n.", [0, 1, 2], "the cat .", [0, 1, 2]),
    "words without a line break": ({"vocab_size": 2, "stoi": {"the": 0, "cat": 1}}, "\n", [0], "the", [0, 1]),
    "words and a line break": ({"vocab_size": 3, "itos": ["ox", "cat", "\n"]}, "ox cat\n", [0, 1, 2], "ox cat \n", [0, 1, 2]),
    "letters and a mark": ({"vocab_size": 5, "itos": ["<pad>", *"ACGT"]}, "ACGT", [1, 2, 3, 4], "ACGT", [0, 1, 2, 3, 4]),
    "one table is None": ({"vocab_size": 2, "itos": None, "stoi": {"a": 0, "b": 1}}, "ab", [0, 1], "ab", [0, 1]),
    "pieces of words": ({"vocab_size": 4, "itos": ["un", "do", " ", "u"]}, "undo u", [0, 1, 2, 3], "undo u", [0, 1, 2, 3]),
}


def load(folder, meta):
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return load_codec(load_meta(str(folder)), 300)


@pytest.mark.parametrize("name", TABLES)
def test_tables_as_others_write_them(name, tmp_path):
    meta, text, tokens, back, allowed = TABLES[name]
    codec = load(tmp_path, meta)
    assert (codec.prompt(text), codec.decode(tokens), list(codec.tokens)) == (tokens, back, allowed)


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"vocab_size": 2, "itos": {0: "a", 2: "b"}}, "vocabulary of 2 tokens has a text for token 2"),
        ({"vocab_size": 2, "itos": {0: "a", -1: "b"}}, "a text for token -1"),
        ({"vocab_size": 2, "itos": {"a": "b"}}, "is no number"),
        ({"vocab_size": 301}, "the model knows 300 tokens"),
        ({"vocab_size": 2, "stoi": 7}, "meta.pkl is no vocabulary|is no number"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({}, "is no vocabulary"),
        ([], "is no vocabulary"),
    ],
)
def test_tables_that_are_none(meta, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load(tmp_path, meta)


def test_unknown_texts(tmp_path):
    for meta, text, shown in (
        ({"vocab_size": 2, "stoi": {"a": 0, "b": 1}}, "axbya", "'xy'"),
        ({"vocab_size": 2, "stoi": {"the": 0, "cat": 1}}, "the dog", "'dog'"),
        ({"vocab_size": 2, "stoi": {b"a": 0, b"b": 1}}, "aé", r"b'\xa9\xc3'"),
    ):
        with pytest.raises(DataError) as refused:
            load(tmp_path, meta).encode(text)
        assert f"has no {shown}; leave it out" in str(refused.value)
    for text in ("def ", "3 5", "-1", "1.5"):
        with pytest.raises(DataError, match="write numbers below 5, such as --start='3 17'"):
            load(tmp_path, {"vocab_size": 5}).encode(text)
