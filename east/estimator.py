"""EASTClassifier: a network trained on the metric it is judged by, as a scikit-learn classifier.

X is an array of numbers or a frame. Non-numeric columns of a frame are encoded as in files: one 0/1 feature per
category; year, month, weekday and days for dates.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted, validate_data
from torch import Tensor

from east import decisions
from east.lab import models
from east.lab.data.columns import Numeric
from east.lab.data.common import DataError, Part, Splits, listed, shown
from east.lab.data.detection import detect_all
from east.lab.data.encoding import Encoding, typed_columns
from east.lab.settings import sections
from east.lab.training import saved
from east.lab.training.annealing import SCHEDULES, stages_of
from east.lab.training.crossfit import judge_for
from east.lab.training.engine import train
from east.lab.training.population import Outcome, Trial, batches_of
from east.losses import slopes, steps

if TYPE_CHECKING:
    from sklearn.utils import Tags

ROWS = 8192  # that pass through the network at once
LOSSES = {
    "metric": "east.losses.MetricLoss",
    "metric_ce": "east.losses.MetricCrossEntropy",
    "ce": "east.losses.CrossEntropy",
}
LENGTH, PATIENCE = {"steps": 3000, "epochs": 20}, {"steps": 500, "epochs": 5}  # defaults: whichever is longer


class EASTClassifier(ClassifierMixin, BaseEstimator):
    """A multilayer perceptron trained for a metric: by default on metric cross-entropy, for the reasons in
    docs/which_loss.md; with loss="metric" on EAST's 1 - metric of the soft confusion matrix, arXiv 2405.20954.

    metric: a name of east.METRICS, a dotted path, or a function of an east.Confusion; larger is better. The network is
        trained for it, it selects among the initialisations, and `score` returns it.
    average, positive, beta, costs: parameters of the metric. With two classes, f1 and other averages are those of the
        positive one, with more they are macro; f1_macro, or `average`, says it outright. `positive` is a label of y and
        implies average="positive"; by default it is the larger of two numbers, or True, and the rarer of two texts.
        `costs` [d, d] has true classes in rows and predicted ones in columns, in the order of classes_.
    loss: metric_ce (MetricCrossEntropy), metric (EAST's MetricLoss with this `step`) or ce (cross-entropy).
    decision: argmax, or the rule that is best for the metric on the validation rows: plugin uses their labels, expected
        only the probabilities.
    class_weight: {label: weight} or "balanced"; multiplies the sample weights. A metric of recalls, such as
        balanced_accuracy, does not depend on it.
    missing: error rejects missing values; median fills in the training median and adds a feature that marks
        them. In text columns, missing values become a category.
    hidden, dropout: layers of the network. lr, batch_size, weight_decay: for AdamW. loss="metric" needs batches in
        which every class occurs.
    warmup: how many epochs train on cross-entropy first; without them, some metrics never stop predicting one class.
    max_epochs, patience: training ends after `patience` epochs without a better validation score (metric_ce) or a
        lower validation loss (the others); with annealing, that ends a stage. None: the contest's 3,000 and 500
        gradient steps, but at least 20 and 5 epochs; temperatures then get equal shares.
    annealing: geometric, linear, cosine, per_epoch or none; `cooling` is the factor r between stages.
    n_init: initialisations that train together as one population; the best on the validation rows is kept.
    validation_fraction: share of the rows of each class that is held out for early stopping.
    random_state: determines validation rows, initial weights and batches; the global generators are not touched.
    verbose: show a progress bar, in a log plain lines.

    Fitted: classes_, net_ (a torch module, float64), rule_ (the decision), encoding_, outcomes_ (one per
    initialisation), n_iter_ (its epochs), validation_score_, n_features_in_, feature_names_in_.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> EASTClassifier("mcc", random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    _parameter_constraints: ClassVar[dict] = {
        "metric": [str, callable],
        "loss": [StrOptions(set(LOSSES))],
        "step": [StrOptions({*steps.STEPS, "none"})],
        "decision": [StrOptions({"argmax", "plugin", "expected"})],
        "annealing": [StrOptions(set(SCHEDULES))],
        "missing": [StrOptions({"error", "median"})],
        "hidden": ["array-like"],
        "warmup": [Interval(Integral, 0, None, closed="left")],
        **{key: [Interval(Integral, 1, None, closed="left")] for key in ("batch_size", "n_init")},
        **{key: [Interval(Integral, 1, None, closed="left"), None] for key in ("max_epochs", "patience")},
        **{key: [Interval(Real, 0.001, 0.999, closed="both")] for key in ("cooling", "validation_fraction")},
        "dropout": [Interval(Real, 0, 0.99, closed="both")],
        "lr": [Interval(Real, 1e-12, 1000, closed="both")],
        "weight_decay": [Interval(Real, 0, 1000, closed="both")],
    }

    def __init__(
        self,
        metric: str | Callable[..., Tensor] = "f1",
        *,
        average: str | None = None,
        positive: Any = None,
        beta: float | Sequence[float] | Mapping[str, float] | None = None,
        costs: ArrayLike | None = None,
        loss: Literal["metric_ce", "metric", "ce"] = "metric_ce",
        step: str = "linear",
        decision: Literal["argmax", "plugin", "expected"] = "argmax",
        class_weight: Mapping[Any, float] | str | None = None,
        missing: Literal["error", "median"] = "error",
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.1,
        lr: float = 3e-3,
        batch_size: int = 128,
        weight_decay: float = 0.01,
        warmup: int = 0,
        max_epochs: int | None = None,
        patience: int | None = None,
        annealing: sections.Schedule = "geometric",
        cooling: float = 0.7,
        n_init: int = 1,
        validation_fraction: float = 0.2,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ):
        self.metric = metric
        self.average = average
        self.positive = positive
        self.beta = beta
        self.costs = costs
        self.loss = loss
        self.step = step
        self.decision = decision
        self.class_weight = class_weight
        self.missing = missing
        self.hidden = hidden
        self.dropout = dropout
        self.lr = lr
        self.batch_size = batch_size
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.max_epochs = max_epochs
        self.patience = patience
        self.annealing = annealing
        self.cooling = cooling
        self.n_init = n_init
        self.validation_fraction = validation_fraction
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train on X [n, f], numbers or a frame, and y [n], classes of any type; sample_weight [n] is at least 0.

        Rows of weight 0 are ignored. Weights count in the loss, in early stopping and for the decision rule.
        """
        self._validate_params()
        self.encodes_frames_ = has_words(X)
        columns, targets = self._read(X, y, fitting=True)
        check_classification_targets(targets)
        used, weights = self._weights(X, targets, sample_weight)
        self.classes_, labels = np.unique(targets[used], return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"expected at least two classes, got one class: {self.classes_.tolist()}")
        given = {name: getattr(self, name) for name in ("average", "beta", "costs")}
        given = {n: v.tolist() if hasattr(v, "tolist") else v for n, v in given.items() if v is not None}
        self._judge = judge_for(self.metric, given, self.positive, self.classes_, np.bincount(labels))
        slopes.reads_matrix(self._judge.metric, len(self.classes_))  # refuses what is no metric
        random = check_random_state(self.random_state)
        splits = self._split(columns.iloc[used], labels, weights, random)
        config = self._config(len(splits.train), self._judge.parameters)
        trials = [Trial(config, int(seed)) for seed in random.randint(2**31 - 1, size=self.n_init)]
        self.outcomes_ = train(trials, splits, device=self.device, progress=bool(self.verbose))
        self._keep_best(splits)
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Log odds of the second class [n] for two classes, else logits [n, d]."""
        logits = self._logits(X)
        return (logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits).numpy()

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities [n, d] in the order of classes_; overconfident, see scikit-learn's CalibratedClassifierCV."""
        return self._logits(X).softmax(-1).numpy()

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The class of each row by the decision rule: the most probable one, unless `decision` says otherwise."""
        logits = self._logits(X)
        return self.classes_[self.rule_.decide(logits.softmax(-1)).numpy()]

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The metric of the predictions; larger is better."""
        predicted = self.rule_.decide(self._logits(X).softmax(-1))
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        return self._judge.score(predicted, without_gaps(column_or_1d(y)), self.classes_, weights)

    def to_model(self) -> saved.Model:
        """The classifier as a model that can be saved: for `.save(folder)`, east.load, task=predict and east.export.

        Its classes are the labels as text, it takes frames, scales them in float64 and computes in float32.
        """
        check_is_fitted(self)
        config, metric = self.trial_.config, self.metric
        if callable(metric):  # JSON cannot hold a function
            metric = getattr(metric, "__name__", repr(metric))
        about = saved.description(
            config if self.loss == "ce" else config.but(loss=config.loss.but(metric=metric)),
            self.trial_.seed,
            kind="table",
            classes=self._names,
            positive=self._judge.positive,
            inputs_shape=[len(self.mean_)],
            encoding=self.encoding_.to_json(),
            decision=self.decision if self.decision == "argmax" else f"{self.decision}_{metric}",
            rule=self.rule_.to_json(),
        )
        net = saved.with_weights(saved.without_weights(about), self.net_.state_dict())
        return saved.made(about, net, torch.from_numpy(self.mean_), torch.from_numpy(self.scale_), "cpu")

    def __sklearn_tags__(self) -> "Tags":
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "median"
        return tags

    @torch.no_grad()
    def _logits(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        columns, _ = self._read(X)
        inputs = torch.from_numpy((self.encoding_.array(columns, np.float64) - self.mean_) / self.scale_)
        return torch.cat([self.net_(rows) for rows in inputs.split(ROWS)])

    def _read(self, X: Any, y: ArrayLike | None = None, fitting: bool = False) -> tuple[pd.DataFrame, np.ndarray]:
        """Typed columns and, in fit, targets [n]. New rows must have the training columns, which fit detects."""
        advice = f"drop these rows, fill them, or use {type(self).__name__}(missing='median')"
        if not self.encodes_frames_:
            options: dict[str, Any] = {"y": y} if fitting else {"reset": False}
            finite = "allow-nan" if self.missing == "median" else True
            try:
                read = validate_data(self, X, dtype=np.float64, ensure_all_finite=finite, **options)
            except ValueError as error:
                if "X contains NaN" not in str(error):
                    raise
                raise ValueError(f"Input X contains NaN, a missing value: {advice}") from None
            rows, targets = read if fitting else (read, np.empty(0))
            names = [str(name) for name in getattr(self, "feature_names_in_", (f"x{k}" for k in range(rows.shape[1])))]
            if fitting:
                self.encoding_ = Encoding(columns=tuple(Numeric(name=name) for name in names))
            return pd.DataFrame(rows, columns=names), targets
        if not isinstance(X, pd.DataFrame):
            raise ValueError(f"expected a DataFrame with the columns of training, got {type(X).__name__}")
        validate_data(self, X, skip_check_array=True, reset=fitting)
        frame = X.rename(columns=str)
        gaps = [shown(str(name)) for name in frame.columns[frame.isna().any()]]
        if gaps and self.missing == "error":
            raise ValueError(f"Input X contains NaN, a missing value, in {', '.join(gaps)}: {advice}")
        if not fitting:
            try:
                return typed_columns(frame, self.encoding_), np.empty(0)
            except DataError as error:
                raise ValueError(str(error)) from error
        targets = without_gaps(column_or_1d(y, warn=True))
        check_consistent_length(X, targets)
        self.encoding_, typed = detected(frame)
        return typed, targets

    def _weights(
        self, X: ArrayLike, targets: np.ndarray, sample_weight: ArrayLike | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows with a weight above 0, and their sample weights times class weights, scaled to a mean of 1.

        Class weights are made from these rows: "balanced" does not count rows that are ignored.
        """
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        used = weights > 0
        if self.class_weight is not None and used.any():
            weights[used] *= compute_sample_weight(self.class_weight, targets[used])
        used = np.flatnonzero(weights > 0)
        if not len(used):
            raise ValueError("sample_weight: expected at least one row with a weight above zero")
        return used, weights[used] / weights[used].mean()

    def _split(
        self, columns: pd.DataFrame, labels: np.ndarray, weights: np.ndarray, random: np.random.RandomState
    ) -> Splits:
        """Training and validation rows, encoded and scaled; the test part is empty.

        Every class gives its share to validation but keeps at least one training row. If that leaves no validation
        rows, the training rows are used.
        """
        held_out = np.zeros(len(labels), dtype=bool)
        for k in range(len(self.classes_)):
            rows = random.permutation(np.flatnonzero(labels == k))
            held_out[rows[: min(round(self.validation_fraction * len(rows)), len(rows) - 1)]] = True
        train_rows, val_rows = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        about = {"classes": tuple(self._names), "positive": self._judge.positive}
        self.encoding_ = self.encoding_.model_copy(update=about).fitted(columns, train_rows)
        X = self.encoding_.array(columns, np.float64)
        scaler = StandardScaler().fit(X[train_rows])
        self.mean_, self.scale_ = scaler.mean_, scaler.scale_
        inputs = torch.from_numpy(scaler.transform(X)).float()
        row_weights = torch.from_numpy(weights).float() if np.ptp(weights) > 0 else None

        def part(rows: np.ndarray) -> Part:
            index = torch.from_numpy(rows)
            counted = None if row_weights is None else row_weights[index]
            return Part(inputs[index], torch.from_numpy(labels)[index], index, counted)

        parts = part(train_rows), part(val_rows if len(val_rows) else train_rows), part(val_rows[:0])
        zeros = torch.zeros(X.shape[1])
        return Splits(*parts, self.encoding_.classes, "estimator", self._judge.positive, "", "", zeros, zeros + 1)

    def _config(self, rows: int, parameters: dict[str, Any]) -> sections.Science:
        """The trials' config, with the same sections as an east-run config."""
        options: dict[str, Any] = {} if self.loss == "ce" else {"metric": self.metric, "parameters": parameters}
        if self.loss == "metric":
            options["step"] = self.step
        loss = sections.LossSection(name=self.loss, target=LOSSES[self.loss], **options)
        annealing = sections.AnnealingSection()
        if loss.anneals:
            r = float(self.cooling)
            annealing = sections.AnnealingSection(schedule=self.annealing, T0=0.2, r=r, T_min=0.01, patience=2)
        batch = int(min(self.batch_size, rows))
        steps = batches_of(rows, batch)
        patience, length = (max(d["epochs"], math.ceil(d["steps"] / steps)) for d in (PATIENCE, LENGTH))
        return sections.Science(
            dataset=sections.DatasetSection(name="estimator"),
            model=sections.ModelSection(name="mlp", hidden=np.asarray(self.hidden).tolist()),
            loss=loss,
            annealing=annealing,
            protocol=sections.Training(
                name="estimator",
                patience=int(self.patience or patience),
                max_epochs=int(self.max_epochs or length),
                stage_epochs=None if self.max_epochs else math.ceil(length / stages_of(annealing)),
                warmup=int(self.warmup),
            ),
            hyper=sections.Hyper(
                lr=float(self.lr),
                batch_size=batch,
                dropout=float(self.dropout),
                weight_decay=float(self.weight_decay),
            ),
        )

    def _keep_best(self, splits: Splits) -> None:
        """Keep the initialisation and rule with the best validation score; ties go to the lowest loss."""
        finished = [outcome for outcome in self.outcomes_ if outcome.status == "done"]
        if not finished:
            raise RuntimeError(f"no initialisation could be trained: {self.outcomes_[0].error}")
        judged = [(*self._judged(outcome, splits.val), outcome) for outcome in finished]
        self.validation_score_, self.rule_, best = min(judged, key=lambda entry: (-entry[0], entry[2].order))
        self.trial_, self.n_iter_ = best.trial, best.epochs
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then replaced
            self.net_ = models.build(best.trial.config.model, splits.train.inputs.shape[1:], len(self.classes_))
        self.net_.load_state_dict(best.weights)
        # In float32 the last digits of a row's probabilities depend on the other rows; in float64 they do not.
        self.net_.double().eval()

    def _judged(self, outcome: Outcome, val: Part) -> tuple[float, decisions.Rule]:
        """The metric on the validation rows under the best rule of kind `decision`, and that rule."""
        p, kind = torch.from_numpy(outcome.probabilities["val"]), {"plugin": "tuned"}.get(self.decision, self.decision)
        rule = self._judge.rule(kind, p, val.labels, val.weights)
        return self._judge(rule.decide(p), val.labels, p.shape[-1], val.weights), rule

    @property
    def _names(self) -> list[str]:
        return [str(name) for name in self.classes_]


def without_gaps(targets: np.ndarray) -> np.ndarray:
    """The targets; ValueError if one is missing, in the words of scikit-learn's check of arrays."""
    if pd.isna(targets).any():
        raise ValueError("Input y contains NaN, a missing value: drop these rows")
    return targets


def has_words(X: Any) -> bool:
    """True if X is a frame with columns that are not numbers."""
    return isinstance(X, pd.DataFrame) and len(X.select_dtypes(["number", "bool", "boolean"]).columns) < X.shape[1]


def detected(frame: pd.DataFrame) -> tuple[Encoding, pd.DataFrame]:
    """Every column as numbers, words or dates. Numbers are always kept, even if they look like an id."""
    categories, numeric = list(frame.select_dtypes("category")), list(frame.select_dtypes(["number", "bool"]))
    columns, typed, faults = detect_all(frame, categories, numeric)
    if faults:
        raise ValueError(
            "some columns cannot be used as they are; repair them, leave them out, or make them categories "
            f"(.astype('category')):{listed(faults)}"
        )
    encoding = Encoding(columns=tuple(columns))
    for note in encoding.notes:
        warnings.warn(note, stacklevel=4)
    if not encoding.used:
        raise ValueError("expected at least one column of numbers, categories or dates, got none")
    return encoding, typed
