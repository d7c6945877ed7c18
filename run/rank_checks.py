"""Checks at the start of a run: all ranks have the same versions, source files, settings, model and dataset, and a resumed run
has the vocabulary of its checkpoint.

A rank that differs would make the ranks wait for each other forever, or would silently train a different model.
docs/running.md says what the checks cost and what they cannot detect.
"""

import math
import pathlib
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from configurator import PER_HOST, settings_with
from data.dataset import Dataset
from distributed.launch import Launch
from distributed.machine import versions
from distributed.ranks import print0
from distributed.rendezvous import agree
from model import GPTConfig
from zero import ShardedOptimizer
from zero.flags import Flags, muon_of
from zero.host_comm import gather_objects

Facts = dict[str, dict[str, Any]]  # remedy if values differ between ranks: name: value

_SHOWN = 3  # differences that a message names
_LOW = 2**32 - 1  # the low half of an int64


def compare_settings(launch: Launch, settings: dict[str, Any]) -> None:
    """Check that all ranks have the same versions, source files and settings. Needs to be called on all ranks.

    This works before the process group has started, because a rank with another backend or device could not join it.
    Settings that are declared `PerHost` may differ: each host may have disks of its own, and only rank 0 logs.

    Raises:
        ValueError: on all ranks, with the ranks that differ, what they have and what the others have.
    """
    may_differ = settings_with(PER_HOST)
    facts: Facts = {
        "install the same versions on all hosts": versions(),
        "copy the same code to all hosts": sources(),
        "start all ranks with the same settings": {key: settings[key] for key in settings if key not in may_differ},
    }
    if message := agree(launch, facts, difference):
        raise ValueError(message)


def check_combinations(settings: dict[str, Any], world_size: int) -> None:
    """Raise ValueError if settings do not go together, or not with this number of ranks."""
    steps = settings["gradient_accumulation_steps"]
    if steps % world_size:
        raise ValueError(
            f"gradient_accumulation_steps={steps} cannot be split over {world_size} ranks; "
            f"use --gradient_accumulation_steps={math.ceil(steps / world_size) * world_size}"
        )
    Flags.of(settings).implementation(world_size)
    muon_of(settings)


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
    """Check that a run resumes with its vocabulary and its optimizer, and print on rank 0 what else has changed.

    Of a checkpoint from nanoGPT, only the size of the vocabulary is known.

    Raises:
        ValueError: if the dataset has another vocabulary, or the checkpoint is of another optimizer.
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


def sources() -> dict[str, str]:
    """Return a checksum (CRC-32) of each source file of this program that has been imported, by path."""
    root = pathlib.Path(__file__).resolve().parent.parent
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    paths = sorted({pathlib.Path(file).resolve() for file in files if file and file.endswith(".py")})
    names = {str(path.relative_to(root)): path for path in paths if path.is_relative_to(root) and path.is_file()}
    # its own modules are at the root or in a package there; a virtual environment may be below the root, too
    own = {
        name: path for name, path in names.items() if "/" not in name or (root / name.split("/")[0] / "__init__.py").exists()
    }
    return {name: f"{zlib.crc32(path.read_bytes()):08x}" for name, path in own.items()}


def difference(by_rank: list[Facts]) -> str | None:
    """Return a line that says which ranks differ in what, and the remedy; None if all ranks have the same facts."""
    for remedy in by_rank[0]:
        values = [facts.get(remedy, {}) for facts in by_rank]
        names = dict.fromkeys(name for of_rank in values for name in of_rank)
        texts = [_difference(name, [str(of_rank.get(name, "absent")) for of_rank in values]) for name in names]
        if found := [text for text in texts if text]:
            more = [f"{len(found) - _SHOWN} more differ"] if len(found) > _SHOWN else []
            return "; ".join([*found[:_SHOWN], *more, remedy])
    return None


def _difference(name: str, values: list[str]) -> str | None:
    """Return a text that says which ranks have which value of one name, or None if all have the same."""
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
    """Return the value that most ranks have, or None if two values are equally common, as always with two ranks."""
    (first, count), *rest = Counter(values).most_common(2)
    return first if not rest or rest[0][1] < count else None


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return, for example, "rank 2" or "ranks 0, 3 and 8 to 15", from ascending ranks."""
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
    """Return, for example, "a, b and c". Only the first texts are named, the others are counted."""
    more = len(texts) - _SHOWN
    *most, last = [*texts[:_SHOWN], f"{more} more"] if more > 0 else texts
    return f"{', '.join(most)} and {last}" if most else last


class DesyncCheck:
    """Compares checksums over the ranks and ends the run if they differ. Needs to be created on all ranks.

    With sharded state, every update overwrites the weights of all ranks with those of their owners. So a wrong weight on one
    rank, for example a flipped bit, corrupts one iteration and is then gone, or it spreads to all ranks. Therefore `check` adds
    the checksum of every parameter to a running sum in every iteration, after the last backward and before the update. This
    needs no communication, and the host does not wait for a GPU. In every `interval`-th iteration, the ranks
    compare their sums.

    Compared are parameters, frozen ones as well, buffers, the iteration and the learning rates. In one iteration, any single
    flipped bit changes the sum. Several changes to one parameter can cancel out. Optimizer state and float32 masters are not
    compared, because each rank has its own. A model whose forward gives the ranks different buffers, such as the statistics of
    BatchNorm, cannot be checked. A change of an owned slice during the update itself is not found.

    Args:
        model: the model, without its wrapper.
        optimizer: the optimizer of the model.
        interval: iterations between comparisons; 0: no check. A single process makes no check.
        fail: called on all ranks with a title and a message when the ranks differ.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, interval: int, fail: Callable[[str, str], None]
    ) -> None:
        self.model, self.optimizer, self.fail = model, optimizer, fail
        self.interval = interval if dist.is_initialized() else 0
        self._calls = 0  # number of calls of `check`, one per iteration
        groups = range(len(optimizer.param_groups))
        self._names = ["the iteration", *(f"the learning rate of group {group}" for group in groups)]
        self._numbers = torch.zeros(len(self._names), dtype=torch.int64)  # running sums of these
        self._names += [_with_buckets(name, tensor, optimizer) for name, tensor in _tensors(model)]
        self._sums = torch.zeros((), dtype=torch.int64, device=next(model.parameters()).device)  # (2, tensors) after a call

    @torch.no_grad()
    def check(self, iteration: int, now: bool = False) -> None:
        """Add checksums of the weights, and compare the ranks if due. Needs to be called on all ranks in each iteration.

        Args:
            iteration: the iteration that this rank is in.
            now: an additional call that compares, before a checkpoint is saved.
        """
        if not self.interval:
            return
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64)
        self._numbers += torch.cat([torch.tensor([iteration]), rates.view(torch.int64)])
        words = torch.stack([checksum(tensor) for _, tensor in _tensors(self.model)])
        self._sums = self._sums + torch.stack((words >> 32, words & _LOW))  # in halves: a sum of equal errors never wraps to 0
        if now or self._calls % self.interval == 0:
            self._compare(iteration)
        self._calls += not now

    def _compare(self, iteration: int) -> None:
        own = [*self._numbers.tolist(), *zip(*self._sums.tolist(), strict=True)]
        found = []
        for name, values in zip(self._names, zip(*gather_objects(own), strict=True), strict=True):
            if len(set(values)) > 1:
                common = most_common(values)
                found.append(f"{describe_ranks([rank for rank, value in enumerate(values) if value != common])} in {name}")
        if found:
            self.interval = 0  # one message is enough
            text = f"the ranks differ at iteration {iteration}: {enumerate_texts(found)}"
            self.fail("The ranks differ", f"{text}; a checkpoint is saved only while all ranks agree")


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2**64, of the tensor's memory read as 64-bit integers, a scalar int64 on the device.

    This takes one pass and no memory, unlike a sum of 32-bit integers, of which PyTorch first makes a copy in 64 bits.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers by name. Each read from the model waits until the parameter has arrived."""
    return [*model.named_parameters(), *model.named_buffers()]


def _with_buckets(name: str, tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    """Return the name of a parameter and the buckets of a ShardedOptimizer that hold it."""
    if not isinstance(optimizer, ShardedOptimizer):
        return name
    params = optimizer.flat_params
    numbers = [
        str(bucket.number) for bucket in optimizer.buckets if any(params[place.param] is tensor for place in bucket.members)
    ]
    return f"{name} (bucket{'s' if len(numbers) > 1 else ''} {enumerate_texts(numbers)})" if numbers else name
