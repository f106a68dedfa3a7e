"""Classical models: logistic regression, gradient boosting, random forest, CCS. Same splits and outcomes as networks.

Tables are scaled already; images are flattened, standardised pixel by pixel and projected on the principal axes that
hold a given share of the training part's variance. Settings with several values are chosen by cross-entropy on
validation. For all models `best.val_loss` and `best.val_metric` are 1 - F1 of the decisions.
"""

import inspect
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Protocol, Self

import numpy as np
import sklearn.linear_model
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from torch import Tensor

from east.choices import choose, import_by_path
from east.confusion import Confusion
from east.lab.data.common import Splits
from east.lab.settings.sections import LossSection
from east.lab.training.evaluation import metric_of
from east.lab.training.population import Outcome, Trial
from east.lab.training.scores import Best
from east.losses.inputs import refuse_unknown

DECODINGS = ("argmax", "set")
CLASS_WEIGHTS = ("balanced",)
SMALLEST = 1e-15  # lower limit of probabilities inside a logarithm
PARTS = ("train", "val", "test")
PIXELS_AT_ONCE = 1 << 24
POWER_ITERATIONS = 4

# The last images after projection, and its axes, shared by the seeds.
_projected: dict[tuple, tuple[dict[str, np.ndarray], "PrincipalAxes"]] = {}


def fit(trial: Trial, splits: Splits, keep: bool = False) -> Outcome:
    """Fit the classifier of the trial's `loss` section; the trial's seed is its random state.

    keep: whether to add the fitted model, as tensors, to the outcome.
    """
    started = time.perf_counter()
    classifier = build(trial.config.loss)
    inputs = features(splits, classifier.pca)
    classifier.fit(
        inputs["train"],
        splits.train.labels.numpy(),
        len(splits.classes),
        trial.seed,
        (inputs["val"], splits.val.labels.numpy()),
    )
    probabilities = {part: classifier.probabilities(inputs[part]).astype(np.float32) for part in ("val", "test")}
    labels = {"val": splits.val.labels.numpy(), "test": splits.test.labels.numpy()}
    predicted = torch.from_numpy(probabilities["val"].argmax(-1))
    confusion = Confusion.from_predictions(predicted, splits.val.labels, len(splits.classes))
    one_minus_f1 = 1 - float(metric_of("f1", splits.positive)(confusion))
    return Outcome(
        trial=trial,
        status="done",
        error=None,
        stopped="fitted",
        epochs=0,
        seconds=time.perf_counter() - started,
        best=Best(val_loss=one_minus_f1, val_metric=one_minus_f1),
        history={},
        probabilities=probabilities,
        labels=labels,
        weights=as_tensors(classifier, splits, inputs["train"]) if keep else {},
    )


def as_tensors(classifier: "Classifier", splits: Splits, inputs: np.ndarray) -> dict[str, Tensor]:
    """The fitted model as tensors, with the projection of images. inputs [n, f]: rows to check it on."""
    from east.lab.training import portable

    axes = projected(splits, classifier.pca)[1] if splits.kind == "image" and classifier.pca else None
    return portable.state_of(classifier, inputs, axes)


Array = np.ndarray
Validation = tuple[Array, Array] | None  # inputs [n, f] and labels [n]


class Classifier(Protocol):
    """The interface of a classical model. pca: the share of the images' variance that it sees; None for all pixels."""

    pca: float | None

    def fit(self, inputs: Array, labels: Array, classes: int, seed: int = 0, validation: Validation = None) -> Self:
        """inputs [n, f], labels [n] from 0 to classes - 1, some of which may not occur.

        validation: rows on which to choose between settings, for models with several.
        """
        ...

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """[n, d] of inputs [n, f]."""
        ...


def build(loss: LossSection) -> Classifier:
    """The classifier of a config's `loss` section."""
    target = import_by_path(loss.target)
    if not (isinstance(target, type) and all(hasattr(target, name) for name in ("fit", "probabilities"))):
        raise ValueError(f"loss._target_={loss.target}: expected a class with fit and probabilities, got {target!r}")
    parameters = list(inspect.signature(target).parameters.values())
    refuse_unknown(f"parameter of {target.__name__}", loss.arguments, parameters)
    return target(**loss.arguments)


class RandomForest:
    """scikit-learn's random forest. Neither paper states its settings; these are the library's own."""

    def __init__(
        self,
        n_estimators: int = 100,
        min_samples_leaf: int = 1,
        pca: float | None = 0.8,
        max_samples: int | None = None,
    ):
        """max_samples: the largest number of rows to draw for a tree; None: as many as there are."""
        self.n_estimators, self.min_samples_leaf, self.pca = n_estimators, min_samples_leaf, pca
        self.max_samples = max_samples

    def fit(self, inputs: Array, labels: Array, classes: int, seed: int = 0, validation: Validation = None) -> Self:
        """inputs [n, f], labels [n] from 0 to classes - 1, some of which may not occur."""
        self.classes = classes
        self.forest = RandomForestClassifier(
            self.n_estimators,
            min_samples_leaf=self.min_samples_leaf,
            max_samples=None if self.max_samples is None else min(self.max_samples, len(inputs)),
            random_state=seed,
            n_jobs=torch.get_num_threads(),  # one where trials are spread over processes; no effect on the result
        ).fit(inputs, labels)
        return self

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """Mean over trees of the class shares in a leaf, [n, d]; zero for a class that was not in training."""
        result = np.zeros((len(inputs), self.classes))
        result[:, self.forest.classes_] = self.forest.predict_proba(inputs)
        return result


class LogisticRegression:
    """scikit-learn's multinomial logistic regression on standardised inputs.

    C: inverse strength of the L2 penalty; if several, the one with the lowest cross-entropy on validation is used.
    class_weights: None, or balanced, which weights each row by n / (d n_k).
    """

    def __init__(
        self,
        C: float | Sequence[float] = (0.01, 0.1, 1.0, 10.0, 100.0),
        class_weights: str | None = None,
        pca: float | None = 0.8,
    ):
        self.grid = sorted([C] if isinstance(C, int | float) else C)
        self.pca = pca
        self.class_weights = None if class_weights is None else choose("class_weights", class_weights, CLASS_WEIGHTS)

    def fit(self, inputs: Array, labels: Array, classes: int, seed: int = 0, validation: Validation = None) -> Self:
        """inputs [n, f], labels [n]; nothing is random, so the seed has no effect."""
        weights = row_weights(labels, classes, self.class_weights)
        std = inputs.std(0, dtype=np.float64)
        self.mean, self.std = inputs.mean(0, dtype=np.float64), np.where(std > 0, std, 1.0)
        scaled = (inputs - self.mean) / self.std
        present = np.unique(labels)
        if len(present) == 1:
            self.C = self.grid[0]
            self.coefficients = np.zeros((classes, inputs.shape[1]))
            self.intercepts = np.where(np.arange(classes) == present[0], 0.0, -np.inf)
            return self
        check_grid("C", self.grid, validation)
        best = np.inf
        model = sklearn.linear_model.LogisticRegression(max_iter=1000, tol=1e-6, warm_start=True)  # along the grid
        for C in self.grid:
            model.set_params(C=C).fit(scaled, labels, weights[labels])
            coefficients, intercepts = self.per_class(model, classes)
            val_loss = 0.0
            if validation:
                p = softmax((validation[0] - self.mean) / self.std @ coefficients.T + intercepts)
                val_loss = cross_entropy(p, validation[1], weights)
            if val_loss < best:
                best, self.C, self.coefficients, self.intercepts = val_loss, C, coefficients, intercepts
        return self

    @staticmethod
    def per_class(model: sklearn.linear_model.LogisticRegression, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Coefficients [d, f] and intercepts [d], -inf for a class that was not in training. Two classes: (0, z)."""
        coefficients, intercepts = np.zeros((classes, model.coef_.shape[1])), np.full(classes, -np.inf)
        fitted = model.classes_[-len(model.coef_) :]
        intercepts[model.classes_] = 0.0
        coefficients[fitted], intercepts[fitted] = model.coef_, model.intercept_
        return coefficients, intercepts

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """[n, d]; zero for a class that was not in training."""
        return softmax((inputs - self.mean) / self.std @ self.coefficients.T + self.intercepts)


class GradientBoosting:
    """scikit-learn's histogram gradient boosting, without its early stopping: that would hold back training rows.

    leaves, iterations: largest number of leaves per tree, and number of trees per class. If several, those with the
    lowest cross-entropy on validation are used; a fit with many trees contains those with fewer.
    class_weights: None, or balanced, which weights each row by n / (d n_k).
    """

    def __init__(
        self,
        learning_rate: float = 0.1,
        leaves: int | Sequence[int] = (4, 31),
        iterations: int | Sequence[int] = (25, 50, 100, 200),
        min_samples_leaf: int = 20,
        class_weights: str | None = None,
        pca: float | None = 0.8,
    ):
        self.learning_rate, self.min_samples_leaf, self.pca = learning_rate, min_samples_leaf, pca
        self.leaves = [leaves] if isinstance(leaves, int) else list(leaves)
        self.counts = sorted([iterations] if isinstance(iterations, int) else iterations)
        self.class_weights = None if class_weights is None else choose("class_weights", class_weights, CLASS_WEIGHTS)

    def fit(self, inputs: Array, labels: Array, classes: int, seed: int = 0, validation: Validation = None) -> Self:
        """inputs [n, f], labels [n]. The seed matters only above 200,000 rows: bins are then made from a sample."""
        self.classes, self.present = classes, np.unique(labels)
        self.model: HistGradientBoostingClassifier | None = None
        if len(self.present) == 1:
            return self
        check_grid("leaves", self.leaves, validation)
        check_grid("iterations", self.counts, validation)
        weights, best = row_weights(labels, classes, self.class_weights), np.inf
        for leaves in self.leaves:
            model = HistGradientBoostingClassifier(
                learning_rate=self.learning_rate,
                max_iter=self.counts[-1],
                max_leaf_nodes=leaves,
                min_samples_leaf=self.min_samples_leaf,
                early_stopping=False,
                random_state=seed,
            ).fit(inputs, labels, weights[labels] if self.class_weights else None)  # weighted bins take seconds
            val_inputs, val_labels = validation or (inputs[:1], labels[:1])
            for count, p in enumerate(model.staged_predict_proba(val_inputs), start=1):
                if count not in self.counts:
                    continue
                val_loss = cross_entropy(self.for_all_classes(p), val_labels, weights)
                if val_loss < best:
                    best, self.model, self.iterations = val_loss, model, count
        return self

    def for_all_classes(self, p: np.ndarray) -> np.ndarray:
        """Probabilities [n, d], from those [n, k] of the classes that were in training; the others are 0."""
        result = np.zeros((len(p), self.classes))
        result[:, self.present] = p
        return result

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """[n, d] after the chosen number of iterations; zero for a class that was not in training."""
        if self.model is None:
            return self.for_all_classes(np.ones((len(inputs), 1)))
        stages = self.model.staged_predict_proba(inputs)
        return self.for_all_classes(next(islice(stages, self.iterations - 1, None)))


def row_weights(labels: np.ndarray, classes: int, kind: str | None) -> np.ndarray:
    """The weight [d] of a row of each class: 1, or n / (d n_k) if kind is balanced."""
    counts = np.bincount(labels, minlength=classes)
    return np.ones(classes) if kind is None else len(labels) / (classes * counts.clip(min=1))


def check_grid(name: str, values: Sequence[float], validation: Validation) -> None:
    if len(values) > 1 and (validation is None or len(validation[1]) == 0):
        raise ValueError(f"{name}: expected one value, or validation rows to choose by, got {list(values)} and no rows")


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities [n, d] of logits [n, d], at least one of them finite in each row."""
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


def cross_entropy(probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> float:
    """Weighted mean over rows of -log p of the true class. probabilities [n, d], labels [n], weights [d]."""
    losses = -np.log(probabilities[np.arange(len(labels)), labels].clip(min=SMALLEST))
    return float(np.average(losses, weights=weights[labels]))


class CCS:
    """Convex calibrated surrogates for the F_beta of label sets. Zhang, Ramaswamy and Agarwal, ICML 2020.

    s^2 + 1 logistic models estimate q_0 = P(no label) and q_jk = P(label j active, k labels in all), j, k = 1 ... s.
    For a set of l labels, V_jl = sum_k (1 + b^2) / (b^2 k + l) q_jk is what label j adds to the expected F_beta. The
    prediction is the l labels with the largest V_jl, for the l whose sum A_l is largest, or no label if q_0 is at
    least that sum. C: scikit-learn's inverse strength of the L2 penalty.

    Two classes are one label, s = 1: logistic regression at 0.5. More classes are s = d labels, exactly one of them
    active: q_j1 is one-vs-rest logistic regression, every other q is zero and not fitted. Probabilities are the q_j1
    divided by their sum, so that argmax is the decision; AUROC of many classes ranks these quotients, not the q_j1.
    decode="set" sets labels outside the predicted set to zero: the same argmax, but different ranking scores.
    """

    def __init__(self, beta: float = 1.0, C: float = 1.0, decode: str = "argmax", pca: float | None = 0.8):
        self.beta, self.C, self.pca = beta, C, pca
        self.decode = choose("decode", decode, DECODINGS)

    def fit(self, inputs: Array, labels: Array, classes: int, seed: int = 0, validation: Validation = None) -> Self:
        """inputs [n, f], labels [n]; nothing is random, so the seed has no effect."""
        return self.fit_sets(inputs, labels[:, None] == (np.arange(classes) if classes > 2 else [1]))

    def fit_sets(self, inputs: np.ndarray, active: np.ndarray) -> Self:
        """Fit label sets. active: bool [n, s], the labels of each sample. Only sizes k that occur need models."""
        count, self.labels = active.sum(1), active.shape[1]
        self.sizes = np.unique(count[count > 0])
        targets = (active[:, j] & (count == k) for j in range(self.labels) for k in self.sizes)
        models = [logistic(inputs, target, self.C) for target in (count == 0, *targets)]
        self.coefficients, self.intercepts = (np.array(values) for values in zip(*models, strict=True))
        return self

    def estimates(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """q_0 [n] and q_jk [n, s, K] for the K sizes k in `sizes`; for all others q_jk is zero."""
        q = torch.from_numpy(inputs @ self.coefficients.T + self.intercepts).sigmoid().numpy()
        return q[:, 0], q[:, 1:].reshape(len(q), self.labels, len(self.sizes))

    def predict_sets(self, inputs: np.ndarray) -> np.ndarray:
        """The predicted label sets, bool [n, s]."""
        return best_sets(*self.estimates(inputs), self.sizes, self.beta)

    def probabilities(self, inputs: np.ndarray) -> np.ndarray:
        """[n, d]; uniform where all scores are zero."""
        nothing, q = self.estimates(inputs)
        scores = q.sum(-1)
        if scores.shape[1] == 1:
            scores = np.column_stack((nothing, scores))
        elif self.decode == "set":
            scores = np.where(best_sets(nothing, q, self.sizes, self.beta), scores, 0.0)
        total = scores.sum(1, keepdims=True)
        return np.divide(scores, total, out=np.full_like(scores, 1 / scores.shape[1]), where=total > 0)


def logistic(inputs: np.ndarray, target: np.ndarray, C: float) -> tuple[np.ndarray, float]:
    """Coefficients [f] and intercept. The intercept is infinite for a constant target, so that q is exactly 0 or 1."""
    if target.all() or not target.any():
        return np.zeros(inputs.shape[1]), np.inf if target.all() else -np.inf
    model = sklearn.linear_model.LogisticRegression(C=C, max_iter=1000).fit(inputs, target)
    return model.coef_[0], model.intercept_[0]


def best_sets(nothing: np.ndarray, q: np.ndarray, sizes: np.ndarray, beta: float = 1.0) -> np.ndarray:
    """The sets, bool [n, s], with the largest expected F_beta, from q_0 [n] and q_jk [n, s, K] with k in sizes [K]."""
    square = beta**2
    best, chosen = nothing, np.zeros(q.shape[:2], dtype=bool)
    for l in range(1, q.shape[1] + 1):
        V = q @ ((1 + square) / (square * sizes + l))
        largest = np.argsort(-V, axis=1, kind="stable")[:, :l]
        A = np.take_along_axis(V, largest, 1).sum(1)
        better = best < A
        candidate = np.zeros_like(chosen)
        np.put_along_axis(candidate, largest, True, 1)
        chosen, best = np.where(better[:, None], candidate, chosen), np.where(better, A, best)
    return chosen


def features(splits: Splits, share: float | None) -> dict[str, np.ndarray]:
    """Train, val and test as the classifiers see them: float32 [n, f].

    share: how much of the variance of images their projection keeps; None: no projection.
    """
    if splits.kind == "graph":
        raise ValueError(f"classical models: expected a table or images, got the graphs of {splits.name}")
    inputs = {part: getattr(splits, part).inputs for part in PARTS}
    if splits.kind == "table":
        return {part: rows.numpy() for part, rows in inputs.items()}
    if share is None:
        return {part: splits.prepare(rows).flatten(1).numpy() for part, rows in inputs.items()}
    return projected(splits, share)[0]


def projected(splits: Splits, share: float) -> tuple[dict[str, np.ndarray], "PrincipalAxes"]:
    """Images on the principal axes of their training part, float32 [n, f], and these axes. The last ones are cached."""
    key = (splits.fingerprint, splits.index_hash, share)
    if key not in _projected:
        axes = PrincipalAxes(splits.train.inputs, share)
        _projected.clear()
        _projected[key] = {part: axes.project(getattr(splits, part).inputs).numpy() for part in PARTS}, axes
    return _projected[key]


class PrincipalAxes:
    """PCA of standardised pixels by block power iteration (Halko et al. 2011), on a few images at a time.

    Like scikit-learn's PCA(n_components=share) after a StandardScaler, but without all images as floats or the square
    matrix of pixels in memory, so that Caltech256 fits too.
    """

    def __init__(self, images: Tensor, share: float):
        """images: uint8 [n, ...]; share: how much of the variance to keep, in (0, 1]."""
        if not 0 < share <= 1:
            raise ValueError(f"pca: expected a share of the variance in (0, 1], or null for all pixels, got {share!r}")
        pixels, count = images[0].numel(), len(images)
        self.mean, self.std = torch.zeros(pixels), torch.ones(pixels)
        moments = [torch.stack((x.double().sum(0), x.double().square().sum(0))) for x in self.standardised(images)]
        mean, square = torch.stack(moments).sum(0) / count
        std = (square - mean.square()).clamp_min(0).sqrt()
        varying = std > 0
        self.mean, self.std = mean.float(), torch.where(varying, std, 1.0).float()
        self.axes = self.leading(images, share * count * int(varying.sum()))

    def standardised(self, images: Tensor) -> Iterator[Tensor]:
        """The images as float32 [m, pixels], a few at a time."""
        for batch in images.split(max(1, PIXELS_AT_ONCE // len(self.mean))):
            yield (batch.flatten(1).float() - self.mean) / self.std

    def project(self, images: Tensor) -> Tensor:
        """The images' coordinates [n, components] on the axes."""
        return torch.cat([x @ self.axes for x in self.standardised(images)])

    def leading(self, images: Tensor, variance: float) -> Tensor:
        """The fewest axes [pixels, k] that hold `variance`, a sum over images and pixels.

        The last axes of a block converge last, so its second half is computed only to be discarded.
        """

        def scatter(axes: Tensor) -> Tensor:
            total = torch.zeros_like(axes)
            for x in self.standardised(images):
                total += x.T @ (x @ axes)
            return total

        max_width, width = min(len(images), len(self.mean)), 64
        while True:
            width = min(2 * width, max_width)
            axes = torch.randn(len(self.mean), width, generator=torch.Generator().manual_seed(0))
            for _ in range(POWER_ITERATIONS):
                axes = torch.linalg.qr(scatter(axes)).Q
            values, rotation = torch.linalg.eigh((axes.T @ scatter(axes)).double())
            explained = values.flip(0).cumsum(0)
            if explained[width // 2] >= variance or width == max_width:
                return (axes @ rotation.flip(1).float())[:, : int((explained < variance).sum()) + 1]
