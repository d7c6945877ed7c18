"""ShardedDataParallel: reduce-scatters during backward, all-gathers during the next forward."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn

from zero.autocast import check_runs_under
from zero.checks import KNOWN, check_all_managed, check_values, check_wrapping, refuse_join
from zero.host_comm import MESSAGE_BYTES, check_same_on_all_ranks, extremes, on_all_ranks
from zero.optimizer import ShardedOptimizer
from zero.reducer import Reducer, check_not_wrapped
from zero.tensors import distinct_elements, properties


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is a ShardedOptimizer. It replaces DistributedDataParallel.

    1. Parameters. After `step()`, every parameter has its new values. With `overlap=units`, those of a unit have arrived when
       the unit's forward begins, all others when the model's forward begins. Anywhere else, call `optimizer.synchronize()`
       first. Saving, restoring, clipping, `step` and `zero_grad` need no such call.
    2. Gradients. Backward divides a gradient by the world size, copies it into its bucket and frees it. A full bucket is
       reduce-scattered at once. Until the next `zero_grad` (of the optimizer, the wrapper or the model), `param.grad` holds a
       placeholder that refuses every operation: clip with `optimizer.clip_grad_norm_`, scale with `ShardedGradScaler`.
    3. Weights are written by the optimizer, by `optimizer.set_parameter`, and by `load_state_dict` of the model. Other writes
       count as well (with units, after `synchronize()`), except to weights with masters (`param_dtype`, `autocast`): there,
       `step` refuses writes that version counters show; others (`param.data`) are lost, or change a remainder by at most half
       a unit of bfloat16. Who reads or copies such weights gets rounded ones; `zero.checkpoint.model_state_dict` has all bits.
    4. Structure. A model is wrapped once, for its life. Its parameters are not moved, replaced or regrouped, or `step` refuses.

    Gradients add up until `zero_grad`: in `no_sync()` in `param.grad`, and the next synchronized backward sends the sum. With
    `shard_gradients`, every backward sends its own gradients (P_os+g). If only some ranks have a gradient, it counts as zero on
    the others; if none has one, the update skips the parameter. Call construction, forward, backward and step on all ranks.

    Args:
        broadcast_buffers: broadcast rank 0's buffers at construction and before forwards, as DistributedDataParallel does.
        overlap: modules of the model, such as its blocks. The all-gathers of a step then run beside the next forward, which
            gains time where communication has processors of its own, as on GPUs. Compile the units first, not the whole model.

    Raises ValueError if these do not fit each other or differ between the ranks.

    Source: Rajbhandari et al., "ZeRO", sections 5.1 and 5.2.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer,
        shard_gradients: bool = False,
        broadcast_buffers: bool = True,
        overlap: Iterable[nn.Module] = (),
    ) -> None:
        super().__init__()
        if not isinstance(optimizer, ShardedOptimizer):
            raise ValueError(f"ShardedDataParallel needs a ShardedOptimizer, not {type(optimizer).__name__}")
        if not isinstance(overlap, Iterable):
            raise ValueError(f"overlap={overlap!r} must be modules of the model, such as overlap=model.blocks; or leave it out")
        units = list(overlap)
        check_wrapping(module, not optimizer.source.is_whole, (nn.parallel.DistributedDataParallel, ShardedDataParallel), units)
        self.module, self.optimizer, self._placed = module, optimizer, optimizer.placed
        # as under DistributedDataParallel, buffers that are added later do not count if there are none now
        self.broadcast_buffers = broadcast_buffers and next(module.buffers(), None) is not None
        self.require_backward_grad_sync = True  # whether the next backward sends its gradients, as in DistributedDataParallel
        self.shard_gradients = shard_gradients  # whether each backward sends
        self._loaded: dict[nn.Module, list[nn.Parameter]] = {}  # by module: parameters whose masters have been loaded
        self._last_was_synchronized = True  # the last forward; if False, the next one does not broadcast
        casts = [buffer.data for buffer in self._placed.buffers if buffer.planned.is_of_autocast]
        self._autocast = {(data.device.type, data.dtype) for data in casts if optimizer.comm.checks_values}  # forward needs it
        self._check_parameters()
        self._placed.names.update({param: name for name, param in module.named_parameters()})
        if (dtype := self._placed.plan.param_dtype) is not None:
            self._cast_unsharded(dtype)
        state = (*module.named_parameters(), *(module.named_buffers() if broadcast_buffers else ()))
        self._broadcast((name, tensor) for name, tensor in state if tensor not in self._placed.number_of)
        self.reducer = optimizer.source = Reducer(self, self._placed, reuse=type(optimizer.inner) in KNOWN)
        overlaps = units and not optimizer.comm.is_alone
        if self._placed.plan.has_masters or overlaps:
            for part in module.modules():
                part.register_state_dict_pre_hook(_Hook(lambda *_: optimizer.synchronize()))
                part.register_load_state_dict_pre_hook(_Hook(self._before_loading))
                part.register_load_state_dict_post_hook(_Hook(self._after_loading))
        if overlaps:
            self._install_waits(units)

    def _check_parameters(self) -> None:
        """Refuse, on all ranks, parameters and buffers that are not the optimizer's, differ, or cannot be moved."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        number_of: dict[Any, int] = self._placed.number_of
        facts: dict[str, Any] = {f"{name!r}": (*properties(tensor), number_of.get(tensor)) for name, tensor in named}
        facts |= {"shard_gradients": self.shard_gradients, "broadcast_buffers": self.broadcast_buffers}
        check_same_on_all_ranks(facts, self.optimizer.comm.group)
        on_all_ranks(self._check_own_parameters, self.optimizer.comm.group)

    def _check_own_parameters(self) -> None:
        if self.optimizer.comm.checks_values:
            check_values(self.module)
        check_not_wrapped(self.module)
        check_all_managed(self.module, self._placed.number_of)
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if tensor in self._placed.number_of:
                continue
            if any(buffer.uses_former_memory(tensor) for buffer in self._placed.buffers):
                remedy = "use the parameter in its place, or clone() it"
                raise ValueError(f"{name} shares memory with a parameter, which ShardedOptimizer has moved; {remedy}")

    def _cast_unsharded(self, dtype: torch.dtype) -> None:
        """Cast frozen parameters. Buffers stay, but for those of BatchNorm, whose kernels need one dtype."""
        for param in self.module.parameters():
            if param not in self._placed.number_of and param.is_floating_point():
                param.data = param.data.to(dtype)
        for part in self.module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.to(dtype)

    def _install_waits(self, units: list[nn.Module]) -> None:
        """Let the model wait for the parameters outside of its units, and each unit and compiled module for its own."""
        parts, inside = list(self.module.modules()), {part for unit in units for part in unit.modules()}
        outside = {param for part in parts if part not in inside for param in part.parameters(recurse=False)}  # also tied ones
        in_units = {param for unit in units for param in unit.parameters()} - outside
        for part in parts:
            is_compiled = part._compiled_call_impl is not None or isinstance(part, torch._dynamo.OptimizedModule)
            if part in units or is_compiled:
                wait = self._wait_for(part.parameters())
            elif part is self.module:
                wait = self._wait_for(self._placed.number_of.keys() - in_units)  # and those of a loss
            else:
                continue
            if part._compiled_call_impl is None:
                part.register_forward_pre_hook(_Hook(torch.compiler.disable(wait)), prepend=True)
            else:  # a hook would be compiled too
                part._compiled_call_impl = partial(_wait_and_call, wait, part._compiled_call_impl)
        self.optimizer.overlaps = True

    def _wait_for(self, params: Iterable[nn.Parameter]) -> Callable[..., None]:
        """Return a function that waits for the all-gathers of some parameters."""
        numbers = {self._placed.number_of.get(param) for param in params}
        needed = [bucket for bucket in self._placed.buckets if any(member.number in numbers for member in bucket.members)]
        return lambda *_: self.optimizer.synchronize(needed)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        self.optimizer.synchronize()
        copied = copy.deepcopy(self.module, memo)
        for param, its in zip(self.module.parameters(), copied.parameters(), strict=True):
            if param.grad_dtype is None:  # a copy has no hook that casts its gradients
                its.grad_dtype = torch.float32
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ShardedDataParallel belongs to a process group and cannot be pickled; pickle its .module")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.reducer.in_backward and torch._C._current_graph_task_id() == -1:
            self.reducer.recover()
        for device_type, dtype in self._autocast:
            check_runs_under(device_type, dtype)
        if self.broadcast_buffers and self._last_was_synchronized:
            torch.compiler.disable(self._broadcast_buffers)()
        result = self.module(*args, **kwargs)
        self._last_was_synchronized = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled():
            torch.compiler.disable(self.reducer.watch)(result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do the optimizer's `zero_grad`."""
        self.optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of backward calls in this block locally; see DistributedDataParallel.no_sync."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    join = join_hook = refuse_join

    @torch.no_grad()
    def _before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load parameters from the state dict into the masters, in full precision. The module itself loads the rest."""
        self.optimizer.synchronize()
        self._loaded[module] = []
        for name, param in module._parameters.items() if self._placed.plan.has_masters else ():
            value = state_dict.get(prefix + name)
            if value is not None and param is not None and (value.shape == param.shape or value.numel() == param.numel() == 1):
                self.optimizer.set_parameter(param, value.view(param.shape))
                self._loaded[module].append(param)
                state_dict[prefix + name] = param.detach()  # as it was rounded; torch has made its own copy of the dict

    def _after_loading(self, module: nn.Module, _: Any) -> None:
        self._placed.expect_versions(self._loaded.pop(module))

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Broadcast the buffers of rank 0, as DistributedDataParallel does. Autograd does not record the write."""
        buffers = dict(self.module.named_buffers())
        own = crc32(repr([(name, properties(buffer)) for name, buffer in buffers.items()]).encode())
        ((least, largest),) = extremes([own], self.optimizer.comm.group)
        if least != largest:
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


class _Hook:
    """A hook of the wrapper in a module. In a copy or a pickle of the module, it does nothing."""

    def __init__(self, function: Callable[..., None] = lambda *_: None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> None:
        self.function(*args)

    def __reduce__(self) -> Any:
        return _Hook, ()


def _wait_and_call(wait: Callable[[], None], call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    wait()
    return call(*args, **kwargs)
