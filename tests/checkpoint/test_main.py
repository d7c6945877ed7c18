"""zero/checkpoint/__main__.py: the commands `inspect` and `convert`, and their exit codes."""

import os
import shutil
import subprocess
import sys

import torch
from conftest import ROOT
from contents import CHECKPOINT, numbered, save_alone

from zero import checkpoint as ckpt
from zero.checkpoint.__main__ import main


def test_inspect(tmp_path, capsys):
    ckpt.save(numbered(5), str(tmp_path))
    shown = subprocess.run(
        [sys.executable, "-m", "zero.checkpoint", "inspect", str(tmp_path / "ckpt.pt")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    for part in ("iteration 5", "model.weight (3000,) float32", "optimizer.state.0.exp_avg (3000,)", "all checksums hold"):
        assert part in shown.stdout
    assert "MB, consolidated, format 1" in shown.stdout

    def inspect(name):
        code = main(["inspect", str(tmp_path / name)])
        return code, *capsys.readouterr()

    torch.save(CHECKPOINT, tmp_path / "nanogpt.pt")
    assert "written by nanoGPT" in inspect("nanogpt.pt")[1]
    wrong = ckpt.load(tmp_path / "ckpt.pt")
    wrong["model"]["weight"] = wrong["model"]["weight"] + 1  # a sound archive of other numbers
    torch.save(wrong, tmp_path / "other.pt")
    code, output, _ = inspect("other.pt")
    assert code == 1
    assert "model.weight (3000,) float32 WRONG CHECKSUM" in output
    (tmp_path / "torn.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:-1000])
    for name, reason in (("torn.pt", "is damaged"), ("nowhere.pt", "there is no checkpoint"), ("", "is a folder")):
        code, _, errors = inspect(name)
        assert (code, errors.count("\n")) == (2, 1)
        assert reason in errors
    assert main([]) == 2


def test_sharded_checkpoints(tmp_path, monkeypatch, capsys):
    for iteration in (1, 2):
        save_alone(tmp_path, iteration)
    [shards] = [name for name in os.listdir(tmp_path) if name.startswith("shards_00000002")]
    before = sorted(set(os.listdir(tmp_path)) - {shards})
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "ckpt.pt"]) == 0
    shown = capsys.readouterr().out
    assert "sharded, format 1" in shown
    assert "files with a checksum each" in shown
    shutil.rmtree(tmp_path / shards)
    for arguments, warning in (
        (["inspect", "ckpt.pt"], "there is no"),
        (["convert", "ckpt.pt", "other.pt"], "there is no"),
        (["convert", "ckpt_prev.pt", "ckpt.pt"], "exists"),
        (["convert", "ckpt_prev.pt", "other"], "does not end in .pt"),
        (["convert", "ckpt_prev.pt", "nowhere/other.pt"], "No such file"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert warning in error
        assert error.count("\n") == 1
    assert sorted(os.listdir()) == before
