"""Checkpoints with the state of all ranks.

    $ python -m zero.checkpoint inspect out/ckpt.pt
    $ python -m zero.checkpoint compare out-adamw out-sharded

A file holds the whole state. Rank 0 writes it as it arrives from the others, and never has it in memory. Every rank maps the
file into memory, and reads the parts that it needs.
"""

from zero.checkpoint.format import load, load_on_all_ranks, save, verify
from zero.checkpoint.state import CheckpointError, consolidate, model_state_dict, restore
