"""zero/checkpoint/__main__.py, compare.py: the commands `inspect` and `compare`, what they say and their exit codes."""

import copy
import math
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
    assert lines[1:4] == [
        "2 weights (tied ones by each of their names), optimizer state of 1 parameters",
        "best_val_loss 2.0",
        "format 1",
    ]
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
    reasons = {"torn.pt": "is damaged", "nowhere.pt": "there is no checkpoint", "empty": "there is no checkpoint"}
    for name, reason in reasons.items():
        for command in (["inspect"], ["compare", str(tmp_path)]):
            assert main([*command, str(tmp_path / name)]) == 2
            assert re.fullmatch(rf"error: .*{reason}.*\n", capsys.readouterr().err)


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


@pytest.mark.parametrize(
    ("line", "error"),
    [
        *((line, "") for line in ("", "inspect", "convert ckpt.pt", "compare ckpt.pt", "--inspect ckpt.pt")),
        *((f"compare a.pt b.pt --tolerance={value}", "argument --tolerance: ") for value in ("-1", "nan", "small")),
    ],
)
def test_wrong_arguments_are_one_line(line, error, capsys):
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2
    assert re.fullmatch(rf"error: {error}.*; see python -m zero.checkpoint.* --help\n", capsys.readouterr().err)


# -- compare ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compared(tmp_path, capsys):
    """A function: exit code and lines of the command for two checkpoints, of which one is changed."""

    def compare(change=lambda checkpoint: None, *arguments):
        torch.save(CHECKPOINT, tmp_path / "ckpt.pt")
        changed = copy.deepcopy(CHECKPOINT)
        change(changed)
        torch.save(changed, tmp_path / "b.pt")
        code = main(["compare", str(tmp_path), str(tmp_path / "b.pt"), *arguments])
        return code, capsys.readouterr().out.splitlines()

    return compare


def model(change):
    return lambda checkpoint: change(checkpoint["model"])


def test_equal_files_are_bit_identical(compared):
    assert compared() == (0, ["bit-identical: 2 weights and 2 entries of optimizer state"])
    of_nanogpt = {f"_orig_mod.{name}": tensor for name, tensor in CHECKPOINT["model"].items()}  # compiled
    code, lines = compared(lambda checkpoint: checkpoint.update(model=of_nanogpt))
    assert (code, lines[0][:14]) == (0, "bit-identical:")


def test_the_worst_comes_first_and_the_tolerance_decides(compared):
    def change(checkpoint):
        checkpoint["model"]["weight"][2999] += 0.5
        checkpoint["model"]["tied"][0] -= 2.0
        checkpoint["optimizer"]["state"][0]["step"] += 1

    code, lines = compared(change)
    said = "3 differ by at most 2, {} the tolerance of {}, of 2 weights and 2 entries of optimizer state:"
    assert (code, lines[0]) == (1, said.format("more than", 0))
    assert " ".join(lines[1:]).split() == ["2", "model.tied", "0.5", "model.weight", "1", "optimizer.state.0.step"]
    code, lines = compared(change, "--tolerance=2")
    assert (code, lines[0]) == (0, said.format("within", 2))
    assert compared(change, "--tolerance=1.9")[0] == 1


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (model(lambda held: held["weight"].__setitem__(5, math.nan)), 1, r"  inf +model.weight"),
        (model(lambda held: held["weight"].__setitem__(0, -0.0)), 0, r"  0 +model.weight"),
        (model(lambda held: held.update(weight=held["weight"].double())), 0, r"  0 +model.weight"),
        (model(lambda held: held.update(tied=torch.ones(8))), 1, r"  shapes \(7,\) and \(8,\) +model.tied"),
        (model(lambda held: held.pop("tied")), 1, r"  only in .*ckpt.pt +model.tied"),
        (model(lambda held: held.update(more=torch.ones(1))), 1, r"  only in .*b.pt +model.more"),
        (lambda held: held.update(optimizer={}), 1, r"  only in .*ckpt.pt +optimizer.state.0.step"),
    ],
)
def test_what_is_not_the_same(compared, change, code, line):
    found, lines = compared(change, "--tolerance=0")
    assert found == code
    assert any(re.fullmatch(line, each) for each in lines), lines


@pytest.mark.parametrize(
    ("a", "b", "code", "line"),
    [
        (0.1, 0.1 + 1e-12, 1, r"  1e-12 +optimizer.state.0.step"),
        (2**63 + 1, 2**63, 1, r"  1 +optimizer.state.0.step"),
        (3, torch.tensor(3.0), 0, "bit-identical: .*"),
        (None, 3, 1, r"  NoneType and int +optimizer.state.0.step"),
        (torch.tensor([3.0, 1.0]), torch.tensor([math.inf, 1.0]), 1, r"  inf +optimizer.state.0.step"),
    ],
)
def test_numbers_in_place_of_tensors(tmp_path, capsys, a, b, code, line):
    for name, step in (("a.pt", a), ("b.pt", b)):
        state = {"state": {0: {"step": step}}, "param_groups": [{"params": [0]}]}
        torch.save({**CHECKPOINT, "optimizer": state}, tmp_path / name)
    assert main(["compare", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == code
    assert any(re.fullmatch(line, each) for each in capsys.readouterr().out.splitlines())


def test_a_view_of_the_first_elements_is_not_the_whole(tmp_path, capsys):
    """They begin at one address. Here, what differs lies behind the view."""
    paths = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    for path, last in zip(paths, (9.0, 0.0), strict=True):
        whole = torch.tensor([*range(9), last])
        torch.save({**CHECKPOINT, "model": {"begin": whole[:3], "whole": whole}}, path)
    assert main(["compare", *paths]) == 1
    assert capsys.readouterr().out.splitlines()[1].split() == ["9", "model.whole"]


def test_many_differences_are_counted(compared):
    code, lines = compared(model(lambda held: held.update({f"layer {number}": torch.ones(1) for number in range(15)})))
    assert (code, len(lines), lines[-1]) == (1, 12, "  and 5 more")
