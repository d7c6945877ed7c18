"""`make bench-gpu`: its parts, what a call leaves for the next one, and what it brings home."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from conftest import ROOT
from scripts import SETTINGS, run

from benchmarks import gpu
from benchmarks.gpu import Part

FAILS_ONCE = "import os, sys; os.path.exists('ran') and sys.exit(0); open('ran', 'w'); sys.exit('the first time')"
PARTS = [
    Part("prints", 1, 0, ["-c", "print('iter 1: loss 4')\nprint('iter 2: loss 3')"]),
    Part("fails", 1, 0, ["-c", FAILS_ONCE]),
    Part("hangs", 1, 0, ["-c", "import time; print('a row', flush=True); time.sleep(60)"]),
    Part("long", 100, 0, ["-c", "pass"]),
]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """A function that calls bench-gpu with `PARTS` and returns its exit code, its lines by part, and its last line."""
    monkeypatch.chdir(tmp_path)
    replaced = {"parts": lambda *_: PARTS, "SLOWER": 1, "BUDGET_S": 90, "machine": lambda card: card}
    replaced["write_tokens"] = lambda: os.makedirs("out-bench", exist_ok=True)
    for name, value in replaced.items():
        monkeypatch.setattr(gpu, name, value)

    def call(*named):
        with pytest.raises(SystemExit) as end:
            gpu.main(list(named))
        printed = capsys.readouterr()
        lines = [line.split(" s  ") for line in printed.out.splitlines() if " s  " in line]
        *_, last = (printed.out + printed.err).splitlines()
        return end.value.code, {line[:20].strip(): result for line, result in lines}, last

    return call


def test_a_second_call_goes_on_where_the_first_stopped(call):
    code, lines, last = call()
    assert (code, last) == (1, "no time is left for long: call it again")
    assert list(lines) == ["prints", "fails", "hangs"]
    assert lines["prints"] == "ok; iter 2: loss 3"
    assert lines["fails"] == "failed with exit code 1, see results/cpu/fails.txt"
    assert lines["hangs"] == "did not end within 1 s"
    gpu.BUDGET_S = 200
    code, lines, last = call()
    assert list(lines) == ["long", "fails", "hangs"], "what has failed comes after what is new"
    assert lines["long"] == lines["fails"] == "ok"
    assert (code, last) == (1, "results are in results/cpu, and with metrics and profile in out-bench/cpu.tar.gz")
    code, lines, _ = call("prints")
    assert (code, list(lines)) == (0, ["prints"]), "a part that is named runs again"
    summary = Path("results/cpu/summary.txt").read_text().splitlines()
    assert [line[:20].strip() for line in summary if " s  " in line] == [part.name for part in PARTS]
    assert Path("results/cpu/hangs.txt").read_text().endswith("\na row\n"), "what it had written is kept"


def test_an_unknown_part_is_refused(call, tmp_path):
    code, lines, last = call("prints", "memory-xxl")
    assert (code, lines) == (2, {})
    assert last == "error: PARTS=memory-xxl is not one of prints, fails, hangs, long"
    assert not os.listdir(tmp_path)


def test_the_archive_takes_the_smallest_files_first(call, monkeypatch):
    monkeypatch.setattr(gpu, "ARCHIVE_BYTES", 20_000)
    os.makedirs("out-bench/prints/profile")
    sizes = {"metrics.jsonl": 10, "profile/rank0.json.gz": 3000, "profile/memory.pickle": 20_000, "ckpt.pt": 5}
    for name, size in sizes.items():
        Path("out-bench/prints", name).write_bytes(os.urandom(size))
    call("prints")
    with tarfile.open("out-bench/cpu.tar.gz") as archive:
        names = archive.getnames()
    assert {"results/cpu/prints.txt", "results/cpu/parts.json", "out-bench/prints/metrics.jsonl"} < {*names}
    assert names[-1] == "out-bench/prints/profile/rank0.json.gz"
    shutil.rmtree("results")
    call("long")  # on a bare machine that has the archive
    assert "prints" in Path("results/cpu/summary.txt").read_text()
    assert os.path.getsize("out-bench/cpu.tar.gz") < 20_000


def test_a_process_alone_shards_its_optimizer_and_writes_no_checkpoint(tmp_path):
    arguments = "--dataset=stdlib_char", f"--out_dir={tmp_path}", *SETTINGS, "--max_iters=2", "--always_save_checkpoint=False"
    printed = run("benchmarks/alone.py", os.path.join(ROOT, "train.py"), *arguments).succeeded().stdout
    assert "Using ShardedOptimizer on one rank" in printed
    assert os.path.exists(tmp_path / "report.md")
    assert not os.path.exists(tmp_path / "ckpt.pt")


def test_the_parts_for_several_gpus():
    """One rank per GPU; groups that share the state have replicas, and their weights are compared with plain AdamW's."""
    for gpus in (2, 3, 4, 8):
        parts = {part.name: part for part in gpu.parts(gpus, "card")}
        hybrid = {name: part.ranks for name, part in parts.items() if name.startswith("train-hybrid")}
        expected = {"train-hybrid-1": 2, "train-hybrid-1-plain": 2, "train-hybrid-1-compared": 0}
        if gpus >= 4:
            expected |= {"train-hybrid-2": 4, "train-hybrid-2-plain": 4, "train-hybrid-2-compared": 0}
        assert hybrid == expected
        assert max(part.ranks for part in parts.values()) == gpus
    assert {part.name for part in gpu.parts(1, "card")} <= {*parts} - {*hybrid}
    assert max(part.limit_s for part in parts.values()) < gpu.BUDGET_S / 2, "no part takes the time of a call"


@pytest.mark.slow("all that runs on a GPU, on a CPU", seconds=391)
def test_what_a_gpu_shows_also_runs_on_a_cpu_of_a_machine_whose_name_has_no_address(tmp_path):
    """torchrun itself would wait for the address. Where nobody may change the name, it is that of this machine."""
    named = ["unshare", "--uts", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    named += ["sh", "-c", 'hostname box-without-a-name && exec "$@"', "sh"]
    if subprocess.run([*named, "true"], capture_output=True).returncode:
        named = []
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
    command = [*named, sys.executable, "-m", "benchmarks.gpu"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count(" s  ok") == len(gpu.parts(0, "cpu"))
    assert process.stdout.count("; bit-identical: ") >= 2
