"""Collectives on flat buckets, each the fast way of its backend."""

import torch
import torch.distributed as dist

# torch 2.13 renamed all_gather_into_tensor; torch 2.11 has only the old name
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather_shards(bucket: torch.Tensor, group: dist.ProcessGroup | None) -> list[dist.Work]:
    """Start filling `bucket` with every rank's own shard, in place. Needs to be called on all ranks, in the same order.

    Gloo's native all-gather takes more than three times as long as one broadcast per shard (448 ms against 134 ms for
    124M float32 elements on 2 ranks), so there each owner broadcasts its shard.

    Args:
        bucket: (world_size * shard_numel,), contiguous; this rank's shard holds what the others are to receive.

    Returns:
        What must be waited for before any other rank's shard is read.
    """
    shards = bucket.chunk(dist.get_world_size(group))  # each (shard_numel,)
    if dist.get_backend(group) == "gloo":
        return [dist.broadcast(shard, group_src=rank, group=group, async_op=True) for rank, shard in enumerate(shards)]
    return [_all_gather_single(bucket, shards[dist.get_rank(group)], group=group, async_op=True)]
