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
import os
import sys
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist

import hardware
from configurator import configure, fail
from dataset import Dataset, prepare_if_embedded
from distributed import launched, start_process_group
from guard import Guard
from lock import Lock
from logger import Logger
from model import GPT, GPTConfig
from signals import Signals, Wish
from zero import ShardedGradScaler
from zero import checkpoint as ckpt
from zero.build import IMPLEMENTATIONS, PARAM_DTYPES, build, clip_grad_norm_, describe
from zero.memory import peak_bytes

# -----------------------------------------------------------------------------
# default settings: GPT-2 (124M) on OpenWebText
# input and output
out_dir = "out"
eval_interval = 2000
log_interval = 1
eval_iters = 200
eval_only = False  # evaluate once and exit
always_save_checkpoint = True  # after every evaluation, not only after those that improve the validation loss
on_save_error = "continue"  # when a checkpoint cannot be written, a full disk, say; 'stop': end the run, exit code 1
keep_checkpoints = 0  # how many to keep by iteration, ckpt_<iter>.pt, besides ckpt.pt and ckpt_prev.pt
async_save = False  # write checkpoints in the background
checkpoint_format = "consolidated"  # one file, put together by rank 0; 'sharded': every rank writes its part
init_from = "scratch"  # 'scratch', 'resume', 'gpt2', 'gpt2-medium', 'gpt2-large', 'gpt2-xl', or a folder with a GPT-2
# wandb
wandb_log = False
wandb_project = "owt"
wandb_run_name = "gpt2"
# data
dataset = "openwebtext"  # a folder of data/
gradient_accumulation_steps = 5 * 8  # micro-steps of all ranks together
batch_size = 12  # sequences per micro-step
block_size = 1024  # tokens per sequence
# model
n_layer = 12
n_head = 12
n_embd = 768
dropout = 0.0  # 0 for pretraining; try 0.1 for finetuning
bias = False  # in LayerNorm and Linear
# AdamW
learning_rate = 6e-4
max_iters = 600000
weight_decay = 1e-1
beta1 = 0.9
beta2 = 0.95
grad_clip = 1.0  # largest gradient norm; 0.0 for no clipping
on_nonfinite = "stop"  # when the loss or the gradient norm is inf or nan: end the run, exit code 1; 'skip': skip the update
max_nonfinite = 10  # 'skip': so many in a row end the run
# learning rate
decay_lr = True
warmup_iters = 2000
lr_decay_iters = 600000  # about max_iters, as Chinchilla has it
min_lr = 6e-5  # about learning_rate / 10
# ZeRO-1
use_zero1 = True  # divide the optimizer state among the ranks
zero1_impl = "sharded"  # 'sharded': ours; 'torch': ZeroRedundancyOptimizer
zero_bucket_mb = 75.0  # megabytes per bucket of 'sharded'
shard_gradients = False  # 'sharded': keep 1/N of the gradients, too, at the price of a reduce-scatter per micro-step
param_dtype = "float32"  # 'bfloat16': weights and gradients in that, with 'sharded', which keeps 1/N of float32 masters
zero_check_reads = False  # 'sharded': debugging; a parameter that is read before it has arrived is nan
# system
backend = "auto"  # 'nccl', 'gloo'; auto: nccl where every rank has a GPU of its own
device = "auto"  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: cuda where there is one
dtype = "auto"  # 'float32', 'bfloat16', 'float16' (with a scaler); auto: the best the GPU has, float32 on a CPU
compile = torch.cuda.is_available()  # torch.compile, block by block
seed = 1337
config = configure(globals())
# -----------------------------------------------------------------------------

# ranks and devices
launch = launched()  # by torchrun, or alone
ddp, rank, local_rank, world_size, local_world_size = launch
master_process = rank == 0  # this rank logs and writes files; whatever all ranks must take part in stands outside its ifs
try:
    if param_dtype == "bfloat16" and dtype == "auto":
        dtype = "bfloat16"
    device, dtype = hardware.resolve(device, dtype)
except ValueError as error:
    fail(str(error))
device_type = device.split(":")[0]

# what can be wrong with the settings is found before anything is started or written
if backend not in ("auto", "nccl", "gloo"):
    fail(f"backend={backend} is not one of auto, nccl, gloo")
if ddp and backend == "nccl" and device_type != "cuda":
    fail(f"backend=nccl cannot serve device={device}; use --backend=gloo")
if zero1_impl not in IMPLEMENTATIONS:
    fail(f"zero1_impl={zero1_impl} is not one of {', '.join(IMPLEMENTATIONS)}")
if param_dtype not in PARAM_DTYPES:
    fail(f"param_dtype={param_dtype} is not one of {', '.join(PARAM_DTYPES)}")
if param_dtype == "bfloat16" and dtype != "bfloat16":
    fail(f"param_dtype=bfloat16 computes in bfloat16, not in dtype={dtype}; use --dtype=bfloat16")
for name in (
    "batch_size",
    "block_size",
    "gradient_accumulation_steps",
    "eval_interval",
    "eval_iters",
    "log_interval",
    "max_nonfinite",
):
    if config[name] < 1:
        fail(f"{name}={config[name]} must be at least 1")
for name in ("learning_rate", "min_lr", "weight_decay", "grad_clip", "warmup_iters", "max_iters", "seed", "keep_checkpoints"):
    if config[name] < 0:
        fail(f"{name}={config[name]} must not be negative")
if checkpoint_format not in ckpt.FORMATS:
    fail(f"checkpoint_format={checkpoint_format} is not one of {', '.join(ckpt.FORMATS)}")
if on_save_error not in ("continue", "stop"):
    fail(f"on_save_error={on_save_error} is not one of continue, stop")
if on_nonfinite not in ("stop", "skip"):
    fail(f"on_nonfinite={on_nonfinite} is not one of stop, skip")
if gradient_accumulation_steps % world_size:
    fail(
        f"gradient_accumulation_steps={gradient_accumulation_steps} cannot be split over {world_size} ranks; "
        f"use --gradient_accumulation_steps={math.ceil(gradient_accumulation_steps / world_size) * world_size}"
    )

if ddp and device_type == "cpu":
    hardware.divide_threads(local_world_size)
if ddp:
    device = start_process_group(launch, device, backend)
device = torch.device(device)
ptdtype = hardware.DTYPES[dtype]
autocast = nullcontext() if dtype == "float32" else torch.amp.autocast(device_type, ptdtype)
if device_type == "cpu" and master_process and hardware.is_slow_on_cpu(ptdtype):
    print(f"note: this CPU has no {dtype} instructions; --dtype=float32 will be faster")
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
micro_steps = gradient_accumulation_steps // world_size  # of this rank
sequences_per_iter = gradient_accumulation_steps * batch_size  # of all ranks together
tokens_per_iter = sequences_per_iter * block_size
if master_process:
    print(f"tokens per iteration will be: {tokens_per_iter:,}")


@contextmanager
def wrong_input_ends_all_ranks():
    """If the block finds the user's input wrong on any rank, all ranks say so and end. Needs to be entered on all ranks."""
    message = None
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        message = str(error)
    if ddp:
        messages = [None] * world_size
        dist.all_gather_object(messages, message)
        message = next(filter(None, messages), None)
    if message is not None:
        fail(message)


# data: what exactly a batch holds depends on the seed and the iteration only, not on the ranks that share it
with wrong_input_ends_all_ranks():
    if local_rank == 0:
        prepare_if_embedded(dataset)
with wrong_input_ends_all_ranks():
    data = Dataset(dataset, block_size)


def get_batch(split, offsets):
    """The sequences at `offsets` and their targets on the device, each (len(offsets), block_size)."""
    x, y = (torch.from_numpy(tokens) for tokens in data.batch(split, offsets))
    if device_type == "cuda":  # pinned, so that the copy runs beside the computation
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def train_batches(position):
    """This rank's micro-batches without end, once all ranks together have seen `position` sequences."""
    while True:
        offsets = data.offsets("train", (seed, 0), position, sequences_per_iter)
        for global_micro_step in range(rank, gradient_accumulation_steps, world_size):
            start = global_micro_step * batch_size
            yield get_batch("train", offsets[start : start + batch_size])
        position += sequences_per_iter


# model
torch.manual_seed(seed)
iter_num = 0
first_sequence = 0  # of iteration 0, had the batches always been as large as now
best_val_loss = float("inf")
checkpoint = None
wandb_run_id = None
checkpoint_path = complaint = lock = None
with wrong_input_ends_all_ranks():
    if init_from == "resume" and master_process:
        if not eval_only and os.path.isdir(out_dir):
            lock = Lock(out_dir)  # before reading what another run may be about to replace
        try:
            checkpoint_path, complaint = ckpt.find(out_dir)
        except ckpt.CheckpointError as error:
            raise ValueError(f"{error}; to resume, check --out_dir; to begin anew, use --init_from=scratch") from error
        if complaint:
            print(f"WARNING: {complaint}; resuming from {checkpoint_path}, the checkpoint before")
if ddp:
    paths = [checkpoint_path]
    dist.broadcast_object_list(paths, src=0)
    [checkpoint_path] = paths
with wrong_input_ends_all_ranks():
    if init_from == "scratch":
        if master_process:
            print("Initializing a new model from scratch")
        vocab_size = data.vocab_size or GPTConfig.vocab_size
        raw_model = GPT(GPTConfig(block_size, vocab_size, n_layer, n_head, n_embd, dropout, bias))
    elif init_from == "resume":
        if master_process:
            print(f"Resuming training from {out_dir}")
        checkpoint = ckpt.load(checkpoint_path)
        raw_model = GPT.from_checkpoint(checkpoint, dropout)
        iter_num = checkpoint["iter_num"]
        best_val_loss = float(checkpoint["best_val_loss"])
        if math.isnan(best_val_loss):  # which no loss would ever be less than
            best_val_loss = float("inf")
        first_sequence = checkpoint.get("data_position", iter_num * sequences_per_iter) - iter_num * sequences_per_iter
        wandb_run_id = checkpoint.get("wandb_run_id")
        if master_process:
            print(f"with the checkpoint's model, at iteration {iter_num}: {raw_model.config}")
    elif init_from.startswith("gpt2") or os.path.isdir(init_from):
        if master_process:
            print(f"Initializing from GPT-2 weights: {init_from}")
        raw_model = GPT.from_pretrained(init_from, dropout)
    else:
        raise ValueError(f"init_from={init_from} is neither scratch, resume, a gpt2 name nor a folder that holds a GPT-2")
    longest = raw_model.config.block_size
    if block_size > longest or (block_size < longest and init_from == "resume"):
        raise ValueError(f"block_size={block_size} does not fit the model; use --block_size={longest}")
    if block_size < longest:
        raw_model.crop_block_size(block_size)
    if data.vocab_size is not None and data.vocab_size > raw_model.config.vocab_size:
        raise ValueError(
            f"dataset {dataset} has a vocabulary of {data.vocab_size}, the model one of {raw_model.config.vocab_size}; "
            "use the dataset that the model was trained on"
        )
    data.check(raw_model.config.vocab_size, rank, world_size)
raw_model.to(device)
if master_process:
    print(f"number of parameters: {raw_model.num_params() / 1e6:.2f}M")
if compile:  # by the block: short to compile, and the parameters keep their names
    for block in raw_model.transformer.h:
        block.compile()

# optimizer: what the two ZeRO-1 flags choose is hidden in here
with wrong_input_ends_all_ranks():
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
    scaler = ShardedGradScaler(device_type, enabled=dtype == "float16")
    if checkpoint is not None:
        ckpt.restore(optimizer, checkpoint["optimizer"], ckpt.chunk_reader(checkpoint_path, checkpoint))
        if checkpoint.get("scaler"):  # of a run in float16
            scaler.load_state_dict(checkpoint["scaler"])
        checkpoint = None  # lets go of the file
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


def mean_over_ranks(value):
    """A scalar tensor's mean over the ranks, as a float. Needs to be called on all ranks."""
    if ddp:
        dist.all_reduce(value)
    return value.item() / world_size


def get_lr(iteration):
    """Linear warm-up, then half a cosine down to `min_lr`."""
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    if iteration > lr_decay_iters:
        return min_lr
    progress = (iteration - warmup_iters) / max(1, lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * progress)) * (learning_rate - min_lr)


def save_checkpoint():
    """Write ckpt.pt, from which any other ranks and implementation can go on. Needs to be called on all ranks."""
    guard.look(iter_num - 1)
    if guard.failed:
        return
    if master_process:
        print(f"saving checkpoint to {out_dir}", flush=True)
    values = {
        "model_args": vars(raw_model.config),
        "iter_num": iter_num,
        "best_val_loss": best_val_loss,
        "config": config,
        "scaler": scaler.state_dict(),
        "data_position": first_sequence + iter_num * sequences_per_iter,
        "wandb_run_id": log.run_id if master_process else None,
    }
    writer.save(raw_model, optimizer, values)


def report_saves(must_succeed):
    """Tell what has come of writing checkpoints since the last call, and whether the run has to end for it."""
    global unsaved
    for outcome in writer.outcomes() if master_process else ():  # rank 0 knows of everything
        unsaved = None if isinstance(outcome, ckpt.SaveReport) else outcome
        if unsaved:
            print(f"WARNING: the checkpoint was not written: {outcome}; files from before are unchanged", flush=True)
            continue
        if outcome.complaint:
            print(f"WARNING: {outcome.complaint}", flush=True)
        log.log(
            {
                "iter": outcome.iter_num,
                "checkpoint/consolidate_s": outcome.consolidate_s,
                "checkpoint/write_s": outcome.write_s,
                "checkpoint/bytes": outcome.nbytes,
            }
        )
    return isinstance(unsaved, ckpt.DivergedError) or (must_succeed and unsaved is not None)


unsaved = None  # why the last save that is known of failed
log = None
saves = not eval_only  # else nothing in out_dir changes
with wrong_input_ends_all_ranks():
    if master_process and saves:
        lock = lock or Lock(out_dir)
        if init_from != "resume" and os.path.exists(os.path.join(out_dir, "ckpt.pt")):
            print(f"WARNING: out_dir={out_dir} holds another run, which this one replaces; --init_from=resume goes on with it")
with wrong_input_ends_all_ranks():
    if master_process:
        resume_at = iter_num if init_from == "resume" else None
        log = Logger(out_dir if saves else None, resume_at, wandb_log, wandb_project, wandb_run_name, config, wandb_run_id)
with wrong_input_ends_all_ranks():
    writer = ckpt.CheckpointWriter(
        out_dir, keep_checkpoints, async_save, checkpoint_format, damaged=complaint is not None, sweep=saves
    )
signals = Signals()
guard = Guard(raw_model, optimizer, scaler, limit=1 if on_nonfinite == "stop" else max_nonfinite)

# training loop
flops_per_iter = raw_model.flops_per_token() * tokens_per_iter / world_size  # of one rank
peak_flops = hardware.peak_flops(device, ptdtype)
if master_process:
    print(f"mfu is relative to {peak_flops / 1e12:.3g} TFLOP/s per rank in {dtype}")
running_mfu = -1.0
batches = train_batches(first_sequence + iter_num * sequences_per_iter)
x, y = next(batches)
iterations_timed = 0  # since t0
t0 = time.perf_counter()
first_iter = iter_num
wish = Wish.NOTHING
if iter_num > max_iters and master_process:
    print(f"nothing to train: the checkpoint is at iteration {iter_num}, beyond max_iters={max_iters}")
while iter_num <= max_iters or eval_only:
    lr = get_lr(iter_num) if decay_lr else learning_rate
    for group in optimizer.param_groups:
        group["lr"] = lr

    if iter_num % eval_interval == 0 or eval_only:
        losses = estimate_loss()
        if master_process:
            print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
            log.log(
                {
                    "iter": iter_num,
                    "train/loss": losses["train"],
                    "val/loss": losses["val"],
                    "lr": lr,
                    "mfu": running_mfu * 100,
                }
            )
        if eval_only:
            break
        if guard.in_a_row or not all(map(math.isfinite, losses.values())):
            if master_process:
                print("WARNING: not saved: the loss or the last gradients are not finite", flush=True)
        elif losses["val"] < best_val_loss or always_save_checkpoint:
            best_val_loss = min(best_val_loss, losses["val"])
            if iter_num > first_iter:
                save_checkpoint()
        t0, iterations_timed = time.perf_counter(), 0

    # dropout draws from (seed, iteration, rank): resuming repeats it, evaluating does not disturb it
    torch.manual_seed(int(np.random.SeedSequence((seed, iter_num, rank)).generate_state(1)[0]))
    loss_sum = torch.zeros((), device=device)
    for micro_step in range(micro_steps):
        model.require_backward_grad_sync = micro_step == micro_steps - 1  # ranks exchange gradients once per iteration
        with autocast:
            _, loss = model(x, y)
        loss_sum += loss.detach()
        x, y = next(batches)  # read ahead while the device is busy
        scaler.scale(loss / micro_steps).backward()
    scaler.unscale_(optimizer)
    norms = clip_grad_norm_(optimizer, grad_clip or math.inf)
    guard.watch(loss_sum, norms)
    scaler.step(optimizer)
    scaler.update()
    iterations_timed += 1
    is_logged = iter_num % log_interval == 0
    if is_logged:
        mean_loss = mean_over_ranks(loss_sum) / micro_steps  # over the whole global batch; also waits for the device
        dt = (time.perf_counter() - t0) / iterations_timed
        if iter_num - first_iter >= 5:  # the first iterations warm up
            mfu = flops_per_iter / dt / peak_flops
            running_mfu = mfu if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * mfu
        if master_process:
            tokens_per_second, memory = tokens_per_iter / dt, peak_bytes(device)
            print(
                f"iter {iter_num}: loss {mean_loss:.4f}, time {dt * 1000:.2f}ms, mfu {running_mfu * 100:.2f}%, "
                f"{tokens_per_second:,.0f} tok/s, peak memory {memory / 1e9:.2f} GB",
                flush=True,
            )
            log.log(
                {
                    "iter": iter_num,
                    "iter/loss": mean_loss,
                    "iter/time_ms": dt * 1000,
                    "iter/tokens_per_second": tokens_per_second,
                    "iter/peak_memory_gb": memory / 1e9,
                    "lr": lr,
                    "mfu": running_mfu * 100,
                }
            )
        t0, iterations_timed = time.perf_counter(), 0

    if is_logged or (iter_num + 1) % eval_interval == 0 or device_type == "cpu":  # else it would wait for the device
        guard.look(iter_num)
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

    wish = signals.decide(Wish.FAIL if report_saves(on_save_error == "stop") or guard.failed else Wish.NOTHING)
    if wish in (Wish.SAVE, Wish.SAVE_AND_STOP):
        save_checkpoint()
        t0, iterations_timed = time.perf_counter(), 0
    if wish in (Wish.SAVE_AND_STOP, Wish.FAIL) or guard.failed:
        break

writer.wait()
guard.look(iter_num - 1)
must_end = report_saves(on_save_error == "stop" or wish == Wish.SAVE_AND_STOP) or guard.failed
failed = signals.decide(Wish.FAIL if must_end else Wish.NOTHING) == Wish.FAIL
if master_process:
    if guard.failed and os.path.exists(os.path.join(out_dir, "ckpt.pt")):
        print("its checkpoint is as it was; --init_from=resume goes on from there", flush=True, file=sys.stderr)
    if failed and unsaved:
        print(f"the run ends without its last checkpoint, which was not written: {unsaved}", flush=True, file=sys.stderr)
    elif wish == Wish.SAVE_AND_STOP and not failed:
        print(f"stopped by a signal before iteration {iter_num}; go on with --init_from=resume", flush=True)
    log.finish()
if ddp:
    dist.barrier()
    sys.stdout.flush()
    os._exit(int(failed))  # without winding up, which gloo's threads can turn into an abort (pytorch/pull/179291)
sys.exit(int(failed))
