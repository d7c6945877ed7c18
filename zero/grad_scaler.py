"""A gradient scaler for float16 that also supports sharded gradients."""

from typing import Any

import torch
import torch.distributed as dist

from zero.optimizer import ShardedOptimizer


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, except that either all ranks of a ShardedOptimizer skip a step or none of them does.

    An all-reduce of one number tells all ranks about an inf or nan in any shard. Call `unscale_` and `step` on all ranks. Both
    raise ValueError if gradients are float16 and there is no ShardedDataParallel, which has float32 sums.
    """

    def skip_if(self, optimizer: torch.optim.Optimizer, flag: torch.Tensor) -> None:
        """Skip the update, if `flag` is 1, without a wait for its value. Call it between `unscale_` and `step`."""
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.copy_(torch.maximum(found, flag.to(found.device)))

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, *args)
        optimizer.follow_moves()
        is_whole, (_, found_inf, _) = optimizer.source.is_whole, args
        if is_whole and optimizer.placed.plan.param_dtype == torch.float16:
            raise ValueError("only ShardedDataParallel unscales float16 gradients, as float32 sums; wrap the model in it")
        optimizer.collect_gradients()
        scaled = optimizer if is_whole else optimizer.inner
        for found in super()._unscale_grads_(scaled, *args).values():  # empty if this rank owns nothing
            found_inf += found.to(found_inf.device)
        optimizer.comm.wait("all-reduce", optimizer.comm.all_reduce(found_inf, dist.ReduceOp.MAX), found_inf.device)
        return {found_inf.device: found_inf}
