"""What plan.py recommends: the cheapest settings that fit, and what each of them costs."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace

from forecast.modes import MODES
from forecast.planner import Choice, Planner
from model import GPT2_SIZES
from zero.codecs import codec_of
from zero.flags import Flags
from zero.options import weight_dtype


def cheapest(planner: Planner, world_size: int, allowed: Callable[[Choice], bool] = lambda choice: True) -> Choice | None:
    """Return the cheapest choice that is allowed and fits, or None. All have about the same number of sequences per iteration.

    Cheap is, in this order: no more rounding than in the settings, an iteration that is faster by more than 3 % if the speed of
    the GPU is known, no bytes to send in addition, no computation in addition, large micro-steps, and few changes.
    """
    chosen = planner.chosen(world_size)

    def cost(choice: Choice) -> tuple[bool, tuple[float, ...]]:
        its, ours = ((weight_dtype(each.flags.param_dtype), each.flags.state_dtype) for each in (choice, chosen))
        return its != ours, planner.cost(choice, world_size)

    choices = sorted(filter(allowed, _by_price(planner, world_size)), key=cost)
    return next((choice for choice in choices if planner.fits(planner.forecast(choice, world_size))), None)


def candidates(planner: Planner, world_size: int) -> dict[str, Choice]:
    """Return what --find compares: the optimizer without sharding, the settings, all flags that change no value, all flags."""
    chosen, everything = planner.chosen(world_size), planner.everything(world_size)
    plain = replace(chosen, flags=MODES["adamw"].flags, activation_checkpointing=False, loss_chunk=0)
    same_losses = replace(everything, flags=planner.acting(MODES["shard_gradients"].flags, world_size))
    return {"adamw": plain, "these settings": chosen, "same losses": same_losses, "all flags": everything}


def fits(planner: Planner, name: str, world_size: int) -> bool:
    """Return whether one of `candidates` fits."""
    return planner.fits(planner.forecast(candidates(planner, world_size)[name], world_size))


def largest_model(planner: Planner, name: str, world_size: int) -> Planner | None:
    """Return the planner of the largest model, as deep for its width as GPT-2 XL, that fits one of `candidates`, or None."""
    xl = GPT2_SIZES["gpt2-xl"]

    def of_heads(heads: int) -> Planner:
        layers = max(1, round(64 * heads * xl["n_layer"] / xl["n_embd"]))
        return Planner(planner.settings, replace(planner.config, n_head=heads, n_embd=64 * heads, n_layer=layers))

    low, high = 0, 1
    while fits(of_heads(high), name, world_size):
        low, high = high, 2 * high
    low += bisect_left(range(low + 1, high), True, key=lambda heads: not fits(of_heads(heads), name, world_size))
    return of_heads(low) if low else None


def fewest_ranks(planner: Planner, name: str) -> int | None:
    """Return the smallest power of two of ranks, up to 1024, on which one of `candidates` fits, or None."""
    return next((2**power for power in range(11) if fits(planner, name, 2**power)), None)


def batch_of_the_run(planner: Planner, choice: Choice, world_size: int) -> tuple[int, int, int]:
    """Return the largest batch size that fits, the largest that also divides the sequences of a rank, and its micro-steps."""
    largest = planner.largest_batch(choice, world_size)
    sequences = planner.accumulation_steps(choice.batch_size, world_size) // world_size * choice.batch_size
    dividing = next((size for size in range(min(largest, sequences), 0, -1) if sequences % size == 0), 0)
    return largest, dividing, sequences // max(1, dividing) * world_size


def _by_price(planner: Planner, world_size: int) -> Iterator[Choice]:
    """Yield the choices between that of the settings and the one with the least memory, the cheapest first, some twice."""
    chosen, least = planner.chosen(world_size), planner.everything(world_size)
    before, after = chosen.flags, least.flags
    for param_dtype, state_dtype, shard_gradients, checkpointing, batch_size, loss_chunk in itertools.product(
        (before.param_dtype, after.param_dtype),
        (before.state_dtype, after.state_dtype),
        (before.shard_gradients, before.shard_gradients or after.shard_gradients),
        (chosen.activation_checkpointing, least.activation_checkpointing),
        [size for size in range(chosen.batch_size, 0, -1) if chosen.batch_size % size == 0],
        (chosen.loss_chunk, least.loss_chunk),
    ):
        flags = replace(after, param_dtype=param_dtype, state_dtype=state_dtype, shard_gradients=shard_gradients)
        yield Choice(flags, checkpointing, loss_chunk, batch_size)


def prices(planner: Planner, world_size: int, choice: Choice) -> dict[str, str]:
    """Return the arguments that turn the settings into a choice, each with its price; none: the settings as they are."""
    chosen = planner.chosen(world_size)
    before, after = chosen.flags, choice.flags
    found: dict[str, str] = {}
    implementation = after.implementation(world_size)
    if implementation == "sharded" and not Flags.of(planner.settings).is_sharded:
        found["--use_zero1=True --zero1_impl=sharded"] = "no more bytes to send, the same losses"
    if world_size > 1 and implementation == "adamw" != before.implementation(world_size):
        found["--use_zero1=False"] = "no more bytes to send, the same losses"
    if choice.loss_chunk != chosen.loss_chunk:
        found[f"--loss_chunk={choice.loss_chunk}"] = "smaller kernels, not measured on GPUs yet; the same losses up to rounding"
    if choice.batch_size != chosen.batch_size:
        steps = planner.accumulation_steps(choice.batch_size, world_size)
        tokens = choice.batch_size * planner.config.block_size
        found[f"--batch_size={choice.batch_size} --gradient_accumulation_steps={steps}"] = (
            f"{planner.global_batch(choice.batch_size, steps)}; slower where {tokens:,} tokens do not fill a GPU"
        )
    if choice.activation_checkpointing != chosen.activation_checkpointing:
        price = "the forward of the blocks a second time, up to a third more computation"
        found[f"--activation_checkpointing={choice.activation_checkpointing}"] = price
    if after.shard_gradients and not before.shard_gradients:
        without = replace(choice, flags=replace(after, shard_gradients=False))
        sent, once = (sum(planner.prediction(each, world_size).sent.values()) for each in (choice, without))
        found["--shard_gradients=True"] = f"{sent / once:.1f} times the bytes to send, with these micro-steps"
    if after.param_dtype != before.param_dtype:
        same = weight_dtype(after.param_dtype) == weight_dtype(before.param_dtype)
        rounds = "weights and gradients are rounded to bfloat16; " + "half the bytes to send; " * (world_size > 1)
        price = "the same values as float32 masters; on a CPU an update takes 1.4 times as long"
        found[f"--param_dtype={after.param_dtype}"] = price if same else rounds + price
    if after.state_dtype != before.state_dtype:
        codec = codec_of(after.state_dtype)
        found[f"--state_dtype={after.state_dtype}"] = "moments are not rounded" if codec is None else codec.price
    return found
