"""logger.py: metrics.jsonl holds whole lines whatever happened to the run, and wandb records without a network."""

import json
import math
import os
import sys
import types

import pytest
from scripts import SETTINGS, run_for_real, torch_load

from logger import Logger


def make(folder, resume_at=None, wandb_log=False):
    return Logger(folder and str(folder), resume_at, wandb_log, project="", name="", config={})


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_goes_on_after_the_last_whole_line(tmp_path):
    make(tmp_path).log({"iter": 1})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"iter": 2, "los')  # a kill
    logger = make(tmp_path, resume_at=2)
    assert logger.file.tell() == len('{"iter": 1}\n'), "where the next line goes back to if the disk is full"
    logger.log({"iter": 2})
    logger.log({"iter": 3})
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


def test_what_is_not_finite_is_null_in_the_file_and_itself_in_wandb(tmp_path, monkeypatch):
    run = types.SimpleNamespace(events=[], offline=False, finish=lambda: None)
    run.log = run.events.append
    error = type("Error", (Exception,), {})
    wandb = types.SimpleNamespace(
        init=lambda **_: run, login=lambda **_: True, errors=types.SimpleNamespace(Error=error, CommError=error)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    event = {"iter": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 2.0, "e": None}
    make(tmp_path, wandb_log=True).log(event)
    assert run.events == [event]
    text = (tmp_path / "metrics.jsonl").read_text()
    assert text == '{"iter": 1, "a": null, "b": null, "c": null, "d": 2.0, "e": null}\n'


def test_without_a_folder_there_is_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger = make(None)
    logger.log({"iter": 1})
    logger.finish()
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
    logger = make(tmp_path)
    logger.file = Full(room=30)
    for iteration in range(10, 15):
        logger.log({"iter": iteration})  # 13 bytes
    assert logger.file.content == b'{"iter": 10}\n{"iter": 11}\n'
    assert capsys.readouterr().out.count("figures are missing from metrics.jsonl") == 1
    logger.file.room = 100
    logger.log({"iter": 15})
    assert logger.file.content.endswith(b'11}\n{"iter": 15}\n')


def test_wandb_records_offline_without_login_or_network(data, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc
    arguments = [*SETTINGS, f"--dataset={data}", "--wandb_log=True", "--max_iters=5", f"--out_dir={tmp_path / 'out'}"]
    folders = []
    for init_from in ("scratch", "resume"):
        process = run_for_real("train.py", *arguments, f"--init_from={init_from}", cwd=tmp_path)
        assert process.returncode == 0, process.stderr
        assert "wandb records offline; to upload later: wandb login && wandb sync " in process.stdout
        folders.append(process.stdout.split("wandb sync ")[1].split()[0])
    assert all(os.path.isdir(folder) for folder in folders)
    run_id = torch_load(tmp_path / "out")["wandb_run_id"]
    assert [folder.rsplit("-", 1)[1] for folder in folders] == [run_id, run_id], "the resumed run is the same run"


def test_wandb_records_offline_with_a_login_but_no_network(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
    arguments = [*SETTINGS, f"--dataset={data}", "--wandb_log=True", "--max_iters=1", f"--out_dir={tmp_path / 'out'}"]
    process = run_for_real("train.py", *arguments, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "wandb cannot be reached" in process.stdout
    assert "wandb records offline; to upload later" in process.stdout
