"""sample.py: text from a checkpoint, within the vocabulary at hand."""

import pytest
import torch
from conftest import write_meta
from scripts import run, torch_load, train

from data.dataset import vocabulary_of
from data.vocabulary import load_meta


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
    _, _, printed = train(tmp_path, data, "--max_iters=0")
    assert f"note: out_dir={tmp_path} held another run, which is now in {tmp_path}.before-1; to continue" in printed


def test_a_checkpoint_with_nothing_but_the_model(trained, tmp_path):
    """It has neither its dataset, so that its tokens have no texts, nor what a run needs to go on."""
    whole = torch_load(trained)
    stripped = {key: whole[key] for key in ("model", "model_args")}
    torch.save(
        {**stripped, "optimizer": None, "model": {f"module.{name}": held for name, held in stripped["model"].items()}},
        trained / "ckpt.pt",
    )
    sampled = run("sample.py", f"--out_dir={trained}", "--num_samples=1", "--max_new_tokens=9", "--start=3 17")
    assert sampled.stdout.splitlines()[-2].startswith("3 17 ")
    evaluated = run("evaluate.py", f"--out_dir={trained}", f"--dataset={whole['config']['dataset']}")
    assert "evaluation/val_loss" in evaluated.succeeded().stdout
    exported = run("export.py", f"--out_dir={trained}", f"--to={tmp_path}/exported").succeeded()
    assert "29 tokens without a tokenizer" in exported.stdout
    resumed = run(
        "train.py", f"--out_dir={trained}", f"--dataset={whole['config']['dataset']}", "--block_size=32", "--init_from=resume"
    )
    assert "lacks best_val_loss, iter_num, optimizer, which training needs to go on" in resumed.refusal()


def test_sample_stays_within_the_vocabulary(trained, tmp_path):
    """The model's vocabulary may be padded; it may not be smaller than the one at hand."""
    checkpoint = torch_load(trained)
    config = {**checkpoint["config"], "dataset": str(tmp_path)}
    command = [f"--out_dir={tmp_path}", "--start=A", "--num_samples=1", "--max_new_tokens=300", "--temperature=50.0"]
    for size, code in ((5, 0), (29, 0), (30, 2)):
        letters = [chr(ord("A") + token) for token in range(size)]
        write_meta(tmp_path, letters)
        vocabulary = vocabulary_of(load_meta(str(tmp_path)))
        torch.save({**checkpoint, "config": config, "vocabulary": vocabulary}, tmp_path / "ckpt.pt")
        process = run("sample.py", *command)
        assert process.returncode == code, process.stderr
        if code == 0:
            assert set(process.stdout.splitlines()[-2]) == set(letters)
        else:
            assert "the model knows 29 tokens, the vocabulary at hand has 30" in process.stderr
    write_meta(tmp_path, "no others")
    assert "has another vocabulary" in run("sample.py", *command).refusal()
