"""The file is whole or the one before it: full disks, damage of every kind, kills at any moment, hostile contents."""

import copy
import os
import random
import re
import subprocess
import sys
import time

import pytest
import ranks
import torch
from conftest import ROOT

from model import GPT, GPTConfig
from zero import checkpoint as ckpt
from zero.checkpoint import writer as writer_module
from zero.checkpoint.__main__ import main

CHECKPOINT = {
    "model": {"weight": torch.arange(3000.0), "tied": torch.ones(7)},
    "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3000)}}, "param_groups": [{"params": [0]}]},
    "model_args": {"n_layer": 1},
    "iter_num": 1,
    "best_val_loss": 2.0,
    "config": {"seed": 1},
}


def numbered(iteration):
    return {**CHECKPOINT, "iter_num": iteration}


class Weight(torch.nn.Module):
    """A frozen number and a weight that is the number of the iteration everywhere."""

    def __init__(self, iteration, numel):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((numel,), float(iteration)))
        self.register_buffer("frozen", torch.tensor(5.0))


def write(writer, iteration, numel=3000, **values):
    model = Weight(iteration, numel)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "exp_avg": torch.ones(numel)}
    writer.save(model, optimizer, {"model_args": {}, "best_val_loss": 2.0, "config": {}, **values, "iter_num": iteration})


def test_the_file_before_is_kept_and_so_are_the_last_few(tmp_path):
    (tmp_path / "ckpt_3_best.pt").write_bytes(b"of the user")
    for iteration in (1, 2, 30, 4):
        report = ckpt.save(numbered(iteration), str(tmp_path), keep=2)
        assert (report.iter_num, report.nbytes) == (iteration, os.path.getsize(tmp_path / "ckpt.pt"))
    files = ["ckpt.pt", "ckpt_00000002.pt", "ckpt_00000004.pt", "ckpt_00000030.pt", "ckpt_3_best.pt", "ckpt_prev.pt"]
    assert sorted(os.listdir(tmp_path)) == files
    assert ckpt.load(tmp_path / "ckpt.pt")["iter_num"] == 4
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 30
    assert ckpt.find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)


def test_the_last_few_are_those_of_the_largest_iterations(tmp_path):
    """Whatever their files' times; later ones than the newest are of a run that went back, and stay."""
    for iteration in (10, 20, 30, 40):
        ckpt.save(numbered(iteration), str(tmp_path), keep=9)
    for age, iteration in enumerate((40, 10, 30, 20)):
        os.utime(tmp_path / f"ckpt_{iteration:08d}.pt", (2e9 - age, 2e9 - age))

    def kept():
        return [int(name[5:-3]) for name in sorted(os.listdir(tmp_path)) if re.fullmatch(r"ckpt_\d+\.pt", name)]

    ckpt.save(numbered(25), str(tmp_path), keep=2)
    assert kept() == [20, 25, 30, 40]
    ckpt.save(numbered(35), str(tmp_path), keep=1)
    assert kept() == [35, 40]
    ckpt.save(numbered(100_000_000), str(tmp_path), keep=2)
    assert sorted(kept()) == [40, 100_000_000]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("format", ckpt.FORMATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_take_no_ones_place(tmp_path, format, background, value):
    writer = ckpt.CheckpointWriter(str(tmp_path), keep=3, format=format, background=background)
    write(writer, 1)
    writer.wait()
    before = sorted(os.listdir(tmp_path))
    write(writer, value)
    writer.wait()
    written, refused = writer.outcomes()
    assert written.iter_num == 1
    assert isinstance(refused, ckpt.DivergedError)
    assert str(refused) == "weight is not finite"
    assert sorted(os.listdir(tmp_path)) == before
    assert ckpt.find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)
    write(writer, 2)
    writer.wait()
    assert [outcome.iter_num for outcome in writer.outcomes()] == [2]


def test_a_writer_that_sweeps_nothing(tmp_path):
    for name in ("ckpt.pt.tmp", "shards_00000001_00000000.tmp"):
        (tmp_path / name).mkdir()
    ckpt.CheckpointWriter(str(tmp_path), sweep=False)
    assert len(os.listdir(tmp_path)) == 2


def test_what_overwrites_the_newest_file_in_place_leaves_the_kept_ones(tmp_path):
    """As `cp` does, to go back to one of them, and nanoGPT, when it resumes there."""
    for iteration in (1, 2, 3):
        ckpt.save(numbered(iteration), str(tmp_path), keep=2)
    (tmp_path / "ckpt.pt").write_bytes((tmp_path / "ckpt_00000002.pt").read_bytes())
    (tmp_path / "ckpt_prev.pt").write_bytes(b"")
    assert [ckpt.load(tmp_path / f"{name}.pt")["iter_num"] for name in ("ckpt", "ckpt_00000002", "ckpt_00000003")] == [2, 2, 3]


def test_a_missing_file_is_mentioned(tmp_path):
    with pytest.raises(ckpt.CheckpointError, match=r"there is no checkpoint .*ckpt\.pt$"):
        ckpt.find(str(tmp_path))
    ckpt.save(numbered(1), str(tmp_path))
    os.rename(tmp_path / "ckpt.pt", tmp_path / "ckpt_prev.pt")
    path, warning = ckpt.find(str(tmp_path))
    assert path == str(tmp_path / "ckpt_prev.pt")
    assert warning == f"there is no checkpoint {tmp_path / 'ckpt.pt'}"


@pytest.mark.parametrize("format", ckpt.FORMATS)
def test_nothing_counts_before_it_is_on_the_disk(tmp_path, monkeypatch, format):
    """Contents, then the name they have while they are written, then the name that counts."""
    steps = []

    def note(call):
        def noted(*arguments):
            paths = [os.readlink(f"/proc/self/fd/{each}") if isinstance(each, int) else str(each) for each in arguments]
            names = [re.sub("[0-9a-f]{8}_?", "", os.path.relpath(path, tmp_path)) for path in paths]
            steps.append((call.__name__, *names))
            return call(*arguments)

        monkeypatch.setattr(os, call.__name__, noted)

    for call in (os.fsync, os.rename, os.replace):
        note(call)
    write(ckpt.CheckpointWriter(str(tmp_path), format=format), 7)
    commit = [("fsync", "ckpt.pt.tmp"), ("replace", "ckpt.pt.tmp", "ckpt.pt"), ("fsync", ".")]
    if format == "sharded":
        commit[1:1] = [("rename", "shards_.tmp", "shards_"), ("fsync", ".")]
        before, steps = steps[: -len(commit)], steps[-len(commit) :]
        assert ("fsync", "shards_.tmp/__0_0.distcp") in before
        assert before[-1] == ("fsync", "shards_.tmp")
    assert steps == commit


def test_where_a_file_cannot_have_two_names_it_is_copied(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError("not on this file system")

    monkeypatch.setattr(os, "link", no_links)
    test_the_file_before_is_kept_and_so_are_the_last_few(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    ckpt.save(CHECKPOINT, str(tmp_path))

    class Unpicklable:
        def __reduce__(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ckpt.save({**CHECKPOINT, "config": Unpicklable()}, str(tmp_path))
    assert ckpt.load(tmp_path / "ckpt.pt")["iter_num"] == 1
    assert os.listdir(tmp_path) == ["ckpt.pt"]


def test_a_full_disk(tmp_path):
    """/dev/full takes the name of the temporary file: every write fails as on a full disk."""
    writer = ckpt.CheckpointWriter(str(tmp_path))
    write(writer, 1)
    os.symlink("/dev/full", tmp_path / "ckpt.pt.tmp")
    write(writer, 2, numel=1_000_000)
    written, failed = writer.outcomes()
    assert written.iter_num == 1
    assert isinstance(failed, OSError)
    assert "No space left" in str(failed)
    write(writer, 3)
    assert [outcome.iter_num for outcome in writer.outcomes()] == [3]
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 1


@pytest.mark.parametrize("kind", [TypeError, RuntimeError])
@pytest.mark.parametrize("background", [False, True])
def test_an_error_that_is_not_the_disks_is_not_swallowed(tmp_path, background, kind):
    class Unpicklable:
        def __reduce__(self):
            raise kind("a mistake in the program")

    writer = ckpt.CheckpointWriter(str(tmp_path), background=background)
    with pytest.raises(kind, match="a mistake in the program"):  # noqa: PT012 - in the background wait() raises it
        write(writer, 1, config=Unpicklable())
        writer.wait()
    assert not os.listdir(tmp_path)


def test_in_the_background_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    running, most = [], []
    save = ckpt.save

    def slow(checkpoint, *args):
        running.append(checkpoint["iter_num"])
        most.append(len(running))
        time.sleep(0.1)
        nbytes = save(checkpoint, *args)
        running.remove(checkpoint["iter_num"])
        return nbytes

    monkeypatch.setattr(writer_module, "save", slow)
    writer = ckpt.CheckpointWriter(str(tmp_path), background=True)
    begin = time.perf_counter()
    write(writer, 1)
    assert time.perf_counter() - begin < 0.09, "the first one returns at once"
    write(writer, 2)
    writer.wait()
    assert most == [1, 1]
    assert [outcome.iter_num for outcome in writer.outcomes()] == [1, 2]
    assert ckpt.find(str(tmp_path))[0].endswith("ckpt.pt")


def test_what_a_killed_process_left_is_swept(tmp_path):
    (tmp_path / "ckpt.pt.tmp").write_bytes(b"torn")
    (tmp_path / "other.tmp").write_bytes(b"of somebody else")
    ckpt.CheckpointWriter(str(tmp_path))
    assert os.listdir(tmp_path) == ["other.tmp"]


# -- damage ------------------------------------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return os.system, ("touch hostile-code-ran",)


def damages(whole, tmp_path):
    """200 damaged files, by name, as bytes; where the damage lies in the padding between entries the file may be whole."""
    rng = random.Random(0)
    yield "empty", b""
    yield "no zip", b"no zip at all"
    yield "torn head", b"PK\x03\x04 torn"
    yield "only the end", whole[-100:]
    yield "twice", whole[: len(whole) // 2] * 2
    for number in range(80):
        yield f"truncated {number}", whole[: rng.randrange(1, len(whole))]
    for number in range(80):
        position = rng.randrange(len(whole))
        flipped = whole[position] ^ (1 << rng.randrange(8))
        yield f"flipped {number}", whole[:position] + bytes([flipped]) + whole[position + 1 :]
    for number in range(20):
        position = rng.randrange(len(whole) - 512)
        yield f"zeroed {number}", whole[:position] + bytes(512) + whole[position + 512 :]
    contents = [{**CHECKPOINT, "config": Hostile()}, Hostile(), 7, [], {}, {"model": {}}]
    contents += [{key: value for key, value in CHECKPOINT.items() if key != missing} for missing in CHECKPOINT]
    contents += [{**CHECKPOINT, "optimizer": {}}, {**CHECKPOINT, "iter_num": "1"}, {**CHECKPOINT, "format": 99}]
    for number, content in enumerate(contents):
        torch.save(content, tmp_path / "content.pt")
        yield f"content {number}", (tmp_path / "content.pt").read_bytes()


def same(checkpoint):
    """Whether what was loaded is what was saved."""
    return all(torch.equal(checkpoint["model"][name], tensor) for name, tensor in CHECKPOINT["model"].items()) and torch.equal(
        checkpoint["optimizer"]["state"][0]["exp_avg"], torch.ones(3000)
    )


def test_two_hundred_damaged_files(tmp_path, monkeypatch):
    """Each falls back to the file before; without one it is named in one line. Nothing runs code, nothing else escapes."""
    monkeypatch.chdir(tmp_path)
    folder, alone = tmp_path / "run", tmp_path / "alone"
    folder.mkdir()
    alone.mkdir()
    ckpt.save(numbered(1), str(folder))
    ckpt.save(numbered(2), str(folder))
    whole = (folder / "ckpt.pt").read_bytes()
    count = unharmed = 0
    for name, damaged in damages(whole, tmp_path):
        count += 1
        for place in (folder, alone):
            (place / "ckpt.pt").write_bytes(damaged)
        path, warning = ckpt.find(str(folder))
        checkpoint = ckpt.load(path)
        assert same(checkpoint), name
        if warning is None:
            assert name.startswith(("flipped", "zeroed")), f"{name} was not noticed"
            assert checkpoint["iter_num"] == 2
            unharmed += 1
            continue
        assert checkpoint["iter_num"] == 1
        assert str(folder / "ckpt.pt") in warning
        with pytest.raises(ckpt.CheckpointError, match=r"ckpt\.pt") as caught:
            ckpt.find(str(alone))
        assert "\n" not in str(caught.value)
    assert count >= 195
    assert unharmed < 25, "damage in the padding only"
    assert not os.path.exists("hostile-code-ran")


def gpt_checkpoint(**sizes):
    """Of a small GPT after a step, as train.py writes it."""
    model = GPT(GPTConfig(**{"block_size": 4, "vocab_size": 5, "n_layer": 1, "n_head": 1, "n_embd": 8, **sizes}))
    optimizer = torch.optim.AdamW(model.param_groups(0.1))
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))[1].backward()
    optimizer.step()
    return copy.deepcopy(
        {
            **{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": vars(model.config)},
            **{"iter_num": 1, "best_val_loss": 2.0, "config": {}, "scaler": {}, "data_position": 3, "wandb_run_id": None},
        }
    )


def resume(folder):
    """What train.py does with a checkpoint, as far as the file is concerned, and a step."""
    checkpoint = ckpt.load(ckpt.find(folder)[0])
    model = GPT.from_checkpoint(checkpoint)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), fused=True)
    ckpt.restore(optimizer, checkpoint["optimizer"])
    model(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))[1].backward()
    optimizer.step()


WRONG_SHAPES_AND_KEYS = {
    "exp_avg_sq is missing": lambda c: c["optimizer"]["state"][0].pop("exp_avg_sq"),
    "exp_avg is a number": lambda c: c["optimizer"]["state"][0].update(exp_avg=5),
    "exp_avg has no dimensions": lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.tensor(1.0)),
    "exp_avg has other dimensions": lambda c: c["optimizer"]["state"][0].update(exp_avg=torch.ones(3, 3)),
    "exp_avg is of one row": lambda c: c["optimizer"]["state"][1].update(exp_avg=torch.ones(3)),
    "step is a vector": lambda c: c["optimizer"]["state"][0].update(step=torch.ones(3)),
    "state of a parameter too many": lambda c: c["optimizer"]["state"].update({99: c["optimizer"]["state"][0]}),
    "state of a parameter by name": lambda c: c["optimizer"]["state"].update({"a": c["optimizer"]["state"][0]}),
    "state is a list": lambda c: c["optimizer"].update(state=[1]),
    "state is of numbers": lambda c: c["optimizer"]["state"].update({0: 3}),
    "a group without parameters": lambda c: c["optimizer"]["param_groups"][0].pop("params"),
    "a group too few": lambda c: c["optimizer"]["param_groups"].pop(),
    "groups are a number": lambda c: c["optimizer"].update(param_groups=3),
    "betas are a word": lambda c: c["optimizer"]["param_groups"][0].update(betas="ab"),
    "betas are three": lambda c: c["optimizer"]["param_groups"][0].update(betas=(0.9, 0.9, 0.9)),
    "a weight is a number": lambda c: c["model"].update({"lm_head.weight": 3}),
    "a weight has a number for a name": lambda c: c["model"].update({3: torch.ones(3)}),
    "a weight has another shape": lambda c: c["model"].update({"lm_head.weight": torch.ones(3, 3)}),
    "a weight is missing": lambda c: c["model"].pop("transformer.wpe.weight"),
    "a weight is on the meta device": lambda c: c["model"].update({"lm_head.weight": torch.ones(5, 8, device="meta")}),
    "the model has other sizes": lambda c: c["model_args"].update(n_embd=16),
    "the model has other layers": lambda c: c["model_args"].update(n_layer=2),
    "layers in words": lambda c: c["model_args"].update(n_layer="two"),
    "no layers": lambda c: c["model_args"].update(n_layer=-1),
    "a different model": lambda c: c.update(model=gpt_checkpoint(n_embd=16)["model"]),
    "a different model's optimizer": lambda c: c.update(optimizer=gpt_checkpoint(n_embd=16)["optimizer"]),
    "a deeper model's optimizer": lambda c: c.update(optimizer=gpt_checkpoint(n_layer=2)["optimizer"]),
    "three best losses": lambda c: c.update(best_val_loss=torch.ones(3)),
    "a negative iteration": lambda c: c.update(iter_num=-3),
    "a position in words": lambda c: c.update(data_position="x"),
    "a negative position": lambda c: c.update(data_position=-1000),
    "a scaler in words": lambda c: c.update(scaler={"scale": "x"}),
    "a scaler without a scale": lambda c: c.update(scaler={"growth_factor": 2.0}),
    "a run id that is none": lambda c: c.update(wandb_run_id=3),
    "a manifest that is none": lambda c: c.update(manifest=3),
}


@pytest.mark.parametrize("name", WRONG_SHAPES_AND_KEYS)
def test_wrong_shapes_and_keys(tmp_path, name):
    """Sound files of wrong contents end in one error of the kind that the scripts turn into a line and exit code 2."""
    checkpoint = gpt_checkpoint()
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    resume(str(tmp_path))
    WRONG_SHAPES_AND_KEYS[name](checkpoint)
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r"checkpoint|saved"):
        resume(str(tmp_path))


def test_a_damaged_file_never_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    writer = ckpt.CheckpointWriter(str(tmp_path))
    write(writer, 1)
    write(writer, 2)
    (tmp_path / "ckpt.pt").write_bytes(b"damaged")
    assert ckpt.find(str(tmp_path))[1] is not None
    writer = ckpt.CheckpointWriter(str(tmp_path), newest_is_corrupt=True)

    def cannot(*_):
        raise OSError("as if killed here")

    with monkeypatch.context() as context:
        context.setattr(os, "replace", cannot)
        write(writer, 3)
    assert ckpt.load(ckpt.find(str(tmp_path))[0])["iter_num"] == 1
    write(writer, 3)
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 1
    write(writer, 4)
    assert ckpt.load(tmp_path / "ckpt_prev.pt")["iter_num"] == 3
    assert ckpt.find(str(tmp_path)) == (str(tmp_path / "ckpt.pt"), None)


def test_hostile_and_incomplete_files_say_what_is_wrong(tmp_path):
    for content, message in (
        ({**CHECKPOINT, "config": None, "model_args": 3}, "missing in it: model_args, config"),
        ({**CHECKPOINT, "optimizer": {}}, r"missing in it: optimizer"),
        ({**CHECKPOINT, "config": Hostile()}, "system"),
        ({**CHECKPOINT, "format": 99}, "has format 99"),
        (7, "missing in it: model, optimizer"),
    ):
        torch.save(content, tmp_path / "ckpt.pt")
        with pytest.raises(ckpt.CheckpointError, match=message):
            ckpt.load(str(tmp_path / "ckpt.pt"))
    with pytest.raises(ckpt.CheckpointError, match=r"no checkpoint .*nowhere\.pt"):
        ckpt.load(str(tmp_path / "nowhere.pt"))
    with pytest.raises(ckpt.CheckpointError, match=r"no checkpoint .*nowhere\.pt"):
        ckpt.verify(str(tmp_path / "nowhere.pt"))


def test_inspect(tmp_path, capsys):
    ckpt.save(numbered(5), str(tmp_path))
    shown = subprocess.run(
        [sys.executable, "-m", "zero.checkpoint", "inspect", str(tmp_path / "ckpt.pt")],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    for part in ("iteration 5", "model.weight (3000,) float32", "optimizer.state.0.exp_avg (3000,)", "all checksums hold"):
        assert part in shown.stdout
    assert "MB, consolidated, format 1" in shown.stdout

    def inspect(name):
        code = main(["inspect", str(tmp_path / name)])
        return code, *capsys.readouterr()

    torch.save(CHECKPOINT, tmp_path / "nanogpt.pt")
    assert "written by nanoGPT" in inspect("nanogpt.pt")[1]
    wrong = ckpt.load(tmp_path / "ckpt.pt")
    wrong["model"]["weight"] = wrong["model"]["weight"] + 1  # a sound archive of other numbers
    torch.save(wrong, tmp_path / "other.pt")
    code, output, _ = inspect("other.pt")
    assert code == 1
    assert "model.weight (3000,) float32 WRONG CHECKSUM" in output
    (tmp_path / "torn.pt").write_bytes((tmp_path / "ckpt.pt").read_bytes()[:-1000])
    for name, reason in (("torn.pt", "is damaged"), ("nowhere.pt", "there is no checkpoint"), ("", "is a folder")):
        code, _, errors = inspect(name)
        assert (code, errors.count("\n")) == (2, 1)
        assert reason in errors
    assert main([]) == 2


# -- kills -------------------------------------------------------------------------------------------------------------


def save_without_end(folder, background, format, iteration, ready):
    torch.set_num_threads(1)
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
    for _ in range(25):
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
    assert iteration > 25, "there must have been something to kill"
