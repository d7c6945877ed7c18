"""Predictions of plan.py beside the memory of GPUs that others have published.

    $ python -m benchmarks.published              # results/published-gpu/: points.csv has each setting, with its source
    $ python -m benchmarks.published --measure    # on a GPU: three of these settings, by this program's model

A point is the peak of PyTorch's allocator in MiB. What plan.py's peak leaves out is added step by step:

cublas   the workspaces of cuBLAS, from PyTorch's code
held     masks of attention and caches, from the code of the measured program
end      of whole-model compilation, half of the embedding's bytes (inferred: two gradients, one of 16 bits, beside their sum)
logits   of XL in 16 bits, once more (inferred: Inductor pads the vocabulary of 50257; 50304 needs no padding)
"""

import csv
import datetime
import os
import statistics
import sys
from dataclasses import replace
from typing import Any

import torch

from benchmarks.results import Results
from distributed.machine import MIB
from forecast.prediction import Workload
from forecast.run_memory import gpt_specs, planned_optimizer, predicted, predicted_activations
from model import GPT, GPT2_SIZES, GPTConfig
from zero.flags import Flags

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "results", "published-gpu")
ADDED = "cublas", "held", "end", "logits"
MEASURED = ("124M", "16", "whole"), ("124M", "16", "blocks"), ("XL", "4", "whole")  # series, batch size and what is compiled


def points() -> list[dict[str, str]]:
    """Return the published points."""
    with open(os.path.join(FOLDER, "points.csv"), newline="") as file:
        return list(csv.DictReader(file))


def row(point: dict[str, str], added: tuple[str, ...] = ADDED) -> dict[str, Any]:
    """Return a row of the table: what was measured, and what is predicted."""
    measured, found = int(point["measured_mib"]), peak(point, added)
    figures = {"measured, MiB": measured, "predicted, MiB": round(found), "off by, %": 100 * (found / measured - 1)}
    return {key: point[key] for key in ("series", "block_size", "batch_size")} | figures | {"named in": point["named_in"]}


def config_of(point: dict[str, str]) -> GPTConfig:
    """Return the sizes of the model."""
    sizes = {"block_size": int(point["block_size"]), "vocab_size": int(point["vocab_size"])}
    return GPTConfig(**sizes, **GPT2_SIZES[point["model"]], dropout=0.0, bias=True)


def peak(point: dict[str, str], added: tuple[str, ...]) -> float:
    """Return the predicted peak of one GPU without sharding, in MiB. `added`: see the top of this file."""
    config, batch_size, checkpointing = config_of(point), int(point["batch_size"]), point["checkpointing"] == "yes"
    how = {"compiled": point["compiled"] != "no", "activation_checkpointing": checkpointing}
    activations = predicted_activations(Workload(config, batch_size, point["dtype"], "cuda", **how), "float32")
    whole = [] if point["compiled"] != "whole" else [name for name in added if point.get(f"{name}_again", "yes") == "yes"]
    end, logits = (2 * config.vocab_size * (name in whole) for name in ("end", "logits"))
    end, logits = end * config.n_embd + activations.embedding, logits * batch_size * config.block_size + activations.loss
    held = predicted(gpt_specs(config), Flags(use_zero1=False), planned_optimizer(None), distributed=False)
    beside = sum(int(point[f"{name}_mib"]) for name in ("cublas", "held") if name in added)
    return replace(held, activations=activations._replace(embedding=end, loss=logits)).peak / MIB + beside


def measure() -> None:
    """Train with three of the settings, and print the peaks beside the predictions. A CPU trains small ones, without peaks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for series, batch_size, compiled in MEASURED:
        torch._dynamo.reset()
        point = next(each for each in points() if (each["series"], each["batch_size"]) == (series, batch_size))
        small: dict[str, Any] = {} if device == "cuda" else {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64}
        model = GPT(config := replace(config_of(point), **small)).to(device)
        shape = int(batch_size) if device == "cuda" else 1, config.block_size
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        loss_of = torch.compile(lambda tokens, model=model: model(tokens, tokens)[1], disable=compiled != "whole")
        if compiled == "blocks":
            model.compile_blocks()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(10):
            tokens = torch.randint(config.vocab_size, shape, device=device)
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found = torch.cuda.max_memory_allocated() / MIB if device == "cuda" else float("nan")
        expected = peak({**point, "compiled": compiled}, ("cublas", "end", "logits"))
        theirs = f"published {point['measured_mib']}, {point['held_mib']} of it masks and caches; loss {loss:.2f}"
        print(f"{series}, batch size {batch_size}, {compiled}: {found:.0f} MiB, predicted {expected:.0f}, {theirs}", flush=True)


def main() -> None:
    lines, about = [], {"command": "python -m benchmarks.published", "date": datetime.date.today().isoformat()}
    for count in range(len(ADDED) + 1):
        rows = [row(point, ADDED[:count]) for point in points()]
        errors = [abs(each["off by, %"]) for each in rows]
        text = f"median {statistics.median(errors):.1f} %, largest {max(errors):.1f} %"
        lines.append(f"{len(rows)} peaks, {' + '.join(['plan.py', *ADDED[:count]])}: {text}")
    about |= {"machine": f"none: predicted, torch {torch.__version__}", "setup": "see points.csv"}
    print(Results(FOLDER, about).add("published", "\n".join([*lines, ""]), rows))


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["--measure"] else main()
