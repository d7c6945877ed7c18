"""ShardedDataParallel: reduce-scatters during backward, all-gathers during the next forward."""

import copy
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from zero.buckets import Bucket
from zero.checks import check_all_managed, check_values, check_wrapping
from zero.host_comm import MESSAGE_BYTES, check_same_on_all_ranks, cpu_group, on_all_ranks
from zero.optimizer import ShardedOptimizer, holds_its_parameters
from zero.overlap import ReadCheck, Readers, WeakHook
from zero.reducer import Reducer
from zero.tensors import distinct_elements, properties

CHECKED_FORWARDS = 2  # with `overlap`: number of forwards, the first with all-gathers in flight, in which reads are checked
_wrapper_of: weakref.WeakKeyDictionary[nn.Module, "weakref.ref[ShardedDataParallel]"] = weakref.WeakKeyDictionary()


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is a ShardedOptimizer. It replaces DistributedDataParallel.

    backward   When the gradient of a parameter arrives, it is divided by the world size, copied into its bucket and freed. A
               full bucket is reduce-scattered at once, in the order of the buckets, and with replicas, each shard is then
               all-reduced over the groups. From then on, `param.grad` is a `SentGradient`. It can be dropped and zeroed, not
               read: clip with `optimizer.clip_grad_norm_`, and scale float16 gradients with `ShardedGradScaler`.
    step       The optimizer waits for the reduce-scatters, updates the owned slices, all-gathers buckets as soon as they are
               updated, and waits until every parameter is in its place.
    forward    With `overlap`, step does not wait. A read of a parameter from its module waits for its all-gathers.

    With `overlap`, one rule: after `step`, read parameters from their modules, or from the optimizer's `param_groups`, in any
    thread. Before any other read (from a list or a view made before `step`, from a module outside of the model, or in a process
    forked after `step`), call `optimizer.synchronize()`. The first forwards of the wrapper refuse an operation that reads a
    parameter too early, and name the parameter. An RNN and a compiled module wait for all parameters that they contain; compile
    the blocks of a model, not the whole model. On a GPU, read parameters on the stream of `step`: the first read makes its own
    stream and that of `step` wait, and later reads on a third one would not.

    Gradients of several backward passes add up until `zero_grad`. The update skips a parameter that has no gradient on any
    rank; if it has one on some ranks, it counts as zero on the others. With `require_backward_grad_sync = False`, or inside
    `no_sync()`, gradients accumulate in `param.grad`, and the next synchronized backward sends their sum. With
    `shard_gradients`, every backward reduce-scatters its gradients and adds them to the owned shards, so a full gradient never
    outlives its bucket (the paper's P_os+g).

    If the optimizer has a `param_dtype`, frozen parameters and buffers are converted to it as well. Gradients then arrive,
    accumulate and are sent in that dtype. Sums over ranks are float32, and with `shard_gradients` those over micro-steps too.

    Construction, forward, backward and step need to be called on all ranks. Construction broadcasts frozen parameters from
    rank 0. `deepcopy` returns a copy of the module, without the wrapper. Deletion of a wrapper leaves the module as it was.

    Args:
        broadcast_buffers: broadcast the buffers of rank 0 (for example the statistics of BatchNorm) at construction, and before
            each forward that follows a synchronized forward, as DistributedDataParallel does.
        overlap: let the all-gathers of a step overlap with the next forward. By default they end in `step`, so that
            every later read of a parameter, of any kind and in any thread, sees the update.
        check_reads: with `overlap`, check the reads of all forwards, not only of the first ones. The check costs time in each
            operation, and is left out if a module is compiled.

    Raises:
        ValueError: if a trainable parameter does not belong to the optimizer, `module` or `optimizer` is already wrapped, the
            model differs between the ranks, or a buffer or frozen parameter shares memory or cannot be stored in `param_dtype`.
        RuntimeError: from forward, if a parameter is read too early, buffers differ between the ranks, or the last backward
            failed. From backward, if a gradient arrives again after its bucket has been sent (as from several reentrant
            checkpoints), or is sparse. From step, if gradients have not been sent, or a parameter was replaced.

    Source: Rajbhandari et al., "ZeRO", sections 5.1 and 5.2, and DeepSpeed ZeRO-3 (dictionaries that wait).
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer,
        shard_gradients: bool = False,
        broadcast_buffers: bool = True,
        overlap: bool = False,
        check_reads: bool = False,
    ) -> None:
        super().__init__()
        self._undo: list[Callable[[], None]] = []  # removes from the module everything that the wrapper installed
        self._is_installed = False
        if not isinstance(optimizer, ShardedOptimizer):
            raise ValueError(f"ShardedDataParallel needs a ShardedOptimizer, not {type(optimizer).__name__}")
        check_wrapping(module, optimizer, (nn.parallel.DistributedDataParallel, ShardedDataParallel))
        self._replace_wrappers(module)
        self.module, self.optimizer, self.overlap = module, optimizer, overlap
        # as under DistributedDataParallel, buffers that are added later do not count if there are none now
        self.broadcast_buffers = broadcast_buffers and next(module.buffers(), None) is not None
        self.require_backward_grad_sync = True  # whether the next backward sends its gradients, as in DistributedDataParallel
        self.shard_gradients = shard_gradients  # whether every backward does
        self._checked_forwards = math.inf if check_reads else CHECKED_FORWARDS  # forwards that are still to be checked
        self._last_was_synchronized = True  # the last forward; if False, the next one does not broadcast
        optimizer.names.update({param: name for name, param in module.named_parameters()})
        self._check_parameters()
        if optimizer.plan.param_dtype is not None:
            module.to(optimizer.plan.param_dtype)
        self._broadcast_unsharded()
        self.readers = self._make_readers() if overlap else None
        self.reducer = Reducer(self, self._undo)
        self._is_installed = True
        if self.readers is not None:
            self.readers.find(list(module.modules()))
        self._install_hooks()
        optimizer.wrapper = weakref.ref(self)
        optimizer.wrap_param_groups()

    def _check_parameters(self) -> None:
        """Refuse, on all ranks, parameters and buffers that are not the optimizer's, differ, or cannot be moved."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        number_of: dict[Any, int] = self.optimizer.number_of
        facts = {f"{name!r}": (*properties(tensor), number_of.get(tensor)) for name, tensor in named}
        check_same_on_all_ranks(facts, self.optimizer.comm.group)
        on_all_ranks(self._check_own_parameters, self.optimizer.comm.group)

    def _check_own_parameters(self) -> None:
        check_values(self.module)
        optimizer, attributes = self.optimizer, itertools.chain(*(vars(part).items() for part in self.module.modules()))
        check_all_managed(self.module, optimizer.number_of)
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers(), *attributes):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor not in optimizer.number_of:
                for buffer in optimizer.buffers:
                    buffer.take_along(tensor, name, optimizer.names)
                if optimizer.plan.param_dtype is not None and tensor.is_complex():
                    raise ValueError(f"param_dtype={optimizer.plan.param_dtype} would drop the imaginary parts of {name}")

    def _broadcast_unsharded(self) -> None:
        """Broadcast rank 0's frozen parameters and, with `broadcast_buffers`, its buffers to all ranks."""
        buffers = self.module.named_buffers() if self.broadcast_buffers else ()
        named = (*self.module.named_parameters(), *buffers)
        self._broadcast((name, tensor) for name, tensor in named if tensor not in self.optimizer.number_of)

    def _make_readers(self) -> Readers:
        """Return the readers, which make modules wait for the buckets of a parameter that they read."""
        optimizer, params = self.optimizer, self.optimizer.flat_params
        buckets_of: dict[Any, list[Bucket]] = {}
        for bucket in optimizer.buckets:
            for placed in bucket.members:
                buckets_of.setdefault(params[placed.param], []).append(bucket)
        return Readers(optimizer.number_of.keys(), lambda param: optimizer.synchronize(buckets_of.get(param, ())), self._undo)

    def _install_hooks(self) -> None:
        """Install hooks for loaded weights in the module, which `_undo` removes, and note the wrapper of the module."""
        before_loading = WeakHook(self._before_loading)
        for part in self.module.modules():
            if self.optimizer.plan.has_masters:
                self._undo.append(part.register_load_state_dict_pre_hook(before_loading).remove)
            _wrapper_of[part] = weakref.ref(self)

    def _replace_wrappers(self, module: nn.Module) -> None:
        """Remove the wrapper of an optimizer that another one has replaced. A module can have only one wrapper."""
        for part in module.modules():
            reference = _wrapper_of.get(part)
            other = reference() if reference is not None else None
            if other is None:
                continue
            if holds_its_parameters(other.optimizer):
                raise ValueError(
                    f"{type(part).__name__} is wrapped by another ShardedDataParallel already; delete that one first, or make "
                    "a new ShardedOptimizer to replace its optimizer"
                )
            other._unwrap()

    def _unwrap(self) -> None:
        """Leave the module as it was before it was wrapped, with nothing in flight."""
        self.reducer.release()
        self.optimizer.synchronize()
        for undo in self._undo:
            undo()
        self._undo, self._is_installed = [], False
        for part in self.module.modules():
            _wrapper_of.pop(part, None)
        self.optimizer.wrapper = None

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        if self.__dict__.get("_is_installed"):
            self._unwrap()
        for undo in self.__dict__.get("_undo", ()):  # the constructor has failed
            undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ShardedDataParallel belongs to a process group and cannot be pickled; pickle its .module")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_installed:
            raise RuntimeError("this ShardedDataParallel has been replaced by a newer one of the same module; call that one")
        if torch.compiler.is_compiling():  # if compiled with the wrapper, the module bypasses the dictionaries
            torch.compiler.disable(self.optimizer.synchronize)()
        if self.reducer.in_backward and torch._C._current_graph_task_id() == -1:
            self.reducer.recover()
        if self.broadcast_buffers and self._last_was_synchronized:
            torch.compiler.disable(self._broadcast_buffers)()
        with self._check_of_reads():
            result = self.module(*args, **kwargs)
        self._last_was_synchronized = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled() and (self.require_backward_grad_sync or self.shard_gradients):
            torch.compiler.disable(self.reducer.watch)(result)
        return result

    def _check_of_reads(self) -> Any:
        """Return a context for forward that refuses reads of parameters in flight."""
        cannot = self.readers is None or self.readers.is_compiled or torch.compiler.is_compiling()
        if cannot or self._checked_forwards <= 0 or not self._in_flight():
            return nullcontext()
        self._checked_forwards -= 1
        return ReadCheck(self._in_flight, self.optimizer.names)

    def _in_flight(self) -> list[torch.Tensor]:
        """Return the memory whose all-gathers are in flight."""
        return [bucket.data for bucket in self.optimizer.buckets if bucket.gather is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients like the optimizer's `zero_grad`, including gradients that have been sent."""
        if not set_to_none:
            super().zero_grad(False)
        for part in self.module.modules() if set_to_none else ():
            for param in dict.values(part._parameters):  # does not wait for parameters in flight
                if param is not None:
                    param.grad = None
        self.reducer.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this block; see DistributedDataParallel.no_sync."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @torch.no_grad()
    def _before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load parameters from the state dict into the masters, in full precision. The module itself loads the rest."""
        for name, param in module.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if value is not None and value.shape == param.shape:
                self.optimizer.set_parameter(param, value)
                state_dict[prefix + name] = param.detach()  # as it was rounded; torch has made its own copy of the dict

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Broadcast the buffers of rank 0, as DistributedDataParallel does. Autograd does not record the write."""
        flat, named = self.optimizer.buffers, self.module.named_buffers()
        buffers = {name: buffer for name, buffer in named if not any(other.holds(buffer) for other in flat)}
        own = crc32(repr([(name, properties(buffer)) for name, buffer in buffers.items()]).encode())
        extremes = torch.tensor([own, -own], device="cpu")
        if self.optimizer.comm.world_size > 1:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=cpu_group(self.optimizer.comm.group))
        if extremes[0] != -extremes[1]:
            raise RuntimeError(
                "the names, shapes or dtypes of the buffers differ between the ranks, because a forward has registered or "
                "resized some; do so on all ranks, or use broadcast_buffers=False"
            )
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            self._broadcast(buffers.items())

    def _broadcast(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Overwrite tensors, with any strides, with the tensors of rank 0."""
        comm, own = self.optimizer.comm, [distinct_elements(name, tensor.detach()) for name, tensor in named]
        if comm.world_size > 1 and (tensors := [tensor for tensor in own if tensor.numel()]):
            group: Any = comm.group or dist.group.WORLD
            dist._broadcast_coalesced(group, tensors, MESSAGE_BYTES, 0)
