"""zero/checkpoint/__main__.py: the commands `inspect` and `convert`, and their exit codes."""

import os
import re
import shutil

import pytest
import torch
from contents import CHECKPOINT, assert_same_contents, numbered, save_alone
from scripts import run

from zero import checkpoint as ckpt
from zero.checkpoint.__main__ import main
from zero.checkpoint.store import commit


def test_inspect(tmp_path, capsys):
    commit(numbered(5), None, str(tmp_path))
    shown = run("zero/checkpoint/__main__.py", "inspect", str(tmp_path / "ckpt.pt")).succeeded()
    lines = shown.stdout.splitlines()
    assert re.fullmatch(rf"{tmp_path / 'ckpt.pt'}: all checksums match; 0.0 MB, consolidated", lines[0])
    assert "iteration 5" in lines[1]

    def inspect(name):
        code = main(["inspect", str(tmp_path / name)])
        return code, *capsys.readouterr()

    torch.save(CHECKPOINT, tmp_path / "nanogpt.pt")
    assert "written by nanoGPT" in inspect("nanogpt.pt")[1]
    (tmp_path / "torn.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:-1000])
    for name, reason in (("torn.pt", "is damaged"), ("nowhere.pt", "there is no checkpoint"), ("", "is a folder")):
        code, _, errors = inspect(name)
        assert (code, errors.count("\n")) == (2, 1)
        assert reason in errors


@pytest.mark.parametrize(("line", "part"), [("--help", "inspect | convert"), ("convert --help", "--to {consolidated,sharded}")])
def test_help_is_no_error(line, part, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 0
    output, errors = capsys.readouterr()
    assert part in output
    assert max(map(len, output.splitlines())) <= 120
    assert not errors


@pytest.mark.parametrize("line", ["", "inspect", "convert ckpt.pt", "convert ckpt.pt other.pt --to=torch", "--inspect ckpt.pt"])
def test_wrong_arguments_are_one_line(line, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    assert re.fullmatch(r"error: .*; see python -m zero.checkpoint.* --help\n", capsys.readouterr().err)


def test_a_file_is_converted_to_the_format_that_is_named_or_to_the_other_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save_alone(tmp_path, 1)
    ckpt.convert("ckpt.pt", "whole.pt", "consolidated")
    for source, to, name in (
        ("ckpt", [], "consolidated"),
        ("ckpt", ["--to=consolidated"], "consolidated"),
        ("ckpt", ["--to", "sharded"], "sharded"),
        ("whole", [], "sharded"),
        ("whole", ["--to=consolidated"], "consolidated"),
    ):
        file = f"{source}-{name}-{len(to)}.pt"
        assert main(["convert", f"{source}.pt", file, *to]) == 0
        assert capsys.readouterr().out == f"{file}: {name}\n"
        assert ("shards" in ckpt.load(file)) == (name == "sharded")
        ckpt.convert(file, f"{file}-again.pt", "consolidated")
        assert_same_contents(ckpt.load(f"{file}-again.pt"), ckpt.load("whole.pt"))


def test_sharded_checkpoints(tmp_path, monkeypatch, capsys):
    save_alone(tmp_path, 1, 2)
    [shards] = [name for name in os.listdir(tmp_path) if name.startswith("shards_00000002")]
    before = sorted(set(os.listdir(tmp_path)) - {shards})
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "ckpt.pt"]) == 0
    shown = capsys.readouterr().out
    assert "MB, sharded" in shown
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
