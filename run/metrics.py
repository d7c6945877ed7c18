"""Every metric of a run, declared once. This prints them as a table:

    $ python -m run.metrics

To add a metric, add a line to CHARTS, and log it where it is computed (run/meter.py). The workspace in wandb then has it in
that chart. The page of dashboard.py has a curve of each metric in "Others", and of each that is not declared. This module
imports nothing of this repository, because charts/ reads it, too.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """A number or a text that a run logs.

    Attributes:
        key: its name in metrics.jsonl, wandb and TensorBoard.
        unit: of its values, "text" for texts. MB are 10^6 bytes.
        when: it is logged. "iteration": each logged one; times are means since the one before. "ranks": some of these, because
            it needs a collective. "summary": it describes the whole run, in wandb's summary and in the report card.
        meaning: what it is, of rank 0 if nothing else is said.
        best: the value that wandb's summary shows, "min" or "max"; "": the last one.
        is_maximum: over the ranks. Where they differ, `<key>_min` and `<key>_rank`, the rank of the maximum, are logged, too.
    """

    key: str
    unit: str
    when: str
    meaning: str
    best: str = ""
    is_maximum: bool = False


NATS = "nats per token"
# by section and chart of the workspace; "": no chart
CHARTS: dict[str, dict[str, list[Metric]]] = {
    "Loss": {
        "Loss of the global batch": [Metric("iter/loss", NATS, "iteration", "mean over micro-steps and ranks", "min")],
        "Validation loss": [
            Metric("val/loss", NATS, "evaluation", "mean over 12 * eval_iters sequences, the same ones each time", "min")
        ],
        "Training loss at evaluations": [Metric("train/loss", NATS, "evaluation", "the same for the training data", "min")],
        "Gradient norm before clipping": [Metric("iter/grad_norm", "norm", "iteration", "norm of all gradients together")],
        "Learning rate": [Metric("lr", "", "iteration, evaluation", "learning rate")],
        "Largest loss of a rank": [Metric("iter/loss_max_rank", NATS, "ranks", "the largest loss of a single rank")],
        "": [
            Metric("iter", "", "always", "the iteration; an evaluation runs before the iteration of the same number"),
            Metric("iter/tokens", "tokens", "iteration, end", "that all ranks together have seen since the run began"),
        ],
    },
    "Summary": {
        "Peak memory, MB": [Metric("peak_memory_mb", "MB", "summary", "largest memory/peak_mb")],
        "Median tokens per second": [
            Metric("median_tokens_per_second", "tokens/s", "summary", "median of throughput/tokens_per_second")
        ],
        "Best validation loss": [Metric("best_val_loss", NATS, "summary", "smallest val/loss")],
        "": [
            Metric("first_loss", NATS, "summary", "first iter/loss"),
            Metric("best_loss", NATS, "summary", "smallest iter/loss"),
            Metric("last_loss", NATS, "summary", "last iter/loss"),
            Metric("first_val_loss", NATS, "summary", "first val/loss"),
            Metric("last_val_loss", NATS, "summary", "last val/loss"),
            Metric("best_val_bits_per_byte", "bits", "summary", "of best_val_loss, for a vocabulary with texts in meta.pkl"),
            Metric("median_mfu", "%", "summary", "median of mfu"),
            Metric("median_exposed_ms", "ms", "summary", "median of comm/exposed_ms"),
            Metric("median_exposed_percent", "%", "summary", "median of comm/exposed_percent"),
            Metric("checkpoints", "", "summary", "number of checkpoints written"),
            Metric("restarts", "", "summary", "how often the run was resumed"),
            Metric("warnings", "", "summary", "number of warnings"),
        ],
    },
    "Memory": {
        "At three points of a step, MB": [
            Metric("memory/after_init_mb", "MB", "ranks", "of tensors, before the first step", is_maximum=True),
            Metric("memory/before_step_mb", "MB", "ranks", "of tensors, with all gradients", is_maximum=True),
            Metric("memory/after_step_mb", "MB", "ranks", "of tensors, without gradients", is_maximum=True),
        ],
        "Peak and its prediction, MB (on a CPU the peak includes Python)": [
            Metric("memory/peak_mb", "MB", "ranks", "since the one before; GPU: tensors, CPU: the process", "max", True),
            Metric("memory/predicted_mb", "MB", "ranks", "predicted peak of the tensors of the fullest rank"),
        ],
        "Optimizer state of a rank, MB": [
            Metric(
                "memory/optimizer_state_mb", "MB", "ranks", "AdamW's moments or Muon's momentum, and masters", is_maximum=True
            )
        ],
        "Less than without sharding, gradients included, MB": [
            Metric("memory/saved_mb", "MB", "ranks", "parameters, gradients, state and buckets: without sharding, less held")
        ],
        "Predicted peak, MB": [Metric("memory/predicted_peak_mb", "MB", "start", "memory/predicted_mb, once")],
        "Activations, predicted, MB": [
            Metric("memory/predicted_activations_mb", "MB", "start", "that forward keeps for backward")
        ],
        **{
            f"{purpose.capitalize()}, predicted and measured, MB": [
                Metric(f"memory/predicted_{purpose}_mb", "MB", "start", f"{name} before a step"),
                Metric(f"memory/measured_{purpose}_mb", "MB", "third iteration", f"{name} of the fullest rank before its step"),
            ]
            for purpose, name in {
                "parameters": "parameters",
                "gradients": "gradients",
                "state": "optimizer state",
                "master": "float32 masters or remainders of bfloat16 weights",
                "buckets": "buckets of the communication",
            }.items()
        },
        "": [
            Metric("memory/measured_peak_mb", "MB", "third iteration, GPU", "of the fullest rank, since the start"),
            Metric("memory/reserved_mb", "MB", "ranks, GPU", "what PyTorch's allocator has taken", is_maximum=True),
            Metric("memory/alloc_retries", "", "ranks, GPU", "how often it had to free its reserve, if ever", is_maximum=True),
            Metric("memory/ooms", "", "ranks, GPU", "how often it found no memory, if ever", is_maximum=True),
        ],
    },
    "Throughput": {
        "Tokens per second": [Metric("throughput/tokens_per_second", "tokens/s", "iteration", "of all ranks together", "max")],
        "Tokens per second per rank": [
            Metric("throughput/tokens_per_second_per_rank", "tokens/s", "iteration", "the same, divided by the number of ranks")
        ],
        "TFLOP/s per rank": [
            Metric("throughput/tflops_per_rank", "TFLOP/s", "iteration", "of the model, without activation checkpointing")
        ],
        "Step, ms": [Metric("time/step_ms", "ms", "iteration", "without evaluations and checkpoints")],
        "Parts of a step, ms": [
            Metric("time/data_ms", "ms", "iteration", "the host prepares batches; a GPU computes meanwhile"),
            Metric("time/forward_backward_ms", "ms", "iteration", "all micro-steps, with their communication"),
            Metric("time/optimizer_ms", "ms", "iteration", "clipping and update, with their communication"),
        ],
        "MFU, %": [Metric("mfu", "%", "iteration, evaluation", "running mean of model FLOP/s by the device's peak", "max")],
        "Time to the end of the run, hours": [
            Metric("throughput/eta_hours", "hours", "iteration", "until max_iters, with evaluations and checkpoints")
        ],
        "Rank spread, ms": [
            Metric("time/rank_spread_ms", "ms", "ranks", "how much longer the slowest rank computes than the fastest")
        ],
        "": [
            Metric("time/slowest_rank", "rank", "ranks", "the rank that computes longest"),
            Metric("time/eval_s", "s", "evaluation", "duration of the evaluation"),
            Metric("time/elapsed_s", "s", "iteration, evaluation, end", "of training, without what a restart has lost"),
        ],
    },
    "Communication": {
        "Exposed, % of a step": [Metric("comm/exposed_percent", "%", "iteration", "comm/exposed_ms by time/step_ms")],
        "Exposed, by kind, ms": [
            Metric("comm/exposed_ms", "ms", "iteration", "the computation waits for collectives, and so for slower ranks"),
            Metric("comm/exposed_all_reduce_ms", "ms", "iteration", "adamw, torch: gradients; sharded: norm and scalars"),
            Metric("comm/exposed_reduce_scatter_ms", "ms", "iteration", "sharded: gradients, before clipping"),
            Metric("comm/exposed_all_to_all_ms", "ms", "iteration", "Muon: matrices to their owners and back"),
            Metric("comm/exposed_all_gather_ms", "ms", "iteration", "sharded: parameters, in the next forward"),
            Metric("comm/exposed_broadcast_ms", "ms", "iteration", "torch: parameters, after the update"),
        ],
        "Sent per step, by kind, MB": [
            Metric("comm/sent_mb_per_step", "MB", "iteration", "for gradients and parameters"),
            Metric("comm/sent_all_reduce_mb_per_step", "MB", "iteration", "as a ring: 2 (N - 1) / N of the bytes"),
            Metric("comm/sent_reduce_scatter_mb_per_step", "MB", "iteration", "counted where they are sent"),
            Metric("comm/sent_all_to_all_mb_per_step", "MB", "iteration", "matrices of Muon"),
            Metric("comm/sent_all_gather_mb_per_step", "MB", "iteration", "counted where they are sent"),
            Metric("comm/sent_broadcast_mb_per_step", "MB", "iteration", "mean over the ranks: (N - 1) / N of the bytes"),
        ],
    },
    "Checkpoints": {
        "Consolidate, s": [Metric("checkpoint/consolidate_s", "s", "save", "until the state was collected")],
        "Write, s": [Metric("checkpoint/write_s", "s", "save", "until the file was on the disk")],
        "Training blocked, s": [
            Metric("checkpoint/blocked_s", "s", "save", "training waited; with async_save for the save before, too")
        ],
        "Bytes": [Metric("checkpoint/bytes", "bytes", "save", "size of the checkpoint, shards included")],
        "": [Metric("checkpoint/error", "text", "failed save", "why the file could not be written")],
    },
    "Samples": {
        "Samples": [Metric("sample/text", "text", "every sample_interval", "what the model writes; in wandb, a table")],
        "": [Metric("warning", "text", "warning", "its text")],
    },
    "Others": {},
}

METRICS = {metric.key: metric for charts in CHARTS.values() for metrics in charts.values() for metric in metrics}  # by key
for metric in [metric for metric in METRICS.values() if metric.is_maximum]:
    METRICS[f"{metric.key}_min"] = Metric(f"{metric.key}_min", metric.unit, metric.when, "the smallest of the ranks")
    METRICS[f"{metric.key}_rank"] = Metric(f"{metric.key}_rank", "rank", metric.when, "the rank of the largest")

if __name__ == "__main__":
    print("| key | unit | when | meaning |\n|---|---|---|---|")
    for metric in METRICS.values():
        print(f"| `{metric.key}` | {metric.unit} | {metric.when} | {metric.meaning} |")
