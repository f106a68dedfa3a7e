"""task=study: checks of the method that are not tables of trials; each computes a small frame and draws it.

    soft_hard   the soft metric that is trained against the hard one that counts, epoch by epoch
    balanced    EAST against cross-entropy where no class is rare
    gap         the distance between soft and hard metric, by number of classes and temperature
    bias        batch against population metric, by batch size, with the bounds of Theorems 5.8 and 5.9

The first two train, and take overrides such as dataset=mammography. The others simulate a calibrated classifier: rows
are unit Gaussians around class means, classified by their true posterior.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from east import metrics
from east.choices import ConfigError, choose
from east.confusion import Confusion
from east.lab.experiment.runs import Run, load, splits_of
from east.lab.files import write_text
from east.lab.reporting import plots
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.training import engine
from east.lab.training.population import Outcome, Trial
from east.losses import MetricLoss

TEMPERATURES = (0.2, 0.1, 0.05, 0.02, 0.01)
CLASSES = (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
ACCURACY = 0.8  # of the simulated classifier, whatever the number of classes
BATCHES = tuple(2**k for k in range(4, 14))
PREVALENCES = (0.5, 0.1, 0.01)
DRAWS = 1000
DELTA = 0.05
EPOCHS = 80
DATA = ("dataset", "split", "model", "hyper", "device", "data_dir", "config_dir")


@dataclass(frozen=True)
class Study:
    """How to `compute` a frame from the user's command and `draw` it; `takes`: sections that the command may set."""

    compute: Callable[[Command], pd.DataFrame]
    draw: Callable[[pd.DataFrame], Figure]
    takes: tuple[str, ...] = ()


def main(command: Command, settings: Settings) -> int:
    if not settings.study:
        raise ConfigError(f"task=study needs study=…: {', '.join(STUDIES)}, or all")
    names = list(STUDIES) if settings.study == "all" else [settings.study]
    command = command.without("task", "study", "results_dir", "debug")
    for name in names:
        checked(name, command)  # before the first one trains
    for name in names:
        for file in run(name, command, settings.results_dir):
            print(file, flush=True)
    return 0


def checked(name: str, command: Command) -> Study:
    """The study of this name; ConfigError if there is none, or if it does not take what the command sets."""
    study = STUDIES[choose("study", name, STUDIES)]
    for setting in command.values:
        if setting.partition(".")[0] not in study.takes:
            raise ConfigError(f"{setting}: study={name} takes {', '.join(study.takes) or 'no settings: it simulates'}")
    return study


def run(name: str, command: Command, results_dir: str | Path) -> list[Path]:
    """Carry out a study; write results_dir/studies/<name>.csv and its figure, return the files."""
    study = checked(name, command)
    frame = study.compute(command)
    target = Path(results_dir) / "studies" / name
    files = plots.save(study.draw(frame), target)
    write_text(target.with_suffix(".csv"), frame.to_csv(index=False, float_format="%.6g"))
    return [target.with_suffix(".csv"), *files]


def trained(command: Command, seeds: Sequence[int]) -> list[Outcome]:
    """One setting, trained from several seeds as a population."""
    run = Run.of(compose.settings(command))
    trials = [Trial(run.science, seed) for seed in seeds]
    loaded = load(run.settings.dataset, run.settings.data_dir)
    return engine.train(trials, splits_of(loaded, trials), device=run.settings.device)


def with_defaults(command: Command, defaults: Mapping[str, Any]) -> Command:
    """The user's command over these defaults. Another dataset=… comes without the options of the default one."""
    fitting = {name: value for name, value in defaults.items() if name.partition(".")[0] not in command}
    return Command(fitting).but(command.values)


def soft_hard(command: Command) -> pd.DataFrame:
    """Validation scores of one run of EAST: epoch, temperature, soft (at that temperature), hard (of argmax)."""
    data = {"dataset": "synthetic", "dataset.classes": 5, "dataset.imbalance": 10, "dataset.separability": 2}
    command = with_defaults(command, {**data, "loss": "f1", "preset": "budget"}).but(search="none")
    loss = compose.settings(command).loss
    if not loss.anneals:
        raise ConfigError(f"study=soft_hard needs a loss with a temperature; {loss.name} has none")
    (outcome,) = trained(command, [0])
    history = pd.DataFrame(outcome.history)
    scores = {"soft": 1 - history["val_loss"], "hard": 1 - history["val_metric"]}
    return history[["epoch", "temperature"]].assign(**scores, dataset=outcome.trial.config.dataset.name)


@plots.styled
def draw_soft_hard(frame: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(5.6, 3.8))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    above.plot(frame.epoch, frame.soft, color=plots.BLUE, label="soft metric, at the temperature of the epoch")
    above.plot(frame.epoch, frame.hard, color=plots.ORANGE, ls="--", label="hard metric, of the decisions")
    below.step(frame.epoch, frame.temperature, color=plots.INK, where="mid")
    for epoch in frame.epoch[frame.temperature.diff() < 0]:
        above.axvline(epoch - 0.5, color=plots.GREY, lw=0.5, ls=":")
    above.set(ylabel="validation score", title=f"{frame.dataset[0]}: what is trained, and what is meant")
    below.set(xlabel="epoch", ylabel="T", ylim=(0, None))
    above.legend(loc="lower right", fontsize=8)
    return figure


def balanced(command: Command) -> pd.DataFrame:
    """Macro F1 of the validation decisions for f1 and ce, from five seeds: dataset, loss, seed, epoch, f1_macro.

    Eighty epochs each without early stopping; f1 is cooled every twenty.
    """
    common = with_defaults(command, {"dataset": "digits", "hyper.batch_size": 128})
    common = common.but({"search": "none", "protocol.patience": 1000, "protocol.max_epochs": EPOCHS})
    overrides: dict[str, dict[str, float]] = {
        "f1": {"protocol.stage_epochs": EPOCHS // 4, "annealing.r": 0.5, "annealing.patience": 1000},
        "ce": {"protocol.stage_epochs": EPOCHS},
    }
    settings = compose.settings(common)
    if len(load(settings.dataset, settings.data_dir).classes) == 2:
        raise ConfigError(f"study=balanced compares macro F1 of more than two classes; {settings.dataset.name} has two")
    frames = []
    for loss, schedule in overrides.items():
        for outcome in trained(common.but(schedule, loss=loss), range(5)):
            trial = {"dataset": outcome.trial.config.dataset.name, "loss": loss, "seed": outcome.trial.seed}
            scores = 1 - np.array(outcome.history["val_metric"])
            frames.append(pd.DataFrame(trial | {"epoch": outcome.history["epoch"], "f1_macro": scores}))
    return pd.concat(frames)


@plots.styled
def draw_balanced(frame: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(5.6, 3.2))
    axes = figure.add_subplot()
    names = {"f1": ("F1*, cooled every 20 epochs", plots.BLUE, "-"), "ce": ("cross-entropy", plots.ORANGE, "--")}
    for loss, (label, colour, line) in names.items():
        scores = frame[frame.loss == loss].groupby("epoch").f1_macro
        mean, std = scores.mean(), scores.std()
        axes.plot(mean.index, mean, color=colour, ls=line, label=label)
        axes.fill_between(mean.index, mean - std, mean + std, color=colour, alpha=0.2, lw=0)
    seeds = frame.seed.nunique()
    axes.set_title(f"{frame.dataset.iloc[0]}: mean ± std of {seeds} seeds")
    axes.set(xlabel="epoch", ylabel="macro F1, validation")
    axes.set_ylim(frame[frame.epoch > 5].f1_macro.min() - 0.02, None)
    axes.legend(loc="lower right")
    return figure


def gap(_: Command) -> pd.DataFrame:
    """Hard and soft scores of the same predictions: classes, temperature, metric, hard, soft, gap (hard - soft)."""
    lines = []
    for classes in CLASSES:
        logits, labels = calibrated(classes, rows=20_000)
        hard = Confusion.from_predictions(logits.argmax(-1), labels, classes)
        for metric in ("accuracy", "f1"):
            score = float(metrics.METRICS[metric](hard))
            for temperature in TEMPERATURES:
                soft = 1 - float(MetricLoss(metric, temperature=temperature)(logits, labels))
                lines.append((classes, temperature, metric, score, soft, score - soft))
    return pd.DataFrame(lines, columns=["classes", "temperature", "metric", "hard", "soft", "gap"])


def calibrated(classes: int, rows: int) -> tuple[Tensor, Tensor]:
    """Logits [rows, d] of the Bayes classifier for d equally frequent classes, spaced to reach ACCURACY.

    A row is classified correctly if mu exceeds the lead of its strongest wrong class, so mu is a quantile of the leads.
    """
    noise = torch.randn(rows, classes, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(rows) % classes
    true_class = torch.nn.functional.one_hot(labels, classes)
    leads = noise.masked_fill(true_class.bool(), -torch.inf).amax(-1) - noise[true_class.bool()]
    mu = torch.quantile(leads, ACCURACY)
    return mu * (noise + mu * true_class), labels


@plots.styled
def draw_gap(frame: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(7.2, 3.0))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (metric, part) in zip(panels, frame.groupby("metric"), strict=True):
        for k, (temperature, line) in enumerate(part.groupby("temperature", sort=False)):
            look = {"color": plots.BLUE, "alpha": 1 - 0.17 * k, "marker": plots.MARKERS[k], "ms": 3.5, "lw": 1.2}
            axes.plot(line.classes, line.gap, label=f"T = {temperature:g}", **look)
        axes.axhline(0, color=plots.GREY, lw=0.6)
        axes.set(xscale="log", xlabel="classes", title={"f1": "macro F1"}.get(str(metric), str(metric)))
    panels[0].set_ylabel(f"hard − soft (hard accuracy {ACCURACY:g})")
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def bias(_: Command) -> pd.DataFrame:
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


@plots.styled
def draw_bias(frame: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(9.6, 3.2))
    left, middle, right = panels = figure.subplots(1, 3)
    for k, (prevalence, part) in enumerate(frame.groupby("prevalence")):
        colour = plots.COLOURS[k]
        look = {"color": colour, "marker": plots.MARKERS[k], "ms": 3.5, "lw": 1.2}
        left.plot(part.n, part.bias, label=f"{prevalence:.0%} positive", **look)
        middle.plot(part.n, part.entries, **look)
        right.plot(part.n, part.score, **look)
        right.plot(part.n, part.bound_score, color=colour, ls="--", lw=1)
    middle.plot(part.n, part.bound_entries, color=plots.INK, ls="--", lw=1, label="Theorem 5.8")
    right.plot([], [], color=plots.INK, ls="--", lw=1, label="Theorem 5.9")
    left.axhline(0, color=plots.GREY, lw=0.6)
    left.set(title="bias of soft F1", ylabel="mean over batches − population")
    middle.set(title="largest error of an entry, 95 %", yscale="log")
    right.set(title="error of soft F1, 95 %", yscale="log")
    right.axhline(1, color=plots.GREY, lw=0.6, ls=":")
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch size n")
        axes.legend(fontsize=8)
    return figure


STUDIES = {
    "soft_hard": Study(soft_hard, draw_soft_hard, (*DATA, "loss", "annealing", "protocol", "preset")),
    "balanced": Study(balanced, draw_balanced, DATA),
    "gap": Study(gap, draw_gap),
    "bias": Study(bias, draw_bias),
}
