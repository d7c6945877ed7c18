"""Write a trace of a few steps of the sharded implementation, for chrome://tracing or https://ui.perfetto.dev.

$ torchrun --standalone --nproc_per_node=1 -m benchmarks.trace --path=trace.json.gz --model=gpt2 --block_size=1024
"""

import os

from torch.profiler import ProfilerActivity, profile, schedule

import hardware
from benchmarks.contenders import Contender, Setup
from configurator import PositiveInt, configure
from distributed import exit_on_wrong_input, finish, launched, print0, start
from model import GPT2_SIZES, GPTConfig

path = "trace.json.gz"  # rank 0 writes it
model = ""  # a name from GPT2_SIZES; empty: the sizes below
batch_size: PositiveInt = 1
block_size = 64
n_layer = 4
n_head = 4
n_embd = 128
vocab_size = 50304
device = "auto"
dtype = "auto"

WARM_UP, ACTIVE = 2, 2  # steps


def main() -> None:
    config = configure(globals())
    launch = launched()
    with exit_on_wrong_input():
        if not launch.distributed:
            raise ValueError("start it with torchrun --standalone --nproc_per_node=1 -m benchmarks.trace")
        chosen, used_dtype = hardware.resolve(config["device"], config["dtype"])
        sizes = GPT2_SIZES.get(config["model"], {key: config[key] for key in ("n_layer", "n_head", "n_embd")})
        gpt = GPTConfig(config["block_size"], config["vocab_size"], **sizes, dropout=0.0, bias=False)
        os.makedirs(os.path.dirname(config["path"]) or ".", exist_ok=True)
        used = start(launch, chosen)
    contender = Contender(Setup(gpt, config["batch_size"], used, used_dtype, 75.0, 1.0, False, 1), "sharded").wrap()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if used.type == "cuda" else [])]

    def export(profiler: profile) -> None:
        if launch.rank == 0:
            profiler.export_chrome_trace(config["path"])
            print(profiler.key_averages().table(sort_by=f"self_{used.type}_time_total", row_limit=15, max_name_column_width=40))

    steps = schedule(wait=0, warmup=WARM_UP, active=ACTIVE)
    with profile(activities=activities, schedule=steps, on_trace_ready=export) as profiler:
        for _ in range(WARM_UP + ACTIVE):
            contender.step()
            profiler.step()
    print0(f"trace: {config['path']}")
    finish()


if __name__ == "__main__":
    main()
