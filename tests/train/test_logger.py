"""metrics.jsonl holds whole lines, whatever happened to the run that wrote it."""

import json
import math
import os
import sys
import types

import pytest

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
