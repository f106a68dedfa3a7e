"""EASTClassifier: networks for the metric that they are judged by, as a scikit-learn classifier.

X is an array of numbers or a frame. Non-numeric columns of a frame are encoded as in files: one 0/1 feature per
category; year, month, weekday and days for dates.
"""

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils._param_validation import Interval, StrOptions
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_consistent_length, check_is_fitted, validate_data
from torch import Tensor

from east.lab.data.columns import Numeric
from east.lab.data.common import DataError, Part, Splits, listed, shown
from east.lab.data.detection import detect_all
from east.lab.data.encoding import Encoding, typed_columns
from east.lab.settings import settings as sections
from east.lab.training import saved
from east.lab.training.annealing import SCHEDULES, stages_of
from east.lab.training.crossfit import DecidedClassifier, Fold, folds_of, judge_for
from east.lab.training.ensemble import Mixture, cross_fit_networks
from east.lab.training.population import Trial, batches_of
from east.losses import slopes, steps

if TYPE_CHECKING:
    from sklearn.utils import Tags

ROWS = 8192  # that pass through the network at once
LOSSES = {
    "metric": "east.losses.MetricLoss",
    "metric_ce": "east.losses.MetricCrossEntropy",
    "ce": "east.losses.CrossEntropy",
}
RULES = {"plugin": "tuned"}  # decisions by the name that MetricClassifier gives them
MOST_NUMBERS = 10**8  # of sparse rows that are made dense
LENGTH, PATIENCE = {"steps": 3000, "epochs": 20}, {"steps": 500, "epochs": 5}  # defaults: whichever is longer


@dataclass(eq=False, repr=False)
class EASTClassifier(DecidedClassifier):
    """Perceptrons that differ in fold and seed, averaged, and decided for a metric; docs/which_loss.md has the reasons.

    Each network trains on all folds but one, which it is stopped on, so the rule is found on rows out of fold.

    metric: a name of east.METRICS, a dotted path, or a function of an east.Confusion; larger is better. The rule is
        made for it, `score` returns it, and the losses metric and metric_ce train for it.
    average, positive, beta, costs: parameters of the metric. By default averages are those of the positive one of two
        classes, and macro with more. `positive` is a label of y and implies average="positive"; by default it is the
        larger of two numbers, or True, and the rarer of two texts. `costs` [d, d] has true classes in rows and
        predicted ones in columns, in the order of classes_.
    members, folds: how many networks, and folds of the rows; fewer if a class has fewer rows. members=1 is a single
        network, stopped on a share of the rows, `validation_fraction`, on which its rule is found.
    loss: ce (cross-entropy), metric_ce (MetricCrossEntropy) or metric (EAST's MetricLoss with this `step`, arXiv
        2405.20954). None: ce, for a single network metric_ce.
    decision: argmax, or the best rule for the metric on the rows out of fold: plugin uses their labels, expected only
        the probabilities. None: expected, for a single network argmax.
    class_weight: {label: weight} or "balanced"; multiplies the sample weights.
    missing: error rejects missing values; median fills them and adds a feature that marks them. In text columns they
        are a category.
    hidden, dropout: layers of a network. None: (64, 32) and 0.25, for a single network (128, 64) and 0.1.
    lr, batch_size, weight_decay: for AdamW. loss="metric" needs batches in which every class occurs.
    warmup: how many epochs train on cross-entropy first; without them, some metrics never stop predicting one class.
    max_epochs, patience: training ends after `patience` epochs without a better validation score (metric_ce) or loss
        (the others); with annealing, that ends a stage. None: 3,000 and 500 gradient steps, but at least 20 and 5
        epochs; temperatures then get equal shares.
    annealing: geometric, linear, cosine, per_epoch or none; `cooling` is the factor r between stages.
    random_state: determines folds, initial weights and batches; the global generators are not touched.
    verbose: show a progress bar, in a log plain lines.

    Fitted: classes_, net_ (a torch module, float64: scaled rows to probabilities), rule_ (the decision), encoding_,
    outcomes_ (one per network), n_iter_ (the most epochs of a network), folds_, oof_probabilities_ [n, d] (NaN for rows
    in no fold), oof_score_ (the metric on the others; slightly optimistic, as a network is stopped on the fold that it
    judges), n_features_in_, feature_names_in_. Sparse rows are made dense, up to 100 million numbers.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> EASTClassifier("mcc", random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    metric: str | Callable[..., Tensor] = "f1"
    _: KW_ONLY
    average: str | None = None
    positive: Any = None
    beta: float | Sequence[float] | Mapping[str, float] | None = None
    costs: ArrayLike | None = None
    members: int = 10
    folds: int = 5
    loss: Literal["metric_ce", "metric", "ce"] | None = None
    step: str = "linear"
    decision: Literal["argmax", "plugin", "expected"] | None = None
    class_weight: Mapping[Any, float] | str | None = None
    missing: Literal["error", "median"] = "error"
    hidden: Sequence[int] | None = None
    dropout: float | None = None
    lr: float = 3e-3
    batch_size: int = 128
    weight_decay: float = 0.01
    warmup: int = 0
    max_epochs: int | None = None
    patience: int | None = None
    annealing: sections.Schedule = "geometric"
    cooling: float = 0.7
    validation_fraction: float = 0.2
    random_state: int | np.random.RandomState | None = None
    device: str = "auto"
    verbose: bool = False

    _parameter_constraints: ClassVar[dict] = {
        "metric": [str, callable],
        "loss": [StrOptions(set(LOSSES)), None],
        "step": [StrOptions({*steps.STEPS, "none"})],
        "decision": [StrOptions({"argmax", "plugin", "expected"}), None],
        "annealing": [StrOptions(set(SCHEDULES))],
        "missing": [StrOptions({"error", "median"})],
        "hidden": ["array-like", None],
        **{
            key: [Interval(Integral, least, None, closed="left")]
            for key, least in (("warmup", 0), ("batch_size", 1), ("members", 1), ("folds", 2))
        },
        **{key: [Interval(Integral, 1, None, closed="left"), None] for key in ("max_epochs", "patience")},
        **{key: [Interval(Real, 0.001, 0.999, closed="both")] for key in ("cooling", "validation_fraction")},
        "dropout": [Interval(Real, 0, 0.99, closed="both"), None],
        "lr": [Interval(Real, 1e-12, 1000, closed="both")],
        "weight_decay": [Interval(Real, 0, 1000, closed="both")],
    }

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
        splits = self._whole(columns.iloc[used], labels, weights)
        folds = self._folds(labels, random)
        config = self._config(min(len(train) for train, _ in folds), self._judge.parameters)
        self.trial_ = Trial(config, int(random.randint(2**31 - 1)))
        networks = cross_fit_networks(
            self.trial_, splits, folds, self.members, device=self.device, progress=bool(self.verbose)
        )
        self.folds_, self.outcomes_ = len(folds), networks.outcomes
        self.n_iter_ = max(outcome.epochs for outcome in networks.outcomes)
        # In float32 the last digits of a row's probabilities depend on the other rows; in float64 they do not.
        self.net_ = Mixture(dict.fromkeys(networks.predictors, 1 / len(networks.predictors))).double().eval()
        self._decide(networks.held_out[None], labels, weights, RULES.get(self._decision, self._decision))
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Log odds of the second class [n] for two classes, else logarithms of the probabilities [n, d]."""
        logits = np.log(self.predict_proba(X).clip(np.finfo(float).tiny))
        return logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits

    @torch.no_grad()
    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities [n, d] in the order of classes_: the mean over the networks."""
        check_is_fitted(self)
        columns, _ = self._read(X)
        inputs = torch.from_numpy((self.encoding_.features(columns, np.float64).numpy() - self.mean_) / self.scale_)
        return torch.cat([self.net_(rows) for rows in inputs.split(ROWS)]).numpy()

    def to_model(self) -> saved.Model:
        """The classifier as a model that can be saved: for `.save(folder)`, east.load, task=predict and east.export.

        Its classes are the labels as text, it takes frames, scales them in float64 and computes in float32.
        """
        check_is_fitted(self)
        config, metric = self.trial_.config, self.metric
        if callable(metric):  # JSON cannot hold a function
            metric = getattr(metric, "__name__", repr(metric))
        about = saved.description(
            config if self._loss == "ce" else config.but(loss=config.loss.but(metric=metric)),
            self.trial_.seed,
            kind="table",
            classes=self._names,
            positive=self._judge.positive,
            inputs_shape=[len(self.mean_)],
            encoding=self.encoding_.to_json(),
            decision=self._decision if self._decision == "argmax" else f"{self._decision}_{metric}",
            rule=self.rule_.to_json(),
        )
        mean, std = torch.from_numpy(self.mean_), torch.from_numpy(self.scale_)
        return saved.made(about, copy.deepcopy(self.net_).float(), mean, std, "cpu")

    def __sklearn_tags__(self) -> "Tags":
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing == "median"
        tags.input_tags.sparse = True
        return tags

    @property
    def _decision(self) -> str:
        return self.decision or ("expected" if self.members > 1 else "argmax")

    @property
    def _loss(self) -> str:
        return self.loss or ("ce" if self.members > 1 else "metric_ce")

    def _read(self, X: Any, y: ArrayLike | None = None, fitting: bool = False) -> tuple[pd.DataFrame, np.ndarray]:
        """Typed columns and, in fit, targets [n]. New rows must have the training columns, which fit detects."""
        advice = f"drop these rows, fill them, or use {type(self).__name__}(missing='median')"
        if not self.encodes_frames_:
            options: dict[str, Any] = {"y": y} if fitting else {"reset": False}
            options |= {"dtype": np.float64, "ensure_all_finite": "allow-nan" if self.missing == "median" else True}
            try:
                read = validate_data(self, X, accept_sparse="csr", **options)
            except ValueError as error:
                if "X contains NaN" not in str(error):
                    raise
                raise ValueError(f"Input X contains NaN, a missing value: {advice}") from None
            rows, targets = read if fitting else (read, np.empty(0))
            if not isinstance(rows, np.ndarray):
                if math.prod(rows.shape) > MOST_NUMBERS:
                    raise ValueError(f"sparse X: made dense up to {MOST_NUMBERS:,} numbers, got the shape {rows.shape}")
                rows = rows.toarray()
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

    def _whole(self, columns: pd.DataFrame, labels: np.ndarray, weights: np.ndarray) -> Splits:
        """All rows, encoded and scaled, as training rows; the other parts are empty."""
        positive, everything = self._judge.positive, np.arange(len(labels))
        about = {"classes": tuple(self._names), "positive": positive}
        self.encoding_ = self.encoding_.model_copy(update=about).fitted(columns)
        X = self.encoding_.features(columns, np.float64).numpy()
        scaler = StandardScaler().fit(X)
        self.mean_, self.scale_ = scaler.mean_, scaler.scale_
        counted = torch.from_numpy(weights).float() if np.ptp(weights) > 0 else None
        inputs, zeros = torch.from_numpy(scaler.transform(X)).float(), torch.zeros(X.shape[1])
        whole = Part(inputs, torch.from_numpy(labels), torch.from_numpy(everything), counted)
        none = Part(inputs[:0], whole.labels[:0], whole.index[:0], None if counted is None else counted[:0])
        return Splits(whole, none, none, self.encoding_.classes, "estimator", positive, "", "", zeros, zeros + 1)

    def _folds(self, labels: np.ndarray, random: np.random.RandomState) -> list[Fold]:
        """The rows that each network trains on and is stopped on; all rows for both if every class has a single one.

        Of a single network's validation rows, every class gives its share but keeps at least one training row.
        """
        everything = np.arange(len(labels))
        if self.members > 1 and np.bincount(labels).max() > 1:
            return folds_of(min(self.folds, self.members), everything, labels, random)
        of_class = [random.permutation(np.flatnonzero(labels == k)) for k in range(len(self.classes_))]
        held = [rows[: min(round(self.validation_fraction * len(rows)), len(rows) - 1)] for rows in of_class]
        val = np.sort(np.concatenate(held))
        return [(np.setdiff1d(everything, val), val if len(val) else everything)]

    def _config(self, rows: int, parameters: dict[str, Any]) -> sections.Science:
        """The trials' config, with the same sections as an east-run config."""
        hidden, dropout = ((64, 32), 0.25) if self.members > 1 else ((128, 64), 0.1)
        options: dict[str, Any] = {"metric": self.metric, "parameters": parameters}
        options = {"ce": {}, "metric": options | {"step": self.step}}.get(self._loss, options)
        loss = sections.LossSection(name=self._loss, target=LOSSES[self._loss], **options)
        annealing: dict[str, Any] = {}
        if loss.anneals:
            annealing = {"schedule": self.annealing, "T0": 0.2, "r": float(self.cooling), "T_min": 0.01, "patience": 2}
        batch = int(min(self.batch_size, rows))
        steps, cooled = batches_of(rows, batch), sections.AnnealingSection(**annealing)
        patience, length = (max(d["epochs"], math.ceil(d["steps"] / steps)) for d in (PATIENCE, LENGTH))
        return sections.Science(
            dataset=sections.DatasetSection(name="estimator"),
            model=sections.ModelSection(
                name="mlp", hidden=np.asarray(hidden if self.hidden is None else self.hidden).tolist()
            ),
            loss=loss,
            annealing=cooled,
            protocol=sections.Training(
                name="estimator",
                patience=int(self.patience or patience),
                max_epochs=int(self.max_epochs or length),
                stage_epochs=None if self.max_epochs else math.ceil(length / stages_of(cooled)),
                warmup=int(self.warmup),
            ),
            hyper=sections.Hyper(
                lr=float(self.lr),
                batch_size=batch,
                dropout=float(dropout if self.dropout is None else self.dropout),
                weight_decay=float(self.weight_decay),
            ),
        )

    @property
    def _names(self) -> list[str]:
        return [str(name) for name in self.classes_]

    @staticmethod
    def _targets(y: ArrayLike) -> np.ndarray:
        return without_gaps(column_or_1d(y))


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
        kept = "; .astype('category') would use its values" if "; dataset.keep=" in note else ""
        warnings.warn(note.partition("; dataset.keep=")[0] + kept, stacklevel=4)
    if not encoding.used:
        raise ValueError("expected at least one column of numbers, categories or dates, got none")
    return encoding, typed
