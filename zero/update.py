"""Phase 2 of a step: the inner optimizer updates the owned slices, some buckets at a time, in full precision."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zero.buckets import Bucket, Placement
from zero.checks import KNOWN, check_rounding, rounded_state
from zero.codecs import CodedState, codec_of
from zero.gradients import float32_norms
from zero.muon import Muon
from zero.muon.exchange import MatrixExchange
from zero.stopwatch import region, without_hooks

# Updates that have failed while matrices were exchanged. Their messages are kept here and never waited for, because other ranks
# may have failed in other rounds.
_FAILED: list["SliceUpdate"] = []
TOGETHER = 2**24  # elements of this rank that a GPU updates in one call: 0.1 ms on an H100, as long as the call takes the host


class SliceUpdate:
    """Calls `inner`, the optimizer of the `placed` slices. What it needs in float32 exists for the buckets of a call only.

    A step is `begin`, then `update` for each of the `bucket_groups`. All of it needs to be called on all ranks.
    """

    def __init__(self, inner: torch.optim.Optimizer, placed: Placement) -> None:
        self.inner, self.placed, self.buckets = inner, placed, placed.buckets
        self.codec = codec_of(placed.comm.options.state_dtype)  # a resumed run rounds in the same way
        self.exchange: MatrixExchange | None = None  # of matrices, if `inner` needs whole ones, see `zero.muon`
        self._coded: dict[torch.nn.Parameter, CodedState] = {}  # by slice
        inner.register_load_state_dict_post_hook(self._encode_loaded)
        self.prepare()

    def prepare(self) -> None:
        """Prepare for all buckets, of which some are new."""
        self.exchange = MatrixExchange(self.placed, self.inner) if isinstance(self.inner, Muon) else None
        self._round_of = {} if self.exchange is None else self.exchange.round_of
        if self.codec is None:
            return
        names = rounded_state(type(self.inner))
        together: dict[tuple[int | None, int | None], list[torch.nn.Parameter]] = {}  # by bucket, or round of matrices
        for bucket in self.buckets:
            for owned in bucket.owned:
                round_ = self._round_of.get(owned.number)
                if owned.local not in self._coded:
                    together.setdefault((bucket.number if round_ is None else None, round_), []).append(owned.local)
        for slices in together.values():
            self._coded.update(dict.fromkeys(slices, CodedState(self.codec, self.inner, slices, names)))

    def check(self, groups: list[dict[str, Any]]) -> None:
        """Raise if no step can be made now with the hyperparameters of `groups`."""
        if self.codec is not None:
            check_rounding(type(self.inner), groups)
        if self in _FAILED:
            raise RuntimeError("a step has failed while matrices were exchanged; restart the program from a checkpoint")

    def begin(self, changed: list[torch.nn.Parameter]) -> None:
        """Begin a step. `changed`: the parameters that have a gradient on any rank."""
        if self.exchange is not None:
            self.exchange.begin(changed, self._update_momenta)

    def update(self, buckets: list[Bucket]) -> None:
        """Update the slices of some buckets that have gradients."""
        with region(f"zero::update bucket {buckets[0].number}" if buckets else "zero::update"):
            if self.exchange is not None:
                self.exchange.arrive(buckets, self._update_momenta)
            self._call_inner(buckets)

    def fail(self) -> None:
        """Note that a step has failed: with an exchange between ranks, no other step can be made."""
        if self.exchange is not None and not self.exchange.comm.is_alone:
            _FAILED.append(self)

    def let_write(self, method: Callable[[], Any]) -> bool:
        """Let a method of the inner optimizer write to all slices and their state. Return whether it has changed a slice."""
        locals_ = [owned.local for bucket in self.buckets for owned in bucket.owned]
        with self._loaded(self.buckets, locals_):
            before = [float32_norms([local])[0].item() for local in locals_]  # a write to `data` leaves no other trace
            method()
            return before != [float32_norms([local])[0].item() for local in locals_]

    def bucket_groups(self) -> list[list[Bucket]]:
        """Return the buckets that are updated together, the last bucket first: the next forward begins with it.

        A class from neither torch.optim nor `zero` steps once. On a GPU, small shards share a call, unless it takes memory for
        each of them, as kernels that are not fused do. A CPU sends a bucket while it updates the next one.
        """
        if type(self.inner) not in KNOWN:
            return [self.buckets[::-1]]
        calls, room = list[list[Bucket]](), 0
        is_fused = all(group.get("fused") for group in self.inner.param_groups)
        takes_memory = not is_fused or self.codec is not None or self.exchange is not None
        for bucket in self.buckets[::-1]:
            alone = takes_memory or bucket.gradient_dtype != bucket.values.dtype or self.placed.comm.is_on_cpu(bucket.data)
            if alone or bucket.shard.numel() > room:
                calls.append([])
                room = 0 if alone else TOGETHER
            calls[-1].append(bucket)
            room -= bucket.shard.numel()
        return calls

    def _call_inner(self, buckets: list[Bucket]) -> None:
        groups = self.inner.param_groups
        everything = [group["params"] for group in groups]
        if len(buckets) < len(self.buckets) or self.exchange is not None:
            for index, group in enumerate(groups):
                locals_ = [local for bucket in buckets for local in bucket.local_by_group.get(index, [])]
                group["params"] = [] if self.exchange is not None and group.get("matrices") else locals_
        slices = [owned for bucket in buckets for owned in bucket.owned if owned.local.grad is not None]
        by_element = [owned.local for owned in slices if owned.number not in self._round_of]
        try:
            with self._loaded(buckets, by_element):
                if self.exchange is not None:
                    for bucket in buckets:
                        self.exchange.add_directions(bucket)
                without_hooks(type(self.inner).step)(self.inner)
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params

    @contextmanager
    def _loaded(self, buckets: list[Bucket], locals_: list[torch.nn.Parameter]) -> Iterator[None]:
        """Return a context in which some buckets have masters to write to, and some slices what `_in_float32` says."""
        loaded = []
        try:
            for bucket in buckets:
                bucket.load_masters()
                loaded.append(bucket)
            with self._in_float32(locals_):
                yield
        finally:
            for bucket in loaded:
                bucket.store_masters()

    def _update_momenta(self, by_group: dict[int, list[torch.nn.Parameter]]) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Call `Muon.update_momenta` for the slices of each group, with their state in float32."""
        assert isinstance(self.inner, Muon)
        found = dict[torch.nn.Parameter, torch.Tensor]()
        with self._in_float32(list(itertools.chain(*by_group.values()))):
            for index, locals_ in by_group.items():
                momenta = self.inner.update_momenta(locals_, self.inner.param_groups[index])
                found.update(zip(locals_, momenta, strict=True))
        return found

    @contextmanager
    def _in_float32(self, locals_: list[torch.nn.Parameter]) -> Iterator[None]:
        """Return a context in which the gradients and the state of some slices have the dtype of the update."""
        coded = dict.fromkeys(self._coded[local] for local in locals_ if local in self._coded)
        narrow = {local: local.grad for local in locals_ if local.grad is not None and local.grad.dtype != local.dtype}
        try:
            for state in coded:
                state.decode()
            if narrow:
                wide = [torch.empty_like(local) for local in narrow]
                torch._foreach_copy_(wide, list(narrow.values()))
                for local, gradient in zip(narrow, wide, strict=True):
                    local.grad = gradient
            yield
        finally:
            for local, gradient in narrow.items():
                local.grad = gradient
            for state in coded:
                state.encode()

    def _encode_loaded(self, _: torch.optim.Optimizer) -> None:
        for state in dict.fromkeys(self._coded.values()):
            state.encode()
