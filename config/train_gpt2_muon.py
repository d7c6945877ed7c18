# GPT-2 (124M) on OpenWebText as in train_gpt2.py, with Muon for the matrices of the blocks.
#
#   $ torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_muon.py
#
# Muon has the learning rate and the weight decay of AdamW. The learning rate stays constant after the warm-up and falls in the
# last fifth, so the run can be made longer: docs/settings.md#learning-rate. On eight ranks, the optimizer state takes 0.08 GB
# per GPU in place of 0.12 GB. This run has not been made yet.

from pathlib import Path

exec(Path(__file__).with_name("train_gpt2.py").read_text())

out_dir = "out-gpt2-muon"
wandb_run_name = "gpt2-124M-muon"

optimizer = "muon"
schedule = "wsd"
decay_fraction = 0.2

# two thirds of the iterations with AdamW; others report 1.5 to 1.7 times fewer for the same loss
max_iters = 400000
lr_decay_iters = 400000
