"""Plan a run before you rent its GPUs: memory per rank, largest batch, bytes to send, for each way to hold the state.

GPT-2 XL on 1 to 1024 GPUs with 80 GB. This needs no GPU and starts no processes:
    $ python plan.py config/train_gpt2_xl.py --world_size=1,2,4,8,64,1024 --gpu_memory_gb=80

A small model on two CPU ranks of a laptop:
    $ python plan.py config/train_shakespeare_char.py --world_size=2 --device=cpu --gradient_accumulation_steps=2

The table as a file and as a picture, and the owners of one parameter:
    $ python plan.py config/train_gpt2_xl.py --json=plan.json --plot=plan.png
    $ python plan.py config/train_gpt2_xl.py --world_size=8 --explain=transformer.wte.weight

Every setting of train.py is a setting of plan.py, with the same default.

Modes: `adamw` is use_zero1=False, `torch` is zero1_impl=torch, `sharded` is the default. To `sharded` are added:
`shard_gradients`, `bfloat16` (param_dtype=bfloat16), `remainder` (the same with master_dtype=remainder),
`int8` (state_dtype=int8), `checkpointing` (activation_checkpointing=True), `loss_chunk` (loss_chunk=1024), and in `all`
everything together. If the settings have `checkpointing` or `loss_chunk`, all rows have it. The row that the settings
choose is marked with *.
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

from charts.bars import plan_chart
from charts.style import check_path, number, save, shown_in
from configurator import NonNegativeFloat, NonNegativeInt, PositiveFloat, configure, settings_of
from data.dataset import DATA_DIR, Dataset
from data.vocabulary import DataError, expected_vocab_size
from distributed.exits import exit_on_wrong_input
from distributed.machine import resolve_dtype
from distributed.ranks import check_backend
from forecast.memory import (
    CPU_RESIDENT,
    LOSS_CHUNK,
    MODES,
    Extras,
    Forecast,
    Workload,
    forecast,
    gpt_specs,
    predicted_activations,
)
from model import GPT2_SIZES, GPTConfig, check_block_size
from run.shadow import check_device
from zero.flags import Flags
from zero.layout import ParameterSpec, Plan
from zero.prediction import Activations, Prediction, ShardedPrediction

# plan
world_size = "1,2,4,8,64,1024"  # numbers of ranks, separated by commas
vocab_size: NonNegativeInt = 0  # number of tokens, if the dataset is not prepared and not one of data/; 0: that of the dataset
# memory that PyTorch may use on each GPU, in 10^9 bytes; CUDA itself takes about 1 GB in addition. With --device=cpu, memory
# of each rank; Python and its libraries take about 0.4 GB in addition
gpu_memory_gb: PositiveFloat = 80.0
bandwidth_gbit: PositiveFloat = 100.0  # what a rank can send per second, to estimate communication that overlaps with nothing
bandwidth_between_gbit: NonNegativeFloat = 0.0  # the same between machines of zero_shard_size ranks each; 0: bandwidth_gbit
explain = ""  # name of a parameter: print which rank owns which part of it, instead of the table
json = ""  # path of a JSON file that also receives the table, in bytes
plot = ""  # path of a picture: .png, .svg or .html (interactive)
legend = False  # explain the columns of the table

BATCHES = [4**power for power in range(7)]  # activations are predicted for these batch sizes, and interpolated between them
COLUMNS = {  # heading of each column, its unit, and its text in a row
    "ranks": ("", "{world_size}"),
    "mode": ("", "{mode}{chosen}"),
    "parameters": ("{unit}", "{parameters}"),
    "gradients": ("{unit}", "{gradients}"),
    "state": ("{unit}", "{state}"),
    "uneven": ("x", "{state_to_mean:.2f}"),
    "masters": ("{unit}", "{master}"),
    "buckets": ("{unit}", "{buckets}"),
    "activations": ("{unit}", "{activations}"),
    "temporary": ("{unit}", "{temporary}"),
    "shadow": ("{unit}", "{shadow}"),
    "peak": ("{unit}", "{peak}"),
    "at save": ("{unit}", "{saving}"),
    "fits": ("", "{fits}"),
    "max batch": ("", "{largest_batch}"),
    "sent": ("{unit}", "{sent}"),
    "between": ("{unit}", "{between}"),
    "sent in": ("ms", "{sent_ms:.0f}"),
}
PARTS = ("parameters", "gradients", "state", "master", "buckets", "activations", "shadow")
SCALED = (*PARTS, "temporary", "peak", "saving", "sent", "between")
OPTIONAL = ("shadow", "between")  # columns that are left out if all rows have 0
LEGEND = """
*            the mode that the settings choose
gradients    between micro-steps if there are several, otherwise before the update
uneven       optimizer state of this rank, divided by the mean over all ranks; 1.00 is perfectly even
masters      this rank's part of the float32 copy of bfloat16 weights, or its remainders
buckets      the most that communication holds in addition to gradients
activations  what forward keeps for backward
temporary    what the peak needs in addition to these parts: gradients of the logits and of the tied embedding, autocast's
             copies of the weights, or the original weights while the model is wrapped{shadow}
peak         the most while training, without torch.compile, which usually takes less
at save      the peak while a checkpoint is {saving}
fits         whether the peaks are at most {gpu_memory_gb:g} GB{resident}
max batch    the largest batch_size that fits, up to {largest_batch}
sent         what a rank sends per iteration, and how long it takes at {bandwidth_gbit:g} Gbit/s without overlap{between}"""
_SHADOW = "\nshadow       what shadow_check holds in the first iterations ({shadow_check}): plain AdamW on a copy of the model"
_RESIDENT = f", with {CPU_RESIDENT - 1:.0%} more for pages that the system's allocator keeps"
_BETWEEN = """
between      of this: what leaves a machine of zero_shard_size={zero_shard_size} ranks, as the mean over its ranks, at
             {gbit:g} Gbit/s. Without hybrid sharding, a ring leads through all ranks, and one rank of each machine sends on"""


def model_config(settings: dict[str, Any]) -> GPTConfig:
    """Return the sizes of the model that train.py would make.

    Raises:
        ValueError: if the sizes are impossible, or come from a checkpoint.
    """
    sizes: dict[str, Any] = {name: settings[name] for name in ("block_size", "n_layer", "n_head", "n_embd", "dropout", "bias")}
    if settings["init_from"] in GPT2_SIZES:
        check_block_size(settings["block_size"], GPTConfig.block_size)
        if settings["vocab_size"]:
            raise ValueError(f"vocab_size={settings['vocab_size']}: {settings['init_from']} has its own; remove --vocab_size")
        sizes |= {**GPT2_SIZES[settings["init_from"]], "bias": True, "vocab_size": 50257}
        return GPTConfig(**sizes)
    if settings["init_from"] != "scratch":
        raise ValueError(
            f"init_from={settings['init_from']}: plan.py reads no checkpoint; remove it and give n_layer, n_head and n_embd"
        )
    return GPTConfig(**sizes, vocab_size=vocabulary(settings))


def vocabulary(settings: dict[str, Any]) -> int:
    """Return the size of the vocabulary that train.py would give the model.

    Raises:
        ValueError: if the dataset is prepared, and train.py would refuse it or not use `--vocab_size`.
    """
    name, given = settings["dataset"], settings["vocab_size"]
    folder = os.path.join(DATA_DIR, name)
    if os.path.exists(os.path.join(folder, "train.bin")):
        size = Dataset(name, settings["block_size"]).vocab_size or GPTConfig.vocab_size
        if given not in (0, size):
            raise ValueError(f"vocab_size={given}: dataset {name} is prepared and gives {size}; remove --vocab_size")
        return size
    if given:
        return given
    try:
        return expected_vocab_size(folder) or GPTConfig.vocab_size
    except DataError as error:
        print(f"WARNING: the vocabulary of dataset {name} is not known: it is not prepared, and {error}.")
        print(
            f"         The table is for {GPTConfig.vocab_size} tokens and may be far off; use --vocab_size=<number of tokens>"
        )
        return GPTConfig.vocab_size


def world_sizes(text: str) -> list[int]:
    """Return the numbers of `--world_size`."""
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
        best = "bfloat16" if self.device_type == "cuda" else "float32"
        self.dtype = resolve_dtype(settings["dtype"], settings["param_dtype"], best)
        check_device(settings["shadow_check"], self.device_type)
        if settings["bandwidth_between_gbit"] and not settings["zero_shard_size"]:
            raise ValueError(
                "bandwidth_between_gbit needs the number of ranks of a machine; use for example --zero_shard_size=8"
            )
        resident = CPU_RESIDENT if self.device_type == "cpu" else 1.0
        self.memory = int(settings["gpu_memory_gb"] * 1e9 / resident)  # bytes that tensors may take
        self.limit = f"{settings['gpu_memory_gb']:g} GB"
        if resident > 1:
            self.limit += f" ({self.memory / 1e9:.3g} GB for tensors)"
        self.extras = Extras.of(settings)
        numel = sum(spec.numel for spec in self.specs)
        self.description = (
            f"{numel / 1e6:.1f}M parameters, {self.dtype} on {self.device_type}, "
            f"{settings['batch_size']} x {config.block_size} tokens per micro-step, "
            f"{settings['gradient_accumulation_steps']} micro-steps per iteration, all ranks together"
        )
        self._plans: dict[tuple[Flags, int], Plan] = {}

    def plan(self, flags: Flags, world_size: int) -> Plan:
        """Return the plan of the flags. Modes with equal plans share it: a plan of 1024 ranks takes a tenth of a second."""
        key = replace(flags, shard_gradients=False), world_size
        if key not in self._plans:
            self._plans[key] = flags.plan(self.specs, world_size)
        return self._plans[key]

    def complete(self, flags: Flags, world_size: int) -> Flags:
        """Return the flags of a mode with the sizes in the settings. If zero_shard_size does not fit, all ranks share it."""
        flags = replace(flags, bucket_mb=self.settings["zero_bucket_mb"])
        is_sharded = flags.implementation(world_size) == "sharded"
        return replace(flags, shard_size=self.shard_size(world_size)) if is_sharded else flags

    def shard_size(self, world_size: int) -> int:
        """Return zero_shard_size if it divides the number of ranks, otherwise 0: all ranks share the state."""
        shard_size = self.settings["zero_shard_size"]
        return shard_size if shard_size and world_size % shard_size == 0 else 0

    def rows(self, world_size: int) -> list[dict[str, Any]]:
        """Return one row per mode, and one for the settings if no mode matches them. A single process has only one mode."""
        settings = self.settings
        base, checkpointing = MODES["sharded" if world_size > 1 else "adamw"], settings["activation_checkpointing"]
        loss_chunk = settings["loss_chunk"]
        modes = {(flags, checkpointing, loss_chunk): mode for mode, flags in MODES.items() if world_size > 1 or mode == "adamw"}
        modes.setdefault((base, True, loss_chunk), "checkpointing")
        modes.setdefault((base, checkpointing, loss_chunk or LOSS_CHUNK), "loss_chunk")
        if world_size > 1:
            every = replace(MODES["remainder"], shard_gradients=True, state_dtype=MODES["int8"].state_dtype)
            modes.setdefault((every, True, loss_chunk or LOSS_CHUNK), "all")
        chosen = Flags(
            settings["use_zero1"],
            settings["zero1_impl"],
            shard_gradients=settings["shard_gradients"],
            param_dtype=settings["param_dtype"],
            check_reads=settings["zero_check_reads"],
            shard_size=settings["zero_shard_size"],
            master_dtype=settings["master_dtype"],
            state_dtype=settings["state_dtype"],
        )
        if chosen.use_zero1 and chosen.zero1_impl == "sharded":
            chosen = replace(chosen, shard_size=self.shard_size(world_size))
        if chosen.implementation(world_size) != "sharded":  # the other flags have no effect
            chosen = MODES[chosen.implementation(world_size)]
        key = replace(chosen, shard_size=0, check_reads=False), checkpointing, loss_chunk
        modes.setdefault(key, "these flags")
        return [self.row(mode, *one, world_size, chosen=one == key) for one, mode in modes.items()]

    def row(
        self, mode: str, flags: Flags, checkpointing: bool, loss_chunk: int, world_size: int, chosen: bool
    ) -> dict[str, Any]:
        """Return the figures of one mode, in bytes, on the rank with the most optimizer state."""
        settings = self.settings
        flags = self.complete(flags, world_size)
        micro_steps = math.ceil(settings["gradient_accumulation_steps"] / world_size)
        dtype = flags.param_dtype if flags.param_dtype != "float32" else self.dtype
        workload = Workload(self.config, settings["batch_size"], dtype, self.device_type, checkpointing, loss_chunk)
        result = forecast(
            self.plan(flags, world_size),
            world_size,
            micro_steps,
            workload.device_type,
            self.activations(workload, flags),
            flags.shard_gradients,
            distributed=world_size > 1,
            extras=self.extras,
        )
        prediction, sent = result.prediction, sum(result.prediction.sent().values())
        between = self.between(prediction)
        bandwidth = settings["bandwidth_gbit"]
        row: dict[str, Any] = {
            "mode": mode,
            "chosen": " *" if chosen else "",
            "world_size": world_size,
            **prediction.at("accumulating" if micro_steps > 1 else "before step"),
            "buckets": prediction.largest_buckets,
            "state_to_mean": result.state_to_mean,
            "activations": result.activations.saved,
            "shadow": result.shadow,
            "peak": result.peak,
            "saving": result.saving_peak,
            "saving_on_cpu": result.saved_copy,
            "fits": "yes" if max(result.peak, result.saving_peak) <= self.memory else "no",
            "sent": sent,
            "between": between,
            "sent_ms": ((sent - between) / bandwidth + between / (settings["bandwidth_between_gbit"] or bandwidth)) * 8 / 1e6,
        }
        # the parts are not all at their largest at the same time, so the peak can also be less than their sum
        row["temporary"] = max(0, row["peak"] - sum(row[part] for part in PARTS))
        row["largest_batch"] = self.largest_batch(workload, flags, result)
        return row

    def activations(self, workload: Workload, flags: Flags) -> Activations:
        """Return the larger activations: of the run, or of the shadow, whose weights are always float32."""
        return predicted_activations(workload, "float32" if self.settings["shadow_check"] else flags.param_dtype)

    def between(self, prediction: Prediction) -> int:
        """Return the bytes that leave a machine of `zero_shard_size` ranks, as the mean over its ranks; 0 without this size.

        With hybrid sharding, these are the all-reduces between the replicas. All other modes send everything along rings over
        all ranks: on each machine, one rank sends to the next machine.
        """
        sent, world_size = prediction.sent(), prediction.world_size
        if isinstance(prediction, ShardedPrediction) and prediction.plan.world_size < world_size:
            return sent["all-reduce"]
        machines = math.ceil(world_size / (self.settings["zero_shard_size"] or world_size))
        return sum(sent.values()) * machines // world_size if machines > 1 else 0

    def largest_batch(self, workload: Workload, flags: Flags, result: Forecast) -> int:
        """Return the largest batch size that fits, or 0. `result` is the forecast for any batch size.

        The peak of activations is the largest of several linear functions of the batch size, so it is convex, on both sides of
        a full chunk of the loss. A straight line between two predicted batch sizes is therefore not too low.
        """

        def fits(activations: Activations) -> bool:
            forecast = replace(result, activations=activations)
            return max(forecast.peak, forecast.saving_peak) <= self.memory

        low = None
        full_chunk = workload.loss_chunk // self.config.block_size  # fewer sequences have fewer logits than a chunk
        for batch in sorted({*BATCHES, workload.batch_size, full_chunk, full_chunk + 1} - {0}):
            activations = self.activations(replace(workload, batch_size=batch), flags)
            high = batch, activations
            if not fits(activations):
                break
            low = high
        if low is None:
            return 0

        def does_not_fit(size: int) -> bool:
            share = (size - low[0]) / max(1, high[0] - low[0])
            between = Activations(*(round(a + share * (b - a)) for a, b in zip(low[1], high[1], strict=True)))
            return not fits(between)

        return low[0] + bisect_left(range(low[0] + 1, high[0] + 1), True, key=does_not_fit)


def print_owners(name: str, planner: Planner, world_size: int) -> None:
    """Print which rank owns which elements of a parameter."""
    names = [spec.name for spec in planner.specs]
    if name == "lm_head.weight":
        raise ValueError("explain=lm_head.weight: it is the same tensor as transformer.wte.weight")
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1) or names[:1]
        raise ValueError(f"explain={name}: the model has no such parameter; it has for example {near[0]}")
    number = names.index(name)
    spec = planner.specs[number]
    for mode in ("sharded", "torch") if world_size > 1 else ("adamw",):
        plan = planner.plan(planner.complete(MODES[mode], world_size), world_size)
        groups = f" in {world_size // plan.world_size} groups" if 1 < plan.world_size < world_size else ""
        print(f"{mode}, ranks: {world_size}{groups}; {name} {tuple(spec.shape)}, {spec.numel:,} elements when flattened")
        for rank in range(plan.world_size):
            owned = [slice_ for slice_ in plan.slices(rank) if slice_.param == number]
            if owned:
                share = sum(slice_.numel for slice_ in owned) / max(1, spec.numel)
                ranges = ", ".join(f"{slice_.start:,} to {slice_.stop:,}" for slice_ in owned)
                print(f"  rank {rank} owns {share:.1%}: {ranges}")


def verdict(rows: list[dict[str, Any]], limit: str, divisor: float, unit: str, settings: dict[str, Any]) -> str:
    """Return a line about one number of ranks: what the settings take and save, whether it fits, and the largest batch.

    If train.py would refuse the settings with this number of ranks, it says which others are assumed.
    """
    plain, chosen = rows[0], next(row for row in rows if row["chosen"])
    size = chosen["world_size"]
    text = f"{size:5} rank{'s' if size > 1 else ' '}  peak {number(chosen['peak'] / divisor)} {unit}"
    if chosen is not plain:
        text += f", {1 - chosen['peak'] / plain['peak']:.0%} less than plain AdamW ({number(plain['peak'] / divisor)} {unit})"
    if chosen["fits"] == "yes":
        text += f": fits in {limit}, up to --batch_size={chosen['largest_batch']}"
        text += f" (plain AdamW {plain['largest_batch']})" if chosen is not plain else ""
    else:
        fitting = ", ".join(row["mode"] for row in rows if row["fits"] == "yes")
        text += f": does not fit in {limit}; what fits: {fitting or 'none of these modes'}"
    steps, shard_size = settings["gradient_accumulation_steps"], settings["zero_shard_size"] or 1
    needs = [f"--gradient_accumulation_steps={math.ceil(steps / size) * size}"] if steps % size else []
    needs += ["--zero_shard_size=0"] if size > 1 and size % shard_size else []
    return f"{text}; train.py needs {' '.join(needs)} for it, as assumed here" if needs else text


def print_table(rows: list[dict[str, Any]], divisor: float, unit: str) -> None:
    """Print the rows, with an empty line between world sizes."""
    digits = 2 if unit == "GB" else 1
    columns = {key: text for key, (_, text) in COLUMNS.items() if key not in OPTIONAL or any(row[key] for row in rows)}
    cells = [list(columns), [COLUMNS[key][0].format(unit=unit) for key in columns]]
    for row in rows:
        scaled = {key: f"{value / divisor:.{digits}f}" if key in SCALED else value for key, value in row.items()}
        cells.append([text.format(**scaled) for text in columns.values()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    world_size: str | None = None
    for line in cells:
        if line[0] not in ("", world_size):
            world_size = line[0]
            print()
        aligned = zip(columns, line, widths, strict=True)
        print("  ".join(f"{cell:{'<' if column == 'mode' else '>'}{width}}" for column, cell, width in aligned))


def print_plan(planner: Planner, sizes: list[int]) -> list[dict[str, Any]]:
    """Print the table with its explanations and return its rows."""
    rows = [row for size in sizes for row in planner.rows(size)]
    settings = planner.settings
    steps = settings["gradient_accumulation_steps"]
    divisor, unit = shown_in("bytes", 10 * max(row["parameters"] for row in rows))  # 0.1 GB is the least with two digits
    print(f"{planner.description}; the rank with the most optimizer state")
    for size in sizes:
        of_size = [row for row in rows if row["world_size"] == size]
        print(verdict(of_size, planner.limit, divisor, unit, settings))
    print_table(rows, divisor, unit)
    copied = max(row["saving_on_cpu"] for row in rows)
    saving = "written in the background, while training goes on" if settings["async_save"] else "saved"
    if copied and planner.device_type != "cpu":
        whose = "rank 0" if settings["checkpoint_format"] == "consolidated" else "each rank, at most"
        saving += f";\n{'':13}a copy of it takes {copied / divisor:.2f} {unit} of main memory of {whose}"
    gbit = settings["bandwidth_between_gbit"] or settings["bandwidth_gbit"]
    details = {
        "shadow": _SHADOW.format(**settings) if settings["shadow_check"] else "",
        "resident": _RESIDENT if planner.device_type == "cpu" else "",
        "between": _BETWEEN.format(**settings, gbit=gbit) if any(row["between"] for row in rows) else "",
    }
    if settings["legend"]:
        print(LEGEND.format(**settings, **details, largest_batch=BATCHES[-1], saving=saving))
    else:
        print("\n*: the settings; --legend=True explains the columns")
    if 1 in sizes:
        print("note: 1 rank is a process without torchrun; DistributedDataParallel would take the gradients once more")
    for size in sizes:
        if size > 1 and steps <= size:
            print(f"note: with one micro-step on each of {size} ranks, shard_gradients changes nothing")
    return rows


def check_outputs(settings: dict[str, Any]) -> None:
    """Raise ValueError or OSError now if the files of --json and --plot cannot be written later."""
    if settings["explain"] and (settings["json"] or settings["plot"]):
        raise ValueError("explain prints no table; remove --json and --plot, or run plan.py once more without --explain")
    if settings["plot"]:
        check_path(settings["plot"])
    for key in ("json", "plot"):
        if os.path.isdir(settings[key]):
            raise ValueError(f"{key}={settings[key]} is a folder; give the path of a file")
        if settings[key]:
            os.makedirs(os.path.dirname(settings[key]) or ".", exist_ok=True)


def main() -> None:
    train = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
    settings = configure({**settings_of(__file__, train, torch=torch), "__doc__": __doc__})
    with exit_on_wrong_input():
        check_outputs(settings)
        sizes = world_sizes(settings["world_size"])
        if max(sizes) > 1:
            check_backend(settings["backend"], "cuda" if settings["device"] == "auto" else settings["device"])
        planner = Planner(settings, model_config(settings))
        if settings["explain"]:
            for size in sizes:
                print_owners(settings["explain"], planner, size)
            return
        rows = print_plan(planner, sizes)
        if settings["json"]:
            with open(settings["json"], "w") as file:
                dump({"settings": settings, "rows": rows}, file, indent=1)
            print(f"the table is in {settings['json']}")
        if settings["plot"]:
            save(plan_chart(rows, (planner.memory, planner.limit), planner.description), settings["plot"])
            print(f"the picture is in {settings['plot']}")


if __name__ == "__main__":
    main()
