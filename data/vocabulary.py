"""The vocabulary of a dataset: its own in `meta.pkl`, or GPT-2's."""

import ast
import hashlib
import os
import pickle
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import tiktoken

_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_FILES = f"{_URL}/encoder.json", f"{_URL}/vocab.bpe"  # of which tiktoken makes its gpt2


class DataError(ValueError):
    """A dataset is missing or cannot be used. The message names the file, the problem and the remedy."""


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Return the dtype of the tokens in a plain token file: uint16, or uint32 for more than 65,536 tokens. None: GPT-2's."""
    return np.dtype(np.uint32 if vocab_size is not None and vocab_size > 2**16 else np.uint16)


def expected_vocab_size(directory: str) -> int | None:
    """Return the `Dataset.vocab_size` that a dataset will have when it is prepared: VOCAB_SIZE in its `prepare.py`.

    The script is read, not run.

    Raises:
        DataError: if there is no script, or it does not define VOCAB_SIZE.
    """
    path = os.path.join(directory, "prepare.py")
    try:
        with open(path, encoding="utf-8") as file:
            [value] = [
                ast.literal_eval(statement.value)
                for statement in ast.parse(file.read()).body
                if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "VOCAB_SIZE"
            ]
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{os.path.relpath(path)} has no line such as VOCAB_SIZE = 65") from error
    return value


def load_meta(directory: str) -> dict[str, Any] | None:
    """Return the content of `meta.pkl`: `vocab_size`, `stoi`, `itos`; None if there is no such file.

    Code in the file is not run.

    Raises:
        DataError: if the file is damaged, or needs more than plain containers and values.
    """
    path = os.path.join(directory, "meta.pkl")
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as file:
            meta = _PlainUnpickler(file).load()
        if type(meta["vocab_size"]) is not int or meta["vocab_size"] < 1:
            raise pickle.UnpicklingError(f"vocab_size={meta['vocab_size']!r} is not a positive integer")
        if not isinstance(meta.get("itos"), dict | None):  # a list has its tokens as indices
            meta["itos"] = dict(enumerate(meta["itos"]))
        if not isinstance(meta.get("stoi"), dict | None):
            raise pickle.UnpicklingError("stoi is no dict")
    except Exception as error:  # damaged bytes can raise any exception
        raise DataError(f"{path} is no vocabulary ({error}); run the dataset's prepare.py again") from error
    return meta


class Codec(NamedTuple):
    """A vocabulary: functions that convert text to tokens and tokens to text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    tokens: Sequence[int]  # that `decode` takes, ascending

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt. A line break, the usual one, is the first token if the vocabulary has none."""
        try:
            return self.encode(text) or [self.tokens[0]] * (text == "\n")
        except DataError:
            if text != "\n":
                raise
            return [self.tokens[0]]


def of_size(vocab_size: int) -> dict[str, Any] | None:
    """Return the `load_meta` of a model that comes without a dataset: None, GPT-2's, or tokens without texts.

    GPT-2's vocabulary may have been padded to a multiple of up to 512.
    """
    return None if 50257 <= vocab_size <= 50688 else {"vocab_size": vocab_size}


def load_codec(meta: dict[str, Any] | None, model_vocab_size: int, folder: str = "") -> Codec:
    """Return the vocabulary of the tokenizer in `folder` if it has one, that of a dataset, or if `meta` is None GPT-2's.

    Raises:
        DataError: if the vocabulary is not available, or it is larger than that of the model.
    """
    if (tokenizer := tokenizer_of(folder)) is not None:
        return _codec_of(tokenizer, model_vocab_size)
    codec = _gpt2_codec() if meta is None else _own_codec(meta)
    if (size := codec.tokens[-1] + 1) > model_vocab_size:
        raise DataError(
            f"the model knows {model_vocab_size} tokens, the vocabulary at hand has {size}; prepare the dataset that the model "
            "was trained on, to create its meta.pkl"
        )
    return codec


def tokenizer_of(folder: str) -> Any:
    """Return the tokenizer of transformers in a folder; None: it has none.

    Raises:
        DataError: if it cannot be read.
    """
    names = "tokenizer.json", "vocab.json", "tokenizer.model"
    if not folder or not any(os.path.exists(os.path.join(folder, name)) for name in names):
        return None
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of transformers, of the library below it, of a file that is none
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DataError(
            f"cannot read the tokenizer in {folder} ({reason}); save it there again, or remove its files"
        ) from error


def bytes_of_tokens(meta: dict[str, Any] | None) -> np.ndarray:
    """Return the length of each token in UTF-8, (65536 or more,) float64; nan: unknown. GPT-2's end-of-text has no bytes.

    `meta` as in `load_codec`. GPT-2's tokens are unknown if tiktoken has to download them: no training waits for that.
    """
    lengths = np.full(max(2**16, meta["vocab_size"] if meta else 0), np.nan)
    if meta is None:
        try:
            encoding = gpt2_encoding(download=False)
        except DataError:
            return lengths
        texts = {token: encoding.decode_single_token_bytes(token) for token in range(encoding.n_vocab)}
        texts[encoding.eot_token] = b""
    else:
        texts = {
            token: text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
            for token, text in texts_of(meta).items()
        }
    lengths[list(texts)] = [len(text) for text in texts.values()]
    return lengths


def gpt2_encoding(download: bool = True) -> "tiktoken.Encoding":
    """Return GPT-2's BPE encoding. tiktoken downloads its vocabulary the first time, if it may.

    Raises:
        DataError: if the vocabulary or tiktoken is not available.
    """
    own_cache = os.path.join(tempfile.gettempdir(), "data-gym-cache")  # as in tiktoken/load.py
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", own_cache))
    paths = [os.path.join(cache, hashlib.sha1(url.encode()).hexdigest()) for url in GPT2_FILES]
    try:
        import tiktoken  # only here: a dataset of characters needs only numpy

        if not download and not all(map(os.path.exists, paths)):
            raise OSError("it is not in tiktoken's cache")
        return tiktoken.get_encoding("gpt2")
    except (ImportError, OSError) as error:  # it downloads with requests, whose errors are OSErrors
        remedy = "pip install tiktoken, and set TIKTOKEN_CACHE_DIR to a folder that holds the vocabulary if there is no network"
        raise DataError(f"GPT-2's vocabulary is not available ({error}); {remedy}") from error


def _gpt2_codec() -> Codec:
    encoding = gpt2_encoding()
    encode = partial(encoding.encode, allowed_special={"<|endoftext|>"})
    return Codec(encode, encoding.decode, range(encoding.n_vocab))


def _codec_of(tokenizer: Any, model_vocab_size: int) -> Codec:
    """Return the vocabulary of a tokenizer of transformers, which may have tokens, as for padding, that the model has not."""

    def encode(text: str) -> list[int]:
        try:
            tokens = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # of the library: it has no token for a character
            raise DataError(f"the tokenizer has no tokens for this text: {error}; leave characters out") from error
        if max(tokens, default=0) >= model_vocab_size:
            raise DataError(f"the text has token {max(tokens)}, the model {model_vocab_size} tokens; leave this token out")
        return tokens

    tokens = sorted(token for token in {*tokenizer.get_vocab().values()} if token < model_vocab_size)
    return Codec(encode, partial(tokenizer.decode, clean_up_tokenization_spaces=False), tokens)


def texts_of(meta: dict[str, Any]) -> dict[int, str | bytes]:
    """Return the text of each token that has one, all of one type. Either table of a `meta.pkl` is enough; keys may be text.

    Raises:
        DataError: if a token is no number below `vocab_size`.
    """
    table = meta.get("itos") or {token: text for text, token in (meta.get("stoi") or {}).items()}
    try:
        texts = {int(token): text if isinstance(text, str | bytes) else str(text) for token, text in table.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"a token of the vocabulary is no number ({error}); run the dataset's prepare.py again") from error
    if wrong := [token for token in texts if not 0 <= token < meta["vocab_size"]]:
        raise DataError(f"the vocabulary of {meta['vocab_size']} tokens has a text for token {wrong[0]}; mend its meta.pkl")
    if any(isinstance(text, bytes) for text in texts.values()):
        texts = {token: text.encode() if isinstance(text, str) else text for token, text in texts.items()}
    return texts


def _own_codec(meta: dict[str, Any]) -> Codec:
    texts: dict[int, Any] = texts_of(meta)
    if not texts:
        return _numbers_codec(meta["vocab_size"])
    tokens_of = {text: token for token, text in sorted(texts.items(), reverse=True)}  # the first of several with one text
    in_bytes = isinstance(next(iter(texts.values())), bytes)
    any_of = "|".join(map(re.escape, sorted(map(_as_text, tokens_of), key=len, reverse=True)))
    pieces = re.compile(f"{any_of}|.", re.DOTALL)  # the longest text of a token that comes next, or a character that none has
    long = [text for text in texts.values() if len(text) > 1]
    are_words = (
        not in_bytes
        and 2 * len(long) > len(texts)
        and " " not in texts.values()
        and all(text.split() == [text] for text in long)
    )
    between: Any = b"" if in_bytes else " " if are_words else ""

    def encode(text: str) -> list[int]:
        found: list[Any] = pieces.findall(_as_text(text.encode()) if in_bytes else text)
        found = [piece.encode("latin-1") for piece in found] if in_bytes else found
        if are_words and not tokens_of.keys() >= set(found):
            found = [word for word in re.findall(r"\S+|\s", text) if word in tokens_of or not word.isspace()]
        if unknown := sorted(set(found) - tokens_of.keys()):
            shown: Any = between.join(unknown)
            raise DataError(f"the vocabulary has no {shown!r}; leave it out of the text")
        return [tokens_of[piece] for piece in found]

    def decode(tokens: list[int]) -> str:
        text = between.join([texts[token] for token in tokens])
        return text.decode(errors="replace") if in_bytes else text

    return Codec(encode, decode, sorted(texts))


def _as_text(text: Any) -> str:
    """Return a text, of bytes a character for each."""
    return text.decode("latin-1") if isinstance(text, bytes) else text


def _numbers_codec(vocab_size: int) -> Codec:
    """Return the vocabulary of tokens that have no texts: they are written as numbers."""

    def encode(text: str) -> list[int]:
        numbers = text.split()
        if not all(number.isdecimal() and int(number) < vocab_size for number in numbers):
            raise DataError(f"the vocabulary has no texts; write numbers below {vocab_size}, such as --start='3 17'")
        return list(map(int, numbers))

    return Codec(encode, lambda tokens: " ".join(map(str, tokens)), range(vocab_size))


class _PlainUnpickler(pickle.Unpickler):
    """Accepts only what pickle builds without an import: dicts, lists, tuples, strings, numbers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
