"""The checkpoint: state of all ranks, in a file that is whole or the one before it.

    $ python -m zero.checkpoint inspect out/ckpt.pt
    $ python -m zero.checkpoint convert out/ckpt.pt other/ckpt.pt

print what a file holds and whether its checksums hold, and make a consolidated checkpoint of a sharded one or the reverse.

A folder of checkpoints holds

ckpt.pt             the newest
ckpt_prev.pt        the one before, which takes over if the newest is damaged
ckpt_<iter>.pt      the last few by iteration, if asked for
ckpt*.pt.tmp        being written; what a killed process leaves of it is swept at the next start
shards_<iter>_*/    what sharded checkpoints among them keep outside the file; swept when none refers to it any more

A consolidated checkpoint is one file with everything in it, collected on rank 0. A sharded one is the same file with tensors
on the meta device in place of the real ones, which lie in a folder of torch.distributed.checkpoint: every rank writes
there what it owns, and reads what it needs. The file is what makes the folder count, so both are replaced in one instant.
"""

from zero.checkpoint.store import FORMATS, chunk_reader, convert, find, load, verify
from zero.checkpoint.writer import CheckpointWriter, DivergedError, SaveReport, save
from zero.state import CheckpointError, consolidate, model_state_dict, restore

__all__ = [
    "FORMATS",
    "CheckpointError",
    "CheckpointWriter",
    "DivergedError",
    "SaveReport",
    "chunk_reader",
    "consolidate",
    "convert",
    "find",
    "load",
    "model_state_dict",
    "restore",
    "save",
    "verify",
]
