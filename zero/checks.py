"""What this package refuses, with the reason and the remedy: what it cannot divide, move or follow."""

import copy
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import nn

from zero.buckets import Placement
from zero.muon import Muon
from zero.stopwatch import without_hooks
from zero.tensors import is_dense, may_overlap, memory_span, name_of

SPARSE = "sparse gradients cannot be laid flat; use nn.Embedding(sparse=False)"
# what each class of torch.optim keeps for a parameter: always, and with some hyperparameters or shapes
ENTRIES: dict[type, tuple[set[str], set[str]]] = {
    torch.optim.Adadelta: ({"step", "square_avg", "acc_delta"}, set()),
    torch.optim.Adagrad: ({"step", "sum"}, set()),
    **dict.fromkeys((torch.optim.Adam, torch.optim.AdamW), ({"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"})),
    torch.optim.Adamax: ({"step", "exp_avg", "exp_inf"}, set()),
    torch.optim.ASGD: ({"step", "eta", "mu", "ax"}, set()),
    torch.optim.Muon: ({"momentum_buffer"}, set()),
    torch.optim.NAdam: ({"step", "mu_product", "exp_avg", "exp_avg_sq"}, set()),
    torch.optim.RAdam: ({"step", "exp_avg", "exp_avg_sq"}, set()),
    torch.optim.RMSprop: ({"step", "square_avg"}, {"momentum_buffer", "grad_avg"}),
    torch.optim.Rprop: ({"step", "prev", "step_size"}, set()),
    torch.optim.SGD: (set(), {"momentum_buffer"}),
}
# of these, the classes that treat every element independently, and keep all their counters in the state of a parameter
_ELEMENTWISE = ENTRIES.keys() - {torch.optim.Muon}
KNOWN = _ELEMENTWISE | {Muon}
# the state of these must not be rounded between updates. That of the others is means of gradients and of squares
_EXACT = (torch.optim.Adagrad, torch.optim.ASGD, torch.optim.Rprop)
_USE_WHOLE = "use ZeroRedundancyOptimizer (experimental), which keeps each parameter whole"
_NEEDS_WHOLE = f"it looks at the shape of a parameter; {_USE_WHOLE}"
_UNSUPPORTED = {
    torch.optim.Adafactor: _NEEDS_WHOLE,
    torch.optim.Muon: f"{_NEEDS_WHOLE}, or zero.Muon",
    torch.optim.LBFGS: "it looks at all parameters together, several times per step",
    torch.optim.SparseAdam: "sparse gradients cannot be laid flat",
}


def check_class(optimizer_cls: Any, optimizer_class: Any, elementwise: bool) -> type[torch.optim.Optimizer]:
    """Return the one of the two arguments that is given. Raise ValueError if the state of this class cannot be divided."""
    if optimizer_cls is not None and optimizer_class is not None:
        raise ValueError("optimizer_cls and optimizer_class are two names of one argument; give one of them")
    if not isinstance(optimizer_cls := optimizer_cls or optimizer_class, type):
        raise ValueError(f"optimizer_cls={optimizer_cls!r} must be a class, for example torch.optim.AdamW")
    for refused, reason in _UNSUPPORTED.items():
        if issubclass(optimizer_cls, refused):
            raise ValueError(f"{optimizer_cls.__name__} cannot be divided among ranks: {reason}")
    if optimizer_cls not in KNOWN and not elementwise:
        raise ValueError(
            f"{optimizer_cls.__name__} is not an elementwise class of torch.optim; if it updates each element independently, "
            "pass elementwise=True (see ShardedOptimizer), otherwise use ZeroRedundancyOptimizer"
        )
    return optimizer_cls


def check_elementwise(
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer], group: dict[str, Any], device: torch.device
) -> None:
    """Raise ValueError if 12 steps with the hyperparameters of a group differ for a small matrix and for its slices.

    This does not prove the promise of `elementwise=True`: a class may look at a whole parameter later, or at all of them.
    `make`: from groups. A learning rate of zero would hide everything.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    values, gradients = (torch.randn(*shape, generator=generator, device="cpu") for shape in ((8, 12), (12, 8, 12)))
    results = []
    with torch.random.fork_rng(devices=[]):
        for parts in [values], values.view(-1).split(32):
            params = [torch.nn.Parameter(part.to(device, copy=True)) for part in parts]
            own = copy.deepcopy({key: value for key, value in group.items() if key != "params"}) | {"params": params}
            optimizer = make([own | {"lr": 1e-3} if "lr" in own and not own["lr"] else own])
            getattr(optimizer, "train", lambda: None)()  # of schedule-free classes
            for gradient in gradients.view(12, -1):
                for param, part in zip(params, gradient.split(params[0].numel()), strict=True):
                    param.grad = part.view_as(param).to(device, copy=True)  # some classes overwrite it
                without_hooks(type(optimizer).step)(optimizer)
            results.append(torch.cat([param.detach().view(-1) for param in params]))
    if not torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-6):
        name = type(optimizer).__name__
        raise ValueError(f"{name} updates a matrix otherwise than its slices, so it is not elementwise; {_USE_WHOLE}")


def rounded_state(optimizer_cls: type[torch.optim.Optimizer]) -> Collection[str] | None:
    """Return the names of the state that may be rounded, the attribute `rounded_state` of a class; None: all of its state."""
    if optimizer_cls in _ELEMENTWISE and optimizer_cls not in _EXACT:
        return None
    names = vars(optimizer_cls).get("rounded_state")
    if names is None or isinstance(names, str):
        raise ValueError(
            f"{optimizer_cls.__name__} declares no state that may be rounded (in a class attribute rounded_state, a tuple of "
            "names); use state_dtype='float32'"
        )
    return names


def check_rounding(optimizer_cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]]) -> None:
    """Raise ValueError for a class whose state must not be rounded, or that subtracts one mean from another."""
    rounded_state(optimizer_cls)
    if optimizer_cls is torch.optim.RMSprop and any(group.get("centered") for group in groups):
        raise ValueError("RMSprop with centered=True subtracts one mean from another; use state_dtype='float32'")


def checked_norm(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Return the arguments of `clip_grad_norm_` as numbers. Raise TypeError or ValueError for others."""
    try:
        max_norm, norm_type = float(max_norm), float(norm_type)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError("clip_grad_norm_ takes max_norm and norm_type, not parameters: it clips all gradients") from error
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} must be positive; 2.0 is the usual norm, inf the largest gradient")
    return max_norm, norm_type


def check_parameters(params: list[torch.nn.Parameter], param_dtype: torch.dtype | None) -> None:
    """Refuse parameters that cannot move into flat buffers."""
    for param in params:
        what = f"a parameter of shape {tuple(param.shape)} is"
        if param.layout != torch.strided:
            raise ValueError(f"{what} {param.layout}, which cannot be laid flat; densify it")
        if param.is_meta:
            raise ValueError(f"{what} on the meta device; build the model on another one")
        if param.requires_grad and param.device.type == "cpu" and param.is_shared():
            remedy = "build the optimizer first and share a copy of the weights"
            raise ValueError(f"{what} in shared memory (share_memory()), which it would leave; {remedy}")
        if param.requires_grad and not is_dense(param) and may_overlap(param):
            raise ValueError(f"{what} expanded: elements may share memory; clone() it first")
        if param_dtype is not None and param.is_complex():
            raise ValueError(f"param_dtype={param_dtype} would drop the imaginary parts of a complex parameter")
    if len(params) > len(set(params)):
        raise ValueError("a parameter is given more than once; give each one once")
    _check_memory(params)


def _check_memory(params: list[torch.nn.Parameter]) -> None:
    """Raise ValueError for parameters that share memory. Frozen ones may share it with each other."""
    spans = sorted((str(p.device), *memory_span(p), p.requires_grad, tuple(p.shape)) for p in params if p.numel())
    reached: dict[tuple[str, bool], tuple[int, tuple[int, ...]]] = {}  # by device, trainable: end, shape
    for device, start, stop, trainable, shape in spans:
        for other in (True, False) if trainable else (True,):
            end, its_shape = reached.get((device, other), (start, ()))
            if start < end:
                raise ValueError(
                    f"two parameters, of shapes {its_shape} and {shape}, share memory; tie them by using one Parameter in both "
                    "places, or clone() one of them"
                )
        reached[device, trainable] = max((stop, shape), reached.get((device, trainable), (stop, shape)))


def check_groups(placed: Placement, groups: list[dict[str, Any]]) -> None:
    """Raise RuntimeError if the parameters in the groups are not those that were laid out."""
    if [list(map(id, group["params"])) for group in groups] != [list(map(id, params)) for params in placed.groups]:
        raise RuntimeError("the parameters in param_groups have been changed; use add_param_group or build a new optimizer")


def check_addition(placed: Placement, groups: list[dict[str, Any]], is_wrapped: bool, inner: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if a ShardedOptimizer, whose slices are in `inner`, cannot lay out another group."""
    if is_wrapped:
        remedy = "give all groups to the constructor, or train under DistributedDataParallel"
        raise RuntimeError(f"the buckets of a ShardedDataParallel are laid out once; {remedy}")
    check_groups(placed, groups)
    for param in placed.frozen:
        if param.requires_grad and inner.state.get(param):
            remedy = "build a new ShardedOptimizer, and load what consolidate_state_dict() gathers"
            raise RuntimeError(f"{name_of(param, placed.names)} has state from a time when it was frozen; {remedy}")


def check_in_place(placed: Placement, groups: list[dict[str, Any]]) -> None:
    """Raise RuntimeError for parameters that were moved, regrouped, unfrozen or written to. Looks at no element."""
    check_groups(placed, groups)
    names = placed.names
    for param in placed.moved():
        raise RuntimeError(
            f"{name_of(param, names)} was moved or replaced after ShardedOptimizer was built (by model.to, param.data = ..., "
            "flatten_parameters, or another optimizer); build the optimizer after that, and write with optimizer.set_parameter"
        )
    for param in placed.written():
        remedy = "write with optimizer.set_parameter(param, value) or load_state_dict of the model under ShardedDataParallel"
        raise RuntimeError(f"{name_of(param, names)} was written to, but its master was not; {remedy}")
    for param in placed.frozen:
        if param.grad is not None:
            name, remedy = name_of(param, names), "call add_param_group or build the optimizer after requires_grad_(True)"
            raise RuntimeError(f"{name} was frozen when ShardedOptimizer was built and has a gradient now; {remedy}")


def check_values(module: nn.Module) -> None:
    """Refuse parameters and buffers without values."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; build the model with values on all ranks")


def check_wrapping(module: nn.Module, is_wrapped: bool, wrappers: tuple[type[nn.Module], ...], units: list[nn.Module]) -> None:
    """Raise ValueError if these cannot be the arguments of a ShardedDataParallel; `is_wrapped`: its optimizer has one."""
    parts = set(module.modules())
    if any(isinstance(part, wrappers) for part in parts):
        raise ValueError("the module is wrapped for data parallelism already; ShardedDataParallel takes the bare one")
    if is_wrapped:
        raise ValueError("the optimizer has a ShardedDataParallel already; make another ShardedOptimizer for another model")
    if ignored := getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        raise ValueError(f"DistributedDataParallel was told to ignore {', '.join(ignored)}, which ShardedDataParallel cannot")
    for unit in units:
        if unit not in parts or getattr(unit.forward, "__func__", None) is nn.Module.forward:
            remedy = "give modules of the model that it calls, such as its blocks"
            raise ValueError(f"{type(unit).__name__} in overlap has no forward, or is no module of the model; {remedy}")
    if units and any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        raise ValueError("a ScriptModule runs no hooks of its parts, which overlap needs; wrap the module it was made from")


def refuse_join(*_: Any, **__: Any) -> NoReturn:
    """Stand for `join` of DistributedDataParallel and `join_hook` of a Joinable."""
    raise RuntimeError("ranks with fewer inputs cannot join; give all ranks as many, or use DistributedDataParallel with AdamW")


def check_all_managed(module: nn.Module, managed: Collection[nn.Parameter], error: type[Exception] = ValueError) -> None:
    """Raise an error if trainable parameters are not among those that are managed: the optimizer's."""
    if unmanaged := [name for name, param in module.named_parameters() if param.requires_grad and param not in managed]:
        remedy = "give all of them to one ShardedOptimizer, after they were unfrozen or replaced (as by load_state_dict with "
        remedy += "assign=True); or use DistributedDataParallel, under which several can share a module"
        raise error(f"these parameters require gradients but are not the optimizer's: {', '.join(unmanaged)}; {remedy}")
