"""Muon for matrices and AdamW for all other parameters, as one optimizer. Sharded, each matrix is whole at one point only."""

import math
from typing import Any

import torch

from zero.muon.matrices import stacked
from zero.stopwatch import without_hooks

MOMENTUM, NS_STEPS = 0.95, 5  # defaults
NS_DTYPES = ("bfloat16", "float32")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, see https://kellerjordan.github.io/posts/muon/


class Muon(torch.optim.AdamW):
    """Muon for the groups with "matrices", AdamW for the others. What it computes is what torch.optim.Muon and AdamW do.

    The update of a matrix is its momentum, orthogonalized by a Newton-Schulz iteration. As `adjust_lr_fn="match_rms_adamw"` of
    torch.optim.Muon does, the learning rate is multiplied by 0.2 * sqrt(max(rows, columns)): an element then changes about as
    much as with AdamW, and both can have the same learning rate and weight decay (https://arxiv.org/abs/2502.16982).

    Only the second of its three parts needs a matrix whole. A ShardedOptimizer calls `update_momenta` and `add_directions` for
    lists of slices, `orthogonalized` for matrices of one shape on the rank that owns them, and `step` for the other groups.

    Args:
        params: parameter groups. A group with the entry "matrices": 1 has parameters with two dimensions. With k > 1, each of
            them consists of k matrices of equal size, one below the other, such as query, key and value. A group can have its
            own momentum, nesterov and ns_steps.
        momentum: factor of the momentum, a moving average of the gradients.
        nesterov: use the momentum that the next step would have with the same gradient.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: in which they compute, and in which matrices are sent to the rank that owns them: 'bfloat16' or 'float32',
            whose products a GPU rounds to TF32 if `torch.backends.cuda.matmul.allow_tf32`.
        **adamw: arguments of torch.optim.AdamW. The learning rate and the weight decay are also those of the matrices.

    Raises ValueError if an argument is invalid; from `step`, and from the constructor of a ShardedOptimizer, if a parameter of
    a group with "matrices" does not consist of matrices.

    Source: Keller Jordan et al. (https://kellerjordan.github.io/posts/muon/) and torch.optim.Muon.
    """

    rounded_state = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")

    def __init__(
        self,
        params: Any,
        *,
        momentum: float = MOMENTUM,
        nesterov: bool = True,
        ns_steps: int = NS_STEPS,
        ns_dtype: str = "bfloat16",
        **adamw: Any,
    ) -> None:
        own = {"matrices": 0, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "ns_dtype": ns_dtype}
        self._own_defaults: dict[str, Any] = own
        super().__init__(params, **adamw)
        # torch.amp.GradScaler would leave it to `step` to unscale the gradients and to skip: only AdamW's fused kernel can
        self._step_supports_amp_scaling = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.defaults |= vars(self).pop("_own_defaults", {})  # the first call is from AdamW's constructor
        group = {**self.defaults, **param_group}
        if not 0.0 <= group["momentum"] < 1.0:
            raise ValueError(f"momentum={group['momentum']} must be at least 0 and less than 1")
        if group["ns_steps"] < 1:
            raise ValueError(f"ns_steps={group['ns_steps']} must be positive")
        if group["ns_dtype"] not in NS_DTYPES:
            raise ValueError(f"ns_dtype={group['ns_dtype']!r} is not one of {', '.join(NS_DTYPES)}")
        if not group["matrices"] and (group.get("use_muon") or "muon" in (str(value).lower() for value in group.values())):
            raise ValueError("zero.Muon knows a group of matrices by its entry matrices=1 only, not by use_muon or kind")
        with_matrices = [group for group in (group, *self.param_groups) if group["matrices"]]
        if len({group["ns_dtype"] for group in with_matrices}) > 1:
            raise ValueError("the groups of matrices have different ns_dtype; use one for all")
        super().add_param_group(param_group)

    @property
    def matrix_dtype(self) -> torch.dtype:
        """The dtype in which matrices are sent and transformed: ns_dtype."""
        return getattr(torch, next((group["ns_dtype"] for group in self.param_groups if group["matrices"]), "bfloat16"))

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # that of AdamW expects a `step` in the state of every parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        of_matrices = [(group, group["params"]) for group in self.param_groups if group["matrices"]]
        updated = [(param, group) for group, params in of_matrices for param in params if param.grad is not None]
        for param, group in updated if updated and not is_skipped(self) else ():
            shape = stacked(param.shape, group["matrices"])
            matrices = self.update_momenta([param], group)[0].to(self.matrix_dtype).reshape(-1, *shape)
            self.add_directions([param], group, [orthogonalized(matrices, group["ns_steps"]).reshape(param.shape)], [shape])
        try:
            for group, _ in of_matrices:
                group["params"] = []
            without_hooks(torch.optim.AdamW.step)(self)
        finally:
            for group, params in of_matrices:
                group["params"] = params
        return loss

    def update_momenta(self, locals_: list[torch.nn.Parameter], group: dict[str, Any]) -> list[torch.Tensor]:
        """Update the momenta of slices, all with a gradient. Return what is to be orthogonalized, in the slices' shapes."""
        gradients = [local.grad for local in locals_ if local.grad is not None]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))
        for local in locals_:
            if "momentum_buffer" not in self.state[local]:
                self.state[local]["momentum_buffer"] = torch.zeros_like(local)
        momenta = [self.state[local]["momentum_buffer"] for local in locals_]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, momenta, group["momentum"])) if group["nesterov"] else momenta

    def add_directions(
        self,
        locals_: list[torch.nn.Parameter],
        group: dict[str, Any],
        directions: list[torch.Tensor],
        shapes: list[tuple[int, int]],
    ) -> None:
        """Update the elements of slices, given their directions. `shapes`: those of their matrices."""
        lr = float(group["lr"])
        torch._foreach_mul_(list[torch.Tensor](locals_), 1 - lr * group["weight_decay"])
        of_side: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by the longer side of their matrices
        for local, direction, shape in zip(locals_, directions, shapes, strict=True):
            of_side.setdefault(max(shape), []).append((local, direction))
        for side, pairs in of_side.items():
            torch._foreach_add_(*zip(*pairs, strict=True), alpha=-lr * 0.2 * math.sqrt(side))


def orthogonalized(matrices: torch.Tensor, steps: int) -> torch.Tensor:
    """Return U V^T of each matrix U S V^T, with singular values of about 0.5 to 1.5 in place of 1, (number, rows, columns).

    Source: `torch.optim._muon._zeropower_via_newtonschulz`, for one matrix, always in bfloat16.
    """
    a, b, c = COEFFICIENTS
    norms = torch.stack(torch._foreach_norm(list(matrices.flatten(1)))).clamp(min=1e-7)
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices) / norms[:, None, None]  # the largest singular value is then at most 1
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)  # with the bits of torch.mm, which `x @ x.mT` does not have for one matrix
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def is_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `found_inf`, a flag of AdamW's fused kernel, says that a step changes nothing. Waits for a GPU."""
    return bool(getattr(optimizer, "found_inf", None))
