"""ShardedDataParallel: reduce-scatters during backward, all-gathers during the next forward."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable

from zero.collectives import Pool, Reduction, reduce_scatter
from zero.optimizer import Bucket, ShardedOptimizer

_IN_FLIGHT = 4  # reduce-scatters at a time: enough to keep the wire busy, few enough to bound the memory


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is a ShardedOptimizer, in place of DistributedDataParallel.

    backward   as a parameter's gradient arrives, it is divided by the number of ranks, copied into its bucket and freed; a
               bucket that has all its gradients is reduce-scattered at once, in the order of the buckets
    step       the optimizer waits for the reduce-scatters (this is its phase 1), updates, and starts the all-gathers
    forward    a module waits for the all-gathers of the buckets that its own parameters lie in, just before it runs

    So a rank sends the bytes of one all-reduce, half of them while backward runs and half while forward does. `state_dict`
    and `load_state_dict` of the model wait for all gathers; whoever else reads parameters calls
    `optimizer.synchronize()` first.

    A parameter without a gradient on any rank is skipped by the update; one that has a gradient on some ranks counts as
    zero on the others.

    With `require_backward_grad_sync = False`, or inside `no_sync()`, gradients accumulate in `param.grad` as under
    DistributedDataParallel, and the next synchronized backward sends their sum. With `shard_gradients` every backward
    reduce-scatters and adds to the owned shards, so a full gradient never outlives its bucket (the paper's P_os+g), at the
    price of a reduce-scatter per micro-step.

    Construction broadcasts parameters and buffers from rank 0. It, forward, backward and step need to be called on all
    ranks.

    Raises:
        ValueError: if a trainable parameter of `module` is not the optimizer's.

    Source: Rajbhandari et al., "ZeRO", sections 5.1 and 5.2; the interface is that of
    `torch.nn.parallel.DistributedDataParallel`.
    """

    def __init__(self, module: nn.Module, optimizer: ShardedOptimizer, shard_gradients: bool = False) -> None:
        super().__init__()
        self.module = module
        self.optimizer = optimizer
        self.shard_gradients = shard_gradients
        self.require_backward_grad_sync = True
        self.world_size = optimizer.world_size
        self.process_group = optimizer.process_group

        self._params = [param for buffer in optimizer.buffers for param in buffer.params]
        self._number = {param: number for number, param in enumerate(self._params)}
        strangers = [name for name, param in module.named_parameters() if param.requires_grad and param not in self._number]
        if strangers:
            raise ValueError(f"these parameters require gradients but are not the optimizer's: {', '.join(strangers)}")
        # per parameter: (bucket, where it begins in the bucket, elements start:stop of the parameter)
        self._places: dict[nn.Parameter, list[tuple[int, int, int, int]]] = {param: [] for param in self._params}
        for index, bucket in enumerate(optimizer.buckets):
            for param, piece, offset in bucket.members:
                self._places[param].append((index, offset, piece.start, piece.stop))

        count = len(optimizer.buckets)
        self._shards: list[torch.Tensor | None] = [None] * count  # (shard_numel,), the mean gradient; made when needed
        self._reduced = [False] * count  # whether the shard holds a gradient of this step
        self._filling: list[torch.Tensor | None] = [None] * count  # (world_size * shard_numel,), gradients as they arrive
        self._reductions: list[Reduction | None] = [None] * count  # in flight
        self._pool = Pool()
        self._missing: list[set[nn.Parameter]] = []  # by bucket; empty outside of backward
        self._next = 0  # the bucket to be reduced next
        self._used: set[int] = set()  # numbers of the parameters that had a gradient on this rank
        self._used_anywhere: tuple[torch.Tensor, dist.Work] | None = None  # (parameters,) uint8: on any rank; in flight
        self._collected = False

        self._broadcast()
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._on_gradient)
        self._wait_before_forward()
        optimizer.collect_gradients = self._collect
        optimizer.gather_in_background = True
        optimizer.on_zero_grad = self._forget

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this block; see DistributedDataParallel.no_sync."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- backward ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _on_gradient(self, param: nn.Parameter) -> None:
        """Take a gradient that backward has just finished."""
        if not (self.require_backward_grad_sync or self.shard_gradients):
            return
        if not self._missing:
            self._begin_backward()
        self._fill(param)
        self._reduce_full_buckets()

    def _begin_backward(self) -> None:
        if self._collected:
            raise RuntimeError("gradients of the last step are still there; call optimizer.zero_grad() before backward")
        self._missing = [{param for param, _, _ in bucket.members} for bucket in self.optimizer.buckets]
        self._next = 0
        Variable._execution_engine.queue_callback(self._end_backward)

    def _fill(self, param: nn.Parameter) -> None:
        """Copy a gradient, divided by the number of ranks, to its places in the buckets, and free it."""
        if param.grad.is_sparse:
            raise RuntimeError("sparse gradients cannot be laid flat; use nn.Embedding(sparse=False)")
        self._used.add(self._number[param])
        gradient = param.grad.reshape(-1)
        for index, offset, start, stop in self._places[param]:
            torch.mul(gradient[start:stop], 1 / self.world_size, out=self._filled(index)[offset : offset + stop - start])
            self._missing[index].discard(param)
        param.grad = None

    def _filled(self, index: int) -> torch.Tensor:
        """The tensor that collects the gradients of a bucket."""
        if self._filling[index] is None:
            self._filling[index] = self._pool.take(self.optimizer.buckets[index].data)
        return self._filling[index]

    def _reduce_full_buckets(self) -> None:
        """Start the reduce-scatter of every full bucket whose turn it is: all ranks must start them in one order."""
        while self._next < len(self._missing) and not self._missing[self._next]:
            index, self._next = self._next, self._next + 1
            self._finish(index)  # of the micro-step before
            self._finish(index - _IN_FLIGHT)
            self._reductions[index] = reduce_scatter(self._filled(index), self.process_group, self._pool)
            self._filling[index] = None

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Complete the buckets that wait for parameters that this backward did not reach."""
        for index, bucket in enumerate(self.optimizer.buckets):
            for param, piece, offset in bucket.members:
                if param not in self._missing[index]:
                    continue
                if param.grad is not None:  # of an earlier micro-step
                    self._fill(param)
                else:
                    self._filled(index)[offset : offset + piece.numel].zero_()
                    self._missing[index].discard(param)
        self._reduce_full_buckets()
        self._missing = []
        if self.require_backward_grad_sync and self.world_size > 1:
            used = torch.tensor([number in self._used for number in range(len(self._params))], dtype=torch.uint8)
            used = used.to(self._params[0].device)
            work = dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.process_group, async_op=True)
            self._used_anywhere = (used, work)

    def _finish(self, index: int) -> None:
        """If a reduce-scatter of this bucket is in flight, wait for it and take its sum into the shard."""
        if index < 0 or self._reductions[index] is None:
            return
        reduction, self._reductions[index] = self._reductions[index], None
        if self._shards[index] is None:
            self._shards[index] = torch.empty_like(reduction.bucket.chunk(self.world_size)[0])
        reduction.add_to(self._shards[index], first=not self._reduced[index])
        self._reduced[index] = True
        for tensor in (reduction.bucket, *reduction.received):
            self._pool.give_back(tensor)

    # -- step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _collect(self) -> None:
        """Give every owned slice its mean gradient, or None if no rank had one: phase 1 of the optimizer's step."""
        if self._collected:
            return
        self._collected = True
        used = self._used
        if self._used_anywhere is not None:
            flags, work = self._used_anywhere
            work.wait()
            used = set(flags.nonzero().flatten().tolist())
            self._used_anywhere = None
        for index, bucket in enumerate(self.optimizer.buckets):
            self._finish(index)
            shard = self._shards[index]
            for owned in bucket.owned:
                has_gradient = self._reduced[index] and self._number[owned.param] in used
                owned.local.grad = shard[owned.offset : owned.offset + owned.local.numel()] if has_gradient else None

    def _forget(self) -> None:
        """Begin a new step: what the shards hold is no gradient any more."""
        self._collect()  # nothing may be in flight
        self._collected = False
        self._reduced = [False] * len(self._reduced)
        self._used = set()

    # -- forward -------------------------------------------------------------------------------------------------------

    def _wait_before_forward(self) -> None:
        """Have every module that holds parameters wait for their all-gathers before it runs, and state dicts for all."""
        for module in self.module.modules():
            indices = {place[0] for param in module.parameters(recurse=False) for place in self._places.get(param, [])}
            if indices:
                buckets = [self.optimizer.buckets[index] for index in sorted(indices)]
                module.register_forward_pre_hook(_waiter(buckets))
        self.module.register_state_dict_pre_hook(lambda *_: self.optimizer.synchronize())
        self.module.register_load_state_dict_pre_hook(lambda *_: self.optimizer.synchronize())

    def _broadcast(self) -> None:
        """Make every rank's parameters and buffers those of rank 0."""
        if self.world_size > 1:
            inside = [buffer.data for buffer in self.optimizer.buffers]
            outside = [tensor.data for tensor in self.module.parameters() if tensor not in self._number]
            for tensor in (*inside, *outside, *self.module.buffers()):
                dist.broadcast(tensor, group_src=0, group=self.process_group)


def _waiter(buckets: list[Bucket]) -> Any:
    @torch._dynamo.disable
    def wait(*_: Any) -> None:
        for bucket in buckets:
            bucket.wait()

    return wait
