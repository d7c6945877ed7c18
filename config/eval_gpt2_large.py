# Evaluate the released gpt2-large (774M) on OpenWebText, as eval_gpt2.py does. nanoGPT reports a validation loss of 2.67.
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2_large.py

init_from = "gpt2-large"
eval_only = True
eval_iters = 500
batch_size = 8
