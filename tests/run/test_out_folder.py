"""run/lock.py: one run per folder; a second run is told who is there, and the lock of a killed run is free."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import time
from unittest import mock

import pytest
import ranks
from scripts import FEW, SETTINGS, run, train

from run.lock import is_held, take
from zero.checkpoint.__main__ import main


def hold(folder, ready, end):
    with take(folder):
        ready.set()
        end.wait()


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_second_is_told_who_is_there_until_its_end(tmp_path, monkeypatch, is_killed):
    folder = str(tmp_path / "new")
    assert is_held(folder) is None, "a copy has no lock"
    ready, end = ranks.context.Event(), ranks.context.Event()
    process = ranks.context.Process(target=hold, args=(folder, ready, end))
    process.start()
    assert ready.wait(60)
    said = (tmp_path / "new" / "run.lock").read_text()
    with pytest.raises(ValueError, match=rf"is in use by another run: process {process.pid} on \S+, since 20") as refused:
        take(folder)
    assert "\n" not in str(refused.value)
    assert (tmp_path / "new" / "run.lock").read_text() == said
    assert is_held(folder) is True
    (process.kill if is_killed else end.set)()
    process.join()
    assert is_held(folder) is False
    take(folder).close()
    assert os.listdir(folder) == ["run.lock"]
    monkeypatch.setattr(socket, "gethostname", lambda: "another machine")
    assert is_held(folder) is None, "the file system may not tell other machines"


def test_whoever_asks_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    take(str(tmp_path)).close()
    with open(tmp_path / "run.lock") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        take(str(tmp_path)).close()


def test_programs_that_it_starts_do_not_inherit_it(tmp_path):
    lock = take(str(tmp_path))
    says_ready = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(says_ready, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    child.stdout.readline()  # the kernel closes files some time after Popen has returned
    lock.close()
    take(str(tmp_path)).close()
    child.communicate(b"\n")


def test_a_file_system_without_locks_is_mentioned(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    take(str(tmp_path)).close()
    assert "run.lock cannot be locked" in capsys.readouterr().out


def test_eval_only_changes_nothing(data, tmp_path):
    """This holds also in a folder that cannot be written to and that another run uses."""
    out = tmp_path / "out"
    _, evaluations, _ = train(out, data, FEW, "--max_iters=5")
    (out / "ckpt_prev.pt").replace(out / "ckpt.pt")  # of the evaluation at iteration 5; the other one is of the end
    (out / "ckpt.pt.tmp").write_bytes(b"being written")
    lock = take(str(out))

    def state():
        return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(out.iterdir())}

    before = state()
    out.chmod(0o500)
    flags = f"--dataset={data}", f"--out_dir={out}", "--init_from=resume", "--eval_only=True"
    process = run("train.py", *SETTINGS, *flags).succeeded()
    assert "step 5: train loss {:.4f}, val loss {:.4f}".format(*evaluations[5]) in process.stdout
    assert "iter 5" not in process.stdout
    run("sample.py", f"--out_dir={out}", "--start=A", "--num_samples=1", "--max_new_tokens=1").succeeded()
    assert main(["inspect", str(out / "ckpt.pt")]) == 0
    out.chmod(0o700)
    assert state() == before
    lock.close()


def test_a_run_in_a_folder_that_is_in_use_is_refused_on_all_ranks(data, tmp_path):
    names = ["ckpt.pt.tmp", "metrics.jsonl", "shards_00000001_00000000.tmp"]
    for name in names:
        (tmp_path / name).write_text("of the run that is there")
    with take(str(tmp_path)):
        process = run("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", ranks=2)
    assert f"out_dir={tmp_path} is in use by another run: process {os.getpid()} on " in process.refusal()
    assert all((tmp_path / name).read_text() == "of the run that is there" for name in names)
