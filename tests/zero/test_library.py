"""zero/ in other programs: what the package contains, and the program in docs/sharding.md, which trains, saves and resumes."""

import glob
import os
import re
import tomllib

import torch
from conftest import ROOT
from scripts import run

from zero.checkpoint.state import leaves


def test_the_package_has_all_of_zero_and_nothing_else():
    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]
    folders = {os.path.dirname(path) for path in glob.glob("zero/**/*.py", root_dir=ROOT, recursive=True)}
    assert sorted(packages) == sorted(folder.replace("/", ".") for folder in folders)


def test_the_program_in_the_documentation_resumes_as_if_it_had_not_stopped(tmp_path):
    with open(os.path.join(ROOT, "docs", "sharding.md")) as file:
        (program,) = re.findall(r"^```python\n(import os\n.*?)^```$", file.read(), re.MULTILINE | re.DOTALL)
    assert program.count("\n") <= 30
    assert program.count('saved["step"] + 10') == 1
    states = []
    for starts, steps in ((2, 10), (1, 20)):
        folder = tmp_path / f"{starts}"
        folder.mkdir()
        text = program.replace('saved["step"] + 10', f'saved["step"] + {steps}')
        (folder / "sharded.py").write_text(f"import torch; torch.manual_seed(0)\n{text}")
        for start in range(1, starts + 1):
            run(str(folder / "sharded.py"), ranks=2, cwd=folder).succeeded()
            state = leaves(torch.load(folder / "state.pt"))
            assert state["step"] == start * steps
            states.append(state)
    half, resumed, whole = states
    assert resumed.keys() == whole.keys()
    tensors = [name for name, value in whole.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 4 + 4 * 3  # weights; two moments and a counter of each
    for name in tensors:
        assert torch.equal(resumed[name], whole[name]), name
        assert not torch.equal(half[name], whole[name]), name
