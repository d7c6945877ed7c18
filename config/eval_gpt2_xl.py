# Evaluate the released gpt2-xl (1.5B) on OpenWebText, as eval_gpt2.py does. nanoGPT reports a validation loss of 2.54.
#
#   $ pip install -e '.[gpt2]'
#   $ python train.py config/eval_gpt2_xl.py

init_from = "gpt2-xl"
eval_only = True
eval_iters = 500
batch_size = 8
