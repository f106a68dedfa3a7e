"""Types of a trial's evaluation, as in records: confusion matrices, scores, decision rules, the epoch that was kept.

`val` and `test` are the parts of a split. Nothing here needs torch.
"""

from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypeAlias, overload

from typing_extensions import TypedDict

DENSE_CLASSES = 2_000  # matrices of more classes are `Cells`

Matrix: TypeAlias = Sequence[Sequence[int]]  # rows true, columns predicted
Scores: TypeAlias = dict[str, float | list[float] | None]  # name -> value; a list has one number per class


class Cells(Sequence[list[int]]):
    """A confusion matrix of very many classes, whose rows are built on demand."""

    def __init__(self, classes: int, cells: Sequence[Sequence[int]]):
        self.classes, self.cells = classes, cells
        self.by_row: dict[int, list[tuple[int, int]]] = {}
        for i, j, count in cells:
            self.by_row.setdefault(i, []).append((j, count))

    def __len__(self) -> int:
        return self.classes

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
