"""The loss is in float32 on every device, whatever autocast does there; compiled, it is the same to rounding."""

import json

import pytest
import torch
import torch.nn.functional as F
from scripts import ROOT

from benchmarks.pretended_gpu import run_preloaded
from model import GPT, GPTConfig

SIZES = GPTConfig(block_size=32, vocab_size=61, n_layer=1, n_head=2, n_embd=32)
ON_A_GPU = """
import json
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from forecast.activations import micro_step, predict
from forecast.prediction import Workload
from model import GPT, GPTConfig, SkipInitialization
from benchmarks.pretended_gpu import DEVICE, PretendedGPU

class Inputs(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._log_softmax.default:
            dtypes.append(str(args[0].dtype))
        return function(*args, **(kwargs or {}))

found = {}
for chunk in (0, 1024):
    dtypes, work = [], Workload(GPTConfig(bias=False), 12, "bfloat16", "cuda", loss_chunk=chunk)
    with PretendedGPU(), Inputs():
        with DEVICE, SkipInitialization():
            model = GPT(work.config)
        model.loss_chunk = chunk
        tokens = torch.zeros((12, 1024), dtype=torch.int64, device=DEVICE)
        forward = lambda: model(tokens, tokens)[1]
        live = micro_step(model, forward, torch.autocast("cuda", torch.bfloat16), on_cpu=False)
    found[chunk] = sorted(set(dtypes)), live, predict(work, "float32")
print(json.dumps(found))
"""


def test_it_is_float32_under_autocast_on_a_gpu_and_its_memory_is_predicted():
    """GPT-2 124M, 12 sequences of 1024 tokens. CUDA's autocast leaves cross_entropy in bfloat16."""
    try:
        process = run_preloaded(["-c", ON_A_GPU], cwd=ROOT, capture_output=True)
    except ValueError as error:
        pytest.skip(str(error))
    assert process.returncode == 0, process.stderr
    for dtypes, live, predicted in json.loads(process.stdout).values():
        assert dtypes == ["torch.float32"]
        assert live == pytest.approx(predicted, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_of_another_dtype(dtype):
    model, tokens = GPT(SIZES).to(dtype), torch.zeros((2, 32), dtype=torch.int64)
    logits, loss = model(tokens, tokens)
    assert (logits.dtype, loss.dtype) == (dtype, torch.promote_types(dtype, torch.float32))


@pytest.mark.parametrize("enabled", [False, True], ids=["float32", "autocast"])
def test_compiled_it_is_the_same_and_keeps_the_logits_alone(enabled):
    torch.manual_seed(0)
    model = GPT(SIZES)
    logits = torch.randn(2, 32, 61, dtype=torch.bfloat16 if enabled else torch.float32, requires_grad=True)
    targets = torch.randint(61, (2, 32))
    targets[0, :5] = -1

    def loss_and_gradient():
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), torch.autograd.graph.saved_tensors_hooks(keep, get):
            loss = model.mean_loss(logits, targets)
        return loss, torch.autograd.grad(loss, logits)[0]

    def keep(tensor):
        kept.append(tensor)
        return tensor

    def get(tensor):
        return tensor

    kept = []
    eager, gradient = loss_and_gradient()
    assert torch.equal(eager, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1))
    model.compile_blocks()
    kept.clear()
    loss, compiled_gradient = loss_and_gradient()
    assert (loss.dtype, compiled_gradient.dtype) == (torch.float32, logits.dtype)
    torch.testing.assert_close(loss, eager)
    torch.testing.assert_close(compiled_gradient, gradient)
    assert [tensor.dtype for tensor in kept if tensor.shape == logits.shape] == [logits.dtype]
