# Train a small character-level GPT on Tiny Shakespeare. The model overfits, so a checkpoint is saved only when the validation
# loss improves.
#
#   $ python data/shakespeare_char/prepare.py
#   $ python train.py config/train_shakespeare_char.py
#
# On an A100 GPU this takes about 3 minutes and reaches a validation loss of 1.47. On a laptop without a GPU, make the model
# smaller:
#
#   $ python train.py config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 \
#       --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 \
#       --dropout=0.0
#
# This takes about 70 seconds on two CPU cores and reaches a validation loss of 1.89. On two ranks, give each rank half of the
# batch: --gradient_accumulation_steps=2 --batch_size=6.

out_dir = "out-shakespeare-char"
eval_interval = 250
eval_iters = 200
log_interval = 10
always_save_checkpoint = False

wandb_log = False
wandb_project = "shakespeare-char"
wandb_run_name = "mini-gpt"

dataset = "shakespeare_char"
gradient_accumulation_steps = 1
batch_size = 64
block_size = 256  # 64 * 256 = 16,384 tokens per iteration

n_layer = 6
n_head = 6
n_embd = 384  # 10.7M parameters
dropout = 0.2

learning_rate = 1e-3  # a small model allows a higher learning rate
max_iters = 5000
lr_decay_iters = 5000
min_lr = 1e-4
beta2 = 0.99  # larger than the default, because an iteration has few tokens
warmup_iters = 100
