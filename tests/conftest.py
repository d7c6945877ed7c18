"""What all tests share: where the project lies, the test data, and a small dataset with runs of train.py on it."""

import inspect
import os
import pickle
import shutil
import signal
import sys
import tempfile

import numpy as np
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = ROOT  # for the processes of tests.ranks
STARTERS = {"ranks", "scripts", "hosts", "subprocess", "multiprocessing.context", "pretended_gpu"}
os.environ["OMP_NUM_THREADS"] = "1"  # for torch: two threads of a process wait for each other on busy cores


def pytest_addoption(parser):
    parser.addoption("--as-on-gpu", action="store_true", help="buckets travel between gloo ranks as they do between GPUs")


def pytest_configure(config):
    """Keep what the scripts cache, such as predictions of activations, out of the user's home. Let Ctrl-C reach them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs and their children ignore it
    cache = tempfile.TemporaryDirectory()
    os.environ["XDG_CACHE_HOME"] = cache.name
    config.add_cleanup(cache.cleanup)
    if config.getoption("as_on_gpu"):
        os.environ["ZERO1_TEST_AS_ON_GPU"] = "1"  # for the processes of tests.ranks


def _starts_processes(used, seen):
    """Whether a function or class of the tests starts ranks, scripts or commands, itself or by another that it uses."""
    if used in seen:
        return False
    seen.add(used)
    functions = [each for each in vars(used).values() if inspect.isfunction(each)] if inspect.isclass(used) else [used]
    codes = [function.__code__ for function in functions]
    for code in codes:  # with the functions in it
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    names = {name for code in codes for name in code.co_names}
    found = [vars(sys.modules[used.__module__]).get(name) for name in names]
    homes = {each.__name__ if inspect.ismodule(each) else getattr(each, "__module__", type(each).__module__) for each in found}
    own = [each for each in found if inspect.isfunction(each) or inspect.isclass(each)]
    return bool((homes | names) & STARTERS) or any(_starts_processes(each, seen) for each in own if _is_of_tests(each))


def _is_of_tests(used):
    return (getattr(sys.modules[used.__module__], "__file__", None) or "").startswith(os.path.join(ROOT, "tests"))


def pytest_collection_modifyitems(config, items):
    """The longest files first, so that no worker is left with one at the end. A slow test says why, and how long it takes.

    A test that starts ranks, scripts or commands gets the mark "processes".
    """
    for item in items:
        fixtures = [each.func for defs in item._fixtureinfo.name2fixturedefs.values() for each in defs]
        own = [each for each in (item.function, *fixtures) if inspect.isfunction(each) and _is_of_tests(each)]
        if any(_starts_processes(each, set()) for each in own):
            item.add_marker("processes")
    for mark in (mark for item in items for mark in item.iter_markers("slow")):
        assert (len(mark.args), [*mark.kwargs]) == (1, ["seconds"]), mark
    if config.getoption("as_on_gpu"):
        items[:] = [item for item in items if item.get_closest_marker("processes")]
    longest = "wandb_run", "bench", "prediction", "train", "any_model", "pretended_gpu", "muon", "gpt", "any_to_any"
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in longest)


def shared_data(name):
    """A path below the folder of test data, or skip: the files are too large for the repository."""
    folder = os.environ.get("ZERO1_TEST_DATA", os.path.join(ROOT, "..", "shared", "data"))
    path = os.path.abspath(os.path.join(folder, name))
    if not os.path.exists(path):
        pytest.skip(f"{path} is absent; ZERO1_TEST_DATA names the folder that holds it")
    return path


def write_meta(folder, letters):
    """The vocabulary of a dataset, a letter for each token."""
    meta = {"vocab_size": len(letters), "stoi": {c: t for t, c in enumerate(letters)}, "itos": dict(enumerate(letters))}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A small dataset with a pattern in it: 3 * t modulo 29, and some noise."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for split, length in (("train", 4000), ("val", 1000)):
        tokens = (3 * np.arange(length) + generator.integers(3, size=length)) % 29
        tokens.astype(np.uint16).tofile(folder / f"{split}.bin")
    write_meta(folder, [chr(ord("A") + token) for token in range(29)])
    return str(folder)


@pytest.fixture
def other(data, tmp_path):
    """A folder with this dataset, whose training data differ in one token."""
    tokens = np.memmap(shutil.copytree(data, tmp_path / "other") / "train.bin", dtype=np.uint16, mode="r+")
    tokens[123] = (tokens[123] + 1) % 29
    tokens.flush()
    return tmp_path / "other"


@pytest.fixture(scope="session")
def runs(data, tmp_path_factory):
    """One run of train.py by each implementation, see scripts.Runs."""
    from scripts import Runs

    return Runs(tmp_path_factory.mktemp("runs"), data)
