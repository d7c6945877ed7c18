"""The rules of the modules: which may import which, what touches files, how large a part may be."""

import ast
import glob
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = {"train", "sample", "evaluate", "export", "bench", "plan", "dashboard"}
# what a package does not import: nothing that a run needs knows what draws it, or what accompanies it
ABOVE = {
    "zero": {"benchmarks", "charts", "data", "distributed", "forecast", "run"},
    "distributed": {"benchmarks", "charts", "data", "forecast", "run"},
    "data": {"benchmarks", "charts", "forecast", "run"},
    "forecast": {"benchmarks", "charts", "data", "run"},
    "charts": {"benchmarks", "data", "distributed", "run"},
    "run": {"benchmarks", "charts"},
    "benchmarks": set(),
}
# inside zero: a module imports its own layer and those before it
LAYERS = (
    ("autocast", "codecs", "host_comm", "layout", "masters", "options", "stopwatch", "tensors"),
    ("buckets", "checks", "collectives", "muon", "muon.matrices", "muon.muon"),
    ("flags", "sharded_state"),
    ("checkpoint",),
    ("gradients", "interface", "muon.exchange", "optimizer", "moves", "update"),
    ("data_parallel", "grad_scaler", "held_bytes", "reducer"),
    ("build",),
)
TABLES = {"run", "run.metrics"}  # plain data, which the charts read as well
WITH_FILES = {f"zero.checkpoint.{name}" for name in ("__main__", "archive", "files", "format")}
TOUCHES_FILES = {"glob", "io", "mmap", "os", "pathlib", "pickle", "shutil", "tempfile", "zipfile"}


def modules(*packages):
    """Path of every module by its name, perhaps in these packages only. The prepare.py scripts are none."""
    found = [] if packages else glob.glob("*.py", root_dir=ROOT)
    for package in packages or ABOVE:
        found += glob.glob(f"{package}/**/*.py", root_dir=ROOT, recursive=True)
    paths = {path.removesuffix(".py").replace(os.sep, "."): os.path.join(ROOT, path) for path in found}
    return {name.removesuffix(".__init__"): path for name, path in paths.items() if not name.endswith(".prepare")}


def parsed(path):
    return ast.parse(Path(path).read_text())


def imports_of(path):
    """Names of everything that a file imports, wherever in it; a name that is imported from a module as `module.name`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module")
def graph():
    """Module: the modules of this repository that it imports, with the packages around these, whose __init__ runs first."""
    paths = modules()

    def ours(name):
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return name

    found = {module: {ours(name) for name in imports_of(path)} - {"", module} for module, path in paths.items()}
    for module, names in found.items():
        packages = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
        names |= {package for package in packages if not module.startswith(package)}
    return found


def test_there_are_no_cycles(graph):
    list(graphlib.TopologicalSorter(graph).static_order())


def test_packages_import_one_way(graph):
    for module, imported in graph.items():
        package = module.partition(".")[0]
        wrong = {name for name in imported - TABLES if name.partition(".")[0] in ABOVE.get(package, ())}
        assert not wrong, f"{module} imports {wrong}"
        assert not imported & SCRIPTS, f"{module} imports a script"
        assert "run.hooks" not in imported or module == "train", f"{module} knows when others are called"


def test_zero_imports_torch_and_itself_only_and_few_of_its_modules_touch_files():
    for module, path in modules("zero").items():
        imported = {name.partition(".")[0] for name in imports_of(path)}
        assert not imported - set(sys.stdlib_module_names) - {"torch", "zero"}, module
        called = {getattr(node.func, "id", None) for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)}
        assert module in WITH_FILES or not (TOUCHES_FILES & imported or "open" in called), module


def test_zero_has_layers(graph):
    layer_of = {f"zero.{name}": number for number, names in enumerate(LAYERS) for name in names}
    parts = {module for module in graph if module.startswith("zero.checkpoint.")}
    layer_of |= dict.fromkeys(parts, layer_of["zero.checkpoint"])
    engine = {module for module in graph if module.startswith("zero.")}
    assert engine == layer_of.keys()
    for module in engine:
        wrong = {name for name in graph[module] if layer_of.get(name, len(LAYERS)) > layer_of[module]}
        assert not wrong, f"{module} imports {wrong}, of a later layer"
    assert (graph["zero.layout"], graph["zero.options"]) == ({"zero.options"}, set()), "planning needs these two alone"


def test_no_two_modules_have_one_name():
    names = Counter(module.rpartition(".")[2] for module, path in modules().items() if not path.endswith("__init__.py"))
    assert {name for name, count in names.items() if count > 1} == set()


def test_a_reader_can_take_in_every_class_of_the_engine():
    """Prints the longest ones: at most 250 lines for a class, 400 for a file."""
    files, classes = {}, {}
    for module, path in modules("zero").items():
        files[module] = Path(path).read_text().count("\n")
        nodes = (node for node in parsed(path).body if isinstance(node, ast.ClassDef))
        classes |= {f"{module}.{node.name}": node.end_lineno - node.lineno + 1 for node in nodes}
    for sizes, limit in ((classes, 250), (files, 400)):
        print(*sorted(((size, name) for name, size in sizes.items()), reverse=True)[:5], sep="\n")
        assert max(sizes.values()) <= limit


def test_the_makefile_names_tests_that_exist():
    """One name that does not exist, and pytest runs none of those beside it."""
    how = {"cwd": ROOT, "capture_output": True, "check": True}
    printed = subprocess.run(["make", "-s", "-n", "check", "test-all"], text=True, **how).stdout
    names = sorted(set(re.findall(r'"(tests/\S+)"', printed)))
    assert len(names) > 10
    subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow or not slow", *names], **how)


def test_the_package_has_all_of_zero_and_nothing_else():
    packages = tomllib.loads(Path(ROOT, "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {os.path.dirname(path) for path in glob.glob("zero/**/*.py", root_dir=ROOT, recursive=True)}
    assert sorted(packages) == sorted(folder.replace("/", ".") for folder in folders)
