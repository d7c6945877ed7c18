"""Train a GPT with one process, or with many processes and sharded optimizer state (ZeRO-1).

One process on a CPU or a GPU:
    $ python train.py config/train_shakespeare_char.py

Two processes on a laptop, without a GPU and without a download:
    $ torchrun --standalone --nproc_per_node=2 train.py config/train_stdlib_char.py

Eight GPUs on one machine:
    $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

Eight GPUs on each of two machines, where the first machine has the address 10.0.0.1:
    (first)  $ torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 train.py config/train_gpt2.py
    (second) $ torchrun --nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 train.py config/train_gpt2.py

A config file or --key=value overrides any setting below. SIGTERM and Ctrl-C save a checkpoint after the current step
and stop the run. SIGUSR1 saves and continues. Exit code 0: done; 2: wrong input, explained in one line; 1: any other
error.
"""

import math
import os
import time
from typing import Literal

import numpy as np
import torch

from configurator import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitInterval, configure
from data.dataset import EVALUATION_BATCH, Dataset, prepare_if_missing
from distributed import machine
from distributed.exits import exit_on_wrong_input, finish
from distributed.launch import launched
from distributed.machine import environment
from distributed.position import position
from distributed.ranks import mean_over_ranks, print0, start
from distributed.signals import Action, Signals
from distributed.watchdog import Watchdog
from forecast.memory import Extras, Workload
from model import GPT, GPTConfig, check_block_size
from run.agreement import DesyncCheck, compare_model_and_data, compare_settings, compare_with_checkpoint
from run.checkpoints import Checkpoints
from run.guard import Guard
from run.logger import Logger
from run.memory import MemoryCheck, describe
from run.meter import Meter
from run.profiling import Profiler
from run.progress import Progress
from run.sampling import Sampler
from run.shadow import Shadow
from zero import ShardedGradScaler
from zero.build import build, clip_grad_norm_
from zero.flags import Flags

# -----------------------------------------------------------------------------
# default settings: GPT-2 (124M) on OpenWebText
# input and output
out_dir = "out"
eval_interval: PositiveInt = 2000
log_interval: PositiveInt = 1
metric_interval: PositiveInt = 10  # iterations between measurements that compare the ranks
eval_iters: PositiveInt = 200  # an evaluation takes 12 times as many sequences of each split, for any batch_size
sample_interval: NonNegativeInt = 0  # iterations from one short sample of text to the next; 0: no samples
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # after every evaluation and at the end; False: only when the validation loss improves
on_save_error: Literal["continue", "stop"] = "continue"  # if a checkpoint cannot be written; stop: exit code 1
keep_checkpoints: NonNegativeInt = 0  # number of ckpt_<iter>.pt files to keep, in addition to ckpt.pt and ckpt_prev.pt
async_save = False  # write checkpoints in the background
checkpoint_format: Literal["consolidated", "sharded"] = "consolidated"  # rank 0 writes one file, or each rank its part
# 'auto': resume if out_dir has a checkpoint, otherwise scratch; so torchrun --max-restarts=3 goes on after a rank is lost
init_from = "scratch"  # 'scratch', 'resume', 'auto', 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder with a GPT-2
# wandb
wandb_log = False
wandb_project = "owt"
wandb_run_name = "gpt2"
wandb_mode: Literal["online", "offline", "disabled"] = "online"  # the variable WANDB_MODE comes first
# data
dataset = "openwebtext"  # name of a folder in data/
gradient_accumulation_steps: PositiveInt = 5 * 8  # micro-steps per iteration, summed over all ranks
batch_size: PositiveInt = 12  # sequences per micro-step
block_size: PositiveInt = 1024  # tokens per sequence
# model
n_layer = 12
n_head = 12
n_embd = 768
dropout = 0.0  # 0 for pretraining; try 0.1 for finetuning
bias = False  # use biases in LayerNorm and Linear layers
activation_checkpointing = False  # keep only the input of each block for backward, and compute the block again: less memory
# AdamW
learning_rate: NonNegativeFloat = 6e-4
max_iters: NonNegativeInt = 600000
weight_decay: NonNegativeFloat = 1e-1
beta1: UnitInterval = 0.9
beta2: UnitInterval = 0.95
grad_clip: NonNegativeFloat = 1.0  # maximum gradient norm; 0.0 disables clipping
on_nonfinite: Literal["stop", "skip"] = "stop"  # if the loss or gradient norm is inf or nan: exit code 1, or skip the update
max_nonfinite: PositiveInt = 10  # number of consecutive skipped updates that ends the run
# learning rate
decay_lr = True
warmup_iters: NonNegativeInt = 2000
lr_decay_iters = 600000  # should be about max_iters, as in Chinchilla
min_lr: NonNegativeFloat = 6e-5  # should be about learning_rate / 10
# ZeRO-1
use_zero1 = True  # shard the optimizer state across the ranks
zero1_impl: Literal["sharded", "torch"] = "sharded"  # 'sharded': the code in zero/; 'torch': ZeroRedundancyOptimizer
zero_bucket_mb: Literal["auto"] | PositiveFloat = "auto"  # 'sharded': megabytes per bucket; auto: 4 to 25, by the model's size
shard_gradients = False  # 'sharded': also keep only 1/N of the gradients; costs one reduce-scatter per micro-step
param_dtype: Literal["float32", "bfloat16"] = "float32"  # weights and gradients; 'sharded' keeps float32 masters, 1/N per rank
zero_shard_size: NonNegativeInt = 0  # 'sharded': ranks that share the optimizer state, such as the GPUs of a machine; 0: all
zero_check_reads = False  # 'sharded', for debugging: refuse early reads of parameters in all iterations, not only the first
desync_check_interval: NonNegativeInt = 0  # iterations between comparisons of the ranks' weights; 0: no comparison
# system
backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl if every rank has its own GPU, otherwise gloo
dist_timeout_s: PositiveFloat = 600.0  # seconds without progress on any rank after which the ranks end, with the reason
device = "auto"  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: cuda if available, otherwise cpu
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # float16 uses GradScaler; auto: best on GPU, float32 on CPU
compile = torch.cuda.is_available()  # compile the model block by block with torch.compile
seed: NonNegativeInt = 1337
shadow_check: NonNegativeInt = 0  # iterations in which plain AdamW trains a copy, to print how far the weights differ; 0: off
profile = False  # after a few iterations, write a trace of torch.profiler to out_dir/profile
profile_memory = False  # the same, with the allocations of memory; on a GPU also write a snapshot of its memory
config = configure(globals())
# -----------------------------------------------------------------------------

# ranks and devices
launch = launched()  # by torchrun, or as a single process
rank, local_rank, world_size = launch.rank, launch.local_rank, launch.world_size
progress = Progress(max_iters, rank)
# Every rank runs every line, and print0 prints on rank 0: a collective must never stand where only some ranks go.
with exit_on_wrong_input():
    device, dtype = machine.resolve(device, dtype, param_dtype)
    compare_settings(launch, config | {"device": device.partition(":")[0], "dtype": dtype})
    if gradient_accumulation_steps % world_size:
        raise ValueError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} cannot be split over {world_size} ranks; "
            f"use --gradient_accumulation_steps={math.ceil(gradient_accumulation_steps / world_size) * world_size}"
        )
    device = start(launch, device, backend, dist_timeout_s)
Watchdog(dist_timeout_s, out_dir)  # ends the ranks if they hang
autocast = machine.autocast(device, dtype)
profiler = Profiler(os.path.join(out_dir, "profile"), rank, device, profile, profile_memory)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
micro_steps = gradient_accumulation_steps // world_size  # per iteration on this rank
sequences_per_iter = gradient_accumulation_steps * batch_size  # on all ranks together
tokens_per_iter = sequences_per_iter * block_size
print0(f"tokens per iteration will be: {tokens_per_iter:,}")
if machine.is_slow_on_cpu(device, dtype):
    print0(f"note: this CPU has no {dtype} instructions; --dtype=float32 will be faster")

# data
with exit_on_wrong_input(), progress.task(f"preparing {dataset}"):
    if local_rank == 0:
        prepare_if_missing(dataset)
with exit_on_wrong_input():
    data = Dataset(dataset, block_size)


def get_batch(split, offsets):
    """Returns the sequences at `offsets` and their targets, on the device, each (len(offsets), block_size)."""
    x, y = (torch.from_numpy(tokens) for tokens in data.batch(split, offsets))
    if device.type == "cuda":  # pinned memory: the copy overlaps with the computation
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


# model
torch.manual_seed(seed)
iter_num = 0
data_position = 0  # number of sequences that all ranks together have seen
best_val_loss = float("inf")
checkpoint = wandb_run_id = None
saving = {"always": always_save_checkpoint, "read_only": eval_only, "stop_on_error": on_save_error == "stop"}
checkpoints = Checkpoints(out_dir, keep_checkpoints, async_save, checkpoint_format, **saving)
with exit_on_wrong_input(), progress.task("loading the model"):
    init_from = checkpoints.resolve(init_from)
    if init_from == "scratch":
        print0("Initializing a new model from scratch")
        vocab_size = data.vocab_size or GPTConfig.vocab_size
        raw_model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias))
    elif init_from == "resume":
        checkpoint = checkpoints.load()
        compare_with_checkpoint(checkpoint, config, data)
        raw_model = GPT.from_checkpoint(checkpoint, dropout)
        iter_num, wandb_run_id = checkpoint["iter_num"], checkpoint.get("wandb_run_id")
        data_position = checkpoint.get("data_position", iter_num * sequences_per_iter)
        if not math.isnan(checkpoint["best_val_loss"]):  # with nan, no later loss would be an improvement
            best_val_loss = float(checkpoint["best_val_loss"])
        print0(f"with the checkpoint's model, at iteration {iter_num}: {raw_model.config}")
    elif init_from.startswith("gpt2") or os.path.isdir(init_from):
        print0(f"Initializing from GPT-2 weights: {init_from}")
        raw_model = GPT.from_pretrained(init_from, dropout)
    else:
        raise ValueError(f"init_from={init_from} is neither scratch, resume, auto, a gpt2 name nor a folder that holds a GPT-2")
    check_block_size(block_size, raw_model.config.block_size, croppable=init_from != "resume")
    raw_model.crop_block_size(block_size)
    data.check(raw_model.config.vocab_size, rank, world_size)
with exit_on_wrong_input(), progress.task("comparing the ranks"):
    compare_model_and_data(raw_model, data, iter_num=iter_num, data_position=data_position, best_val_loss=best_val_loss)
raw_model.to(device)
print0(f"number of parameters: {raw_model.num_params() / 1e6:.2f}M")
raw_model.activation_checkpointing = activation_checkpointing
if compile:
    raw_model.compile_blocks()

# optimizer: `build` chooses the implementation from the ZeRO-1 settings
with exit_on_wrong_input(), progress.task("making the optimizer"):
    flags = Flags(use_zero1, zero1_impl, zero_bucket_mb, shard_gradients, param_dtype, zero_check_reads, zero_shard_size)
    groups = raw_model.param_groups(weight_decay)
    shadow = Shadow(0 if eval_only else shadow_check, raw_model, groups, checkpoints, checkpoint)
    model, optimizer = build(raw_model, groups, flags, overlap=True, lr=learning_rate, betas=(beta1, beta2))
    scaler = ShardedGradScaler(device.type, enabled=dtype == "float16")
    if checkpoint is not None:
        checkpoints.restore(optimizer, checkpoint)
        if checkpoint.get("scaler"):  # the checkpoint is from a float16 run
            scaler.load_state_dict(checkpoint["scaler"])
        checkpoint = None  # frees the memory
print0(describe(optimizer, use_zero1))


@torch.no_grad()
@position.at("evaluation")
def estimate_loss():
    """Returns the mean loss over sequences of each split. Needs to be called on all ranks.

    The ranks share the sequences. Every evaluation uses the same sequences, so only the model can change the loss.
    """
    result, count = {}, eval_iters * EVALUATION_BATCH
    raw_model.eval()
    for split in ("train", "val"):
        batches = data.evaluation(split, seed, count, batch_size, rank, world_size)
        total = torch.zeros((), device=device)
        for offsets in progress.track(batches, f"evaluating on {split}"):
            x, y = get_batch(split, offsets)
            with autocast:
                total.add_(raw_model(x, y)[1], alpha=(offsets >= 0).sum().item())  # the mean of so many sequences
        result[split] = mean_over_ranks(total) * world_size / count
    raw_model.train()
    return result


def get_lr(iteration):
    """Returns the learning rate: linear warm-up, then cosine decay to `min_lr`."""
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    if iteration > lr_decay_iters:
        return min_lr
    ratio = (iteration - warmup_iters) / max(1, lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def save_checkpoint():
    """Write ckpt.pt, unless the guard has ended the run. Needs to be called on all ranks."""
    guard.report(iter_num - 1)
    desync.check(iter_num, now=True)
    if guard.failed:
        return
    values = {
        "model_args": vars(raw_model.config),
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
        "config": config,
        "scaler": scaler.state_dict(),
        "data_position": data_position,
        "wandb_run_id": log.run_id or wandb_run_id,
        **data.identity(),
    }
    with progress.task("saving the checkpoint"):
        checkpoints.save(raw_model, optimizer, values)


# logging
with exit_on_wrong_input(), progress.task("starting the log"):
    checkpoints.claim()
    facts: dict[str, object] = {
        "implementation": flags.implementation(world_size),
        "world_size": world_size,
        "micro_steps": micro_steps,
    }
    facts |= {"parameters": raw_model.num_params(), "dtype": dtype, **environment(device)}
    folder = None if eval_only or iter_num > max_iters else out_dir
    log = Logger(folder, iter_num if init_from == "resume" else None, config | facts, wandb_run_id)
    sampler = Sampler(0 if eval_only else sample_interval, raw_model, data.meta, autocast, log, seed)
workload = Workload(raw_model.config, batch_size, dtype, device.type, activation_checkpointing)
memory = MemoryCheck(log, model, optimizer, workload, shard_gradients, micro_steps, compile, Extras.of(config))
meter = Meter(log, model, optimizer, memory, dtype, tokens_per_iter, raw_model.flops_per_token(), max_iters, metric_interval)
signals = Signals()
guard = Guard(raw_model, optimizer, scaler, limit=1 if on_nonfinite == "stop" else max_nonfinite, alert=log.alert)
shadow.follow(optimizer, scaler, guard.limit, autocast, micro_steps, grad_clip)
desync = DesyncCheck(raw_model, optimizer, desync_check_interval, guard.fail)

# training loop
batches = data.micro_batches(seed, data_position, batch_size, gradient_accumulation_steps, rank, world_size)
x, y = get_batch("train", next(batches))
first_iter = iter_num
action = Action.CONTINUE
if iter_num > max_iters:
    print0(f"nothing to train: the checkpoint is at iteration {iter_num}, beyond max_iters={max_iters}; use a larger one")
if iter_num <= max_iters and not eval_only:
    memory.announce(iter_num)
meter.restart()
while iter_num <= max_iters or eval_only:
    position.begin_iteration(iter_num)
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for group in optimizer.param_groups:
        group["lr"] = lr

    if iter_num % eval_interval == 0 or eval_only:
        begin = time.perf_counter()
        losses = estimate_loss()
        meter.log_evaluation(iter_num, losses, lr, time.perf_counter() - begin)
        if eval_only:
            break
        if guard.in_a_row or not all(map(math.isfinite, losses.values())):
            print0("WARNING: not saved: the loss or the last gradients are not finite")
        elif losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = min(best_val_loss, losses["val"])
            if iter_num > first_iter:
                save_checkpoint()
        meter.restart()
    if sampler.write(iter_num):
        meter.restart()

    # seed dropout from (seed, iteration, rank): a resumed run repeats it, and an evaluation does not change it
    torch.manual_seed(int(np.random.SeedSequence((seed, iter_num, rank)).generate_state(1)[0]))
    is_logged = iter_num % log_interval == 0
    meter.begin_iteration(iter_num, is_logged)
    loss_sum = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        model.require_backward_grad_sync = micro_step == micro_steps - 1  # sync in the last micro-step; shard_gradients: in all
        shadow.micro_step(x, y)
        with meter.phase("forward"), autocast:
            loss = model(x, y)[1]  # the logits, which can be the largest tensor, are not kept
        loss_sum += loss.detach()
        with meter.phase("data"):
            x, y = get_batch("train", next(batches))  # prefetch the next batch while the device computes
        with meter.phase("backward"):
            scaler.scale(loss / micro_steps).backward()
    desync.check(iter_num)  # all weights have arrived by now, and the update will overwrite them
    with meter.phase("clip"):
        scaler.unscale_(optimizer)
        norms = clip_grad_norm_(optimizer, grad_clip or math.inf)
    guard.check(loss_sum, norms)  # waits for all ranks
    meter.measure_memory("before_step")
    with meter.phase("update"):
        scaler.step(optimizer)
        scaler.update()
    if iter_num >= first_iter + max(2, shadow_check):
        memory.compare(iter_num)  # once, as soon as there is optimizer state
    optimizer.zero_grad(set_to_none=True)
    meter.measure_memory("after_step")
    data_position += sequences_per_iter
    if is_logged:  # waits for the device
        progress.show(meter.log_iteration(iter_num, loss_sum / micro_steps, norms.total, lr, data_position * block_size))
    if is_logged or (iter_num + 1) % eval_interval == 0 or device.type == "cpu":  # report() waits for a GPU
        guard.report(iter_num)
    progress.update(iter_num)
    if shadow.update():
        meter.restart(new_peak=True)
    if profiler.step():
        meter.restart()
    iter_num += 1

    must_fail = checkpoints.report(log) or guard.failed
    action = signals.agree(
        Action.FAIL if must_fail else checkpoints.due(iter_num, is_end=iter_num > max_iters and not guard.in_a_row)
    )
    if action in (Action.SAVE, Action.SAVE_AND_STOP):
        save_checkpoint()
        meter.restart()
    if action in (Action.SAVE_AND_STOP, Action.FAIL) or guard.failed:
        break

shadow.finish()
checkpoints.wait()
guard.report(iter_num - 1)
last_line = f"stopped by a signal before iteration {iter_num}; continue with --init_from=resume"
must_fail = checkpoints.report(log, required=True) or guard.failed
failed = signals.agree(Action.FAIL if must_fail else Action.CONTINUE) == Action.FAIL
if failed:
    checkpoints.explain_failure(diverged=guard.failed)
profiler.finish()
progress.close()
log.finish(int(failed))
finish(int(failed), last_line if action == Action.SAVE_AND_STOP else "")
