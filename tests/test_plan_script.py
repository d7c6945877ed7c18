"""plan.py: the table, its files, the largest batch, and what is refused."""

import io
import json
import math
import re
import shutil
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import ROOT
from scripts import SIZES, check_mistakes, defaults_of

import plan as plan_script
from benchmarks.contenders import Setup
from charts.style import number
from configurator import TRAIN, configure, settings_of
from forecast.dry_run import state_bytes, state_of_ranks
from forecast.modes import MODES
from forecast.run_memory import CPU_RESIDENT, gpt_specs, planned_optimizer
from model import GPT2_SIZES, GPTConfig

CONFIG = GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32, bias=False)  # as in SIZES and the data
SETTINGS = [*SIZES, "--device=cpu", "--bucket_mb=0.02"]
SMALL_BUCKETS = {name: replace(mode.flags, bucket_mb=0.02) for name, mode in MODES.items() if mode.planned}
IN_PLACE = [name for name, mode in MODES.items() if mode.in_place]
WORLD_SIZES = [1, 2, 8]
ALONE = [name for name, flags in SMALL_BUCKETS.items() if name == "adamw" or flags.implementation(1) == "sharded"]
OTHERS = ["checkpointing", "loss_chunk", "all"]
DEFAULTS = settings_of(plan_script.__file__, TRAIN)


def plan(*arguments):
    """What plan.py prints."""
    with mock.patch.object(sys, "argv", ["plan.py", *arguments]), redirect_stdout(io.StringIO()) as printed:
        plan_script.main()
    return printed.getvalue()


def planner(config=CONFIG, **changes):
    """A Planner, of the small model with one micro-step per rank on two ranks."""
    settings = {"device": "cpu", "gradient_accumulation_steps": 2, "batch_size": 2, "bucket_mb": 0.02, **changes}
    return plan_script.Planner(DEFAULTS | settings, config)


def row(world_size, **changes):
    """The row of the settings; without a limit in `changes`, no batch fits, so that few batch sizes are predicted."""
    one = planner(**{"gpu_memory_gb": 1e-6, **changes})
    return one.figures("", one.chosen(world_size), world_size)


def rows_of(path):
    """The rows of a JSON file of plan.py: (world size, mode): figures."""
    return {(row["world_size"], row["mode"]): row for row in json.loads(path.read_text())["rows"]}


def test_the_state_is_that_of_the_optimizer_that_build_chooses(monkeypatch):
    before = row(2)["state"]
    monkeypatch.setattr("forecast.run_memory.optimizer_of", lambda *_, **adamw: (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}))
    assert 2 * row(2)["state"] == before


@pytest.mark.parametrize(
    ("row", "modes", "arguments"),
    [
        ("GPT-2 XL on 8 GPUs", ("adamw", *IN_PLACE, "sharded"), ("config/train_gpt2_xl.py", "--world_size=8")),
        ("GPT-2 124M on 8 GPUs", ("adamw", *IN_PLACE, "sharded"), ("config/train_gpt2.py", "--world_size=8")),
        ("XL on one GPU", ("adamw", "adamw", None, "all"), ("config/train_gpt2_xl.py", "--world_size=1", "--batch_size=1")),
    ],
)
def test_the_first_figures_of_the_readme(monkeypatch, row, modes, arguments):
    monkeypatch.chdir(ROOT)
    settings = configure(settings_of(plan_script.__file__, TRAIN), [*arguments, "--compile=True"])
    one, size = plan_script.Planner(settings, plan_script.model_config(settings)), int(settings["world_size"])
    choices = {mode: choice for choice, mode in one.choices(size).items()}
    peaks = [mode and one.forecast(choices[mode], size).peak for mode in modes]
    less = ["", "", *(f"({1 - peak / peaks[1]:.0%} less)".replace("%", " %") if peak else "" for peak in peaks[2:])]
    cells = [f" {peak / 1e9:.2f} {saved}".rstrip() + " " if peak else " " for peak, saved in zip(peaks, less, strict=True)]
    with open("README.md") as file:
        assert [line.split("|")[2:6] for line in file if line.startswith(f"| {row}")] == [cells]


@pytest.fixture(scope="module")
def planned(data, tmp_path_factory):
    """What one run printed, and its rows."""
    folder = tmp_path_factory.mktemp("plan")
    flags = f"--world_size={','.join(map(str, WORLD_SIZES))}", "--gpu_memory_gb=0.001", f"--json={folder / 'plan.json'}"
    return plan(f"--dataset={data}", *SETTINGS, *flags), rows_of(folder / "plan.json")


def test_the_table_has_every_mode_for_every_number_of_ranks(planned):
    printed, rows = planned
    lines = [tuple(line.split()[:2]) for line in printed.splitlines() if re.match(r" *\d+  \w", line)]
    rows_of_size = {1: [*ALONE, *OTHERS], 2: [*SMALL_BUCKETS, *OTHERS]}
    rows_of_size[8] = [mode for mode in rows_of_size[2] if mode not in IN_PLACE]  # 6 micro-steps of all ranks
    expected = [(size, mode) for size in WORLD_SIZES for mode in rows_of_size[size]]
    assert [(int(size), mode) for size, mode in lines] == list(rows) == expected
    chosen = [tuple(line.split()[:2]) for line in printed.splitlines() if re.match(r" *\d+  \w+ \*", line)]
    assert chosen == [("1", "adamw"), ("2", "sharded"), ("8", "sharded")]
    assert re.findall(r"^ *(\d+) ranks? +peak .*", printed, re.MULTILINE) == [str(size) for size in WORLD_SIZES]
    more = "--batch_size=2 --gradient_accumulation_steps=8 for it (a global batch of 16 sequences in place of 12, 33.3% more)"
    needs = re.findall(r"^ *(\d+) ranks?  peak .*; train.py needs (--.*), as assumed here$", printed, re.MULTILINE)
    assert needs == [("8", more)], "6 micro-steps are enough for 1 and 2 ranks"
    assert "\nnote: without effect on 1 rank: bucket_mb=0.02, use_zero1=True\n" in printed
    header, units = re.search(r"^(ranks  mode  .*)\n(.*)$", printed, re.MULTILINE).groups()
    assert header.split()[:3] == ["ranks", "mode", "parameters"]
    assert set(units.split()) == {"MB", "x", "ms"}, "the unit is that of the weights"


def test_the_rows_are_what_bench_predicts_for_the_rank_with_the_most_state(planned):
    _, rows = planned
    setup = Setup(CONFIG, 2, torch.device("cpu"), "float32", 0.02, 1.0, activation_checkpointing=False, seed=0)
    for (world_size, mode), row in rows.items():
        if world_size == 1 or mode not in MODES or not MODES[mode].is_built:
            continue
        result = setup.forecast(MODES[mode], world_size, micro_steps=math.ceil(6 / world_size))
        state = [sum(slice_.numel for slice_ in result.plan.slices(rank)) for rank in range(result.plan.world_size)]
        expected = {
            **result.at("accumulating" if world_size < 6 else "before step"),
            **{"buckets": result.largest_buckets, "activations": result.activations.saved, "peak": result.peak},
            **{"sent": sum(result.sent.values()), "saving_on_cpu": 0},
            "state_to_mean": pytest.approx(max(state) * len(state) / sum(state)),
        }
        assert row | expected == row, (world_size, mode)


def test_the_row_of_the_settings_is_marked():
    everything = {"param_dtype": "bfloat16_remainder", "state_dtype": "int8"}
    for mode, changes in {
        "adamw": {"use_zero1": False, "zero1_impl": "torch"},
        "torch": {"zero1_impl": "torch"},
        "these flags": {"param_dtype": "bfloat16", "shard_gradients": True},
        "remainder": {"param_dtype": "bfloat16_remainder"},
        "int8": {"state_dtype": "int8", "activation_checkpointing": True},
        "all": {**everything, "shard_gradients": True, "activation_checkpointing": True, "loss_chunk": 1024},
        "sharded": {"activation_checkpointing": True, "loss_chunk": 512},
    }.items():
        one = planner(**changes)
        assert one.choices(2)[one.chosen(2)] == mode


@pytest.mark.parametrize("memory_mb", [1, 12])
def test_the_largest_batch_fits_and_a_larger_one_does_not(memory_mb):
    def choices(batch_size):
        one = planner(gpu_memory_gb=memory_mb / 1e3, batch_size=batch_size, gradient_accumulation_steps=6)
        found = {name: choice for choice, name in one.choices(2).items()}
        return one, {mode: found[mode] for mode in ("adamw", "sharded", "checkpointing")}

    one, found = choices(1)
    largest = {mode: one.largest_batch(choice, 2) for mode, choice in found.items()}
    assert largest["checkpointing"] > 1.5 * largest["sharded"] >= 1.5 * largest["adamw"] > 0
    for mode in ("adamw", "checkpointing"):
        for batch_size, fits in ((largest[mode], True), (math.ceil(1.1 * largest[mode]), False)):
            other, found = choices(batch_size)
            result = other.forecast(found[mode], 2)
            assert (result.peak <= memory_mb * 1e6 / CPU_RESIDENT) == other.fits(result) == fits, mode


def test_the_largest_batch_of_a_gpu_fits_though_its_allocator_rounds():
    """Rounded, activations are no convex function of the batch size."""
    config = GPTConfig(**GPT2_SIZES["gpt2"], bias=False)
    one = planner(config, device="cuda", dtype="bfloat16", compile=True, use_zero1=False, gpu_memory_gb=10.0, batch_size=1)
    choice = one.chosen(1)
    largest = one.largest_batch(choice, 1)
    for batch_size, fits in ((largest, True), (largest + 1, False)):
        activations = one.activations(replace(choice, batch_size=batch_size), 1)
        assert one.fits(replace(one.prediction(choice, 1), activations=activations)) == fits


def test_a_verdict_comes_first(planned):
    printed, rows = planned
    plain, sharded = rows[8, "adamw"], rows[8, "sharded"]
    peak, of_plain = (f"{number(row['peak'] / 1e6)} MB" for row in (sharded, plain))
    saved = f"{1 - sharded['peak'] / plain['peak']:.0%} less than adamw ({of_plain})"
    room = f"fits in 0.001 GB (0.000769 GB for tensors), up to --batch_size={sharded['largest_batch']} (adamw "
    above_the_table = printed.partition("\n\n")[0]
    assert f"\n    8 ranks  peak {peak}, {saved}: {room}{plain['largest_batch']}); " in above_the_table
    assert "\nmain memory of a machine with 8 of the ranks: at most " in above_the_table


def test_the_plan_of_a_gpu_counts_as_compiled_and_names_the_rows_that_take_more(tmp_path):
    for arguments, compiled in {
        ("--device=auto",): True,
        ("--device=cuda",): True,
        ("--device=cpu",): False,
        ("--gpu=H100", "--compile=False"): False,
        (str(tmp_path / "given.py"), "--gpu=H100"): False,
        (str(tmp_path / "other.py"), "--gpu=H100"): True,
    }.items():
        (tmp_path / "given.py").write_text("compile = False\n")
        (tmp_path / "other.py").write_text("n_layer = 2\n")
        printed = plan(*arguments, *SIZES, "--world_size=2", "--max_iters=7")
        assert f", --compile={compiled}, " in printed
    assert re.search(r" tokens/s and [\d.e-]+ s for 7 iterations, 1,344 tokens, on H100 at 33 % MFU$", printed, re.M)
    one = planner(replace(CONFIG, n_layer=24), batch_size=64)
    rows = {
        mode: one.figures(mode, choice, 2) for choice, mode in one.choices(2).items() if mode in ("adamw", "sharded", "int8")
    }
    rows["int8"] |= {"peak": 2 * rows["sharded"]["peak"], "buckets": 10**9 + rows["sharded"]["buckets"]}
    checkpointing = one.forecast(replace(one.chosen(2), activation_checkpointing=True), 2).peak
    assert list(plan_script.notes(list(rows.values()), one)) == [
        "on 2 ranks, int8 takes 100% more than sharded: 1.00 GB of buckets",
        f"on 2 ranks, --activation_checkpointing=True takes {1 - checkpointing / rows['sharded']['peak']:.0%} less, "
        "for up to a third more computation",
        "with one micro-step on each of 2 ranks, shard_gradients changes nothing",
    ]


def test_no_batch_fits_where_saving_does_not():
    """On a CPU, a save in the background takes a copy: here more than training with batch size 1."""
    limited = planner(gpu_memory_gb=0.00045, batch_size=1, async_save=True)
    row = next(limited.figures(mode, choice, 8) for choice, mode in limited.choices(8).items() if mode == "checkpointing")
    assert CPU_RESIDENT * row["peak"] < 0.45e6 < CPU_RESIDENT * row["saving"]
    assert (row["fits"], row["largest_batch"]) == ("no", 0)


def test_every_setting_of_the_trainer_is_accepted():
    """With its default. Its help explains plan.py's own only."""
    settings, own = defaults_of("train.py"), {"world_size", "vocab_size", "gpu_memory_gb", "json"}
    own |= {"bandwidth_gbit", "between_gbit", "ranks_per_machine", "find", "gpu", "mfu", "gpu_hour_price"}
    assert set(defaults_of("plan.py")) == own
    assert DEFAULTS.keys() - {"__annotations__", "__files__"} == settings.keys() | own
    assert {key: DEFAULTS[key] for key in settings} == settings


MISTAKES = {
    "--world_size=0": "world_size=0 must be positive integers, separated by commas; for example --world_size=1,2,8",
    "--world_size=2,": "must be positive integers",
    "--gpu_memory_gb=-1": "gpu_memory_gb=-1.0 must not be negative",
    "--batch_size=0": "batch_size=0 must be at least 1",
    "--wrld_size=2": "did you mean 'world_size'?",
    "--init_from=resume": "plan.py reads no checkpoint",
    "--device=gpu": "device=gpu is not one of auto, cpu, cuda, mps",
    "--json=data": "json=data is a folder",
    "--gpu_hour_price=2.5": "gpu_hour_price needs the speed of the GPUs",
    "--find=batch --json=plan.json": "find prints no table; remove --json",
    "--device=cuda --gpu=A101": "gpu=A101 is not one of B200, ",
    "--device=cuda --gpu=8xH100": "gpu=8xH100 is more than one; use --world_size=8 --gpu=H100",
    "--device=cuda --gpu=V100 --param_dtype=bfloat16": "no bfloat16 and computes in float16; use --param_dtype=auto",
    "--init_from=gpt2 --vocab_size=65": "gpt2 has its own; remove --vocab_size",
    # what train.py refuses
    "--n_embd=33": "use a multiple of n_head",
    "--shard_size=2 --zero1_impl=torch --world_size=4": "shard_size=2 needs use_zero1=True",
    "--param_dtype=bfloat16 --use_zero1=False": "param_dtype=bfloat16 needs use_zero1=True",
    "--init_from=gpt2 --block_size=2048": "block_size=2048 does not fit the model; use --block_size=1024",
    "--param_dtype=bfloat16 --dtype=float16": "computes in bfloat16, not in dtype=float16",
    "--backend=nccl": "backend=nccl does not support device=cpu",
}


def test_mistakes_have_exit_code_2():
    check_mistakes("plan.py", SETTINGS, MISTAKES)


def test_groups_of_ranks_share_the_state(data, tmp_path):
    groups = f"--dataset={data}", "--shard_size=4", "--ranks_per_machine=4", "--gpu_memory_gb=0.0001"
    printed = plan(*SETTINGS, "--world_size=2,8", *groups, f"--json={tmp_path / 'plan.json'}")
    rows = rows_of(tmp_path / "plan.json")
    specs = gpt_specs(CONFIG)
    whole = SMALL_BUCKETS["sharded"].plan(specs, 4)
    for mode in ("sharded", "shard_gradients"):
        assert rows[8, mode]["state"] == max(state_of_ranks(whole, state_bytes(specs, planned_optimizer(None))))
        # an all-reduce of 1/4 of the gradients between two groups: each rank sends half of it twice
        assert rows[8, mode]["between"] == sum(4 * len(span[0]) for span in whole.buffers[0].layout.shards)
    assert rows[8, "bfloat16"]["between"] > 0  # float32 sums
    for mode in ("adamw", "torch"):  # on two machines of four ranks, one rank of each sends everything to the other machine
        assert rows[8, mode]["between"] == pytest.approx(rows[8, mode]["sent"] / 4, rel=1e-6)
    assert not any(rows[2, mode]["between"] for mode in ("adamw", "torch", "sharded"))  # one machine
    assert re.search(r"^ *2 ranks  peak .*; train.py needs .*--shard_size=0 for it, as assumed here$", printed, re.MULTILINE)
    assert printed.count("needs --shard_size") == 1, "4 divides 8"


def vocabulary(dataset, vocab_size=0, block_size=16):
    return plan_script.vocabulary({"dataset": str(dataset), "vocab_size": vocab_size, "block_size": block_size})


def test_the_vocabulary_of_a_dataset_that_is_not_prepared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan_script, "DATA_DIR", str(tmp_path))
    for name, size in (("shakespeare_char", 65), ("stdlib_char", 96), ("shakespeare", 50304), ("openwebtext", 50304)):
        (tmp_path / name).mkdir()
        shutil.copy(f"{ROOT}/data/{name}/prepare.py", tmp_path / name)
        assert (vocabulary(name), vocabulary(name, 100)) == (size, 100)
    assert vocabulary("mine", 1000) == 1000
    assert capsys.readouterr().out == ""
    assert vocabulary("mine") == 50304
    assert "use --vocab_size=<number of tokens>" in capsys.readouterr().out


def test_a_prepared_dataset_is_checked_as_in_a_run(data):
    assert vocabulary(data) == 29
    with pytest.raises(ValueError, match=r"is prepared and gives 29; remove --vocab_size"):
        vocabulary(data, 65)
    with pytest.raises(ValueError, match="too few for one sequence of block_size=4000"):
        vocabulary(data, block_size=4000)


def test_a_background_save_takes_a_copy_while_training_goes_on():
    numel = sum(spec.numel for spec in gpt_specs(CONFIG))
    saved = row(2, async_save=True)
    copy = pytest.approx(8 * numel, rel=0.01)  # weights, moments / 2
    assert saved["saving"] - saved["peak"] == saved["saving_on_cpu"] == copy
    assert row(2, async_save=True, param_dtype="bfloat16")["saving_on_cpu"] == pytest.approx(6 * numel, rel=0.01)
    assert row(2)["saving_on_cpu"] == 0
    on_gpu = row(2, async_save=True, device="cuda")
    assert on_gpu["saving"] == on_gpu["peak"]


def test_a_card_gives_its_memory_less_what_its_libraries_take():
    card = planner(device="cuda", gpu="L4")
    assert [card.memory(size) for size in (1, 2)] == [23.0e9, 22.4e9]
    assert card.limit(1) == "23 GB (L4: 23.6 GB, less 0.6 for CUDA and cuBLAS)"
    assert card.limit(2) == "22.4 GB (L4: 23.6 GB, less 1.2 for CUDA, cuBLAS and NCCL)"
    given = planner(device="cuda", gpu="L4", gpu_memory_gb=24.0)
    assert [(given.memory(size), given.limit(size)) for size in (1, 2)] == 2 * [(24e9, "24 GB")]
    assert (card.network.inside, planner(gpu="L4", bandwidth_gbit=100.0).network.inside) == (256, 100)


def test_a_card_without_bfloat16_computes_in_float16():
    """Its weights are not rounded, whatever memory there is; the other flags remain."""
    card = planner(device="cuda", gpu="T4", gpu_memory_gb=1e-6)
    assert card.dtype == "float16"
    assert not any("bfloat16" in mode or mode == "remainder" for size in (1, 2) for mode in card.choices(size).values())
    for size in (1, 2):
        assert card.everything(size).flags == replace(SMALL_BUCKETS["int8"], shard_gradients=size > 1)
        held = planner(device="cuda", gpu="T4", gpu_memory_gb=1.01e-9 * card.forecast(card.everything(size), size).peak)
        found = plan_script.cheapest(held, size).flags
        assert (found.param_dtype, found.state_dtype) == ("auto", "int8")


def test_ranks_that_cannot_share_the_batch_get_another_one_of_the_same_size():
    split = planner(batch_size=12, gradient_accumulation_steps=40)
    for ranks, batch in ((1, (12, 40)), (16, (10, 48)), (32, (5, 96)), (64, (8, 64))):
        assert split.batch(ranks) == batch
        assert split.chosen(ranks).batch_size == batch[0]
        assert split.accumulation_steps(1, ranks) == math.prod(batch)
    assert split.global_batch(10, 48) == "the same global batch"
    assert split.global_batch(8, 64) == "a global batch of 512 sequences in place of 480, 6.7% more"
