"""Training that is killed at a random moment, one rank or all, and resumed, ends as if nothing had happened.

A process that is killed at any moment of a save leaves a whole checkpoint.
"""

import json
import os
import random
import tempfile
import time

import pytest
import ranks
import torch
import torch.distributed as dist
from checkpoints import VALUES, restore, write
from toy import batch, build_toy, make_toy

from run.checkpoint_folder import find
from run.checkpoint_writer import CheckpointWriter
from zero import checkpoint as ckpt

STEPS, WORLD_SIZE, KILLS = 16, 2, 5


def train_rank(rank, meeting, folder, muon, started):
    """From the newest checkpoint to the end, a save every other step; the losses go to a file, a line each."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}/rendezvous", rank=rank, world_size=WORLD_SIZE)
    model, optimizer = build_toy("sharded", muon=muon)
    first = 0
    if os.path.exists(f"{folder}/ckpt.pt"):
        checkpoint = restore(optimizer, find(folder)[0])
        model.module.load_state_dict(checkpoint["model"])
        first = checkpoint["iter_num"]
    writer = CheckpointWriter(folder, keep=2, background=True)
    dist.barrier()
    started.set()
    with open(f"{folder}/losses{rank}", "a", buffering=1) as losses:
        for step in range(first, STEPS):
            if step % 2 == 0:
                writer.write(model.module, optimizer, {**VALUES, "iter_num": step})
            loss = model(*batch(step, rank))
            losses.write(json.dumps([step, loss.item()]) + "\n")
            loss.backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    weights = ckpt.model_state_dict(model.module, optimizer)
    writer.wait()
    assert not [outcome for outcome in writer.outcomes() if isinstance(outcome, OSError)]
    if rank == 0:
        torch.save(weights, f"{folder}/end.pt")
    dist.barrier()
    os._exit(0)


def start(folder, muon):
    """The ranks, all of which are in training."""
    meeting = tempfile.mkdtemp(dir=folder)
    events = [ranks.context.Event() for _ in range(WORLD_SIZE)]
    how = [(rank, meeting, folder, muon, event) for rank, event in enumerate(events)]
    processes = [ranks.context.Process(target=train_rank, args=args) for args in how]
    for process in processes:
        process.start()
    assert all(event.wait(60) for event in events)
    return processes


def finish(processes):
    for process in processes:
        process.join(60)
        process.kill()
    return [process.exitcode for process in processes]


def curve(folder):
    """Every loss that was ever logged, by rank and step: a step that was repeated must have given the same."""
    losses = {}
    for rank in range(WORLD_SIZE):
        with open(f"{folder}/losses{rank}") as file:
            for line in file:
                if not line.endswith("]\n"):
                    continue  # cut off by the kill
                step, loss = json.loads(line)
                assert losses.setdefault((rank, step), loss) == loss, "the repeated step differs"
    return losses


def steps_taken(folder):
    """How many losses rank 0 has logged so far."""
    path = folder / "losses0"
    return path.read_text().count("\n") if path.exists() else 0


MANY = pytest.mark.slow("100 kills, also with AdamW alone; the default has four", seconds=131)


@pytest.mark.parametrize(
    ("trials", "muon"), [(4, True), pytest.param(100, False, marks=MANY), pytest.param(100, True, marks=MANY)]
)
def test_killed_and_resumed(tmp_path, trials, muon):
    """With Muon for two matrices and AdamW for everything else, or AdamW alone."""
    rng = random.Random(0)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    processes = start(str(undisturbed), muon)
    begin = time.monotonic()
    assert finish(processes) == [0] * WORLD_SIZE
    duration = time.monotonic() - begin
    expected, end = curve(undisturbed), torch.load(undisturbed / "end.pt", weights_only=True)
    assert len(expected) == STEPS * WORLD_SIZE
    assert not torch.equal(end["hidden.weight"], make_toy(0).hidden.weight)
    interrupted = 0
    for trial in range(trials):
        folder = tmp_path / str(trial)
        folder.mkdir()
        processes = start(str(folder), muon)
        steps = rng.randrange(STEPS // 2)
        while all(process.exitcode is None for process in processes) and steps_taken(folder) < steps:
            time.sleep(0.001)
        time.sleep(rng.random() * duration / STEPS)
        for process in [rng.choice(processes)] if trial % 2 else processes:
            process.kill()
        finish(processes)  # a rank that is left alone finds out and fails
        if not (folder / "end.pt").exists():
            interrupted += 1
            assert finish(start(str(folder), muon)) == [0] * WORLD_SIZE, trial
        assert curve(folder) == expected, trial
        resumed = torch.load(folder / "end.pt", weights_only=True)
        assert all(torch.equal(resumed[name], end[name]) for name in end), trial
    assert interrupted > trials // 2, "the kills must hit runs that are under way"


def save_without_end(folder, background, iteration, ready):
    """`ready` after two of them."""
    writer, first = CheckpointWriter(folder, keep=2, background=background), iteration + 1
    while True:
        iteration += 1
        write(writer, iteration, numel=200_000)
        outcomes = writer.outcomes()
        assert not [outcome for outcome in outcomes if isinstance(outcome, OSError)]
        if any(outcome.iter_num > first for outcome in outcomes):
            ready.set()


@pytest.mark.parametrize("background", [False, True])
def test_a_kill_inside_a_save_leaves_a_whole_file(tmp_path, background):
    rng, iteration = random.Random(1), 0
    for _ in range(KILLS):
        ready = ranks.context.Event()
        process = ranks.context.Process(target=save_without_end, args=(str(tmp_path), background, iteration, ready))
        process.start()
        assert ready.wait(60), "it has ended"
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.join()
        path, warning = find(str(tmp_path))
        assert warning is None
        checkpoint = ckpt.load(path)
        assert checkpoint["iter_num"] >= iteration
        assert (checkpoint["model"]["weight"] == checkpoint["iter_num"]).all()
        iteration = checkpoint["iter_num"]
    assert iteration >= 2 * KILLS, "there must have been something to kill"
