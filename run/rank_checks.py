"""Checks at the start of a run: all ranks have the same versions, source files, settings, model and dataset, and a resumed run
has the vocabulary of its checkpoint.

A rank that differs would make the ranks wait for each other forever, or would silently train a different model.
docs/running.md says what the checks cannot detect.
"""

import os
import pathlib
import sys
import zlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from configurator import PER_HOST
from data.dataset import DATA_DIR, Dataset, vocabulary_of
from data.vocabulary import load_meta, of_size
from distributed.machine import versions
from distributed.ranks import print0
from forecast.modes import batch_in_words, divided_batch, muon_of
from model import GPTConfig
from zero.flags import Flags
from zero.host_comm import check_same_on_all_ranks


def compare_settings(settings: dict[str, Any], device: str, dtype: str) -> None:
    """Check that all ranks have the same versions, source files and settings. Needs to be called on all ranks.

    Call it before `start`, where a rank with another backend or device could not join the others. The settings in `PER_HOST`
    may differ. `device` and `dtype` are what `machine.resolve` returned.

    Raises ValueError on all ranks, with a rank that differs, what it has and what rank 0 has.
    """
    settings = settings | {"device": device.partition(":")[0], "dtype": dtype}
    shared = {key: value for key, value in settings.items() if key not in PER_HOST}
    check_same_on_all_ranks(versions(), remedy="install the same versions on all hosts")
    check_same_on_all_ranks(sources(), remedy="copy the same code to all hosts")
    check_same_on_all_ranks(shared, remedy="start all ranks with the same settings")


def check_combinations(settings: dict[str, Any], world_size: int) -> None:
    """Raise ValueError if settings do not go together, or not with this number of ranks."""
    steps = settings["gradient_accumulation_steps"]
    if steps % world_size:
        size, divided = divided_batch(settings["batch_size"], steps, world_size)
        raise ValueError(
            f"gradient_accumulation_steps={steps} cannot be split over {world_size} ranks; "
            f"use --batch_size={size} --gradient_accumulation_steps={divided}, "
            f"{batch_in_words(size * divided, settings['batch_size'] * steps)}"
        )
    Flags.of(settings).implementation(world_size)
    muon_of(settings)
    least, rate = settings["min_lr"], settings["learning_rate"]
    if settings["decay_lr"] and least > rate:
        raise ValueError(
            f"min_lr={least:g} is above learning_rate={rate:g}, so it would grow; lower it, or use --decay_lr=False"
        )


def compare_model_and_data(model: torch.nn.Module, fingerprint: dict[str, str], **values: Any) -> None:
    """Check that all ranks have the same dataset, and a model of the same shape. Needs to be called on all ranks.

    This compares the config of the model, the names, shapes and dtypes of its parameters, `values`, which the ranks have read
    from a checkpoint, and the files of the data (`Dataset.fingerprint`). It does not compare weights: in training, the ranks
    take those of rank 0.

    Raises ValueError as `compare_settings`.
    """
    parameters = {name: f"{tuple(param.shape)} {param.dtype}" for name, param in model.named_parameters()}
    of_model = {**values, **vars(model.config), **parameters}
    check_same_on_all_ranks(fingerprint, remedy="copy the dataset from one host to the others")
    check_same_on_all_ranks(of_model, remedy="give all hosts the same checkpoint or pretrained model")


def compare_with_checkpoint(checkpoint: dict[str, Any], settings: dict[str, Any], data: Dataset) -> None:
    """Check that a run resumes with its vocabulary and its optimizer, and print on rank 0 what else has changed.

    Of a checkpoint from nanoGPT, only the size of the vocabulary is known.

    Raises ValueError if the dataset has another vocabulary, or the checkpoint is of another optimizer.
    """
    check_vocabulary(checkpoint, data.name, data.meta)
    if "dataset" in checkpoint and checkpoint["dataset"] != data.fingerprint:
        name, before = checkpoint["config"].get("dataset"), checkpoint["dataset"]
        file = next(file for file in before | data.fingerprint if before.get(file) != data.fingerprint.get(file))
        print0(
            f"note: the run goes on with other data: dataset {data.name}; until the checkpoint it was dataset {name}, "
            f"with {file} of {before.get(file)}; another number of tokens changes their order in the middle of an epoch"
        )
    groups = checkpoint["optimizer"]["param_groups"]
    of_matrices = next((group for group in groups if group.get("matrices")), None)
    optimizer = "adamw" if of_matrices is None else "muon"
    if optimizer != settings["optimizer"]:
        raise ValueError(
            f"the checkpoint is of optimizer={optimizer}; use --optimizer={optimizer}, or another --out_dir for a new run"
        )
    sizes = {**vars(GPTConfig()), **checkpoint["model_args"]}  # what the file does not name has its default, as in the model
    taken = ("block_size", "dropout")  # from the settings; `check_block_size` refuses another block_size
    saved = {name: value for name, value in sizes.items() if name in settings and name not in taken}
    saved["weight_decay"] = groups[0].get("weight_decay")
    saved["beta1"], saved["beta2"] = groups[0].get("betas", (None, None))
    saved["muon_momentum"] = (of_matrices or {}).get("momentum")
    ignored = [name for name, value in saved.items() if value is not None and value != settings[name]]
    if ignored:
        used = ", ".join(f"{name}={saved[name]} (not {settings[name]})" for name in ignored)
        print0(f"note: a resumed run uses the checkpoint's values: {used}")


def check_gradients(model: torch.nn.Module) -> None:
    """Raise ValueError if a backward has left a parameter of a DistributedDataParallel without gradient: it could not go on."""
    if not isinstance(model, DistributedDataParallel):
        return
    if without := [name for name, param in model.module.named_parameters() if param.requires_grad and param.grad is None]:
        raise ValueError(
            f"DistributedDataParallel needs a gradient of each trained parameter; {without[0]} has none ({len(without)} in "
            f"all); freeze it with requires_grad_(False), or use --use_zero1=True --zero1_impl=sharded, which needs none"
        )


def vocabulary_at_hand(checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return the `Dataset.meta` of the dataset that a checkpoint was trained on; None: GPT-2's vocabulary.

    A checkpoint that was stripped may not name its dataset. Then `of_size` decides.

    Raises ValueError as `check_vocabulary`.
    """
    if (dataset := checkpoint["config"].get("dataset")) is None:
        return of_size(checkpoint["model_args"].get("vocab_size", GPTConfig.vocab_size))
    meta = load_meta(os.path.join(DATA_DIR, dataset))
    check_vocabulary(checkpoint, dataset, meta)
    return meta


def check_vocabulary(checkpoint: dict[str, Any], name: str, meta: dict[str, Any] | None) -> None:
    """Raise ValueError if a dataset, with `meta` as its `Dataset.meta`, has another vocabulary than a checkpoint."""
    size, own = checkpoint["model_args"].get("vocab_size"), vocabulary_of(meta)
    vocabulary = checkpoint.get("vocabulary", own if meta is None or meta["vocab_size"] == size else f"{size} tokens")
    if vocabulary != own:
        raise ValueError(
            f"dataset {name} has another vocabulary ({own}) than the checkpoint ({vocabulary}); use the files of dataset "
            f"{checkpoint['config'].get('dataset')} that it was trained on, or start from scratch in another --out_dir"
        )


def sources() -> dict[str, str]:
    """Return a checksum (CRC-32) of each source file of this program that has been imported, by path."""
    root = pathlib.Path(__file__).resolve().parent.parent
    python = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))  # may be below the root, too
    names = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    files = {pathlib.Path(name).resolve() for name in names if name.endswith(".py") and not name.startswith(python)}
    own = sorted(file for file in files if file.is_relative_to(root) and file.is_file())
    return {str(path.relative_to(root)): f"{zlib.crc32(path.read_bytes()):08x}" for path in own}
