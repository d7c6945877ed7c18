"""Train a GPT on one process, or on many with the optimizer state divided among them (ZeRO-1).

One process, a CPU or a GPU:
    $ python train.py config/train_shakespeare_char.py

Two processes on a laptop, no GPU and no download needed:
    $ torchrun --standalone --nproc_per_node=2 train.py config/train_stdlib_char.py

Eight GPUs of one machine:
    $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

Eight GPUs on each of two machines, the first one at 10.0.0.1:
    (first)  $ torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 train.py config/train_gpt2.py
    (second) $ torchrun --nproc_per_node=8 --nnodes=2 --node_rank=1 --master_addr=10.0.0.1 train.py config/train_gpt2.py

Every setting below can be given in a config file or as --key=value. SIGTERM and Ctrl-C save and end the run
after the step at hand, SIGUSR1 saves. Exit code 0: done; 2: wrong input, said in one line; 1: anything else.
"""

import math
from contextlib import nullcontext
from typing import Literal

import numpy as np
import torch

import hardware
from checkpoints import Checkpoints
from configurator import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, configure
from dataset import Dataset, prepare_if_embedded
from distributed import exit_on_wrong_input, finish, launched, mean_over_ranks, start
from guard import Guard
from logger import Logger, Meter
from model import GPT, GPTConfig
from signals import Action, Signals
from zero import ShardedGradScaler
from zero.build import build, clip_grad_norm_, describe

# -----------------------------------------------------------------------------
# default settings: GPT-2 (124M) on OpenWebText
# input and output
out_dir = "out"
eval_interval: PositiveInt = 2000
log_interval: PositiveInt = 1
eval_iters: PositiveInt = 200
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # after every evaluation, not only after those that improve the validation loss
on_save_error: Literal["continue", "stop"] = "continue"  # when a checkpoint cannot be written; stop: exit code 1
keep_checkpoints: NonNegativeInt = 0  # how many to keep by iteration, ckpt_<iter>.pt, besides ckpt.pt and ckpt_prev.pt
async_save = False  # write checkpoints in the background
checkpoint_format: Literal["consolidated", "sharded"] = "consolidated"  # one file by rank 0; or each rank writes its part
init_from = "scratch"  # 'scratch', 'resume', 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder with a GPT-2
# wandb
wandb_log = False
wandb_project = "owt"
wandb_run_name = "gpt2"
# data
dataset = "openwebtext"  # a folder of data/
gradient_accumulation_steps: PositiveInt = 5 * 8  # micro-steps of all ranks together
batch_size: PositiveInt = 12  # sequences per micro-step
block_size: PositiveInt = 1024  # tokens per sequence
# model
n_layer = 12
n_head = 12
n_embd = 768
dropout = 0.0  # 0 for pretraining; try 0.1 for finetuning
bias = False  # in LayerNorm and Linear
# AdamW
learning_rate: NonNegativeFloat = 6e-4
max_iters: NonNegativeInt = 600000
weight_decay: NonNegativeFloat = 1e-1
beta1: Fraction = 0.9
beta2: Fraction = 0.95
grad_clip: NonNegativeFloat = 1.0  # largest gradient norm; 0.0 for no clipping
on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient norm of inf or nan ends the run, exit code 1; or is skipped
max_nonfinite: PositiveInt = 10  # skipped updates in a row that end the run
# learning rate
decay_lr = True
warmup_iters: NonNegativeInt = 2000
lr_decay_iters = 600000  # about max_iters, as Chinchilla has it
min_lr: NonNegativeFloat = 6e-5  # about learning_rate / 10
# ZeRO-1
use_zero1 = True  # divide the optimizer state among the ranks
zero1_impl: Literal["sharded", "torch"] = "sharded"  # ours, or ZeroRedundancyOptimizer
zero_bucket_mb: PositiveFloat = 75.0  # megabytes per bucket of 'sharded'
shard_gradients = False  # 'sharded': also keep 1/N of the gradients; costs a reduce-scatter per micro-step
param_dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and gradients; 'sharded' keeps 1/N of float32 masters
zero_check_reads = False  # 'sharded': debugging; a parameter that is read before it has arrived is nan
# system
backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl where every rank has a GPU of its own
device = "auto"  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: cuda where there is one
dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # float16 with a scaler; auto: the GPU's best, CPU: float32
compile = torch.cuda.is_available()  # torch.compile, block by block
seed: NonNegativeInt = 1337
config = configure(globals())
# -----------------------------------------------------------------------------

# ranks and devices
launch = launched()  # by torchrun, or alone
ddp, rank, local_rank, world_size, _ = launch
master_process = rank == 0  # this rank prints; what all ranks must take part in stands outside its ifs
with exit_on_wrong_input():
    device, dtype = hardware.resolve(device, dtype, param_dtype)
    if gradient_accumulation_steps % world_size:
        raise ValueError(
            f"gradient_accumulation_steps={gradient_accumulation_steps} cannot be split over {world_size} ranks; "
            f"use --gradient_accumulation_steps={math.ceil(gradient_accumulation_steps / world_size) * world_size}"
        )
    device = start(launch, device, backend)
autocast = nullcontext() if dtype == "float32" else torch.amp.autocast(device.type, hardware.DTYPES[dtype])
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
micro_steps = gradient_accumulation_steps // world_size  # of this rank
sequences_per_iter = gradient_accumulation_steps * batch_size  # of all ranks together
tokens_per_iter = sequences_per_iter * block_size
if master_process:
    print(f"tokens per iteration will be: {tokens_per_iter:,}")
    if hardware.is_slow_on_cpu(device, dtype):
        print(f"note: this CPU has no {dtype} instructions; --dtype=float32 will be faster")

# data
with exit_on_wrong_input():
    if local_rank == 0:
        prepare_if_embedded(dataset)
with exit_on_wrong_input():
    data = Dataset(dataset, block_size)


def get_batch(split, offsets):
    """The sequences at `offsets` and their targets on the device, each (len(offsets), block_size)."""
    x, y = (torch.from_numpy(tokens) for tokens in data.batch(split, offsets))
    if device.type == "cuda":  # pinned, so that the copy runs beside the computation
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


# model
torch.manual_seed(seed)
iter_num = 0
data_position = 0  # sequences that all ranks together have seen
best_val_loss = float("inf")
checkpoint = None
checkpoints = Checkpoints(
    out_dir,
    read_only=eval_only,
    stop_on_error=on_save_error == "stop",
    keep=keep_checkpoints,
    background=async_save,
    format=checkpoint_format,
)
with exit_on_wrong_input():
    if init_from == "scratch":
        origin = "Initializing a new model from scratch"
        vocab_size = data.vocab_size or GPTConfig.vocab_size
        raw_model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias))
    elif init_from == "resume":
        checkpoint = checkpoints.load()
        raw_model = GPT.from_checkpoint(checkpoint, dropout)
        iter_num = checkpoint["iter_num"]
        data_position = checkpoint.get("data_position", iter_num * sequences_per_iter)
        if not math.isnan(checkpoint["best_val_loss"]):  # no loss is less than nan
            best_val_loss = float(checkpoint["best_val_loss"])
        origin = f"Resuming training from {out_dir}\nwith the checkpoint's model, at iteration {iter_num}: {raw_model.config}"
    else:
        origin = f"Initializing from GPT-2 weights: {init_from}"
        raw_model = GPT.from_pretrained(init_from, dropout)
    if master_process:
        print(origin)
    longest = raw_model.config.block_size
    if block_size > longest or (block_size < longest and init_from == "resume"):
        raise ValueError(f"block_size={block_size} does not fit the model; use --block_size={longest}")
    raw_model.crop_block_size(block_size)
    data.check(raw_model.config.vocab_size, rank, world_size)
raw_model.to(device)
if master_process:
    print(f"number of parameters: {raw_model.num_params() / 1e6:.2f}M")
if compile:
    raw_model.compile_blocks()

# optimizer: `build` hides what the ZeRO-1 settings choose
with exit_on_wrong_input():
    model, optimizer = build(
        raw_model,
        raw_model.param_groups(weight_decay),
        use_zero1=use_zero1,
        zero1_impl=zero1_impl,
        bucket_mb=zero_bucket_mb,
        shard_gradients=shard_gradients,
        param_dtype=param_dtype,
        check_reads=zero_check_reads,
        lr=learning_rate,
        betas=(beta1, beta2),
    )
    scaler = ShardedGradScaler(device.type, enabled=dtype == "float16")
    if checkpoint is not None:
        checkpoints.restore(optimizer, checkpoint)
        if checkpoint.get("scaler"):  # of a run in float16
            scaler.load_state_dict(checkpoint["scaler"])
if master_process:
    print(describe(optimizer, use_zero1))


@torch.no_grad()
def estimate_loss():
    """Mean loss over `eval_iters` batches of each split, which the ranks share. Needs to be called on all ranks.

    The batches are the same each time, so that two evaluations differ by the model alone.
    """
    result = {}
    raw_model.eval()
    for split in ("train", "val"):
        offsets = data.offsets(split, (seed, 1), 0, eval_iters * batch_size).reshape(eval_iters, batch_size)
        total = torch.zeros((), device=device)
        for k in range(rank, eval_iters, world_size):
            x, y = get_batch(split, offsets[k])
            with autocast:
                total += raw_model(x, y)[1]
        result[split] = mean_over_ranks(total) * world_size / eval_iters
    raw_model.train()
    return result


def get_lr(iteration):
    """Linear warm-up, then half a cosine down to `min_lr`."""
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    if iteration > lr_decay_iters:
        return min_lr
    progress = (iteration - warmup_iters) / max(1, lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


def save_checkpoint():
    """Write ckpt.pt, unless updates are being skipped. Needs to be called on all ranks."""
    guard.report(iter_num - 1)
    if guard.failed:
        return
    values = {
        "model_args": vars(raw_model.config),
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
        "config": config,
        "scaler": scaler.state_dict(),
        "data_position": data_position,
        "wandb_run_id": log.run_id,
    }
    checkpoints.save(raw_model, optimizer, values)


# logging
with exit_on_wrong_input():
    checkpoints.claim()
    log = Logger(
        None if eval_only else out_dir,
        None if checkpoint is None else iter_num,
        wandb_log,
        wandb_project,
        wandb_run_name,
        config,
        None if checkpoint is None else checkpoint.get("wandb_run_id"),
        rank,
    )
checkpoint = None  # releases the file
meter = Meter(log, tokens_per_iter, raw_model.flops_per_token() * tokens_per_iter / world_size, device, dtype)
signals = Signals()
guard = Guard(raw_model, optimizer, scaler, limit=1 if on_nonfinite == "stop" else max_nonfinite)

# training loop
batches = data.micro_batches(seed, data_position, batch_size, gradient_accumulation_steps, rank, world_size)
x, y = get_batch("train", next(batches))
first_iter = iter_num
action = Action.CONTINUE
if iter_num > max_iters and master_process:
    print(f"nothing to train: the checkpoint is at iteration {iter_num}, beyond max_iters={max_iters}")
meter.restart()
while iter_num <= max_iters or eval_only:
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for group in optimizer.param_groups:
        group["lr"] = lr

    if iter_num % eval_interval == 0 or eval_only:
        losses = estimate_loss()
        meter.log_evaluation(iter_num, losses, lr)
        if eval_only:
            break
        if guard.in_a_row or not all(map(math.isfinite, losses.values())):
            if master_process:
                print("WARNING: not saved: the loss or the last gradients are not finite", flush=True)
        elif losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = min(best_val_loss, losses["val"])
            if iter_num > first_iter:
                save_checkpoint()
        meter.restart()

    # dropout draws from (seed, iteration, rank): resuming repeats it, evaluating does not disturb it
    torch.manual_seed(int(np.random.SeedSequence((seed, iter_num, rank)).generate_state(1)[0]))
    loss_sum = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        model.require_backward_grad_sync = micro_step == micro_steps - 1  # ranks exchange gradients once per iteration
        with autocast:
            _, loss = model(x, y)
        loss_sum += loss.detach()
        x, y = get_batch("train", next(batches))  # read ahead while the device is busy
        scaler.scale(loss / micro_steps).backward()
    scaler.unscale_(optimizer)
    norms = clip_grad_norm_(optimizer, grad_clip or math.inf)
    guard.check(loss_sum, norms)
    scaler.step(optimizer)
    scaler.update()
    meter.count_iteration()
    is_logged = iter_num % log_interval == 0
    if is_logged:
        meter.log_iteration(iter_num, mean_over_ranks(loss_sum) / micro_steps, lr)  # of the global batch; waits for the device

    if is_logged or (iter_num + 1) % eval_interval == 0 or device.type == "cpu":  # else it would wait for the device
        guard.report(iter_num)
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    data_position += sequences_per_iter

    must_fail = checkpoints.report(log) or guard.failed
    action = signals.agree(Action.FAIL if must_fail else Action.CONTINUE)
    if action in (Action.SAVE, Action.SAVE_AND_STOP):
        save_checkpoint()
        meter.restart()
    if action in (Action.SAVE_AND_STOP, Action.FAIL) or guard.failed:
        break

checkpoints.wait()
guard.report(iter_num - 1)
stopped = action == Action.SAVE_AND_STOP
must_fail = checkpoints.report(log, required=stopped) or guard.failed
failed = signals.agree(Action.FAIL if must_fail else Action.CONTINUE) == Action.FAIL
if failed:
    checkpoints.explain_failure(diverged=guard.failed)
elif stopped and master_process:
    print(f"stopped by a signal before iteration {iter_num}; go on with --init_from=resume", flush=True)
log.finish()
finish(int(failed))
