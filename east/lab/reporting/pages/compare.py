"""The results of task=compare and task=evaluate as files: a self-contained HTML page, scores and predictions as CSV.

No external requests and no scripts; light and dark, readable on a phone. scores.csv has every candidate's scores, means
over seeds if there are several; predictions.csv has what the winner's are computed from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from sklearn.metrics import precision_recall_curve

from east import decisions
from east.lab.data.common import Data, Splits, Table, shown
from east.lab.files import write_text
from east.lab.reporting.comparison import Comparison, Estimate, JudgedPart, scores_of
from east.lab.reporting.pages import html

if TYPE_CHECKING:
    import pandas as pd

WRONG = 12  # mistakes that are shown
VALUES = 6  # of their columns
CELL = 30  # characters of a cell
MATRIX = 20  # classes of a confusion matrix that fits a page; with more, the most frequent mistakes are listed
CURVES = 6  # precision-recall curves in one figure
POINTS = 200  # of a curve
BINS = 10  # of the calibration curve
COLUMNS = 1000  # columns of the data that are described one by one
WIDTH, HEIGHT, MARGIN = 340, 260, 44
STYLE = """
.lead { font-size: 1.15rem; max-width: 60rem; } .warning { color: var(--maybe); }
tr.winner td, tr.winner th { font-weight: 700; background: var(--panel); }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; } .axis { stroke: var(--soft); fill: none; }
.grid { stroke: var(--line); fill: none; } .curve { fill: none; stroke-width: 2; } .dash { stroke-dasharray: 4 4; }
thead th { white-space: normal; }
td.hit { background: var(--panel); font-weight: 700; }
"""
COLOURS = ("var(--link)", "var(--bad)", "var(--good)", "var(--maybe)", "var(--soft)", "var(--ink)")


@dataclass(frozen=True)
class Scored:
    """A model's decisions on labelled rows.

    frame: the rows as the user knows them, numbered from 0 by the index; None for the pairs of a graph.
    """

    part: JudgedPart
    rule: decisions.Rule
    classes: tuple[str, ...]
    positive: int | None
    frame: "pd.DataFrame | None"


def write(
    folder: Path,
    result: Comparison,
    loaded: Data,
    splits: Splits,
    about: str,
    notes: Sequence[str],
    command: str,
    predict: str,
) -> None:
    """Write report.html, scores.csv, predictions.csv and command.txt of a comparison.

    about: the data in a few lines. predict: the command that applies the saved model.
    """
    chosen = result.winner.chosen
    rows = rows_of(loaded, splits.test.index.numpy())
    scored = Scored(chosen.test, chosen.rule, result.classes, result.positive, rows)
    write_text(folder / "scores.csv", result.frame().to_csv(index=False))
    write_text(folder / "predictions.csv", predictions(result, rows).to_csv(index=False))
    write_text(folder / "command.txt", command + "\n")
    sections = {
        "The winner": winner(result, notes),
        "All candidates": candidates(result),
        **of_model(scored, f"Decisions of the saved model, seed {chosen.seed}", boxes(scored)),
        "The data": f"<pre>{escape(about)}</pre>",
        "How the columns were read": columns(splits),
        "Predict new rows": f"<pre>{escape(predict)}</pre>",
        "How this was made": f"<pre>{escape(command)}</pre>{method(result)}",
    }
    title = f"Which model? {folder.name.removesuffix(f'-{result.score}')}, by {result.score}"
    write_page(folder, title, sections)


def rows_of(loaded: Data, index: np.ndarray) -> "pd.DataFrame | None":
    """Some rows of the data without their target: as read from a file, else their features, else without columns."""
    import pandas as pd

    if loaded.kind == "graph":
        return None
    if not isinstance(loaded, Table):
        return pd.DataFrame(index=index)
    if loaded.raw is None or loaded.raw.frame is None or loaded.encoding is None:
        features = loaded.features[index].numpy()
        return pd.DataFrame(features, index=index, columns=loaded.columns or None)
    return loaded.raw.frame.iloc[index].drop(columns=loaded.encoding.target)


def write_evaluation(folder: Path, title: str, scored: Scored, scores: dict[str, Estimate], command: str) -> None:
    """Write report.html and scores.csv of a saved model on labelled rows."""
    import pandas as pd

    frame = pd.DataFrame([{"score": name, **vars(estimate)} for name, estimate in scores.items()])
    write_text(folder / "scores.csv", frame.to_csv(index=False))
    lines = [[name, *estimate.cells] for name, estimate in scores.items()]
    values = table(["score", "value", "95 % interval"], lines, "Scores")
    sections = {
        **of_model(scored, "Scores", f'{values}<p class="caption">Intervals: bootstrap over rows.</p>'),
        "How this was made": f"<pre>{escape(command)}</pre>",
    }
    write_page(folder, title, sections)


def write_page(folder: Path, title: str, sections: dict[str, str]) -> None:
    """Write report.html; sections without text are left out."""
    body = "".join(f"<section><h2>{escape(name)}</h2>{text}</section>" for name, text in sections.items() if text)
    page = html.document(title, f"<h1>{escape(title)}</h1>", body, STYLE)
    write_text(folder / "report.html", page)


def table(header: Sequence[str], lines: Sequence[Sequence[str]], label: str, marked: int | None = None) -> str:
    """A table of plain text, with words on the left of their cells; `marked`: the winner's row."""
    words = [all(text[0] not in "+-.0123456789" for text in column if text) for column in zip(*lines, strict=True)]
    kinds = [' class="word"' if word else "" for word in words] or [""] * len(header)
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(header, kinds, strict=True))
    rows = ""
    for k, (first, *others) in enumerate(lines):
        cells = "".join(f"<td{kind}>{escape(text)}</td>" for text, kind in zip(others, kinds[1:], strict=True))
        kind = ' class="winner"' if k == marked else ""
        rows += f'<tr{kind}><th scope="row">{escape(first)}</th>{cells}</tr>'
    return html.scrolling(label, f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>")


def winner(result: Comparison, notes: Sequence[str]) -> str:
    test = result.interval(result.best)
    parts = [
        f'<p class="lead"><strong>{escape(result.winner.name)}</strong>: {escape(result.score)} {test.value:.3f} on '
        f"test rows (95 % interval {test.low:.3f} to {test.high:.3f}), {result.standing}.</p>"
    ]
    if result.uncertain:
        parts.append(f'<p class="warning">The choice is uncertain: {escape(result.uncertain)}.</p>')
    if notes:
        parts.append(f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>")
    return "".join(parts)


def candidates(result: Comparison) -> str:
    lines = []
    for k, candidate in enumerate(result.candidates):
        lead = result.lead(k)
        ahead = ["", ""] if k == result.best else [f"{lead.value:+.3f}", f"{lead.low:+.3f} to {lead.high:+.3f}"]
        lines.append([candidate.name, f"{candidate.validation:.3f}", *result.interval(k).cells, *ahead])
    header = ["", "validation", "test", "95 % interval", "winner minus this", "95 % interval"]
    return table(header, lines, "All candidates", marked=result.best)


def method(result: Comparison) -> str:
    seeds = max(len(candidate.trials) for candidate in result.candidates)
    of_seeds = "are those of one seed" if seeds == 1 else f"are means over up to {seeds} seeds"
    drawn = "test rows" if result.winner.trials[0].test.groups is None else "groups of test rows"
    return (
        '<p class="caption">The winner has the best score on validation rows or, if a class has few of them, the '
        "highest likelihood among the candidates that are not clearly worse there. Plug-in rules are cross-fitted, "
        "and networks are judged on rows that were not used to stop their training. No candidate has seen the test "
        f"rows. Scores {of_seeds}; intervals come from a bootstrap over {drawn} and seeds, with the same ones for "
        "all candidates. The same numbers are in scores.csv, the winner's test predictions in predictions.csv.</p>"
    )


def predictions(result: Comparison, rows: "pd.DataFrame | None") -> "pd.DataFrame":
    """The winner's predictions on test rows: seed, row, label, predicted, and a probability per class."""
    import pandas as pd

    names, frames = np.array(result.classes, dtype=object), []
    for trial in result.winner.trials:
        part = trial.test
        numbers = (np.arange(len(part.labels)) if rows is None else rows.index) + 1
        frame = pd.DataFrame({"seed": trial.seed, "row": numbers, "label": names[part.labels.numpy()]})
        frame["predicted"] = names[part.predicted.numpy()]
        p = pd.DataFrame(part.probabilities.numpy(), columns=[f"p_{name}" for name in names])
        frames.append(pd.concat([frame, p], axis=1))
    return pd.concat(frames, ignore_index=True)


def boxes(scored: Scored) -> str:
    scores = {name: value for name, value in scores_of(scored.part, scored.positive).items() if value is not None}
    items = "".join(f"<li><strong>{value:.3f}</strong> {escape(name)}</li>" for name, value in scores.items())
    return f'<ul class="facts">{items}</ul>'


def of_model(scored: Scored, title: str, scores: str) -> dict[str, str]:
    """Sections about one model's decisions; the first has this title and begins with these scores, in HTML."""
    decides_by = decisions.explained(scored.rule, scored.classes)
    return {
        title: f'{scores}<p class="caption">Decides by: {escape(decides_by)}</p>{confusion(scored)}',
        "Precision, recall and calibration": f'<div class="gallery">{recall_curves(scored)}{calibration(scored)}</div>',
        "Most confident mistakes": mistakes(scored),
    }


def confusion(scored: Scored) -> str:
    counts = scored.part.confusion.matrix.round().long().numpy()
    names = scored.classes
    if len(names) > MATRIX:
        wrong = counts - np.diag(np.diag(counts))
        order = np.argsort(-wrong, axis=None)[:MATRIX]
        pairs = [np.unravel_index(k, wrong.shape) for k in order]
        lines = [[names[i], names[j], str(wrong[i, j])] for i, j in pairs if wrong[i, j]]
        return table(["true class", "predicted", "rows"], lines, "Most frequent mistakes")
    head = '<th scope="col">true \\ predicted</th>' + "".join(f'<th scope="col">{escape(n)}</th>' for n in names)
    head += '<th scope="col">recall</th>'
    rows = ""
    for i, name in enumerate(names):
        total = counts[i].sum()
        cells = "".join(f"<td{' class=hit' if i == j else ''}>{counts[i, j]:,}</td>" for j in range(len(names)))
        recall = f"{counts[i, i] / total:.3f}" if total else ""
        rows += f'<tr><th scope="row">{escape(name)}</th>{cells}<td>{recall}</td></tr>'
    return html.scrolling("Confusion matrix", f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>")


def recall_curves(scored: Scored) -> str:
    """Precision against recall of the positive class, else of the rarest classes; a dot marks the model's decisions."""
    labels, p = scored.part.labels.numpy(), scored.part.probabilities.numpy()
    predicted = scored.part.predicted.numpy()
    counts = np.bincount(labels, minlength=len(scored.classes))
    rarest = [int(k) for k in np.argsort(counts, kind="stable") if 0 < counts[k] < len(labels)]
    shown = rarest[:CURVES] if scored.positive is None else [k for k in rarest if k == scored.positive]
    if not shown:
        return ""
    drawn = ""
    for colour, k in zip(COLOURS, shown, strict=False):
        precision, recall, _ = precision_recall_curve(labels == k, p[:, k])
        thin = np.unique(np.linspace(0, len(recall) - 1, POINTS).round().astype(int))
        drawn += line(recall[thin], precision[thin], colour)
        hits = int(((predicted == k) & (labels == k)).sum())
        if (predicted == k).any():
            drawn += dot(hits / counts[k], hits / int((predicted == k).sum()), colour)
    names = [scored.classes[k] for k in shown]
    caption = f"Precision and recall of {', '.join(names)}; the dot is the chosen cut"
    legend = "".join(
        f' <span style="color: {colour}">&#9632;</span> {escape(name)}'
        for colour, name in zip(COLOURS, names, strict=False)
    )
    return figure(drawn, "recall", "precision", caption, legend if len(names) > 1 else "")


def calibration(scored: Scored) -> str:
    """Observed share against mean probability, in bins of equally many rows."""
    labels, p = scored.part.labels.numpy(), scored.part.probabilities.numpy()
    if scored.positive is None:
        values, truth = p.max(1), p.argmax(1) == labels
        event = "the most probable class is right"
    else:
        values, truth = p[:, scored.positive], labels == scored.positive
        event = f"the class is {scored.classes[scored.positive]}"
    bins = [part for part in np.array_split(np.argsort(values, kind="stable"), BINS) if len(part)]
    x, y = (np.array([column[part].mean() for part in bins]) for column in (values, truth))
    drawn = line(np.array([0.0, 1.0]), np.array([0.0, 1.0]), "var(--soft)", "dash") + line(x, y, COLOURS[0])
    drawn += "".join(dot(a, b, COLOURS[0]) for a, b in zip(x, y, strict=True))
    return figure(drawn, "probability", "observed share", f"Calibration: how often {event}, by its probability")


def figure(drawn: str, x: str, y: str, caption: str, legend: str = "") -> str:
    """A plot of `drawn` with both axes from 0 to 1; `legend` is HTML."""
    ticks = ""
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        a, b = place(value, value)
        ticks += f'<path class="grid" d="M{a:.1f} {place(0, 0)[1]:.1f}V{place(0, 1)[1]:.1f}"/>'
        ticks += f'<path class="grid" d="M{place(0, 0)[0]:.1f} {b:.1f}H{place(1, 0)[0]:.1f}"/>'
        ticks += f'<text x="{a:.1f}" y="{HEIGHT - 26}" text-anchor="middle">{value:g}</text>'
        ticks += f'<text x="{MARGIN - 6}" y="{b + 4:.1f}" text-anchor="end">{value:g}</text>'
    labels = f'<text x="{(WIDTH + MARGIN) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>'
    labels += f'<text x="4" y="12">{escape(y)}</text>'
    return (
        f'<figure><svg role="img" aria-label="{escape(caption)}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">{ticks}{labels}{drawn}</svg>'
        f"<figcaption>{escape(caption)}{legend and f'.<br>{legend}'}</figcaption></figure>"
    )


def place(x: float, y: float) -> tuple[float, float]:
    return MARGIN + x * (WIDTH - MARGIN - 12), HEIGHT - MARGIN - y * (HEIGHT - MARGIN - 22)


def line(x: np.ndarray, y: np.ndarray, colour: str, kind: str = "") -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(*point) for point in zip(x, y, strict=True)))
    return f'<polyline class="curve {kind}" stroke="{colour}" points="{points}"/>'


def dot(x: float, y: float, colour: str) -> str:
    a, b = place(x, y)
    return f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>'


def mistakes(scored: Scored) -> str:
    """The wrong rows whose true class has the lowest probability, with the values of their first columns."""
    if scored.frame is None:
        return ""
    labels, predicted = scored.part.labels.numpy(), scored.part.predicted.numpy()
    p = scored.part.probabilities.numpy()
    wrong = np.flatnonzero(labels != predicted)
    if not len(wrong):
        return "<p>All rows are right.</p>"
    worst = wrong[np.argsort(p[wrong, labels[wrong]], kind="stable")[:WRONG]]
    values = scored.frame.iloc[worst, :VALUES]
    lines = [
        [
            str(number + 1),
            *(f"{cell(scored.classes[k[i]])} ({p[i, k[i]]:.4f})" for k in (labels, predicted)),
            *(cell(value) for value in row),
        ]
        for i, (number, *row) in zip(worst, values.itertuples(name=None), strict=True)
    ]
    header = ["row", "true class (probability)", "predicted (probability)"]
    header += [shown(name, CELL, quoted=False) for name in values.columns]
    total = scored.frame.shape[1]
    cut = f" The first {VALUES} of {total:,} columns are shown." if total > VALUES else ""
    return (
        f"{table(header, lines, 'Most confident mistakes')}<p class='caption'>{len(wrong):,} of {len(labels):,} rows "
        f"are wrong. Row 1 is the first below the header.{cut}</p>"
    )


def cell(value: object) -> str:
    """A value for a table: shortened, and blank if it is missing."""
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:.6g}"
    return "" if value is None or str(value) in ("nan", "NaT", "<NA>") else shown(value, CELL, quoted=False)


def columns(splits: Splits) -> str:
    if splits.encoding is None:
        return ""
    return f"<pre>{escape(chr(10).join(splits.encoding.describe(COLUMNS)))}</pre>"
