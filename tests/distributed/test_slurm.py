"""slurm/train.sbatch, with stand-ins for the commands of Slurm."""

import os
import signal
import subprocess
import time

import pytest
from scripts import ROOT

SCRIPT = os.path.join(ROOT, "slurm", "train.sbatch")
JOB = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "16"}
TORCHRUN = (
    "srun --cpus-per-task=16 --wait=60 torchrun --nnodes=2 --nproc-per-node={ranks} "
    "--rdzv-backend=c10d --rdzv-endpoint=node3:24567 --rdzv-id=1234567 --max-restarts=3 "
    "train.py config/train_gpt2.py --out_dir=out a --init_from=auto"
)
# The step runs until `scancel` tells it to stop, and then a little longer, as a run that saves. Each call is a line in the log.
STEP = """
echo "srun $*" >> log
until test -e stop; do sleep 0.02; done
sleep 0.2
echo saved >> log
exit 1  # as torchrun after SIGTERM
"""
SCANCEL = 'echo "scancel $*" >> log; touch stop'
SCONTROL = """
case "$1" in
  show) printf 'node3\\nnode4\\n' ;;
  *) echo "scontrol $*" >> log ;;
esac
"""


def submit(folder, step, **variables):
    """The script under way in `folder`, where `srun` runs the shell commands `step`."""
    for name, commands in {"srun": step, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
        path = folder / name
        path.write_text(f"#!/bin/bash\n{commands}\n")
        path.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", **JOB, **variables}
    line = ["bash", SCRIPT, "config/train_gpt2.py", "--out_dir=out a"]
    return subprocess.Popen(line, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def log(folder):
    path = folder / "log"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_run_saves_before_the_time_limit_and_when_it_is_cancelled_and_is_requeued_unless_cancelled(tmp_path, number):
    script = submit(tmp_path, STEP, SLURM_GPUS_ON_NODE="8")
    end = time.monotonic() + 30
    while not log(tmp_path):
        assert time.monotonic() < end
        time.sleep(0.01)
    script.send_signal(number)
    if number == signal.SIGTERM:  # scancel: Slurm sends the signal to the step as well
        (tmp_path / "stop").touch()
    code = script.wait(timeout=30)
    begun, *calls = log(tmp_path)  # at the end of the script; the step could still run
    assert script.communicate(timeout=30) == ("", None)
    assert begun == TORCHRUN.format(ranks=8)
    if number == signal.SIGTERM:
        assert (calls, code != 0) == (["saved"], True)
    else:
        assert calls == ["scancel --signal=TERM 1234567", "saved", "scontrol requeue 1234567"]


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_a_run_that_ends_by_itself_is_not_requeued(tmp_path, code):
    script = submit(tmp_path, f'echo "srun $*" >> log; exit {code}')
    assert (script.communicate(timeout=30), script.returncode) == (("", None), code)
    assert log(tmp_path) == [TORCHRUN.format(ranks=16)], "without GPUs, one rank per CPU"
