"""`overlap`: by default every parameter is in its place after step; with overlap, whoever reads through modules waits."""

import copy
import gc
import io
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from nets import TINY_MB, backward, inputs, make_gathers_late, net, same_under_both, wrap
from ranks import run_ranks
from test_idioms import three_steps
from torch import nn
from torch.nn.utils import spectral_norm

from zero import ShardedDataParallel, ShardedOptimizer


class Views(nn.Module):
    """Has views of a weight, from before its memory moves: one in an attribute, one as a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.flat = self.inner.weight.detach().view(-1)
        self.register_buffer("rows", self.inner.weight.data[2:])

    def forward(self, x):
        return self.flat[:8] * self.rows.sum() + self.inner(x)


def a_list_of_parameters(wrap):
    """A moving average over a list that was made once, and a reading of it in forward, by another method."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
            self.weights = [self.head.weight]

        def loss(self, x):
            return (self.body(x) @ self.weights[0].t()).square().sum() + self.head(x).sum()

        def forward(self, x):
            return self.loss(x)

    module = Reader()
    model, optimizer = wrap(module)
    params = list(module.parameters())
    averages = [param.detach().clone() for param in params]
    for step in range(4):
        model(inputs(step)).backward()
        optimizer.step()
        for average, param in zip(averages, params, strict=True):
            average.lerp_(param.detach(), 0.5)
        optimizer.zero_grad()
    return [*averages, *(param.detach().clone() for param in params)]


def views(wrap):
    return three_steps(wrap, Views())


def a_legacy_spectral_norm(wrap):
    torch.manual_seed(0)
    module = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 3)))
    assert module[0].weight.untyped_storage().data_ptr() == module[0].weight_orig.untyped_storage().data_ptr()
    return three_steps(wrap, module)


def an_lstm(wrap):
    torch.manual_seed(0)
    module = nn.Sequential(nn.LSTM(8, 8), nn.Identity())
    module[1].forward = lambda found: found[0]
    return three_steps(wrap, module)


def default_readers():
    make_gathers_late()
    readers = (a_list_of_parameters, views, a_legacy_spectral_norm)
    return [same_under_both(trains, TINY_MB, overlap=False) for trains in readers]


def test_by_default_it_does_not_matter_how_a_parameter_is_read():
    for differences in run_ranks(default_readers, 2):
        assert differences == [pytest.approx(0, abs=1e-6)] * 3


def overlapped_readers():
    make_gathers_late()
    assert same_under_both(a_legacy_spectral_norm, TINY_MB, overlap=True) == pytest.approx(0, abs=1e-6)
    assert same_under_both(an_lstm, TINY_MB, overlap=True) == pytest.approx(0, abs=1e-6)
    with pytest.raises(RuntimeError, match=r"uses .*inner\.weight before its all-gather has ended"):
        views(lambda module: wrap(module, overlap=True))
    return True


def test_with_overlap_a_read_waits_or_is_named():
    run_ranks(overlapped_readers, 2)


def a_thread_reads():
    """Two threads must not wait for the same receive."""
    module = net()
    model, optimizer = wrap(module, overlap=True)
    stop, failures = threading.Event(), []

    def read():
        try:
            while not stop.is_set():
                sum(param.detach().sum().item() for param in module.parameters())
        except Exception as error:
            failures.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    for step in range(50):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    stop.set()
    thread.join()
    assert not failures
    return True


def test_a_thread_may_read_while_the_model_trains():
    run_ranks(a_thread_reads, 2)


def a_forked_reader(overlap):
    """A process that is forked after step reads what is there, or is told to synchronize first."""
    make_gathers_late()
    module = net()
    model, optimizer = wrap(module, overlap=overlap)
    backward(model)
    optimizer.step()
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            answer = str(module[0].weight.isfinite().all().item())
        except RuntimeError as error:
            answer = str(error)
        os.write(writing, answer.encode())
        os._exit(0)
    answer = os.read(reading, 1000).decode()
    optimizer.synchronize()
    os.wait()
    return answer


def test_a_forked_process_reads_or_is_refused():
    assert run_ranks(a_forked_reader, 2, False) == ["True", "True"]
    for answer in run_ranks(a_forked_reader, 2, True):
        assert "forked while all-gathers were in flight" in answer


def _ends_early(rank, folder):
    """Rank 1 ends as soon as its last step has returned; the other one is still in it, and saves afterwards."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    model, optimizer = wrap(module, bucket_mb=1, overlap=True)
    model(torch.ones(2, 512)).sum().backward()
    if rank == 0:
        update = optimizer.inner.step.__func__.__wrapped__

        def slow(self):
            threading.Event().wait(0.2)
            return update(self)

        type(optimizer.inner).step.__wrapped__ = slow
    optimizer.step()
    if rank == 0:
        torch.save(module.state_dict(), f"{folder}/saved.pt")


def test_a_rank_that_ends_first_leaves_the_others_their_parameters(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [subprocess.Popen([sys.executable, __file__, str(rank), str(tmp_path)], env=env) for rank in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert (tmp_path / "saved.pt").exists()


def reads_are_checked_at_first_only():
    module = net()
    model, optimizer = wrap(module, overlap=True)
    always, its_optimizer = wrap(net(), overlap=True, check_reads=True)
    found = []
    for step in range(5):
        for wrapper, its in ((model, optimizer), (always, its_optimizer)):
            found.append(isinstance(wrapper._check_of_reads(), torch.utils._python_dispatch.TorchDispatchMode))
            backward(wrapper, step)
            its.step()
            its.zero_grad()
    return found


def test_reads_are_checked_in_the_first_forwards_after_a_step():
    # each call above counts as a forward; nothing is in flight before the first step
    for found in run_ranks(reads_are_checked_at_first_only, 2):
        assert found[::2] == [False, True, False, False, False]
        assert found[1::2] == [False, True, True, True, True]


def parts():
    """What copies or saves a part of a model takes that part, not the buffer that it lies in."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    wrap(module, bucket_mb=75)
    file = io.BytesIO()
    torch.save(module[0].weight, file)
    assert len(file.getvalue()) < 64 * 64 * 4 + 4000
    copied = {name: copy.deepcopy(tensor) for name, tensor in module.state_dict().items()}
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in copied.values())
    return True


def test_a_part_is_copied_and_saved_as_a_part():
    run_ranks(parts, 2)


def building_again():
    """A next phase of training, after the wrapper and the optimizer of the first one are deleted."""
    module = net()
    for _ in range(3):
        model, optimizer = wrap(module)
        backward(model)
        optimizer.step()
        del model, optimizer
        gc.collect()
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW)
    ShardedDataParallel(module, optimizer)
    return True


def test_a_model_can_be_wrapped_again_after_deletion():
    run_ranks(building_again, 2)


if __name__ == "__main__":
    _ends_early(int(sys.argv[1]), sys.argv[2])
