"""Whether parameters that ShardedOptimizer moves into flat buffers, by DLPack, take the memory that they should, and free it.

$ python -m benchmarks.storage      # on the GPU, if there is one
"""

import copy

import torch

from benchmarks.memory_profile import AllocatedBytes, free_unused_memory
from forecast.live_bytes import LiveBytes
from zero import ShardedDataParallel, ShardedOptimizer

WIDTH, LAYERS = 1024, 8


class Products(torch.nn.Module):
    """Multiplies no matrices, for which a GPU would take workspaces."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.ones(WIDTH, WIDTH, device=device) for _ in range(LAYERS))

    def forward(self, x: float) -> torch.Tensor:
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


def main() -> None:
    """Print the bytes at each point by those of the parameters, and end with exit code 1 if one is not what it should be."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    live = AllocatedBytes() if device == "cuda" else LiveBytes()
    found = {}
    with live:
        model = Products(device)
        whole = live.now
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, bucket_mb=8, fused=True)
        wrapped = ShardedDataParallel(model, optimizer)
        found["moved"] = live.now, 1.0
        storages = sum(param.untyped_storage().nbytes() for param in model.parameters())
        found["storages of the parameters"] = storages, 1.0
        copied = copy.deepcopy(model.weights[0])
        found["moved, with a copy of one"] = live.now, 1 + 1 / LAYERS
        wrapped(2.0).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.comm.pool.clear()  # which a CPU keeps
        free_unused_memory()
        found["after a step, with its state"] = live.now, 3 + 1 / LAYERS
        del copied, wrapped, optimizer, model
        free_unused_memory()
        found["freed"] = live.now, 0.0
    for point, (count, expected) in found.items():
        print(f"{point:30} {count / whole:.3f} of the parameters, expected {expected:.3f}")
    raise SystemExit(any(abs(count / whole - expected) > 0.02 for count, expected in found.values()))


if __name__ == "__main__":
    main()
