"""Classical models as tensors, saved and run without scikit-learn's objects: nothing is pickled.

`state_of` reads a fitted model of training/classical.py; `build` makes a module with the same predictions. The arrays
inside scikit-learn's trees are private: only `forest_nodes` and `boosted_nodes` use them, and `state_of` compares the
result with scikit-learn's own predictions before anything is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import sklearn
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from torch import Tensor, nn

from east.lab.data.common import DataError
from east.lab.training.boosters import LIBRARIES, Booster, predict
from east.lab.training.classical import Classifier, GradientBoosting, LogisticRegression, PrincipalAxes, RandomForest

TOLERANCE = 1e-6
CHECKED = 200  # rows on which a portable model is compared with the original


class Portable(nn.Module):
    """A classifier whose forward returns probabilities [n, d] of inputs [n, f] or of images.

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
    """Decision trees, their nodes concatenated.

    left, right: [nodes] numbers of the children; a leaf's are its own. feature, threshold: [nodes]; a row goes left
    where x[feature] <= threshold. value: [nodes, d] what a leaf adds. roots: [trees], the first node of each tree.
    """

    left: Tensor
    right: Tensor
    feature: Tensor
    threshold: Tensor
    value: Tensor
    roots: Tensor

    def leaves(self, x: Tensor) -> Tensor:
        """The leaf [n, trees] that each row reaches in each tree."""
        node = self.roots.expand(len(x), -1)
        while True:
            goes_left = x.gather(1, self.feature[node]) <= self.threshold[node]
            below = torch.where(goes_left, self.left[node], self.right[node])
            if below.equal(node):
                return node
            node = below


class Forest(Trees):
    """Random forest: the mean over trees of value [nodes, d], the class shares in a leaf."""

    def probabilities(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x), self.value.shape[1], dtype=torch.float64, device=x.device)
        for node in self.leaves(x).unbind(1):
            total += self.value[node]
        return total / len(self.roots)


class Boosted(Trees):
    """Gradient boosting: logits start at `baseline` [k], and value [nodes] of each tree adds to one of them.

    Tree t adds to logit t mod k. k = 1 is the logit of the second of two classes. present: the classes that the logits
    belong to, among `classes` [1] in all.
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
    """A model of XGBoost, LightGBM or CatBoost in its own text format. library: its position in LIBRARIES."""

    text: Tensor
    library: Tensor
    present: Tensor
    classes: Tensor

    def probabilities(self, x: Tensor) -> Tensor:
        library = LIBRARIES[int(self.library)]
        text, present = self.text.cpu().numpy().tobytes(), self.present.cpu().numpy()
        return torch.from_numpy(predict(library, text, present, int(self.classes), x.cpu().numpy())).to(x.device)


def build(state: Mapping[str, Tensor]) -> Portable | None:
    """The classical model that these tensors describe; None if they belong to a network."""
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
    """DataError unless children come after their parents: otherwise a file could make a row walk in circles."""
    missing = {"left", "right", "feature", "threshold", "value", "roots"} - set(state)
    if missing:
        raise DataError(f"a saved model of trees lacks {', '.join(sorted(missing))}")
    nodes = len(state["left"])
    own_number = torch.arange(nodes)
    valid = all(len(state[name]) == nodes for name in ("right", "feature", "threshold", "value"))
    valid = valid and all(
        not state[name].is_floating_point() and bool((state[name] >= least).all()) and bool((state[name] < nodes).all())
        for name, least in (("left", own_number), ("right", own_number), ("roots", torch.tensor(0)))
    )
    if not valid:
        raise DataError("a saved model of trees is damaged: expected every node's children to come after it")


def can_export(model: type) -> bool:
    """Whether `state_of` covers this class of models."""
    return issubclass(model, LogisticRegression | GradientBoosting | RandomForest | Booster)


def state_of(model: Classifier, inputs: np.ndarray, axes: PrincipalAxes | None = None) -> dict[str, Tensor]:
    """The tensors of a fitted model. inputs [n, f]: rows to check that they predict the same as the model.

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
    sample = inputs[:CHECKED]
    difference = np.abs(module(torch.from_numpy(sample)).numpy() - model.probabilities(sample)).max(initial=0.0)
    if not difference <= TOLERANCE:
        raise ValueError(cannot_read_trees(f"predictions differ by {difference:.1e}"))
    return state | ({"pixel_mean": axes.mean, "pixel_std": axes.std, "axes": axes.axes} if axes else {})


def cannot_read_trees(reason: str) -> str:
    return (
        f"cannot read the trees of scikit-learn {sklearn.__version__}: {reason}. "
        "Please report it; an older version works."
    )


def linear(model: LogisticRegression) -> dict[str, np.ndarray]:
    """Logistic regression as arrays, with the scaling of the inputs folded into the coefficients."""
    coefficients = model.coefficients / model.std
    return {"coefficients": coefficients, "intercepts": model.intercepts - coefficients @ model.mean}


@dataclass(frozen=True)
class Nodes:
    """One tree. left, right: children, numbered from its root, -1 for a leaf; value [nodes, ...]."""

    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray


def forest(model: RandomForest) -> dict[str, np.ndarray]:
    arrays = concatenated(forest_nodes(model.forest))
    shares = np.zeros((len(arrays["left"]), model.classes))
    shares[:, model.forest.classes_] = arrays["value"]
    return arrays | {"value": shares / shares.sum(1, keepdims=True)}


def boosted(model: GradientBoosting) -> dict[str, np.ndarray]:
    present = model.present
    if model.model is None:  # training had a single class: logit 0 for it, and -inf for any other; trees that add 0
        leaf = Nodes(*(np.array([v]) for v in (-1, -1, 0, 0.0, 0.0)))
        baseline, trees = np.array([0.0, -np.inf]), [leaf, leaf]
        present = np.array([present[0], 0 if present[0] else 1])
    else:
        baseline, trees = boosted_nodes(model.model, model.iterations)
    return concatenated(trees) | {"baseline": baseline, "present": present, "classes": np.array([model.classes])}


def concatenated(trees: Sequence[Nodes]) -> dict[str, np.ndarray]:
    """The arrays of `Trees`, all nodes one after the other."""
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
    """baseline [k], and the trees of the first iterations, k in each; `value` [nodes] includes the learning rate."""
    try:
        stages = [[predictor.nodes for predictor in stage] for stage in model._predictors[:iterations]]
        baseline = np.asarray(model._baseline_prediction, dtype=np.float64).reshape(-1)
        trees = []
        for nodes in (nodes for stage in stages for nodes in stage):
            leaf = nodes["is_leaf"].astype(bool)
            if nodes["is_categorical"].any():
                raise ValueError(cannot_read_trees("a split on categories"))
            left, right = (np.where(leaf, -1, nodes[side].astype(np.int64)) for side in ("left", "right"))
            threshold = np.where(leaf, 0.0, nodes["num_threshold"])
            trees.append(Nodes(left, right, nodes["feature_idx"], threshold, np.where(leaf, nodes["value"], 0.0)))
    except (AttributeError, KeyError, IndexError) as error:
        raise ValueError(cannot_read_trees(f"{type(error).__name__}: {error}")) from error
    return baseline, trees
