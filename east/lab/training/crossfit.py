"""Cross-fitting: every row's probabilities come from models that did not train on it (out of fold).

A decision rule is found by these probabilities and a score estimated from them. Several classifiers are stacked: the
mixture with the lowest out-of-fold log-loss, a convex problem without hyperparameters.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold, check_cv
from sklearn.utils import _safe_indexing, column_or_1d
from sklearn.utils.multiclass import unique_labels
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import _check_method_params, _check_sample_weight, check_is_fitted
from torch import Tensor

from east import decisions, losses, metrics
from east.confusion import Confusion

Fold = tuple[np.ndarray, np.ndarray]  # training and test rows
LEAST = 1e-9  # probabilities in a logarithm: a forest's can be 0
GAP = 1e-6  # by which the log-loss of a mixture may exceed the lowest one


@dataclass(frozen=True)
class Judge:
    """Judges decisions by a metric of a Confusion, resolved for the classes of a problem."""

    name: str  # with the average that is meant: f1_positive
    parameters: dict[str, Any]
    metric: Callable[[Confusion], Tensor]
    positive: int | None  # the class that a threshold is for

    def __call__(self, predicted: Tensor, labels: Tensor, classes: int, weights: Tensor | None = None) -> float:
        """The metric of predictions [n] on labels [n] with weights [n], by default 1."""
        return float(self.metric(Confusion.from_predictions(predicted, labels, classes, weights)))

    def score(self, predicted: Tensor, targets: np.ndarray, classes: np.ndarray, weights: np.ndarray) -> float:
        """The metric of predictions [n] on targets [n]. Those that are none of the classes count as errors."""
        unseen = np.setdiff1d(unique_labels(classes, targets), classes)  # refuses text where classes are numbers
        index = {label: k for k, label in enumerate([*classes, *unseen])}
        labels = torch.tensor([index[label] for label in targets])
        return self(predicted, labels, len(index), torch.from_numpy(weights))

    def rule(self, decision: str, p: Tensor, labels: Tensor, weights: Tensor | None = None) -> decisions.Rule:
        """The best rule on probabilities [n, d]; only decision="tuned" looks at labels [n]."""
        if decision == "argmax":
            return decisions.Argmax()
        if decision == "tuned":
            return decisions.tuned(p, labels, self.metric, self.positive, weights)
        return decisions.expected(p, self.metric, self.positive, weights)


def judge_for(
    metric: str | Callable[..., Tensor],
    parameters: Mapping[str, Any] | None,
    positive: Any,
    classes: np.ndarray,
    counts: np.ndarray,
) -> Judge:
    """The metric for these classes with these numbers of rows [d].

    positive: a label; its score is meant where the metric averages over classes. Without it: with two classes the
    larger one, of two texts the rarer one; with more, the macro average.
    """
    function, options = metrics.parse(metric, parameters)
    names, accepted = classes.tolist(), inspect.signature(function).parameters
    if metrics.takes_average(function):
        options.setdefault("average", metrics.default_average(len(names)) if positive is None else "positive")
    of_one_class = options.get("average") == "positive"
    index = 1 if len(names) == 2 else None
    if positive is not None:
        if positive not in names:
            raise ValueError(f"positive: expected one of the classes {names}, got {positive!r}")
        index = names.index(positive)
    elif of_one_class and index is None:
        raise ValueError(f"average='positive': expected positive=, one of the classes {names}")
    elif of_one_class and isinstance(names[0], str | bytes):  # the order of texts means nothing
        index = int(counts[1] <= counts[0])
        warnings.warn(f"scored as positive: {names[index]!r}, the rarer class; `positive` sets another", stacklevel=3)
    if "positive" in accepted and (of_one_class or positive is not None):
        options["positive"] = index
    loss = losses.MetricLoss(function, classes=[str(name) for name in names], **options)  # checks the options
    name = getattr(function, "__name__", repr(function))
    name += f"_{options['average']}" if "average" in options else ""
    return Judge(name, options, partial(loss.metric, **loss.metric_parameters), index)


class DecidedClassifier(ClassifierMixin, BaseEstimator):
    """A classifier whose rule for a metric is found on rows out of fold.

    Fitted: classes_, weights_ (of what is stacked), rule_, oof_probabilities_ [n, d] (NaN for rows in no fold),
    oof_score_ (of the rule, on the others).
    """

    def predict_proba(self, X: Any) -> np.ndarray:
        raise NotImplementedError

    def predict(self, X: Any) -> np.ndarray:
        """The class of each row by `rule_`."""
        check_is_fitted(self)
        return self.classes_[self._decided(X).numpy()]

    def score(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The metric of the predictions; larger is better. Labels that were not in training count as errors."""
        decided, weights = self._decided(X), _check_sample_weight(sample_weight, X, dtype=np.float64)
        return self._judge.score(decided, self._targets(y), self.classes_, weights)

    def _decided(self, X: Any) -> Tensor:
        p = torch.from_numpy(self.predict_proba(X))  # first, since it checks that the classifier is fitted
        return self.rule_.decide(p)

    @staticmethod
    def _targets(y: ArrayLike) -> np.ndarray:
        return column_or_1d(y)

    def _decide(self, p: np.ndarray, labels: np.ndarray, weights: np.ndarray, decision: str) -> np.ndarray:
        """Mix probabilities [m, n, d] out of fold, find the rule and score it; the rows that count."""
        self.weights_, self.oof_probabilities_, used = mixture_of(p, labels, weights)
        if decision == "expected":
            decisions.warn_of_shift(
                self.oof_probabilities_[used], labels[used], weights[used], self.classes_, stacklevel=4
            )
        mixed, truth, counted = (torch.from_numpy(v[used]) for v in (self.oof_probabilities_, labels, weights))
        self.rule_ = self._judge.rule(decision, mixed, truth, counted)
        self.oof_score_ = self._oof_score(used, labels, weights)
        return used

    def _oof_score(self, rows: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
        decided = self.rule_.decide(torch.from_numpy(self.oof_probabilities_[rows]))
        truth, counted = torch.from_numpy(labels[rows]), torch.from_numpy(weights[rows])
        return self._judge(decided, truth, len(self.classes_), counted)


def folds_of(cv: Any, X: Any, y: np.ndarray, random_state: Any, groups: ArrayLike | None = None) -> list[Fold]:
    """Training and test rows of each fold, for a splitter of scikit-learn or the number of folds.

    A number is lowered to the rows (or groups) of the rarest class. A class with a single one stays in training.
    """
    if not isinstance(cv, int | np.integer):
        return [*check_cv(cv, y, classifier=True).split(X, y, groups)]
    units = np.arange(len(y)) if groups is None else np.asarray(groups)
    in_class = {label: np.unique(units[y == label]) for label in np.unique(y).tolist()}
    single = np.isin(units, [found[0] for found in in_class.values() if len(found) == 1])
    fewest = min((len(found) for found in in_class.values() if len(found) > 1), default=1)
    folds = min(int(cv), max(2, fewest))
    if folds < cv:
        warnings.warn(f"{folds} folds of {cv}: one class has only {fewest} rows or groups", stacklevel=3)
    if single.any():
        warnings.warn("a class with a single row or group is always in training, never out of fold", stacklevel=3)
    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    splitter = kind(folds, shuffle=True, random_state=random_state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)  # said above
        split = [*splitter.split(X, y, groups)]
    kept = np.flatnonzero(single)
    return [(np.union1d(train, kept), np.setdiff1d(test, kept)) for train, test in split]


def cross_fit(
    estimator: ClassifierMixin,
    X: Any,
    y: np.ndarray,
    classes: np.ndarray,
    folds: Sequence[Fold],
    options: Mapping[str, Any],
    n_jobs: int | None = None,
) -> tuple[list[ClassifierMixin], np.ndarray]:
    """A model for each fold, and the probabilities [n, d] of every row by those that did not train on it.

    A row in several test folds gets their mean, a row in none NaN. options: for `fit`, cut to the training rows.
    """

    def fit(train: np.ndarray, test: np.ndarray) -> tuple[ClassifierMixin, tuple[np.ndarray, np.ndarray]]:
        cut = _check_method_params(X, options, indices=train)
        model = clone(estimator).fit(_safe_indexing(X, train), y[train], **cut)
        return model, (test, probabilities_of(model, _safe_indexing(X, test), classes))

    models, judged = zip(*Parallel(n_jobs=n_jobs)(delayed(fit)(*fold) for fold in folds), strict=True)
    return [*models], out_of_fold(judged, len(y), len(classes))


def out_of_fold(judged: Iterable[tuple[np.ndarray, np.ndarray]], n: int, d: int) -> np.ndarray:
    """The mean probabilities [n, d] of each row over the models that judge it, NaN without any.

    judged: for each model, the numbers [m] of its rows and their probabilities [m, d].
    """
    total, times = np.zeros((n, d)), np.zeros((n, 1))
    for rows, p in judged:
        total[rows] += p
        times[rows] += 1
    with np.errstate(invalid="ignore"):
        return total / times


def probabilities_of(model: ClassifierMixin, X: Any, classes: np.ndarray) -> np.ndarray:
    """The model's probabilities [n, d] in the order of classes, 0 for classes that it did not see."""
    return spread(model.predict_proba(X), model.classes_, classes)


def spread(p: np.ndarray, known: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Probabilities [n, d] of all classes from those of the known ones, 0 for the others."""
    if len(known) == len(classes):
        return p
    every = np.zeros((len(p), len(classes)))
    every[:, np.searchsorted(classes, known)] = p
    return every


def mixture_of(
    p: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weights [m] of a stack, its probabilities [n, d], and the rows that all models have probabilities for.

    p [m, n, d]: out of fold, of each of m models; NaN for rows in no fold. weights [n]: of the rows.
    """
    used = np.flatnonzero(~np.isnan(p).any((0, 2)))
    mixing = mixture_weights(p[:, used, labels[used]], None if weights is None else weights[used])
    return mixing, np.tensordot(mixing, p, 1), used


def mixture_weights(probabilities: np.ndarray, weights: np.ndarray | None = None, steps: int = 10_000) -> np.ndarray:
    """Weights [m] on the simplex that minimise the log-loss of the mixture, by expectation maximisation.

    probabilities [m, n]: of the true class of each row, by each of m models; weights [n] of the rows. A model's gain is
    the mean ratio of its probability to the mixture's: the log-loss is within log(largest gain) of the lowest.
    """
    p, mixture = probabilities.clip(LEAST), np.full(len(probabilities), 1 / len(probabilities))
    rows = np.ones(p.shape[1]) if weights is None else weights
    rows = rows / rows.sum()
    for _ in range(steps):
        gains = (p / (mixture @ p)) @ rows
        if gains.max() <= 1 + GAP:
            break
        mixture = mixture * gains
    return mixture / mixture.sum()
