"""The benchmark of the losses: that it runs and writes what it prints, and that its limits are kept."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_loss.py"


@pytest.fixture
def bench():
    specification = importlib.util.spec_from_file_location("bench_loss", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def run(bench, path, monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["bench_loss.py", "--json", str(path), *options])
    bench.main()
    return json.loads(path.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_small_shapes_are_measured_and_written(bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SHAPES", ((32, 2), (16, 500)))
    monkeypatch.setattr(bench, "DENSE", (2, 3, 4, 4))
    written = run(bench, tmp_path / "bench.json", monkeypatch, "--quick")
    shapes = [[32, 2]] * 6 + [[16, 500]] * 6 + [[2, 3, 4, 4]] * 5  # nine thresholds are left out for pixels
    assert [row["shape"] for row in written["rows"]] == shapes
    assert all(row["ratio"] > 0 and row["cross_entropy_ms"] > 0 for row in written["rows"])
    assert [row["shape"] for row in written["memory"]] == [[16, 500], [2, 3, 4, 4]]
    assert all(row["logits"] >= 0 for row in written["memory"])
    printed = capsys.readouterr().out
    assert printed.count("x cross-entropy") == 17
    assert printed.count("peak memory") == 2


@pytest.mark.nightly  # half a minute, and a busy machine fails it
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_the_losses_keep_their_limits(bench, tmp_path, monkeypatch):
    """About 5 cross-entropies for few classes, 3 for many; 8 times the logits' memory for 100,000, 3 for pixels.

    Other work on the machine raises the ratios; a third more tells a loss that is out of hand from a busy hour.
    """
    written = run(bench, tmp_path / "bench.json", monkeypatch)
    for row in written["rows"]:
        if row["loss"] != "nine thresholds" and len(row["shape"]) == 2:
            few = row["shape"][1] < 32
            assert row["ratio"] <= 1.33 * (5 if few else 3), row
    huge, dense = written["memory"]
    assert huge["logits"] < 8
    assert dense["logits"] <= 3
