"""run/wandb_run.py: wandb has every figure of metrics.jsonl, one run per job, and never ends a run."""

import json
import math
import os
import re
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
