"""A gradient scaler for float16 that looks at sharded gradients, too."""

from typing import Any

import torch
import torch.distributed as dist

from zero.optimizer import ShardedOptimizer


class ShardedGradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, except that the ranks of a ShardedOptimizer skip a step all together or not at all.

    Each of them sees its own shards only, so an inf or nan in one is made known to all by an all-reduce of one number.
    (`torch.distributed.fsdp.sharded_grad_scaler` reads the gradients of the parameters themselves, which are gone here.)
    `unscale_` and `step` need to be called on all ranks. Any other optimizer is treated as ever.
    """

    def skip_if(self, optimizer: torch.optim.Optimizer, flag: torch.Tensor) -> None:
        """Between `unscale_` and `step`: if `flag` is 1, skip the update as if gradients were not finite; no wait for it."""
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.copy_(torch.maximum(found, flag.to(found.device)))

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any) -> dict[torch.device, torch.Tensor]:
        if not isinstance(optimizer, ShardedOptimizer):
            return super()._unscale_grads_(optimizer, *args)
        optimizer.collect_gradients()
        _, found_inf, _ = args
        for found in super()._unscale_grads_(optimizer.inner, *args).values():  # none where this rank owns nothing
            found_inf += found.to(found_inf.device)
        works = optimizer.comm.all_reduce(found_inf, dist.ReduceOp.MAX)
        optimizer.comm.wait("found_inf", works, found_inf.device)
        return {found_inf.device: found_inf}
