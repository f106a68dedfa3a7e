"""Classical models as tensors, so that they are saved and run without scikit-learn's objects: nothing is pickled.

`state_of` reads a fitted model of training/classical.py, `build` makes the module that predicts as it did. The arrays
inside scikit-learn's trees are private: `forest_nodes` and `boosted_nodes` are the only places that know them, and
`state_of` compares the result with scikit-learn's own predictions before anything is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sklearn
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from torch import Tensor, nn

from east.data.common import DataError
from east.training.boosters import LIBRARIES, Booster, predicted
from east.training.classical import Classifier, GradientBoosting, LogisticRegression, PrincipalAxes, RandomForest

TOLERANCE = 1e-6
CHECKED = 200  # rows on which a portable model is compared with the original


class Portable(nn.Module):
    """A classifier whose forward gives probabilities [n, d] of inputs [n, f], or of images, which it projects first.

    pixel_mean, pixel_std, axes: for images only; the model sees (x - pixel_mean) / pixel_std @ axes.
    """

    pixel_mean: Tensor
    pixel_std: Tensor
    axes: Tensor

    def __init__(self, state: Mapping[str, Tensor]):
        super().__init__()
        for name, tensor in state.items():
            self.register_buffer(name, tensor)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.flatten(1)
        if hasattr(self, "axes"):
            x = (x - self.pixel_mean) / self.pixel_std @ self.axes
        return self.probabilities(x).float()

    def probabilities(self, x: Tensor) -> Tensor:
        """[n, d], in double precision."""
        raise NotImplementedError


class Linear(Portable):
    """Softmax of x @ coefficients.T + intercepts. coefficients [d, f]; an intercept of -inf rules its class out."""

    coefficients: Tensor
    intercepts: Tensor

    def probabilities(self, x: Tensor) -> Tensor:
        return (x.double() @ self.coefficients.T + self.intercepts).softmax(-1)


class Trees(Portable):
    """Decision trees, all their nodes in one row.

    left, right: child nodes, itself for a leaf. feature, threshold: a row goes left where x[feature] <= threshold.
    value: [nodes, d] what a leaf adds. roots: [trees], the first node of each tree.
    """

    left: Tensor
    right: Tensor
    feature: Tensor
    threshold: Tensor
    value: Tensor
    roots: Tensor

    def leaves(self, x: Tensor) -> Tensor:
        """The node [n, trees] at which each row ends in each tree."""
        node = self.roots.expand(len(x), -1)
        while True:
            goes_left = x.gather(1, self.feature[node]) <= self.threshold[node]
            below = torch.where(goes_left, self.left[node], self.right[node])
            if below.equal(node):
                return node
            node = below


class Forest(Trees):
    """Mean over trees of the class shares value [nodes, d] in a leaf."""

    def probabilities(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), self.value.shape[1], dtype=torch.float64, device=x.device)
        for node in self.leaves(x).unbind(1):
            total += self.value[node]
        return total / len(self.roots)


class Boosted(Trees):
    """Gradient boosting: value [nodes] adds to the logit of its tree's class, after `baseline` [k].

    Trees take turns: tree t is of logit t mod k. k = 1 is the logit of the second of two classes. present: the classes,
    out of `classes` [1], that the logits are of.
    """

    baseline: Tensor
    present: Tensor
    classes: Tensor

    def probabilities(self, x: Tensor) -> Tensor:
        k = len(self.baseline)
        logits = self.baseline + self.value[self.leaves(x)].unflatten(1, (-1, k)).sum(1)
        p = torch.cat((-logits, logits), 1).div(2).softmax(-1) if k == 1 else logits.softmax(-1)
        result = p.new_zeros(len(x), int(self.classes))
        result[:, self.present] = p
        return result


class Text(Portable):
    """A model of XGBoost, LightGBM or CatBoost as these wrote it: bytes of text; library: its place in LIBRARIES."""

    text: Tensor
    library: Tensor
    present: Tensor
    classes: Tensor

    def probabilities(self, x: Tensor) -> Tensor:
        library = LIBRARIES[int(self.library)]
        text, present = self.text.cpu().numpy().tobytes(), self.present.cpu().numpy()
        found = predicted(library, text, present, int(self.classes), x.cpu().numpy())
        return torch.from_numpy(found).to(x.device)


def build(state: Mapping[str, Tensor]) -> Portable | None:
    """The classical model that these tensors describe; None if they are a network's."""
    names = set(state)
    if {"text", "library"} <= names:
        return Text(state)
    if {"coefficients", "intercepts"} <= names:
        return Linear(state)
    if "roots" in names:
        check_trees(state)
    if {"roots", "baseline"} <= names:
        return Boosted(state)
    return Forest(state) if {"roots", "value"} <= names else None


def check_trees(state: Mapping[str, Tensor]) -> None:
    """Check that children come after their parents, so that no file can make a row walk in circles; else DataError."""
    missing = {"left", "right", "feature", "threshold", "value", "roots"} - set(state)
    if missing:
        raise DataError(f"a saved model of trees lacks {', '.join(sorted(missing))}")
    nodes = len(state["left"])
    number = torch.arange(nodes)
    sound = all(len(state[name]) == nodes for name in ("right", "feature", "threshold", "value"))
    sound = sound and all(
        not state[name].is_floating_point() and bool((state[name] >= least).all()) and bool((state[name] < nodes).all())
        for name, least in (("left", number), ("right", number), ("roots", torch.tensor(0)))
    )
    if not sound:
        raise DataError("a saved model of trees is damaged: expected every node's children to come after it")


def can_export(model: type) -> bool:
    return issubclass(model, LogisticRegression | GradientBoosting | RandomForest | Booster)


def state_of(model: Classifier, inputs: np.ndarray, axes: PrincipalAxes | None = None) -> dict[str, Tensor]:
    """The tensors of a fitted model. inputs [n, f]: rows on which they must predict the same as the model.

    axes: the projection of the images that the model was fitted on.
    """
    if isinstance(model, LogisticRegression):
        arrays = linear(model)
    elif isinstance(model, GradientBoosting):
        arrays = boosted(model)
    elif isinstance(model, RandomForest):
        arrays = forest(model)
    elif isinstance(model, Booster):
        arrays = {"text": np.frombuffer(model.text, dtype=np.uint8).copy(), "present": model.present}
        arrays |= {"library": np.array([LIBRARIES.index(model.library)]), "classes": np.array([model.classes])}
    else:
        raise ValueError(
            "expected logistic regression, gradient boosting or a random forest to save, "
            f"got {type(model).__name__}; it has no portable form"
        )
    state = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    module = build(state)
    assert module is not None
    some = inputs[:CHECKED]
    difference = np.abs(module(torch.from_numpy(some)).numpy() - model.probabilities(some)).max(initial=0.0)
    if not difference <= TOLERANCE:
        raise ValueError(changed(f"predictions differ by {difference:.1e}"))
    return state | ({"pixel_mean": axes.mean, "pixel_std": axes.std, "axes": axes.axes} if axes else {})


def changed(what: str) -> str:
    return f"cannot read the trees of scikit-learn {sklearn.__version__}: {what}. Please report it; an older one works."


def linear(model: LogisticRegression) -> dict[str, np.ndarray]:
    """The scaling goes into the coefficients."""
    coefficients = model.coefficients / model.std
    return {"coefficients": coefficients, "intercepts": model.intercepts - coefficients @ model.mean}


@dataclass(frozen=True)
class Nodes:
    """One tree: children count from its root, -1 below a leaf; value [nodes, ...]."""

    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray


def forest(model: RandomForest) -> dict[str, np.ndarray]:
    trees = forest_nodes(model.forest)
    joined = in_one_row(trees)
    shares = np.zeros((len(joined["left"]), model.classes))
    shares[:, model.forest.classes_] = joined["value"]
    return joined | {"value": shares / shares.sum(1, keepdims=True)}


def boosted(model: GradientBoosting) -> dict[str, np.ndarray]:
    present = {"present": model.present, "classes": np.array([model.classes])}
    if model.model is None:  # one class only: a tree that is a leaf, and softmax of a single logit
        leaf = Nodes(*(np.array([v]) for v in (-1, -1, 0, 0.0, 0.0)))
        return in_one_row([leaf, leaf]) | {"baseline": np.array([0.0, -np.inf])} | certain(model)
    baseline, trees = boosted_nodes(model.model, model.iterations)
    return in_one_row(trees) | {"baseline": baseline} | present


def certain(model: GradientBoosting) -> dict[str, np.ndarray]:
    """The classes of two logits if training had a single class: that one and, at -inf, any other."""
    other = 0 if model.present[0] else 1
    return {"present": np.array([model.present[0], other]), "classes": np.array([model.classes])}


def in_one_row(trees: Sequence[Nodes]) -> dict[str, np.ndarray]:
    """All trees' nodes one after the other."""
    sizes = [len(tree.left) for tree in trees]
    roots = np.cumsum([0, *sizes[:-1]])
    numbers = [np.arange(size) + root for size, root in zip(sizes, roots, strict=True)]
    pairs = list(zip(trees, numbers, strict=True))
    return {
        "left": np.concatenate([np.where(tree.left < 0, n, tree.left + n[0]) for tree, n in pairs]),
        "right": np.concatenate([np.where(tree.right < 0, n, tree.right + n[0]) for tree, n in pairs]),
        "feature": np.concatenate([tree.feature.clip(min=0) for tree in trees]).astype(np.int64),
        "threshold": np.concatenate([tree.threshold for tree in trees]).astype(np.float64),
        "value": np.concatenate([tree.value for tree in trees]).astype(np.float64),
        "roots": roots,
    }


def forest_nodes(forest: RandomForestClassifier) -> list[Nodes]:
    """The trees of a forest; `value` [nodes, k] is counts or shares of the classes that were in training."""
    trees = [estimator.tree_ for estimator in forest.estimators_]
    return [Nodes(t.children_left, t.children_right, t.feature, t.threshold, t.value[:, 0]) for t in trees]


def boosted_nodes(model: HistGradientBoostingClassifier, iterations: int) -> tuple[np.ndarray, list[Nodes]]:
    """baseline [k], and the trees of the first iterations, k of each; `value` [nodes] includes the learning rate."""
    try:
        stages = [[predictor.nodes for predictor in stage] for stage in model._predictors[:iterations]]
        baseline = np.asarray(model._baseline_prediction, dtype=np.float64).reshape(-1)
        trees = []
        for nodes in (nodes for stage in stages for nodes in stage):
            leaf = nodes["is_leaf"].astype(bool)
            if nodes["is_categorical"].any():
                raise ValueError(changed("a split on categories"))
            left, right = (np.where(leaf, -1, nodes[side].astype(np.int64)) for side in ("left", "right"))
            threshold = np.where(leaf, 0.0, nodes["num_threshold"])
            trees.append(Nodes(left, right, nodes["feature_idx"], threshold, np.where(leaf, nodes["value"], 0.0)))
    except (AttributeError, KeyError, IndexError) as error:
        raise ValueError(changed(f"{type(error).__name__}: {error}")) from error
    return baseline, trees
