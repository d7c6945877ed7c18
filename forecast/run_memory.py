"""What a run will need on each rank: memory at each point of a step, bytes to send. plan.py prints it, train.py checks it.

`forecast.prediction` predicts the model, the optimizer and the communication from the plan that training uses. `activations`
predicts the activations. This module joins them for a GPT and the settings of train.py.
"""

import hashlib
import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from distributed.machine import multiplies_in_float32
from forecast.prediction import Activations, DataParallelPrediction, Prediction, ShardedPrediction, Workload
from model import GPT, GPTConfig, without_weights
from zero.build import optimizer_of
from zero.layout import ParameterSpec, Plan, parameter_specs
from zero.stopwatch import without_hooks

# Resident peak of a rank on a CPU, without Python and its libraries (0.4 GB), relative to the predicted peak: malloc keeps the
# pages of freed tensors. Measured: 1.03 to 1.30 for 10.8M and 85M parameters on two ranks, see docs/accounting.md.
CPU_RESIDENT = 1.3
_CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanogpt-zero1", "activations.json")


@dataclass(frozen=True)
class Forecast:
    """The bytes of the rank with the most optimizer state."""

    prediction: Prediction  # model, optimizer and communication
    activations: Activations
    async_save: bool = False  # a setting of train.py

    @property
    def peak(self) -> int:
        """Peak bytes while training."""
        return max(self.prediction.construction, self.prediction.peak_of_training(self.activations))

    @property
    def saving_peak(self) -> int:
        """Peak bytes on the device of a rank while a checkpoint is saved. With `async_save`, training continues meanwhile."""
        held = self.prediction
        piece = max(held.decoded_slice, held.arriving if held.on_cpu else 0)
        collecting = sum({**held.at("after step"), "buckets": 0}.values()) + piece  # kept buckets are freed
        meanwhile = max(collecting, self.peak) if self.async_save else collecting
        return meanwhile + (self.saved_copy if held.on_cpu else 0)

    @property
    def saved_copy(self) -> int:
        """Bytes of main memory for a copy of what a rank saves, with `async_save`. Rank 0 has all weights without masters."""
        held = self.prediction
        weights = held.owned if held.plan.has_masters else held.weights
        return held.plan.state_bytes[held.rank] + weights if self.async_save else 0


def planned_optimizer(muon: dict[str, Any] | None) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that `zero.build` will use and its arguments, whose learning rate and betas do not matter here."""
    return optimizer_of(muon is not None, "meta", lr=0.0, betas=(0.9, 0.95))


def gpt_specs(config: GPTConfig, muon: dict[str, Any] | None = None) -> Sequence[ParameterSpec]:
    """Return the parameters of a GPT, as its optimizer numbers them, without allocating them.

    Args:
        muon: see `forecast.modes.muon_of`.
    """
    with without_weights():
        model = GPT(config)
    names, groups = {param: name for name, param in model.named_parameters()}, model.param_groups(0.0, muon)
    specs = parameter_specs(groups, model.parameters(), names)
    optimizer_cls, arguments = planned_optimizer(muon)
    return with_own_state(specs, optimizer_cls(groups, **arguments))


def of_fullest_rank(plan: Plan, distributed: bool, **how: Any) -> Prediction:
    """Return the prediction for the rank with the most optimizer state.

    Args:
        plan: see `Flags.plan`.
        distributed: the ranks are torchrun's, so that the model is wrapped for data parallelism.
        **how: see `Prediction`.
    """
    state, kind = plan.state_bytes, DataParallelPrediction if distributed else Prediction
    if plan.buffers:
        kind = ShardedPrediction
    return kind(plan, state.index(max(state)), **how)


def forecast(plan: Plan, activations: Activations, distributed: bool, **how: Any) -> Forecast:
    """Predict what the rank with the most optimizer state will need, see `of_fullest_rank`."""
    return Forecast(of_fullest_rank(plan, distributed, **how), activations)


def predicted_activations(workload: Workload, param_dtype: str) -> Activations:
    """Return the result of `activations.predict`. It is kept in a file, because the fake tensors take a second to import."""
    known, key = _known(), f"{workload} {param_dtype} {_version()}"
    if key not in known:
        from forecast import activations  # only here: see above

        known[key] = activations.predict(workload, param_dtype)
        with suppress(OSError):  # a home that cannot be written to: the next prediction takes a second longer
            os.makedirs(os.path.dirname(_CACHE), exist_ok=True)
            with open(f"{_CACHE}.{os.getpid()}", "w") as file:
                json.dump(known, file)
            os.replace(file.name, _CACHE)
    return Activations(*known[key])


@cache
def _known() -> dict[str, Any]:
    with suppress(OSError, ValueError), open(_CACHE) as file:  # if it is missing or damaged, it will be written again
        return json.load(file)
    return {}


@cache
def _version() -> str:
    """Return a version string that changes with the code and the CPU that activations depend on."""
    folder = pathlib.Path(__file__).parent
    sources = (folder.parent / "model.py").read_bytes() + (folder / "activations.py").read_bytes()
    cpu = [multiplies_in_float32(transposed) for transposed in (False, True)]
    return f"torch {torch.__version__} {hashlib.sha256(sources).hexdigest()[:16]} {cpu}"


def with_own_state(specs: Sequence[ParameterSpec], optimizer: torch.optim.Optimizer) -> tuple[ParameterSpec, ...]:
    """Return the specs with as many tensors of state as the class of an optimizer keeps, which may be other than AdamW's.

    A copy of the optimizer that shares no parameter and no state makes a step with a small parameter of each group. What
    has the shape of the parameter counts, in the dtype of the update.

    Args:
        optimizer: not ShardedOptimizer or ZeroRedundancyOptimizer, but the inner one. It stays as it is.
    """
    counts = []
    for group in optimizer.param_groups:
        device = next((param.device for param in group["params"] if not param.is_meta), None)
        small = torch.nn.Parameter(torch.zeros(6 * (group.get("matrices") or 1), 5, device=device))
        small.grad = torch.zeros_like(small)
        twin = object.__new__(type(optimizer))
        vars(twin).update(vars(optimizer), state=defaultdict(dict), param_groups=[{**group, "params": [small]}])
        without_hooks(type(twin).step)(twin)
        state = twin.state[small].values()
        counts.append(sum(isinstance(value, torch.Tensor) and value.shape == small.shape for value in state))
    return tuple(spec._replace(state_tensors=counts[spec.group]) for spec in specs)
