"""ShardedOptimizer: a torch.optim class with its state divided evenly among the ranks."""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zero.buckets import Bucket, Placement
from zero.checks import check_addition, check_class, check_in_place, checked_norm
from zero.collectives import Communicator
from zero.gradients import GradientSource, ParameterGradients, SentGradient, float32_norms, norm_over_ranks
from zero.host_comm import gather_objects, meet, on_all_ranks
from zero.interface import DividedEntries, DividedState
from zero.moves import groups_of_slices, have_moved, lay_out
from zero.options import Options
from zero.sharded_state import Partition, hyperparameters, parameters, taken_over
from zero.stopwatch import region
from zero.tensors import flattened
from zero.update import SliceUpdate


class ShardedOptimizer(DividedState):
    """ZeRO stage 1: each of N ranks keeps and updates the optimizer state of 1/N of the elements.

    At construction, the parameters take the values of rank 0 and move into flat buffers, divided as `zero.layout` says: their
    `data` become views. The inner optimizer receives each slice that lies in this rank's shards as an ordinary parameter:

    1. collect gradients   Each owned slice gets the gradient of its elements, averaged over the ranks: from
                           ShardedDataParallel, or views of the parameters' gradients, which must already be averaged.
    2. update              Bucket by bucket (on a GPU some small ones at a time), the inner optimizer steps over the owned
                           slices, 1/N of the elements. The last bucket comes first: the next forward begins with it.
    3. all-gather          As soon as a bucket is updated, its owners send their shards to all ranks.

    Parameters without a gradient are skipped. Call construction and `step` on all ranks. `ShardedDataParallel` has the
    contract. Arguments and methods of ZeroRedundancyOptimizer have the same meaning.

    Args:
        params: parameters or parameter groups, the same on all ranks. Or an optimizer, whose class, groups and state it takes.
        optimizer_cls, optimizer_class: class of the inner optimizer; give one. A class from neither torch.optim nor `zero`
            steps once for all buckets. Its `train` and `eval`, if any, exist here too; call them on all ranks.
        process_group: the ranks that train the model. Default: all ranks, or this process without torch.distributed. A dry
            run gives a Communicator that sends nothing.
        registration_order: `model.parameters()`, if `params` have another order. Buckets reverse it, as backward does.
        elementwise: True for another class than torch.optim's, to promise that its update of an element depends only on that
            element, its gradient, its state, the hyperparameters of its group and the number of steps.
        device: where the parameters will be. Default: where they are. They move there one after the other.
        autocast: parameters that forward reads under autocast only, each with its dtype, see `zero.autocast_parameters`. They
            are stored in this dtype. Values do not change: each rank keeps float32 masters of its slices, and gradients are
            float32. It needs a ShardedDataParallel, whose forward is called under autocast of this dtype.
        parameters_as_bucket_view: has no effect, parameters always are views. `overlap_with_ddp` must be False.
        options: the fields of `zero.options.Options`, which may also be given by name, such as `bucket_mb`.
        **kwargs: arguments of `optimizer_cls`, or options.

    Raises ValueError if an argument is invalid, `optimizer_cls` cannot be divided in this way or is not declared, or the
    parameters differ between the ranks, share memory, or cannot be stored in `param_dtype`.

    Source: Rajbhandari et al., "ZeRO", section 5.1 (P_os), and the interface of ZeroRedundancyOptimizer.
    """

    def __init__(
        self,
        params: Any,
        optimizer_cls: type[torch.optim.Optimizer] | None = None,
        process_group: dist.ProcessGroup | Communicator | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        optimizer_class: type[torch.optim.Optimizer] | None = None,
        registration_order: Iterable[torch.nn.Parameter] | None = None,
        elementwise: bool = False,
        device: torch.device | None = None,
        autocast: Mapping[torch.nn.Parameter, torch.dtype] | None = None,
        options: Options | None = None,
        **kwargs: Any,
    ) -> None:
        self.options = options or Options.taken_from(kwargs)
        if overlap_with_ddp:
            raise ValueError("overlap_with_ddp=True is not supported; use zero.ShardedDataParallel, which overlaps")
        whole = params if isinstance(params, torch.optim.Optimizer) else None
        if whole is not None:
            params, kwargs = taken_over(whole, kwargs)
            optimizer_cls = optimizer_cls or (None if optimizer_class else type(whole))
        optimizer_cls = check_class(optimizer_cls, optimizer_class, elementwise)
        self.comm = process_group if isinstance(process_group, Communicator) else Communicator(process_group, self.options)
        self.make_inner = partial(optimizer_cls, **kwargs)  # from groups of slices
        self._new_placement = partial(Placement, self.comm, list(registration_order or ()), device, autocast or {})
        self.source: GradientSource  # ParameterGradients, until ShardedDataParallel replaces it by its Reducer
        self.overlaps = False  # whether forward waits for the all-gathers, in place of `step`; ShardedDataParallel sets it
        on_all_ranks(partial(super().__init__, params, dict(kwargs)), self.comm.group)
        self.entries = DividedEntries(self)
        self._build()
        if whole is not None and any(gather_objects(bool(whole.state), self.comm.group)):
            self.load_state_dict(whole.state_dict())

    def _build(self) -> None:
        """Lay out the parameters where they are now, and make the optimizer of this rank's slices."""
        self.placed = self._new_placement()
        lay_out(self.placed, self.param_groups, self.make_inner)
        # a rank that ends its program right after a step must not leave the others without their parameters
        weakref.finalize(self.placed, _wait_for_gathers, self.placed.buckets)
        self.inner = on_all_ranks(partial(self.make_inner, groups_of_slices(self.placed, self.param_groups)), self.comm.group)
        if self.inner._optimizer_step_pre_hooks or self.inner._optimizer_step_post_hooks:
            name = type(self.inner).__name__
            raise ValueError(f"{name} registers step hooks on itself, which ShardedOptimizer would not call")
        self.has_state, self.consolidated = any(gather_objects(bool(self.inner.state), self.comm.group)), None  # as of Adagrad
        self._updater = SliceUpdate(self.inner, self.placed)
        self.source = ParameterGradients(self.placed)
        for name in {"train", "eval"} & {*dir(self.inner)}:  # of schedule-free classes
            setattr(self, name, partial(_call_inner, self, name))
        self.defaults = dict(self.inner.defaults)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)

    def follow_moves(self) -> None:
        """Lay out anew what was moved before the first step, as `Accelerator.prepare` does. Needs to be called on all ranks."""
        may_move = not self.has_state and self.source.is_whole and not self.placed.plan.has_masters
        if may_move and have_moved(self.placed, self.param_groups):
            self._build()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.optim, also between steps. Needs to be called on all ranks.

        Its parameters take the values of rank 0 and move into flat buffers of their own, and so do those of earlier groups that
        were frozen and require gradients now. All others stay in their places, with their state.
        Raises RuntimeError under a ShardedDataParallel, or if a frozen parameter has state, otherwise ValueError as torch does.
        """
        if "inner" not in vars(self):  # the constructor lays out all groups together
            super().add_param_group(param_group)
            return
        meet(self.comm.group)
        self.synchronize()
        self.follow_moves()
        before = list(self.param_groups)
        try:
            check = partial(check_addition, self.placed, before, not self.source.is_whole, self.inner)
            on_all_ranks(check, self.comm.group)
            on_all_ranks(partial(super().add_param_group, param_group), self.comm.group)
            lay_out(self.placed, self.param_groups, self.make_inner)
        except BaseException:
            self.param_groups[:] = before
            raise
        *groups, added = groups_of_slices(self.placed, self.param_groups)
        for group, inner_group in zip(groups, self.inner.param_groups, strict=True):
            inner_group["params"] = group["params"]
        self.inner.add_param_group(added)
        self._updater.prepare()
        self.source = ParameterGradients(self.placed)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the owned slices and all-gather the slices of all ranks. Needs to be called on all ranks.

        `closure` recomputes the loss, once. Its result is returned.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._prepare()
        self._updater.check(self.param_groups)
        self.source.check()

        self.collect_gradients()  # phase 1
        changed = self.source.with_gradient()
        with self._writing(changed):
            self._updater.begin(changed)
            for buckets in self._updater.bucket_groups():
                self._updater.update(buckets)  # phase 2
                self._all_gather(buckets)  # phase 3
        return loss

    def _prepare(self) -> None:
        """Wait until every parameter is in its place with its last values. Raise RuntimeError for one that is not."""
        self.synchronize()
        self.follow_moves()
        check_in_place(self.placed, self.param_groups)

    @contextmanager
    def _writing(self, changed: list[torch.nn.Parameter]) -> Iterator[None]:
        """Return a context in which the inner optimizer may write to its slices of `changed`. Then all ranks have these."""
        self.has_state, self.consolidated = True, None
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        try:
            yield
        except BaseException:
            self._updater.fail()
            self.synchronize()  # nothing else waits for all-gathers that have started
            raise
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)  # which a class may change, as a counter
        # tell autograd that the update and the all-gathers write to the memory of the parameters
        torch.autograd.graph.increment_version(changed)
        self.placed.expect_versions(changed)
        if not self.overlaps:
            self.synchronize()

    def _all_gather(self, buckets: Iterable[Bucket]) -> None:
        """Start to send the shards of some buckets to all ranks."""
        for bucket in buckets:
            with region(f"zero::all_gather bucket {bucket.number}"):
                bucket.gather = self.comm.all_gather(bucket.data)

    def synchronize(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait for all all-gathers, or those of `buckets`. On a GPU, the current stream waits, not the host."""
        for bucket in self.placed.buckets if buckets is None else buckets:
            if bucket.gather is not None:
                with region(f"zero::wait_all_gather bucket {bucket.number}"):
                    self.comm.wait("all-gather", bucket.gather, bucket.data.device)
                bucket.gather = None

    def collect_gradients(self) -> None:
        """Give the owned slices their gradients until the next `zero_grad`. Needs to be called on all ranks."""
        self.source.begin_collecting()
        for bucket in self.placed.buckets:
            self.source.collect(bucket)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as in torch.optim. The next step skips a gradient that is None, but not one that is zero."""
        for param in itertools.chain(*self.placed.groups):
            if set_to_none or param.grad is None:
                param.grad = None
            elif not isinstance(param.grad, SentGradient):
                param.grad = param.grad.detach().zero_()
        self.source.zero_grad(set_to_none)
        for owned in self.placed.owned:
            owned.local.grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients like `torch.nn.utils.clip_grad_norm_`. Needs to be called on all ranks.

        Return the norm of all gradients before clipping, a float32 scalar. With `max_norm=math.inf`, only measure it.
        `norm_type` must be positive, and may be `math.inf`.
        """
        max_norm, norm_type = checked_norm(max_norm, norm_type)
        self.follow_moves()
        device = self.placed.buckets[0].data.device if self.placed.buckets else None
        norms = [torch.zeros((), dtype=torch.float32, device=device)]
        self.source.begin_collecting()
        for bucket in self.placed.buckets:
            self.source.collect(bucket)  # meanwhile, the gradients of the next bucket are in flight
            if gradients := [owned.local.grad for owned in bucket.owned if owned.local.grad is not None]:
                norms += [norm.to(device) for norm in float32_norms(gradients, norm_type)]
        norm = norm_over_ranks(norms, norm_type, self.comm)
        if max_norm < math.inf:
            groups = (self if self.source.is_whole else self.inner).param_groups
            torch.nn.utils.clip_grads_with_norm_(itertools.chain(*(group["params"] for group in groups)), max_norm, norm)
        return norm

    def partition(self) -> Partition:
        """Return the partition of the state over the ranks."""
        owned = [owned for param in parameters(self) for owned in self.placed.owned_of.get(param, [])]
        groups = self.comm.shard_group, self.comm.group
        return Partition(self, self.inner, self.placed.plan, self.comm.shard_rank, *groups, owned, self.comm.replica)

    def settle(self) -> None:
        """Make the state ready to be saved or restored. Needs to be called on all ranks."""
        meet(self.comm.group)
        on_all_ranks(self._prepare, self.comm.group)
        self.comm.pool.clear()  # frees memory for a copy

    @torch.no_grad()
    def set_parameter(self, param: torch.nn.Parameter, value: torch.Tensor) -> None:
        """Overwrite a parameter, and its masters in the full precision of `value`. Needs to be called on all ranks."""
        self.synchronize()
        value = value.expand_as(param)
        if param in self.placed.versions:
            self.placed.write(param, flattened(value, param))
            torch.autograd.graph.increment_version([param])
            self.placed.expect_versions([param])
        else:
            param.copy_(value)


@torch.no_grad()
def _call_inner(optimizer: ShardedOptimizer, name: str) -> None:
    """Call a method of the inner optimizer, which may write to the parameters. Needs to be called on all ranks."""
    optimizer._prepare()
    _copy_hyperparameters(optimizer.param_groups, optimizer.inner.param_groups)
    wrote = optimizer._updater.let_write(getattr(optimizer.inner, name))
    _copy_hyperparameters(optimizer.inner.param_groups, optimizer.param_groups)
    if any(gather_objects(wrote, optimizer.comm.group)):
        with optimizer._writing(list(optimizer.placed.number_of)):
            optimizer._all_gather(optimizer.placed.buckets)


def _wait_for_gathers(buckets: list[Bucket]) -> None:
    for bucket in buckets:
        while bucket.gather:
            bucket.gather.pop(0).wait()
    for device in {bucket.data.device for bucket in buckets if bucket.data.is_cuda}:
        torch.cuda.synchronize(device)  # only streams have waited, and the end of the process aborts what is in flight


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(hyperparameters(from_group))
