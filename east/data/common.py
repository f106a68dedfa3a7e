"""What data look like once loaded, and how they are split.

A dataset is a `Table`, `Images` or `Graphs`: raw inputs, integer labels, class names and where it all came from.
`split` turns it into `Splits`: three `Part`s whose scaling was fitted on the training rows alone. Random choices use
NumPy's RandomState, whose streams are frozen: a split seed means the same rows on every machine, for ever.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from east.choices import ConfigError

FRACTIONS = (0.64, 0.16, 0.20)


class DataError(Exception):
    """Data that is missing, broken or unusable. The message says what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """What tables, images and graphs have in common; n rows in the first dimension of everything."""

    labels: Tensor  # int64 [n]; graphs [n, pairs]
    classes: tuple[str, ...]
    name: str
    positive: int | None = None  # index of the positive class, 1 for every binary problem
    fingerprint: str = ""  # 16 hex digits, computed from inputs and labels unless given
    official_test: Tensor | None = None  # bool [n]: rows that are the test part by the authors' decision
    groups: Tensor | None = None  # int64 [n]: rows of one group are never separated by a split
    source: str = ""  # where the data came from originally
    path: str = ""  # where the files lie here
    limit: int | None = None  # rows that were asked for, if not all

    def __post_init__(self):
        if not self.fingerprint:
            object.__setattr__(self, "fingerprint", fingerprint([digest(self.inputs), digest(self.labels)]))

    def take(self, rows: np.ndarray, **changes: Any) -> Self:
        """The given rows only, in the given order."""
        rows = torch.as_tensor(rows)
        fields = {key: getattr(self, key) for key in ("labels", "official_test", "groups", self.field)}
        parts = {key: value[rows] for key, value in fields.items() if value is not None}
        return replace(self, **parts, fingerprint="", **changes)

    def limited(self, limit: int | None) -> Self:
        """`limit` rows with the same mix of classes (and of official test rows).

        A class keeps three rows if it has them and there is room, so that it can occur in train, val and test.
        """
        if limit is None:
            return self
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 3:
            raise ConfigError(f"limit must be a whole number of at least 3 rows, or null for all; got {limit!r}")
        if limit >= len(self.labels):
            return replace(self, limit=limit)
        strata = self.labels.numpy() if self.labels.ndim == 1 else np.zeros(len(self.labels), dtype=np.int64)
        if self.official_test is not None:
            strata = strata * 2 + self.official_test.numpy()
        rows = stratified(strata, limit, np.random.RandomState(0), least=3)
        return self.take(np.sort(rows), limit=limit)

    def expect(self, **expected: Any) -> Self:
        """Self, after checking rows, features, classes or positives; a header read as data fails here."""
        found = {
            "rows": len(self.labels),
            "shape": tuple(self.inputs.shape[1:]),
            "classes": len(self.classes),
            "positives": int((self.labels == 1).sum()),
        }
        wrong = {key: value for key, value in expected.items() if found[key] != value}
        if wrong:
            lines = "; ".join(f"expected {key} {value}, got {found[key]}" for key, value in wrong.items())
            raise DataError(f"{self.name} was read from {self.path}, but not as it should be: {lines}.")
        return self


@dataclass(frozen=True, kw_only=True)
class Table(Data):
    """Rows of numbers."""

    kind: ClassVar[str] = "table"
    field: ClassVar[str] = "features"
    features: Tensor  # float32 [n, f], not yet scaled
    columns: tuple[str, ...] = ()
    encoding: dict | None = None  # csv only: how `features` are made from a file's columns, as plain JSON

    @property
    def inputs(self) -> Tensor:
        return self.features


@dataclass(frozen=True, kw_only=True)
class Images(Data):
    """Colour images of one size."""

    kind: ClassVar[str] = "image"
    field: ClassVar[str] = "pixels"
    pixels: Tensor  # uint8 [n, 3, h, w]
    normalise: str = "train"  # channel mean and std of the training part, or "half": (x - 0.5) / 0.5

    @property
    def inputs(self) -> Tensor:
        return self.pixels


@dataclass(frozen=True, kw_only=True)
class Graphs(Data):
    """Complete graphs; labels [n, pairs] in the order of `torch.triu_indices(nodes, nodes, offset=1)`."""

    kind: ClassVar[str] = "graph"
    field: ClassVar[str] = "nodes"
    nodes: Tensor  # float32 [n, nodes, f]

    @property
    def inputs(self) -> Tensor:
        return self.nodes


@dataclass(frozen=True)
class Part:
    """One of train, val and test."""

    inputs: Tensor  # tables: scaled float32 [n, f]; images: uint8 [n, 3, h, w]; graphs: float32 [n, nodes, f]
    labels: Tensor  # int64 [n]; graphs [n, pairs]
    index: Tensor  # int64 [n], rows of the data

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Splits:
    """Train, val and test, ready for a network: `net(splits.prepare(part.inputs))`."""

    train: Part
    val: Part
    test: Part
    classes: tuple[str, ...]
    name: str
    positive: int | None
    fingerprint: str
    index_hash: str  # 16 hex digits over the three parts' rows
    mean: Tensor  # tables [f]; images [3], on the 0..1 scale; graphs [f] of zeros
    std: Tensor
    kind: str = "table"

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "val": len(self.val), "test": len(self.test)}

    def prepare(self, inputs: Tensor) -> Tensor:
        """What the network sees, float32 on the inputs' device; tables were scaled when they were split."""
        if self.kind != "image":
            return inputs
        mean, std = (value.to(inputs.device)[:, None, None] for value in (self.mean, self.std))
        return (inputs.float() / 255 - mean) / std


def split(data: Data, seed: int = 0, fractions: Sequence[float] = FRACTIONS, stratify: bool = False) -> Splits:
    """Train, val and test of `data`. An official test part stays what it is; groups stay together."""
    rows = assign(data, seed, fractions, stratify)
    mean, std = moments(data, rows[0])
    parts = []
    for index in map(torch.from_numpy, rows):
        inputs = data.inputs[index]
        parts.append(Part((inputs - mean) / std if data.kind == "table" else inputs, data.labels[index], index))
    return Splits(
        *parts,
        classes=data.classes,
        name=data.name,
        positive=data.positive,
        fingerprint=data.fingerprint,
        index_hash=fingerprint([digest(part.index) for part in parts]),
        mean=mean,
        std=std,
        kind=data.kind,
    )


def assign(
    data: Data, seed: int = 0, fractions: Sequence[float] = FRACTIONS, stratify: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row numbers of train, val and test: two random cuts, test first, each rounded up as scikit-learn does."""
    train, val, test = fractions = tuple(map(float, fractions))
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ConfigError(f"split fractions must be three positive numbers that add up to 1, got {list(fractions)}")
    if stratify and (data.groups is not None or data.labels.ndim > 1):
        raise ConfigError(f"{data.name} is split by groups of rows; that cannot be stratified as well")
    random = np.random.RandomState(seed)
    strata = data.labels.numpy() if stratify else None
    everything = np.arange(len(data.labels))
    if data.official_test is not None:
        official = data.official_test.numpy()
        rest, test_rows = everything[~official], everything[official]
    else:
        rest, test_rows = cut(everything, test, random, data.groups, strata)
    train_rows, val_rows = cut(rest, val / (train + val), random, data.groups, strata)
    if not (len(train_rows) and len(val_rows) and len(test_rows)):
        sizes = (len(train_rows), len(val_rows), len(test_rows))
        raise DataError(f"{data.name} has too few rows to split: {len(everything)} make train/val/test {sizes}.")
    return train_rows, val_rows, test_rows


def cut(
    rows: np.ndarray, fraction: float, random: np.random.RandomState, groups: Tensor | None, strata: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """`rows` without a random `fraction` of them, and that fraction; of whole groups where there are any."""
    if strata is not None:
        chosen = np.zeros(len(rows), dtype=bool)
        chosen[stratified(strata[rows], share(fraction, len(rows)), random)] = True
        shuffled = random.permutation(len(rows))
        return rows[shuffled[~chosen[shuffled]]], rows[shuffled[chosen[shuffled]]]
    units = rows if groups is None else groups.numpy()[rows]
    names = np.unique(units)
    order = random.permutation(names)
    taken = order[: share(fraction, len(names))]
    if groups is None:
        return order[len(taken) :], taken
    inside = np.isin(units, taken)
    return random.permutation(rows[~inside]), random.permutation(rows[inside])


def share(fraction: float, count: int) -> int:
    """`fraction` of `count`, rounded up; the inner rounding keeps 0.16/0.80 from being a little over 0.2."""
    return math.ceil(round(fraction * count, 6))


def stratified(strata: np.ndarray, size: int, random: np.random.RandomState, least: int = 0) -> np.ndarray:
    """`size` positions drawn in proportion to their stratum (largest remainders), `least` of each if there is room."""
    names, members, counts = np.unique(strata, return_inverse=True, return_counts=True)
    quota = counts * size / len(strata)
    take = np.floor(quota).astype(int)
    order = np.argsort(take - quota, kind="stable")
    take[order[: size - take.sum()]] += 1
    take = np.maximum(take, np.minimum(counts, min(least, size // len(names))))
    while take.sum() > size:
        take[take.argmax()] -= 1
    return np.concatenate([random.permutation(np.flatnonzero(members == k))[: take[k]] for k in range(len(names))])


def moments(data: Data, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per feature or channel over `rows`; a constant feature gets 1."""
    if data.kind == "graph":  # positions stay in metres: distances between people are what matters
        return torch.zeros(data.nodes.shape[-1]), torch.ones(data.nodes.shape[-1])
    if data.kind == "table":
        features = data.features[torch.from_numpy(rows)].double()
        mean, std = features.mean(0), features.std(0, correction=0)
        return mean.float(), torch.where(std > 0, std, 1.0).float()
    if data.normalise == "half":
        return torch.full((3,), 0.5), torch.full((3,), 0.5)
    total, squares = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for chunk in torch.from_numpy(rows).split(2048):  # in pieces: the images as floats would fill the memory
        values = data.pixels[chunk].float() / 255
        total += values.sum((2, 3)).double().sum(0)
        squares += values.square().sum((2, 3)).double().sum(0)
    count = len(rows) * data.pixels.shape[2] * data.pixels.shape[3]
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(std > 0, std, 1.0).float()


def digest(array: Tensor | np.ndarray) -> str:
    """SHA-256 of an array: its type, shape and bytes."""
    array = np.ascontiguousarray(array)
    state = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    state.update(memoryview(array).cast("B"))
    return state.hexdigest()


def listed(lines: Sequence[str], most: int = 5) -> str:
    """Lines of an error message, one below the other, and how many more there are."""
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "".join(f"\n  {line}" for line in [*lines[:most], *more])


def fingerprint(digests: Iterable[str]) -> str:
    """One short name for several arrays: 16 hex digits of the SHA-256 of their digests."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
