"""Fitted classifiers as compressed skops files, which may come from anyone.

skops unpickles nothing and builds only objects of trusted types. But it lets a file decide how much memory they take
and in which state they are, and scikit-learn follows the nodes of a tree without checking them. So the file's list of
objects is checked before any of them is built, and the trees before any row passes through them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import skops.io
from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
from sklearn.ensemble._hist_gradient_boosting.predictor import TreePredictor
from sklearn.tree._tree import Tree
from skops.io._protocol import PROTOCOL

MOST_RATIO = 100  # of unpacked to packed size; our own files stay below 10
ENSEMBLE = "sklearn.ensemble"
BOOSTING = f"{ENSEMBLE}._hist_gradient_boosting"
OBJECTS = {
    "ObjectNode": [
        "east.lab.training.classical.CCS",
        "sklearn.dummy.DummyClassifier",
        "sklearn.linear_model._logistic.LogisticRegression",
        "sklearn.preprocessing._label.LabelEncoder",
        *(f"{ENSEMBLE}._forest.{name}" for name in ("RandomForestClassifier", "ExtraTreesClassifier")),
        *(f"sklearn.tree._classes.{name}" for name in ("DecisionTreeClassifier", "ExtraTreeClassifier")),
        f"{BOOSTING}.gradient_boosting.HistGradientBoostingClassifier",
        f"{BOOSTING}.predictor.TreePredictor",
        f"{BOOSTING}.binning._BinMapper",
        *(f"sklearn._loss.link.{name}" for name in ("Interval", "LogitLink", "MultinomialLogit")),
        *(f"sklearn._loss.loss.{name}" for name in ("HalfBinomialLoss", "HalfMultinomialLoss")),
    ],
    "LossNode": [f"sklearn._loss._loss.{name}" for name in ("CyHalfBinomialLoss", "CyHalfMultinomialLoss")],
    "TreeNode": ["sklearn.tree._tree.Tree"],
    "NdArrayNode": ["numpy.ndarray", "numpy.float64", "numpy.int64", "numpy.uint64"],
    "DictNode": ["builtins.dict"],
    "ListNode": ["builtins.list"],
    "TupleNode": ["builtins.tuple"],
    "JsonNode": ["builtins.str"],
    "TypeNode": ["builtins.str", "builtins.int"],
}
TRUSTED = {(loader, name) for loader, names in OBJECTS.items() for name in names}


def dump(estimator: Any) -> bytes:
    """A fitted classifier as a skops file."""
    vars(estimator).pop("_feature_subsample_rng", None)  # a random generator of boosting that predictions do not use
    return skops.io.dumps(estimator, compression=ZIP_DEFLATED, compresslevel=1)


def load(file: Path, features: int, trust: bool = False) -> Any:
    """The classifier in a skops file, for rows of so many features; ValueError if it is not sound.

    trust: build objects of any type, unchecked.
    """
    try:
        if trust:
            return skops.io.load(file, trusted=skops.io.get_untrusted_types(file=file))
        check_objects(file)
        estimator = skops.io.load(file, trusted=sorted({name for _, name in TRUSTED}))
        for tree in contents(estimator):
            if isinstance(tree, Tree | TreePredictor):
                check_tree(tree, features)
    except Exception as error:  # a damaged file can make the libraries raise anything
        raise ValueError(str(error) or type(error).__name__) from error
    return estimator


def check_objects(file: Path) -> None:
    """ValueError unless the file unpacks to a moderate size and describes only objects that we know, each in one way.

    skops reads an array anew for every object that is not a repetition of an earlier one, and takes a repetition for
    the earlier object whatever it says itself.
    """
    with ZipFile(file) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > MOST_RATIO * file.stat().st_size:
            raise ValueError(f"expected a file that unpacks to at most {MOST_RATIO} times its size")
        schema = json.loads(archive.read("schema.json"))
    if schema["protocol"] != PROTOCOL:
        raise ValueError(f"expected a file of skops protocol {PROTOCOL}, got {schema['protocol']!r}")
    numbered: dict[int, Any] = {}
    readers: dict[str, int] = {}
    pending: list[Any] = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict | list):
            pending += node.values() if isinstance(node, dict) else node
        if not isinstance(node, dict) or "__loader__" not in node:
            continue
        name, number = f"{node['__module__']}.{node['__class__']}", node["__id__"]
        if (node["__loader__"], name) not in TRUSTED:
            raise ValueError(f"it holds a {name}, which is not checked; "
                             "if you trust its author, use trust=true, or east.load(…, trust=True)")  # fmt: skip
        if type(number) is not int or number <= 0 or not same(numbered.setdefault(number, node), node):
            raise ValueError("expected a number of its own for each object")
        if "file" in node and readers.setdefault(node["file"], number) != number:
            raise ValueError("expected each array once")
        if node["__loader__"] == "TreeNode":
            outputs = node["__reduce__"]["args"]["content"][2]
            if (outputs["__loader__"], outputs["content"]) != ("JsonNode", "1"):  # so many numbers are read unchecked
                raise ValueError("expected trees of one output")


def same(one: Any, other: Any) -> bool:
    """True if two parts of the list of objects are equal but for the numbers of the objects inside them."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one if key != "__id__")
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def contents(value: object) -> Iterator[object]:
    """An object and everything inside it."""
    pending = [value]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, np.ndarray):
            pending += value.ravel().tolist() if value.dtype == object else []
        elif isinstance(value, dict | list | tuple):
            pending += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__") and not isinstance(value, type):
            pending += vars(value).values()


def check_tree(tree: Any, features: int) -> None:
    """ValueError unless children come after their parent, so that every path ends, and each split has its feature."""
    if isinstance(tree, Tree):
        sound = 0 < tree.node_count == tree.capacity  # else its arrays do not show all nodes
        left, right, feature = (tree.children_left, tree.children_right, tree.feature) if sound else np.empty((3, 0))
        inner = left != -1
    else:
        nodes = tree.nodes
        sound = nodes.dtype == PREDICTOR_RECORD_DTYPE and nodes.ndim == 1 and len(nodes) > 0
        sound = sound and not nodes["is_categorical"].any()
        left, right, feature = (nodes[name].astype(np.int64) for name in ("left", "right", "feature_idx"))
        inner = nodes["is_leaf"] == 0
    own = np.arange(len(left))
    for child in (left, right):
        sound = sound and bool(((child > own) & (child < len(own)))[inner].all())
    if not sound or not ((feature >= 0) & (feature < features))[inner].all():
        raise ValueError(f"a tree: expected children after their parent, and features from 0 to {features - 1}")
