"""run/wandb_run.py: wandb has every figure of metrics.jsonl, one curve per run, and never ends or slows a run."""

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from functools import partial

import faults
import pytest
from conftest import ROOT
from scripts import SETTINGS, Finished, Forked, environment, run, run_for_real, torch_load
from wandb_server import WandbServer

from run import wandb_run
from run.wandb_run import WandbRun


@pytest.fixture(autouse=True)
def wandb_folder(tmp_path, monkeypatch):
    """The folder of offline runs; neither the user's login nor the user's settings count."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    return tmp_path / "wandb"


def records(folder, kind):
    """The records of a kind in an offline run."""
    inspect = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)]
    lines = subprocess.run(inspect, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    return [record[kind] for record in map(json.loads, lines) if record["type"] == kind]


def rows(folder):
    """The rows of an offline run."""
    return without_what_wandb_adds(record["item"] for record in records(folder, "history"))


def without_what_wandb_adds(rows):
    """The rows without _timestamp and such. The step of each row is its iteration."""
    rows = list(rows)
    assert all(row["_step"] == row["iter"] for row in rows)
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in rows]


def merged(out):
    """metrics.jsonl, the events of each iteration in one dict."""
    found = {}
    with open(os.path.join(out, "metrics.jsonl")) as file:
        for event in map(json.loads, file):
            found.setdefault(event["iter"], {}).update(event)
    return list(found.values())


def newest(wandb_folder):
    return max(wandb_folder.glob("offline-run-*"), key=os.path.getmtime)


def in_summary(folder, key):
    return [record["update"][key] for record in records(folder, "summary") if key in record.get("update", {})]


@pytest.mark.parametrize(
    ("implementation", "flags"),
    [
        ("adamw", "--use_zero1=False"),
        pytest.param(
            "torch", "--zero1_impl=torch", marks=pytest.mark.slow("the default has the other implementations", seconds=30)
        ),
        ("sharded", "--use_zero1=True"),
    ],
)
def test_an_offline_run_has_every_figure_of_metrics_jsonl(data, tmp_path, wandb_folder, implementation, flags):
    arguments = [
        f"--dataset={data}",
        f"--out_dir={tmp_path}",
        "--wandb_log=True",
        "--wandb_run_name=test",
        "--metric_interval=1",
        *("--wandb_entity=us", "--wandb_tags=first, second", "--wandb_notes=a note", "--wandb_log_checkpoints=True"),
    ]
    process = run("train.py", *SETTINGS, *arguments, flags, ranks=2, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    expected = merged(tmp_path)
    assert [row["iter"] for row in expected] == list(range(21)), "the last one about the last checkpoint"
    assert {"val/loss", "iter/loss"} <= expected[5].keys()
    assert rows(newest(wandb_folder)) == expected
    (start,) = records(newest(wandb_folder), "run")
    assert (start["display_name"], start["run_group"], start["job_type"]) == (f"test {tmp_path.name}", "test", implementation)
    assert start["config"]["update"]["n_layer"] == 2
    assert (start["entity"], start["tags"], start["notes"]) == ("us", ["first", "second"], "a note")
    smallest = {metric["name"] for metric in records(newest(wandb_folder), "metric") if metric.get("summary") == {"min": True}}
    assert smallest == {"val/loss", "train/loss", "iter/loss"}
    uploads = records(newest(wandb_folder), "artifact")
    assert {upload["name"] for upload in uploads} == {f"checkpoint-{start['run_id']}"}
    assert sorted(uploads[-1]["aliases"]) == ["iter-20", "latest"], "the last checkpoint; no newer one has replaced it"
    best = min(row["val/loss"] for row in expected if "val/loss" in row)
    values = in_summary(newest(wandb_folder), "best_val_loss")
    assert values[-1] == best
    assert len(values) > 1, "known before the end"
    (end,) = records(newest(wandb_folder), "exit")
    assert end["exit_code"] == 0


@pytest.mark.parametrize(
    "how", ["stopped", pytest.param("killed", marks=pytest.mark.slow("the default has the run that was stopped", seconds=14))]
)
def test_a_resumed_run_is_one_curve(data, tmp_path, wandb_folder, how):
    """The newest folder has the iterations before the checkpoint, and no others that a killed run had begun."""
    arguments = [f"--dataset={data}", f"--out_dir={tmp_path / 'out'}", "--wandb_log=True", "--eval_interval=30"]
    with Forked("train.py", *SETTINGS, *arguments, "--max_iters=100000", ranks=2, cwd=tmp_path) as forked:
        if how == "stopped":
            forked.wait_for("iter 30:")
            os.kill(forked.pids[1], signal.SIGTERM)
            assert forked.finish().returncode == 0
        else:
            forked.wait_for("iter 37:")
            os.kill(forked.pids[0], signal.SIGKILL)
    begun = merged(tmp_path / "out")
    if how == "killed":  # in the middle of a line
        with open(tmp_path / "out" / "metrics.jsonl", "a") as file:
            file.write('{"iter": 1000, "iter/lo')
    resumed = run("train.py", *SETTINGS, *arguments, "--max_iters=60", "--init_from=resume", ranks=2, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert newest(wandb_folder).name in resumed.stdout
    assert "leave out its older folders" in resumed.stdout
    with open(tmp_path / "out" / "metrics.jsonl") as file:
        assert [event["iter"] for event in map(json.loads, file) if "iter/loss" in event] == list(range(61))
    expected = merged(tmp_path / "out")
    assert [row["iter"] for row in expected] == list(range(62)), "the last one about the last checkpoint"
    assert expected[:30] == begun[:30]
    assert rows(newest(wandb_folder)) == expected
    ids = {folder.name.rsplit("-", 1)[1] for folder in wandb_folder.glob("offline-run-*")}
    assert ids == {torch_load(tmp_path / "out")["wandb_run_id"]}
    if how == "stopped":
        without = run("train.py", *SETTINGS, *arguments, "--wandb_log=False", "--max_iters=90", "--init_from=resume", ranks=2)
        assert without.returncode == 0, without.stderr
        checkpoint = torch_load(tmp_path / "out")
        assert checkpoint["iter_num"] == 91
        assert ids == {checkpoint["wandb_run_id"]}, "a process without wandb keeps the run"


def test_without_a_login_the_run_is_offline(data, tmp_path, wandb_folder, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    arguments = [*SETTINGS, f"--dataset={data}", "--wandb_log=True", "--max_iters=5", f"--out_dir={tmp_path / 'out'}"]
    process = run_for_real("train.py", *arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    line = f"wandb records offline (there is no login); to upload later: wandb login && wandb sync {newest(wandb_folder)}\n"
    mentions = [line for line in process.stdout.splitlines(True) if "wandb" in line and not line.startswith("Overriding")]
    assert mentions == [line]
    assert "wandb" not in process.stderr


@pytest.mark.parametrize(
    "init_from", [pytest.param("scratch", marks=pytest.mark.slow("the default has the resumed run", seconds=12)), "resume"]
)
def test_without_a_network_the_run_is_offline(data, tmp_path, wandb_folder, monkeypatch, init_from):
    out = f"--out_dir={tmp_path / 'out'}"
    arguments = [*SETTINGS, f"--dataset={data}", "--wandb_log=True", "--max_iters=5", out]
    if init_from == "resume":
        assert run("train.py", *arguments, cwd=tmp_path).returncode == 0
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    process = run_for_real("train.py", *arguments, "--max_iters=8", f"--init_from={init_from}", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert re.search(rf"wandb records offline \(.+\); to upload later: .* wandb sync {newest(wandb_folder)}", process.stdout)
    assert "wandb" not in process.stderr
    assert rows(newest(wandb_folder)) == merged(tmp_path / "out")


def run_single(arguments, cwd, fault, *args):
    """Run train.py in one process, which ends as Python does: with its hooks. A forked process has none."""
    arguments = [os.path.join(ROOT, "train.py"), *SETTINGS, *arguments]
    program = f"import runpy, sys; sys.path[:0] = [{os.path.dirname(faults.__file__)!r}, {ROOT!r}]; import faults; "
    program += f"faults.{fault.__name__}(*{args}); sys.argv = {arguments}; runpy.run_path(sys.argv[0], run_name='__main__')"
    with open(cwd / "stdout", "w") as stdout, open(cwd / "stderr", "w") as stderr:  # no pipes: wandb's process keeps them
        process = subprocess.run(
            [sys.executable, "-c", program], cwd=cwd, env=environment(), stdout=stdout, stderr=stderr, timeout=60
        )
    return Finished(process.returncode, [process.returncode], (cwd / "stdout").read_text(), (cwd / "stderr").read_text())


@pytest.mark.parametrize("what", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("ranks", [0, 2])
def test_training_goes_on_without_wandb(data, tmp_path, what, ranks):
    """Its process is killed, or hangs."""
    arguments = [f"--dataset={data}", f"--out_dir={tmp_path}", "--wandb_log=True"]
    try:
        if ranks:
            process = run(
                "train.py", *SETTINGS, *arguments, ranks=ranks, cwd=tmp_path, before=partial(faults.signal_to_wandb, what)
            )
        else:
            process = run_single(arguments, tmp_path, faults.signal_to_wandb, what)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a stopped process would never end
            os.kill(int((tmp_path / "process of wandb").read_text()), signal.SIGKILL)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("WARNING: wandb has stopped") == 1
    assert process.stderr in ("", "wandb: ERROR Problem finishing run\n")
    assert [row["iter"] for row in merged(tmp_path)] == list(range(21))


def test_a_run_that_ends_with_an_error_has_failed_in_wandb(data, tmp_path, wandb_folder):
    process = run_single(
        [f"--dataset={data}", f"--out_dir={tmp_path}", "--wandb_log=True"], tmp_path, faults.error_in_iteration, 5
    )
    assert process.returncode == 1
    assert "an error in the program" in process.stderr
    (end,) = records(newest(wandb_folder), "exit")
    assert end["exit_code"] == 1
    assert rows(newest(wandb_folder)) == merged(tmp_path)


def test_samples_become_a_table(tmp_path, wandb_folder):
    program = """
from run.wandb_run import WandbRun
run = WandbRun("offline", "project", "name", {}, "sharded")
for iteration in (0, 5):
    run.log({"iter": iteration, "sample/text": f"text {iteration}"})
run.finish()
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, env=environment(), timeout=60)
    files = (newest(wandb_folder) / "files" / "media" / "table").rglob("*.json")
    tables = [json.loads(file.read_text()) for file in files]
    assert all(table["columns"] == ["iter", "text"] for table in tables)
    assert sorted(row for table in tables for row in table["data"]) == [[0, "text 0"], [5, "text 5"]]


@pytest.mark.parametrize("can_rewind", [True, False])
def test_a_run_on_a_server_is_one_curve(data, tmp_path, wandb_folder, monkeypatch, can_rewind):
    """Ended after 12, and resumed from a checkpoint at 10."""
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    arguments = [*SETTINGS, f"--dataset={data}", "--wandb_log=True", f"--out_dir={tmp_path / 'out'}"]
    with WandbServer(can_rewind) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        first = run("train.py", *arguments, "--max_iters=12", "--keep_checkpoints=2", ranks=2, cwd=tmp_path)
        assert first.returncode == 0, first.stderr
        ((run_id, rows_before),) = [(run_id, list(rows)) for run_id, rows in server.rows.items()]
        assert f"wandb: {server.url}/entity/project/runs/{run_id}\n" in first.stdout
        assert [row["iter"] for row in rows_before] == list(range(14))
        shutil.copy(tmp_path / "out" / "ckpt_00000010.pt", tmp_path / "out" / "ckpt.pt")
        resumed = run("train.py", *arguments, "--max_iters=15", "--init_from=resume", ranks=2, cwd=tmp_path)
        assert resumed.returncode == 0, resumed.stderr
    assert "RewindRun" in server.asked
    assert list(server.rows) == [run_id]
    expected = merged(tmp_path / "out")
    assert [row["iter"] for row in expected] == list(range(17))
    found = without_what_wandb_adds(server.rows[run_id])
    if can_rewind:
        assert found == expected
    else:
        assert "wandb keeps the rows of iterations 10 to 13 as they are (failed to rewind run" in resumed.stdout
        assert found == expected[:10] + without_what_wandb_adds(rows_before)[10:] + expected[14:]


class FakeWandb(types.ModuleType):
    """A module `wandb` without a process: it keeps what it gets."""

    Error = type("Error", (Exception,), {})
    errors = types.SimpleNamespace(CommError=Error)
    offline, starting_step, resumed, id, dir, sync_dir = True, 0, False, "abc", os.sep, "folder"

    def __init__(self):
        super().__init__("wandb")
        self.rows, self.arguments, self.exit_code = [], None, None
        self.setup = self.teardown = self.define_metric = lambda *_, **__: None
        self.login = lambda **_: True
        self.Settings = self.Table = dict
        self.is_slow = threading.Event()

    def init(self, **arguments):
        self.arguments = arguments
        return self

    def log(self, row, step):
        while self.is_slow.is_set():
            time.sleep(0.001)
        self.rows.append((step, row))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def fake(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    yield module
    module.is_slow.clear()


def start(mode="offline", **arguments):
    return WandbRun(mode, "project", "name", {}, "sharded", **arguments)


def test_an_event_that_comes_late_goes_into_the_newest_row(fake):
    wandb = start()
    wandb.log({"iter": 4, "a": 1})
    wandb.log({"iter": 2, "checkpoint/write_s": 1.0})
    wandb.log({"iter": 5, "a": math.nan})
    wandb.finish(exit_code=3)
    assert str(fake.rows) == "[(4, {'iter': 4, 'a': 1}), (4, {'checkpoint/write_s': 1.0}), (5, {'iter': 5, 'a': nan})]"
    assert fake.exit_code == 3


def test_a_resumed_run_gets_only_the_rows_that_it_lacks(fake):
    fake.starting_step = 2
    wandb = start(run_id="abc", resume_at=3, history=[{"iter": iteration} for iteration in range(3)])
    wandb.log({"iter": 3})
    wandb.finish()
    assert fake.rows == [(2, {"iter": 2}), (3, {"iter": 3})]


def test_variables_of_the_environment_come_before_settings(fake, monkeypatch):
    start().finish()
    given = {"project": "project", "name": "name", "group": "name", "job_type": "sharded", "id": None}
    assert {key: fake.arguments[key] for key in given} == given
    for name in ("PROJECT", "NAME", "RUN_GROUP", "JOB_TYPE", "RUN_ID"):
        monkeypatch.setenv(f"WANDB_{name}", "mine")
    start(run_id="abc").finish()
    assert {key: fake.arguments[key] for key in given} == {**dict.fromkeys(given), "id": "mine"}


def test_settings_of_the_run_come_after_variables(fake, monkeypatch):
    config = {"wandb_run_name": "group", "wandb_entity": "", "wandb_tags": " , ", "wandb_notes": ""}
    WandbRun("offline", "project", None, config, "sharded").finish()
    given = {"name": None, "group": "group", "entity": None, "tags": None, "notes": None}
    assert {key: fake.arguments[key] for key in given} == given
    for name in ("ENTITY", "TAGS", "NOTES"):
        monkeypatch.setenv(f"WANDB_{name}", "mine")
    config = {"wandb_run_name": "group", "wandb_entity": "a", "wandb_tags": "b", "wandb_notes": "c"}
    WandbRun("offline", "project", None, config, "sharded").finish()
    assert {key: fake.arguments[key] for key in given} == given


def test_a_checkpoint_that_was_replaced_is_not_uploaded(fake, tmp_path):
    """The one that has replaced it is."""
    uploaded = []
    fake.Artifact = lambda *_, metadata, **__: types.SimpleNamespace(
        add_file=lambda path: uploaded.append((metadata, pathlib.Path(path).read_text()))
    )
    fake.log_artifact = lambda artifact, aliases: uploaded.append(aliases)
    fake.is_slow.set()
    wandb = start()
    wandb.log({"iter": 0})
    for iteration in (5, 10):
        (tmp_path / "new").write_text(f"weights {iteration}")
        os.replace(tmp_path / "new", tmp_path / "ckpt.pt")
        wandb.upload(str(tmp_path / "ckpt.pt"), iteration)
    wandb.upload(str(tmp_path / "missing.pt"), 15)
    fake.is_slow.clear()
    wandb.finish()
    assert uploaded == [({"iter_num": 10}, "weights 10"), ["latest", "iter-10"]]


def test_figures_go_on_during_an_upload_and_its_failure_is_reported(fake, tmp_path, capfd):
    def wait(timeout):
        assert fake.rows[-1][0] == 6
        raise ValueError("the bucket is full")

    fake.Artifact = lambda *_, **__: types.SimpleNamespace(add_file=lambda path: None)
    fake.log_artifact = lambda artifact, aliases: types.SimpleNamespace(wait=wait)
    (tmp_path / "ckpt.pt").write_text("weights")
    fake.offline, fake.url = False, "url"
    wandb = start("online")
    wandb.upload(str(tmp_path / "ckpt.pt"), 5)
    wandb.log({"iter": 6})
    wandb.finish()
    assert "WARNING: wandb has stopped: the bucket is full; metrics.jsonl has all figures" in capfd.readouterr().out


def test_a_sweep_of_the_example_trains(data, tmp_path, monkeypatch):
    """The command line is the one that wandb's agent makes, with the launcher of the tests in place of torchrun."""
    import yaml
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    with open(os.path.join(ROOT, "config", "sweep.yaml")) as file:
        sweep = yaml.safe_load(file)
    parameters = {"learning_rate": 0.0123, "n_embd": sweep["parameters"]["n_embd"]["values"][0]}
    assert parameters.keys() == sweep["parameters"].keys()
    flags = create_sweep_command_args({"args": {name: {"value": value} for name, value in parameters.items()}})
    given = flags | {"env": ["/usr/bin/env"], "program": [sweep["program"]]}
    parts = [given.get(part[2:-1]) if part.startswith("${") else [part] for part in create_sweep_command(sweep["command"])]
    line = [word for part in parts for word in part]
    assert line[:5] == ["/usr/bin/env", "torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    files = [os.path.join(ROOT, word) if word.endswith(".py") else word for word in line[5:]]
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")
    small = ["--device=cpu", "--compile=False", f"--dataset={data}", "--max_iters=2", "--block_size=16", "--eval_iters=1"]
    process = run("train.py", *files, *small, ranks=2, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    facts = json.loads((tmp_path / "out-sweep-abc" / "run.json").read_text())
    assert {name: facts[name] for name in parameters} == parameters
    (start,) = records(newest(tmp_path / "wandb"), "run")
    assert (start["run_id"], start["sweep_id"]) == ("abc", "s")
    keys = {key for event in merged(tmp_path / "out-sweep-abc") for key in event}
    assert sweep["metric"]["name"] in keys


def test_a_slow_wandb_slows_nothing(fake, monkeypatch, capsys):
    monkeypatch.setattr(wandb_run, "_QUEUE", 10)
    monkeypatch.setattr(wandb_run, "_FINISH_S", 0.1)
    fake.is_slow.set()
    wandb = start()
    for iteration in range(100):
        wandb.log({"iter": iteration})
    wandb.finish()
    assert fake.rows == []
    printed = capsys.readouterr().out
    assert printed.count("wandb is too slow") == 1
    assert printed.count("wandb has stopped: it has not sent anything for") == 1


@pytest.mark.parametrize("reason", ["an error of wandb", "no space"])
def test_after_an_error_nothing_more_is_sent(fake, monkeypatch, capsys, reason):
    def log(row, step):
        raise RuntimeError("an error of wandb\nand its details")

    if reason == "no space":
        monkeypatch.setattr(wandb_run.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=0))
        reason = f"less than 1 MB are free in {os.sep}"
    else:
        fake.log = log
    wandb = start()
    for iteration in range(100):
        wandb.log({"iter": iteration})
    wandb.finish()
    assert fake.rows == []
    assert fake.exit_code == 0
    assert capsys.readouterr().out.count(f"WARNING: wandb has stopped: {reason}; ") == 1


def test_without_wandb_training_goes_on_with_one_line(data, tmp_path):
    arguments = [f"--dataset={data}", f"--out_dir={tmp_path}", "--wandb_log=True", "--max_iters=2"]
    process = run("train.py", *SETTINGS, *arguments, before=partial(faults.without_module, "wandb"))
    assert process.returncode == 0, process.stderr
    lines = process.stdout.replace(str(tmp_path), "").splitlines()  # its name has wandb in it
    (line,) = [line for line in lines if "wandb" in line and not line.startswith("Overriding")]
    assert line.startswith("WARNING: wandb is not installed (")
    assert line.endswith("; pip install wandb; training goes on, metrics.jsonl has all figures")
    assert [row["iter"] for row in merged(tmp_path)] == [0, 1, 2, 3]


def test_an_invalid_project_is_refused(data, tmp_path):
    process = run("train.py", *SETTINGS, f"--dataset={data}", "--wandb_log=True", "--wandb_project=a/b", cwd=tmp_path)
    assert process.returncode == 2
    assert re.fullmatch(r"error: wandb does not start: .*a/b.*\n", process.stderr)
