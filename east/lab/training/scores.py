"""Types of a trial's evaluation, as in records: confusion matrices, scores, decision rules, the epoch that was kept.

`val` and `test` are the parts of a split. Nothing here needs torch: the scores of recorded matrices take only NumPy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, NotRequired, TypeAlias, overload

import numpy as np
from typing_extensions import TypedDict

from east import metrics

DENSE_CLASSES = 2_000  # matrices of more classes are `Cells`
CHUNK = 1 << 20  # cells of matrices that become one array

Matrix: TypeAlias = Sequence[Sequence[int]]  # rows true, columns predicted
Score: TypeAlias = float | list[float] | None  # a list has one number per class
Scores: TypeAlias = Mapping[str, Score]


def _of_positive(c: Any, positive: int | None) -> dict[str, Any]:
    return {"average": "macro"} if positive is None else {"average": "positive", "positive": positive}


def _fbeta_pos(beta: float, c: Any, positive: int | None) -> Any:
    return None if positive is None else metrics.fbeta(c, beta, average="positive", positive=positive)


def _auroc_thresholded(c: Any, positive: int | None) -> Any:
    """The area under the ROC curve of 0/1 decisions: (recall + specificity) / 2 of the positive class, or its mean."""
    average = _of_positive(c, positive)
    return (metrics.recall(c, **average) + metrics.specificity(c, **average)) / 2


# Scores that follow from a confusion matrix: f(counts [..., d], positive class or None) -> [...], or [..., d] for the
# last two; f1_pos is None without a positive class. Counts are of tensors or NumPy arrays.
SCORES: dict[str, Callable[[Any, int | None], Any]] = {
    "f1_pos": partial(_fbeta_pos, 1.0),
    "f1_macro": lambda c, _: metrics.f1(c, average="macro"),
    "accuracy": lambda c, _: metrics.accuracy(c),
    "balanced_accuracy": lambda c, _: metrics.balanced_accuracy(c),
    "mcc": lambda c, _: metrics.mcc(c),
    "gmean": lambda c, _: metrics.gmean(c),
    "auroc_thresholded": _auroc_thresholded,
    "precision": lambda c, _: metrics.precision(c, average="none"),
    "recall": lambda c, _: metrics.recall(c, average="none"),
}
# Those whose mean over thresholds is a score, as in Bridging the Gap.
MEANS = SCORES | {"f2_pos": partial(_fbeta_pos, 2.0), "f3_pos": partial(_fbeta_pos, 3.0)}
RANKED = ("auroc", "average_precision")  # follow from the probabilities alone, so they are the same for every rule


class Cells(Sequence[list[int]]):
    """A confusion matrix with few nonzero cells, [row, column, count] each; its rows are built on demand."""

    def __init__(self, classes: int, cells: Sequence[Sequence[int]]):
        self.classes, self.cells = classes, cells

    @cached_property
    def by_row(self) -> dict[int, list[tuple[int, int]]]:
        rows: dict[int, list[tuple[int, int]]] = {}
        for i, j, count in self.cells:
            rows.setdefault(i, []).append((j, count))
        return rows

    @property
    def in_order(self) -> list[list[int]]:
        return sorted([*cell] for cell in self.cells if cell[2])

    def __len__(self) -> int:
        return self.classes

    def __eq__(self, other: object) -> bool:
        """Equal to a matrix of the same counts; never expanded to compare."""
        if isinstance(other, Cells):
            return self.classes == other.classes and self.in_order == other.in_order
        return isinstance(other, Sequence) and len(other) == self.classes and nonzero(other) == self.in_order

    __hash__ = None  # type: ignore[assignment]

    @overload
    def __getitem__(self, row: int) -> list[int]: ...
    @overload
    def __getitem__(self, row: slice) -> list[list[int]]: ...
    def __getitem__(self, row: int | slice) -> list[int] | list[list[int]]:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self.classes))]
        number = range(self.classes)[row]  # IndexError beyond the last row, which ends an iteration
        counts = [0] * self.classes
        for j, count in self.by_row.get(number, ()):
            counts[j] = count
        return counts


def nonzero(matrix: Matrix) -> list[list[int]]:
    """The nonzero cells [row, column, count] of a matrix, in order."""
    return [[i, j, count] for i, row in enumerate(matrix) for j, count in enumerate(row) if count]


class Margins(NamedTuple):
    """The counts of recorded confusion matrices [..., d] as metrics take them."""

    diagonal: np.ndarray
    actual: np.ndarray
    predicted: np.ndarray

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> "Margins":
        """Of matrices [m, d, d] of one size, which are stacked a few at a time; `Cells` are never expanded."""
        few = max(1, CHUNK // len(matrices[0]) ** 2)
        chunks: list[Margins] = []
        for k in range(0, len(matrices), few):
            chunk = matrices[k : k + few]
            if any(isinstance(matrix, Cells) for matrix in chunk):
                chunks += [cls.of_cells(m) if isinstance(m, Cells) else cls.of([[*m]]) for m in chunk]
            else:
                counts = np.array(chunk, dtype=float)
                chunks.append(cls(np.diagonal(counts, axis1=1, axis2=2), counts.sum(2), counts.sum(1)))
        return cls(*map(np.concatenate, zip(*chunks, strict=True)))

    @classmethod
    def of_cells(cls, matrix: Cells) -> "Margins":
        i, j, count = np.array(matrix.cells, dtype=np.int64).reshape(-1, 3).T
        sums = ((i[i == j], count[i == j]), (i, count), (j, count))
        return cls(*(np.bincount(place, n, matrix.classes)[None] for place, n in sums))

    @property
    def classes(self) -> int:
        return self.diagonal.shape[-1]

    @property
    def missed(self) -> np.ndarray:
        return self.actual - self.diagonal

    @property
    def false_positives(self) -> np.ndarray:
        return self.predicted - self.diagonal


class MatrixBatch:
    """Confusion matrices of one size; each score is computed for all of them when it is first asked for."""

    def __init__(self, positive: int | None):
        self.positive = positive
        self.matrices: list[Matrix] = []
        self.columns: dict[str, list[Score]] = {}

    @cached_property
    def margins(self) -> Margins:
        return Margins.of(self.matrices)

    def column(self, name: str) -> list[Score]:
        """One score of every matrix."""
        if name in self.columns:
            return self.columns[name]
        few = len(self.matrices[0]) <= DENSE_CLASSES  # otherwise the numbers of one record fill megabytes
        values = MEANS[name](self.margins if few else Margins.of(self.matrices), self.positive)
        column = [None] * len(self.matrices) if values is None else values.tolist()
        return self.columns.setdefault(name, column) if few else column


class LazyScores(Mapping[str, Score]):
    """The scores of one matrix, or their means over several: those that follow from it, and those that are stored."""

    __slots__ = ("batch", "computed", "ranks", "row", "stored")

    def __init__(self, batch: MatrixBatch, matrices: Sequence[Matrix], mean: bool, stored: Scores, ranks: Scores = {}):  # noqa: B006
        """ranks: the scores of argmax, of which those that follow from the probabilities alone hold for any rule."""
        first = len(batch.matrices)
        batch.matrices += matrices
        self.batch, self.row = batch, slice(first, first + len(matrices)) if mean else first
        self.computed, self.ranks = MEANS if mean else SCORES, ranks
        self.stored = stored and {n: v for n, v in stored.items() if v is not None and n not in self.computed}

    def __getitem__(self, name: str) -> Score:
        if name in self.computed:
            values: Any = self.batch.column(name)[self.row]
            if isinstance(self.row, slice):
                return None if values[0] is None else np.mean(values, 0).tolist()
            return values
        if name in RANKED and self.computed is SCORES:
            return self.ranks.get(name, self.stored.get(name))
        return self.stored[name]

    def __iter__(self) -> Iterator[str]:
        ranked = dict.fromkeys(RANKED) if self.computed is SCORES else {}
        return iter({**self.computed, **ranked, **self.stored})

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Best(NamedTuple):
    """The epoch whose weights a trial has kept: its numbers on validation, its temperature; None where there is none.

    `val_metric` is 1 - M. If the metric decides which epoch that is, it chooses among trials too: `val_loss` is 1 - M
    as well, and `tie` breaks its ties.
    """

    val_loss: float | None = None
    val_metric: float | None = None
    temperature: float | None = None
    epoch: int | float | None = None  # a whole number
    tie: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """As in a record, which has a `tie` only if there is one."""
        values = self._asdict()
        return values if self.tie is not None else {name: x for name, x in values.items() if name != "tie"}


class StoredRule(TypedDict, total=False):
    """A decision rule as JSON: a threshold, class weights, scale and shift, or gains."""

    threshold: float
    weights: list[float]
    scale: list[float]
    shift: list[float]
    gains: list[list[float]]


class Judged(TypedDict):
    """The confusion matrices and scores of one decision rule, by part."""

    confusion: dict[str, Matrix]
    scores: dict[str, Scores]


class JudgedRule(TypedDict):
    """A rule other than argmax. A mean over thresholds has one matrix for each of them."""

    rule: NotRequired[StoredRule | None]
    at: NotRequired[list[float]]  # the thresholds of a mean
    confusion: dict[str, Matrix] | dict[str, list[Matrix]]
    scores: dict[str, Scores]


class Evaluation(Judged):
    """Argmax, and the other rules that were requested."""

    decisions: dict[str, JudgedRule]


class Stacked(TypedDict):
    """How an ensemble came about."""

    folds: int  # fewer than the setting if a class has fewer rows
    weights: dict[str, float]  # of each component in the mixture
    epochs: list[int]  # of each network
    temperature: float  # by which the networks' out-of-fold probabilities were smoothed; 1: not at all
    confusion: dict[str, Matrix]  # of each component out of fold, by argmax
