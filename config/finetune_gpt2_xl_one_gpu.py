# Fine-tune GPT-2 XL (1.5B) on Tiny Shakespeare as in finetune_shakespeare.py, on one GPU with 16 or 24 GB.
#
#   $ pip install -e '.[gpt2]' && python data/shakespeare/prepare.py
#   $ python train.py config/finetune_gpt2_xl_one_gpu.py
#   $ python sample.py --out_dir=out-shakespeare-xl
#
# The predicted peak is 14.6 GB, and 31.5 GB without these flags. The GPU needs bfloat16. In main memory, the model takes 6.2 GB
# and a checkpoint another 18.7 GB. This run has not been made yet.

out_dir = "out-shakespeare-xl"
eval_interval = 5
eval_iters = 4  # 48 sequences
always_save_checkpoint = False

dataset = "shakespeare"
init_from = "gpt2-xl"

# what they cost: docs/recipes.md
param_dtype = "bfloat16_remainder"
state_dtype = "int8"
activation_checkpointing = True
loss_chunk = 1024

# 4 micro-steps * 8 sequences * 1024 tokens = 32,768 tokens per iteration; 20 iterations are a little more than two epochs
gradient_accumulation_steps = 4
batch_size = 8
max_iters = 20

learning_rate = 3e-5
decay_lr = False
