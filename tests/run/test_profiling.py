"""run/profiling.py: the traces that two ranks of train.py write, and the ranges of the phases and buckets in them."""

import gzip
import json
import os

import faults
import pytest
import torch
from scripts import run, training

from run.profiling import ACTIVE, WAIT, WARM_UP, Profiler


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
            buckets = {name.rpartition(" ")[2] for name, _, _ in ranges(events, f"zero::{kind} bucket ")}
            assert len(buckets) > 3, kind
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
    printed = capfd.readouterr().out
    assert ("WARNING: no profile was written" in printed) == (not is_written)
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
