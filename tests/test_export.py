"""export.py: a folder with which Transformers computes the logits of the checkpoint, and from which train.py continues."""

import json
import os
from dataclasses import make_dataclass
from functools import partial

import faults
import pytest
import torch
from conftest import shared_data, write_meta
from scripts import ROOT, check_mistakes, run, run_for_real, torch_load, train

from data.dataset import vocabulary_of
from data.vocabulary import gpt2_encoding, load_meta
from model import GPT, GPTConfig
from zero import checkpoint as ckpt

transformers = pytest.importorskip("transformers")
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # Shakespeare's 65
TEXT = "O, wilt thou leave me so unsatisfied?\n\n  'Tis 3: Farewell!\n"
GPT2S_TEXT = f"{TEXT}def größe(π):\treturn 1234567 — 日本語 🙂'll  <|endoftext|>It's   over\n"


def know_the_vocabulary(folder):
    """As our own checkpoints do; then the model may have more tokens."""
    torch.save({**torch_load(folder), "vocabulary": vocabulary_of(load_meta(str(folder)))}, folder / "ckpt.pt")


def models_with_an_option():
    """Give the models an option that GPT-2 does not have: the weights could fit and mean something else."""
    import model

    model.GPTConfig = make_dataclass("GPTConfig", [("positions", str, "learned")], bases=(model.GPTConfig,))


@pytest.fixture
def gpt2s_tokens(monkeypatch):
    """GPT-2's tokens of GPT2S_TEXT."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", shared_data("tiktoken_cache"))
    return gpt2_encoding().encode(GPT2S_TEXT, allowed_special="all")


def make_run(folder, vocab_size, bias, characters=CHARACTERS):
    """Write a checkpoint as nanoGPT would, beside a dataset of characters, or of GPT-2's tokens if there are none.

    With biases, the names are those of a compiled model, and there are the causal masks of old checkpoints.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=32, vocab_size=vocab_size, n_layer=3, n_head=4, n_embd=24, dropout=0.1, bias=bias))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)  # away from zero biases and unit norms
    if characters:
        write_meta(folder, characters)
    values = {"model_args": vars(model.config), "iter_num": 7, "best_val_loss": 1.5, "config": {"dataset": str(folder)}}
    optimizer = torch.optim.AdamW(model.param_groups(0.1)).state_dict()
    weights = model.state_dict()
    if bias:
        weights = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
        weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    torch.save({"model": weights, "optimizer": optimizer, **values}, folder / "ckpt.pt")
    return model.eval()


def export(folder, *arguments, **how):
    """Export the checkpoint of a folder, and return the new folder and what was printed."""
    process = run("export.py", f"--out_dir={folder}", f"--to={folder / 'exported'}", *arguments, **how).succeeded()
    return str(folder / "exported"), process.stdout


def largest_difference(exported, model):
    """Of the logits of Transformers to those of a model."""
    tokens = torch.randint(model.config.vocab_size, (2, model.config.block_size))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    logits, _ = model(tokens, tokens)
    assert logits.std() > 0.1
    return (theirs(tokens).logits - logits).abs().max()


def check_imported(exported, model):
    """The weights come back bit by bit, with zeros as the biases that the model does not have."""
    ours, back = model.state_dict(), GPT.from_pretrained(exported).state_dict()
    assert all(torch.equal(back[name], weight) for name, weight in ours.items())
    assert all(name.endswith("bias") and not back[name].any() for name in back.keys() - ours.keys())


def generated(exported, tokens):
    """256 random tokens, more or less independent of the weights."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    theirs.generation_config.update(do_sample=True, temperature=1000.0, top_k=0, max_new_tokens=8, eos_token_id=None)
    return theirs.generate(torch.tensor([tokens[:16]] * 32))[:, 16:]


@pytest.mark.parametrize("bias", [False, True])
def test_characters(tmp_path, bias):
    model = make_run(tmp_path, 65, bias)
    exported, printed = export(tmp_path)
    assert largest_difference(exported, model) < 1e-4
    check_imported(exported, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer(TEXT)["input_ids"] == [CHARACTERS.index(character) for character in TEXT]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    with pytest.raises(Exception, match=r"Missing \[UNK\]"):
        tokenizer("§")
    assert printed.splitlines()[-1] == "vocabulary: 65 characters with their tokenizer"
    assert len({path.stat().st_mode for path in (tmp_path / "exported").iterdir()}) == 1, "others may read the weights, too"
    assert ("zeros as the biases" in printed) != bias


@pytest.mark.parametrize("bias", [False, True])
def test_gpt2s_vocabulary(tmp_path, gpt2s_tokens, bias):
    model = make_run(tmp_path, 50304, bias, characters="")
    exported, printed = export(tmp_path)
    assert largest_difference(exported, model) < 1e-4
    check_imported(exported, model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    assert tokenizer(GPT2S_TEXT)["input_ids"] == gpt2s_tokens
    assert tokenizer.decode(gpt2s_tokens) == GPT2S_TEXT
    assert tokenizer.eos_token_id == transformers.GenerationConfig.from_pretrained(exported).eos_token_id == 50256
    assert "vocabulary: 50257 tokens of GPT-2 with their tokenizer; the 47 rows of padding stay" in printed


def test_padding_is_not_generated(tmp_path):
    model = make_run(tmp_path, 65, False, characters="ABCDEFGH")
    know_the_vocabulary(tmp_path)
    exported, printed = export(tmp_path)
    assert largest_difference(exported, model) < 1e-4
    assert set(generated(exported, [0] * 16).flatten().tolist()) == set(range(8))
    assert "the 57 rows of padding stay, and generate() does not choose them" in printed


def test_bfloat16(tmp_path):
    """As a user does it, into a folder whose own one is not there yet."""
    model = make_run(tmp_path, 65, True)
    exported = str(tmp_path / "new" / "folder")
    process = run_for_real("export.py", f"--out_dir={tmp_path}", f"--to={exported}/", "--dtype=bfloat16")
    assert (process.returncode, process.stderr) == (0, "")
    assert os.listdir(tmp_path / "new") == ["folder"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported)
    assert {param.dtype for param in theirs.parameters()} == {torch.bfloat16}
    check_imported(exported, model.bfloat16())


def test_a_vocabulary_of_other_tokens(tmp_path):
    """Such as syllables, or numbers without texts."""
    make_run(tmp_path, 65, False, characters=["ha", "ho"])
    know_the_vocabulary(tmp_path)
    exported, printed = export(tmp_path)
    assert "vocabulary: 2 tokens without a tokenizer" in printed
    assert sorted(os.listdir(exported)) == ["config.json", "generation_config.json", "model.safetensors"]


def test_a_sharded_checkpoint_goes_through_piece_by_piece(data, tmp_path):
    """And train.py continues with the losses of the run, although its model has no biases, and the exported one has."""
    biggest, limit = 4 * 192 * 64, 100_000
    settings = ["--dropout=0.0", "--n_embd=64", "--n_layer=4", "--always_save_checkpoint=False"]
    _, before, _ = train(tmp_path, data, *settings, "--checkpoint_format=sharded", ranks=2)
    exported, printed = export(tmp_path, before=partial(faults.small_files, limit))
    checkpoint = ckpt.load(str(tmp_path / "ckpt.pt"))
    model = GPT.from_checkpoint(checkpoint).eval()
    in_memory = [int(line.split()[-1]) for line in printed.splitlines() if line.startswith("bytes of weights in memory")]
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert len(in_memory) == len(set(index["weight_map"].values())) > 5
    assert max(in_memory) <= limit + biggest < model.num_params()  # of 4 bytes each
    assert largest_difference(exported, model) < 1e-4
    check_imported(exported, model)
    _, after, _ = train(tmp_path / "again", data, *settings, f"--init_from={exported}", "--max_iters=0")
    assert after[0] == pytest.approx(before[checkpoint["iter_num"]], abs=1e-6)


def test_refusals(tmp_path):
    make_run(tmp_path, 65, False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "other").mkdir()
    checkpoint = torch_load(tmp_path)
    torch.save({**checkpoint, "vocabulary": "65 tokens with checksum 01234567"}, tmp_path / "other" / "ckpt.pt")
    (tmp_path / "untied").mkdir()
    checkpoint["model"]["lm_head.weight"] = checkpoint["model"]["lm_head.weight"] + 1.0
    torch.save(checkpoint, tmp_path / "untied" / "ckpt.pt")
    (tmp_path / "rotary").mkdir()
    checkpoint = torch_load(tmp_path)
    checkpoint["model_args"]["positions"] = "rotary"
    torch.save(checkpoint, tmp_path / "rotary" / "ckpt.pt")
    (tmp_path / "gone").mkdir()
    make_run(tmp_path / "gone", 65, False, characters="")
    new = f"--to={tmp_path / 'new'}"
    mistakes = {
        f"--out_dir={tmp_path}": "--to= is neither a new nor an empty folder; name one to write, as in --to=out-exported",
        f"--to={tmp_path / 'full'}": "full is neither a new nor an empty folder",
        f"--to={tmp_path / 'full' / 'file'}": "file is neither a new nor an empty folder",
        f"--to={tmp_path / 'full' / 'file' / 'new'}": f"cannot write {tmp_path / 'full' / 'file' / 'new'}: ",
        f"{new} --out_dir={tmp_path / 'full'}": "full/ckpt.pt; give the --out_dir of a run",
        f"{new} --out_dir={tmp_path / 'other'}": "than the checkpoint (65 tokens with checksum 01234567)",
        f"{new} --out_dir={tmp_path / 'untied'}": "the checkpoint's lm_head differs from its wte",
        f"{new} --out_dir={tmp_path / 'gone'}": "the model knows 65 tokens, GPT-2 50257: dataset "
        f"{tmp_path / 'gone'} lacks its meta.pkl",
        f"{new} --dtype=float16": "dtype=float16 is not one of float32, bfloat16",
    }
    before = sorted(os.listdir(tmp_path))
    check_mistakes("export.py", [f"--out_dir={tmp_path}"], mistakes)
    for out_dir, how, message in (
        (tmp_path, {"limit": 10_000}, f"cannot write {tmp_path / 'new'}: "),
        (tmp_path, {"before": partial(faults.without_module, "transformers")}, "pip install -e '.[gpt2]'"),
        (tmp_path / "rotary", {"before": models_with_an_option}, "GPT2LMHeadModel has no positions=rotary"),
    ):
        assert message in run("export.py", f"--out_dir={out_dir}", new, **how).refusal()
    assert sorted(os.listdir(tmp_path)) == before


def test_a_link_or_the_working_folder_gets_the_files_and_the_previous_checkpoint_stands_in(tmp_path):
    make_run(tmp_path, 65, False)
    os.rename(tmp_path / "ckpt.pt", tmp_path / "ckpt_prev.pt")
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    for name in ("working", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "to_empty").symlink_to("empty")
    (tmp_path / "to_new").symlink_to("new")
    before = {path.name for path in tmp_path.iterdir()}
    folders = "\n".join(f"--to={path}" for path in (".", tmp_path / "to_empty", tmp_path / "to_new"))
    each = partial(faults.run_each, f"{ROOT}/export.py")
    process = run("export.py", f"--out_dir={tmp_path}", folders, cwd=tmp_path / "working", before=each).succeeded()
    assert process.stderr.count("WARNING: ") == process.stderr.count("ckpt_prev.pt, the previous checkpoint") == 3
    assert "exit code" not in process.stderr
    assert {path.name for path in tmp_path.iterdir()} == before | {"new"}
    for name in ("working", "empty", "new"):
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).config.n_layer == 3


def test_without_a_network_only_the_tokenizer_of_gpt2_is_missing(tmp_path):
    model = make_run(tmp_path, 50304, False, characters="")
    exported, printed = export(tmp_path, before=partial(faults.without_module, "tiktoken"))
    assert "vocabulary: 50257 tokens of GPT-2 without the tokenizer, which tiktoken could not get (" in printed
    check_imported(exported, model)
    assert "vocab.json" not in os.listdir(exported)
