"""Plan a run before you rent its GPUs: memory per rank, largest batch and bytes to send, for each way to hold the state.

GPT-2 XL on 1 to 1024 GPUs with 80 GB. This needs no GPU and starts no processes:
    $ python plan.py config/train_gpt2_xl.py --world_size=1,2,4,8,64,1024 --gpu_memory_gb=80

The same on CPUs, for two ranks on a laptop:
    $ python plan.py config/train_shakespeare_char.py --world_size=2 --device=cpu --gradient_accumulation_steps=2

The owners of one parameter, and the table as a file and as a picture:
    $ python plan.py config/train_gpt2_xl.py --world_size=8 --explain=transformer.wte.weight
    $ python plan.py config/train_gpt2_xl.py --json=plan.json --plot=plan.png

Every setting of train.py is a setting of plan.py, with the same default. These are added:
    world_size      numbers of ranks, separated by commas
    gpu_memory_gb   what PyTorch can use on each GPU; CUDA itself takes about 1 GB in addition
    bandwidth_gbit  what a rank can send per second, to estimate the time of communication that overlaps with nothing
    explain         name of a parameter
    json            path of a JSON file that also receives the table, in bytes
    plot            path of a picture: .png, .svg or .html (interactive)

Modes: `adamw` is use_zero1=False, `torch` is zero1_impl=torch, `sharded` is the default. `shard_gradients`, `bfloat16`
(param_dtype=bfloat16) and `checkpointing` (activation_checkpointing=True) are added to `sharded`.
"""

import difflib
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from json import dump
from typing import Any

import torch

import charts
from accounting import MODES, Workload, forecast, gpt_specs, predicted_activations
from configurator import PositiveFloat, configure, settings_of
from dataset import DATA_DIR, load_meta
from distributed import exit_on_wrong_input
from model import GPT2_SIZES, GPTConfig
from zero.flags import Flags
from zero.layout import ParameterSpec, Plan
from zero.prediction import Activations

OWN_SETTINGS = {
    "world_size": "1,2,4,8,64,1024",
    "gpu_memory_gb": 80.0,
    "bandwidth_gbit": 100.0,
    "explain": "",
    "json": "",
    "plot": "",
}
BATCHES = [4**power for power in range(7)]  # activations are predicted for these batch sizes, and interpolated between them
COLUMNS = {  # heading of each column, and its text in a row
    "ranks": "{world_size}",
    "mode": "{mode}",
    "parameters": "{parameters:.2f}",
    "gradients": "{gradients:.2f}",
    "state": "{state:.2f}",
    "/mean": "{state_to_mean:.2f}",
    "masters": "{master:.2f}",
    "buckets": "{buckets:.2f}",
    "activations": "{activations:.2f}",
    "peak": "{peak:.2f}",
    "saving": "{saving:.2f}",
    "fits": "{fits}",
    "max batch": "{largest_batch}",
    "sent": "{sent:.2f}",
    "ms": "{sent_ms:.0f}",
}
IN_GB = ("parameters", "gradients", "state", "master", "buckets", "activations", "peak", "saving", "sent")
LEGEND = """
gradients    between micro-steps if there are several, otherwise before the update
/mean        optimizer state of this rank, relative to the mean of the ranks
buckets      most that communication holds in addition to gradients
activations  what forward keeps for backward; peak: the most while training, without torch.compile; the parts of a peak are
             not all at their largest at the same time
saving       on the device of rank 0
max batch    sequences per micro-step that fit into {gpu_memory_gb:g} GB, up to {largest_batch}
sent, ms     per rank and iteration, and the time at {bandwidth_gbit:g} Gbit/s if it overlaps with nothing"""


def model_config(settings: dict[str, Any]) -> GPTConfig:
    """Returns the sizes of the model that train.py would make.

    Raises:
        ValueError: if the sizes are impossible, or come from a checkpoint.
    """
    sizes: dict[str, Any] = {name: settings[name] for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")}
    if settings["init_from"] in GPT2_SIZES:
        sizes |= {**GPT2_SIZES[settings["init_from"]], "bias": True, "vocab_size": 50257}
        return GPTConfig(**sizes)
    if settings["init_from"] != "scratch":
        raise ValueError(
            f"init_from={settings['init_from']}: plan.py takes sizes from settings, not from files; set n_layer, ..."
        )
    folder = os.path.join(DATA_DIR, settings["dataset"])
    meta = load_meta(folder)
    if meta is None and not os.path.exists(os.path.join(folder, "train.bin")):
        print(f"note: {settings['dataset']} is not prepared; a vocabulary of {GPTConfig.vocab_size} tokens is assumed")
    return GPTConfig(**sizes, **({"vocab_size": meta["vocab_size"]} if meta else {}))


def world_sizes(text: str) -> list[int]:
    """Returns the numbers of `--world_size`."""
    sizes = [int(size) if size.isdecimal() else 0 for size in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"world_size={text} must be numbers of ranks, separated by commas; for example --world_size=1,2,8")
    return sizes


class Planner:
    """Makes the rows of the table for one model.

    Args:
        settings: the settings of train.py and plan.py.
    """

    def __init__(self, settings: dict[str, Any], config: GPTConfig) -> None:
        self.settings, self.config = settings, config
        self.specs: Sequence[ParameterSpec] = gpt_specs(config)
        if settings["device"].partition(":")[0] not in ("auto", "cpu", "cuda", "mps"):
            raise ValueError(f"device={settings['device']} is not one of auto, cpu, cuda, mps")
        self.device_type = "cuda" if settings["device"] == "auto" else settings["device"].partition(":")[0]
        on_cpu = self.device_type == "cpu"
        self.dtype = ("float32" if on_cpu else "bfloat16") if settings["dtype"] == "auto" else settings["dtype"]
        self.memory = int(settings["gpu_memory_gb"] * 1e9)
        self._plans: dict[tuple[Flags, int], Plan] = {}

    def plan(self, flags: Flags, world_size: int) -> Plan:
        """Returns the plan of the flags. Modes with equal plans share it: a plan of 1024 ranks takes a tenth of a second."""
        key = replace(flags, shard_gradients=False), world_size
        if key not in self._plans:
            self._plans[key] = flags.plan(self.specs, world_size)
        return self._plans[key]

    def rows(self, world_size: int) -> list[dict[str, Any]]:
        """Returns one row per mode. A single process has only one mode."""
        modes = dict(MODES) if world_size > 1 else {"adamw": MODES["adamw"]}
        if not self.settings["activation_checkpointing"]:
            modes["checkpointing"] = modes["sharded" if world_size > 1 else "adamw"]
        bucket_mb = self.settings["zero_bucket_mb"]
        return [self.row(mode, replace(flags, bucket_mb=bucket_mb), world_size) for mode, flags in modes.items()]

    def row(self, mode: str, flags: Flags, world_size: int) -> dict[str, Any]:
        """Returns the figures of one mode, in bytes, on the rank with the most optimizer state."""
        micro_steps = math.ceil(self.settings["gradient_accumulation_steps"] / world_size)
        workload = Workload(
            self.config,
            self.settings["batch_size"],
            "bfloat16" if flags.param_dtype == "bfloat16" else self.dtype,
            self.device_type,
            self.settings["activation_checkpointing"] or mode == "checkpointing",
        )
        activations = predicted_activations(workload, flags.param_dtype)
        plan = self.plan(flags, world_size)
        result = forecast(
            plan,
            world_size,
            micro_steps,
            workload.device_type,
            activations,
            flags.shard_gradients,
            distributed=world_size > 1,
        )
        prediction, sent = result.prediction, sum(result.prediction.sent().values())
        fits = max(result.peak, result.saving_peak) <= self.memory
        return {
            "mode": mode,
            "world_size": world_size,
            **prediction.at("accumulating" if micro_steps > 1 else "before step"),
            "buckets": prediction.largest_buckets,
            "state_to_mean": result.state_to_mean,
            "activations": result.activations.saved,
            "peak": result.peak,
            "saving": result.saving_peak,
            "saving_on_cpu": prediction.consolidated,
            "fits": "yes" if fits else "no",
            "largest_batch": self.largest_batch(
                workload, flags, lambda activations: max(prediction.peak(activations), result.saving_peak)
            ),
            "sent": sent,
            "sent_ms": sent * 8 / self.settings["bandwidth_gbit"] / 1e6,
        }

    def largest_batch(self, workload: Workload, flags: Flags, peak: Any) -> int:
        """Returns the largest batch size whose peak fits, or 0. `peak` maps the two peaks of activations to that of the device.

        The peak of activations is the largest of several linear functions of the batch size, so it is convex. A straight
        line between two predicted batch sizes is therefore not too low.
        """
        low = None
        for batch in BATCHES:
            activations = predicted_activations(replace(workload, batch_size=batch), flags.param_dtype)
            high = batch, activations
            if peak(activations) > self.memory:
                break
            low = high
        if low is None:
            return 0

        def does_not_fit(size: int) -> bool:
            share = (size - low[0]) / max(1, high[0] - low[0])
            between = Activations(*(round(a + share * (b - a)) for a, b in zip(low[1], high[1], strict=True)))
            return peak(between) > self.memory

        return low[0] + bisect_left(range(low[0] + 1, high[0] + 1), True, key=does_not_fit)


def explain(name: str, planner: Planner, world_size: int) -> None:
    """Print which rank owns which elements of a parameter."""
    names = [spec.name for spec in planner.specs]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1) or names[:1]
        raise ValueError(f"explain={name}: the model has no such parameter; it has for example {near[0]}")
    number = names.index(name)
    spec = planner.specs[number]
    for mode in ("sharded", "torch") if world_size > 1 else ("adamw",):
        plan = planner.plan(replace(MODES[mode], bucket_mb=planner.settings["zero_bucket_mb"]), world_size)
        print(f"{mode}, {world_size} ranks: {name}, {tuple(spec.shape)}, {spec.numel:,} elements of the flattened parameter")
        for rank in range(plan.world_size):
            for slice_ in plan.slices(rank):
                if slice_.param == number:
                    print(f"  rank {rank}: {slice_.start:,} to {slice_.stop:,} ({slice_.numel / spec.numel:.1%})")


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print the rows, with an empty line between world sizes."""
    cells = [list(COLUMNS)]
    for row in rows:
        scaled = {key: value / 1e9 if key in IN_GB else value for key, value in row.items()}
        cells.append([text.format(**scaled) for text in COLUMNS.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    world_size = None
    for line in cells:
        if line[0] != world_size:
            world_size = line[0]
            print()
        aligned = zip(COLUMNS, line, widths, strict=True)
        print("  ".join(f"{cell:{'<' if column == 'mode' else '>'}{width}}" for column, cell, width in aligned))


def print_plan(planner: Planner, sizes: list[int]) -> list[dict[str, Any]]:
    """Print the table with its explanations and return its rows."""
    rows = [row for size in sizes for row in planner.rows(size)]
    settings = planner.settings
    steps, numel = settings["gradient_accumulation_steps"], sum(spec.numel for spec in planner.specs)
    sequences = f"{settings['batch_size']} sequences of {planner.config.block_size} tokens"
    print(f"{numel / 1e6:.1f}M parameters, {planner.dtype} on {planner.device_type}, {sequences} per micro-step,")
    print(f"{steps} micro-steps per iteration on all ranks together; GB (10^9 bytes) on the rank with the most optimizer state")
    print_table(rows)
    print(LEGEND.format(**settings, largest_batch=BATCHES[-1]))
    if planner.device_type != "cpu":
        saving = f"{rows[0]['saving_on_cpu'] / 1e9:.1f} GB of main memory on rank 0"
        print(f"             with checkpoint_format=consolidated, it also takes {saving}")
    for size in sizes:
        if steps % size:
            print(f"note: {size} ranks cannot share {steps} micro-steps; {math.ceil(steps / size) * size} are assumed")
    return rows


def main() -> None:
    train = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
    settings = {**settings_of(train, torch=torch), **OWN_SETTINGS, "__doc__": __doc__}
    settings["__annotations__"] |= {"gpu_memory_gb": PositiveFloat, "bandwidth_gbit": PositiveFloat}
    settings = configure(settings)
    with exit_on_wrong_input():
        if settings["plot"]:
            charts.check_path(settings["plot"])
        if settings["json"]:
            os.makedirs(os.path.dirname(settings["json"]) or ".", exist_ok=True)
            open(settings["json"], "a").close()
        sizes = world_sizes(settings["world_size"])
        planner = Planner(settings, model_config(settings))
        if settings["explain"]:
            for size in sizes:
                explain(settings["explain"], planner, size)
            return
        rows = print_plan(planner, sizes)
        if settings["json"]:
            with open(settings["json"], "w") as file:
                dump({"settings": settings, "rows": rows}, file, indent=1)
        if settings["plot"]:
            charts.save(charts.plan_chart(rows, settings["gpu_memory_gb"]), settings["plot"])


if __name__ == "__main__":
    main()
