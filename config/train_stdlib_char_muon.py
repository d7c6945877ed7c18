# The small GPT of train_stdlib_char.py, with Muon for the matrices of the blocks.
#
#   $ torchrun --standalone --nproc_per_node=2 train.py config/train_stdlib_char_muon.py
#
# The learning rate is the best of five. AdamW, also with its best of five (4e-3), has a validation loss of 1.42 after 2500
# iterations, as the mean of three seeds. Muon has 1.39 after 1000 iterations and 1.30 after 2000: docs/sharding.md#muon.

from pathlib import Path

exec(Path(__file__).with_name("train_stdlib_char.py").read_text())

out_dir = "out-stdlib-char-muon"
wandb_run_name = "mini-gpt-muon"

optimizer = "muon"
learning_rate = 8e-3
min_lr = 8e-4
max_iters = 2000
lr_decay_iters = 2000
