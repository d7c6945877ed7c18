"""Checkpoints with the state of all ranks. The file is always complete: either the new checkpoint or the previous one.

    $ python -m zero.checkpoint inspect out/ckpt.pt
    $ python -m zero.checkpoint compare out-adamw out-sharded

A folder of checkpoints contains

ckpt.pt             the newest checkpoint
ckpt_prev.pt        the previous checkpoint, which is used if the newest is damaged
ckpt_<iter>.pt      the last checkpoints by iteration, if requested
ckpt*.pt.tmp        a file that is being written. The next start removes what a killed process has left.

A file holds the whole state. Rank 0 writes it as it arrives from the others, and never has it in memory. Every rank maps the
file into memory, and reads the parts that it needs.
"""

from zero.checkpoint.format import load, load_on_all_ranks, verify
from zero.checkpoint.state import CheckpointError, consolidate, model_state_dict, restore
from zero.checkpoint.store import SaveReport, find
from zero.checkpoint.writer import CheckpointWriter, DivergedError
