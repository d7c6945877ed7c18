"""ShardedDataParallel: reduce-scatters during backward, all-gathers during the next forward."""

import copy
import enum
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from zero.collectives import ReduceScatterWork
from zero.optimizer import SPARSE, Bucket, OwnedSlice, ShardedOptimizer, flattened, shaped
from zero.placeholders import SentGradient, WaitingDict, find_hidden_tensors, local_gradient

_IN_FLIGHT = 2  # reduce-scatters at a time: one on the wire, the next one ready; more is no faster and takes memory
_wrapper_of: weakref.WeakKeyDictionary[nn.Module, "weakref.ref[ShardedDataParallel]"] = weakref.WeakKeyDictionary()


class Place(NamedTuple):
    """Where elements `start:stop` of a parameter lie: from `offset` on in bucket number `bucket`."""

    bucket: int
    offset: int
    start: int
    stop: int


class Phase(enum.Enum):
    """What a ShardedDataParallel is doing."""

    IDLE = "no backward runs"
    BACKWARD = "gradients arrive; also after a backward that has failed"


@dataclass
class BucketGradients:
    """The gradients of one bucket, from backward to the end of the step."""

    bucket: Bucket
    missing: set[nn.Parameter] = field(default_factory=set)  # in backward: those whose gradients have not arrived
    buffer: torch.Tensor | None = None  # (sum of sizes,), gradients as they arrive
    streams: set[torch.cuda.Stream] = field(default_factory=set)  # that have filled it, on a GPU
    reduction: ReduceScatterWork | None = None  # in flight
    shard: torch.Tensor | None = None  # (sizes[rank],), the mean gradient of this step
    is_reduced: bool = False  # whether `shard` holds a gradient of this step

    def owned_gradient(self, owned: OwnedSlice) -> torch.Tensor:
        """The part of the shard that belongs to an owned slice, in its shape."""
        assert self.shard is not None
        return shaped(self.shard[owned.offset : owned.offset + owned.local.numel()], owned.local)


class Agreement(NamedTuple):
    """An all-reduce in flight. When its works are done, `used` says which parameters have a gradient on any rank."""

    used: torch.Tensor  # (parameters,) uint8
    works: list[dist.Work]


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is a ShardedOptimizer, in place of DistributedDataParallel.

    backward   as a parameter's gradient arrives, it is divided by the number of ranks, copied into its bucket and freed; a
               bucket that has all its gradients is reduce-scattered at once, in the order of the buckets. `param.grad` is
               a `SentGradient` from then on, which can be dropped and zeroed, but not read: clip with
               `optimizer.clip_grad_norm_`, scale float16 with `ShardedGradScaler`
    step       the optimizer waits for the reduce-scatters (this is its phase 1), updates, and starts the all-gathers
    forward    whoever reads a parameter from its module waits for the all-gathers of the buckets that it lies in

    So a rank sends the bytes of one all-reduce, half of them while backward runs and half while forward does.

    The wait is in the modules' own dictionaries of parameters (`WaitingDict`), which stand in place of plain ones
    while gathers are in flight. So it does not matter who reads, or when: a module's forward, its parent, a hook,
    `parameters()`, `state_dict()`, deepcopy. The optimizer's `param_groups` wait as well. A module that reads parameters past
    these dictionaries waits before it runs, as a whole: one that is compiled with `Module.compile` (compile the blocks of a
    model, not all of it, and the overlap remains), and one that has parameters in attributes, of its own (LSTM) or others',
    by the end of the first step. A function from `torch.compile` that is called past the wrapper is right, but compiled anew
    until torch gives up; compile the module instead.

    What is left is a reference that neither the module nor the optimizer hands out after `step`: a list of parameters that
    a moving average made once, or another module with the same Parameter (a decoder outside that is tied to an embedding
    inside, a traced copy). Call `optimizer.synchronize()` before these are read. `check_reads` finds them.

    A parameter without a gradient on any rank is skipped by the update; one that has a gradient on some ranks counts as
    zero on the others. Several backward passes add up until `zero_grad`, of the optimizer, the wrapper or the module.

    With `require_backward_grad_sync = False`, or inside `no_sync()`, gradients accumulate in `param.grad` as under
    DistributedDataParallel, and the next synchronized backward sends their sum. With `shard_gradients` every backward
    reduce-scatters and adds to the owned shards, so a full gradient never outlives its bucket (the paper's P_os+g), at the
    price of a reduce-scatter per micro-step.

    If the optimizer has a `param_dtype`, frozen parameters and buffers take it on, too. Gradients then arrive, accumulate
    and are sent in that dtype; sums over ranks, and over micro-steps with `shard_gradients`, are float32.

    Construction broadcasts frozen parameters and buffers from rank 0, as the optimizer has done with its own. It, forward,
    backward and step need to be called on all ranks. `deepcopy` gives a copy of the module, without the wrapper. A wrapper
    that is deleted leaves the module as it was; one whose optimizer has been replaced by a new ShardedOptimizer gives way to
    the new one's wrapper.

    Args:
        broadcast_buffers: before a forward whose last one was synchronized, every rank takes the buffers of rank 0 (the
            statistics of BatchNorm, say), as under DistributedDataParallel; otherwise they are each rank's own.
        check_reads: a debugging mode. Whatever is read before it has arrived is nan, by whatever way it is read, at the
            price of a copy of each bucket.

    Raises:
        ValueError: if a trainable parameter of `module` is not the optimizer's, one of the two is of the wrong kind or
            wrapped already, or a buffer or frozen parameter shares memory, within itself or with a trainable parameter.
        RuntimeError: from backward, if a parameter was read before it had arrived, its gradient arrives again after its
            bucket has been sent (as from several reentrant checkpoints), or is sparse; from step, if gradients of this
            step have not been sent, or a parameter was replaced; from forward, if the last backward failed and its
            gradients have not been dropped.

    Source: Rajbhandari et al., "ZeRO", sections 5.1 and 5.2; the interface is that of
    `torch.nn.parallel.DistributedDataParallel`; waiting dictionaries are DeepSpeed ZeRO-3's idea.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: ShardedOptimizer,
        shard_gradients: bool = False,
        broadcast_buffers: bool = True,
        check_reads: bool = False,
    ) -> None:
        super().__init__()
        self._undo: list[Callable[[], None]] = []  # takes out of the module what was put into it
        _check_arguments(module, optimizer)
        self._replace_wrappers(module)
        self.module = module
        self.optimizer = optimizer
        self.shard_gradients = shard_gradients
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._comm = optimizer.comm
        self._last_was_synchronized = True  # the last forward; else it is not followed by a broadcast
        self._index_parameters()
        self._check_parameters()
        self._phase = Phase.IDLE
        self._next = 0  # the bucket to be reduced next
        self._used: set[int] = set()  # numbers of the parameters that have a gradient in this step
        self._agreement: Agreement | None = None  # in flight
        if optimizer.param_dtype is not None:
            module.to(optimizer.param_dtype)
        self._sent = [SentGradient(param) for param in self._params]  # stands in `param.grad` for what is in the shards
        self._broadcast_unsharded()
        self._install_hooks()
        optimizer.wrapper = weakref.ref(self)
        optimizer.check_reads = check_reads

    def _index_parameters(self) -> None:
        """Number the optimizer's parameters, and note where in the buckets each of them lies."""
        optimizer = self.optimizer
        self._params = [param for buffer in optimizer.buffers for param in buffer.params]
        self._number = {param: number for number, param in enumerate(self._params)}
        optimizer.names.update({param: name for name, param in self.module.named_parameters()})
        self._places: dict[nn.Parameter, list[Place]] = {param: [] for param in self._params}
        for bucket in optimizer.buckets:
            for param, placed in bucket.members:
                self._places[param].append(Place(bucket.number, placed.offset, placed.start, placed.stop))
        self._gradients = [BucketGradients(bucket) for bucket in optimizer.buckets]

    def _check_parameters(self) -> None:
        if unmanaged := self._unmanaged_names():
            raise ValueError(f"these parameters require gradients but are not the optimizer's: {', '.join(unmanaged)}")
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            self._refuse_alias(tensor, name)

    def _broadcast_unsharded(self) -> None:
        """Begin on every rank with rank 0's frozen parameters and, if they are broadcast at all, buffers."""
        buffers = self.module.named_buffers() if self.broadcast_buffers else ()
        for name, tensor in (*self.module.named_parameters(), *buffers):
            if tensor not in self._number:
                self._broadcast([_distinct_elements(name, tensor.detach())])

    def _install_hooks(self) -> None:
        """Put into the module what tells of gradients, reads and loaded weights; `_undo` takes it out again."""
        on_gradient = _weak_hook(self._on_gradient)
        for param in self._params:
            self._undo.append(param.register_post_accumulate_grad_hook(on_gradient).remove)
        self._wait = _uncompiled(_waiter(self.optimizer, self._places))
        self._hidden: dict[nn.Module, list[nn.Parameter]] = {}  # by modules that wait as a whole: what they hold elsewhere
        self._attributes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()  # how many there were
        self._find_owners()
        self._attributes.clear()  # look again after the first forward, which may have made some
        if self.optimizer.param_dtype is not None:
            before_loading = _weak_hook(self._before_loading)
            for part in self.module.modules():
                self._undo.append(part.register_load_state_dict_pre_hook(before_loading).remove)
        for part in self.module.modules():
            _wrapper_of[part] = weakref.ref(self)

    def _replace_wrappers(self, module: nn.Module) -> None:
        """A module has one wrapper; that of an optimizer which another one has followed is no longer of use."""
        for part in module.modules():
            reference = _wrapper_of.get(part)
            other = reference() if reference is not None else None
            if other is None:
                continue
            if other.optimizer.holds_its_parameters():
                raise ValueError(
                    f"{type(part).__name__} is wrapped by another ShardedDataParallel already; delete that one first, or make "
                    "a new ShardedOptimizer to replace its optimizer"
                )
            other._unwrap()

    def _unwrap(self) -> None:
        """Leave the module as it was before it was wrapped, and nothing in flight."""
        if self._used:
            self.optimizer.refuse_step("the ShardedDataParallel that had sent the gradients of this step is gone")
        self._reset()
        self.optimizer.synchronize()
        _restore_plain_dicts(self._owners)
        for undo in self._undo:
            undo()
        self._undo = []
        for param in self._params:
            if isinstance(param.grad, SentGradient):
                param.grad = None
        for part in self.module.modules():
            _wrapper_of.pop(part, None)
        self.optimizer.wrapper = None
        self.optimizer.check_reads = False

    def __del__(self) -> None:
        if self.__dict__.get("_undo") and not sys.is_finalizing():
            self._unwrap()

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ShardedDataParallel belongs to a process group and cannot be pickled; pickle its .module")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._undo and self._params:
            raise RuntimeError("this ShardedDataParallel has been replaced by a newer one of the same module; call that one")
        if torch.compiler.is_compiling():  # compiled with the wrapper, the module would read past the dictionaries
            _uncompiled(self.optimizer.synchronize)()
        if self._phase is Phase.BACKWARD and torch._C._current_graph_task_id() == -1:
            self._recover()
        if self.broadcast_buffers and self._last_was_synchronized:
            _uncompiled(self._broadcast_buffers)()
        result = self.module(*args, **kwargs)
        self._last_was_synchronized = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled() and (self.require_backward_grad_sync or self.shard_gradients):
            for output in _tensors_in(result):
                if output.grad_fn is not None:
                    output.register_hook(_weak_hook(self._on_output_gradient))
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer's: also drops what has been sent, while parameters arrive."""
        arriving = [(part, part._parameters) for part in self._owners]
        _restore_plain_dicts(self._owners)
        super().zero_grad(set_to_none)
        for part, parameters in arriving:
            part.__dict__["_parameters"] = parameters
        self.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this block; see DistributedDataParallel.no_sync."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    # -- backward ------------------------------------------------------------------------------------------------------

    def _on_output_gradient(self, _: torch.Tensor) -> None:
        """Backward begins here, and ends when this call of `backward` does.

        The end of a call is all that autograd tells, and reentrant checkpoints call `backward` once per segment from
        within. So whoever comes first here is the outermost.
        """
        if self._phase is Phase.IDLE and (self.require_backward_grad_sync or self.shard_gradients):
            self._begin_backward()

    @torch.no_grad()
    def _on_gradient(self, param: nn.Parameter) -> None:
        """Take a gradient that backward has just finished."""
        if param.grad is None:  # another hook has dropped it; DistributedDataParallel takes that for zero
            param.grad = torch.zeros_like(param)
        if any(self.optimizer.buckets[place.bucket].gather is not None for place in self._places[param]):
            raise RuntimeError(
                f"{self.optimizer.names[param]} has a gradient, but its all-gather was never waited for: it was read through a "
                "reference taken beforehand; read it from its module, or call optimizer.synchronize() after step()"
            )
        if not (self.require_backward_grad_sync or self.shard_gradients):
            self._comm.pool.clear()  # makes room for the full gradients
            return
        if self._phase is Phase.IDLE:
            self._begin_backward()
        self._copy_to_bucket(param)

    @torch.no_grad()
    def _begin_backward(self) -> None:
        self._wait_for_agreement()
        self._apply_zeroing()
        for gradients in self._gradients:
            gradients.missing = {param for param, _ in gradients.bucket.members}
        self._phase, self._next = Phase.BACKWARD, 0
        Variable._execution_engine.queue_callback(self._end_backward)

    def _copy_to_bucket(self, param: nn.Parameter) -> None:
        """Copy a gradient, divided by the number of ranks, to its places in the buckets, and free it."""
        number = self._number[param]
        gradient: Any = param.grad
        if gradient is self._sent[number]:
            gradient = self._sent[number].take_added()
        if gradient.is_sparse:
            raise RuntimeError(SPARSE)
        self._used.add(number)
        gradient = flattened(gradient, param)
        for index, offset, start, stop in self._places[param]:
            if index < self._next:
                raise RuntimeError(
                    f"{self.optimizer.names[param]} gets a gradient again after its bucket has been sent in this backward; "
                    "a module in several reentrant checkpoints does that: use checkpoint(..., use_reentrant=False)"
                )
            gradients = self._gradients[index]
            place = self._bucket_buffer(gradients)[offset : offset + stop - start]
            if place.is_cuda:
                gradients.streams.add(torch.cuda.current_stream(place.device))
            if param in gradients.missing:
                torch.mul(gradient[start:stop], 1 / self._comm.world_size, out=place)
                gradients.missing.discard(param)
            else:  # a second time
                place.add_(gradient[start:stop], alpha=1 / self._comm.world_size)
            self._reduce_full_buckets()  # before the next one is taken: a large parameter fills several
        param.grad = self._sent[number]

    def _bucket_buffer(self, gradients: BucketGradients) -> torch.Tensor:
        """The tensor that collects the gradients of a bucket."""
        if gradients.buffer is None:
            data = gradients.bucket.data
            gradients.buffer = self._comm.pool.acquire(data.numel(), data)
        return gradients.buffer

    def _reduce_full_buckets(self) -> None:
        """Start the reduce-scatter of every full bucket whose turn it is: all ranks must start them in one order."""
        while self._next < len(self._gradients) and not self._gradients[self._next].missing:
            gradients = self._gradients[self._next]
            self._wait_for_streams(gradients)
            self._finish_reduce_scatter(gradients)  # of the micro-step before
            if self._next >= _IN_FLIGHT:
                self._finish_reduce_scatter(self._gradients[self._next - _IN_FLIGHT])
            with record_function(f"zero::reduce_scatter bucket {self._next}"):
                gradients.reduction = self._comm.reduce_scatter(self._bucket_buffer(gradients), gradients.bucket.sizes)
            gradients.buffer = None
            self._next += 1

    def _wait_for_streams(self, gradients: BucketGradients) -> None:
        """Have the stream that sends a bucket wait for the others that have filled it."""
        streams, gradients.streams = gradients.streams, set()
        for stream in streams:
            here = torch.cuda.current_stream(stream.device)
            if stream != here:
                here.wait_stream(stream)
                self._bucket_buffer(gradients).record_stream(stream)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Complete the buckets that wait for parameters that this backward did not reach."""
        for gradients in self._gradients:
            for param, placed in gradients.bucket.members:
                if param not in gradients.missing:
                    continue
                if local_gradient(param) is not None:  # of an earlier micro-step
                    self._copy_to_bucket(param)
                else:
                    self._bucket_buffer(gradients)[placed.offset : placed.offset + placed.numel].zero_()
                    gradients.missing.discard(param)
        self._reduce_full_buckets()
        self._phase = Phase.IDLE
        self._wait_for_agreement()  # of the micro-step before
        if not self._params:
            return
        used = torch.ones(len(self._params), dtype=torch.uint8, device=self._params[0].device)
        if unused := [number for number in range(len(self._params)) if number not in self._used]:
            used[unused] = 0
        self._agreement = Agreement(used, self._comm.all_reduce(used, dist.ReduceOp.MAX))
        if unused:
            self._wait_for_agreement()

    def _recover(self) -> None:
        """After a backward that has failed: go on if its gradients have been dropped."""
        self._apply_zeroing()
        if self._phase is Phase.BACKWARD and self._used:
            raise RuntimeError("the last backward did not end; call zero_grad() to drop its gradients")
        self._reset()

    def _finish_reduce_scatter(self, gradients: BucketGradients) -> None:
        """If a reduce-scatter of this bucket is in flight, wait for it and take its sum into the shard."""
        if gradients.reduction is None:
            return
        reduction, gradients.reduction = gradients.reduction, None
        if gradients.shard is None:
            like = gradients.bucket.updated
            gradients.shard = self._comm.pool.acquire(like.numel(), like)
        with record_function(f"zero::wait_reduce_scatter bucket {gradients.bucket.number}"):
            self._comm.add(reduction, gradients.shard, first=not gradients.is_reduced)
        gradients.is_reduced = True

    # -- step ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect(self) -> Iterator[Bucket]:
        """See GradientSource."""
        if self._phase is Phase.BACKWARD:
            raise RuntimeError("the last backward did not end; call optimizer.zero_grad() and repeat the step")
        others = {param for part in self._parts for param in part._parameters.values()} - self._number.keys()
        if any(self._is_unmanaged(param) for param in others):
            raise RuntimeError(
                f"{', '.join(self._unmanaged_names())} require gradients, but are not the optimizer's: replaced (by "
                "load_state_dict with assign=True, say) or unfrozen after it was built; build ShardedOptimizer and "
                "ShardedDataParallel anew"
            )
        self._wait_for_agreement()
        self._apply_zeroing()
        if any(local_gradient(param) is not None for param in self._params):
            raise RuntimeError(
                "gradients of this step have not been sent: its last backward must run outside of no_sync(), with "
                "require_backward_grad_sync = True; one set by hand is never sent"
            )
        for gradients in self._gradients:
            self._finish_reduce_scatter(gradients)
            for owned in gradients.bucket.owned:
                is_used = gradients.is_reduced and self._number[owned.param] in self._used
                owned.local.grad = gradients.owned_gradient(owned) if is_used else None
            yield gradients.bucket

    def updated(self) -> list[nn.Parameter]:
        """See GradientSource."""
        return [self._params[number] for number in self._used]

    @torch.no_grad()
    def clear(self) -> None:
        """See GradientSource."""
        self._wait_for_agreement()
        self._apply_zeroing()
        if not self._used or self._phase is Phase.BACKWARD:  # of a backward that has failed
            self._reset()

    def _apply_zeroing(self) -> None:
        """Do to what has been sent as was done to `param.grad` since: a gradient of None is dropped, one of zero is zero."""
        for param, sent in zip(self._params, self._sent, strict=True):
            if isinstance(param.grad, SentGradient) and param.grad is not sent:
                raise RuntimeError(
                    f"the gradient of {self.optimizer.names[param]} was put there again after zero_grad or a step, but it is "
                    "gone: ShardedDataParallel keeps the one that was sent last"
                )
        dropped = {number for number in self._used if self._params[number].grad is not self._sent[number]}
        zeroed = {number for number in self._used if self._sent[number].take_zeroed()}
        if self._used and dropped == self._used:
            self._reset()
        elif dropped or zeroed:
            for gradients in self._gradients:
                self._finish_reduce_scatter(gradients)
                for owned in gradients.bucket.owned if gradients.is_reduced else ():
                    if self._number[owned.param] in dropped | zeroed:
                        gradients.owned_gradient(owned).zero_()
            self._drop(dropped)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            self._used.discard(number)
            if self._params[number].grad is self._sent[number]:
                self._params[number].grad = None
            self._sent[number] = SentGradient(self._params[number])  # another one, so that the old one is not taken for it

    def _reset(self) -> None:
        """Drop all gradients that have arrived here; nothing is in flight after that."""
        self._wait_for_agreement()
        for gradients in self._gradients:
            self._finish_reduce_scatter(gradients)
            if gradients.shard is not None:
                self._comm.pool.release(gradients.shard)
                gradients.shard = None
            gradients.is_reduced = False
            gradients.missing, gradients.buffer = set(), None  # of a backward that has failed
        self._drop(self._used)
        self._phase = Phase.IDLE

    def _wait_for_agreement(self) -> None:
        """Count as used what any rank has used. A rank that has used everything need not wait for the others."""
        if self._agreement is not None:
            self._comm.wait("agreement", self._agreement.works, self._agreement.used.device)
            if len(self._used) < len(self._params):
                for number in self._agreement.used.nonzero().flatten().tolist():
                    self._used.add(number)
                    self._params[number].grad = self._sent[number]
            self._agreement = None

    # -- forward -------------------------------------------------------------------------------------------------------

    def on_gathers_started(self) -> None:
        """See GradientSource. Whoever reads a parameter from now on waits for it."""
        self._find_owners()  # anew: parametrizations, say, may have been added
        inside = {param for part in self._owners for param in part._parameters.values()}
        for param in self._number.keys() - inside:  # a loss's own, say, which nobody else would wait for
            self._wait(param)
        for part in self._owners:
            part.__dict__["_parameters"] = WaitingDict(part._parameters, self._wait)

    def on_gathers_ended(self) -> None:
        """See GradientSource."""
        _restore_plain_dicts(self._owners)

    def _find_owners(self) -> None:
        """Find the modules that hold parameters of the optimizer's, and those that must wait as a whole."""
        self._parts = list(self.module.modules())
        self._owners = [part for part in self._parts if any(param in self._number for param in part._parameters.values())]
        inside: set[nn.Module] = set()
        for part in self._parts:
            call = part._compiled_call_impl
            if call is not None and not isinstance(call, _WaitingCall):  # hooks would be compiled with it
                waiting: Any = _WaitingCall(_weak_hook(self._wait_for_module), part, call)
                part._compiled_call_impl = waiting
                self._undo.append(partial(setattr, part, "_compiled_call_impl", call))
            if self._attributes.get(part) == len(vars(part)):
                continue
            self._attributes[part] = len(vars(part))
            if isinstance(part, torch.jit.ScriptModule):
                raise ValueError("a ScriptModule reads its parameters without telling; wrap the module it was made from")
            inside = inside or {self, *self._parts}
            tensors = find_hidden_tensors(part, inside)
            for tensor in tensors:
                self._refuse_alias(tensor, f"a tensor that {type(part).__name__} holds")
            held: list[Any] = [tensor for tensor in tensors if tensor in self._number]
            if part not in self._hidden and (held or isinstance(part, torch._dynamo.OptimizedModule)):
                hook = _weak_hook(self._wait_for_module)
                self._undo.append(part.register_forward_pre_hook(hook, prepend=True).remove)
            if held or part in self._hidden:
                self._hidden[part] = held

    def _wait_for_module(self, module: nn.Module, *_: Any) -> None:
        """Wait for all that a module can read, and leave plain dictionaries below it, as compiled code expects."""
        for param in (*module.parameters(), *self._hidden.get(module, ())):
            self._wait(param)
        _restore_plain_dicts(module.modules())

    @torch.no_grad()
    def _before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load into the masters what the state dict has in full precision; the module itself loads the rest."""
        for name, param in module.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if value is not None and value.shape == param.shape:
                self.optimizer.set_parameter(param, value)

    def _refuse_alias(self, tensor: torch.Tensor, name: str) -> None:
        if tensor not in self._number and self.optimizer.is_in_former_memory(tensor):
            raise ValueError(
                f"{name} shares memory with a trainable parameter, which ShardedOptimizer has moved; clone() it, or use the "
                "parameter in its place"
            )

    def _unmanaged_names(self) -> list[str]:
        return [name for name, param in self.module.named_parameters() if self._is_unmanaged(param)]

    def _is_unmanaged(self, param: nn.Parameter | None) -> bool:
        """Whether a parameter is trainable and not the optimizer's."""
        return param is not None and param.requires_grad and param not in self._number

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Have each rank use the buffers of rank 0, as DistributedDataParallel does, without a trace in autograd."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        buffers = list(self.module.named_buffers())
        for name, buffer in buffers:
            kinds.setdefault((buffer.dtype, buffer.device), []).append(_distinct_elements(name, buffer))
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffer for _, buffer in buffers)):
            for of_kind in kinds.values():
                self._broadcast(of_kind)

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite tensors of one dtype and device, whatever their strides, with those of rank 0."""
        values = [tensor.contiguous().view(-1) for tensor in tensors]
        flat = values[0] if len(values) == 1 else torch.cat(values)
        self._comm.broadcast(flat)
        for tensor, value in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value.view(tensor.shape))

    # ------------------------------------------------------------------------------------------------------------------

    def held_bytes(self) -> dict[str, int]:
        """See GradientSource."""
        buckets = [gradients.buffer for gradients in self._gradients if gradients.buffer is not None]
        for gradients in self._gradients:
            if gradients.reduction is not None:
                buckets += [gradients.reduction.bucket, *gradients.reduction.received]
        return {
            "gradients": sum(gradients.shard.nbytes for gradients in self._gradients if gradients.shard is not None),
            "buckets": sum(tensor.nbytes for tensor in buckets) + self._comm.pool.nbytes,
        }


def _check_arguments(module: nn.Module, optimizer: ShardedOptimizer) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        raise ValueError(f"ShardedDataParallel needs a ShardedOptimizer, not {type(optimizer).__name__}")
    if any(isinstance(part, nn.parallel.DistributedDataParallel | ShardedDataParallel) for part in module.modules()):
        raise ValueError("the module is wrapped for data parallelism already; ShardedDataParallel takes the bare one")
    if optimizer.wrapper is not None and optimizer.wrapper() is not None:
        raise ValueError("the optimizer has a ShardedDataParallel already; make another ShardedOptimizer for another model")
    if ignored := getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        raise ValueError(f"DistributedDataParallel was told to ignore {', '.join(ignored)}, which ShardedDataParallel cannot")


def _restore_plain_dicts(parts: Iterable[nn.Module]) -> None:
    for part in parts:
        if isinstance(part._parameters, WaitingDict):
            part.__dict__["_parameters"] = part._parameters.plain()


def _waiter(optimizer: ShardedOptimizer, places: dict[nn.Parameter, list[Place]]) -> Callable[[Any], None]:
    """Waits for one parameter; without a reference to the wrapper, which it shall not keep alive."""

    def wait(param: Any) -> None:
        in_flight = [bucket for place in places.get(param, ()) if (bucket := optimizer.buckets[place.bucket]).gather]
        if in_flight:
            optimizer.synchronize(in_flight)

    return wait


class _WaitingCall(NamedTuple):
    """What a compiled module calls in place of its code."""

    wait: Callable[[nn.Module], None]
    module: nn.Module
    compiled: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.wait(self.module)
        return self.compiled(*args, **kwargs)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors that a forward has given, as DistributedDataParallel finds them, and in whatever else is a pytree."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, dict):  # of a class of its own
            yield from _tensors_in(list(leaf.values()))
        elif is_dataclass(leaf):
            yield from _tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


def _uncompiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compiler.disable(function)


def _distinct_elements(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that are different places in memory: of an expanded one the first."""
    own = tensor[tuple(slice(1) if stride == 0 else slice(None) for stride in tensor.stride())]
    if torch._debug_has_internal_overlap(own) == 1 or (not own.is_contiguous() and _shares_memory(own)):
        raise ValueError(f"elements of {name} share memory, so it cannot be broadcast; clone() it before wrapping")
    return own


def _shares_memory(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor lie in one place."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return places.unique().numel() < tensor.numel()


def _weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that does not keep its owner alive: what hangs on a tensor is out of the garbage collector's sight."""
    return _WeakHook(weakref.WeakMethod(method))


class _WeakHook:
    """Calls a method as long as its owner lives; a copy of what the hook hangs on has no part in that and does nothing."""

    def __init__(self, reference: Callable[[], Callable[..., None] | None]) -> None:
        self.reference = reference

    def __call__(self, *args: Any) -> None:
        alive = self.reference()
        if alive is not None:
            (_uncompiled(alive) if torch.compiler.is_compiling() else alive)(*args)

    def __reduce__(self) -> Any:
        return _WeakHook, (_no_owner,)


def _no_owner() -> None:
    """The reference of a hook that has been copied."""
