"""Optimizer state in fewer bytes: float32 while its bucket is updated, encoded the rest of the time.

A codec encodes a float32 tensor, one number per element of a slice. Checkpoints hold what it decodes to, in float32, and if
that is encoded again, the bytes are the same: so a resumed run has the state of the run that was saved.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch.nn import functional

from zero.tensors import pieces, shaped, to_bfloat16

BLOCK = 256  # elements that share a scale with `Int8`


class Codec(Protocol):
    """Encodes flat float32 tensors."""

    def encode(self, values: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the encoded elements of `values`, (numel,) float32.

        `noise`: random numbers for the rounding, int32 from 0 to 65535; they are repeated if there are fewer than elements.
        """
        ...

    def decode(self, encoded: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the elements, (numel,) float32."""
        ...

    def nbytes(self, numel: int) -> int:
        """Return the bytes of `numel` encoded elements."""
        ...


class BFloat16:
    """The upper 16 bits of float32, with stochastic rounding.

    A second moment changes by a factor of 1 - beta2 per step. If this is less than half the distance of two bfloat16 numbers,
    as with beta2 = 0.999, rounding to the nearest one would never change it. Stochastic rounding is right on average.
    """

    def encode(self, values: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        encoded = torch.empty_like(values, dtype=torch.bfloat16)
        to_bfloat16(values, noise, encoded)
        return (encoded,)

    def decode(self, encoded: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return encoded[0].float()

    def nbytes(self, numel: int) -> int:
        return 2 * numel


class Int8:
    """One byte per element: its ratio to the largest element of its block of 256, on a scale that is finer for large ratios.

    The scale is the dynamic map of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
    (https://arxiv.org/abs/2110.02861), with two changes. It includes the largest ratio exactly, with both signs, so that a
    block that is encoded again does not shrink. And what is not zero does not become zero: an element whose second moment is
    lost, but not its first, would be updated by too much. Blocks without negative elements use all codes for positive ones.

    It rounds to the nearest code. A change by less than half the distance to the next code is lost, so a second moment may
    neither decay nor grow as it should (docs/sharding.md has figures).
    """

    def encode(self, values: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = torch.empty_like(values, dtype=torch.uint8)
        scales = values.new_empty(-(-values.numel() // BLOCK))  # negative if the block has negative elements
        nearest = _nearest_codes(values.device)
        first = 0
        for coded, part in pieces(codes, values):
            blocks = functional.pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
            lowest, highest = blocks.aminmax(dim=1)
            scale = torch.maximum(highest, -lowest)
            ratios = (blocks / scale[:, None]).to(torch.bfloat16).view(torch.int16)
            bits = (ratios.to(torch.int32) & 0xFFFF) + (lowest < 0)[:, None] * 2**16
            coded.copy_(nearest.index_select(0, bits.view(-1)[: part.numel()]))
            scales[first : first + scale.numel()] = torch.where(lowest < 0, -scale, scale)
            first += scale.numel()
        return codes, scales

    def decode(self, encoded: tuple[torch.Tensor, ...]) -> torch.Tensor:
        codes, scales = encoded
        values = torch.empty_like(codes, dtype=torch.float32)
        ratios = _ratios(codes.device)
        first = 0
        for part, coded in pieces(values, codes):
            blocks = functional.pad(coded, (0, -part.numel() % BLOCK)).view(-1, BLOCK).to(torch.int32)
            scale = scales[first : first + blocks.shape[0], None]
            blocks += (scale < 0) * 2**8
            decoded = ratios.index_select(0, blocks.view(-1)).view(-1, BLOCK)
            decoded *= scale.abs()
            part.copy_(decoded.view(-1)[: part.numel()])
            first += blocks.shape[0]
        return values

    def nbytes(self, numel: int) -> int:
        return numel + 4 * -(-numel // BLOCK)


# by `state_dtype`; None: the state stays as it is
STATE_CODECS: dict[str, Codec | None] = {"float32": None, "bfloat16": BFloat16(), "int8": Int8()}


def codec_of(state_dtype: str) -> Codec | None:
    """Return the codec of a `state_dtype`. Raise ValueError if there is none of this name."""
    if state_dtype not in STATE_CODECS:
        raise ValueError(f"state_dtype={state_dtype!r} is not one of {', '.join(STATE_CODECS)}")
    return STATE_CODECS[state_dtype]


@dataclass(frozen=True)
class Encoded:
    """An entry of the state of a slice at rest."""

    codec: Codec
    parts: tuple[torch.Tensor, ...]

    def decode(self, local: torch.Tensor) -> torch.Tensor:
        """Return the entry in float32, in the shape of `local`, the slice."""
        return shaped(self.codec.decode(self.parts), local)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def encodable(local: torch.Tensor, state: dict[str, Any], names: Collection[str] | None) -> list[str]:
    """Return the entries of a slice's state that have a float32 number per element; with `names`, only those among them."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == local.shape and value.dtype == torch.float32
        if names is None or name in names
    ]


def decoded(local: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a slice with its encoded entries in float32."""
    return {key: value.decode(local) if isinstance(value, Encoded) else value for key, value in state.items()}


def rounding_noise(steps: torch.Tensor, numel: int) -> torch.Tensor:
    """Return at most `numel` random numbers for `Codec.encode`: a hash of `steps`, which is one number.

    It needs no wait for a GPU, and each element gets a new number in each step. Elements that lie far apart get the same one,
    because random numbers take far more time than their use.
    """
    (block,) = next(pieces(torch.empty(numel, dtype=torch.int8, device=steps.device)))
    bits = torch.arange(block.numel(), dtype=torch.int32, device=steps.device)
    bits += steps.to(torch.int64).mul(0x9E3779B1).to(torch.int32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):  # Ellis and Wellons, "hash-prospector"
        bits ^= (bits >> shift) & (2 ** (32 - shift) - 1)
        bits *= factor
    return bits & 0xFFFF


@cache
def _ratios(device: torch.device) -> torch.Tensor:
    """Return the ratios of the codes, (512,) float32: 256 for blocks without negative elements, then 256 for others.

    From 1e-7 to 1, each power of ten has twice as many codes as the one below.
    """
    positive = [_decades(2), _decades(1)]
    tables = [torch.cat((torch.zeros(1), positive[0])), torch.cat((-positive[1].flip(0), torch.zeros(1), positive[1]))]
    return torch.cat([functional.pad(table, (0, 1), value=1.0) for table in tables]).to(device)


def _decades(first: int) -> torch.Tensor:
    """Return the positive ratios in ascending order, `first` of them between 1e-7 and 1e-6."""
    ratios = []
    for power in range(7):
        bounds = torch.linspace(0.1, 1, first * 2**power + 1, dtype=torch.float64)
        ratios.append((bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (power - 6))
    ratios[-1][-1] = 1.0
    return torch.cat(ratios).float()


@cache
def _nearest_codes(device: torch.device) -> torch.Tensor:
    """Return the code of each ratio, (2 * 65536,) uint8: by the bits of its bfloat16, without and with negative elements."""
    ratios = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    nearest = []
    for table in _ratios(torch.device("cpu")).double().view(2, -1):
        table = table[:-1]  # the last code is not used
        codes = torch.bucketize(ratios, (table[:-1] + table[1:]) / 2)
        zero = int((table == 0).nonzero())
        codes = torch.where((codes == zero) & (ratios > 0), zero + 1, codes)
        codes = torch.where((codes == zero) & (ratios < 0), zero - 1, codes)
        nearest.append(torch.where(ratios.isnan() | (ratios == 0), zero, codes))  # nan: of a block of zeros
    return torch.cat(nearest).to(torch.uint8).to(device)
