# Train GPT-2 xl (1.5B) from scratch on OpenWebText.
#
#   $ pip install -e '.[openwebtext]' && python data/openwebtext/prepare.py
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_xl.py
#
# The model has 1,556.8M parameters. The optimizer state takes 12.5 GB per GPU with plain AdamW, and 1.56 GB per GPU on eight
# ranks. Weights take 3.3 GB on every rank, with 0.7 of float32 masters, gradients 6.2. The learning rate is the one of the
# GPT-3 paper for this size (table 2.1).
#
# Faster, but all weights and gradients are rounded: --param_dtype=bfloat16 spares casts, a third of the bytes to send and 4 GB.

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-xl"

n_layer = 48
n_head = 25
n_embd = 1600

# 240 micro-steps * 2 sequences * 1024 tokens = 491,520 tokens per iteration, as in nanoGPT's 124M, for 1, 2, 4, 8 or 16 ranks.
# The same for 32 ranks: --batch_size=1 --gradient_accumulation_steps=480
gradient_accumulation_steps = 240
batch_size = 2
block_size = 1024

learning_rate = 2.0e-4
min_lr = 2.0e-5
max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10
