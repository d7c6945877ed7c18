"""ShardedOptimizer: a torch.optim class with its state divided evenly among the ranks."""

import gc
import itertools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import current_process
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from zero.collectives import Communicator
from zero.layout import BucketMB, BufferPlan, Layout, PlacedSlice, Plan, Span, check_options, parameter_specs, plan
from zero.messages import broadcast_object, cpu_group, gather_objects
from zero.stopwatch import region
from zero.tensors import check_memory, flattened, has_memory, is_dense, memory_span, properties, shaped, with_own_storage
from zero.waiting import WaitingDict

_CACHED = 2**17  # elements to process at a time, so that intermediate results fit into a CPU's cache
# classes that treat every element independently, and keep all that they count in the state of a parameter
_ELEMENTWISE = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.ASGD),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
)
_NEED_WHOLE_PARAMETERS = (torch.optim.Adafactor, torch.optim.Muon)  # they use rows and columns
_UNSUPPORTED = {
    torch.optim.LBFGS: "it looks at all parameters together, several times per step",
    torch.optim.SparseAdam: "sparse gradients cannot be laid flat",
}
_optimizer_of = WeakIdKeyDictionary()  # by parameter: a reference to the ShardedOptimizer whose buffers hold it


class FlatBuffer(NamedTuple):
    """Parameters of one dtype and device, whose data are views into one flat tensor."""

    data: torch.Tensor  # (layout.padded_numel,)
    params: list[torch.nn.Parameter]  # numbered as in the layout
    layout: Layout


class OwnedSlice(NamedTuple):
    """A slice of this rank, as the inner optimizer sees it."""

    param: torch.nn.Parameter
    start: int  # first element of the flattened parameter, see `flattened`
    stop: int
    offset: int  # first element in this rank's shard of the bucket
    # a view into the shard or into its master; (stop - start,), or the parameter's shape if it is whole or has one element
    local: torch.nn.Parameter


@dataclass
class Bucket:
    """The tensors and slices of one bucket at run time."""

    number: int  # among all buckets of the optimizer
    data: torch.Tensor  # (sum of sizes,), a view into FlatBuffer.data
    sizes: list[int]  # elements of each rank's shard
    shard: torch.Tensor  # (sizes[rank],), this rank's part of `data`
    master: torch.Tensor | None  # (sizes[rank],) float32, if `data` has lower precision
    owned: list[OwnedSlice]  # the slices that this rank updates
    local_by_group: dict[int, list[torch.nn.Parameter]]  # their local parameters, by group of the inner optimizer
    members: list[PlacedSlice]  # all slices in the bucket; `param` counts through the parameters of all buffers
    gather: list[dist.Work] | None = None  # the all-gather in flight: until it ends, only the `shard` part may be read

    @property
    def updated(self) -> torch.Tensor:
        """The tensor that the inner optimizer updates through views, (sizes[rank],)."""
        return self.shard if self.master is None else self.master


class GradientNorms(NamedTuple):
    """Norms of gradients before clipping. All norms are on the device."""

    total: torch.Tensor  # norm of all gradients together, on every rank
    each: dict[torch.nn.Parameter, torch.Tensor]  # norm by parameter of this rank's inner optimizer, if it has a gradient


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO stage 1: each of N ranks keeps and updates the optimizer state of 1/N of the elements.

    At construction, the parameters take the values of rank 0 and move into flat buffers: their `data` become views. The
    buffers are divided into buckets and shards as described in `zero.layout`. The inner optimizer receives each slice that
    lies in this rank's shards as an ordinary parameter. Needs to be constructed on all ranks. One step has three phases:

    1. collect gradients   Each owned slice gets the gradient of its elements, averaged over the ranks. ShardedDataParallel
                           provides the results of its reduce-scatters. Without it, the class takes views of the parameters'
                           gradients, which must already be averaged (by DistributedDataParallel's all-reduce or by hand).
    2. update              Bucket by bucket, the inner optimizer steps over the owned slices, 1/N of the elements. The last
                           bucket comes first, because the next forward begins with its parameters.
    3. all-gather          As soon as a bucket is updated, the owners send its shards to all ranks, while the next bucket is
                           updated. `step` waits for all of these all-gathers, or with `ShardedDataParallel(overlap=True)` the
                           next forward, for each of them when it needs the parameters.

    Parameters without a gradient are skipped, as in torch.optim. Frozen parameters stay outside the buffers and must remain
    frozen. If they have optimizer state, rank 0 holds it. After construction, a parameter must not be moved (`model.to`). It
    keeps its strides (channels_last, transposed) if its elements are dense in memory. Views of its former memory move with it
    only if ShardedDataParallel finds them in attributes and buffers of the module.

    With `param_dtype=torch.bfloat16`, the parameters become bfloat16, and each rank keeps float32 masters of its own slices.
    This takes 2 bytes per parameter, 2 bytes for its gradient, and 12/N bytes for its master and AdamW state (ZeRO, section
    3.1). If a weight has been written to, the next step copies it into its master. `set_parameter`, or a state dict that is
    loaded into the ShardedDataParallel, gives the master full precision. Construct it before DistributedDataParallel, because
    a change of dtype removes the hooks of DistributedDataParallel.

    Args:
        params: parameters or parameter groups, as for any `torch.optim.Optimizer`. They must be the same on all ranks.
        optimizer_cls: class of the inner optimizer. If it is one of torch.optim's own, its `step` is called bucket by bucket,
            so that all-gathers overlap with updates; otherwise once, for all owned slices together.
        process_group: the ranks that train the model. Default: all ranks, or this process without torch.distributed.
        shard_size: number of consecutive ranks that share the state, for example those of one machine; each such group holds
            a replica of it (hybrid sharding). It must divide the number of ranks. 0: all ranks share the state.
        bucket_mb: megabytes (10**6 bytes) per bucket, or 'auto', see `zero.layout.auto_bucket_mb`.
        registration_order: `model.parameters()`, if `params` are groups in another order. Buckets then fill in the order in
            which backward produces gradients.
        partition: 'element' cuts parameters wherever a shard ends, which is exact for classes that treat every element
            independently. 'parameter' assigns whole parameters to ranks, for classes that treat every parameter independently
            (Muon, Adafactor).
        elementwise: needed with 'element' for a class that is not one of torch.optim's. With True, the caller promises: what
            `optimizer_cls` does to an element depends on that element, its gradient, its state, the hyperparameters of its
            group and the number of steps. It does not depend on the shape of a parameter (no norm, no rule for matrices), on
            other parameters, or on which process updates it (no random numbers).
        param_dtype: dtype in which the parameters are stored, if it has lower precision than the float32 of the update.
        **kwargs: arguments of `optimizer_cls`.

    Raises:
        ValueError: if an argument is invalid, `optimizer_cls` cannot be divided in this way or is not declared, or the
            parameters differ between the ranks, share memory, or cannot be stored in `param_dtype`.
        RuntimeError: from `step`, if a parameter was replaced or unfrozen, or has a sparse gradient. From `state[param]`,
            `state_dict` and `load_state_dict`: a single rank does not have the whole state. Use `zero.checkpoint` instead.

    Source: Rajbhandari et al., "ZeRO", section 5.1 (P_os), and the interface of ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        shard_size: int = 0,
        bucket_mb: BucketMB = "auto",
        registration_order: Iterable[torch.nn.Parameter] | None = None,
        partition: str = "element",
        elementwise: bool = False,
        param_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        check_options(bucket_mb, partition)
        _check_class(optimizer_cls, partition, elementwise)
        self.comm = Communicator(process_group, shard_size)
        self.bucket_mb = bucket_mb
        self.partition = partition
        self.param_dtype = param_dtype
        self.registration_order = list(registration_order or ())
        self.buffers: list[FlatBuffer] = []
        self.buckets: list[Bucket] = []
        self._refusal: str | None = None
        self.names: dict[torch.nn.Parameter, str] = {}  # known names, for messages
        self._owned_of: dict[torch.nn.Parameter, list[OwnedSlice]] = {}  # this rank's slices of a parameter, ascending
        self._original_groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # as given, and its values at that time
        self._params_of_groups: list[list[torch.nn.Parameter]] = []
        # where the parameters were: storage, start address, end address, and whether their elements lay as in the buffer
        self._former_memory: dict[torch.nn.Parameter, tuple[StorageWeakRef, int, int, bool]] = {}
        self._forms: dict[torch.nn.Parameter, tuple[Any, ...]] = {}  # of the parameters in the buffers: their slices follow it
        self._parameter_gradients = ParameterGradients(self)
        self.wrapper: weakref.ref[Any] | None = None  # the ShardedDataParallel, which keeps this object alive
        self.inner: torch.optim.Optimizer  # optimizer of this rank's slices
        self.plan: Plan
        self._steps_by_bucket = optimizer_cls in (*_ELEMENTWISE, *_NEED_WHOLE_PARAMETERS)
        self._is_built = False
        self._lock, self._pid = threading.RLock(), current_process().pid
        # a rank that ends its program right after a step must not leave the others without their parameters
        weakref.finalize(self, _wait_for_gathers, self.buckets, self._pid)
        super().__init__(params, dict(kwargs))
        self.state = CallersState(dict)
        self._lay_out(first_group=0)
        self.inner = self.on_all_ranks(lambda: optimizer_cls(self._inner_groups(first_group=0), **kwargs))
        if self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks:
            raise ValueError(f"{optimizer_cls.__name__} registers step hooks on itself, which ShardedOptimizer would not call")
        self._is_built = True
        self.defaults = dict(self.inner.defaults)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.optim. Its parameters get their own buffers. Needs to be called on all ranks."""
        if self._is_built and self.source is not self._parameter_gradients:
            raise RuntimeError("ShardedDataParallel has laid out its buckets; add parameter groups before you make it")
        super().add_param_group(param_group)
        self._params_of_groups.append(list(param_group["params"]))
        if not self._is_built:  # during construction, __init__ lays out all groups together
            return
        first = len(self.param_groups) - 1
        self._lay_out(first)
        for group in self._inner_groups(first):
            self.on_all_ranks(partial(self.inner.add_param_group, group))
        _copy_hyperparameters(self.inner.param_groups[first:], self.param_groups[first:])

    def on_all_ranks(self, make: Callable[[], Any]) -> Any:
        """Return the result of `make`. If it raises on any rank, raise on all ranks, so that no rank waits forever."""
        error, made = None, None
        try:
            made = make()
        except Exception as raised:
            error = raised
        if self.comm.world_size > 1:
            errors = gather_objects(error and (str(error) or repr(error)), cpu_group(self.comm.group))
            if error is None and any(errors):
                rank = next(rank for rank, message in enumerate(errors) if message)
                raise ValueError(f"rank {rank}: {errors[rank]}")
        if error is not None:
            raise error
        return made

    def check_same_on_all_ranks(self, facts: dict[str, Any]) -> None:
        """Raise ValueError on all ranks if the facts of a rank differ from those of rank 0."""
        expected = broadcast_object(facts, cpu_group(self.comm.group)) if self.comm.world_size > 1 else facts

        def compare() -> None:
            for name in expected | facts:
                if facts.get(name) != expected.get(name):
                    raise ValueError(
                        f"the model differs between the ranks: {name} is {facts.get(name, 'absent')}, on rank 0 "
                        f"{expected.get(name, 'absent')}; build the same model on all ranks"
                    )

        self.on_all_ranks(compare)

    def _check_own_parameters(self, params: list[torch.nn.Parameter]) -> None:
        """Refuse parameters that cannot move into flat buffers."""
        if len(params) > len(set(params)):
            raise ValueError("a parameter is given more than once; give each one once")
        check_memory(params)
        if self.param_dtype is None:
            return
        if any(param.is_complex() for param in params):
            raise ValueError(f"param_dtype={self.param_dtype} would drop the imaginary parts of a complex parameter")
        gc.collect()  # a wrapper that nobody holds any more does not count
        for thing in gc.get_objects():
            if DistributedDataParallel in type(thing).__mro__ and not set(params).isdisjoint(thing.parameters()):
                raise ValueError(
                    "param_dtype would remove the hooks of the DistributedDataParallel around these parameters, and their "
                    "gradients would not be averaged; build ShardedOptimizer before DistributedDataParallel"
                )

    def wrap_param_groups(self) -> None:
        """With `overlap`, make reads of a group's parameters wait. Includes groups that have been put into `param_groups`."""
        for index, group in enumerate(self.param_groups if self.source.overlap else ()):
            if not isinstance(group, WaitingDict):
                self.param_groups[index] = WaitingDict(group, self._wait_for_list)
                self._original_groups[index] = group, hyperparameters(group)

    @property
    def source(self) -> Any:
        """The source of gradients: the ShardedDataParallel around the model, or else ParameterGradients, with its methods."""
        wrapper = self.wrapper() if self.wrapper is not None else None
        return self._parameter_gradients if wrapper is None else wrapper

    def holds_its_parameters(self) -> bool:
        """Return whether no other ShardedOptimizer has been built over its parameters since."""
        params = [param for buffer in self.buffers for param in buffer.params]
        return all(_optimizer_of[param]() is self for param in params)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the owned slices and all-gather the slices of all ranks. Needs to be called on all ranks.

        Args:
            closure: recomputes the loss, once. Its result is returned.
            **kwargs: arguments of the inner optimizer's `step`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.source.check()
        # phase 1: collect gradients
        self.collect_gradients()
        self.update_masters()
        if any(_changed(group, before) for group, before in self._original_groups.values()):
            raise RuntimeError("a group of before ShardedDataParallel(overlap=True) was changed; take it from param_groups now")
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        if not self._steps_by_bucket:
            with region("zero::update"):
                self._inner_step(**kwargs)
            _copy_hyperparameters(self.inner.param_groups, self.param_groups)  # which a class may change, as a counter
        everything = [group["params"] for group in self.inner.param_groups]
        try:
            for bucket in reversed(self.buckets):
                # phase 2: update the owned slices
                with region(f"zero::update bucket {bucket.number}"):
                    if self._steps_by_bucket:
                        for index, group in enumerate(self.inner.param_groups):
                            group["params"] = bucket.local_by_group.get(index, [])
                        self._inner_step(**kwargs)
                    if bucket.master is not None:
                        bucket.shard.copy_(bucket.master)
                # phase 3: all-gather
                with region(f"zero::all_gather bucket {bucket.number}"):
                    bucket.gather = self.comm.all_gather(bucket.data, bucket.sizes)
        except BaseException:
            self.synchronize()  # nobody waits for gathers that have started
            raise
        finally:
            for group, params in zip(self.inner.param_groups, everything, strict=True):
                group["params"] = params
        # tell autograd that the update and the all-gathers write to the memory of the parameters
        torch.autograd.graph.increment_version(self.source.updated())
        if self.source.overlap:
            self.source.readers.begin()
        else:
            self.synchronize()
        return loss

    def _inner_step(self, **kwargs: Any) -> None:
        """Run the inner optimizer's own step. The hooks that torch runs around every `step` run around ours, once."""
        step = type(self.inner).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(self.inner, **kwargs)  # type: ignore[attr-defined]

    def synchronize(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait until every parameter is whole, or with `buckets` every parameter that lies in them."""
        buckets = [bucket for bucket in (self.buckets if buckets is None else buckets) if bucket.gather is not None]
        if not buckets:
            return
        if current_process().pid != self._pid:
            raise RuntimeError(
                "this process was forked while all-gathers were in flight, and cannot wait for them; call "
                "optimizer.synchronize() before the fork"
            )
        with self._lock:  # two threads must not wait for the same receive
            ended = False
            for bucket in buckets:
                if bucket.gather is not None:
                    with region(f"zero::wait_all_gather bucket {bucket.number}"):
                        self.comm.wait("all-gather", bucket.gather, bucket.data.device)
                    bucket.gather = None
                    ended = True
            if ended and self.source.overlap and all(bucket.gather is None for bucket in self.buckets):
                self.source.readers.end()

    def collect_gradients(self) -> None:
        """Phase 1: give the owned slices their gradients until the next `zero_grad`. Needs to be called on all ranks."""
        for _ in self._collect():
            pass

    def _wait_for_list(self, value: Any) -> None:
        """Wait for all parameters if `value` is the list of a group's parameters. Other values need no wait."""
        if isinstance(value, list):
            self.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch.optim. The next step skips a gradient that is None, but not one that is zero."""
        for param in itertools.chain(*self._params_of_groups):  # without a wait for parameters in flight
            if set_to_none or param.grad is None:
                param.grad = None
                continue
            if param.grad.requires_grad:  # with create_graph=True
                param.grad = param.grad.detach()
            param.grad.zero_()
        self._refusal = None
        self.source.clear()
        for owned in self.owned:
            owned.local.grad = None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of the owned slices like `torch.nn.utils.clip_grad_norm_`. Needs to be called on all ranks.

        Returns the norm before clipping, a float32 scalar.
        """
        norm = self.gradient_norms().total
        torch.nn.utils.clip_grads_with_norm_([owned.local for owned in self.owned], max_norm, norm)
        return norm

    @torch.no_grad()
    def gradient_norms(self) -> GradientNorms:
        """Return the gradient norms of this rank's slices and the norm of all gradients. Needs to be called on all ranks.

        Each rank adds up the squares of its slices, and an all-reduce of a float32 scalar gives the norm of all gradients. It
        runs over all ranks, also if there are replicas: the norm must have the same bits on all of them.
        """
        each: dict[torch.nn.Parameter, torch.Tensor] = {}
        for bucket in self._collect():  # meanwhile, the gradients of the next bucket are in flight
            gradients = {owned.local: owned.local.grad for owned in bucket.owned if owned.local.grad is not None}
            if gradients:
                each.update(zip(gradients, float32_norms(list(gradients.values())), strict=True))
        device = self.buckets[0].data.device if self.buckets else None
        norms = [torch.zeros((), dtype=torch.float32, device=device), *(norm.to(device) for norm in each.values())]
        total = torch.stack(norms).square().sum()
        self.comm.wait("all-reduce", self.comm.all_reduce(total), total.device)
        return GradientNorms((total / self.comm.replicas).sqrt(), each)

    @torch.no_grad()
    def set_parameter(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite a parameter and this rank's master slices of it. The masters keep the full precision of `value`."""
        self.synchronize()
        param.copy_(value)
        for owned in self._owned_of.get(param, []):
            owned.local.copy_(shaped(flattened(value, param)[owned.start : owned.stop], owned.local))

    @property
    def owned(self) -> list[OwnedSlice]:
        """The slices of this rank, bucket by bucket."""
        return [owned for bucket in self.buckets for owned in bucket.owned]

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(
            f"the optimizer state is divided among {self.comm.shard_size} ranks; "
            "call zero.checkpoint.consolidate(optimizer) on all ranks to gather it on rank 0"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("call zero.checkpoint.restore(optimizer, state_dict) on all ranks: each takes its slices")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ShardedOptimizer belongs to a process group and cannot be copied or pickled; call "
            "zero.checkpoint.consolidate(optimizer) on all ranks and save what rank 0 gets"
        )

    def refuse_step(self, reason: str) -> None:
        """Make the next step raise an error, because its gradients are lost. `zero_grad` clears this."""
        self._refusal = reason

    def _collect(self) -> Iterator[Bucket]:
        if self._refusal is not None:
            raise RuntimeError(f"{self._refusal}; call zero_grad() and repeat backward")
        self._check_parameters()
        yield from self.source.collect()

    def _check_parameters(self) -> None:
        """Check that the groups still have the same parameters, and that no gradient is sparse or outside of the buffers."""
        self.wrap_param_groups()
        groups = [group["params"] for group in self.param_groups]
        if [list(map(id, params)) for params in groups] != [list(map(id, params)) for params in self._params_of_groups]:
            raise RuntimeError("the parameters in param_groups have been changed; build a new ShardedOptimizer for that")
        for param in itertools.chain(*groups):
            gradient = param.grad
            if gradient is not None and param not in self._forms:
                raise RuntimeError(
                    f"{self._name(param)} was frozen when ShardedOptimizer was built and has a gradient now; build the "
                    "optimizer after requires_grad_(True)"
                )
            if gradient is not None and gradient.is_sparse:
                raise RuntimeError(SPARSE)

    def _take_back(self, param: torch.nn.Parameter, place: torch.Tensor) -> None:
        """Copy a parameter whose `data` were replaced (`param.data = ...`) into its place in the flat buffer."""
        if _form(param) != self._forms[param] or _optimizer_of[param]() is not self or self.is_in_buffer(param):
            raise RuntimeError(
                f"{self._name(param)} was moved or replaced after ShardedOptimizer was built (by model.to, "
                "flatten_parameters, or another optimizer); build the optimizer after that"
            )
        value = param.data
        param.data = with_own_storage(place).as_strided(value.shape, value.stride())
        param.data.copy_(value)

    def is_in_buffer(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in a flat buffer."""
        spans = (memory_span(buffer.data) for buffer in self.buffers)
        return has_memory(tensor) and any(start <= tensor.data_ptr() < stop for start, stop in spans)

    def _name(self, param: torch.nn.Parameter) -> str:
        return self.names.get(param) or f"a parameter of shape {tuple(param.shape)}"

    @torch.no_grad()
    def update_masters(self) -> None:
        """Copy weights that have been written to since the last step into their places and their masters."""
        self.synchronize()
        for buffer in self.buffers:
            for param, offset in zip(buffer.params, buffer.layout.offsets, strict=True):
                address = buffer.data.data_ptr() + offset * buffer.data.itemsize
                if param.numel() and (param.data_ptr(), *_form(param)) != (address, *self._forms[param]):
                    self._take_back(param, buffer.data[offset : offset + param.numel()])
        for bucket in self.buckets:
            if bucket.master is None:
                continue
            on_cpu = bucket.shard.device.type == "cpu"
            at_once = _CACHED if on_cpu else max(1, bucket.shard.numel())
            for master, shard in zip(bucket.master.split(at_once), bucket.shard.split(at_once), strict=True):
                unwritten = shard == master.to(shard.dtype)
                if not on_cpu or not unwritten.all():  # does not wait for a GPU
                    torch.where(unwritten, master, shard, out=master)

    def take_along(self, tensor: torch.Tensor, name: str) -> None:
        """If a tensor lies in the memory that a parameter has left for its flat buffer, make it follow the parameter.

        Raises:
            ValueError: if it cannot, because it has another dtype, or a part of it lies elsewhere.
        """
        if not has_memory(tensor):
            return
        storage, (start, stop) = StorageWeakRef(tensor.untyped_storage()), memory_span(tensor)
        for param, (left, begin, end, is_same) in self._former_memory.items():
            if left == storage and start < end and begin < stop:
                if not is_same or tensor.dtype != param.dtype or start < begin or end < stop:
                    raise ValueError(
                        f"{name} shares memory with {self._name(param)}, which ShardedOptimizer has moved, and cannot follow; "
                        "clone() it, or use the parameter in its place"
                    )
                offset = param.storage_offset() + (start - begin) // tensor.itemsize
                tensor.data = param.data.as_strided(tensor.shape, tensor.stride(), offset)

    def _lay_out(self, first_group: int) -> None:
        """Move the parameters of the groups from `first_group` on to their places in new flat buffers."""
        params = [param for group in self.param_groups for param in group["params"]]
        self.check_same_on_all_ranks({f"parameter {number}": properties(param) for number, param in enumerate(params)})
        self.on_all_ranks(lambda: self._check_own_parameters(params))
        for param in params:
            before = _optimizer_of.get(param, lambda: None)()
            if before is not None:
                before.synchronize()
        specs = parameter_specs(self.param_groups[first_group:], self.registration_order, first_group=first_group)
        planned = plan(
            specs, self.comm.shard_size, bucket_mb=self.bucket_mb, partition=self.partition, param_dtype=self.param_dtype
        )
        self.plan = self.plan.followed_by(planned) if first_group else planned
        params = params[len(params) - len(specs) :]
        group_of = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        for number, start, stop in planned.slices(self.comm.shard_rank):
            if not planned.params[number].requires_grad:  # a frozen parameter stays in its own memory
                self._owned_of[params[number]] = [OwnedSlice(params[number], start, stop, 0, params[number])]
        for planned_buffer in planned.buffers:
            data = torch.zeros(planned_buffer.layout.padded_numel, dtype=planned_buffer.dtype, device=planned_buffer.device)
            buffer = FlatBuffer(data, [params[number] for number in planned_buffer.params], planned_buffer.layout)
            self.buffers.append(buffer)
            for shards in planned_buffer.layout.shards:
                bucket = self._bucket(buffer, shards, planned_buffer)
                self.buckets.append(bucket)
                for owned in bucket.owned:
                    self._owned_of.setdefault(owned.param, []).append(owned)
                    bucket.local_by_group.setdefault(group_of[owned.param], []).append(owned.local)
            self._move_parameters(buffer)

    def _bucket(self, buffer: FlatBuffer, shards: tuple[Span, ...], planned: BufferPlan) -> Bucket:
        span, own = Span(shards[0].start, shards[-1].stop), shards[self.comm.shard_rank]
        data, shard = buffer.data[span.start : span.stop], buffer.data[own.start : own.stop]
        master = torch.zeros_like(shard, dtype=planned.update_dtype) if planned.has_masters else None
        first = sum(len(other.params) for other in self.buffers[:-1])
        members = [placed._replace(param=first + placed.param) for placed in planned.layout.placed_in(span)]
        bucket = Bucket(len(self.buckets), data, [span.numel for span in shards], shard, master, [], {}, members)
        for number, start, stop, offset in planned.layout.placed_in(own):
            param, local = buffer.params[number], bucket.updated[offset : offset + stop - start]
            if self.partition == "parameter" or param.numel() == 1:  # then any state of it has one shape
                local = shaped(local, param)
            bucket.owned.append(OwnedSlice(param, start, stop, offset, torch.nn.Parameter(local)))
        return bucket

    def _move_parameters(self, buffer: FlatBuffer) -> None:
        """Make the data of a buffer's parameters views into the buffer, with the values of rank 0."""
        for param, offset in zip(buffer.params, buffer.layout.offsets, strict=True):
            if param.numel():
                is_same = is_dense(param) and param.dtype == buffer.data.dtype
                self._former_memory[param] = StorageWeakRef(param.untyped_storage()), *memory_span(param), is_same
            value = param.data if is_dense(param) else param.data.contiguous()
            self.comm.broadcast(flattened(value, value))
            place = with_own_storage(buffer.data[offset : offset + param.numel()])
            param.data = place.as_strided(value.shape, value.stride())
            self._forms[param] = _form(param)
            self.set_parameter(param, value)
            _optimizer_of[param] = weakref.ref(self)

    def _inner_groups(self, first_group: int) -> list[dict[str, Any]]:
        """Return parameter groups for the inner optimizer, with this rank's slices in place of the parameters."""
        return [
            {
                **hyperparameters(group),
                "params": [owned.local for param in group["params"] for owned in self._owned_of.get(param, [])],
            }
            for group in self.param_groups[first_group:]
        ]


class CallersState(defaultdict):
    """The `state` of a ShardedOptimizer: what wrappers of optimizers keep there for themselves. Refuses parameters as keys."""

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(
            "the optimizer state is divided among the ranks: optimizer.inner.state has that of this rank's slices, "
            "zero.checkpoint.consolidate(optimizer) gathers all of it"
        )

    __iter__ = __len__ = keys = values = items = clear = popitem = _refuse  # type: ignore[assignment]


def _for_callers_keys(name: str) -> Callable[..., Any]:
    def method(state: CallersState, key: Any, *args: Any) -> Any:
        return state._refuse() if isinstance(key, torch.Tensor) else getattr(super(CallersState, state), name)(key, *args)

    return method


for _name in ("__missing__", "__contains__", "__setitem__", "get", "pop", "setdefault"):
    setattr(CallersState, _name, _for_callers_keys(_name))


class ParameterGradients:
    """The source of gradients without ShardedDataParallel: those of the parameters, which must already be averaged."""

    overlap = False

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        self._converted: dict[torch.nn.Parameter, tuple[torch.Tensor, int]] = {}  # by local: source gradient, its version

    def check(self) -> None:
        """Called when a step begins. Raises RuntimeError if the model has changed in a way that a step cannot follow."""

    def collect(self) -> Iterator[Bucket]:
        """Yield each bucket when each of its owned slices has its mean gradient or None. Needs to be called on all ranks."""
        for bucket in self.optimizer.buckets:
            for param, start, stop, _, local in bucket.owned:
                gradient = param.grad
                if gradient is None:
                    local.grad = None
                    continue
                flat = flattened(gradient, param)
                if bucket.master is None and flat.data_ptr() == gradient.data_ptr():  # `flat` is a view
                    local.grad = shaped(flat[start:stop], local)
                    continue
                converted, version = self._converted.get(local, (None, 0))
                if converted is not gradient or version != gradient._version:  # otherwise keep the copy, which may be clipped
                    local.grad = shaped(flat[start:stop], local).to(local.dtype)
                    self._converted[local] = gradient, gradient._version
            yield bucket

    def updated(self) -> list[torch.nn.Parameter]:
        """Return the parameters that have a gradient on any rank. The current step changes these parameters."""
        return [param for buffer in self.optimizer.buffers for param in buffer.params if param.grad is not None]

    def clear(self) -> None:
        """Follow a change of `param.grad` to None or to zero."""
        self._converted.clear()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes held in addition to the parameters' gradients: "gradients" and "buckets"."""
        return {"gradients": sum(local.grad.nbytes for local in self._converted if local.grad is not None)}


SPARSE = "sparse gradients cannot be laid flat; use nn.Embedding(sparse=False)"


def _form(param: torch.Tensor) -> tuple[Any, ...]:
    return param.device, param.dtype, param.shape, param.stride()


def _wait_for_gathers(buckets: list[Bucket], pid: int | None) -> None:
    for bucket in buckets if current_process().pid == pid else ():
        while bucket.gather:
            bucket.gather.pop(0).wait()


def _check_class(optimizer_cls: type[torch.optim.Optimizer], partition: str, elementwise: bool) -> None:
    if not isinstance(optimizer_cls, type):
        raise ValueError(f"optimizer_cls={optimizer_cls!r} must be a class, for example torch.optim.AdamW")
    for refused, reason in _UNSUPPORTED.items():
        if issubclass(optimizer_cls, refused):
            raise ValueError(f"{optimizer_cls.__name__} cannot be divided among ranks: {reason}")
    if partition == "parameter":
        return
    if issubclass(optimizer_cls, _NEED_WHOLE_PARAMETERS):
        raise ValueError(f"{optimizer_cls.__name__} looks at the shape of a parameter; use partition='parameter'")
    if optimizer_cls not in _ELEMENTWISE and not elementwise:
        raise ValueError(
            f"{optimizer_cls.__name__} is not one of torch.optim's classes that treat every element independently; if it does, "
            "pass elementwise=True (ShardedOptimizer says what that promises), otherwise partition='parameter'"
        )


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(hyperparameters(from_group))


def float32_norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norms of gradients in float32, also if these are float16, whose norm may be larger than float16 can hold."""
    norms: Sequence[torch.Tensor]
    if any(gradient.dtype.itemsize < 4 for gradient in gradients):
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    else:
        norms = torch._foreach_norm(gradients)
    return [norm.float() for norm in norms]


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _changed(group: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Return the names of the hyperparameters of a group that differ from `before`."""
    now = hyperparameters(group)
    return [key for key in now if key not in before or (before[key] is not now[key] and not _same(before[key], now[key]))]


def _same(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) else left == right
