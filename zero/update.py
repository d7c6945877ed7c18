"""Phase 2 of a step: the inner optimizer updates the owned slices, bucket by bucket, each one in full precision."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from zero.buckets import Bucket, OwnedSlice
from zero.checks import check_rounding, rounded_state
from zero.codecs import Codec, Encoded, decoded, encodable, rounding_noise
from zero.muon.exchange import MatrixExchange
from zero.muon.muon import own_step
from zero.stopwatch import region
from zero.tensors import flattened

# Updates that have failed while matrices were exchanged. Their messages are kept here and never waited for, because other ranks
# may have failed in other rounds.
_FAILED: list["SliceUpdate"] = []


class SliceUpdate:
    """Calls the inner optimizer. What it needs in float32 exists for the buckets of the call, the rest stays encoded.

    Args:
        inner: the optimizer of this rank's slices.
        buckets: all buckets.
        codec: of the state, see `zero.codecs`; None: the state stays as `inner` keeps it. A resumed run rounds in the same way.
        exchange: of the matrices, if `inner` needs whole ones, see `zero.muon`.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, buckets: list[Bucket], codec: Codec | None, exchange: MatrixExchange | None
    ) -> None:
        self.inner, self.buckets, self.codec, self.exchange = inner, buckets, codec, exchange
        self._rounded = rounded_state(type(inner)) if codec is not None else ()
        if codec is not None:
            inner.register_load_state_dict_post_hook(self._encode_loaded)

    def __call__(self, rounds: list[list[Bucket]], changed: list[torch.nn.Parameter]) -> Iterator[list[Bucket]]:
        """Update the slices that have gradients, some buckets at a time, and yield these. Needs to be called on all ranks.

        `changed`: the parameters that have a gradient on any rank.
        """
        if self.codec is not None:
            check_rounding(type(self.inner), self.inner.param_groups)
        if self in _FAILED:
            raise RuntimeError("a step has failed while matrices were exchanged; restart the program from a checkpoint")
        if self.exchange is not None:
            self.exchange.begin(changed)
        order = [bucket.number for buckets in rounds for bucket in buckets]
        positions = itertools.count()
        try:
            for buckets in rounds:
                with region(f"zero::update bucket {buckets[0].number}" if len(buckets) == 1 else "zero::update"):
                    for _ in buckets:
                        self._exchange_for(order, next(positions))
                    self._update(buckets)
                yield buckets
        except BaseException:
            if self.exchange is not None and self.exchange.comm.shard_size > 1:
                _FAILED.append(self)
            raise

    def _exchange_for(self, order: list[int], position: int) -> None:
        """Wait for the directions of the bucket at a position in the order of the updates, and work ahead for the next two."""
        if (exchange := self.exchange) is not None:
            for later in order[position + 2 if position else 0 : position + 3]:
                exchange.send(later, self._before)
            for later in order[position + 1 if position else 0 : position + 2]:
                exchange.transform(later)
            exchange.receive(order[position])

    def _update(self, buckets: list[Bucket]) -> None:
        groups = self.inner.param_groups
        everything = [group["params"] for group in groups]
        if len(buckets) < len(self.buckets) or self.exchange is not None:
            for index, group in enumerate(groups):
                locals_ = [local for bucket in buckets for local in bucket.local_by_group.get(index, [])]
                group["params"] = [] if self.exchange is not None and group.get("matrices") else locals_
        updated = [[owned for owned in bucket.owned if owned.local.grad is not None] for bucket in buckets]
        by_element = [[owned.local for owned in slices if not self._has_matrices(owned)] for slices in updated]
        loaded = []
        try:
            for bucket, slices, locals_ in zip(buckets, updated, by_element, strict=True):
                bucket.load_masters()
                loaded.append(bucket)
                for local in locals_ if self.codec is not None else ():
                    if local in self.inner.state:
                        self.inner.state[local] = decoded(local, self.inner.state[local])
                for owned in slices:
                    if self.exchange is not None and self._has_matrices(owned):
                        self.exchange.apply(owned)
            own_step(type(self.inner))(self.inner)
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params
            for bucket in loaded:
                bucket.store_masters()
            for locals_ in by_element:
                self._encode(locals_)

    def _before(self, owned: OwnedSlice, group: dict[str, Any]) -> torch.Tensor:
        """Call `before` of the inner optimizer, with the state of the slice in float32."""
        inner: Any = self.inner
        if self.codec is not None and owned.local in inner.state:
            inner.state[owned.local] = decoded(owned.local, inner.state[owned.local])
        result = inner.before(owned.local, group)
        self._encode([owned.local])
        return result

    def _has_matrices(self, owned: OwnedSlice) -> bool:
        return self.exchange is not None and self.exchange.has_matrices(owned.param)

    def _encode(self, locals_: list[torch.nn.Parameter]) -> None:
        """Encode the state of some slices. The random numbers for the rounding come from the state, which a checkpoint has."""
        if self.codec is None:
            return
        slices = [(local, self.inner.state[local]) for local in locals_]
        entries = [(local, state, name) for local, state in slices for name in encodable(local, state, self._rounded)]
        if not entries:
            return
        bits = [state["step"].double() for _, state in slices if isinstance(state.get("step"), torch.Tensor)]
        if not bits:  # a class without `step`: a checksum
            bits = [flattened(state[name], local).view(torch.int32).sum() for local, state, name in entries]
        noise = rounding_noise(torch.stack(bits).sum().to(locals_[0].device), max(local.numel() for local in locals_))
        for local, state, name in entries:
            state[name] = Encoded(self.codec, self.codec.encode(flattened(state[name], local), noise))

    def _encode_loaded(self, inner: torch.optim.Optimizer) -> None:
        for bucket in self.buckets:
            self._encode([owned.local for owned in bucket.owned if owned.local in inner.state])
