"""EASTClassifier: a network trained on the metric it is judged by, as a scikit-learn classifier."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor

from east import losses, models
from east.choices import choose
from east.confusion import Confusion
from east.data.common import Part, Splits
from east.settings.sections import Annealing, Dataset, Hyper, Loss, Model, Schedule, Science, Training
from east.training.annealing import SCHEDULES
from east.training.engine import train
from east.training.evaluation import validation_metric
from east.training.population import Trial

ROWS = 8192  # that pass through the network at once


class EASTClassifier(ClassifierMixin, BaseEstimator):
    """A multilayer perceptron trained on 1 - metric of its soft confusion matrix, with annealing. arXiv 2405.20954.

    metric: a name of east.METRICS, a dotted path, or a function of an east.Confusion; larger is better. It is trained
        for, stops training early, chooses among the initialisations, and is what `score` returns.
    metric_parameters: of the metric, such as {"average": "positive", "positive": "fraud"}, a label of y; without it the
        positive class is the second of classes_.
    hidden, dropout: layers of the network. lr, batch_size, weight_decay: of AdamW. Rare classes need large batches.
    warmup: first epochs that train on cross-entropy; some metrics never leave "all of one class" without.
    max_epochs, patience: a stage at one temperature ends after `patience` epochs without a lower validation loss.
    annealing: geometric, linear, cosine, per_epoch or none; `cooling` is the factor r between stages.
    n_init: initialisations that train together as one population; the best on the validation rows is kept.
    validation_fraction: share of the rows of each class that early stopping watches.
    random_state: decides validation rows, initial weights and batches; the global generators are not touched.

    Fitted: classes_, net_ (a torch module, float64), outcomes_ (one per initialisation), n_iter_ (its epochs),
    validation_score_, n_features_in_, feature_names_in_.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> EASTClassifier("mcc", random_state=0).fit(X, y).score(X, y) > 0.9
    True
    """

    def __init__(
        self,
        metric: str | Callable[..., Tensor] = "f1",
        *,
        metric_parameters: Mapping[str, Any] | None = None,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.1,
        lr: float = 3e-3,
        batch_size: int = 512,
        weight_decay: float = 0.01,
        warmup: int = 0,
        max_epochs: int = 100,
        patience: int = 10,
        annealing: Schedule = "geometric",
        cooling: float = 0.7,
        n_init: int = 1,
        validation_fraction: float = 0.2,
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        verbose: bool = False,
    ):
        self.metric = metric
        self.metric_parameters = metric_parameters
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

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """X [n, f] finite numbers, y [n] classes of any type."""
        rows, targets = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(targets)
        self._check_parameters()
        self.classes_, labels = np.unique(targets, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"expected at least two classes, got one class: {self.classes_.tolist()}")
        random = check_random_state(self.random_state)
        splits = self._split(rows, labels, random)
        config = self._config(len(splits.train))
        trials = [Trial(config, int(seed)) for seed in random.randint(2**31 - 1, size=self.n_init)]
        self.outcomes_ = train(trials, splits, device=self.device, progress=self.verbose)
        finished = [outcome for outcome in self.outcomes_ if outcome.status == "done"]
        if not finished:
            raise RuntimeError(f"no initialisation could be trained: {self.outcomes_[0].error}")
        best = min(finished, key=lambda outcome: outcome.missed)
        self.n_iter_, self.validation_score_ = best.epochs, 1 - best.missed[0]
        with torch.random.fork_rng(devices=[]):  # a new network draws initial weights, which are replaced at once
            self.net_ = models.build(config.model, splits.train.inputs.shape[1:], len(self.classes_))
        self.net_.load_state_dict(best.weights)
        # In float64 a row's probabilities do not depend on the rows around it, in float32 their last digits do.
        self.net_.double().eval()
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Log odds of the second class [n] for two classes, else logits [n, d]."""
        logits = self._logits(X)
        return (logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits).numpy()

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities [n, d] in the order of classes_; sharper than frequencies, see CalibratedClassifierCV."""
        return self._logits(X).softmax(-1).numpy()

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most probable class of each row."""
        logits = self._logits(X)
        return self.classes_[logits.argmax(-1).numpy()]

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """The metric of the predictions, as a number where larger is better."""
        predicted = self._logits(X).argmax(-1)
        truth = column_or_1d(y)
        unseen = np.setdiff1d(truth, self.classes_)  # classes that were not in training are never predicted
        classes = [*self.classes_, *unseen]
        index = {name: k for k, name in enumerate(classes)}
        labels = torch.tensor([index[name] for name in truth])
        weights = torch.from_numpy(_check_sample_weight(sample_weight, X, dtype=np.float64))
        decided = torch.eye(len(classes), dtype=torch.float64)[predicted]
        loss = losses.build(self._loss(), [str(name) for name in classes], positive=self._positive())
        metric = validation_metric(loss, self._positive())
        return float(metric(Confusion.from_memberships(decided, labels, weights)))

    @torch.no_grad()
    def _logits(self, X: ArrayLike) -> Tensor:
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        inputs = torch.from_numpy((X - self.mean_) / self.scale_)
        return torch.cat([self.net_(some) for some in inputs.split(ROWS)])

    def _split(self, X: np.ndarray, labels: np.ndarray, random: np.random.RandomState) -> Splits:
        """Training rows and validation rows, scaled; the test part is empty.

        Every class gives its share to validation but keeps a row to learn from. Where that leaves nothing to validate
        on, the training rows serve.
        """
        held_out = np.zeros(len(labels), dtype=bool)
        for k in range(len(self.classes_)):
            rows = random.permutation(np.flatnonzero(labels == k))
            held_out[rows[: min(round(self.validation_fraction * len(rows)), len(rows) - 1)]] = True
        train_rows, val_rows = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        self.mean_, scale = X[train_rows].mean(0), X[train_rows].std(0)
        self.scale_ = np.where(np.ptp(X[train_rows], axis=0) > 0, scale, 1.0)  # a constant's deviation is rounding

        def part(rows: np.ndarray) -> Part:
            inputs = torch.from_numpy((X[rows] - self.mean_) / self.scale_).float()
            return Part(inputs, torch.from_numpy(labels[rows]), torch.from_numpy(rows))

        return Splits(
            train=part(train_rows),
            val=part(val_rows if len(val_rows) else train_rows),
            test=part(val_rows[:0]),
            classes=tuple(self._names()),
            name="estimator",
            positive=self._positive(),
            fingerprint="",
            index_hash="",
            mean=torch.zeros(X.shape[1]),
            std=torch.ones(X.shape[1]),
        )

    def _config(self, rows: int) -> Science:
        """The trials' config, with the sections that a run of east-run has."""
        return Science(
            dataset=Dataset(name="estimator"),
            model=Model(name="mlp", hidden=list(self.hidden)),
            loss=self._loss(),
            annealing=Annealing(schedule=self.annealing, T0=0.2, r=float(self.cooling), T_min=0.01, patience=2),
            protocol=Training(
                name="estimator",
                patience=int(self.patience),
                max_epochs=int(self.max_epochs),
                warmup=int(self.warmup),
            ),
            hyper=Hyper(
                lr=float(self.lr),
                batch_size=int(min(self.batch_size, rows)),
                dropout=float(self.dropout),
                weight_decay=float(self.weight_decay),
            ),
        )

    def _loss(self) -> Loss:
        parameters = dict(self.metric_parameters or {})
        if parameters.get("positive") in [*self.classes_]:
            parameters["positive"] = [*self.classes_].index(parameters["positive"])
        target = "east.losses.MetricLoss"
        return Loss(name="metric", target=target, metric=self.metric, step="linear", parameters=parameters)

    def _names(self) -> list[str]:
        return [str(name) for name in self.classes_]

    def _positive(self) -> int | None:
        return 1 if len(self.classes_) == 2 else None

    def _check_parameters(self) -> None:
        choose("annealing", self.annealing, SCHEDULES)
        if isinstance(self.hidden, Integral | str) or not all(isinstance(k, Integral) and k > 0 for k in self.hidden):
            raise ValueError(f"hidden: expected the sizes of the layers, such as (128, 64), got {self.hidden!r}")
        for name in ("batch_size", "max_epochs", "patience", "n_init", "warmup"):
            value, least = getattr(self, name), int(name != "warmup")
            if not (isinstance(value, Integral) and int(value) >= least):
                raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
        for name, low, high in (("lr", 0, np.inf), ("validation_fraction", 0, 1), ("cooling", 0, 1)):
            value = getattr(self, name)
            if not (isinstance(value, Real) and low < float(value) < high):
                raise ValueError(f"{name}: expected a number between {low} and {high}, got {value!r}")
        if not (isinstance(self.dropout, Real) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout: expected a rate from 0 to below 1, got {self.dropout!r}")
