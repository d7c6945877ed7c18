"""Samples while training: what is written, and that training does not change."""

import shutil
from functools import partial

import faults
import torch
from conftest import write_meta
from scripts import FEW, events_of, run, torch_load, train, training

from run.sampling import TOKENS


def samples(out):
    """The samples in metrics.jsonl, {iter: text}."""
    return {event["iter"]: event["sample/text"] for event in events_of(out) if "sample/text" in event}


def test_samples_change_neither_the_losses_nor_the_weights(data, tmp_path):
    flags = [FEW, "--max_iters=4", "--param_dtype=bfloat16", "--shard_gradients=True"]
    plain = train(tmp_path / "plain", data, *flags, ranks=2)
    sampled = train(tmp_path / "sampled", data, *flags, "--sample_interval=3", ranks=2)
    assert samples(tmp_path / "plain") == {}
    assert list(samples(tmp_path / "sampled")) == [0, 3]
    assert sampled[:2] == plain[:2]
    before, after = (torch_load(tmp_path / name)["model"] for name in ("plain", "sampled"))
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_a_sample_is_text_in_the_vocabulary_on_the_console_and_in_the_log(data, tmp_path):
    """The newline, here the last letter, is the prompt; without it, the first one is."""
    folder, letters = tmp_path / "data", [*(chr(ord("A") + token) for token in range(28)), "\n"]
    shutil.copytree(data, folder)
    write_meta(folder, letters)
    flags = "--max_iters=9", "--sample_interval=9"
    _, _, printed = train(tmp_path, folder, *flags, run=partial(run, before=faults.print_prompts))
    assert printed.count("prompt [[28]]") == 2
    texts = samples(tmp_path)
    assert list(texts) == [0, 9]
    assert texts[0] != texts[9]
    for iteration, text in texts.items():
        assert len(text) == TOKENS
        assert set(text) <= set(letters)
        assert f"sample {iteration}:\n{text}\n---------------\n" in printed


def test_a_vocabulary_that_is_not_available_ends_the_run_at_its_start(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "meta.pkl").unlink()  # now the tokens are GPT-2's
    line = training(tmp_path, tmp_path / "data", "--max_iters=0", "--eval_iters=1")
    without = partial(faults.without_module, "tiktoken")
    run(*line, before=without).succeeded()
    files = [tmp_path / name for name in ("metrics.jsonl", "run.json", "report.md", "ckpt.pt")]
    before = [path.read_bytes() for path in files]
    why = "error: sample_interval=5 cannot write samples: GPT-2's vocabulary is not available"
    run(*line, "--sample_interval=5", before=without, ranks=2).refusal(why, "--sample_interval=0")
    assert [path.read_bytes() for path in files] == before, "the earlier run stays as it was"
