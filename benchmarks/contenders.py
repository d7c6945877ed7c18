"""The models and optimizers that are compared. Every mode starts from the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.alone import ShardedOnOneRank
from distributed import machine
from forecast.modes import Mode
from forecast.prediction import Prediction, Workload
from forecast.run_memory import gpt_specs, planned_optimizer, predicted, predicted_activations
from model import GPT, GPTConfig, SkipInitialization
from zero import ShardedOptimizer
from zero.build import build, clip_grad_norm_
from zero.flags import Flags
from zero.options import BucketMB

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95)}


@dataclass(frozen=True)
class Setup:
    """What all contenders have in common."""

    config: GPTConfig
    batch_size: int  # sequences per rank and micro-step
    device: torch.device
    dtype: str  # of the computation; modes with bfloat16 weights always compute in bfloat16
    bucket_mb: BucketMB
    grad_clip: float
    activation_checkpointing: bool
    seed: int
    shard_size: int = 0  # of the mode hybrid
    compiled: bool = False  # see `GPT.compile_blocks`

    def flags(self, mode: Mode) -> Flags:
        """Return the flags of a mode with the sizes of this setup."""
        shard_size = self.shard_size if mode.hybrid else 0
        return ShardedOnOneRank(**{**vars(mode.flags), "bucket_mb": self.bucket_mb, "shard_size": shard_size})

    def workload(self, mode: Mode) -> Workload:
        """Return what a micro-step computes."""
        dtype, checkpointing = "bfloat16" if mode.flags.stored_dtype else self.dtype, self.activation_checkpointing
        how = checkpointing, mode.loss_chunk, self.compiled
        return Workload(self.config, self.batch_size, dtype, self.device.type, *how)

    def forecast(self, mode: Mode, world_size: int, micro_steps: int, rank: int | None = None) -> Prediction | None:
        """Return the prediction for a rank, by default the fullest, or None if there is none."""
        if not mode.is_built:
            return None
        muon: dict[str, Any] | None = {} if mode.muon else None
        how: dict[str, Any] = {"rank": rank, "world_size": world_size, "micro_steps": micro_steps, "in_place": mode.in_place}
        how["on_cpu"] = self.device.type == "cpu"
        workload, flags = self.workload(mode), self.flags(mode)
        specs = gpt_specs(self.config, muon, workload.dtype)
        how["activations"] = predicted_activations(workload, flags.plan(specs, world_size).weights)
        return predicted(specs, flags, planned_optimizer(muon), **how)


class Contender:
    """A model and its optimizer. Every method needs to be called on all ranks."""

    def __init__(self, setup: Setup, mode: Mode) -> None:
        self.setup, self.mode = setup, mode
        torch.manual_seed(setup.seed)
        skip = SkipInitialization() if mode.is_built and dist.get_rank() > 0 else nullcontext()
        with setup.device, skip:  # on a CPU, GPT-2 XL would take most of a minute
            self.module = GPT(setup.config)
        if mode.is_built:  # as in train.py, in main memory
            self.module.to("cpu")
        self.module.activation_checkpointing, self.module.loss_chunk = setup.activation_checkpointing, mode.loss_chunk
        if setup.compiled:
            torch._dynamo.reset()  # under DistributedDataParallel, graphs are others
            self.module.compile_blocks()
        self.model: torch.nn.Module
        self.optimizer: torch.optim.Optimizer
        torch.manual_seed(setup.seed + dist.get_rank())  # different tokens on each rank

    def wrap(self) -> Self:
        """Wrap the model for data parallelism and create its optimizer."""
        device, fully_sharded = self.setup.device, self.mode.fully_shard
        if fully_sharded is not None:  # before the parameters are grouped, which it replaces
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for block in self.module.transformer.h:
                fully_shard(block, mesh=mesh, **fully_sharded)
            self.model = fully_shard(self.module, mesh=mesh, **fully_sharded)
        groups = self.module.param_groups(0.1, {} if self.mode.muon else None)
        if fully_sharded is not None:
            self.optimizer = torch.optim.AdamW(groups, fused=True, **ADAMW)
        elif self.mode.simple:
            self.optimizer = ShardedOptimizer(groups, torch.optim.AdamW, bucket_mb=self.setup.bucket_mb, fused=True, **ADAMW)
            self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        else:
            flags, units = self.setup.flags(self.mode), self.module.blocks if self.mode.overlap else ()
            how: dict[str, Any] = {"autocast": machine.DTYPES[self.setup.workload(self.mode).dtype], **ADAMW}
            self.model, self.optimizer = build(self.module, groups, flags, device=device, overlap=units, **how)
        if dist.get_backend() == "fake" and isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, noop_hook)  # the fake process group returns no tensors
        return self

    def forward(self, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the loss of inputs and targets, (2, batch_size, block_size) int64, by default new random ones."""
        shape = 2, self.setup.batch_size, self.setup.config.block_size
        if tokens is None:
            tokens = torch.randint(self.setup.config.vocab_size, shape, device=self.setup.device)
        with machine.autocast(self.setup.device, self.setup.workload(self.mode).dtype):
            return self.model(*tokens)[1]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulate gradients in this block without sending them, except with shard_gradients and FSDP2's defaults."""
        self._set_sync(False)
        yield
        self._set_sync(True)

    def clip(self) -> None:
        """Wait for the gradients and clip them."""
        if self.mode.fully_shard is not None:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.setup.grad_clip or float("inf"))
        else:
            clip_grad_norm_(self.optimizer, self.setup.grad_clip or float("inf"))

    def update(self) -> None:
        """Step and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.mode.in_place)

    def step(self, micro_batches: Sequence[torch.Tensor | None] = (None,)) -> torch.Tensor:
        """Run a micro-step for each micro-batch (see `forward`) and the update, and return the mean of their losses."""
        losses: list[torch.Tensor] = []
        for tokens in micro_batches:
            is_last = len(losses) == len(micro_batches) - 1
            with nullcontext() if is_last else self.accumulating():
                loss = self.forward(tokens) / len(micro_batches)
                loss.backward()
                losses.append(loss.detach())
        self.clip()
        self.update()
        return torch.stack(losses).sum()

    def wait(self) -> None:
        """Wait until all parameters have arrived and the device has finished its work."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.synchronize()
        if self.setup.device.type == "cuda":
            torch.cuda.synchronize()

    def _set_sync(self, sync: bool) -> None:
        if self.mode.fully_shard is None:
            self.model.require_backward_grad_sync = sync
        elif self.mode.fully_shard:  # with its defaults, every micro-step gathers weights and sends gradients
            self.model.set_requires_gradient_sync(sync)
            self.model.set_reshard_after_backward(sync)
