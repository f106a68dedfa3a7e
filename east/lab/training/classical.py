"""Classical models: logistic regression, gradient boosting, random forest, CCS, or any classifier by its dotted path.

They get the splits of networks and give the same outcomes. Tables are scaled already; images are flattened,
standardised pixel by pixel and projected on the principal axes that hold a given share of the training part's variance.
Settings with several values are chosen by cross-entropy on validation. For all models `best.val_loss` and
`best.val_metric` are 1 - F1 of the decisions.

A class that a config names as `loss._target_` is a recipe: it has `pca`, the share of the images' variance that the
model sees (None: all pixels), and `fitted(inputs, labels, validation, seed)`, which returns an object with
`predict_proba`. Its labels 0 to k - 1 all occur; the validation rows are for choosing settings.
"""

import copy
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import sklearn.linear_model
import torch
from scipy.special import expit
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss
from sklearn.model_selection import TunedThresholdClassifierCV
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from east.choices import ConfigError, choose, import_by_path
from east.confusion import Confusion
from east.lab.data.common import Splits
from east.lab.settings.settings import LossSection
from east.lab.training.evaluation import metric_of
from east.lab.training.population import Outcome, Trial
from east.lab.training.scores import Best
from east.losses.inputs import refuse_unknown

IMAGES = 1024  # that are projected at once

Rows = tuple[np.ndarray, np.ndarray]  # inputs [n, f] and labels [n]


def fit(trial: Trial, splits: Splits) -> Outcome:
    """Fit the classifier of the trial's `loss` section; the trial's seed is its random state."""
    started = time.perf_counter()
    recipe = recipe_of(trial.config.loss)
    inputs, projection = features(splits, recipe.pca)
    labels = {part: getattr(splits, part).labels.numpy() for part in inputs}
    present, renumbered = np.unique(labels["train"], return_inverse=True)
    if len(present) > 1:
        known = np.isin(labels["val"], present)
        validation = inputs["val"][known], np.searchsorted(present, labels["val"][known])
        estimator = recipe.fitted(inputs["train"], renumbered, validation, trial.seed)
    else:
        estimator = DummyClassifier().fit(inputs["train"], renumbered)
    model = Fitted(estimator, len(splits.classes), torch.from_numpy(present), projection)
    probabilities = {part: model.probabilities(inputs[part]).numpy() for part in ("val", "test")}
    predicted = torch.from_numpy(probabilities["val"].argmax(-1))
    confusion = Confusion.from_predictions(predicted, splits.val.labels, len(splits.classes))
    one_minus_f1 = 1 - float(metric_of("f1", splits.positive)(confusion))
    return Outcome(
        trial,
        seconds=time.perf_counter() - started,
        best=Best(val_loss=one_minus_f1, val_metric=one_minus_f1),
        probabilities=probabilities,
        labels={part: labels[part] for part in probabilities},
        fitted=model,
    )


def recipe_of(loss: LossSection) -> Any:
    """The recipe of a config's `loss` section."""
    target = import_by_path(loss.target)
    if not (isinstance(target, type) and hasattr(target, "fitted")):
        raise ValueError(f"loss._target_={loss.target}: expected a class with the method fitted, got {target!r}")
    parameters = list(inspect.signature(target).parameters.values())
    refuse_unknown(f"parameter of {target.__name__}", loss.arguments, parameters)
    return target(**loss.arguments)


class Fitted(nn.Module):
    """A fitted classifier as a module: from inputs [n, f] or images [n, c, h, w] to probabilities [n, d] in float32.

    present [k]: the classes that were in training, in the order of the estimator's; all others have probability 0.
    """

    present: Tensor

    def __init__(self, estimator: Any, classes: int, present: Tensor, projection: "Projection | None" = None):
        super().__init__()
        self.estimator, self.classes, self.projection = estimator, classes, projection
        self.register_buffer("present", present)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.projection(inputs) if self.projection else inputs.flatten(1)
        return self.probabilities(rows.cpu().numpy())

    def probabilities(self, rows: np.ndarray) -> Tensor:
        """[n, d] of rows [n, f] as the estimator sees them."""
        p = torch.from_numpy(np.asarray(self.estimator.predict_proba(rows))).float()
        if p.shape != (len(rows), len(self.present)):
            raise ValueError(f"expected a classifier of {len(self.present)} classes, got {list(p.shape)} probabilities")
        return torch.zeros(len(rows), self.classes).index_copy(1, self.present.cpu(), p)


@dataclass(kw_only=True)
class Tuned:
    """A model whose settings, where several values are given, are those with the lowest cross-entropy on validation.

    class_weights: None, or balanced, which weights each row by n / (k n_k), also on validation.
    """

    class_weights: str | None = None
    pca: float | None = 0.8

    def __post_init__(self) -> None:
        if self.class_weights is not None:
            choose("class_weights", self.class_weights, ("balanced",))

    def best(self, models: Sequence[Any], setting: str, values: Any, train: Rows, validation: Rows) -> Any:
        """The best of the models, each fitted with all values of a setting, where each fit goes on from the last."""
        fits, classes = [], np.unique(train[1])
        for model in models:
            for value in sorted(np.atleast_1d(values).tolist()):
                model.set_params(**{setting: value}, class_weight=self.class_weights, warm_start=True)
                fits.append(copy.deepcopy(model.fit(*train)))
        inputs, labels = validation
        weights = compute_class_weight(self.class_weights, classes=classes, y=train[1])[labels]

        def missed(fit: Any) -> float:
            return log_loss(labels, fit.predict_proba(inputs), labels=classes, sample_weight=weights)

        return min(fits, key=missed) if len(fits) > 1 else fits[0]


@dataclass
class LogisticRegression(Tuned):
    """scikit-learn's multinomial logistic regression on standardised inputs; nothing is random.

    C: inverse strength of the L2 penalty.
    """

    C: float | Sequence[float] = (0.01, 0.1, 1.0, 10.0, 100.0)

    def fitted(self, inputs: np.ndarray, labels: np.ndarray, validation: Rows, seed: int = 0) -> Any:
        scaler = StandardScaler().fit(inputs.astype(np.float64))
        model = sklearn.linear_model.LogisticRegression(max_iter=1000, tol=1e-6)
        train, val = ((scaler.transform(rows), classes) for rows, classes in ((inputs, labels), validation))
        best = self.best([model], "C", self.C, train, val)
        best.coef_ = best.coef_ / scaler.scale_  # takes inputs that are not scaled
        best.intercept_ = best.intercept_ - best.coef_ @ scaler.mean_
        return best


@dataclass
class GradientBoosting(Tuned):
    """scikit-learn's histogram gradient boosting, without its early stopping: that would hold back training rows.

    leaves, iterations: largest number of leaves per tree, and number of trees per class.
    """

    learning_rate: float = 0.1
    leaves: int | Sequence[int] = (4, 31)
    iterations: int | Sequence[int] = (25, 50, 100, 200)
    min_samples_leaf: int = 20

    def fitted(self, inputs: np.ndarray, labels: np.ndarray, validation: Rows, seed: int = 0) -> Any:
        """The seed matters only above 200,000 rows: bins are then made from a sample."""
        usual = {
            "learning_rate": self.learning_rate,
            "min_samples_leaf": self.min_samples_leaf,
            "early_stopping": False,
        }
        models = [HistGradientBoostingClassifier(max_leaf_nodes=leaves, random_state=seed, **usual)
                  for leaves in np.atleast_1d(self.leaves).tolist()]  # fmt: skip
        return self.best(models, "max_iter", self.iterations, (inputs, labels), validation)


@dataclass
class CCS:
    """Convex calibrated surrogates for the F_beta of label sets. Zhang, Ramaswamy and Agarwal, ICML 2020.

    Classes are labels of which exactly one is active, so of the paper's estimates only q_j = P(label j) are not zero:
    one logistic regression against the rest each. Probabilities are the q_j divided by their sum, so that argmax is the
    decision; AUROC of many classes ranks these quotients, not the q_j. Two classes are one label: logistic regression.
    C: scikit-learn's inverse strength of the L2 penalty.

    decode="set" sets labels outside the set with the largest expected F_beta to zero: the same argmax, but different
    ranking scores. The best set of l labels is the l largest q_j, worth (1 + b^2) / (b^2 + l) times their sum.
    """

    beta: float = 1.0
    C: float = 1.0
    decode: str = "argmax"
    pca: float | None = 0.8

    def __post_init__(self) -> None:
        choose("decode", self.decode, ("argmax", "set"))

    def fitted(self, inputs: np.ndarray, labels: np.ndarray, validation: Rows, seed: int = 0) -> "CCS":
        """Fit one logistic regression for each label; nothing is random."""
        classes = range(labels.max() + 1) if labels.max() > 1 else [1]
        one = sklearn.linear_model.LogisticRegression(C=self.C, max_iter=1000)
        models = [copy.copy(one).fit(inputs, labels == k) for k in classes]
        self.coefficients = np.concatenate([model.coef_ for model in models])
        self.intercepts = np.concatenate([model.intercept_ for model in models])
        return self

    def predict_proba(self, inputs: np.ndarray) -> np.ndarray:
        q = expit(inputs @ self.coefficients.T + self.intercepts)
        if q.shape[1] == 1:
            return np.hstack((1 - q, q))
        if self.decode == "set":
            sizes, ranks = np.arange(1, q.shape[1] + 1), (-q).argsort(1, kind="stable").argsort(1)
            worth = -np.sort(-q).cumsum(1) * (1 + self.beta**2) / (self.beta**2 + sizes)
            q = np.where(ranks <= worth.argmax(1)[:, None], q, 0.0)
        q = q.clip(min=np.finfo(q.dtype).tiny) if self.decode == "argmax" else q  # uniform where all are zero
        return q / q.sum(1, keepdims=True)


class Estimator:
    """Any classifier with scikit-learn's interface: a class with fit and predict_proba, by its dotted path.

    The options are its own. Random state and threads are set for it if it takes them.
    """

    def __init__(self, target: str | None = None, pca: float | None = 0.8, **options: Any):
        library = str(target).partition(".")[0]
        if target is None or "." not in target:
            raise ConfigError(f"loss.target: expected a classifier such as sklearn.svm.SVC, got {target!r}")
        if find_spec(library) is None:
            raise ConfigError(f"{library} is not installed: pip install {library}")
        self.kind, self.pca, self.options = import_by_path(target), pca, options
        if not (isinstance(self.kind, type) and hasattr(self.kind, "fit") and hasattr(self.kind, "predict_proba")):
            raise ConfigError(f"{target}: expected a class with fit and predict_proba, got {self.kind!r}")
        accepted = list(inspect.signature(self.kind).parameters.values())
        self.accepted = {parameter.name for parameter in accepted}
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
            self.accepted |= {"random_state", "n_jobs"}
        else:
            refuse_unknown(f"parameter of {self.kind.__name__}", options, accepted)

    def unfitted(self, seed: int) -> Any:
        """A new classifier with this random state."""
        threads = torch.get_num_threads()
        usual = {"random_state": seed, "n_jobs": threads, "thread_count": threads}
        usual = {name: value for name, value in usual.items() if name in self.accepted}
        return self.kind(**(usual | self.options))

    def fitted(self, inputs: np.ndarray, labels: np.ndarray, validation: Rows, seed: int = 0) -> Any:
        return self.unfitted(seed).fit(inputs, labels)


class RandomForest(Estimator):
    """scikit-learn's random forest. Neither paper states its settings; these are the library's own."""

    def __init__(self, n_estimators: int = 100, min_samples_leaf: int = 1, pca: float | None = 0.8):
        options = {"n_estimators": n_estimators, "min_samples_leaf": min_samples_leaf}
        super().__init__("sklearn.ensemble.RandomForestClassifier", pca, **options)


class TunedThreshold(Estimator):
    """What a careful user of scikit-learn does: a classifier in TunedThresholdClassifierCV, on all rows but the test's.

    With more than two classes, which that takes none of, it is the classifier alone. Its decisions are final: they are
    given as probabilities of 0 and 1.
    """

    def __init__(self, target: str | None = None, pca: float | None = 0.8, scoring: str = "f1", **options: Any):
        super().__init__(target, pca, **options)
        self.scoring = scoring

    def fitted(self, inputs: np.ndarray, labels: np.ndarray, validation: Rows, seed: int = 0) -> "Decided":
        rows, classes = np.concatenate((inputs, validation[0])), np.concatenate((labels, validation[1]))
        model = self.unfitted(seed)
        if labels.max() == 1:
            model = TunedThresholdClassifierCV(model, scoring=self.scoring, random_state=seed)
        return Decided(model.fit(rows, classes))


@dataclass
class Decided:
    """A classifier whose probabilities are its decisions, 0 or 1."""

    model: Any

    def predict_proba(self, inputs: np.ndarray) -> np.ndarray:
        return (self.model.predict(inputs)[:, None] == self.model.classes_).astype(float)


@lru_cache(maxsize=1)  # shared by the seeds
def features(splits: Splits, share: float | None) -> tuple[dict[str, np.ndarray], "Projection | None"]:
    """Train, val and test as the classifiers see them, float32 [n, f], and the projection of images.

    share: how much of the variance of images their projection keeps; None: no projection.
    """
    if splits.kind == "graph":
        raise ValueError(f"classical models: expected a table or images, got the graphs of {splits.name}")
    inputs = {part: getattr(splits, part).inputs for part in ("train", "val", "test")}
    if splits.kind == "table" or share is None:
        return {part: splits.prepare(rows).flatten(1).numpy() for part, rows in inputs.items()}, None
    projection = principal_axes(splits.train.inputs, share)
    projected = {part: torch.cat([*map(projection, rows.split(IMAGES))]) for part, rows in inputs.items()}
    return {part: rows.numpy() for part, rows in projected.items()}, projection


class Projection(nn.Module):
    """Images [n, c, h, w] standardised pixel by pixel, on their principal axes: [n, k].

    pixel_mean, pixel_std: [pixels]. axes: [pixels, k].
    """

    pixel_mean: Tensor
    pixel_std: Tensor
    axes: Tensor

    def __init__(self, pixel_mean: Tensor, pixel_std: Tensor, axes: Tensor):
        super().__init__()
        for name, tensor in {"pixel_mean": pixel_mean, "pixel_std": pixel_std, "axes": axes}.items():
            self.register_buffer(name, tensor)

    def forward(self, images: Tensor) -> Tensor:
        return (images.flatten(1).float() - self.pixel_mean) / self.pixel_std @ self.axes


def principal_axes(images: Tensor, share: float) -> Projection:
    """PCA of standardised pixels: the leading axes that hold a share of the variance, by a randomised decomposition.

    Like scikit-learn's PCA(n_components=share) after a StandardScaler, but without the square matrix of pixels, so that
    Caltech256 fits too. images: uint8 [n, ...]. The last axes of a block are the least exact, so its second half is
    computed only to be discarded.
    """
    if not 0 < share <= 1:
        raise ValueError(f"pca: expected a share of the variance in (0, 1], or null for all pixels, got {share!r}")
    rows = images.flatten(1).float()
    variance, mean = torch.var_mean(rows, 0, correction=0)
    std = torch.where(variance > 0, variance.sqrt(), 1.0)
    rows.sub_(mean).div_(std)
    wanted, most, width = share * len(rows) * int((variance > 0).sum()), min(rows.shape), 64
    while True:
        width = min(2 * width, most)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _, values, axes = torch.svd_lowrank(rows, width, niter=4)
        explained = values.double().square().cumsum(0)
        if explained[width // 2] >= wanted or width == most:
            axes = axes[:, : int((explained < wanted).sum()) + 1]
            return Projection(mean, std, axes.contiguous())
