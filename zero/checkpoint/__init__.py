"""Checkpoints with the state of all ranks. The file is always complete: either the new checkpoint or the previous one.

    $ python -m zero.checkpoint inspect out/ckpt.pt
    $ python -m zero.checkpoint convert out/ckpt.pt other/ckpt.pt --to=consolidated

A folder of checkpoints contains

ckpt.pt             the newest checkpoint
ckpt_prev.pt        the previous checkpoint, which is used if the newest is damaged
ckpt_<iter>.pt      the last checkpoints by iteration, if requested
ckpt*.pt.tmp        a file that is being written. The next start removes what a killed process has left.
shards_<iter>_*/    the tensors of sharded checkpoints. The folder is removed when no file refers to it any more.

A consolidated checkpoint is one file with the whole state, gathered on rank 0. A sharded checkpoint is the same file, but
with tensors on the meta device. The real tensors are in a folder of torch.distributed.checkpoint: every
rank writes the tensors that it owns, and reads the tensors that it needs. A folder is valid only if the file refers to it,
so the replacement of the file replaces both at once.
"""

from zero.checkpoint.format import chunk_reader, load, load_on_all_ranks, verify
from zero.checkpoint.state import CheckpointError, consolidate, model_state_dict, restore
from zero.checkpoint.store import FORMATS, SaveReport, convert, find
from zero.checkpoint.writer import CheckpointWriter, DivergedError
