"""run/lock.py: one run per folder; a second run is told who is there, and the lock of a killed run is free."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
import time

import pytest
import ranks

from run.lock import Lock, is_held


def hold(folder, ready, end):
    lock = Lock(folder)
    ready.set()
    end.wait()
    lock.release()


def start(folder):
    ready, end = ranks.context.Event(), ranks.context.Event()
    process = ranks.context.Process(target=hold, args=(folder, ready, end))
    process.start()
    assert ready.wait(60)
    return process, end


def test_the_second_is_told_who_is_there(tmp_path):
    process, end = start(str(tmp_path / "new"))
    said = (tmp_path / "new" / "run.lock").read_text()
    with pytest.raises(ValueError, match=rf"is in use by another run: process {process.pid} on \S+, since 20") as refused:
        Lock(str(tmp_path / "new"))
    assert "\n" not in str(refused.value)
    assert (tmp_path / "new" / "run.lock").read_text() == said
    end.set()
    process.join()
    Lock(str(tmp_path / "new")).release()
    assert os.listdir(tmp_path / "new") == ["run.lock"]


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    process, _ = start(str(tmp_path))
    process.kill()
    process.join()
    Lock(str(tmp_path))


def test_whether_a_run_holds_it(tmp_path, monkeypatch):
    assert is_held(str(tmp_path)) is None, "a copy has no lock"
    process, end = start(str(tmp_path))
    assert is_held(str(tmp_path)) is True
    end.set()
    process.join()
    assert is_held(str(tmp_path)) is False
    Lock(str(tmp_path)).release()
    monkeypatch.setattr(socket, "gethostname", lambda: "another machine")
    assert is_held(str(tmp_path)) is None, "the file system may not tell other machines"


def test_whoever_asks_does_not_keep_a_run_from_starting(tmp_path, monkeypatch):
    Lock(str(tmp_path)).release()
    with open(tmp_path / "run.lock") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        Lock(str(tmp_path))


def test_programs_that_it_starts_do_not_inherit_it(tmp_path):
    lock = Lock(str(tmp_path))
    says_ready = [sys.executable, "-c", "print(flush=True); input()"]
    child = subprocess.Popen(says_ready, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    child.stdout.readline()  # the kernel closes files some time after Popen has returned
    lock.release()
    Lock(str(tmp_path)).release()
    child.communicate(b"\n")


def test_a_file_system_without_locks_is_mentioned(tmp_path, monkeypatch, capsys):
    def flock(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    Lock(str(tmp_path))
    assert "run.lock cannot be locked" in capsys.readouterr().out


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to out_dir=\S+/out: "):
        Lock(str(tmp_path / "file" / "out"))
