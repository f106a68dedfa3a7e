"""Checks on a saved model before anything is computed with it: the files may come from anyone.

Every function raises ValueError. Nothing is imported, and no more memory is taken than the files themselves need.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zipfile import ZipFile

import numpy as np
import skops.io
import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, PlainSerializer, model_validator
from sklearn.ensemble._hist_gradient_boosting.common import PREDICTOR_RECORD_DTYPE
from sklearn.tree._tree import Tree
from skops.io._audit import Node, get_tree
from skops.io._protocol import PROTOCOL
from skops.io._utils import read_schema
from torch import Tensor

from east import decisions
from east.lab.data import Encoding
from east.lab.data.common import Kind
from east.lab.settings.settings import ModelSection
from east.lab.training.scores import StoredRule

MOST_CLASSES, MOST_LAYERS, MOST_INPUTS = 200_000, 1_000, 10**8
MOST_RATIO = 100  # of the unpacked to the packed size of a classifier; our own files stay below 10
TRUST = "if you trust its author, use trust=true, or east.load(…, trust=True)"


class About(BaseModel):
    """The content of model.json. The fields up to `rule`, and `encoding` for tables, are needed to predict."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", allow_inf_nan=False)

    format: Literal[1]
    kind: Kind
    classes: Annotated[list[str], Field(min_length=2, max_length=MOST_CLASSES)]
    positive: Annotated[int, Field(ge=0)] | None
    inputs_shape: Annotated[list[Annotated[int, Field(ge=1, le=MOST_INPUTS)]], Field(min_length=1, max_length=3)]
    encoding: Any = None  # Encoding.from_json checks it
    model: Annotated[ModelSection, PlainSerializer(lambda section: section.to_json())]
    networks: Annotated[int, Field(ge=0, le=MOST_LAYERS)] | None = None  # of an ensemble; None: a single model
    decision: str = "argmax"
    rule: StoredRule | None
    key: str = ""
    seed: int = 0
    config: dict[str, JsonValue] = {}
    versions: dict[str, str] = {}
    git: str | None = None

    @model_validator(mode="after")
    def consistent(self) -> Self:
        """The values must fit each other."""
        count, columns = len(self.classes), Encoding.from_json(self.encoding) if self.kind == "table" else None
        names = [column.name for column in columns.columns] if columns else []
        if len(set(self.classes)) < count or len(set(names)) < len(names):
            raise ValueError("classes, encoding: expected each name once")
        if self.positive is not None and self.positive >= count:
            raise ValueError(f"positive: expected one of {count} classes, got number {self.positive}")
        if prod(self.inputs_shape) > MOST_INPUTS:
            raise ValueError(f"inputs_shape: expected at most {MOST_INPUTS:,} inputs, got {self.inputs_shape}")
        if columns and len(columns.feature_names) != prod(self.inputs_shape):
            got = len(columns.feature_names)
            raise ValueError(f"encoding: expected columns of {prod(self.inputs_shape)} features, got {got}")
        if any(isinstance(value, list) and len(value) > MOST_LAYERS for value in self.model.options.values()):
            raise ValueError(f"model: expected at most {MOST_LAYERS:,} layers")
        try:
            if any(len(values) != count for values in (self.rule or {}).values() if isinstance(values, list)):
                raise ValueError(f"expected {count} numbers")
            chosen = decisions.from_json(self.rule, self.positive).decide(torch.full((1, count), 1 / count))
            if not 0 <= int(chosen) < count:
                raise ValueError(f"it chooses class {int(chosen)}")
        except (ValueError, TypeError, RuntimeError, IndexError, OverflowError) as error:
            raise ValueError(f"rule: it does not fit {count} classes ({str(error).splitlines()[0]})") from None
        return self


def check_tensors(tensors: Mapping[str, Tensor], about: About) -> None:
    """Numbers must be finite, and scaling must not divide by 0."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{name}: expected finite numbers")
    check_scaling(tensors["mean"], tensors["std"], 3 if about.kind == "image" else about.inputs_shape[-1])


def check_scaling(mean: Tensor, std: Tensor, width: int) -> None:
    """Both are one number, or one for each of `width` inputs, which are divided by std."""
    for name, scale in (("mean", mean), ("std", std)):
        if scale.ndim > 1 or scale.numel() not in (1, width) or not scale.is_floating_point():
            raise ValueError(f"{name}: expected {width} numbers, got a tensor of shape {list(scale.shape)}")
    if (std == 0).any():
        raise ValueError("std: expected no zeros, because inputs are divided by it")


def check_classical(state: Mapping[str, Tensor], inputs: int, d: int) -> int:
    """The number of features that a classical model's classifier sees; `present` must number its classes, among d."""
    present = state["present"]
    ascending = present.dtype == torch.int64 and present.ndim == 1 and bool((present.diff() > 0).all())
    if not (ascending and len(present) and present[0] >= 0 and present[-1] < d):
        raise ValueError(f"present: expected ascending numbers of classes from 0 to {d - 1}, each once")
    if "projection.axes" not in state:
        return inputs
    check_scaling(state["projection.pixel_mean"], state["projection.pixel_std"], inputs)
    return state["projection.axes"].shape[-1]


# The objects that our classifiers consist of, by how skops builds them. skops builds only objects of trusted types, but
# lets a file decide how much memory they take and in which state they are, and scikit-learn follows the nodes of a tree
# without checking them. So everything is checked before it is built, and trees before any row passes through them.
ENSEMBLE, BOOSTING = "sklearn.ensemble", "sklearn.ensemble._hist_gradient_boosting"
CYTHON_LOSSES = [f"sklearn._loss._loss.{name}" for name in ("CyHalfBinomialLoss", "CyHalfMultinomialLoss")]
TREE, PREDICTOR = "sklearn.tree._tree.Tree", f"{BOOSTING}.predictor.TreePredictor"
OBJECTS = {
    "ObjectNode": [
        "east.lab.training.classical.CCS",
        "sklearn.dummy.DummyClassifier",
        "sklearn.linear_model._logistic.LogisticRegression",
        "sklearn.preprocessing._label.LabelEncoder",
        *(f"{ENSEMBLE}._forest.{name}" for name in ("RandomForestClassifier", "ExtraTreesClassifier")),
        *(f"sklearn.tree._classes.{name}" for name in ("DecisionTreeClassifier", "ExtraTreeClassifier")),
        f"{BOOSTING}.gradient_boosting.HistGradientBoostingClassifier",
        PREDICTOR,
        f"{BOOSTING}.binning._BinMapper",
        *(f"sklearn._loss.link.{name}" for name in ("Interval", "LogitLink", "MultinomialLogit")),
        *(f"sklearn._loss.loss.{name}" for name in ("HalfBinomialLoss", "HalfMultinomialLoss")),
    ],
    "LossNode": CYTHON_LOSSES,
    "TreeNode": [TREE],
    "NdArrayNode": ["numpy.ndarray", "numpy.float64", "numpy.int64", "numpy.uint64"],
    "DictNode": ["builtins.dict"],
    "ListNode": ["builtins.list"],
    "TupleNode": ["builtins.tuple"],
    "JsonNode": ["builtins.str"],
    "TypeNode": ["builtins.str", "builtins.int", TREE, *CYTHON_LOSSES],
}


class Archive(ZipFile):
    """A zip file of moderate size, whose files can be read once each."""

    def __init__(self, file: Path):
        super().__init__(file)
        self.unread = set(self.namelist())
        if sum(entry.file_size for entry in self.infolist()) > MOST_RATIO * file.stat().st_size:
            raise ValueError(f"expected a file that unpacks to at most {MOST_RATIO} times its size")

    def read(self, name: Any, pwd: bytes | None = None) -> bytes:
        if name not in self.unread:
            raise ValueError("expected each array once")
        self.unread.remove(name)
        return super().read(name, pwd)


def classifiers(file: Path, features: int, trust: bool) -> list[Any]:
    """The classifiers in a skops file, for rows of so many features. trust: build objects of any type, unchecked."""
    if trust:
        built = skops.io.load(file, trusted=skops.io.get_untrusted_types(file=file))
        return built if isinstance(built, list) else [built]
    with Archive(file) as archive:
        schema, context = read_schema(archive)
        if schema["protocol"] != PROTOCOL:
            raise ValueError(f"expected a file of skops protocol {PROTOCOL}, got {schema['protocol']!r}")
        found = [*nodes(get_tree(schema, context, trusted=None))]
    for node in found:
        kind, name = type(node).__name__, node_type(node)
        if name not in OBJECTS.get(kind, ()):
            raise ValueError(f"it holds a {name}, which is not checked; {TRUST}")
        if kind == "TreeNode" and node.args.content[2].construct() != 1:  # so many numbers would be read unchecked
            raise ValueError("expected trees of one output")
    built = found[0].construct()
    for node in found:
        if node_type(node) in (TREE, PREDICTOR) and type(node).__name__ != "TypeNode":
            check_tree(node.construct(), features)
    return built if isinstance(built, list) else [built]


def nodes(root: Node) -> Iterator[Any]:
    """The node of an object and those of everything inside it, each once; the objects are not built yet."""
    pending, seen = [root], set()
    while pending:
        node: Any = pending.pop()
        if isinstance(node, dict | list):
            pending += node.values() if isinstance(node, dict) else node
        elif isinstance(node, Node) and id(node) not in seen:
            seen.add(id(node))
            pending += node.children.values()
            yield node


def node_type(node: Node) -> str:
    """The dotted name of the class that a node builds."""
    return f"{node.module_name}.{node.class_name}"


def check_tree(tree: Any, features: int) -> None:
    """ValueError unless children come after their parent, so that every path ends, and each split has its feature."""
    if isinstance(tree, Tree):
        sound = 0 < tree.node_count == tree.capacity  # else its arrays do not show all nodes
        left, right, feature = (tree.children_left, tree.children_right, tree.feature) if sound else np.empty((3, 0))
        inner = left != -1
    else:
        table = tree.nodes
        sound = table.dtype == PREDICTOR_RECORD_DTYPE and table.ndim == 1 and len(table) > 0
        sound = sound and not table["is_categorical"].any()
        left, right, feature = (table[name].astype(np.int64) for name in ("left", "right", "feature_idx"))
        inner = table["is_leaf"] == 0
    own = np.arange(len(left))
    children = all(((child > own) & (child < len(own)))[inner].all() for child in (left, right))
    if not (sound and children and ((feature >= 0) & (feature < features))[inner].all()):
        raise ValueError(f"a tree: expected children after their parent, and features from 0 to {features - 1}")
