"""Checks at the start of a run: all ranks have the same versions, source files, settings, model and dataset, and a resumed run
has the vocabulary of its checkpoint.

A rank that differs would make the ranks wait for each other forever, or would train another model in silence.
docs/many-machines.md says what the checks cost and what they cannot see.
"""

import pathlib
import sys
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dataset import Dataset
from distributed import Launch, agree, print0
from environment import versions
from zero.collectives import gather_objects

Facts = dict[str, dict[str, Any]]  # values by name, by the remedy if they are not the same on all ranks

# settings that may differ: a host may have its own disks, the content of the dataset is compared later, rank 0 alone logs
_OF_EACH_HOST = ("out_dir", "dataset", "wandb_log", "wandb_mode", "wandb_project", "wandb_run_name")
_SHOWN = 3  # differences that a message names


def compare_settings(launch: Launch, settings: dict[str, Any]) -> None:
    """Check that all ranks have the same versions, source files and settings. Needs to be called on all ranks.

    This works before the process group has started, because a rank with another backend or device could not join it.
    `out_dir`, `dataset` and the settings of wandb may differ: each host may have disks of its own, and only rank 0 logs.

    Raises:
        ValueError: on all ranks, with the ranks that differ, what they have and what the others have.
    """
    facts: Facts = {
        "install the same versions on all hosts": versions(),
        "copy the same code to all hosts": sources(),
        "start all ranks with the same settings": {
            name: value for name, value in settings.items() if name not in _OF_EACH_HOST
        },
    }
    if message := agree(launch, facts, difference):
        raise ValueError(message)


def compare_model_and_data(model: torch.nn.Module, data: Dataset, **values: Any) -> None:
    """Check that all ranks have the same dataset, and a model of the same shape. Needs to be called on all ranks.

    The weights themselves are not compared, because the ranks take those of rank 0.

    Args:
        model: compared are its config, and the names, shapes and dtypes of its parameters.
        data: compared are the files, see `Dataset.fingerprint`.
        **values: what the ranks have read from a checkpoint.

    Raises:
        ValueError: as `compare_settings`.
    """
    if not dist.is_initialized():
        return
    parameters = {name: f"{tuple(param.shape)} {param.dtype}" for name, param in model.named_parameters()}
    facts: Facts = {
        "copy the dataset from one host to the others": data.fingerprint(),
        "give all hosts the same checkpoint or pretrained model": {**values, **vars(model.config), **parameters},
    }
    if message := difference(gather_objects(facts)):
        raise ValueError(message)


def compare_with_checkpoint(checkpoint: dict[str, Any], settings: dict[str, Any], data: Dataset) -> None:
    """Check that a run resumes with its vocabulary, and print on rank 0 what else is not as before.

    Of a checkpoint from nanoGPT, only the size of the vocabulary is known.

    Raises:
        ValueError: if the dataset has another vocabulary.
    """
    size, name = checkpoint["model_args"].get("vocab_size"), checkpoint["config"].get("dataset")
    vocabulary = checkpoint.get("vocabulary", data.vocabulary if data.vocab_size in (None, size) else f"{size} tokens")
    if vocabulary != data.vocabulary:
        raise ValueError(
            f"dataset {data.name} has another vocabulary ({data.vocabulary}) than the checkpoint ({vocabulary}); "
            f"use the files of dataset {name} that it was trained on, or start a new run in another --out_dir"
        )
    if "dataset" in checkpoint and checkpoint["dataset"] != data.fingerprint():
        print0(f"note: the run goes on with other data: dataset {data.name}; until the checkpoint it was dataset {name}")
    group = checkpoint["optimizer"]["param_groups"][0]
    saved = {**checkpoint["model_args"], "weight_decay": group.get("weight_decay")}
    saved["beta1"], saved["beta2"] = group.get("betas", (None, None))
    names = ("n_layer", "n_head", "n_embd", "bias", "weight_decay", "beta1", "beta2")
    ignored = [name for name in names if saved.get(name) is not None and saved[name] != settings[name]]
    if ignored:
        used = ", ".join(f"{name}={saved[name]} (not {settings[name]})" for name in ignored)
        print0(f"note: a resumed run uses the checkpoint's values: {used}")


def sources() -> dict[str, str]:
    """Returns a checksum (CRC-32) of each source file of this program that has been imported, by path."""
    root = pathlib.Path(__file__).resolve().parent
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = sorted({pathlib.Path(file).resolve() for file in files if file and file.endswith(".py")})
    names = {str(path.relative_to(root)): path for path in paths if path.is_relative_to(root) and path.is_file()}
    own = {name: path for name, path in names.items() if "/" not in name or name.startswith("zero/")}
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in own.items()}


def difference(by_rank: list[Facts]) -> str | None:
    """Returns a line that says which ranks differ in what, and the remedy; None if all ranks have the same facts."""
    for remedy in by_rank[0]:
        values = [facts.get(remedy, {}) for facts in by_rank]
        names = dict.fromkeys(name for of_rank in values for name in of_rank)
        texts = [_difference(name, [str(of_rank.get(name, "absent")) for of_rank in values]) for name in names]
        if found := [text for text in texts if text]:
            more = [f"{len(found) - _SHOWN} more differ"] if len(found) > _SHOWN else []
            return "; ".join([*found[:_SHOWN], *more, remedy])
    return None


def _difference(name: str, values: list[str]) -> str | None:
    """Returns a text that says which ranks have which value of one name, or None if all have the same."""
    ranks: dict[str, list[int]] = {}  # by value
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return None
    common = most_common(values)
    others = [] if common is None else [f"the others {name}={common}"]
    odd = [
        f"{describe_ranks(of_value)} {'has' if len(of_value) == 1 else 'have'} {name}={value}"
        for value, of_value in ranks.items()
        if value != common
    ]
    more = [f"{len(odd) - _SHOWN} more values on other ranks"] if len(odd) > _SHOWN else []
    return ", ".join([*odd[:_SHOWN], *more, *others])


def most_common(values: Iterable[Hashable]) -> Any:
    """Returns the value that most ranks have, or None if two values are equally common, as always with two ranks."""
    (first, count), *rest = Counter(values).most_common(2)
    return first if not rest or rest[0][1] < count else None


def describe_ranks(ranks: Sequence[int]) -> str:
    """Returns, for example, "rank 2" or "ranks 0, 3 and 8 to 15", from ascending ranks."""
    runs: list[list[int]] = []  # first and last rank of each row of consecutive ranks
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    texts: list[str] = []
    for first, last in runs:
        texts += [f"{first} to {last}"] if last > first + 1 else map(str, range(first, last + 1))
    return f"rank{'s' if len(ranks) > 1 else ''} {enumerate_texts(texts)}"


def enumerate_texts(texts: Sequence[str]) -> str:
    """Returns, for example, "a, b and c". Only the first texts are named, the others are counted."""
    more = len(texts) - _SHOWN
    *most, last = [*texts[:_SHOWN], f"{more} more"] if more > 0 else texts
    return f"{', '.join(most)} and {last}" if most else last
