"""run/progress.py: a bar at the bottom of a terminal; what rank 0 prints scrolls above it; a file or a pipe gets nothing."""

import os
import pty
import re
import termios
from functools import partial
from multiprocessing.connection import wait

import faults
import pytest
from scripts import Forked, run, training

PROGRAM = """
import sys
import time
from distributed.ranks import print0
from run.progress import Progress

line = Progress(20, rank=int(sys.argv[1]))
with line.task("loading"):
    print0("being loaded")
print0("loaded")
for i in range(21):
    if i % 10 == 0:
        for _ in line.track(range(4), "evaluating"):
            time.sleep(0.11 if i == 0 else 0)
        print0("step", i)
    if i % 4 == 0:
        print0("iter", i)
    line.update(i, {"iter/loss": 1.25, "throughput/tokens_per_second": 45000.0, "memory/peak_mb": 400.0, "lr": 1.0})
    time.sleep(0.01)
line.close()
"""
PRINTED = ["being loaded", "loaded", "step 0", "iter 0", "iter 4", "iter 8", "step 10", "iter 12", "iter 16", "step 20"]
PRINTED += ["iter 20"]


@pytest.fixture
def script(tmp_path):
    """A program whose argument is its rank."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path / "program.py"


def on_terminal(*line, columns=100):
    """What a script writes to a terminal."""
    terminal, end_of_process = pty.openpty()
    termios.tcsetwinsize(end_of_process, (24, columns))
    written = b""
    with Forked(*line, before=partial(faults.write_to, os.ttyname(end_of_process))) as forked:
        while (is_alive := forked.processes[0].is_alive()) or wait([terminal], 0):
            if wait([terminal], 0.05 * is_alive):
                written += os.read(terminal, 1 << 16)
        assert forked.finish().returncode == 0, written.decode()
    os.close(terminal)
    os.close(end_of_process)
    return written.decode()


def screen(written):
    """The lines that the terminal shows when all has been written."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[A|\r|\n|[^\x1b\r\n]+", written):
        if part == "\x1b[A":
            row -= 1
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]


def drawn(written):
    """What was drawn, each time."""
    return [text for text in re.split(r"[\r\n]", written.replace("\x1b[A", "")) if " left" in text or "00:00" in text]


def test_what_is_printed_scrolls_above_the_bar_which_says_how_far_the_run_is(script):
    written = on_terminal(script, "0")
    assert [line for line in screen(written) if line] == PRINTED
    texts = drawn(written)
    assert "loading 00:00" in texts
    assert any(re.fullmatch(r"evaluating [123]/4 \|\S+ +\| 00:00 left", text) for text in texts)
    shown = [re.fullmatch(r"iter (\d+)/20 \|\S* *\| 00:00 left, loss 1.2500, 45,000 tok/s, 400 MB", text) for text in texts]
    iterations = [int(match[1]) for match in shown if match]
    assert iterations == sorted(iterations)
    assert len(set(iterations)) > 2


def test_a_file_gets_nothing_and_another_rank_draws_nothing(script):
    plain = run(script, "0")
    assert (plain.stdout.splitlines(), plain.stderr) == (PRINTED, "")
    assert on_terminal(script, "1").splitlines() == PRINTED


def test_train_shows_the_bar_and_prints_what_it_prints_to_a_file(data, tmp_path):
    def printed(text):
        measured = r"[\d.,:-]+(?=( ?ms| ?%| s,| tok| GB| MB at| TFLOP| \(h:mm:ss))"
        return [re.sub(measured, "N", line) for line in text.splitlines() if line]

    line = training(tmp_path, data, "--max_iters=6")
    written = on_terminal(*line, columns=300)
    assert any(text.startswith("iter 6/6 |") and ", loss " in text for text in drawn(written))
    for path in tmp_path.iterdir():
        path.unlink()
    assert printed("\n".join(screen(written))) == printed(run(*line).stdout)
