"""Muon for matrices and AdamW for all other parameters, as one optimizer. Sharded, each matrix is whole at one point only."""

import math
from typing import Any

import torch

from zero.muon.matrices import stacked

MOMENTUM, NS_STEPS = 0.95, 5  # defaults
NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, see https://kellerjordan.github.io/posts/muon/


class Muon(torch.optim.AdamW):
    """Muon for the groups with "matrices", AdamW for the others. What it computes is what torch.optim.Muon and AdamW do.

    The update of a matrix is its momentum, orthogonalized by a Newton-Schulz iteration. As `adjust_lr_fn="match_rms_adamw"` of
    torch.optim.Muon does, the learning rate is multiplied by 0.2 * sqrt(max(rows, columns)): an element then changes about as
    much as with AdamW, and both can have the same learning rate and weight decay (https://arxiv.org/abs/2502.16982).

    The update of a matrix has three parts, of which only the second one needs it whole. A ShardedOptimizer calls `before` and
    `after` for slices, `whole` on the rank that owns the matrix, and `step` for the other groups.

    Args:
        params: parameter groups. A group with the entry "matrices": 1 has parameters with two dimensions. With k > 1, each of
            them consists of k matrices of equal size, one below the other, such as query, key and value. A group can have its
            own momentum, nesterov and ns_steps.
        momentum: factor of the momentum, a moving average of the gradients.
        nesterov: use the momentum that the next step would have with the same gradient.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: in which they compute, and in which matrices are sent to the rank that owns them: 'bfloat16' or 'float32'.
        **adamw: arguments of torch.optim.AdamW. The learning rate and the weight decay are also those of the matrices.

    Raises:
        ValueError: if an argument is invalid; from `step`, and from the constructor of a ShardedOptimizer, if a parameter of a
            group with "matrices" does not consist of matrices.

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
        with_matrices = [group for group in (group, *self.param_groups) if group["matrices"]]
        if len({group["ns_dtype"] for group in with_matrices}) > 1:
            raise ValueError("the groups of matrices have different ns_dtype; use one for all")
        super().add_param_group(param_group)

    @property
    def matrix_dtype(self) -> torch.dtype:
        """The dtype in which matrices are sent and transformed: ns_dtype."""
        name = next((group["ns_dtype"] for group in self.param_groups if group["matrices"]), "bfloat16")
        return NS_DTYPES[name]

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
        skipped = is_skipped(self)
        for group, params in of_matrices:
            for param in params:
                if param.grad is not None and not skipped:
                    count, shape = group["matrices"], stacked(param.shape, group["matrices"])
                    whole = [self.whole(matrix, group) for matrix in self.before(param, group).chunk(count)]
                    self.after(param, group, torch.cat(whole), shape)
            group["params"] = []
        try:
            own_step(torch.optim.AdamW)(self)
        finally:
            for group, params in of_matrices:
                group["params"] = params
        return loss

    def before(self, local: torch.nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
        """Update the state of a slice that has a gradient; return what its matrix consists of, in the shape of `local`."""
        assert local.grad is not None
        gradient = -local.grad if group["maximize"] else local.grad
        state = self.state[local]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(local)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return update.to(self.matrix_dtype)

    def whole(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        """Return the direction of the update of a matrix, (rows, columns), in the same shape and dtype."""
        return orthogonalized(matrix, group["ns_steps"])

    def after(self, local: torch.nn.Parameter, group: dict[str, Any], direction: torch.Tensor, shape: tuple[int, int]) -> None:
        """Update the elements of a slice, given their direction. `shape`: that of the whole matrix."""
        lr = float(group["lr"])
        local.mul_(1 - lr * group["weight_decay"])
        local.add_(direction, alpha=-lr * 0.2 * math.sqrt(max(shape)))


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return U V^T of a matrix U S V^T, with singular values of about 0.5 to 1.5 in place of 1, (rows, columns).

    Source: `torch.optim._muon._zeropower_via_newtonschulz`, which always computes in bfloat16.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)  # the largest singular value is then at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def is_skipped(optimizer: Any) -> bool:
    """Return whether `found_inf`, a flag of AdamW's fused kernel, says that a step changes nothing. Waits for a GPU."""
    return bool(getattr(optimizer, "found_inf", None))


def own_step(cls: type[torch.optim.Optimizer]) -> Any:
    """Return the `step` of a class without the hooks that torch runs around every step of an optimizer."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step
