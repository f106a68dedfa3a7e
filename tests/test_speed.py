"""The ratios of docs/speed.md and of the README are those of the runs in results/bench."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "results" / "bench"
SPEED, README = (ROOT / name for name in ("docs/speed.md", "README.md"))
SHAPES = ([1024, 2], [1024, 10], [1024, 257], [1024, 1000], [64, 100_000], [4, 21, 128, 128])
LOSSES = {
    '`MetricLoss("f1_macro")`': "f1",
    '`MetricLoss("mcc")`': "mcc",
    '`MetricLoss("accuracy")`': "accuracy",
    '`MetricLoss("fbeta_macro")`': "fbeta",
    '`MetricLoss("f1", average="positive")`': "f1 of the positive class",
    '`MetricLoss("f1_macro", threshold=[.1, …, .9])`': "nine thresholds",
    '`MetricCrossEntropy("f1_macro")`': "metric cross-entropy: f1",
    '`MetricCrossEntropy("mcc")`': "metric cross-entropy: mcc",
    '`MetricCrossEntropy("gmean")`': "metric cross-entropy: gmean",
}
NETWORKS = {"512-256-128, batch 128": "mlp_128", "512-256-128, batch 1024": "mlp_1024", "32-16, batch 1024": "btg_1024"}


def runs(name):
    return [json.loads((BENCH / f"{name}_{k}.json").read_text()) for k in (1, 2, 3)]


def rows_of(page, header):
    """The rows of the table with this first column header, as lists of cells."""
    table = page.read_text().split(f"| {header} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def shown(values):
    """The smallest and the largest value, to one decimal below 100; one number if both round to it."""
    return "–".join(dict.fromkeys(f"{x:.1f}" if x < 100 else f"{x:.0f}" for x in (min(values), max(values))))


def test_the_table_of_losses_shows_the_committed_runs():
    ratios, before = ({}, {})
    for found, rows in [(ratios, run["rows"]) for run in runs("loss")] + [
        (before, run["before"]["rows"]) for run in runs("loss_6f6085d")
    ]:
        for row in rows:
            found.setdefault((row["loss"], *row["shape"]), []).append(row["ratio"])
    loss, checked = "", 0
    for name, *cells in rows_of(SPEED, "times cross-entropy"):
        loss = LOSSES.get(name, loss)
        found = before if name == "before" else ratios
        for cell, shape in zip(cells, SHAPES, strict=True):
            if cell:
                assert cell == shown(found[loss, *shape]), (loss, shape)
                checked += 1
    assert checked == 81


@pytest.mark.parametrize(
    ("page", "header"), [(SPEED, "10 trials, engine against plain loop"), (README, "network, batch")]
)
def test_the_tables_of_training_show_the_committed_runs(page, header):
    measured = runs("train")
    for network, *cells in rows_of(page, header):
        name = NETWORKS[network if "batch" in network else re.sub(r", (\d+)$", r", batch \1", network)]
        of_network = [run[name] for run in measured]
        columns = [[run[key] for run in of_network] for key in ("per_core", "machine", "engine_over_products")]
        epochs = [run["before_and_after"][name] for run in runs("train_6f6085d")]
        columns.append([of_epoch["fb015cc"] / of_epoch["6f6085d"] for of_epoch in epochs])
        for cell, values in zip(cells, columns[: len(cells)], strict=True):
            assert cell.removesuffix("x") == shown(values)


def test_the_readmes_sentence_covers_all_runs():
    text = " ".join(README.read_text().split()).split("## Speed", 1)[1].split("Ten trials", 1)[0]
    limits = [float(x) for pair in re.findall(r"([\d.]+) to ([\d.]+)", text) for x in pair]
    found, nine = {10: [], 257: [], 1000: []}, []
    for run in runs("loss"):
        for row in run["rows"]:
            if len(row["shape"]) == 2 and row["shape"][1] <= 1000:
                target = nine if row["loss"] == "nine thresholds" else found[max(10, row["shape"][1])]
                target.append(row["ratio"])
    for values, expected in zip((*found.values(), nine), zip(limits[::2], limits[1::2], strict=True), strict=True):
        digits = 0 if values is nine else 1
        assert (round(min(values), digits), round(max(values), digits)) == expected
