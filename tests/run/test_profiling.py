"""run/profiling.py: the traces that two ranks of train.py write, and the ranges of the phases and buckets in them."""

import gzip
import json
import os

import faults
import pytest
import torch
from scripts import SETTINGS, run

from run.profiling import ACTIVE, WAIT, WARM_UP, Profiler


def trace(folder, rank):
    """The events of the trace of a rank."""
    with gzip.open(folder / "profile" / f"rank{rank}.json.gz") as file:
        return json.load(file)["traceEvents"]


def ranges(events, beginning):
    """(name, begin, end) of the ranges whose name has this beginning, by begin, in microseconds."""
    found = [
        (event["ts"], event["ts"] + event["dur"], event["name"]) for event in events if event.get("cat") == "user_annotation"
    ]
    return [(name, begin, end) for begin, end, name in sorted(found) if name.startswith(beginning)]


@pytest.fixture(scope="module")
def traces(data, tmp_path_factory):
    """The events of rank 0 and of rank 1, with 3 micro-steps per iteration on each rank, and what was printed."""
    out = tmp_path_factory.mktemp("profiled")
    flags = [f"--dataset={data}", f"--out_dir={out}", "--max_iters=12", "--eval_interval=100", "--bucket_mb=0.03"]
    finished = run(
        "train.py", *SETTINGS, *flags, "--profile=True", ranks=2, before=faults.collects_garbage_after_the_profile
    ).succeeded()
    assert sorted(os.listdir(out / "profile")) == ["rank0.json.gz", "rank1.json.gz"]
    return trace(out, 0), trace(out, 1), finished.stdout


def test_the_trace_has_the_iterations_after_the_first_ones(traces):
    *of_ranks, printed = traces
    for events in of_ranks:
        steps = [name for name, _, _ in ranges(events, "ProfilerStep#")]
        assert steps == [f"ProfilerStep#{WAIT + WARM_UP + number}" for number in range(ACTIVE)]
    assert "wrote the profile of each rank to " in printed
    assert "Self CPU time" in printed


def test_every_phase_of_every_step_is_a_range(traces):
    for events in traces[:2]:
        names = [name for name, _, _ in ranges(events, "") if name in ("forward", "backward", "clip", "update")]
        assert names == [*(3 * ["forward", "backward"]), "clip", "update"] * ACTIVE


@pytest.mark.parametrize(
    ("kind", "phase", "is_last_first"),
    [
        ("reduce_scatter", "backward", False),
        ("wait_reduce_scatter", "", False),
        ("update", "update", True),
        ("all_gather", "update", True),
        ("wait_all_gather", "forward", False),
    ],
)
def test_every_bucket_is_communicated_once_per_step_inside_its_phase(traces, kind, phase, is_last_first):
    for events in traces[:2]:
        of_kind = ranges(events, f"zero::{kind} bucket ")
        if kind == "wait_all_gather":  # the last ones end before the recording does
            end_of_update = ranges(events, "update")[-1][2]
            of_kind = [found for found in of_kind if found[1] < end_of_update]
        count = len(of_kind) // ACTIVE
        assert count > 3
        numbers = [int(name.rpartition(" ")[2]) for name, _, _ in of_kind]
        for step in range(ACTIVE):
            in_step = numbers[step * count : (step + 1) * count]
            assert sorted(in_step) == list(range(count))
            if kind != "wait_all_gather":  # forward waits in the order in which it reads
                assert in_step == sorted(in_step, reverse=is_last_first)
        outer = ranges(events, phase) if phase else []
        for name, begin, end in of_kind if phase else ():
            assert any(start <= begin and end <= stop for _, start, stop in outer), (name, phase)


def test_only_the_last_backward_of_a_step_communicates(traces):
    for events in traces[:2]:
        backward = ranges(events, "backward")
        sent = [[name for name, begin, _ in ranges(events, "zero::reduce_scatter") if b <= begin <= e] for _, b, e in backward]
        assert [bool(names) for names in sent] == [False, False, True] * ACTIVE


def test_the_trace_has_allocations(traces):
    for events in traces[:2]:
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


def test_without_the_setting_nothing_is_recorded(tmp_path, capfd):
    profiler = Profiler(str(tmp_path / "profile"), 0, torch.device("cpu"), False)
    for _ in range(20):
        profiler.step()
    profiler.finish()
    assert (os.listdir(tmp_path), capfd.readouterr().out) == ([], "")
