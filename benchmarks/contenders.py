"""The models and optimizers that are compared. Every mode starts from the same weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from distributed import machine
from forecast.run_memory import IN_PLACE, LOSS_CHUNK, Forecast, Workload, forecast, gpt_specs, predicted_activations
from forecast.run_memory import MODES as PLANNED
from model import GPT, GPTConfig, without_weights
from zero import Muon, ShardedDataParallel, ShardedOptimizer
from zero.build import build, clip_grad_norm_
from zero.flags import Flags
from zero.layout import BucketMB, plan

# hybrid: sharded, with zero_shard_size
# loss_chunk: sharded, with loss_chunk=1024
# no_overlap: sharded, where step waits for the all-gathers, as is the default of ShardedDataParallel
# simple: DistributedDataParallel's all-reduce, an update of 1/N, then an all-gather that overlaps with nothing
# fsdp2: FSDP2, applied block by block; parameters stay unsharded between forward and backward, gradients between micro-steps
# fsdp2_reshard: FSDP2 with its defaults: only the parameters outside of the blocks stay, and every micro-step sends gradients
# muon: sharded, with Muon for the matrices
# plain_muon: the same under DistributedDataParallel, where every rank orthogonalizes all matrices
MODES = (*IN_PLACE, *PLANNED, "loss_chunk", "hybrid", "no_overlap", "simple", "fsdp2", "fsdp2_reshard", "muon", "plain_muon")
FSDP2: dict[str, dict[str, Any]] = {"fsdp2": {"reshard_after_forward": False}, "fsdp2_reshard": {}}  # arguments of fully_shard
NOT_BUILT = ("simple", *FSDP2)  # by `zero.build`, nor predicted
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

    def flags(self, mode: str) -> Flags:
        """Return the flags of a mode of `forecast.run_memory`, of loss_chunk, hybrid, no_overlap, muon or plain_muon."""
        known = {**PLANNED, **IN_PLACE, "plain_muon": PLANNED["adamw"]}
        flags = replace(known.get(mode, PLANNED["sharded"]), bucket_mb=self.bucket_mb)
        return replace(flags, shard_size=self.shard_size) if mode == "hybrid" else flags

    def workload(self, mode: str) -> Workload:
        """Return what a micro-step of a mode computes."""
        dtype = "bfloat16" if self.flags(mode).param_dtype != "float32" else self.dtype
        loss_chunk = LOSS_CHUNK if mode == "loss_chunk" else 0
        return Workload(self.config, self.batch_size, dtype, self.device.type, self.activation_checkpointing, loss_chunk)

    def forecast(self, mode: str, world_size: int, micro_steps: int) -> Forecast | None:
        """Return the prediction for a mode, or None if there is none."""
        if mode in NOT_BUILT:
            return None
        flags, specs = self.flags(mode), gpt_specs(self.config, {} if mode.endswith("muon") else None)
        if is_sharded_over_one_rank(mode, world_size):
            planned = plan(specs, 1, **flags.options)
        else:
            planned = flags.plan(specs, world_size)
        activations = predicted_activations(self.workload(mode), "bfloat16" if planned.has_masters else "float32")
        return forecast(
            planned,
            world_size,
            micro_steps,
            self.device.type,
            activations,
            flags.shard_gradients,
            distributed=True,
            in_place=mode in IN_PLACE,
        )


def is_sharded_over_one_rank(mode: str, world_size: int) -> bool:
    """Return whether the sharded implementation runs on one rank, which it does here, but not in train.py."""
    return world_size == 1 and (
        mode in ("loss_chunk", "muon") or PLANNED.get(mode, PLANNED["adamw"]).implementation(2) == "sharded"
    )


class Contender:
    """A model and its optimizer. Every method needs to be called on all ranks."""

    def __init__(self, setup: Setup, mode: str) -> None:
        self.setup, self.mode = setup, mode
        torch.manual_seed(setup.seed)
        is_built = mode not in NOT_BUILT
        with setup.device, without_weights(is_built and dist.get_rank() > 0):  # on a CPU, GPT-2 XL would take most of a minute
            self.module = GPT(setup.config)
        if is_built and dist.get_rank() == 0:  # as in train.py, rank 0 has the weights, in main memory
            self.module.to("cpu")
        self.module.activation_checkpointing = setup.activation_checkpointing
        self.module.loss_chunk = setup.workload(mode).loss_chunk
        self.model: torch.nn.Module
        self.optimizer: torch.optim.Optimizer
        torch.manual_seed(setup.seed + dist.get_rank())  # different tokens on each rank

    def wrap(self) -> "Contender":
        """Wrap the model for data parallelism and create its optimizer."""
        groups = self.module.param_groups(0.1, {} if self.mode.endswith("muon") else None)
        if self.mode == "simple":
            self.optimizer = ShardedOptimizer(groups, torch.optim.AdamW, bucket_mb=self.setup.bucket_mb, fused=True, **ADAMW)
            self.model = DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        elif self.mode in FSDP2:
            mesh, options = init_device_mesh(self.setup.device.type, (dist.get_world_size(),)), FSDP2[self.mode]
            for block in self.module.transformer.h:
                fully_shard(block, mesh=mesh, **options)
            self.model = fully_shard(self.module, mesh=mesh, **options)
            self.optimizer = torch.optim.AdamW(self.module.param_groups(0.1), fused=True, **ADAMW)
        elif is_sharded_over_one_rank(self.mode, dist.get_world_size()):
            self._shard_over_one_rank(groups)
        else:
            flags, overlap = self.setup.flags(self.mode), self.mode != "no_overlap"
            self.model, self.optimizer = build(self.module, groups, flags, device=self.setup.device, overlap=overlap, **ADAMW)
        if dist.get_backend() == "fake" and isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(None, _without_communication)
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
        """Accumulate gradients in this block without communication (with shard_gradients, they are sent)."""
        self._set_sync(False)
        yield
        self._set_sync(True)

    def clip(self) -> None:
        """Wait for the gradients and clip them."""
        if self.mode in FSDP2:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.setup.grad_clip or float("inf"))
        else:
            clip_grad_norm_(self.optimizer, self.setup.grad_clip or float("inf"))

    def update(self) -> None:
        """Step and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.mode not in IN_PLACE)

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
        if self.mode == "fsdp2":
            self.model.set_requires_gradient_sync(sync)
        elif self.mode not in FSDP2:
            self.model.require_backward_grad_sync = sync

    def _shard_over_one_rank(self, groups: list[dict[str, Any]]) -> None:
        """Use the sharded implementation with one rank, which `build` does not do."""
        flags = self.setup.flags(self.mode)
        self.optimizer = ShardedOptimizer(
            groups,
            Muon if self.mode == "muon" else torch.optim.AdamW,
            registration_order=self.module.parameters(),
            device=self.setup.device,
            fused=True,
            **flags.options,
            **ADAMW,
        )
        self.model = ShardedDataParallel(self.module, self.optimizer, flags.shard_gradients, overlap=True)


def _without_communication(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Hook of DistributedDataParallel: the fake process group returns no tensors."""
    buffer = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future
