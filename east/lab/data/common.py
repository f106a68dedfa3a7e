"""Data in memory, and how they are split.

A dataset is a `Table`, `Images` or `Graphs`: raw inputs, integer labels, class names and their origin. `split` turns it
into `Splits`: three `Part`s whose scaling was fitted on the training rows alone. Random choices use NumPy's
RandomState, whose streams are frozen: a split seed gives the same rows on every machine, forever.
"""

import hashlib
import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from east.choices import ConfigError, printable

if TYPE_CHECKING:
    import pandas as pd

    from east.lab.data.encoding import Encoding

FRACTIONS = (0.64, 0.16, 0.20)
Kind: TypeAlias = Literal["table", "image", "graph"]


class DataError(Exception):
    """Data that is missing, broken or unusable. The message says what to do about it."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """Base of tables, images and graphs. The first dimension of every tensor is the n rows."""

    kind: ClassVar[Kind]
    field: ClassVar[str]  # attribute that holds the inputs
    labels: Tensor  # int64 [n]; graphs [n, pairs]
    classes: tuple[str, ...]
    name: str
    positive: int | None = None  # index of the positive class, 1 for every binary problem
    fingerprint: str = ""  # 16 hex digits, computed from inputs and labels if empty
    inputs_digest: str = ""  # SHA-256 of the inputs, if it is known already
    official_test: Tensor | None = None  # bool [n]: rows of the authors' test part
    groups: Tensor | None = None  # int64 [n]: rows of one group are never separated by a split
    time: Tensor | None = None  # float64 [n]: the split is by time, train oldest and test newest
    source: str = ""  # where the data originally came from
    path: str = ""  # where the files are on this machine
    limit: int | None = None  # number of rows requested, if not all
    own: bool = False  # the user's own data: names count in the fingerprint, since saved models contain them

    def __post_init__(self) -> None:
        if not self.fingerprint:
            names = [json.dumps(self.names())] if self.own else []
            object.__setattr__(self, "fingerprint", fingerprint([*self.digests(), *names]))

    @property
    def inputs(self) -> Tensor:
        return cast(Tensor, getattr(self, self.field))

    def digests(self) -> list[str]:
        """The digests behind the fingerprint."""
        return [self.inputs_digest or digest(self.inputs), digest(self.labels)]

    def names(self) -> list[tuple[str, ...]]:
        """Names stored in a saved model: classes, and features of a table."""
        return [self.classes]

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on how the data were read."""
        return ()

    @property
    def stratifiable(self) -> bool:
        """True if a split can keep the class proportions; groups and time rule that out."""
        return self.groups is None and self.time is None and self.labels.ndim == 1

    def fitted(self, train: np.ndarray) -> Self:
        """The data with everything but scaling learnt from the rows `train`."""
        return self

    def take(self, rows: np.ndarray, **changes: Any) -> Self:
        """Only these rows, in this order."""
        index = torch.as_tensor(rows)
        fields = {key: getattr(self, key) for key in ("labels", "official_test", "groups", "time", self.field)}
        parts = {key: value[index] for key, value in fields.items() if value is not None}
        return replace(self, **parts, fingerprint="", inputs_digest="", **changes)

    def limited(self, limit: int | None) -> Self:
        """A sample of `limit` rows with the same class proportions (and share of official test rows).

        A class keeps three rows if possible, so that it can occur in train, val and test.
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
        """Return self if rows, shape, classes or positives are as expected; a header read as data fails here."""
        actual = {"rows": len(self.labels), "shape": tuple(self.inputs.shape[1:]), "classes": len(self.classes)}
        actual |= {"positives": int((self.labels == 1).sum())}
        wrong = [
            f"expected {key} {value}, got {actual[key]}" for key, value in expected.items() if actual[key] != value
        ]
        if wrong:
            raise DataError(f"{self.name} was read from {self.path}, but its content is wrong: {'; '.join(wrong)}.")
        return self


@dataclass(frozen=True, kw_only=True)
class Table(Data):
    """Rows of numbers. A table from a file also keeps its raw columns, which `split` encodes by the training rows."""

    kind: ClassVar[Kind] = "table"
    field: ClassVar[str] = "features"
    features: Tensor  # float32 [n, f], not yet scaled; for a file, encoded by all of its rows, float64 once `fitted`
    columns: tuple[str, ...] = ()
    raw: "pd.DataFrame | None" = None  # for a file: its typed columns, before encoding
    written: "pd.DataFrame | None" = None  # for a file: as read; its index numbers the rows
    encoding: "Encoding | None" = None  # for a file: how `features` are made from `raw`
    file_note: str | None = None  # for a file: what had to be guessed to read it

    @property
    def notes(self) -> tuple[str, ...]:
        lines = [self.file_note] if self.file_note else []
        return (*lines, *(self.encoding.notes if self.encoding else ()))

    def digests(self) -> list[str]:
        if self.raw is None or self.encoding is None:
            return super().digests()
        split_by = [digest(values) for values in (self.groups, self.time) if values is not None]
        return [*super().digests(), *split_by, *self.encoding.hidden_digests(self.raw, fine=self.own)]  # KEEL is older

    def names(self) -> list[tuple[str, ...]]:
        return [self.classes, self.columns]

    def take(self, rows: np.ndarray, **changes: Any) -> Self:
        frames = {"raw": self.raw, "written": self.written}
        changes |= {name: frame.iloc[np.asarray(rows)] for name, frame in frames.items() if frame is not None}
        return super().take(rows, **changes)

    def fitted(self, train: np.ndarray) -> Self:
        """The table with medians, categories and first date learnt from the training rows."""
        if self.raw is None or self.encoding is None:
            return self
        encoding = self.encoding.fitted(self.raw.iloc[train])
        features = encoding.features(self.raw, np.float64)  # seconds since 1970 do not fit in float32
        return replace(self, features=features, columns=encoding.feature_names, encoding=encoding)


@dataclass(frozen=True, kw_only=True)
class Images(Data):
    """Colour images of one size."""

    kind: ClassVar[Kind] = "image"
    field: ClassVar[str] = "pixels"
    pixels: Tensor  # uint8 [n, 3, h, w]
    normalise: str = "train"  # channel mean and std of the training part, or "half": (x - 0.5) / 0.5


@dataclass(frozen=True, kw_only=True)
class Graphs(Data):
    """Complete graphs; labels [n, pairs] in the order of `torch.triu_indices(nodes, nodes, offset=1)`."""

    kind: ClassVar[Kind] = "graph"
    field: ClassVar[str] = "nodes"
    nodes: Tensor  # float32 [n, nodes, f]


@dataclass(frozen=True)
class Part:
    """One of train, val and test."""

    inputs: Tensor  # tables: scaled float32 [n, f]; images: uint8 [n, 3, h, w]; graphs: float32 [n, nodes, f]
    labels: Tensor  # int64 [n]; graphs [n, pairs]
    index: Tensor  # int64 [n], rows of the data
    weights: Tensor | None = None  # float32 [n], how much each row counts; None: all count 1
    groups: Tensor | None = None  # int64 [n]: rows of one group belong together
    time: Tensor | None = None  # float64 [n]: older rows predict newer ones

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
    mean: Tensor  # tables [f], float64 for a file; images [3], on the 0..1 scale; graphs [f] of zeros
    std: Tensor
    kind: Kind = "table"
    encoding: "Encoding | None" = None  # for a file: learnt from the training rows

    @property
    def sizes(self) -> dict[str, int]:
        return {"train": len(self.train), "val": len(self.val), "test": len(self.test)}

    def prepare(self, inputs: Tensor) -> Tensor:
        """Inputs for the network, float32 on the same device; tables are already scaled."""
        if self.kind != "image":
            return inputs
        mean, std = (value.to(inputs.device)[:, None, None] for value in (self.mean, self.std))
        return (inputs.float() / 255 - mean) / std


def split(data: Data, seed: int = 0, fractions: Sequence[float] = FRACTIONS, stratify: bool = False) -> Splits:
    """Split `data` into train, val and test. An official test part is kept; groups stay together."""
    return split_into(data, assign(data, seed, fractions, stratify))


def split_into(data: Data, rows: Sequence[np.ndarray]) -> Splits:
    """The splits with these rows for train, val and test.

    Medians, categories and scaling are learnt from the training rows alone.
    """
    data = data.fitted(rows[0])
    mean, std = moments(data, rows[0])
    parts = []
    for index in map(torch.from_numpy, rows):
        inputs = data.inputs[index]
        groups, time = (None if values is None else values[index] for values in (data.groups, data.time))
        scaled = ((inputs - mean) / std).float() if data.kind == "table" else inputs
        parts.append(Part(scaled, data.labels[index], index, groups=groups, time=time))
    about = {key: getattr(data, key) for key in ("classes", "name", "positive", "fingerprint", "kind")}
    encoding = data.encoding if isinstance(data, Table) else None
    index_hash = fingerprint([digest(part.index) for part in parts])
    train, val, test = parts
    return Splits(train, val, test, **about, index_hash=index_hash, mean=mean, std=std, encoding=encoding)


def assign(
    data: Data, seed: int = 0, fractions: Sequence[float] = FRACTIONS, stratify: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row numbers of train, val and test: two random cuts, test first, each rounded up as scikit-learn does."""
    train, val, test = fractions = tuple(map(float, fractions))
    if min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ConfigError(f"split fractions must be three positive numbers that add up to 1, got {list(fractions)}")
    if stratify and not data.stratifiable:
        criterion = "time" if data.time is not None else "groups of rows"
        raise ConfigError(f"{data.name} is split by {criterion}; that cannot be stratified as well")
    if data.time is not None:
        return by_time(data.time.numpy(), val, test, data.name)
    random = np.random.RandomState(seed)
    strata = data.labels.numpy() if stratify else None
    everything = np.arange(len(data.labels))
    if data.official_test is not None:
        official = data.official_test.numpy()
        rest, test_rows = everything[~official], everything[official]
    else:
        rest, test_rows = cut_rows(everything, test, random, data.groups, strata)
    train_rows, val_rows = cut_rows(rest, val / (train + val), random, data.groups, strata)
    if 0 in (sizes := (len(train_rows), len(val_rows), len(test_rows))):
        units = f"{len(everything)} rows" if data.groups is None else f"{len(data.groups.unique())} groups of rows"
        raise DataError(f"{data.name} has too few rows to split: {units} make train/val/test {sizes}.")
    return train_rows, val_rows, test_rows


def by_time(time: np.ndarray, val: float, test: float, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in order of `time` [n], cut twice where it changes, as close to the requested sizes as possible.

    Rows of the same time stay together, so every row of test is newer than all of val, and val than train.
    """
    order = np.argsort(time, kind="stable")
    changes = np.flatnonzero(np.diff(time[order])) + 1
    if len(changes) < 2:
        raise DataError(f"{name} cannot be split by time: expected at least 3 different times, got {len(changes) + 1}.")
    last = changes[1:][np.abs(changes[1:] - (len(time) - share(test, len(time)))).argmin()]
    before = changes[changes < last]
    first = before[np.abs(before - (len(time) - share(val + test, len(time)))).argmin()]
    return order[:first], order[first:last], order[last:]


def cut_rows(
    rows: np.ndarray, fraction: float, random: np.random.RandomState, groups: Tensor | None, strata: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """`rows` cut at random: all but a `fraction` of them, and that fraction; groups are kept whole."""
    if strata is not None:
        chosen = np.zeros(len(rows), dtype=bool)
        chosen[stratified(strata[rows], share(fraction, len(rows)), random)] = True
        shuffled = random.permutation(len(rows))
        return rows[shuffled[~chosen[shuffled]]], rows[shuffled[chosen[shuffled]]]
    units = rows if groups is None else groups.numpy()[rows]
    names = np.unique(units)
    order = random.permutation(names)
    chosen_units = order[: share(fraction, len(names))]
    if groups is None:
        return order[len(chosen_units) :], chosen_units
    inside = np.isin(units, chosen_units)
    return random.permutation(rows[~inside]), random.permutation(rows[inside])


def share(fraction: float, count: int) -> int:
    """`fraction` of `count`, rounded up; the inner rounding is for fractions such as 0.16/0.80, a little over 0.2."""
    return math.ceil(round(fraction * count, 6))


def stratified(strata: np.ndarray, size: int, random: np.random.RandomState, least: int = 0) -> np.ndarray:
    """`size` random positions, in proportion to the strata (largest remainders), `least` of each if there is room."""
    names, members, counts = np.unique(strata, return_inverse=True, return_counts=True)
    quotas = counts * size / len(strata)
    sizes = np.floor(quotas).astype(int)
    order = np.argsort(sizes - quotas, kind="stable")
    sizes[order[: size - sizes.sum()]] += 1
    sizes = np.maximum(sizes, np.minimum(counts, min(least, size // len(names))))
    largest_first = [(-count, k) for k, count in enumerate(sizes.tolist())]
    heapq.heapify(largest_first)
    for _ in range(sizes.sum() - size):
        count, k = largest_first[0]
        heapq.heapreplace(largest_first, (count + 1, k))
        sizes[k] -= 1
    rows = np.split(np.argsort(members, kind="stable"), np.cumsum(counts)[:-1])
    return np.concatenate([random.permutation(of_name)[:n] for of_name, n in zip(rows, sizes, strict=True)])


def folded(labels: np.ndarray, folds: int, groups: np.ndarray | None = None) -> np.ndarray:
    """The fold [n] of each row, 0 to folds - 1; the rows of a class, or their groups, are spread evenly."""
    if groups is not None:
        numbers, group_of_row = np.unique(groups, return_inverse=True)
        largest = np.zeros(len(numbers), dtype=labels.dtype)
        np.maximum.at(largest, group_of_row, labels)  # a group counts as positive if one of its rows is
        return folded(largest, folds)[group_of_row]
    order = stratified(labels, len(labels), np.random.RandomState(0))  # class by class, shuffled within
    fold = np.empty(len(labels), dtype=np.int64)
    fold[order] = np.arange(len(labels)) % folds
    return fold


def leave_out(splits: Splits, folds: int, fold: int) -> Splits:
    """The same split with weight 0 for the validation rows of one fold, which early stopping then ignores."""
    if splits.kind == "graph":
        raise ConfigError(f"split.folds: expected a table or images, got the graphs of {splits.name}")
    groups = None if splits.val.groups is None else splits.val.groups.numpy()
    kept = torch.from_numpy(folded(splits.val.labels.numpy(), folds, groups) != fold)
    if not kept.any():
        units = "rows" if groups is None else "groups of rows"
        raise DataError(f"{splits.name}: split.folds={folds} needs at least two {units} for validation.")
    name = fingerprint([splits.index_hash, f"without fold {fold} of {folds}"])
    return replace(splits, val=replace(splits.val, weights=kept.float()), index_hash=name)


def moments(data: Data, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per feature or channel over `rows`; a constant feature gets 1."""
    if isinstance(data, Graphs):  # positions stay in metres, because distances between people matter
        return torch.zeros(data.nodes.shape[-1]), torch.ones(data.nodes.shape[-1])
    if isinstance(data, Table):
        features = data.features[torch.from_numpy(rows)].double()
        mean, std = features.mean(0), features.std(0, correction=0)
        varies = (std > 0) & (features.amax(0) > features.amin(0))  # a constant's std may be a rounding error
        return mean.to(data.features.dtype), torch.where(varies, std, 1.0).to(data.features.dtype)
    if not isinstance(data, Images):
        raise TypeError(f"expected a Table, Images or Graphs, got {type(data).__name__}")
    if data.normalise == "half":
        return torch.full((3,), 0.5), torch.full((3,), 0.5)
    channels = (data.pixels[torch.from_numpy(rows), channel].flatten() for channel in range(3))
    counts = torch.stack(
        [values.bincount(minlength=256) for values in channels]
    ).double()  # floats would fill the memory
    shares, levels = counts / counts.sum(1, keepdim=True), torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ levels
    std = (shares @ levels.square() - mean.square()).clamp(min=0).sqrt()
    return mean.float(), torch.where(std > 0, std, 1.0).float()


def digest(array: Tensor | np.ndarray) -> str:
    """SHA-256 of an array: its type, shape and bytes."""
    values: np.ndarray = np.ascontiguousarray(array)
    state = hashlib.sha256(f"{values.dtype.str}{values.shape}".encode())
    state.update(values.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def listed(lines: Sequence[str]) -> str:
    """Lines for an error message: the first five, and how many more there are."""
    more = [f"and {len(lines) - 5} more"] if len(lines) > 5 else []
    return "".join(f"\n  {line}" for line in [*lines[:5], *more])


def enumerated(names: Iterable[str], most: int = 60) -> str:
    """Names for a message: the first twenty, each cut after `most` characters, and how many more there are."""
    names = [*names]
    more = [f"and {len(names) - 20} more"] if len(names) > 20 else []
    return ", ".join([*(shown(name, most, quoted=False) for name in names[:20]), *more])


def shown(value: object, most: int = 60, quoted: bool = True) -> str:
    """A value for an error message, truncated: a cell of a file may hold a whole book."""
    text = str(value)
    rest = f"… ({len(text):,} characters)" if len(text) > most else ""
    return f"{text[:most]!r}{rest}" if quoted else f"{printable(text[:most])}{rest}"


def fingerprint(digests: Iterable[str]) -> str:
    """One short name for several arrays: 16 hex digits of the SHA-256 of their digests."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]
