"""train.py when the loss or the gradients are not finite: the run ends or skips, and keeps what can be trained."""

import os
import re

import faults
import pytest
from scripts import FEW, SETTINGS, run, train

from zero import checkpoint as ckpt

DIVERGING = [  # the learning rate from iteration 8 on, ranks, flags
    ("1e30", 0, ["--log_interval=4"]),
    ("1e4", 2, ["--dtype=bfloat16", "--checkpoint_format=sharded"]),
    ("1e30", 2, ["--use_zero1=False", "--checkpoint_format=sharded"]),
    ("1e6", 2, ["--zero1_impl=torch", "--dtype=float16"]),
    ("1e38", 2, ["--zero1_impl=torch", "--checkpoint_format=sharded", "--grad_clip=0.0"]),
    ("1e10", 2, ["--dtype=float16", "--async_save=True"]),
    ("1e300", 2, ["--param_dtype=bfloat16", "--checkpoint_format=sharded"]),
    ("1e4", 0, ["--dtype=float16", "--grad_clip=0.0"]),
    ("1e10", 2, ["--shard_gradients=True", "--max_nonfinite=3"]),
    ("1e6", 2, ["--use_zero1=False", "--dtype=bfloat16", "--max_nonfinite=10", "--grad_clip=0.0"]),
]
MORE = pytest.mark.slow("more learning rates and modes", seconds=17)


@pytest.mark.parametrize(
    ("learning_rate", "ranks", "flags"), [*DIVERGING[:2], *(pytest.param(*case, marks=MORE) for case in DIVERGING[2:])]
)
def test_a_run_that_diverges_keeps_its_checkpoint(data, tmp_path, learning_rate, ranks, flags):
    flags = [f"--dataset={data}", f"--out_dir={tmp_path}", FEW, *flags]
    schedule = ["--warmup_iters=8", "--lr_decay_iters=7", f"--min_lr={learning_rate}", "--max_iters=1000"]
    process = run("train.py", *SETTINGS, *schedule, *flags, ranks=ranks)
    assert process.returncode == 1, process.stdout + process.stderr
    assert set(process.returncodes) == {1}, process.stderr
    [message] = [line for line in process.stderr.splitlines() if line.startswith("the run ends at iteration ")]
    assert re.search(r"not finite since iteration \d+: .*(loss of rank \d|gradient norm) is ", message)
    assert "lower --learning_rate" in message
    assert "--init_from=resume goes on from there" in process.stderr
    checkpoint = ckpt.load(ckpt.find(str(tmp_path))[0])
    assert all(tensor.isfinite().all() for tensor in checkpoint["model"].values())
    again = ["--init_from=resume", "--lr_decay_iters=2000", f"--max_iters={checkpoint['iter_num'] + 4}"]
    losses, _, _ = train(tmp_path, data, *flags, *again, ranks=ranks)
    assert max(losses) > checkpoint["iter_num"]
    assert None not in losses.values()


def test_nothing_is_saved_while_updates_are_skipped(data, tmp_path):
    """Weights with a finite loss but gradients that are not finite do not replace weights that can be trained."""
    process = run(
        *("train.py", *SETTINGS, f"--dataset={data}", f"--out_dir={tmp_path}", "--max_iters=5", "--max_nonfinite=10"),
        before=faults.infinite_norm,
    ).succeeded()
    assert "by iteration 4, 1 more update was skipped (5 in a row so far): the gradient norm is inf" in process.stdout
    assert "WARNING: not saved" in process.stdout
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "report.md", "run.json", "run.lock"]
