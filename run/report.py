"""The report card at the end of a run: what was trained, to what loss, how fast, with what memory, and what to do next."""

import math
import os
import shlex
from array import array
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np

from forecast.prediction import PURPOSES
from zero.checkpoint.files import atomic_write

NAME = "report.md"
_WIDTH = 15  # columns of the labels on the console
_LOSSES = {"loss": "iter/loss", "val_loss": "val/loss"}
_USUAL = {"optimizer": "adamw", "schedule": "cosine"}  # named only if they differ
_MEDIANS = ("throughput/tokens_per_second", "mfu", "comm/exposed_ms", "comm/exposed_percent")


class Summary:
    """The figures of a whole run, from its events. `figures` has them for wandb, `rows` for people.

    A run that resumes begins with the events that it keeps, so that what a killed process had done beyond its checkpoint
    counts once, when it is done again.

    Args:
        facts: content of run.json.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.first: dict[str, float] = {}  # by metric
        self.best: dict[str, tuple[float, int]] = {}  # by metric: smallest value, its iteration
        self.last: dict[str, Any] = {}  # by metric
        self.peak_mb = -math.inf
        self.saves: dict[int, float] = {}  # iteration of a checkpoint: its bytes
        self.save_error = ""  # why the last save failed, if it did
        self.warnings: list[str] = []
        self._series = {key: array("d") for key in _MEDIANS}  # iteration, value, iteration, value, ...

    def add(self, event: dict[str, Any]) -> None:
        """Include an event, which has None or nan for a number that was not finite."""
        known = {key: value for key, value in event.items() if isinstance(value, str) or _is_finite(value)}
        if "memory/predicted_peak_mb" in known:  # a process begins, perhaps with another implementation
            self.last = {key: value for key, value in self.last.items() if not key.startswith(("memory/", "comm/"))}
        self.last |= known
        for key in known.keys() & _LOSSES.values():
            self.first.setdefault(key, known[key])
            self.best[key] = min(self.best.get(key, (math.inf, 0)), (known[key], event["iter"]))
        for key in known.keys() & self._series.keys():
            self._series[key].extend((event["iter"], known[key]))
        self.peak_mb = max(self.peak_mb, known.get("memory/peak_mb", -math.inf))
        if "checkpoint/bytes" in known:
            self.saves[event["iter"]] = known["checkpoint/bytes"]
        if any(key.startswith("checkpoint/") for key in known):
            self.save_error = known.get("checkpoint/error", "")
        if "warning" in known:
            self.warnings.append(known["warning"])

    def figures(self) -> dict[str, float]:
        """Return the figures that are known so far, by their names in docs/metrics.md."""
        found: dict[str, float] = {"peak_memory_mb": self.peak_mb}
        for name, key in _LOSSES.items():
            if key in self.first:
                found |= {f"first_{name}": self.first[key], f"best_{name}": self.best[key][0], f"last_{name}": self.last[key]}
        bytes_per_token = self.facts.get("val_bytes_per_token")
        if bytes_per_token and "best_val_loss" in found:
            found["best_val_bits_per_byte"] = found["best_val_loss"] / math.log(2) / bytes_per_token
        for key, series in self._series.items():
            iterations, values = np.frombuffer(series).reshape(-1, 2).T
            if (counted := values[iterations >= self.medians_from]).size:
                found[f"median_{key.rpartition('/')[2]}"] = float(np.median(counted))
        found |= {"checkpoints": len(self.saves), "restarts": len(self.restarts), "warnings": len(self.warnings)}
        return {name: figure for name, figure in found.items() if math.isfinite(figure)}

    @property
    def medians_from(self) -> int:
        """The iteration from which the medians are: that of the last change of implementation or world size."""
        return self.facts["parts"][-1]["from_iter"] if "parts" in self.facts else 0

    @property
    def restarts(self) -> list[int]:
        """The iterations at which the run was resumed."""
        return self.facts.get("starts", [])[1:]


class Row(NamedTuple):
    label: str
    text: str


def rows(summary: Summary) -> list[Row]:
    """Return the rows of the report card. What is not known is left out."""
    facts, last, figures = summary.facts, summary.last, summary.figures()
    found = {
        "model": _model(facts),
        "data": _data(facts, last),
        "settings": _settings(facts),
        "loss": _loss("loss", summary, figures),
        "val loss": _loss("val_loss", summary, figures),
        "time": _time(summary),
        "speed": _speed(summary, figures),
        "communication": _communication(summary, figures),
        **_memory(facts, last, figures),
        "checkpoints": _checkpoints(summary),
        "restarts": _restarts(summary),
        "warnings": _warnings(summary),
    }
    return [Row(label, text) for label, text in found.items() if text]


def next_commands(summary: Summary) -> list[Row]:
    """Return what one may do with the run next: a label and a command each."""
    folder = shlex.quote(summary.facts["out_dir"])
    found = [Row("dashboard", f"python dashboard.py {folder} --html=runs.html")]
    free = f"free space on the disk of {folder}, or repair what the error names; then " if summary.save_error else ""
    if _newest(summary) is not None:
        found.insert(0, Row("sample", f"python sample.py --out_dir={folder}"))
        further = " and a larger --max_iters" if _has_ended(summary) and not free else ""
        found.append(Row("resume", f"{free}the same command with --init_from=resume{further}"))
    elif free:
        found.append(Row("repeat", f"{free}the same command"))
    return found


def on_console(outcome: str, summary: Summary) -> str:
    """Return the card as lines for the console."""
    path = os.path.join(summary.facts["out_dir"], NAME)
    lines = [Row("run", f"{outcome}; this report is {path}"), *rows(summary), *next_commands(summary)]
    return "\n" + "\n".join(f"{label:<{_WIDTH}}{text}" for label, text in lines)


def as_markdown(outcome: str, summary: Summary) -> str:
    """Return the card as a file."""
    table = [f"| {label} | {text.replace('|', chr(92) + '|')} |" for label, text in rows(summary)]
    commands = [f"- {label}: `{text}`" for label, text in next_commands(summary)]
    return "\n".join([f"# Report: {outcome}", "", "| | |", "|---|---|", *table, "", *commands, ""])


def write(outcome: str, summary: Summary) -> None:
    """Write report.md into the folder of the run. If the disk is full, print a warning and continue."""
    try:
        with atomic_write(os.path.join(summary.facts["out_dir"], NAME)) as temporary, open(temporary, "w") as file:
            file.write(as_markdown(outcome, summary))
    except OSError as error:
        print(f"WARNING: {NAME} is not written: {error}", flush=True)


def size(count: float) -> str:
    """Return a number of bytes as text."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _model(facts: dict[str, Any]) -> str:
    def of(part: dict[str, Any]) -> str:
        ranks = part["world_size"]
        return f"{part['implementation']} on {ranks} rank{'s' if ranks > 1 else ''}"

    how = ", then ".join(map(of, facts["parts"]))
    names = ", ".join(dict.fromkeys(facts["devices"]))
    return f"{facts['parameters'] / 1e6:.2f}M parameters, {facts['dtype']}; {how}, {facts['device']}: {names}"


def _data(facts: dict[str, Any], last: dict[str, Any]) -> str:
    tokens = last.get("iter/tokens", 0)
    return f"{facts['dataset']}: {tokens:,} tokens, {tokens / facts['train_tokens']:.2f} epochs"


def _settings(facts: dict[str, Any]) -> str:
    sizes = [facts[key] for key in ("gradient_accumulation_steps", "batch_size", "block_size")]
    chosen = [f"{key}={facts[key]}, " for key, usual in _USUAL.items() if facts.get(key, usual) != usual]
    text = f"{''.join(chosen)}learning_rate={facts['learning_rate']:g}, seed={facts['seed']}, "
    text += f"{math.prod(sizes):,} tokens per iteration: "
    text += "gradient_accumulation_steps={} x batch_size={} x block_size={}".format(*sizes)
    commit, _, dirty = (facts.get("git_commit") or "").partition("-")
    return f"{text}; commit {commit[:8]}{dirty and f' ({dirty})'}" if commit else text


def _loss(name: str, summary: Summary, figures: dict[str, float]) -> str:
    if f"first_{name}" not in figures:
        return ""
    first, best, last = (figures[f"{which}_{name}"] for which in ("first", "best", "last"))
    text = f"first {first:.4f}, best {best:.4f} at iteration {summary.best[_LOSSES[name]][1]:,}, last {last:.4f}"
    bits = figures.get("best_val_bits_per_byte")
    return f"{text}; the best is {bits:.4f} bits per byte" if name == "val_loss" and bits is not None else text


def _time(summary: Summary) -> str:
    if "time/elapsed_s" not in summary.last:
        return ""
    text = f"{timedelta(seconds=round(summary.last['time/elapsed_s']))} (h:mm:ss), with evaluations and checkpoints"
    return f"{text}, without what was lost before a restart" if summary.restarts else text


def _medians(summary: Summary) -> str:
    return f"medians since iteration {summary.medians_from:,}" if summary.medians_from else "medians"


def _speed(summary: Summary, figures: dict[str, float]) -> str:
    if "median_tokens_per_second" not in figures:
        return ""
    text = f"{figures['median_tokens_per_second']:,.0f} tokens/s"
    if "median_mfu" in figures:
        of = " of this CPU's fastest matrix product" if summary.facts["device"] == "cpu" else ""
        text += f", MFU {figures['median_mfu']:.1f} %{of}"
    return f"{text} ({_medians(summary)})"


def _communication(summary: Summary, figures: dict[str, float]) -> str:
    if "median_exposed_ms" not in figures:
        return ""
    ms, percent, last = figures["median_exposed_ms"], figures["median_exposed_percent"], summary.last
    sent = f"; {last['comm/sent_mb_per_step']:.1f} MB sent per step" if "comm/sent_mb_per_step" in last else ""
    return f"{ms:.1f} ms of a step exposed, {percent:.0f} % ({_medians(summary)}){sent}"


def _memory(facts: dict[str, Any], last: dict[str, Any], figures: dict[str, float]) -> dict[str, str]:
    """Return a row for each notion of memory, of the fullest rank: of the process, of its tensors, and what was predicted."""
    on_gpu = facts["device"] == "cuda"
    peak = size(figures["peak_memory_mb"] * 1e6) if "peak_memory_mb" in figures else ""
    process = "" if on_gpu or not peak else f"{peak} at the peak, with Python and its libraries"
    measured, predicted, before_update = _held("measured", last), _held("predicted", last), []
    tensors = [f"{peak} at the peak"] if on_gpu and peak else []
    if measured:
        saved = last.get("memory/saved_mb", 0.0)
        less = f", {size(abs(saved) * 1e6)} {'less' if saved > 0 else 'more'} than without sharding" if saved else ""
        tensors.append(f"{size(measured)} before the update{less}: parameters, gradients, state and buckets")
    if predicted:
        before_update = [f"{size(predicted)} before the update", f"{size(last['memory/predicted_peak_mb'] * 1e6)} at the peak"]
    return {"process": process, "tensors": "; ".join(tensors), "predicted": ", ".join(before_update)}


def _held(which: str, last: dict[str, Any]) -> float:
    """Return the bytes of all tensors before the update that were measured or predicted."""
    return sum(last.get(f"memory/{which}_{purpose}_mb", 0.0) for purpose in PURPOSES) * 1e6


def _newest(summary: Summary) -> int | None:
    """Return the iteration of the newest checkpoint, or None: one that was written, or the one that was resumed from."""
    return max([*summary.saves, *summary.restarts[-1:]], default=None)


def _checkpoints(summary: Summary) -> str:
    saves, newest, end = summary.saves, _newest(summary), summary.last.get("iter", 0)
    failed = f"; the last save failed: {summary.save_error}" if summary.save_error else ""
    if newest is None:
        return f"none written{failed}"
    written = f"{len(saves)} written, {size(saves[max(saves)])} each" if saves else "none written"
    best_only = not summary.facts["always_save_checkpoint"]
    why = " (always_save_checkpoint=False)" if best_only and _has_ended(summary) and not failed else ""
    # without always_save_checkpoint, a run ends with an evaluation at max_iters, which saves, and one more iteration
    last = min(end, summary.facts["max_iters"]) if best_only else end
    after = f"; the last {end - newest:,} not saved{why}" if newest < last else ""
    return f"{written}; the newest after {newest:,} iterations{after}{failed}"


def _has_ended(summary: Summary) -> bool:
    return summary.last.get("iter", 0) > summary.facts["max_iters"]


def _restarts(summary: Summary) -> str:
    return f"{len(summary.restarts)}, the last one at iteration {summary.restarts[-1]:,}" if summary.restarts else ""


def _warnings(summary: Summary) -> str:
    found = summary.warnings
    return f"{len(found)}; the last one: {' '.join(found[-1].split())}" if found else ""


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
