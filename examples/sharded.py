"""Each start, with any number of ranks, trains ten more steps: torchrun --standalone --nproc_per_node=2 examples/sharded.py"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist

from zero import ShardedDataParallel, ShardedOptimizer, checkpoint

dist.init_process_group()
if torch.cuda.is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64)).to(device)
optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)  # all ranks get the weights of rank 0
ddp = ShardedDataParallel(model, optimizer)  # in place of DistributedDataParallel
saved = checkpoint.load("state.pt") if os.path.exists("state.pt") else {"step": 0}
if saved["step"]:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])  # on all ranks: each takes its part
for step in range(saved["step"], saved["step"] + 10):
    torch.manual_seed(1000 * step + dist.get_rank())  # each rank has its own data
    for micro_step, x in enumerate(torch.randn(4, 32, 64, device=device)):
        with ddp.no_sync() if micro_step < 3 else nullcontext():  # the last backward sends the gradients of all four
            loss = (ddp(x) - x.sort().values).square().mean()
            (loss / 4).backward()
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}", flush=True)
checkpoint.save("state.pt", model, optimizer, step=step + 1)  # on all ranks; the file is always complete
os._exit(0)  # Python's own end can be aborted by the threads of gloo (https://github.com/pytorch/pytorch/pull/179291)
