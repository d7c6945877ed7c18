"""What reads or writes the weights of a model in training without calling it, in the ways of training scripts."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from blocks import now
from torch import nn


class Reader:
    """Made once, before the first step. What it has `found` is the same whatever the optimizer is.

    With `by_reference` it reads, outside of forward, through references that it has taken once. That is what the rule of
    overlapped all-gathers is about: `optimizer.synchronize()` comes first.
    """

    by_reference = False

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.found: list[torch.Tensor] = []

    def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Called between forward and backward. `x` is the input. Returns the loss for backward."""
        return loss

    def after_step(self) -> None:
        """Called right after each step."""

    def stop(self) -> None:
        """Called after the last step."""


def reads(read: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> type[Reader]:
    """Parameters that are looked up anew after each step."""

    class Looks(Reader):
        def after_step(self) -> None:
            self.found += [tensor.detach().clone() for tensor in read(self.model, self.optimizer)]

    return Looks


def holds(take: Callable[[nn.Module], Callable[[], Any]]) -> type[Reader]:
    """Parameters that have been looked up once, in some holder, which `take` returns as a function that opens it."""

    class Holds(Reader):
        by_reference = True

        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(model, optimizer)
            self.open = take(model)

        def after_step(self) -> None:
            self.found += [tensor.detach().clone() for tensor in self.open()]

    return Holds


def in_a_thread(read: type[Reader]) -> type[Reader]:
    """The same in another thread, which ends before training goes on."""

    class InAThread(read):  # type: ignore[misc, valid-type]
        def after_step(self) -> None:
            thread = threading.Thread(target=super().after_step)
            thread.start()
            thread.join()

    return InAThread


class Average(Reader):
    """A moving average over a list of parameters that was made once."""

    by_reference = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.params = list(model.parameters())
        self.found = [param.detach().clone() for param in self.params]

    def after_step(self) -> None:
        for mean, param in zip(self.found, self.params, strict=True):
            mean.lerp_(param.detach(), 0.5)


class Clamp(Reader):
    """Clips the weights of a list, as for the critic of a Wasserstein GAN."""

    by_reference = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.params = list(model.parameters())

    def after_step(self) -> None:
        for param in self.params:
            param.data.clamp_(-0.3, 0.3)


class Watch(Reader):
    """A thread that reads all weights again and again while the model trains."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer)
        self.is_done = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def read(self) -> None:
        for param in self.model.parameters():
            param.detach().clone()

    def watch(self) -> None:
        try:
            while not self.is_done.wait(0.001):
                self.read()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.is_done.set()
        self.thread.join()
        if self.error is not None:
            raise self.error


class WatchAList(Watch):
    by_reference = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.params = list(model.parameters())
        super().__init__(model, optimizer)

    def read(self) -> None:
        for param in self.params:
            param.detach().clone()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


class Saliency(Reader):
    """The gradient of the loss with respect to the input, on one rank."""

    def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if now.rank == 1:
            self.found += torch.autograd.grad(loss, x, retain_graph=True)
        return loss


class SaliencyByBackward(Reader):
    """The same by a call of backward that accumulates into the input only."""

    def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if now.rank == 1:
            torch.autograd.backward(loss, inputs=[x], retain_graph=True)
            self.found.append(x.grad.clone())
        return loss


class LoggedPenalty(Reader):
    """The squared gradients of the parameters, which one rank logs."""

    def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if now.rank == 0:
            each = torch.autograd.grad(loss, trainable(self.model), retain_graph=True, allow_unused=True)
            self.found.append(sum(gradient.double().square().sum() for gradient in each if gradient is not None))
        return loss


class LoggedPenaltyOfPenalty(Reader):
    """The same on all ranks, with a graph that nobody goes through."""

    def before_backward(self, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        self.found.append(gradient.square().sum().detach())
        return loss


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
    "parameters in a thread": in_a_thread(reads(lambda model, _: model.parameters())),
    "list": holds(once(lambda model: list(model.parameters()))),
    "named list": holds(once(lambda model: dict(model.named_parameters()).values())),
    "closure": holds(closure),
    "old state dict": holds(once(lambda model: model.state_dict().values())),
    "detached aliases": holds(once(lambda model: [param.detach() for param in model.parameters()])),
    "rows": holds(once(lambda model: [param.data[1:] for param in model.parameters() if param.dim() == 2])),
    "another module": holds(twin),
    "list in a thread": in_a_thread(holds(once(lambda model: list(model.parameters())))),
    "average over a list": Average,
    "clamp a list": Clamp,
    "watching thread": Watch,
    "thread that watches a list": WatchAList,
    "saliency on one rank": Saliency,
    "saliency by backward on one rank": SaliencyByBackward,
    "logged penalty on one rank": LoggedPenalty,
    "logged penalty with a graph": LoggedPenaltyOfPenalty,
    "decay of a list": Decay,
}
OF_GRADIENTS = {name for name, reader in READERS.items() if reader.before_backward is not Reader.before_backward} - {
    "decay of a list"
}  # call autograd.grad, which reentrant checkpoints do not admit
