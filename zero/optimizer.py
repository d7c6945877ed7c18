"""ShardedOptimizer: any elementwise torch.optim class with its state divided evenly among the ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero.collectives import Gather, all_gather
from zero.layout import Layout, Slice, Span

_VECTOR_BYTES = 64  # the widest vector registers, AVX-512, and a cache line


class FlatBuffer(NamedTuple):
    """Parameters of one dtype and device, whose data are views into one flat tensor."""

    data: torch.Tensor  # (layout.padded_numel,)
    params: list[torch.nn.Parameter]  # in layout order
    indices: list[int]  # the place of each in all of `param_groups`
    layout: Layout


class OwnedSlice(NamedTuple):
    """A slice of this rank as the inner optimizer sees it."""

    param: torch.nn.Parameter
    start: int  # first element of the flattened parameter
    stop: int
    offset: int  # first element of this rank's shard of the bucket
    local: torch.nn.Parameter  # (stop - start,), a view into FlatBuffer.data


@dataclass
class Bucket:
    """One bucket at run time."""

    data: torch.Tensor  # (world_size * shard_numel,), a view into FlatBuffer.data
    owned: list[OwnedSlice]  # what this rank updates
    members: list[tuple[torch.nn.Parameter, Slice, int]]  # all that lies in it: parameter, part of it, offset in the bucket
    gather: Gather | None = None  # in flight: only this rank's shard of `data` may be read

    def wait(self) -> None:
        """Make all of `data` readable."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO stage 1: each rank keeps and updates the optimizer state of 1/N of the elements.

    At construction the parameters move into flat buffers (their `data` become views), which are cut into buckets and
    shards as `zero.layout` says. A slice of a parameter that falls into this rank's shards is handed to the inner
    optimizer as an ordinary parameter. AdamW and its like treat every element alone, so updating slices gives, bit for
    bit, what updating whole parameters gives (`zero.layout` says where it may cut). One step has three phases:

    1. collect gradients   each owned slice gets the gradient of its elements, the mean over the ranks. Alone, the class
                           takes views of the parameters' gradients, which must be averaged already (by
                           DistributedDataParallel's all-reduce or by hand). ShardedDataParallel puts the results of
                           its reduce-scatters here instead.
    2. update              bucket by bucket, the inner optimizer steps over the owned slices: 1/N of the elements
    3. all-gather          as soon as a bucket is updated, its shards go from their owners to everyone, while the next
                           one is updated. Alone, `step` waits for the last; under ShardedDataParallel the next forward
                           waits for each where it needs it.

    Parameters without a gradient are skipped, as torch.optim does. Those that are frozen at construction stay where they
    are, outside the buffers, and must remain frozen. A parameter must not be moved (`model.to`) or have its `data`
    replaced once the optimizer is built.

    Args:
        params: parameters or parameter groups, the same on all ranks, as for any `torch.optim.Optimizer`.
        optimizer_cls: the class of the inner optimizer; must be elementwise.
        process_group: the ranks that share the state; default the whole world, or this process alone when
            torch.distributed is not initialized.
        bucket_mb: megabytes (10**6 bytes) per bucket.
        registration_order: all parameters in the order in which the model uses them, `model.parameters()`, where `params`
            are groups of another order; buckets then fill in the order in which backward produces gradients.
        **kwargs: for `optimizer_cls`.

    Raises:
        ValueError: if `bucket_mb` is not positive.
        RuntimeError: from `step`, if a parameter left its buffer or was unfrozen; from `state_dict` and `load_state_dict`,
            which a single rank cannot answer: `zero.checkpoint` has the calls.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.1
    (P_os); the interface is that of `torch.distributed.optim.ZeroRedundancyOptimizer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_cls: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None,
        bucket_mb: float = 75,
        registration_order: Iterable[torch.nn.Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        if bucket_mb <= 0:
            raise ValueError(f"bucket_mb={bucket_mb} must be positive")
        distributed = dist.is_available() and dist.is_initialized()
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group) if distributed else 1
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.bucket_mb = bucket_mb
        self.registration_order = {param: index for index, param in enumerate(registration_order or [])}
        self.buffers: list[FlatBuffer] = []
        self.buckets: list[Bucket] = []
        self.collect_gradients: Callable[[], None] = self._view_gradients  # phase 1
        self.on_zero_grad: Callable[[], None] = lambda: None
        self.gather_in_background = False  # whoever reads parameters calls `synchronize` or Bucket.wait first
        self.inner: torch.optim.Optimizer | None = None
        super().__init__(params, dict(kwargs))
        self._lay_out(first_group=0)
        self.inner = optimizer_cls(self._inner_groups(first_group=0), **kwargs)
        self.defaults = dict(self.inner.defaults)
        _copy_hyperparameters(self.inner.param_groups, self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch.optim; its parameters get buffers of their own. Needs to be called on all ranks."""
        super().add_param_group(param_group)
        if self.inner is None:
            return  # still under construction: __init__ lays all groups out together
        first = len(self.param_groups) - 1
        self._lay_out(first)
        for group in self._inner_groups(first):
            self.inner.add_param_group(group)
        _copy_hyperparameters(self.inner.param_groups[first:], self.param_groups[first:])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the owned slices and gather everyone else's. Needs to be called on all ranks.

        Returns:
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.collect_gradients()
        self.synchronize()
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        gradients = [[owned.local.grad for owned in bucket.owned] for bucket in self.buckets]
        self._show_gradients([[None] * len(bucket.owned) for bucket in self.buckets])
        for bucket, of_bucket in zip(self.buckets, gradients, strict=True):
            if any(gradient is not None for gradient in of_bucket):
                # the inner optimizer skips what has no gradient: it updates this bucket's slices alone
                for owned, gradient in zip(bucket.owned, of_bucket, strict=True):
                    owned.local.grad = gradient
                self.inner.step()
                for owned in bucket.owned:
                    owned.local.grad = None
            if self.world_size > 1:
                bucket.gather = all_gather(bucket.data, self.process_group)
        self._show_gradients(gradients)
        if not self.gather_in_background:
            self.synchronize()
        return loss

    def synchronize(self) -> None:
        """Wait until every parameter is whole."""
        for bucket in self.buckets:
            bucket.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch.optim; the owned slices' gradients are dropped with their parameters'."""
        super().zero_grad(set_to_none)
        self.on_zero_grad()
        self._show_gradients([[None] * len(bucket.owned) for bucket in self.buckets])

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the owned slices' gradients as `torch.nn.utils.clip_grad_norm_` would. Needs to be called on all ranks.

        Every rank adds up the squares of its slices, and one all-reduce of a scalar gives the norm of the whole gradient.

        Returns:
            The norm before clipping, a float32 scalar.
        """
        self.collect_gradients()
        gradients = [owned.local.grad for owned in self.owned if owned.local.grad is not None]
        device = self.buckets[0].data.device if self.buckets else None
        total = torch.zeros((), device=device)
        if gradients:
            total = torch.stack(torch._foreach_norm(gradients)).float().square().sum()
        if self.world_size > 1:
            dist.all_reduce(total, group=self.process_group)
        norm = total.sqrt()
        if gradients:
            torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @property
    def owned(self) -> list[OwnedSlice]:
        """The slices of this rank, bucket by bucket."""
        return [owned for bucket in self.buckets for owned in bucket.owned]

    def slices(self, rank: int) -> list[Slice]:
        """The slices of any rank, in the order of the parameters of its inner optimizer.

        Their `param` counts through all of `param_groups`, as the keys of a torch.optim `state_dict()` do.
        """
        return sorted(
            piece._replace(param=buffer.indices[piece.param]) for buffer in self.buffers for piece in buffer.layout.slices(rank)
        )

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError(
            f"the optimizer state is divided among {self.world_size} ranks; "
            "call zero.checkpoint.consolidate(optimizer) on all ranks to have it whole on rank 0"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("call zero.checkpoint.restore(optimizer, state_dict) on all ranks: each takes its slices")

    def _lay_out(self, first_group: int) -> None:
        """Move the trainable parameters of the groups from `first_group` on into flat buffers, one per dtype and device."""
        first_index = sum(len(group["params"]) for group in self.param_groups[:first_group])
        params = [param for group in self.param_groups[first_group:] for param in group["params"]]
        positions = range(len(params))
        if self.registration_order:
            positions = sorted(positions, key=lambda position: self.registration_order.get(params[position], -1))
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position in reversed(positions):
            if params[position].requires_grad:
                kinds.setdefault((params[position].dtype, params[position].device), []).append(position)
        for (dtype, device), members in kinds.items():
            layout = Layout(
                numels=tuple(params[position].numel() for position in members),
                world_size=self.world_size,
                bucket_numel=max(1, int(self.bucket_mb * 1e6) // dtype.itemsize),
                align=_VECTOR_BYTES // dtype.itemsize,
            )
            data = torch.zeros(layout.padded_numel, dtype=dtype, device=device)
            for position, offset in zip(members, layout.offsets, strict=True):
                param = params[position]
                view = data[offset : offset + param.numel()].view(param.shape)
                param.data = view.copy_(param.data)
            buffer = FlatBuffer(data, [params[p] for p in members], [first_index + p for p in members], layout)
            self.buffers.append(buffer)
            self.buckets += [self._bucket(buffer, span) for span in layout.buckets]

    def _bucket(self, buffer: FlatBuffer, span: Span) -> Bucket:
        data, params, layout = buffer.data, buffer.params, buffer.layout
        shard = layout.shard(span, self.rank)
        owned = []
        for index, start, stop in layout.slices_in(shard):
            begin = layout.offsets[index] + start
            local = torch.nn.Parameter(data[begin : begin + stop - start])
            owned.append(OwnedSlice(params[index], start, stop, begin - shard.start, local))
        members = [
            (params[piece.param], piece, layout.offsets[piece.param] + piece.start - span.start)
            for piece in layout.slices_in(span)
        ]
        return Bucket(data[span.start : span.stop], owned, members)

    def _inner_groups(self, first_group: int) -> list[dict[str, Any]]:
        """Parameter groups for the inner optimizer, with this rank's slices in place of the parameters."""
        locals_of: dict[torch.nn.Parameter, list[torch.nn.Parameter]] = {}
        for owned in self.owned:  # a parameter's slices come in ascending order
            locals_of.setdefault(owned.param, []).append(owned.local)
        return [
            {
                **hyperparameters(group),
                "params": [local for param in group["params"] for local in locals_of.get(param, [])],
            }
            for group in self.param_groups[first_group:]
        ]

    def _view_gradients(self) -> None:
        """Point each owned slice's `grad` at its part of the parameter's gradient, or at None where there is none."""
        inside = set()
        for buffer in self.buffers:
            for param, offset in zip(buffer.params, buffer.layout.offsets, strict=True):
                inside.add(param)
                if param.numel() and param.data_ptr() != buffer.data.data_ptr() + offset * buffer.data.itemsize:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} was moved or replaced after ShardedOptimizer was built; "
                        "build the optimizer after model.to(device)"
                    )
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param not in inside:
                    raise RuntimeError(
                        f"a parameter of shape {tuple(param.shape)} was frozen when ShardedOptimizer was built and has a "
                        "gradient now; build the optimizer after requires_grad_(True)"
                    )
        for owned in self.owned:
            gradient = owned.param.grad
            owned.local.grad = None if gradient is None else gradient.reshape(-1)[owned.start : owned.stop]

    def _show_gradients(self, gradients: list[list[torch.Tensor | None]]) -> None:
        """Set every owned slice's `grad`, bucket by bucket."""
        for bucket, of_bucket in zip(self.buckets, gradients, strict=True):
            for owned, gradient in zip(bucket.owned, of_bucket, strict=True):
                owned.local.grad = gradient


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(hyperparameters(from_group))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
