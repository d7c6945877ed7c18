# GPT-2 XL fine-tuned on Tiny Shakespeare: a few epochs at a constant small rate, keeping the best checkpoint.
#
#   $ pip install -e '.[gpt2]' && python data/shakespeare/prepare.py
#   $ torchrun --standalone --nproc_per_node=2 train.py config/finetune_shakespeare.py
#   $ python sample.py --out_dir=out-shakespeare
#
# The optimizer state of XL is 12.5 GB: 6.2 GB on each of two GPUs. Smaller GPUs: --init_from=gpt2-medium, --block_size=512.

import time

out_dir = "out-shakespeare"
eval_interval = 5
eval_iters = 40
always_save_checkpoint = False

wandb_log = False
wandb_project = "shakespeare"
wandb_run_name = f"ft-{time.time():.0f}"

dataset = "shakespeare"
init_from = "gpt2-xl"

# 32 micro-steps * 1 sequence * 1024 tokens = 32,768 tokens per iteration; with 301,966 training tokens
# an epoch is 9.2 iterations, so 20 iterations are a little more than two
gradient_accumulation_steps = 32
batch_size = 1
max_iters = 20

learning_rate = 3e-5
decay_lr = False
