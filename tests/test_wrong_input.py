"""train.py with wrong input, or ranks that differ: one line with what is wrong and the remedy, exit code 2 on all ranks."""

import glob
import math
import os
import re
from functools import partial
from itertools import product

import faults
import numpy as np
import pytest
import torch.distributed as dist
from ranks import run_ranks
from scripts import ROOT, check_mistakes, run, run_for_real, training

from configurator import TRAIN, configure, settings_of
from data.vocabulary import DataError
from model import GPT, GPTConfig
from run import rank_checks
from run.rank_checks import check_combinations, compare_model_and_data, compare_settings

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
    "--init_from=config": "no folder of a GPT-2 or of a run with a ckpt.pt; to resume a run, use --init_from=resume",
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
        ("train.py", "sample_interval=2 cannot write samples", (faults.fails_later, "run.sampling:load_codec", 0, DataError())),
    ],
)
def test_a_mistake_of_one_rank_is_told_once(data, tmp_path, script, message, fault):
    """By rank 0 alone, because all are on one host, while the others are on their way to the next collective."""
    train = training(tmp_path / "out", data, "--sample_interval=2")
    line = train if script == "train.py" else [script, "--device=cpu", "--name="]
    run(*line, ranks=3, before=partial(faults.on_last_rank, *fault), timeout=60).refusal(f"error: rank 2: {message}")


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


REFUSED = {  # more arguments of the last rank, and the line that is printed; DATA is another dataset
    "other settings": (
        ["--backend=gloo", "--param_dtype=bfloat16", "--seed=7"],
        "rank 2: param_dtype is bfloat16, but auto on rank 0; backend is gloo, but auto on rank 0; "
        "dtype is bfloat16, but float32 on rank 0; 1 more differ; start all ranks with the same settings",
    ),
    "another dataset": (["--dataset=DATA"], "rank 2: train.bin is 4000 tokens with checksum "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rank_that_differs_is_named_on_all_ranks(data, other, tmp_path, name):
    arguments, message = REFUSED[name]
    before = partial(faults.on_last_rank, faults.add_arguments, *(text.replace("DATA", str(other)) for text in arguments))
    run(*training(tmp_path / "out", data), ranks=3, before=before).refusal(f"error: {message}")
    assert not (tmp_path / "out").exists()


def differing():
    """What a rank is told if the last one has another source file, another model, and other data."""
    is_last, sources = dist.get_rank() == dist.get_world_size() - 1, rank_checks.sources()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_checks, "sources", lambda: sources | ({"zero/layout.py": "changed"} if is_last else {}))
        with pytest.raises(ValueError, match="; copy the same code to all hosts") as of_code:
            compare_settings({"seed": 7}, "cpu", "float32")
    model = GPT(GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32))
    compare_model_and_data(model, {}, elapsed_s=math.nan)  # of a checkpoint of nanoGPT
    with pytest.raises(ValueError, match="; copy the dataset from one host to the others") as of_data:
        compare_model_and_data(model, {"val.bin": "new"} if is_last else {})
    with pytest.raises(ValueError, match="; give all hosts the same checkpoint or pretrained model") as of_model:
        compare_model_and_data(model.half() if is_last else model, {})
    return [str(told.value) for told in (of_code, of_data, of_model)]


def test_another_source_file_another_model_and_other_data():
    *others, (code, data, model) = run_ranks(differing, 3)
    assert others == [[f"rank 2: {told}" for told in (code, data, model)]] * 2
    assert code.startswith("zero/layout.py is changed, but ")
    assert data.startswith("val.bin is new, but absent on rank 0; ")
    assert model.startswith("transformer.wte.weight is (29, 32) torch.float16, but (29, 32) torch.float32 on rank 0; ")


def printed_commands():
    """Every command in the documents and in the heads of files that starts train.py: (numbers of ranks, arguments)."""
    patterns = "*.md", "docs/*.md", "results/*.md", "*.py", "config/*.py"
    for path in [path for pattern in patterns for path in glob.glob(f"{ROOT}/{pattern}")]:
        with open(path) as file:
            text = re.sub(r"\\+\n[ #]*", "", file.read())
        variables = dict(re.findall(r'^([A-Z]+)="(.*?)"', text, re.MULTILINE))
        for launcher, line in re.findall(r"(torchrun (?!\.\.\.)[^\n#`]*|python )train\.py ([^\n#`]*)", text):
            line = re.sub(r"\$([A-Z]+)", lambda match, known=variables: known[match[1]], line)
            ranks = int((re.search(r"--nproc[_-]per[_-]node=(\d+)", launcher) or ["", 1])[1])
            machines = [int(number) for number in (re.search(r"--nnodes=([\d:]+)", launcher) or ["", "1"])[1].split(":")]
            yield [ranks * number for number in range(machines[0], machines[-1] + 1)], re.split("  | &&", line)[0].split()


def test_the_ranks_of_every_printed_command_can_share_its_batch(capsys):
    found = [command for command in printed_commands() if not {"...", "--help", "[file.py"} & {*command[1]}]
    for sizes, arguments in found:
        settings = configure(settings_of(TRAIN), [f"{ROOT}/{part}" if part[0] != "-" else part for part in arguments])
        for size in sizes:
            check_combinations(settings, size)
    assert {size for sizes, _ in found for size in sizes} >= {1, 2, 4, 8, 16}
    assert len(found) > 25


def test_a_rate_that_would_grow_is_refused_unless_it_does_not_decay():
    settings = settings_of(TRAIN) | {"learning_rate": 1e-5}  # below the default of min_lr
    with pytest.raises(ValueError, match=r"min_lr=6e-05 is above learning_rate=1e-05.*--decay_lr=False"):
        check_combinations(settings, 1)
    check_combinations(settings | {"decay_lr": False}, 1)
    check_combinations(settings | {"min_lr": 1e-5}, 1)


@pytest.mark.parametrize("steps", [1, 5, 7, 40, 240])
def test_the_remedy_keeps_the_sequences_of_an_iteration(steps):
    for batch_size, ranks in product((1, 2, 10, 12, 64), (2, 4, 8, 16, 32, 64)):
        if steps % ranks:
            settings = {**settings_of(TRAIN), "batch_size": batch_size, "gradient_accumulation_steps": steps}
            with pytest.raises(ValueError, match=f"cannot be split over {ranks} ranks; use --") as refused:
                check_combinations(settings, ranks)
            size, micro_steps = map(int, re.findall(r"--[a-z_]+=(\d+)", str(refused.value)))
            check_combinations({**settings, "batch_size": size, "gradient_accumulation_steps": micro_steps}, ranks)
            before = batch_size * steps
            assert size * micro_steps == math.ceil(before / ranks) * ranks
            assert size <= batch_size
            assert ("the same global batch" in str(refused.value)) == (before % ranks == 0)
