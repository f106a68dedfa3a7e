"""The papers' numbers by our names, and what is known or suspected about where they come from.

The numbers are in published.yaml, the findings in findings.yaml.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from east.choices import choose
from east.lab.files import yaml_content

HERE = Path(__file__).resolve().parent
PAPERS = ("east_v2", "east_v1", "btg")
BASELINES = ("rf", "ccs")  # the papers' rows without a network, judged by macro F1 and plain accuracy
MULTICLASS = {"cifar10": 10, "caltech256": 257}  # dataset -> number of classes

# The papers' names -> ours. Which of our scores a metric is depends on the paper: see `score_of`.
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
# Records keep the names they were written with; everywhere else a score is metric, then average.
STORED = {"f1_positive": "f1_pos", "f2_positive": "f2_pos", "f3_positive": "f3_pos"}
SHOWN = {stored: shown for shown, stored in STORED.items()}
SCORES = (
    *("f1_positive", "f1_macro", "accuracy", "balanced_accuracy", "mcc", "gmean"),
    *("auroc", "auroc_thresholded", "average_precision", "precision", "recall", "trained_for"),
)

# The released-code variant of a table types these instead (see findings.yaml).
RELEASED_DATASETS = {"adult": "adult_released"}
RELEASED_LOSSES: dict[str, dict[str, str | int]] = {
    "dice": {"loss": "dice_released"},
    "wmw": {"loss": "wmw_released"},
    "btg_f1": {"loss": "btg_released"},
    "btg_f2": {"loss": "btg_released", "loss.beta": 2},
    "btg_f3": {"loss": "btg_released", "loss.beta": 3},
    "btg_accuracy": {"loss": "btg_released", "loss.metric": "accuracy"},
    "btg_auroc": {"loss": "btg_released", "loss.metric": "auroc"},
}
# It also prefers these settings, by protocol; until such trials exist, others are shown with a mark.
RELEASED_PROTOCOLS: dict[str, dict[str, str]] = {"btg": {"protocol.val_reduce": "batch_mean"}}
LOGIT_JUDGED = ("bce", "wmw", "ap_perf")  # losses whose raw outputs the released code thresholds

Betas: TypeAlias = tuple[tuple[str, float], ...]  # (class, beta), …


class Published(BaseModel):
    """A number of a paper: mean and standard deviation over ten trials. published.yaml explains the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    paper: Literal["east_v2", "east_v1", "btg"]
    table: int
    dataset: str
    loss: str
    metric: str
    mean: float
    std: float
    row: int | None = None
    class_: str | None = Field(None, alias="class")  # for precision and recall of one class
    beta: float | None = None
    beta_class: str | None = None
    block: str | None = None

    @property
    def our_loss(self) -> str:
        return LOSSES.get(self.loss, self.loss)

    @property
    def our_beta(self) -> Betas | None:
        return ((self.beta_class, self.beta),) if self.beta_class and self.beta is not None else None

    def __format__(self, style: str) -> str:
        """As printed in the paper, such as "0.750 ± 0.02"."""
        return f"{self.mean:.{2 if self.paper == 'btg' else 3}f} ± {self.std:.2f}"


class Footnote(BaseModel):
    """What is known or suspected about some published numbers; without cells, about the text of a paper.

    A pattern of `cells` matches published numbers by field: each has the value that is given, or one of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    status: Literal["confirmed", "suspected", "open"]
    text: str
    evidence: str
    cells: tuple[dict[str, Any], ...]


@cache
def cells() -> list[Published]:
    """The 341 published cells."""
    return [Published.model_validate(cell) for cell in yaml_content(HERE / "published.yaml")["cells"]]


@cache
def findings() -> list[Footnote]:
    """Everything in findings.yaml."""
    return [Footnote.model_validate(entry) for entry in yaml_content(HERE / "findings.yaml")["findings"]]


def matches(pattern: Mapping[str, Any], cell: Published) -> bool:
    """True if a finding's pattern is about a published number."""
    values = vars(cell) | {"class": cell.class_}
    return all(values[name] in (wanted if isinstance(wanted, list) else [wanted]) for name, wanted in pattern.items())


@cache
def findings_of(cell: Published) -> list[str]:
    """Ids of the findings about a published cell."""
    return [finding.id for finding in findings() if any(matches(pattern, cell) for pattern in finding.cells)]


def shown(score: str) -> str:
    """A stored score's name as tables print it.

    >>> shown("thresholds.test.f1_pos")
    'thresholds.test.f1_positive'
    """
    rule, dot, name = score.rpartition(".")
    return f"{rule}{dot}{SHOWN.get(name, name)}"


def score_of(paper: str | None, dataset: str, loss: str, metric: str) -> str:
    """The stored score that a paper's metric means; without a paper, `metric` is our name, as plugin_f1.f1_positive.

    With two classes F1 is that of the positive class, but macro F1 in the rows of random forest and CCS. On Caltech256
    the networks' accuracy is balanced accuracy. Bridging the Gap prints means over the thresholds 0.1 to 0.9.

    >>> score_of("east_v2", "adult", "rf", "f1"), score_of("btg", "adult", "bce", "f1")
    ('test.f1_macro', 'thresholds.test.f1_pos')
    """
    baseline = loss in BASELINES
    if paper is None:
        rule, dot, name = metric.rpartition(".")
        known = choose("score", SHOWN.get(name, name), SCORES)
        return f"{rule}{dot}test.{STORED.get(known, known)}"
    if paper == "btg":
        return f"thresholds.test.{BTG_METRICS[metric]}"
    if metric == "f1":
        return "test.f1_macro" if baseline or dataset in MULTICLASS else "test.f1_pos"
    if metric == "acc" and dataset == "caltech256" and not baseline:
        return "test.balanced_accuracy"
    return f"test.{METRICS[choose('metric', metric, METRICS)]}"
