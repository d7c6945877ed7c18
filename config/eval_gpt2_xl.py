# Evaluate the released gpt2-xl (1.5B) on OpenWebText. nanoGPT reports a validation loss of 2.54.
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2_xl.py
#
# The evaluation uses 500 * 12 sequences of 1024 tokens per split, in batches of 8. It trains and saves nothing. With torchrun,
# the ranks share the sequences.

init_from = "gpt2-xl"
eval_only = True
eval_iters = 500
batch_size = 8
wandb_log = False
