"""The place of this process among the ranks of a run, from the launch variables of torchrun."""

import os
from typing import NamedTuple


class Launch(NamedTuple):
    distributed: bool = False  # False: a single process without torchrun
    rank: int = 0
    local_rank: int = 0  # rank among the processes of this machine
    world_size: int = 1
    local_world_size: int = 1


def launched() -> Launch:
    """Return the launch variables that torchrun sets.

    Without RANK, the run is a single process. In that case the other variables are ignored, because a cluster or a container
    may set WORLD_SIZE and others.

    Raises ValueError if RANK is set without the other variables.
    """
    if "RANK" not in os.environ:
        return Launch()
    if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ValueError(f"RANK is set without {', '.join(missing)}; start with torchrun, or unset RANK for a single process")
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    return Launch(True, *(int(os.environ.get(name, default)) for name, default in defaults.items()))
