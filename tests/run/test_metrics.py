"""run/meter.py, communication.py, memory_meter.py, profiling.py: the same keys for every implementation, figures, traces."""

import gzip
import json
import math
import os
import re
import runpy
from functools import partial
from types import SimpleNamespace
from unittest import mock

import faults
import pytest
import torch
from scripts import FEW, events_of, run, train, training

from forecast.prediction import PURPOSES, Workload
from model import GPT, GPTConfig
from run import memory_meter, metrics
from run.memory_meter import Memory
from run.metrics import METRICS
from run.profiling import ACTIVE, WAIT, WARM_UP, Profiler
from zero.build import build
from zero.collectives import KINDS as COLLECTIVES
from zero.flags import Flags

STEPS = 6
KINDS = {  # collectives that an implementation waits for, and sends
    "adamw": [("all_reduce",), ("all_reduce",)],
    "torch": [("all_reduce", "broadcast"), ("all_reduce", "broadcast")],
    "sharded": [("all_reduce", "reduce_scatter", "all_gather"), ("reduce_scatter", "all_gather")],
}
# figures that not every run has
OF_SOME = r"comm/(exposed|sent)_(all_|reduce_|broadcast)|memory/((predicted|measured)_(buckets|master)|saved|.*_(min|rank)$)"
OF_SOME += "|checkpoint/error|warning|sample|evaluation/"
LOGGED = {metric.key for metric in METRICS.values() if metric.when != "summary"}
OF_GPU = {metric.key for metric in METRICS.values() if metric.when.endswith("GPU")}
OF_RANKS = {metric.key for metric in METRICS.values() if metric.when == "ranks"}
OF_RANKS -= {f"{key}_{of}" for key in OF_RANKS for of in ("min", "rank")}
HOW = {"adamw": ["--use_zero1=False"], "torch": ["--zero1_impl=torch"], "sharded": ["--bucket_mb=0.02"]}


@pytest.fixture(scope="module")
def events(data, tmp_path_factory):
    """By implementation: the events of metrics.jsonl, run.json, and what was printed."""
    found = {}
    for name, flags in HOW.items():
        out = tmp_path_factory.mktemp(name)
        line = training(out, data, "--dropout=0.0", f"--max_iters={STEPS}", *flags)
        printed = run(*line, ranks=2, before=partial(faults.measure_every, 2)).succeeded().stdout
        found[name] = events_of(out), json.loads((out / "run.json").read_text()), printed
    return found


def iterations(events):
    return [event for event in events if "iter/loss" in event]


def test_every_metric_that_is_logged_is_declared_and_the_other_way_round(events):
    for name, (lines, *_) in events.items():
        logged, (waited, sent) = set().union(*lines), KINDS[name]
        of_kinds = {f"comm/exposed_{kind}_ms" for kind in waited} | {f"comm/sent_{kind}_mb_per_step" for kind in sent}
        assert {key for key in logged if re.match(r"comm/(exposed|sent)_[arb]", key)} == of_kinds, name
        assert logged <= LOGGED - OF_GPU
        assert {key for key in LOGGED - OF_GPU - logged if not re.match(OF_SOME, key)} == set(), name
    kinds = [kind.replace("-", "_") for kind in COLLECTIVES]
    of_some = {key for kind in kinds for key in (f"comm/exposed_{kind}_ms", f"comm/sent_{kind}_mb_per_step")}
    of_some |= {f"memory/{which}_{purpose}_mb" for which in ("predicted", "measured") for purpose in PURPOSES}
    assert of_some <= LOGGED


def test_the_table_has_a_row_of_every_metric(capsys):
    runpy.run_path(metrics.__file__, run_name="__main__")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split("`")[1] for line in lines] == list(METRICS)
    assert all(line.count("|") == 6 for line in lines)


def test_a_figure_that_is_always_zero_is_not_logged(events, data, tmp_path):
    """Without a kind of collective there are no figures of it; without other ranks there is no communication at all."""
    ends_at_zero = {"iter", "throughput/eta_hours", "time/slowest_rank"}
    for name, (lines, *_) in events.items():
        values = {key: [event[key] for event in lines if key in event] for key in set().union(*lines)}
        zeros = {key for key, found in values.items() if not any(found) and f"{key.removesuffix('_rank')}_min" not in values}
        assert zeros <= ends_at_zero, name
    line = training(tmp_path, data, "--max_iters=2", "--eval_interval=100", FEW)
    run(*line, before=partial(faults.takes_longer, "run.logger:MetricsFile.log", 0.1)).succeeded()
    keys = set().union(*events_of(tmp_path))
    assert not {key for key in keys if re.match(r"comm/|time/(slowest|rank)|iter/loss_max|memory/.*_(min|rank)$", key)}
    assert "memory/peak_mb" in keys
    assert [event["time/step_ms"] > 100 for event in iterations(events_of(tmp_path))[1:]] == [True, True], "it takes to log"


def test_every_implementation_logs_the_same_keys_at_the_same_events(events):
    def keys(name):
        lines = [event for event in events[name][0] if "warning" not in event]
        return [(event["iter"], {key for key in event if not re.match(OF_SOME, key)}) for event in lines]

    assert keys("adamw") == keys("torch") == keys("sharded")
    for event in iterations(events["sharded"][0]):
        expected = OF_RANKS - ({"memory/saved_mb"} if event["iter"] == 0 else set())  # no state before the first update
        assert OF_RANKS & set(event) == (expected if event["iter"] % 2 == 0 else set())


@pytest.mark.parametrize("name", HOW)
def test_figures_that_are_known(events, name):
    lines, facts, _ = events[name]
    tokens_per_iter = 6 * 2 * 16
    parameters = 4 * (facts["parameters"] + 16 * 32)  # bytes; nanoGPT does not count the embeddings of positions
    for event in iterations(lines):
        assert event["iter/tokens"] == (event["iter"] + 1) * tokens_per_iter
        speed = event["throughput/tokens_per_second"]
        assert speed == pytest.approx(tokens_per_iter / (event["time/step_ms"] / 1000))
        assert event["throughput/tokens_per_second_per_rank"] == pytest.approx(speed / 2)
        kinds = "all_reduce_", "reduce_scatter_", "all_gather_", "broadcast_"
        for total in ("comm/exposed_{}ms", "comm/sent_{}mb_per_step"):
            assert event[total.format("")] == pytest.approx(sum(event.get(total.format(kind), 0.0) for kind in kinds))
        phases = event["time/data_ms"] + event["time/forward_backward_ms"] + event["time/optimizer_ms"]
        assert 0 < phases <= event["time/step_ms"]
        assert event["comm/exposed_percent"] == pytest.approx(100 * event["comm/exposed_ms"] / event["time/step_ms"])
        sent = parameters * (1.5 if name == "torch" else 1.0) / 1e6  # 2 (N - 1) / N = 1, and 1/2 for the broadcasts
        if event["iter"] < STEPS:
            assert event["comm/sent_mb_per_step"] == pytest.approx(sent, rel=0.01)  # buckets are padded
        if event["iter"] % 2 == 0:
            assert event["iter/loss_max_rank"] > event["iter/loss"]
            assert event["time/slowest_rank"] in (0, 1)
            for key in [key for key in event if key.endswith("_min")]:
                assert event[key] < event[key.removesuffix("_min")], "only where the ranks differ"
                assert event[key.removesuffix("_min") + "_rank"] in (0, 1)
    state = [event["memory/optimizer_state_mb"] for event in iterations(lines) if "memory/peak_mb" in event][1:]
    whole = 2 * parameters / 1e6
    assert state == pytest.approx([whole if name == "adamw" else whole / 2] * 3, rel=0.25 if name == "torch" else 0.01)
    assert iterations(lines)[-1]["throughput/eta_hours"] == 0.0


def test_mfu_begins_when_it_is_measured(events):
    for lines, _, printed in events.values():
        assert [event["iter"] for event in iterations(lines) if "mfu" in event] == [5, 6], "five iterations warm up"
        assert all(event["mfu"] > 0 for event in lines if "mfu" in event)
        assert re.findall(r"^iter (\d+): .*, mfu n/a, ", printed, re.MULTILINE) == ["0", "1", "2", "3", "4"]
        assert re.search(r"^iter 5: .*, mfu \d+\.\d\d%, ", printed, re.MULTILINE)


def test_training_stands_still_for_the_whole_of_a_save(events):
    for lines, *_ in events.values():
        saves = [event for event in lines if "checkpoint/blocked_s" in event]
        assert [save["iter"] for save in saves] == [5, STEPS + 1]
        for save in saves:
            assert save["checkpoint/blocked_s"] >= save["checkpoint/consolidate_s"] + save["checkpoint/write_s"] > 0


def test_a_run_takes_what_it_says(events, data, tmp_path):
    flags = "--param_dtype=bfloat16_remainder", "--state_dtype=int8", "--shard_gradients=True"
    other = train(tmp_path, data, "--max_iters=3", *flags, ranks=2)[2]
    for lines, _, printed in [*events.values(), (events_of(tmp_path), None, other)]:
        assert "WARNING" not in printed
        peak, *parts = [float(size) for size in re.findall(r"([0-9.]+) MB", re.search("predicted memory: .*", printed).group())]
        assert sum(parts) > peak - 0.1 * len(parts), "what is not held is temporary"
        announced, compared = printed.index("predicted memory: "), printed.index("memory of tensors: ")
        assert announced < printed.index("iter 0: ") < printed.index("iter 1: ") < compared < printed.index("iter 2: ")
        kinds = "predicted", "measured"
        of = {kind: event for event in lines for kind in kinds if f"memory/{kind}_state_mb" in event}
        assert [of[kind]["iter"] for kind in kinds] == [0, 2]
        predicted, measured = ({key: of[kind].get(f"memory/{kind}_{key}_mb", 0.0) for key in PURPOSES} for kind in kinds)
        assert min(predicted[purpose] for purpose in ("parameters", "gradients", "state")) > 0
        assert predicted == pytest.approx(measured, rel=0.02)


def test_memory_at_the_points_of_a_step(events):
    """On a CPU these are exact: parameters P, DistributedDataParallel's buckets P, state 2P."""
    lines, facts, _ = events["adamw"]
    last = iterations(lines)[-1]
    parameters = 4 * (facts["parameters"] + 16 * 32) / 1e6
    assert [last[f"memory/{point}_mb"] / parameters for point in ("after_init", "before_step", "after_step")] == [2, 4, 4]
    assert "memory/saved_mb" not in last, "it is plain AdamW"
    of_torch, state = iterations(events["torch"][0])[-1], "memory/optimizer_state_mb"
    assert of_torch["memory/saved_mb"] == pytest.approx(last[state] - of_torch[state])


def test_run_json_has_the_settings_and_what_the_run_runs_on(events):
    for name, (_, facts, _) in events.items():
        assert (facts["implementation"], facts["world_size"], facts["micro_steps"]) == (name, 2, 3)
        assert (facts["n_embd"], facts["versions"]["torch"], len(facts["devices"])) == (32, torch.__version__, 2)
        assert facts["git_commit"] is None or len(facts["git_commit"].removesuffix("-dirty")) == 40


@pytest.mark.parametrize("name", HOW)
def test_the_rank_that_computes_longest_is_named_and_the_other_waits(data, tmp_path, name):
    slow = partial(faults.measure_every, 1, faults.on_last_rank, faults.takes_longer, "model:GPT.forward", 0.1)
    run(*training(tmp_path, data, "--max_iters=1", "--eval_iters=1", *HOW[name]), ranks=2, before=slow).succeeded()
    lines = iterations(events_of(tmp_path))
    assert [event["time/slowest_rank"] for event in lines] == [1] * 2
    waits = "time/rank_spread_ms", "comm/exposed_ms"  # of rank 0, in three micro-steps of 0.1 s more
    assert min(event[key] for event in lines for key in waits) > 0.5 * 3 * 100


def test_figures_of_a_gpu(monkeypatch):
    sizes = GPTConfig(block_size=16, vocab_size=29, n_layer=1, n_head=1, n_embd=16)
    model, workload = GPT(sizes), Workload(sizes, batch_size=2, dtype="float32", device_type="cpu")
    meter = Memory(None, model, torch.optim.AdamW(model.parameters()), workload, Flags(use_zero1=False), micro_steps=1)
    meter.device = torch.device("cuda")
    peaks = iter([300_000_000, 300_000_000, 200_000_000, 100_000_000])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7_000_000)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": 2, "num_ooms": 1, "other": 3})
    meter.measure("before step")
    figures = meter.take()
    assert meter.peak() == 300_000_000, "the largest one stays"
    meter.forget_peak()
    assert meter.peak() == 100_000_000, "without what a copy of the model took"
    expected = {"peak_mb": 300.0, "before_step_mb": 5.0, "reserved_mb": 7.0, "alloc_retries": 2, "ooms": 1}
    assert expected.items() <= figures.items()
    of_gpu = {key for key in OF_GPU if not key.endswith(("_min", "_rank"))}
    assert of_gpu - {f"memory/{name}" for name in figures} == {"memory/measured_peak_mb"}, "the check of memory logs it"
    assert not any(math.isnan(value) for value in figures.values())


SIZES = GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32)


@pytest.fixture
def check():
    """A check of a single process after two steps with plain AdamW, with the gradients of the second; its log is a list."""
    flags, model = Flags(), GPT(SIZES)
    wrapped, optimizer = build(model, model.param_groups(0.1), flags, lr=0.01)
    workload = Workload(SIZES, batch_size=2, dtype="float32", device_type="cpu")
    log = SimpleNamespace(events=[])
    log.log, log.warn = log.events.append, lambda text: print(f"WARNING: {text}")
    check = Memory(log, wrapped, optimizer, workload, flags, micro_steps=1)
    tokens = torch.zeros((2, 16), dtype=torch.int64)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(tokens, tokens)[1].backward()
        optimizer.step()
    return check


@pytest.mark.parametrize(("factor", "warns"), [(1.0, False), (1.04, False), (1.06, True), (0.94, True)])
def test_a_wrong_prediction_causes_a_warning_with_the_parts(check, capsys, factor, warns):
    check.predicted = {purpose: round(factor * count) for purpose, count in check.predicted.items()}
    check.compare(2)
    line, *warnings = capsys.readouterr().out.splitlines()
    assert line.startswith("memory of tensors: 0.4 MB of parameters, gradients, state and buckets (predicted 0.")
    assert check.log.events[0]["memory/measured_parameters_mb"] == sum(p.nbytes for p in check.model.parameters()) / 1e6
    assert len(warnings) == warns
    if warns:
        taken, predicted = warnings[0].split("; ")
        assert taken == "WARNING: model and optimizer take 0.1 MB of parameters, 0.1 MB of gradients, 0.2 MB of state"
        assert predicted.startswith("predicted were 0.1 MB of parameters, ")


@pytest.mark.parametrize(
    ("factor", "compiled", "workspaces", "warns"),
    [
        (1.0, False, 0, False),
        (1.1, False, 0, True),
        (1.1, False, 10**6, False),  # libraries of a GPU take more than the difference
        (1.1, True, 0, True),
        (0.9, False, 0, True),
        (0.9, True, 0, False),  # compiled blocks keep less
    ],
)
def test_the_peak_is_compared_on_a_gpu(check, capsys, monkeypatch, factor, compiled, workspaces, warns):
    check.device, check.compiled = torch.device("cuda"), compiled
    monkeypatch.setattr(memory_meter, "GPU_WORKSPACES", workspaces)
    monkeypatch.setattr(check, "peak", lambda: round(factor * check.prediction.peak))
    check.compare(2)
    line, *warnings = capsys.readouterr().out.splitlines()
    assert "at the peak (predicted " in line
    assert check.log.events[0]["memory/measured_peak_mb"] == pytest.approx(factor * check.prediction.peak / 1e6, rel=1e-3)
    assert len(warnings) == warns
    assert all(warning.startswith("WARNING: the peak is ") and "activations of " in warning for warning in warnings)


@pytest.mark.parametrize("what", ["activations", "memory"])
def test_a_model_that_cannot_be_predicted_trains_all_the_same(monkeypatch, capsys, request, what):
    fails = mock.Mock(side_effect=RuntimeError("not without memory"))
    monkeypatch.setattr(memory_meter, {"activations": "predicted_activations", "memory": "predicted"}[what], fails)
    check = request.getfixturevalue("check")
    assert capsys.readouterr().out == f"note: {what} cannot be predicted: RuntimeError: not without memory\n"
    check.announce(0)
    check.compare(2)
    assert ("predicted 0.4 MB" in capsys.readouterr().out) == (what == "activations")
    assert check.log.events[-1]["memory/measured_state_mb"] > 0


def trace(folder, rank):
    """The events of the trace of a rank."""
    with gzip.open(folder / "profile" / f"rank{rank}.json.gz") as file:
        return json.load(file)["traceEvents"]


def ranges(events, beginning):
    """(name, begin, end) of the ranges whose name has this beginning, by begin, in microseconds."""
    annotations = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith(beginning)]
    return sorted(((of["name"], of["ts"], of["ts"] + of["dur"]) for of in annotations), key=lambda found: found[1:])


def test_the_trace_has_every_phase_of_the_iterations_after_the_first_ones_and_allocations(data, tmp_path):
    """Three micro-steps per iteration on each rank; only the last backward communicates. Each update is in its phase."""
    line = training(tmp_path, data, "--max_iters=10", "--eval_interval=100", "--bucket_mb=0.03", "--profile=True")
    process = run(*line, ranks=2, before=faults.collects_garbage_after_the_profile)
    process.succeeded("wrote the profile of each rank to ", "Self CPU time")
    assert sorted(os.listdir(tmp_path / "profile")) == ["rank0.json.gz", "rank1.json.gz"]
    for events in (trace(tmp_path, 0), trace(tmp_path, 1)):
        steps = [name for name, _, _ in ranges(events, "ProfilerStep#")]
        assert steps == [f"ProfilerStep#{WAIT + WARM_UP + number}" for number in range(ACTIVE)]
        names = [name for name, _, _ in ranges(events, "") if name in ("forward", "backward", "clip", "update")]
        assert names == [*(3 * ["forward", "backward"]), "clip", "update"] * ACTIVE
        scatters, backward = ranges(events, "zero::reduce_scatter"), ranges(events, "backward")
        sends = [any(first <= begin <= last for _, begin, _ in scatters) for _, first, last in backward]
        assert sends == [False, False, True] * ACTIVE
        for kind in ("wait_reduce_scatter", "update", "all_gather", "wait_all_gather"):
            assert len({name.rpartition(" ")[2] for name, _, _ in ranges(events, f"zero::{kind} bucket ")}) > 3, kind
        updates = ranges(events, "update")
        for _, begin, end in (*ranges(events, "zero::update"), *ranges(events, "zero::all_gather")):
            assert any(first <= begin and end <= last for _, first, last in updates)
        allocations = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
        assert min(allocations) < 0 < max(allocations)


@pytest.mark.parametrize(("steps", "is_written"), [(WAIT + WARM_UP - 1, False), (WAIT + WARM_UP + 1, True)])
def test_a_short_run_writes_what_it_has_or_says_that_it_has_nothing(steps, is_written, tmp_path, capfd):
    profiler = Profiler(str(tmp_path / "profile"), 0, torch.device("cpu"), True)
    for number in range(steps):
        with torch.profiler.record_function(f"step {number}"):
            torch.ones(3).sum()
        profiler.step()
    assert not (tmp_path / "profile").exists()
    profiler.finish()
    assert ("WARNING: no profile was written" in capfd.readouterr().out) == (not is_written)
    assert (tmp_path / "profile").exists() == is_written
    if is_written:
        assert [name for name, _, _ in ranges(trace(tmp_path, 0), "step ")] == [f"step {WAIT + WARM_UP}"]


def test_a_folder_that_cannot_be_written_to_does_not_end_the_run(tmp_path, capfd):
    (tmp_path / "profile").write_text("a file")
    profiler = Profiler(str(tmp_path / "profile"), 0, torch.device("cpu"), True)
    wrote = [profiler.step() for _ in range(WAIT + WARM_UP + ACTIVE + 2)]
    profiler.finish()
    assert wrote == [False] * (WAIT + WARM_UP + ACTIVE - 1) + [True, False, False]
    assert capfd.readouterr().out.count("WARNING: rank 0 cannot write its profile: ") == 1
