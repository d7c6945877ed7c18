"""Phase 2 of a step: the inner optimizer updates the owned slices, bucket by bucket, each one in full precision."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from zero.buckets import Bucket, OwnedSlice
from zero.checks import check_rounding, rounded_state
from zero.codecs import Codec, CodedState
from zero.muon.exchange import MatrixExchange
from zero.muon.muon import own_step
from zero.stopwatch import region

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
        self._coded: dict[torch.nn.Parameter, CodedState] = {}  # by slice
        if codec is not None:
            names = rounded_state(type(inner))
            for bucket, has_matrices in itertools.product(buckets, (False, True)):
                slices = [owned.local for owned in bucket.owned if self._has_matrices(owned) == has_matrices]
                self._coded.update(dict.fromkeys(slices, CodedState(codec, inner, slices, names)))
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
                with self._in_float32(exchange.slices(later)):
                    exchange.send(later, lambda owned, group: exchange.inner.before(owned.local, group))
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
        loaded = []
        try:
            for bucket, slices in zip(buckets, updated, strict=True):
                bucket.load_masters()
                loaded.append(bucket)
                for owned in slices:
                    if self.exchange is not None and self._has_matrices(owned):
                        self.exchange.apply(owned)
            with self._in_float32(owned for slices in updated for owned in slices if not self._has_matrices(owned)):
                own_step(type(self.inner))(self.inner)
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params
            for bucket in loaded:
                bucket.store_masters()

    @contextmanager
    def _in_float32(self, slices: Iterable[OwnedSlice]) -> Iterator[None]:
        """Return a context in which the state of some slices is not encoded."""
        coded = dict.fromkeys(self._coded[owned.local] for owned in slices if owned.local in self._coded)
        try:
            for state in coded:
                state.decode()
            yield
        finally:
            for state in coded:
                state.encode()

    def _has_matrices(self, owned: OwnedSlice) -> bool:
        return self.exchange is not None and self.exchange.has_matrices(owned.param)

    def _encode_loaded(self, _: torch.optim.Optimizer) -> None:
        for state in dict.fromkeys(self._coded.values()):
            state.encode()
