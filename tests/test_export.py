"""export.py: a folder with which Transformers computes the logits of the checkpoint, and from which train.py continues."""

import json
import os
import pathlib
import re
from dataclasses import make_dataclass
from functools import partial

import faults
import numpy as np
import pytest
import torch
from conftest import shared_data, write_meta
from scripts import ROOT, check_mistakes, run, torch_load, train

from data.dataset import check_tokenizer, vocabulary_of
from data.vocabulary import DataError, gpt2_encoding, load_codec, load_meta, tokenizer_of
from model import GPT, GPTConfig
from run.checkpoint_folder import find
from zero import checkpoint as ckpt

transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402  # which comes with it

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


RUNS = {  # tokens of the model, whether it has biases, and its characters
    "characters": (65, False, CHARACTERS),
    "biases": (65, True, CHARACTERS),
    "GPT-2's": (50304, False, ""),
    "padding": (65, False, "ABCDEFGH"),
    "syllables": (65, False, ["ha", "ho"]),
    "bfloat16": (65, True, CHARACTERS),
}


def export_each_without_tiktoken():
    faults.without_module("tiktoken")
    faults.run_each(f"{ROOT}/export.py")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """By the name of a run: the exported folder, the model, and what was printed. One process exports all."""
    models, lines = {}, []
    for name, how in RUNS.items():
        folder = tmp_path_factory.mktemp("run")
        model, to = make_run(folder, *how), folder / "new" / "folder"  # whose own folder is not there yet
        if name in ("padding", "syllables"):
            know_the_vocabulary(folder)
        models[to] = model.bfloat16() if name == "bfloat16" else model
        lines.append(f"--out_dir={folder} --to={to}/ --dtype={'bfloat16' if name == 'bfloat16' else 'float32'}")
    process = run("export.py", "", "\n".join(lines), before=export_each_without_tiktoken).succeeded()
    assert process.stderr == ""
    printed = process.stdout.split("Overriding: out_dir = ")[1:]
    return {name: (str(to), models[to], text) for name, to, text in zip(RUNS, models, printed, strict=True)}


def export(folder, **how):
    """Export the checkpoint of a folder, and return the new folder and what was printed."""
    process = run("export.py", f"--out_dir={folder}", f"--to={folder / 'exported'}", **how).succeeded()
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


@pytest.mark.parametrize("name", RUNS)
def test_logits_are_those_of_the_model_and_the_weights_come_back(exported, name):
    folder, model, printed = exported[name]
    check_imported(folder, model)
    held = transformers.AutoModelForCausalLM.from_pretrained(folder).parameters()
    assert {param.dtype for param in held} == {model.lm_head.weight.dtype}
    assert name == "bfloat16" or largest_difference(folder, model) < 1e-4
    assert os.listdir(os.path.dirname(folder)) == ["folder"]
    assert ("zeros as the biases" in printed) == (name not in ("biases", "bfloat16"))
    assert len({path.stat().st_mode for path in pathlib.Path(folder).iterdir()}) == 1, "others may read the weights, too"


def test_characters_have_their_tokenizer(exported):
    folder, _, printed = exported["characters"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXT)["input_ids"] == [CHARACTERS.index(character) for character in TEXT]
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    with pytest.raises(Exception, match=r"Missing \[UNK\]"):
        tokenizer("§")
    assert printed.splitlines()[-1] == "vocabulary: 65 characters with their tokenizer"


def test_gpt2s_vocabulary(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", shared_data("tiktoken_cache"))
    tokens = gpt2_encoding().encode(GPT2S_TEXT, allowed_special="all")
    make_run(tmp_path, 50304, False, characters="")
    folder, printed = export(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer(GPT2S_TEXT)["input_ids"], tokenizer.decode(tokens)) == (tokens, GPT2S_TEXT)
    assert tokenizer.eos_token_id == transformers.GenerationConfig.from_pretrained(folder).eos_token_id == 50256
    assert "vocabulary: 50257 tokens of GPT-2 with their tokenizer; the 47 rows of padding stay" in printed
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    check_tokenizer(str(folder), None, "openwebtext")
    codec = load_codec(None, 50304, str(folder))
    assert (codec.encode(GPT2S_TEXT), codec.decode(tokens), codec.tokens) == (tokens, GPT2S_TEXT, list(range(50258)))


def test_a_gpt2_with_a_tokenizer_of_its_own(tmp_path):
    """Its text comes from this tokenizer. GPT-2's tokens, as many as its own, are refused."""
    folder = tmp_path / "words"
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, activation_function="gelu")).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(50257)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    sampling = f"--init_from={folder}", "--num_samples=1", "--max_new_tokens=9", "--device=cpu"
    assert re.fullmatch(r"w3 w17( w\d+){9}", run("sample.py", *sampling, "--start=w3 w17").succeeded().stdout.splitlines()[-2])

    def refused(message, *line, ranks=0):
        run(*line, ranks=ranks).refusal(f"error: {message}", is_alone=False)  # transformers shows progress, too

    refused("the tokenizer has no tokens for this text", "sample.py", *sampling, "--start=to be")
    for split in ("train", "val"):
        np.arange(2000, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    differs = f"dataset {tmp_path} has other tokens than the tokenizer in {folder}; "
    flags = f"--init_from={folder}", f"--dataset={tmp_path}", "--device=cpu"
    refused(differs, "evaluate.py", *flags, ranks=2)
    refused(differs, "train.py", *flags, "--block_size=8", f"--out_dir={tmp_path / 'out'}")
    write_meta(tmp_path, [f"w{token}" for token in range(9)])
    check_tokenizer(str(folder), load_meta(str(tmp_path)), str(tmp_path))
    write_meta(tmp_path, "ab")
    with pytest.raises(DataError, match="has other tokens than the tokenizer in"):
        check_tokenizer(str(folder), load_meta(str(tmp_path)), str(tmp_path))
    (folder / "tokenizer.json").write_text("{}")
    refused(f"cannot read the tokenizer in {folder} (", "sample.py", *sampling)
    (folder / "tokenizer.json").unlink()
    assert tokenizer_of(str(folder)) is None, "its settings alone are no tokenizer"


def test_padding_is_not_generated(exported):
    folder, _, printed = exported["padding"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs.generation_config.update(do_sample=True, temperature=1000.0, top_k=0, max_new_tokens=8, eos_token_id=None)
    tokens = theirs.generate(torch.zeros((32, 16), dtype=torch.int64))[:, 16:]  # more or less independent of the weights
    assert set(tokens.flatten().tolist()) == set(range(8))
    assert "the 57 rows of padding stay, and generate() does not choose them" in printed


def test_without_a_tokenizer(exported):
    """Of syllables, or numbers without texts; that of GPT-2 is missing without a network."""
    gpt2s = "50257 tokens of GPT-2 without the tokenizer, which tiktoken could not get ("
    for name, vocabulary in (("syllables", "2 tokens without a tokenizer"), ("GPT-2's", gpt2s)):
        folder, _, printed = exported[name]
        assert f"vocabulary: {vocabulary}" in printed
        assert sorted(os.listdir(folder)) == ["config.json", "generation_config.json", "model.safetensors"]


def test_a_checkpoint_goes_through_file_by_file(data, tmp_path):
    """And train.py continues with the losses of the run, although its model has no biases, and the exported one has."""
    limit = 100_000
    settings = ["--dropout=0.0", "--n_embd=64", "--n_layer=4", "--always_save_checkpoint=False"]
    _, before, _ = train(tmp_path, data, *settings, ranks=2)
    exported, _ = export(tmp_path, before=partial(faults.small_files, limit))
    checkpoint = ckpt.load(find(str(tmp_path), best=True)[0])
    model = GPT.from_checkpoint(checkpoint).eval()
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 5
    assert largest_difference(exported, model) < 1e-4
    check_imported(exported, model)
    _, after, _ = train(tmp_path / "again", data, *settings, f"--init_from={exported}", "--max_iters=0")
    assert after[0] == pytest.approx(before[checkpoint["iter_num"]], abs=1e-6)
    train(tmp_path / "cropped", data, *settings, f"--init_from={exported}", "--block_size=8", "--max_iters=0")
    assert torch_load(tmp_path / "cropped")["model_args"]["block_size"] == 8


def test_refusals(tmp_path):
    make_run(tmp_path, 65, False)
    for name in ("full", "other", "untied", "rotary", "gone"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    make_run(tmp_path / "gone", 65, False, characters="")
    checkpoint = torch_load(tmp_path)
    untied = {**checkpoint["model"], "lm_head.weight": checkpoint["model"]["lm_head.weight"] + 1.0}
    torch.save({**checkpoint, "vocabulary": "65 tokens with checksum 01234567"}, tmp_path / "other" / "ckpt.pt")
    torch.save({**checkpoint, "model": untied}, tmp_path / "untied" / "ckpt.pt")
    checkpoint["model_args"]["positions"] = "rotary"
    torch.save(checkpoint, tmp_path / "rotary" / "ckpt.pt")
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
        new: f"cannot write {tmp_path / 'new'}: ",  # the disk is full
    }
    before = sorted(os.listdir(tmp_path))
    check_mistakes("export.py", [f"--out_dir={tmp_path}"], mistakes, limit=10_000)
    without_library = partial(faults.without_module, "transformers")
    run("export.py", f"--out_dir={tmp_path}", new, before=without_library).refusal("pip install -e '.[gpt2]'")
    rotary = run("export.py", f"--out_dir={tmp_path / 'rotary'}", new, before=models_with_an_option)
    rotary.refusal("GPT2LMHeadModel has no positions=rotary")
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
    said = run("export.py", f"--out_dir={tmp_path}", folders, cwd=tmp_path / "working", before=each).succeeded().stderr
    assert [said.count(text) for text in ("WARNING: ", "ckpt_prev.pt, the previous checkpoint", "exit code")] == [3, 3, 0]
    assert {path.name for path in tmp_path.iterdir()} == before | {"new"}
    for name in ("working", "empty", "new"):
        assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).config.n_layer == 3
