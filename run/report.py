"""The report card at the end of a run: what was trained, to what loss, how fast, with what memory, and what to do next."""

import json
import math
import os
import shlex
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from typing import Any

from distributed.ranks import print0
from forecast.prediction import PURPOSES
from run.summary import Summary
from zero.checkpoint.files import atomic_write
from zero.flags import Flags

NAME, EVALUATION = "report.md", "evaluation.json"  # in out_dir
_HEADING = "\n## Evaluation\n\n"  # of the part of the card that `add_evaluation` writes


def rows(summary: Summary) -> dict[str, str]:
    """Return the rows of the report card: label and text. What is not known is left out."""
    facts, restarts, warnings, device = summary.facts, summary.restarts, summary.warnings, summary.facts["device"]
    known = summary.last | summary.figures()

    def fill(form: str, more: str = "") -> str:
        """Return the text with its figures, or '' if one is not known."""
        try:
            return form.format_map(known) + more
        except KeyError:
            return ""

    def loss(name: str) -> str:
        at = summary.at.get(f"best_{name}", 0)
        return fill(f"first {{first_{name}:.4f}}, best {{best_{name}:.4f}} at iteration {at:,}, last {{last_{name}:.4f}}")

    def held(which: str, more: str) -> str:
        mb = sum(known.get(f"memory/{which}_{purpose}_mb", 0.0) for purpose in PURPOSES)
        return f"{size(mb * 1e6)} before the update{more}" if mb else ""

    def peak(key: str) -> str:
        return f"{size(known[key] * 1e6)} at the peak" if key in known else ""

    how = [f"{part['implementation']} on {part['world_size']} rank{'s' * (part['world_size'] > 1)}" for part in facts["parts"]]
    names = ", ".join(dict.fromkeys(facts["devices"]))
    sizes = {key: facts[key] for key in ("gradient_accumulation_steps", "batch_size", "block_size")}
    tokens_per_iter, factors = math.prod(sizes.values()), " x ".join(f"{key}={value}" for key, value in sizes.items())
    commit, _, dirty = (facts.get("git_commit") or "").partition("-")
    tokens, elapsed_s, saved_mb = (known.get(key, 0) for key in ("iter/tokens", "time/elapsed_s", "memory/saved_mb"))
    ends = [part["from_tokens"] for part in facts["data"][1:]] + [tokens]
    seen = [(of["dataset"], end - of["from_tokens"], of["train_tokens"]) for of, end in zip(facts["data"], ends, strict=True)]
    medians = f" (medians since iteration {summary.medians_from:,})" if summary.medians_from else " (medians)"
    if summary.timed <= summary.medians_from:
        medians = " (of the first iteration alone, which takes longer than later ones)"
    optimizer = facts["optimizer"]
    plain = f"{optimizer} with DistributedDataParallel" if facts["parts"][-1]["world_size"] > 1 else f"plain {optimizer}"
    less = f", {size(abs(saved_mb) * 1e6)} {'less' if saved_mb > 0 else 'more'} than {plain}" if saved_mb else ""
    flags = {flag.name: flag.default for flag in fields(Flags)} | {"activation_checkpointing": False, "loss_chunk": 0}
    changed = [f", {name}={facts[name]}" for name, default in flags.items() if facts.get(name, default) != default]
    reached, saves, newest, target = summary.reached, summary.saves, _newest_save(summary), ""
    if reached.keys() >= {"iter/tokens", "time/elapsed_s"}:
        target = f"val loss {reached['val/loss']:.4f} after {reached['iter']:,} iterations, {reached['iter/tokens']:,} tokens, "
        target += f"{_time(reached['time/elapsed_s'])} (h:mm:ss)"
    of_tensors = held("measured", f"{less}: parameters, gradients, state and buckets")
    texts = {  # parts; without the first one there is no row
        "model": [f"{facts['parameters'] / 1e6:.2f}M parameters, {facts['dtype']}; {', then '.join(how)}, {device}: {names}"],
        "data": [", then ".join(f"{name}: {count:,} tokens, {count / whole:.2f} epochs" for name, count, whole in seen)],
        "settings": [
            f"optimizer={optimizer}{''.join(changed)}, ",
            f"learning_rate={facts['learning_rate']:g}, seed={facts['seed']}, ",
            f"{tokens_per_iter:,} tokens per iteration: {factors}",
            f"; commit {commit[:8]}{dirty and f' ({dirty})'}" if commit else "",
        ],
        "loss": [loss("loss")],
        "val loss": [loss("val_loss"), fill("; the best is {best_val_bits_per_byte:.4f} bits per byte")],
        "target": [target],
        "time": [
            f"{_time(elapsed_s)} (h:mm:ss), with evaluations and checkpoints" if elapsed_s else "",
            ", without what was lost before a restart" if restarts else "",
        ],
        "speed": [fill("{median_tokens_per_second:,.0f} tokens/s"), fill(", MFU {median_mfu:.1f} %"), medians],
        "communication": [
            fill("{median_exposed_ms:.1f} ms of a step exposed, {median_exposed_percent:.0f} %", medians),
            fill("; {comm/sent_mb_per_step:.1f} MB sent per step"),
        ],
        # of the fullest rank: of the process, of its tensors, and what was predicted
        "process": ["" if device == "cuda" else peak("peak_memory_mb"), ", with Python and its libraries"],
        "tensors": ["; ".join(filter(None, [peak("peak_memory_mb") if device == "cuda" else "", of_tensors]))],
        "predicted": [held("predicted", f", {peak('memory/predicted_peak_mb')}")],
        "checkpoints": [
            f"{len(saves)} written, {size(saves[max(saves)])} each" if saves else "none written",
            "" if newest is None else f"; the newest after {newest:,} iterations",
            f"; the last save failed: {summary.save_error}" if summary.save_error else "",
        ],
        "restarts": [f"{len(restarts)}, the last one at iteration {restarts[-1]:,}" if restarts else ""],
        "warnings": [f"{len(warnings)}; the last one: {' '.join(warnings[-1].split())}" if warnings else ""],
    }
    return {label: "".join(parts) for label, parts in texts.items() if parts[0]}


def _newest_save(summary: Summary) -> int | None:
    """Return the iteration of the newest checkpoint, or None: one that was written, or the one that was resumed from."""
    return max([*summary.saves, *summary.restarts[-1:]], default=None)


def next_commands(summary: Summary) -> dict[str, str]:
    """Return what one may do with the run next: label and command."""
    folder = shlex.quote(summary.facts["out_dir"])
    dashboard = {"dashboard": f"python dashboard.py {folder} --html=runs.html"}
    if _newest_save(summary) is None:
        return dashboard
    has_ended = summary.last.get("iter", 0) > summary.facts["max_iters"] and not summary.save_error
    more = " and a lower --stop_at_val_loss" if summary.reached else " and a larger --max_iters" if has_ended else ""
    resume = f"the same command with --init_from=resume{more}"
    return {"sample": f"python sample.py --out_dir={folder}", **dashboard, "resume": resume}


def write(outcome: str, summary: Summary) -> None:
    """Print the card, and write it into the folder of the run. If the disk is full, print a warning and continue."""
    path, texts, commands = os.path.join(summary.facts["out_dir"], NAME), rows(summary), next_commands(summary)
    table = [f"| {label} | {text.replace('|', chr(92) + '|')} |" for label, text in texts.items()]
    list_ = [f"- {label}: `{text}`" for label, text in commands.items()]
    try:
        with atomic_write(path) as temporary, open(temporary, "w") as file:
            file.write("\n".join([f"# Report: {outcome}", "", "| | |", "|---|---|", *table, "", *list_, ""]))
    except OSError as error:
        print0(f"WARNING: {NAME} is not written: {error}")
    texts = {"run": f"{outcome}; this report is {path}", **texts, **commands}
    print0("\n" + "\n".join(f"{label:<15}{text}" for label, text in texts.items()))


def add_evaluation(folder: str, iteration: int | None, dataset: str, results: dict[str, float]) -> None:
    """Write results of evaluate.py to evaluation.json, and to the card if there is one. Others of the same checkpoint stay.

    Raises OSError if a file cannot be written.
    """
    path, card = os.path.join(folder, EVALUATION), os.path.join(folder, NAME)
    values: dict[str, Any] = {"iter": iteration, "dataset": dataset}
    with suppress(FileNotFoundError, ValueError, AttributeError, KeyError, RecursionError), open(path) as file:
        before = json.load(file)
        if before.get("iter") == iteration:
            same_data = before["dataset"] == dataset
            kept = {key: value for key, value in before.items() if isinstance(value, int | float)}
            values = {key: value for key, value in kept.items() if same_data or "/val_" not in key} | values
    values |= results
    with atomic_write(path) as temporary, open(temporary, "w") as file:
        json.dump(values, file, indent=1)
    if os.path.exists(card):
        with open(card) as file:
            of_run = file.read().partition(_HEADING)[0]
        text = ", ".join(f"{key.partition('/')[2]} {value:.4f}" for key, value in values.items() if "/" in key)
        with atomic_write(card) as temporary, open(temporary, "w") as file:
            after = "" if iteration is None else f", after {iteration:,} iterations"
            file.write(f"{of_run}{_HEADING}{dataset}{after}: {text}\n")


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))


def size(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
