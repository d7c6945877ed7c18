"""A process that is killed at any moment of a save leaves a whole checkpoint, in both formats."""

import random
import time

import pytest
import ranks
from contents import write

from zero import checkpoint as ckpt

KILLS = 8


def save_without_end(folder, background, format, iteration, ready):
    writer = ckpt.CheckpointWriter(folder, keep=2, background=background, format=format)
    while True:
        iteration += 1
        write(writer, iteration, numel=200_000)
        outcomes = writer.outcomes()
        assert not [outcome for outcome in outcomes if isinstance(outcome, OSError)]
        if outcomes:
            ready.set()


@pytest.mark.parametrize("format", ckpt.FORMATS)
@pytest.mark.parametrize("background", [False, True])
def test_a_kill_inside_a_save_leaves_a_whole_file(tmp_path, background, format):
    rng, iteration = random.Random(1), 0
    for _ in range(KILLS):
        ready = ranks.context.Event()
        process = ranks.context.Process(target=save_without_end, args=(str(tmp_path), background, format, iteration, ready))
        process.start()
        ready.wait()
        time.sleep(rng.random() * 0.1)
        process.kill()
        process.join()
        path, warning = ckpt.find(str(tmp_path))
        assert warning is None
        checkpoint = ckpt.load(path)
        assert checkpoint["iter_num"] >= iteration
        assert (checkpoint["model"]["weight"] == checkpoint["iter_num"]).all()
        iteration = checkpoint["iter_num"]
    assert iteration > KILLS, "there must have been something to kill"
