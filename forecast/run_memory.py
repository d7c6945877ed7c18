"""What a run will need on each rank: memory at each point of a step, bytes to send. plan.py prints it, train.py checks it.

`forecast.dry_run` predicts the model, the optimizer and the communication, `activations` the activations. This module joins
them for a GPT and the settings of train.py, and keeps what they have found in a file.
"""

import hashlib
import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from distributed.machine import multiplies_in_float32
from forecast.prediction import Activations, Moment, Optimizer, Prediction, Workload, replicated
from model import GPT, GPTConfig, without_weights
from zero.build import optimizer_of
from zero.flags import Flags
from zero.host_comm import SimulatedGroup
from zero.layout import ParameterSpec, parameter_specs
from zero.stopwatch import without_hooks

# Resident peak of a rank on a CPU, without Python and its libraries (0.4 GB), relative to the predicted peak: malloc keeps the
# pages of freed tensors. Measured: 1.03 to 1.30 for 10.8M and 85M parameters on two ranks, see docs/accounting.md.
CPU_RESIDENT = 1.3
_CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanogpt-zero1", "forecast.json")


@dataclass(frozen=True)
class Forecast:
    """The bytes of the rank with the most optimizer state."""

    prediction: Prediction  # model, optimizer and communication
    activations: Activations
    on_cpu: bool
    async_save: bool = False  # a setting of train.py

    @property
    def peak(self) -> int:
        """Peak bytes while training."""
        return max(self.prediction.frozen + self.prediction.construction, self.prediction.peak_of_training(self.activations))

    @property
    def saving_peak(self) -> int:
        """Peak bytes on the device of a rank while a checkpoint is saved. With `async_save`, training continues meanwhile."""
        held = self.prediction
        piece = max(held.decoded_slice, held.arriving if self.on_cpu else 0)
        collecting = sum({**held.at("after step"), "buckets": 0}.values()) + piece  # kept buckets are freed
        meanwhile = max(collecting, self.peak) if self.async_save else collecting
        return meanwhile + (self.saved_copy if self.on_cpu else 0)

    @property
    def saved_copy(self) -> int:
        """Bytes of main memory for a copy of what a rank saves, with `async_save`. Rank 0 has all weights without masters."""
        held = self.prediction
        weights = held.owned if held.plan.has_masters else held.weights
        return held.plan.state_bytes[held.rank] + weights if self.async_save else 0


def planned_optimizer(muon: dict[str, Any] | None) -> Optimizer:
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


def predicted(
    specs: Sequence[ParameterSpec],
    flags: Flags,
    optimizer: Optimizer,
    *,
    rank: int | None = None,
    world_size: int = 1,
    micro_steps: int = 1,
    on_cpu: bool = False,
    distributed: bool = True,
    in_place: bool = False,
    frozen: int = 0,
) -> Prediction:
    """Return the prediction for a rank, by default the one with the most optimizer state.

    Args:
        specs: of the parameters that are trained.
        rank: of those that share the state.
        micro_steps: per iteration on each rank.
        distributed: the ranks are torchrun's, so that the model is wrapped for data parallelism.
        in_place: gradients accumulate in the buckets of DistributedDataParallel: with `zero_grad(set_to_none=False)`.
        frozen: bytes of the other weights of the model.
    """
    plan = flags.plan(specs, world_size)
    rank = plan.state_bytes.index(max(plan.state_bytes)) if rank is None else rank
    if not plan.buffers:
        return replicated(plan, rank, world_size, micro_steps, distributed, in_place, frozen)

    def run() -> dict[str, Any]:
        from forecast.dry_run import dry_run  # only here: see `_kept`

        return dry_run(specs, flags, optimizer, SimulatedGroup(rank, world_size), min(micro_steps, 3), on_cpu)

    run_id = repr((specs, flags, optimizer, rank, world_size, min(micro_steps, 3), on_cpu))
    found = _kept(hashlib.sha256(run_id.encode()).hexdigest() + _version("forecast/dry_run.py", "zero/**/*.py"), run)
    found["moments"] = [Moment(*moment) for moment in found["moments"]]
    prediction = Prediction(plan, rank, world_size, micro_steps, flags.shard_gradients, frozen, **found)
    prediction.sent["reduce-scatter"] *= micro_steps if flags.shard_gradients else 1
    return prediction


def predicted_activations(workload: Workload, param_dtype: str) -> Activations:
    """Return the result of `activations.predict`."""

    def predict() -> Activations:
        from forecast import activations  # only here: see `_kept`

        return activations.predict(workload, param_dtype)

    return Activations(
        *_kept(f"{workload} {param_dtype} {_version('forecast/activations.py', 'model.py', 'loss.py')}", predict)
    )


def _kept(key: str, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, as JSON, from a file if it is there: a dry run takes a moment, fake tensors seconds."""
    known = _known()
    if key not in known:
        known[key] = json.dumps(make())
        with suppress(OSError):  # a home that cannot be written to: the next prediction takes a second longer
            os.makedirs(os.path.dirname(_CACHE), exist_ok=True)
            with open(f"{_CACHE}.{os.getpid()}", "w") as file:
                json.dump(known, file)
            os.replace(file.name, _CACHE)
    return json.loads(known[key])


@cache
def _known() -> dict[str, str]:
    with suppress(OSError, ValueError), open(_CACHE) as file:  # if it is missing or damaged, it will be written again
        return json.load(file)
    return {}


@cache
def _version(*sources: str) -> str:
    """Return a version string that changes with the CPU and the code that a prediction depends on."""
    root = pathlib.Path(__file__).parent.parent
    code = b"".join(path.read_bytes() for pattern in sources for path in sorted(root.glob(pattern)))
    cpu = [multiplies_in_float32(transposed) for transposed in (False, True)]
    return f"torch {torch.__version__} {hashlib.sha256(code).hexdigest()[:16]} {cpu}"


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
