"""configurator.py: config files and --key=value, names and types checked; nanoGPT's own files work unchanged."""

import glob
import os
import re
from dataclasses import fields
from typing import Literal

import pytest
from conftest import ROOT
from scripts import defaults_of, run

from configurator import TRAIN, Decay, PositiveFloat, PositiveInt, _notes, configure, settings_of
from zero.flags import Flags

DEFAULTS = {"batch_size": 12, "learning_rate": 6e-4, "compile": True, "out_dir": "out"}
OTHERS = {"_private": 1, "LIMIT": 2, "function": print}


def settings(*argv):
    values = DEFAULTS | OTHERS
    config = configure(values, list(argv))
    assert {key: values[key] for key in config} == config
    return config


def refused(capsys, settings, *argv):
    with pytest.raises(SystemExit) as caught:
        configure(dict(settings), list(argv))
    assert caught.value.code == 2
    [error] = capsys.readouterr().err.splitlines(keepends=True)
    assert error.startswith("error: ")
    return error


def test_values_are_the_defaults_or_take_their_type(capsys):
    assert settings() == DEFAULTS
    config = settings("--batch_size=3", "--learning_rate=1", "--compile=False", "--out_dir=a=b", "--batch_size=4")
    assert repr(config) == "{'batch_size': 4, 'learning_rate': 1.0, 'compile': False, 'out_dir': 'a=b'}"
    for text in ("17", "None", "[1]", "x", "", "a b", "'out'"):
        assert settings(f"--out_dir={text}")["out_dir"] == text.strip("'"), "text stays text, without its quotes"
    capsys.readouterr()
    settings("--batch_size=3", "--out_dir=out")
    assert capsys.readouterr().out == "Overriding: batch_size = 3\n", "only what has changed"


MISTAKES = {
    "--batchsize=3": "did you mean 'batch_size'?",
    "--lr=3": "did you mean 'learning_rate'?",
    "--batch_size": "--batch_size is not of the form --key=value; for example, write --batch_size=",
    "--compile": "--compile is not of the form --key=value; for example, write --compile=True",
    "--function=3": "unknown setting 'function'",
    "--batch_size=abc": "takes an integer",
    "--batch_size=1.5": "takes an integer",
    "--batch_size=True": "takes an integer",
    "--compile=1": "takes True or False",
    "--learning_rate=fast": "takes a number",
    "--batch_size=" + 400 * "x": f"batch_size='{59 * 'x'}... in --batch_size={47 * 'x'}... is text",
    "--learning_rate=" + "[" * 9999: "takes a number",
    "--learning_rate=1" + 400 * "0": "is not a finite number",
    "--out_dir=\udcff": r"out_dir='\udcff' is not text in UTF-8",
    "no_such_file.py": "does not exist",
}
MISTAKES_IN_FILES = {
    "batchsize = 3": "did you mean 'batch_size'?",
    "batch_size = ": "SyntaxError",
    "\nbatch_size = 1 / 0": "ZeroDivisionError: division by zero (line 2)",
    "\nimport sys\nsys.exit('no GPU')": "cannot be run: SystemExit: no GPU (line 3)",
    "learning_rate = float('nan')": "is not a finite number",
    "batch_size = 10**5000": "must be less than 2**63",
    "batch_size = -(10**5000)": "must be less than 2**63",
    "out_dir = 10**5000": "out_dir=a long number in",
    "def batch_size(): pass": "is a function, but batch_size takes an integer",
    "import math as learning_rate": "is a module, but learning_rate takes a number",
    "# yaml\nbatch_size: 8": "cannot be run: ValueError: line 2 sets nothing",
    '{"batch_size": 8}': "ValueError: line 1 sets nothing",
    "batch_size == 8": "sets nothing; write it in Python: batch_size = 8",
}


def test_a_path_in_the_home_folder(monkeypatch, tmp_path):
    """Python and the shell expand it where it is a word of its own, but not after --out_dir=."""
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "config.py").write_text("dataset = '~/data/text'\n")
    found = configure(settings_of(TRAIN), [str(tmp_path / "config.py"), "--out_dir=~/out", "--wandb_run_name=a~/b"])
    assert [found[key] for key in ("dataset", "out_dir", "wandb_run_name")] == ["/home/me/data/text", "/home/me/out", "a~/b"]


def test_mistakes_end_with_one_line(capsys, tmp_path):
    for argument, message in MISTAKES.items():
        assert message in refused(capsys, DEFAULTS | OTHERS, argument)
    file = tmp_path / "config.py"
    for text, message in MISTAKES_IN_FILES.items():
        file.write_text(text)
        error = refused(capsys, DEFAULTS | OTHERS, str(file))
        assert message in error
        assert str(file) in error


def test_files_and_arguments_apply_in_order(tmp_path):
    file = tmp_path / "config.py"
    file.write_text("import time\n_half = 2\nbatch_size = 5 * 8 // _half\nout_dir = f'{out_dir}-x'\n")
    config = settings("--out_dir=a", str(file), "--learning_rate=0.5")
    assert config == {"batch_size": 20, "learning_rate": 0.5, "compile": True, "out_dir": "a-x"}


SCRIPT = f'''"""What it does."""
from typing import Literal
from configurator import PositiveInt, configure
# -----
# this comment belongs to no setting, because a heading comes next
# AdamW
rate = 0.5  # per step; # is no end
steps: PositiveInt = 3
# longer than a heading: it goes to the setting below,
# in two lines, then.
names = (
    "a # b"  # at the end
)
# data
kind: Literal["one", "two"] = "one"  # {" ".join(["word"] * 30)}
# learning rate
configure(globals())
rate = 1  # after the settings
'''
HELP = f"""What it does.
INTRODUCTION

AdamW
  --rate=0.5       per step; # is no end
  --steps=3        must be at least 1
  --names='a # b'  at the end; longer than a heading: it goes to the setting below, in two lines, then.

data
  --kind='one'     {" ".join(["word"] * 20)}
                   {" ".join(["word"] * 10)}; one of one, two
"""


def test_help_shows_what_stands_beside_the_settings(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    head, introduction, *lines = run(str(script), "--help").succeeded().stdout.splitlines()
    assert "--key=value" in introduction
    assert [head, "INTRODUCTION", *lines] == HELP.splitlines()


EXPLAINED = {
    "train.py": r"--batch_size=12 +sequences per micro-step; must be at least 1\n",
    "sample.py": r"--dtype='auto' +auto: best on GPU, float32 on CPU; one of auto, float32, bfloat16, float16\n",
    "export.py": r"--dtype='float32' +of the weights; one of float32, bfloat16\n",
    "bench.py": r"--rounds=5 +turns of each mode; one more turn comes first and is not counted; must be at least 1\n",
    "plan.py": r"--world_size='1,2,4,8,64,1024' +numbers of ranks, separated by commas\n",
    "dashboard.py": r"--png DIR +write pictures into a folder\n",
}


@pytest.mark.parametrize("script", EXPLAINED)
def test_help_of_every_script_explains_the_settings_in_120_columns(script):
    shown = run(script, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert re.search(EXPLAINED[script], shown.stdout)
    assert max(map(len, shown.stdout.splitlines())) <= 120


@pytest.fixture(scope="module")
def train_defaults():
    return defaults_of("train.py")


DECLARED = {
    "count": (3, PositiveInt),
    "decay": (0.5, Decay),
    "format": ("one", Literal["one", "two"]),
    "level": (1, Literal[1, 2]),
    "bucket": ("auto", Literal["auto"] | PositiveFloat),  # the word or a number
}
BAD_VALUES = {
    "count=0": "count=0 must be at least 1",
    "decay=1.0": "decay=1.0 must be at least 0 and less than 1",
    "decay=-0.5": "decay=-0.5 must be at least 0 and less than 1",
    "format=three": "format=three is not one of one, two",
    "level=3": "level=3 is not one of 1, 2",
    "bucket=large": "bucket='large' in --bucket=large is text, but bucket takes auto or a number",
    "bucket=True": "bucket=True in --bucket=True is True or False (with a capital), but bucket takes auto or a number",
    "bucket=0": "bucket=0.0 must be positive",
    "bucket=1e999": "bucket=inf in --bucket=1e999 is not a finite number",
}


def declared():
    kinds = {key: kind for key, (_, kind) in DECLARED.items()}
    return {**{key: value for key, (value, _) in DECLARED.items()}, "__annotations__": kinds}


def test_a_value_must_keep_the_declared_range_or_choices_and_is_named_with_its_file(tmp_path, capsys):
    for text, message in BAD_VALUES.items():
        assert refused(capsys, declared(), f"--{text}") == f"error: {message}\n"
    path = tmp_path / "config.py"
    path.write_text("count = 0\nformat = 'three'\n")
    assert refused(capsys, declared(), str(path), "--format=two") == f"error: count=0 in {path} must be at least 1\n"
    assert refused(capsys, declared(), str(path), "--count=1") == f"error: format=three in {path} is not one of one, two\n"


def test_values_at_the_end_of_a_range_are_taken_and_an_integer_in_a_file_is_a_number(tmp_path):
    for text in ("count=1", "decay=0.0", "format=two", "level=1", "bucket='auto'", "bucket=2.5"):
        key, value = text.split("=")
        assert str(configure(declared(), [f"--{text}"])[key]) == value.strip("'")
    (tmp_path / "config.py").write_text("bucket = 3\n")
    assert repr(configure(declared(), [str(tmp_path / "config.py")])["bucket"]) == "3.0"


NANOGPT_DEFAULTS = {
    **{"out_dir": "out", "eval_interval": 2000, "log_interval": 1, "eval_iters": 200, "eval_only": False, "dropout": 0.0},
    **{"always_save_checkpoint": True, "init_from": "scratch", "wandb_log": False, "wandb_project": "owt", "bias": False},
    **{"wandb_run_name": "gpt2", "dataset": "openwebtext", "gradient_accumulation_steps": 40, "batch_size": 12},
    **{"block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768, "learning_rate": 6e-4, "max_iters": 600000},
    **{"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "decay_lr": True, "warmup_iters": 2000},
    **{"lr_decay_iters": 600000, "min_lr": 6e-5},
}


def test_nanogpts_settings_have_nanogpts_defaults(train_defaults):
    assert {key: train_defaults[key] for key in NANOGPT_DEFAULTS} == NANOGPT_DEFAULTS
    assert {"backend", "device", "dtype", "compile"} <= train_defaults.keys(), "also in nanoGPT, but the machine decides"
    assert {flag.name: flag.default for flag in fields(Flags)}.items() <= train_defaults.items()


@pytest.mark.parametrize("path", sorted(glob.glob(os.path.join(ROOT, "config", "*.py"))))
def test_every_config_file_is_accepted(train_defaults, path):
    assert configure(dict(train_defaults), [path]) != train_defaults


def test_settings_of_a_script_are_those_that_its_help_lists(train_defaults):
    settings = settings_of(TRAIN)
    kinds = settings.pop("__annotations__")
    del settings["__files__"]
    assert settings == train_defaults
    assert all(comments for _, comments in _notes(TRAIN).values()), "every setting says what it is"
    assert list(settings) == list(train_defaults)
    assert kinds["batch_size"] is PositiveInt
    assert kinds["zero1_impl"] == Literal["sharded", "torch"]


def test_settings_of_a_script_keep_their_limits_and_the_script_is_not_run(tmp_path, capsys):
    script = tmp_path / "script.py"
    others = "_private, LIMIT = 1, 2\nconfig = configure(globals())\nrank = 0\n"
    script.write_text(f"import os\n1 / 0\nbatch_size: PositiveInt = 3 * 4\nparallel = os.name == ''\n{others}")
    settings = settings_of(str(script))
    kinds = {"batch_size": PositiveInt}
    assert settings == {"batch_size": 12, "parallel": False, "__annotations__": kinds, "__files__": (str(script),)}
    assert refused(capsys, settings, "--batch_size=0") == "error: batch_size=0 must be at least 1\n"
