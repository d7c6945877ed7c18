"""Plan a run before you rent its GPUs: memory per rank, largest batch, bytes to send, for each way to hold the state.

GPT-2 XL on 1 to 1024 GPUs with 80 GB. This needs no GPU and starts no processes:
    $ python plan.py config/train_gpt2_xl.py --world_size=1,2,4,8,64,1024 --gpu_memory_gb=80

A small model on two CPU ranks of a laptop:
    $ python plan.py config/train_shakespeare_char.py --world_size=2 --device=cpu --gradient_accumulation_steps=2

What fits: the largest batch, the fewest GPUs, the largest model. And what a run costs on rented H100s:
    $ python plan.py config/train_gpt2_xl.py --world_size=8 --find=batch        # or gpus, or model
    $ python plan.py config/train_gpt2.py --world_size=8 --gpu=H100 --gpu_hour_price=2.50

Every setting of train.py is one of plan.py, which compiles on a GPU by default; python train.py --help explains them.

Time is estimated: computation at --mfu per cent of the data sheet's peak, and the communication that does not overlap
with it, without evaluations, checkpoints and slow ranks.

The row that the settings choose is marked with *. `checkpointing` is sharded with activation_checkpointing=True, and
`all` has everything together. If the settings have checkpointing or loss_chunk, all rows have it. For comparison only:
`_in_place`, a loop whose zero_grad(set_to_none=False) leaves gradients in DDP's buckets from the third iteration on.

Columns, of the rank with the most optimizer state:
  gradients    between micro-steps if there are several, otherwise before the update
  uneven       its optimizer state, divided by the mean over all ranks; 1.00 is perfectly even
  masters      its part of the float32 copy of 16-bit weights, or its remainders
  buckets      the most that communication holds in addition to gradients
  activations  what forward keeps for backward
  temporary    what the peak needs in addition: gradients of the logits and of the tied embedding, casts of weights,
               what a GPU's allocator rounds up, or on a CPU the original weights while the model is wrapped
  peak         the most while training; compiled blocks count as not compiled, the loss counts as --compile says.
               On a GPU, PyTorch counts cuBLAS's workspaces, too: 0.07 GB from Hopper on, 0.02 before
  at save      the peak while a checkpoint is saved, with async_save while training goes on
  fits         whether the peaks fit; on a CPU with 30 % more, for pages that the system's allocator keeps
  max batch    the largest batch_size that fits, up to 4096
  sent         what a rank sends per iteration; sent in: how long that takes alone
  between      of this, what leaves a machine, as the mean over its ranks; every collective counts as a ring
  exposed      how much of the time the computation cannot hide, estimated

Modes:
"""

import itertools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from json import dump
from operator import attrgetter, itemgetter
from typing import Any, Literal

from charts.style import number, shown_in, table, with_unit
from configurator import TRAIN, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, configure, integers, settings_of
from data.dataset import DATA_DIR, Dataset
from data.shards import paths_of
from data.vocabulary import DataError, expected_vocab_size
from distributed.exits import exit_on_wrong_input, guard_output
from distributed.ranks import check_backend
from forecast.advice import batch_of_the_run, candidates, cheapest, fewest_ranks, largest_model, prices
from forecast.modes import MODES, explained, without_effect
from forecast.planner import Choice, Planner
from forecast.run_memory import CPU_RESIDENT
from model import GPT2_SIZES, GPT2_VOCAB_SIZE, GPTConfig, check_block_size
from zero.flags import Flags

# plan
world_size = "1,2,4,8,64,1024"  # numbers of ranks, separated by commas
vocab_size: NonNegativeInt = 0  # number of tokens, if the dataset is not prepared and not one of data/; 0: that of the dataset
# memory that PyTorch may use on each GPU, in 10^9 bytes; 0: that of --gpu, less what CUDA, cuBLAS and NCCL take themselves.
# With --device=cpu, memory of each rank, 0: 80; Python and its libraries take about 0.4 GB in addition
gpu_memory_gb: NonNegativeFloat = 0.0
find: Literal["nothing", "batch", "gpus", "model"] = "nothing"  # print the largest batch_size, fewest GPUs or largest model
ranks_per_machine: PositiveInt = 8
bandwidth_gbit: NonNegativeFloat = 0.0  # what a rank can send per second to the ranks of its machine; 0: by the link of --gpu
between_gbit: PositiveFloat = 1600.0  # what a machine can send per second to other machines; this is a network card per A100
gpu = "A100"  # such as T4, L4, 4090, H100: its peak FLOP/s, memory, link, and whether it has bfloat16
mfu: NonNegativeFloat = 0.0  # FLOP/s in per cent of the peak; 0: as published for full batches, 33 or 42
gpu_hour_price: NonNegativeFloat = 0.0  # of one GPU, in any currency; 0: the run's cost is not printed
json = ""  # path of a JSON file that also receives the table, in bytes

COLUMNS = {  # heading of each column: what it shows of a row, and the unit of that
    "ranks": ("world_size", ""),
    "mode": ("mode", ""),
    "parameters": ("parameters", "bytes"),
    "gradients": ("gradients", "bytes"),
    "state": ("state", "bytes"),
    "uneven": ("state_to_mean", "x"),
    "masters": ("master", "bytes"),
    "buckets": ("buckets", "bytes"),
    "activations": ("activations", "bytes"),
    "temporary": ("temporary", "bytes"),
    "peak": ("peak", "bytes"),
    "at save": ("saving", "bytes"),
    "fits": ("fits", ""),
    "max batch": ("largest_batch", ""),
    "sent": ("sent", "bytes"),
    "between": ("between", "bytes"),
    "sent in": ("sent_ms", "ms"),
    "exposed": ("exposed_ms", "ms"),
}
OPTIONAL = "between", "exposed"  # columns that are left out if all rows have 0
PAYS_WITH = attrgetter("flags.shard_gradients", "activation_checkpointing")  # of a choice: more bytes, more computation


def model_config(settings: dict[str, Any]) -> GPTConfig:
    """Return the sizes of the model that train.py would make.

    Raises:
        ValueError: if the sizes are impossible, or come from a checkpoint.
    """
    init_from, block_size = settings["init_from"], settings["block_size"]
    if init_from == "scratch":
        return GPTConfig.of(settings, vocab_size=vocabulary(settings))
    if init_from not in GPT2_SIZES:
        raise ValueError(f"init_from={init_from}: plan.py reads no checkpoint; remove it and give n_layer, n_head and n_embd")
    check_block_size(block_size, GPTConfig.block_size)
    if settings["vocab_size"]:
        raise ValueError(f"vocab_size={settings['vocab_size']}: {init_from} has its own; remove --vocab_size")
    sizes = {"block_size": block_size, "vocab_size": GPT2_VOCAB_SIZE, "dropout": settings["dropout"], "bias": True}
    return GPTConfig.of(GPT2_SIZES[init_from], **sizes)


def vocabulary(settings: dict[str, Any]) -> int:
    """Return the size of the vocabulary that train.py would give the model.

    Raises:
        ValueError: if the dataset is prepared, and train.py would refuse it or not use `--vocab_size`.
    """
    name, given, usual = settings["dataset"], settings["vocab_size"], GPTConfig.vocab_size
    folder = os.path.join(DATA_DIR, name)
    if paths_of(folder, "train"):
        size = Dataset(name, settings["block_size"]).vocab_size or usual
        if given not in (0, size):
            raise ValueError(f"vocab_size={given}: dataset {name} is prepared and gives {size}; remove --vocab_size")
        return size
    try:
        return given or expected_vocab_size(folder) or usual
    except DataError as error:
        assumed_size = f"the table is for {usual} tokens and may be far off; use --vocab_size=<number of tokens>"
        print(
            f"WARNING: the vocabulary of dataset {name} is not known, because it is not prepared, and {error}; {assumed_size}"
        )
        return usual


def description(planner: Planner) -> str:
    """Return what is planned, in a line."""
    settings = planner.settings
    return (
        f"{planner.numel / 1e6:.1f}M parameters, {settings['optimizer']}, {planner.dtype} on {planner.device_type}, "
        f"--compile={settings['compile']}, {settings['batch_size']} x {planner.config.block_size} tokens per micro-step, "
        f"{settings['gradient_accumulation_steps']} micro-steps per iteration, all ranks together"
    )


def verdict(rows: list[dict[str, Any]], planner: Planner, amount: Callable[[int], str]) -> Iterator[str]:
    """Yield lines about one number of ranks: what the settings take and save, whether it fits, how long the run takes.

    If the settings do not fit, lines say which ones do, and what these cost; if train.py refuses them, which are assumed.

    Args:
        amount: writes bytes with their unit.
    """
    plain, chosen = rows[0], next(row for row in rows if row["chosen"])
    size, saved, batches = chosen["world_size"], "", f"--batch_size={chosen['largest_batch']}"
    if chosen is not plain:
        baseline = plain["mode"]
        share = 1 - chosen["peak"] / plain["peak"]
        saved = f", {abs(share):.0%} {'less' if share >= 0 else 'more'} than {baseline} ({amount(plain['peak'])})"
        batches += f" ({baseline} {plain['largest_batch']})"
    fits = chosen["fits"] == "yes"
    room = f"fits in {planner.limit(size)}, up to {batches}" if fits else f"does not fit in {planner.limit(size)}"
    line = f"{in_words(size)}  peak {amount(chosen['peak'])}{saved}: {room}{assumed(planner, size)}"
    yield line + (duration(chosen, planner) if fits else "")
    if fits:
        return
    if (best := cheapest(planner, size)) is None:
        yield f"{'':7}nothing fits{wrong_tool(planner, size)}"
        return
    how = "fastest that fits with the least rounding, as predicted" if planner.flops else "cheapest that fits"
    yield from recommended(f"the {how}", best, planner, size, amount)
    if second := cheapest(planner, size, lambda choice: PAYS_WITH(choice) != PAYS_WITH(best)):
        yield from recommended("the second choice", second, planner, size, amount)
    rounded = cheapest(planner, size, lambda choice: choice.flags.stored_dtype is not None)
    if rounded is not None and planner.cost(rounded, size) < planner.cost(best, size):
        yield from recommended("cheaper, but rounded", rounded, planner, size, amount)


def in_words(size: int) -> str:
    return f"{size:5} rank{'s' if size > 1 else ' '}"


def assumed(planner: Planner, size: int) -> str:
    """Return what has been assumed in place of settings that train.py would refuse with this number of ranks."""
    needs, kept = [], ""
    if size > 1 and size % (planner.settings["shard_size"] or 1):
        needs.append("--shard_size=0")
    if planner.settings["gradient_accumulation_steps"] % size:
        batch_size, steps = planner.batch(size)
        needs.append(f"--batch_size={batch_size} --gradient_accumulation_steps={steps}")
        kept = f" ({planner.global_batch(batch_size, steps)})"
    return f"; train.py needs {' '.join(needs)} for it{kept}, as assumed here" if needs else ""


def recommended(title: str, choice: Choice, planner: Planner, size: int, amount: Callable[[int], str]) -> Iterator[str]:
    """Yield lines about settings that fit: what they take, and the price of each."""
    row, found = planner.figures("", choice, size), prices(planner, size, choice)
    spare = 1 - max(row["peak"], row["saving"]) / planner.memory(size)
    yield f"{'':7}{title}: {' '.join(found)}"
    takes = f"peak {amount(row['peak'])} ({spare:.0%} to spare), up to --batch_size={row['largest_batch']}"
    yield f"{'':9}{takes}{duration(row, planner)}"
    for setting, price in found.items():
        yield f"{'':9}{setting}: {price}"


def duration(row: dict[str, Any], planner: Planner) -> str:
    """Return the speed, the time and the cost of a run, if they are known."""
    if not row["seconds"]:
        return ""
    settings, size = planner.settings, row["world_size"]
    tokens = math.prod(planner.batch(size)) * planner.config.block_size  # per iteration
    speed, hours = tokens / row["seconds"], settings["max_iters"] * row["seconds"] / 3600
    of = f"{settings['max_iters']:,} iterations, {with_unit(settings['max_iters'] * tokens, 'tokens')}"
    took = f"{with_unit(hours, 'hours')} for {of}, on {settings['gpu']} at {planner.mfu:.3g} % MFU"
    text = f"; about {speed / 1e3:,.0f}k tokens/s and {took}"
    price = settings["gpu_hour_price"]
    return f"{text}, at a cost of {hours * size * price:,.0f}" if price else text


def wrong_tool(planner: Planner, size: int) -> str:
    """Return what to do where no flags are enough."""
    if (ranks := fewest_ranks(planner, "all flags")) is not None and ranks > size:
        return f", but all flags fit on {ranks} ranks (--find=gpus)"
    smaller = "use larger GPUs or a smaller model (--find=model)"
    if size == 1:
        return f" in one process: {smaller}"
    return f", because every rank holds all weights: use FSDP2 (fully_shard), which divides them; or {smaller}"


def print_table(rows: list[dict[str, Any]], divisor: float, unit: str) -> None:
    """Print the rows, with an empty line between world sizes."""
    columns = {heading: of for heading, of in COLUMNS.items() if heading not in OPTIONAL or any(row[of[0]] for row in rows)}
    formats = {"bytes": ".2f" if unit == "GB" else ".1f", "x": ".2f", "ms": ".0f", "": ""}
    lines = [list(columns), [unit if kind == "bytes" else kind for _, kind in columns.values()]]
    for _, of_size in itertools.groupby(rows, key=itemgetter("world_size")):
        lines.append([])
        for row in of_size:
            shown = {**row, "mode": row["mode"] + row["chosen"]}
            values = [(shown[key] / divisor if kind == "bytes" else shown[key], kind) for key, kind in columns.values()]
            lines.append([format(value, formats[kind]) for value, kind in values])
    print(f"\n{table(lines)}\n\n*: the settings; --help explains the columns")


def print_plan(planner: Planner, sizes: list[int]) -> list[dict[str, Any]]:
    """Print the table with its explanations and return its rows."""
    by_size = {size: [planner.figures(mode, choice, size) for choice, mode in planner.choices(size).items()] for size in sizes}
    rows = list(itertools.chain(*by_size.values()))
    divisor, unit = shown_in("bytes", 10 * max(row["parameters"] for row in rows))  # 0.1 GB is the least with two digits
    print(f"{description(planner)}; the rank with the most optimizer state")
    for of_size in by_size.values():
        print("\n".join(verdict(of_size, planner, lambda count: f"{number(count / divisor)} {unit}")))
    print(host_memory(planner, rows))
    print_table(rows, divisor, unit)
    for line in itertools.chain.from_iterable(notes(of_size, planner) for of_size in by_size.values()):
        print(f"note: {line}")
    return rows


def notes(rows: list[dict[str, Any]], planner: Planner) -> Iterator[str]:
    """Yield lines about one number of ranks: flags that take memory or change nothing, what checkpointing saves."""
    base, chosen = next((row for row in rows if row["mode"] == "sharded"), rows[0]), next(row for row in rows if row["chosen"])
    size, parts = base["world_size"], list(COLUMNS.items())[: list(COLUMNS).index("peak")]
    for row in rows:
        if row["peak"] > 1.005 * base["peak"] and (row["mode"] not in MODES or MODES[row["mode"]].flags.is_sharded):
            more, most = max((row[key] - base[key], heading) for heading, (key, kind) in parts if kind == "bytes")
            share = f"{row['peak'] / base['peak'] - 1:.0%} more than {base['mode']}"
            yield f"on {in_words(size).strip()}, {row['mode']} takes {share}: {with_unit(more, 'bytes')} of {most}"
    peak = planner.forecast(replace(planner.chosen(size), activation_checkpointing=True), size).peak
    if 2 * peak < chosen["peak"]:
        less = f"{1 - peak / chosen['peak']:.0%} less, for up to a third more computation"
        yield f"on {in_words(size).strip()}, --activation_checkpointing=True takes {less}"
    if size == 1:
        yield "1 rank is a process without torchrun; DistributedDataParallel would take the gradients once more"
        if idle := without_effect(Flags.of(planner.settings), 1):
            yield f"without effect on 1 rank: {', '.join(idle)}"
    elif planner.settings["gradient_accumulation_steps"] <= size:
        yield f"with one micro-step on each of {size} ranks, shard_gradients changes nothing"


def host_memory(planner: Planner, rows: list[dict[str, Any]]) -> str:
    """Return a line about the main memory of a machine."""
    settings = planner.settings
    ranks = min(settings["ranks_per_machine"], max(row["world_size"] for row in rows))
    chosen = [row for row in rows if row["chosen"] and row["world_size"] >= ranks]
    if planner.device_type == "cpu":
        most = ranks * max(max(row["peak"], row["saving"]) for row in chosen) * CPU_RESIDENT / 1e9
        return f"main memory of a machine with {ranks} of the ranks: at most {most:.3g} GB, and 0.4 GB for Python in each rank"
    copied = max(row["saving_on_cpu"] for row in chosen) / 1e9
    copies = f", at most {ranks} x {copied:.3g} GB for copies of what is saved" if copied else ""
    text = f"main memory of the first machine: {4 * planner.numel / 1e9:.3g} GB for the model that rank 0 makes{copies}"
    return f"{text}; and what Python and CUDA take in each rank"


def print_found(planner: Planner, sizes: list[int]) -> None:
    """Print the answers of --find, one line per way to train."""
    find, limit = planner.settings["find"], " or ".join(dict.fromkeys(f"in {planner.limit(size)}" for size in sizes))
    asked = {
        "batch": f"the largest batch_size {limit} per rank",
        "gpus": f"the fewest ranks {limit} per rank, as a power of two",
        "model": f"the largest model {limit} per rank, as deep for its width as GPT-2 XL",
    }
    print(f"{description(planner)}\n{asked[find]}:")
    for size in sizes if find != "gpus" else [max(sizes)]:
        for name in candidates(planner, size):
            print(f"{'' if find == 'gpus' else f'{in_words(size)}  '}{name:14}  {answer(planner, name, size)}")


def answer(planner: Planner, name: str, size: int) -> str:
    """Return what --find asks of one of `candidates`, with the flags that this takes."""
    find = planner.settings["find"]
    if find == "batch":
        largest, dividing, steps = batch_of_the_run(planner, candidates(planner, size)[name], size)
        if not largest:
            return " none"
        text = f"{largest:5}"
        if dividing:
            kept = planner.global_batch(dividing, steps)
            text += f"; --batch_size={dividing} --gradient_accumulation_steps={steps} for {kept}"
    elif find == "gpus":
        if (fewest := fewest_ranks(planner, name)) is None:
            return "none up to 1024"
        text, size = f"{fewest:5}", fewest
    else:
        if (model := largest_model(planner, name, size)) is None:
            return " none"
        found = model.config
        sizes = f"--n_layer={found.n_layer} --n_head={found.n_head} --n_embd={found.n_embd}"
        text = f"{model.numel / 1e6:6,.0f}M parameters: {sizes}"
    flags = " ".join(prices(planner, size, candidates(planner, size)[name]))
    return f"{text}; {flags}" if flags else text


def main() -> None:
    modes = explained(mode for mode in MODES if MODES[mode].planned or mode == "loss_chunk")
    defaults = {**settings_of(__file__, TRAIN), "__doc__": __doc__ + modes}
    settings = configure(defaults, unless_given=lambda given: {"compile": given["device"].startswith(("auto", "cuda"))})
    path, finds = settings["json"], settings["find"] != "nothing"
    with exit_on_wrong_input():
        if path and finds:
            raise ValueError("find prints no table; remove --json, or run plan.py once more without --find")
        if os.path.isdir(path):
            raise ValueError(f"json={path} is a folder; give the path of a file")
        if path:  # now, in case that it cannot be written later
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        sizes = integers("world_size", settings["world_size"])
        if max(sizes) > 1:
            check_backend(settings["backend"], "cuda" if settings["device"] == "auto" else settings["device"])
        planner = Planner(settings, model_config(settings))
        if finds:
            print_found(planner, sizes)
            return
        rows = print_plan(planner, sizes)
        if path:
            with open(path, "w") as file:
                dump({"settings": settings, "rows": rows}, file, indent=1)
            print(f"the table is in {path}")


if __name__ == "__main__":
    guard_output(goes_on=False)
    main()
