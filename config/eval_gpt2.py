# The released gpt2 (124M) evaluated on OpenWebText: nanoGPT reports a validation loss of 3.12.
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2.py
#
# 500 batches of 8 * 1024 tokens of each split; nothing is trained or saved. torchrun divides them among the ranks.

init_from = "gpt2"
eval_only = True
eval_iters = 500
batch_size = 8
wandb_log = False
