"""run/wandb_run.py and logger.py: wandb has every figure of metrics.jsonl, whose lines stay whole, and never ends a run."""

import json
import math
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import types
from functools import cache, partial
from unittest import mock

import faults
import pytest
from scripts import FEW, Forked, events_of, run, torch_load, training
from wandb_server import serving

from run import logger
from run.logger import Logger
from run.metrics import METRICS
from run.wandb_run import WandbRun

CONFIG = {"wandb_log": True, "wandb_project": "p", "wandb_run_name": "n", "out_dir": "runs/out", "implementation": "sharded"}


@pytest.fixture(autouse=True)
def wandb_folder(tmp_path, monkeypatch):
    """The folder of offline runs; neither the user's login nor the user's settings count."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    folders = {"HOME": "", "WANDB_DIR": "", **{f"WANDB_{name.upper()}_DIR": name for name in ("data", "cache", "config")}}
    for name, folder in folders.items():
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path / "wandb"


@pytest.fixture
def line(data, tmp_path):
    return training(tmp_path / "out", data, FEW, "--max_iters=7", "--wandb_log=True")


@pytest.fixture
def server(monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with serving() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server


@cache
def inspected(folder):
    """All records of an offline run that has ended."""
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(inspect, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [json.loads(line) for line in lines]


def records(folder, kind):
    return [record[kind] for record in inspected(folder) if record["type"] == kind]


def rows(folder):
    return without_what_wandb_adds([record["item"] for record in records(folder, "history")])


def without_what_wandb_adds(rows):
    """The rows without _timestamp and such. The step of each row is its iteration."""
    assert all(row["_step"] == row["iter"] for row in rows)
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def merged(out):
    """metrics.jsonl, the events of each iteration in one dict."""
    found = {}
    for event in events_of(out):
        found.setdefault(event["iter"], {}).update(event)
    return list(found.values())


def only(wandb_folder):
    [folder] = wandb_folder.glob("offline-run-*")
    return folder


def lines_about_wandb(process):
    return [line for line in process.stdout.splitlines() if "wandb" in line and not line.startswith("Overriding")]


def test_an_offline_run_has_every_figure_of_metrics_jsonl(line, tmp_path, wandb_folder):
    run(*line, "--wandb_run_name=test", "--sample_interval=5", ranks=2, cwd=tmp_path).succeeded()
    expected, found = merged(tmp_path / "out"), rows(only(wandb_folder))
    samples = [[row["iter"], row.pop("sample/text")] for row in expected if "sample/text" in row]
    assert [row["iter"] for row in expected] == list(range(9)), "the last one about the last checkpoint"
    assert {"val/loss", "iter/loss"} <= expected[5].keys()
    assert [{key: value for key, value in row.items() if not key.startswith("sample/text")} for row in found] == expected
    folder = only(wandb_folder)
    tables = [json.loads(file.read_text()) for file in (folder / "files" / "media" / "table").rglob("*.json")]
    assert all(table["columns"] == ["iter", "text"] for table in tables)
    assert sorted(row for table in tables for row in table["data"]) == samples
    (start,) = records(folder, "run")
    assert (start["display_name"], start["run_group"], start["job_type"]) == ("test out", "test", "sharded")
    assert start["config"]["update"]["n_layer"] == 2
    smallest = {metric["name"] for metric in records(folder, "metric") if metric.get("summary") == {"min": True}}
    assert smallest == {key for key, metric in METRICS.items() if metric.best == "min"} >= {"val/loss"}
    updates = [record.get("update", {}) for record in records(folder, "summary")]
    *before_the_end, best = [update["best_val_loss"] for update in updates if "best_val_loss" in update]
    assert best == min(row["val/loss"] for row in expected if "val/loss" in row)
    assert before_the_end
    assert [end["exit_code"] for end in records(folder, "exit")] == [0]


@pytest.mark.slow("a server of wandb", seconds=14)
def test_an_offline_run_that_was_killed_is_uploaded_as_one_run(line, tmp_path, server, monkeypatch):
    """By the command that it prints. What the killed process had done after its checkpoint is there once."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    line.append("--eval_interval=8")
    with Forked(*line, "--max_iters=100000", ranks=2, cwd=tmp_path) as forked:
        forked.wait_for("iter 11:")
        os.kill(forked.pids[0], signal.SIGKILL)
    end = torch_load(tmp_path / "out")["iter_num"] + 6
    resumed = run(*line, f"--max_iters={end}", "--init_from=resume", ranks=2, cwd=tmp_path).succeeded()
    assert "wandb" not in resumed.stderr
    (message,) = lines_about_wandb(resumed)
    command = re.search("(wandb sync .*); this folder has all rows of the run: leave out its older ones", message)[1].split()
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True, timeout=60)
    [found] = server.rows.values()
    assert [row["iter"] for row in found] == list(range(end + 2))
    assert without_what_wandb_adds(found) == merged(tmp_path / "out")


@pytest.mark.slow("two runs of wandb", seconds=12)
def test_an_evaluation_goes_to_the_summary_of_the_run(line, tmp_path, wandb_folder):
    out = tmp_path / "out"
    run(*line, "--max_iters=3", cwd=tmp_path).succeeded()
    trained = only(wandb_folder)
    run("evaluate.py", f"--out_dir={out}", "--wandb_log=True", ranks=2, cwd=tmp_path).succeeded()
    (evaluated,) = set(wandb_folder.glob("offline-run-*")) - {trained}
    ids = {record["run_id"] for folder in (trained, evaluated) for record in records(folder, "run")}
    assert ids == {torch_load(out)["wandb_run_id"]}
    assert rows(evaluated) == merged(out), "offline, the newest folder has all rows"
    values = {key: value for record in records(evaluated, "summary") for key, value in record.get("update", {}).items()}
    assert values["evaluation/val_loss"] == json.loads((out / "evaluation.json").read_text())["evaluation/val_loss"]


@pytest.mark.slow("a server of wandb", seconds=11)
def test_a_run_on_a_server_is_one_run(line, tmp_path, server):
    """It ended after 12, and resumes from a checkpoint at 10."""
    first = run(*line, "--max_iters=12", "--keep_checkpoints=2", ranks=2, cwd=tmp_path).succeeded()
    ((run_id, before),) = [(run_id, list(rows)) for run_id, rows in server.rows.items()]
    assert lines_about_wandb(first) == [f"wandb: {server.url}/entity/project/runs/{run_id}"]
    assert without_what_wandb_adds(before) == merged(tmp_path / "out")
    shutil.copy(tmp_path / "out" / "ckpt_00000010.pt", tmp_path / "out" / "ckpt.pt")
    run(*line, "--max_iters=15", "--init_from=resume", ranks=2, cwd=tmp_path).succeeded()
    assert list(server.rows) == [run_id]
    expected = merged(tmp_path / "out")
    assert [row["iter"] for row in expected] == list(range(17))
    assert without_what_wandb_adds(server.rows[run_id]) == without_what_wandb_adds(before) + expected[14:]


NO_SERVER = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_HTTP_TIMEOUT": "1"}


@pytest.mark.slow("a process of wandb", seconds=9)
@pytest.mark.parametrize("variables", [{}, NO_SERVER])
def test_without_a_login_or_a_network_the_run_is_offline(line, tmp_path, wandb_folder, monkeypatch, variables):
    monkeypatch.delenv("WANDB_MODE")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = run(*line, "--max_iters=1", cwd=tmp_path).succeeded()
    (message,) = lines_about_wandb(process)
    reason = "Failed to authenticate .*" if variables else "there is no login"
    command = f"wandb login && wandb sync {only(wandb_folder)}"
    assert re.fullmatch(rf"wandb records offline \({reason}\); to upload later: {re.escape(command)}", message)
    assert "wandb" not in process.stderr
    assert rows(only(wandb_folder)) == merged(tmp_path / "out")


@pytest.mark.slow("a process of wandb", seconds=8)
def test_training_goes_on_when_the_process_of_wandb_is_killed(line, tmp_path):
    process = run(*line, "--max_iters=19", cwd=tmp_path, before=partial(faults.run_exit_hooks, faults.kill_wandb)).succeeded()
    assert process.stdout.count("WARNING: wandb has stopped") == 1
    # asyncio says this if wandb's client writes five times before it is told that the connection is gone
    assert set(process.stderr.splitlines()) <= {"socket.send() raised exception."}
    assert [row["iter"] for row in merged(tmp_path / "out")] == list(range(21))


@pytest.fixture
def fake(monkeypatch):
    """A module `wandb` without a process, which is also its run: it keeps what it gets."""
    module = mock.Mock(offline=True, disabled=False, starting_step=0, id="abc", sync_dir="wandb/offline-run-abc")
    module.errors = types.SimpleNamespace(CommError=ConnectionError, UsageError=AttributeError)
    module.setup.return_value = module.init.return_value = module
    module.settings.mode = "offline"
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def rows_of(fake):
    return [(call.kwargs["step"], call.args[0]) for call in fake.log.call_args_list]


def test_an_event_that_comes_late_goes_into_the_newest_row(fake):
    wandb = WandbRun(CONFIG)
    for event in ({"iter": 4, "a": 1}, {"iter": 2, "checkpoint/write_s": 1.0}, {"iter": 5, "a": math.nan}):
        wandb.log(event)
    wandb.finish({"best_val_loss": 1.0}, 3)
    assert str(rows_of(fake)) == "[(4, {'iter': 4, 'a': 1}), (4, {'checkpoint/write_s': 1.0}), (5, {'iter': 5, 'a': nan})]"
    fake.summary.update.assert_called_once_with({"best_val_loss": 1.0})
    fake.finish.assert_called_once_with(3)


@pytest.mark.parametrize(("offline", "run_id"), [(False, "abc"), (True, "abc"), (True, None)])
def test_a_resumed_run_gets_only_the_rows_that_it_lacks(fake, offline, run_id):
    fake.offline, fake.url, fake.starting_step = offline, "url", 0 if offline else 2
    wandb = WandbRun(CONFIG, run_id)
    for iteration in range(5):
        wandb.log({"iter": iteration})
    assert [step for step, _ in rows_of(fake)] == list(range(fake.starting_step, 5))
    assert wandb.lacks_history == (offline and run_id is not None)


def test_variables_of_the_environment_come_before_settings(fake, monkeypatch):
    WandbRun(CONFIG, "abc")
    given = {"project": "p", "name": "n out", "group": "n", "job_type": "sharded", "id": "abc", "resume": "allow"}
    assert {key: fake.init.call_args.kwargs.get(key) for key in given} == given
    for name in ("PROJECT", "NAME", "RUN_GROUP", "JOB_TYPE", "RUN_ID", "RESUME"):
        monkeypatch.setenv(f"WANDB_{name}", "mine")
    WandbRun(CONFIG, "abc")
    assert not fake.init.call_args.kwargs.keys() & given.keys()
    monkeypatch.delenv("WANDB_NAME")
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    WandbRun(CONFIG)
    assert fake.init.call_args.kwargs["name"] is None, "wandb names the runs of a sweep"
    fake.disabled = True
    assert WandbRun(CONFIG).id is None, "WANDB_MODE=disabled"


@pytest.mark.parametrize(("call", "sent"), [("log", (1, 0)), ("finish", (100, 1))])
def test_after_an_error_nothing_more_is_sent(fake, capsys, call, sent):
    """An error in `finish`: the server has gone away."""
    getattr(fake, call).side_effect = RuntimeError("an error of wandb\nand its details")
    wandb = WandbRun(CONFIG)
    for iteration in range(100):
        wandb.log({"iter": iteration})
    wandb.finish({})
    assert (fake.log.call_count, fake.finish.call_count) == sent
    assert capsys.readouterr().out.count("WARNING: wandb has stopped: an error of wandb; metrics.jsonl has all figures\n") == 1


@pytest.mark.parametrize("why", ["there is no login", "there is no network"])
def test_a_run_that_reaches_no_server_is_offline(fake, capsys, why):
    fake.settings.mode = "online"
    fake.login = mock.Mock(side_effect=[False] if "login" in why else ConnectionError(f"{why}\nand its details"))
    WandbRun(CONFIG)
    assert fake.init.call_args.kwargs["mode"] == "offline"
    command = "wandb login && wandb sync wandb/offline-run-abc"
    assert capsys.readouterr().out == f"wandb records offline ({why}); to upload later: {command}\n"


def test_what_wandb_refuses_ends_the_run_and_the_files_stay(fake, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    fake.init.side_effect = AttributeError("Invalid project name 'a/b'")
    with pytest.raises(ValueError, match="wandb does not start: Invalid project name 'a/b'"):
        Logger(str(tmp_path), None, CONFIG | {"eval_interval": 5})
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_without_wandb_training_goes_on_with_one_line(line, tmp_path):
    process = run(*line, "--max_iters=2", before=partial(faults.without_module, "wandb")).succeeded()
    (warning,) = [text for text in lines_about_wandb(process) if "WARNING" in text]
    assert re.fullmatch(r"WARNING: wandb does not start: .*; training goes on, metrics.jsonl has all figures", warning)
    assert [row["iter"] for row in merged(tmp_path / "out")] == [0, 1, 2, 3]


LOGGED = {"wandb_log": False, "implementation": "sharded", "eval_interval": 5}


def make(folder, resume_at=None):
    return Logger(str(folder), resume_at, LOGGED)


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
        log = Logger(str(tmp_path), 5, LOGGED | {"eval_interval": eval_interval})
        log.log({"iter": 5, "lr": 0.1})
        assert lines(tmp_path) == [events[0], *([events[1]] if kept else []), events[2]]
        assert log.summary.figures()["best_val_loss"] == (1.5 if kept else 4.0)


@pytest.fixture
def wandb(monkeypatch):
    """Replaces the wandb run by notes of its calls; returns a Logger with one."""

    def noted(config, run_id=None):
        return mock.create_autospec(WandbRun, instance=True, id=run_id, lacks_history=run_id == "offline")

    monkeypatch.setattr(logger, "WandbRun", noted)
    return lambda folder, resume_at=None, run_id=None, **more: Logger(str(folder), resume_at, LOGGED | more, run_id)


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
        *("a remark", "[7]", "[" * 100_000),
        *('{"iter": 2}', '{"iter": 4}', '{"iter": 2, "checkpoint/bytes": 7}', '{"iter": 9, "to'),
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
        Logger(str(tmp_path), resume_at, LOGGED | {"implementation": implementation, "world_size": world_size})
        content = json.loads((tmp_path / "run.json").read_text())
        assert content["implementation"] == implementation
        return [(part["from_iter"], part["implementation"], part["world_size"]) for part in content["parts"]]

    assert parts(None, "sharded") == [(0, "sharded", 2)]
    assert parts(10, "sharded") == [(0, "sharded", 2)]
    assert parts(20, "torch") == [(0, "sharded", 2), (20, "torch", 2)]
    assert parts(30, "torch", 4) == [(0, "sharded", 2), (20, "torch", 2), (30, "torch", 4)]
    assert parts(20, "adamw") == [(0, "sharded", 2), (20, "adamw", 2)], "from an older checkpoint"
    assert parts(None, "adamw") == [(0, "adamw", 2)]
    (tmp_path / "run.json").write_text('{"parts": []}')  # of an earlier version
    Logger(str(tmp_path), 30, LOGGED | {"dataset": "a", "train_tokens": 7, "from_tokens": 480})
    assert json.loads((tmp_path / "run.json").read_text())["data"][0]["from_tokens"] == 0
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
