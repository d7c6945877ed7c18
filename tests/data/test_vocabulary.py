"""data/vocabulary.py: `meta.pkl` as other programs write it."""

import pickle

import pytest

from data.vocabulary import DataError, load_codec, load_meta

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
