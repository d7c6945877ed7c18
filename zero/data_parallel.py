"""ShardedDataParallel: reduce-scatters during backward, all-gathers during the next forward."""

import copy
import itertools
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from zero.collectives import ReduceScatterWork
from zero.layout import PlacedSlice
from zero.messages import cpu_group
from zero.optimizer import SPARSE, Bucket, ShardedOptimizer
from zero.placeholders import SentGradient, local_gradient
from zero.stopwatch import region
from zero.tensors import distinct_elements, flattened, properties, shaped
from zero.waiting import ReadCheck, Readers, WeakHook

CHECKED_FORWARDS = 2  # with `overlap`: forwards after a step in which reads are checked, after a start
_wrapper_of: weakref.WeakKeyDictionary[nn.Module, "weakref.ref[ShardedDataParallel]"] = weakref.WeakKeyDictionary()


@dataclass
class BucketGradients:
    """The gradients of one bucket, from backward to the end of the step."""

    bucket: Bucket
    missing: set[int] = field(default_factory=set)  # in backward: parameters without their gradient yet
    buffer: torch.Tensor | None = None  # (sum of sizes,), collects gradients as they arrive
    streams: set[torch.cuda.Stream] = field(default_factory=set)  # on a GPU: streams that have written to `buffer`
    reduction: ReduceScatterWork | None = None  # in flight
    shard: torch.Tensor | None = None  # (sizes[shard_rank],), the mean gradient of this step, if one has arrived
    views: list[torch.Tensor] = field(default_factory=list)  # into `shard`, in the shapes of the owned slices
    # with replicas: the all-reduce of `shard` over them, in flight or done; None: `shard` has the sum over the shard group only
    all_reduce: list[dist.Work] | None = None

    def set_shard(self, shard: torch.Tensor) -> None:
        self.shard, owned = shard, self.bucket.owned
        self.views = [shaped(shard[slice_.offset : slice_.offset + slice_.local.numel()], slice_.local) for slice_ in owned]


class Agreement(NamedTuple):
    """An all-reduce in flight. When its works are done, `used` marks the parameters that have a gradient on any rank."""

    used: torch.Tensor  # (number of parameters,) uint8
    works: list[dist.Work]


class ShardedDataParallel(nn.Module):
    """Data parallelism for a model whose optimizer is a ShardedOptimizer. It replaces DistributedDataParallel.

    backward   When the gradient of a parameter arrives, it is divided by the world size, copied into its bucket and freed. A
               bucket that has all its gradients is reduce-scattered at once, in the order of the buckets. From then on,
               `param.grad` is a `SentGradient`. It can be dropped and zeroed, but not read: clip with
               `optimizer.clip_grad_norm_`, and scale float16 gradients with `ShardedGradScaler`. With replicas, an all-reduce
               adds up each shard over the groups as soon as its reduce-scatter has ended.
    step       The optimizer waits for the reduce-scatters (its phase 1), updates the owned slices, all-gathers each bucket
               as soon as it is updated, and waits until every parameter is in its place.
    forward    With `overlap`, step does not wait. A read of a parameter from its module waits for the all-gathers of the
               buckets that hold the parameter.

    With `overlap`, one rule: after `step`, read parameters from their modules, or from the optimizer's `param_groups`. While
    all-gathers are in flight, a `WaitingDict` replaces the `_parameters` of each module, so it does not matter who reads, when,
    or in which thread. An RNN and a compiled module wait for all parameters that they contain; compile the blocks of a model,
    not the whole model. Before any other read (from a list or a view made before `step`, from a module outside of the model, or
    in a process forked after `step`), call `optimizer.synchronize()`. The first forwards of the wrapper refuse an operation
    that reads a parameter too early, and name the parameter. A forward of the module itself is not checked.

    The update skips a parameter that has no gradient on any rank. If a parameter has a gradient on some ranks, its gradient
    counts as zero on the other ranks. Gradients of several backward passes add up until `zero_grad`.

    With `require_backward_grad_sync = False`, or inside `no_sync()`, gradients accumulate in `param.grad`, and the next
    synchronized backward sends their sum. With `shard_gradients`, every backward reduce-scatters its gradients and adds them to
    the owned shards, so a full gradient never outlives its bucket (the paper's P_os+g).

    If the optimizer has a `param_dtype`, frozen parameters and buffers are converted to it as well. Gradients then arrive,
    accumulate and are sent in that dtype. Sums over ranks are float32, and with `shard_gradients` those over micro-steps too.

    Construction, forward, backward and step need to be called on all ranks. Construction broadcasts frozen parameters from
    rank 0. `deepcopy` returns a copy of the module, without the wrapper. Deletion of a wrapper leaves the module as it was.

    Args:
        broadcast_buffers: broadcast the buffers of rank 0 (for example the statistics of BatchNorm) at construction, and before
            each forward that follows a synchronized forward, as DistributedDataParallel does.
        overlap: let the all-gathers of a step overlap with the next forward. By default they end in `step`, so that whoever
            reads a parameter, when, how and in which thread, reads what has been updated.
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
        _check_arguments(module, optimizer)
        self._replace_wrappers(module)
        self.module = module
        self.optimizer = optimizer
        self.shard_gradients = shard_gradients
        # as under DistributedDataParallel, buffers that are added later do not count if there are none now
        self.broadcast_buffers = broadcast_buffers and next(module.buffers(), None) is not None
        self.overlap = overlap
        self._checked_forwards = math.inf if check_reads else CHECKED_FORWARDS  # forwards that are still to be checked
        self.require_backward_grad_sync = True
        self._comm = optimizer.comm
        self._last_was_synchronized = True  # the last forward; if False, the next one does not broadcast
        self._index_parameters()
        self._check_parameters()
        self._in_backward = False  # whether gradients arrive; also after a backward that has failed
        self._next = 0  # number of the bucket to be reduce-scattered next
        self._used: set[int] = set()  # numbers of the parameters that have a gradient in this step
        self._agreement: Agreement | None = None  # in flight
        if optimizer.param_dtype is not None:
            module.to(optimizer.param_dtype)
        self._sent = [SentGradient(param) for param in self._params]  # placeholders for gradients in the shards
        self._broadcast_unsharded()
        self._install_hooks()
        optimizer.wrapper = weakref.ref(self)
        optimizer.wrap_param_groups()

    def _index_parameters(self) -> None:
        """Number the optimizer's parameters, and record the places of each parameter in the buckets."""
        optimizer = self.optimizer
        self._params = [param for buffer in optimizer.buffers for param in buffer.params]
        self._number = {param: number for number, param in enumerate(self._params)}
        optimizer.names.update({param: name for name, param in self.module.named_parameters()})
        self._places: list[list[tuple[BucketGradients, PlacedSlice]]] = [[] for _ in self._params]
        self._gradients = [BucketGradients(bucket) for bucket in optimizer.buckets]
        for gradients in self._gradients:
            for placed in gradients.bucket.members:
                self._places[placed.param].append((gradients, placed))

    def _check_parameters(self) -> None:
        """Refuse, on all ranks, parameters and buffers that are not the optimizer's, differ, or cannot be moved."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        self.optimizer.check_same_on_all_ranks(
            {f"{name!r}": (*properties(tensor), self._number.get(tensor)) for name, tensor in named}  # type: ignore[call-overload]
        )
        self.optimizer.on_all_ranks(self._check_own)

    def _check_own(self) -> None:
        if unmanaged := self._unmanaged_names():
            raise ValueError(
                f"these parameters require gradients but are not the optimizer's: {', '.join(unmanaged)}; give all of them to "
                "one ShardedOptimizer, or use DistributedDataParallel, under which several ShardedOptimizers share a module"
            )
        named: list[tuple[str, Any]] = [*self.module.named_parameters(), *self.module.named_buffers()]
        named += [attribute for part in self.module.modules() for attribute in vars(part).items()]
        for name, tensor in named:
            if isinstance(tensor, torch.Tensor) and tensor not in self._number:
                self.optimizer.take_along(tensor, name)
                if self.optimizer.param_dtype is not None and tensor.is_complex():
                    raise ValueError(f"param_dtype={self.optimizer.param_dtype} would drop the imaginary parts of {name}")

    def _broadcast_unsharded(self) -> None:
        """Broadcast rank 0's frozen parameters and, with `broadcast_buffers`, its buffers to all ranks."""
        buffers = self.module.named_buffers() if self.broadcast_buffers else ()
        for name, tensor in (*self.module.named_parameters(), *buffers):
            if tensor not in self._number:
                self._broadcast([distinct_elements(name, tensor.detach())])

    def _install_hooks(self) -> None:
        """Install hooks for gradients, reads and loaded weights in the module. `_undo` removes them."""
        on_gradient = WeakHook(self._on_gradient)
        for number, param in enumerate(self._params):
            self._undo.append(param.register_post_accumulate_grad_hook(partial(on_gradient, number)).remove)
        buckets_of = {param: [gradients.bucket for gradients, _ in self._places[n]] for param, n in self._number.items()}
        self.readers = Readers(set(self._params), partial(_wait, self.optimizer, buckets_of), self._undo)
        if self.overlap:
            self.readers.find(list(self.module.modules()))
        if self.optimizer.plan.has_masters:
            before_loading = WeakHook(self._before_loading)
            for part in self.module.modules():
                self._undo.append(part.register_load_state_dict_pre_hook(before_loading).remove)
        for part in self.module.modules():
            _wrapper_of[part] = weakref.ref(self)

    def _replace_wrappers(self, module: nn.Module) -> None:
        """Remove the wrapper of an optimizer that another one has replaced. A module can have only one wrapper."""
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
        """Leave the module as it was before it was wrapped, with nothing in flight."""
        if self._used:
            self.optimizer.refuse_step("the ShardedDataParallel that had sent the gradients of this step is gone")
        self._reset()
        self.optimizer.synchronize()
        for undo in self._undo:
            undo()
        self._undo = []
        for param in self._params:
            if isinstance(param.grad, SentGradient):
                param.grad = None
        for part in self.module.modules():
            _wrapper_of.pop(part, None)
        self.optimizer.wrapper = None

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
        if torch.compiler.is_compiling():  # if compiled with the wrapper, the module bypasses the dictionaries
            torch.compiler.disable(self.optimizer.synchronize)()
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._recover()
        if self.broadcast_buffers and self._last_was_synchronized:
            torch.compiler.disable(self._broadcast_buffers)()
        with self._check_of_reads():
            result = self.module(*args, **kwargs)
        self._last_was_synchronized = torch.is_grad_enabled() and self.require_backward_grad_sync
        if torch.is_grad_enabled() and (self.require_backward_grad_sync or self.shard_gradients):
            torch.compiler.disable(self._watch)(result)
        return result

    def _watch(self, result: Any) -> None:
        """Note the begin of a backward through the outputs of a forward."""
        for output in tensors_in(result):
            if output.grad_fn is not None:
                output.register_hook(partial(WeakHook(self._on_output_gradient), _nearest_leaf(output.grad_fn)))

    def _check_of_reads(self) -> Any:
        """Return a context for forward that refuses reads of parameters in flight."""
        optimizer = self.optimizer
        if self._checked_forwards <= 0 or self.readers.is_compiled or torch.compiler.is_compiling() or not self._in_flight():
            return nullcontext()
        self._checked_forwards -= 1
        return ReadCheck(self._in_flight, optimizer.names)

    def _in_flight(self) -> list[torch.Tensor]:
        """Return the memory whose all-gathers are in flight."""
        return [bucket.data for bucket in self.optimizer.buckets if bucket.gather is not None]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Same as the optimizer's `zero_grad`: also drops gradients that have been sent."""
        if not set_to_none:
            super().zero_grad(False)
        for part in self.module.modules() if set_to_none else ():
            for param in dict.values(part._parameters):  # does not wait for parameters in flight
                if param is not None:
                    param.grad = None
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

    def _on_output_gradient(self, leaf: Any, _: torch.Tensor) -> None:
        """Begin a backward, before any gradient arrives: also a rank on which none arrives takes part.

        `torch.autograd.grad` comes here as well, but accumulates no gradient, not even in the leaf next to the output.
        Reentrant checkpoints call `backward` inside of the outer call, to which the first call of this hook belongs.
        """
        is_due = not self._in_backward and (self.require_backward_grad_sync or self.shard_gradients)
        if is_due and _accumulates(leaf):
            self._begin_backward()

    def _on_gradient(self, number: int, param: nn.Parameter) -> None:
        """Process a gradient that backward has just accumulated."""
        if param.grad is None:  # another hook has dropped it; DistributedDataParallel treats this as zero
            param.grad = torch.zeros_like(param)
        for gradients, _ in self._places[number]:
            if gradients.bucket.gather is not None:
                raise RuntimeError(
                    f"{self.optimizer.names[param]} has a gradient, but its all-gather was never waited for: it was read "
                    "through an old reference; read it from its module, or call optimizer.synchronize() after step()"
                )
        if not (self.require_backward_grad_sync or self.shard_gradients):
            self._comm.pool.clear()  # frees memory for the full gradients
            return
        if not self._in_backward:
            self._begin_backward()  # the parameter was used outside of the module, for example in a penalty
        self._copy_to_bucket(number)

    @torch.no_grad()
    def _begin_backward(self) -> None:
        self._wait_for_agreement()
        self._apply_zeroing()
        for gradients in self._gradients:
            self._finish_reduce_scatter(gradients)  # of the previous micro-step
            gradients.missing = {placed.param for placed in gradients.bucket.members}
        self._in_backward, self._next = True, 0
        Variable._execution_engine.queue_callback(self._end_backward)

    def _copy_to_bucket(self, number: int) -> None:
        """Copy a gradient, divided by the world size, to its places in the buckets, and free it."""
        param = self._params[number]
        gradient: Any = param.grad
        if gradient is self._sent[number]:
            gradient = self._sent[number].take_added()
        if gradient.is_sparse:
            raise RuntimeError(SPARSE)
        self._used.add(number)
        gradient = flattened(gradient.detach(), param)  # it requires gradients itself with create_graph=True
        for gradients, (_, start, stop, offset) in self._places[number]:
            if gradients.bucket.number < self._next:
                raise RuntimeError(
                    f"{self.optimizer.names[param]} gets a gradient again after its bucket has been sent in this backward; "
                    "a module in several reentrant checkpoints does that: use checkpoint(..., use_reentrant=False)"
                )
            place = self._bucket_buffer(gradients)[offset : offset + stop - start]
            if place.is_cuda:
                gradients.streams.add(torch.cuda.current_stream(place.device))
            if number in gradients.missing:
                torch.mul(gradient[start:stop], 1 / self._comm.world_size, out=place)
                gradients.missing.discard(number)
            else:  # the second gradient of this parameter in this backward
                place.add_(gradient[start:stop], alpha=1 / self._comm.world_size)
            self._reduce_full_buckets()  # before the next buffer is acquired: a large parameter fills several
        param.grad = self._sent[number]

    def _bucket_buffer(self, gradients: BucketGradients) -> torch.Tensor:
        """Return the tensor that collects the gradients of a bucket."""
        if gradients.buffer is None:
            data = gradients.bucket.data
            gradients.buffer = self._comm.pool.acquire(data.numel(), data)
        return gradients.buffer

    def _reduce_full_buckets(self) -> None:
        """Start the reduce-scatters of full buckets in bucket order: all ranks must start them in the same order.

        One is in flight while the next bucket fills. With two, GPT-2 124M is not faster on CPUs, and takes a bucket more.
        """
        while self._next < len(self._gradients) and not self._gradients[self._next].missing:
            number, self._next = self._next, self._next + 1  # first: hooks of another device may run in another thread
            gradients = self._gradients[number]
            self._wait_for_streams(gradients)
            if number > 0:
                self._finish_reduce_scatter(self._gradients[number - 1])
                if self.require_backward_grad_sync:
                    self._start_all_reduce(self._gradients[number - 1])
            with region(f"zero::reduce_scatter bucket {number}"):
                gradients.reduction = self._comm.reduce_scatter(self._bucket_buffer(gradients), gradients.bucket.sizes)
            gradients.buffer = None

    def _wait_for_streams(self, gradients: BucketGradients) -> None:
        """Make the stream that sends a bucket wait for the other streams that have filled it."""
        streams, gradients.streams = gradients.streams, set()
        for stream in streams:
            here = torch.cuda.current_stream(stream.device)
            if stream != here:
                here.wait_stream(stream)
                self._bucket_buffer(gradients).record_stream(stream)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Complete the buckets that still wait for gradients, for parameters that this backward did not reach."""
        for gradients in self._gradients:
            for number, start, stop, offset in gradients.bucket.members:
                if number not in gradients.missing:
                    continue
                if local_gradient(self._params[number]) is not None:  # accumulated in an earlier micro-step
                    self._copy_to_bucket(number)
                else:
                    self._bucket_buffer(gradients)[offset : offset + stop - start].zero_()
                    gradients.missing.discard(number)
        self._reduce_full_buckets()
        self._in_backward = False
        self._wait_for_agreement()  # the one of the previous micro-step
        if not self._params:
            return
        used = torch.ones(len(self._params), dtype=torch.uint8, device=self._params[0].device)
        if unused := [number for number in range(len(self._params)) if number not in self._used]:
            used[unused] = 0
        self._agreement = Agreement(used, self._comm.all_reduce(used, dist.ReduceOp.MAX))
        if unused:  # a rank that has used all parameters does not read the result
            self._wait_for_agreement()
            for number in used.nonzero().flatten().tolist():
                self._used.add(number)
                self._params[number].grad = self._sent[number]

    def _recover(self) -> None:
        """Continue after a failed backward if its gradients have been dropped. Otherwise raise an error."""
        self._apply_zeroing()
        if self._in_backward and self._used:
            raise RuntimeError("the last backward did not end; call zero_grad() to drop its gradients")
        self._reset()

    def _finish_reduce_scatter(self, gradients: BucketGradients) -> None:
        """If a reduce-scatter of this bucket is in flight, wait for it and accumulate its sum in the shard."""
        if gradients.reduction is None:
            return
        reduction, gradients.reduction = gradients.reduction, None
        if gradients.all_reduce is not None:  # an earlier backward of this step: count its sum once in the next all-reduce
            assert gradients.shard is not None
            self._wait_for_all_reduce(gradients)
            if self._comm.replica > 0:
                gradients.shard.zero_()
            gradients.all_reduce = None
        with region(f"zero::wait_reduce_scatter bucket {gradients.bucket.number}"):
            shard = self._comm.add(reduction, gradients.shard, gradients.bucket.updated)
        if gradients.shard is None:
            gradients.set_shard(shard)

    def _start_all_reduce(self, gradients: BucketGradients) -> None:
        """Start to add up the shard over its replicas, if it has a gradient of this step that is not added up yet."""
        if self._comm.replicas > 1 and gradients.shard is not None and gradients.all_reduce is None:
            with region(f"zero::all_reduce bucket {gradients.bucket.number}"):
                gradients.all_reduce = self._comm.all_reduce_shard(gradients.shard)

    def _wait_for_all_reduce(self, gradients: BucketGradients) -> None:
        if gradients.all_reduce:
            with region(f"zero::wait_all_reduce bucket {gradients.bucket.number}"):
                self._comm.wait("all-reduce", gradients.all_reduce, gradients.bucket.data.device)
            gradients.all_reduce = []

    # -- step: the methods of zero.optimizer.ParameterGradients --------------------------------------------------------

    def check(self) -> None:
        parts = list(self.module.modules())
        if self.overlap:
            self.readers.find(parts)  # some may have been added or compiled
        params = [param for part in parts for param in part._parameters.values() if param is not None and param.requires_grad]
        if not self._number.keys() >= set(params):
            raise RuntimeError(
                f"{', '.join(self._unmanaged_names())} require gradients, but are not the optimizer's: replaced (for "
                "example by load_state_dict with assign=True) or unfrozen after the optimizer was built; build "
                "ShardedOptimizer and ShardedDataParallel again"
            )

    @torch.no_grad()
    def collect(self) -> Iterator[Bucket]:
        if self._in_backward:
            raise RuntimeError("the last backward did not end; call optimizer.zero_grad() and repeat the step")
        self._apply_zeroing()
        if any(local_gradient(param) is not None for param in self._params):
            raise RuntimeError(
                "gradients of this step have not been sent: its last backward must run outside of no_sync(), with "
                "require_backward_grad_sync = True; one set by hand is never sent"
            )
        if self._comm.replicas > 1:
            for gradients in self._gradients:  # start all of them before the first wait
                self._finish_reduce_scatter(gradients)
                self._start_all_reduce(gradients)
        for gradients in self._gradients:
            self._finish_reduce_scatter(gradients)
            self._wait_for_all_reduce(gradients)
            for owned, view in itertools.zip_longest(gradients.bucket.owned, gradients.views):
                owned.local.grad = view if self._number[owned.param] in self._used else None
            yield gradients.bucket

    def updated(self) -> list[nn.Parameter]:
        return [self._params[number] for number in self._used]

    @torch.no_grad()
    def clear(self) -> None:
        self._wait_for_agreement()
        self._apply_zeroing()
        if not self._used or self._in_backward:  # a backward has failed
            self._reset()

    def _apply_zeroing(self) -> None:
        """Apply to the sent gradients what was done to `param.grad` since: None drops a gradient, `zero_()` zeroes it."""
        current = [param.grad for param in self._params]
        for param, gradient, sent in zip(self._params, current, self._sent, strict=True):
            if gradient is not sent and isinstance(gradient, SentGradient):
                raise RuntimeError(
                    f"the gradient of {self.optimizer.names[param]} was put there again after zero_grad or a step, but it is "
                    "gone: ShardedDataParallel keeps the one that was sent last"
                )
        dropped = {number for number in self._used if current[number] is not self._sent[number]}
        zeroed = {number for number in self._used if self._sent[number].take_zeroed()}
        if self._used and dropped == self._used:
            self._reset()
        elif dropped or zeroed:
            for gradients in self._gradients:
                self._finish_reduce_scatter(gradients)
                self._wait_for_all_reduce(gradients)
                for owned, view in zip(gradients.bucket.owned, gradients.views, strict=False):
                    if self._number[owned.param] in dropped | zeroed:
                        view.zero_()
            self._drop(dropped)

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            self._used.discard(number)
            if self._params[number].grad is self._sent[number]:
                self._params[number].grad = None
            self._sent[number] = SentGradient(self._params[number])  # a new object, which differs from the old one

    def _reset(self) -> None:
        """Drop all gradients that have arrived on this rank. Afterwards nothing is in flight."""
        self._wait_for_agreement()
        for gradients in self._gradients:
            self._finish_reduce_scatter(gradients)
            self._wait_for_all_reduce(gradients)
            if gradients.shard is not None:
                self._comm.pool.release(gradients.shard)
                gradients.shard, gradients.views = None, []
                for owned in gradients.bucket.owned:
                    owned.local.grad = None
            gradients.missing, gradients.buffer, gradients.all_reduce = set(), None, None  # left over from a failed backward
        self._drop(self._used)
        self._in_backward = False

    def _wait_for_agreement(self) -> None:
        if self._agreement is not None:
            self._comm.wait("all-reduce", self._agreement.works, self._agreement.used.device)
            self._agreement = None

    # -- forward -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before_loading(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        """Load parameters from the state dict into the masters, in full precision. The module itself loads the rest."""
        for name, param in module.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if value is not None and value.shape == param.shape:
                self.optimizer.set_parameter(param, value)

    def _unmanaged_names(self) -> list[str]:
        """Return the names of the trainable parameters that do not belong to the optimizer."""
        named = self.module.named_parameters()
        return [name for name, param in named if param.requires_grad and param not in self._number]

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Broadcast the buffers of rank 0, as DistributedDataParallel does. Autograd does not record the write."""
        buffers = {name: buffer for name, buffer in self.module.named_buffers() if not self.optimizer.is_in_buffer(buffer)}
        own = crc32(repr([(name, properties(buffer)) for name, buffer in buffers.items()]).encode())
        extremes = torch.tensor([own, -own])
        if self._comm.world_size > 1:
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=cpu_group(self._comm.group))
        if extremes[0] != -extremes[1]:
            raise RuntimeError(
                "the names, shapes or dtypes of the buffers differ between the ranks, because a forward has registered or "
                "resized some; do so on all ranks, or use broadcast_buffers=False"
            )
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for name, buffer in buffers.items():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(distinct_elements(name, buffer))
        with torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            for of_kind in kinds.values():
                self._broadcast(of_kind)

    def _broadcast(self, tensors: list[torch.Tensor]) -> None:
        """Overwrite tensors of one dtype and device, with any strides, with the tensors of rank 0."""
        values = [tensor.contiguous().view(-1) for tensor in tensors]
        flat = values[0] if len(values) == 1 else torch.cat(values)
        self._comm.broadcast(flat)
        for tensor, value in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            if value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value.view(tensor.shape))

    def held_bytes(self) -> dict[str, int]:
        buckets = [gradients.buffer for gradients in self._gradients if gradients.buffer is not None]
        for gradients in self._gradients:
            if gradients.reduction is not None:
                buckets += [gradients.reduction.bucket, *gradients.reduction.received]
        return {
            "gradients": sum(gradients.shard.nbytes for gradients in self._gradients if gradients.shard is not None),
            "buckets": sum(tensor.nbytes for tensor in buckets) + self._comm.pool.nbytes,
        }


def _nearest_leaf(node: Any) -> Any:
    """Return the node nearest to `node` in its graph that accumulates a gradient into a leaf."""
    pending = deque([node])
    while pending:
        node = pending.popleft()
        following = [other for other, _ in node.next_functions if other is not None]
        if not following and hasattr(node, "variable"):
            return node
        pending.extend(following)
    return None


def _accumulates(leaf: Any) -> bool:
    """Return whether the running call of autograd accumulates a gradient into a leaf, and is not `torch.autograd.grad`."""
    try:
        return leaf is not None and torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # the leaf is an input of torch.autograd.grad
        return False


def _check_arguments(module: nn.Module, optimizer: ShardedOptimizer) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        raise ValueError(f"ShardedDataParallel needs a ShardedOptimizer, not {type(optimizer).__name__}")
    if any(isinstance(part, nn.parallel.DistributedDataParallel | ShardedDataParallel) for part in module.modules()):
        raise ValueError("the module is wrapped for data parallelism already; ShardedDataParallel takes the bare one")
    if optimizer.wrapper is not None and optimizer.wrapper() is not None:
        raise ValueError("the optimizer has a ShardedDataParallel already; make another ShardedOptimizer for another model")
    if ignored := getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        raise ValueError(f"DistributedDataParallel was told to ignore {', '.join(ignored)}, which ShardedDataParallel cannot")


def _wait(optimizer: ShardedOptimizer, buckets_of: dict[nn.Parameter, list[Bucket]], param: Any) -> None:
    """Wait for one parameter."""
    optimizer.synchronize(buckets_of.get(param, ()))


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the output of a forward, as DistributedDataParallel finds them, and those in any other pytree."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, dict):  # a subclass of dict
            yield from tensors_in(list(leaf.values()))
        elif is_dataclass(leaf):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
