"""ShardedOptimizer: any elementwise torch.optim class with its state divided evenly among the ranks."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zero.collectives import all_gather_shards
from zero.layout import Layout, Slice

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
    local: torch.nn.Parameter  # (stop - start,), a view into FlatBuffer.data


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO stage 1: each rank keeps and updates the optimizer state of 1/N of the elements.

    At construction the parameters move into flat buffers (their `data` become views), which are cut into buckets and
    shards as `zero.layout` says. A slice of a parameter that falls into this rank's shards is handed to the inner
    optimizer as an ordinary parameter. AdamW and its like treat every element alone, so updating slices gives, bit for
    bit, what updating whole parameters gives (`zero.layout` says where it may cut). One step has three phases:

    1. view grads   each owned slice's `grad` becomes a view into its parameter's gradient, which must be the mean over
                    the ranks already (DistributedDataParallel's all-reduce leaves it so)
    2. update       the inner optimizer steps over the owned slices, 1/N of the elements
    3. all-gather   every bucket's shards go from their owners to everyone

    Parameters without a gradient are skipped, as torch.optim does. Those that are frozen at construction stay where they
    are, outside the buffers, and must remain frozen. A parameter must not be moved (`model.to`) or have its `data`
    replaced once the optimizer is built.

    Args:
        params: parameters or parameter groups, the same on all ranks, as for any `torch.optim.Optimizer`.
        optimizer_cls: the class of the inner optimizer; must be elementwise.
        process_group: the ranks that share the state; default the whole world, or this process alone when
            torch.distributed is not initialized.
        bucket_mb: megabytes (10**6 bytes) per bucket.
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
        bucket_mb: float = 25,
        **kwargs: Any,
    ) -> None:
        if bucket_mb <= 0:
            raise ValueError(f"bucket_mb={bucket_mb} must be positive")
        distributed = dist.is_available() and dist.is_initialized()
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group) if distributed else 1
        self.rank = dist.get_rank(process_group) if distributed else 0
        self.bucket_mb = bucket_mb
        self.buffers: list[FlatBuffer] = []
        self.owned: list[OwnedSlice] = []  # in the order of the inner optimizer's parameters
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
            What `closure` returned, or None. Every parameter is whole and new when this returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._view_gradients()
        _copy_hyperparameters(self.param_groups, self.inner.param_groups)
        self.inner.step()
        for owned in self.owned:
            owned.local.grad = None
        self._all_gather()
        return loss

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
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for position in reversed(range(len(params))):
            if params[position].requires_grad:
                kinds.setdefault((params[position].dtype, params[position].device), []).append(position)
        for (dtype, device), positions in kinds.items():
            members = [params[position] for position in positions]
            layout = Layout(
                numels=tuple(param.numel() for param in members),
                world_size=self.world_size,
                bucket_numel=max(1, int(self.bucket_mb * 1e6) // dtype.itemsize),
                align=_VECTOR_BYTES // dtype.itemsize,
            )
            data = torch.zeros(layout.padded_numel, dtype=dtype, device=device)
            for param, offset in zip(members, layout.offsets, strict=True):
                view = data[offset : offset + param.numel()].view(param.shape)
                param.data = view.copy_(param.data)
            self.buffers.append(FlatBuffer(data, members, [first_index + p for p in positions], layout))
            for index, start, stop in layout.slices(self.rank):
                local = torch.nn.Parameter(data[layout.offsets[index] + start : layout.offsets[index] + stop])
                self.owned.append(OwnedSlice(members[index], start, stop, local))

    def _inner_groups(self, first_group: int) -> list[dict[str, Any]]:
        """Parameter groups for the inner optimizer, with this rank's slices in place of the parameters."""
        locals_of: dict[torch.nn.Parameter, list[torch.nn.Parameter]] = {}
        for owned in self.owned:
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
            if owned.param.grad is not None:
                owned.local.grad = owned.param.grad.reshape(-1)[owned.start : owned.stop]

    def _all_gather(self) -> None:
        """Send this rank's updated shards to all ranks and receive theirs."""
        if self.world_size == 1:
            return
        in_flight = [
            work
            for buffer in self.buffers
            for bucket in buffer.layout.buckets
            for work in all_gather_shards(buffer.data[bucket.start : bucket.stop], self.process_group)
        ]
        for work in in_flight:
            work.wait()


def _copy_hyperparameters(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    for from_group, to_group in zip(source, target, strict=True):
        to_group.update(hyperparameters(from_group))


def hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
