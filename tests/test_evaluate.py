"""evaluate.py: the figures are those that a plain count gives, on one rank and on two, and they go where a reader looks."""

import json
import math
import os
import random
import shutil
from functools import partial

import faults
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import shared_data, write_meta
from scripts import check_mistakes, run, torch_load, train

from model import GPT
from run import report

EXAMPLE = {"ctx": "a", "endings": [*"abcd"], "label": 0}
LETTERS = [" ", *(chr(ord("à") + number) for number in range(9)), *(chr(ord("a") + number) for number in range(19))]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A dataset with letters of one and of two bytes, a run on it, and a file of HellaSwag in its letters."""
    folder, out = tmp_path_factory.mktemp("letters"), tmp_path_factory.mktemp("out")
    for split in ("train", "val"):
        os.link(f"{data}/{split}.bin", folder / f"{split}.bin")
    write_meta(folder, LETTERS)
    train(out, folder, "--max_iters=9")
    write_hellaswag(folder / "hellaswag.jsonl", 50, lambda generator, length: "".join(generator.choices(LETTERS, k=length)))
    return out, folder


def write_hellaswag(path, count, text):
    """Examples of texts that `text` makes of a number of words or letters; some are longer than 16."""
    generator, lines = random.Random(0), []
    for number in range(count):
        endings = [text(generator, generator.randint(1, 9)) for _ in range(4)]
        fields = {"ind": number, "ctx": text(generator, generator.randint(2, 12)), "endings": endings}
        label = generator.randrange(4)
        lines.append(json.dumps({**fields, "label": str(label) if number % 2 else label}))  # some copies have strings
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b"\n\n")  # the mark and the blank line are no examples


def examples_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]


def wrong_examples(folder):
    """Files of which the second example is wrong."""
    fields = [{"label": label} for label in (None, 9, -1, "d", math.inf, True)]
    fields += [{"endings": endings} for endings in ("abcd", [], [*"abcde"], [*"abc", ""], [*"abc", 4])]
    lines = [json.dumps(EXAMPLE | field).encode() for field in (*fields, {"ctx": ""})]
    for number, line in enumerate([*lines, b"?", b"[" * 100_000, b"7", b"\xe9"]):
        path = folder / f"wrong{number}.jsonl"
        path.write_bytes(json.dumps(EXAMPLE).encode() + b"\n" + line + b"\n")
        yield path


def evaluated(out, *arguments, ranks=0):
    process = run("evaluate.py", f"--out_dir={out}", "--device=cpu", *arguments, ranks=ranks).succeeded()
    return json.loads((out / report.EVALUATION).read_text()), process.stdout


def losses_of(row, logits_of):
    """Loss of each token but the first, in nats. `logits_of`: a model."""
    x, y = torch.tensor(row[:-1])[None], torch.tensor(row[1:])
    return F.cross_entropy(logits_of(x)[0], y, reduction="none")


def scored(examples, encode, logits_of, longest):
    """How many examples are answered right by the sums of the losses, and how many by their means."""
    right, right_norm = 0, 0
    for example in examples:
        sums, means = [], []
        for ending in example["endings"]:
            after = encode(f" {ending}")
            losses = losses_of((encode(example["ctx"]) + after)[-longest:], logits_of)[-len(after) :]
            sums.append(losses.sum().item())
            means.append(losses.mean().item())
        right += sums.index(min(sums)) == int(example["label"])
        right_norm += means.index(min(means)) == int(example["label"])
    assert right != right_norm
    return right, right_norm


def test_figures_are_those_of_a_plain_count_on_any_number_of_ranks(trained):
    out, folder = trained
    examples = examples_of(folder / "hellaswag.jsonl")
    both = ["--tasks=val,hellaswag", f"--hellaswag={folder / 'hellaswag.jsonl'}", "--batch_size=3"]
    alone, printed = evaluated(out, *both)
    together, _ = evaluated(out, *both, ranks=2)
    assert together == pytest.approx(alone, abs=1e-6)
    assert (alone.pop("iter"), alone.pop("dataset")) == (10, str(folder))
    model = GPT.from_checkpoint(torch_load(out)).eval()
    tokens = np.fromfile(folder / "val.bin", dtype=np.uint16).astype(int)
    assert len(tokens) % 16 not in (0, 1), "the last window is shorter"
    with torch.no_grad():
        windows = [tokens[first : first + 17].tolist() for first in range(0, len(tokens) - 1, 16)]
        nats = sum(losses_of(window, lambda x: model(x, x)[0]).sum().item() for window in windows)
        right, right_norm = scored(examples, lambda text: [*map(LETTERS.index, text)], lambda x: model(x, x)[0], 17)
    size = len("".join(LETTERS[token] for token in tokens[1:]).encode())
    figures = {"val_loss": nats / (len(tokens) - 1), "val_bits_per_byte": nats / math.log(2) / size}
    figures |= {"hellaswag_acc": right / 50, "hellaswag_acc_norm": right_norm / 50}
    expected = {f"evaluation/{key}": value for key, value in figures.items()}
    assert alone == pytest.approx(expected, abs=1e-6)
    for key, value in expected.items():
        assert f"{key:<32}{value:8.4f}  " in printed


def test_the_card_has_the_results_of_one_checkpoint(trained, tmp_path):
    out, folder = trained
    (out / report.EVALUATION).unlink(missing_ok=True)
    only_val, _ = evaluated(out)
    assert only_val["dataset"] == str(folder)
    assert [*only_val] == ["iter", "dataset", "evaluation/val_loss", "evaluation/val_bits_per_byte"]
    both, _ = evaluated(out, "--tasks=hellaswag", f"--hellaswag={folder / 'hellaswag.jsonl'}")
    assert only_val.items() < both.items(), "those of another task stay"
    before, after = (out / report.NAME).read_text().split("## Evaluation")
    texts = [f"{key.partition('/')[2]} {value:.4f}" for key, value in both.items() if "/" in key]
    assert (before[:10], before[-3:]) == ("# Report: ", "`\n\n")
    assert after == f"\n\n{folder}, after 10 iterations: {', '.join(texts)}\n"
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(folder / "meta.pkl", other)  # the training split is not needed
    np.fromfile(folder / "val.bin", dtype=np.uint16)[::2].tofile(other / "val.bin")
    moved, _ = evaluated(out, f"--dataset={other}")
    assert moved.keys() == both.keys()
    assert {key for key in both if moved[key] != both[key]} == {"dataset", *(key for key in only_val if "/" in key)}
    (out / report.EVALUATION).write_text(json.dumps({**both, "iter": 5}))
    again, _ = evaluated(out)
    assert again == only_val, "those of another checkpoint do not"


def test_hellaswag_of_a_gpt2_is_that_of_transformers(tmp_path, monkeypatch):
    tiktoken, transformers = pytest.importorskip("tiktoken"), pytest.importorskip("transformers")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", shared_data("tiktoken_cache"))
    encoding = tiktoken.get_encoding("gpt2")
    words = ["a", "roof", "The", "naïve", "skis,", "pulling", "up", "tiles.", "it's", "1984", "\n", "[header]"]
    write_hellaswag(tmp_path / "examples.jsonl", 40, lambda generator, length: " ".join(generator.choices(words, k=length)))
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 128, "initializer_range": 0.3}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, activation_function="gelu")).eval()
    model.save_pretrained(tmp_path / "gpt2")
    with torch.no_grad():
        right, right_norm = scored(examples_of(tmp_path / "examples.jsonl"), encoding.encode, lambda x: model(x).logits, 129)
    arguments = [f"--init_from={tmp_path / 'gpt2'}", "--tasks=hellaswag", f"--hellaswag={tmp_path / 'examples.jsonl'}"]
    process = run("evaluate.py", *arguments, "--device=cpu", ranks=2, cwd=tmp_path).succeeded()
    found = [line.split()[:2] for line in process.stdout.splitlines() if line.startswith("evaluation/")]
    kinds = {"acc": right, "acc_norm": right_norm}
    assert found == [[f"evaluation/hellaswag_{kind}", f"{count / 40:.4f}"] for kind, count in kinds.items()]
    assert {path.name for path in tmp_path.iterdir()} == {"examples.jsonl", "gpt2"}, "a model without a run leaves no file"


def test_mistakes(data, trained, tmp_path):
    out, folder = trained
    (tmp_path / "other.jsonl").write_text('{"ctx": "a", "endings": ["b"]}\n')
    (tmp_path / "accents.jsonl").write_text(json.dumps({**EXAMPLE, "ctx": "Z"}))
    messages = {
        "--tasks=all": "tasks=all is not one of val, hellaswag",
        "--tasks=hellaswag --hellaswag=nowhere.jsonl": "curl -O https://raw.githubusercontent.com/rowanz/hellaswag/",
        f"--tasks=hellaswag --hellaswag={tmp_path / 'other.jsonl'}": "other.jsonl, line 1: no HellaSwag (KeyError: 'label')",
        f"--tasks=hellaswag --hellaswag={os.devnull}": "no HellaSwag (ValueError: it is empty)",
        f"--tasks=hellaswag --dataset={data}": "has another vocabulary",
        **{f"--tasks=hellaswag --hellaswag={path}": f"{path}, line 2: no HellaSwag" for path in wrong_examples(tmp_path)},
        f"--tasks=hellaswag --hellaswag={tmp_path / 'accents.jsonl'}": "the vocabulary has no 'Z'",
        f"--dataset={data}": "has another vocabulary",
        "--init_from=gtp2": "init_from=gtp2 is none of gpt2, ",
        f"--out_dir={tmp_path}": "ckpt.pt; give the --out_dir of a run",
        "--wandb_log=True": "wandb_log=True needs a run in out_dir that was trained with it",
    }
    check_mistakes("evaluate.py", [f"--out_dir={out}", "--device=cpu"], messages)
    shutil.copytree(folder, tmp_path / "data")
    tokens = np.fromfile(folder / "val.bin", dtype=np.uint16)
    tokens[-1] = 60
    tokens.tofile(tmp_path / "data" / "val.bin")
    process = run("evaluate.py", f"--out_dir={out}", f"--dataset={tmp_path / 'data'}", ranks=2)
    process.refusal("val.bin holds token 60, but the model's vocabulary has 29")  # one rank has found it


def test_a_model_that_computes_nan_gets_no_figures(trained, tmp_path):
    checkpoint = torch_load(trained[0])
    checkpoint["model"]["transformer.ln_f.weight"][0] = math.nan
    torch.save(checkpoint, tmp_path / "ckpt.pt")
    run("evaluate.py", f"--out_dir={tmp_path}", "--device=cpu").refusal("computes losses that are not finite")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt.pt"]


def test_ranks_that_differ_are_refused(trained, tmp_path):
    out, folder = trained
    shutil.copytree(folder, tmp_path / "data")
    with open(tmp_path / "data" / "val.bin", "r+b") as file:
        file.write(b"\7")
    write_hellaswag(tmp_path / "data" / "hellaswag.jsonl", 50, lambda generator, length: "a" * length)
    both = ["--tasks=val,hellaswag", f"--out_dir={out}", "--device=cpu", "--hellaswag=hellaswag.jsonl"]
    for fault, message in (
        ((faults.add_arguments, "--batch_size=1"), "rank 1: batch_size is 1, but 8 on rank 0; "),
        ((faults.add_arguments, f"--dataset={tmp_path / 'data'}"), "rank 1: val.bin is "),
        ((os.chdir, tmp_path / "data"), "rank 1: hellaswag is checksum "),
    ):
        run("evaluate.py", *both, cwd=folder, ranks=2, before=partial(faults.on_last_rank, *fault)).refusal(message)
