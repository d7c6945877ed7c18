"""Phase 2 of a step: the inner optimizer updates the owned slices, bucket by bucket, each one in full precision."""

from typing import Any

import torch

from zero.buckets import Bucket
from zero.codecs import Codec, decoded, encode, rounding_noise


class SliceUpdate:
    """Calls the inner optimizer. What it needs in float32 exists for the buckets of the call, the rest stays encoded.

    Args:
        inner: the optimizer of this rank's slices.
        buckets: all buckets.
        codec: of the state, see `zero.codecs`; None: the state stays as `inner` keeps it. A resumed run rounds in the same way,
            unless the class keeps no `step` (SGD).
    """

    def __init__(self, inner: torch.optim.Optimizer, buckets: list[Bucket], codec: Codec | None) -> None:
        self.inner, self.buckets, self.codec = inner, buckets, codec
        self._calls = 0  # of `_encode`
        if codec is not None:
            inner.register_load_state_dict_post_hook(self._encode_loaded)

    def __call__(self, buckets: list[Bucket], **kwargs: Any) -> None:
        """Update the slices of `buckets` that have gradients.

        Args:
            **kwargs: arguments of the inner optimizer's `step`.
        """
        groups = self.inner.param_groups
        everything = [group["params"] for group in groups]
        if len(buckets) < len(self.buckets):
            for index, group in enumerate(groups):
                group["params"] = [local for bucket in buckets for local in bucket.local_by_group.get(index, [])]
        updated = [[owned.local for owned in bucket.owned if owned.local.grad is not None] for bucket in buckets]
        loaded = []
        try:
            for bucket, locals_ in zip(buckets, updated, strict=True):
                bucket.load_masters()
                loaded.append(bucket)
                for local in locals_ if self.codec is not None else ():
                    if local in self.inner.state:
                        self.inner.state[local] = decoded(local, self.inner.state[local])
            # its own step: hooks that torch runs around every `step` run once around that of ShardedOptimizer
            step = type(self.inner).step
            (step.__wrapped__ if getattr(step, "hooked", False) else step)(self.inner, **kwargs)  # type: ignore[attr-defined]
        finally:
            for group, params in zip(groups, everything, strict=True):
                group["params"] = params
            for bucket in loaded:
                bucket.store_masters()
            for locals_ in updated:
                self._encode(locals_)

    def _encode(self, locals_: list[torch.nn.Parameter]) -> None:
        """Encode the state of slices of one bucket. The random numbers depend on their number of steps."""
        if self.codec is None or not locals_:
            return
        self._calls += 1
        states = [self.inner.state[local] for local in locals_]
        steps = [state["step"] for state in states if isinstance(state.get("step"), torch.Tensor)]
        count = torch.stack(steps).double().sum() if steps else torch.tensor(self._calls, device=locals_[0].device)
        noise = rounding_noise(count.to(locals_[0].device), max(local.numel() for local in locals_))
        encode(zip(locals_, states, strict=True), self.codec, noise)

    def _encode_loaded(self, inner: torch.optim.Optimizer) -> None:
        for bucket in self.buckets:
            self._encode([owned.local for owned in bucket.owned if owned.local in inner.state])
