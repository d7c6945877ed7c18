"""Checks during a run that all ranks have the same weights, iteration and learning rate."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from consistency import describe_ranks, enumerate_texts, most_common
from zero import ShardedOptimizer
from zero.collectives import gather_objects

_LOW = 2**32 - 1  # the low half of an int64


class DesyncCheck:
    """Compares checksums over the ranks and ends the run if they differ. Needs to be created on all ranks.

    With sharded state, every update overwrites the weights of all ranks with those of their owners. So a wrong weight on one
    rank, for example a flipped bit, spoils one iteration and is then gone, or it spreads to all ranks. Therefore `check` adds
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
        """Add checksums of the weights, and compare the ranks if it is time. Needs to be called on all ranks in each iteration.

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
    """Returns the sum, modulo 2**64, of the tensor's memory read as 64-bit integers, a scalar int64 on the device.

    This takes one pass and no memory, unlike a sum of 32-bit integers, of which PyTorch first makes a copy in 64 bits.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Returns parameters and buffers by name. Each read from the model waits until the parameter has arrived."""
    return [*model.named_parameters(), *model.named_buffers()]


def _with_buckets(name: str, tensor: torch.Tensor, optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of a parameter and the buckets of a ShardedOptimizer that hold it."""
    if not isinstance(optimizer, ShardedOptimizer):
        return name
    params = [param for buffer in optimizer.buffers for param in buffer.params]
    numbers = [
        str(bucket.number) for bucket in optimizer.buckets if any(params[place.param] is tensor for place in bucket.members)
    ]
    return f"{name} (bucket{'s' if len(numbers) > 1 else ''} {enumerate_texts(numbers)})" if numbers else name
