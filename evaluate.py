"""Evaluate a checkpoint that this program or nanoGPT wrote, or a released GPT-2, by figures that others report as well.

$ python evaluate.py --out_dir=out-stdlib-char
$ torchrun --standalone --nproc_per_node=8 evaluate.py --out_dir=out-fineweb-gpt2 --tasks=val,hellaswag
$ python evaluate.py --init_from=gpt2 --tasks=hellaswag

val: loss and bits per byte over the whole validation split, in windows of block_size tokens that follow each other, so that
every token but the first is a target once. End-of-text counts with its loss, and has no bytes.

hellaswag (https://arxiv.org/abs/1905.07830), as in dev/data/hellaswag.py of llm.c: the model answers with the ending whose
tokens have the smallest sum (acc) or mean (acc_norm) of losses. It needs GPT-2's vocabulary, or one with all its characters.

The results of a run also go to out_dir/evaluation.json and its report card.
"""

import json
import math
import os
import sys
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from configurator import Dtype, PositiveInt, configure
from data.dataset import DATA_DIR, Dataset, check_tokenizer
from data.vocabulary import Codec, DataError, bytes_of_tokens, gpt2_encoding, load_codec, load_meta, of_size
from distributed import machine
from distributed.exits import exit_on_wrong_input, finish
from distributed.launch import launched
from distributed.ranks import on_rank_0, print0, start
from model import GPT
from run import report
from run.checkpoints import load_newest
from run.logger import FACTS, MetricsFile
from run.metrics import METRICS
from run.progress import Progress
from run.rank_checks import check_vocabulary, compare_model_and_data, compare_settings
from run.wandb_run import WandbRun
from zero.host_comm import gather_objects

# -----------------------------------------------------------------------------
init_from = "resume"  # 'resume': the checkpoint in out_dir; 'gpt2', ..., 'gpt2-xl', or a folder that holds a GPT-2
out_dir = "out"  # folder of the run
tasks: Literal["val", "hellaswag", "val,hellaswag"] = "val"
dataset = ""  # name of a folder in data/; '': the one that the checkpoint was trained on
hellaswag = "hellaswag_val.jsonl"  # the published file
batch_size: PositiveInt = 8  # at a time on a rank: sequences, or examples with their endings
device = "auto"  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: cuda if available, otherwise cpu
dtype: Dtype = "auto"  # auto: best on GPU, float32 on CPU
wandb_log = False  # add the results to the summary of the run in wandb
config = configure(globals(), connects=True)
# -----------------------------------------------------------------------------

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"

Example = tuple[list[int], list[list[int]], int]  # tokens of the context and of each ending, number of the right ending


def read_hellaswag(path: str, codec: Codec) -> list[Example]:
    """Return the examples of the published file.

    Raises:
        ValueError: if it is missing or another one, or the vocabulary lacks one of its characters.
    """
    where, examples = path, []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                fields = json.loads(line.decode("utf-8-sig"))
                (context, *endings), label = [fields["ctx"]] + fields["endings"], int(fields["label"])
                is_label = type(fields["label"]) in (int, str) and label in range(4)
                if len(endings) != 4 or not is_label or not all(isinstance(x, str) and x for x in (context, *endings)):
                    raise ValueError("an example is a context, four endings and a label of 0 to 3")
                examples.append((codec.encode(context), [codec.encode(f" {ending}") for ending in endings], label))
        if not examples:
            raise ValueError("it is empty")
    except DataError as error:
        raise ValueError(f"hellaswag needs GPT-2's vocabulary, or one with the characters of {where}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{where}: no HellaSwag ({type(error).__name__}: {error}); get it by curl -O {URL}, or use --hellaswag=FILE"
        ) from error
    return examples


def own_batches(items: Sequence[Any]) -> list[Any]:
    """Return the batches of this rank. Which items are in a batch together does not depend on the number of ranks."""
    return [items[first : first + batch_size] for first in range(0, len(items), batch_size)[launch.rank :: launch.world_size]]


@torch.inference_mode()
def loss_sums(rows: Sequence[np.ndarray | list[int]], counts: list[int]) -> np.ndarray:
    """Return the sum of the losses of the last `counts` tokens of each row, (len(rows),) float64, in nats.

    A row has at most block_size + 1 tokens.
    """
    shape = len(rows), max(map(len, rows)) - 1
    inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int64)
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        inputs[number, : len(row) - 1] = row[:-1]
        targets[number, len(row) - 1 - count : len(row) - 1] = row[-count:]
    x, y = torch.from_numpy(inputs).to(own_device), torch.from_numpy(targets).to(own_device)
    with autocast:
        losses = model(x, y)[1]
    sums = losses.view_as(y).cpu().double().sum(dim=1).numpy()
    if not np.isfinite(sums).all():
        raise ValueError("the model computes losses that are not finite; try --dtype=float32, or an earlier checkpoint")
    return sums


def val_sums() -> np.ndarray:
    """Return what this rank finds in its part of the validation split: nats, tokens and bytes."""
    tokens, size, lengths = data.tokens["val"], model.config.block_size, bytes_of_tokens(data.meta)
    sums = np.zeros(3)
    for starts in progress.track(own_batches(range(0, len(tokens) - 1, size)), "val"):
        rows = [np.asarray(tokens[start : start + size + 1]) for start in starts]
        counts = [len(row) - 1 for row in rows]
        sums += loss_sums(rows, counts).sum(), sum(counts), sum(lengths[row[1:]].sum() for row in rows)
    return sums


def hellaswag_sums() -> np.ndarray:
    """Return what this rank finds: right answers by the sums of the losses, right ones by their means, and examples."""
    sums, longest = np.zeros(3), model.config.block_size + 1
    for batch in progress.track(own_batches(examples), "hellaswag"):
        labels = [label for _, _, label in batch]
        pairs = [(context, ending) for context, endings, _ in batch for ending in endings]
        rows = [(context + ending)[-longest:] for context, ending in pairs]  # a long text loses its beginning
        counts = [min(len(ending), longest - 1) for _, ending in pairs]
        losses = loss_sums(rows, counts).reshape(len(batch), -1)  # (examples, endings)
        means = losses / np.reshape(counts, losses.shape)
        sums += (losses.argmin(axis=1) == labels).sum(), (means.argmin(axis=1) == labels).sum(), len(batch)
    return sums


def record(checkpoint: dict[str, Any], results: dict[str, float]) -> None:
    """Write the results to the folder of the run and, with `wandb_log`, to wandb. Call it on rank 0 only."""
    report.add_evaluation(out_dir, checkpoint.get("iter_num"), name, results)
    if wandb_log:
        with open(os.path.join(out_dir, FACTS)) as file:
            run = WandbRun({**json.load(file), "wandb_log": True}, checkpoint["wandb_run_id"])
        for event in MetricsFile(out_dir, sys.maxsize, evaluates=False).kept() if run.lacks_history else ():
            run.log(event)
        run.finish(results)


launch = launched()
with exit_on_wrong_input():
    device_name, compute_dtype = machine.resolve(device, dtype)
with exit_on_wrong_input():
    compare_settings(config, device_name, compute_dtype)
    own_device = start(launch, device_name)
autocast, progress = machine.autocast(own_device, compute_dtype), Progress(0, launch.rank)

with exit_on_wrong_input():
    checkpoint = load_newest(out_dir) if init_from == "resume" else None
    own_folder = "" if init_from == "resume" else init_from  # perhaps with a tokenizer
    if wandb_log and not (checkpoint or {}).get("wandb_run_id"):
        raise ValueError("wandb_log=True needs a run in out_dir that was trained with it")
    model = GPT.from_pretrained(init_from) if checkpoint is None else GPT.from_checkpoint(checkpoint)
    model.eval().to(own_device).mean_loss.reduction = "none"
    name = dataset or ("" if checkpoint is None else checkpoint["config"].get("dataset") or "")
    meta = load_meta(os.path.join(DATA_DIR, name)) if name else of_size(model.config.vocab_size)
    fingerprint: dict[str, str] = {}
    if "val" in tasks:
        if not name:
            raise ValueError(f"tasks={tasks} needs a dataset, such as --dataset=openwebtext")
        data = Dataset(name, block_size=1, splits=("val",))
        fingerprint |= data.fingerprint
        data.check(model.config.vocab_size, launch.rank, launch.world_size)
        check_tokenizer(own_folder, meta, name)
    if checkpoint is not None and name:
        check_vocabulary(checkpoint, name, meta)
    elif meta is not None and meta["vocab_size"] != model.config.vocab_size:
        raise ValueError(f"dataset {name} has a vocabulary of {meta['vocab_size']}, {init_from} of {model.config.vocab_size}")
    if "val" in tasks and meta is None:
        gpt2_encoding()  # tiktoken may download it
    if "hellaswag" in tasks:
        examples = read_hellaswag(hellaswag, load_codec(meta, model.config.vocab_size, own_folder))
        fingerprint["hellaswag"] = f"checksum {zlib.crc32(repr(examples).encode()):08x}"

if checkpoint is not None:
    print0(f"evaluating the checkpoint of iteration {checkpoint.get('iter_num', '?')} in {out_dir}")
own = np.zeros(6)
with exit_on_wrong_input():
    compare_model_and_data(model, fingerprint, iter_num=checkpoint and checkpoint.get("iter_num"))
    if "val" in tasks:
        own[:3] = val_sums()
    if "hellaswag" in tasks:
        own[3:] = hellaswag_sums()
nats, targets, val_bytes, right, right_norm, count = np.sum(gather_objects(own.tolist()), axis=0).tolist()
rates = {
    "evaluation/val_loss": (nats, targets),
    "evaluation/val_bits_per_byte": (nats / math.log(2), val_bytes),
    "evaluation/hellaswag_acc": (right, count),
    "evaluation/hellaswag_acc_norm": (right_norm, count),
}
results = {key: part / whole for key, (part, whole) in rates.items() if whole > 0}  # nan: the bytes of a token are unknown
for key, value in results.items():
    print0(f"{key:<32}{value:8.4f}  {METRICS[key].meaning}")
if checkpoint is not None:
    with exit_on_wrong_input():
        on_rank_0(partial(record, checkpoint, results))
finish()
