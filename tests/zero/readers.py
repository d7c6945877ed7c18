"""What reads or writes the weights of a model in training without calling it, in the ways of training scripts."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from blocks import now
from torch import nn


class Reader:
    """Made once, before the first step. What it has `found` is the same whatever the optimizer is.

    With overlap, `optimizer.synchronize()` comes before `after_step` of one that `reads` parameters.
    """

    reads = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.found: list[torch.Tensor] = []

    def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Called between forward and backward. `x` is the input. Returns the loss for backward."""
        return loss

    def after_step(self) -> None:
        """Called right after each step."""


def reads(read: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> type[Reader]:
    """Parameters that are looked up anew after each step."""

    class Looks(Reader):
        reads = True

        def after_step(self) -> None:
            self.found += [tensor.detach().clone() for tensor in read(self.model, self.optimizer)]

    return Looks


def holds(take: Callable[[nn.Module], Callable[[], Any]]) -> type[Reader]:
    """Parameters that have been looked up once, in some holder, which `take` returns as a function that opens it."""

    class Holds(Reader):
        reads = True

        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(model, optimizer)
            self.open = take(model)

        def after_step(self) -> None:
            self.found += [tensor.detach().clone() for tensor in self.open()]

    return Holds


class OfAList(Reader):
    """It has made a list of the parameters once."""

    reads = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.params = list(model.parameters())


class Average(OfAList):
    """A moving average over the list."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.found = [param.detach().clone() for param in self.params]

    def after_step(self) -> None:
        for mean, param in zip(self.found, self.params, strict=True):
            mean.lerp_(param.detach(), 0.5)


class Clamp(OfAList):
    """Clips the weights of the list, as for the critic of a Wasserstein GAN."""

    def after_step(self) -> None:
        for param in self.params:
            param.data.clamp_(-0.3, 0.3)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def between(find: Callable[[nn.Module, torch.Tensor, torch.Tensor], Any], rank: int | None = None) -> type[Reader]:
    """What `find(model, loss, x)` computes between forward and backward, on one rank or on all."""

    class Finds(Reader):
        def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            if rank in (None, now.rank):
                self.found += find(self.model, loss, x)
            return loss

    return Finds


def saliency(_: nn.Module, loss: torch.Tensor, x: torch.Tensor) -> Any:
    """The gradient of the loss with respect to the input."""
    return torch.autograd.grad(loss, x, retain_graph=True)


def saliency_by_backward(_: nn.Module, loss: torch.Tensor, x: torch.Tensor) -> Any:
    """The same by a call of backward that accumulates into the input only."""
    torch.autograd.backward(loss, inputs=[x], retain_graph=True)
    return [x.grad.clone()]


def penalty(model: nn.Module, loss: torch.Tensor, _: torch.Tensor) -> Any:
    """The squared gradients of the parameters."""
    each = torch.autograd.grad(loss, trainable(model), retain_graph=True, allow_unused=True)
    return [sum(gradient.double().square().sum() for gradient in each if gradient is not None)]


def penalty_with_a_graph(_: nn.Module, loss: torch.Tensor, x: torch.Tensor) -> Any:
    """The same of the input, with a graph that nobody goes through."""
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return [gradient.square().sum().detach()]


class Decay(Reader):
    """A penalty on a list of weights, in the loss. The list was made once, so forward reads its parameters first."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.params = [param for part in model.modules() if isinstance(part, nn.Linear) for param in trainable(part)]

    def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return loss + 0.01 * sum(param.to(loss.dtype).square().sum() for param in {id(p): p for p in self.params}.values())


def twin(model: nn.Module) -> Callable[[], Any]:
    """Another module with the same parameters."""
    same = copy.deepcopy(model, {id(param): param for param in model.parameters()})
    return lambda: same.parameters()


def closure(model: nn.Module) -> Callable[[], Any]:
    weight = model.stem.weight
    return lambda: [weight]


def once(take: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Callable[[], Any]]:
    def hold(model: nn.Module) -> Callable[[], Any]:
        taken = take(model)
        return lambda: taken

    return hold


READERS: dict[str, type[Reader]] = {
    "": Reader,
    "parameters": reads(lambda model, _: model.parameters()),
    "state dict": reads(lambda model, _: model.state_dict().values()),
    "one vector": reads(lambda model, _: [torch.cat([param.detach().double().flatten() for param in model.parameters()])]),
    "by name": reads(lambda model, _: [model.get_parameter(name) for name, _ in model.named_parameters()]),
    "param_groups": reads(lambda _, optimizer: [param for group in optimizer.param_groups for param in group["params"]]),
    "list": holds(once(lambda model: list(model.parameters()))),
    "named list": holds(once(lambda model: dict(model.named_parameters()).values())),
    "closure": holds(closure),
    "old state dict": holds(once(lambda model: model.state_dict().values())),
    "another module": holds(twin),
    "average over a list": Average,
    "clamp a list": Clamp,
    "saliency on one rank": between(saliency, 1),
    "saliency by backward on one rank": between(saliency_by_backward, 1),
    "logged penalty on one rank": between(penalty, 0),
    "logged penalty with a graph": between(penalty_with_a_graph),
    "decay of a list": Decay,
}
OF_GRADIENTS = {name for name, reader in READERS.items() if reader.before_backward is not Reader.before_backward} - {
    "decay of a list"
}  # call autograd.grad, which reentrant checkpoints do not admit
