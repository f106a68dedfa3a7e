"""Writes the small committed records that the table tests render: `python tests/golden/generate.py`.

Invented trials, whose scores follow from their confusion matrices. They hold what tables must tell apart: search and
trials, presets, variants, other splits, a failed trial, a part of the data, an altered loss.
"""

import shutil
from functools import cache
from pathlib import Path

import numpy as np

from east.lab.experiment.records import Record, export, write
from east.lab.settings.command import Command
from east.lab.settings.compose import settings
from east.lab.settings.settings import Science
from east.lab.training.scores import Best

HERE = Path(__file__).parent


def binary(seed: int, positives: int, negatives: int, recall: float, false: float) -> np.ndarray:
    """A 2 x 2 matrix around the given recall and false positive rate."""
    rng = np.random.default_rng(seed)
    tp, fp = rng.binomial(positives, recall), rng.binomial(negatives, false)
    return np.array([[negatives - fp, fp], [positives - tp, tp]])


def tenfold(seed: int, recall: float) -> np.ndarray:
    """A 10 x 10 matrix of 100 rows per class; the other 9 classes share the errors."""
    rng = np.random.default_rng(seed)
    return np.array([rng.multinomial(100, np.where(np.eye(10)[k], recall, (1 - recall) / 9)) for k in range(10)])


@cache
def config(*words: str) -> Science:
    """The settings of a command, on data of the fingerprint "golden"."""
    asked = settings(Command.parse(words))
    return asked.science(asked.dataset.name, "golden")


def put(
    folder, dataset, loss, matrix, *, seed=0, lr=0.001, protocol="east", preset="paper", annealing=None, split=0, **more
):
    """One record; `more`: val_loss (a search point), limit, status, thresholds."""
    loss = loss if "=" in loss else f"loss={loss}"
    words = [f"dataset={dataset}", *loss.split(), f"protocol={protocol}", f"preset={preset}", f"split.seed={split}"]
    if dataset == "digits":
        words += ["dataset.imbalance=10"]  # as `east-run` without arguments has it
    words += [] if loss == "loss=rf" else [f"hyper.lr={lr}", "hyper.batch_size=256", "hyper.dropout=0.25"]
    words += [f"annealing={annealing}"] if annealing else []
    words += [f"dataset.limit={more['limit']}"] if "limit" in more else []
    judged = more.get("status") != "failed"
    decisions = {"thresholds": {"at": [0.5], "confusion": {"test": [matrix]}}} if more.get("thresholds") else {}
    record = Record(
        config=config(*words),
        seed=1000 if "val_loss" in more else seed,
        stage="search" if "val_loss" in more else "trial",
        data={"name": dataset, "fingerprint": "golden", "sizes": [0, 0, int(matrix.sum())]},
        confusion={"test": matrix} if judged else {},
        decisions=decisions,
        best=Best(more.get("val_loss", 0.25), more.get("val_metric", 0.3), temperature=0.1, epoch=9),
        epochs=30,
        stopped="patience",
        status=more.get("status", "done"),
        error="RuntimeError: loss is nan" if more.get("status") == "failed" else None,
        seconds=12.5,
        device="cpu",
        versions={"east": "0.1.0"},
        git="0123456789ab",
        history={
            "epoch": [0, 15, 29],
            "temperature": [0.2, 0.18, 0.1],
            "train_loss": [0.6, 0.3, 0.2],
            "val_loss": [0.6, 0.3, 0.25],
        },
    )
    write(folder, record)


def generate(folder: Path) -> None:
    mammography = lambda seed, recall: binary(seed, 52, 2185, recall, 0.003)  # noqa: E731
    for lr, val_loss, val_metric in [(0.01, 0.30, 0.20), (0.001, 0.25, 0.30), (0.0001, 0.40, 0.40)]:
        put(folder, "mammography", "f1", mammography(9, 0.2), lr=lr, val_loss=val_loss, val_metric=val_metric)
    for seed in range(5):
        put(folder, "mammography", "f1", mammography(seed, 0.75), seed=seed)
        put(folder, "mammography", "ce", mammography(seed + 50, 0.62), seed=seed)
    put(folder, "mammography", "f1", mammography(9, 0.1), seed=5, status="failed")
    put(folder, "mammography", "mcc", mammography(7, 0.8), val_loss=0.2)  # chosen, but no trials of it
    for seed in range(3):
        put(folder, "mammography", "accuracy", mammography(seed + 70, 0.66), seed=seed, preset="budget")
    put(folder, "mammography", "dice", mammography(3, 0.7))  # one trial: no spread
    for seed in range(2):
        put(folder, "mammography", "dice_released", binary(seed, 52, 2185, 0.3, 0.5), seed=seed)
        put(folder, "mammography", "f1", mammography(seed + 20, 0.72), seed=seed, split=1)
        put(folder, "mammography", "ce", mammography(seed + 25, 0.60), seed=seed, split=1)
        put(folder, "mammography", "f1", mammography(seed, 0.01), seed=seed, limit=500)
        put(folder, "mammography", "loss=f1 loss.average=positive", mammography(seed, 0.02), seed=seed)
        put(folder, "mammography", "f1", mammography(seed, 0.03), seed=seed, annealing="none")
        put(folder, "mammography", "f1", mammography(seed, 0.04), seed=seed, preset="quick")
        put(folder, "adult_released", "ce", binary(seed, 3846, 12435, 0.08, 0.006), seed=seed)
        put(folder, "adult", "ce", binary(seed, 3846, 12435, 0.6, 0.07), seed=seed, preset="budget")
        put(folder, "adult", "rf", binary(seed, 3846, 12435, 0.62, 0.07), seed=seed)
        put(folder, "digits", "f1", tenfold(seed, 0.95), seed=seed, preset="quick")
        put(folder, "digits", "ce", tenfold(seed + 5, 0.94), seed=seed, preset="quick")
        for beta, recall in [(0.25, 0.55), (1, 0.7), (5, 0.8)]:
            loss = f"loss=fbeta loss.beta={{dog:{beta}}}"
            put(folder, "cifar10", loss, tenfold(seed + int(8 * beta), recall), seed=seed)
    for seed in range(3):
        for loss, recall in [("btg_f1", 0.6), ("btg_f2", 0.7)]:
            matrix = mammography(seed + 90, recall)
            put(folder, "mammography", loss, matrix, seed=seed, protocol="btg", split="trial", thresholds=True)


if __name__ == "__main__":
    runs = HERE / "building"
    generate(runs)
    shutil.rmtree(HERE / "records", ignore_errors=True)
    print(export(runs))
    shutil.move(runs / "records", HERE / "records")
    failed = next(file for file in runs.rglob("*.json") if '"failed"' in file.read_text())
    kept = HERE / failed.relative_to(runs)
    kept.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(failed, kept)  # an export leaves failures out
    shutil.rmtree(runs)
