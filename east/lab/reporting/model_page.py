"""The results of task=compare and task=evaluate as files: a self-contained HTML page, scores and predictions as CSV."""

from dataclasses import replace
from html import escape
from io import StringIO
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import precision_recall_curve

from east import decisions
from east.confusion import Confusion
from east.lab.data.common import Data, Splits, Table, shown
from east.lab.files import write_atomically
from east.lab.reporting import plots
from east.lab.reporting.comparison import Comparison, DecidedRows, with_interval
from east.lab.reporting.html import bullets, document, pre, table
from east.metrics import METRICS, default_average

WRONG = 12  # mistakes that are shown
VALUES = 6  # of their columns
CELL = 30  # characters of a cell
MATRIX = 20  # classes of a confusion matrix that fits a page; with more, the most frequent mistakes are listed
CURVES = 6  # precision-recall curves in one figure
POINTS = 200  # of a curve
BINS = 10  # of the calibration curve
RARE = 0.05  # the share of a class below which its calibration curve is logarithmic
DECIDED_FOR = ("f1", "mcc", "balanced_accuracy", "gmean", "accuracy")
COLUMNS = 1000  # columns of the data that are described one by one


def write(
    folder: Path,
    result: Comparison,
    loaded: Data,
    splits: Splits,
    about: str,
    notes: list[str],
    command: str,
    predict: str,
) -> None:
    """Write report.html, scores.csv, predictions.csv and command.txt of a comparison.

    about: the data in a few lines. predict: the command that applies the saved model.
    """
    winner, rows = result.winner, rows_of(loaded, splits.test.index.numpy())
    part = replace(winner.test, frame=rows)
    write_atomically(folder / "scores.csv", result.scores.to_csv(index=False))
    write_atomically(folder / "predictions.csv", predictions(part).to_csv(index=False))
    write_atomically(folder / "command.txt", command + "\n")
    header, *lines = result.lines()
    won = escape(f"{result.score}: {result.summary}")
    columns = splits.encoding.describe(COLUMNS) if splits.encoding else ()
    reached = {result.score: result.scores["test"][0]} | winner.test.scores()
    values = [[name, f"{value:.3f}"] for name, value in reached.items()]
    sections = {
        "The candidates": f"<p><strong>{won}</strong></p>{table(header, lines)}{bullets(map(escape, notes))}",
        **of_model(part, "Decisions of the saved model", table(["score", "test"], values)),
        "What each decision costs": decided_for(result),
        "The data": pre(about),
        "How the columns were read": pre("\n".join(columns)),
        "Predict new rows": pre(predict),
        "How this was made": pre(command) + method(result, in_time=splits.train.time is not None),
    }
    title = f"Which model? {folder.name.removesuffix(f'-{result.score}')}, by {result.score}"
    write_atomically(folder / "report.html", document(title, sections))


def write_evaluation(folder: Path, title: str, part: DecidedRows, scores: pd.DataFrame, command: str) -> None:
    """Write report.html and scores.csv of a saved model on labelled rows. scores: rows of text, header first."""
    write_atomically(folder / "scores.csv", scores.to_csv(index=False))
    lines = [[name, *with_interval(*numbers)] for name, *numbers in scores.itertuples(index=False)]
    values = (
        table(["score", "value", "95 % interval"], lines) + "<p>Intervals: 95 %, for new rows of the same kind.</p>"
    )
    sections = {**of_model(part, "Scores", values), "How this was made": pre(command)}
    write_atomically(folder / "report.html", document(title, sections))


def method(result: Comparison, in_time: bool) -> str:
    units = "rows" if result.winner.test.groups is None else "groups of rows"
    saved = (
        "The saved model is the mean of all models of the winner, which is usually a little better than each of them "
        "is on the test rows."
    )
    if in_time:
        saved = (
            "Those models knew older rows only. In the saved model, classifiers are fitted again, to all rows; "
            "networks are those of the last fold, whose training the newest rows stopped."
        )
    return (
        "<p>All candidates were cross-fitted: each row was judged by models that did not train on it. The winner has "
        "the best score on the rows out of fold that are not test rows; they also determine the stack and the decision "
        f"rules. The test rows had no part in these choices. {saved} Intervals hold for new rows of the same kind; "
        f"they treat {units} as independent, and those of the leads hold for all candidates together.</p>"
    )


def decided_for(result: Comparison) -> str:
    """What the winner's probabilities would decide for the score and for other metrics, on the test rows."""
    part, held_out, lines = result.winner.test, result.winner.held_out.probabilities, []
    same = result.score.removesuffix(f"_{default_average(len(part.classes))}")
    measures = {result.score: result.measure} | {name: METRICS[name] for name in DECIDED_FOR if name != same}
    for name, measure in measures.items():
        rule = decisions.expected(held_out, measure, part.positive)
        c = Confusion.from_predictions(rule.decide(part.probabilities), part.labels, len(part.classes))
        predicted = " / ".join(f"{count:,.0f}" for count in c.predicted.tolist())
        lines.append([name, predicted, *(f"{float(other(c)):.3f}" for other in measures.values())])
    return table(["best for", "rows predicted per class", *measures], lines)


def rows_of(loaded: Data, index: np.ndarray) -> pd.DataFrame:
    """Some rows of the data without their target: as read from a file, else their features, else without columns."""
    if not isinstance(loaded, Table):
        return pd.DataFrame(index=index)
    if loaded.written is None or loaded.encoding is None:
        features = loaded.features[index].numpy()
        return pd.DataFrame(features, index=index, columns=loaded.columns or None)
    return loaded.written.iloc[index].drop(columns=loaded.encoding.target)


def predictions(part: DecidedRows) -> pd.DataFrame:
    """Predictions on test rows: row, label, predicted, and a probability per class."""
    labels, p, predicted = arrays(part)
    names = np.array(part.classes, dtype=object)
    about = pd.DataFrame({"row": part.frame.index + 1, "label": names[labels], "predicted": names[predicted]})
    return pd.concat([about, pd.DataFrame(p, columns=[f"p_{name}" for name in names])], axis=1)


def of_model(part: DecidedRows, title: str, scores: str) -> dict[str, str]:
    """Sections about one model's decisions; the first has this title and begins with these scores, in HTML."""
    decides_by = f"<p>Decides by: {escape(decisions.rule_in_words(part.rule, part.classes))}</p>"
    return {
        title: scores + decides_by + confusion(part),
        "Precision, recall and calibration": recall_curves(part) + calibration(part),
        "Most confident mistakes": mistakes(part),
    }


def arrays(part: DecidedRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels [n], probabilities [n, d] and decisions [n]."""
    return part.labels.numpy(), part.probabilities.numpy(), part.predicted.numpy()


def confusion(part: DecidedRows) -> str:
    counts, names = part.confusion.matrix.round().long().numpy(), part.classes
    if len(names) > MATRIX:
        wrong = counts - np.diag(np.diag(counts))
        pairs = [np.unravel_index(k, wrong.shape) for k in np.argsort(-wrong, axis=None)[:MATRIX]]
        lines = [[names[i], names[j], wrong[i, j]] for i, j in pairs if wrong[i, j]]
        return table(["true class", "predicted", "rows"], lines)
    recall = counts.diagonal() / np.maximum(counts.sum(1), 1)
    lines = [[name, *row, f"{share:.3f}"] for name, row, share in zip(names, counts, recall, strict=True)]
    return table(["true \\ predicted", *names, "recall"], lines)


def recall_curves(part: DecidedRows) -> str:
    """Precision against recall of the positive class, else of the rarest classes; a dot marks the model's decisions."""
    labels, p, predicted = arrays(part)
    counts = np.bincount(labels, minlength=len(part.classes))
    drawn = [int(k) for k in np.argsort(counts, kind="stable") if 0 < counts[k] < len(labels)]
    drawn = drawn[:CURVES] if part.positive is None else [k for k in drawn if k == part.positive]
    figure, axes = panel("recall", "precision")
    for colour, k in zip(plots.COLOURS, drawn, strict=False):
        precision, recall, _ = precision_recall_curve(labels == k, p[:, k])
        thin = np.unique(np.linspace(0, len(recall) - 1, POINTS).round().astype(int))
        axes.plot(recall[thin], precision[thin], color=colour, label=part.classes[k].replace("$", r"\$"))
        hits, marked = ((predicted == k) & (labels == k)).sum(), (predicted == k).sum()
        if marked:
            axes.plot(hits / counts[k], hits / marked, "o", color=colour)
    if len(drawn) > 1:
        axes.legend()
    names = ", ".join(part.classes[k] for k in drawn)
    return svg(figure, f"Precision and recall of {names}; the dot is the chosen cut") if drawn else ""


def calibration(part: DecidedRows) -> str:
    """Observed share against mean probability, in bins of equally many events; logarithmic if the class is rare."""
    labels, p, _ = arrays(part)
    values, truth, event = p.max(1), p.argmax(1) == labels, "the most probable class is right"
    if part.positive is not None:
        values, truth = p[:, part.positive], labels == part.positive
        event = f"the class is {part.classes[part.positive]}"
    order = np.argsort(values, kind="stable")
    events = truth[order].cumsum()
    edges = np.searchsorted(events, np.linspace(0, events[-1], BINS + 1)[1:-1], side="right")
    bins = [rows for rows in np.split(order, np.unique(edges)) if len(rows)]
    figure, axes = panel("probability", "observed share")
    if truth.mean() < RARE:
        least = max(min(values[rows].mean() for rows in bins), 1 / len(values)) / 2
        axes.set(xscale="log", yscale="log", xlim=(least, 1.2), ylim=(least, 1.2))
    axes.plot([1e-9, 1], [1e-9, 1], "--", color=plots.GREY)
    axes.plot([values[rows].mean() for rows in bins], [truth[rows].mean() for rows in bins], "o-", color=plots.BLUE)
    return svg(figure, f"Calibration: how often {event}, by its probability")


def panel(x: str, y: str) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(plots.STYLE):
        figure = Figure(figsize=(3.6, 2.8))
        axes = figure.add_subplot()
        axes.set(xlabel=x, ylabel=y, xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
        axes.grid(alpha=0.3)
    return figure, axes


def svg(figure: Figure, caption: str) -> str:
    """A figure as part of a page."""
    text = StringIO()
    with matplotlib.rc_context(plots.STYLE):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawing = text.getvalue()
    return f"<figure>{drawing[drawing.index('<svg') :]}<figcaption>{escape(caption)}</figcaption></figure>"


def mistakes(part: DecidedRows) -> str:
    """The wrong rows whose true class has the lowest probability, with the values of their first columns."""
    labels, p, predicted = arrays(part)
    wrong = np.flatnonzero(labels != predicted)
    worst = wrong[np.argsort(p[wrong, labels[wrong]], kind="stable")[:WRONG]]
    values = part.frame.iloc[worst, :VALUES]
    lines = [
        [
            number + 1,
            *(f"{cell(part.classes[k[i]])} ({p[i, k[i]]:.4f})" for k in (labels, predicted)),
            *map(cell, row),
        ]
        for i, (number, *row) in zip(worst, values.itertuples(name=None), strict=True)
    ]
    header = ["row", "true class (probability)", "predicted (probability)"]
    header += [shown(name, CELL, quoted=False) for name in values.columns]
    total = part.frame.shape[1]
    cut = f" The first {VALUES} of {total:,} columns are shown." if total > VALUES else ""
    count = f"<p>{len(wrong):,} of {len(labels):,} rows are wrong. Row 1 is the first below the header.{cut}</p>"
    return (table(header, lines) if lines else "") + count


def cell(value: object) -> str:
    """A value for a table: shortened, and blank if it is missing."""
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.6g}"
    return "" if value is None or str(value) in ("nan", "NaT", "<NA>") else shown(value, CELL, quoted=False)
