"""task=study: how far a batch's soft F1 is from that of all rows, by batch size. Theorems 5.8 and 5.9, EAST.

It simulates a calibrated classifier: rows are unit Gaussians around class means, classified by their true posterior.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from east import metrics
from east.confusion import Confusion
from east.lab.files import write_text
from east.lab.reporting import plots
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.losses import MetricLoss

BATCHES = tuple(2**k for k in range(4, 14))
PREVALENCES = (0.5, 0.1, 0.01)
DRAWS = 1000
DELTA = 0.05


def main(_: Command, settings: Settings) -> int:
    """Write results_dir/studies/bias.csv and its figure."""
    frame = bias()
    target = Path(settings.results_dir) / "studies" / "bias"
    files = plots.save(draw_bias(frame), target)
    write_text(target.with_suffix(".csv"), frame.to_csv(index=False, float_format="%.6g"))
    print(target.with_suffix(".csv"), *files, sep="\n")
    return 0


def bias() -> pd.DataFrame:
    """Soft F1 of random batches against the population's, by prevalence of the positive class and batch size.

    bias: mean over batches minus the population's score. entries, score: the 95 % quantiles of max |C_n/n - C| and
    |M(C_n) - M(C)|. bound_entries: sqrt(log(2 d²/delta) / (2n)), Theorem 5.8. bound_score: that times the sum of
    |dM/dC|, the most that M can move to first order: the rate of Theorem 5.9 with this metric's constant.
    """
    lines = []
    for prevalence in PREVALENCES:
        memberships, labels = population(prevalence)
        whole = Confusion.from_memberships(memberships, labels)
        C = (whole.matrix / len(labels)).requires_grad_()
        exact = metrics.f1(Confusion.from_matrix(C), average="positive")
        slope = float(torch.autograd.grad(exact, C)[0].abs().sum())
        C, target = C.detach(), float(exact.detach())
        for n in BATCHES:
            counts = torch.cat([c.matrix for c in sampled(memberships, labels, n)])
            scores = metrics.f1(Confusion.from_matrix(counts), average="positive")
            entries = (counts / n - C).abs().amax((-2, -1))
            bound = math.sqrt(math.log(2 * 2**2 / DELTA) / (2 * n))
            quantiles = [float(torch.quantile(e, 1 - DELTA)) for e in (entries, (scores - target).abs())]
            lines.append((prevalence, n, target, float(scores.mean()) - target, *quantiles, bound, slope * bound))
    columns = ["prevalence", "n", "population", "bias", "entries", "score", "bound_entries", "bound_score"]
    return pd.DataFrame(lines, columns=columns)


def population(prevalence: float, rows: int = 400_000) -> tuple[Tensor, Tensor]:
    """Memberships [rows, 2] at T = 0.2 and labels: two unit Gaussians three apart, classified by the true posterior."""
    positives = round(prevalence * rows)
    labels = (torch.arange(rows) < positives).long()
    x = torch.randn(rows, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 3 * labels
    z = 3 * (x - 1.5) + math.log(prevalence / (1 - prevalence))
    return MetricLoss("f1").memberships(torch.stack([torch.zeros_like(z), z], -1)), labels


def sampled(memberships: Tensor, labels: Tensor, n: int) -> Iterator[Confusion]:
    """Soft counts of DRAWS batches of n rows, in portions that fit in memory."""
    generator = torch.Generator().manual_seed(n)
    portion = max(1, min(DRAWS, 2_000_000 // n))
    for start in range(0, DRAWS, portion):
        index = torch.randint(len(labels), (min(portion, DRAWS - start), n), generator=generator)
        yield Confusion.from_memberships(memberships[index], labels[index])


def draw_bias(frame: pd.DataFrame) -> Figure:
    panels: list[list[plots.Curve]] = [[], [], []]
    for k, (prevalence, part) in enumerate(frame.groupby("prevalence")):
        look = (f"{prevalence:.0%} positive", plots.COLOURS[k], plots.MARKERS[k])
        for drawn, name in zip(panels, ("bias", "entries", "score"), strict=True):
            drawn.append(plots.Curve(part.n, part[name], *look))
        panels[2].append(plots.Curve(part.n, part.bound_score, "", plots.COLOURS[k], dashed=True))
    panels[0].append(plots.Curve(part.n, 0 * part.n, "", plots.GREY))
    panels[1].append(plots.Curve(part.n, part.bound_entries, "bounds of Theorems 5.8 and 5.9", dashed=True))
    shared = {"xscale": "log", "xlabel": "batch size n"}
    options = (
        {"title": "bias of soft F1", "ylabel": "mean over batches − population"},
        {"title": "largest error of an entry, 95 %", "yscale": "log"},
        {"title": "error of soft F1, 95 %", "yscale": "log"},
    )
    return plots.curves([(drawn, shared | own) for drawn, own in zip(panels, options, strict=True)])
