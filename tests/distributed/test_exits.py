"""distributed/exits.py: nobody has to read what a script prints."""

import os
import subprocess

import pytest
from scripts import FEW, command, events_of, torch_load, train, training


def start(script, *arguments, stdout, ranks=0, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        command(script, *arguments, ranks=ranks), env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def closed_pipe():
    """The end to write to, of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk():
    return open("/dev/full", "w")


@pytest.mark.parametrize("lost", [closed_pipe, full_disk])
def test_a_run_whose_log_cannot_be_written_goes_on(data, tmp_path, lost):
    with lost() as stdout:
        run = start(*training(tmp_path, data, FEW, "--max_iters=8"), stdout=stdout)
        errors = run.communicate(timeout=240)[1]
    assert run.returncode == 0, errors
    assert errors.count("<stdout> cannot be written: ") == 1
    assert "; the run goes on" in errors
    assert torch_load(tmp_path)["iter_num"] > 0
    assert (tmp_path / "report.md").exists()
    assert not any("mfu" in event for event in events_of(tmp_path)), "of a CPU"


def test_text_that_the_encoding_lacks_is_escaped(tmp_path):
    run = start("sample.py", f"--out_dir={tmp_path}/\N{SNOWMAN}", stdout=subprocess.PIPE, PYTHONIOENCODING="ascii", LC_ALL="C")
    printed, errors = run.communicate(timeout=240)
    assert run.returncode == 2, errors
    assert "\\u2603" in printed + errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("script", ["sample.py", "evaluate.py", "plan.py", "dashboard.py", "train.py"])
def test_head_ends_a_script_without_an_error(script):
    with closed_pipe() as stdout:
        run = start(script, "--help", stdout=stdout)
        errors = run.communicate(timeout=240)[1]
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert run.returncode in (0, -13)


def test_head_ends_no_rank_with_an_error(data, tmp_path):
    """The others wait for rank 0, which prints."""
    train(tmp_path, data, FEW, "--max_iters=0")
    with closed_pipe() as stdout:
        run = start("evaluate.py", f"--out_dir={tmp_path}", "--device=cpu", stdout=stdout, ranks=2)
        errors = run.communicate(timeout=240)[1]
    assert run.returncode == 0, errors
    assert "Traceback" not in errors
    assert (tmp_path / "evaluation.json").exists()
