"""MetricClassifier: any scikit-learn classifier, cross-fitted, and decided for the metric that it is judged by."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, MetaEstimatorMixin, _fit_context, clone
from sklearn.utils import Bunch, column_or_1d, get_tags, indexable
from sklearn.utils._param_validation import HasMethods, Interval, StrOptions
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, _routing_enabled, process_routing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, has_fit_parameter
from torch import Tensor

from east.lab.training.crossfit import (
    DecidedClassifier,
    cross_fit,
    folds_of,
    judge_for,
    probabilities_of,
)

if TYPE_CHECKING:
    from sklearn.utils import Tags


@dataclass(eq=False, repr=False)
class MetricClassifier(MetaEstimatorMixin, DecidedClassifier):
    """Any classifier with probabilities, decided for a metric: cross-fitted models and the rule from their rows.

    estimator: a scikit-learn classifier with `predict_proba`, or a list of them, which are stacked.
    metric: a name of east.METRICS, a dotted path, or a function of an east.Confusion; larger is better. By default
        averages are those of the positive one of two classes, and macro with more.
    metric_parameters: such as {"beta": 2} or, for the metric "cost", {"costs": [[0, 1], [10, 0]]} with true classes in
        rows and predicted ones in columns, in the order of classes_.
    positive: the label of the positive class; by default the larger one, of two texts the rarer one.
    cv: the number of stratified folds, in groups if `fit` gets groups, or a splitter of scikit-learn. There are fewer
        folds if a class has fewer rows.
    decision: "expected", the best rule by the probabilities themselves, which must be calibrated: no class weights or
        resampling; "tuned", the best by the labels; "argmax", the most probable class.
    refit: "folds" keeps the models of the folds and averages their probabilities; "all" fits one model on all rows.
    n_jobs: folds that are fitted at the same time, as in scikit-learn. random_state: determines the folds.

    Fitted: classes_, estimators_ (for each classifier its models), weights_ (of the classifiers), rule_,
    oof_probabilities_ [n, d] (NaN for rows in no test fold), oof_score_ (of the rule, on all rows), fold_scores_,
    n_features_in_, feature_names_in_.

    `predict` follows `rule_`, not the largest probability; "tuned" makes oof_score_ slightly optimistic.

    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = MetricClassifier(make_pipeline(StandardScaler(), LogisticRegression()), "mcc", random_state=0).fit(X, y)
    >>> model.oof_score_ > 0.9
    True
    """

    estimator: BaseEstimator | Sequence[BaseEstimator]
    metric: str | Callable[..., Tensor] = "f1"
    _: KW_ONLY
    metric_parameters: Mapping[str, Any] | None = None
    positive: Any = None
    cv: Any = 5
    decision: Literal["expected", "tuned", "argmax"] = "expected"
    refit: Literal["folds", "all"] = "folds"
    n_jobs: int | None = None
    random_state: int | np.random.RandomState | None = None

    _parameter_constraints: ClassVar[dict] = {
        "estimator": [HasMethods(["fit", "predict_proba"]), list, tuple],
        "metric": [str, callable],
        "metric_parameters": [Mapping, None],
        "cv": ["cv_object", Interval(Integral, 2, None, closed="left")],
        "decision": [StrOptions({"expected", "tuned", "argmax"})],
        "refit": [StrOptions({"folds", "all"})],
        "n_jobs": [Integral, None],
        "random_state": ["random_state"],
    }

    @_fit_context(prefer_skip_nested_validation=False)
    def fit(self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None = None, **params: Any) -> Self:
        """Fit on X [n, f], whatever the classifiers take, and y [n].

        sample_weight [n] goes to the classifiers that take it, and counts in the rule and the score.
        params: `groups` [n] for the folds; others go to the classifiers' `fit`. With scikit-learn's metadata routing
        enabled, all go to what requests them.
        """
        if not self._estimators():
            raise ValueError("estimator: expected at least one classifier, got an empty list")
        X, y = indexable(X, y)
        check_classification_targets(y)
        targets = column_or_1d(y, warn=True)
        self.classes_, labels = np.unique(targets, return_inverse=True)
        counts = np.bincount(labels)
        if len(counts) < 2:
            raise ValueError(f"expected at least two classes, got one class: {self.classes_.tolist()}")
        self._judge = judge_for(self.metric, self.metric_parameters, self.positive, self.classes_, counts)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        routed = self._routed(sample_weight, params)
        folds = folds_of(self.cv, X, targets, self.random_state, routed.splitter.split.get("groups"))
        self.estimators_, by_estimator = [], []
        for k, estimator in enumerate(self._estimators()):
            options = routed[f"estimator{k}"].fit
            models, p = cross_fit(estimator, X, targets, self.classes_, folds, options, self.n_jobs)
            self.estimators_.append(models if self.refit == "folds" else [clone(estimator).fit(X, targets, **options)])
            by_estimator.append(p)
        self._decide(np.stack(by_estimator), labels, weights, self.decision)
        self.fold_scores_ = np.array([self._oof_score(test, labels, weights) for _, test in folds])
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(self.estimators_[0][0], name):
                setattr(self, name, getattr(self.estimators_[0][0], name))
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities [n, d] in the order of classes_: the mean over folds, mixed over classifiers."""
        check_is_fitted(self)
        means = [
            np.mean([probabilities_of(m, X, self.classes_) for m in models], axis=0) for models in self.estimators_
        ]
        return np.tensordot(self.weights_, np.stack(means), 1)

    def get_metadata_routing(self) -> MetadataRouter:
        """What takes which metadata of `fit`: this classifier, the splitter, each of the classifiers."""
        fit, split = (MethodMapping().add(caller="fit", callee=callee) for callee in ("fit", "split"))
        router = MetadataRouter(owner=self).add_self_request(self).add(splitter=self.cv, method_mapping=split)
        for k, estimator in enumerate(self._estimators()):
            router.add(**{f"estimator{k}": estimator}, method_mapping=fit)
        return router

    def __sklearn_tags__(self) -> "Tags":
        tags = super().__sklearn_tags__()
        each = [get_tags(estimator).input_tags for estimator in self._estimators()]
        tags.input_tags.sparse = all(t.sparse for t in each)
        tags.input_tags.allow_nan = all(t.allow_nan for t in each)
        return tags

    def _estimators(self) -> list[BaseEstimator]:
        return [*self.estimator] if isinstance(self.estimator, list | tuple) else [self.estimator]

    def _routed(self, sample_weight: ArrayLike | None, params: dict[str, Any]) -> Bunch:
        """Metadata for the splitter's `split` and each classifier's `fit`."""
        weights = {} if sample_weight is None else {"sample_weight": sample_weight}
        if _routing_enabled():
            return process_routing(self, "fit", **weights, **params)
        routed = Bunch(splitter=Bunch(split={"groups": params.pop("groups", None)}))
        for k, estimator in enumerate(self._estimators()):
            taken = weights if has_fit_parameter(estimator, "sample_weight") else {}
            if weights and not taken:
                name = type(estimator).__name__
                warnings.warn(f"{name} takes no sample_weight: only the rule counts it", stacklevel=3)
            routed[f"estimator{k}"] = Bunch(fit=taken | params)
        return routed
