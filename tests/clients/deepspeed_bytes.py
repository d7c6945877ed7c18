"""Count what DeepSpeed's ZeRO stage 1 sends and holds, for the table of docs/accounting.md. It needs deepspeed.

    $ DS_ACCELERATOR=cpu torchrun --standalone --nproc_per_node=2 tests/clients/deepspeed_bytes.py

Prints, in units of the bytes of the parameters: what is all-reduced and gathered in a step, and float32 masters of a rank.
"""

import json
from collections import Counter

import deepspeed
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MICRO_STEPS = 2


class Collectives(TorchDispatchMode):
    """Adds up the bytes of the largest tensor list of each collective, by its name."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sizes = [sum(leaf.nbytes for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)) for part in args[:2]]
            self.bytes[func._opname] += max(sizes)
        return func(*args, **(kwargs or {}))


def step(engine):
    for _ in range(MICRO_STEPS):
        engine.backward(engine(torch.randn(2, 256)).square().mean())
        engine.step()


dist.init_process_group("gloo")
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(16)))
whole = sum(param.nbytes for param in model.parameters())
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": MICRO_STEPS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
step(engine)
with Collectives() as sent:
    step(engine)
if dist.get_rank() == 0:
    sent.bytes["masters"] = optimizer.single_partition_of_fp32_groups[0].nbytes
    print(json.dumps({name: round(count / whole, 3) for name, count in sent.bytes.items()}))
