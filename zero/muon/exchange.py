"""The exchange of matrices in an update: each goes once to the rank that owns it, and its direction comes back."""

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from zero.buckets import Bucket, OwnedSlice, Placement
from zero.collectives import AllToAllWork
from zero.muon.matrices import Part, matrix_plan, stacked
from zero.muon.muon import Muon, is_skipped, orthogonalized
from zero.stopwatch import region

# of slices by group of the inner optimizer: what `Muon.update_momenta` returns, by slice
UpdateMomenta = Callable[[dict[int, list[torch.nn.Parameter]]], dict[torch.nn.Parameter, torch.Tensor]]


class Round(NamedTuple):
    """What this rank exchanges in a round."""

    sent: list[Part]  # rank by rank: what it sends to the owners, and gets back from them
    sent_numels: list[int]  # by rank
    received: list[Part]  # rank by rank: parts of its own matrices, which it receives, and sends back
    received_numels: list[int]
    device: torch.device


class MatrixExchange:
    """Exchanges matrices between the ranks of a shard group, round by round. Every method needs to be called on all ranks.

    `zero.muon.matrices.matrix_plan` says which matrices a round has. Slices are sent to the owners of their matrices, which
    transform the matrices and send the directions back. A stage of the update works on three rounds: it transforms one, while
    the next one and the directions of the previous one are in flight.
    """

    def __init__(self, placed: Placement, inner: Muon) -> None:
        self.comm, self.inner, self._number_of = placed.comm, inner, placed.number_of
        self.matrices = matrix_plan(placed.plan)
        self._buckets = buckets = placed.buckets
        self._specs = placed.plan.params
        offsets = [[owned.offset for owned in bucket.owned] for bucket in buckets]
        self._slice_of: dict[Part, OwnedSlice] = {}  # by part of this rank
        for part in itertools.chain(*(matrix.parts for matrix in self.matrices)):
            if part.rank == self.comm.shard_rank:
                self._slice_of[part] = buckets[part.bucket].owned[bisect_right(offsets[part.bucket], part.offset) - 1]
        self.round_of = {matrix.param: matrix.round for matrix in self.matrices}  # of each parameter with matrices
        self._used: set[int] = set()  # numbers of the parameters with matrices that this step updates
        self._rounds: list[Round] = []  # of their matrices
        self._needed: dict[int, int] = {}  # how many stages must have ended before a bucket is updated, by its number
        self._stage = 0  # the next one
        self._works: dict[int, AllToAllWork] = {}  # in flight, by number of the round
        # arrived directions, by number of the bucket: slice, first element in it, direction
        self._directions: dict[int, list[tuple[OwnedSlice, int, torch.Tensor]]] = {}

    def begin(self, changed: Iterable[torch.nn.Parameter], update_momenta: UpdateMomenta) -> None:
        """Begin a step, which updates `changed`, the same on all ranks, or nothing if `found_inf` is set.

        `update_momenta`: returns what to send of the slices of a round.
        """
        used = {number for number in map(self._number_of.__getitem__, changed) if number in self.round_of}
        if used and is_skipped(self.inner):
            used = set()
        if used != self._used:
            self._use(used)
        self._stage = 0
        self._works.clear()  # of a step that has failed, where there is no other rank
        self._directions.clear()
        self._advance(update_momenta)  # the first round is on its way while buckets without matrices are updated

    def arrive(self, buckets: Iterable[Bucket], update_momenta: UpdateMomenta) -> None:
        """Make the directions that buckets need arrive, and work ahead for those that are updated after them."""
        for bucket in buckets:
            while self._stage < self._needed.get(bucket.number, 0):
                self._advance(update_momenta)

    def add_directions(self, bucket: Bucket) -> None:
        """Update the slices of a bucket with their directions, which have arrived, unless this step updates nothing."""
        by_group: dict[int, dict[torch.nn.Parameter, torch.Tensor]] = {}
        arrived, places, shapes = self._directions.pop(bucket.number, []), [], {}
        for owned, first, values in arrived:
            spec = self._specs[owned.number]
            directions = by_group.setdefault(spec.group, {})
            if owned.local not in directions:
                directions[owned.local] = torch.empty_like(owned.local)
                shapes[owned.local] = stacked(spec.shape, spec.matrices)
            places.append(directions[owned.local].view(-1)[first : first + values.numel()])
        if arrived:
            torch._foreach_copy_(places, [values for _, _, values in arrived])
        for index, directions in by_group.items():
            group, of_slices = self.inner.param_groups[index], [shapes[local] for local in directions]
            self.inner.add_directions(list(directions), group, list(directions.values()), of_slices)

    def _use(self, used: set[int]) -> None:
        """Make the rounds that exchange some parameters."""
        self._used, self._needed = used, {}
        # by round: what is sent to each rank and received from it, the device
        found: dict[int, tuple[list[list[Part]], list[list[Part]], torch.device]] = {}
        ranks, own = range(self.comm.shard_size), self.comm.shard_rank
        for matrix in sorted(self.matrices, key=attrgetter("round")):
            if matrix.param not in used:
                continue
            device = self._buckets[matrix.parts[0].bucket].data.device
            sent, received, _ = found.setdefault(matrix.round, ([[] for _ in ranks], [[] for _ in ranks], device))
            for part in matrix.parts:
                self._needed[part.bucket] = len(found) + 2
                if part.rank == own:
                    sent[matrix.owner].append(part)
                if matrix.owner == own:
                    received[part.rank].append(part)
        self._rounds = [Round(*_joined(sent), *_joined(received), device) for sent, received, device in found.values()]

    def _advance(self, update_momenta: UpdateMomenta) -> None:
        """Run a stage: send round k, transform round k - 1, and receive the directions of round k - 2."""
        stage, rounds = self._stage, self._rounds
        if stage < len(rounds):
            self._send(stage, rounds[stage], update_momenta)
        if 0 <= stage - 1 < len(rounds):
            self._transform(stage - 1, rounds[stage - 1])
        if 0 <= stage - 2 < len(rounds):
            self._receive(stage - 2, rounds[stage - 2])
        self._stage += 1

    def _send(self, number: int, round_: Round, update_momenta: UpdateMomenta) -> None:
        with region(f"zero::send matrices of round {number}"):
            slices = [self._slice_of[part] for part in round_.sent]
            by_group: dict[int, dict[torch.nn.Parameter, None]] = {}
            for owned in slices:
                by_group.setdefault(self._specs[owned.number].group, {})[owned.local] = None
            values = update_momenta({index: list(locals_) for index, locals_ in by_group.items()})
            outgoing = torch.empty(sum(round_.sent_numels), dtype=self.inner.matrix_dtype, device=round_.device)
            pieces = []
            for part, owned in zip(round_.sent, slices, strict=True):
                first = part.offset - owned.offset
                pieces.append(values[owned.local].reshape(-1)[first : first + part.numel])
            if pieces:
                torch._foreach_copy_(outgoing.split([part.numel for part in round_.sent]), pieces)
            self._works[number] = self.comm.all_to_all(outgoing, round_.sent_numels, round_.received_numels)

    def _transform(self, number: int, round_: Round) -> None:
        incoming = self._arrived(number)
        with region(f"zero::transform matrices of round {number}"):
            pieces: dict[int, dict[int, torch.Tensor]] = {}  # by matrix and its element
            for part, values in zip(round_.received, incoming.split([part.numel for part in round_.received]), strict=True):
                pieces.setdefault(part.matrix, {})[part.start] = values
            batches: dict[tuple[tuple[int, int], int], list[int]] = {}  # matrices that are transformed together
            for index in pieces:
                matrix = self.matrices[index]
                ns_steps = self.inner.param_groups[self._specs[matrix.param].group]["ns_steps"]
                batches.setdefault((matrix.shape, ns_steps), []).append(index)
            directions: dict[int, torch.Tensor] = {}  # by matrix
            for (shape, ns_steps), indices in batches.items():
                in_order = [pieces[index][start] for index in indices for start in sorted(pieces[index])]
                transformed = orthogonalized(torch.cat(in_order).view(-1, *shape), ns_steps)
                directions.update(zip(indices, transformed.reshape(len(indices), -1), strict=True))
            outgoing = [directions[part.matrix][part.start : part.stop] for part in round_.received]
            joined = torch.cat(outgoing) if outgoing else incoming
            self._works[number] = self.comm.all_to_all(joined, round_.received_numels, round_.sent_numels)

    def _receive(self, number: int, round_: Round) -> None:
        incoming = self._arrived(number)
        for part, values in zip(round_.sent, incoming.split([part.numel for part in round_.sent]), strict=True):
            owned = self._slice_of[part]
            self._directions.setdefault(part.bucket, []).append((owned, part.offset - owned.offset, values))

    def _arrived(self, number: int) -> torch.Tensor:
        """Wait for what is in flight of a round, and return what has arrived."""
        work = self._works[number]
        self.comm.wait("all-to-all", work.works, work.incoming.device)
        del self._works[number]
        return work.incoming


def check_matrices(groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for parameters whose elements do not lie in memory as the matrices that their groups say they are."""
    for group in groups:
        for param in group["params"] if group.get("matrices") else ():
            stacked(param.shape, group["matrices"])
            if not param.is_contiguous():
                raise ValueError(f"a matrix of shape {tuple(param.shape)} has strides {param.stride()}; make it contiguous")


def _joined(parts: list[list[Part]]) -> tuple[list[Part], list[int]]:
    """Return the parts rank by rank, and the number of their elements by rank."""
    return list(itertools.chain(*parts)), [sum(part.numel for part in of_rank) for of_rank in parts]
