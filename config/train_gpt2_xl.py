# GPT-2 xl (1.5B) from scratch on OpenWebText.
#
#   $ pip install -e '.[openwebtext]' && python data/openwebtext/prepare.py
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_xl.py
#
# 1,556.8M parameters. Optimizer state per GPU: 12.5 GB with plain AdamW, 1.56 GB over eight ranks; weights and
# gradients take 12.5 GB more on every rank. The learning rate is the GPT-3 paper's for this size (table 2.1).

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-xl"

n_layer = 48
n_head = 25
n_embd = 1600

# 240 micro-steps * 2 sequences * 1024 tokens = 491,520 tokens per iteration, whatever the number of ranks
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
