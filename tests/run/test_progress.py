"""run/progress.py and distributed/exits.py: a bar on a terminal, above which lines scroll; nobody has to read the lines."""

import os
import pty
import re
import subprocess
import termios
from functools import partial
from multiprocessing.connection import wait

import faults
import pytest
from scripts import FEW, Forked, command, events_of, run, torch_load, train, training

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


def run_into(stdout, script, *arguments, ranks=0, **variables):
    """Run a script to its end, as a user does, whose output goes to a file or a pipe."""
    how = {"env": {**os.environ, "OMP_NUM_THREADS": "1", **variables}, "stderr": subprocess.PIPE, "text": True, "timeout": 240}
    with stdout:
        return subprocess.run(command(script, *arguments, ranks=ranks), stdout=stdout, **how)


def closed_pipe():
    """The end to write to, of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full_disk():
    return open("/dev/full", "w")


@pytest.mark.parametrize("lost", [closed_pipe, full_disk])
def test_a_run_whose_log_cannot_be_written_goes_on(data, tmp_path, lost):
    run = run_into(lost(), *training(tmp_path, data, FEW, "--max_iters=8"))
    assert run.returncode == 0, run.stderr
    assert len(re.findall("<stdout> cannot be written: .*; the run goes on", run.stderr)) == 1
    assert torch_load(tmp_path)["iter_num"] > 0
    assert (tmp_path / "report.md").exists()
    assert not any("mfu" in event for event in events_of(tmp_path)), "of a CPU"


def test_text_that_the_encoding_lacks_is_escaped(tmp_path):
    output = open(tmp_path / "printed", "w")  # noqa: SIM115
    run = run_into(output, "sample.py", f"--out_dir={tmp_path}/\N{SNOWMAN}", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert run.returncode == 2, run.stderr
    assert "\\u2603" in (tmp_path / "printed").read_text() + run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("script", ["sample.py", "evaluate.py", "plan.py", "dashboard.py", "train.py"])
def test_head_ends_a_script_without_an_error(script):
    run = run_into(closed_pipe(), script, "--help")
    assert not re.search("Traceback|Exception", run.stderr)
    assert run.returncode in (0, -13)


def test_head_ends_no_rank_with_an_error(data, tmp_path):
    """The others wait for rank 0, which prints."""
    train(tmp_path, data, FEW, "--max_iters=0")
    run = run_into(closed_pipe(), "evaluate.py", f"--out_dir={tmp_path}", "--device=cpu", ranks=2)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert (tmp_path / "evaluation.json").exists()
