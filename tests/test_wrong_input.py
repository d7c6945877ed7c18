"""train.py with wrong input: one line that says what is wrong, printed once, exit code 2 on all ranks, nothing written."""

import os
import re
from functools import partial

import faults
import numpy as np
import pytest
from scripts import ROOT, check_mistakes, run, run_for_real, training

MISTAKES = {
    "--use_zero=True": "did you mean 'use_zero1'?",
    "--init_from=resume": "ckpt.pt; to resume, check --out_dir",
    "--gradient_accumulation_steps=5": "use --batch_size=1 --gradient_accumulation_steps=10, the same",
    "--out_dir=/dev/null/out": "cannot write to out_dir=/dev/null/out",  # found by rank 0 alone
}
MORE_MISTAKES = {  # one process finds them in the same way
    "--dataset=nowhere": "nowhere/train.bin is missing; --dataset takes ",
    "--n_embd=33": "use a multiple of n_head",
    "--zero1_impl=other": "sharded, torch",
    "--dtype=int8": "float32, bfloat16, float16",
    "--init_from=gtp2": "init_from=gtp2 is none of gpt2, gpt2-medium, ",
    "--init_from=config": "or resume a run with --init_from=resume --out_dir=config",
    "--block_size=2000": "too few for one sequence",
    "--device=cuda:7": "use for example --device=cpu",
    "--backend=mpi": "nccl, gloo",
    "--param_dtype=float8": "param_dtype=float8 is not one of auto, float32, bfloat16",
    "--param_dtype=bfloat16 --dtype=float16": "use --dtype=bfloat16",
    "--weight_decay=-0.1": "weight_decay=-0.1 must not be negative",
    "--max_iters=-1": "max_iters=-1 must not be negative",
    "--optimizer=lion": "optimizer=lion is not one of adamw, muon",
    "--muon_momentum=0.9": "muon_momentum=0.9 needs optimizer=muon",
    f"--seed={2**70}": "seed must be less than 2**63",
    "--max_nonfinite=0": "max_nonfinite=0 must be at least 1",
    "--beta1=2.0": "beta",
}


@pytest.mark.parametrize("argument", MISTAKES)
def test_mistakes_end_at_once_on_all_ranks(data, tmp_path, argument):
    run(*training(tmp_path, data, argument), ranks=2).refusal(MISTAKES[argument])


def test_torchrun_reports_the_line_of_one_rank(tmp_path):
    for split in ("train", "val"):
        tokens = np.zeros(2000, dtype=np.uint16)
        tokens[-1] = 60000  # which the last rank reads
        tokens.tofile(tmp_path / f"{split}.bin")
    process = run_for_real(*training(tmp_path / "out", tmp_path), ranks=2)
    assert process.returncodes == [2, 2], process.stderr
    (error,) = (line for line in process.stderr.splitlines() if line.startswith("error: "))
    assert "holds token 60000, but the model's vocabulary has 50304" in error
    assert process.stderr.splitlines()[-2] == f"  traceback : {error}"
    assert not re.search(rf'File "{ROOT}/[^.]', process.stderr), "no traceback but torchrun's own, which may lie in ROOT/.venv"


@pytest.mark.parametrize(
    ("script", "message", "fault"),
    [
        ("train.py", "n_layer='x' in --n_layer=x", (faults.add_arguments, "--n_layer=x")),
        ("train.py", "device=cuda:99 is not available", (faults.add_arguments, "--device=cuda:99")),
        ("bench.py", "device=cuda:99 is not available", (faults.add_arguments, "--device=cuda:99")),
        ("train.py", "sample_interval=2 cannot write samples", (faults.no_vocabulary,)),
    ],
)
def test_a_mistake_of_one_rank_is_told_once(data, tmp_path, script, message, fault):
    """By rank 0 alone, because all are on one host, while the others are on their way to the next collective."""
    train = training(tmp_path / "out", data, "--sample_interval=2")
    line = train if script == "train.py" else [script, "--device=cpu", "--name="]
    run(*line, ranks=3, before=partial(faults.on_last_rank, *fault), timeout=60).refusal(f"error: {message}")


def test_a_parameter_without_a_gradient(data, tmp_path):
    """DistributedDataParallel refuses it. ShardedDataParallel needs none."""
    line = training(tmp_path, data, "--max_iters=3")
    how = {"ranks": 2, "before": faults.a_parameter_that_no_forward_uses}
    remedy = "freeze it with requires_grad_(False), or use --use_zero1=True --zero1_impl=sharded"
    run(*line, "--use_zero1=False", **how).refusal(f"unused.weight has none (2 in all); {remedy}")
    run(*line, **how).succeeded()


def test_mistakes_of_one_process_have_exit_code_2(data, tmp_path):
    script, *settings = training(tmp_path, data)
    check_mistakes(script, settings, MORE_MISTAKES)
    assert not os.listdir(tmp_path)
