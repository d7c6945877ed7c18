# The released gpt2-large (774M) evaluated on OpenWebText: nanoGPT reports a validation loss of 2.67.
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2_large.py
#
# 500 batches of 8 * 1024 tokens of each split; nothing is trained or saved. torchrun divides them among the ranks.

init_from = "gpt2-large"
eval_only = True
eval_iters = 500
batch_size = 8
wandb_log = False
