"""The papers' numbers in our words, and what is known or suspected about where they come from.

The numbers are in published.yaml, the findings in findings.yaml.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from east.choices import choose

HERE = Path(__file__).resolve().parent
PROTOCOLS = {"east_v2": "east", "east_v1": "east_v1", "btg": "btg"}  # the papers, in the order of their tables here
BASELINES = ("rf", "ccs")  # no networks
MULTICLASS = {"cifar10": 10, "caltech256": 257}  # and their classes

# One map from the papers' words to ours. Which of our scores a metric is depends on who printed it: see `score_of`.
LOSSES = {
    "east_f1": "f1",
    "east_acc": "accuracy",
    "east_mcc": "mcc",
    "east_fbeta": "fbeta",
    "east_fbeta_p": "fbeta",
    "east_fbeta_r": "fbeta",
    "btg_acc": "btg_accuracy",
    "ap_perf_f1": "ap_perf",
    "wmw_auroc": "wmw",
}
METRICS = {"acc": "accuracy", "mcc": "mcc", "f1_macro": "f1_macro", "precision": "precision", "recall": "recall"}
BTG_METRICS = METRICS | {"f1": "f1_pos", "f2": "f2_pos", "f3": "f3_pos", "auroc": "auroc_thresholded"}
SCORES = (
    *("f1_pos", "f1_macro", "accuracy", "balanced_accuracy", "mcc"),
    *("auroc", "auroc_thresholded", "average_precision", "precision", "recall", "trained_for"),
)

# The released-code variant of a table asks for these instead (see findings.yaml).
RELEASED_DATASETS = {"adult": "adult_released"}
RELEASED_LOSSES: dict[str, dict] = {
    "dice": {"loss": "dice_released"},
    "wmw": {"loss": "wmw_released"},
    "btg_f1": {"loss": "btg_released"},
    "btg_f2": {"loss": "btg_released", "beta": 2},
    "btg_f3": {"loss": "btg_released", "beta": 3},
    "btg_accuracy": {"loss": "btg_released", "metric": "accuracy"},
    "btg_auroc": {"loss": "btg_released", "metric": "auroc"},
}
LOGIT_JUDGED = ("bce", "wmw", "ap_perf")  # losses whose raw outputs the released code holds against the thresholds


@cache
def cells() -> list[dict[str, Any]]:
    """The 341 published cells; `our_loss` and `our_beta` are our names for their losses."""
    found = yaml.safe_load((HERE / "published.yaml").read_text())["cells"]
    for cell in found:
        cell["our_loss"] = LOSSES.get(cell["loss"], cell["loss"])
        cell["our_beta"] = pairs({cell["beta_class"]: cell["beta"]} if "beta_class" in cell else None)
    return found


def pairs(beta: Mapping[str, float] | None) -> tuple | None:
    """Betas by class as something that can be looked up."""
    return tuple(beta.items()) if beta else None


@cache
def findings() -> list[dict[str, Any]]:
    """What is known or suspected about the published numbers: id, status, text, evidence, cells."""
    return yaml.safe_load((HERE / "findings.yaml").read_text())["findings"]


def findings_of(cell: Mapping) -> list[str]:
    """Ids of the findings that touch a published cell."""

    def matches(pattern: Mapping) -> bool:
        return all(cell.get(name) in (want if isinstance(want, list) else [want]) for name, want in pattern.items())

    return [finding["id"] for finding in findings() if any(map(matches, finding["cells"]))]


def score_of(paper: str | None, dataset: str, loss: str, metric: str) -> str:
    """Which of our scores a paper's metric is; without a paper, `metric` is our own word, such as plugin_f1.f1_pos.

    Two classes: F1 of the positive class, but macro F1 in the rows of random forest and CCS. Caltech256: the networks'
    accuracy is balanced accuracy. Bridging the Gap: means over the thresholds 0.1 to 0.9.

    >>> score_of("east_v2", "adult", "rf", "f1"), score_of("btg", "adult", "bce", "f1")
    ('test.f1_macro', 'thresholds.test.f1_pos')
    """
    baseline = loss in BASELINES
    if paper is None:
        rule, _, name = metric.rpartition(".")
        return f"{rule}{'.' if rule else ''}test.{choose('score', name, SCORES)}"
    if paper == "btg":
        return f"thresholds.test.{BTG_METRICS[choose('metric', metric, BTG_METRICS)]}"
    if metric == "f1":
        return "test.f1_macro" if baseline or dataset in MULTICLASS else "test.f1_pos"
    if metric == "acc" and dataset == "caltech256" and not baseline:
        return "test.balanced_accuracy"
    return f"test.{METRICS[choose('metric', metric, METRICS)]}"


def published_for(dataset: str, loss: str, protocol: str | None, score: str) -> dict | None:
    """The first published number about a whole dataset that is this score of this loss under this protocol."""
    clean = {released: name for name, released in RELEASED_DATASETS.items()}.get(dataset, dataset)
    same = (c for c in cells() if (c["dataset"], c["our_loss"], PROTOCOLS[c["paper"]]) == (clean, loss, protocol))
    whole = (c for c in same if "class" not in c and not c["our_beta"])
    return next((c for c in whole if score_of(c["paper"], clean, loss, c["metric"]) == score), None)
