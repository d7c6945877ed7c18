"""zero/checkpoint/__main__.py: the command `inspect`, and its exit codes. `compare` is in test_compare.py."""

import re

import pytest
import torch
from checkpoints import CHECKPOINT, numbered
from scripts import run

from run.checkpoint_folder import commit
from zero.checkpoint.__main__ import main


def test_inspect(tmp_path, capsys):
    commit(numbered(5), str(tmp_path))
    shown = run("zero/checkpoint/__main__.py", "inspect", str(tmp_path / "ckpt.pt")).succeeded()
    lines = shown.stdout.splitlines()
    assert re.fullmatch(rf"{tmp_path / 'ckpt.pt'}: all checksums match; 0.0 MB, written by zero.checkpoint", lines[0])
    assert lines[1:4] == ["2 weights, optimizer state of 1 parameters", "best_val_loss 2.0", "format 1"]
    assert "iter_num 5" in lines

    def inspect(name):
        code = main(["inspect", str(tmp_path / name)])
        return code, *capsys.readouterr()

    torch.save(CHECKPOINT, tmp_path / "nanogpt.pt")
    assert "written by nanoGPT" in inspect("nanogpt.pt")[1]
    torch.save({"model": {}, "step": 3}, tmp_path / "own.pt")
    assert "written by another program" in inspect("own.pt")[1]
    assert inspect("")[1].startswith(f"{tmp_path / 'ckpt.pt'}: all checksums match")
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:-1000])
    for name, reason in (
        ("torn.pt", "is damaged"),
        ("nowhere.pt", "there is no checkpoint"),
        ("empty", "there is no checkpoint"),
    ):
        code, _, errors = inspect(name)
        assert (code, errors.count("\n")) == (2, 1)
        assert reason in errors


@pytest.mark.parametrize(
    ("line", "part"), [("--help", "compare"), ("inspect --help", "FILE"), ("compare --help", "--tolerance")]
)
def test_help_is_no_error(line, part, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 0
    output, errors = capsys.readouterr()
    assert part in output
    assert max(map(len, output.splitlines())) <= 120
    assert not errors


@pytest.mark.parametrize("line", ["", "inspect", "convert ckpt.pt", "compare ckpt.pt", "--inspect ckpt.pt"])
def test_wrong_arguments_are_one_line(line, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    assert re.fullmatch(r"error: .*; see python -m zero.checkpoint.* --help\n", capsys.readouterr().err)
