"""Runs a script with deterministic kernels and, on a GPU, with collectives that start late and overwrite nan.

A single rank shards its optimizer and sends to itself, so that one GPU is enough for the collectives of NCCL.

    $ torchrun --standalone --nproc_per_node=2 -m benchmarks.exact train.py --dataset=stdlib_char --shadow_check=5 --grad_clip=0

So the shadow check compares bits, and shows a wait that is missing. NCCL waits for the stream that starts a collective. Here
that one sleeps, and the stream that computes goes on: where it does not wait, it reads nan, and what it overwrites too early is
sent. Collectives in time would show neither. All-reduces, which overwrite what they send, are not late.
"""

import os
import runpy
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from distributed.launch import launched
from zero import collectives
from zero.collectives import Communicator
from zero.flags import Flags


def send_to_itself() -> None:
    """From now on, in this process, which has one rank."""
    for owner, name, value in ((Flags, "implementation", lambda *_: "sharded"), (Communicator, "is_alone", False)):
        setattr(owner, name, value)


def start_late() -> None:
    """From now on, in this process."""
    for home, name in (collectives, "_all_gather_single"), (collectives, "_reduce_scatter_single"), (dist, "all_to_all_single"):
        setattr(home, name, partial(_late, getattr(home, name)))


def _late(start: Any, output: torch.Tensor, own: torch.Tensor, *sizes: list[int], **options: Any) -> dist.Work:
    copy, stream = own.clone(), torch.cuda.Stream()  # in an all-gather, `own` is a part of `output`
    output.fill_(torch.nan)
    own.copy_(copy)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(3 * 10**7)  # some 20 ms: longer than the host takes until it launches the first read
        return start(output, own, *sizes, **options)


if __name__ == "__main__":
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    if launched().world_size == 1:
        send_to_itself()
    if torch.cuda.is_available():
        start_late()
    del sys.argv[0]
    with sdpa_kernel(SDPBackend.MATH):  # with warn_only, backward of the others adds up in another order each time
        runpy.run_path(sys.argv[0], run_name="__main__")
