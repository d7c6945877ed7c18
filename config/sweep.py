# What the runs of a sweep have in common; config/sweep.yaml has the settings in which they differ.
#
#   $ wandb sweep config/sweep.yaml
#
# An agent starts one run after the other, and wandb gives each an ID. So each has an output folder of its own.
import os

out_dir = f"out-sweep-{os.environ.get('WANDB_RUN_ID', 'local')}"
wandb_log = True

max_iters = 1000
lr_decay_iters = 1000
eval_interval = 250
