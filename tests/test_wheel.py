"""The wheel: the package zero, with a version and types, for an environment that has torch and NumPy only."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT


def top_levels(name, seen):
    """The files and folders of a distribution and of what it requires, by their names in site-packages."""
    seen.add(name)
    distribution = importlib.metadata.distribution(name)
    found = {path.parts[0]: distribution.locate_file(path.parts[0]) for path in distribution.files if path.parts[0] != ".."}
    for requirement in distribution.requires or []:
        required = re.split(r"[^\w.-]", requirement)[0]
        if ";" not in requirement and required not in seen:
            found |= top_levels(required, seen)
    return found


@pytest.mark.slow("pip builds a wheel and an environment", seconds=40)
def test_the_wheel_in_an_environment_of_its_own(tmp_path):
    environment = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}  # without PYTHONPATH, which has this checkout

    def run(*command):
        how = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 200}
        done = subprocess.run([str(part) for part in command], **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = (sys.executable, "-m", "pip")
    shutil.copytree(os.path.join(ROOT, "zero"), tmp_path / "source" / "zero")  # pip leaves what it builds beside the source
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(os.path.join(ROOT, name), tmp_path / "source")
    run(*pip, "wheel", "./source", "--no-deps", "--no-build-isolation", "-w", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "env")
    python, (packages,) = tmp_path / "env/bin/python", (tmp_path / "env/lib").glob("python*/site-packages")
    for name, path in (top_levels("torch", set()) | top_levels("numpy", set())).items():  # torch gathers objects with NumPy
        (packages / name).symlink_to(path)
    run(*pip, "--python", python, "install", "--no-index", wheel)
    facts = "import zero; from importlib.metadata import version; print(zero.__file__, version('nanogpt-zero1'))"
    path, version = run(python, "-c", facts).split()
    assert path.startswith(str(packages))
    assert version == "0.1.0"
    assert (packages / "zero/py.typed").exists()
    for step in (10, 20):
        launch = (python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
        printed = run(*launch, os.path.join(ROOT, "examples", "sharded.py"))
        assert printed.startswith(f"step {step}: loss ")
    assert torch.load(tmp_path / "state.pt")["step"] == 20
