"""run/memory_meter.py: a run says what memory it will need and what it takes, and warns if the two differ."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from forecast.prediction import Workload
from model import GPT, GPTConfig
from run import memory_meter
from run.memory_meter import Memory
from zero.build import build
from zero.flags import Flags

SIZES = GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32)


@pytest.fixture
def check():
    """A check of a single process after two steps with plain AdamW, with the gradients of the second; its log is a list."""
    flags, model = Flags(), GPT(SIZES)
    wrapped, optimizer = build(model, model.param_groups(0.1), flags, lr=0.01)
    workload = Workload(SIZES, batch_size=2, dtype="float32", device_type="cpu")
    log = SimpleNamespace(events=[])
    log.log, log.warn = log.events.append, lambda text: print(f"WARNING: {text}")
    check = Memory(log, wrapped, optimizer, workload, flags, micro_steps=1)
    tokens = torch.zeros((2, 16), dtype=torch.int64)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(tokens, tokens)[1].backward()
        optimizer.step()
    return check


@pytest.mark.parametrize(("factor", "warns"), [(1.0, False), (1.04, False), (1.06, True), (0.94, True)])
def test_a_wrong_prediction_causes_a_warning_with_the_parts(check, capsys, factor, warns):
    check.predicted = {purpose: round(factor * count) for purpose, count in check.predicted.items()}
    check.compare(2)
    line, *warnings = capsys.readouterr().out.splitlines()
    assert line.startswith("memory of tensors: 0.4 MB of parameters, gradients, state and buckets (predicted 0.")
    assert check.log.events[0]["memory/measured_parameters_mb"] == sum(p.nbytes for p in check.model.parameters()) / 1e6
    assert len(warnings) == warns
    if warns:
        taken, predicted = warnings[0].split("; ")
        assert taken == "WARNING: model and optimizer take 0.1 MB of parameters, 0.1 MB of gradients, 0.2 MB of state"
        assert predicted.startswith("predicted were 0.1 MB of parameters, ")


@pytest.mark.parametrize(
    ("factor", "compiled", "workspaces", "warns"),
    [
        (1.0, False, 0, False),
        (1.1, False, 0, True),
        (1.1, False, 10**6, False),  # libraries of a GPU take more than the difference
        (1.1, True, 0, True),
        (0.9, False, 0, True),
        (0.9, True, 0, False),  # compiled blocks keep less
    ],
)
def test_the_peak_is_compared_on_a_gpu(check, capsys, monkeypatch, factor, compiled, workspaces, warns):
    check.device, check.compiled = torch.device("cuda"), compiled
    monkeypatch.setattr(memory_meter, "GPU_WORKSPACES", workspaces)
    monkeypatch.setattr(check, "peak", lambda: round(factor * check.prediction.peak))
    check.compare(2)
    line, *warnings = capsys.readouterr().out.splitlines()
    assert "at the peak (predicted " in line
    assert check.log.events[0]["memory/measured_peak_mb"] == pytest.approx(factor * check.prediction.peak / 1e6, rel=1e-3)
    assert len(warnings) == warns
    assert all(warning.startswith("WARNING: the peak is ") and "activations of " in warning for warning in warnings)


@pytest.mark.parametrize("what", ["activations", "memory"])
def test_a_model_that_cannot_be_predicted_trains_all_the_same(monkeypatch, capsys, request, what):
    fails = mock.Mock(side_effect=RuntimeError("not without memory"))
    monkeypatch.setattr(memory_meter, {"activations": "predicted_activations", "memory": "predicted"}[what], fails)
    check = request.getfixturevalue("check")
    assert capsys.readouterr().out == f"note: {what} cannot be predicted: RuntimeError: not without memory\n"
    check.announce(0)
    check.compare(2)
    assert ("predicted 0.4 MB" in capsys.readouterr().out) == (what == "activations")
    assert check.log.events[-1]["memory/measured_state_mb"] > 0
