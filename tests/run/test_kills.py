"""Training that is killed at a random moment, one rank or all, and resumed, ends as if nothing had happened.

A process that is killed at any moment of a save leaves a whole checkpoint.
"""

import random
import re
import time

import pytest
import ranks
from checkpoints import write
from scripts import FEW, Forked, torch_load, train, training
from toy import assert_equal

from run.checkpoint_folder import find
from run.checkpoint_writer import CheckpointWriter
from zero import checkpoint as ckpt

STEPS, KILLS = 16, 5
MANY = pytest.mark.slow("50 kills with either optimizer; the default has four", seconds=111)


@pytest.mark.parametrize(
    ("trials", "optimizer"), [(4, "muon"), pytest.param(50, "adamw", marks=MANY), pytest.param(50, "muon", marks=MANY)]
)
def test_killed_and_resumed(data, tmp_path, trials, optimizer):
    """With a save in the background every other step, and the same dropout after it."""
    settings = FEW, f"--optimizer={optimizer}", f"--max_iters={STEPS - 1}", "--eval_interval=100"
    settings += "--init_from=auto", "--save_interval=2", "--async_save=True"
    expected, _, _ = train(tmp_path / "undisturbed", data, *settings, ranks=2)
    end = torch_load(tmp_path / "undisturbed")
    assert len(expected) == STEPS
    rng, interrupted = random.Random(0), 0
    for trial in range(trials):
        folder = tmp_path / str(trial)
        with Forked(*training(folder, data, *settings), ranks=2) as forked:
            forked.wait_for(f"iter {rng.randrange(STEPS // 2)}:")
            time.sleep(rng.random() * 0.1)
            for process in [rng.choice(forked.processes)] if trial % 2 else forked.processes:
                process.kill()
            killed = forked.finish()  # a rank that is left alone finds out and fails
        interrupted += killed.returncode != 0
        for iteration, loss in re.findall(r"^iter (\d+): loss (\S+),", killed.stdout, re.MULTILINE):
            assert loss == f"{expected[int(iteration)]:.4f}", "also of steps that are made again"
        losses, _, _ = train(folder, data, *settings, ranks=2)
        assert losses == expected, trial
        for key in ("model", "optimizer"):
            assert_equal(torch_load(folder)[key], end[key], f"{trial}: {key}")
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
