"""Every example runs as a reader would run it and shows what it claims; so does the metric of the guide."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
from sklearn.datasets import make_classification
from torch import nn

import east
from east.lab.training.annealing import temperatures

ROOT = Path(__file__).parents[1]


@pytest.fixture
def output(monkeypatch, capsys):
    """Runs an example as a script; returns what it prints."""

    def run(example):
        monkeypatch.setattr(sys, "argv", [f"{example}.py"])
        with torch.random.fork_rng(), warnings.catch_warnings():
            runpy.run_path(str(ROOT / "scripts" / "examples" / f"{example}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def table(output):
    """Rows of an example's table: training loss -> scores."""

    def rows(example):
        lines = output(example).splitlines()[1:]
        return {re.sub(r"\s+[\d. ]+$", "", line): [*map(float, re.findall(r"\d\.\d{3}", line))] for line in lines}

    return rows


def test_every_example_is_tested():
    found = {path.stem for path in (ROOT / "scripts" / "examples").glob("*.py")}
    assert found == {
        "training_loop", "estimator", "own_metric", "segmentation", "multilabel", "lightning_module", "compute_loss",
        "east_in_one_file",
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [0.2, 0.05, 0.01])
@pytest.mark.parametrize("metric", ["f1", "mcc", "accuracy"])
def test_east_in_one_file_is_the_loss_of_the_library(metric, temperature):
    example = runpy.run_path(str(ROOT / "scripts" / "examples" / "east_in_one_file.py"))
    logits = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(64) % 5
    ours = example["loss"](logits, labels, metric, temperature)
    theirs = east.MetricLoss(metric, temperature=temperature)(logits, labels)
    torch.testing.assert_close(ours, theirs)
    gradients = (torch.autograd.grad(value, logits)[0] for value in (ours, theirs))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_east_in_one_file_learns_the_rare_class(output):
    lines = output("east_in_one_file").splitlines()
    assert [line[:7] for line in lines[:2]] == ["T 0.200", "T 0.160"]
    assert float(lines[-1].removeprefix("test f1: ")) > 0.9


def test_segmentation_trained_on_the_metric_finds_the_rare_class(table):
    rows = table("segmentation")
    pairs = ("Dice", "MetricLoss f1")
    assert rows.keys() == {"cross-entropy", "MetricLoss jaccard", *pairs, *(f"{name} + CE" for name in pairs)}
    discs = {name: scores[2] for name, scores in rows.items()}
    assert discs["cross-entropy"] < 0.02
    assert discs["MetricLoss f1"] > 0.05
    assert discs["MetricLoss jaccard"] > 0.02
    assert discs["MetricLoss f1 + CE"] > discs["MetricLoss f1"] + 0.03


def test_multilabel_trained_on_the_metric_is_better_on_every_average(table):
    rows = table("multilabel")
    for name in ("macro", "micro", "samples"):
        ours, plain = rows[f"MetricLoss f1 {name}"], rows["BCEWithLogitsLoss"]
        assert all(a > b + 0.02 for a, b in zip(ours, plain, strict=True))


def test_a_trainer_with_its_own_compute_loss_beats_cross_entropy(table):
    rows = table("compute_loss")
    assert rows["MetricTrainer"][0] > rows["Trainer"][0] + 0.05


def test_in_lightning_the_metric_or_a_rule_from_the_checkpoint_beats_binary_cross_entropy(table):
    pytest.importorskip("lightning")
    rows = table("lightning_module")
    plain, decided = rows["BCEWithLogitsLoss"]
    assert rows["MetricLoss"][0] > plain
    assert decided > plain + 0.05


def test_the_training_loop_beats_cross_entropy(output):
    ours, plain = map(float, re.findall(r"\d\.\d{3}", output("training_loop")))
    assert ours > plain + 0.05


def test_the_loop_of_the_tutorial_cools_as_the_engine_does_and_not_by_the_clock():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    loop = next(block for block in blocks if "lowest_weights" in block)
    clock = "epoch in range(60):\n    loss.temperature = max(0.2 * 0.9**epoch, 0.01)"
    by_the_clock = loop.replace("epoch in range(60):", clock).replace("waited == 5", "False")
    made = make_classification(23000, 10, n_informative=5, weights=[0.93], class_sep=0.6, random_state=1)
    x, y = torch.tensor(made[0], dtype=torch.float32), torch.tensor(made[1])

    def trained(code):
        """The temperature in the end, and F1 on new rows with the weights of the best epoch."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
        parts = {"x": x[:2000], "y": y[:2000], "val_x": x[2000:3000], "val_y": y[2000:3000]}
        space = {"torch": torch, "east": east, "model": model, "optimizer": torch.optim.AdamW(model.parameters(), 0.01)}
        exec(code, space := space | parts)
        counts = east.Confusion.from_predictions(model(x[3000:]).argmax(1), y[3000:], 2)
        return space["loss"].temperature, float(east.METRICS["f1"](counts))

    with torch.random.fork_rng():
        (temperature, score), (cold, by_epochs) = trained(loop), trained(by_the_clock)
    assert any(temperature == pytest.approx(T) for T in temperatures("geometric", T0=0.2, r=0.7)[1:])
    assert cold == 0.01
    assert score > by_epochs + 0.02


def test_the_estimator_in_a_pipeline_generalises(output):
    chosen, tested = map(float, re.findall(r"macro F1 (\d\.\d{3})", output("estimator")))
    assert chosen > 0.6
    assert tested == pytest.approx(chosen, abs=0.08)


def test_training_on_the_cost_costs_least(output):
    costs = dict(re.findall(r"trained for (\w+) .* cost (\d+)", output("own_metric")))
    assert float(costs["saved"]) < 0.8 * min(float(costs["f1"]), float(costs["accuracy"]))


def test_the_metric_of_the_guide_is_the_share_of_avoided_cost():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own_data.md").read_text(), re.DOTALL)
    space = {}
    exec(next(block for block in blocks if "def saved" in block), space)
    # 2 of 10 positives missed, 30 false alarms on 990 negatives: 50*2 + 30 = 130 of min(50*10, 990) = 500.
    matrix = torch.tensor([[960.0, 30.0], [2.0, 8.0]])
    assert float(space["saved"](east.Confusion.from_matrix(matrix))) == pytest.approx(1 - 130 / 500)
    never = torch.tensor([[990.0, 0.0], [10.0, 0.0]])
    assert float(space["saved"](east.Confusion.from_matrix(never))) == 0
