"""From probabilities to confusion matrices, scores and decisions. NumPy arrays in, plain JSON types out (or `Cells`).

Decisions: always argmax; on request `thresholds` (Bridging the Gap's mean over 0.1 ... 0.9), `logit_thresholds` (the
same numbers applied to logits, as in its released code), `plugin_<metric>`, the rule tuned for that metric on
validation, and `expected_<metric>`, the best rule according to the probabilities on validation, without its labels.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor, nn

from east import metrics
from east.choices import choose
from east.confusion import Confusion
from east.decisions import expected, tuned
from east.lab.training.scores import (
    DENSE_CLASSES,
    MEANS,
    SCORES,
    Cells,
    Evaluation,
    Judged,
    JudgedRule,
    Matrix,
    Score,
    Scores,
)
from east.losses import AUROCLoss, MetricCrossEntropy, MetricLoss

THRESHOLDS = [k / 10 for k in range(1, 10)]
AVERAGED = {"thresholds": THRESHOLDS, "logit_thresholds": torch.tensor(THRESHOLDS).sigmoid().tolist()}
SCORED = (metrics.f1, metrics.accuracy, metrics.balanced_accuracy, metrics.mcc, metrics.gmean)  # by `scores`
PLUGIN, EXPECTED = "plugin_", "expected_"


def evaluate(
    probabilities: Mapping[str, np.ndarray],
    labels: Mapping[str, np.ndarray],
    positive: int | None,
    decisions: Sequence[str] = (),
    trained_for: Callable[[Confusion], Tensor] | None = None,
) -> Evaluation:
    """Everything a record says about predictions.

    probabilities, labels: {"val": [n, d], "test": ...} and {"val": [n], ...}; a search has no test part. positive:
    index of the positive class, or None. Rules are tuned on val alone. trained_for: a metric to add to the scores
    under the name `trained_for`.
    """
    truth = {part: torch.as_tensor(values) for part, values in labels.items()}
    tensors = {part: torch.as_tensor(values) for part, values in probabilities.items()}
    ranking = {part: rank_scores(tensors[part], truth[part], positive) for part in tensors}
    val, classes = tensors["val"], tensors["val"].shape[-1]

    def judge(decide: Callable[[Tensor], Tensor]) -> Judged:
        result: Judged = {"confusion": {}, "scores": {}}
        for part, p in tensors.items():
            predicted = decide(p)
            c = Confusion.from_predictions(predicted, truth[part], classes)
            result["confusion"][part] = matrix(predicted, truth[part], classes)
            extra = {"trained_for": float(trained_for(c))} if trained_for else {}
            result["scores"][part] = {**scores(c, positive), **ranking[part], **extra}
        return result

    result: Evaluation = {**judge(lambda p: p.argmax(-1)), "decisions": {}}
    for name in decisions:
        if name in AVERAGED:
            result["decisions"][name] = over_thresholds(tensors, truth, positive, AVERAGED[name])
        else:
            metric, with_labels = decision_metric(name, positive), name.startswith(PLUGIN)
            rule = tuned(val, truth["val"], metric, positive) if with_labels else expected(val, metric, positive)
            result["decisions"][name] = {"rule": rule.to_json(), **judge(rule.decide)}
    return result


def scores(c: Confusion, positive: int | None) -> dict[str, Score]:
    """The scores of one hard confusion; `f1_pos` is None without a positive class."""
    values = {name: score(c, positive) for name, score in SCORES.items()}
    return {name: None if value is None else value.tolist() for name, value in values.items()}


def rank_scores(probabilities: Tensor, labels: Tensor, positive: int | None) -> Scores:
    """Scores that depend only on the ranking: of the positive class, or the mean over classes of one against the rest.

    Classes without samples are left out; None if that leaves nothing to rank.
    """
    targets = [positive] if positive is not None else range(probabilities.shape[-1])
    pairs = [(probabilities[:, k].double().numpy(), (labels == k).numpy()) for k in targets]
    pairs = [(values, truth) for values, truth in pairs if truth.any() and not truth.all()]
    if not pairs:
        return {"auroc": None, "average_precision": None}
    return {
        "auroc": float(np.mean([roc_auc_score(truth, values) for values, truth in pairs])),
        "average_precision": float(np.mean([average_precision_score(truth, values) for values, truth in pairs])),
    }


def over_thresholds(
    probabilities: Mapping[str, Tensor], labels: Mapping[str, Tensor], positive: int | None, thresholds: Sequence[float]
) -> JudgedRule:
    """Confusions at `p >= t` for every threshold, and the mean of each score over them. Section 5, Bridging the Gap."""
    check_decisions(["thresholds"], positive, probabilities["val"].shape[-1])
    assert positive is not None
    judged: dict[str, list] = {}
    means: dict[str, Scores] = {}
    for part, p in probabilities.items():
        at = torch.tensor(thresholds, dtype=p.dtype)[:, None]
        predicted = torch.where(p[:, positive] >= at, positive, 1 - positive)
        confusions = Confusion.from_predictions(predicted, labels[part], 2)
        judged[part] = counts(confusions)
        means[part] = {name: score(confusions, positive).mean(0).tolist() for name, score in MEANS.items()}
    return {"at": list(thresholds), "confusion": judged, "scores": means}


def check_decisions(decisions: Sequence[str], positive: int | None, classes: int) -> None:
    """Raise ValueError for decisions that `evaluate` does not know or that these classes do not allow."""
    for name in decisions:
        if name not in AVERAGED:
            decision_metric(name, positive)
        elif positive is None or classes != 2:
            raise ValueError(f"decision {name!r} is for two classes, got {classes}")


def decision_metric(decision: str, positive: int | None) -> Callable[[Confusion], Tensor]:
    """The metric that plugin_<metric> or expected_<metric> maximises; of the positive class where there is one."""
    choose("decision", decision, [*AVERAGED, *(kind + name for kind in (PLUGIN, EXPECTED) for name in tunable())])
    return metric_of(decision.removeprefix(PLUGIN).removeprefix(EXPECTED), positive)


def tunable() -> list[str]:
    """Metrics that a rule can be tuned for: all but `cost`, which needs a matrix of costs."""
    return [name for name in metrics.METRICS if name != "cost"]


def metric_of(name: str, positive: int | None) -> Callable[[Confusion], Tensor]:
    """A metric by name; without an average in the name, of the positive class where the data have one."""
    if "." in name:  # a user's own function: refused with the choices
        choose("metric", name, tunable())
    metric, parameters = metrics.parse(name)
    choose("metric", metric.__name__, tunable())
    if metrics.takes_average(metric):
        parameters.setdefault("average", "macro" if positive is None else "positive")
    if parameters.get("average") == "positive":
        if positive is None:
            raise ValueError(f"{name}: expected data with a positive class: two classes, or dataset.positive=…")
        parameters["positive"] = positive
    return partial(metric, **parameters)


def validation_metric(loss: nn.Module, positive: int | None) -> Callable[[Confusion], Tensor]:
    """M in `val_metric` = 1 - M(hard validation confusion), which is comparable across temperatures.

    A metric loss is judged by its own metric, the AUROC loss by the AUROC of its decisions (balanced accuracy), every
    other loss by F1: of the positive class where there is one, else macro.
    """
    if isinstance(loss, AUROCLoss):
        return metrics.balanced_accuracy
    if isinstance(loss, MetricLoss | MetricCrossEntropy):
        return partial(loss.metric, **loss.metric_parameters)
    return metric_of("f1", positive)


def trains_other_metric(loss: nn.Module) -> bool:
    """True if the loss trains a metric that is not among the scores of every record."""
    if isinstance(loss, AUROCLoss) or not isinstance(loss, MetricLoss | MetricCrossEntropy):
        return False
    average = loss.metric_parameters.get("average", "macro")
    return loss.metric not in SCORED or average not in ("macro", "positive")


def matrix(predicted: Tensor, labels: Tensor, classes: int) -> Matrix:
    """The confusion matrix of decisions [n]; of very many classes its nonzero cells, since it would not fit memory."""
    if classes <= DENSE_CLASSES:
        return counts(Confusion.from_predictions(predicted, labels, classes))
    cells, numbers = torch.unique(labels.long() * classes + predicted, return_counts=True)
    return Cells(classes, torch.stack((cells // classes, cells % classes, numbers), 1).tolist())


def counts(c: Confusion) -> list:
    """Matrices of counts as nested lists of ints."""
    return c.matrix.round().long().tolist()
