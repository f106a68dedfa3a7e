"""Figures. `dots` and `leads` draw numbers with intervals below each other, `curves` draws lines.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and nothing is shown by colour alone: our
markers are filled, published ones hollow.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from east.lab.files import write_atomically
from east.lab.reporting import statistics
from east.lab.reporting.cells import MARKS, Cell
from east.lab.reporting.tables import ALL, Ranking, ResultTable

Curve: TypeAlias = tuple[ArrayLike, ArrayLike, dict[str, Any]]  # x, y, and what matplotlib calls its look

INK = "#2b2b2a"  # text and axes; the report lets it follow the page's colour
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a8a86"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#e69f00", "#56b4e9", GREY, INK)
MARKERS = "osD^vPX*"
DECISION_COLOURS = {"": BLUE, "plug-in": ORANGE, "expected": GREEN}  # "": argmax
REACH = 0.15  # a mean further than this from the median is an arrow at the end of the axis
STYLE: dict[Any, Any] = {  # matplotlib types its keys as literals
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "east",
    "pdf.fonttype": 42,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
}


styled = matplotlib.rc_context(STYLE)  # decorates functions that draw; nobody else's settings change


def save(figure: Figure, file: Path, background: str | None = None) -> Path:
    """Write a figure in the format that the file's name says; the same figure gives the same bytes.

    background: by default white in a png, transparent in the others.
    """
    stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix, {})
    facecolor = background or ("white" if file.suffix == ".png" else "none")
    with matplotlib.rc_context(STYLE):
        content = io.BytesIO()
        figure.savefig(content, format=file.suffix[1:], dpi=150, metadata=stamp, facecolor=facecolor)
    write_atomically(file, content.getvalue())
    return file


@dataclass(frozen=True)
class Dot:
    """A number with an interval on a line of a panel."""

    line: float
    at: float
    low: float
    high: float
    colour: str
    marker: str = "o"
    note: str = ""  # beside the axis
    hollow: bool = False


class Panel(NamedTuple):
    title: str
    names: Sequence[str]  # of the lines
    drawn: Sequence[Dot]


def forest(axes: Axes, drawn: Sequence[Dot], names: Sequence[str], left: float, right: float) -> None:
    """Draw dots with their intervals on named lines; one outside of the axis is an arrow at its end."""
    for dot in drawn:
        beside: dict[str, Any] = {
            **{"color": dot.colour, "fontsize": 5.5, "va": "center", "annotation_clip": False},
            **{"xycoords": ("axes fraction", "data"), "textcoords": "offset points"},
        }
        if left <= dot.at <= right:
            ends = [[dot.at - dot.low], [dot.high - dot.at]]
            face = "white" if dot.hollow else dot.colour
            axes.errorbar(dot.at, dot.line, xerr=ends, color=dot.colour, mfc=face, marker=dot.marker, ms=4, lw=1.2)
        else:
            below, number = dot.at < left, f"{round(dot.at, 3) + 0:.3f}".replace("-", "−")  # + 0: not -0.000
            words, place, align = (f"◂ {number}", 0, "left") if below else (f"{number} ▸", 1, "right")
            axes.annotate(words, (place, dot.line), (2 - 4 * place, 0), ha=align, **beside)
        axes.annotate(dot.note, (1, dot.line), (3, 0), **beside)
    axes.set(xlim=(left, right), ylim=(len(names) - 0.4, -0.6), yticks=range(len(names)), yticklabels=names)
    axes.tick_params(length=2, labelsize=8)


@styled
def figure_of(table: ResultTable) -> Figure:
    """The leads of a table that ranks its rows, else its cells: a line of panels for each block."""
    lines, handles = leads(table) if table.spec.ranked else dots(table)
    heights, width = [len(line[0].names) + 1.2 for line in lines], max(map(len, lines), default=1)
    figure = Figure(figsize=(1.2 + (5.6 if table.spec.ranked else 2.5 * width), 0.7 + 0.26 * sum(heights)))
    if not lines:
        figure.text(0.5, 0.5, "no records", ha="center")
        return figure
    grid = figure.subplots(len(lines), width, squeeze=False, height_ratios=heights)
    for places, line in zip(grid, lines, strict=True):
        for axes in places[len(line) :]:
            axes.set_visible(False)
        for axes, panel in zip(places, line, strict=False):
            forest(axes, panel.drawn, panel.names, *limits(panel.drawn))
            axes.set_title(panel.title, loc="left")
            axes.xaxis.set_major_locator(MaxNLocator(4 if width > 1 else "auto"))
            axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.5)
            if table.spec.ranked:
                axes.axvline(0, color=INK, lw=0.8)
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=8)
    return figure


def dots(table: ResultTable) -> tuple[list[list[Panel]], list[Line2D]]:
    """Cells, ours and published, with 95 % intervals of the means, and the legend; empty blocks are left out."""
    lines: list[list[Panel]] = []
    blocks = {block: cells for block, cells in table.blocks.items() if any(cell.values for cell in cells.values())}
    for block, cells in blocks.items():
        rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
        lines.append([])
        for column in columns:
            drawn = [dot for y, row in enumerate(rows) for dot in _dots_of(y, cells[row, column])]
            title = f"{block}: {column}" if len(blocks) > 1 else column
            lines[-1].append(Panel(title, rows if column == columns[0] else [""] * len(rows), drawn))
    shown = [cell for cells in blocks.values() for cell in cells.values()]
    handles = [handle("ours (n, marks of its training)", BLUE, "o")]
    handles += [handle("published (n = 10)", GREY, "D", mfc="none")] if any(c.published for c in shown) else []
    used = {mark for cell in shown if cell.values for mark in cell.marks}
    words = [f"{mark} {text.partition(':')[0].rstrip('.')}" for mark, text in MARKS.values() if mark in used]
    return lines, [*handles, *map(handle, ["bars: 95 % interval of the mean", *words])]


def _dots_of(y: int, cell: Cell) -> list[Dot]:
    """Published and ours, one below the other around line y; beside ours, the number of trials and their marks."""
    apart, ours, found = 0.15 if cell.published and cell.values else 0.0, cell.summary, []
    if known := cell.published:
        ends = statistics.published_interval(known.mean, known.std)
        found.append(Dot(y - apart, known.mean, *ends, GREY, "D", hollow=True))
    if ours.mean is not None:
        # Where all scores are equal, rounding can put the end of the interval below the mean.
        reach = max(0.0, (ours.high or 0.0) - ours.mean) if ours.n > 1 else 0.0
        note = f"{ours.n}{cell.marks}"
        found.append(Dot(y + apart, ours.mean, ours.mean - reach, ours.mean + reach, BLUE, note=note))
    return found


def limits(drawn: Sequence[Dot]) -> tuple[float, float]:
    """The ends of an axis for the dots near the median of ours or of the published ones, with their intervals.

    The others, such as networks that collapsed to 0, would flatten the panel.
    """
    groups = [group for hollow in (True, False) if (group := [dot.at for dot in drawn if dot.hollow == hollow])]
    near = [dot for dot in drawn if any(abs(dot.at - np.median(group)) <= REACH for group in groups)]
    left = min((max(dot.low, dot.at - REACH) for dot in near), default=0.0)
    right = max((min(dot.high, dot.at + REACH) for dot in near), default=1.0)
    margin = max(0.1 * (right - left), 0.005)
    return left - margin, right + margin


def handle(label: str, colour: str = GREY, marker: str = "", **look: Any) -> Line2D:
    """An entry of a legend; without a marker, words alone."""
    return Line2D([], [], color=colour, marker=marker, ms=4, lw=1.2 if marker else 0, label=label, **look)


def leads(table: ResultTable) -> tuple[list[list[Panel]], list[Line2D]]:
    """How far each row is ahead of the reference row, with its interval over datasets, and the legend.

    The decisions of one loss share a line. Losses are sorted by the rank of their best decision. Filled: the interval
    excludes 0.
    """
    lines = []
    for entry in table.rankings:
        names, drawn = losses_by_rank(entry), []
        for name, lead in entry.leads[ALL].items():
            loss, decision = loss_and_decision(name)
            k = list(DECISION_COLOURS).index(decision)
            low, high = (lead.difference, lead.difference) if lead.low is None else (lead.low, lead.high or 0.0)
            place, look = names.index(loss) + 0.22 * (k - 1), (DECISION_COLOURS[decision], MARKERS[k])
            drawn.append(Dot(place, lead.difference, low, high, *look, hollow=low * high <= 0))
        lines.append(
            [Panel(f"{entry.block}, {len(entry.columns)} datasets: lead over {entry.reference}", names, drawn)]
        )
    looks = zip(DECISION_COLOURS.items(), MARKERS, strict=False)
    handles = [handle(decision or "argmax", colour, marker) for (decision, colour), marker in looks]
    return lines, [*handles, handle("interval contains 0", GREY, "o", mfc="white")]


def losses_by_rank(entry: Ranking) -> list[str]:
    return list(dict.fromkeys(loss_and_decision(n)[0] for n in sorted(entry.ranks, key=entry.ranks.__getitem__)))


def loss_and_decision(row: str) -> tuple[str, str]:
    """The parts of a row's label, such as "CE + plug-in"; the decision is empty for argmax."""
    loss, _, decision = row.partition(" + ")
    return (loss, decision) if decision in DECISION_COLOURS else (row, "")


@styled
def curves(panels: Sequence[tuple[Sequence[Curve], Mapping[str, Any]]]) -> Figure:
    """Lines in panels side by side, each with what matplotlib sets of its axes; lines of one label share their entry in
    the legend."""
    figure = Figure(figsize=(1.6 + 3.0 * len(panels), 3.2))
    for axes, (drawn, options) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for x, y, look in drawn:
            axes.plot(x, y, **{"color": INK, "ms": 4, "lw": 1.2, **look})
        axes.set(**options)
    labelled = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {name: drawn for pair in labelled for drawn, name in zip(*pair, strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=8)
    return figure
