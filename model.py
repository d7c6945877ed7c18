"""GPT-2 in one file, with nanoGPT's parameter names, so that checkpoints pass between the two.

The architecture is GPT-2's (Radford et al. 2019): pre-norm blocks, learned positions, GELU, input embedding tied to the
output head. Weights come from a seed, from a checkpoint (`load_state_dict`) or from a GPT-2 release (`from_pretrained`).
"""

import math
import os
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    """Sizes of the model; the defaults are GPT-2 124M, its vocabulary of 50257 padded up to a multiple of 64."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in Linear and LayerNorm, as GPT-2 has it; False is a little better and faster

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} cannot be split over n_head={self.n_head} heads; use a multiple of n_head")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and less than 1")


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # query, key and value at once
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
    """Four times wider in the middle, position by position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model: tokens in, next-token logits (and the loss, given targets) out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied: one parameter, which counts once
        self._initialize()

    def _initialize(self) -> None:
        """GPT-2's: normal(0, 0.02), zero biases, and the 2 * n_layer projections into the residual stream scaled down."""
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif name.endswith("c_proj.weight"):
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * self.config.n_layer))
            elif param.dim() == 2:
                nn.init.normal_(param, std=0.02)

    def num_params(self) -> int:
        """Parameters without the position embeddings, as nanoGPT counts them; the tied embedding counts, once."""
        return sum(param.numel() for param in self.parameters()) - self.transformer.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Floating-point operations per token, forward and backward (PaLM, https://arxiv.org/abs/2204.02311, app. B)."""
        config = self.config
        return 6 * self.num_params() + 12 * config.n_layer * config.n_embd * config.block_size

    def param_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: matrices and embeddings decay; biases and norms do not; frozen ones are out."""
        params = [param for param in self.parameters() if param.requires_grad]
        return [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": weight_decay},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Next-token logits and, with targets, the mean cross-entropy.

        Args:
            idx: (batch, time) int64 tokens, time <= block_size.
            targets: (batch, time) int64, the token that follows each; -1 is not counted.

        Returns:
            Logits (batch, time, vocab_size) and the loss in nats; without targets (batch, 1, vocab_size), of the last
            position only, and None.
        """
        time = idx.shape[1]
        if time > self.config.block_size:
            raise ValueError(f"a sequence of {time} tokens is longer than block_size={self.config.block_size}")
        positions = torch.arange(time, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, -1:]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def compile_blocks(self) -> None:
        """Compile the model block by block: that is short to compile, and the parameters keep their names."""
        for block in self.transformer.h:
            block.compile()

    def crop_block_size(self, block_size: int) -> None:
        """Forget the positions from `block_size` on. Call it before an optimizer takes the parameters."""
        if block_size == self.config.block_size:
            return
        if not 1 <= block_size < self.config.block_size:
            raise ValueError(f"block_size={block_size} must be between 1 and the model's {self.config.block_size}")
        self.config.block_size = block_size
        self.transformer.wpe = nn.Embedding.from_pretrained(
            self.transformer.wpe.weight.detach()[:block_size].clone(), freeze=False
        )

    @classmethod
    def from_checkpoint(cls, checkpoint: dict[str, Any], dropout: float = 0.0) -> "GPT":
        """The model of a checkpoint of ours or nanoGPT's, which may come from a `torch.compile`d model.

        Raises:
            ValueError: if its weights do not fit its `model_args`.
        """
        names = {field.name for field in fields(GPTConfig)}
        sizes = {key: value for key, value in checkpoint["model_args"].items() if key in names}
        try:
            model = cls(GPTConfig(**{**sizes, "dropout": dropout}))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"the checkpoint's model_args {sizes} are no sizes of a model: {error}") from error
        weights = {key.removeprefix("_orig_mod."): tensor for key, tensor in checkpoint["model"].items()}
        weights = {key: tensor for key, tensor in weights.items() if not key.endswith(".attn.bias")}  # old causal masks
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:  # torch's message lists the offending names, a line each
            raise ValueError(f"the checkpoint's weights do not fit its model_args: {error}") from error
        return model

    @classmethod
    def from_pretrained(cls, name: str, dropout: float = 0.0) -> "GPT":
        """A released GPT-2, or any GPT2LMHeadModel saved in a local directory.

        OpenAI trained with the tanh approximation of GELU; this model, like nanoGPT's, has the exact one, which moves the
        logits of a trained GPT-2 by about 1e-3.

        Args:
            name: 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or the path of a directory.
            dropout: of the new model, whatever it was trained with.

        Raises:
            ImportError: without transformers.
            OSError: if the weights are neither on this machine nor to be downloaded.
            ValueError: if the name is neither that of a GPT-2 nor a directory.
        """
        if not (name.startswith("gpt2") or os.path.isdir(name)):
            raise ValueError(f"init_from={name} is neither scratch, resume, a gpt2 name nor a folder that holds a GPT-2")
        try:
            from transformers import GPT2LMHeadModel
        except ImportError as error:
            raise ImportError(f"{name} is read with transformers ({error}); pip install -e '.[gpt2]'") from error

        source = GPT2LMHeadModel.from_pretrained(name)
        config = GPTConfig(
            block_size=source.config.n_positions,
            vocab_size=source.config.vocab_size,
            n_layer=source.config.n_layer,
            n_head=source.config.n_head,
            n_embd=source.config.n_embd,
            dropout=dropout,
            bias=True,
        )
        model = cls(config)
        weights = source.state_dict()
        # OpenAI's Conv1D keeps its weight as (in, out), Linear as (out, in)
        conv1d = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
        model.load_state_dict({key: weights[key].t() if key.endswith(conv1d) else weights[key] for key in model.state_dict()})
        return model

    @torch.no_grad()
    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        vocab_size: int | None = None,
    ) -> torch.Tensor:
        """Continue `idx`, (batch, time) int64, by `max_new_tokens` sampled tokens; call `eval()` first.

        Args:
            temperature: divides the logits; towards 0 the likeliest token always wins.
            top_k: sample among the k likeliest tokens only.
            vocab_size: sample among the first tokens only, where the model's vocabulary is padded.

        Returns:
            (batch, time + max_new_tokens) int64.
        """
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :vocab_size].float() / temperature
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, float("-inf"))
            idx = torch.cat((idx, torch.multinomial(logits.softmax(dim=-1), num_samples=1)), dim=1)
        return idx
