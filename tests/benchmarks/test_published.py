"""benchmarks/published.py: how near the predictions are to GPUs of others; what a GPU's allocator rounds."""

import json
import os
import statistics

import pytest

from benchmarks.published import FOLDER, points, row
from distributed.machine import MIB, allocated, usual_mfu
from forecast.prediction import Workload
from forecast.run_memory import predicted_activations
from model import GPT2_SIZES, GPTConfig


@pytest.fixture(scope="module")
def rows():
    return [row(point) for point in points()]


def test_published_points_are_predicted(rows):
    """Also those from which no correction was made."""
    for some in (rows, [each for each in rows if not each["corrected from it"]]):
        errors = [abs(each["off by, %"]) for each in some]
        assert len(errors) > 30
        assert statistics.median(errors) <= 1.0
        assert max(errors) <= 6.0


def test_the_table_is_what_the_command_writes(rows):
    with open(os.path.join(FOLDER, "results.json")) as file:
        written = json.load(file)["published"]["rows"]
    for own, its in zip(rows, written, strict=True):
        assert own.keys() == its.keys()
        assert own["predicted, MiB"] == pytest.approx(its["predicted, MiB"], rel=5e-3), its


@pytest.mark.parametrize(
    ("size", "counted"),
    [
        (0, 0),
        (1, 512),
        (1000, 1024),
        (3 * MIB, 3 * MIB),  # six in a segment, 2 MiB are left, which is split off
        (9.75 * MIB, 10 * MIB),  # two in a segment, 0.5 MiB is left
        (18.75 * MIB, 18.75 * MIB),  # a segment of 20 MiB, of which 1.25 is split off
        (39.5 * MIB, 40 * MIB),  # 0.5 MiB is not
    ],
)
def test_what_the_allocator_counts(size, counted):
    assert allocated(int(size)) == counted


def test_checkpointed_blocks_that_are_compiled_keep_no_casts():
    sizes = GPTConfig(block_size=64, vocab_size=512, **{**GPT2_SIZES["gpt2"], "n_layer": 4})
    eager, compiled = (
        predicted_activations(Workload(sizes, 1, "bfloat16", "cuda", True, 0, compiled), "float32")
        for compiled in (False, True)
    )
    casts = 4 * 12 * 768**2 * 2  # bytes: all matrices of four blocks
    assert eager.forward - compiled.forward == pytest.approx(casts * 3 / 4, rel=0.3), "but for the block that runs"


def test_the_mfu_is_between_the_published_ones():
    assert [round(usual_mfu(numel)) for numel in (0, 1_000_000, 124_000_000, 1_558_000_000, 10**11)] == [33, 33, 33, 42, 42]
    assert 33 < usual_mfu(350_000_000) < usual_mfu(774_000_000) < 42
