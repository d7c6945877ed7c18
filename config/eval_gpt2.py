# Evaluate a released GPT-2 on OpenWebText. nanoGPT reports validation losses of 3.12 for gpt2 (124M), 2.84 for gpt2-medium
# (350M), 2.67 for gpt2-large (774M) and 2.54 for gpt2-xl (1.5B).
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2.py --init_from=gpt2-xl
#
# The evaluation uses 500 * 12 sequences of 1024 tokens per split, in batches of 8. It trains and saves nothing. With torchrun,
# the ranks share the sequences.

init_from = "gpt2"
eval_only = True
eval_iters = 500
batch_size = 8
