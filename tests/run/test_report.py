"""run/report.py: the card at the end of a run says what was trained, once, whatever has happened to the run."""

import math
import os
import re
import shutil
import signal
from datetime import timedelta
from functools import partial

import faults
import numpy as np
import pytest
from conftest import shared_data, write_meta
from scripts import FEW, Forked, events_of, run, torch_load, train, training

from data.dataset import Dataset
from data.vocabulary import bytes_of_tokens
from run import report
from run.metrics import METRICS
from run.summary import Summary

TOKENS_PER_ITER = 6 * 2 * 16
FACTS = {
    **{"parameters": 1_500_000, "dtype": "float32", "device": "cpu", "devices": ["a CPU", "a CPU"], "dataset": "letters"},
    **{"train_tokens": 1000, "out_dir": "out", "max_iters": 9, "always_save_checkpoint": True},
    **{"learning_rate": 0.001, "seed": 7, "gradient_accumulation_steps": 2, "batch_size": 6, "block_size": 16},
    **{"optimizer": "adamw", "state_dtype": "int8", "loss_chunk": 0},
    **{"git_commit": 40 * "a" + "-dirty"},
    **{"parts": [{"from_iter": 0, "implementation": "sharded", "world_size": 2}], "starts": [0]},
    **{"data": [{"from_iter": 0, "from_tokens": 0, "dataset": "letters", "train_tokens": 1000}]},
}
EVENTS = [
    {"iter": 0, **{f"memory/predicted_{part}_mb": 2.0 for part in ("parameters", "gradients", "state", "buckets", "peak")}},
    {"iter": 0, "val/loss": 4.0, "time/elapsed_s": 1.0},
    {"iter": 0, "iter/loss": 4.1, "memory/peak_mb": 300.0, "throughput/tokens_per_second": 10.0},
    {"iter": 2, "memory/measured_parameters_mb": 3.0, "memory/measured_state_mb": 4.0},
    {"iter": 5, "val/loss": math.log(2), "val/bits_per_byte": 0.5, "memory/saved_mb": 5.0},
    {"iter": 5, "checkpoint/bytes": 6e6},
    {"iter": 6, "iter/loss": None, "mfu": 30.0},
    {"iter": 7, "iter/loss": 3.0, "memory/peak_mb": 200.0, "throughput/tokens_per_second": 30.0},
    {"iter": 8, "val/loss": 3.5, "warning": "Loss spike: of 3.0"},
    {"iter": 10, "iter/tokens": 1500, "time/elapsed_s": 151.0},
]


def summary(events=EVENTS, **facts):
    found = Summary(FACTS | facts)
    for event in events:
        found.add(event)
    return found


def card(folder):
    """The rows of report.md, and its title."""
    text = (folder / report.NAME).read_text()
    return dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", text, re.MULTILINE)), text.splitlines()[0].removeprefix("# Report: ")


def test_the_rows_of_a_run():
    assert report.rows(summary()) == {
        "model": "1.50M parameters, float32; sharded on 2 ranks, cpu: a CPU",
        "data": "letters: 1,500 tokens, 1.50 epochs",
        "settings": "optimizer=adamw, state_dtype=int8, learning_rate=0.001, seed=7, 192 tokens per iteration: "
        "gradient_accumulation_steps=2 x batch_size=6 x block_size=16; commit aaaaaaaa (dirty)",
        "loss": "first 4.1000, best 3.0000 at iteration 7, last 3.0000",
        "val loss": "first 4.0000, best 0.6931 at iteration 5, last 3.5000; the best is 0.5000 bits per byte",
        "time": "0:02:31 (h:mm:ss), with evaluations and checkpoints",
        "speed": "20 tokens/s, MFU 30.0 % (medians)",
        "process": "300.0 MB at the peak, with Python and its libraries",
        "tensors": "7.0 MB before the update, 5.0 MB less than adamw with DistributedDataParallel: parameters, gradients, "
        "state and buckets",
        "predicted": "8.0 MB before the update, 2.0 MB at the peak",
        "checkpoints": "1 written, 6.0 MB each; the newest after 5 iterations",
        "warnings": "1; the last one: Loss spike: of 3.0",
    }


def test_a_save_that_failed_is_named_as_long_as_no_later_one_succeeds():
    failed, saved, end = {"iter": 8, "checkpoint/error": "it is full"}, {"iter": 9, "checkpoint/bytes": 6e6}, {"iter": 10}
    none, again = summary([failed, end]), summary([failed, saved, end])
    assert report.rows(none)["checkpoints"] == "none written; the last save failed: it is full"
    assert [*report.next_commands(none)] == ["dashboard"]
    assert report.rows(again)["checkpoints"] == "1 written, 6.0 MB each; the newest after 9 iterations"
    assert report.next_commands(again)["resume"] == "the same command with --init_from=resume and a larger --max_iters"


def test_on_a_gpu_the_peak_is_that_of_the_tensors():
    rows = report.rows(summary(device="cuda"))
    assert "process" not in rows
    assert rows["tensors"].startswith("300.0 MB at the peak; 7.0 MB before the update, ")
    assert rows["speed"].endswith("MFU 30.0 % (medians)")


def test_what_is_not_known_is_left_out_and_the_first_iteration_is_not_taken_for_a_typical_one():
    rows = report.rows(summary(EVENTS[1:2]))
    assert [*rows] == ["model", "data", "settings", "val loss", "time", "checkpoints"]
    assert "bits" not in rows["val loss"]
    rows = report.rows(summary([*EVENTS[:6], {"iter": 0, "comm/exposed_ms": 2.0, "comm/exposed_percent": 10.0}]))
    alone = " (of the first iteration alone, which takes longer than later ones)"
    assert rows["speed"] == f"10 tokens/s{alone}"
    assert rows["communication"] == f"2.0 ms of a step exposed, 10 %{alone}"


def test_figures_of_an_earlier_process_are_not_mixed_with_those_of_a_later_one():
    again = {"iter": 9, "memory/predicted_state_mb": 1.0, "memory/predicted_peak_mb": 3.0}
    sharded = {"iter": 8, "comm/exposed_ms": 2.0, "comm/exposed_percent": 10.0, "comm/sent_mb_per_step": 3.0}
    exposed_text = "2.0 ms of a step exposed, 10 % (medians)"
    assert report.rows(summary([*EVENTS, sharded]))["communication"] == f"{exposed_text}; 3.0 MB sent per step"
    rows = report.rows(summary([*EVENTS, sharded, again]))
    assert rows["communication"] == exposed_text, "the later process may send something else"
    assert "tensors" not in rows
    assert rows["predicted"] == "1.0 MB before the update, 3.0 MB at the peak"
    parts = [*FACTS["parts"], {"from_iter": 9, "implementation": "adamw", "world_size": 1}]
    ended, later = {"iter": 9, "mfu": 28.0}, {"iter": 10, "throughput/tokens_per_second": 7.0}
    rows = report.rows(summary([*EVENTS, sharded, ended, again, later], parts=parts))
    assert rows["speed"] == "7 tokens/s (medians since iteration 9)"
    assert "communication" not in rows, "plain AdamW on one rank has none"


def test_the_figures_are_those_that_are_declared():
    more = [{"iter": 9, "comm/exposed_ms": 1.0, "comm/exposed_percent": 2.0}]
    assert {*summary(EVENTS + more).figures()} == {key for key, metric in METRICS.items() if metric.when == "summary"}


def test_bytes_per_token_are_counted_where_the_vocabulary_has_texts(data, tmp_path):
    assert Dataset(data, 16).bytes_per_token("val") == 1.0
    dataset = Dataset(data, 16)
    dataset.meta["itos"] = {token: "ä" if token < 10 else "a" for token in range(29)}
    tokens = dataset.tokens["val"][:]
    assert dataset.bytes_per_token("val") == pytest.approx(1 + (tokens < 10).mean())
    dataset.meta["itos"] = dict.fromkeys(range(28), "a")
    assert (28 in tokens, dataset.bytes_per_token("val")) == (True, None), "a token without a text"


def test_bytes_of_gpt2s_tokens_are_known_if_nothing_is_to_be_downloaded(tmp_path, monkeypatch):
    import tiktoken

    requested = []
    monkeypatch.setattr("requests.get", lambda *url: requested.append(url))
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert np.isnan(bytes_of_tokens(None)).all()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", shared_data("tiktoken_cache"))
    lengths, encoding, text = bytes_of_tokens(None), tiktoken.get_encoding("gpt2"), "naïve 日本 skis"
    assert (lengths[encoding.encode(text)].sum(), lengths[encoding.eot_token]) == (len(text.encode()), 0)
    assert np.isnan(lengths[encoding.n_vocab :]).all()
    assert not requested


def test_bits_per_byte_are_beside_every_loss(data, tmp_path):
    """Of letters with two bytes, but for token 0."""
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    letters = ["a", *(chr(ord("à") + token) for token in range(1, 29))]
    write_meta(folder, letters)
    size = len("".join(letters[token] for token in np.fromfile(folder / "val.bin", np.uint16)).encode()) / 1000
    _, evaluations, printed = train(tmp_path, folder, FEW, "--max_iters=5")
    events = [event for event in events_of(tmp_path) if "val/loss" in event]
    bits = [loss / math.log(2) / size for _, loss in evaluations.values()]
    assert [event["val/bits_per_byte"] for event in events] == pytest.approx(bits)
    said = re.findall(r"^step .*, val loss \S+ \((.*) bits per byte\)$", printed, re.MULTILINE)
    assert said == [f"{bit:.4f}" for bit in bits]
    assert card(tmp_path)[0]["val loss"].endswith(f"; the best is {min(bits):.4f} bits per byte")


def test_a_run_ends_when_it_reaches_its_loss(data, tmp_path):
    line = training(tmp_path, data, "--stop_at_val_loss=3.0", "--max_iters=99")
    first = run(*line, ranks=2).succeeded()
    events = events_of(tmp_path)
    *above, reached = [event for event in events if "val/loss" in event]
    assert min(event["val/loss"] for event in above) > 3.0 >= reached["val/loss"]
    end = torch_load(tmp_path)["iter_num"]
    assert end == reached["iter"] == max(event["iter"] for event in events if "iter/loss" in event) + 1
    rows, title = card(tmp_path)
    assert title == f"done, {end} iterations"
    time = timedelta(seconds=round(reached["time/elapsed_s"]))
    expected = f"{reached['val/loss']:.4f} after {end} iterations, {end * TOKENS_PER_ITER:,} tokens, {time} (h:mm:ss)"
    assert rows["target"] == f"val loss {expected}"
    again = run(*line, "--init_from=resume").succeeded()
    assert [len(re.findall(r"^iter \d+:", each.stdout, re.MULTILINE)) for each in (first, again)] == [end, 0]
    assert card(tmp_path)[0]["target"].startswith(f"val loss {reached['val/loss']:.4f} after {end} iterations, ")
    assert "--init_from=resume and a lower --stop_at_val_loss" in (tmp_path / report.NAME).read_text()


def test_a_run_that_has_reached_its_loss_before_it_starts_leaves_a_checkpoint(data, tmp_path):
    _, evaluations, _ = train(tmp_path, data, "--stop_at_val_loss=99", "--always_save_checkpoint=False")
    assert [*evaluations] == [torch_load(tmp_path)["iter_num"]] == [0]


def test_the_loss_of_the_training_split_ends_no_run(data, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(data, folder)
    np.random.default_rng(0).integers(29, size=1000, dtype=np.uint16).tofile(folder / "val.bin")
    losses, evaluations, _ = train(tmp_path, folder, "--stop_at_val_loss=3.2")
    assert min(train_loss for train_loss, _ in evaluations.values()) < 3.2 < min(val for _, val in evaluations.values())
    assert max(losses) == 19


def test_a_killed_and_resumed_run_counts_once(data, tmp_path):
    """Each iteration is a twentieth of a second longer. What the killed process did beyond its checkpoint is done again."""
    line = training(tmp_path, data, "--eval_interval=4", "--keep_checkpoints=9")
    slow = partial(faults.on_last_rank, faults.takes_longer, "model:GPT.forward", 0.05 / 3)
    with Forked(*line, "--max_iters=100000", ranks=2, before=slow) as forked:
        forked.wait_for("iter 11:")
        for pid in forked.pids:
            os.kill(pid, signal.SIGKILL)
        forked.finish()
    assert not (tmp_path / report.NAME).exists()
    killed, saved = events_of(tmp_path), torch_load(tmp_path)
    assert saved["iter_num"] == 8
    resumed = run(*line, "--max_iters=13", "--init_from=resume", ranks=2).succeeded()
    events = events_of(tmp_path)
    rows, title = card(tmp_path)
    assert title == "done, 14 iterations"
    assert rows["data"].startswith(f"{data}: {14 * TOKENS_PER_ITER:,} tokens, ")
    assert rows["checkpoints"].startswith("4 written, "), "at 4, 8, 12 and 14"
    assert rows["restarts"] == "1, the last one at iteration 8"
    first = max(event["iter/loss"] for event in events if event["iter"] == 0 and "iter/loss" in event)
    assert rows["loss"].startswith(f"first {first:.4f}, ")
    times = [event["time/elapsed_s"] for event in events if "time/elapsed_s" in event]
    assert times == sorted(times)
    with_what = "with evaluations and checkpoints, without what was lost before a restart"
    assert rows["time"] == f"{timedelta(seconds=round(times[-1]))} (h:mm:ss), {with_what}"
    at_8 = next(event["time/elapsed_s"] for event in events if event["iter"] == 8 and "val/loss" in event)
    at_11 = next(event["time/elapsed_s"] for event in killed if event["iter"] == 11)
    assert saved["elapsed_s"] < at_8 < at_11, "four iterations of the killed process do not count"
    assert "\n".join(f"{label:<15}{text}" for label, text in rows.items()) in resumed.stdout


def test_a_run_that_ends_with_an_error_says_so_in_its_card(data, tmp_path):
    hooks = partial(faults.run_exit_hooks, faults.error_in_iteration, 3)
    run(*training(tmp_path, data, FEW), before=hooks).failed("an error in the program")
    assert card(tmp_path)[1] == "ended by an error, see the traceback"
