"""Every metric of a run, declared once. This prints them as a table:

    $ python -m run.metrics

run/meter.py computes most of them. charts/ reads this module, too.
"""

import itertools
from typing import Literal, NamedTuple, get_args

from forecast.prediction import PURPOSES
from zero.collectives import KINDS


class Metric(NamedTuple):
    """A number or a text that a run logs."""

    key: str  # its name in metrics.jsonl and wandb
    unit: str  # of its values, "text" for texts; MB are 10^6 bytes
    # "iteration": each logged one; times are means since the one before. "ranks": some of these, because it needs a collective.
    # "summary": it describes the whole run, in wandb's summary and in the report card
    when: str
    chart: str  # title of its chart in the workspace, which may have several metrics; "": no chart
    meaning: str = ""  # what else there is to say; it is of rank 0 if nothing says otherwise
    best: str = ""  # the value that wandb's summary shows, "min" or "max"; "": the last one
    summary: tuple[str, ...] = ()  # its figures of the whole run, each of which is a metric, too
    # over the ranks; where they differ, `<key>_min` and `<key>_rank`, the rank of the maximum, are logged, too
    is_maximum: bool = False


def is_of_part(key: str) -> bool:
    """Return whether a metric begins anew with another implementation or world size: memory, speed and communication do."""
    return key.startswith(("comm/", "memory/", "mfu", "throughput/")) or key.endswith("_ms")


COURSE, MEDIAN = ("first", "best", "last"), ("median",)  # figures of the whole run; the best is the smallest
NATS, BITS, TOKENS, TFLOPS = "nats per token", "bits per byte", "tokens/s", "TFLOP/s"
Point = Literal["after init", "before step", "after step"]  # of a step, at which memory is measured
POINT_KEYS = {point: f"memory/{point.replace(' ', '_')}_mb" for point in get_args(Point)}
POINTS, PEAK = "At three points of a step, MB", "Peak and its prediction, MB (on a CPU the peak includes Python)"
EXPOSED, SENT = "Exposed, by kind, ms", "Sent per step, by kind, MB"
EXPOSED_KEYS, SENT_KEYS = (
    {kind: key.format(kind.replace("-", "_")) for kind in KINDS} for key in ("comm/exposed_{}_ms", "comm/sent_{}_mb_per_step")
)
COLLECTIVES = {  # by kind: what is waited for, and how the bytes are counted
    "all-reduce": ("adamw, torch: gradients; sharded: norm", "as a ring: 2 (N - 1) / N of the bytes"),
    "reduce-scatter": ("sharded: gradients, before clipping", "counted where they are sent"),
    "all-to-all": ("Muon: matrices to their owners and back", "matrices of Muon"),
    "all-gather": ("sharded: parameters, in the next forward", "counted where they are sent"),
    "broadcast": ("torch: parameters, after the update", "mean of the ranks, (N - 1) / N of the bytes"),
}
SECTIONS = {  # of the workspace
    "Loss": [
        Metric("iter/loss", NATS, "iteration", "Loss of the global batch", "mean over micro-steps and ranks", "min", COURSE),
        Metric("val/loss", NATS, "evaluation", "Validation loss", "of the same 12 * eval_iters sequences", "min", COURSE),
        Metric("val/bits_per_byte", BITS, "evaluation", "Bits per byte of validation data", "if bytes known", "min", COURSE),
        Metric("train/loss", NATS, "evaluation", "Training loss at evaluations", "the same for the training data", "min"),
        Metric("iter/grad_norm", "norm", "iteration", "Gradient norm before clipping", "of all gradients together"),
        Metric("lr", "", "iteration, evaluation", "Learning rate"),
        Metric("iter/loss_max_rank", NATS, "ranks", "Largest loss of a rank"),
        Metric("iter", "", "always", "", "the iteration; an evaluation runs before the iteration of the same number"),
        Metric("iter/tokens", "tokens", "iteration, evaluation, end", "", "that all ranks together have seen since the start"),
    ],
    "Summary": [
        Metric("peak_memory_mb", "MB", "summary", "Peak memory, MB", "largest memory/peak_mb"),
        Metric("evaluation/val_loss", NATS, "evaluate.py", "", "of the whole validation split"),
        Metric("evaluation/val_bits_per_byte", BITS, "evaluate.py", "", "the same; end-of-text has a loss, and no bytes"),
        Metric("evaluation/hellaswag_acc", "", "evaluate.py", "", "how often the right ending has the smallest loss"),
        Metric("evaluation/hellaswag_acc_norm", "", "evaluate.py", "", "the same with the mean over the tokens of an ending"),
        Metric("checkpoints", "", "summary", "", "number of checkpoints written"),
        Metric("restarts", "", "summary", "", "how often the run was resumed"),
        Metric("warnings", "", "summary", "", "number of warnings"),
    ],
    "Memory": [
        *(
            Metric(key, "MB", "ranks", POINTS, f"of tensors, {which}", is_maximum=True)
            for key, which in zip(
                POINT_KEYS.values(), ("before the first step", "with all gradients", "without gradients"), strict=True
            )
        ),
        Metric("memory/peak_mb", "MB", "ranks", PEAK, "since the last one; GPU: tensors, CPU: process", "max", is_maximum=True),
        Metric("memory/predicted_mb", "MB", "ranks", PEAK, "of the tensors of the fullest rank"),
        Metric("memory/optimizer_state_mb", "MB", "ranks", "Optimizer state of a rank, MB", "with masters", is_maximum=True),
        Metric("memory/saved_mb", "MB", "ranks", "Less than without sharding, gradients included, MB"),
        Metric("memory/predicted_peak_mb", "MB", "start", "Predicted peak, MB", "memory/predicted_mb, once"),
        Metric("memory/predicted_activations_mb", "MB", "start", "Activations, predicted, MB"),
        *(
            Metric(f"memory/{which}_{part}_mb", "MB", when, f"{part.capitalize()} before a step, MB", meaning)
            for part in PURPOSES
            for which, when, meaning in (
                ("predicted", "start", "predicted"),
                ("measured", "third iteration", "measured"),
                ("unsharded", "start", "predicted for the plain optimizer with DistributedDataParallel"),
            )
            if which != "unsharded" or part in ("parameters", "gradients", "state")
        ),
        Metric("memory/measured_peak_mb", "MB", "third iteration, GPU", "", "of the fullest rank, since the start"),
        Metric("memory/reserved_mb", "MB", "ranks, GPU", "", "reserved by PyTorch's allocator", is_maximum=True),
        Metric("memory/alloc_retries", "", "ranks, GPU", "", "cache flushes of the allocator, if any", is_maximum=True),
        Metric("memory/ooms", "", "ranks, GPU", "", "out-of-memory errors, if any", is_maximum=True),
    ],
    "Throughput": [
        Metric("throughput/tokens_per_second", TOKENS, "iteration", "Tokens per second", "of all ranks", "max", MEDIAN),
        Metric("throughput/tokens_per_second_per_rank", TOKENS, "iteration", "Tokens per second per rank"),
        Metric("throughput/tflops_per_rank", TFLOPS, "iteration", "TFLOP/s per rank", "of the model, nothing computed twice"),
        Metric("time/step_ms", "ms", "iteration", "Step, ms", "without evaluations and checkpoints"),
        Metric("time/data_ms", "ms", "iteration", "Parts of a step, ms", "the host prepares batches; a GPU computes meanwhile"),
        Metric("time/forward_backward_ms", "ms", "iteration", "Parts of a step, ms", "all micro-steps, with communication"),
        Metric("time/optimizer_ms", "ms", "iteration", "Parts of a step, ms", "clipping and update, with communication"),
        Metric("mfu", "%", "iteration, evaluation", "MFU, %", "model FLOP/s by the device's peak, running mean", "max", MEDIAN),
        Metric("throughput/eta_hours", "hours", "iteration", "Time to the end of the run, hours", "with all that it does"),
        Metric("time/rank_spread_ms", "ms", "ranks", "Rank spread, ms", "of the time in which a rank computes"),
        Metric("time/slowest_rank", "rank", "ranks", "", "the rank that computes longest"),
        Metric("time/eval_s", "s", "evaluation", "", "duration of the evaluation"),
        Metric("time/elapsed_s", "s", "iteration, evaluation, end", "", "of training, without what a restart has lost"),
    ],
    "Communication": [
        Metric("comm/exposed_percent", "%", "iteration", "Exposed, % of a step", "of time/step_ms", summary=MEDIAN),
        Metric("comm/exposed_ms", "ms", "iteration", EXPOSED, "the computation waits, also for slower ranks", summary=MEDIAN),
        *(Metric(EXPOSED_KEYS[kind], "ms", "iteration", EXPOSED, COLLECTIVES[kind][0]) for kind in KINDS),
        Metric("comm/sent_mb_per_step", "MB", "iteration", SENT, "for gradients and parameters"),
        *(Metric(SENT_KEYS[kind], "MB", "iteration", SENT, COLLECTIVES[kind][1]) for kind in KINDS),
    ],
    "Checkpoints": [
        Metric("checkpoint/consolidate_s", "s", "save", "Consolidate, s", "until the state was collected"),
        Metric("checkpoint/write_s", "s", "save", "Write, s", "until the file was on the disk"),
        Metric("checkpoint/blocked_s", "s", "save", "Training blocked, s", "with async_save for the save before, too"),
        Metric("checkpoint/bytes", "bytes", "save", "Bytes", "of the checkpoint, shards included"),
        Metric("checkpoint/error", "text", "failed save", "", "why the file could not be written"),
    ],
    "Samples": [
        Metric("sample/text", "text", "sample_interval", "Samples", "what the model writes; in wandb, a table"),
        Metric("warning", "text", "warning", "", "its text"),
    ],
    "Others": [],
}

FIGURES = {  # of the whole run, by name: which one, of what metric
    f"{which}_{metric.key.replace('val/', 'val_').rpartition('/')[2]}": (which, metric)
    for which in MEDIAN + COURSE
    for metric in itertools.chain(*SECTIONS.values())
    if which in metric.summary
}
for name, (which, metric) in FIGURES.items():
    title = f"{which} {metric.chart}".capitalize() if name in ("median_tokens_per_second", "best_val_loss") else ""
    SECTIONS["Summary"].append(Metric(name, metric.unit, "summary", title, f"{which} {metric.key}"))

METRICS = {metric.key: metric for metrics in SECTIONS.values() for metric in metrics}  # by key
for metric in [metric for metric in METRICS.values() if metric.is_maximum]:
    METRICS[f"{metric.key}_min"] = Metric(f"{metric.key}_min", metric.unit, metric.when, "", "the smallest of the ranks")
    METRICS[f"{metric.key}_rank"] = Metric(f"{metric.key}_rank", "rank", metric.when, "", "the rank of the largest")

if __name__ == "__main__":
    print("| key | unit | when | chart | meaning |\n|---|---|---|---|---|")
    for metric in METRICS.values():
        print(f"| `{metric.key}` | {metric.unit} | {metric.when} | {metric.chart} | {metric.meaning} |")
