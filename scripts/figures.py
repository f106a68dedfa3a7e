"""Draw the figures of README and docs/ from the committed records and from data that come with scikit-learn.

python scripts/figures.py        writes docs/figures/*.svg
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict

from east import metrics
from east.confusion import Confusion
from east.lab.experiment import records
from east.lab.reporting import plots, tables
from east.lab.reporting.catalogue import Catalogue
from east.lab.reporting.tables import ALL, ResultTable
from east.losses import MetricLoss
from east.losses.steps import linear

ROOT = Path(__file__).resolve().parents[1]
TEMPERATURES = (0.4, 0.2, 0.1, 0.05, 0.01)
ROWS = {
    "F1*": "trained on F1 (EAST)",
    "CE": "cross-entropy",
    "CE + plug-in": "cross-entropy, tuned threshold",
}  # row of the table `plugin` -> label
TITLES = {"cocktailparty": "CocktailParty", "adult": "Adult, no bug", "mammography": "Mammography", "kaggle": "Kaggle"}


METHODS = {
    "Metric CE": "metric cross-entropy, most probable class",
    "Metric CE + plug-in": "metric cross-entropy, tuned rule",
    "CE stopped by its loss + expected": "cross-entropy by its loss, rule without labels",
    "CE stopped by its loss + plug-in": "cross-entropy by its loss, tuned rule",
    "CE stopped by its loss": "cross-entropy by its loss, most probable class",
    "CE": "cross-entropy by F1, most probable class",
    "CE weighted": "class-weighted cross-entropy",
    "EAST positive": "EAST, F1 of the positive class",
    "EAST macro": "EAST, macro F1",
    "EAST after warm-up": "EAST after a warm-up",
    "Boosting + expected": "gradient boosting, rule without labels",
    "Random forest + expected": "random forest, rule without labels",
}  # row of the table `contest` -> label


@plots.styled
def contest(table: ResultTable) -> Figure:
    """F1 lead of each method over cross-entropy with a tuned rule, on the held-out datasets."""
    figure = Figure(figsize=(9.2, 3.6))
    blocks = [entry for entry in table.rankings if entry.block.startswith("held out")]
    panels = figure.subplots(1, len(blocks), sharey=True)
    for axes, entry in zip(panels, blocks, strict=True):
        for y, row in enumerate(METHODS):
            if lead := entry.leads[ALL].get(row):
                colour = plots.ORANGE if "EAST" in row else plots.GREEN if "Metric" in row else plots.BLUE
                axes.plot([lead.low, lead.high], [y, y], color=colour)
                axes.plot(lead.difference, y, "o", ms=5, color=colour)
        axes.axvline(0, color=plots.INK, lw=0.8)
        classes = entry.block.removeprefix("held out, ")
        axes.set(title=f"{classes}, {len(entry.columns)} datasets", yticks=range(len(METHODS)))
        axes.set(ylim=(len(METHODS) - 0.5, -0.5), xlim=(-0.15, 0.06), xticks=(-0.15, -0.1, -0.05, 0, 0.05))
        axes.set_yticklabels(METHODS.values())
    label = "F1 lead over cross-entropy stopped by F1 with a tuned rule; mean and 95 % interval over datasets"
    figure.supxlabel(label, fontsize=9)
    return figure


@plots.styled
def headline(table: ResultTable) -> Figure:
    """F1 of the positive class on four datasets: mean and 95 % interval of the mean over trials."""
    figure = Figure(figsize=(9.2, 1.9))
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, (block, title) in zip(panels, TITLES.items(), strict=True):
        cells = [table.blocks[block][row, "f1_positive"] for row in ROWS]
        presets = "/".join(dict.fromkeys(cell.preset for cell in cells))
        for y, (row, cell) in enumerate(zip(ROWS, cells, strict=True)):
            ours = cell.summary
            colour = plots.ORANGE if row == "F1*" else plots.BLUE
            axes.errorbar(ours.mean, y, xerr=ours.high - ours.mean, fmt="o", ms=5, color=colour)
            axes.annotate(
                f"{ours.mean:.3f}", (ours.mean, y), (0, 5), textcoords="offset points", ha="center", fontsize=8
            )
        axes.set(title=f"{title}\n(n = {ours.n}, {presets})", yticks=range(len(ROWS)), ylim=(len(ROWS) - 0.5, -0.7))
        axes.margins(x=0.2)
        axes.set_yticklabels(ROWS.values())
    figure.supxlabel("F1 of the positive class, test rows; n trials and the preset of their training", fontsize=9)
    return figure


ENSEMBLES = {
    "Stack + expected": "networks, forests, boosting, logistic regression:\nmixed, decided without labels",
    "CE stopped by its loss + expected": "one network, decided without labels",
    "Boosting, tuned by scikit-learn": "gradient boosting, threshold tuned by scikit-learn",
}  # row of the table `contest_ensembles` -> label


@plots.styled
def ensembles(table: ResultTable) -> Figure:
    """F1 lead over one network with a searched setting and a tuned threshold, on tables that no choice was made on."""
    figure = Figure(figsize=(9.2, 1.9), layout="constrained")
    axes, (entry,) = figure.add_subplot(), table.rankings
    for y, row in enumerate(ENSEMBLES):
        lead, colour = entry.leads[ALL][row], plots.GREEN if row.startswith("Stack") else plots.BLUE
        axes.plot([lead.low, lead.high], [y, y], color=colour)
        axes.plot(lead.difference, y, "o", ms=5, color=colour)
        said = f"{lead.difference:+.3f}, ahead on {lead.wins} of {lead.n}".replace("-", "−")
        axes.annotate(said, (lead.difference, y), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.axvline(0, color=plots.INK, lw=0.8)
    axes.set(yticks=range(len(ENSEMBLES)), ylim=(len(ENSEMBLES) - 0.5, -0.7))
    axes.set_yticklabels(ENSEMBLES.values())
    label = "F1 lead over one network with a searched setting and a tuned threshold; mean and 95 % interval"
    figure.supxlabel(label, fontsize=9)
    return figure


VERDICTS = {  # word -> colour
    "reproduced": plots.GREEN,
    "close": plots.BLUE,
    "imprecise": plots.GREY,
    "differs": plots.ORANGE,
    None: plots.RED,
}
PAPERS = {"east_v2": "EAST, version 2", "east_v1": "EAST, version 1", "btg": "Bridging the Gap"}


@plots.styled
def published(built: Sequence[ResultTable]) -> Figure:
    """Ours against the published number for every cell that has been run, with our 95 % interval of the mean."""
    figure = Figure(figsize=(9.2, 4.1), layout="constrained")
    panels = figure.subplots(1, len(PAPERS), sharey=True)
    for axes, (paper, title) in zip(panels, PAPERS.items(), strict=True):
        cells = {id(c.published): c for table in built for c in table.cells if c.published}.values()
        own = [cell for cell in cells if cell.published.paper == paper]
        axes.plot([0, 1], [0, 1], color=plots.INK, lw=0.8)
        for cell in (cell for cell in own if cell.values):
            ours, full = cell.summary, cell.preset == "paper" or not cell.trains_networks
            reach = 0.0 if ours.high is None else ours.high - ours.mean
            look = {"color": VERDICTS[cell.gap.word], "ms": 4, "mfc": VERDICTS[cell.gap.word] if full else "white"}
            axes.errorbar(cell.published.mean, ours.mean, yerr=reach, fmt="o", elinewidth=0.7, **look)
        run = sum(bool(cell.values) for cell in own)
        axes.set(title=f"{title}\n{run} of {len(own)} cells run", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))
        axes.set(xlabel="published", box_aspect=1)
    panels[0].set_ylabel("ours, by the formulas")
    keys = [plots.handle(word or "a single trial", colour, "o") for word, colour in VERDICTS.items()]
    keys.append(plots.handle("hollow: shorter training than the paper's", plots.GREY, "o", mfc="white"))
    figure.legend(handles=keys, ncols=len(keys), loc="outside lower center")
    return figure


def steps() -> Figure:
    """The step at several temperatures, for a threshold of 0.5. Eq. 4, arXiv 2405.20954."""
    p, shades = torch.linspace(0, 1, 501), (plots.GREY, plots.GREEN, plots.ORANGE, plots.BLUE, plots.INK)
    drawn = [
        (p.tolist(), linear(p, torch.tensor(0.5), t).tolist(), {"label": f"T = {t:g}", "color": colour})
        for t, colour in zip(TEMPERATURES, shades, strict=True)
    ]
    axes = {"xlabel": "probability p", "ylabel": "H(p), threshold 0.5", "xlim": (0, 1), "ylim": (0, 1)}
    return plots.curves([(drawn, axes)])


def soft_hard() -> Figure:
    """Soft and hard metrics of a logistic regression's out-of-fold predictions on scikit-learn's digits."""
    inputs, labels = load_digits(return_X_y=True)
    model = LogisticRegression(C=0.001, max_iter=500)
    p = torch.as_tensor(cross_val_predict(model, inputs, labels, method="predict_proba"))
    y, temperatures, drawn = torch.as_tensor(labels), [0.2 * 0.7**k for k in range(15)], []
    counts = Confusion.from_predictions(p.argmax(-1), y, p.shape[-1])
    for name, colour in {"f1": plots.BLUE, "mcc": plots.ORANGE}.items():
        soft = [1 - float(MetricLoss(name, temperature=t)(p.log(), y)) for t in temperatures]
        hard = [float(metrics.METRICS[name](counts))] * len(temperatures)
        drawn += [(temperatures, soft, {"label": f"soft {name}", "color": colour, "marker": "o"})]
        drawn += [(temperatures, hard, {"label": f"hard {name}", "color": colour, "ls": "--"})]
    axes = {"xlabel": "temperature T (falling)", "ylabel": "score", "xscale": "log", "xlim": (0.22, 0.001)}
    return plots.curves([(drawn, axes)])


@plots.styled
def worth(matrix: list[list[int]]) -> Figure:
    """What one more correct positive row adds to a metric, relative to one more correct negative row."""
    figure = Figure(figsize=(4.6, 2.6))
    axes = figure.add_subplot()
    names = {"accuracy": {}, "balanced_accuracy": {}, "f1": {"average": "positive"}, "mcc": {}}
    counts = torch.tensor(matrix, dtype=torch.float64)
    for y, (name, options) in enumerate(names.items()):
        gains = []
        for k in (0, 1):  # a row of class k moves from the wrong column to the right one
            better = counts.clone()
            better[k, 1 - k] -= 1
            better[k, k] += 1
            gains.append(float(metrics.METRICS[name](Confusion.from_matrix(better), **options)
                               - metrics.METRICS[name](Confusion.from_matrix(counts), **options)))  # fmt: skip
        axes.barh(y, gains[1] / gains[0], color=plots.BLUE)
        axes.annotate(f"{gains[1] / gains[0]:.1f}", (gains[1] / gains[0], y), (4, -3), textcoords="offset points")
    axes.set(yticks=range(len(names)), xlabel="worth of a positive row / worth of a negative row")
    axes.set_yticklabels([name.replace("_", " ") for name in names])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    return figure


def main() -> None:
    found = records.scan(ROOT / "results")
    ce = [r for r in found if (r.config.dataset.name, r.config.loss.name, r.stage) == ("mammography", "ce", "trial")]
    chosen = min((r for r in ce if r.status == "done" and r.seed == 0), key=lambda r: r.key)
    catalogue = Catalogue(found)
    built = [tables.build(name, ROOT / "results", scanned=catalogue) for name in tables.papers_tables()]
    figures = {
        "contest": contest(tables.build("contest", ROOT / "results", scanned=found)),
        "ensembles": ensembles(tables.build("contest_ensembles", ROOT / "results", scanned=found)),
        "headline": headline(tables.build(tables.spec("plugin"), ROOT / "results", scanned=found)),
        "published": published(built),
        "steps": steps(),
        "soft_hard": soft_hard(),
        "worth": worth(chosen.confusion["test"]),
    }
    for name, figure in figures.items():
        # White background: an embedded picture cannot follow the page's dark mode.
        print(plots.save(figure, ROOT / "docs" / "figures" / f"{name}.svg", background="white"))


if __name__ == "__main__":
    main()
