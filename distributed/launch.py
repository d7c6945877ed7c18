"""The place of this process among the ranks of a run, from the launch variables of torchrun."""

import os
from typing import NamedTuple

_REMEDY = "start with torchrun, or unset RANK to start a single process"


class Launch(NamedTuple):
    """The place of this process among the ranks of a run."""

    distributed: bool = False  # False: a single process without torchrun
    rank: int = 0
    local_rank: int = 0  # rank among the processes of this machine
    world_size: int = 1
    local_world_size: int = 1


def launched() -> Launch:
    """Return the launch variables that torchrun sets.

    Without RANK, the run is a single process. In that case the other variables are ignored, because a cluster or a container
    may set WORLD_SIZE and others.

    Raises:
        ValueError: if RANK is set without the other variables, or if a variable has an impossible value.
    """
    if "RANK" not in os.environ:
        return Launch()
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ValueError(f"RANK is set without {', '.join(missing)}; {_REMEDY}")
    rank, world_size, port = _integer("RANK"), _integer("WORLD_SIZE"), _integer("MASTER_PORT")
    local_rank, local_world_size = _integer("LOCAL_RANK", "0"), _integer("LOCAL_WORLD_SIZE", "1")
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not one of the ranks 0 to WORLD_SIZE-1={world_size - 1}; {_REMEDY}")
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT={port} is not a port, 1 to 65535; {_REMEDY}")
    if local_rank < 0 or local_world_size < 1:
        raise ValueError(f"LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={local_world_size} cannot be valid; {_REMEDY}")
    return Launch(True, rank, local_rank, world_size, local_world_size)


def _integer(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text} is not an integer; {_REMEDY}") from error
