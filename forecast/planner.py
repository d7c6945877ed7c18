"""The figures of plan.py: memory, bytes and time of a run, for each way to hold the state and each number of ranks."""

import math
import re
from bisect import bisect_left, insort
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from distributed.machine import CARDS, CUDA_GB, NCCL_ALL_TO_ALL_GB, NCCL_GB, card, resolve_dtype, usual_mfu
from forecast.modes import LOSS_CHUNK, MODES, batch_in_words, divided_batch, muon_of
from forecast.prediction import Activations, Prediction, Workload
from forecast.run_memory import CPU_RESIDENT, gpt_specs, planned_optimizer, predicted, predicted_activations
from forecast.step_time import Network
from model import GPT, GPTConfig, without_weights
from zero.codecs import SMALLEST
from zero.flags import Flags
from zero.muon.muon import NS_STEPS
from zero.options import weight_dtype

BATCHES = [4**power for power in range(7)]  # activations are predicted for these batch sizes, and interpolated between them


@dataclass(frozen=True)
class Choice:
    """The settings in which the rows of a table differ."""

    flags: Flags
    activation_checkpointing: bool
    loss_chunk: int
    batch_size: int
    in_place: bool = False  # see `forecast.run_memory.predicted`


class Planner:
    """Predicts what the rank with the most optimizer state needs.

    Args:
        settings: the settings of train.py and plan.py.
        config: the sizes of the model.
    """

    def __init__(self, settings: dict[str, Any], config: GPTConfig) -> None:
        self.settings, self.config = settings, config
        muon = muon_of(settings)
        self.optimizer = planned_optimizer(muon)
        self.has_adamw = muon is None
        self.device_type = "cuda" if settings["device"] == "auto" else settings["device"].partition(":")[0]
        if self.device_type not in ("cpu", "cuda", "mps"):
            raise ValueError(f"device={settings['device']} is not one of auto, cpu, cuda, mps")
        if (found := card(settings["gpu"])) is None:
            if several := re.fullmatch(r"(\d+)(?: ?[x*] ?| )(.+)", settings["gpu"]):
                raise ValueError(f"gpu={settings['gpu']} is more than one; use --world_size={several[1]} --gpu={several[2]}")
            remedy = "for another card, give the nearest one, and --gpu_memory_gb"
            raise ValueError(f"gpu={settings['gpu']} is not one of {', '.join(CARDS)}; {remedy}")
        self.card, on_gpu = found, self.device_type == "cuda"
        # GB of a rank by the settings, or of a device without a card; 0: as the card has
        self.given_gb = settings["gpu_memory_gb"] or (0.0 if on_gpu else 80.0)
        self.can_round_weights = found.has_bfloat16 or not on_gpu  # to bfloat16
        lowest = "bfloat16" if found.has_bfloat16 else "float16"
        self.dtype = resolve_dtype(settings["dtype"], settings["param_dtype"], lowest if on_gpu else "float32")
        self.specs = gpt_specs(config, muon, self.dtype)  # of what is trained
        inside = settings["bandwidth_gbit"] or found.link_gbit
        self.network = Network(inside, settings["between_gbit"], settings["ranks_per_machine"])
        with without_weights():
            model = GPT(config)
        self.flops_per_token, self.numel = model.flops_per_token(), sum(param.numel() for param in model.parameters())
        self.frozen_numel = self.numel - sum(spec.numel for spec in self.specs)
        self.mfu = settings["mfu"] or usual_mfu(self.numel)
        if self.mfu > 100:
            raise ValueError(f"mfu={settings['mfu']:g} must be at most 100")
        is_known = on_gpu and self.dtype != "float32"
        self.flops = found.tflops * 1e12 * self.mfu / 100 if is_known else 0.0  # per second and rank; 0: not known
        if settings["gpu_hour_price"] and not is_known:
            raise ValueError("gpu_hour_price needs the speed of the GPUs, known for bfloat16 and float16 on cuda only")
        self._prediction = cache(self._predict)

    def memory(self, world_size: int) -> int:
        """Return the bytes that tensors may take on each of the ranks."""
        if self.given_gb:
            return int(self.given_gb * 1e9 / (CPU_RESIDENT if self.device_type == "cpu" else 1.0))
        return round((self.card.memory_gb - CUDA_GB - NCCL_GB * (world_size > 1)) * 1e9)

    def limit(self, world_size: int) -> str:
        """Return `memory` in words."""
        tensors = f"{self.memory(world_size) / 1e9:.3g} GB"
        if self.given_gb:
            assumed = "" if self.settings["gpu_memory_gb"] else "; assumed, give --gpu_memory_gb"
            return f"{self.given_gb:g} GB" + (f" ({tensors} for tensors{assumed})" if self.device_type == "cpu" else "")
        libraries = "CUDA, cuBLAS and NCCL" if world_size > 1 else "CUDA and cuBLAS"
        whole, taken = self.card.memory_gb, f"{self.card.memory_gb - self.memory(world_size) / 1e9:g}"
        sends_all_to_all = not self.has_adamw or weight_dtype(self.settings["param_dtype"]) != "float32"
        if world_size > 1 and sends_all_to_all and self.card.link_gbit >= 1200:  # by NVLink, NCCL takes more channels
            taken += f" to {CUDA_GB + NCCL_ALL_TO_ALL_GB:g}"
        return f"{tensors} ({self.settings['gpu']}: {whole:g} GB, less {taken} for {libraries})"

    def acting(self, flags: Flags, world_size: int) -> Flags:
        """Return `flags` with the sizes in the settings; for another implementation than sharded, its mode's flags.

        If shard_size does not fit, all ranks share the state.
        """
        shard_size = self.settings["shard_size"]
        if flags.is_sharded:
            shard_size = 0 if world_size % (shard_size or 1) else shard_size
            flags = replace(flags, bucket_mb=self.settings["bucket_mb"], shard_size=shard_size)
        implementation = flags.implementation(world_size)
        auto = replace(flags, param_dtype="auto")
        if flags.param_dtype == "float32" and (self.dtype == "float32" or not auto.stores_as_autocast(world_size)):
            flags = auto  # which stores the same then
        return flags if implementation == "sharded" else MODES[implementation].flags

    def chosen(self, world_size: int) -> Choice:
        """Return the settings of the run as a choice. Flags without effect have their defaults.

        If the ranks cannot share the batch, the batch size is the one that the error message of train.py names.
        """
        flags, (batch_size, _) = self.acting(Flags.of(self.settings), world_size), self.batch(world_size)
        return Choice(flags, self.settings["activation_checkpointing"], self.settings["loss_chunk"], batch_size)

    def batch(self, world_size: int) -> tuple[int, int]:
        """Return the batch_size and gradient_accumulation_steps of the settings, or those that train.py names instead."""
        return divided_batch(self.settings["batch_size"], self.settings["gradient_accumulation_steps"], world_size)

    def choices(self, world_size: int) -> dict[Choice, str]:
        """Return the choices of a table, with that of the settings, and the names of their modes."""
        chosen = self.chosen(world_size)
        base = replace(chosen, flags=self.acting(Flags(), world_size))
        accumulates = 1 < world_size < self.accumulation_steps(chosen.batch_size, world_size)
        modes: dict[Choice, str] = {}
        for name, mode in MODES.items():
            if mode.planned and (accumulates or not mode.in_place) and (self.can_round_weights or not mode.flags.stored_dtype):
                choice = replace(base, flags=self.acting(mode.flags, world_size), in_place=mode.in_place)
                modes.setdefault(replace(choice, loss_chunk=chosen.loss_chunk or mode.loss_chunk), name)
        modes.setdefault(replace(base, activation_checkpointing=True), "checkpointing")
        modes.setdefault(replace(base, loss_chunk=chosen.loss_chunk or LOSS_CHUNK), "loss_chunk")
        modes.setdefault(self.everything(world_size), "all")
        modes.setdefault(chosen, "these flags")
        return modes

    def everything(self, world_size: int) -> Choice:
        """Return the choice with the least memory."""
        chosen, weights = self.chosen(world_size), "bfloat16_remainder" if self.can_round_weights else "auto"
        # a single rank has nobody to share gradients with; there, the flag makes their sums float32
        flags = Flags(param_dtype=weights, shard_gradients=world_size > 1, state_dtype=SMALLEST)
        chosen = replace(chosen, flags=self.acting(flags, world_size), activation_checkpointing=True)
        return replace(chosen, loss_chunk=chosen.loss_chunk or LOSS_CHUNK)

    def figures(self, mode: str, choice: Choice, world_size: int) -> dict[str, Any]:
        """Return the row of a choice, in bytes and seconds."""
        prediction = self.forecast(choice, world_size)
        peak, between = prediction.peak, self.network.across_machines(prediction)
        computing, exposed = self.seconds(choice, world_size)
        parts = prediction.at("accumulating" if prediction.micro_steps > 1 else "before step")
        parts |= {"buckets": prediction.largest_buckets, "activations": prediction.activations.saved}
        return {
            "mode": mode,
            "chosen": " *" if choice == self.chosen(world_size) else "",
            "world_size": world_size,
            **parts,
            "state_to_mean": prediction.uneven,
            "peak": peak,
            "saving": prediction.saving_peak,
            "saving_on_cpu": prediction.saved_copy,
            "fits": "yes" if self.fits(prediction) else "no",
            "sent": sum(prediction.sent.values()),
            "between": round(sum(between.values())),
            "sent_ms": 1e3 * sum(self.network.seconds(prediction).values()),
            "exposed_ms": 1e3 * sum(exposed.values()),
            "seconds": computing + sum(exposed.values()),
            # the parts are not all at their largest at the same time, so the peak can also be less than their sum
            "temporary": max(0, peak - sum(parts.values())),
            "largest_batch": self.largest_batch(choice, world_size),
        }

    def forecast(self, choice: Choice, world_size: int) -> Prediction:
        """Return what a choice needs. All choices have the same number of sequences per iteration."""
        return replace(self.prediction(choice, world_size), activations=self.activations(choice, world_size))

    def prediction(self, choice: Choice, world_size: int) -> Prediction:
        """Return what a choice needs apart from activations."""
        return self._prediction(replace(choice, activation_checkpointing=False, loss_chunk=0), world_size)

    def _predict(self, choice: Choice, world_size: int) -> Prediction:
        flags, micro_steps = choice.flags, self.accumulation_steps(choice.batch_size, world_size) // world_size
        how: dict[str, Any] = {"on_cpu": self.device_type == "cpu", "distributed": world_size > 1, "in_place": choice.in_place}
        how |= {"world_size": world_size, "micro_steps": micro_steps, "async_save": self.settings["async_save"]}
        how["frozen"] = self.frozen_numel * (flags.stored_dtype or torch.float32).itemsize
        return predicted(self.specs, flags, self.optimizer, **how)

    def accumulation_steps(self, batch_size: int, world_size: int) -> int:
        """Return the gradient_accumulation_steps of a batch size that divides that of `batch`: a multiple of the ranks."""
        return math.prod(self.batch(world_size)) // (batch_size * world_size) * world_size

    def global_batch(self, batch_size: int, steps: int) -> str:
        """Return whether gradient_accumulation_steps=`steps` of a batch size keep the sequences per iteration, in words."""
        return batch_in_words(batch_size * steps, self.settings["gradient_accumulation_steps"] * self.settings["batch_size"])

    def cost(self, choice: Choice, world_size: int) -> tuple[float, ...]:
        """Return what a choice costs apart from rounding, to be compared: seconds of an iteration, or what takes time."""
        if self.flops:
            computing, exposed = self.seconds(choice, world_size)
            return (round(math.log(computing + sum(exposed.values())) / math.log(1.03)),)
        return choice.flags.shard_gradients, choice.activation_checkpointing, -choice.batch_size

    def fits(self, prediction: Prediction) -> bool:
        return max(prediction.peak, prediction.saving_peak) <= self.memory(prediction.world_size)

    def seconds(self, choice: Choice, world_size: int) -> tuple[float, dict[str, float]]:
        """Return the seconds of matrix products in an iteration, 0 if not known, and of waits, by kind of collective."""
        if not self.flops:
            return 0.0, {}
        forward = choice.batch_size * self.config.block_size * self.flops_per_token / self.flops / 3
        backward = (3 if choice.activation_checkpointing else 2) * forward
        prediction = self.prediction(choice, world_size)
        newton_schulz = prediction.newton_schulz * NS_STEPS / self.flops
        exposed = self.network.exposed(prediction, forward, backward, newton_schulz) if world_size > 1 else {}
        return prediction.micro_steps * (forward + backward) + newton_schulz, exposed

    def activations(self, choice: Choice, world_size: int) -> Activations:
        """Return the activations of a micro-step."""
        weights = self.prediction(choice, world_size).plan.weights
        dtype = self.dtype if weights in ("autocast", "float32") else weights
        how = choice.activation_checkpointing, choice.loss_chunk, self.settings["compile"]
        return predicted_activations(Workload(self.config, choice.batch_size, dtype, self.device_type, *how), weights)

    def largest_batch(self, choice: Choice, world_size: int) -> int:
        """Return the largest batch size that fits with these micro-steps, or 0.

        The peak of activations is the largest of several linear functions of the batch size, so it is convex, on both sides of
        a full chunk of the loss. A straight line between two of them is too low by at most what a GPU's allocator rounds.
        """
        prediction = self.prediction(choice, world_size)
        full_chunk = choice.loss_chunk // self.config.block_size  # fewer sequences have fewer logits than a chunk
        sizes = sorted({*BATCHES, choice.batch_size, full_chunk, full_chunk + 1} - {0})

        def exceeds(size: int) -> bool:
            high = bisect_left(sizes, size)
            low = high if sizes[high] == size else high - 1
            ends = (self.activations(replace(choice, batch_size=sizes[at]), world_size) for at in (low, high))
            share = (size - sizes[low]) / max(1, sizes[high] - sizes[low])
            found = (round(first + share * (last - first)) for first, last in zip(*ends, strict=True))
            return not self.fits(replace(prediction, activations=Activations(*found)))

        own = sizes.index(choice.batch_size)
        above = bisect_left(sizes, True, *((0, own) if exceeds(choice.batch_size) else (own + 1, len(sizes))), key=exceeds)
        low, high = sizes[above - 1] if above else 0, sizes[min(above, len(sizes) - 1)]
        size = low + bisect_left(range(low + 1, high), True, key=exceeds)
        while size > low and (insort(sizes, size) or exceeds(size)):  # what is among the sizes is predicted itself
            size -= 1
        return size
