"""model.py: GPT-2's numbers, nanoGPT's names, tying, cropping, sampling, and activation checkpointing bit for bit."""

import json
import shutil
from functools import partial

import faults
import pytest
import torch
from scripts import run, torch_load, train
from toy import assert_equal

from forecast.activations import predict
from forecast.prediction import Workload
from model import GPT, GPT2_SIZES, GPTConfig

TINY = {"block_size": 16, "vocab_size": 40, "n_layer": 2, "n_head": 2, "n_embd": 8}


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **changes})).eval()


def test_parameters_have_nanogpts_names_in_nanogpts_order():
    block = ["ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "ln_2.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    expected = [
        *("transformer.wte.weight", "transformer.wpe.weight"),
        *(f"transformer.h.{layer}.{name}" for layer in range(2) for name in block),
        "transformer.ln_f.weight",
    ]
    model = tiny(bias=False)
    assert [name for name, _ in model.named_parameters()] == expected
    assert list(model.state_dict()) == [*expected, "lm_head.weight"]


def test_gpt2_124m_has_its_124m_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50257, bias=True))
    assert sum(param.numel() for param in model.parameters()) == 124_439_808
    assert model.num_params() == 124_439_808 - 1024 * 768


def test_embedding_is_tied_and_groups_cover_every_parameter_once():
    model = tiny()
    assert model.lm_head.weight is model.transformer.wte.weight
    decay, rest = model.param_groups(0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(param.dim() >= 2 for param in decay["params"])
    assert all(param.dim() < 2 for param in rest["params"])
    assert {id(p) for p in decay["params"] + rest["params"]} == {id(p) for p in model.parameters()}
    model.transformer.wpe.weight.requires_grad_(False)
    assert len(model.param_groups(0.1)[0]["params"]) == len(decay["params"]) - 1


def test_a_position_does_not_see_the_future():
    model = tiny()
    tokens = torch.randint(40, (1, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 10:] = 0
    logits, other = model(tokens, tokens)[0], model(changed, tokens)[0]
    assert torch.allclose(logits[:, :10], other[:, :10], atol=1e-6)
    assert not torch.allclose(logits[:, 10:], other[:, 10:], atol=1e-3)


def test_loss_ignores_minus_one_and_the_last_position_alone_is_the_same():
    model = tiny()
    tokens = torch.arange(16)[None]
    logits, loss = model(tokens, tokens)
    targets = torch.full((1, 16), -1)
    targets[0, 3] = 3
    assert torch.allclose(model(tokens, targets)[1], -logits[0, 3].log_softmax(-1)[3])
    assert torch.allclose(model(tokens)[0], logits[:, -1:], atol=1e-6)
    assert 3.0 < loss < 4.5  # near log(40) = 3.7 before training


def test_crop_block_size():
    model = tiny()
    tokens = torch.arange(8)[None]
    before = model(tokens)[0]
    model.crop_block_size(8)
    assert model.config.block_size == 8
    assert model.transformer.wpe.weight.shape == (8, 8)
    assert model.transformer.wpe.weight.requires_grad
    assert torch.equal(model(tokens)[0], before)
    with pytest.raises(ValueError, match="longer than block_size=8"):
        model(torch.arange(9)[None])
    with pytest.raises(ValueError, match="block_size=9 does not fit the model; use --block_size=8"):
        model.crop_block_size(9)


@pytest.mark.parametrize(
    ("sizes", "message"), [({"n_embd": 9}, "multiple of n_head"), ({"n_layer": 0}, "n_layer=0"), ({"dropout": 1.0}, "dropout")]
)
def test_impossible_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**TINY, **sizes})


def test_generate():
    model = tiny()
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    torch.manual_seed(1)
    sample = model.generate(prompt, 20, temperature=0.8, top_k=5)
    assert sample.shape == (2, 23)
    assert torch.equal(sample[:, :3], prompt)
    torch.manual_seed(1)
    assert torch.equal(model.generate(prompt, 20, temperature=0.8, top_k=5), sample)
    greedy = model.generate(prompt, 4, top_k=1)
    assert torch.equal(greedy[:, 3], model(prompt)[0][:, -1].argmax(-1))
    assert torch.equal(model.generate(prompt, 4, temperature=1e-40), greedy)
    assert set(model.generate(prompt, 40, allowed=[1, 7, 9])[:, 3:].flatten().tolist()) == {1, 7, 9}
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = float("nan")
    with pytest.raises(ValueError, match="logits of the model are nan or inf"):
        model.generate(prompt, 1)


def test_from_checkpoint_takes_the_names_of_a_wrapped_model_and_refuses_other_weights():
    weights = tiny().state_dict()
    checkpoint = {"model_args": {**TINY, "dropout": 0.3, "bias": True}}

    def refusal(changed):
        with pytest.raises(ValueError, match="the checkpoint") as error:
            GPT.from_checkpoint({**checkpoint, "model": changed})
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 300
        return str(error.value)

    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        loaded = GPT.from_checkpoint({**checkpoint, "model": {f"{prefix}{key}": value for key, value in weights.items()}})
        assert loaded.config.dropout == 0.0
        assert all(torch.equal(value, weights[key]) for key, value in loaded.state_dict().items())
    assert "has missing weights" in refusal({f"net.{key}": value for key, value in weights.items()})
    assert "has unexpected weights (more, 1 in all)" in refusal({**weights, "more": torch.ones(3)})
    assert "weights are floating-point numbers" in refusal({name: held.to(torch.int8) for name, held in weights.items()})
    checkpoint["model_args"]["rotary"] = True
    assert "have rotary=True, which this model does not know" in refusal(weights)
    del checkpoint["model_args"]["rotary"]
    checkpoint["model_args"]["n_embd"] = 16
    assert "do not fit its model_args: size mismatch for transformer.wte.weight" in refusal(weights)


def test_from_pretrained_equals_transformers(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    source = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=32, n_embd=24, n_layer=3, n_head=4)).eval()
    with torch.no_grad():
        for param in source.parameters():
            param.add_(torch.randn_like(param) * 0.02)  # away from zero biases and unit norms
    source.save_pretrained(tmp_path)
    model = GPT.from_pretrained(str(tmp_path), dropout=0.1).eval()
    assert model.config == GPTConfig(block_size=32, vocab_size=101, n_layer=3, n_head=4, n_embd=24, dropout=0.1, bias=True)
    tokens = torch.randint(101, (2, 32))
    expected = source(tokens).logits
    logits, _ = model(tokens, tokens)
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def a_gpt2(tmp_path_factory):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=32, n_embd=24, n_layer=3, n_head=4)).save_pretrained(folder)
    return folder


CHANGES = {  # of config.json
    "scale_attn_by_inverse_layer_idx": True,
    "scale_attn_weights": False,
    "activation_function": "relu",
    "layer_norm_epsilon": 1e-3,
    "tie_word_embeddings": False,
    "reorder_and_upcast_attn": True,
    "n_inner": 48,
    "add_cross_attention": True,
    "is_encoder_decoder": True,
    "quantization_config": {"bits": 4},
    "rotary": "an entry that nobody knows",
}
OLD = {
    "output_past": True,
    "gradient_checkpointing": False,
    "_num_labels": 1,
    "do_sample": True,
    "max_length": 50,
    "rotary": False,
}


@pytest.mark.parametrize("entry", CHANGES)
def test_a_gpt2_that_computes_something_else_is_refused(entry, a_gpt2, tmp_path):
    shutil.copytree(a_gpt2, tmp_path, dirs_exist_ok=True)
    config = json.loads((a_gpt2 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, entry: CHANGES[entry]}))
    with pytest.raises(ValueError, match=f"has {entry}=.* in its config.json, which this model does not compute"):
        GPT.from_pretrained(str(tmp_path))


def test_entries_of_older_versions_change_nothing(a_gpt2, tmp_path):
    shutil.copytree(a_gpt2, tmp_path, dirs_exist_ok=True)
    config = json.loads((a_gpt2 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **OLD}))
    expected = GPT.from_pretrained(str(a_gpt2)).state_dict()
    assert all(torch.equal(held, expected[name]) for name, held in GPT.from_pretrained(str(tmp_path)).state_dict().items())


@pytest.mark.parametrize("change", ["size", "head", "cut", "words"])
def test_folders_that_transformers_refuses_or_reads_in_another_way(change, a_gpt2, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(a_gpt2, tmp_path, dirs_exist_ok=True)
    config, path = json.loads((a_gpt2 / "config.json").read_text()), tmp_path / "model.safetensors"
    message = f"cannot read the GPT-2 in {tmp_path}: "
    if change == "head":
        weights = load_file(path)
        save_file({**weights, "lm_head.weight": weights["transformer.wte.weight"] + 1}, path, metadata={"format": "pt"})
        message = "lm_head differs from its wte"
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:5000])
    else:
        config |= {"n_positions": 64} if change == "size" else {"n_layer": "three"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(str(tmp_path))


def test_folders_with_other_weights(a_gpt2, tmp_path):
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    weights = load_file(a_gpt2 / "model.safetensors")
    expected = GPT.from_pretrained(str(a_gpt2)).state_dict()

    def folder_with(changed):
        shutil.copytree(a_gpt2, tmp_path / "changed", dirs_exist_ok=True)
        save_file(changed, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
        return str(tmp_path / "changed")

    for prefix in ("module.", "_orig_mod.", "module._orig_mod."):
        read = GPT.from_pretrained(folder_with({f"{prefix}{name}": value for name, value in weights.items()})).state_dict()
        assert all(torch.equal(read[name], expected[name]) for name in expected)
    *_, last = weights
    with pytest.raises(ValueError, match=r"has missing weights .* in all"):
        GPT.from_pretrained(folder_with({name: value for name, value in weights.items() if name != last}))
    with pytest.raises(ValueError, match=r"has unexpected weights \(more.weight, 1 in all\)"):
        GPT.from_pretrained(folder_with({**weights, "more.weight": torch.ones(3)}))
    with pytest.raises(ValueError, match=r"has (missing|unexpected) weights"):
        GPT.from_pretrained(folder_with({f"decoder.{name}": value for name, value in weights.items()}))
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
    for kind in ("llama", "opt", "gpt_neox", "mistral"):
        other = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, intermediate_size=48))
        other.save_pretrained(tmp_path / kind)
        with pytest.raises(ValueError, match=f"is a model of type {kind}; init_from takes a GPT-2"):
            GPT.from_pretrained(str(tmp_path / kind))


def gradients(checkpointing):
    """Of a small model with dropout, whose random numbers are drawn again."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=29, n_layer=2, n_head=2, n_embd=32, dropout=0.1))
    model.activation_checkpointing = checkpointing
    tokens = torch.arange(16)[None]
    model(tokens, tokens)[1].backward()
    return [param.grad for param in model.parameters()]


def test_gradients_are_the_same_bit_for_bit():
    assert all(map(torch.equal, gradients(checkpointing=False), gradients(checkpointing=True)))


def test_losses_and_weights_of_a_run_are_the_same_bit_for_bit(data, tmp_path):
    flags = "--param_dtype=bfloat16", "--shard_gradients=True", "--max_iters=4", "--eval_interval=4", "--bucket_mb=0.02"
    run_and_print = partial(run, before=faults.print_checkpointed_blocks)
    losses, evaluations, printed = train(tmp_path / "plain", data, *flags, ranks=2, run=run_and_print)
    assert "keeps only its input" not in printed
    again = train(tmp_path / "out", data, "--activation_checkpointing=True", *flags, ranks=2, run=run_and_print)
    assert "keeps only its input" in again[2]
    assert again[:2] == (losses, evaluations)
    assert len(losses) == 5
    plain, other = torch_load(tmp_path / "plain"), torch_load(tmp_path / "out")
    assert plain["iter_num"] == other["iter_num"] == 5
    for part in ("model", "optimizer"):
        assert_equal(other[part], plain[part], part)


def kept_by_a_block(checkpointing):
    """Bytes that one block of GPT-2 124M keeps for backward."""
    sizes = {**GPT2_SIZES["gpt2"], "block_size": 512}
    layers = sizes.pop("n_layer")
    less, more = (
        predict(Workload(GPTConfig(**sizes, n_layer=count), 1, "bfloat16", "cuda", checkpointing), "float32")
        for count in (layers - 1, layers)
    )
    return more.saved - less.saved


def test_the_blocks_of_gpt2_keep_a_quarter_at_most():
    assert 0 < kept_by_a_block(checkpointing=True) <= 0.25 * kept_by_a_block(checkpointing=False)
