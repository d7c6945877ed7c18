"""Runs a script in one process as one rank of several runs it: its optimizer is sharded. It writes no checkpoint.

    $ python -m benchmarks.alone train.py --dataset=stdlib_char --max_iters=60

Without DistributedDataParallel, of which PyTorch's compiler cuts the graphs, so that all dtypes of weights compare alike.
"""

import runpy
import sys
from typing import Literal
from unittest import mock

from distributed.signals import Action
from run.checkpoints import Checkpoints
from zero.flags import Flags


class ShardedOnOneRank(Flags):
    """Flags that choose the sharded implementation on one rank as well, which train.py does not do."""

    def implementation(self, world_size: int) -> Literal["adamw", "torch", "sharded"]:
        return "sharded" if self.is_sharded else super().implementation(world_size)

    def stores_as_autocast(self, world_size: int) -> bool:
        return self.param_dtype == "auto"


def shard_alone() -> None:
    """From now on, in this process, which has one rank, `Flags.of` returns these flags, as in train.py."""
    mock.patch.object(Flags, "of", ShardedOnOneRank.of).start()


if __name__ == "__main__":
    shard_alone()
    mock.patch.object(Checkpoints, "action_due", return_value=Action.CONTINUE).start()  # 19 GB of XL would take minutes
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
