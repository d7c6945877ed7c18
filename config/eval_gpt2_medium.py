# Evaluate the released gpt2-medium (350M) on OpenWebText, as eval_gpt2.py does. nanoGPT reports a validation loss of 2.84.
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2_medium.py

init_from = "gpt2-medium"
eval_only = True
eval_iters = 500
batch_size = 8
