"""train.py and its out_dir: one run at a time writes there, and a run that only evaluates writes nothing."""

import contextlib
import os
import time

from scripts import FEW, SETTINGS, Forked, events_of, run, torch_load, train

from run.lock import Lock
from zero.checkpoint.__main__ import main


def test_eval_only_changes_nothing(data, tmp_path):
    """This holds also in a folder that cannot be written to and that another run uses."""
    out = tmp_path / "out"
    _, evaluations, _ = train(out, data, "--max_iters=5")
    (out / "ckpt_prev.pt").replace(out / "ckpt.pt")  # of the evaluation at iteration 5; the other one is of the end
    (out / "ckpt.pt.tmp").write_bytes(b"being written")
    lock = Lock(str(out))

    def state():
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(out.iterdir())}

    before = state()
    out.chmod(0o500)
    process = run(
        "train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={out}", "--init_from=resume", "--eval_only=True", ranks=2
    ).succeeded()
    assert "step 5: train loss {:.4f}, val loss {:.4f}".format(*evaluations[5]) in process.stdout
    assert "iter 5" not in process.stdout
    run("sample.py", f"--out_dir={out}", "--start=A", "--num_samples=1", "--max_new_tokens=1").succeeded()
    assert main(["inspect", str(out / "ckpt.pt")]) == 0
    out.chmod(0o700)
    assert state() == before
    lock.release()


def test_a_run_in_a_folder_that_is_in_use_is_refused_on_all_ranks(data, tmp_path):
    names = ["ckpt.pt.tmp", "metrics.jsonl", "shards_00000001_00000000.tmp"]
    for name in names:
        (tmp_path / name).write_text("of the run that is there")
    lock = Lock(str(tmp_path))
    process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", ranks=2)
    lock.release()
    errors = process.stderr.splitlines()
    assert len(errors) == 1, process.stderr
    assert all(f"out_dir={tmp_path} is in use by another run: process {os.getpid()} on " in line for line in errors)
    assert process.returncodes == [2, 2], process.stderr
    assert all((tmp_path / name).read_text() == "of the run that is there" for name in names)


def collide(out, data):
    """Two runs resume in one folder at the same time; the one that goes on is killed."""
    arguments = [*SETTINGS, FEW, f"--dataset={data}", f"--out_dir={out}", "--init_from=resume", "--max_iters=100000"]
    arguments += ["--eval_interval=5", "--keep_checkpoints=1000000"]
    before = {path.name for path in out.iterdir()}
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(Forked("train.py", *arguments)) for _ in range(2)]
        end = time.monotonic() + 60
        while all(run.processes[0].is_alive() for run in both) and time.monotonic() < end:
            time.sleep(0.01)
        [refused] = [run for run in both if not run.processes[0].is_alive()]
        [other] = [run for run in both if run is not refused]
        code, _, _, error = refused.finish()
        assert code == 2, error
        assert error.count("\n") == 1
        assert f"is in use by another run: process {other.pids[0]} on " in error
        newest = torch_load(out)["iter_num"]
        while torch_load(out)["iter_num"] < newest + 5:
            assert other.processes[0].is_alive(), other.printed("stderr")
            time.sleep(0.01)
    lost = before - {path.name for path in out.iterdir()}
    assert all(name.endswith(".tmp") for name in lost), "but for what a killed run has left, which is swept"


def test_of_two_runs_in_one_folder_one_is_refused(data, tmp_path):
    train(tmp_path, data, FEW, "--max_iters=5")
    collide(tmp_path, data)
    end = torch_load(tmp_path)["iter_num"] + 7
    train(tmp_path, data, FEW, "--init_from=resume", f"--max_iters={end}")
    events = events_of(tmp_path)
    assert [event["iter"] for event in events if "iter/loss" in event] == list(range(end + 1)), "every iteration once"
    assert [event["iter"] for event in events if "val/loss" in event] == list(range(0, end + 1, 5))
