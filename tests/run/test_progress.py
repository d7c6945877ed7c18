"""run/progress.py: a line at the bottom of a terminal; other output scrolls above it, and a file or a pipe gets nothing."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap

import pytest
from conftest import ROOT
from scripts import SETTINGS, command, environment

BEGIN = """
import logging, sys, time, warnings
from run import progress
handler = logging.StreamHandler()  # holds sys.stderr
progress._REDRAW_S = 0.01
line = progress.Progress(20, rank=0)
"""
RUN = """
with line.task("loading"):
    time.sleep(0.05)
print("loaded")
for i in range(21):
    if i % 10 == 0:
        for _ in line.track(range(4), "evaluating"):
            time.sleep(0.03)
        print("step", i)
    if i == 5:
        warnings.warn_explicit("be careful", UserWarning, "library.py", 3)
        logging.getLogger().addHandler(handler)
        logging.getLogger().warning("logged")
    if i % 4 == 0:
        print("iter", i, end="")
        line.update(i)
        time.sleep(0.03)
        print(": done")
        line.show({"iter/loss": 1.25, "throughput/tokens_per_second": 45000.0, "memory/peak_mb": 400.0, "lr": 1.0})
    line.update(i)
    time.sleep(0.01)
"""
PRINTED = [
    "loaded",
    "step 0",
    "iter 0: done",
    "iter 4: done",
    "library.py:3: UserWarning: be careful",
    "logged",
    "iter 8: done",
]
PRINTED += ["step 10", "iter 12: done", "iter 16: done", "step 20", "iter 20: done"]


def script(text):
    return [sys.executable, "-c", textwrap.dedent(text)]


def on_terminal(line, columns=100, interrupt_after=None, **streams):
    """What a process writes to a terminal, and its exit code. It gets SIGINT once it has written `interrupt_after`."""
    terminal, end_of_process = pty.openpty()
    termios.tcsetwinsize(end_of_process, (24, columns))
    streams = {"stdout": end_of_process, "stderr": end_of_process, **streams}
    process = subprocess.Popen(line, cwd=ROOT, env={**environment(), "TERM": "xterm"}, **streams)
    os.close(end_of_process)
    written = b""
    while True:
        try:
            written += os.read(terminal, 1 << 16)
        except OSError:  # the process has ended
            break
        if interrupt_after is not None and interrupt_after in written:
            process.send_signal(signal.SIGINT)
            interrupt_after = None
    os.close(terminal)
    return written.decode(), process.wait(60)


def screen(written):
    """The lines that the terminal shows when all has been written. The last one is the one with the cursor."""
    lines = [""]
    column = 0
    for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]+", written):
        if part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        else:
            lines[-1] = lines[-1][:column].ljust(column) + part + lines[-1][column + len(part) :]
            column += len(part)
    return lines


def drawn(written):
    """What was drawn in the line, each time."""
    texts = re.findall(r"\r\x1b\[K([^\x1b\r\n]*)", written)
    return [text for text in texts if " left" in text or re.fullmatch(r"\w+ \d\d:\d\d", text)]


def test_what_is_printed_scrolls_above_the_line():
    written, code = on_terminal(script(BEGIN + RUN))
    assert code == 0
    *lines, last = screen(written)
    assert lines == PRINTED
    assert last == ""
    assert "\x1b" not in re.sub(r"\x1b\[K", "", written), "no other codes, such as those that hide the cursor"


def test_the_line_says_what_runs_and_how_far_it_is():
    texts = drawn(on_terminal(script(BEGIN + RUN))[0])
    assert "loading 00:00" in texts
    assert any(re.fullmatch(r"evaluating [123]/4 \|#+ +\| 00:00 left", text) for text in texts)
    shown = [re.fullmatch(r"iter (\d+)/20 \|#* *\| 00:00 left, loss 1.2500, 45,000 tok/s, 400 MB", text) for text in texts]
    iterations = [int(match[1]) for match in shown if match]
    assert iterations == sorted(iterations)
    assert len(set(iterations)) > 5


@pytest.mark.parametrize("columns", [30, 60, 80])
def test_the_line_fits_the_terminal_and_no_number_is_cut(columns):
    written, _ = on_terminal(script(BEGIN + RUN), columns)
    texts = drawn(written)
    assert max(map(len, texts)) <= columns - 3
    figures = {text.partition("left")[2] for text in texts if text.startswith("iter")}
    fit = {30: "", 60: ", loss 1.2500, 45,000 tok/s", 80: ", loss 1.2500, 45,000 tok/s, 400 MB"}[columns]
    assert figures <= {"", fit}
    assert fit in figures


def test_a_pipe_gets_nothing_and_neither_does_a_terminal_on_stderr():
    plain = subprocess.run(script(BEGIN + RUN), cwd=ROOT, env=environment(), capture_output=True, text=True)
    on_stderr = PRINTED[4:6]
    assert (plain.stdout.splitlines(), plain.stderr.splitlines()) == ([x for x in PRINTED if x not in on_stderr], on_stderr)
    written, _ = on_terminal(script(BEGIN + RUN), stdout=subprocess.DEVNULL)
    assert written.splitlines() == on_stderr


def test_a_file_on_stderr_gets_no_codes_of_the_terminal(tmp_path):
    with open(tmp_path / "stderr", "w") as file:
        written, _ = on_terminal(script(BEGIN + RUN), stderr=file)
    assert (tmp_path / "stderr").read_text().splitlines() == PRINTED[4:6]
    assert drawn(written)


@pytest.mark.parametrize("begin", ["import sys; sys.modules['tqdm'] = None", "import os; os.environ['TERM'] = 'dumb'"])
def test_without_tqdm_or_on_a_dumb_terminal_there_is_no_line(begin):
    written, code = on_terminal(script(begin + BEGIN + RUN))
    assert code == 0
    assert written.split("\r\n") == [*PRINTED, ""]


def test_what_another_rank_prints_does_not_mix_with_the_line():
    other = BEGIN.replace("rank=0", "rank=1") + "line.update(1)\nprint('a', 'b')\nsys.stderr.write('c\\n')"
    written, _ = on_terminal(script(other))
    assert written == "\r\x1b[Ka b\r\n\r\x1b[Kc\r\n"
    line_of_rank_0 = drawn(on_terminal(script(BEGIN + RUN))[0])[-1]
    assert screen(line_of_rank_0 + written) == ["a b", "c", ""]


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [("1 / 0", 1, "ZeroDivisionError"), ("time.sleep(60)", -signal.SIGINT, "KeyboardInterrupt"), ("sys.exit(3)", 3, "iter 1")],
)
def test_an_error_or_ctrl_c_leaves_no_line(end, code, error):
    text = BEGIN + f"line.update(0)\ntime.sleep(0.1)\nprint('iter 1')\nline.update(1)\n{end}\n"
    written, returned = on_terminal(script(text), interrupt_after=b"iter 1/20" if "sleep(60)" in text[-20:] else None)
    assert returned == code
    *_, before, last = screen(written)
    assert before.startswith(error)
    assert last == ""


def test_a_second_ctrl_c_ends_the_last_line():
    text = """
    import os, signal
    from distributed.signals import Signals
    from distributed import signals
    signals._SAME_KEYSTROKE_S = 0.1
    Signals()
    line.update(1)
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
    """
    written, code = on_terminal(script(BEGIN + textwrap.dedent(text)))
    assert code == 130
    assert screen(written)[0] == "SIGINT: saving and stopping at the next step boundary"
    assert screen(written)[-1] == ""


def test_train_shows_the_line_and_prints_what_it_prints_to_a_pipe(data, tmp_path):
    def printed(text):
        return [
            re.sub(r"[\d.,:-]+(?=( ?ms| ?%| s,| tok| GB| MB at| TFLOP| \(h:mm:ss))", "N", line) for line in text.splitlines()
        ]

    line = command("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}")
    written, code = on_terminal(line, 200)
    assert code == 0, written
    texts = drawn(written)
    assert any(text.startswith("iter 19/19 |") and ", loss " in text for text in texts)
    for name in ("ckpt.pt", "ckpt_prev.pt"):
        (tmp_path / name).unlink()
    plain = subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert printed("\n".join(screen(written))) == printed(plain.stdout)
