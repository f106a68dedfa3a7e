"""Scores, intervals and p-values from the confusion matrices of committed records, computed without code of east."""

from collections import defaultdict
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

from tests.tracked import exported

ROOT = Path(__file__).parents[1]
POSITIVE, CIFAR10 = 1, {"dog": 5, "frog": 6}  # the class of a precision or recall


def scores_of(counts, of=POSITIVE):
    """Score name -> mean over confusion matrices [m, d, d] with true classes in rows."""
    right, actual, predicted = np.diagonal(counts, axis1=1, axis2=2), counts.sum(2), counts.sum(1)
    total = counts.sum((1, 2))
    fbeta = {b: (1 + b**2) * right / np.maximum(b**2 * actual + predicted, 1) for b in (1, 2, 3)}
    spread = [np.sqrt(total**2 - (margin**2).sum(1)) for margin in (actual, predicted)]
    mcc = (right.sum(1) * total - (actual * predicted).sum(1)) / np.maximum(spread[0] * spread[1], 1)
    precision, recall = right / np.maximum(predicted, 1), right / np.maximum(actual, 1)
    present = actual > 0
    balanced = recall.sum(1) / present.sum(1)  # also the "AUROC" of predictions
    scores = {f"f{b}_positive": values[:, 1] for b, values in fbeta.items()}
    scores |= {f"f{b}_pos": values[:, 1] for b, values in fbeta.items()}  # as records name it
    scores |= {"f1_macro": fbeta[1].mean(1), "accuracy": right.sum(1) / total, "mcc": mcc}
    scores |= {"balanced_accuracy": balanced, "auroc_thresholded": balanced}
    scores |= {"precision": precision[:, of], "recall": recall[:, of]}
    scores["gmean"] = np.prod(np.where(present, recall, 1), 1) ** (1 / present.sum(1))
    return {name: float(values.mean()) for name, values in scores.items()}


def matrices(stored):
    """[m, d, d] from a record's matrix, several matrices, or nonzero cells."""
    if isinstance(stored, dict):
        dense = np.zeros((stored["classes"], stored["classes"]))
        for row, column, count in stored["cells"]:
            dense[row, column] = count
        stored = dense
    counts = np.asarray(stored, dtype=float)
    return counts[None] if counts.ndim == 2 else counts


@cache
def records():
    """key -> its records, without the contest's, which are many."""
    by_key = defaultdict(list)
    for record in exported():
        if record["config"]["protocol"]["name"] != "contest":
            by_key[record["key"]].append(record)
    return by_key


def trials(key):
    return [r for r in records()[key] if (r["stage"], r["status"]) == ("trial", "done")]


@cache
def scored(key, score, column):
    """The scores of a setting's trials; a column such as "precision frog" names their class."""
    of = CIFAR10.get(column.rpartition(" ")[2], POSITIVE)
    return tuple(value(record, score, of) for record in trials(key))


def value(record, score, of):
    """A score such as "test.mcc" or "thresholds.test.f1_positive"."""
    *rule, split, name = score.split(".")
    judged = record["decisions"][rule[0]] if rule else record
    return scores_of(matrices(judged["confusion"][split]), of)[name]


def welch(values, mean, deviation):
    """The interval of ours minus a published mean of ten trials, whose deviation counts as at least 0.005."""
    n = len(values)
    ours, theirs = np.var(values, ddof=1) / n, max(deviation, 0.005) ** 2 / 10
    freedom = (ours + theirs) ** 2 / (ours**2 / (n - 1) + theirs**2 / 9)
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(ours + theirs)
    return np.mean(values) - mean - reach, np.mean(values) - mean + reach


def word(low, high):
    inside, contains_zero = low >= -0.02 and high <= 0.02, low <= 0 <= high
    words = {(True, True): "reproduced", (True, False): "close", (False, False): "differs", (False, True): "imprecise"}
    return words[inside, contains_zero]


def sign_flip(differences):
    """The share of sign patterns whose sum is at least as far from 0."""
    sums = [abs(np.dot(signs, differences)) for signs in product((1, -1), repeat=len(differences))]
    return np.mean([total >= sums[0] - 1e-12 for total in sums])


def holm(p_values):
    """p-values corrected for their number."""
    corrected, largest = {}, 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return [corrected[i] for i in range(len(p_values))]
