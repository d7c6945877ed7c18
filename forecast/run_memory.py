"""What a run will need on each rank: memory at each point of a step, bytes to send. plan.py prints it, train.py checks it.

`forecast.dry_run` predicts the model, the optimizer and the communication, `activations` the activations. This module joins
them for a GPT and the settings of train.py, and keeps what they have found in a file.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch

from distributed.machine import DTYPES, multiplies_in_float32
from forecast.activations import predict
from forecast.baselines import replicated
from forecast.dry_run import dry_run, state_bytes, state_of_ranks
from forecast.prediction import Activations, Moment, Optimizer, Prediction, Workload
from model import GPT, GPTConfig, without_weights
from zero.autocast import autocast_parameters
from zero.build import optimizer_of
from zero.flags import Flags
from zero.layout import ParameterSpec, parameter_specs

# Resident peak of a rank on a CPU, without Python and its libraries (0.4 GB), relative to the predicted peak: malloc keeps the
# pages of freed tensors. Measured: 1.03 to 1.30 for 10.8M and 85M parameters on two ranks, see docs/accounting.md.
CPU_RESIDENT = 1.3
_CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nanogpt-zero1", "forecast.json")


def planned_optimizer(muon: dict[str, Any] | None) -> Optimizer:
    """Return the class that `zero.build` will use and its arguments; learning rate and betas do not matter here.

    `muon`: see `forecast.modes.muon_of`.
    """
    return optimizer_of(muon is not None, "cuda", lr=0.0, betas=(0.9, 0.95))


def gpt_specs(config: GPTConfig, muon: dict[str, Any] | None = None, dtype: str = "float32") -> Sequence[ParameterSpec]:
    """Return the parameters of a GPT, as its optimizer numbers them, without allocating them. `dtype`: of the computation."""
    with without_weights():
        model = GPT(config)
    autocast = {} if dtype == "float32" else autocast_parameters(model, DTYPES[dtype])
    return parameter_specs(model.param_groups(0.0, muon), model.parameters(), autocast=autocast)


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
    **others: Any,
) -> Prediction:
    """Return the prediction for a rank, by default the one with the most optimizer state.

    Args:
        specs: of the parameters that are trained.
        rank: of those that share the state.
        micro_steps: per iteration on each rank.
        distributed: the ranks are torchrun's, so that the model is wrapped for data parallelism.
        in_place: gradients accumulate in the buckets of DistributedDataParallel: with `zero_grad(set_to_none=False)`.
        **others: the last fields of `Prediction`, from `frozen` on.
    """
    specs = tuple(spec._replace(device=torch.device("meta")) for spec in specs)  # all devices share a result
    plan = flags.plan(specs, world_size)
    in_order = sorted(specs, key=attrgetter("matrices"))
    kinds = {spec._replace(group=spec.matrices, position=0): 0 for spec in in_order}  # those of a kind have as much state
    kinds.update(zip(kinds, _kept(state_bytes, [*kinds], optimizer, sources=("zero/**/*.py",)), strict=True))
    of_ranks = state_of_ranks(plan, [kinds[spec._replace(group=spec.matrices, position=0)] for spec in specs])
    rank = of_ranks.index(max(of_ranks)) if rank is None else rank
    others |= {"on_cpu": on_cpu, "uneven": max(of_ranks) * len(of_ranks) / max(1, sum(of_ranks))}
    if not plan.buffers:
        return replace(replicated(plan, rank, of_ranks[rank], world_size, micro_steps, distributed, in_place, on_cpu), **others)
    what = plan.params, flags, optimizer, (rank, world_size), min(micro_steps, 3), on_cpu
    kept = _kept(dry_run, *what, sources=("zero/**/*.py",))
    kept["moments"] = [Moment(*moment) for moment in kept["moments"]]
    kept["sent"]["reduce-scatter"] *= micro_steps if flags.shard_gradients else 1
    return Prediction(plan, rank, world_size, micro_steps, flags.shard_gradients, **kept, **others)


def predicted_activations(workload: Workload, weights: str) -> Activations:
    """Return the result of `activations.predict`."""
    return Activations(*_kept(predict, workload, weights, sources=("model.py", "loss.py", "zero/autocast.py")))


def _kept(function: Callable[..., Any], *arguments: Any, sources: tuple[str, ...]) -> Any:
    """Return what a function returns, as JSON, from a file if it is there: a dry run takes a moment, fake tensors seconds.
    `sources`: the files, besides forecast's own and distributed/machine.py, whose change makes a result invalid.
    """
    known, text = _known(), f"{function.__name__} {arguments} {_version('forecast/*.py', 'distributed/machine.py', *sources)}"
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in known:
        known[key] = json.dumps(function(*arguments))
        with suppress(OSError):  # a home that cannot be written to: the next prediction takes a second longer
            os.makedirs(os.path.dirname(_CACHE), exist_ok=True)
            with open(f"{_CACHE}.{os.getpid()}", "w") as file:
                json.dump(dict([*known.items()][-1000:]), file)  # older ones may be of other versions of the code
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
