# Train GPT-2 (124M) from scratch on OpenWebText, to a validation loss of about 2.85.
#
#   $ pip install -e '.[openwebtext]' && python data/openwebtext/prepare.py
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py
#
# This takes about 4 days on eight A100 GPUs with 40 GB. The optimizer state takes 1.0 GB per GPU with plain AdamW, and 0.12 GB
# per GPU on eight ranks.

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-124M"

# 40 micro-steps * 12 sequences * 1024 tokens = 491,520 tokens per iteration, as in nanoGPT, for 1, 2, 4 or 8 ranks. The same
# for 16 ranks: --batch_size=10 --gradient_accumulation_steps=48, for 32: --batch_size=5 --gradient_accumulation_steps=96
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024

# 600,000 iterations are 295 billion tokens
max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
