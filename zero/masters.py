"""The owned elements of a bucket in float32, where the parameters have lower precision: kept, or weight and remainder."""

import itertools
from collections.abc import Collection
from functools import cache

import torch

from zero.tensors import pieces


class Masters:
    """A copy of a shard in the dtype of the update.

    Args:
        shard: the weights, (numel,).
        dtype: of the update.
    """

    def __init__(self, shard: torch.Tensor, dtype: torch.dtype) -> None:
        self.shard = shard
        self.values = torch.zeros_like(shard, dtype=dtype)  # what the inner optimizer updates

    @property
    def nbytes(self) -> int:
        """Bytes that are held between updates, in addition to the weights."""
        return self.values.nbytes

    def load(self) -> None:
        """Make `values` ready for an update."""

    def store(self) -> None:
        """Round the updated values to the weights."""
        store_rounded(self.values, self.shard)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements in full precision: a view, or a copy."""
        return self.values[start:stop]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from `start` on, whose weights have been written already, rounded as `store` does."""
        self.values[start : start + values.numel()] = values

    def follow(self) -> torch.Tensor | None:
        """Copy weights that have been written to since the last update to the masters.

        Return a bool on the device, whether there are some but they cannot be found, or None.
        """
        for master, shard in pieces(self.values, self.shard):
            if shard.device.type == "cpu" and _is_rounded(master, shard):  # does not wait for a GPU
                continue
            store_rounded(master, rounded := torch.empty_like(shard))
            torch.where(shard == rounded, master, shard, out=master)
        return None


class Remainders:
    """What bfloat16 weights lack to be float32, 16 bits: the same values as `Masters`, in half the bytes.

    A weight is its master rounded to the nearest number, or away from zero if two are equally near: `(bits + 0x8000) >> 16`.
    The remainder then fits into 16 bits with a sign, while rounding to the nearest even number would need one more value.
    Megatron-LM does the same (store_param_remainders).

    A weight that somebody else writes to has lost its master. The remainder does not show that, but a checksum does, though not
    which weight it is: if another one is then written as it should be, all of them have to be, see `before_write`.
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self.shard = shard
        self.remainder = torch.zeros_like(shard, dtype=torch.int16)
        self.values = self._placeholder()
        self.checksum = self._checksum()
        self.unknown: set[int] = set()  # first elements of the slices that may have lost masters, as far as `write` knows

    @property
    def nbytes(self) -> int:
        return self.remainder.nbytes

    def before_write(self, slices: Collection[int]) -> None:
        """Look for lost masters before weights are overwritten. `slices`: the first elements of all slices of the shard."""
        if self._differs():
            self.unknown = set(slices)

    def load(self) -> None:
        self.values = self.read(0, self.shard.numel())

    def store(self) -> None:
        self.write(0, self.values)
        self.values = self._placeholder()

    def read(self, start: int, stop: int) -> torch.Tensor:
        values = self.shard.new_empty(stop - start, dtype=torch.float32)
        for value, weight, remainder in pieces(values, self.shard[start:stop], self.remainder[start:stop]):
            value.copy_(weight)  # these are its upper 16 bits
            value.view(torch.int32).add_(remainder)
        return values

    def write(self, start: int, values: torch.Tensor) -> None:
        stop = start + values.numel()
        for value, weight, remainder in pieces(values, self.shard[start:stop], self.remainder[start:stop]):
            store_rounded(value, weight)
            remainder.copy_(value.view(torch.int32))  # the lower 16 bits
        self.checksum = self._checksum()

    def follow(self) -> torch.Tensor | None:
        return torch.ones_like(self.checksum[0], dtype=torch.bool) if self.unknown else self._differs()

    def _differs(self) -> torch.Tensor:
        return (self._checksum() != self.checksum).any()

    def _placeholder(self) -> torch.Tensor:
        """Return one element that is shown as all of them: between updates, slices have shapes and a dtype but no values."""
        return torch.zeros((), dtype=torch.float32, device=self.shard.device).expand(self.shard.shape)

    def _checksum(self) -> torch.Tensor:
        """Return the sum of each row of pairs of weights, (rows,) int64, with a random factor for each pair of a row.

        With regular factors, or modulo 2**32, changes that people make would cancel out, such as the signs of a column.
        """
        pairs, factors = self.shard.view(torch.int32), _factors(self.shard.device)
        rows, length = pairs.numel() // len(factors), len(factors)
        # not a list: its tensors would lie between the large ones in memory, and these would cost page faults on a CPU
        sums = torch.empty(rows + 1, dtype=torch.int64, device=pairs.device)
        whole, rest = pairs[: rows * length].view(rows, length), pairs[rows * length :].view(1, -1)
        for part, total in itertools.chain(pieces(whole, sums[:-1]), pieces(rest, sums[-1:])):
            torch.sum(part.long().mul_(factors[: part.shape[1]]), 1, out=total)
        return sums


@cache
def _factors(device: torch.device) -> torch.Tensor:
    """Return the factors of a checksum, (1024,) int64 from 0 to 2**31, the same on every device."""
    return torch.randint(2**31, (1024,), generator=torch.Generator().manual_seed(0), device="cpu").to(device)


def store_rounded(values: torch.Tensor, place: torch.Tensor) -> None:
    """Write values to a place of lower precision, both flat: as float32, then rounded; bfloat16 half up, see `Remainders`.

    This is the only rounding of weights, so that the owner of a slice and the other ranks get the same bits from any dtype.
    """
    if place.dtype == torch.bfloat16 and values.dtype != torch.bfloat16:
        for target, part in pieces(place, values):
            bits = part.float().view(torch.int32)
            above_half = (bits >> 15).bitwise_and_(1).bitwise_or_(bits)  # PyTorch rounds half to even, and this is more
            target.copy_(above_half.view(torch.float32))
    else:
        place.copy_(values.float() if values.dtype == torch.float64 else values)


def _is_rounded(values: torch.Tensor, place: torch.Tensor) -> bool:
    """Return whether `place` has what `store_rounded` would write there. With bfloat16, the difference of the bits says it."""
    if (values.dtype, place.dtype) == (torch.float32, torch.bfloat16):
        remainder = values.view(torch.int32) - place.float().view(torch.int32)
        return bool(remainder.amin() >= -(2**15)) and bool(remainder.amax() < 2**15)
    store_rounded(values, rounded := torch.empty_like(place))
    return torch.equal(rounded, place)
