"""ShardedOptimizer: a torch.optim class with its state divided evenly among the ranks."""

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import current_process
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from zero.buckets import Bucket, FlatBuffer, OwnedSlice, allocate
from zero.checks import (
    KNOWN,
    MOVED,
    WRITTEN,
    CallersState,
    StateIsDivided,
    check_class,
    check_groups,
    check_parameters,
    check_rounding,
)
from zero.codecs import codec_of
from zero.collectives import Communicator
from zero.gradients import GradientSource, ParameterGradients, float32_norms
from zero.host_comm import check_same_on_all_ranks, on_all_ranks
from zero.layout import Plan, parameter_specs, plan
from zero.masters import Remainders, store_rounded
from zero.muon import Muon
from zero.muon.exchange import MatrixExchange, check_matrices
from zero.options import Options
from zero.overlap import WaitingDict
from zero.stopwatch import region
from zero.tensors import flattened, is_dense, name_of, properties
from zero.update import SliceUpdate

_optimizer_of = WeakIdKeyDictionary()  # by parameter: a reference to the ShardedOptimizer whose buffers hold it


class ShardedOptimizer(StateIsDivided, torch.optim.Optimizer):
    """ZeRO stage 1: each of N ranks keeps and updates the optimizer state of 1/N of the elements.

    At construction, the parameters take the values of rank 0 and move into flat buffers, divided as `zero.layout` says: their
    `data` become views. After it, they must not be moved (`model.to`), and what is frozen must remain frozen. The inner
    optimizer receives each slice that lies in this rank's shards as an ordinary parameter. One step has three phases:

    1. collect gradients   Each owned slice gets the gradient of its elements, averaged over the ranks: from
                           ShardedDataParallel, or views of the parameters' gradients, which must already be averaged (by
                           DistributedDataParallel's all-reduce or by hand).
    2. update              Bucket by bucket (on a GPU some small ones at a time), the inner optimizer steps over the owned
                           slices, 1/N of the elements. The last bucket comes first: the next forward begins with it.
    3. all-gather          As soon as a bucket is updated, its owners send their shards to all ranks. `step` waits for all of
                           these all-gathers, or with `ShardedDataParallel(overlap=True)` the next forward, for each of them.

    Parameters without a gradient are skipped, as in torch.optim. Construction and `step` need to be called on all ranks.
    docs/sharding.md says what happens to strides, views and weights that are written to.

    Args:
        params: parameters or parameter groups, as for any `torch.optim.Optimizer`. They must be the same on all ranks.
        optimizer_cls: class of the inner optimizer. One that is not of torch.optim steps once, for all buckets together.
        process_group: the ranks that train the model. Default: all ranks, or this process without torch.distributed.
        registration_order: `model.parameters()`, if `params` are groups in another order. Buckets then fill in the order in
            which backward produces gradients.
        elementwise: needed for a class that is not one of torch.optim's. With True, the caller promises: what
            `optimizer_cls` does to an element depends on that element, its gradient, its state, the hyperparameters of its
            group and the number of steps; on no shape, no norm, no other parameter and no random number.
        device: where the parameters will be. Default: where they are. They move there one after the other.
        **kwargs: options, such as `bucket_mb`: the fields of `zero.options.Options`. All others are arguments of
            `optimizer_cls`.

    Raises:
        ValueError: if an argument is invalid, `optimizer_cls` cannot be divided in this way or is not declared, or the
            parameters differ between the ranks, share memory, or cannot be stored in `param_dtype`.
        RuntimeError: from `step`, if a parameter was replaced or unfrozen, or has a sparse gradient.

    Source: Rajbhandari et al., "ZeRO", section 5.1 (P_os), and the interface of ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        registration_order: Iterable[torch.nn.Parameter] | None = None,
        elementwise: bool = False,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        self.options = Options.taken_from(kwargs)
        codec = codec_of(self.options.state_dtype)
        check_class(optimizer_cls, elementwise)
        self.comm, self.optimizer_cls = Communicator(process_group, self.options), optimizer_cls
        self.arguments, self.device = kwargs, device
        self.registration_order = list(registration_order or ())
        self.buffers: list[FlatBuffer] = []
        self.buckets: list[Bucket] = []
        self.number_of: dict[torch.nn.Parameter, int] = {}  # the parameters in the buffers, numbered as in `Bucket.members`
        self._follows = False  # whether `lost_masters` has been called for the next step
        self.refusal: str | None = None  # why the next step has to raise an error: its gradients are lost
        self.names: dict[torch.nn.Parameter, str] = {}  # known names, for messages
        self._owned_of: dict[torch.nn.Parameter, list[OwnedSlice]] = {}  # this rank's slices of a parameter, ascending
        self._original_groups: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # as given, and its values at that time
        self._parameter_gradients = ParameterGradients(self)
        self.wrapper: weakref.ref[Any] | None = None  # the ShardedDataParallel, which keeps this object alive
        self.inner: torch.optim.Optimizer  # optimizer of this rank's slices
        self.plan: Plan
        self.is_known = optimizer_cls in KNOWN  # then it keeps no reference to a gradient
        self.lock, self._pid = threading.RLock(), current_process().pid
        # a rank that ends its program right after a step must not leave the others without their parameters
        weakref.finalize(self, _wait_for_gathers, self.buckets, self._pid)
        on_all_ranks(partial(super().__init__, params, dict(kwargs)), self.comm.group)
        self.state = CallersState(dict)
        self._lay_out()
        inner_groups = [
            {
                **hyperparameters(group),
                "params": [owned.local for param in group["params"] for owned in self._owned_of.get(param, [])],
            }
            for group in self.param_groups
        ]
        self.inner = on_all_ranks(lambda: optimizer_cls(inner_groups, **kwargs), self.comm.group)
        if self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks:
            raise ValueError(f"{optimizer_cls.__name__} registers step hooks on itself, which ShardedOptimizer would not call")
        exchange = MatrixExchange(self) if isinstance(self.inner, Muon) else None
        self._update = SliceUpdate(self.inner, self.buckets, codec, exchange)
        self.defaults = dict(self.inner.defaults)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction, which lays out all groups together."""
        if "inner" in vars(self):
            raise RuntimeError("ShardedOptimizer has laid out its buckets; give all parameter groups to its constructor")
        super().add_param_group(param_group)

    def wrap_param_groups(self) -> None:
        """With `overlap`, make reads of a group's parameters wait. Includes groups that have been put into `param_groups`."""
        for index, group in enumerate(self.param_groups if self.source.readers is not None else ()):
            if not isinstance(group, WaitingDict):
                self.param_groups[index] = WaitingDict(group, partial(_wait_for_list, self))
                self._original_groups[index] = group, hyperparameters(group)

    @property
    def source(self) -> GradientSource:
        """The source of the gradients: the Reducer of the ShardedDataParallel around the model, or else ParameterGradients."""
        wrapper = self.wrapper() if self.wrapper is not None else None
        return self._parameter_gradients if wrapper is None else wrapper.reducer

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the owned slices and all-gather the slices of all ranks. Needs to be called on all ranks.

        `closure` recomputes the loss, once. Its result is returned.
        """
        loss, follows, self._follows = None, self._follows, False
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.source.check()
        # phase 1: collect gradients
        self.collect_gradients()
        if not follows:
            self.update_masters()
        if any(_is_changed(group, before) for group, before in self._original_groups.values()):
            raise RuntimeError("a group of before ShardedDataParallel(overlap=True) was changed; take it from param_groups now")
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        changed = self.source.updated()
        try:
            for updated in self._update(changed):  # phase 2: update the owned slices
                for bucket in updated:  # phase 3: all-gather
                    with region(f"zero::all_gather bucket {bucket.number}"):
                        bucket.gather = self.comm.all_gather(bucket.data)
                        bucket.stream = torch.cuda.current_stream(bucket.data.device) if bucket.data.is_cuda else None
        except BaseException:
            self.synchronize()  # nothing else waits for all-gathers that have started
            raise
        if not self.is_known:
            _copy_hyperparameters(self.inner.param_groups, self.param_groups)  # which a class may change, as a counter
        # tell autograd that the update and the all-gathers write to the memory of the parameters
        torch.autograd.graph.increment_version(changed)
        if self.source.readers is not None:
            self.source.readers.begin()
        else:
            self.synchronize()
        return loss

    def synchronize(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait for all parameters, or for those in `buckets`. On a GPU, this stream and that of `step` wait, not the host."""
        buckets = [bucket for bucket in (self.buckets if buckets is None else buckets) if bucket.gather is not None]
        if not buckets:
            return
        if current_process().pid != self._pid:
            raise RuntimeError(
                "this process was forked while all-gathers were in flight, and cannot wait for them; call "
                "optimizer.synchronize() before the fork"
            )
        with self.lock:  # two threads must not wait for the same receive
            ended = False
            for bucket in buckets:
                if bucket.gather is not None:
                    with region(f"zero::wait_all_gather bucket {bucket.number}"):
                        self.comm.wait("all-gather", bucket.gather, bucket.data.device)
                    if bucket.stream is not None and bucket.stream != (here := torch.cuda.current_stream(bucket.data.device)):
                        bucket.stream.wait_stream(here)  # from now on, its reads do not wait
                    bucket.gather = None
                    ended = True
            if ended and self.source.readers is not None and all(bucket.gather is None for bucket in self.buckets):
                self.source.readers.end()

    def collect_gradients(self) -> None:
        """Phase 1: give the owned slices their gradients until the next `zero_grad`. Needs to be called on all ranks."""
        for _ in self._collect():
            pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch.optim. The next step skips a gradient that is None, but not one that is zero."""
        for param in itertools.chain(*self._params_of_groups):  # without a wait for parameters in flight
            if set_to_none or param.grad is None:
                param.grad = None
                continue
            if param.grad.requires_grad:  # with create_graph=True
                param.grad = param.grad.detach()
            param.grad.zero_()
        self.refusal = None
        self.source.clear()
        for owned in self.owned:
            owned.local.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients like `torch.nn.utils.clip_grad_norm_`. Needs to be called on all ranks.

        Return the norm of all gradients before clipping, a float32 scalar. With `max_norm=math.inf`, only measure it.
        """
        device = self.buckets[0].data.device if self.buckets else None
        norms = [torch.zeros((), dtype=torch.float32, device=device)]
        for bucket in self._collect():  # meanwhile, the gradients of the next bucket are in flight
            if gradients := [owned.local.grad for owned in bucket.owned if owned.local.grad is not None]:
                norms += [norm.to(device) for norm in float32_norms(gradients)]
        total = torch.stack(norms).square().sum()
        # over all ranks, also if there are replicas: the norm must have the same bits on all of them
        self.comm.wait("all-reduce", self.comm.all_reduce(total), total.device)
        norm = (total / self.comm.replicas).sqrt()
        if max_norm < math.inf:
            groups = (self if self.source.is_whole else self.inner).param_groups
            torch.nn.utils.clip_grads_with_norm_(itertools.chain(*(group["params"] for group in groups)), max_norm, norm)
        return norm

    @torch.no_grad()
    def set_parameter(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite a parameter and this rank's master slices of it. The masters keep the full precision of `value`."""
        self.synchronize()
        slices, value = self._owned_of.get(param, []), value.expand_as(param)
        for masters in [owned.masters for owned in slices if isinstance(owned.masters, Remainders)]:
            masters.before_write([other.offset for other in self.owned if other.masters is masters])
        if self.plan.param_dtype is not None and param in self.number_of:
            store_rounded(flattened(value, param), flattened(param.data, param))
            torch.autograd.graph.increment_version([param])
        else:
            param.copy_(value)
        for owned in slices:
            owned.set_masters(flattened(value, param))

    @property
    def flat_params(self) -> list[torch.nn.Parameter]:
        """The parameters in the flat buffers, as `Bucket.members` numbers them."""
        return list(self.number_of)

    @property
    def owned(self) -> list[OwnedSlice]:
        """The slices of this rank, bucket by bucket."""
        return [owned for bucket in self.buckets for owned in bucket.owned]

    def _collect(self) -> Iterator[Bucket]:
        if self.refusal is not None:
            raise RuntimeError(f"{self.refusal}; call zero_grad() and repeat backward")
        self.wrap_param_groups()
        groups = [group["params"] for group in self.param_groups]
        check_groups(groups, self._params_of_groups, self.number_of, self.names)
        yield from self.source.collect()

    def update_masters(self) -> None:
        """Copy weights that have been written to since the last step into their places and their masters.

        Needs to be called on all ranks, and raises RuntimeError on all of them if any has lost a master.
        """
        lost = self.lost_masters()
        self._follows = False
        if lost is not None:  # on all ranks, with remainders
            found = lost.to(torch.uint8)
            self.comm.wait("all-reduce", self.comm.all_reduce(found, dist.ReduceOp.MAX), found.device)
            if found:
                raise RuntimeError(WRITTEN)

    @torch.no_grad()
    def lost_masters(self) -> torch.Tensor | None:
        """Do `update_masters` before a step without a wait for a GPU, on this rank alone. The step does not repeat it.

        Return a bool on the device, whether this rank has lost masters: then the caller must let all ranks skip this step
        (`found_inf` of `inner`), and make none after it. None: no rank can lose any.
        """
        self.synchronize()
        _take_back_moved(self)
        self._follows = True
        lost = [flag for bucket in self.buckets if bucket.masters is not None and (flag := bucket.masters.follow()) is not None]
        return torch.stack([flag.to(lost[0].device) for flag in lost]).any() if lost else None

    def _lay_out(self) -> None:
        """Move the parameters to their places in flat buffers."""
        self.plan = planned = _checked_plan(self)
        self._params_of_groups = [list(group["params"]) for group in self.param_groups]
        params = list(itertools.chain(*self._params_of_groups))
        for before in filter(None, [_optimizer_of.get(param, lambda: None)() for param in params]):
            before.synchronize()
        group_of = {param: index for index, group in enumerate(self.param_groups) for param in group["params"]}
        for number, start, stop, offset in planned.slices(self.comm.shard_rank):
            if not planned.params[number].requires_grad:  # a frozen parameter stays in its own memory
                self._owned_of[params[number]] = [OwnedSlice(params[number], start, stop, offset, params[number])]
        for planned_buffer in planned.buffers:
            own = [params[number] for number in planned_buffer.params]
            earlier = len(self.number_of), len(self.buckets)
            buffer, buckets = allocate(planned_buffer, own, self.comm.shard_rank, *earlier)
            self.buffers.append(buffer)
            self.number_of.update(zip(own, itertools.count(len(self.number_of)), strict=False))
            self.buckets += buckets
            for bucket in buckets:
                for owned in bucket.owned:
                    self._owned_of.setdefault(owned.param, []).append(owned)
                    bucket.local_by_group.setdefault(group_of[owned.param], []).append(owned.local)
            for number, param in enumerate(own):
                _move_in(buffer, number, self.comm, self._owned_of.get(param, []))
                _optimizer_of[param] = weakref.ref(self)


def _move_in(buffer: FlatBuffer, number: int, comm: Communicator, slices: list[OwnedSlice]) -> None:
    """Move a parameter to its place in a flat buffer, with the values of rank 0. Needs to be called on all ranks.

    `slices`: those of the parameter that this rank owns.
    """
    param = buffer.params[number]
    source = param.data if is_dense(param) else param.data.contiguous()
    buffer.move_in(number, source)
    place = flattened(param.data, param)
    for first, part in comm.parts_of_rank_0(flattened(source, source), place):
        if part.dtype != place.dtype:
            store_rounded(part, place[first : first + part.numel()])
        for owned in slices:
            owned.set_masters(part, first)


def _checked_plan(optimizer: ShardedOptimizer) -> Plan:
    """Return the plan of all groups. Nothing has moved if this refuses them, on all ranks."""
    groups, comm, options = optimizer.param_groups, optimizer.comm, optimizer.options
    params = [param for group in groups for param in group["params"]]

    def check() -> None:
        check_parameters(params, options.stored_dtype)
        if options.state_dtype != "float32":
            check_rounding(optimizer.optimizer_cls, groups)
        if issubclass(optimizer.optimizer_cls, Muon):
            check_matrices(groups)
        optimizer.optimizer_cls([_of_one_element(group, optimizer.device) for group in groups], **optimizer.arguments)

    on_all_ranks(check, comm.group)
    check_same_on_all_ranks({f"parameter {number}": properties(param) for number, param in enumerate(params)}, comm.group)
    specs = parameter_specs(groups, optimizer.registration_order, device=optimizer.device)
    return plan(specs, comm.shard_size, options)


def _of_one_element(group: dict[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Return a parameter group with parameters of one element, for a trial of its hyperparameters."""
    tried = [torch.nn.Parameter(param.new_zeros((), device=device), param.requires_grad) for param in group["params"]]
    return {**hyperparameters(group), "params": tried}


def _take_back_moved(optimizer: ShardedOptimizer) -> None:
    """Copy the values of parameters that somebody has moved (`param.data = ...`) into their places, or raise RuntimeError."""
    for buffer in optimizer.buffers:
        for number in buffer.moved():
            param = buffer.params[number]
            inside = any(other.holds(param) for other in optimizer.buffers)
            if inside or _optimizer_of[param]() is not optimizer or not buffer.take_back(number):
                raise RuntimeError(f"{name_of(param, optimizer.names)} {MOVED}")


def holds_its_parameters(optimizer: ShardedOptimizer) -> bool:
    """Return whether no other ShardedOptimizer has been built over the parameters of this one since."""
    return all(_optimizer_of[param]() is optimizer for param in optimizer.number_of)


def _wait_for_list(optimizer: ShardedOptimizer, value: Any) -> None:
    """Wait for all parameters if `value` is the list of a group's parameters. Other values of a group need no wait."""
    if isinstance(value, list):
        optimizer.synchronize()


def _wait_for_gathers(buckets: list[Bucket], pid: int | None) -> None:
    for bucket in buckets if current_process().pid == pid else ():
        while bucket.gather:
            bucket.gather.pop(0).wait()
        if bucket.stream is not None:  # only streams have waited, and the end of the process aborts what is in flight
            torch.cuda.synchronize(bucket.data.device)


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(hyperparameters(from_group))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_changed(group: dict[str, Any], before: dict[str, Any]) -> bool:
    """Return whether a hyperparameter of a group has been written to since `before`."""
    return any(key not in before or value is not before[key] for key, value in hyperparameters(group).items())
