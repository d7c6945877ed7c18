"""ShardedOptimizer: a torch.optim class with its state divided evenly among the ranks."""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zero.buckets import Bucket, FlatBuffer, OwnedSlice, allocate
from zero.checks import KNOWN, CallersState, StateIsDivided, check_class, check_in_place, check_parameters, check_rounding
from zero.codecs import codec_of
from zero.collectives import Communicator
from zero.gradients import GradientSource, ParameterGradients, SentGradient, float32_norms
from zero.host_comm import check_same_on_all_ranks, on_all_ranks
from zero.layout import Plan, parameter_specs, plan
from zero.masters import store_rounded
from zero.muon import Muon
from zero.muon.exchange import MatrixExchange, check_matrices
from zero.options import Options
from zero.stopwatch import region
from zero.tensors import flattened, is_dense, properties
from zero.update import SliceUpdate


class ShardedOptimizer(StateIsDivided, torch.optim.Optimizer):
    """ZeRO stage 1: each of N ranks keeps and updates the optimizer state of 1/N of the elements.

    At construction, the parameters take the values of rank 0 and move into flat buffers, divided as `zero.layout` says: their
    `data` become views. The inner optimizer receives each slice that lies in this rank's shards as an ordinary parameter:

    1. collect gradients   Each owned slice gets the gradient of its elements, averaged over the ranks: from
                           ShardedDataParallel, or views of the parameters' gradients, which must already be averaged.
    2. update              Bucket by bucket (on a GPU some small ones at a time), the inner optimizer steps over the owned
                           slices, 1/N of the elements. The last bucket comes first: the next forward begins with it.
    3. all-gather          As soon as a bucket is updated, its owners send their shards to all ranks.

    Parameters without a gradient are skipped. Construction and `step` need to be called on all ranks. `ShardedDataParallel`
    has the contract.

    Args:
        params: parameters or parameter groups, as for any `torch.optim.Optimizer`. They must be the same on all ranks.
        optimizer_cls: class of the inner optimizer. One that is not of torch.optim steps once, for all buckets together.
        process_group: the ranks that train the model. Default: all ranks, or this process without torch.distributed.
        registration_order: `model.parameters()`, if `params` are groups in another order: that of gradients in backward.
        elementwise: True for a class that is not one of torch.optim's: the caller's promise that what it does to an element
            depends on that element, its gradient, its state, the hyperparameters of its group and the number of steps only.
        device: where the parameters will be. Default: where they are. They move there one after the other.
        **kwargs: options, such as `bucket_mb`: the fields of `zero.options.Options`. Others are arguments of `optimizer_cls`.

    Raises ValueError if an argument is invalid, `optimizer_cls` cannot be divided in this way or is not declared, or the
    parameters differ between the ranks, share memory, or cannot be stored in `param_dtype`.

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
        self._versions: dict[torch.nn.Parameter, int] = {}  # that parameters with masters have if nobody else writes to them
        self.names: dict[torch.nn.Parameter, str] = {}  # known names, for messages
        self._owned_of: dict[torch.nn.Parameter, list[OwnedSlice]] = {}  # this rank's slices of a parameter, ascending
        self.source: GradientSource = ParameterGradients(self)  # or the Reducer of the ShardedDataParallel around the model
        self.overlaps = False  # whether that one waits for the all-gathers, in place of `step`
        self.inner: torch.optim.Optimizer  # optimizer of this rank's slices
        self.plan: Plan
        self.is_known = optimizer_cls in KNOWN  # then it keeps no reference to a gradient
        # a rank that ends its program right after a step must not leave the others without their parameters
        weakref.finalize(self, _wait_for_gathers, self.buckets)
        on_all_ranks(partial(super().__init__, params, dict(kwargs)), self.comm.group)
        self.state = CallersState(dict)
        self._lay_out()
        inner_groups = [{**hyperparameters(group), "params": self._locals(group["params"])} for group in self.param_groups]
        self.inner = on_all_ranks(lambda: optimizer_cls(inner_groups, **kwargs), self.comm.group)
        if self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks:
            raise ValueError(f"{optimizer_cls.__name__} registers step hooks on itself, which ShardedOptimizer would not call")
        exchange = MatrixExchange(self) if isinstance(self.inner, Muon) else None
        self._update = SliceUpdate(self.inner, self.buckets, codec, exchange)
        self.defaults = dict(self.inner.defaults)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)

    def _locals(self, params: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        return [owned.local for param in params for owned in self._owned_of.get(param, [])]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction, which lays out all groups together."""
        if "inner" in vars(self):
            raise RuntimeError("ShardedOptimizer has laid out its buckets; give all parameter groups to its constructor")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the owned slices and all-gather the slices of all ranks. Needs to be called on all ranks.

        `closure` recomputes the loss, once. Its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        check_in_place(self)
        self.source.check()
        self.collect_gradients()  # phase 1
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        changed = self.source.updated()
        try:
            for updated in self._update(changed):  # phase 2: update the owned slices
                for bucket in updated:  # phase 3
                    with region(f"zero::all_gather bucket {bucket.number}"):
                        bucket.gather = self.comm.all_gather(bucket.data)
        except BaseException:
            self.synchronize()  # nothing else waits for all-gathers that have started
            raise
        if not self.is_known:
            _copy_hyperparameters(self.inner.param_groups, self.param_groups)  # which a class may change, as a counter
        # tell autograd that the update and the all-gathers write to the memory of the parameters
        torch.autograd.graph.increment_version(changed)
        self.expect_versions(changed)
        if not self.overlaps:
            self.synchronize()
        return loss

    def synchronize(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait for all parameters, or for those in `buckets`. On a GPU, the current stream waits, not the host."""
        for bucket in self.buckets if buckets is None else buckets:
            if bucket.gather is not None:
                with region(f"zero::wait_all_gather bucket {bucket.number}"):
                    self.comm.wait("all-gather", bucket.gather, bucket.data.device)
                bucket.gather = None

    def collect_gradients(self) -> None:
        """Phase 1: give the owned slices their gradients until the next `zero_grad`. Needs to be called on all ranks."""
        for _ in self.source.collect():
            pass

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch.optim. The next step skips a gradient that is None, but not one that is zero."""
        for param in itertools.chain(*self.params_of_groups):
            if set_to_none or param.grad is None:
                param.grad = None
            elif not isinstance(param.grad, SentGradient):
                param.grad = param.grad.detach().zero_()
        self.source.zero_grad(set_to_none)
        for owned in self.owned:
            owned.local.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients like `torch.nn.utils.clip_grad_norm_`. Needs to be called on all ranks.

        Return the norm of all gradients before clipping, a float32 scalar. With `max_norm=math.inf`, only measure it.
        """
        device = self.buckets[0].data.device if self.buckets else None
        norms = [torch.zeros((), dtype=torch.float32, device=device)]
        for bucket in self.source.collect():  # meanwhile, the gradients of the next bucket are in flight
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
        """Overwrite a parameter, and its masters in the full precision of `value`. Needs to be called on all ranks."""
        self.synchronize()
        value = value.expand_as(param)
        if self.plan.param_dtype is not None and param in self.number_of:
            store_rounded(flattened(value, param), flattened(param.data, param))
            torch.autograd.graph.increment_version([param])
        else:
            param.copy_(value)
        for owned in self._owned_of.get(param, []):
            owned.set_masters(flattened(value, param))
        self.expect_versions([param])

    def expect_versions(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Note that the writes to parameters so far have reached their masters, if they have any."""
        if self.plan.has_masters:
            self._versions.update((param, param._version) for param in params if param in self.number_of)

    def written(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose masters have missed a write, as far as autograd's version counters show it."""
        return [param for param, version in self._versions.items() if param._version != version]

    @property
    def flat_params(self) -> list[torch.nn.Parameter]:
        """The parameters in the flat buffers, as `Bucket.members` numbers them."""
        return list(self.number_of)

    @property
    def owned(self) -> list[OwnedSlice]:
        """The slices of this rank, bucket by bucket."""
        return [owned for bucket in self.buckets for owned in bucket.owned]

    def _lay_out(self) -> None:
        """Move the parameters to their places in flat buffers."""
        self.plan = planned = _checked_plan(self)
        self.params_of_groups = [list(group["params"]) for group in self.param_groups]
        params = list(itertools.chain(*self.params_of_groups))
        self.frozen = [param for param in params if not param.requires_grad]
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
        self.expect_versions(self.number_of)


def _move_in(buffer: FlatBuffer, number: int, comm: Communicator, slices: list[OwnedSlice]) -> None:
    """Move a parameter, and its `slices` of this rank, to its place with the values of rank 0. Call it on all ranks."""
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
    params = list(itertools.chain(*(group["params"] for group in groups)))

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


def _wait_for_gathers(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        while bucket.gather:
            bucket.gather.pop(0).wait()
    for device in {bucket.data.device for bucket in buckets if bucket.data.is_cuda}:
        torch.cuda.synchronize(device)  # only streams have waited, and the end of the process aborts what is in flight


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(hyperparameters(from_group))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
