"""Optimizer state in fewer bytes: float32 while its bucket is updated, encoded the rest of the time.

A codec encodes a float32 tensor, one number per element of a slice. Checkpoints hold the decoded float32
numbers. Encoded again, they give the same bytes, so a resumed run has the state of the run that was saved.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn import functional

from zero.tensors import cut, cut_sizes, pieces, shaped

BLOCK = 256  # elements that share a scale with `Int8`
# state of torch.optim's classes to which an update is proportional: small numbers may become zero
MEANS = ("exp_avg", "momentum_buffer", "grad_avg")

Parts = tuple[torch.Tensor, ...]  # of encoded elements


class Codec(Protocol):
    """Encodes flat float32 tensors."""

    block: int  # elements that are encoded together: a tensor consists of whole blocks
    price: str  # what it costs with AdamW, in words

    def empty(self, numel: int, device: torch.device) -> Parts:
        """Return memory for encoded elements: one or more flat tensors, each with a number per element or per block."""

    def encode(self, values: torch.Tensor, seed: Callable[[], torch.Tensor], out: Parts, means: int = 0) -> None:
        """Encode `values`, (numel,) float32, of which the first `means` are `MEANS`.

        `seed` returns one number, for the random numbers of the rounding.
        """

    def decode(self, encoded: Parts) -> torch.Tensor:
        """Return the elements, (numel,) float32."""


class BFloat16:
    """The upper 16 bits of float32, with stochastic rounding.

    A second moment changes by a factor of 1 - beta2 per step. If this is less than half the distance of two bfloat16 numbers,
    as with beta2 = 0.999, rounding to the nearest one would never change it. Stochastic rounding is right on average.
    """

    block = 1
    price = "AdamW's moments are rounded, stochastically"

    def empty(self, numel: int, device: torch.device) -> Parts:
        return (torch.empty(numel, dtype=torch.bfloat16, device=device),)

    def encode(self, values: torch.Tensor, seed: Callable[[], torch.Tensor], out: Parts, means: int = 0) -> None:
        noise = rounding_noise(seed().to(values.device, non_blocking=True), values.numel())
        for target, part in pieces(out[0], values):
            # the sum must not overflow, which it would for the nan whose bits are all one
            bits = part.nan_to_num(math.nan, math.inf, -math.inf).view(torch.int32)
            bits += noise[: part.numel()]
            target.view(torch.int16).copy_(bits >> 16)

    def decode(self, encoded: Parts) -> torch.Tensor:
        return encoded[0].float()


class Int8:
    """One byte per element: its ratio to the largest element of its block of 256, on a scale that is finer for large ratios.

    The scale is the dynamic map of Dettmers et al., "8-bit Optimizers" (https://arxiv.org/abs/2110.02861), with two changes. It
    has the largest ratio exactly, with both signs, so that a block that is encoded again does not shrink. And small numbers
    become zero only if they are `MEANS`, or if their block has nothing above 1e-37: with a second moment of zero and a first
    moment that is not zero, an update would be too large. Blocks without negative elements use all codes for positive ones. A
    number is rounded to the nearest code, so small changes are lost (docs/sharding.md has figures).
    """

    block = BLOCK
    price = "AdamW's moments are rounded; on a CPU an update takes 5 to 10 times as long"

    def empty(self, numel: int, device: torch.device) -> Parts:
        codes = torch.empty(numel, dtype=torch.uint8, device=device)
        return codes, torch.empty(numel // BLOCK, device=device)  # the scales: negative if the block has negative elements

    def encode(self, values: torch.Tensor, seed: Callable[[], torch.Tensor], out: Parts, means: int = 0) -> None:
        nearest, means = _nearest_codes(values.device), means // BLOCK
        for blocks, codes, scales in _by_block(values, *out):
            lowest, highest = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)  # aminmax is slow on a CPU
            has_negative = lowest < 0
            torch.where(has_negative, torch.minimum(lowest, -highest), highest, out=scales)
            ratios = torch.div(blocks, scales, out=torch.empty_like(blocks, dtype=torch.bfloat16))
            numbers = ratios.view(torch.uint16).to(torch.int32)
            numbers.add_(has_negative, alpha=2**16)
            if means > 0:
                numbers[:means].add_(2**17)
                means -= len(blocks)
            torch.index_select(nearest, 0, numbers.view(-1), out=codes.view(-1))

    def decode(self, encoded: Parts) -> torch.Tensor:
        values = torch.empty_like(encoded[0], dtype=torch.float32)
        ratios = _ratios(values.device)
        for blocks, codes, scales in _by_block(values, *encoded):
            numbers = codes.int().add_(scales < 0, alpha=2**8)
            torch.index_select(ratios, 0, numbers.view(-1), out=blocks.view(-1))
            blocks *= scales
        return values


# by `state_dtype`; None: the state stays as it is
STATE_CODECS: dict[str, Codec | None] = {"float32": None, "bfloat16": BFloat16(), "int8": Int8()}


def codec_of(state_dtype: str) -> Codec | None:
    """Return the codec of a `state_dtype`. Raise ValueError if there is none of this name."""
    if state_dtype not in STATE_CODECS:
        raise ValueError(f"state_dtype={state_dtype!r} is not one of {', '.join(STATE_CODECS)}")
    return STATE_CODECS[state_dtype]


def encoded_nbytes(codec: Codec | None, numel: int) -> int:
    """Return the bytes of `numel` encoded elements, with those that fill the last block. Without a codec, they are float32."""
    if codec is None:
        return 4 * numel
    whole_blocks = -(-numel // codec.block) * codec.block
    return sum(part.nbytes for part in codec.empty(whole_blocks, torch.device("meta")))


SMALLEST = min(STATE_CODECS, key=lambda state_dtype: encoded_nbytes(STATE_CODECS[state_dtype], 2**20))


@dataclass(frozen=True)
class Encoded:
    """An entry of the state of a slice between updates."""

    codec: Codec
    parts: Parts

    def decode(self, local: torch.Tensor) -> torch.Tensor:
        """Return the entry in float32, in the shape of `local`, the slice."""
        return shaped(self.codec.decode(self.parts)[: local.numel()], local)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class CodedState:
    """The state of slices that are updated together: in float32 from `decode` to `encode`, encoded the rest of the time.

    All its entries lie in one flat tensor, each from the beginning of a block on: an update takes as many operations for many
    slices as for one. A slice that an update skips keeps its state, because decoded numbers are encoded to the same bytes.

    `inner`: the optimizer. `slices`: its parameters, on one device. `names`: of entries that may be encoded; None: of all.
    """

    def __init__(
        self, codec: Codec, inner: torch.optim.Optimizer, slices: list[torch.nn.Parameter], names: Collection[str] | None
    ) -> None:
        self.codec, self.inner, self.slices, self.names = codec, inner, slices, names
        self._entries: list[tuple[torch.nn.Parameter, str, Encoded]] = []  # slice, name, encoded entry
        self._parts: Parts = ()  # of all entries
        self._means = 0  # elements of `MEANS`, which come first
        self._cuts: list[int] = []  # where the entries lie in `_flat`, see `zero.tensors.cut`
        self._flat: torch.Tensor | None = None  # the decoded entries, if any
        self._views: list[torch.Tensor] = []  # the entries in `_flat`

    def decode(self) -> None:
        """Make the entries float32 tensors, which may be written to."""
        if self._flat is None and self._entries:
            self._flat = self.codec.decode(self._parts)
            for (local, name, encoded), elements in zip(self._entries, cut(self._flat, self._cuts), strict=True):
                self._views.append(shaped(elements, local))
                if self.inner.state[local].get(name) is encoded:
                    self.inner.state[local][name] = self._views[-1]

    def encode(self) -> None:
        """Encode the entries that are float32 tensors. Other tensors than those of `decode` are copied first."""
        state = self.inner.state
        found = [(local, name) for local in self.slices if local in state for name in self._encodable(local)]
        if not found:
            return
        found.sort(key=lambda entry: entry[1] not in MEANS)
        if self._flat is None or [id(state[local][name]) for local, name in found] != list(map(id, self._views)):
            self._lay_out(found)
        assert self._flat is not None
        self.codec.encode(self._flat, self._seed, self._parts, self._means)
        for local, name, encoded in self._entries:
            state[local][name] = encoded
        self._flat, self._views = None, []

    def _encodable(self, local: torch.nn.Parameter) -> list[str]:
        """Return the names of the entries that have a float32 number per element of a slice."""
        return [
            name
            for name, value in self.inner.state[local].items()
            if isinstance(value, torch.Tensor) and value.shape == local.shape and value.dtype == torch.float32
            if value.dim() and value.numel() and (self.names is None or name in self.names)
        ]

    def _lay_out(self, found: list[tuple[torch.nn.Parameter, str]]) -> None:
        """Move entries into a flat tensor, one after the other."""
        device, block = found[0][0].device, self.codec.block
        sizes = [-(-local.numel() // block) * block for local, _ in found]
        numel = sum(sizes)
        self._means = sum(size for size, (_, name) in zip(sizes, found, strict=True) if name in MEANS)
        self._cuts = cut_sizes(zip(accumulate([0, *sizes]), [local.numel() for local, _ in found], strict=False), numel)
        self._flat = torch.zeros(numel, device=device)
        for (local, name), elements in zip(found, cut(self._flat, self._cuts), strict=True):
            state, view = self.inner.state[local], shaped(elements, local)
            state[name] = view.copy_(state[name])
        self._parts = self.codec.empty(numel, device)
        each = zip(*(part.split([size * part.numel() // numel for size in sizes]) for part in self._parts), strict=True)
        self._entries = [(*entry, Encoded(self.codec, parts)) for entry, parts in zip(found, each, strict=True)]

    def _seed(self) -> torch.Tensor:
        """Return the sum of the `step` counters, or a checksum for a class without them: a checkpoint has both."""
        states = [self.inner.state[local] for local in self.slices if local in self.inner.state]
        if steps := [state["step"] for state in states if isinstance(state.get("step"), torch.Tensor)]:
            return torch.stack(steps).sum(dtype=torch.float64)
        assert self._flat is not None
        return self._flat.view(torch.int32).sum()


def rounding_noise(steps: torch.Tensor, numel: int) -> torch.Tensor:
    """Return at most `numel` random numbers for `Codec.encode`: a hash of `steps`, which is one number. No wait for a GPU.

    Each element gets a new one in each step; elements far apart share one, because making them takes longer than using them.
    """
    (block,) = next(pieces(torch.empty(numel, dtype=torch.int8, device=steps.device)))
    bits = torch.arange(block.numel(), dtype=torch.int32, device=steps.device)
    bits += steps.to(torch.int64).mul(0x9E3779B1).to(torch.int32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):  # Ellis and Wellons, "hash-prospector"
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)
        bits *= factor
    return bits & 0xFFFF


def _by_block(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield flat tensors with a number per element or per block in pieces, (number of blocks, numbers per block)."""
    blocks = tensors[0].numel() // BLOCK
    return pieces(*(tensor.view(blocks, -1) for tensor in tensors))


@cache
def _ratios(device: torch.device) -> torch.Tensor:
    """Return the ratios of the codes to the scale, (512,) float32: 256 for a positive scale, then 256 for a negative one.

    From 1e-7 to 1, each power of ten has twice as many codes as the one below.
    """
    positive, zero = [_decades(2), _decades(1)], torch.zeros(1, device="cpu")
    tables = [torch.cat((zero, positive[0])), -torch.cat((-positive[1].flip(0), zero, positive[1]))]
    return torch.cat([functional.pad(table, (0, 1), value=1.0) for table in tables]).to(device)


def _decades(first: int) -> torch.Tensor:
    """Return the positive ratios in ascending order, `first` of them between 1e-7 and 1e-6."""
    ratios = []
    for power in range(7):
        bounds = torch.linspace(0.1, 1, first * 2**power + 1, dtype=torch.float64, device="cpu")
        ratios.append((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (power - 6))
    ratios[-1][-1] = 1.0
    return torch.cat(ratios).float()


@cache
def _nearest_codes(device: torch.device) -> torch.Tensor:
    """Return the code of each ratio to the scale, (4 * 65536,) uint8: for a positive scale, then for a negative one.

    The index is the bits of the bfloat16 ratio as an unsigned number. The last half of the table is for `MEANS`.
    """
    ratios = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.uint16).view(torch.bfloat16).double()
    keeping, nearest = [], []
    for table, sign in zip(_ratios(torch.device("cpu")).double().view(2, -1), (1, -1), strict=True):
        ascending, wanted = sign * table[:-1], sign * ratios  # the last code is not used
        codes = torch.bucketize(wanted, (ascending[:-1] + ascending[1:]) / 2)
        zero = int((ascending == 0).nonzero())
        codes[wanted.isnan()] = zero  # of a block of zeros
        nearest.append(codes)
        keeping.append(codes + torch.where(codes == zero, wanted.nan_to_num().sign().int(), 0))
    return torch.cat([*keeping, *nearest]).to(torch.uint8).to(device)
