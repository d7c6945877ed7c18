"""The programs in examples/ run as they stand there, and with the wheel: the package zero, with a version and types."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from scripts import run
from toy import assert_equal


def test_the_example_resumes_as_if_it_had_not_stopped(tmp_path):
    program = Path(ROOT, "examples", "sharded.py").read_text()
    assert program.count('saved["step"] + 10') == 1
    states = []
    for starts, steps in ((2, 10), (1, 20)):
        folder = tmp_path / f"{starts}"
        folder.mkdir()
        text = program.replace('saved["step"] + 10', f'saved["step"] + {steps}')
        (folder / "sharded.py").write_text(f"import torch; torch.manual_seed(0)\n{text}")
        for _ in range(starts):
            run(str(folder / "sharded.py"), ranks=2, cwd=folder).succeeded()
        states.append(torch.load(folder / "state.pt"))
    assert states[0]["step"] == 20
    assert_equal(*states)


@pytest.mark.slow("pip builds and installs a wheel", seconds=40)
def test_the_wheel_has_the_package_and_its_example_runs(tmp_path):
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "installed")}

    def run(*command):
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 200}
        done = subprocess.run([sys.executable, *map(str, command)], **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    shutil.copytree(os.path.join(ROOT, "zero"), tmp_path / "source" / "zero")  # pip leaves what it builds beside the source
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(os.path.join(ROOT, name), tmp_path / "source")
    run("-m", "pip", "wheel", "./source", "--no-deps", "--no-build-isolation", "-w", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run("-m", "pip", "install", "--no-index", "--no-deps", "--target", "installed", wheel)
    facts = "import zero; from importlib.metadata import version; print(zero.__file__, version('nanogpt-zero1'))"
    path, version = run("-c", facts).split()
    assert path.startswith(str(tmp_path / "installed"))
    assert version == "0.1.0"
    assert (tmp_path / "installed" / "zero" / "py.typed").exists()
    for step in (10, 20):
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        assert run(*launch, os.path.join(ROOT, "examples", "sharded.py")).startswith(f"step {step}: loss ")
    assert torch.load(tmp_path / "state.pt")["step"] == 20
