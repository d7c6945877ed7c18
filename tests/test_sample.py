"""sample.py, and samples while training: text within the vocabulary at hand; training does not change."""

import shutil
from functools import partial

import faults
import pytest
import torch
from conftest import write_meta
from scripts import FEW, events_of, run, torch_load, train, training

from data.dataset import vocabulary_of
from data.vocabulary import load_meta
from run.sampling import TOKENS


@pytest.fixture
def trained(data, tmp_path):
    """The folder of a run."""
    train(tmp_path, data, "--max_iters=0")
    return tmp_path


def test_sample(data, trained, tmp_path):
    command = [f"--out_dir={tmp_path}", "--start=ADGJ", "--num_samples=2", "--max_new_tokens=30", "--device=cpu"]
    process = run("sample.py", *command).succeeded()
    samples = process.stdout.split("---------------\n")
    assert len(samples) == 3
    for text in samples[:2]:
        assert "ADGJ" in text
        assert set(text.splitlines()[-1]) <= {chr(ord("A") + token) for token in range(29)}
    (tmp_path / "prompt.txt").write_text("BEH", encoding="utf-8-sig")
    prompted = run("sample.py", f"--out_dir={tmp_path}", f"--start=FILE:{tmp_path / 'prompt.txt'}", "--num_samples=1")
    assert "BEH" in prompted.stdout
    whole = (tmp_path / "ckpt.pt").read_bytes()
    (tmp_path / "ckpt.pt").write_bytes(whole[:9000] + bytes([whole[9000] ^ 1]) + whole[9001:])
    assert "ckpt.pt is damaged, or not a checkpoint" in run("sample.py", *command).refusal()
    (tmp_path / "ckpt_prev.pt").write_bytes(whole)
    before = run("sample.py", *command)
    assert before.stdout == process.stdout
    assert "WARNING: " in before.stderr


def test_a_checkpoint_with_nothing_but_the_model(trained, tmp_path):
    """It has neither its dataset, so that its tokens have no texts, nor what a run needs to go on."""
    whole = torch_load(trained)
    stripped = {key: whole[key] for key in ("model", "model_args")}
    wrapped = {f"module.{name}": held for name, held in stripped["model"].items()}
    torch.save({**stripped, "optimizer": None, "model": wrapped}, trained / "ckpt.pt")
    out_dir, dataset = f"--out_dir={trained}", f"--dataset={whole['config']['dataset']}"
    sampled = run("sample.py", out_dir, "--num_samples=1", "--max_new_tokens=9", "--start=3 17")
    assert sampled.stdout.splitlines()[-2].startswith("3 17 ")
    run("evaluate.py", out_dir, dataset).succeeded("evaluation/val_loss")
    run("export.py", out_dir, f"--to={tmp_path}/exported").succeeded("29 tokens without a tokenizer")
    resumed = run("train.py", out_dir, dataset, "--block_size=32", "--init_from=resume")
    resumed.refusal("lacks best_val_loss, iter_num, optimizer, which training needs to go on")


def test_sample_stays_within_the_vocabulary(trained, tmp_path):
    """The model's vocabulary may be padded; it may not be smaller than the one at hand."""
    checkpoint = torch_load(trained)
    config = {**checkpoint["config"], "dataset": str(tmp_path)}
    command = [f"--out_dir={tmp_path}", "--start=A", "--num_samples=1", "--max_new_tokens=300", "--temperature=50.0"]
    for size in (5, 29, 30):
        letters = [chr(ord("A") + token) for token in range(size)]
        write_meta(tmp_path, letters)
        vocabulary = vocabulary_of(load_meta(str(tmp_path)))
        torch.save({**checkpoint, "config": config, "vocabulary": vocabulary}, tmp_path / "ckpt.pt")
        process = run("sample.py", *command)
        if size < 30:
            assert set(process.succeeded().stdout.splitlines()[-2]) == set(letters)
    process.refusal("the model knows 29 tokens, the vocabulary at hand has 30")
    write_meta(tmp_path, "no others")
    run("sample.py", *command).refusal("has another vocabulary")


def samples(out):
    """The samples in metrics.jsonl, {iter: text}."""
    return {event["iter"]: event["sample/text"] for event in events_of(out) if "sample/text" in event}


def test_samples_change_neither_the_losses_nor_the_weights(data, tmp_path):
    flags = [FEW, "--max_iters=4", "--param_dtype=bfloat16", "--shard_gradients=True"]
    plain = train(tmp_path / "plain", data, *flags, ranks=2)
    sampled = train(tmp_path / "sampled", data, *flags, "--sample_interval=3", ranks=2)
    assert (samples(tmp_path / "plain"), list(samples(tmp_path / "sampled"))) == ({}, [0, 3])
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
