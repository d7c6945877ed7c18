"""What differs between runs: names from their settings, and which of them should have the same losses.

The facts of a run are what its `run.json` holds: settings, implementation, ranks, devices, versions. They are empty if the file
cannot be read.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from configurator import PER_HOST, SAME_LOSS, SHARDED, settings_with, train_settings
from zero.flags import weight_dtype

Facts = Mapping[str, Any]

_MOST = 4  # settings in a name; the table of the page has all of them
_FIRST = (
    *("dataset", "implementation", "world_size", "optimizer", "shard_gradients", "param_dtype", "state_dtype", "learning_rate"),
    *("n_layer", "n_head", "n_embd", "block_size", "batch_size", "gradient_accumulation_steps", "dropout", "weight_decay"),
    *("max_iters", "seed"),
)
_LAST = ("backend", "devices", "git_commit", "versions")
# How often a run logs, how it has ended, and what other facts say: the implementation says which flags had an effect.
_NOT_COMPARED = {"log_interval", "state", "parts", "starts", "use_zero1", "zero1_impl"}
_NOT_COMPARED |= {"micro_steps", "parameters", "train_tokens", "val_bytes_per_token"}
_PARTS = ("implementation", "world_size")  # what may change when a run is resumed, see run/logger.py
_BATCH = ("batch_size", "gradient_accumulation_steps")  # their product says which sequences an iteration takes


def names(facts: Sequence[Facts], folders: Sequence[str]) -> list[str]:
    """Return a name for each run: what is different in its settings, or its folder if nothing is.

    The name of a single run is its implementation and its ranks.
    """
    short = [os.path.basename(os.path.abspath(folder)) for folder in folders]
    if len(set(short)) < len(short):
        short = [os.path.abspath(folder) for folder in folders]
    if len(facts) == 1:
        return [_what_it_is(facts[0]) or short[0]]
    found = [", ".join(list(texts.values())[:_MOST]) for texts in differences(facts)]
    count = Counter(found)
    return [
        ", ".join(filter(None, (name, folder if count[name] > 1 or not name else "")))
        for name, folder in zip(found, short, strict=True)
    ]


def differences(facts: Sequence[Facts]) -> list[dict[str, str]]:
    """Return for each run the settings that are not the same in all runs, the most telling first, with a text for each."""
    compared = [_compared(one) for one in facts]
    values = {
        key: {_json(one[key]) for one in compared if key in one}
        for key in dict.fromkeys(key for one in compared for key in one)
    }
    differing = sorted((key for key in values if len(values[key]) > 1), key=_place)
    return [{key: _text(key, one[key]) for key in differing if one.get(key) is not None} for one in compared]


def in_common(facts: Sequence[Facts]) -> list[str]:
    """Return what all runs share of what a reader asks first: data, size of the model, implementation, ranks, device."""
    compared = [_compared(one) | {"parameters": one.get("parameters")} for one in facts]
    shared = [
        key
        for key in ("dataset", "parameters", "implementation", "world_size", "device", "dtype")
        if compared[0].get(key) is not None and len({_json(one.get(key)) for one in compared}) == 1
    ]
    bare = ("dataset", "device", "dtype")
    return [str(compared[0][key]) if key in bare else _text(key, compared[0][key]) for key in shared]


def agreeing(facts: Sequence[Facts]) -> list[list[int]]:
    """Return groups of at least two runs, by their positions, whose training losses should be the same up to rounding."""
    groups: dict[str, list[int]] = {}
    for position, one in enumerate(facts):
        if one:
            groups.setdefault(_json(_decides_the_loss(one)), []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def _decides_the_loss(facts: Facts) -> dict[str, Any]:
    compared = _compared(facts)
    batch = [compared.pop(key, 1) for key in _BATCH]
    by_rank = [compared.get("world_size"), batch] if compared.get("dropout") else []  # its random numbers depend on the rank
    # a run without a setting, such as one of an earlier version, is one with its default
    same = settings_with(SAME_LOSS).union(_PARTS, _LAST)
    same |= {key for key, setting in train_settings().items() if compared.get(key) == setting.default}
    found = {key: value for key, value in compared.items() if key not in same}
    if "param_dtype" in found:  # remainders hold the values of float32 masters
        found["param_dtype"] = weight_dtype(found["param_dtype"])
    return found | {"sequences": batch[0] * batch[1], "by rank": by_rank}


def _compared(facts: Facts) -> dict[str, Any]:
    """Return the facts that are worth comparing. A run that was resumed in another way has a list of what it has been."""
    left_out = _NOT_COMPARED | (settings_with(PER_HOST) - {"dataset"})  # where a run writes; a dataset says what it trains on
    found = {key: value for key, value in facts.items() if key not in left_out and value is not None}
    if found.get("init_from") in ("scratch", "resume", "auto"):  # the last two do not say how the run has begun
        del found["init_from"]
    if found.get("implementation", "sharded") != "sharded":
        found = {key: value for key, value in found.items() if key not in settings_with(SHARDED)}
    without_effect = {"decay_fraction"} if found.get("schedule") == "cosine" else set()
    without_effect |= {key for key in found if key.startswith("muon_") and found.get("optimizer") == "adamw"}
    found = {key: value for key, value in found.items() if key not in without_effect}
    if "devices" in found:  # one per rank
        found["devices"] = list(dict.fromkeys(found["devices"]))
    for key in _PARTS:
        been = [part[key] for part in facts.get("parts", []) if key in part]
        found |= {key: been} if len(set(been)) > 1 else {}
    return found


def _what_it_is(facts: Facts) -> str:
    """Return the implementation and the number of ranks of a run, or all of them if they have changed when it was resumed."""
    parts = facts.get("parts") or [facts]
    return " then ".join(", ".join(_text(key, part[key]) for key in _PARTS) for part in parts if part.keys() >= set(_PARTS))


def _place(key: str) -> tuple[int, int]:
    if key in _FIRST:
        return 0, _FIRST.index(key)
    return (2, _LAST.index(key)) if key in _LAST else (1, 0)


def _text(key: str, value: Any) -> str:
    if key in _PARTS and isinstance(value, list):
        return " then ".join(_text(key, one) for one in value)
    if key == "implementation":
        return str(value)
    if key == "world_size":
        return f"{value} rank{'' if value == 1 else 's'}"
    if key == "parameters":
        return f"{value / 1e6:.2f}M parameters"
    if key == "devices":
        return " and ".join(map(str, value))
    if key == "versions":
        return ", ".join(f"{package} {version}" for package, version in value.items() if version)
    return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
