"""Runs a script in one process as one rank of several runs it: its optimizer is sharded. It writes no checkpoint.

    $ python -m benchmarks.alone train.py --dataset=stdlib_char --max_iters=60

Without DistributedDataParallel, of which PyTorch's compiler cuts the graphs, so that all dtypes of weights compare alike.
"""

import runpy
import sys
from unittest import mock

from distributed.signals import Action
from run.checkpoints import Checkpoints
from zero.flags import Flags


def shard_alone() -> None:
    """From now on, in this process, which has one rank, `use_zero1` chooses the sharded optimizer, as on several ranks."""
    mock.patch.object(Flags, "implementation", lambda flags, _: "sharded" if flags.use_zero1 else "adamw").start()
    mock.patch.object(Flags, "stores_as_autocast", lambda flags, _: flags.param_dtype == "auto").start()


if __name__ == "__main__":
    shard_alone()
    mock.patch.object(Checkpoints, "action_due", return_value=Action.CONTINUE).start()  # 19 GB of XL would take minutes
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
