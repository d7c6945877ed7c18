"""A dry run of `zero` itself: as one rank of any number, on the meta device, where tensors have sizes but no memory.

The parameters have the sizes of a model's, and their gradients arrive in its order, but nothing computes with them. What the
optimizer, its wrapper and their communication allocate is counted, so a change of `zero` needs no change here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from forecast.live_bytes import LiveBytes
from forecast.prediction import Moment, Optimizer, Point, arriving
from zero.checkpoint.state import Snapshot, parts_of_rank
from zero.codecs import codec_of
from zero.collectives import Communicator
from zero.data_parallel import ShardedDataParallel
from zero.flags import Flags
from zero.held_bytes import held_bytes
from zero.host_comm import ALONE
from zero.layout import ParameterSpec, Plan
from zero.muon.matrices import matrix_plan
from zero.optimizer import ShardedOptimizer
from zero.options import Options
from zero.sharded_state import first_state
from zero.tensors import MAIN_MEMORY

_META = torch.device("meta")


class _SimulatedRank(Communicator):
    """A rank of a world whose other ranks do not exist: it allocates and counts as they all do, and sends nothing."""

    checks_values = False

    def __init__(self, place: tuple[int, int], options: Options) -> None:
        self._prepare(ALONE, *place, options)

    def _start(self, *_: Any, **how: Any) -> list[Any]:
        return []

    def _exchange(self, *_: Any) -> list[Any]:
        return []


class _MetaBytes(LiveBytes):
    """Counts tensors on the meta device as if they had memory. What only writes to them is not run.

    `main_memory`: whether they stand for tensors in main memory. A copy there counts nowhere.
    """

    def __init__(self, main_memory: bool) -> None:
        super().__init__(on_cpu=main_memory)
        self._main_memory = main_memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            written = kwargs.get("out", args[0])
            if (written[0] if isinstance(written, list) else written).is_meta:
                return written if func._schema.returns else None
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and kwargs.get("device") == torch.device("cpu"):
            return args[0] if self._main_memory else torch.empty_like(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _has_memory(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.is_meta


class _Model(nn.Module):
    """Parameters, in the order of their registration."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        super().__init__()
        self.groups, params = groups_on_meta(specs)
        in_order = sorted(zip(specs, params, strict=True), key=lambda pair: pair[0].position)
        self.params = nn.ParameterList(param for _, param in in_order)
        self.autocast = {param: spec.autocast for spec, param in in_order if spec.autocast is not None}

    def forward(self, backward: Callable[[], torch.Tensor]) -> torch.Tensor:
        return _Backward.apply(self.params[0], backward)


class _Backward(torch.autograd.Function):
    """Its backward calls `backward`, which delivers every gradient but that of the first parameter, and returns that one."""

    @staticmethod
    def forward(ctx: Any, first: nn.Parameter, backward: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.run = backward
        return torch.empty(0, device=_META)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return ctx.run(), None


class _Rank:
    """Runs iterations, and notes what is alive."""

    def __init__(
        self, specs: Sequence[ParameterSpec], flags: Flags, optimizer: Optimizer, place: tuple[int, int], on_cpu: bool
    ) -> None:
        if (codec := codec_of(flags.state_dtype)) is not None:  # which makes the tables that all optimizers share
            codec.encode(torch.empty(codec.block, device=_META), lambda: torch.zeros(()), codec.empty(codec.block, _META))
        self.live, self.on_cpu, self.model = _MetaBytes(on_cpu), on_cpu, _Model(specs)
        if not on_cpu:  # rank 0 has the weights in main memory, until they move
            self.live.ignore(self.model.parameters())
        for param in self.model.parameters():
            self.live.count(param)
        cls, arguments = optimizer
        how: dict[str, Any] = {"registration_order": self.model.params, "autocast": self.model.autocast, **arguments}
        how |= dict.fromkeys({"fused"} & arguments.keys(), False)  # in the first step: such kernels make no state here
        with self.live:
            comm = _SimulatedRank(place, flags)
            self.optimizer = ShardedOptimizer(self.model.groups, cls, comm, elementwise=True, options=flags, **how)
            self.wrapper = ShardedDataParallel(self.model, self.optimizer, flags.shard_gradients)
        self.construction = self.live.peak
        self.largest_buckets = self._arrived = self._before = 0
        self.points: dict[Point, dict[str, int]] = {"after wrapping": held_bytes(self.optimizer, self.wrapper)}
        self.moments: list[Moment] = []
        self._new = {param: torch.empty_like(param) for param in self.model.params}  # new gradients, which count as activations
        self.live.ignore(self._new.values())

    def iteration(self, micro_steps: int) -> None:
        self.live.reset_peak()
        self.moments, self._before = [Moment(0)], self.live.now
        for left in reversed(range(micro_steps)):
            self.wrapper.require_backward_grad_sync = left == 0
            self._arrived, output = 0, self.wrapper(self._backward)
            self._note("forward")
            output.backward(output.detach())
            self._note("")
            if left > 0:
                self.points["accumulating"] = held_bytes(self.optimizer, self.wrapper)
        self.optimizer.clip_grad_norm_(1.0)
        self.points["before step"] = held_bytes(self.optimizer, self.wrapper)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._note("")
        self.points["after step"] = held_bytes(self.optimizer, self.wrapper)

    def save(self) -> tuple[int, int]:
        """Return the most bytes while rank 0 saves, and the bytes that it saves itself."""
        self.optimizer.settle()
        own = parts_of_rank(self.optimizer.partition(), self.model, with_state=True, receives=True)[-1]
        snapshot = Snapshot({}, own, [(torch.empty(0), part.numel, 0) for part in own], to=0, group=None, everyone=ALONE)
        before, saved = self.live.now, 0
        self.live.reset_peak()
        with snapshot.arriving() as pieces:
            for _, elements in pieces:
                saved += elements.nbytes
        of_others = arriving(self.optimizer.placed.plan, self.optimizer.comm.shard_rank) if self.on_cpu else 0
        return max(self.live.peak, before + of_others), saved

    def _backward(self) -> torch.Tensor:
        for phase in ("saved", "loss", "layers"):
            self._note(phase)
        sends = self.wrapper.require_backward_grad_sync or self.wrapper.shard_gradients
        first, *others = self.model.params
        for param in reversed(others):
            new = self._new[param]
            freed = 0 if param.grad is None else new.nbytes  # autograd adds a new gradient in place, and then frees it
            if param.grad is None:
                param.grad = new if sends or param.grad_dtype is None else torch.empty_like(new)
            self._arrived += param.numel() * (param.grad_dtype or torch.float32).itemsize
            for hook in param._post_accumulate_grad_hooks.values():
                hook(param)
            self._note("layers", freed)
        self._note("embedding")
        return torch.empty_like(first)

    def _note(self, beside: str, freed: int = 0) -> None:
        """Note the peak since the last call, unless the last moment has more and the same activations. `freed`: since then."""
        held = self.live.peak - freed
        if self.live.peak > self._before:
            buckets = self.optimizer.source.held_bytes()["buckets"] - self.optimizer.comm.pool.nbytes
            self.largest_buckets = max(self.largest_buckets, buckets)
        if beside != self.moments[-1].beside or held > self.moments[-1].held:
            self.moments.append(Moment(held, beside, self._arrived))
        self.live.reset_peak()
        self._before = self.live.now


def groups_on_meta(specs: Sequence[ParameterSpec]) -> tuple[list[dict[str, Any]], list[torch.nn.Parameter]]:
    """Return new parameters on the meta device, with their groups for torch.optim and in the order of the specs."""
    params = [torch.nn.Parameter(torch.empty(spec.shape, dtype=spec.dtype, device=_META)) for spec in specs]
    groups: dict[int, dict[str, Any]] = {spec.group: {"params": []} for spec in sorted(specs, key=lambda spec: spec.group)}
    for spec, param in zip(specs, params, strict=True):
        groups[spec.group]["params"].append(param)
        if spec.matrices:
            groups[spec.group] |= {"matrices": spec.matrices, "ns_dtype": str(spec.matrix_dtype).removeprefix("torch.")}
    return list(groups.values()), params


def state_bytes(specs: Sequence[ParameterSpec], optimizer: Optimizer) -> list[int]:
    """Return the bytes of state that an optimizer keeps of each parameter, group by group, without counters of steps."""
    cls, arguments = optimizer
    state = first_state(partial(cls, **arguments), groups_on_meta(specs)[0])
    entries = [[value for name, value in state.get(number, {}).items() if name != "step"] for number in range(len(specs))]
    return [sum(value.nbytes for value in of_param if isinstance(value, torch.Tensor)) for of_param in entries]


def state_of_ranks(plan: Plan, of_params: Sequence[int]) -> list[int]:
    """Return the bytes of state of each rank, given those of each parameter."""
    each = [count / max(1, spec.numel) for count, spec in zip(of_params, plan.params, strict=True)]  # per element
    return [round(sum(each[slice_.number] * slice_.numel for slice_ in plan.slices(rank))) for rank in range(plan.world_size)]


def dry_run(
    specs: Sequence[ParameterSpec], flags: Flags, optimizer: Optimizer, place: tuple[int, int], micro_steps: int, on_cpu: bool
) -> dict[str, Any]:
    """Return what a rank takes in its second iteration, by field of `Prediction`; what it sends, per backward that sends.

    Three micro-steps are like more: all between the first and the last are alike. `place`: the rank, and how many there are.
    """
    if on_cpu:
        MAIN_MEMORY.add("meta")
    try:
        rank = _Rank(specs, flags, optimizer, place, on_cpu)
        with rank.live:
            rank.iteration(1)
            sent = dict(rank.optimizer.comm.sent_bytes)
            for group in rank.optimizer.param_groups:  # as later steps are
                group |= {name: value for name, value in optimizer[1].items() if name == "fused"}
            rank.iteration(micro_steps)
            saving, saved = rank.save()
    finally:
        MAIN_MEMORY.discard("meta")
    matrices, own = matrix_plan(rank.optimizer.placed.plan), rank.optimizer.comm.shard_rank
    return {
        "points": rank.points,
        "moments": rank.moments,
        "construction": rank.construction,
        "saving": saving,
        "saved": saved,
        "sent": sent,
        "largest_buckets": rank.largest_buckets,
        "least_exposed": 1 / len(rank.optimizer.placed.buckets),
        "newton_schulz": sum(matrix.cost for matrix in matrices if matrix.owner == own),
        "matrix_rounds": max((matrix.round for matrix in matrices), default=-1) + 1,
    }
