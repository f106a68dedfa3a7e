"""From probabilities to classes: decision rules, and the search for the best rule for a metric, with or without labels.

Plug-in (`tuned`): the rule that maximises the metric on labelled rows (Narasimhan et al. 2014; Koyejo et al. 2014).
Expected (`expected`): the same search with the probabilities themselves in place of the labels.
Both use truth [n, d], the share of each class in each row: one-hot labels, or the probabilities; the shares of a
weighted row sum to its weight. With two classes all thresholds are compared. With more, the counts of a rule give the
metric's slopes G, and these give the next rule, argmax_j sum_k p_k G_kj, until nothing changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from east import metrics
from east.confusion import Confusion, check_range
from east.losses import MetricLoss, slopes

if TYPE_CHECKING:
    from east.lab.training.scores import StoredRule

LOG_WEIGHTS = torch.linspace(-3, 3, 25, dtype=torch.float64)
SWEEPS = 5
ROUNDS = 50
SUM_TOLERANCE = 1e-3  # by which probabilities may miss their range, and rows a sum of 1
SHIFT = 0.5  # a class's mean probability may differ from its share by this part of the share before a warning
NEARLY_ALL = 0.1  # a rule is all but constant if it finds at most this part of what is outside of its main class

Metric = Callable[[Confusion], Tensor]


@dataclass(frozen=True)
class Argmax:
    """The most probable class; ties go to the first. Other rules replace the probabilities by other scores."""

    def scores(self, probabilities: Tensor) -> Tensor:
        """Scores [..., d] of probabilities [..., d]."""
        return probabilities

    def decide(self, probabilities: Tensor) -> Tensor:
        """Classes [...] of probabilities [..., d]: those with the highest score."""
        return self.scores(probabilities.double()).argmax(-1)

    def to_json(self) -> StoredRule | None:
        return None


@dataclass(frozen=True)
class Threshold(Argmax):
    """For two classes: the positive one where its probability is at least `threshold`."""

    threshold: float
    positive: int = 1

    def scores(self, probabilities: Tensor) -> Tensor:
        above = probabilities[..., self.positive] - self.threshold
        return torch.stack((-above, above) if self.positive else (above, -above), -1)

    def decide(self, probabilities: Tensor) -> Tensor:
        reached = probabilities[..., self.positive].double() >= self.threshold
        return torch.where(reached, self.positive, 1 - self.positive)

    def to_json(self) -> StoredRule:
        return {"threshold": self.threshold}


@dataclass(frozen=True)
class Affine(Argmax):
    """argmax_k scale_k p_k + shift_k: class weights or, with a shift, the best rule for every metric of the margins."""

    scale: tuple[float, ...]
    shift: tuple[float, ...] = ()

    def scores(self, probabilities: Tensor) -> Tensor:
        scaled = probabilities * probabilities.new_tensor(self.scale)
        return scaled + probabilities.new_tensor(self.shift) if self.shift else scaled

    def to_json(self) -> StoredRule:
        return {"scale": [*self.scale], "shift": [*self.shift]} if self.shift else {"weights": [*self.scale]}


@dataclass(frozen=True)
class Gains(Argmax):
    """argmax_j sum_k p_k gains_kj, for metrics to which it matters which wrong class is predicted, such as costs."""

    gains: tuple[tuple[float, ...], ...]

    def scores(self, probabilities: Tensor) -> Tensor:
        return probabilities @ probabilities.new_tensor(self.gains)

    def to_json(self) -> StoredRule:
        return {"gains": [[*row] for row in self.gains]}


Rule = Argmax  # any of them


def from_json(rule: StoredRule | None, positive: int | None = None) -> Rule:
    """The rule that a record or a saved model holds. positive: the class that a threshold is for, by default 1."""
    match rule:
        case None:
            return Argmax()
        case {"threshold": threshold}:
            return Threshold(float(threshold), 1 if positive is None else positive)
        case {"weights": scale} | {"scale": scale}:
            return Affine(tuple(scale), tuple(rule.get("shift", ())))
        case {"gains": gains}:
            return Gains(tuple(map(tuple, gains)))
    raise ValueError(
        f"rule: expected threshold, weights, scale and shift, or gains, got {', '.join(rule) or 'nothing'}"
    )


def rule_in_words(rule: Rule, classes: Sequence[str]) -> str:
    """A rule in words, with p_<class> for the probabilities.

    >>> rule_in_words(Threshold(0.25, positive=1), ("ok", "fraud"))
    'fraud if p_fraud >= 0.25, else ok'
    """
    match rule:
        case Threshold(threshold, positive):
            yes, no = classes[positive], classes[1 - positive]
            return f"{yes} if p_{yes} >= {threshold:.6g}, else {no}"
        case Affine(scale, shift):
            added = [f" {b:+.4g}" for b in shift] or [""] * len(scale)
            return f"largest of {', '.join(f'{a:.4g} p_{k}{b}' for a, b, k in zip(scale, added, classes, strict=True))}"
        case Gains():
            return "largest expected gain, by the matrix in model.json"
        case _:
            return "largest probability"


def tuned(
    probabilities: Tensor, labels: Tensor, metric: Metric, positive: int | None = None, weights: Tensor | None = None
) -> Rule:
    """The rule that maximises the metric on probabilities [n, d] with labels [n] and weights [n], by default 1.

    With more than two classes, it is the best on these rows of argmax, the expected rule, the fixed points on the
    labels, and coordinate ascent on class weights; ties go to the first.
    """
    p, classes = probabilities.double(), probabilities.shape[-1]
    truth = one_hot(labels, classes).double()
    truth = truth if weights is None else truth * weights.double().unsqueeze(-1)
    found = best_rule(p, truth, metric, positive)
    if classes == 2:
        return found
    metric, starts = defined(metric), (torch.zeros(classes), -p.mean(0).clamp_min(1e-6).log())
    rules = [Argmax(), expected(p, metric, weights=weights), found]
    return first_best([*rules, *(best_weights(p, truth, metric, start) for start in starts)], p, truth, metric)


def expected(probabilities: Tensor, metric: Metric, positive: int | None = None, weights: Tensor | None = None) -> Rule:
    """The rule that maximises the metric of the counts expected under probabilities [n, d]: no labels needed."""
    p = probabilities.double()
    return best_rule(p, p if weights is None else p * weights.double().unsqueeze(-1), metric, positive)


def best_rule(p: Tensor, truth: Tensor, metric: Metric, positive: int | None) -> Rule:
    """The best threshold for two classes; for more, the best of argmax and the fixed points."""
    in_cells, metric = slopes.reads_matrix(metric, p.shape[-1]), defined(metric)
    if p.shape[-1] == 2:
        return best_threshold(p, truth, metric, 1 if positive is None else positive)
    return first_best([Argmax(), fixed_point(p, truth, metric, in_cells)], p, truth, metric)


def defined(metric: Metric) -> Metric:
    """The metric with 0 where it is undefined (0/0), as east's own metrics score it: NaN has no place in a ranking."""

    def score(c: Confusion) -> Tensor:
        value = metric(c)
        return value.masked_fill(value.isnan(), 0.0)

    return score


def first_best(rules: Sequence[Rule], p: Tensor, truth: Tensor, metric: Metric) -> Rule:
    """The best rule, or the first of those that are equal up to rounding."""
    values = torch.stack([metric(Confusion.from_shares(rule.decide(p), truth)) for rule in rules])
    return rules[int((values >= values.max() - 1e-12).int().argmax())]


def best_threshold(p: Tensor, truth: Tensor, metric: Metric, positive: int) -> Threshold:
    """The threshold t at which `p >= t` maximises the metric; of several, the nearest to 0.5.

    Thresholds are the midpoints between neighbouring values of p[:, positive], and between the extreme ones and 1 or
    0: "never" and "always".
    """
    values, order = p[:, positive].sort(descending=True, stable=True)
    last = torch.cat((values.diff() != 0, torch.tensor([True])))  # of equal values
    reached = torch.cat((truth.new_zeros(1, 2), truth[order].cumsum(0)[last]))  # at each threshold, by true class
    cells = torch.stack((reached[-1] - reached, reached), -1)
    score = metric(Confusion.from_matrix(cells if positive else cells.flip(-1)))
    values = values[last]
    above = torch.cat((values[:1].clamp_min(1), values))
    below = torch.cat((values, values[-1:].clamp_max(0)))
    thresholds = (above + below) / 2
    # The midpoint of two adjacent floats can round to the lower one, which must stay below the threshold.
    thresholds[:-1] = torch.where(thresholds[:-1] <= below[:-1], above[:-1], thresholds[:-1])
    thresholds[0] = max(float(thresholds[0]), np.nextafter(float(values[0]), 2))  # not even a probability of 1
    best = thresholds[score >= score.max() - 1e-12]
    return Threshold(float(best[(best - 0.5).abs().argmin()]), positive)


def fixed_point(p: Tensor, truth: Tensor, metric: Metric, in_cells: bool) -> Rule:
    """The best rule met while iterating: counts give slopes, slopes give the next rule, and that gives new counts.

    Starts: soft counts; argmax, a trap where it never predicts some class; and predictions as frequent as the classes.
    The iteration can cycle, and G-mean jumps from one class to the next, so two of the walks are damped, as
    Frank-Wolfe's (Narasimhan et al. 2015). All W walks advance together, in a leading dimension.
    """
    shares = (truth.sum(0) / truth.sum()).clamp(0, 1)
    quantiles = torch.stack([p[:, k].quantile(1 - share) for k, share in enumerate(shares)])
    first = [Argmax(), Affine(tuple((1 / quantiles.clamp_min(1e-12)).tolist()))]
    best = first_best(first, p, truth, metric)
    by_argmax, by_frequency = (Confusion.from_shares(rule.decide(p), truth) for rule in first)
    highest = float(torch.maximum(metric(by_argmax), metric(by_frequency)))
    soft = Confusion((truth * p).sum(0), truth.sum(0), truth.sum(-1) @ p, lambda: truth.T @ p)
    starts = (soft, by_argmax, by_frequency, soft, by_frequency)
    damped = torch.tensor([False, False, False, True, True])
    counts = torch.stack([slopes.counts_of(start, in_cells) for start in starts])
    for step in range(ROUNDS):
        rules = next_rules(counts, metric, in_cells)
        scores = p @ rules if in_cells else torch.addcmul(rules[:, None, 1], p, rules[:, None, 0])
        confusion = Confusion.from_shares(scores.argmax(-1), truth)
        values = metric(confusion)
        if float(values.max()) > highest + 1e-12:
            highest, chosen = float(values.max()), map(tuple, rules[int(values.argmax())].tolist())
            best = Gains(tuple(chosen)) if in_cells else Affine(*chosen)
        previous = counts
        step_size = torch.where(damped, 1 / (step + 2), 1.0)[:, None, None]
        counts = counts.lerp(slopes.counts_of(confusion, in_cells), step_size.to(counts))
        if torch.equal(counts, previous):
            break
    return best


def next_rules(counts: Tensor, metric: Metric, in_cells: bool) -> Tensor:
    """Rules from the metric's slopes at W counts: gains [W, d, d], or scale and shift [W, 2, d]; scaled to at most 1.

    Slopes that are not finite become 0: such a walk ends in the first class, and is no better than argmax.
    """
    _, rules = slopes.by_autograd(metric, counts, in_cells)
    largest = rules.abs().amax((-2, -1), keepdim=True)
    return torch.where(largest.isfinite(), rules / largest.clamp_min(1e-30), 0.0)


def best_weights(p: Tensor, truth: Tensor, metric: Metric, start: Tensor) -> Affine:
    """Weights [d] such that argmax_k w_k p_k maximises the metric: coordinate ascent on a grid of log w_k.

    A class without rows keeps a weight of 1: nothing is known about its best weight.
    """
    logs, present = torch.log(p.clamp_min(1e-30)), truth.sum(0) > 0
    weights = torch.where(present, start.double(), 0.0)
    scores, ranked = two_best(logs + weights)  # so that trying a class costs O(n), not O(n d)
    best = float(metric(Confusion.from_shares(ranked[:, 0], truth)))
    for _ in range(SWEEPS):
        previous = best
        for k in present.nonzero().flatten().tolist():
            leads = ranked[:, 0] == k  # its rival is then the second
            rival_score, rival = (torch.where(leads, x[:, 1], x[:, 0]) for x in (scores, ranked))
            score = logs[:, k] + LOG_WEIGHTS[:, None]
            # Ties go to the lower index, as in argmax.
            wins = (score > rival_score) | ((score == rival_score) & (k < rival))
            values = metric(Confusion.from_shares(torch.where(wins, k, rival), truth))
            if float(values.max()) > best + 1e-12:
                best = float(values.max())
                weights[k] = LOG_WEIGHTS[values.argmax()]
                changed = (ranked == k).any(-1) | (logs[:, k] + weights[k] >= scores[:, 1])
                scores[changed], ranked[changed] = two_best(logs[changed] + weights)
        if best == previous:
            break
    return Affine(tuple(weights.exp().tolist()))


def two_best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The two highest scores [n, 2] of each row and their classes [n, 2]; ties go to the lower index."""
    first_score, first = scores.max(-1, keepdim=True)
    second_score, second = scores.scatter(-1, first, -torch.inf).max(-1, keepdim=True)
    return torch.cat((first_score, second_score), -1), torch.cat((first, second), -1)


@dataclass(frozen=True)
class Decision:
    """A rule and the value of the metric under it: on the labels it was tuned on, or as expected without labels."""

    rule: Rule
    value: float
    classes: int

    def predict(self, probabilities: Any) -> Any:
        """Classes [n] of probabilities [n], [n, 2] or [n, d]: a tensor if they are one, else a NumPy array."""
        return self._answer(self.rule.decide, probabilities)

    __call__ = predict

    def margin(self, probabilities: Any) -> Any:
        """By how much the best class of each row [n] leads in the rule's scores; 0 at a threshold."""
        return self._answer(lambda p: -self.rule.scores(p).topk(2).values.diff().squeeze(-1), probabilities)

    def _answer(self, question: Callable[[Tensor], Tensor], probabilities: Any) -> Any:
        p = checked_probabilities(probabilities)
        if p.shape[-1] != self.classes:
            raise ValueError(f"probabilities: expected {self.classes} classes, got {p.shape[-1]}")
        answer = question(p)
        return answer if isinstance(probabilities, Tensor) else answer.numpy()


def decide(
    probabilities: Any,
    metric: str | metrics.Metric = "f1",
    labels: Any = None,
    at_least: Mapping[str, float] | None = None,
    **metric_parameters: Any,
) -> Decision:
    """The best decision rule for a metric, given the probabilities of any model.

    The rows must not have trained the model, whose probabilities are too sure of those: out-of-fold probabilities of
    the training rows are best. Class weights and resampling shift the probabilities; a rule without labels believes
    them, and with labels a class whose mean probability is far from its share brings a warning. With two classes no
    threshold is better than the rule's; with more, a better rule may exist.

    probabilities: [n, d] with rows that sum to 1, or [n] of the positive class of two; array or tensor.
    labels: class indices [n], to tune the rule on. Without them, it maximises the metric that the probabilities
        themselves predict, which must be calibrated.
    metric: a name of east.METRICS, a dotted path, or a function of a Confusion, with its parameters.
    at_least: other metrics and their lowest values, for two classes: decide(p, "precision", at_least={"recall": 0.9}).

    >>> rule = decide(np.array([0.9, 0.7, 0.4, 0.35, 0.1, 0.05]), "f1")
    >>> rule.predict(np.array([0.38, 0.2]))
    array([1, 0])
    """
    p = checked_probabilities(probabilities)
    classes, positive = p.shape[-1], metric_parameters.get("positive")
    if positive is not None and not 0 <= positive < classes:
        raise ValueError(f"positive: expected a class from 0 to {classes - 1}, got {positive}")
    name, score = measure(metric, metric_parameters, classes)
    for other, bound in (at_least or {}).items():
        score = bounded(score, other, bound, classes, positive)
    if labels is None:
        rule, truth = expected(p, score, positive), p
    else:
        y = checked_labels(labels, p)
        warn_of_shift(p.numpy(), y.numpy(), np.ones(len(y)), np.arange(classes), stacklevel=3)
        rule, truth = tuned(p, y, score, positive), one_hot(y, classes).double()
    c = Confusion.from_shares(rule.decide(p), truth)
    value = float(score(c))
    if value == -np.inf:
        raise ValueError(f"at_least: expected bounds that some threshold meets, got {dict(at_least or {})}")
    warn_of_one_class(name, c.predicted, c.actual)
    return Decision(rule, value, classes)


def measure(metric: str | metrics.Metric, parameters: Mapping[str, Any], classes: int) -> tuple[str, Metric]:
    """A metric's name and its function of a Confusion, with the parameters checked and the average that is meant."""
    function, options = metrics.parse(metric, parameters)
    if metrics.takes_average(function):
        options.setdefault("average", metrics.default_average(classes))
    options = MetricLoss(function, **options).metric_parameters  # checks them
    return getattr(function, "__name__", repr(function)), defined(partial(function, **options))


def bounded(score: Metric, name: str, bound: float, classes: int, positive: int | None) -> Metric:
    """The metric, and -infinity where another one is below its bound; only with two classes is every rule compared."""
    if classes != 2:
        raise ValueError(f"at_least: expected two classes, got {classes}")
    of_class = positive is not None and metrics.takes_average(metrics.parse(name)[0])
    _, other = measure(name, {"positive": positive} if of_class else {}, classes)
    return lambda c: torch.where(other(c) >= bound - 1e-12, score(c), -torch.inf)


def warn_of_shift(p: np.ndarray, labels: np.ndarray, weights: np.ndarray, names: np.ndarray, stacklevel: int) -> None:
    """Warn if the mean probability of a class is far from its share: a rule without labels believes the probabilities.

    p [n, d], labels and weights [n], names [d].
    """
    share = np.bincount(labels, weights, len(names)) / weights.sum()
    mean = weights @ p / weights.sum()
    error = np.sqrt((share * (1 - share)).clip(1 / len(p)) / len(p))  # of the share itself
    k = int(np.argmax(np.abs(mean - share) / np.maximum(share, error)))
    if abs(mean[k] - share[k]) > max(SHIFT * share[k], 4 * error[k]):
        warnings.warn(
            f"the mean probability of {names.tolist()[k]!r} is {mean[k]:.3g}, but its share is {share[k]:.3g}: class "
            "weights, resampling or too little training? Only a rule that is tuned on labels needs no calibrated "
            "probabilities",
            stacklevel=stacklevel,
        )


def warn_of_one_class(metric: str, predicted: Tensor, actual: Tensor) -> None:
    """Warn if the best rule predicts one class, or all but; counts [d]."""
    main, rows = int(predicted.argmax()), float(actual.sum())
    if rows - predicted[main] <= NEARLY_ALL * (rows - actual[main]):
        warnings.warn(
            f"the best rule for {metric} gives {float(predicted[main]):,.0f} of {rows:,.0f} rows to class {main}: it "
            "rewards a few safe decisions; choose another metric, or bound a second one by at_least",
            stacklevel=3,
        )


def checked_probabilities(values: Any) -> Tensor:
    """Probabilities [n, d] in float64, on the CPU; [n] and [n, 1] are taken as those of class 1 of two."""
    given = as_cpu_tensor(values)
    if given.is_complex() or given.ndim not in (1, 2) or given.numel() == 0:
        raise ValueError(
            f"probabilities: expected numbers of shape [n] or [n, d], got {given.dtype} of shape {list(given.shape)}"
        )
    p, rounding = given.double(), torch.finfo(given.dtype).eps if given.is_floating_point() else 0
    tolerance = max(SUM_TOLERANCE, rounding)  # bfloat16 rounds by more
    if not ((p >= -tolerance) & (p <= 1 + tolerance)).all():  # NaN fails as well
        raise ValueError(f"probabilities: expected 0 to 1, got {float(p.min()):g} to {float(p.max()):g}: logits?")
    p = p.clamp(0, 1).reshape(len(p), -1)
    if p.shape[1] == 1:
        return torch.cat((1 - p, p), -1)
    sums = p.sum(-1)
    if (sums - 1).abs().max() > tolerance:
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
    return check_range("labels", labels, probabilities.shape[-1])
