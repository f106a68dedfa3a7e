"""Types of a trial's evaluation, as in records: confusion matrices, scores and decision rules.

`val` and `test` are the parts of a split. Nothing here needs torch.
"""

from typing import NotRequired, TypeAlias

from typing_extensions import TypedDict

Matrix: TypeAlias = list[list[int]]  # rows true, columns predicted
Scores: TypeAlias = dict[str, float | list[float] | None]  # name -> value; a list has one number per class


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
