"""What changes a script that a test runs, mostly for the worse: a function is called in the process of a rank, before it.

A test gives one of these to `scripts.run` as `before`, with its arguments bound by `functools.partial`. The program must not be
imported before its settings and its folder are known: its functions are named, as "module:Class.function".
"""

import atexit
import ctypes
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import wraps
from multiprocessing import util
from pathlib import Path
from pkgutil import resolve_name

import torch


def around(name):
    """Replace a function of a module or a class. The new one gets the old one as its first argument."""
    module, _, path = name.partition(":")
    *classes, attribute = path.split(".")
    owner = resolve_name(f"{module}:{'.'.join(classes)}")
    original = getattr(owner, attribute)

    def install(function):
        @wraps(original)
        def changed(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, attribute, changed)

    return install


def rank():
    return int(os.environ.get("RANK", 0))


def on_last_rank(fault, *args):
    if rank() == int(os.environ["WORLD_SIZE"]) - 1:
        fault(*args)


# -- settings and modules ------------------------------------------------------------------------------------------------


def add_arguments(*arguments):
    sys.argv += arguments


def add_arguments_by_rank(by_rank):
    sys.argv += by_rank.get(rank(), ())


def import_from(folder):
    sys.path.insert(0, folder)


def without_module(name):
    sys.modules[name] = None


def returns(name, value):
    """Let a function return this."""

    @around(name)
    def constant(*_, **__):
        return value


def fails_later(name, times, error=RuntimeError):
    """Let a function fail after it has run some times."""
    left = iter(range(times))

    @around(name)
    def fail(original, *args, **options):
        if next(left, None) is None:
            raise error
        return original(*args, **options)


def matrix_products_of_muon_are_zero():
    """Each takes seconds on a CPU without instructions for bfloat16; memory and bytes are the same."""
    torch.bmm = lambda a, b: a.new_zeros(*a.shape[:2], b.shape[2])
    torch.baddbmm = lambda c, a, b, **_: torch.zeros_like(c)


def a_parameter_that_no_forward_uses():
    @around("model:GPT.__init__")
    def init(original, self, *args):
        original(self, *args)
        self.unused = torch.nn.Linear(2, 3)


def run_exit_hooks(fault, *args):
    """As Python does where it ends; a forked process runs none. And another fault."""
    util.Finalize(None, atexit._run_exitfuncs, exitpriority=0)
    fault(*args)


def write_to(path):
    """A terminal in place of stdout and stderr."""
    os.environ["TERM"] = "xterm"
    for number, name in ((1, "stdout"), (2, "stderr")):
        terminal = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        os.dup2(terminal, number)
        os.close(terminal)
        setattr(sys, name, os.fdopen(number, "w", buffering=1))


def enter_namespaces(pid, *kinds):
    """Those of another process; Python 3.12 has `os.setns`."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in kinds:
        with open(f"/proc/{pid}/ns/{kind}") as file:
            assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def be_on_hosts(pids, ranks_per_host, address, fault):
    """Each rank is on the host of one of these processes, where rank 0 holds the store. And another fault."""
    host, local_rank = divmod(rank(), ranks_per_host)
    os.sched_setaffinity(0, os.sched_getaffinity(pids[host]))
    enter_namespaces(pids[host], "net", "uts", "mnt")
    own = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": ranks_per_host, "MASTER_ADDR": address}
    os.environ |= {name: str(value) for name, value in own.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    fault()


def run_each(script):
    """In place of the script, run it once for each line of the second argument, after the settings of the first."""
    _, settings, mistakes = sys.argv
    for mistake in mistakes.splitlines():
        sys.argv[1:] = [*settings.split(), *mistake.split()]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            print("exit code", end.code, file=sys.stderr)
    sys.exit(0)


# -- time ----------------------------------------------------------------------------------------------------------------


def takes_longer(name, seconds):
    @around(name)
    def late(original, *args, **kwargs):
        time.sleep(seconds)
        return original(*args, **kwargs)


def rank_1_stops_at_a_batch(number):
    calls = []

    @around("data.dataset:Dataset.batch")
    def batch(original, *args):
        calls.append(args)
        if rank() == 1 and len(calls) == number:
            time.sleep(1000)
        return original(*args)


def measure_every(iterations, fault=None, *args):
    """Compare the ranks more often than the program does, perhaps with another fault."""
    from run import meter

    meter.INTERVAL = iterations
    if fault:
        fault(*args)


# -- values --------------------------------------------------------------------------------------------------------------


def nan_while_it_saves():
    @around("run.checkpoint_writer:CheckpointWriter.write")
    def write(original, writer, model, *args):
        weight = model.transformer.wte.weight.data
        before = weight.clone()
        weight[3] = torch.nan
        original(writer, model, *args)
        weight.copy_(before)


def infinite_norm():
    @around("run.guard:Guard.check")
    def check(original, self, loss, norm):
        original(self, loss, norm * torch.inf)


def error_in_iteration(iteration):
    @around("run.guard:Guard.report")
    def report(original, self, number, *args):
        if number == iteration:
            raise RuntimeError("an error in the program")
        original(self, number, *args)


def reads_as_from_a_gpu(fault=None):
    """The figures of an iteration are read when the next forward is under way, perhaps with another fault."""

    @around("run.hooks:Run.attach")
    def attach(original, self, *args):
        original(self, *args)
        self._reads_later = True

    if fault:
        fault()


# -- what a test looks at ------------------------------------------------------------------------------------------------


def print_checkpointed_blocks():
    @around("model:checkpoint")
    def checkpoint(original, block, x, **kwargs):
        if type(x) is torch.Tensor:  # the prediction of activations calls it with fake tensors
            print("keeps only its input")
        return original(block, x, **kwargs)


def print_phases_and_collectives():
    """On rank 0, what an iteration does, in order: "> phase", "< phase" at its end, and the collectives of its figures."""
    if rank() > 0:
        return

    @around("run.hooks:Run.phase")
    @contextmanager
    def phase(original, self, name):
        with original(self, name):
            print(f"> {name}")
            yield
        print(f"< {name}")

    @around("torch.distributed:all_reduce")
    def all_reduce(original, tensor, *args, **kwargs):
        print(f"all-reduce of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}")
        return original(tensor, *args, **kwargs)

    @around("zero.collectives:Communicator.all_gather")
    def all_gather(original, *args):
        print("all-gather")
        return original(*args)


def print_seeds():
    @around("torch:manual_seed")
    def manual_seed(original, seed):
        print(f"rank {rank()} draws from {seed}\n", end="", flush=True)
        return original(seed)


def print_bytes_sent(*iterations):
    """When these begin: the bytes and packets that this host has sent."""
    import torch.distributed as dist

    @around("run.meter:Meter.begin_iteration")
    def begin_iteration(original, self, iteration, is_logged):
        if iteration in iterations:
            getattr(self.memory.optimizer, "synchronize", lambda: None)()  # waits for the all-gathers
            dist.barrier()
            counted = [Path(f"/sys/class/net/eth0/statistics/tx_{what}").read_text() for what in ("bytes", "packets")]
            dist.barrier()
            if os.environ["LOCAL_RANK"] == "0":
                print("counted", os.uname().nodename, *map(int, counted), flush=True)
        original(self, iteration, is_logged)


def print_prompts():
    @around("model:GPT.generate")
    def generate(original, self, idx, *rest):
        print("prompt", idx.tolist())
        return original(self, idx, *rest)


def small_files(nbytes):
    """export.py writes files of `nbytes`, and says what is in memory for each."""

    @around("huggingface_hub:split_torch_state_dict_into_shards")
    def split(original, weights, max_shard_size):
        return original(weights, max_shard_size=nbytes)

    @around("safetensors.torch:save_file")
    def save_file(original, *args, **kwargs):
        tensors = [held for held in gc.get_objects() if issubclass(type(held), torch.Tensor) and not held.is_meta]
        print("bytes of weights in memory:", sum(tensor.nbytes for tensor in tensors))
        original(*args, **kwargs)


# -- wandb ---------------------------------------------------------------------------------------------------------------


def kill_wandb():
    """Kill wandb's process in iteration 10."""

    @around("run.wandb_run:WandbRun.log")
    def log(original, self, event):
        if event["iter"] == 10 and "iter/loss" in event:
            process = subprocess.run(["pgrep", "-P", str(os.getpid()), "wandb-core"], capture_output=True, text=True).stdout
            os.kill(int(process), signal.SIGKILL)
        original(self, event)


def collects_garbage_after_the_profile():
    """The garbage collector finds memory that was written to after it was freed."""

    @around("run.profiling:Profiler.finish")
    def finish_and_collect(finish, profiler):
        finish(profiler)
        gc.collect()
