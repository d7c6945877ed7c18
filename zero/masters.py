"""The owned elements of a bucket in float32, where the parameters have lower precision: a copy, or weight and remainder."""

import torch

from zero.tensors import pieces


class Masters:
    """A copy of a shard in the dtype of the update.

    Args:
        shard: the weights, (numel,).
        dtype: of the update.
        half_even: see `store_rounded`.
    """

    def __init__(self, shard: torch.Tensor, dtype: torch.dtype, half_even: bool = False) -> None:
        self.shard, self._half_even = shard, half_even
        self.values = torch.zeros_like(shard, dtype=dtype)  # what the inner optimizer updates

    @property
    def nbytes(self) -> int:
        """Bytes that are held between updates, in addition to the weights."""
        return self.values.nbytes

    def load(self) -> None:
        """Make `values` ready for an update."""

    def store(self) -> None:
        """Round the updated values to the weights."""
        store_rounded(self.values, self.shard, self._half_even)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements in full precision: a view, or a copy."""
        return self.values[start:stop]

    def write(self, start: int, values: torch.Tensor) -> None:
        """Overwrite elements from `start` on. Their weights are written already, rounded as `store` does."""
        self.values[start : start + values.numel()] = values


class Remainders:
    """The 16 bits that bfloat16 weights lack to be float32: the same values as `Masters`, in half the bytes.

    A weight is its master rounded to the nearest number, or away from zero if two are equally near: `(bits + 0x8000) >> 16`.
    The remainder then fits into 16 bits with a sign. Megatron-LM does the same (store_param_remainders).
    """

    def __init__(self, shard: torch.Tensor) -> None:
        self.shard = shard
        self.remainder = torch.zeros_like(shard, dtype=torch.int16)
        self.values = self._placeholder()

    @property
    def nbytes(self) -> int:
        return self.remainder.nbytes

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

    def _placeholder(self) -> torch.Tensor:
        """Return one element that is shown as all of them: between updates, slices have shapes and a dtype but no values."""
        return torch.zeros((), dtype=torch.float32, device=self.shard.device).expand(self.shard.shape)


def store_rounded(values: torch.Tensor, place: torch.Tensor, half_even: bool = False) -> None:
    """Round flat values, as float32, to a flat place of lower precision; bfloat16: half away from zero, see `Remainders`.

    `half_even`: half to even, as autocast does.

    This is the only rounding of weights, so that the owner of a slice and the other ranks get the same bits from any dtype.
    """
    if place.dtype == torch.bfloat16 and values.dtype != torch.bfloat16 and not half_even:
        for target, part in pieces(place, values):
            bits = part.float().view(torch.int32)
            above_half = (bits >> 15).bitwise_and_(1).bitwise_or_(bits)  # make half more: PyTorch rounds half to even
            target.copy_(above_half.view(torch.float32))
    else:
        place.copy_(values.float() if values.dtype == torch.float64 else values)
