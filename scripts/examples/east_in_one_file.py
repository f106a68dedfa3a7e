"""EAST (Evaluation Aligned Surrogate Training, arXiv 2405.20954) in one file, to be read from top to bottom.

    python scripts/examples/east_in_one_file.py [f1|mcc|accuracy]

A classifier is judged by a metric of its confusion matrix, but counting decisions has no gradient. EAST replaces each
decision by a soft membership, computes the metric of the soft confusion matrix, and minimises one minus that. A
temperature sets how soft the memberships are, and training lowers it step by step. Only torch and scikit-learn are
needed. n rows, d classes.
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn


def step(probabilities: Tensor, threshold: Tensor, temperature: float) -> Tensor:
    """H_T(p, tau), equation 4: the piecewise linear step through (0, 0), (low, T), (tau, 1/2), (high, 1-T), (1, 1).

    The middle piece is steep, and steeper the lower the temperature; the outer pieces keep a small slope, so that no
    row is without a gradient. Written as a sum of three ramps, which has no division by zero.
    """
    half_width = 2.5 * temperature * torch.minimum(threshold, 1 - threshold)
    low, high = threshold - half_width, threshold + half_width
    below = (probabilities / low).clamp(0, 1)
    across = ((probabilities - low) / (high - low)).clamp(0, 1)
    above = ((probabilities - high) / (1 - high)).clamp(0, 1)
    return temperature * below + (1 - 2 * temperature) * across + temperature * above


def memberships(logits: Tensor, temperature: float) -> Tensor:
    """g_T(p), equation 5: how much of each row counts towards each class, [n, d]; every row sums to 1.

    The dynamic threshold of a row is halfway between its two largest probabilities: what is above it is the decision.
    """
    probabilities = logits.softmax(1)
    threshold = probabilities.topk(2, dim=1).values.mean(1, keepdim=True)
    heights = step(probabilities, threshold, temperature)
    return heights / heights.sum(1, keepdim=True)


def confusion(counted: Tensor, labels: Tensor) -> Tensor:
    """The confusion matrix [d, d], rows true and columns predicted: soft if the memberships [n, d] are, else hard."""
    classes = counted.shape[1]
    return counted.new_zeros(classes, classes).index_add(0, labels, counted)


def accuracy(matrix: Tensor) -> Tensor:
    return matrix.trace() / matrix.sum()


def f1(matrix: Tensor) -> Tensor:
    """Macro F1, equation 2. A class that neither occurs nor is predicted counts as 0."""
    actual, predicted = matrix.sum(1), matrix.sum(0)
    return (2 * matrix.diagonal() / (actual + predicted).clamp_min(1e-12)).mean()


def mcc(matrix: Tensor) -> Tensor:
    """Matthews' correlation coefficient for any number of classes (R_K); 0 if all rows have one class."""
    shares = matrix / matrix.sum()
    actual, predicted = shares.sum(1), shares.sum(0)
    spread = (actual * (1 - actual)).sum() * (predicted * (1 - predicted)).sum()
    return (shares.diagonal() - actual * predicted).sum() / spread.clamp_min(1e-12).sqrt()


METRICS = {"f1": f1, "mcc": mcc, "accuracy": accuracy}


def loss(logits: Tensor, labels: Tensor, metric: str, temperature: float) -> Tensor:
    """EAST's loss: one minus the metric of the soft confusion matrix. As T falls it approaches the metric itself."""
    return 1 - METRICS[metric](confusion(memberships(logits, temperature), labels))


def score(logits: Tensor, labels: Tensor, metric: str) -> float:
    """The metric of the decisions, which is what the classifier is judged by."""
    decisions = nn.functional.one_hot(logits.argmax(1), logits.shape[1]).float()
    return METRICS[metric](confusion(decisions, labels)).item()


def train(model: nn.Module, data: dict[str, tuple[Tensor, Tensor]], metric: str, patience=10, outer_patience=3) -> None:
    """Train at T = 0.2 until the validation loss stops improving, cool by r = 0.8, and go on from the best weights.

    Early stopping has two levels. Inner: a temperature ends after `patience` epochs without a lower validation loss.
    Outer: training ends after `outer_patience` temperatures whose best loss is not lower than that of all before.
    The model keeps the weights of the best temperature.
    """
    (inputs, labels), (val_inputs, val_labels) = data["train"], data["val"]
    temperature, kept, kept_loss, idle_stages = 0.2, model.state_dict(), float("inf"), 0
    while idle_stages < outer_patience and temperature > 0.001:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
        best, best_loss, idle_epochs = copy.deepcopy(model.state_dict()), float("inf"), 0
        while idle_epochs < patience:
            model.train()
            for batch in torch.randperm(len(inputs)).split(128):
                optimizer.zero_grad()
                loss(model(inputs[batch]), labels[batch], metric, temperature).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                val_loss = loss(model(val_inputs), val_labels, metric, temperature).item()
            idle_epochs += 1
            if val_loss < best_loss:
                best, best_loss, idle_epochs = copy.deepcopy(model.state_dict()), val_loss, 0
        model.load_state_dict(best)
        with torch.no_grad():
            reached = score(model(val_inputs), val_labels, metric)
        print(f"T {temperature:.3f}: validation loss {best_loss:.3f}, {metric} {reached:.3f}")
        idle_stages += 1
        if best_loss < kept_loss - 1e-4:
            kept, kept_loss, idle_stages = best, best_loss, 0
        temperature *= 0.8
    model.load_state_dict(kept)


def digits_with_a_rare_class(rare: int = 8, keep: int = 6) -> dict[str, tuple[Tensor, Tensor]]:
    """scikit-learn's digits with one in `keep` rows of one digit, split 64/16/20, standardised on the training part."""
    images, digits = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
    chosen = (digits != rare) | ((digits == rare).cumsum(0) % keep == 0)
    images, digits = images[chosen].float(), digits[chosen]
    parts = torch.randperm(len(digits)).tensor_split([int(0.64 * len(digits)), int(0.80 * len(digits))])
    mean, std = images[parts[0]].mean(0), images[parts[0]].std(0).clamp_min(1e-6)
    names = ("train", "val", "test")
    return {name: ((images[rows] - mean) / std, digits[rows]) for name, rows in zip(names, parts, strict=True)}


def main() -> None:
    metric = sys.argv[1] if len(sys.argv) > 1 else "f1"
    torch.manual_seed(0)
    data = digits_with_a_rare_class()
    hidden = [nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.25)]
    model = nn.Sequential(*hidden, nn.Linear(64, 10))
    train(model, data, metric)
    inputs, labels = data["test"]
    print(f"test {metric}: {score(model.eval()(inputs), labels, metric):.3f}")


if __name__ == "__main__":
    main()
