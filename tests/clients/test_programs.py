"""Programs of other packages train, save and resume with a ShardedOptimizer as without one."""

import importlib.util
import json

import pytest
from scripts import run, run_for_real

HALF = 4  # steps
PACKAGES = {"trainer": "accelerate", "schedule_free": "schedulefree", "lion": "lion_pytorch", "lora": "peft"}
PACKAGES |= {name: name for name in ("accelerate", "lightning", "ignite")}


def losses(program, mode, folder, first, steps):
    process = run("tests/clients/programs.py", program, mode, str(folder), str(first), str(steps), ranks=2).succeeded()
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow("six programs start six ranks each and import large packages", seconds=100)
@pytest.mark.parametrize(("program", "package"), PACKAGES.items())
def test_a_program_trains_saves_and_resumes(program, package, tmp_path):
    for name in {package, "transformers"}:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[clients]'")
    for mode in ("plain", "sharded"):
        (tmp_path / mode).mkdir()
    expected = losses(program, "plain", tmp_path / "plain", 0, 2 * HALF)
    first, second = (losses(program, "sharded", tmp_path / "sharded", begin, HALF) for begin in (0, HALF))
    assert len(set(expected)) > HALF, "it trains"
    assert first[:HALF] + second == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow("imports a large package on two ranks", seconds=30)
def test_deepspeed_all_reduces_and_gathers(monkeypatch):
    """So it sends 3P (N-1)/N, as docs/accounting.md says."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: pip install deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    process = run_for_real("tests/clients/deepspeed_bytes.py", ranks=2).succeeded()
    found = json.loads(process.stdout.splitlines()[-1])
    assert found == {"allreduce_": 1.0, "_allgather_base_": 1.0, "masters": 0.5}
