"""An update that is not finite is not made; all ranks decide together."""

import math
import sys

import torch
import torch.distributed as dist

from zero import ShardedGradScaler
from zero.collectives import gather_objects
from zero.optimizer import GradientNorms
from zero.partition import partition

_REMEDY = "try a lower --learning_rate, --grad_clip=1.0, more --warmup_iters or --dtype=float32"


class Guard:
    """Has an update skipped if the loss of any rank or the gradient norm is not finite. Needs to be made on all ranks.

    `check` leaves the decision on the device, where the fused AdamW reads it (`found_inf`, as GradScaler has it), so that a
    GPU is not waited for. `report` brings it to the host. Once `limit` updates in a row were skipped no further one is made:
    however late the host looks, the weights are those before the first of them. With float16, gradients that are not
    finite are the scaler's business; only the loss counts here.

    Args:
        model: whose parameters have the names to be told.
        limit: so many skipped updates in a row end the run.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: ShardedGradScaler, limit: int) -> None:
        self.optimizer, self.scaler, self.limit = optimizer, scaler, limit
        self.failed = False  # for good, as far as the host knows; the same on all ranks
        self.in_a_row = 0  # updates skipped up to the last one that the host knows of
        self._part = partition(optimizer)
        self._names = {param: name for name, param in model.named_parameters()}
        device = next(model.parameters()).device
        self._zero = torch.zeros((), device=device)
        self._in_a_row = self._skipped = self._zero  # updates
        # of the last one that was the first of its row: loss, norm of all gradients, norms of this rank's, (locals + 2,)
        self._first = torch.zeros(len(self._part.locals) + 2, device=device)
        self._reported = 0  # of the skipped ones

    def check(self, loss: torch.Tensor, norms: GradientNorms) -> None:
        """Before `scaler.step`: decide whether it is to change anything. Needs to be called on all ranks.

        Args:
            loss: of this rank, a scalar.
            norms: of the gradients.
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
        elif skip:  # without that kernel, as on mps, the host has to know
            self.optimizer.zero_grad(set_to_none=True)

    def report(self, iteration: int) -> None:
        """After the step of `iteration`: report. Needs to be called on all ranks."""
        self.in_a_row, skipped = (int(count) for count in torch.stack((self._in_a_row, self._skipped)).tolist())
        if skipped == self._reported:
            return
        news, self._reported, self.failed = skipped - self._reported, skipped, self.in_a_row >= self.limit
        reason = self._reason()
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        if not self.failed:
            updates = "1 more update was" if news == 1 else f"{news} more updates were"
            row = f"{self.in_a_row} in a row so far"
            print(f"WARNING: by iteration {iteration}, {updates} skipped ({row}): {reason}", flush=True)
            return
        first = iteration - self.in_a_row + 1
        made = "no update was made with that" if self.limit == 1 else f"{self.in_a_row} updates in a row were skipped"
        sys.stdout.flush()
        print(
            f"the run ends at iteration {iteration}, not finite since iteration {first}: {reason}; {made}; {_REMEDY}",
            file=sys.stderr,
            flush=True,
        )

    def _reason(self) -> str:
        """What is not finite, and where. Needs to be called on all ranks."""
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
        """Place in the model and name of the first parameter of this rank that, or whose gradient, is not finite."""
        params, places = self._part.params, {name: place for place, name in enumerate(self._names.values())}
        bad = []
        for piece, local, norm in zip(self._part.plan.slices(self._part.rank), self._part.locals, norms, strict=True):
            name = self._names[params[piece.param]]
            if not local.detach().isfinite().all():
                bad.append((places[name], name))
            elif not math.isfinite(norm):
                bad.append((places[name], f"the gradient of {name}"))
        return min(bad, default=None)
