"""Sample text from a checkpoint that this program or nanoGPT wrote, or from a released GPT-2.

$ python sample.py --out_dir=out-stdlib-char --start="def " --num_samples=3
$ python sample.py --init_from=gpt2-xl --start="What is the answer to life?" --max_new_tokens=100
$ python sample.py --out_dir=out-shakespeare-char --start=FILE:prompt.txt
"""

import pathlib

import torch

from configurator import Dtype, PositiveFloat, PositiveInt, Seed, configure
from data.vocabulary import load_codec, of_size
from distributed import machine
from distributed.exits import exit_on_wrong_input
from model import GPT
from run.checkpoints import load_newest
from run.rank_checks import vocabulary_at_hand
from run.sampling import TEMPERATURE, TOP_K

# -----------------------------------------------------------------------------
init_from = "resume"  # 'resume': the checkpoint in out_dir; 'gpt2', ..., 'gpt2-xl', or a folder that holds a GPT-2
out_dir = "out"  # folder of the run
start = "\n"  # the prompt, or FILE:path to read the prompt from a file
num_samples = 10  # number of texts
max_new_tokens = 500  # number of tokens to generate per sample
temperature: PositiveFloat = TEMPERATURE  # 1.0: probabilities of the model; lower values: less random text
top_k: PositiveInt = TOP_K  # sample from the k most likely tokens only
seed: Seed = 1337  # another seed gives other texts
device = "auto"  # 'cpu', 'cuda', 'cuda:1', 'mps'; auto: cuda if available, otherwise cpu
dtype: Dtype = "auto"  # auto: best on GPU, float32 on CPU
compile = False  # compile the model block by block with torch.compile
configure(globals())
# -----------------------------------------------------------------------------

with exit_on_wrong_input():
    device_name, compute_dtype = machine.resolve(device, dtype)
    if init_from == "resume":
        checkpoint = load_newest(out_dir)
        model = GPT.from_checkpoint(checkpoint)
        meta = vocabulary_at_hand(checkpoint)
    else:
        model = GPT.from_pretrained(init_from)
        meta = of_size(model.config.vocab_size)
    codec = load_codec(meta, model.config.vocab_size, "" if init_from == "resume" else init_from)
    text = start
    if start.startswith("FILE:"):
        try:
            text = pathlib.Path(start[5:]).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            remedy = "--start=FILE:path names a text file"
            raise ValueError(f"cannot read the prompt file {start[5:]}: {error}; {remedy}") from error
    tokens = codec.prompt(text)
    if not tokens:
        raise ValueError("the prompt is empty; give at least one character with --start")
autocast = machine.autocast(torch.device(device_name), compute_dtype)

torch.manual_seed(seed)
model.eval().to(device_name)
if compile:
    model.compile_blocks()

prompt = torch.tensor([tokens], device=device_name)  # (1, time)
for _ in range(num_samples):
    with exit_on_wrong_input(), autocast:
        sample = model.generate(prompt, max_new_tokens, temperature, top_k, codec.tokens)
    print(codec.decode(sample[0].tolist()))
    print("---------------")
