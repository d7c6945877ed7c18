"""model.py: GPT-2's numbers, nanoGPT's names, tying, cropping, sampling, and activation checkpointing bit for bit."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from model import GPT, GPTConfig

TINY = {"block_size": 16, "vocab_size": 40, "n_layer": 2, "n_head": 2, "n_embd": 8}


def tiny(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**TINY, **changes})).eval()


def test_parameters_have_nanogpts_names_in_nanogpts_order():
    block = ["ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight", "ln_2.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"]
    names = ["wte.weight", "wpe.weight", *(f"h.{layer}.{name}" for layer in range(2) for name in block), "ln_f.weight"]
    expected = [f"transformer.{name}" for name in names]
    model = tiny(bias=False)
    assert [name for name, _ in model.named_parameters()] == expected
    assert list(model.state_dict()) == [*expected, "lm_head.weight"], "the head is tied"
    with torch.device("meta"):
        gpt2 = GPT(GPTConfig(vocab_size=50257, bias=True))
    assert sum(param.numel() for param in gpt2.parameters()) == 124_439_808
    assert gpt2.num_params() == 124_439_808 - 1024 * 768


def test_groups_cover_every_trained_parameter_once():
    model = tiny()
    decay, rest = model.param_groups(0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert max(param.dim() for param in rest["params"]) < 2 <= min(param.dim() for param in decay["params"])
    assert {id(p) for p in decay["params"] + rest["params"]} == {id(p) for p in model.parameters()}
    model.transformer.wpe.weight.requires_grad_(False)
    assert len(model.param_groups(0.1)[0]["params"]) == len(decay["params"]) - 1


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
    positions = model.transformer.wpe.weight
    assert (model.config.block_size, positions.shape, positions.requires_grad) == (8, (8, 8), True)
    assert torch.equal(model(tokens)[0], before)
    with pytest.raises(ValueError, match="longer than block_size=8"):
        model(torch.arange(9)[None])
    with pytest.raises(ValueError, match="block_size=9 does not fit the model; use --block_size=8"):
        model.crop_block_size(9)


def test_impossible_sizes_are_refused():
    for sizes, message in (({"n_embd": 9}, "multiple of n_head"), ({"n_layer": 0}, "n_layer=0"), ({"dropout": 1.0}, "dropout")):
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
        with pytest.raises(ValueError, match=r"^.*the checkpoint.*$") as error:  # in one line
            GPT.from_checkpoint({**checkpoint, "model": changed})
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


@pytest.fixture(scope="module")
def a_gpt2(tmp_path_factory):
    """A folder with a GPT-2 of transformers, and its model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("gpt2")
    model = GPT2LMHeadModel(GPT2Config(vocab_size=101, n_positions=32, n_embd=24, n_layer=3, n_head=4)).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)  # away from zero biases and unit norms
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def changed(a_gpt2, tmp_path):
    """A function that copies this folder with other entries in its config.json, and perhaps with other weights."""

    def changed(weights=None, **entries):
        shutil.copytree(a_gpt2[0], tmp_path, dirs_exist_ok=True)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | entries))
        if weights is not None:
            save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return str(tmp_path)

    return changed


def test_from_pretrained_equals_transformers(a_gpt2):
    folder, source = a_gpt2
    model = GPT.from_pretrained(str(folder), dropout=0.1).eval()
    assert model.config == GPTConfig(block_size=32, vocab_size=101, n_layer=3, n_head=4, n_embd=24, dropout=0.1, bias=True)
    tokens = torch.randint(101, (2, 32))
    expected = source(tokens).logits
    logits, _ = model(tokens, tokens)
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-4


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
OLD = {"output_past": True, "gradient_checkpointing": False, "_num_labels": 1, "do_sample": True, "rotary": False}


def test_folders_with_names_and_entries_of_older_versions_are_read(a_gpt2, changed):
    expected = GPT.from_pretrained(str(a_gpt2[0])).state_dict()
    for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
        weights = {f"{prefix}{name}": value for name, value in load_file(a_gpt2[0] / "model.safetensors").items()}
        read = GPT.from_pretrained(changed(weights, **OLD)).state_dict()
        assert all(torch.equal(read[name], expected[name]) for name in expected)


def refused(folder, message):
    with pytest.raises(ValueError, match=message):
        GPT.from_pretrained(folder)


def test_a_gpt2_that_computes_something_else_is_refused(changed):
    for key, value in CHANGES.items():
        refused(changed(**{key: value}), f"has {key}=.* in its config.json, which this model does not compute")
    for kind in ("llama", "gpt_neox"):
        refused(changed(model_type=kind), f"is a model of type {kind}; init_from takes a GPT-2")


def test_folders_that_cannot_be_read_or_have_other_weights_are_refused(a_gpt2, changed):
    for entries in ({"n_positions": 64}, {"n_layer": "three"}):
        refused(changed(**entries), r"cannot read the GPT-2 in /.*: ")
    weights = load_file(a_gpt2[0] / "model.safetensors")
    *others, _ = weights
    refused(changed({**weights, "lm_head.weight": weights["transformer.wte.weight"] + 1}), "lm_head differs from its wte")
    refused(changed({name: weights[name] for name in others}), r"has missing weights .* in all")
    refused(changed({**weights, "more.weight": torch.ones(3)}), r"has unexpected weights \(more.weight, 1 in all\)")
    refused(changed({f"decoder.{name}": value for name, value in weights.items()}), r"has (missing|unexpected) weights")
    path = pathlib.Path(changed(), "model.safetensors")
    path.write_bytes(path.read_bytes()[:5000])
    refused(str(path.parent), r"cannot read the GPT-2 in /.*: ")


def test_checkpointing_gives_the_same_gradients_bit_for_bit():
    """With dropout, whose random numbers are drawn again."""
    found = []
    for checkpointing in (False, True):
        model = tiny(dropout=0.1).train()
        model.activation_checkpointing = checkpointing
        tokens = torch.arange(16)[None]
        model(tokens, tokens)[1].backward()
        found.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *found))
