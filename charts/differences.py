"""What differs between runs, from their settings: their names, and what they have in common.

The facts of a run are what its `run.json` holds: settings, implementation, ranks, devices. They are empty if the file cannot be
read.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from configurator import PER_HOST, train_settings
from zero.flags import Flags

Facts = Mapping[str, Any]

_MOST = 4  # settings in a name; the table of the page has all of them
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


def _compared(facts: Facts) -> dict[str, Any]:
    """Return the facts that are worth comparing, the most telling first."""
    # the implementation says which flags had an effect; the others say where a run writes, but a dataset what it trains on
    left_out = {"use_zero1", "zero1_impl"} | PER_HOST - {"dataset"}
    if facts.get("implementation", "sharded") != "sharded":
        left_out |= {flag.name for flag in fields(Flags)}
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
