"""Skips updates whose loss or gradients are not finite. All ranks decide together."""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from distributed.ranks import print0
from zero import ShardedGradScaler
from zero.gradients import GradientNorms
from zero.host_comm import gather_objects, is_rank_0
from zero.sharded_state import partition


class Guard:
    """Skips an update if the loss of any rank or the gradient norm is not finite. Needs to be created on all ranks.

    `check` leaves the decision on the device, where the fused AdamW reads it (`found_inf`, the flag of GradScaler). So the
    host does not wait for a GPU (with Muon it does, to skip the exchange of matrices). `report` copies the decision to the
    host. After `limit` consecutive skipped updates, every later update is skipped as well. So the weights stay as they were
    before the first of these skipped updates, even if the host reads the decision much later. With float16, only the loss
    counts here, because the gradient scaler handles gradients that are not finite.

    Args:
        model: the model, which gives the parameter names for the messages.
        optimizer: the optimizer of the model.
        scaler: the gradient scaler, which is enabled for float16 only.
        limit: number of consecutive skipped updates that ends the run.
        alert: called on rank 0 with a title and a text when updates have been skipped.
        remedy: what the last message advises.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: ShardedGradScaler,
        limit: int,
        alert: Callable[[str, str], None] = lambda *_: None,
        remedy: str = "try a lower --learning_rate",
    ) -> None:
        self.optimizer, self.scaler, self.limit, self.alert, self._remedy = optimizer, scaler, limit, alert, remedy
        self.failed = False  # whether the run must end without another checkpoint; the same on all ranks
        self.in_a_row = 0  # number of consecutive skipped updates at the last `report`
        self._part = partition(optimizer)
        self._names = {param: name for name, param in model.named_parameters()}
        device = next(model.parameters()).device
        self._zero = torch.zeros((), device=device)
        self._in_a_row = self._skipped = self._zero  # number of skipped updates: consecutive ones, all
        # figures of the first skipped update of the latest series, (locals + 2,): loss, norm of all gradients, norm of the
        # gradient of each local parameter
        self._first = torch.zeros(len(self._part.locals) + 2, device=device)
        self._reported = 0  # number of skipped updates that `report` has reported

    def check(self, loss: torch.Tensor, norms: GradientNorms) -> None:
        """Decide whether the next `scaler.step` makes an update. Needs to be called on all ranks, before `scaler.step`.

        Args:
            loss: loss of this rank, a scalar.
            norms: norms of the gradients.
        """
        finite = loss.isfinite() if self.scaler.is_enabled() else loss.isfinite() & norms.total.isfinite()
        bad = (~finite).float()
        if dist.is_initialized():
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        skip = torch.maximum(bad, (self._in_a_row >= self.limit).float())
        each = [norms.each.get(local, self._zero) for local in self._part.locals]
        figures = torch.stack([figure.float() for figure in (loss, norms.total, *each)])
        self._first = torch.where(skip > self._in_a_row, figures, self._first)
        self._in_a_row = (self._in_a_row + 1) * skip
        self._skipped = self._skipped + skip
        if self.scaler.is_enabled():
            self.scaler.skip_if(self.optimizer, skip)
        elif self._part.inner.defaults.get("fused"):
            self._part.inner.found_inf = skip  # type: ignore[attr-defined]  # where torch.amp.GradScaler puts it
        elif skip:  # no fused kernel (mps): the host reads the decision
            self.optimizer.zero_grad(set_to_none=True)

    def report(self, iteration: int) -> None:
        """Print the updates skipped since the last call. Needs to be called on all ranks, after the step of `iteration`."""
        self.in_a_row, skipped = (int(count) for count in torch.stack((self._in_a_row, self._skipped)).tolist())
        if skipped == self._reported:
            return
        new_skips, self._reported, is_last = skipped - self._reported, skipped, self.in_a_row >= self.limit
        self.failed = self.failed or is_last
        reason = self._reason()
        if not is_rank_0():
            return
        self.alert("Loss or gradients not finite", f"at iteration {iteration}: {reason}")
        if not is_last:
            updates = "1 more update was" if new_skips == 1 else f"{new_skips} more updates were"
            row = f"{self.in_a_row} in a row so far"
            print0(f"WARNING: by iteration {iteration}, {updates} skipped ({row}): {reason}")
            return
        first = iteration - self.in_a_row + 1
        skipped_ones = f"{self.in_a_row} updates in a row were skipped, and " if self.limit > 1 else ""
        _print_error(
            f"the run ends at iteration {iteration}, not finite since iteration {first}: {reason}; {skipped_ones}"
            f"the weights are those before iteration {first}; {self._remedy}"
        )

    @staticmethod
    def remedy_for(config: dict[str, Any], dtype: str) -> str:
        """Return what may keep a run from diverging, of what its settings do not do already.

        Args:
            config: the settings of train.py.
            dtype: dtype of the computation.
        """
        found = [f"a lower --learning_rate than {config['learning_rate']:g}"]
        if not 0 < config["grad_clip"] <= 1:
            found.append("--grad_clip=1.0")
        if config["decay_lr"]:
            found.append(f"more --warmup_iters than {config['warmup_iters']}")
        if dtype != "float32":
            found.append("--dtype=float32" if config["param_dtype"] == "float32" else "--param_dtype=float32 --dtype=float32")
        return "try " + " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)

    def _reason(self) -> str:
        """Return a text that says which values are not finite, and where. Needs to be called on all ranks."""
        loss, norm, *each = self._first.tolist()
        found = gather_objects((loss, self._first_bad(each)))
        reasons = [f"the loss of rank {rank} is {loss}" for rank, (loss, _) in enumerate(found) if not math.isfinite(loss)]
        if not math.isfinite(norm):
            reasons.append(f"the gradient norm is {norm}")
        places = [(*place, rank) for rank, (_, place) in enumerate(found) if place is not None]
        if places:
            _, what, rank = min(places)
            reasons.append(f"first in {what} on rank {rank}")
        return ", ".join(reasons)

    def _first_bad(self, norms: list[float]) -> tuple[int, str] | None:
        """Return the first parameter of this rank that is not finite or has a gradient that is not finite.

        Args:
            norms: norm of the gradient of each local parameter.

        Returns:
            The position of the parameter in the model and its name, or None.
        """
        params, places = self._part.params, {name: place for place, name in enumerate(self._names.values())}
        bad = []
        slices = self._part.plan.slices(self._part.rank)
        for slice_, read, norm in zip(slices, self._part.readers, norms, strict=True):
            name = self._names[params[slice_.param]]
            if not read().isfinite().all():
                bad.append((places[name], name))
            elif not math.isfinite(norm):
                bad.append((places[name], f"the gradient of {name}"))
        return min(bad, default=None)


def _print_error(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
