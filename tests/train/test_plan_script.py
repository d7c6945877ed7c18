"""plan.py: the table, its files, the owners of a parameter, the largest batch, and what is refused."""

import json
import math
import re
from dataclasses import replace

import pytest
from scripts import SIZES, defaults_of, run

from accounting import MODES, gpt_specs
from activations import predict
from model import GPTConfig
from zero.prediction import Prediction

CONFIG = GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32, bias=False)  # as in SIZES and the data
SETTINGS = [*SIZES, "--device=cpu", "--zero_bucket_mb=0.02"]
FLAGS = {mode: replace(flags, bucket_mb=0.02) for mode, flags in MODES.items()}
FLAGS |= {"checkpointing": FLAGS["sharded"], "all": replace(FLAGS["bfloat16"], shard_gradients=True)}
WORLD_SIZES = [1, 2, 8]


def plan(data, *arguments):
    """What plan.py prints for the small model."""
    process = run("plan.py", f"--dataset={data}", *SETTINGS, *arguments)
    assert process.returncode == 0, process.stderr
    return process.stdout


def rows_of(path):
    """The rows of a JSON file of plan.py: (world size, mode): figures."""
    return {(row["world_size"], row["mode"]): row for row in json.loads(path.read_text())["rows"]}


@pytest.fixture(scope="module")
def planned(data, tmp_path_factory):
    """What one run printed, its rows, and its picture."""
    pytest.importorskip("vl_convert")
    folder = tmp_path_factory.mktemp("plan")
    world_sizes = ",".join(map(str, WORLD_SIZES))
    printed = plan(data, f"--world_size={world_sizes}", f"--json={folder / 'plan.json'}", f"--plot={folder / 'plan.png'}")
    return printed, rows_of(folder / "plan.json"), folder / "plan.png"


def test_the_table_has_every_mode_for_every_number_of_ranks(planned):
    printed, rows, picture = planned
    lines = [tuple(line.split()[:2]) for line in printed.splitlines() if re.match(r" *\d+  \w", line)]
    alone = ["adamw", "checkpointing"]
    expected = [(size, mode) for size in WORLD_SIZES for mode in (FLAGS if size > 1 else alone)]
    assert [(int(size), mode) for size, mode in lines] == expected
    assert list(rows) == expected
    chosen = [tuple(line.split()[:2]) for line in printed.splitlines() if re.match(r" *\d+  \w+ \*", line)]
    assert chosen == [("1", "adamw"), ("2", "sharded"), ("8", "sharded")]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert "note: 8 ranks cannot share 6 micro-steps; 8 are assumed" in printed


@pytest.mark.parametrize("mode", FLAGS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_rows_are_the_predictions_of_the_rank_with_the_most_state(planned, world_size, mode):
    _, rows, _ = planned
    if world_size == 1 and mode not in ("adamw", "checkpointing"):
        assert (world_size, mode) not in rows
        return
    flags = FLAGS[mode] if world_size > 1 else FLAGS["adamw"]
    activations = predict(CONFIG, 2, flags.param_dtype, flags.param_dtype, mode in ("checkpointing", "all"), "cpu")
    wrapper = "DistributedDataParallel" if mode in ("adamw", "torch") else "ShardedDataParallel"
    owners = flags.plan(gpt_specs(CONFIG), world_size)
    ranks = [
        Prediction(
            owners,
            rank,
            wrapper if world_size > 1 else None,
            world_size,
            micro_steps=math.ceil(6 / world_size),
            shard_gradients=flags.shard_gradients,
            on_cpu=True,
        )
        for rank in range(owners.world_size)
    ]
    fullest = max(ranks, key=lambda prediction: prediction.state)
    expected = {
        **fullest.at("accumulating" if world_size < 6 else "before step"),
        "buckets": fullest.largest_buckets,
        "activations": activations.saved,
        "peak": fullest.peak(activations),
        "sent": sum(fullest.sent().values()),
        "saving_on_cpu": fullest.consolidated,
        "state_to_mean": pytest.approx(fullest.state * len(ranks) / sum(prediction.state for prediction in ranks)),
    }
    row = rows[world_size, mode]
    assert {key: row[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "row"),
    [
        (["--use_zero1=False", "--zero1_impl=torch"], "adamw"),
        (["--zero1_impl=torch"], "torch"),
        (["--param_dtype=bfloat16", "--shard_gradients=True"], "these flags"),
        (["--param_dtype=bfloat16", "--shard_gradients=True", "--activation_checkpointing=True"], "all"),
    ],
)
def test_the_row_of_the_settings_is_marked(data, arguments, row):
    lines = plan(data, "--world_size=2", *arguments).splitlines()
    assert [line for line in lines if re.match(rf" *2  {row} \*", line)]
    assert len([line for line in lines if re.match(r" *2  [\w ]+ \*", line)]) == 1


def test_owners_of_a_parameter_cover_it_once(data):
    printed = plan(data, "--world_size=1,3", "--explain=transformer.wte.weight")
    blocks = re.findall(r"^(\w+, ranks: \d); transformer.wte.weight \(29, 32\), 928 elements.*\n((?:  .*\n)+)", printed, re.M)
    assert [name for name, _ in blocks] == ["adamw, ranks: 1", "sharded, ranks: 3", "torch, ranks: 3"]
    for name, lines in blocks:
        owned = re.findall(r"rank (\d) owns [\d.]+%: (.*)", lines)
        slices = [(rank, *map(int, pair.split(" to "))) for rank, ranges in owned for pair in ranges.split(", ")]
        end = 0
        for _, start, stop in sorted(slices, key=lambda slice_: slice_[1]):
            assert start == end < stop, name
            end = stop
        assert end == 928, name
        assert len({rank for rank, _, _ in slices}) == (3 if name.startswith("sharded") else 1), name


@pytest.mark.parametrize("memory_mb", [1, 12])
def test_the_largest_batch_fits_and_a_larger_one_does_not(data, tmp_path, memory_mb):
    path = tmp_path / "plan.json"

    def rows(batch_size):
        plan(data, "--world_size=2", f"--gpu_memory_gb={memory_mb / 1e3}", f"--batch_size={batch_size}", f"--json={path}")
        return {mode: row for (_, mode), row in rows_of(path).items()}

    largest = {mode: row["largest_batch"] for mode, row in rows(1).items()}
    assert largest["checkpointing"] > 1.5 * largest["sharded"] >= 1.5 * largest["adamw"] > 0
    for mode in ("adamw", "checkpointing"):
        fitting, larger = rows(largest[mode])[mode], rows(math.ceil(1.1 * largest[mode]))[mode]
        assert fitting["peak"] <= memory_mb * 1e6 < larger["peak"], mode
        assert (fitting["fits"], larger["fits"]) == ("yes", "no"), mode


def test_no_batch_fits_where_saving_does_not(data, tmp_path):
    """On a CPU, a consolidated checkpoint takes the memory of the whole state: here more than training with batch size 1."""
    path = tmp_path / "plan.json"
    plan(data, "--world_size=8", "--gpu_memory_gb=0.0005", "--batch_size=1", f"--json={path}")
    row = rows_of(path)[8, "checkpointing"]
    assert row["peak"] < 0.5e6 < row["saving"]
    assert (row["fits"], row["largest_batch"]) == ("no", 0)


def test_every_setting_of_the_trainer_is_accepted():
    settings, own = defaults_of("train.py"), {"world_size", "gpu_memory_gb", "bandwidth_gbit", "explain", "json", "plot"}
    with_own = defaults_of("plan.py")
    assert set(with_own) == set(settings) | own
    assert {key: with_own[key] for key in settings} == settings


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--world_size=0", "numbers of ranks"),
        ("--world_size=x", "numbers of ranks"),
        ("--world_size=2,", "numbers of ranks"),
        ("--gpu_memory_gb=0", "gpu_memory_gb=0.0 must be positive"),
        ("--batch_size=0", "batch_size=0 must be at least 1"),
        ("--wrld_size=2", "did you mean 'world_size'?"),
        ("--explain=transformer.wte", "the model has no such parameter; it has for example transformer.wte.weight"),
        ("--n_embd=33", "use a multiple of n_head"),
        ("--init_from=resume", "plan.py reads no checkpoint"),
        ("--explain=lm_head.weight", "the same tensor as transformer.wte.weight"),
        ("--zero_shard_size=2 --zero1_impl=torch --world_size=4", "zero_shard_size=2 needs use_zero1=True"),
        ("--device=gpu", "device=gpu is not one of auto, cpu, cuda, mps"),
        ("--json=data", "json=data is a folder"),
        ("--param_dtype=bfloat16 --use_zero1=False", "needs the master weights"),
        ("--explain=transformer.wte.weight --json=plan.json", "remove --json and --plot"),
        ("--plot=plan.pdf", "must end with .png, .svg or .html"),
    ],
)
def test_mistakes_have_exit_code_2(argument, message):
    process = run("plan.py", *SETTINGS, *argument.split())
    assert message in process.stderr
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert "ranks  mode" not in process.stdout


def test_groups_of_ranks_share_the_state(data, tmp_path):
    printed = plan(data, "--world_size=2,8", "--zero_shard_size=4", f"--json={tmp_path / 'plan.json'}")
    rows = rows_of(tmp_path / "plan.json")
    whole = FLAGS["sharded"].plan(gpt_specs(CONFIG), 4)
    for mode in ("sharded", "shard_gradients"):
        assert rows[8, mode]["state"] == max(2 * owned for owned in whole.updated_bytes)
        # an all-reduce of 1/4 of the gradients between two groups: each rank sends half of it twice
        assert rows[8, mode]["between"] == sum(4 * span[0].numel for span in whole.buffers[0].layout.shards)
    assert rows[8, "bfloat16"]["between"] > 0  # float32 sums
    assert not any(rows[8, mode]["between"] for mode in ("adamw", "torch"))
    assert "what leaves its group of zero_shard_size=4 ranks" in printed
    assert "note: 2 ranks cannot form groups of zero_shard_size=4, so train.py refuses them" in printed
    explained = plan(data, "--world_size=8", "--zero_shard_size=4", "--explain=transformer.wte.weight")
    assert "sharded, ranks: 8 in 2 groups; transformer.wte.weight" in explained
    assert "rank 3 owns" in explained
    assert "rank 4 owns" not in explained.partition("torch, ranks: 8")[0]
