"""run/logger.py: metrics.jsonl holds whole lines whatever happened to the run, and wandb gets the same."""

import json
import math
import os

import pytest

from run import logger
from run.logger import Logger
from run.wandb_run import NoRun, WandbError

CONFIG = {
    "wandb_log": False,
    "wandb_mode": "online",
    "wandb_project": "p",
    "wandb_run_name": "n",
    "implementation": "sharded",
    "out_dir": "out",
    "eval_interval": 5,
}


def make(folder, resume_at=None):
    return Logger(folder and str(folder), resume_at, CONFIG)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path):
    make(tmp_path).log({"iter": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iter": 2, "los')  # a kill
    log = make(tmp_path, resume_at=2)
    assert log.file._file.tell() == len('{"iter": 1}\n'), "where the next line goes back to if the disk is full"
    log.log({"iter": 2})
    log.log({"iter": 3})
    assert lines(tmp_path) == [{"iter": 1}, {"iter": 2}, {"iter": 3}]
    make(tmp_path).log({"iter": 0})
    assert lines(tmp_path) == [{"iter": 0}]


@pytest.mark.parametrize("torn", ["", '{"iter": 9, "lo'])
def test_a_resumed_run_goes_on_where_its_checkpoint_stands(tmp_path, torn):
    """What the killed run has logged beyond it comes again; lines of others stay."""
    before = ['{"iter": 3}', "a remark", "[1]", '{"iter": 4, "x": null}', '{"iter": 4}']
    for beyond in (['{"iter": 5}', '{"iter": 5, "val/loss": 1.0}', '{"iter": 6}', '{"iter": 4, "late": 1}'], []):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in before + beyond) + torn)
        make(tmp_path, resume_at=5).log({"iter": 5})
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [*before, '{"iter": 5}']
    saves = [f'{{"iter": {iteration}, "checkpoint/write_s": 1.0}}' for iteration in (3, 5, 7)]
    late = ['{"iter": 5}', saves[0], '{"iter": 6}', saves[1], '{"iter": 7}', saves[2]]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in before + late) + torn)
    make(tmp_path, resume_at=5).log({"iter": 5})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [*before, *saves[:2], '{"iter": 5}']
    make(tmp_path, resume_at=0)
    assert (tmp_path / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(("eval_interval", "kept"), [(4, True), (5, False)])
def test_a_resumed_run_keeps_the_evaluation_that_it_does_not_repeat(tmp_path, eval_interval, kept):
    events = [{"iter": 0, "val/loss": 4.0}, {"iter": 5, "val/loss": 1.5}, {"iter": 5, "lr": 0.1}, {"iter": 8, "val/loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    for _ in range(2):
        log = Logger(str(tmp_path), 5, CONFIG | {"eval_interval": eval_interval})
        log.log({"iter": 5, "lr": 0.1})
        assert lines(tmp_path) == [events[0], *([events[1]] if kept else []), events[2]]
        assert log._summary.best["val/loss"] == ((1.5, 5) if kept else (4.0, 0))


class FakeRun:
    """What WandbRun offers, with notes of the calls."""

    id = "abc"

    def __init__(self, *how):
        *self.how, history = how
        self.history, self.events, self.alerts, self.summary, self.exit_code = list(history), [], [], {}, None

    def log(self, event):
        self.events.append(event)

    def alert(self, title, text):
        self.alerts.append((title, text))

    def summarize(self, values):
        self.summary = values

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """Replaces the wandb run; returns a Logger with one."""
    monkeypatch.setattr(logger, "WandbRun", FakeRun)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return lambda *how, **config: Logger(*how[:2], CONFIG | {"wandb_log": True} | config, *how[2:])


def test_what_is_not_finite_is_null_in_the_file_and_itself_in_wandb(tmp_path, wandb):
    event = {"iter": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0, "e": None}
    log = wandb(str(tmp_path), None)
    log.log(event)
    assert log.run.events == [event]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"iter": 1, "a": null, "b": null, "c": null, "d": 2.0, "e": null}\n'


def test_wandb_gets_the_run_and_what_was_logged_before(tmp_path, wandb):
    before = [{"iter": 0, "x": 1.0}, {"iter": 1, "x": 2.0}]
    lines = [*map(json.dumps, before), "a remark", '{"iter": 2}', '{"iter": 2, "checkpoint/bytes": 7}', '{"iter": 3, "to']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    log = wandb(str(tmp_path), 2, "abc")
    assert log.run.how[:3] == ["online", "p", "n out"]
    assert log.run.how[4:] == ["sharded", "abc", 2]
    assert log.run.history == [*before, {"iter": 2, "checkpoint/bytes": 7}]
    assert log.run_id == "abc"
    log.finish("failed")
    assert log.run.exit_code == 1
    assert wandb(str(tmp_path), None).run.history == [], "a new run"
    assert wandb(str(tmp_path), None, wandb_mode="disabled").run_id is None
    evaluation = wandb(None, 2, "abc")
    assert evaluation.run.how[5:] == [None, None], "it must not rewind the run"


def test_runs_in_other_folders_have_other_names(tmp_path, wandb, monkeypatch):
    for out_dir in ("out-a", "runs/out-b"):
        assert wandb(str(tmp_path), None, out_dir=out_dir).run.how[2] == f"n {os.path.basename(out_dir)}"
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert wandb(str(tmp_path), None, out_dir="out").run.how[2] is None, "wandb names the runs of a sweep"


def test_a_checkpoint_is_not_uploaded_without_a_wandb_run(tmp_path, wandb):
    with pytest.raises(ValueError, match="wandb_log_checkpoints=True uploads to wandb; use it with --wandb_log=True"):
        wandb(str(tmp_path), None, wandb_log=False, wandb_log_checkpoints=True)


def test_a_checkpoint_in_parts_is_not_uploaded(tmp_path, wandb):
    settings = {"wandb_log_checkpoints": True, "checkpoint_format": "sharded"}
    with pytest.raises(
        ValueError, match="wandb_log_checkpoints=True uploads whole files; use it with --checkpoint_format=cons"
    ):
        wandb(str(tmp_path), None, **settings)


def test_a_wandb_that_does_not_start_leaves_the_files_as_they_are(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("wandb does not start: no reason")

    monkeypatch.setattr(logger, "WandbRun", fail)
    for name in ("metrics.jsonl", "run.json"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(ValueError, match="no reason"):
        Logger(str(tmp_path), None, CONFIG | {"wandb_log": True})
    assert [(tmp_path / name).read_text() for name in ("metrics.jsonl", "run.json")] == ["{}\n", "{}\n"]


def test_a_wandb_that_cannot_start_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise WandbError("wandb is not installed (No module named 'wandb'); pip install wandb")

    monkeypatch.setattr(logger, "WandbRun", fail)
    log = Logger(str(tmp_path), None, CONFIG | {"wandb_log": True})
    log.log({"iter": 0})
    log.finish()
    assert log.run_id is None
    assert lines(tmp_path) == [{"iter": 0}]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("WARNING: wandb is not installed (")
    assert line.endswith("; pip install wandb; training goes on, metrics.jsonl has all figures")


def test_the_variable_comes_before_the_setting(tmp_path, wandb, monkeypatch):
    for variable, mode in (
        ("", "online"),
        ("offline", "offline"),
        ("dryrun", "offline"),
        ("run", "online"),
        ("disabled", None),
    ):
        monkeypatch.setenv("WANDB_MODE", variable)
        run = wandb(str(tmp_path), None).run
        assert mode == (None if isinstance(run, NoRun) else run.how[0]), variable
    monkeypatch.setenv("WANDB_MODE", "foo")
    with pytest.raises(
        ValueError, match="WANDB_MODE=foo is not one of online, offline, disabled; change or unset the variable"
    ):
        wandb(str(tmp_path), None)
    assert wandb(str(tmp_path), None, wandb_log=False).run_id is None, "it does not matter without wandb"


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
    (tmp_path / "run.json").write_text("damaged")
    assert parts(30, "adamw") == [(30, "adamw", 2)]


def test_a_new_run_removes_the_card_of_the_run_that_it_replaces(tmp_path):
    (tmp_path / "report.md").write_text("done")
    make(tmp_path, resume_at=2)
    assert (tmp_path / "report.md").exists(), "until the resumed run ends"
    make(tmp_path)
    assert not (tmp_path / "report.md").exists()


def test_run_json_says_how_the_run_has_ended(tmp_path):
    def facts():
        return json.loads((tmp_path / "run.json").read_text())

    for state in ("ended", "stopped", "failed"):
        log = make(tmp_path)
        before = facts()
        assert before["state"] == "running"
        log.finish(state)
        assert facts() == before | {"state": state}


def test_the_summary_of_a_run_that_was_resumed(tmp_path, wandb):
    log = wandb(str(tmp_path), None)
    for iteration, speed in enumerate((10.0, 30.0, 20.0, 90.0)):
        log.log({"iter": iteration, "val/loss": 3.0 - iteration, "lr": 0.1})
        log.log({"iter": iteration, "throughput/tokens_per_second": speed, "memory/peak_mb": 100.0 - iteration})
    expected = {"peak_memory_mb": 100.0, "median_tokens_per_second": 20.0}
    expected |= {"first_val_loss": 3.0, "best_val_loss": 2.0, "last_val_loss": 2.0}
    found = {key: log.run.summary[key] for key in expected}
    assert found == expected | {"best_val_loss": 0.0, "last_val_loss": 0.0}
    log.finish()
    resumed = wandb(str(tmp_path), 2, eval_interval=1)
    assert resumed.run.summary == {}
    resumed.log({"iter": 2, "val/loss": math.nan})
    resumed.finish()
    assert {key: resumed.run.summary[key] for key in expected} == expected
    assert resumed.run.summary["restarts"] == 1


def test_alerts_go_to_the_console_and_to_wandb(tmp_path, wandb, capsys):
    log = wandb(str(tmp_path), None)
    for iteration in range(50):
        log.log({"iter": iteration, "iter/loss": 2.0 + 0.01 * (iteration % 2)})
    assert capsys.readouterr().out == ""
    log.log({"iter": 50, "iter/loss": 3.0}, "iter 50: loss 3.0000")
    line, warning = capsys.readouterr().out.splitlines()
    assert line == "iter 50: loss 3.0000"
    assert warning == "WARNING: loss spike: the loss of iteration 50 is 3.0000; the mean was 2.0050"
    assert lines(tmp_path)[-1]["warning"] == "Loss spike: the loss of iteration 50 is 3.0000; the mean was 2.0050"
    assert log.run.alerts == [("Loss spike", "the loss of iteration 50 is 3.0000; the mean was 2.0050")]


def test_without_a_folder_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = make(None)
    log.log({"iter": 1})
    log.finish()
    assert not os.listdir(tmp_path)


class Full:
    """A file on a disk with room for `room` bytes."""

    name = "metrics.jsonl"

    def __init__(self, room):
        self.room, self.content = room, b""

    def tell(self):
        return len(self.content)

    def write(self, line):
        taken = line[: self.room - len(self.content)]
        if not taken:
            raise OSError("No space left on device")
        self.content += taken
        return len(taken)

    def truncate(self, size):
        self.content = self.content[:size]


def test_a_full_disk_is_mentioned_once_and_tears_no_line(tmp_path, capsys):
    log = make(tmp_path)
    log.file._file = Full(room=30)
    for iteration in range(10, 15):
        log.log({"iter": iteration})  # 13 bytes
    assert log.file._file.content == b'{"iter": 10}\n{"iter": 11}\n'
    assert capsys.readouterr().out.count("figures are missing from metrics.jsonl") == 1
    log.file._file.room = 100
    log.log({"iter": 15})
    assert log.file._file.content.endswith(b'11}\n{"iter": 15}\n')
