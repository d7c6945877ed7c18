"""The programs in examples/ run as they stand there."""

import re

import pytest
from scripts import run


@pytest.mark.slow("three runs of 80 million parameters on two ranks", seconds=40)
def test_the_cookbook(tmp_path):
    printed = {}
    for zero in ("sharded", "torch", "none"):
        stdout = run("examples/cookbook.py", f"--zero={zero}", ranks=2, cwd=tmp_path).succeeded().stdout
        *peaks, total = re.findall(r"^[a-z ,]+: (\d+ MB|-?\d+\.\d+)$", stdout, re.MULTILINE)
        assert (len(peaks), stdout.count("\n")) == (4, 5), stdout
        printed[zero] = int(peaks[-1].split()[0]), total
    assert len({total for _, total in printed.values()}) == 1, "the same parameters"
    peak = {zero: megabytes for zero, (megabytes, _) in printed.items()}
    assert peak["sharded"] < 0.75 * peak["torch"] < 0.75 * 0.95 * peak["none"]
