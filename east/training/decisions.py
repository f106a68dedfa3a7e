"""From probabilities to classes: argmax, a threshold, or class weights tuned on validation for a metric.

Narasimhan et al. 2014; Koyejo et al. 2014.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from east.confusion import Confusion

LOG_WEIGHTS = np.linspace(-3, 3, 25)
SWEEPS = 5


def cumulative(values: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """True and false positives of the decision `values >= t` at each distinct value t, falling; and those values."""
    order = np.argsort(-values, kind="stable")
    values, truth = values[order], truth[order]
    last = np.flatnonzero(np.append(np.diff(values) != 0, True))
    found = np.cumsum(truth)[last]
    return found, last + 1 - found, values[last]


def tuned(
    probabilities: Tensor, labels: Tensor, metric: Callable[[Confusion], Tensor], positive: int | None
) -> dict[str, Any]:
    """The rule that maximises the metric: {"threshold": t} for two classes, {"weights": [d]} for more."""
    if probabilities.shape[-1] == 2:
        positive = 1 if positive is None else positive
        return {"threshold": best_threshold(probabilities[:, positive], labels == positive, metric, positive)}
    return {"weights": best_weights(probabilities, labels, metric)}


def decided(probabilities: Tensor, rule: Mapping[str, Any], positive: int | None) -> Tensor:
    """Predicted classes [n] under a rule of `tuned`."""
    if "threshold" in rule:
        positive = 1 if positive is None else positive
        return torch.where(probabilities[:, positive].double() >= rule["threshold"], positive, 1 - positive)
    return (probabilities.double() * torch.tensor(rule["weights"], dtype=torch.float64)).argmax(-1)


def best_threshold(values: Tensor, truth: Tensor, metric: Callable[[Confusion], Tensor], positive: int = 1) -> float:
    """The midpoint between neighbouring scores at which `p >= t` maximises the metric; of equals the nearest to 0.5."""
    truth = truth.numpy()
    found, false, at = cumulative(values.double().numpy(), truth)
    if len(at) == 1:
        return 0.5
    found, false, at = found[:-1], false[:-1], (at[:-1] + at[1:]) / 2
    positives, negatives = truth.sum(), (~truth).sum()
    matrix = np.stack([found, positives - found, false, negatives - false], axis=-1).reshape(-1, 2, 2)
    if positive == 1:
        matrix = matrix[:, ::-1, ::-1]
    value = metric(Confusion.from_matrix(torch.tensor(matrix.astype(float)))).numpy()
    best = np.flatnonzero(value >= value.max() - 1e-12)
    return float(at[best[np.abs(at[best] - 0.5).argmin()]])


def best_weights(probabilities: Tensor, labels: Tensor, metric: Callable[[Confusion], Tensor]) -> list[float]:
    """Weights [d] such that argmax_k w_k p_k maximises the metric: coordinate ascent on a grid of log w_k."""
    logs = torch.log(probabilities.double().clamp_min(1e-30))
    grid, classes = torch.tensor(LOG_WEIGHTS), logs.shape[-1]
    weights = torch.zeros(classes, dtype=torch.float64)
    best = float(metric(Confusion.from_predictions(logs.argmax(-1), labels, classes)))
    for _ in range(SWEEPS):
        before = best
        for k in range(classes):
            weighted = logs + weights
            weighted[:, k] = -torch.inf
            rival, other = weighted.max(-1)
            mine = logs[:, k] + grid[:, None]
            # Ties go to the lower index, as in argmax.
            chosen = torch.where((mine > rival) | ((mine == rival) & (k < other)), k, other)
            values = metric(Confusion.from_predictions(chosen, labels, classes))
            if float(values.max()) > best + 1e-12:
                best = float(values.max())
                weights[k] = grid[values.argmax()]
        if best == before:
            break
    return weights.exp().tolist()
