# GPT-2 (124M) on 10 billion tokens of FineWeb, to a validation loss of 3.28: the target of llm.c and modded-nanogpt.
#
#   $ pip install -e '.[openwebtext]'
#   $ hf download kjj0/fineweb10B-gpt2 --repo-type=dataset --local-dir=data/fineweb10B       # the tokens, 21 GB
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_fineweb_gpt2.py         # a node of eight GPUs
#   $ python train.py config/train_fineweb_gpt2.py                                           # or one
#   $ python evaluate.py --out_dir=out-fineweb-gpt2 --tasks=val,hellaswag
#
# The run ends at the loss of 3.28, and its report card says after which time and how many tokens. The settings are nearly
# those of llm.c, which ends at 3.27 to 3.29 after 18,865 iterations, 45 minutes on eight H100 or 95 on eight A100.
# modded-nanogpt changes the model as well: 1.23 minutes on eight H100. Its track 3 tunes optimizers for one model: Muon needs
# 3,250 iterations, Adam 5,625. The released GPT-2 (124M) has an acc_norm of 0.2955 in HellaSwag by llm.c's script.
#
# With Muon, at twice the learning rate:
#
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_fineweb_gpt2.py --out_dir=out-fineweb-gpt2-muon \
#       --optimizer=muon --learning_rate=1.2e-3
#
# Neither run has been made yet. --dataset=fineweb_edu trains on other text, where 3.28 means something else.

out_dir = "out-fineweb-gpt2"
wandb_log = True
wandb_project = "fineweb"
wandb_run_name = "gpt2-124M"

# 32 micro-steps * 16 sequences * 1024 tokens = 524,288 tokens per iteration, for 1, 2, 4, 8, 16 or 32 ranks. A peak of 11.1 GB
# on one GPU, 10.2 GB on each of eight: python plan.py config/train_fineweb_gpt2.py --world_size=1,8
dataset = "fineweb10B"
gradient_accumulation_steps = 32
batch_size = 16
block_size = 1024

# 19,000 iterations * 524,288 tokens = 10.0 billion tokens, and an evaluation at the end
max_iters = 19000
warmup_iters = 700
lr_decay_iters = 19000
learning_rate = 6e-4
min_lr = 0.0
weight_decay = 1e-1

# 12 * 854 sequences * 1024 tokens = 10.5 million tokens of each split: as many as llm.c's, not the same; 5 % of the time
stop_at_val_loss = 3.28
eval_interval = 250
eval_iters = 854
log_interval = 10
