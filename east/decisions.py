"""From probabilities to classes: decision rules, and the search for the best rule for a metric, with or without labels.

Plug-in (`tuned`): the rule that maximises the metric on labelled rows (Narasimhan et al. 2014; Koyejo et al. 2014).
Expected (`expected`): the same search with the probabilities themselves in place of the labels.
Both use truth [n, d], the share of each class in each row: one-hot labels, or the probabilities; the shares of a
weighted row sum to its weight. With two classes all thresholds are compared. With more, the counts of a rule give the
metric's slopes G, and these give the next rule, argmax_j sum_k p_k G_kj, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from east import metrics
from east.confusion import Confusion, checked_indices, per_class
from east.losses import MetricLoss, slopes

if TYPE_CHECKING:
    from east.lab.training.scores import StoredRule

LOG_WEIGHTS = np.linspace(-3, 3, 25)
SWEEPS = 5
ROUNDS = 50
SUM_TOLERANCE = 1e-3  # by which probabilities may miss their range, and rows a sum of 1

Metric = Callable[[Confusion], Tensor]


@dataclass(frozen=True)
class Argmax:
    """The most probable class; ties go to the first."""

    def decide(self, probabilities: Tensor) -> Tensor:
        """Classes [...] of probabilities [..., d], as for every rule."""
        return probabilities.argmax(-1)

    def to_json(self) -> None:
        return None


@dataclass(frozen=True)
class Threshold:
    """For two classes: the positive one where its probability is at least `value`."""

    value: float
    positive: int = 1

    def decide(self, probabilities: Tensor) -> Tensor:
        return torch.where(probabilities[..., self.positive].double() >= self.value, self.positive, 1 - self.positive)

    def to_json(self) -> StoredRule:
        return {"threshold": self.value}


@dataclass(frozen=True)
class ClassWeights:
    """argmax_k w_k p_k."""

    weights: tuple[float, ...]

    def decide(self, probabilities: Tensor) -> Tensor:
        return (probabilities.double() * as_float64(self.weights, probabilities)).argmax(-1)

    def to_json(self) -> StoredRule:
        return {"weights": list(self.weights)}


@dataclass(frozen=True)
class Affine:
    """argmax_k scale_k p_k + shift_k: the form of the best rule for every metric of the margins."""

    scale: tuple[float, ...]
    shift: tuple[float, ...]

    def decide(self, probabilities: Tensor) -> Tensor:
        p = probabilities.double()
        return (p * as_float64(self.scale, p) + as_float64(self.shift, p)).argmax(-1)

    def to_json(self) -> StoredRule:
        return {"scale": list(self.scale), "shift": list(self.shift)}


@dataclass(frozen=True)
class Gains:
    """argmax_j sum_k p_k gains_kj, for metrics to which it matters which wrong class is predicted, such as costs."""

    gains: tuple[tuple[float, ...], ...]

    def decide(self, probabilities: Tensor) -> Tensor:
        p = probabilities.double()
        return (p @ as_float64(self.gains, p)).argmax(-1)

    def to_json(self) -> StoredRule:
        return {"gains": [list(row) for row in self.gains]}


Rule = Argmax | Threshold | ClassWeights | Affine | Gains


def from_json(rule: StoredRule | None, positive: int | None = None) -> Rule:
    """The rule that a record or a saved model holds. positive: the class that a threshold is for, by default 1."""
    if rule is None:
        return Argmax()
    if "threshold" in rule:
        return Threshold(float(rule["threshold"]), 1 if positive is None else positive)
    if "weights" in rule:
        return ClassWeights(tuple(rule["weights"]))
    if "scale" in rule and "shift" in rule:
        return Affine(tuple(rule["scale"]), tuple(rule["shift"]))
    if "gains" in rule:
        return Gains(tuple(tuple(row) for row in rule["gains"]))
    raise ValueError(
        f"rule: expected threshold, weights, scale and shift, or gains, got {', '.join(rule) or 'nothing'}"
    )


def explained(rule: Rule, classes: Sequence[str]) -> str:
    """A rule in words, with p_<class> for the probabilities.

    >>> explained(Threshold(0.25, positive=1), ("ok", "fraud"))
    'fraud if p_fraud >= 0.25, else ok'
    """
    terms: Iterator[str]
    if isinstance(rule, Threshold):
        yes, no = classes[rule.positive], classes[1 - rule.positive]
        return f"{yes} if p_{yes} >= {rule.value:.6g}, else {no}"
    if isinstance(rule, ClassWeights):
        terms = (f"{w:.4g} p_{name}" for w, name in zip(rule.weights, classes, strict=True))
    elif isinstance(rule, Affine):
        parts = zip(rule.scale, rule.shift, classes, strict=True)
        terms = (f"{a:.4g} p_{name} {b:+.4g}" for a, b, name in parts)
    elif isinstance(rule, Gains):
        return "largest expected gain, by the matrix in model.json"
    else:
        return "largest probability"
    return f"largest of {', '.join(terms)}"


def as_float64(values: Sequence[Any], probabilities: Tensor) -> Tensor:
    """The values as a tensor on the device of the probabilities."""
    return torch.tensor(values, dtype=torch.float64, device=probabilities.device)


def tuned(
    probabilities: Tensor,
    labels: Tensor,
    metric: Metric,
    positive: int | None = None,
    weights: Tensor | None = None,
) -> Rule:
    """The rule that maximises the metric on probabilities [n, d] with labels [n] and weights [n], by default 1.

    With more than two classes, it is the best on these rows of argmax, the expected rule, the fixed points on the
    labels, and coordinate ascent on class weights; ties go to the first.
    """
    p, classes = probabilities.double(), probabilities.shape[-1]
    metrics.check_leading(metric, classes)
    metric = defined(metric)
    if classes == 2:
        positive = 1 if positive is None else positive
        return Threshold(best_threshold(p[:, positive], labels == positive, metric, positive, weights), positive)
    truth = weighted(one_hot(labels, classes).double(), weights)
    rules = [Argmax(), expected(p, metric, weights=weights), fixed_point(p, truth, metric)]
    starts = (torch.zeros(classes), -p.mean(0).clamp_min(1e-6).log())
    rules += [best_weights(p, labels, metric, start, weights) for start in starts]
    return best_of(rules, p, truth, metric)


def expected(probabilities: Tensor, metric: Metric, positive: int | None = None, weights: Tensor | None = None) -> Rule:
    """The rule that maximises the metric of the counts expected under probabilities [n, d]: no labels needed."""
    p = probabilities.double()
    metrics.check_leading(metric, p.shape[-1])
    metric = defined(metric)
    if p.shape[-1] == 2:
        positive = 1 if positive is None else positive
        return Threshold(best_threshold(p[:, positive], p[:, positive], metric, positive, weights), positive)
    truth = weighted(p, weights)
    return best_of([Argmax(), fixed_point(p, truth, metric)], p, truth, metric)


def defined(metric: Metric) -> Metric:
    """The metric with 0 where it is undefined (0/0), as east's own metrics score it: NaN has no place in a ranking."""

    def score(c: Confusion) -> Tensor:
        value = metric(c)
        return value.masked_fill(value.isnan(), 0.0)

    return score


def weighted(truth: Tensor, weights: Tensor | None) -> Tensor:
    """Shares [n, d] that sum to the weight of their row."""
    return truth if weights is None else truth * weights.double().unsqueeze(-1)


def best_of(rules: Sequence[Rule], probabilities: Tensor, truth: Tensor, metric: Metric) -> Rule:
    """The best rule, or the first of those that are equal up to rounding."""
    values = torch.stack([value_of(rule, probabilities, truth, metric) for rule in rules])
    return rules[int((values >= values.max() - 1e-12).int().argmax())]


def value_of(rule: Rule, probabilities: Tensor, truth: Tensor, metric: Metric) -> Tensor:
    """The metric of a rule's decisions, on the counts expected under truth [n, d]."""
    return metric(confusion_of(rule.decide(probabilities), truth))


def confusion_of(predicted: Tensor, truth: Tensor) -> Confusion:
    """Counts of predicted classes [..., n] when truth[i, k] of row i is of class k."""
    classes, leading = truth.shape[-1], predicted.shape[:-1]
    correct = truth.expand(*leading, *truth.shape).gather(-1, predicted.unsqueeze(-1)).squeeze(-1)
    return Confusion(
        per_class(correct, predicted, classes),
        truth.sum(0).expand(*leading, classes),
        per_class(truth.sum(-1).expand(predicted.shape), predicted, classes),
        lambda: truth.T @ one_hot(predicted, classes).to(truth.dtype),
    )


def cumulative(values: np.ndarray, truth: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True and false positives of `values >= t` at each distinct value t, from high to low; and those values."""
    order = np.argsort(-values, kind="stable")
    values, truth, weights = values[order], truth[order], weights[order]
    last = np.flatnonzero(np.append(np.diff(values) != 0, True))
    true_positives = np.cumsum(truth * weights)[last]
    return true_positives, np.cumsum(weights)[last] - true_positives, values[last]


def best_threshold(
    values: Tensor, truth: Tensor, metric: Metric, positive: int = 1, weights: Tensor | None = None
) -> float:
    """The threshold t at which `p >= t` maximises the metric; of several, the nearest to 0.5.

    values [n], truth [n]: the positive class's probability, and its share in each row (0 or 1 for labels). Thresholds
    are the midpoints between neighbouring values, and between the extreme ones and 1 or 0: "never" and "always".
    """
    shares = truth.double().cpu().numpy()
    counts = np.ones_like(shares) if weights is None else weights.double().cpu().numpy()
    tp, fp, distinct = cumulative(values.double().cpu().numpy(), shares, counts)
    tp, fp = np.append(0, tp), np.append(0, fp)
    above, below = np.append(max(1.0, distinct[0]), distinct), np.append(distinct, min(0.0, distinct[-1]))
    thresholds = (above + below) / 2
    # The midpoint of two adjacent floats can round to the lower one, which must stay below the threshold.
    thresholds[:-1] = np.where(thresholds[:-1] <= below[:-1], above[:-1], thresholds[:-1])
    thresholds[0] = max(thresholds[0], np.nextafter(distinct[0], 2))  # not even a probability of 1 reaches it
    positives = (shares * counts).sum()
    negatives = counts.sum() - positives
    matrix = np.stack([tp, positives - tp, fp, negatives - fp], axis=-1).reshape(-1, 2, 2)
    if positive == 1:
        matrix = matrix[:, ::-1, ::-1]
    value = metric(Confusion.from_matrix(torch.tensor(matrix.clip(0)))).numpy()
    best = np.flatnonzero(value >= value.max() - 1e-12)
    return float(thresholds[best[np.abs(thresholds[best] - 0.5).argmin()]])


def fixed_point(probabilities: Tensor, truth: Tensor, metric: Metric) -> Rule:
    """The best rule met while iterating: counts give slopes, slopes give the next rule, and that gives new counts.

    Starts: soft counts; argmax, a trap where it never predicts some class; and predictions as frequent as the classes.
    The iteration can cycle, and G-mean jumps from one class to the next, so two of the walks are damped, as
    Frank-Wolfe's (Narasimhan et al. 2015). All W walks advance together, in a leading dimension.
    """
    p, in_cells = probabilities, slopes.reads_matrix(metric, probabilities.shape[-1])
    shares = (truth.sum(0) / truth.sum()).clamp(0, 1)
    quantiles = torch.stack([p[:, k].quantile(1 - share) for k, share in enumerate(shares)])
    matched = ClassWeights(tuple((1 / quantiles.clamp_min(1e-12)).tolist()))
    best = best_of([Argmax(), matched], p, truth, metric)
    highest = float(value_of(best, p, truth, metric))

    soft = Confusion((truth * p).sum(0), truth.sum(0), truth.sum(-1) @ p, lambda: truth.T @ p)
    by_argmax, by_frequency = (confusion_of(rule.decide(p), truth) for rule in (Argmax(), matched))
    starts = (soft, by_argmax, by_frequency, soft, by_frequency)
    damped = torch.tensor([False, False, False, True, True])
    counts = torch.stack([counts_of(start, in_cells) for start in starts])
    for step in range(ROUNDS):
        rules = next_rules(counts, metric, in_cells)
        confusion = confusion_of(decide_by(rules, p), truth)
        values = metric(confusion)
        if float(values.max()) > highest + 1e-12:
            highest, best = float(values.max()), rule_of(rules[int(values.argmax())])
        previous = counts
        step_size = torch.where(damped, 1 / (step + 2), 1.0)[:, None, None]
        counts = counts.lerp(counts_of(confusion, in_cells), step_size.to(counts))
        if torch.equal(counts, previous):
            break
    return best


def counts_of(c: Confusion, in_cells: bool) -> Tensor:
    """Cells [..., d, d], or margins [..., 3, d], as `slopes` takes them."""
    return c.matrix if in_cells else torch.stack((c.diagonal, c.actual.expand(c.diagonal.shape), c.predicted), -2)


def next_rules(counts: Tensor, metric: Metric, in_cells: bool) -> Tensor:
    """Rules from the metric's slopes at W counts: gains [W, d, d], or scale and shift [W, 2, d]; scaled to at most 1.

    Slopes that are not finite become 0: such a walk ends in the first class, and is no better than argmax.
    """
    rules = (
        slopes.of_cells(metric, counts) if in_cells else torch.stack(slopes.of_margins(metric, *counts.unbind(-2)), -2)
    )
    largest = rules.abs().amax((-2, -1), keepdim=True)
    return torch.where(largest.isfinite(), rules / largest.clamp_min(1e-30), 0.0)


def decide_by(rules: Tensor, probabilities: Tensor) -> Tensor:
    """Classes [W, n] of probabilities [n, d] by each of W rules of `next_rules`."""
    if rules.shape[-2] == 2:
        scale, shift = rules.unsqueeze(-3).unbind(-2)
        return torch.addcmul(shift, probabilities, scale).argmax(-1)
    return (probabilities @ rules).argmax(-1)


def rule_of(values: Tensor) -> Rule:
    """One rule of `next_rules` as an object."""
    if values.shape[-2] == 2:
        scale, shift = values.tolist()
        return Affine(tuple(scale), tuple(shift))
    return Gains(tuple(map(tuple, values.tolist())))


def best_weights(
    probabilities: Tensor, labels: Tensor, metric: Metric, start: Tensor, row_weights: Tensor | None = None
) -> ClassWeights:
    """Weights [d] such that argmax_k w_k p_k maximises the metric: coordinate ascent on a grid of log w_k.

    A class without rows keeps a weight of 1: nothing is known about its best weight.
    """
    logs = torch.log(probabilities.double().clamp_min(1e-30))
    grid, classes = torch.tensor(LOG_WEIGHTS), logs.shape[-1]
    present = torch.bincount(labels, row_weights, classes) > 0
    weights = torch.where(present, start.double(), 0.0)

    def values_of(predicted: Tensor) -> Tensor:
        return metric(Confusion.from_predictions(predicted, labels, classes, row_weights))

    scores, ranked = two_best(logs + weights)  # so that trying a class costs O(n), not O(n d)
    best = float(values_of(ranked[:, 0]))
    for _ in range(SWEEPS):
        previous = best
        for k in present.nonzero().flatten().tolist():
            leads = ranked[:, 0] == k
            rival_score = torch.where(leads, scores[:, 1], scores[:, 0])
            rival = torch.where(leads, ranked[:, 1], ranked[:, 0])
            score = logs[:, k] + grid[:, None]
            # Ties go to the lower index, as in argmax.
            wins = (score > rival_score) | ((score == rival_score) & (k < rival))
            values = values_of(torch.where(wins, k, rival))
            if float(values.max()) > best + 1e-12:
                best = float(values.max())
                weights[k] = grid[values.argmax()]
                changed = (ranked == k).any(-1) | (logs[:, k] + weights[k] >= scores[:, 1])
                scores[changed], ranked[changed] = two_best(logs[changed] + weights)
        if best == previous:
            break
    return ClassWeights(tuple(weights.exp().tolist()))


def two_best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The two highest scores [n, 2] of each row and their classes [n, 2]; ties go to the lower index."""
    first_score, first = scores.max(-1)
    second_score, second = scores.scatter(-1, first.unsqueeze(-1), -torch.inf).max(-1)
    return torch.stack((first_score, second_score), -1), torch.stack((first, second), -1)


@dataclass(frozen=True)
class Decision:
    """A rule and the value of the metric under it: on the labels it was tuned on, or as expected without labels."""

    rule: Rule
    value: float
    classes: int

    def predict(self, probabilities: Any) -> Any:
        """Classes [n] of probabilities [n], [n, 2] or [n, d]: a tensor if they are one, else a NumPy array."""
        p = checked_probabilities(probabilities)
        if p.shape[-1] != self.classes:
            raise ValueError(f"probabilities: expected {self.classes} classes, got {p.shape[-1]}")
        predicted = self.rule.decide(p)
        return predicted if isinstance(probabilities, Tensor) else predicted.numpy()

    __call__ = predict


def decide(
    probabilities: Any, metric: str | metrics.Metric = "f1", labels: Any = None, **metric_parameters: Any
) -> Decision:
    """The best decision rule for a metric, given the probabilities of any model.

    probabilities: [n, d] with rows that sum to 1, or [n] of the positive class of two; array or tensor.
    labels: class indices [n], to tune the rule on. Without them, it maximises the metric that the probabilities
        themselves predict, which needs no held-out labels but calibrated probabilities.
    metric: a name of east.METRICS, a dotted path, or a function of a Confusion, with its parameters. The default
        average is "positive" (class 1) for two classes and "macro" for more.

    >>> rule = decide(np.array([0.9, 0.7, 0.4, 0.35, 0.1, 0.05]), "f1")
    >>> rule.predict(np.array([0.38, 0.2]))
    array([1, 0])
    """
    p = checked_probabilities(probabilities)
    function, metric_parameters = metrics.parse(metric, metric_parameters)
    if metrics.takes_average(function):
        metric_parameters.setdefault("average", metrics.default_average(p.shape[-1]))
    positive = metric_parameters.get("positive")
    parameters = MetricLoss(function, **metric_parameters).metric_parameters  # checks them
    if positive is not None and not 0 <= positive < p.shape[-1]:
        raise ValueError(f"positive: expected a class from 0 to {p.shape[-1] - 1}, got {positive}")
    score = defined(partial(function, **parameters))
    if labels is None:
        rule, truth = expected(p, score, positive), p
    else:
        y = checked_labels(labels, p)
        rule, truth = tuned(p, y, score, positive), one_hot(y, p.shape[-1]).double()
    return Decision(rule, float(value_of(rule, p, truth, score)), p.shape[-1])


def checked_probabilities(values: Any) -> Tensor:
    """Probabilities [n, d] in float64, on the CPU; [n] and [n, 1] are taken as those of class 1 of two."""
    p = as_cpu_tensor(values)
    if not p.is_floating_point() or p.ndim not in (1, 2) or p.numel() == 0:
        raise ValueError(
            f"probabilities: expected numbers of shape [n] or [n, d], got {p.dtype} of shape {list(p.shape)}"
        )
    p = p.double()
    if not ((p >= -SUM_TOLERANCE) & (p <= 1 + SUM_TOLERANCE)).all():  # NaN fails as well
        raise ValueError(f"probabilities: expected 0 to 1, got {float(p.min()):g} to {float(p.max()):g}: logits?")
    p = p.clamp(0, 1)
    if p.ndim == 1 or p.shape[1] == 1:
        p = p.reshape(-1)
        return torch.stack((1 - p, p), -1)
    sums = p.sum(-1)
    if (sums - 1).abs().max() > SUM_TOLERANCE:
        raise ValueError(
            f"probabilities: expected rows that sum to 1, got sums from {float(sums.min()):g} to {float(sums.max()):g}"
        )
    return p


def as_cpu_tensor(values: Any) -> Tensor:
    """A tensor, array, frame or list as a tensor; arrays that cannot be written to are copied: torch would warn."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    return torch.as_tensor(np.require(values, requirements="W"))


def checked_labels(values: Any, probabilities: Tensor) -> Tensor:
    if not isinstance(values, Tensor) and (kind := np.asarray(values).dtype).kind not in "biuf":
        raise ValueError(f"labels: expected class indices, got {kind}")
    labels = as_cpu_tensor(values)
    if labels.shape != probabilities.shape[:1]:
        raise ValueError(f"labels: expected one per row, [{len(probabilities)}], got shape {list(labels.shape)}")
    return checked_indices("labels", labels, probabilities.shape[-1])
