"""run/rank_checks.py: at the start, a rank that differs from the others is named, with the remedy, and all ranks end."""

import glob
import math
import re
from functools import partial
from itertools import product

import faults
import pytest
import torch.distributed as dist
from ranks import run_ranks
from scripts import ROOT, run, training

from configurator import TRAIN, configure, settings_of
from model import GPT, GPTConfig
from run import rank_checks
from run.rank_checks import check_combinations, compare_model_and_data, compare_settings, difference

REFUSED = {  # more arguments of the last rank, and the line that is printed; DATA is another dataset
    "other settings": (
        ["--backend=gloo", "--param_dtype=bfloat16", "--seed=7"],
        "rank 2 has param_dtype=bfloat16, the others param_dtype=auto; rank 2 has backend=gloo, the others backend=auto; "
        "rank 2 has dtype=bfloat16, the others dtype=float32; 1 more differ; start all ranks with the same settings",
    ),
    "another dataset": (["--dataset=DATA"], "rank 2 has train.bin=4000 tokens with checksum "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rank_that_differs_is_named_on_all_ranks(data, other, tmp_path, name):
    arguments, message = REFUSED[name]
    before = partial(faults.on_last_rank, faults.add_arguments, *(text.replace("DATA", str(other)) for text in arguments))
    run(*training(tmp_path / "out", data), ranks=3, before=before).refusal(f"error: {message}")
    assert not (tmp_path / "out").exists()


def differing():
    """What all ranks are told if the last one has another source file, and another model."""
    is_last, sources = dist.get_rank() == dist.get_world_size() - 1, rank_checks.sources()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_checks, "sources", lambda: sources | ({"zero/layout.py": "changed"} if is_last else {}))
        with pytest.raises(ValueError, match="; copy the same code to all hosts") as of_code:
            compare_settings({"seed": 7}, "cpu", "float32")
    model = GPT(GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32))
    with pytest.raises(ValueError, match="; give all hosts the same checkpoint or pretrained model") as of_model:
        compare_model_and_data(model.half() if is_last else model, {})
    return str(of_code.value), str(of_model.value)


def test_another_source_file_and_another_model():
    told, *others = run_ranks(differing, 3)
    assert others == [told] * 2
    assert told[0].startswith("rank 2 has zero/layout.py=changed, the others zero/layout.py=")
    weight = "transformer.wte.weight=(29, 32) torch.float{}"
    assert told[1].startswith(f"rank 2 has {weight.format(16)}, the others {weight.format(32)}; ")


def test_what_the_line_says():
    same, other, without_b = ({"mend it": values} for values in ({"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1}))
    assert difference([same] * 3) is None
    assert difference([same, other]) == "rank 0 has b=2, rank 1 has b=3; mend it", "with two ranks nobody is in the majority"
    assert difference([same, same, other]) == "rank 2 has b=3, the others b=2; mend it"
    assert difference([other] * 8 + [same] * 9) == "rank 0 has b=3, rank 8 has b=2; mend it"
    assert difference([same, without_b, same]) == "rank 1 has b=absent, the others b=2; mend it"
    assert difference([same, {}, same]) == "rank 1 has a=absent, the others a=1; rank 1 has b=absent, the others b=2; mend it"
    many = difference([{"mend it": dict.fromkeys("abcdef", rank == 2)} for rank in range(4)])
    assert many.endswith("rank 2 has c=True, the others c=False; 3 more differ; mend it")


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
