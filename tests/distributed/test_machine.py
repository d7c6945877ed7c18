"""distributed/machine.py: what 'auto' stands for on this machine, which devices are refused, and the peak for the MFU."""

import pytest
import torch

from distributed import machine


def test_what_auto_stands_for(monkeypatch):
    assert machine.resolve("cpu", "auto") == ("cpu", "float32")
    assert machine.resolve("cpu", "bfloat16") == ("cpu", "bfloat16")
    cases = (False, False, "cpu", "float32"), (True, False, "cuda", "float16"), (True, True, "cuda", "bfloat16")
    for available, supported, *expected in cases:
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "device_count", lambda available=available: int(available))
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported, **_: supported)
        assert machine.resolve("auto", "auto") == tuple(expected)


@pytest.mark.parametrize("device", ["cuda:1", "cuda:x", "cpu:1", "tpu", ""])
def test_a_device_that_is_not_there_is_refused(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=f"device={device} is not available; this machine has 1 cpu, 1 cuda, "):
        machine.resolve(device, "float32")


def test_the_number_format_follows_that_of_the_weights():
    assert machine.resolve("cpu", "auto", "bfloat16") == ("cpu", "bfloat16")
    with pytest.raises(ValueError, match="param_dtype=bfloat16 computes in bfloat16, not in dtype=float16"):
        machine.resolve("cpu", "float16", "bfloat16")
    with pytest.raises(ValueError, match="this GPU has no bfloat16 and computes in float16; use --param_dtype=auto"):
        machine.resolve_dtype("auto", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, name) for name in machine.CARDS),
        *(("NVIDIA A100-PCIE-40GB", "A100-40"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Tesla V100-SXM2-32GB", "V100-32")),
        *(("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GH200 480GB", "GH200"), ("NVIDIA A10G", "A10G"), ("Tesla T4", "T4")),
        *(("NVIDIA GeForce RTX 5090", "5090"), ("rtx 4090", "4090"), ("rtx4090", "4090"), ("2080ti", "2080 Ti")),
        *(("NVIDIA RTX A6000", "A6000"), ("NVIDIA RTX 6000 Ada Generation", "6000 Ada"), ("a100 40gb", "A100-40")),
        *(("NVIDIA GeForce RTX 4070 Ti", "4070 Ti"), ("NVIDIA A100 80GB PCIe", "A100"), ("h100 sxm", "H100")),
        *((name, None) for name in ("", "A100X", "H200 NVL", "Quadro RTX 6000", "RTX 3080 Ti")),
        *((name, None) for name in ("GRID A100X-40C", "NVIDIA A100-SXM-64GB")),
    ],
)
def test_a_card_is_known_by_its_name_and_by_that_of_its_driver(name, row):
    assert machine.card(name) is machine.CARDS.get(row)
    for other in (f"{name} Laptop GPU", f"{name} MIG 1g.5gb", f"{name} D", f"{name} SUPER"):
        assert machine.card(other) is None


def test_the_peak_of_a_gpu_is_that_of_its_data_sheet_and_that_of_a_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100 80GB HBM3")
    assert machine.peak_flops(torch.device("cuda", 0), torch.bfloat16) == 989.4e12
    assert machine.peak_flops(torch.device("cpu"), torch.float32) == 0
    assert not machine.is_slow_on_cpu(torch.device("cpu"), "float32")


def test_ranks_share_the_cores_unless_the_user_has_said_how_many(monkeypatch):
    before = torch.get_num_threads()
    try:
        for by_torchrun, given, threads in ((True, "1", 2), (True, "3", before), (False, "1", before), (False, "", 2)):
            torch.set_num_threads(before)
            monkeypatch.setenv("OMP_NUM_THREADS", given)
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7") if by_torchrun else monkeypatch.delenv("TORCHELASTIC_RUN_ID", False)
            monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
            machine.divide_threads(2)
            assert torch.get_num_threads() == threads, (by_torchrun, given)
        for cores, ranks, threads in ((8, 2, 4), (8, 3, 2), (1, 4, 1)):
            monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)), raising=False)
            machine.divide_threads(ranks)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
