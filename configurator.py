"""Settings from config files and `--key=value` arguments over a script's defaults, names and types checked.

    $ python train.py config/train_shakespeare_char.py --batch_size=32

runs the file (plain Python that assigns some of the settings), then sets batch_size. A script calls

    config = configure(globals())

once, below its defaults: every module-level int, float, bool or str in small letters without a leading underscore is a setting.
"""

import contextlib
import datetime
import difflib
import math
import os
import runpy
import sys
import time
import types
from ast import literal_eval
from typing import Any, NoReturn

from distributed import launched

_LARGEST = 2**63 - 1  # of an integer that PyTorch, NumPy and a checkpoint take


def fail(message: str) -> NoReturn:
    """End this process because the user's input is wrong: one line on stderr, exit code 2, no traceback.

    Under torchrun every rank says so and ends. There the interpreter is not wound up, which gloo's threads can turn into
    an abort (https://github.com/pytorch/pytorch/pull/179291).
    """
    sys.stderr.write(f"error: {' '.join(message.split())}\n")  # in one piece, not between the words of another rank
    sys.stderr.flush()
    if _is_one_of_several():
        sys.stdout.flush()
        _meet_the_other_ranks()
        os._exit(2)
    sys.exit(2)


def _is_one_of_several() -> bool:
    try:
        return launched().distributed
    except ValueError:  # which is what the user is being told
        return False


def _meet_the_other_ranks(patience_s: float = 5.0) -> None:
    """Wait until all ranks are about to end: torchrun, seeing the first one gone, kills those that have not said why yet."""
    import torch.distributed as dist

    if dist.is_initialized():
        return  # they have met
    with contextlib.suppress(RuntimeError):  # the store is gone with rank 0, or the others never came
        store, _, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=patience_s)))
        end = time.monotonic() + patience_s
        ready = store.add("ranks about to end", 1)
        while ready < world_size and time.monotonic() < end:
            time.sleep(0.01)
            ready = store.add("ranks about to end", 0)


def configure(settings: dict[str, Any], argv: list[str] | None = None) -> dict[str, Any]:
    """Override `settings` in place with the files and `--key=value`s of `argv` (default: sys.argv), left to right.

    Returns:
        The settings alone, by name. Prints those that changed, on rank 0. Wrong input ends the process by `fail`.
    """
    try:
        rank = launched().rank
    except ValueError as error:
        fail(str(error))
    defaults = {key: value for key, value in settings.items() if _is_setting(key, value)}
    config = dict(defaults)
    for argument in sys.argv[1:] if argv is None else argv:
        if argument.startswith("--") and "=" in argument:
            key, text = argument[2:].split("=", 1)
            config[key] = _checked(key, _parsed(text, defaults.get(key)), defaults, _shortened(argument))
        elif argument in ("-h", "--help"):
            _help(settings.get("__doc__"), defaults)
        elif argument.startswith("-"):
            fail(f"{argument} is not of the form --key=value; write for example --batch_size=32")
        else:
            config.update(_read_file(argument, config, defaults))
    if rank == 0:
        for key, value in config.items():
            if value != defaults[key]:
                print(f"Overriding: {key} = {value!r}")
    settings.update(config)
    return config


def _is_setting(key: str, value: Any) -> bool:
    return key.islower() and not key.startswith("_") and isinstance(value, int | float | bool | str)


def _is_assignment(key: str, value: Any) -> bool:
    return not key.startswith("_") and not callable(value) and not isinstance(value, types.ModuleType)


def _read_file(path: str, config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What a config file assigns. It sees the settings as they are so far; its modules, functions and _names are its own."""
    if not os.path.isfile(path):
        fail(f"config file {path} does not exist; settings are given as --key=value")
    try:
        names = runpy.run_path(path, init_globals=config)
    except Exception as error:
        fail(f"config file {path} cannot be run: {type(error).__name__}: {error}")
    return {key: _checked(key, value, defaults, path) for key, value in names.items() if _is_assignment(key, value)}


def _parsed(text: str, default: Any) -> Any:
    """The Python value that `text` spells, or the text itself; where a string is wanted, only quotes are taken off."""
    if isinstance(default, str) and not text.startswith(("'", '"')):
        return text
    try:
        return literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return text


def _checked(key: str, value: Any, defaults: dict[str, Any], where: str) -> Any:
    """`value`, if `key` is a setting and the type is its default's."""
    if key not in defaults:
        near = difflib.get_close_matches(key, defaults, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists all; in a file, names of your own begin with _"
        fail(f"unknown setting {key!r} in {where}; {hint}")
    wanted = type(defaults[key])
    if type(value) is int and abs(value) > _LARGEST:
        fail(f"{key} in {where} is too large; integers go up to {_LARGEST}")
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        fail(f"{key}={_shown(value)} in {where} is {_article(type(value))}, but {key} takes {_article(wanted)}")
    if wanted is float and not math.isfinite(value):
        fail(f"{key}={value} in {where} is not a finite number")
    return value


def _shown(value: Any) -> str:
    try:
        return _shortened(repr(value))
    except ValueError:  # Python spells no integer of more than 4300 digits
        return "..."


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _help(text: str | None, defaults: dict[str, Any]) -> NoReturn:
    """Print what the script says of itself and every setting with its default, and end."""
    print(text or "")
    for key, value in defaults.items():
        print(f"  --{key}={value!r}")
    sys.exit(0)


def _article(kind: type) -> str:
    names = {int: "an integer", float: "a number", bool: "True or False (with a capital)", str: "text"}
    return names.get(kind, f"a {kind.__name__}")
