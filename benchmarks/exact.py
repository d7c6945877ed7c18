"""Runs a script with deterministic kernels and, on a GPU, with collectives that start late and overwrite nan.

A single rank shards its optimizer and sends to itself. NCCL then copies, or does nothing in place: that shows what waits for
what, and who frees memory, but neither its kernels nor their speed.

    $ torchrun --standalone --nproc_per_node=2 -m benchmarks.exact train.py --dataset=stdlib_char --max_iters=5 --grad_clip=0

So the checkpoints of two runs are bit-identical, or a wait is missing. NCCL waits for the stream that starts a collective. Here
that one sleeps, and the stream that computes goes on: where it does not wait, it reads nan, and what it overwrites too early is
sent. Collectives in time would show neither. All-reduces, which overwrite what they send, are not late.
"""

import os
import runpy
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.alone import shard_alone
from distributed.launch import launched
from zero import collectives
from zero.collectives import Communicator


def send_to_itself() -> None:
    """From now on, in this process, which has one rank."""
    shard_alone()
    mock.patch.object(Communicator, "is_alone", False).start()


def start_late() -> None:
    """From now on, in this process."""
    for home, name in (collectives, "_all_gather_single"), (collectives, "_reduce_scatter_single"), (dist, "all_to_all_single"):
        mock.patch.object(home, name, partial(_late, getattr(home, name))).start()


def _late(start: Any, output: torch.Tensor, own: torch.Tensor, *sizes: list[int], **options: Any) -> dist.Work:
    here, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    is_inside = output.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()  # in an all-gather
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        copy = own.clone() if is_inside else own
    here.wait_stream(stream)
    output.fill_(torch.nan)
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(3 * 10**7)  # some 20 ms: longer than the host takes until it launches the first read
        if is_inside:
            own.copy_(copy)
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
