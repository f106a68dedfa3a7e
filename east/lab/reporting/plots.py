"""Figures. `dots`, `leads` and `ranks` draw numbers with intervals below each other, `curves` draws lines.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and nothing is shown by colour alone: our
markers are filled, published ones hollow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec

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

P = ParamSpec("P")

INK = "#2b2b2a"  # text and axes; the report lets it follow the page's colour
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a8a86"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#e69f00", "#56b4e9", GREY, INK)
MARKERS = "osD^vPX*"
DECISION_COLOURS = {"": BLUE, "plug-in": ORANGE, "expected": GREEN}  # "": argmax
CUT = 0.1  # a mean further than this from the others may be left outside a panel, which it would flatten
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


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the project's style without changing matplotlib's settings for anyone else."""

    @wraps(draw)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with style():
            return draw(*args, **kwargs)

    return wrapper


@contextmanager
def style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield


def save(
    figure: Figure, target: str | Path, formats: Sequence[str] = ("svg",), background: str | None = None
) -> list[Path]:
    """Write `target`.svg, or in other formats; the same figure gives the same bytes.

    background: by default white in a png, transparent in the others.
    """
    target = Path(target)
    files = [target.with_name(f"{target.name}.{suffix}") for suffix in formats]
    with style():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is computed; each format would compute it again
    for file, suffix in zip(files, formats, strict=True):
        stamp = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix, {})
        with style():
            facecolor = background or ("white" if suffix == "png" else "none")
            draw = partial(figure.savefig, format=suffix, dpi=150, metadata=stamp, facecolor=facecolor)
            write_atomically(file, draw)
    return files


def figure_of(table: ResultTable, released: ResultTable | None = None) -> Figure:
    """The figure of a table, of the kind that its config names."""
    if table.spec.figure == "dots":
        return dots(table, released)
    return {"lines": lines, "ranks": ranks, "leads": leads}[table.spec.figure](table)


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


def of_cell(line: float, cell: Cell, colour: str, marker: str) -> Dot:
    """Our mean and its interval, with the number of trials and the marks of their training beside it."""
    ours, note = cell.summary, f"{len(cell.values)}{cell.marks}"
    mean = ours.mean or 0.0
    # Where all scores are equal, rounding can put the end of the interval below the mean.
    reach = 0.0 if ours.high is None else max(0.0, ours.high - mean)
    return Dot(line, mean, mean - reach, mean + reach, colour, marker, note)


@styled
def dots(table: ResultTable, released: ResultTable | None = None) -> Figure:
    """A table as dots, ours and published with 95 % intervals of the means; blocks without results are left out.

    `released` is the same table by the papers' released code: where that uses other data, such as the corrupted Adult,
    its dots are drawn as well.
    """
    blocks = {block: cells for block, cells in table.blocks.items() if any(cell.values for cell in cells.values())}
    data = {(cell.block, cell.row, cell.column): cell.dataset for cell in table.cells}
    filled = {(c.block, c.row, c.column): c for c in (released.cells if released else ()) if c.values}
    quirky = {place: cell for place, cell in filled.items() if data.get(place, cell.dataset) != cell.dataset}
    rows, columns = (
        {block: list(dict.fromkeys(key[i] for key in cells)) for block, cells in blocks.items()} for i in (0, 1)
    )
    heights = [len(rows[block]) * (1.5 if block in {place[0] for place in quirky} else 1) + 1.2 for block in blocks]
    width = max(map(len, columns.values()), default=1)
    figure = Figure(figsize=(1.2 + 2.5 * width, 0.7 + 0.24 * sum(heights)))
    if not blocks:
        return without_data(figure, "no records")
    grid = figure.subplots(len(blocks), width, squeeze=False, height_ratios=heights)
    for line, (block, cells) in zip(grid, blocks.items(), strict=True):
        for axes in line[len(columns[block]) :]:
            axes.set_visible(False)
        for axes, column in zip(line, columns[block], strict=False):
            lines_ = [(cells[row, column], quirky.get((block, row, column))) for row in rows[block]]
            drawn = [dot for y, (cell, other) in enumerate(lines_) for dot in _dots_of(y, cell, other)]
            forest(axes, drawn, rows[block] if axes is line[0] else [""] * len(rows[block]), *_limits(drawn))
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.5)
            axes.set_title(f"{block}: {column}" if len(blocks) > 1 else column, loc="left")
    handles = _legend([*(cell for cells in blocks.values() for cell in cells.values()), *quirky.values()], bool(quirky))
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if width > 1 else 1, fontsize=8)
    return figure


def without_data(figure: Figure, reason: str) -> Figure:
    figure.text(0.5, 0.5, reason, ha="center")
    return figure


def _dots_of(y: int, cell: Cell, released: Cell | None) -> list[Dot]:
    """Published, ours, and ours on the released loader's data, one below the other around line y."""
    found = [of_cell(0, cell, BLUE, "o")] if cell.values else []
    found += [of_cell(0, released, ORANGE, "s")] if released else []
    if known := cell.published:
        found.insert(0, Dot(0, known.mean, *statistics.published_interval(known.mean, known.std), GREY, "D", "", True))
    middle = (len(found) - 1) / 2
    return [replace(dot, line=y + 0.3 * (k - middle)) for k, dot in enumerate(found)]


def _limits(drawn: Sequence[Dot]) -> tuple[float, float]:
    """The ends of an axis that covers the bulk of the means, and of the published ones, with their intervals."""
    low, high = near([dot.at for dot in drawn])
    published = [dot.at for dot in drawn if dot.hollow]
    if published and not low <= np.median(published) <= high:
        ends = near(published)
        low, high = min(low, ends[0]), max(high, ends[1])
    inside, most = [dot for dot in drawn if low <= dot.at <= high], high - low + CUT
    low, high = (
        min([low, *(dot.at - min(dot.at - dot.low, most) for dot in inside)]),
        min(max([high, *(dot.at + min(dot.high - dot.at, most) for dot in inside)]), max(high, 1.0)),
    )
    margin = max(0.1 * (high - low), 0.005)
    return low - margin, max(min(high + margin, 1.0), high + margin / 4)


def near(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values without outliers: those over CUT and over three interquartile ranges off the median.

    Values below a gap that is wider than the range above it are left out too, such as networks that collapsed to 0, if
    they are at most half.

    >>> near([0.98, 0.99, 0.985, 0.988, 0.51]), near([0.80, 0.85, 0.83, 0.0, 0.0])
    ((0.98, 0.99), (0.8, 0.85))
    """
    if not values:
        return 0.0, 1.0
    first, median, third = np.percentile(values, [25, 50, 75])
    kept = sorted(value for value in values if abs(value - median) <= max(3 * (third - first), CUT))
    most = len(kept) - (len(values) + 1) // 2  # that may still be left out
    starts = (k for k in range(1, most + 1) if kept[k] - kept[k - 1] > max(CUT, kept[-1] - kept[k]))
    return kept[next(starts, 0)], kept[-1]


def handle(label: str, colour: str = GREY, marker: str = "", **look: Any) -> Line2D:
    """An entry of a legend; without a marker, words alone."""
    return Line2D([], [], color=colour, marker=marker, ms=4, lw=1.2 if marker else 0, label=label, **look)


def _legend(cells: Sequence[Cell], with_released: bool) -> list[Line2D]:
    handles = [handle("ours (n, marks of its training)", BLUE, "o")]
    handles += [handle("ours, released code and data", ORANGE, "s")] if with_released else []
    handles += [handle("published (n = 10)", GREY, "D", mfc="none")] if any(c.published for c in cells) else []
    used = {mark for cell in cells if cell.values for mark in cell.marks}
    words = [f"{mark} {text.partition(':')[0].rstrip('.')}" for mark, text in MARKS.items() if mark in used]
    return [*handles, *map(handle, ["bars: 95 % interval of the mean", *words])]


@styled
def leads(table: ResultTable) -> Figure:
    """How far each row is ahead of the reference row, with its interval over datasets: a panel for each block.

    The decisions of one loss share a line. Losses are sorted by the rank of their best decision. Filled: the interval
    excludes 0.
    """

    def panel(axes: Axes, entry: Ranking) -> None:
        losses, drawn = losses_by_rank(entry), []
        for name, lead in entry.leads[ALL].items():
            loss, decision = loss_and_decision(name)
            k = list(DECISION_COLOURS).index(decision)
            low, high = (lead.difference, lead.difference) if lead.low is None else (lead.low, lead.high or 0.0)
            place, look = losses.index(loss) + 0.22 * (k - 1), (DECISION_COLOURS[decision], MARKERS[k])
            drawn.append(Dot(place, lead.difference, low, high, *look, hollow=low * high <= 0))
        low, high = near([dot.at for dot in drawn])
        room = 1.5 * float(np.median([dot.high - dot.at for dot in drawn])) or CUT
        forest(axes, drawn, losses, min(low, 0.0) - room, max(high, 0.0) + room)
        axes.axvline(0, color=INK, lw=0.8)
        title = f"{entry.block}, {len(entry.columns)} datasets: lead over {entry.reference}"
        axes.set_title(title, loc="left")

    figure = _panels(table, [len(losses_by_rank(entry)) for entry in table.rankings], panel)
    handles = [
        handle(decision or "argmax", colour, marker)
        for marker, (decision, colour) in zip(MARKERS, DECISION_COLOURS.items(), strict=False)
    ]
    handles.append(handle("interval contains 0", GREY, "o", mfc="white"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


@styled
def ranks(table: ResultTable) -> Figure:
    """Mean ranks, best on top: a panel for each block. Rows with bars apart differ significantly (Nemenyi)."""

    def panel(axes: Axes, entry: Ranking) -> None:
        names, reach = sorted(entry.ranks, key=entry.ranks.__getitem__), entry.critical_difference / 2
        places = [(k, entry.ranks[name]) for k, name in enumerate(names)]
        drawn = [Dot(k, rank, rank - reach, rank + reach, BLUE, note=f"{rank:.2f}") for k, rank in places]
        forest(axes, drawn, names, 0.5 - reach, len(names) + 0.5 + reach)
        axes.set_title(f"mean rank by {entry.block}, {len(entry.columns)} datasets", loc="left")

    return _panels(table, [len(entry.ranks) for entry in table.rankings], panel)


def _panels(table: ResultTable, heights: Sequence[int], draw: Callable[[Axes, Ranking], None]) -> Figure:
    """A panel below another for each of a table's rankings."""
    figure = Figure(figsize=(6.8, 0.9 + sum(0.7 + 0.3 * height for height in heights)))
    if not heights:
        return without_data(figure, "fewer than two datasets with trials of every row")
    ratios = [height + 2 for height in heights]
    panels = figure.subplots(len(heights), squeeze=False, height_ratios=ratios)[:, 0]
    for axes, entry in zip(panels, table.rankings, strict=True):
        draw(axes, entry)
    return figure


def losses_by_rank(entry: Ranking) -> list[str]:
    return list(dict.fromkeys(loss_and_decision(n)[0] for n in sorted(entry.ranks, key=entry.ranks.__getitem__)))


def loss_and_decision(row: str) -> tuple[str, str]:
    """The parts of a row's label, such as "CE + plug-in"; the decision is empty for argmax."""
    loss, _, decision = row.partition(" + ")
    return (loss, decision) if decision in DECISION_COLOURS else (row, "")


@dataclass(frozen=True)
class Curve:
    """A line through points, with the reach of an interval around each if it is given."""

    x: ArrayLike
    y: ArrayLike
    label: str = ""
    colour: str = INK
    marker: str = ""
    dashed: bool = False
    reach: ArrayLike | None = None


@styled
def curves(panels: Sequence[tuple[Sequence[Curve], Mapping[str, Any]]]) -> Figure:
    """Lines in panels side by side, each with what matplotlib sets of its axes; lines of one label share their entry in
    the legend."""
    figure = Figure(figsize=(1.6 + 3.0 * max(len(panels), 1), 3.2))
    if not panels:
        return without_data(figure, "no records")
    for axes, (drawn, options) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for c in drawn:
            look = {"ls": "--" if c.dashed else "-", "marker": c.marker, "ms": 4, "lw": 1.2, "elinewidth": 0.7}
            axes.errorbar(c.x, c.y, c.reach, color=c.colour, label=c.label or None, **look)
        axes.set(**options)
    labelled = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {name: drawn for pair in labelled for drawn, name in zip(*pair, strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=8)
    return figure


def lines(table: ResultTable) -> Figure:
    """A table as lines: a panel per block, a line per row over the columns, with 95 % intervals of the means."""
    rows = list(dict.fromkeys(cell.row for cell in table.cells if cell.values))
    panels: list[tuple[list[Curve], dict[str, Any]]] = []
    for block, cells in table.blocks.items():
        columns = list(dict.fromkeys(cell.column for cell in cells.values()))
        drawn = []
        for k, row in enumerate(rows):
            # Side by side, so that intervals do not cover each other.
            placed = {columns.index(c.column) + 0.05 * (k - len(rows) / 2): c for c in cells.values() if c.row == row}
            found = [of_cell(x, cell, COLOURS[k % len(COLOURS)], "") for x, cell in placed.items() if cell.values]
            if found:
                x, y, reach = zip(*((dot.line, dot.at, dot.high - dot.at) for dot in found), strict=True)
                drawn.append(Curve(x, y, row, COLOURS[k % len(COLOURS)], MARKERS[k % len(MARKERS)], reach=reach))
        if drawn:
            # Intervals of few trials reach below any score.
            ends = (min([0.0, *(float(np.min(c.y)) for c in drawn)]) - 0.05, 1.05)
            axes = {"title": block, "xlim": (-0.4, len(columns) - 0.6), "ylim": ends}
            panels.append((drawn, axes | {"xticks": range(len(columns)), "xticklabels": columns}))
    return curves(panels)
