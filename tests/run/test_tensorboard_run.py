"""run/sinks.py: TensorBoard shows every figure of metrics.jsonl once, also of a run that was killed and resumed."""

import os
from functools import partial

import faults
import pytest
from scripts import FEW, SETTINGS, events_of, run

MISSING = "tensorboard is not installed: pip install -e '.[dev]'"


def shown(folder):
    """What TensorBoard reads: {tag: {step: value}}, and the tags of texts."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=MISSING)
    found = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0, reader.TENSORS: 0})
    found.Reload()
    tags = found.Tags()
    return {tag: {event.step: event.value for event in found.Scalars(tag)} for tag in tags["scalars"]}, tags["tensors"]


def test_tensorboard_has_every_figure_once(data, tmp_path):
    """The first process has gone on to iteration 12 when the second one begins at the checkpoint of 10."""
    pytest.importorskip("tensorboard", reason=MISSING)
    arguments = [*SETTINGS, FEW, f"--dataset={data}", f"--out_dir={tmp_path}", "--log_to=tensorboard", "--keep_checkpoints=2"]
    first = run("train.py", *arguments, "--max_iters=12", "--sample_interval=5").succeeded()
    assert f"TensorBoard: tensorboard --logdir={tmp_path}\n" in first.stdout
    os.replace(tmp_path / "ckpt_00000010.pt", tmp_path / "ckpt.pt")
    run("train.py", *arguments, "--max_iters=15", "--init_from=resume").succeeded()
    scalars, texts = shown(tmp_path / "tensorboard")
    expected = {}
    for event in events_of(tmp_path):
        for key in [key for key, value in event.items() if key != "iter" and not isinstance(value, str)]:
            expected.setdefault(key, {})[event["iter"]] = event[key]
    assert sorted(expected["iter/loss"]) == list(range(16))
    assert 10 in expected["checkpoint/bytes"], "its line stays when the run resumes"
    assert scalars.keys() == expected.keys()
    for key, values in expected.items():
        assert scalars[key] == pytest.approx(values, rel=1e-6), key
    assert {"run.json/text_summary", "sample/text/text_summary", "summary/text_summary"} <= set(texts)


def test_without_tensorboard_the_run_is_refused(data, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iter": 0}\n')
    arguments = [f"--dataset={data}", f"--out_dir={tmp_path}", "--log_to=tensorboard"]
    without = partial(faults.without_module, "tensorboard")
    line = run("train.py", *SETTINGS, *arguments, ranks=2, before=without).refusal()
    assert line.startswith("error: log_to=tensorboard needs tensorboard (")
    assert line.endswith("; pip install tensorboard")
    assert (tmp_path / "metrics.jsonl").read_text() == '{"iter": 0}\n'
