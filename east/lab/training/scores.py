"""Types of a trial's evaluation, as in records: confusion matrices, scores, decision rules, the epoch that was kept.

`val` and `test` are the parts of a split. Nothing here needs torch: the scores of recorded matrices take only NumPy.
Pydantic reads these types from the JSON of records, within their bounds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from east import metrics

DENSE_CLASSES = 16  # matrices of more classes are `Cells`
MANY_CLASSES = 2_000  # of more, the numbers of one record fill megabytes and are not kept
MOST_CLASSES = 200_000
LARGEST = 1e100  # of any number, so that sums and squares stay finite

STRICT = ConfigDict(strict=True, extra="forbid")
IN_ORDER = Field(union_mode="left_to_right")  # the first type that fits, which is faster than the best
Whole = Annotated[int, Field(ge=0, le=2**53)]
Real = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Finite: TypeAlias = Real | Annotated[int, Field(ge=-(2**53), le=2**53)]  # an int stays an int


@with_config(STRICT)
@dataclass(eq=False)
class Cells:
    """A confusion matrix with few nonzero cells, [row, column, count] each; its rows are built on demand."""

    classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)]
    cells: list[Annotated[list[Whole], Field(min_length=3, max_length=3)]]

    def __post_init__(self) -> None:
        for i, j, _ in self.cells:
            if i >= self.classes or j >= self.classes:
                raise ValueError(f"expected cells of {self.classes} classes, got one at row {i}, column {j}")

    @classmethod
    def of(cls, matrix: "Matrix") -> "Cells":
        if isinstance(matrix, Cells):
            return matrix
        nonzero = [[i, j, count] for i, row in enumerate(matrix) for j, count in enumerate(row) if count]
        return cls(len(matrix), nonzero)

    @cached_property
    def _by_row(self) -> dict[int, list[tuple[int, int]]]:
        rows: dict[int, list[tuple[int, int]]] = {}
        for i, j, count in self.cells:
            rows.setdefault(i, []).append((j, count))
        return rows

    def __len__(self) -> int:
        return self.classes

    def __getitem__(self, row: int) -> list[int]:
        counts = [0] * self.classes
        for j, count in self._by_row.get(range(self.classes)[row], ()):  # IndexError ends an iteration
            counts[j] = count
        return counts

    def __eq__(self, other: object) -> bool:
        """Equal to a matrix of the same counts; never expanded to compare."""
        if not isinstance(other, Cells | list) or len(other) != self.classes:
            return False
        ours, theirs = (sorted([*cell] for cell in one.cells if cell[2]) for one in (self, Cells.of(other)))
        return ours == theirs


def _compact(matrix: list[list[int]]) -> "Matrix":
    if any(len(row) != len(matrix) for row in matrix):
        raise ValueError(f"expected as many columns as rows, {len(matrix)}")
    return matrix if len(matrix) <= DENSE_CLASSES else Cells.of(matrix)


Matrix: TypeAlias = list[list[int]] | Cells  # rows true, columns predicted
Dense = Annotated[list[list[Whole]], Field(min_length=1), AfterValidator(_compact)]
StoredMatrix = Annotated[Dense | Cells, IN_ORDER]
Score: TypeAlias = Finite | list[Finite | None] | None  # a list has one number per class


def _in_range(scores: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scores are from -1 to 1, but for one that a loss of the user's own was trained for."""
    for name, value in scores.items():
        if isinstance(value, int | float) and abs(value) > 1 + 1e-6 and name != "trained_for":
            raise ValueError(f"{name}: expected -1 to 1")
    return scores


Scores: TypeAlias = Annotated[Mapping[str, Score], AfterValidator(_in_range)]


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


class Margins(NamedTuple):
    """The counts of recorded confusion matrices [..., d] as metrics take them."""

    diagonal: np.ndarray
    actual: np.ndarray
    predicted: np.ndarray

    @classmethod
    def of(cls, matrices: Sequence[Matrix]) -> "Margins":
        """Of matrices [m, d, d] of one size; `Cells` are never expanded."""
        if any(isinstance(matrix, Cells) for matrix in matrices):
            each = [cls.of_cells(Cells.of(matrix)) for matrix in matrices]
            return cls(*map(np.concatenate, zip(*each, strict=True)))
        counts = np.array(matrices, dtype=float)
        return cls(np.diagonal(counts, axis1=1, axis2=2), counts.sum(2), counts.sum(1))

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
        few = len(self.matrices[0]) <= MANY_CLASSES
        values = MEANS[name](self.margins if few else Margins.of(self.matrices), self.positive)
        column = [None] * len(self.matrices) if values is None else values.tolist()
        return self.columns.setdefault(name, column) if few else column


class LazyScores(Mapping[str, Score]):
    """The scores of one matrix, or their means over several: those that follow from it, and those that are stored."""

    __slots__ = ("batch", "computed", "ranks", "row", "stored")

    def __init__(
        self, batch: MatrixBatch, matrices: list[Matrix], mean: bool, stored: Scores, ranks: Scores | None = None
    ):
        """ranks: of a rule, the scores of argmax, which has the same probabilities and so the same ranking."""
        first = len(batch.matrices)
        batch.matrices += matrices
        self.batch, self.row = batch, slice(first, first + len(matrices)) if mean else first
        self.computed = MEANS if mean else SCORES
        unstored = self.computed.keys() if ranks is None else {*self.computed, *RANKED}
        self.stored = {name: value for name, value in stored.items() if value is not None and name not in unstored}
        self.ranks = {} if ranks is None or mean else ranks

    def __getitem__(self, name: str) -> Score:
        if name in self.computed:
            values: Any = self.batch.column(name)[self.row]
            if isinstance(self.row, slice):
                return None if values[0] is None else np.mean(values, 0).tolist()
            return values
        return self.ranks[name] if name in RANKED and name in self.ranks else self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.computed, *filter(self.ranks.__contains__, RANKED), *self.stored]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Best(NamedTuple):
    """The epoch whose weights a trial has kept: its numbers on validation, its temperature; None where there is none.

    `val_metric` is 1 - M. If the metric decides which epoch that is, it chooses among trials too: `val_loss` is 1 - M
    as well, and `tie` breaks its ties.
    """

    val_loss: Finite | None = None
    val_metric: Finite | None = None
    temperature: Finite | None = None
    epoch: Finite | None = None  # a whole number
    tie: Finite | None = None

    def to_json(self) -> dict[str, float | None]:
        """As in a record, which has a `tie` only if there is one."""
        return {name: value for name, value in self._asdict().items() if (name, value) != ("tie", None)}


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


@with_config(STRICT)
class JudgedRule(TypedDict, total=False):
    """A rule other than argmax. A mean over thresholds has one matrix for each of them."""

    rule: Any  # a StoredRule
    at: list[Finite]  # the thresholds of a mean
    confusion: Mapping[str, Annotated[Dense | Cells | Annotated[list[Dense], Field(min_length=1)], IN_ORDER]]
    scores: dict[str, Scores]


class Evaluation(Judged):
    """Argmax, and the other rules that were requested."""

    decisions: dict[str, JudgedRule]


@with_config(STRICT)
class Stacked(TypedDict):
    """How an ensemble came about."""

    folds: Whole  # fewer than the setting if a class has fewer rows
    weights: dict[str, Finite]  # of each component in the mixture
    epochs: list[Whole]  # of each network
    temperature: Finite  # by which the networks' out-of-fold probabilities were smoothed; 1: not at all
    confusion: dict[str, StoredMatrix]  # of each component out of fold, by argmax
