"""The import map of docs/architecture.md: made from the code, without cycles, in one direction."""

import ast
import glob
import graphlib
import os
import sys

import pytest
from conftest import ROOT

SCRIPTS = ("train", "sample", "bench", "plan", "dashboard")
PACKAGES = ("charts", "data", "distributed", "forecast", "run", "zero")
TOUCHES_FILES = {"glob", "io", "mmap", "os", "pathlib", "pickle", "shutil", "tempfile", "zipfile"}


def module_names():
    """Name of every module: its path. The prepare.py scripts are none."""
    found = glob.glob("*.py", root_dir=ROOT)
    for package in PACKAGES:
        found += glob.glob(f"{package}/**/*.py", root_dir=ROOT, recursive=True)
    paths = {path.removesuffix(".py").replace(os.sep, "."): os.path.join(ROOT, path) for path in found}
    return {name.removesuffix(".__init__"): path for name, path in paths.items() if not name.endswith(".prepare")}


def imports_of(path):
    """Names of everything that a file imports, wherever in it; a name that is imported from a module as `module.name`."""
    with open(path) as file:
        tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.fixture(scope="module")
def graph():
    """Module: the modules of this repository that it imports."""
    modules = module_names()

    def ours(name):
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    found = {module: {ours(name) for name in imports_of(path)} - {"", module} for module, path in modules.items()}
    return {module: names | packages_of(module, names) for module, names in found.items()}


def packages_of(module, names):
    """The packages around imported modules, whose __init__ runs first; not those around the importing module itself."""
    parents = {name.rpartition(".")[0] for name in names} | {name.partition(".")[0] for name in names if "." in name}
    return {parent for parent in parents - {""} if not module.startswith(parent)}


def reachable(graph, module):
    found, pending = set(), [module]
    while pending:
        pending += (new := graph[pending.pop()] - found)
        found |= new
    return found


def test_there_are_no_cycles(graph):
    list(graphlib.TopologicalSorter(graph).static_order())


def test_zero_imports_torch_and_itself_only(graph):
    for module, path in module_names().items():
        if module.split(".")[0] == "zero":
            assert all(name.split(".")[0] == "zero" for name in graph[module]), module
            others = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names) - {"torch", "zero"}
            assert not others, f"{module} imports {others}"


def test_packages_import_one_way(graph):
    """The processes and what is predicted or drawn do not know what accompanies a run."""
    above = {"zero": PACKAGES, "distributed": ("charts", "data", "forecast", "run"), "forecast": ("charts", "data", "run")}
    above |= {"charts": ("data", "distributed", "forecast", "run"), "data": ("charts", "forecast", "run"), "run": ("charts",)}
    for module, imported in graph.items():
        package = module.partition(".")[0]
        wrong = {name for name in imported if name.partition(".")[0] in above.get(package, ()) and not name.startswith(package)}
        assert not wrong, f"{module} imports {wrong}"
        assert "run.hooks" not in imported or module == "train", f"{module} knows when others are called"


def test_nothing_imports_a_script(graph):
    for module, imported in graph.items():
        assert not imported & set(SCRIPTS), module


def test_the_engine_does_not_know_checkpoints(graph):
    for module in graph:
        if module.startswith("zero") and not module.startswith("zero.checkpoint"):
            assert not any(name.startswith("zero.checkpoint") for name in reachable(graph, module)), module


def test_planning_needs_the_layout_alone(graph):
    assert reachable(graph, "zero.layout") == set()


def test_gathering_and_restoring_state_touches_no_file(graph):
    modules = module_names()
    for module in {"zero.checkpoint.state"} | reachable(graph, "zero.checkpoint.state") - {"zero"}:
        assert not TOUCHES_FILES & {name.split(".")[0] for name in imports_of(modules[module])}, module
        with open(modules[module]) as file:
            calls = [node.func for node in ast.walk(ast.parse(file.read())) if isinstance(node, ast.Call)]
        assert not [call for call in calls if isinstance(call, ast.Name) and call.id == "open"], module


def test_the_map_in_the_documentation_is_the_codes(graph):
    with open(os.path.join(ROOT, "docs", "architecture.md")) as file:
        text = file.read()
    block = text[text.index("<!-- import map -->") :].split("```")[1].strip().splitlines()
    width = max(map(len, graph))
    order = graphlib.TopologicalSorter({module: sorted(graph[module]) for module in sorted(graph)}).static_order()
    expected = [f"{module:<{width}}  {' '.join(sorted(graph[module])) or '-'}" for module in order]
    now, then = ({line.strip() for line in lines} for lines in (expected, block))
    assert now == then, "\n".join(["remove:", *sorted(then - now), "add, in any place:", *sorted(now - then)])


def test_a_reader_can_take_in_every_class_of_the_engine():
    """Prints the longest ones: at most 320 lines for a class, 450 for a file."""
    files, classes = {}, {}
    for module, path in module_names().items():
        if module.split(".")[0] == "zero":
            with open(path) as file:
                text = file.read()
            files[module] = text.count("\n")
            nodes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
            classes |= {f"{module}.{node.name}": node.end_lineno - node.lineno + 1 for node in nodes}
    for sizes, limit in ((classes, 320), (files, 450)):
        print(*sorted(((size, name) for name, size in sizes.items()), reverse=True)[:5], sep="\n")
        assert max(sizes.values()) <= limit
