"""GPT-2; loss.py has its loss. The parameter names are those of nanoGPT, so each program can load the checkpoints of the other.

The architecture is GPT-2 (Radford et al. 2019): pre-norm blocks, learned position embeddings, GELU, and an output head that
shares its weight with the token embedding.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from loss import LossInChunks, MeanLoss
from pretrained import check_gpt2, check_names, check_tied

GPT2_VOCAB_SIZE = 50257  # tokens of the released models, without padding
# sizes of the released models, which have 1024 positions
GPT2_SIZES = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
WRAPPERS = re.compile(r"^(module\.|_orig_mod\.)+")  # prefixes of names in a model that was wrapped or compiled
# these weights are (in, out) in OpenAI's Conv1D and (out, in) in Linear
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


@dataclass
class GPTConfig:
    """Sizes of the model. The defaults are GPT-2 124M, with the vocabulary of 50257 padded up to a multiple of 64."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # True: bias in Linear and LayerNorm layers, like GPT-2; False: a bit better and faster

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} cannot be split over n_head={self.n_head} heads; use a multiple of n_head")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and less than 1")

    @classmethod
    def of(cls, settings: Mapping[str, Any], **others: Any) -> Self:
        """Return the sizes in a program's settings, which have the names of the fields; `others` replace or complete them."""
        return cls(**{field.name: settings[field.name] for field in fields(cls) if field.name in settings} | others)


def check_block_size(block_size: int, longest: int, croppable: bool = True) -> None:
    """Raise ValueError if a model of `longest` positions cannot train on sequences of `block_size` tokens."""
    if not 1 <= block_size <= longest or (block_size < longest and not croppable):
        raise ValueError(f"block_size={block_size} does not fit the model; use --block_size={longest}")


class LayerNorm(nn.LayerNorm):
    """PyTorch's. Autocast on a GPU would copy bfloat16 to float32 before the kernel, which computes in float32 anyway."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.bfloat16 or self.weight.dtype != torch.bfloat16:
            return super().forward(x)
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


class CausalSelfAttention(nn.Module):
    """Multi-head attention. Each position attends to itself and to earlier positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # query, key and value in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        heads = self.c_attn(x).view(batch, time, 3, self.n_head, width // self.n_head)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, n_head, time, width // n_head)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, time, width)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """Feed-forward network with a hidden size of 4 * n_embd, applied to each position separately."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention followed by an MLP. The output of each is added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model. It maps tokens to next-token logits and, if targets are given, to a loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = False  # True: keep only the input of each block, and recompute the rest in backward
        self.loss_chunk = 0  # tokens whose logits exist at a time while the loss is computed; 0: all of them
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # weight tying: one parameter, counted once
        self.mean_loss = MeanLoss()
        self._initialize()

    def _initialize(self) -> None:
        """Initialize as in GPT-2: weights from normal(0, 0.02), biases to zero.

        The 2 * n_layer projections into the residual stream use a standard deviation of 0.02 / sqrt(2 * n_layer).
        """
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * self.config.n_layer))
            elif param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    @property
    def blocks(self) -> list[nn.Module]:
        """The units whose parameters are read together."""
        return list(self.transformer.h.children())

    def num_params(self) -> int:
        """Return the number of parameters without the position embeddings, as in nanoGPT. The tied embedding counts once."""
        return sum(param.numel() for param in self.parameters()) - self.transformer.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Return the FLOPs per token of forward and backward (PaLM, https://arxiv.org/abs/2204.02311, appendix B)."""
        config = self.config
        return 6 * self.num_params() + 12 * config.n_layer * config.n_embd * config.block_size

    def param_groups(self, weight_decay: float, muon: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer, without frozen parameters.

        Weight decay applies to matrices and embeddings. It does not apply to biases and LayerNorm weights.

        Args:
            muon: for `zero.Muon`, entries of the groups that hold the matrices of the blocks. Query, key and value are a matrix
                each. None: for AdamW, with nanoGPT's two groups.
        """
        params = [param for param in self.parameters() if param.requires_grad]
        matrices = {param for param in self.transformer.h.parameters() if muon is not None and param.dim() == 2}
        stacked = {block.attn.c_attn.weight for block in self.transformer.h}
        decay: dict[str, Any] = {"weight_decay": weight_decay}
        groups = [
            {"params": [param for param in params if param.dim() >= 2 and param not in matrices], **decay},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        if muon is not None:
            single = [param for param in params if param in matrices - stacked]
            groups.append({"params": single, **decay, "matrices": 1, **muon})
            groups.append({"params": [param for param in params if param in stacked], **decay, "matrices": 3, **muon})
        return groups

    def forward(
        self, idx: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute next-token logits and, if targets are given, the mean cross-entropy.

        Args:
            idx: tokens, (batch, time) int64, time <= block_size.
            targets: the next token of each position, (batch, time) int64; -1 is ignored.

        Returns:
            With targets: logits (batch, time, vocab_size) and the loss in nats; with `loss_chunk`, None and the loss. Without
            targets: logits of the last position only (batch, 1, vocab_size), and None.
        """
        time = idx.shape[1]
        if time > self.config.block_size:
            raise ValueError(f"a sequence of {time} tokens is longer than block_size={self.config.block_size}")
        positions = torch.arange(time, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False) if self.activation_checkpointing else block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        if self.loss_chunk:
            self._check_head()
            head, needs_grad = self.lm_head.weight, torch.is_grad_enabled()
            return None, LossInChunks.apply(x.flatten(0, 1), head, targets.flatten(), self.loss_chunk, needs_grad)
        logits = self.lm_head(x)
        return logits, self.mean_loss(logits, targets)

    def _check_head(self) -> None:
        """Raise ValueError if the loss in chunks, which reads only the weight of the head, would differ from the head's."""
        head = self.lm_head
        hooks = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
        is_plain = type(head) is nn.Linear and head.bias is None and not hooks and "forward" not in vars(head)
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk={self.loss_chunk} must not be negative")
        if torch._C._are_functorch_transforms_active():
            raise ValueError("loss_chunk has no gradients for torch.func (grad, vmap, ...); use loss_chunk=0")
        if not is_plain:
            raise ValueError("loss_chunk needs an lm_head that is a torch.nn.Linear without bias and hooks; use loss_chunk=0")

    def compile_blocks(self) -> None:
        """Compile each block and the loss separately.

        This compiles faster than the whole model, and parameters keep their names. The head is not compiled, so its weight is
        read from its module.
        """
        for block in self.transformer.h:
            block.compile()
        self.mean_loss.compile()

    def crop_block_size(self, block_size: int) -> None:
        """Remove the embeddings of positions >= `block_size`. Call this before you create the optimizer."""
        if block_size == self.config.block_size:
            return
        check_block_size(block_size, self.config.block_size)
        self.config.block_size = block_size
        weight = self.transformer.wpe.weight
        kept = weight.detach()[:block_size].clone()
        self.transformer.wpe = nn.Embedding.from_pretrained(kept, freeze=not weight.requires_grad)

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], dropout: float = 0.0) -> "GPT":
        """Return the model of a checkpoint that this program or nanoGPT wrote.

        The model may have been wrapped or compiled as a whole when it was saved.

        Raises:
            ValueError: if the weights of the checkpoint do not fit its `model_args`, or its head is not tied to its embedding.
        """
        sizes = checkpoint["model_args"]
        try:
            model = cls(GPTConfig.of(sizes, dropout=dropout))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the checkpoint's model_args {sizes} are not valid model sizes: {error}") from error
        if more := [f"{key}={value}" for key, value in sizes.items() if value and key not in vars(model.config)]:
            raise ValueError(f"the checkpoint's model_args have {more[0]}, which this model does not know")
        weights = {WRAPPERS.sub("", key): tensor for key, tensor in checkpoint["model"].items()}
        weights = {key: tensor for key, tensor in weights.items() if not key.endswith(".attn.bias")}  # old causal masks
        if wrong := [key for key, tensor in weights.items() if not tensor.is_floating_point()]:
            raise ValueError(f"the checkpoint's {wrong[0]} is {weights[wrong[0]].dtype}; weights are floating-point numbers")
        try:
            info = model.load_state_dict(weights, strict=False)
        except RuntimeError as error:  # a line for each tensor of another shape
            _, first, *more = str(error).splitlines()
            what = f"{first.strip()} ({len(more)} more)"
            raise ValueError(f"the checkpoint's weights do not fit its model_args: {what}") from error
        check_names("the checkpoint", info.missing_keys, info.unexpected_keys)
        check_tied("the checkpoint", weights["lm_head.weight"], weights["transformer.wte.weight"])
        return model

    @classmethod
    def from_pretrained(cls, name: str, dropout: float = 0.0) -> "GPT":
        """Return a released GPT-2, a key of `GPT2_SIZES`, or any GPT2LMHeadModel saved in a local directory.

        OpenAI trained with the tanh approximation of GELU. This model uses the exact GELU, like nanoGPT. The difference
        changes the logits of a trained GPT-2 by about 1e-3. The dropout of the original training is not used.

        Raises:
            ValueError: if the name is neither, or the directory has another model or other weights.
            ImportError: if transformers is not installed.
            OSError: if the weights are not on this machine and cannot be downloaded.
        """
        if name not in GPT2_SIZES and not os.path.isfile(os.path.join(name, "config.json")):  # the hub would be asked for it
            raise ValueError(
                f"init_from={name} is none of {', '.join(GPT2_SIZES)}, and no folder of a GPT-2 or of a run with a ckpt.pt; "
                "to resume a run, use --init_from=resume and its --out_dir"
            )
        try:
            from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
        except ImportError as error:
            raise ImportError(f"{name} needs the transformers library ({error}); pip install -e '.[gpt2]'") from error

        prefixes = {WRAPPERS.pattern: ""}
        try:
            check_gpt2(name, GPT2Config.get_config_dict(name)[0], GPT2Config().to_dict(), GenerationConfig().to_dict())
            with torch.device("cpu"):
                source, info = GPT2LMHeadModel.from_pretrained(name, output_loading_info=True, key_mapping=prefixes)
        except (ValueError, OSError):
            raise
        except Exception as error:  # of safetensors, of the hub's checks, of torch
            raise ValueError(f"cannot read the GPT-2 in {name}: {str(error).strip().splitlines()[0]}") from error
        check_names(name, info["missing_keys"], info["unexpected_keys"])
        check_tied(name, source.lm_head.weight, source.transformer.wte.weight)
        sizes = {"block_size": source.config.n_positions, "dropout": dropout, "bias": True}
        model = cls(GPTConfig.of(source.config.to_dict(), **sizes))
        weights = source.state_dict()
        model.load_state_dict({key: weights[key].t() if key.endswith(CONV1D) else weights[key] for key in model.state_dict()})
        return model

    @torch.no_grad()
    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        allowed: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Append sampled tokens to prompts: (batch, time) int64 becomes (batch, time + max_new_tokens). Call `eval()` first.

        Args:
            temperature: the logits are divided by it; close to 0, the most likely token is always chosen.
            top_k: sample from the k most likely tokens only.
            allowed: sample from these tokens only, for a model with a padded vocabulary; ascending. Default: from all.

        Raises ValueError if the logits are nan.
        """
        allowed = range(self.config.vocab_size) if allowed is None else allowed
        limit = allowed[-1] + 1
        hidden = torch.tensor(sorted(set(range(limit)) - set(allowed)), dtype=torch.int64, device=idx.device)
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :limit].float().index_fill(1, hidden, float("-inf"))
            logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
            if logits.isnan().any():
                raise ValueError("the logits of the model are nan or inf; its weights have diverged, use an earlier checkpoint")
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, float("-inf"))
            idx = torch.cat((idx, torch.multinomial(logits.softmax(dim=-1), num_samples=1)), dim=1)
        return idx


@contextmanager
def without_weights() -> Iterator[None]:
    """Put new modules on the meta device in this context, where they have shapes but no values and take no memory."""
    with torch.device("meta"), SkipInitialization():
        yield


class SkipInitialization(TorchFunctionMode):
    """A context in which new modules do not initialize their parameters.

    This is for weights that others will replace, and for modules on the meta device or of fake tensors, where the functions of
    `nn.init` take a second to import what they need.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if getattr(func, "__module__", None) == nn.init.__name__ else func(*args, **kwargs)
