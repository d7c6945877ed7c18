# The small GPT of train_stdlib_char.py with Muon for the matrices: give it after the settings that it changes.
#
#   $ torchrun --standalone --nproc_per_node=2 train.py config/train_stdlib_char.py config/train_stdlib_char_muon.py
#
# The learning rates are the best of five for each optimizer. AdamW's best validation loss after 2500 iterations, with a learning
# rate of 4e-3, is 1.44. Muon reaches it in 1000 iterations, and 1.32 in 2000: docs/sharding.md#muon.

out_dir = "out-stdlib-char-muon"
wandb_run_name = "mini-gpt-muon"

optimizer = "muon"
learning_rate = 8e-3
min_lr = 8e-4
max_iters = 2000
lr_decay_iters = 2000
