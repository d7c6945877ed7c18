"""PyTorch's recipe for ZeroRedundancyOptimizer, with one more choice: the memory of 20 x Linear(2000, 2000) under Adam.

    $ torchrun --standalone --nproc_per_node=2 examples/cookbook.py --zero=sharded      # or torch, or none

Rank 0 prints the peaks so far, as in the recipe, and the sum of all parameters after a step, which does not depend on --zero.
On a GPU the peaks are those of PyTorch's allocator, on a CPU of resident memory, less that of Python and torch.
Source: https://docs.pytorch.org/tutorials/recipes/zero_redundancy_optimizer.html
"""

import argparse
import os
import resource

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from zero import ShardedDataParallel, ShardedOptimizer


def peak_mb() -> float:
    """Return the peak of memory so far, in megabytes (10**6 bytes)."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # in KiB on Linux


def main(zero: str) -> None:
    dist.init_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = peak_mb()

    def show_peak(point: str) -> None:
        if dist.get_rank() == 0:
            print(f"peak memory after {point}: {peak_mb() - before:.0f} MB")

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(20))).to(device)
    show_peak("the model")
    if zero == "sharded":
        optimizer: torch.optim.Optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        ddp: nn.Module = ShardedDataParallel(model, optimizer)  # type: ignore[arg-type]
    else:
        ddp = DistributedDataParallel(model)
        if zero == "torch":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    show_peak("data parallelism")
    torch.manual_seed(dist.get_rank())  # each rank has its own data
    inputs, labels = torch.randn(20, 2000, device=device), torch.randn(20, 2000, device=device)
    nn.functional.mse_loss(ddp(inputs), labels).backward()
    show_peak("backward, before the step")
    optimizer.step()
    show_peak("the step")
    if dist.get_rank() == 0:
        total = sum(param.detach().double().sum().item() for param in model.parameters())
        print(f"sum of all parameters: {total:.6f}", flush=True)
    os._exit(0)  # Python's own end can be aborted by the threads of gloo (https://github.com/pytorch/pytorch/pull/179291)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--zero", choices=["sharded", "torch", "none"], default="sharded", help="who divides Adam's state")
    main(parser.parse_args().zero)
