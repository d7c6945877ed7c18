"""Optimizers that are not torch's and treat every element independently."""

import torch


class Plain(torch.optim.Optimizer):
    """Gradient descent; the others change `update`."""

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def update(self, param, group):
        """What is taken from the parameter."""
        return group["lr"] * (param.grad + group["weight_decay"] * param)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(self.update(param, group))


class CountsInGroups(Plain):
    """Its rate falls with the steps, which it counts in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()

    def update(self, param, group):
        return super().update(param, group) / group["count"]


class ReplacesGradients(Plain):
    """A decay that is not added in place."""

    def update(self, param, group):
        param.grad = param.grad + 0.1 * param
        return super().update(param, group)


class SignMomentum(Plain):
    """Lion, with a sign that is zero at zero: a gradient of rounding must not become a step of full size."""

    rounded_state = ("mean",)

    def update(self, param, group):
        mean = self.state[param].setdefault("mean", torch.zeros_like(param))
        direction = 0.9 * mean + 0.1 * param.grad
        mean.lerp_(param.grad, 0.01)
        return group["lr"] * (direction / (direction.abs() + 1e-4) + group["weight_decay"] * param)


class OwnTable(Plain):
    """Optimistic gradient descent: a dict of its own has the gradient of the last step, not a copy, by parameter."""

    def __init__(self, params, **kwargs):
        super().__init__(params, **kwargs)
        self.last = {}

    def update(self, param, group):
        last, self.last[param] = self.last.get(param, param.grad), param.grad
        return group["lr"] * (2 * param.grad - last)


class AdamWithWarmup(torch.optim.AdamW):
    """A subclass of torch's own that counts."""

    calls = 0
    rounded_state = ("exp_avg", "exp_avg_sq")

    def step(self, closure=None):
        self.calls += 1
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = group["lr"] * min(1.0, self.calls / 3)
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


ELEMENTWISE = (CountsInGroups, ReplacesGradients, SignMomentum, OwnTable, AdamWithWarmup)
