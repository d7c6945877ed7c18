# Evaluate the released gpt2 (124M) on OpenWebText. nanoGPT reports a validation loss of 3.12.
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2.py
#
# The evaluation uses 500 * 12 sequences of 1024 tokens per split, in batches of 8. It trains and saves nothing. With torchrun,
# the ranks share the sequences.

init_from = "gpt2"
eval_only = True
eval_iters = 500
batch_size = 8
