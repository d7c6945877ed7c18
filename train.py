"""Train a GPT with one process, or with many processes and sharded optimizer state (ZeRO-1).

One process on a CPU or a GPU:
    $ python train.py config/train_shakespeare_char.py

Two processes on a laptop, without a GPU and without a download:
    $ torchrun --standalone --nproc_per_node=2 train.py config/train_stdlib_char.py

Eight GPUs on one machine:
    $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

Eight GPUs on each of two machines, where the first has the address 10.0.0.1; on the second, with --node_rank=1:
    $ torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=10.0.0.1 train.py config/train_gpt2.py \\
        --batch_size=10 --gradient_accumulation_steps=48

A config file or --key=value overrides any setting below. SIGTERM and Ctrl-C save a checkpoint and stop, SIGUSR1 saves
and continues. Exit code 0: done; 2: wrong input, in one line; 1: any other error. torchrun exits with 1 in place of 2.
"""

import math
from contextlib import nullcontext
from typing import Literal

import numpy as np
import torch

from configurator import Decay, Dtype, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, configure
from data.dataset import EVALUATION_BATCH, Dataset, check_tokenizer, prepare_if_missing
from distributed import machine
from distributed.exits import exit_on_wrong_input
from distributed.launch import launched
from distributed.ranks import print0, start, sum_over_ranks
from forecast.modes import MOMENTUM, muon_of
from model import GPT, GPTConfig, SkipInitialization, check_block_size
from run.checkpoints import load_weights
from run.hooks import Run
from run.rank_checks import check_combinations, compare_model_and_data, compare_settings, compare_with_checkpoint
from zero import ShardedGradScaler
from zero.build import build, clip_grad_norm_
from zero.checkpoint import restore
from zero.flags import Flags, Implementation, ParamDtype
from zero.host_comm import LONG_TIMEOUT

# -----------------------------------------------------------------------------
# default settings: GPT-2 (124M) on OpenWebText
# input and output
out_dir = "out"  # folder of checkpoints, metrics and the report
eval_interval: PositiveInt = 2000  # iterations from one evaluation, which may save a checkpoint, to the next
log_interval: PositiveInt = 1  # iterations from one logged loss to the next
eval_iters: PositiveInt = 200  # an evaluation takes 12 * eval_iters sequences of each split, for any batch_size
sample_interval: NonNegativeInt = 0  # iterations from one short sample of text to the next; 0: no samples
eval_only = False  # evaluate once and exit
stop_at_val_loss: NonNegativeFloat = 0.0  # end when an evaluation has a validation loss of at most this; 0.0: never
always_save_checkpoint = True  # after every evaluation; False: when the loss improves, and keep the best in ckpt_best.pt
save_interval: NonNegativeInt = 0  # iterations from one save to the next, whatever evaluations do; 0: at evaluations
keep_checkpoints: NonNegativeInt = 0  # number of ckpt_<iter>.pt files to keep beside ckpt.pt and ckpt_prev.pt
async_save = False  # write checkpoints in the background
# 'auto': resume if out_dir has a checkpoint, otherwise scratch; so torchrun --max-restarts=3 goes on after a rank is lost
init_from = "scratch"  # 'scratch', 'resume', 'auto', 'gpt2' (or -medium, -large, -xl), or a folder of a GPT-2 or a run
# wandb
wandb_log = False  # only rank 0 logs; WANDB_MODE, WANDB_ENTITY and all other variables of wandb count
wandb_project = "owt"  # a name of wandb
wandb_run_name = "gpt2"  # the group of the runs to compare; a run has this name and the last part of out_dir
# data
dataset = "openwebtext"  # name of a folder in data/, or the path of another; its files must be equal on all machines
gradient_accumulation_steps: PositiveInt = 5 * 8  # micro-steps per iteration, summed over all ranks
batch_size: PositiveInt = 12  # sequences per micro-step
block_size: PositiveInt = 1024  # tokens per sequence
# model
n_layer = 12  # blocks
n_head = 12  # attention heads of a block; must divide n_embd
n_embd = 768  # width of the model
dropout = 0.0  # 0 for pretraining; try 0.1 for finetuning
bias = False  # use biases in LayerNorm and Linear layers
loss_chunk: NonNegativeInt = 0  # compute the logits of this many tokens at a time, such as 1024: less memory; 0: all
activation_checkpointing = False  # keep only the input of each block, and compute the block again in backward
# optimizer
optimizer: Literal["adamw", "muon"] = "adamw"  # 'muon': Muon for the matrices of the blocks, AdamW for everything else
learning_rate: NonNegativeFloat = 6e-4  # the largest one, after the warm-up
max_iters: NonNegativeInt = 600000  # the last iteration; the first one is 0
weight_decay: NonNegativeFloat = 1e-1  # of matrices and embeddings, as in AdamW
beta1: Decay = 0.9  # decay of AdamW's first moment
beta2: Decay = 0.95  # decay of AdamW's second moment
grad_clip: NonNegativeFloat = 1.0  # maximum gradient norm; 0.0 disables clipping
muon_momentum: Decay = MOMENTUM  # of Muon's matrices
max_nonfinite: PositiveInt = 1  # consecutive steps with a loss or norm of inf or nan that end the run; they are skipped
# learning rate
decay_lr = True  # False: learning_rate throughout
schedule: Literal["cosine", "wsd"] = "cosine"  # after the warm-up; wsd: constant, then linear decay to min_lr at the end
warmup_iters: NonNegativeInt = 2000  # iterations in which the learning rate grows linearly
lr_decay_iters = 600000  # where the decay ends; should be about max_iters, as in Chinchilla
decay_fraction: Fraction = 0.2  # 'wsd': part of lr_decay_iters that decays
min_lr: NonNegativeFloat = 6e-5  # should be about learning_rate / 10
# ZeRO-1
use_zero1 = True  # shard the optimizer state across the ranks
zero1_impl: Implementation = "sharded"  # the code in zero/, or ZeroRedundancyOptimizer
bucket_mb: Literal["auto"] | PositiveFloat = "auto"  # megabytes per bucket; auto: 4 or more, by size
shard_gradients = False  # also keep only 1/N of the gradients; one reduce-scatter per micro-step
# of weights. auto: float32, but Linear layers as autocast rounds them, with 1/N of their float32 masters per rank, same losses;
# bfloat16: all weights and gradients, with such masters; bfloat16_remainder: the same values, with masters in 2 bytes
param_dtype: ParamDtype = "auto"
state_dtype: Literal["float32", "bfloat16", "int8"] = "float32"  # of the moments between updates, 1/N per rank
shard_size: NonNegativeInt = 0  # ranks that share the state, such as the GPUs of a machine; 0: all
# system
backend: Literal["auto", "nccl", "gloo"] = "auto"  # auto: nccl if every rank has its own GPU, otherwise gloo
dist_timeout_s: PositiveFloat = 600.0  # seconds without progress on any rank; then the run ends and says why
device = "auto"  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: cuda if available, otherwise cpu
dtype: Dtype = "auto"  # float16 uses GradScaler; auto: best on GPU, float32 on CPU
compile = torch.cuda.is_available()  # compile the model block by block with torch.compile; by default on a GPU only
seed: Seed = 1337  # of the first weights, the batches and dropout
profile = False  # after a few iterations, write traces of time and memory to out_dir/profile
config = configure(globals(), connects=True)
# -----------------------------------------------------------------------------

# ranks and devices
launch = launched()  # by torchrun, or as a single process
rank, world_size = launch.rank, launch.world_size
# Every rank runs every line, and print0 prints on rank 0: a collective must never be in code that only some ranks run.
with exit_on_wrong_input():
    device_name, compute_dtype = machine.resolve(device, dtype, param_dtype)
with exit_on_wrong_input():
    compare_settings(config, device_name, compute_dtype)
    check_combinations(config, world_size)
    own_device = start(launch, device_name, backend, LONG_TIMEOUT)
    if launch.local_rank == 0:
        prepare_if_missing(dataset)
autocast = machine.autocast(own_device, compute_dtype)
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
micro_steps = gradient_accumulation_steps // world_size  # per iteration on this rank
sequences_per_iter = gradient_accumulation_steps * batch_size  # on all ranks together
tokens_per_iter = sequences_per_iter * block_size
print0(f"tokens per iteration will be: {tokens_per_iter:,}")
run = Run(config, launch, own_device, compute_dtype, micro_steps, tokens_per_iter)  # what accompanies it: run/hooks.py
state = run.state

# data and model
torch.manual_seed(seed)
with run.stage("making the model"), SkipInitialization() if rank > 0 else nullcontext():  # `build` broadcasts rank 0's weights
    checkpoint = run.checkpoints.load(init_from)  # None: a new run. Needs all ranks, so it comes first
    data = Dataset(dataset, block_size)
    if checkpoint is not None:
        compare_with_checkpoint(checkpoint, config, data)
        state.resume(checkpoint, sequences_per_iter, data.fingerprint)
        raw_model = GPT.from_checkpoint(checkpoint, dropout)
        print0(f"with the checkpoint's model, at iteration {state.iter_num}: {raw_model.config}")
    elif init_from in ("scratch", "auto"):
        print0("Initializing a new model from scratch")
        raw_model = GPT(GPTConfig.of(config, vocab_size=data.vocab_size or GPTConfig.vocab_size))
    elif (earlier := load_weights(init_from, data)) is not None:
        raw_model, at, earlier = GPT.from_checkpoint(earlier, dropout), earlier.get("iter_num"), None  # frees the memory
        print0(f"Initializing from the weights of the run in {init_from}, at iteration {at}: {raw_model.config}")
    else:
        print0(f"Initializing from GPT-2 weights: {init_from}")
        raw_model = GPT.from_pretrained(init_from, dropout)
        check_tokenizer(init_from, data.meta, dataset)
    check_block_size(block_size, raw_model.config.block_size, croppable=checkpoint is None)
    raw_model.crop_block_size(block_size)
    data.check(raw_model.config.vocab_size, rank, world_size)
print0(f"number of parameters: {raw_model.num_params() / 1e6:.2f}M")
raw_model.activation_checkpointing, raw_model.loss_chunk = activation_checkpointing, loss_chunk
if compile:
    raw_model.compile_blocks()

# optimizer: `build` chooses the implementation from the ZeRO-1 settings
with run.stage("making the optimizer"):
    compare_model_and_data(raw_model, data.fingerprint, **vars(state))
    groups = raw_model.param_groups(weight_decay, muon_of(config))
    adamw = {"lr": learning_rate, "betas": (beta1, beta2)}
    units, casts_to = raw_model.blocks, machine.DTYPES[compute_dtype]
    model, opt = build(raw_model, groups, Flags.of(config), device=own_device, overlap=units, autocast=casts_to, **adamw)
    scaler = ShardedGradScaler(own_device.type, enabled=compute_dtype == "float16")
    if checkpoint is not None:
        restore(opt, checkpoint["optimizer"])
        if checkpoint.get("scaler"):  # the checkpoint is from a float16 run
            scaler.load_state_dict(checkpoint["scaler"])
        checkpoint = None  # frees the memory


def get_batch(split, offsets):
    """Return the sequences at `offsets` and their targets, on the device, each (len(offsets), block_size)."""
    with run.reading():
        batch = torch.from_numpy(data.batch(split, offsets))
    if own_device.type == "cuda":  # pinned memory: the copy overlaps with the computation
        batch = batch.pin_memory()
    return batch.to(own_device, non_blocking=True).unbind()


@torch.no_grad()
def estimate_loss():
    """Return the mean loss over sequences of each split. Needs to be called on all ranks.

    The ranks share the sequences. Every evaluation uses the same sequences, so only the model can change the loss.
    """
    result, count = {}, eval_iters * EVALUATION_BATCH
    raw_model.eval()
    for split in ("train", "val"):
        batches = data.evaluation(split, seed, count, batch_size, rank, world_size)
        total = torch.zeros((), device=own_device)
        for offsets in run.progress.track(batches, f"evaluating on {split}"):
            x, y = get_batch(split, offsets)
            with autocast:
                total.add_(raw_model(x, y)[1], alpha=(offsets >= 0).sum().item())  # negative offsets: padding
        result[split] = sum_over_ranks(total) / count
    raw_model.train()
    return result


def evaluate(lr):
    """Log the losses, after which `run.must_save` and `run.must_stop` may be true. Needs to be called on all ranks."""
    with run.untimed("evaluation"):
        losses = estimate_loss()
        run.after_evaluation(losses, lr)


def get_lr(iteration):
    """Return the learning rate: linear warm-up, then cosine decay to `min_lr`, or a constant and then linear decay."""
    if not decay_lr:
        return learning_rate
    if iteration < warmup_iters:
        return learning_rate * (iteration + 1) / (warmup_iters + 1)
    if iteration > lr_decay_iters:
        return min_lr
    first = warmup_iters if schedule == "cosine" else max(warmup_iters, (1 - decay_fraction) * lr_decay_iters)
    ratio = max(0.0, (iteration - first) / max(1, lr_decay_iters - first))
    remaining = 0.5 * (1.0 + math.cos(math.pi * ratio)) if schedule == "cosine" else 1.0 - ratio
    return min_lr + remaining * (learning_rate - min_lr)


# training loop
run.attach(raw_model, model, opt, scaler, autocast, data)  # the log, checks and measurements; from here on, rank 0 writes
batches = data.micro_batches(seed, state.data_position, batch_size, gradient_accumulation_steps, rank, world_size)
with run.untimed("the first batch"):
    x, y = get_batch("train", next(batches))
while True:
    run.agree()  # on all ranks: was there a signal to one, or a failure on one?
    lr = get_lr(state.iter_num)
    is_end = eval_only or state.iter_num > max_iters
    for group in opt.param_groups:
        group["lr"] = lr
    if not run.must_stop and (eval_only or (state.iter_num % eval_interval == 0 and not is_end)):
        evaluate(lr)
    if run.must_save:  # because of a signal, the end or this evaluation
        run.save({"model_args": vars(raw_model.config), "config": config, "scaler": scaler.state_dict(), **data.identity()})
    if is_end or run.must_stop:
        break
    run.begin_step()  # writes a sample, if one is due
    # seed dropout from (seed, iteration, rank): a resumed run repeats it, and an evaluation does not change it
    torch.manual_seed(int(np.random.SeedSequence((seed, state.iter_num, rank)).generate_state(1)[0]))
    loss_sum = torch.zeros((), device=own_device)
    for micro_step in range(micro_steps):
        # sync in the last micro-step only; shard_gradients: in all
        model.require_backward_grad_sync = micro_step == micro_steps - 1  # type: ignore[assignment]
        with run.phase("forward"), autocast:
            loss = model(x, y)[1]  # the logits, which can be the largest tensor, are not kept
        loss_sum += loss.detach()
        with run.phase("data"):
            x, y = get_batch("train", next(batches))  # prefetch the next batch while the device computes
        run.read_figures()  # of the iteration before, while the device computes this one
        with run.phase("backward"):
            scaler.scale(loss / micro_steps).backward()
    with run.phase("clip"):
        scaler.unscale_(opt)
        grad_norm = clip_grad_norm_(opt, grad_clip or math.inf)
    run.skip_if_not_finite(loss_sum / micro_steps, grad_norm)  # on any rank
    with run.phase("update"):
        scaler.step(opt)
        scaler.update()
    run.after_update()
    opt.zero_grad(set_to_none=True)
    state.data_position += sequences_per_iter
    run.end_iteration(lr)  # logs
    state.iter_num += 1
run.finish()
