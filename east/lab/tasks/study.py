"""task=study: soft F1 against F1, of batches by their size and of all rows by temperature.

Theorems 5.4, 5.8 and 5.9, EAST. Rows are unit Gaussians around class means, classified by their true posterior, or by
others like it where the best classifier is sought.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from east import metrics
from east.confusion import Confusion
from east.lab.files import write_atomically
from east.lab.reporting import plots
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.losses import MetricLoss
from east.losses.steps import linear

BATCHES = tuple(2**k for k in range(4, 14))
PREVALENCES = (0.5, 0.1, 0.01)
TEMPERATURES = (0.4, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
DRAWS = 1000
DELTA = 0.05


def main(_: Command, settings: Settings) -> int:
    """Write the numbers of each study to results_dir/studies and its figure to results_dir/figures."""
    folder = Path(settings.results_dir)
    for name, study, draw in (("bias", bias, draw_bias), ("temperature", temperature, draw_temperature)):
        frame, file = study(), folder / "studies" / f"{name}.csv"
        write_atomically(file, frame.to_csv(index=False, float_format="%.6g"))
        print(file, plots.save(draw(frame), folder / "figures" / f"study_{name}.svg"), sep="\n")
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


def temperature() -> pd.DataFrame:
    """The soft F1 and its best classifier against F1 and its own, by temperature. Equation 4 and Theorem 5.4, EAST.

    The two Gaussians of `population`, as an integral over a grid of x. A classifier has the probability
    p = sigmoid(3 (x - b)); its only parameter b is on a grid, so that both metrics are maximised exactly.

    step: mean of |H(p) - [p > 1/2]| for uniform p, which grows with the step's segments: by hand, 9/8 T.
    f1: soft F1 - F1 of the calibrated classifier. offset: the best b of soft F1 minus that of F1. regret: F1 that this
    loses.
    """
    x = torch.linspace(-6, 9, 3001, dtype=torch.float64)
    b = torch.linspace(-1, 5, 1201, dtype=torch.float64)
    densities = torch.stack([torch.exp(-((x - mean) ** 2) / 2) for mean in (0, 3)])
    uniform, half = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000, torch.tensor(0.5, dtype=torch.float64)
    p = torch.sigmoid(3 * (x - b[:, None]))
    lines = []
    for prevalence in PREVALENCES:
        rows = densities * torch.tensor([[1 - prevalence], [prevalence]]) / densities.sum(1, keepdim=True)
        hard = f1_of((p > 0.5).double(), rows)
        calibrated = int((b - 1.5 + math.log(prevalence / (1 - prevalence)) / 3).abs().argmin())
        for T in TEMPERATURES:
            soft, best = f1_of(linear(p, half, T), rows), int(hard.argmax())
            step = (linear(uniform, half, T) - (uniform > 0.5).double()).abs().mean()
            chosen = int(soft.argmax())
            errors = (soft - hard)[calibrated], b[chosen] - b[best], hard[best] - hard[chosen]
            lines.append((prevalence, T, float(step), *map(float, errors)))
    return pd.DataFrame(lines, columns=["prevalence", "T", "step", "f1", "offset", "regret"])


def f1_of(memberships: Tensor, rows: Tensor) -> Tensor:
    """F1 [classifiers] of the positive class for memberships [classifiers, n] and shares of rows [2, n] by class."""
    predicted = memberships @ rows.T
    counts = torch.stack([rows.sum(1) - predicted, predicted], -1)  # [classifiers, true class, predicted class]
    return metrics.f1(Confusion.from_matrix(counts), average="positive")


def by_prevalence(frame: pd.DataFrame, x: str, names: Sequence[str], **look: str) -> list[list[plots.Curve]]:
    """A panel for each of some columns, with a line for each prevalence."""
    parts = [
        (part, {"color": plots.COLOURS[k], "marker": plots.MARKERS[k], "label": f"{prevalence:.0%} positive"} | look)
        for k, (prevalence, part) in enumerate(frame.groupby("prevalence"))
    ]
    return [[(part[x], part[name], own) for part, own in parts] for name in names]


def draw_temperature(frame: pd.DataFrame) -> Figure:
    titles = {
        "f1": "|soft F1 − F1|",
        "offset": "|best b of soft F1 − best b of F1|",
        "regret": "F1 lost by maximising soft F1",
    }
    sizes = frame.assign(**{name: frame[name].abs().where(frame[name] != 0) for name in titles})
    panels = by_prevalence(sizes, "T", list(titles))
    step = frame.drop_duplicates("T")
    panels[0].append((step["T"], step.step, {"label": "mean error of the step", "ls": "--"}))
    shared = {"xscale": "log", "yscale": "log", "xlabel": "temperature T (falling)", "xlim": (0.45, 0.004)}
    return plots.curves(
        [(drawn, shared | {"title": title}) for drawn, title in zip(panels, titles.values(), strict=True)]
    )


def draw_bias(frame: pd.DataFrame) -> Figure:
    bias, entries, score = by_prevalence(frame, "n", ("bias", "entries", "score"))
    once = frame.drop_duplicates("n")  # the bound of an entry does not depend on the prevalence
    (bounds,) = by_prevalence(frame, "n", ("bound_score",), ls="--", marker="", label="")
    entries.append((once.n, once.bound_entries, {"label": "bounds of Theorems 5.8 and 5.9", "ls": "--"}))
    bias.append((once.n, 0 * once.n, {"color": plots.GREY}))
    shared = {"xscale": "log", "xlabel": "batch size n"}
    return plots.curves(
        [
            (bias, shared | {"title": "bias of soft F1", "ylabel": "mean over batches − population"}),
            (entries, shared | {"title": "largest error of an entry, 95 %", "yscale": "log"}),
            (score + bounds, shared | {"title": "error of soft F1, 95 %", "yscale": "log"}),
        ]
    )
