"""Types of a trial's evaluation, as in records: confusion matrices, scores, decision rules, the epoch that was kept.

`val` and `test` are the parts of a split. Nothing here needs torch.
"""

from typing import NamedTuple, NotRequired, TypeAlias

from typing_extensions import TypedDict

Matrix: TypeAlias = list[list[int]]  # rows true, columns predicted
Scores: TypeAlias = dict[str, float | list[float] | None]  # name -> value; a list has one number per class


class Best(NamedTuple):
    """The epoch whose weights a trial has kept: its numbers on validation, its temperature; None where there is none.

    `val_metric` is 1 - M. If the metric decides which epoch that is, it chooses among trials too: `val_loss` is 1 - M
    as well, and `tie` breaks its ties.
    """

    val_loss: float | None = None
    val_metric: float | None = None
    temperature: float | None = None
    epoch: float | None = None  # a whole number
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
