"""What differs between runs: names from their settings, and which of them should have the same losses.

The facts of a run are what its `run.json` holds: settings, implementation, ranks, devices. They are empty if the file cannot be
read.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from configurator import PER_HOST, SAME_LOSS, SHARDED, settings_with, train_settings
from zero.options import weight_dtype

Facts = Mapping[str, Any]

_MOST = 4  # settings in a name; the table of the page has all of them
_BATCH = ("batch_size", "gradient_accumulation_steps")  # their product says which sequences an iteration takes
_IN_COMMON = ("dataset", "parameters", "implementation", "world_size", "device", "dtype")


def names(facts: Sequence[Facts], folders: Sequence[str]) -> list[str]:
    """Return a name for each run: what is different in its settings, and its folder if others have the same."""
    found = [", ".join(list(texts.values())[:_MOST]) for texts in differences(facts)]
    count = Counter(found)
    return [
        ", ".join(filter(None, (name, folder if count[name] > 1 or not name else "")))
        for name, folder in zip(found, folders, strict=True)
    ]


def differences(facts: Sequence[Facts]) -> list[dict[str, str]]:
    """Return for each run the settings that are not the same in all runs that have them, with a text for each."""
    compared = [_compared(one) for one in facts]
    values: dict[str, set[str]] = {}
    for key, value in (item for one in compared for item in one.items()):
        values.setdefault(key, set()).add(json.dumps(value, sort_keys=True))
    return [{key: _text(key, value) for key, value in one.items() if len(values[key]) > 1} for one in compared]


def in_common(facts: Sequence[Facts]) -> list[str]:
    """Return what all runs share of what a reader asks first: data, size of the model, implementation, ranks, device."""
    shared = [key for key in _IN_COMMON if key in facts[0] and all(one.get(key) == facts[0][key] for one in facts)]
    return [_text(key, facts[0][key]).removeprefix(f"{key}=") for key in shared]


def agreeing(facts: Sequence[Facts]) -> list[list[int]]:
    """Return groups of at least two runs, by their positions, whose training losses should be the same up to rounding."""
    groups: dict[str, list[int]] = {}
    for position, one in enumerate(facts):
        if one:
            groups.setdefault(json.dumps(_decides_the_loss(one), sort_keys=True), []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def _decides_the_loss(facts: Facts) -> dict[str, Any]:
    compared, same = _compared(facts), settings_with(SAME_LOSS)
    # a run without a setting, such as one of an earlier version, is one with its default
    found = {key: compared.get(key, setting.default) for key, setting in train_settings().items() if key not in same}
    batch = [found.pop(key) for key in _BATCH]
    ranks = [part.get("world_size") for part in facts.get("parts", [facts])]  # a resumed run may have had others
    by_rank = [ranks, batch] if found["dropout"] else []  # its random numbers depend on the rank
    weights = weight_dtype(found["param_dtype"])  # remainders hold the values of float32 masters
    return found | {"param_dtype": weights, "sequences": batch[0] * batch[1], "by rank": by_rank}


def _compared(facts: Facts) -> dict[str, Any]:
    """Return the facts that are worth comparing, the most telling first."""
    # the implementation says which flags had an effect; the others say where a run writes, but a dataset what it trains on
    left_out = {"use_zero1", "zero1_impl"} | settings_with(PER_HOST) - {"dataset"}
    if facts.get("implementation", "sharded") != "sharded":
        left_out |= settings_with(SHARDED)
    if facts.get("init_from") in ("scratch", "resume", "auto"):  # the last two do not say how the run has begun
        left_out.add("init_from")
    keys = dict.fromkeys(("dataset", "implementation", "world_size", *train_settings(), "git_commit"))
    return {key: facts[key] for key in keys if key not in left_out and facts.get(key) is not None}


def _text(key: str, value: Any) -> str:
    if key == "implementation":
        return str(value)
    if key == "world_size":
        return f"{value} rank{'' if value == 1 else 's'}"
    if key == "parameters":
        return f"{value / 1e6:.2f}M parameters"
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
