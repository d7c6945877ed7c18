"""What a rank holds and sends with what is not ours: DistributedDataParallel and ZeroRedundancyOptimizer. Formulas.

They do not run without process groups. `forecast.dry_run` predicts `zero`.
"""

from typing import get_args

from distributed.machine import allocated
from forecast.prediction import Moment, Point, Prediction, arriving, gradient_bytes
from zero.layout import Plan
from zero.muon.matrices import iteration_flops, stacked

_BUCKET_BYTES = 25_000_000  # of DistributedDataParallel, by default


def sent_by_data_parallel(plan: Plan, world_size: int) -> dict[str, int]:
    """Return the bytes that a rank sends per iteration with DistributedDataParallel, by kind of collective.

    An all-reduce counts as a ring, 2 (N - 1) / N of its bytes, a broadcast as the mean over the ranks, (N - 1) / N.
    """
    one_way = gradient_bytes(plan)[0] * (world_size - 1) // world_size
    return {"all-reduce": 2 * one_way} | ({"broadcast": one_way} if plan.world_size > 1 else {})


def replicated(
    plan: Plan, rank: int, state: int, world_size: int, micro_steps: int, distributed: bool, in_place: bool, on_cpu: bool
) -> Prediction:
    """Return the prediction for an optimizer that is not sharded, or for ZeroRedundancyOptimizer.

    The buckets of DistributedDataParallel exist from construction on. Gradients are views into them, except those that
    accumulate outside. In the last backward, these move into buckets one by one.

    Args:
        plan: see `zero.flags.Flags.plan`.
        state: bytes of optimizer state of this rank.
        distributed, in_place, on_cpu: see `forecast.run_memory.predicted`.
    """
    gradients, last_gradient = gradient_bytes(plan)
    rounding = 1.0 if on_cpu else sum(allocated(spec.numel * spec.dtype.itemsize) for spec in plan.params) / gradients
    each = round(rounding * gradients)  # all weights or gradients, if each is a tensor of its own
    buckets = each if distributed else 0  # hold whole tensors, and are rounded about as much
    outside = each if distributed and micro_steps > 1 and not in_place else 0
    held, summed = each + round(rounding * state) + buckets, micro_steps - bool(outside)  # of gradients added up in one place
    if buckets and not outside:
        moments = _beside_all(held)
    elif summed > 1:
        moments = _beside_all(held + each)
    else:
        moments = _beside_all(held, held + each - last_gradient)
    if outside:
        moments += _beside_all(held + outside, held + last_gradient)
    in_buckets = gradients * distributed
    of_gradients = in_buckets, gradients * (1 + bool(outside)), gradients, in_buckets  # by point
    fixed = {"parameters": gradients, "state": state, "master": 0, "buckets": 0}
    points = {point: fixed | {"gradients": count} for point, count in zip(get_args(Point), of_gradients, strict=True)}
    points["after wrapping"]["state"] = 0
    matrices = [spec for slice_ in plan.slices(rank) if (spec := plan.params[slice_.number]).matrices]
    return Prediction(
        *(plan, rank, world_size, micro_steps, False, points, moments),
        construction=each + buckets,
        saving=held + (arriving(plan, rank) if on_cpu else 0),
        saved=gradients + state,
        sent=sent_by_data_parallel(plan, world_size) if distributed else {},
        least_exposed=_BUCKET_BYTES / gradients,
        newton_schulz=sum(spec.matrices * iteration_flops(stacked(spec.shape, spec.matrices)) for spec in matrices),
        matrix_rounds=1 if matrices else 0,
    )


def _beside_all(held: int, at_the_end: int | None = None) -> list[Moment]:
    """Return the moments of a micro-step that holds `held`, and with the last activations `at_the_end`."""
    first = [Moment(held, phase) for phase in ("forward", "loss", "layers")]
    return [*first, Moment(held if at_the_end is None else at_the_end, "embedding")]
