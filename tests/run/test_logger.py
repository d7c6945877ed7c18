"""run/logger.py: metrics.jsonl holds whole lines whatever happened to the run, and wandb gets the same."""

import json
import math
import resource
from unittest import mock

import pytest

from run import logger
from run.logger import Logger
from run.wandb_run import WandbRun

CONFIG = {"wandb_log": False, "implementation": "sharded", "eval_interval": 5}


def make(folder, resume_at=None):
    return Logger(str(folder), resume_at, CONFIG)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("torn", ["", '{"iter": 9, "lo'])
def test_a_resumed_run_goes_on_where_its_checkpoint_stands(tmp_path, torn):
    """What the killed run has logged beyond it comes again; lines of others stay."""
    before = ['{"iter": 3}', "a remark", "[1]", '{"iter": 4, "x": null}', '{"iter": 4}']
    lost = ['{"iter": 5}', '{"iter": 5, "val/loss": 1.0}', '{"iter": 6}', '{"iter": 4, "late": 1}']
    saves = [f'{{"iter": {iteration}, "checkpoint/write_s": 1.0}}' for iteration in (3, 5, 7)]
    late = ['{"iter": 5}', saves[0], '{"iter": 6}', saves[1], '{"iter": 7}', saves[2]]
    for beyond, stays in ((lost, []), ([], []), (late, saves[:2])):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in before + beyond) + torn)
        make(tmp_path, resume_at=5).log({"iter": 5})
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [*before, *stays, '{"iter": 5}']
    make(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "", "a new run"


@pytest.mark.parametrize(("eval_interval", "kept"), [(4, True), (5, False)])
def test_a_resumed_run_keeps_the_evaluation_that_it_does_not_repeat(tmp_path, eval_interval, kept):
    events = [{"iter": 0, "val/loss": 4.0}, {"iter": 5, "val/loss": 1.5}, {"iter": 5, "lr": 0.1}, {"iter": 8, "val/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for _ in range(2):
        log = Logger(str(tmp_path), 5, CONFIG | {"eval_interval": eval_interval})
        log.log({"iter": 5, "lr": 0.1})
        assert lines(tmp_path) == [events[0], *([events[1]] if kept else []), events[2]]
        assert log.summary.figures()["best_val_loss"] == (1.5 if kept else 4.0)


@pytest.fixture
def wandb(monkeypatch):
    """Replaces the wandb run by notes of its calls; returns a Logger with one."""

    def noted(config, run_id=None):
        return mock.create_autospec(WandbRun, instance=True, id=run_id, lacks_history=run_id == "offline")

    monkeypatch.setattr(logger, "WandbRun", noted)
    return lambda folder, resume_at=None, run_id=None, **more: Logger(str(folder), resume_at, CONFIG | more, run_id)


def test_what_is_not_finite_is_null_in_the_file_and_itself_in_wandb_and_so_are_alerts(tmp_path, wandb):
    event = {"iter": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0, "e": None}
    log = wandb(tmp_path)
    log.log(event)
    log.wandb.log.assert_called_once_with(event)
    log.alert("Loss not finite", "at iteration 3", 3)
    log.wandb.alert.assert_called_once_with("Loss not finite", "at iteration 3")
    warned = {"iter": 3, "warning": "Loss not finite: at iteration 3"}
    assert lines(tmp_path) == [{"iter": 1, "a": None, "b": None, "c": None, "d": 2.0, "e": None}, warned]


def test_wandb_gets_the_run_that_goes_on_and_the_rows_that_it_lacks(tmp_path, wandb):
    lines = [
        f'{{"iter": 0, "by_layer": {{"a": 1}}, "iter/loss": "abc", "lr": 1{400 * "0"}}}',
        "a remark",
        "[7]",
        "[" * 100_000,
        '{"iter": 2}',
        '{"iter": 4}',
        '{"iter": 2, "checkpoint/bytes": 7}',
        '{"iter": 9, "to',
    ]
    for run_id, events in (("abc", []), ("offline", [{"iter": 0}, {"iter": 2, "checkpoint/bytes": 7}])):
        (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
        log = wandb(tmp_path, 2, run_id)
        assert (log.wandb.id, log.wandb.log.mock_calls) == (run_id, [mock.call(event) for event in events])
    log.finish("failed")
    assert log.wandb.finish.call_args[0][1] == 1
    assert wandb(tmp_path).wandb.id is None, "a new run"


def test_run_json_lists_what_a_resumed_run_has_changed(tmp_path):
    def parts(resume_at, implementation, world_size=2):
        Logger(str(tmp_path), resume_at, CONFIG | {"implementation": implementation, "world_size": world_size})
        content = json.loads((tmp_path / "run.json").read_text())
        assert content["implementation"] == implementation
        return [(part["from_iter"], part["implementation"], part["world_size"]) for part in content["parts"]]

    assert parts(None, "sharded") == [(0, "sharded", 2)]
    assert parts(10, "sharded") == [(0, "sharded", 2)]
    assert parts(20, "torch") == [(0, "sharded", 2), (20, "torch", 2)]
    assert parts(30, "torch", 4) == [(0, "sharded", 2), (20, "torch", 2), (30, "torch", 4)]
    assert parts(20, "adamw") == [(0, "sharded", 2), (20, "adamw", 2)], "from an older checkpoint"
    assert parts(None, "adamw") == [(0, "adamw", 2)]
    for damaged in ("damaged", '{"parts": ["a"]}', '{"parts": 7}', '{"parts": [{"from_iter": 0}]}', "[" * 100_000):
        (tmp_path / "run.json").write_text(damaged)
        assert parts(30, "adamw") == [(30, "adamw", 2)]


def test_the_summary_of_a_run_that_was_resumed(tmp_path, wandb):
    def picked(call):
        return {key: call.call_args[0][0][key] for key in expected}

    log = wandb(tmp_path)
    for iteration, speed in enumerate((10.0, 30.0, 20.0, 90.0)):
        log.log({"iter": iteration, "val/loss": 3.0 - iteration, "lr": 0.1})
        log.log({"iter": iteration, "throughput/tokens_per_second": speed, "memory/peak_mb": 100.0 - iteration})
    expected = {"peak_memory_mb": 100.0, "median_tokens_per_second": 20.0}
    expected |= {"first_val_loss": 3.0, "best_val_loss": 2.0, "last_val_loss": 2.0}
    assert picked(log.wandb.summarize) == expected | {"best_val_loss": 0.0, "last_val_loss": 0.0}
    log.finish()
    resumed = wandb(tmp_path, 2, eval_interval=1)
    resumed.wandb.summarize.assert_not_called()
    resumed.log({"iter": 2, "val/loss": math.nan})
    resumed.finish()
    assert picked(resumed.wandb.finish) == expected
    assert resumed.wandb.finish.call_args[0][0]["restarts"] == 1


def test_a_full_disk_is_mentioned_once_and_tears_no_line(tmp_path, capsys):
    log = make(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, limits[1]))  # bytes per file: a write takes what fits, the next fails
        for iteration in range(10, 15):
            log.log({"iter": iteration})  # 13 bytes
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iter": 10}\n{"iter": 11}\n'
    assert capsys.readouterr().out.count("figures are missing from") == 1
    log.log({"iter": 15})
    assert (tmp_path / "metrics.jsonl").read_text().endswith('11}\n{"iter": 15}\n')
