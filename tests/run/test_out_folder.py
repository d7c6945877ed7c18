"""run/out_folder.py: one run per folder, and a second one is told who is there; a new run renames that of an earlier one."""

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
from checkpoints import save_alone
from scripts import FEW, run, torch_load, train, training

import dashboard
from run.checkpoints import Checkpoints
from run.out_folder import earlier, is_held, set_aside, take
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
    with pytest.raises(ValueError, match=rf"^.*is in use by another run: process {process.pid} on \S+, since 20.*\Z"):
        take(folder)
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
    process = run(*training(out, data, "--init_from=resume", "--eval_only=True"))
    process.succeeded("step 5: train loss {:.4f}, val loss {:.4f}".format(*evaluations[5]))
    assert "iter 5" not in process.stdout
    run("sample.py", f"--out_dir={out}", "--start=A", "--num_samples=1", "--max_new_tokens=1").succeeded()
    assert main(["inspect", str(out / "ckpt.pt")]) == 0
    out.chmod(0o700)
    assert state() == before
    lock.close()


def test_a_run_in_a_folder_that_is_in_use_is_refused_on_all_ranks(data, tmp_path):
    files = [tmp_path / name for name in ("ckpt.pt.tmp", "metrics.jsonl", "shards_00000001_00000000.tmp")]
    for path in files:
        path.write_text("of the run that is there")
    with take(str(tmp_path)):
        process = run(*training(tmp_path, data), ranks=2)
    process.refusal(f"out_dir={tmp_path} is in use by another run: process {os.getpid()} on ")
    assert {path.read_text() for path in files} == {"of the run that is there"}


def names(folder):
    return sorted(os.listdir(folder))


def checkpoints(folder, read_only=False):
    settings = {"out_dir": str(folder), "keep_checkpoints": 0, "async_save": False}
    return Checkpoints(settings | {"always_save_checkpoint": True, "save_interval": 0, "eval_only": read_only})


def start_anew(folder, read_only=False):
    starts = checkpoints(folder, read_only)
    starts.claim()
    assert (is_held(folder) is True) == (not read_only)
    if not read_only:
        starts._lock.close()


@pytest.fixture
def out(tmp_path):
    """The folder of a run that saved once, with a file of the user."""
    out = tmp_path / "out"
    save_alone(out, 4)
    for name in ("metrics.jsonl", "run.json", "report.md", "run.lock", "notes.txt"):
        (out / name).write_text("of before")
    return out


def test_the_folder_of_a_run_is_renamed_and_the_run_goes_on_there(data, tmp_path):
    out, before = tmp_path / "out", tmp_path / "out.before-1"
    train(out, data, FEW, "--keep_checkpoints=9", "--profile=True", "--max_iters=11")
    (out / "notes.txt").write_text("of the user")
    old = names(out)
    losses, _, printed = train(out, data, FEW, "--max_iters=1")
    remedy = f"which is now in {before}; to continue that run, use --init_from=resume --out_dir={before}\n"
    assert f"note: out_dir={out} held another run, {remedy}" in printed
    assert (names(out), names(before)) == (["ckpt.pt", "metrics.jsonl", "report.md", "run.json", "run.lock"], old)
    assert ([*losses], torch_load(out)["iter_num"]) == ([0, 1], 2)
    losses, _, _ = train(before, data, FEW, "--init_from=resume", "--max_iters=13")
    assert [*losses] == list(range(14))
    assert [ran.curves["iter/loss"][-1][0] for ran in dashboard.read([str(out), str(before)])] == [1, 13]


def test_a_kill_at_any_moment_leaves_a_run_that_resumes(out):
    files = names(out)
    for killed, place in (("rename", out), ("makedirs", out.with_name("out.before-1"))):
        lock = take(str(out))
        with mock.patch(f"os.{killed}", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            set_aside(str(out), lock)
        lock.close()
        assert (out.exists(), names(place)) == (killed == "rename", files)
        resumed = checkpoints(place)
        assert resumed.load("resume")["iter_num"] == 4
        resumed._lock.close()
    with pytest.raises(ValueError, match=rf"to resume, use --out_dir={out}.before-1; to start a new run"):
        checkpoints(out).load("resume")


def test_a_folder_without_a_checkpoint_is_renamed_too_unless_the_run_writes_nothing(out, capsys):
    """Figures and kept checkpoints are of use when ckpt.pt was deleted. A folder with other files only stays as it is."""
    (out / "ckpt.pt").unlink()
    files = names(out)
    (out.with_name("out.before-of-mine")).mkdir()
    for number in range(1, 12):
        start_anew(out, read_only=True)
        assert (names(out), capsys.readouterr().out) == (files, "")
        start_anew(out)
        assert earlier(str(out)) == {n: f"{out}.before-{n}" for n in range(1, number + 1)}
        assert capsys.readouterr().out.endswith(f"held another run, which is now in {out}.before-{number}\n")
        assert names(out) == ["run.lock"]
        (out / "notes.txt").touch()
        start_anew(out)
        assert (names(out), capsys.readouterr().out) == (["notes.txt", "run.lock"], "")
        for name in files:
            (out / name).touch()


def test_a_folder_that_cannot_be_renamed_stays(out, monkeypatch):
    """Such as a mount point, the working folder, or one with the folder of another run."""
    (out / "second").mkdir()
    files = names(out)

    def refused(reason):
        message = f"out_dir={out} holds another run, and cannot be renamed: {reason}; use another --out_dir"
        with take(str(out)) as lock, pytest.raises(ValueError, match=f"^{message}$"):
            set_aside(str(out), lock)
        assert names(out) == files

    with mock.patch("os.rename", side_effect=OSError(errno.EBUSY, "Device or resource busy")):
        refused("Device or resource busy")
    with monkeypatch.context() as inside:
        inside.chdir(out / "second")
        refused(f"{out}/second is in it")
    (out / "second" / "run.lock").touch()
    refused(f"{out}/second is in it")
    (out / "second" / "run.lock").unlink()
    with open(out / "log.txt", "w") as log:  # python train.py > out/log.txt
        files, stdout = names(out), os.dup(1)
        os.dup2(log.fileno(), 1)
        try:
            refused("/dev/stdout is in it")
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)


def test_a_link_to_a_folder_stays(out):
    link = out.with_name("link")
    link.symlink_to(out)
    start_anew(link)
    assert (link.resolve(), names(out)) == (out, ["run.lock"])
    assert (out.with_name("out.before-1") / "ckpt.pt").exists()


def test_a_run_that_waited_for_the_lock_of_a_renamed_folder_is_refused(out, monkeypatch):
    """And it is told about the run that has the new folder."""
    lock = take(str(out))
    monkeypatch.setattr(time, "sleep", lambda _: set_aside(str(out), lock))  # closes the lock that the other one waits for
    with pytest.raises(ValueError, match=f"out_dir={out} is in use by another run: process {os.getpid()} on "):
        take(str(out))
