"""Reducer: gradients arrive, fill buckets, are reduce-scattered, and become the mean gradients of this rank's slices.

From hook to reduce-scatter: `on_gradient`, `_copy_to_buckets`, `_send_full_buckets`, `Communicator.reduce_scatter`. From there
to the slices: `collect`, which `ShardedOptimizer.clip_grad_norm_` and `step` call.
"""

import itertools
import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from zero.buckets import Bucket, Placement
from zero.checks import SPARSE, check_all_managed
from zero.collectives import Communicator, ReduceScatterWork
from zero.gradients import GradientSource, SentGradient
from zero.layout import Slice
from zero.stopwatch import region
from zero.tensors import accumulates, cut, flattened, name_of, nearest_leaf, tensors_in


@dataclass
class BucketGradients:
    """The gradients of one bucket, from backward to the end of the step."""

    bucket: Bucket
    comm: Communicator
    missing: set[int] = field(default_factory=set)  # in backward: parameters without their gradient yet
    buffer: torch.Tensor | None = None  # in the shape of `bucket.data`, collects gradients as they arrive
    _places: dict[int, torch.Tensor] = field(default_factory=dict)  # views into `buffer`, by parameter
    streams: set[torch.cuda.Stream] = field(default_factory=set)  # on a GPU: streams that have used `buffer` or `reduction`
    reduction: ReduceScatterWork | None = None  # in flight
    # in the shape of `bucket.shard`, the mean gradient of this step, if one has arrived; in the dtype of
    # `bucket.values`, or if nothing has been added up, of the gradients
    shard: torch.Tensor | None = None
    views: list[torch.Tensor] = field(default_factory=list)  # into `shard`, in the shapes of the owned slices; none without it
    # with replicas: the all-reduce of `shard` over them, in flight or done; None: `shard` has the sum over the shard group only
    all_reduce: list[dist.Work] | None = None

    def places(self) -> dict[int, torch.Tensor]:
        """Return the places of slices in the tensor that collects the gradients, by parameter."""
        if self.buffer is None:
            data, dtype = self.bucket.data, self.bucket.gradient_dtype
            self.buffer, self.streams = self.comm.pool.acquire(data.numel(), data, dtype), set()
            parts = cut(self.buffer, self.bucket.cuts)
            self._places = {member.number: part for member, part in zip(self.bucket.members, parts, strict=True)}
        self._follow_streams()
        return self._places

    def accumulate(self, gradient: torch.Tensor, slice_: Slice) -> None:
        """Put a slice of a flattened gradient, divided by the world size, into its place, or add it to what is there."""
        place = self.places()[slice_.number]
        own = gradient if slice_.numel == gradient.numel() else gradient[slice_.start : slice_.stop]
        if slice_.number in self.missing:
            self.comm.divide(own, place)
            self.missing.discard(slice_.number)
        else:  # the second gradient of this parameter in this backward
            place.add_(own, alpha=1 / self.comm.world_size)

    def _follow_streams(self) -> None:
        """On a GPU, let the current stream wait for the others that have used the tensors of this bucket."""
        if self.bucket.data.is_cuda:
            here = torch.cuda.current_stream(self.bucket.data.device)
            for stream in self.streams - {here}:
                here.wait_stream(stream)
            self.streams.add(here)

    def start_reduce_scatter(self) -> None:
        """Start the reduce-scatter of the bucket, after the work of the streams that fill it."""
        assert self.buffer is not None
        self._follow_streams()
        with region(f"zero::reduce_scatter bucket {self.bucket.number}"):
            self.reduction = self.comm.reduce_scatter(self.buffer)
        self.buffer, self._places = None, {}

    def finish_reduce_scatter(self) -> None:
        """If a reduce-scatter is in flight, wait for it and accumulate its sum in the shard."""
        if self.reduction is None:
            return
        reduction, self.reduction = self.reduction, None
        if self.all_reduce is not None:  # of an earlier backward: only one replica may bring its sum into the next all-reduce
            assert self.shard is not None
            self.wait_for_all_reduce()
            if self.comm.replica > 0:
                self.shard.zero_()
            self.all_reduce = None
        self._follow_streams()
        with region(f"zero::wait_reduce_scatter bucket {self.bucket.number}"):
            shard = self.comm.sum_of(reduction, self.shard, self.bucket.values)
        for stream in self.streams if len(self.streams) > 1 else ():  # one of them may reuse the memory of the bucket
            stream.wait_stream(torch.cuda.current_stream(shard.device))
        if shard is not self.shard:
            self.shard, self.views = shard, self.bucket.views(shard)

    def start_all_reduce(self) -> None:
        """Start the all-reduce of the shard over its replicas, if it has a gradient of this step that is not reduced yet."""
        if self.comm.replicas > 1 and self.shard is not None and self.all_reduce is None:
            with region(f"zero::all_reduce bucket {self.bucket.number}"):
                self.all_reduce = self.comm.all_reduce_shard(self.shard)

    def wait_for_all_reduce(self) -> None:
        if self.all_reduce:
            with region(f"zero::wait_all_reduce bucket {self.bucket.number}"):
                self.comm.wait("all-reduce", self.all_reduce, self.bucket.data.device)
            self.all_reduce = []

    def wait(self) -> None:
        """Wait until nothing of this bucket is in flight."""
        self.finish_reduce_scatter()
        self.wait_for_all_reduce()

    def drop(self, reuse: bool) -> None:
        """Drop all gradients, when nothing is in flight. `reuse` their memory only if nobody else can refer to them."""
        if self.shard is not None:
            shard, self.shard, self.views = self.shard, None, []
            for owned in self.bucket.owned:
                owned.local.grad = None
            if reuse:
                self.comm.pool.release(shard)
        self.missing, self.buffer, self._places, self.all_reduce = set(), None, {}, None  # left over from a failed backward

    @property
    def buffer_bytes(self) -> int:
        """Bytes that are being filled, sent or received."""
        in_flight = [] if self.reduction is None else [self.reduction.bucket, *self.reduction.received]
        return sum(tensor.nbytes for tensor in (self.buffer, *in_flight) if tensor is not None)


class Wrapper(Protocol):
    """What the Reducer sees of the ShardedDataParallel around a model."""

    module: nn.Module
    shard_gradients: bool
    require_backward_grad_sync: bool


class Reducer(GradientSource):
    """Takes the gradients of a model while backward runs, and gives their means over the ranks to a ShardedOptimizer.

    `_begin_backward` takes the placeholders away, so that autograd adds nothing to them. `on_gradient` copies a gradient to
    its buckets and sends those that are full. `_end_backward` completes the buckets of parameters without a gradient, lets the
    ranks agree on which parameters have a gradient on any rank, and puts a placeholder into `param.grad` of these.
    """

    def __init__(self, wrapper: Wrapper, placed: Placement, reuse: bool) -> None:
        """Install hooks in the placed parameters. `reuse`: the memory of gradients, to which no optimizer keeps a reference."""
        self._wrapper, self._placed, self._reuse = wrapper, placed, reuse
        self.in_backward = False  # whether a backward has begun and not ended, perhaps because it has failed
        self.params = {number: param for param, number in self._placed.number_of.items()}
        self._gradients = [BucketGradients(bucket, self._placed.comm) for bucket in self._placed.buckets]
        self._slices: dict[int, list[tuple[BucketGradients, Slice]]] = {}  # of each parameter
        for gradients in self._gradients:
            for member in gradients.bucket.members:
                self._slices.setdefault(member.number, []).append((gradients, member))
        self._next = 0  # number of the bucket to be reduce-scattered next
        self._lock = threading.Lock()  # hooks of parameters on another device run in another thread
        self._used: set[int] = set()  # numbers of the parameters that have a gradient in this step
        # an all-reduce in flight, and what it marks: (number of parameters,) uint8, those that have a gradient on any rank
        self._agreement: tuple[list[dist.Work], torch.Tensor] | None = None
        self._sent = {number: SentGradient(param) for number, param in self.params.items()}
        self._parts = list(wrapper.module.modules())
        self._children = [{**part._modules} for part in self._parts]
        casts = [buffer for buffer in placed.buffers if buffer.planned.is_of_autocast]
        self._casts = {number: buffer.planned.gradient_dtype for buffer in casts for number in buffer.params}
        for number in self._casts:  # the dtypes of gradients may differ: autograd adds a 16-bit one to a float32 sum
            self.params[number].grad_dtype = None
        # a message in flight must not lose its memory; at the end of the program, the other rank may be gone
        for gradients in self._gradients:
            weakref.finalize(self, gradients.wait).atexit = False
        # not hooks of autograd's nodes, which would keep a gradient in memory while its bucket is sent
        on_gradient = partial(_call_reducer, weakref.ref(self))
        self._hooks = [
            param.register_post_accumulate_grad_hook(partial(on_gradient, number)) for number, param in self.params.items()
        ]

    # -- backward ------------------------------------------------------------------------------------------------------

    def watch(self, result: Any) -> None:
        """Install hooks that note the start of a backward pass through the outputs of a forward pass."""
        for param, hook in zip(self.params.values(), self._hooks, strict=True):
            hooks: Any = param._post_accumulate_grad_hooks
            if next(reversed(hooks)) != hook.id:  # later hooks run before ours, as under DistributedDataParallel
                hooks[hook.id] = hooks.pop(hook.id)  # torch calls them in the order in which they were put in
        for output in tensors_in(result):
            if output.grad_fn is not None:
                output.register_hook(partial(self._on_output_gradient, nearest_leaf(output.grad_fn)))

    @property
    def _is_sending(self) -> bool:
        return self._wrapper.require_backward_grad_sync or self._wrapper.shard_gradients

    def _on_output_gradient(self, leaf: Any, _: torch.Tensor) -> None:
        """Begin a backward pass before any gradient arrives, so that a rank on which none arrives takes part, too.

        `torch.autograd.grad` calls this hook as well, but accumulates no gradient, not even in the leaf next to the output.
        Reentrant checkpoints call `backward` inside of the outer call, to which the first call of this hook belongs.
        """
        if not self.in_backward and accumulates(leaf):
            self._begin_backward()

    def on_gradient(self, number: int, param: nn.Parameter) -> None:
        """Process a gradient that backward has just accumulated."""
        if not self._is_sending:
            if number in self._casts and param.grad is not None:
                param.grad = param.grad.to(self._casts[number])  # the first one; autograd adds others to it in place
            return
        if param.grad is None:  # a hook has dropped it; DistributedDataParallel treats this as zero
            param.grad = torch.zeros_like(param)
        if not self.in_backward:
            self._begin_backward()  # the parameter was used outside of the module, for example in a penalty
        self._copy_to_buckets(number)

    @torch.no_grad()
    def _begin_backward(self) -> None:
        self._wait_for_agreement()
        self._drop_what_the_model_dropped()
        for number in self._used:
            if isinstance(self.params[number].grad, SentGradient):
                self.params[number].grad = None
        self.in_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not self._is_sending:
            self._placed.comm.pool.clear()  # frees memory for the full gradients
            return
        self._next = 0
        for gradients in self._gradients:
            gradients.finish_reduce_scatter()  # of the previous micro-step
            gradients.missing = {member.number for member in gradients.bucket.members}

    def _drop_what_the_model_dropped(self) -> None:
        """Drop the gradients if the model's `zero_grad` has dropped their placeholders. Refuse if only some were dropped."""
        gone = [number for number in self._used if self.params[number].grad is None]
        if 0 < len(gone) < len(self._used):
            name = name_of(self.params[gone[0]], self._placed.names)
            remedy = "call zero_grad of the optimizer, the wrapper or the whole model"
            raise RuntimeError(f"the gradient of {name} was dropped, and those of other parameters were not; {remedy}")
        if gone:
            self._reset()

    def _copy_to_buckets(self, number: int) -> None:
        """Copy a gradient, divided by the world size, to its places in the buckets, and free it."""
        param = self.params[number]
        gradient: Any = param.grad
        if gradient.is_sparse:
            raise RuntimeError(SPARSE)
        self._used.add(number)
        gradient = flattened(gradient.detach(), param)  # it requires gradients itself with create_graph=True
        for gradients, slice_ in self._slices[number]:
            if gradients.bucket.number < self._next:
                name, remedy = name_of(param, self._placed.names), "use checkpoint(..., use_reentrant=False)"
                why = f"a module in several reentrant checkpoints does that: {remedy}"
                raise RuntimeError(f"{name} gets a gradient again after its bucket has been sent in this backward; {why}")
            gradients.accumulate(gradient, slice_)
            if not gradients.missing:
                self._send_full_buckets()  # before the next buffer is acquired: a large parameter fills several
        param.grad = None

    def _send_full_buckets(self) -> None:
        """Start the reduce-scatters of full buckets in bucket order: all ranks must start them in the same order.

        One is in flight while the next bucket fills. With two, GPT-2 124M is not faster on CPUs, and takes a bucket more.
        """
        with self._lock:
            while self._next < len(self._gradients) and not self._gradients[self._next].missing:
                if self._next > 0:
                    self._gradients[self._next - 1].finish_reduce_scatter()
                    if self._wrapper.require_backward_grad_sync:
                        self._gradients[self._next - 1].start_all_reduce()
                self._gradients[self._next].start_reduce_scatter()
                self._next += 1

    @torch.no_grad()
    def _end_backward(self) -> None:
        if self._is_sending:
            self._complete_buckets()
            self._mark_used_on_any_rank()
        self.in_backward = False
        for number in self._used:
            if self.params[number].grad is None:  # otherwise, it has accumulated without communication
                self.params[number].grad = self._sent[number]

    def _complete_buckets(self) -> None:
        """Send the buckets that still wait for gradients of parameters that this backward did not reach."""
        for gradients in self._gradients:
            for number in [member.number for member in gradients.bucket.members if member.number in gradients.missing]:
                if self.params[number].grad is not None:  # accumulated in an earlier micro-step
                    self._copy_to_buckets(number)
                else:
                    gradients.places()[number].zero_()
                    gradients.missing.discard(number)
            self._send_full_buckets()  # before the next buffer is acquired

    def _mark_used_on_any_rank(self) -> None:
        """Let the ranks agree on which parameters have a gradient on any rank. A rank with all gradients does not wait."""
        self._wait_for_agreement()  # the one of the previous micro-step
        if not self.params or self._placed.comm.world_size == 1:
            return
        used = torch.ones(len(self.params), dtype=torch.uint8, device=next(iter(self.params.values())).device)
        is_partial = len(self._used) < len(self.params)
        if is_partial:
            marks = [number in self._used for number in self.params]
            used.copy_(torch.tensor(marks, dtype=torch.uint8, device="cpu"), non_blocking=True)
        self._agreement = self._placed.comm.all_reduce(used, dist.ReduceOp.MAX), used
        if is_partial:
            self._wait_for_agreement()
            self._used.update(itertools.compress(self.params, used.cpu().tolist()))

    def _wait_for_agreement(self) -> None:
        if self._agreement is not None:
            (works, used), self._agreement = self._agreement, None
            self._placed.comm.wait("all-reduce", works, used.device)

    def recover(self) -> None:
        """Continue after a failed backward that has left no gradient. Otherwise raise RuntimeError."""
        if self._used:
            raise RuntimeError("the last backward did not end; call optimizer.zero_grad() to drop its gradients")
        self._reset()

    # -- step: the methods of GradientSource ---------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse trainable parameters of the module that the optimizer does not have."""
        is_changed = [part._modules for part in self._parts] != self._children  # which takes less time than `modules`
        parts = self._wrapper.module.modules() if is_changed else self._parts
        held = itertools.chain(*(part._parameters.values() for part in parts))
        if any(param is not None and param.requires_grad and param not in self._placed.number_of for param in held):
            check_all_managed(self._wrapper.module, self._placed.number_of, RuntimeError)

    @torch.no_grad()
    def begin_collecting(self) -> None:
        if self.in_backward:
            raise RuntimeError("the last backward did not end; call optimizer.zero_grad() and repeat the step")
        self._drop_what_the_model_dropped()
        if any(param.grad is not None and not isinstance(param.grad, SentGradient) for param in self.params.values()):
            remedy = "must run outside of no_sync(), with require_backward_grad_sync = True; gradients set by hand are not sent"
            raise RuntimeError(f"gradients of this step have not been sent: its last backward {remedy}")
        if self._placed.comm.replicas > 1 or self._wrapper.shard_gradients:
            for gradients in self._gradients:  # start all all-reduces before the first wait
                gradients.finish_reduce_scatter()
                gradients.start_all_reduce()
        if self._wrapper.shard_gradients:
            self._placed.comm.pool.clear()

    @torch.no_grad()
    def collect(self, bucket: Bucket) -> None:
        gradients = self._gradients[bucket.number]
        gradients.wait()
        for owned, view in itertools.zip_longest(bucket.owned, gradients.views):
            owned.local.grad = view if owned.number in self._used else None

    def with_gradient(self) -> list[nn.Parameter]:
        return [self.params[number] for number in self._used]

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool) -> None:
        if set_to_none or self.in_backward:  # a backward has failed
            self._reset()
            return
        for gradients in self._gradients:
            gradients.wait()
            if gradients.shard is not None:
                gradients.shard.zero_()

    def held_bytes(self) -> dict[str, int]:
        return {
            "gradients": sum(gradients.shard.nbytes for gradients in self._gradients if gradients.shard is not None),
            "buckets": sum(gradients.buffer_bytes for gradients in self._gradients) + self._placed.comm.pool.nbytes,
        }

    def _reset(self) -> None:
        """Drop all gradients that have arrived on this rank. Afterwards nothing is in flight."""
        self._wait_for_agreement()
        for gradients in self._gradients:
            gradients.wait()
            gradients.drop(self._reuse)
        self._used.clear()
        self.in_backward = False


def check_not_wrapped(module: nn.Module) -> None:
    """Raise ValueError if a parameter has the hook of another wrapper, alive or not."""
    for name, param in module.named_parameters():
        hooks = (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
        if any(getattr(hook, "func", None) is _call_reducer for hook in hooks):
            raise ValueError(f"{name} was wrapped in another ShardedDataParallel; a model is wrapped once, for its life")


def _call_reducer(reducer: weakref.ref[Reducer], number: int, param: nn.Parameter) -> None:
    """Call `on_gradient`. The reference is weak: the garbage collector cannot see into hooks, so a strong one would leak."""
    if (alive := reducer()) is not None:
        alive.on_gradient(number, param)
