"""Settings of a script: config files and `--key=value` arguments override the defaults. Names and types are checked.

    $ python train.py config/train_shakespeare_char.py --batch_size=32

This command runs the config file, which is plain Python that assigns some of the settings. Then it sets batch_size. A script
calls

    config = configure(globals())

once, below its defaults. A setting is a module-level int, float, bool or str with a lowercase name and no leading underscore.
The type of a setting is the type of its default. An annotation declares a range or choices:

    batch_size: PositiveInt = 12  # sequences per micro-step
    zero1_impl: Literal["sharded", "torch"] = "sharded"
    bucket_mb: Literal["auto"] | PositiveFloat = "auto"  # the word, or a number

`--help` shows the default, the comment and the limits of each setting. A comment stands at the end of the line, or
in lines of its own above. A line of at most three plain words, such as "# learning rate", is a heading instead.
"""

import ast
import difflib
import inspect
import itertools
import math
import os
import re
import runpy
import symtable
import sys
import textwrap
import tokenize
import traceback
import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import torch

from distributed.exits import exit_on_wrong_input, guard_output
from distributed.launch import launched
from distributed.rendezvous import connect
from forecast import modes
from zero import flags

TRAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
_HEADING = re.compile(r"[\w-]+( [\w-]+){0,2}")
_WIDTH = 120
_HELP_INTRODUCTION = "Settings with their defaults. --key=value sets one, a file of lines such as batch_size = 8 sets several:"


class Rule(NamedTuple):
    """A limit on the values of a setting."""

    text: str  # end of the error message, for example "must be at least 1"
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Rule("must be at least 1", lambda value: value >= 1)]
NonNegativeInt = Annotated[int, Rule("must not be negative", lambda value: value >= 0)]
Seed = Annotated[int, Rule("must be at least 0 and less than 2**63", lambda value: 0 <= value < 2**63)]
PositiveFloat = Annotated[float, Rule("must be positive", lambda value: value > 0)]
NonNegativeFloat = Annotated[float, Rule("must not be negative", lambda value: value >= 0)]
Decay = Annotated[float, Rule("must be at least 0 and less than 1", lambda value: 0 <= value < 1)]
Fraction = Annotated[float, Rule("must be positive and at most 1", lambda value: 0 < value <= 1)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]  # of the computation: a key of `machine.DTYPES`, or the best one

# of train.py: hosts may have other values, because each may have disks of its own, and only rank 0 logs
PER_HOST = {"out_dir", "dataset", "wandb_log", "wandb_project", "wandb_run_name"}


PATHS = {"out_dir", "dataset", "init_from", "json", "to"}  # of all scripts: settings that may be paths, in which ~/ is expanded


class Setting(NamedTuple):
    """What a script declares of a setting."""

    default: Any
    words: tuple[str, ...] = ()  # what a number may be instead: "auto"
    choices: tuple[Any, ...] = ()
    rules: tuple[Rule, ...] = ()  # limits on its values

    @property
    def type(self) -> type[Any]:
        """The type of its values, other than `words`."""
        return float if self.words else type(self.default)


@exit_on_wrong_input()
def configure(
    settings: dict[str, Any],
    argv: list[str] | None = None,
    connects: bool = False,
    unless_given: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: {},
) -> dict[str, Any]:
    """Override `settings` in place with the config files and `--key=value` arguments of `argv`, from left to right.

    Rank 0 prints the settings that changed. Wrong input ends the process with exit code 2. Return the settings by name, without
    the other globals.

    Args:
        settings: the globals of the script.
        argv: command-line arguments; None: sys.argv[1:].
        connects: whether the ranks of torchrun start their process group first, so that they end together.
        unless_given: called with all values, returns those of settings that depend on others, unless the user gives them.
    """
    launch = launched()
    if settings.get("__name__") == "__main__":
        guard_output(goes_on="max_iters" in settings)  # training
    argv = sys.argv[1:] if argv is None else argv
    if connects and not {"-h", "--help"} & {*argv}:
        connect(launch)
    known = _declared(settings)
    config = {key: setting.default for key, setting in known.items()}
    given: dict[str, str] = {}  # settings, and the file that a value is from
    for argument in argv:
        if argument.startswith("--") and "=" in argument:
            key, text = argument[2:].split("=", 1)
            value = _parsed(text, known[key].type) if key in known else text
            config[key] = _checked(key, value, known, _shortened(argument))
            given[key] = ""
        elif argument in ("-h", "--help"):
            if launch.rank == 0:
                print(_help(settings, known), flush=True)
            sys.exit(0)
        elif argument.startswith("-"):
            key = argument.lstrip("-")
            example = f"--{key}={known[key].default is False or known[key].default}" if key in known else "--batch_size=32"
            raise ValueError(f"{argument} is not of the form --key=value; for example, write {example}")
        else:
            values, assigned = _read_file(argument, config, known)
            given |= {key: f" in {argument}" for key in values if key in assigned or values[key] != config[key]}
            config.update(values)
    for key, value in unless_given(config).items():
        if key not in given:
            config[key], known[key] = value, known[key]._replace(default=value)
    for key, setting in known.items():
        _check_limits(key, config[key], setting, given.get(key, ""))
    for key, value in config.items():
        if launch.rank == 0 and value != known[key].default:
            print(f"Overriding: {key} = {value!r}")
    settings.update(config)
    return config


def integers(key: str, text: str) -> list[int]:
    """Return the positive integers of a setting that takes several, such as 1,2,8. Raises ValueError for any other text."""
    values = [int(value) if value.isdecimal() else 0 for value in text.split(",")]
    if min(values) < 1:
        raise ValueError(f"{key}={text} must be positive integers, separated by commas; for example --{key}=1,2,8")
    return values


def settings_of(*paths: str) -> dict[str, Any]:
    """Return the default settings of other scripts, with their annotations, without running the scripts.

    These are the assignments above the call of `configure`. They can use torch, and what this module, `zero.flags` and
    `forecast.modes` define and import. To import a script would run it. A module of defaults would take the settings out of
    train.py, where a user of nanoGPT looks for them.
    """
    settings, kinds = {"torch": torch, **vars(flags), **vars(modes), **globals()}, {}
    for path in paths:
        assignments = _assignments(path)
        exec(compile(ast.Module([*assignments.values()], []), path, "exec"), settings)
        for name, statement in assignments.items():  # `exec` leaves no annotations in `settings` since Python 3.14
            if isinstance(statement, ast.AnnAssign):
                kinds[name] = eval(compile(ast.Expression(statement.annotation), path, "eval"), settings)
    defaults = {key: value for key, value in settings.items() if _is_setting(key, value)}
    return {**defaults, "__annotations__": kinds, "__files__": paths}


@cache
def train_settings() -> dict[str, Setting]:
    """Return what train.py declares, by name."""
    return _declared(settings_of(TRAIN))


def _assignments(path: str) -> dict[str, ast.stmt]:
    """Return the assignments to lowercase names above the call of `configure` in a script, by name."""
    with tokenize.open(path) as file:
        statements = ast.parse(file.read()).body
    assignments: dict[str, ast.stmt] = {}
    for statement in itertools.takewhile(lambda statement: "configure" not in _called(statement), statements):
        if isinstance(statement, ast.Assign | ast.AnnAssign):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            if isinstance(target, ast.Name) and target.id.islower():
                assignments[target.id] = statement
    return assignments


def _called(statement: ast.stmt) -> set[str]:
    return {call.func.id for call in ast.walk(statement) if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}


def _is_setting(key: str, value: Any) -> bool:
    return key.islower() and not key.startswith("_") and isinstance(value, int | float | bool | str)


def _declared(settings: dict[str, Any]) -> dict[str, Setting]:
    """Return what a script declares. Python 3.14 creates annotations only when `inspect` asks the module for them."""
    module = sys.modules.get(settings.get("__name__", ""))
    kinds = settings.get("__annotations__", {})
    if module is not None and vars(module) is settings:
        kinds = inspect.get_annotations(module)
    return {key: _setting(value, kinds.get(key)) for key, value in settings.items() if _is_setting(key, value)}


def _setting(default: Any, kind: Any) -> Setting:
    if rules := getattr(kind, "__metadata__", ()):  # of Annotated
        setting = _setting(default, kind.__origin__)
        return setting._replace(rules=(*setting.rules, *rules))
    if get_origin(kind) in (Union, types.UnionType):  # Literal["auto"] | PositiveFloat
        words, number = get_args(kind)
        return _setting(default, number)._replace(words=get_args(words))
    return Setting(default, choices=get_args(kind) if get_origin(kind) is Literal else ())


def _check_limits(key: str, value: Any, setting: Setting, where: str) -> None:
    if value in setting.words:
        return
    if setting.choices and value not in setting.choices:
        raise ValueError(f"{key}={_shortened(str(value))}{where} is not one of {', '.join(map(str, setting.choices))}")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise ValueError(f"{key}{where} must be less than 2**63")
    for rule in setting.rules:
        if not rule.holds(value):
            raise ValueError(f"{key}={value}{where} {rule.text}")


def _read_file(path: str, config: dict[str, Any], known: dict[str, Setting]) -> tuple[dict[str, Any], set[str]]:
    """Run a config file and return the settings after it, and the names that it assigns itself.

    The file can read the current value of every setting. Its names with a leading underscore are not settings, nor are its
    modules, functions and classes, unless they have the name of one.
    """
    if not os.path.isfile(path):
        raise ValueError(f"config file {path} does not exist; settings are given as --key=value")
    try:
        with tokenize.open(path) as file:
            _check_statements(ast.parse(text := file.read(), path).body)
        names = runpy.run_path(path, init_globals=config)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        where = f" (line {lines[-1]})" if lines else ""  # the text of a SyntaxError has it
        raise ValueError(f"config file {path} cannot be run: {type(error).__name__}: {error}{where}") from error
    helpers = {key for key, value in names.items() if callable(value) or isinstance(value, types.ModuleType)} - known.keys()
    assigned = {name.get_name() for name in symtable.symtable(text, path, "exec").get_symbols() if name.is_assigned()}
    values = {key: _checked(key, names[key], known, path) for key in names if not key.startswith("_") and key not in helpers}
    return values, assigned


def _check_statements(statements: list[ast.stmt]) -> None:
    """Raise ValueError for a statement that looks like a setting and sets none, as in YAML and JSON."""
    for line in statements:
        is_bare = isinstance(line, ast.Expr) and not isinstance(line.value, ast.Call | ast.Constant)
        if is_bare or (isinstance(line, ast.AnnAssign) and line.value is None):
            raise ValueError(f"line {line.lineno} sets nothing; write it in Python: batch_size = 8")


def _parsed(text: str, wanted: type[Any]) -> Any:
    """Return the Python value of the literal `text`, or `text` itself if it is not a literal.

    If a string is wanted, only text in quotes is parsed.
    """
    if wanted is str and not text.startswith(("'", '"')):
        return text
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # the last two: deeply nested
        return text


def _checked(key: str, value: Any, known: dict[str, Setting], where: str) -> Any:
    """Return `value` with the type of the setting `key`: an int becomes a float where needed.

    Raise ValueError for an unknown setting or another wrong type.
    """
    if key not in known:
        near = [name for name in known if key == "".join(word[0] for word in name.split("_"))]  # lr: learning_rate
        near = near or difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "--help lists all settings; in a file, start other names with _"
        raise ValueError(f"unknown setting {key!r} in {where}; {hint}")
    setting = known[key]
    if isinstance(value, str) and value in setting.words:
        return value
    if setting.type is float and type(value) is int:
        value = float(value) if abs(value) < 2**1023 else math.inf
    if type(value) is not setting.type:
        accepted = " or ".join([*setting.words, _article(setting.type)])
        is_long = type(value) is int and abs(value) >= 2**63  # Python writes no number of over 4300 digits
        shown = "a long number" if is_long else _shortened(repr(value))
        raise ValueError(f"{key}={shown} in {where} is {_article(type(value))}, but {key} takes {accepted}")
    if setting.type is float and not math.isfinite(value):
        raise ValueError(f"{key}={value} in {where} is not a finite number")
    if isinstance(value, str) and value != value.encode(errors="replace").decode():
        raise ValueError(f"{key}={value!r} is not text in UTF-8; use another name")
    return os.path.expanduser(value) if key in PATHS else value


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _help(settings: dict[str, Any], known: dict[str, Setting]) -> str:
    """Return the docstring of a script, and each setting of its own with its default, its comment and its limits."""
    file = settings["__files__"][0] if "__files__" in settings else settings.get("__file__")
    notes = _notes(file) if file else {}
    assigned = {key: f"  --{key}={setting.default!r}" for key, setting in known.items() if key in notes or not notes}
    width = max(map(len, assigned.values())) + 2
    lines = [settings.get("__doc__") or "", _HELP_INTRODUCTION]
    for key, start in assigned.items():
        heading, comments = notes.get(key, ("", []))
        lines += ["", heading] if heading else []
        lines += textwrap.wrap(
            "; ".join([*comments, *_limits(known[key])]),
            _WIDTH,
            initial_indent=start.ljust(width),
            subsequent_indent=width * " ",
            break_on_hyphens=False,
        ) or [start]
    return "\n".join(lines)


def _limits(setting: Setting) -> list[str]:
    choices = [f"one of {', '.join(map(str, setting.choices))}"] if setting.choices else []
    number = f"{', '.join(setting.words)}, or a number that " if setting.words else ""
    return choices + [number + rule.text for rule in setting.rules]


def _notes(path: str) -> dict[str, tuple[str, list[str]]]:
    """Return the heading above each setting of a script, or "", and the comments on the setting."""
    own_line, at_end = dict[int, str](), dict[int, str]()  # comments by line number
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                (at_end if token.start[1] else own_line)[token.start[0]] = token.string.strip("#- ")
    notes = {}
    for name, statement in _assignments(path).items():
        above = itertools.takewhile(own_line.__contains__, itertools.count(statement.lineno - 1, -1))
        heading, lines = "", list[str]()
        for line in reversed([*above]):
            is_heading = _HEADING.fullmatch(own_line[line])
            heading, lines = (own_line[line], []) if is_heading else (heading, [*lines, own_line[line]])
        beside = [at_end[line] for line in range(statement.lineno, (statement.end_lineno or 0) + 1) if line in at_end]
        notes[name] = heading, [comment for comment in (*beside, " ".join(lines).strip()) if comment]
    return notes


def _article(kind: type) -> str:
    names = {int: "an integer", float: "a number", bool: "True or False (with a capital)", str: "text"}
    return names.get(kind, f"a {kind.__name__}")
