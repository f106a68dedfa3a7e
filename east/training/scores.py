"""What a trial is judged by, as evaluation returns it and records keep it: matrices, scores and decision rules.

`val` and `test` are the parts of a split. Nothing here needs torch.
"""

from typing import NotRequired, TypeAlias

from typing_extensions import TypedDict

Matrix: TypeAlias = list[list[int]]  # rows true, columns predicted
Scores: TypeAlias = dict[str, float | list[float] | None]  # by name; a list has one number per class


class StoredRule(TypedDict, total=False):
    """A decision rule as JSON: a threshold, class weights, scale and shift, or gains."""

    threshold: float
    weights: list[float]
    scale: list[float]
    shift: list[float]
    gains: list[list[float]]


class Judged(TypedDict):
    """One decision rule: the counts it leads to, and their scores, by part."""

    confusion: dict[str, Matrix]
    scores: dict[str, Scores]


class Decision(TypedDict):
    """A rule other than argmax. Rules that average over thresholds have one matrix for each."""

    rule: NotRequired[StoredRule | None]
    at: NotRequired[list[float]]  # the thresholds of a mean over several
    confusion: dict[str, Matrix] | dict[str, list[Matrix]]
    scores: dict[str, Scores]


class Evaluation(Judged):
    """Argmax, and the further rules that were asked for."""

    decisions: dict[str, Decision]
