"""Bars of runs: one bar per run with its parts, or a few bars per run, below the name of the run."""

from collections.abc import Callable, Mapping, Sequence

from charts import series
from charts.bars import TIME, Bar, Group, stack
from charts.series import Curve, Panel, Run
from charts.style import MEMORY, number, shown_in
from run.metrics import METRICS

Amounts = dict[str, float | None]  # of a run, by the name of a bar or of a part of it; all runs have the same names


def latest(keys: Mapping[str, str]) -> Callable[[Run], Amounts]:
    """Return a function that returns the latest values of a run, for metrics by name."""
    return lambda run: {name: run.get(key, Curve.latest) for name, key in keys.items()}


def medians(keys: Mapping[str, str]) -> Callable[[Run], Amounts]:
    """Return the same for medians."""
    return lambda run: {name: run.get(key, Curve.median) for name, key in keys.items()}


def scaled(amounts: Amounts, whole: float | None) -> Amounts:
    """Return the parts so that they add up to the whole: medians of parts do not add up to the median of the sum."""
    total = sum(filter(None, amounts.values()))
    return {name: value * whole / total if value and whole else None for name, value in amounts.items()}


def phases(run: Run) -> Amounts:
    """Return the parts of the time of a step. On a GPU, batches are prepared while it computes, so they are no part of it."""
    keys = {"data": "time/data_ms", "forward and backward": "time/forward_backward_ms", "optimizer": "time/optimizer_ms"}
    found = medians(keys)(run) | ({"data": None} if run.on_gpu else {})
    whole = run.get("time/step_ms", Curve.median)
    return found | {"rest": None if whole is None else max(0, whole - sum(filter(None, found.values())))}


def memory_points(run: Run) -> Amounts:
    """Return the memory at the points of a step. Two points at which a run holds the same are one."""
    keys = {point: f"memory/{point.replace(' ', '_')}_mb" for point in ("after init", "before step", "after step")}
    found = latest(keys)(run)
    both = found["after step"] if found["before step"] == found["after step"] else None
    found |= {} if both is None else {"before step": None, "after step": None}
    peak = run.get("memory/peak_mb", Curve.latest) if run.on_gpu else None
    return found | {"before and after step": both, "peak": peak}


def predicted_peak(run: Run) -> float | None:
    return run.get("memory/predicted_mb", Curve.latest) if run.on_gpu and "memory/peak_mb" in run.curves else None


def bars(
    runs: Sequence[Run],
    title: str,
    amounts_of: Callable[[Run], Amounts],
    unit_of: str,
    note: str = "latest values",
    stacked: bool = True,
    below: Callable[[Run], Amounts] = lambda run: {},
    mark: Callable[[Run], float | None] = lambda run: None,
) -> Panel | None:
    """Return horizontal bars below the name of each run, or None if no run has any. What is zero is left out.

    Args:
        amounts_of: the parts of one bar per run if `stacked`, otherwise a bar each.
        unit_of: a metric that has the unit of all amounts.
        below: what is drawn as a thin bar below that of the run, such as an amount that is included in it.
        mark: where to draw a tick, the prediction for the last bar of a run.
    """
    amounts, included, marks = list(map(amounts_of, runs)), list(map(below, runs)), list(map(mark, runs))
    names, thin = _shown(amounts), _shown(included)
    if not names:
        return None
    every = [value for found in (marks, *(of.values() for of in amounts)) for value in found if value]
    every += [sum(filter(None, of.values())) for of in amounts] if stacked else []
    divisor, unit = shown_in(METRICS[unit_of].unit, max(map(abs, every)))
    groups: list[Group] = []
    for run, of, inside, tick in zip(runs, amounts, included, marks, strict=True):
        parts = {name: amount / divisor for name in names if (amount := of[name])}
        alone = [parts] if stacked and parts else [{name: amount} for name, amount in parts.items()]
        bars = [Bar(of_bar, number(sum(of_bar.values()))) for of_bar in alone]
        if bars:
            bars[-1] = bars[-1]._replace(tick=None if tick is None else tick / divisor)
            bars += [Bar({name: amount / divisor} if (amount := inside[name]) else {}, is_thin=True) for name in thin]
        groups.append((run.name, bars))
    note += "; tick: prediction" if any(bar.tick is not None for _, bars in groups for bar in bars) else ""
    note += f"; thin: {', '.join(thin)}" if thin else ""
    return Panel(stack(groups, _part_colours([*names, *thin]), unit).properties(title=series.title(title, [note])))


def _shown(amounts: Sequence[Amounts]) -> list[str]:
    """Return the names that are not zero in all runs."""
    return [name for name in amounts[0] if any(of[name] for of in amounts)] if amounts else []


def _part_colours(names: Sequence[str]) -> dict[str, str]:
    """Return the colour of each part: that of other charts if it is in them."""
    known = dict([*MEMORY.values(), *TIME.values(), ("data", "#56B4E9"), ("rest", "#BBBBBB")])
    found = {name: colour for part, colour in known.items() for name in names if name.endswith(part)}
    others = iter(colour for colour in series.COLOURS if colour not in found.values())
    return {name: found.get(name) or next(others) for name in names}
