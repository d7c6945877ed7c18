"""Whether a GPT-2 of others is the model of model.py: its config.json, the names of its weights, its output head."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

# entries of a config.json of transformers' GPT-2, of several years, that change no logits, beside those of generation
WITHOUT_EFFECT = {
    *("_attn_implementation", "_name_or_path", "_num_labels", "architectures", "attn_pdrop", "dtype", "embd_pdrop", "id2label"),
    *("initializer_range", "label2id", "model_type", "n_ctx", "output_past", "problem_type", "resid_pdrop", "return_dict"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    *("task_specific_params", "torch_dtype", "transformers_version"),
}


def check_gpt2(name: str, config: Mapping[str, Any], defaults: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Raise ValueError unless this model computes what a config.json of transformers says.

    `defaults`, `generation`: those of its GPT2Config and GenerationConfig.
    """
    if (kind := config.get("model_type", "gpt2")) != "gpt2":
        raise ValueError(f"{name} is a model of type {kind}; init_from takes a GPT-2")
    width = config.get("n_embd", defaults["n_embd"])
    # the exact GELU and its approximation differ by 1e-3 in the logits
    computed = {"n_inner": (None, 4 * width), "activation_function": ("gelu_new", "gelu", "gelu_pytorch_tanh")}
    sizes = {"n_positions", "vocab_size", "n_layer", "n_head", "n_embd"}
    for entry in config.keys() - WITHOUT_EFFECT - generation.keys() - sizes:
        value, allowed = config[entry], computed.get(entry, (defaults.get(entry),))
        if value not in allowed and (value or entry in defaults):  # an option that is off and unknown is none
            remedy = f"which this model does not compute; it computes {' or '.join(map(repr, allowed))}"
            raise ValueError(f"{name} has {entry}={value!r} in its config.json, {remedy}")


def check_names(where: str, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raise ValueError if weights are missing, or are not those of this model."""
    for what, names in (("missing", sorted(missing)), ("unexpected", sorted(unexpected))):
        if names:
            raise ValueError(
                f"{where} has {what} weights ({', '.join(names[:3])}, {len(names)} in all); it needs the weights of a GPT-2"
            )


def check_tied(where: str, head: torch.Tensor, wte: torch.Tensor) -> None:
    """Raise ValueError unless the output head has the weight of the token embedding."""
    if not head.is_meta and not torch.equal(head.contiguous().view(torch.uint8), wte.contiguous().view(torch.uint8)):
        raise ValueError(f"{where}'s lm_head differs from its wte; only models that share this weight can be read")
