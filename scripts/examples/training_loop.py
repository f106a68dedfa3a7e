"""MetricLoss in a plain PyTorch loop: train at one temperature until validation stops improving, lower it, repeat.

One row in twenty is positive, and the goal is F1 of the positive class. The classes overlap so much that few rows are
more likely positive than negative, so cross-entropy in the same loop finds few positives.
"""

import copy

import torch
from torch import nn

from east import Confusion, MetricLoss
from east.lab.training.annealing import temperatures
from east.metrics import f1

PATIENCE = 3  # epochs without a lower validation loss before a stage ends
BATCH = 512  # about 25 positives, enough for the metric of a batch to be meaningful


def moons(rows: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two interleaved half circles with noise: the positive one is rare."""
    labels = (torch.rand(rows, generator=generator) < 0.05).long()
    angle = torch.pi * torch.rand(rows, generator=generator)
    x = torch.stack((angle.cos() + labels, (1 - 2 * labels) * angle.sin() + 0.5 * labels), dim=1)
    return x + 0.6 * torch.randn(rows, 2, generator=generator), labels


def score(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """F1 of the positive class for hard decisions."""
    with torch.no_grad():
        return float(f1(Confusion.from_predictions(net(x).argmax(-1), y, classes=2), average="positive"))


def train(loss: nn.Module, stages: list[float], train_set, val_set) -> nn.Module:
    """Train a small network through the temperatures; each stage starts from the best weights of the one before."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    x, y = train_set
    for temperature in stages:
        loss.temperature = temperature  # has no effect on cross-entropy
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        lowest, best, waited = float("inf"), net.state_dict(), 0
        while waited < PATIENCE:
            for rows in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                loss(net(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                value = float(loss(net(val_set[0]), val_set[1]))
            waited += 1
            if value < lowest:
                lowest, best, waited = value, copy.deepcopy(net.state_dict()), 0
        net.load_state_dict(best)
    return net


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    train_set, val_set, test_set = (moons(rows, generator) for rows in (4000, 2000, 4000))
    cooling = temperatures("geometric", T0=0.2, r=0.5, T_min=0.02)
    east = train(MetricLoss("f1", average="positive"), cooling, train_set, val_set)
    plain = train(nn.CrossEntropyLoss(), [1.0], train_set, val_set)
    print(f"F1 of the positives on test: MetricLoss {score(east, *test_set):.3f}, "
          f"cross-entropy {score(plain, *test_set):.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
