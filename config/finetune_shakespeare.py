# Fine-tune GPT-2 XL on Tiny Shakespeare for a few epochs, with a small constant learning rate. Keep the best checkpoint.
#
#   $ pip install -e '.[gpt2]' && python data/shakespeare/prepare.py
#   $ torchrun --standalone --nproc_per_node=2 train.py config/finetune_shakespeare.py
#   $ python sample.py --out_dir=out-shakespeare
#
# The optimizer state of XL takes 12.5 GB, which is 6.2 GB on each of two GPUs. docs/recipes.md has smaller GPUs.

import time

out_dir = "out-shakespeare"
eval_interval = 5
eval_iters = 4  # 48 sequences
always_save_checkpoint = False

wandb_log = False
wandb_project = "shakespeare"
wandb_run_name = f"ft-{time.time():.0f}"

dataset = "shakespeare"
init_from = "gpt2-xl"

# 32 micro-steps * 1 sequence * 1024 tokens = 32,768 tokens per iteration. The dataset has 301,966 training tokens, so
# an epoch is 9.2 iterations, and 20 iterations are a little more than two epochs.
gradient_accumulation_steps = 32
batch_size = 1
max_iters = 20

learning_rate = 3e-5
decay_lr = False
