"""Figures. `dots` and `leads` draw numbers with intervals below each other, `curves` draws lines.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and nothing is shown by colour alone: our
markers are filled, published ones hollow.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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


def figure_of(table: ResultTable) -> Figure:
    """The leads of a table that ranks its rows, else its cells as dots."""
    return leads(table) if table.spec.ranked else dots(table)


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
def dots(table: ResultTable) -> Figure:
    """A table as dots, ours and published with 95 % intervals of the means; blocks without results are left out."""
    blocks = {block: cells for block, cells in table.blocks.items() if any(cell.values for cell in cells.values())}
    shown = [cell for cells in blocks.values() for cell in cells.values()]
    rows, columns = (
        {block: list(dict.fromkeys(key[i] for key in cells)) for block, cells in blocks.items()} for i in (0, 1)
    )
    heights = [len(rows[block]) + 1.2 for block in blocks]
    width = max(map(len, columns.values()), default=1)
    figure = Figure(figsize=(1.2 + 2.5 * width, 0.7 + 0.24 * sum(heights)))
    if not blocks:
        return without_data(figure, "no records")
    grid = figure.subplots(len(blocks), width, squeeze=False, height_ratios=heights)
    for line, (block, cells) in zip(grid, blocks.items(), strict=True):
        for axes in line[len(columns[block]) :]:
            axes.set_visible(False)
        for axes, column in zip(line, columns[block], strict=False):
            drawn = [dot for y, row in enumerate(rows[block]) for dot in _dots_of(y, cells[row, column])]
            forest(axes, drawn, rows[block] if axes is line[0] else [""] * len(rows[block]), *limits(drawn))
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.5)
            axes.set_title(f"{block}: {column}" if len(blocks) > 1 else column, loc="left")
    handles = [handle("ours (n, marks of its training)", BLUE, "o")]
    handles += [handle("published (n = 10)", GREY, "D", mfc="none")] if any(c.published for c in shown) else []
    used = {mark for cell in shown if cell.values for mark in cell.marks}
    words = [f"{mark} {text.partition(':')[0].rstrip('.')}" for mark, text in MARKS.values() if mark in used]
    handles += map(handle, ["bars: 95 % interval of the mean", *words])
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if width > 1 else 1, fontsize=8)
    return figure


def without_data(figure: Figure, reason: str) -> Figure:
    figure.text(0.5, 0.5, reason, ha="center")
    return figure


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


@styled
def leads(table: ResultTable) -> Figure:
    """How far each row is ahead of the reference row, with its interval over datasets: a panel for each block.

    The decisions of one loss share a line. Losses are sorted by the rank of their best decision. Filled: the interval
    excludes 0.
    """
    losses = [losses_by_rank(entry) for entry in table.rankings]
    figure = Figure(figsize=(6.8, 0.9 + sum(0.7 + 0.3 * len(names) for names in losses)))
    if not losses:
        return without_data(figure, "fewer than two datasets with trials of every row")
    panels = figure.subplots(len(losses), squeeze=False, height_ratios=[len(names) + 2 for names in losses])[:, 0]
    for axes, entry, names in zip(panels, table.rankings, losses, strict=True):
        drawn = []
        for name, lead in entry.leads[ALL].items():
            loss, decision = loss_and_decision(name)
            k = list(DECISION_COLOURS).index(decision)
            low, high = (lead.difference, lead.difference) if lead.low is None else (lead.low, lead.high or 0.0)
            place, look = names.index(loss) + 0.22 * (k - 1), (DECISION_COLOURS[decision], MARKERS[k])
            drawn.append(Dot(place, lead.difference, low, high, *look, hollow=low * high <= 0))
        left, right = limits(drawn)
        forest(axes, drawn, names, min(left, 0.0), max(right, 0.0))
        axes.axvline(0, color=INK, lw=0.8)
        title = f"{entry.block}, {len(entry.columns)} datasets: lead over {entry.reference}"
        axes.set_title(title, loc="left")
    looks = zip(DECISION_COLOURS.items(), MARKERS, strict=False)
    handles = [handle(decision or "argmax", colour, marker) for (decision, colour), marker in looks]
    handles.append(handle("interval contains 0", GREY, "o", mfc="white"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


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
