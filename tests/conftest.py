import os
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
os.environ["PYTHONPATH"] = ROOT  # for the processes of tests.ranks


def shared_data(name):
    """A path below the folder of test data, or skip: the files are too large for the repository."""
    folder = os.environ.get("ZERO1_TEST_DATA", os.path.join(ROOT, "..", "shared", "data"))
    path = os.path.abspath(os.path.join(folder, name))
    if not os.path.exists(path):
        pytest.skip(f"{path} is absent; ZERO1_TEST_DATA names the folder that holds it")
    return path
