"""Write the model of a checkpoint as a folder for Transformers: a GPT2LMHeadModel in safetensors, with its tokenizer.

$ python export.py --out_dir=out-stdlib-char --to=out-exported
$ python export.py --out_dir=out --to=out-exported --dtype=bfloat16
$ python train.py config/finetune_shakespeare.py --init_from=out-exported
"""

import json
import os
import pathlib
import shutil
import tempfile
import warnings
from typing import Any, Literal

import torch

from configurator import configure
from data.vocabulary import GPT2_FILES, texts_of
from distributed.exits import exit_on_wrong_input
from model import CONV1D, GPT, GPT2_VOCAB_SIZE, WRAPPERS, GPTConfig, without_weights
from run.checkpoint_keys import load
from run.checkpoints import find_newest
from run.rank_checks import vocabulary_at_hand

# -----------------------------------------------------------------------------
out_dir = "out"  # folder of the run
to = ""  # folder to write; it does not exist yet, or is empty
dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights
configure(globals())
# -----------------------------------------------------------------------------


def read_weight(name: str) -> torch.Tensor:
    """Return a weight as GPT2LMHeadModel has it: zeros for a bias that this model lacks, (in, out) for Linear's (out, in)."""
    if name not in names:
        return torch.zeros_like(outline[name], device="cpu")
    weight = checkpoint["model"][names[name]]
    return (weight.t() if name.endswith(CONV1D) else weight).to(outline[name].dtype).contiguous()


def write_weights(folder: pathlib.Path) -> None:
    """Write one file after the other, and if there are several, the index that says which weight is in which file."""
    split = split_torch_state_dict_into_shards(outline, max_shard_size="1GB")  # one of which is in memory
    for file, held in split.filename_to_tensors.items():
        save_file({name: read_weight(name) for name in held}, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # save_file lets only the owner read it
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: pathlib.Path) -> str:
    """Write the tokenizer of GPT-2 or of characters. Return what the folder then knows of the vocabulary, in words."""
    if meta is None:
        try:
            from tiktoken.load import read_file_cached

            contents = list(map(read_file_cached, GPT2_FILES))
        except (ImportError, OSError) as error:
            return f"{vocab_size} tokens of GPT-2 without the tokenizer, which tiktoken could not get ({error})"
        for file, content in zip(("vocab.json", "merges.txt"), contents, strict=True):
            (folder / file).write_bytes(content)
        tokenizer = transformers.GPT2TokenizerFast.from_pretrained(folder, model_max_length=sizes.block_size)
    elif not (texts := texts_of(meta)) or any(isinstance(text, bytes) or len(text) > 1 for text in texts.values()):
        return f"{vocab_size} tokens without a tokenizer, because they are neither GPT-2's nor characters"
    else:
        stoi: Any = {text: token for token, text in texts.items()}
        characters = Tokenizer(models.WordLevel(stoi, unk_token=""))  # refuses a character that is not among them
        characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, model_max_length=sizes.block_size)
    tokenizer.save_pretrained(folder)
    return f"{vocab_size} {'characters' if meta else 'tokens of GPT-2'} with their tokenizer"


with exit_on_wrong_input():
    try:
        import transformers
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors import SafetensorError
        from safetensors.torch import save_file
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise ImportError(f"export.py needs the transformers library ({error}); pip install -e '.[gpt2]'") from error
    if not to or os.path.isfile(to) or (os.path.isdir(to) and os.listdir(to)):
        raise ValueError(f"--to={to} is neither a new nor an empty folder; name one to write, as in --to=out-exported")
    path = find_newest(out_dir)
    checkpoint = load(path)  # its tensors are memory-mapped
    names = {WRAPPERS.sub("", name): name for name in checkpoint["model"]}  # in the checkpoint
    with without_weights(), warnings.catch_warnings(action="ignore"):  # no weight is copied
        sizes = GPT.from_checkpoint(checkpoint).config
    meta = vocabulary_at_hand(checkpoint)
    vocab_size = meta["vocab_size"] if meta else GPT2_VOCAB_SIZE
    if vocab_size > sizes.vocab_size:
        dataset = checkpoint["config"].get("dataset")
        raise ValueError(f"the model knows {sizes.vocab_size} tokens, GPT-2 {vocab_size}: dataset {dataset} lacks its meta.pkl")
    padding = list(range(vocab_size, sizes.vocab_size))
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), None if meta else vocab_size - 1)  # GPT-2's <|endoftext|>
    same = ("vocab_size", "n_layer", "n_head", "n_embd")  # in GPT2Config
    for name, value in vars(sizes).items():  # the default of an option is the model without it
        if name not in (*same, "block_size", "bias", "dropout") and value != getattr(GPTConfig, name):
            raise ValueError(f"GPT2LMHeadModel has no {name}={value}; only a model without it can be exported")
    values = {name: getattr(sizes, name) for name in same} | {"n_positions": sizes.block_size, **ends}
    values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"activation_function": "gelu"}  # the exact one
    config = transformers.GPT2Config(**values, architectures=["GPT2LMHeadModel"], dtype=dtype)
    with without_weights():
        outline = dict(transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype)).named_parameters())  # tied ones once
    target = os.path.realpath(to)  # perhaps of a link
    parent, name = os.path.split(target)
    try:
        os.makedirs(parent, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{name}.tmp-", dir=parent) as temporary:
            folder = pathlib.Path(temporary, name)
            config.save_pretrained(folder)  # makes the folder
            transformers.GenerationConfig(**ends, suppress_tokens=padding or None).save_pretrained(folder)
            vocabulary = write_tokenizer(folder)
            write_weights(folder)
            if not os.path.exists(target):
                folder.rename(target)
            else:  # it may be the working directory or a mount point; without config.json it is no model
                for file in sorted(folder.iterdir(), key=lambda file: file.name == "config.json"):
                    shutil.move(file, target)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot write {to}: {error}; name a folder that can be written to, on a disk with space") from error
biases = "" if sizes.bias else "; zeros as the biases, which the model does not have"
print(
    f"{to}: GPT2LMHeadModel in {dtype}, of iteration {checkpoint.get('iter_num', '?')}; exact GELU; tied weights once{biases}"
)
rows = f"; the {len(padding)} rows of padding stay, and generate() does not choose them" if padding else ""
print(f"vocabulary: {vocabulary}{rows}")
