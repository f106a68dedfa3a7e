"""Every example runs as its reader would run it, and shows what it claims; so does every Python block of the guide."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import east

ROOT = Path(__file__).parents[1]


def output(example):
    command = [sys.executable, ROOT / "scripts" / "examples" / f"{example}.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def test_every_example_is_tested():
    found = {path.stem for path in (ROOT / "scripts" / "examples").glob("*.py")}
    assert found == {"training_loop", "estimator", "own_metric"}


def test_the_loop_finds_more_than_cross_entropy():
    ours, plain = map(float, re.findall(r"\d\.\d{3}", output("training_loop")))
    assert ours > plain + 0.05


def test_the_estimator_in_a_pipeline_generalises():
    chosen, tested = map(float, re.findall(r"macro F1 (\d\.\d{3})", output("estimator")))
    assert chosen > 0.6
    assert tested == pytest.approx(chosen, abs=0.08)


def test_training_for_the_cost_costs_least():
    costs = dict(re.findall(r"trained for (\w+) .* cost (\d+)", output("own_metric")))
    assert float(costs["saved"]) < 0.8 * min(float(costs["f1"]), float(costs["accuracy"]))


def test_the_metric_of_the_guide_is_the_share_of_avoided_cost():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_data.md").read_text(), re.DOTALL)
    space = {}
    exec(next(block for block in blocks if "def saved" in block), space)
    # 2 of 10 positives missed, 30 of 990 negatives alarmed: 50*2 + 30 = 130 of min(50*10, 990) = 500.
    matrix = torch.tensor([[960.0, 30.0], [2.0, 8.0]])
    assert float(space["saved"](east.Confusion.from_matrix(matrix))) == pytest.approx(1 - 130 / 500)
    never = torch.tensor([[990.0, 0.0], [10.0, 0.0]])
    assert float(space["saved"](east.Confusion.from_matrix(never))) == 0
