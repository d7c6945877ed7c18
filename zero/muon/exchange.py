"""The exchange of matrices in an update: each goes once to the rank that owns it, and its direction comes back."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from zero.buckets import OwnedSlice
from zero.collectives import AllToAllWork, Communicator
from zero.muon.matrices import Part, matrix_plan, stacked
from zero.muon.muon import Muon, is_skipped
from zero.stopwatch import region
from zero.tensors import shaped


@dataclass
class Round:
    """The matrices that are exchanged together: those which the update of one bucket needs first."""

    sent: list[list[Part]]  # by rank: what this rank sends, in that order
    received: list[list[Part]]  # by rank: what this rank receives
    params: set[int] = field(default_factory=set)  # numbers of the parameters that consist of these matrices


@dataclass
class InFlight:
    """A round of this step. Until `work` is done, nothing of it may be read."""

    sent: list[list[Part]]  # as in `Round`, of the parameters that have a gradient
    received: list[list[Part]]
    work: AllToAllWork


class MatrixExchange:
    """Exchanges matrices between the ranks of a shard group, round by round. Every method needs to be called on all ranks.

    There is a round for each bucket, in three parts: `send`, `transform` and `receive`. Those of different rounds overlap.

    Args:
        optimizer: a ShardedOptimizer with Muon as its inner optimizer.

    Attributes:
        plan: who transforms what.
    """

    def __init__(self, optimizer: Any) -> None:
        comm, buckets, plan = optimizer.comm, optimizer.buckets, optimizer.plan
        self.comm: Communicator = comm
        self.inner: Muon = optimizer.inner
        self.plan = matrix_plan(plan)
        self.number_of: dict[torch.nn.Parameter, int] = optimizer.number_of
        self._specs = [plan.params[number] for buffer in plan.buffers for number in buffer.params]
        self._device = buckets[0].data.device if buckets else None
        ranks = range(comm.shard_size)
        self._rounds = [Round([[] for _ in ranks], [[] for _ in ranks]) for _ in buckets]
        offsets = [[owned.offset for owned in bucket.owned] for bucket in buckets]
        self._slice_of: dict[Part, OwnedSlice] = {}  # by part of this rank
        of_matrices = (self.plan.matrices, self.plan.owners, self.plan.parts, self.plan.rounds)
        for matrix, owner, parts, number in zip(*of_matrices, strict=True):
            round_ = self._rounds[number]
            round_.params.add(matrix.param)
            for part in parts:
                if owner == comm.shard_rank:
                    round_.received[part.rank].append(part)
                if part.rank == comm.shard_rank:
                    round_.sent[owner].append(part)
                    self._slice_of[part] = buckets[part.bucket].owned[bisect_right(offsets[part.bucket], part.offset) - 1]
        self._used: set[int] = set()  # numbers of the parameters that this step updates
        self._in_flight: dict[int, InFlight] = {}  # by round
        self._directions: dict[torch.nn.Parameter, list[torch.Tensor]] = {}  # that have arrived, by slice

    def begin(self, changed: Collection[torch.nn.Parameter]) -> None:
        """Begin a step that updates the parameters that have a gradient, the same on all ranks, or nothing."""
        self._in_flight.clear()  # of a step that has failed, where there is no other rank
        self._directions.clear()
        self._used = set() if is_skipped(self.inner) else {self.number_of[param] for param in changed}

    def send(self, number: int, before: Callable[[OwnedSlice, dict[str, Any]], torch.Tensor]) -> None:
        """Start to send the slices of a round to the ranks that own their matrices.

        Args:
            before: returns what is sent of a slice, see `Muon.before`.
        """
        round_ = self._rounds[number]
        if round_.params.isdisjoint(self._used):
            return
        with region(f"zero::send matrices of bucket {number}"):
            sent, received = (
                [[part for part in of_rank if self.plan.matrices[part.matrix].param in self._used] for of_rank in parts]
                for parts in (round_.sent, round_.received)
            )
            values: dict[torch.nn.Parameter, torch.Tensor] = {}  # by slice
            outgoing = []
            for part in itertools.chain(*sent):
                owned = self._slice_of[part]
                if owned.local not in values:
                    values[owned.local] = before(owned, self._group(self.number_of[owned.param])).reshape(-1)
                first = part.offset - owned.offset
                outgoing.append(values[owned.local][first : first + part.numel])
            work = self.comm.all_to_all(self._joined(outgoing), _sizes(sent), _sizes(received))
            self._in_flight[number] = InFlight(sent, received, work)

    def slices(self, number: int) -> list[OwnedSlice]:
        """Return the slices of this rank that `send` sends."""
        parts = itertools.chain(*self._rounds[number].sent)
        sent = [self._slice_of[part] for part in parts if self.plan.matrices[part.matrix].param in self._used]
        return list({owned.local: owned for owned in sent}.values())

    def transform(self, number: int) -> None:
        """Transform the matrices of a round that this rank owns, and start to send their directions back."""
        if (round_ := self._in_flight.get(number)) is None:
            return
        incoming = self._arrived(round_.work)
        received = list(itertools.chain(*round_.received))
        with region(f"zero::transform matrices of bucket {number}"):
            flat: dict[int, torch.Tensor] = {}
            for part, elements in zip(received, incoming.split([part.numel for part in received]), strict=True):
                if part.matrix not in flat:
                    flat[part.matrix] = incoming.new_empty(self.plan.matrices[part.matrix].numel)
                flat[part.matrix][part.start : part.stop] = elements
            for index, elements in flat.items():
                matrix = self.plan.matrices[index]
                whole = self.inner.whole(elements.view(matrix.shape), self._group(matrix.param))
                flat[index] = whole.reshape(-1)
            outgoing = [flat[part.matrix][part.start : part.stop] for part in received]
            round_.work = self.comm.all_to_all(self._joined(outgoing), _sizes(round_.received), _sizes(round_.sent))

    def receive(self, number: int) -> None:
        """Wait for the directions of a round, which `apply` then needs."""
        if (round_ := self._in_flight.pop(number, None)) is None:
            return
        incoming = self._arrived(round_.work)
        sent = list(itertools.chain(*round_.sent))
        arrived = dict(zip(sent, incoming.split([part.numel for part in sent]), strict=True))
        for part in sorted(arrived, key=lambda part: (part.bucket, part.offset)):
            self._directions.setdefault(self._slice_of[part].local, []).append(arrived[part])

    def apply(self, owned: OwnedSlice) -> None:
        """Update a slice of this rank with its direction, which has arrived, unless this step updates nothing."""
        number = self.number_of[owned.param]
        if number not in self._used:
            return
        arrived = self._directions.pop(owned.local)
        direction = shaped(arrived[0] if len(arrived) == 1 else torch.cat(arrived), owned.local)
        shape = stacked(owned.param.shape, self._specs[number].matrices)
        self.inner.after(owned.local, self._group(number), direction, shape)

    def has_matrices(self, param: torch.nn.Parameter) -> bool:
        """Return whether a parameter consists of matrices."""
        return self._specs[self.number_of[param]].matrices > 0

    def _arrived(self, work: AllToAllWork) -> torch.Tensor:
        self.comm.wait("all-to-all", work.works, work.incoming.device)
        return work.incoming

    def _group(self, number: int) -> dict[str, Any]:
        """Return the group of `inner` that holds the slices of a parameter."""
        return self.inner.param_groups[self._specs[number].group]

    def _joined(self, elements: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(elements) if elements else torch.empty(0, dtype=self.inner.matrix_dtype, device=self._device)


def check_matrices(groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for parameters whose elements do not lie in memory as the matrices that their groups say they are."""
    for group in groups:
        for param in group["params"] if group.get("matrices") else ():
            stacked(param.shape, group["matrices"])
            if not param.is_contiguous():
                raise ValueError(f"a matrix of shape {tuple(param.shape)} has strides {param.stride()}; make it contiguous")


def exchange_of(optimizer: Any) -> MatrixExchange | None:
    """Return the exchange of a ShardedOptimizer, if its inner optimizer needs whole matrices."""
    return MatrixExchange(optimizer) if isinstance(optimizer.inner, Muon) else None


def _sizes(parts: list[list[Part]]) -> list[int]:
    return [sum(part.numel for part in of_rank) for of_rank in parts]
