# Train GPT-2 medium (350M) from scratch on OpenWebText.
#
#   $ pip install -e '.[openwebtext]' && python data/openwebtext/prepare.py
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_medium.py
#
# The model has 354.6M parameters. The optimizer state takes 2.8 GB per GPU with plain AdamW, and 0.35 GB per GPU on eight
# ranks. Weights and gradients take another 2.8 GB on every rank. The learning rate is the one of the GPT-3 paper for this size
# (table 2.1).

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-medium"

n_layer = 24
n_head = 16
n_embd = 1024

# 120 micro-steps * 4 sequences * 1024 tokens = 491,520 tokens per iteration, for any number of ranks
gradient_accumulation_steps = 120
batch_size = 4
block_size = 1024

learning_rate = 3.0e-4
min_lr = 3.0e-5
max_iters = 600000
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10
