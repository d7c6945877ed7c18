"""CONTRIBUTING.md: its recipes are applied to a copy of the files, and the copy trains as they say; its names exist."""

import glob
import json
import math
import os
import re
import shutil
import string
import subprocess
import sys
from functools import partial
from pathlib import Path

import faults
import pytest
from conftest import ROOT
from scripts import SIZES, events_of, run, torch_load

from model import GPT, GPTConfig

TEXT = Path(ROOT, "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)  # language, content
STEPS, WARM_UP, LR, MIN_LR = 6, 2, 1e-2, 1e-3
TRAIN = [
    *(*SIZES, "--device=cpu", "--compile=False", "--dataset=my_text", "--eval_interval=3", "--eval_iters=2"),
    *(f"--max_iters={STEPS}", f"--lr_decay_iters={STEPS}", f"--warmup_iters={WARM_UP}"),
    *(f"--learning_rate={LR}", f"--min_lr={MIN_LR}"),
]


def apply(diff, folder):
    """Change files as the diff says, unless they are changed already. What it replaces must be in the file once."""
    for of_file in re.split("^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, changes = of_file.partition("\n")
        text = (folder / name).read_text()
        for change in changes.split("@@\n"):
            lines = change.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
            assert new in text or text.count(old) == 1, f"{name} has {text.count(old)} times, mend CONTRIBUTING.md:\n{old}"
            text = text if new in text else text.replace(old, new)
        (folder / name).write_text(text)


def apply_all(folder):
    for language, content in BLOCKS:
        if language == "diff":
            apply(content, folder)
        else:
            path = folder / re.match(r"# (\S+\.py)\n", content)[1]
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)


def run_copy(folder, script, *arguments, ranks=0):
    """Run a script of the copy, which imports the modules of the copy."""
    return run(str(folder / script), *arguments, ranks=ranks, before=partial(faults.import_from, str(folder)))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the files with all recipes applied, and the dataset of the last one."""
    folder = tmp_path_factory.mktemp("copy")
    for path in (*glob.glob("*.py", root_dir=ROOT), *glob.glob("data/*.py", root_dir=ROOT)):
        (folder / path).parent.mkdir(exist_ok=True)
        shutil.copy(os.path.join(ROOT, path), folder / path)
    for package in ("benchmarks", "charts", "distributed", "forecast", "run", "zero"):
        shutil.copytree(os.path.join(ROOT, package), folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    apply_all(folder)
    (folder / "text").write_text(200 * string.ascii_lowercase)
    prepared = run_copy(folder, "data/my_text/prepare.py", "--input", str(folder / "text"))
    assert "vocabulary of 26" in prepared.stdout, prepared.stderr
    return folder


def train(folder, *flags):
    """The events of a run of the copy, and what it has printed."""
    process = run_copy(folder, "train.py", *TRAIN, *flags, f"--out_dir={folder / 'out'}").succeeded()
    return events_of(folder / "out"), process.stdout


def test_a_run_with_all_recipes(copy):
    plain, _ = train(copy)
    changed, printed = train(copy, "--z_loss=0.1", "--schedule=linear", "--weight_interval=2")
    assert re.findall(r"^largest weight (\d): 1\.\d+$", printed, re.MULTILINE) == ["0", "2", "4", "6"]
    first, other = ([event for event in events if "iter/loss" in event] for events in (plain, changed))
    assert len(first) == len(other) == STEPS + 1
    z = math.log(26) ** 2  # the logits of a new model are small
    assert other[0]["iter/loss"] - first[0]["iter/loss"] == pytest.approx(0.1 * z, rel=0.05)
    validation = [[event["val/loss"] for event in events if "val/loss" in event] for events in (plain, changed)]
    assert validation[0][0] == validation[1][0] == pytest.approx(math.log(26), rel=0.05), "the evaluations are without it"
    assert 0 < validation[1][-1] < validation[1][0]
    for event in (*first, *other):
        assert event["iter/lr_times_grad_norm"] == event["lr"] * event["iter/grad_norm"]
    norms = [(event["iter"], event["weights/wte_norm"]) for event in plain if "weights/wte_norm" in event]
    assert [iteration for iteration, _ in norms] == [0, 3, 6], "the evaluations"
    assert len({norm for _, norm in norms}) == 3, "the weights change"
    assert {"`iter/lr_times_grad_norm`", "`weights/wte_norm`"} <= set(run_copy(copy, "run/metrics.py").stdout.split())
    for iteration in range(WARM_UP, STEPS + 1):
        ratio = (iteration - WARM_UP) / (STEPS - WARM_UP)
        shapes = 0.5 * (1 + math.cos(math.pi * ratio)), 1 - ratio
        expected = [pytest.approx(MIN_LR + shape * (LR - MIN_LR)) for shape in shapes]
        assert [first[iteration]["lr"], other[iteration]["lr"]] == expected


def test_the_new_model_option_is_trained_planned_with_the_new_mode_and_kept_in_the_checkpoint(copy):
    flags = "--norm=rmsnorm", "--bias=True"
    logged = next(event for event in train(copy, *flags)[0] if "memory/predicted_peak_mb" in event)
    options = "--world_size=2", "--gpu_memory_gb=0.0005", f"--json={copy / 'plan.json'}"
    process = run_copy(copy, "plan.py", *TRAIN, *flags, *options)
    assert re.search(r"^ *2  coded +\d", process.stdout, re.MULTILINE), process.stderr
    planned = json.loads((copy / "plan.json").read_text())["rows"][0]
    for part in ("parameters", "activations"):
        assert logged[f"memory/predicted_{part}_mb"] == planned[part] / 1e6
    before = GPT(GPTConfig(block_size=16, vocab_size=26, n_layer=2, n_head=2, n_embd=32))
    without = sum(param.numel() for param in before.parameters()) - 32 * (2 * 2 + 1)
    assert planned["parameters"] == 4 * without, "no bias in any norm"
    resumed = run_copy(copy, "train.py", *TRAIN, "--bias=True", "--init_from=resume", f"--out_dir={copy / 'out'}")
    resumed.succeeded("a resumed run uses the checkpoint's values: norm=rmsnorm (not layernorm)\n")


@pytest.mark.parametrize("implementation", ["--use_zero1=False", "--use_zero1=True"])
def test_rotary_embeddings_leave_wpe_frozen(copy, implementation):
    """It has no gradient, which DistributedDataParallel would refuse if it were trained."""
    out = copy / "rotary"
    run_copy(copy, "train.py", *TRAIN, "--positions=rotary", implementation, f"--out_dir={out}", ranks=2).succeeded()
    assert not torch_load(out)["model"]["transformer.wpe.weight"].any()
    known = {key: value for event in events_of(out) for key, value in event.items()}
    assert known["memory/predicted_parameters_mb"] == pytest.approx(known["memory/measured_parameters_mb"])
    losses = [event["val/loss"] for event in events_of(out) if "val/loss" in event]
    assert losses[-1] < losses[0]


def test_the_new_mode_and_the_new_model_option_are_measured(copy):
    flags = "--what=memory", "--simulate_world_size=2", "--name=", "--device=cpu", "--vocab_size=64"
    activations = []
    for norm, modes in (("layernorm", "adamw"), ("rmsnorm", "adamw,coded")):
        process = run_copy(copy, "bench.py", *flags, *SIZES[:-1], "--bias=True", f"--norm={norm}", f"--modes={modes}")
        activations.append(float(re.search(r"adamw +peak +.* (\S+) +\S+$", process.stdout, re.MULTILINE)[1]))
    assert re.search(r"^ +2 +coded +peak +\d", process.stdout, re.MULTILINE), process.stderr
    assert activations[0] < activations[1], "on a CPU, RMSNorm keeps more"


def test_the_new_settings_are_checked_and_explained(copy):
    run_copy(copy, "train.py", "--z_loss=-1").refusal("error: z_loss=-1.0 must not be negative")
    refused = run_copy(copy, "train.py", *TRAIN, "--z_loss=0.1", "--loss_chunk=8")
    refused.refusal("error: z_loss needs all logits, but loss_chunk=8")
    shown = run_copy(copy, "train.py", "--help").stdout
    assert re.search(r"--z_loss=0.0 +weight of the squared log-partition function in the training loss; must not be", shown)
    assert re.search(r"--schedule='cosine' +after the warm-up; [^;]*;\s+one\s+of\s+cosine,\s+wsd,\s+linear\n", shown)


def succeeds(folder, *arguments):
    done = subprocess.run([sys.executable, "-m", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_recipes_are_as_lint_wants(copy):
    shutil.copy(os.path.join(ROOT, "pyproject.toml"), copy)
    succeeds(copy, "ruff", "check", ".")
    succeeds(copy, "ruff", "format", "--check", ".")


@pytest.mark.slow("the recipes are tested one by one", seconds=420)
def test_the_recipes_break_no_other_test(tmp_path):
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path], check=True)
    apply_all(tmp_path)
    succeeds(tmp_path, "mypy")
    # the first one has the keys of a checkpoint without the new fields; the second one would see the recipes twice
    left_out = "not test_the_checkpoint_is_nanogpts and not test_the_recipes_are_as_lint_wants"
    succeeds(tmp_path, "pytest", "-n", "2", "-m", "not slow", "-k", left_out)


OTHER_OPTIMIZER = {  # in zero/build.py, as the section on optimizers says
    "from zero.data_parallel": "from optimizers import SignMomentum\nfrom zero.data_parallel",
    'Muon if matrices else torch.optim.AdamW, {**adamw, "fused": device_type in ("cuda", "cpu")}': (
        'SignMomentum, {"lr": adamw["lr"]}'
    ),
    "ShardedOptimizer(groups, optimizer_cls, ": "ShardedOptimizer(groups, optimizer_cls, elementwise=True, ",
}


def test_another_optimizer_class_is_named_and_its_state_is_counted(copy, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(copy, folder)
    shutil.copy(os.path.join(ROOT, "tests", "zero", "optimizers.py"), folder)
    text = (folder / "zero" / "build.py").read_text()
    for old, new in OTHER_OPTIMIZER.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "zero" / "build.py").write_text(text)
    sizes = "--n_layer=4", "--n_head=4", "--n_embd=128", "--block_size=64", "--max_iters=3"  # those of `make train`
    for flag, line in {
        "--use_zero1=False": "Using plain SignMomentum\n",
        "--state_dtype=int8": ": SignMomentum, state in int8 between updates\n",
    }.items():
        out = folder / flag
        process = run_copy(folder, "train.py", *TRAIN, *sizes, flag, "--log_interval=1", f"--out_dir={out}", ranks=2)
        printed = process.succeeded(line).stdout
        assert "WARNING" not in printed
        assert "3.2 MB of state" in printed, "without sharding"
        assert "| settings | optimizer=SignMomentum, " in (out / "report.md").read_text()
        known = {key: value for event in events_of(out) for key, value in event.items()}
        assert known["memory/predicted_state_mb"] == pytest.approx(known["memory/measured_state_mb"], rel=0.001)


def test_what_it_names_exists():
    for path in re.findall(r"`([\w/]+\.(?:py|md))`|\]\(([\w/.]+)\)", TEXT):
        path = "".join(path)
        assert path == "prepare.py" or os.path.exists(os.path.join(ROOT, path)), path
    pairs = re.findall(r"`(?:\w+\.)?(\w+)`\s+(?:of|in)\s+`([\w/]+\.py)`", TEXT)
    assert ("log_iteration", "run/meter.py") in pairs
    for name, path in pairs:
        assert re.search(rf"\b{name}\b", Path(ROOT, path).read_text()), f"{path} has no {name}"
