"""The benchmark of GPUs, as far as it goes without one."""

from __future__ import annotations

import pytest
import torch

from tests.benchmark import gpu


def test_without_a_gpu_it_says_so_and_ends_with_status_2(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert gpu.main() == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("no GPU: this benchmark needs a CUDA device")


def test_network_is_resnet50():
    with torch.device("meta"):
        network = gpu.build_resnet50()
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032


def test_table_compares_within_rounds():
    def figures(rate):
        return gpu.Figures(num_batches=10, seconds=10 / rate, cpu_seconds=0.05)

    found = {
        ("training", "ours-device"): {0: figures(8.0), 1: figures(90.0)},
        ("training", "torch"): {0: figures(4.0), 1: figures(50.0)},
        ("training", "resident"): {0: figures(10.0)},
        ("features", "torch"): {},
    }
    table = gpu.make_table(found, {"training": 10**9, "features": 1})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert rows == [
        ["training", "ours, TCP, device=", "49.0 (8.00 to 90.0)", "49.0", "5.00", "1.90", "0.80"],
        ["training", "torch DataLoader, pin_memory", "27.0 (4.00 to 50.0)", "27.0", "5.00", "1.00", "0.40"],
        ["training", "a batch on the GPU", "10.0", "-", "5.00", "2.50", "1.00"],
        ["features", "torch DataLoader, pin_memory", "failed", "-", "-", "-", "-"],
    ]


@pytest.mark.parametrize("contestant", ["resident", "torch"])
def test_wrong_batches_are_not_measured(contestant):
    task = gpu.Task("training", contestant, [], "cpu", 1, 2, 0.1)
    with pytest.raises(ValueError, match="bytes, where"):
        gpu._check(task, torch.zeros(2, 3, 224, 223, dtype=torch.uint8), torch.device("cpu"))
