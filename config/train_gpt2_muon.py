# GPT-2 (124M) with Muon for the matrices: give it after the settings that it changes.
#
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py config/train_gpt2_muon.py
#
# Muon has the learning rate and the weight decay of AdamW. The learning rate stays constant after the warm-up and falls in the
# last fifth. To train longer, resume from before that part with a larger --max_iters and --lr_decay_iters. On eight ranks, the
# optimizer state takes 0.08 GB per GPU in place of 0.12 GB. This run has not been made yet.

out_dir = "out-gpt2-muon"
wandb_run_name = "gpt2-124M-muon"

optimizer = "muon"
schedule = "wsd"
decay_fraction = 0.2

# two thirds of the iterations with AdamW; others report 1.5 to 1.7 times fewer for the same loss
max_iters = 400000
lr_decay_iters = 400000
