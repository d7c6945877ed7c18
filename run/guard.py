"""Skips updates whose loss or gradients are not finite. All ranks decide together."""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from distributed.launch import launched
from distributed.ranks import all_reduce, print0
from zero import ShardedGradScaler
from zero.host_comm import gather_objects, is_rank_0
from zero.sharded_state import partition
from zero.stopwatch import mark

_REMEDY = "try a lower --learning_rate, --grad_clip=1.0 or more --warmup_iters"


class Figures(NamedTuple):
    """What `Guard.check` leaves of an iteration."""

    loss: float  # mean over the ranks
    loss_of_rank: float
    grad_norm: float
    consecutive: float  # number of skipped updates since the last one that was made
    skipped: float  # number of all skipped updates


class Reading:
    """Figures on their way to the host, which waits for them in `read` only. `values` has the sum of the losses first."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values.to("cpu", non_blocking=values.is_cuda)  # to pinned memory
        self._arrived = mark(values.device)

    def read(self) -> Figures:
        if isinstance(self._arrived, torch.cuda.Event):
            self._arrived.synchronize()
        total, *others = self._values.tolist()
        return Figures(total / launched().world_size, *others)


class Guard:
    """Skips an update if the loss of any rank or the gradient norm is not finite. Needs to be created on all ranks.

    `check` leaves the decision on the device, where the fused AdamW reads it (`found_inf`, the flag of GradScaler). So the
    host does not wait for a GPU (with Muon it does, to skip the exchange of matrices). `report` reads it on the host. After
    `limit` consecutive skipped updates, every later update is skipped as well. So the weights stay as they were before the
    first of these skipped updates, even if the host reads the decision much later. With float16, only the loss counts here,
    because the gradient scaler handles gradients that are not finite.

    Args:
        limit: number of consecutive skipped updates that ends the run.
        alert: called on rank 0 with a title, a text and the iteration when updates have been skipped.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scaler: ShardedGradScaler, limit: int, alert: Callable[[str, str, int], None]
    ) -> None:
        self.optimizer, self.scaler, self.limit, self.alert = optimizer, scaler, limit, alert
        self.failed = False  # whether the run must end without another checkpoint; the same on all ranks
        self.consecutive = 0  # number of consecutive skipped updates at the last `report`
        self._inner = partition(optimizer).inner
        device = optimizer.param_groups[0]["params"][0].device
        self._consecutive = self._skipped = torch.zeros((), device=device)  # number of skipped updates: consecutive ones, all
        self._first = torch.zeros(2, device=device)  # loss and gradient norm of the first skipped update of the latest series
        self._latest = torch.zeros(len(Figures._fields), device=device)
        self._reported = 0  # number of skipped updates that `report` has reported

    def check(self, loss: torch.Tensor, norm: torch.Tensor) -> None:
        """Decide whether the next `scaler.step` makes an update. Needs to be called on all ranks, before `scaler.step`.

        One all-reduce tells the decision and the loss. It starts before the all-gathers of the update. `loss` is the mean of
        this rank over the iteration, `norm` that of all gradients, both scalars.
        """
        finite = loss.isfinite() if self.scaler.is_enabled() else loss.isfinite() & norm.isfinite()
        sums = torch.stack((loss.float(), (~finite).float()))
        all_reduce(sums)
        skip = ((sums[1] > 0) | (self._consecutive >= self.limit)).float()
        own = torch.stack((loss.float(), norm.float()))
        self._first = torch.where(skip > self._consecutive, own, self._first)
        self._consecutive = (self._consecutive + 1) * skip
        self._skipped = self._skipped + skip
        self._latest = torch.stack((sums[0], *own, self._consecutive, self._skipped))
        if self.scaler.is_enabled():
            self.scaler.skip_if(self.optimizer, skip)
        elif self._inner.defaults.get("fused"):
            self._inner.found_inf = skip  # type: ignore[attr-defined]  # where torch.amp.GradScaler puts it
        elif skip:  # no fused kernel (mps): the host reads the decision
            self.optimizer.zero_grad(set_to_none=True)

    def figures(self) -> Reading:
        """Start to copy the figures of the last `check` to the host."""
        return Reading(self._latest)

    def report(self, iteration: int, reading: Reading | None = None) -> None:
        """Print the updates skipped since the last call. Needs to be called on all ranks, after the step of `iteration`.

        `reading`: figures of this iteration; None: those of the last `check`.
        """
        *_, consecutive, skips = (reading or self.figures()).read()
        self.consecutive, skipped = int(consecutive), int(skips)
        if self.failed or skipped == self._reported:
            return
        new_skips, self._reported, self.failed = skipped - self._reported, skipped, self.consecutive >= self.limit
        loss, norm = self._first.tolist()
        losses = enumerate(gather_objects(loss))
        reasons = [f"the loss of rank {rank} is {loss}" for rank, loss in losses if not math.isfinite(loss)]
        reason = ", ".join(reasons + ([] if math.isfinite(norm) else [f"the gradient norm is {norm}"]))
        if not is_rank_0():
            return
        self.alert("Loss or gradients not finite", f"at iteration {iteration}: {reason}", iteration)
        if not self.failed:
            updates = "1 more update was" if new_skips == 1 else f"{new_skips} more updates were"
            print0(f"WARNING: by iteration {iteration}, {updates} skipped ({self.consecutive} consecutive so far): {reason}")
            return
        first = iteration - self.consecutive + 1
        skipped_ones = f"{self.consecutive} consecutive updates were skipped, and " if self.limit > 1 else ""
        sys.stdout.flush()
        print(
            f"the run ends at iteration {iteration}, not finite since iteration {first}: {reason}; {skipped_ones}"
            f"the weights are those before iteration {first}; {_REMEDY}",
            file=sys.stderr,
            flush=True,
        )
