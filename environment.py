"""What a run runs on: devices, versions of libraries, commit of the code. `run.json` and wandb get it beside the settings."""

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import hardware
from zero.collectives import gather_objects, is_rank_0


def environment(device: torch.device) -> dict[str, Any]:
    """Returns facts about this run: device, backend, names of the devices, one per rank, versions, and on rank 0 the commit.

    Needs to be called on all ranks.
    """
    return {
        "device": device.type,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "devices": gather_objects(hardware.device_name(device)),
        "versions": {**versions(), "python": platform.python_version(), "wandb": _version("wandb")},
        "git_commit": _git_commit() if is_rank_0() else None,
    }


def versions() -> dict[str, str | None]:
    """Returns the versions of what every rank computes with."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Returns the commit of this code, with "-dirty" if files have changed since, or None if it is not a git checkout."""
    folder = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
