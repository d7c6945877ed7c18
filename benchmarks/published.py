"""Predictions of plan.py beside the memory of GPUs that others have published.

    $ python -m benchmarks.published              # results/published-gpu/: points.csv has each setting, with its source
    $ python -m benchmarks.published --measure    # on a GPU: three of these settings, by this program's model

A point is the peak of PyTorch's allocator in MiB, or what ZeRO-1 saves. To the prediction come the workspaces of cuBLAS, and
the masks of attention that the measured program holds. Programs that compile the whole model also take, which is inferred:
end      half of the embedding's bytes at the end of backward: its two gradients, one of 16 bits, exist beside their sum
logits   the 16-bit logits once more in XL, where Inductor pads the vocabulary of 50257; 50304 needs no padding
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
from distributed.machine import CARDS, MIB
from forecast.prediction import Workload
from forecast.run_memory import gpt_specs, planned_optimizer, predicted, predicted_activations
from model import GPT, GPT2_SIZES, GPTConfig
from zero.flags import Flags

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "results", "published-gpu")
SHOWN = "series", "what", "block_size", "batch_size", "ranks"
MEASURED = ("124M", "16", "whole"), ("124M", "16", "blocks"), ("XL", "4", "whole")  # series, batch size and what is compiled


def points() -> list[dict[str, str]]:
    """Return the published points."""
    with open(os.path.join(FOLDER, "points.csv"), newline="") as file:
        return list(csv.DictReader(file))


def row(point: dict[str, str]) -> dict[str, Any]:
    """Return a row of the table: what was measured, and what is predicted."""
    measured, found = int(point["measured_mib"]), peak(point) if point["what"] == "peak" else saved(point)
    figures = {"measured, MiB": measured, "predicted, MiB": round(found), "off by, %": 100 * (found / measured - 1)}
    return {key: point[key] for key in SHOWN} | figures | {"corrected from it": point["corrected_from"]}


def config_of(point: dict[str, str]) -> GPTConfig:
    """Return the sizes of the model."""
    sizes = {"block_size": int(point["block_size"]), "vocab_size": int(point["vocab_size"])}
    return GPTConfig(**sizes, **GPT2_SIZES[point["model"]], dropout=0.0, bias=True)


def peak(point: dict[str, str]) -> float:
    """Return the predicted peak of one GPU without sharding, in MiB."""
    config, batch_size, checkpointing = config_of(point), int(point["batch_size"]), point["checkpointing"] == "yes"
    how = {"compiled": point["compiled"] != "no", "activation_checkpointing": checkpointing}
    activations = predicted_activations(Workload(config, batch_size, point["dtype"], "cuda", **how), "float32")
    if point["compiled"] == "whole":
        logits = 2 * batch_size * config.block_size * config.vocab_size * (point["logits_again"] == "yes")
        end = activations.embedding + 2 * config.vocab_size * config.n_embd
        activations = activations._replace(embedding=end, loss=activations.loss + logits)
    held = predicted(gpt_specs(config), Flags(use_zero1=False), planned_optimizer(None), distributed=False)
    beside = CARDS[point["gpu"]].cublas_mib + float(point["held_mib"])
    return replace(held, activations=activations).peak / MIB + beside


def saved(point: dict[str, str]) -> float:
    """Return the predicted MiB of state and masters that a rank saves by ZeRO-1 with bfloat16 weights."""
    how = gpt_specs(config_of(point)), Flags(param_dtype="bfloat16"), planned_optimizer(None)
    alone, shared = (predicted(*how, world_size=size).at("before step") for size in (1, int(point["ranks"])))
    return sum(alone[purpose] - shared[purpose] for purpose in ("state", "master")) / MIB


def measure() -> None:
    """Train with three of the settings, and print the peaks beside the predictions. A CPU trains small ones, without peaks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for series, batch_size, compiled in MEASURED:
        point = next(each for each in points() if (each["series"], each["batch_size"]) == (series, batch_size))
        small: dict[str, Any] = {} if device == "cuda" else {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 64}
        model = GPT(config := replace(config_of(point), **small)).to(device)
        shape = int(batch_size) if device == "cuda" else 1, config.block_size
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        forward = torch.compile(model, disable=compiled != "whole")
        if compiled == "blocks":
            model.compile_blocks()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        for _ in range(10):
            tokens = torch.randint(config.vocab_size, shape, device=device)
            with torch.autocast(device, torch.bfloat16):
                loss = forward(tokens, tokens)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        found = torch.cuda.max_memory_allocated() / MIB if device == "cuda" else float("nan")
        expected = peak({**point, "compiled": compiled, "held_mib": "0"})
        theirs = f"published {point['measured_mib']} of which {point['held_mib']} are masks, loss {loss:.2f}"
        print(f"{series}, batch size {batch_size}, {compiled}: {found:.0f} MiB, predicted {expected:.0f}, {theirs}", flush=True)


def main() -> None:
    rows = [row(point) for point in points()]
    titles = []
    for name, some in ("all", rows), ("no correction was made from", [each for each in rows if not each["corrected from it"]]):
        errors = [abs(each["off by, %"]) for each in some]
        titles.append(f"{len(some)} points ({name}): median {statistics.median(errors):.1f} %, largest {max(errors):.1f} %")
    about = {"command": "python -m benchmarks.published", "date": datetime.date.today().isoformat()}
    about |= {"machine": f"none: predicted, torch {torch.__version__}", "setup": "see points.csv"}
    print(Results(FOLDER, about).add("published", f"Memory of GPUs: {'; '.join(titles)}", rows))


if __name__ == "__main__":
    measure() if sys.argv[1:] == ["--measure"] else main()
