"""Figures. Each function takes data and returns a matplotlib Figure; `save` writes it.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and nothing is shown by colour alone: our
markers are filled, published ones hollow.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from east.lab.files import write_atomically
from east.lab.reporting import statistics
from east.lab.reporting.cells import MARKS

if TYPE_CHECKING:
    from east.lab.reporting.tables import Cell, Ranking, ResultTable

P = ParamSpec("P")

INK = "#2b2b2a"  # text and axes; the report lets it follow the page's colour
BLUE, ORANGE, GREEN, RED, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a8a86"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#e69f00", "#56b4e9", GREY, INK)
MARKERS = "osD^vPX*"
DECISION_COLOURS = {"": BLUE, "plug-in": ORANGE, "expected": GREEN}  # "": argmax
CUT = 0.1  # a mean further than this from the others may be left outside a panel, which it would flatten
WORDS_OF_MARKS = {mark: text.partition(":")[0].rstrip(".") for mark, text in MARKS.items()}
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


def without_data(figure: Figure, reason: str) -> Figure:
    figure.text(0.5, 0.5, reason, ha="center")
    return figure


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


@styled
def steps(probabilities: np.ndarray, heights: Mapping[float, np.ndarray], threshold: float) -> Figure:
    """The step at several temperatures: heights[T] over probabilities. Eq. 4, arXiv 2405.20954."""
    figure = Figure(figsize=(4.6, 3.2))
    axes = figure.add_subplot()
    shades = np.linspace(0.5, 1.0, len(heights))
    for shade, (temperature, height) in zip(shades, sorted(heights.items(), reverse=True), strict=True):
        axes.plot(probabilities, height, color=BLUE, alpha=shade, lw=1 + shade, label=f"T = {temperature:g}")
    axes.axvline(threshold, color=GREY, lw=0.8, ls=":")
    axes.text(threshold, 1.03, f"τ = {threshold:g}", ha="center", color=INK)
    axes.set(xlabel="probability p", ylabel="H(p)", xlim=(0, 1), ylim=(0, 1))
    axes.legend(loc="lower right")
    return figure


@styled
def soft_against_hard(
    temperatures: Sequence[float], soft: Mapping[str, Sequence[float]], hard: Mapping[str, float]
) -> Figure:
    """Soft metrics of fixed predictions as the temperature falls, and the hard metrics that they approach."""
    figure = Figure(figsize=(4.6, 3.2))
    axes = figure.add_subplot()
    for colour, (name, values) in zip((BLUE, ORANGE, GREEN, RED), soft.items(), strict=False):
        axes.plot(temperatures, values, color=colour, marker="o", ms=3, label=f"soft {name}")
        axes.axhline(hard[name], color=colour, lw=0.9, ls="--", label=f"hard {name}")
    axes.set(xlabel="temperature T (falling)", ylabel="score", xscale="log")
    axes.invert_xaxis()
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@styled
def curves(history: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """One trial: losses, 1 - metric and, on the same axis, the temperature. A dotted line marks each cooling."""
    figure = Figure(figsize=(5.6, 3.2))
    axes = figure.add_subplot()
    epoch, temperature = history["epoch"], history.get("temperature", [])
    if len(temperature) and None not in temperature:
        axes.fill_between(epoch, temperature, step="post", color=GREY, alpha=0.3, lw=0, label="temperature T")
        for i in np.flatnonzero(np.diff(temperature)).tolist():
            axes.axvline(epoch[i + 1], color=GREY, lw=0.5, ls=":")
    names = {"train_loss": "training loss", "val_loss": "validation loss", "val_metric": "1 − metric, validation"}
    for colour, line, (name, label) in zip((GREY, BLUE, ORANGE), ("-", "-", "--"), names.items(), strict=True):
        if name in history:
            values = np.array(history[name], dtype=float)
            axes.plot(epoch, values, color=colour, ls=line, lw=1.2, label=label)
    axes.set(xlabel="epoch", title=title, ylim=(0, None))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


@styled
def tradeoff(table: "ResultTable") -> Figure:
    """Precision against recall of class dog, a point per beta, ours and published: EAST v2 Table 6."""
    precision, recall = "precision dog", "recall dog"
    figure = Figure(figsize=(4.6, 3.6))
    axes = figure.add_subplot()
    cells = {(cell.row, cell.column): cell for cell in table.cells}
    rows = list(dict.fromkeys(cell.row for cell in table.cells))
    with_trials = [row for row in rows if cells[row, recall].values and cells[row, precision].values]
    published = [[_published(cells[row, name]) for row in rows] for name in (recall, precision)]
    _path(axes, rows, published[0], published[1], GREY, "published", hollow=True)
    if with_trials:
        ours = [[_ours(cells[row, name]) for row in with_trials] for name in (recall, precision)]
        _path(axes, with_trials, ours[0], ours[1], BLUE, "ours", hollow=False)
    axes.set(xlabel=f"{recall}, 95 % interval of the mean", ylabel=f"{precision}, 95 % interval of the mean")
    axes.legend()
    return figure


def _path(
    axes: Axes, names: Sequence[str], x: Sequence["Mean"], y: Sequence["Mean"], colour: str, label: str, hollow: bool
) -> None:
    xs, ys = [mean.at for mean in x], [mean.at for mean in y]
    dx, dy = [mean.reach for mean in x], [mean.reach for mean in y]
    face = "none" if hollow else colour
    axes.errorbar(xs, ys, dy, dx, color=colour, mfc=face, marker="o", ms=5, lw=0.8, elinewidth=0.5, label=label)
    for name, a, b in zip(names, xs, ys, strict=True):
        axes.annotate(name.removeprefix("beta "), (a, b), (4, 4), textcoords="offset points", fontsize=7, color=colour)


@dataclass(frozen=True)
class Mean:
    """A mean, ours or published, and half the width of its 95 % interval."""

    at: float
    reach: float


def _ours(cell: "Cell") -> Mean:
    ours = cell.summary
    assert ours.mean is not None, "only cells with trials are drawn"
    # Where all scores are equal, rounding can put the end of the interval below the mean.
    return Mean(ours.mean, 0.0 if ours.high is None else max(0.0, ours.high - ours.mean))


def _published(cell: "Cell") -> Mean:
    published = cell.published
    assert published is not None, "only published cells are drawn"
    return Mean(published.mean, statistics.published_interval(published.mean, published.std).high - published.mean)


@styled
def dots(table: "ResultTable", released: "ResultTable | None" = None) -> Figure:
    """A table as dots, ours and published with 95 % intervals of the means; blocks without results are left out.

    Each of our dots has the number of trials and the marks of its training beside it. `released` is the same table by
    the papers' released code: where that uses other data, such as the corrupted Adult, its dots are drawn as well.
    """
    blocks = {block: cells for block, cells in table.blocks.items() if any(cell.values for cell in cells.values())}
    on_other_data = _on_other_data(table, released)
    rows, columns = (
        {block: list(dict.fromkeys(key[i] for key in cells)) for block, cells in blocks.items()} for i in (0, 1)
    )
    two_loaders = {block for block, _, _ in on_other_data}
    heights = [len(rows[block]) * (1.5 if block in two_loaders else 1) + 1.2 for block in blocks]
    width = max(map(len, columns.values()), default=1)
    figure = Figure(figsize=(1.2 + 2.5 * width, 0.7 + 0.24 * sum(heights)))
    if not blocks:
        return without_data(figure, "no records")
    grid = figure.subplots(len(blocks), width, squeeze=False, height_ratios=heights)
    for line, (block, cells) in zip(grid, blocks.items(), strict=True):
        for axes in line[len(columns[block]) :]:
            axes.set_visible(False)
        for axes, column in zip(line, columns[block], strict=False):
            _panel(axes, [(cells[row, column], on_other_data.get((block, row, column))) for row in rows[block]])
            axes.set_yticklabels(rows[block] if axes is line[0] else [])
            axes.set_title(f"{block}: {column}" if len(blocks) > 1 else column, loc="left")
    ncols = 2 if width > 1 else 1
    figure.legend(handles=_legend(blocks, on_other_data), loc="outside lower center", ncols=ncols, fontsize=8)
    return figure


def _on_other_data(table: "ResultTable", released: "ResultTable | None") -> dict[tuple[str, str, str], "Cell"]:
    """The filled cells of the released variant that use other data than the table."""
    data = {(cell.block, cell.row, cell.column): cell.dataset for cell in table.cells}
    filled = {(c.block, c.row, c.column): c for c in (released.cells if released else ()) if c.values}
    return {place: cell for place, cell in filled.items() if data.get(place, cell.dataset) != cell.dataset}


@dataclass(frozen=True)
class Dot:
    """A mean on a line of a panel."""

    mean: Mean
    line: float
    colour: str
    marker: str
    note: str  # number of trials and marks, if it is ours


def _panel(axes: Axes, rows: Sequence[tuple["Cell", "Cell | None"]]) -> None:
    """One column of a block, a line per row: a cell, and the same on the released loader's data.

    The axis covers the bulk of the means, and of the published ones; an outlier is an arrow at its end.
    """
    drawn = [dot for y, (cell, released) in enumerate(rows) for dot in _dots_of(y, cell, released)]
    low, high = near([dot.mean.at for dot in drawn])
    published = [dot.mean.at for dot in drawn if dot.colour == GREY]
    if published and not low <= np.median(published) <= high:
        ends = near(published)
        low, high = min(low, ends[0]), max(high, ends[1])
    inside = [dot.mean for dot in drawn if low <= dot.mean.at <= high]
    low, high = (
        min([low, *(m.at - min(m.reach, high - low + CUT) for m in inside)]),
        min(max([high, *(m.at + min(m.reach, high - low + CUT) for m in inside)]), max(high, 1.0)),
    )
    margin = max(0.1 * (high - low), 0.005)
    left, right = low - margin, max(min(high + margin, 1.0), high + margin / 4)
    for dot in drawn:
        face = "none" if dot.colour == GREY else dot.colour
        look: dict[str, Any] = {"color": dot.colour, "fontsize": 5.5, "va": "center", "annotation_clip": False}
        if left <= dot.mean.at <= right:
            axes.errorbar(dot.mean.at, dot.line, xerr=dot.mean.reach, color=dot.colour, mfc=face, marker=dot.marker,
                          ms=4, lw=1.2)  # fmt: skip
        else:
            _arrow(axes, dot.mean.at, dot.line, dot.mean.at < left, look)
        axes.annotate(dot.note, (1, dot.line), (3, 0), xycoords=("axes fraction", "data"),
                      textcoords="offset points", **look)  # fmt: skip
    axes.set(xlim=(left, right), ylim=(len(rows) - 0.4, -0.6), yticks=range(len(rows)))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(length=2, labelsize=8)
    axes.grid(axis="y", color=GREY, alpha=0.25, lw=0.5)


def _arrow(axes: Axes, value: float, line: float, below: bool, look: Mapping[str, Any]) -> None:
    """A number beside the end of an axis that does not reach it."""
    number = f"{round(value, 3) + 0:.3f}".replace("-", "−")  # + 0: not -0.000
    text = f"◂ {number}" if below else f"{number} ▸"
    axes.annotate(
        text, (0 if below else 1, line), (2 if below else -2, 0), xycoords=("axes fraction", "data"),
        textcoords="offset points", ha="left" if below else "right", **look,
    )  # fmt: skip


def _dots_of(y: int, cell: "Cell", released: "Cell | None") -> list[Dot]:
    """Published, ours, and ours on the released loader's data, one below the other around line y."""
    looks = [(_published(cell), GREY, "D", "")] if cell.published else []
    looks += [(_ours(cell), BLUE, "o", f"{len(cell.values)}{cell.marks}")] if cell.values else []
    looks += [(_ours(released), ORANGE, "s", f"{len(released.values)}{released.marks}")] if released else []
    middle = (len(looks) - 1) / 2
    return [Dot(look[0], y + 0.3 * (k - middle), *look[1:]) for k, look in enumerate(looks)]


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


def _legend(blocks: Mapping[str, Mapping], on_other_data: Mapping) -> list[Line2D]:
    cells = [cell for block in blocks.values() for cell in block.values()]
    handles = [Line2D([], [], color=BLUE, marker="o", ms=4, lw=1.2, label="ours (n, marks of its training)")]
    if on_other_data:
        handles += [Line2D([], [], color=ORANGE, marker="s", ms=4, lw=1.2, label="ours, released code and data")]
    if any(cell.published for cell in cells):
        handles += [Line2D([], [], color=GREY, marker="D", ms=4, mfc="none", lw=1.2, label="published (n = 10)")]
    used = {mark for cell in (*cells, *on_other_data.values()) if cell.values for mark in cell.marks}
    handles += [Line2D([], [], lw=0, label="bars: 95 % interval of the mean")]
    names = [f"{mark} {WORDS_OF_MARKS[mark]}" for mark in MARKS if mark in used]
    return [*handles, *(Line2D([], [], lw=0, label=name) for name in names)]


def lowest(cells: Iterable["Cell"]) -> float:
    """The lower end of an axis of scores: the lowest mean or 0, since intervals of few trials reach below any score."""
    return min([0.0, *(cell.summary.mean for cell in cells if cell.summary.mean is not None)])


@styled
def lines(table: "ResultTable") -> Figure:
    """A table as lines: a panel per block, a line per row over the columns, with 95 % intervals of the means."""
    blocks = {block: cells for block, cells in table.blocks.items() if any(cell.values for cell in cells.values())}
    figure = Figure(figsize=(1.6 + 3.0 * max(len(blocks), 1), 3.2))
    if not blocks:
        return without_data(figure, "no records")
    rows = list(dict.fromkeys(cell.row for cells in blocks.values() for cell in cells.values()))
    for axes, (block, cells) in zip(figure.subplots(1, len(blocks), squeeze=False)[0], blocks.items(), strict=True):
        columns = list(dict.fromkeys(cell.column for cell in cells.values()))
        for k, row in enumerate(rows):
            drawn = [cell for cell in cells.values() if cell.row == row and cell.values]
            if not drawn:
                continue
            x = [columns.index(cell.column) + 0.05 * (k - len(rows) / 2) for cell in drawn]  # intervals side by side
            means = [_ours(cell) for cell in drawn]
            look = {"color": COLOURS[k % len(COLOURS)], "marker": MARKERS[k % len(MARKERS)], "ms": 4, "lw": 1.2}
            axes.errorbar(x, [m.at for m in means], [m.reach for m in means], elinewidth=0.7, label=row, **look)
        axes.set(title=block, xlim=(-0.4, len(columns) - 0.6))
        axes.set_xticks(range(len(columns)), columns)
        axes.set_ylim(lowest(cells.values()) - 0.05, min(axes.get_ylim()[1], 1.05))
    labelled = [axes.get_legend_handles_labels() for axes in figure.axes]  # a row may be in some blocks only
    handles = {name: handle for pair in labelled for handle, name in zip(*pair, strict=True)}
    figure.legend(list(handles.values()), list(handles), loc="outside right center", fontsize=8)
    return figure


@styled
def ranks(table: "ResultTable") -> Figure:
    """Critical-difference diagrams, one per block: mean ranks, best at the left.

    A bar joins ranks that do not differ significantly.
    """
    entries = table.rankings
    heights = [2.2 + len(entry.ranks) / 2 for entry in entries]
    figure = Figure(figsize=(6.4, max(0.3 * sum(heights), 1.0)))
    if not entries:
        return without_data(figure, "fewer than two datasets with trials of every row")
    panels = figure.subplots(len(entries), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, entry, height in zip(panels, entries, heights, strict=True):
        _critical_difference(axes, entry, height)
    return figure


@styled
def leads(table: "ResultTable") -> Figure:
    """How far each row is ahead of the reference row, with its interval over datasets: a panel for each block.

    The decisions of one loss share a line. Losses are sorted by the rank of their best decision. The axis covers the
    bulk of the leads; longer intervals run to its end, and an outlier is an arrow there.
    """
    entries = [entry for entry in table.rankings if entry.leads]
    losses_by_rank = [
        list(dict.fromkeys(loss_and_decision(n)[0] for n in sorted(e.ranks, key=e.ranks.__getitem__))) for e in entries
    ]
    figure = Figure(figsize=(6.8, 0.9 + sum(0.7 + 0.3 * len(losses) for losses in losses_by_rank)))
    if not entries:
        return without_data(figure, "fewer than two datasets with trials of every row")
    heights = [len(losses) + 2 for losses in losses_by_rank]
    panels = figure.subplots(len(entries), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, entry, losses in zip(panels, entries, losses_by_rank, strict=True):
        left, right = _lead_limits(list(entry.leads[statistics.ALL].values()))
        for name, lead in entry.leads[statistics.ALL].items():
            loss, decision = loss_and_decision(name)
            k = list(DECISION_COLOURS).index(decision)
            y, color = losses.index(loss) + 0.22 * (k - 1), DECISION_COLOURS[decision]
            excludes_0 = lead.low is not None and lead.high is not None and lead.low * lead.high > 0
            if not left <= lead.mean <= right:
                look = {"color": color, "fontsize": 5.5, "va": "center", "annotation_clip": False}
                _arrow(axes, lead.mean, y, lead.mean < left, look)
                continue
            axes.plot(lead.mean, y, MARKERS[k], color=color, mfc=color if excludes_0 else "white", ms=4, zorder=3)
            if lead.low is not None:
                axes.plot([lead.low, lead.high], [y, y], color=color, lw=1.2)
        axes.axvline(0, color=INK, lw=0.8)
        axes.set(yticks=range(len(losses)), yticklabels=losses, ylim=(len(losses) - 0.5, -0.5), xlim=(left, right))
        axes.tick_params(axis="y", length=0)
        title = f"{entry.block}, {len(entry.columns)} datasets: lead over {entry.reference}"
        axes.set_title(title, loc="left")
    handles = [
        Line2D([], [], color=color, marker=MARKERS[k], ms=4, lw=1.2, label=decision or "argmax")
        for k, (decision, color) in enumerate(DECISION_COLOURS.items())
    ]
    handles.append(Line2D([], [], color=GREY, marker="o", mfc="white", ms=4, lw=1.2, label="interval contains 0"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _lead_limits(leads: Sequence[statistics.Lead]) -> tuple[float, float]:
    """Ends of an axis for these leads and 0, with room for most of their intervals."""
    low, high = near([lead.mean for lead in leads])
    reaches = [lead.high - lead.mean for lead in leads if lead.high is not None]
    room = 1.5 * float(np.median(reaches)) if reaches else CUT
    return min(low, 0.0) - room, max(high, 0.0) + room


def loss_and_decision(row: str) -> tuple[str, str]:
    """The parts of a row's label, such as "CE + plug-in"; the decision is empty for argmax."""
    loss, _, decision = row.partition(" + ")
    return (loss, decision) if decision in DECISION_COLOURS else (row, "")


def _critical_difference(axes: Axes, entry: "Ranking", height: float) -> None:
    """Demšar's diagram: the axis of ranks on top, names at the nearer side, bars below the axis."""
    names = sorted(entry.ranks, key=lambda name: entry.ranks[name])
    sorted_ranks, reach = [entry.ranks[name] for name in names], entry.critical_difference
    count, half = len(names), (len(names) + 1) // 2
    for k, (name, rank) in enumerate(zip(names, sorted_ranks, strict=True)):
        left = k < half
        y = 1.2 + (k if left else count - 1 - k)
        side = 0.8 if left else count + 0.2
        axes.plot([rank, rank, side], [0, y, y], color=INK, lw=0.8)
        axes.text(side, y, f" {name} ", ha="right" if left else "left", va="center")
        axes.text(side, y - 0.08, f"{rank:.2f}", ha="left" if left else "right", va="bottom", fontsize=7, color=GREY)
    for k, (first, last) in enumerate(cliques(sorted_ranks, reach)):
        ends = [sorted_ranks[first] - 0.04, sorted_ranks[last] + 0.04]
        axes.plot(ends, [0.3 + 0.18 * k] * 2, color=BLUE, lw=3, solid_capstyle="butt")
    axes.plot([1, 1 + reach], [-1.0, -1.0], color=INK, lw=1.5, marker="|", ms=6)
    axes.text(1 + reach / 2, -1.15, f"critical difference {reach:.2f}", ha="center", va="bottom", fontsize=8)
    axes.set(xlim=(1, count), ylim=(height - 1.6, 0), xticks=range(1, count + 1))
    axes.set_title(f"mean rank by {entry.block}, {len(entry.columns)} datasets", loc="right")
    axes.xaxis.tick_top()
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.spines["top"].set_visible(True)
    axes.set_yticks([])
    for artist in (*axes.lines, *axes.texts):
        artist.set_clip_on(False)


def cliques(sorted_ranks: Sequence[float], reach: float) -> list[tuple[int, int]]:
    """(first, last) of the longest runs whose ranks differ by less than `reach`; runs of one are left out.

    >>> cliques([1.0, 1.5, 2.2, 4.0], reach=1.0)
    [(0, 1), (1, 2)]
    """
    runs: list[tuple[int, int]] = []
    for first, rank in enumerate(sorted_ranks):
        last = max(k for k, other in enumerate(sorted_ranks) if other - rank < reach)
        if last > first and (not runs or last > runs[-1][1]):
            runs.append((first, last))
    return runs


@styled
def confusion(matrix: Sequence[Sequence[int]], classes: Sequence[str] | None = None, title: str = "") -> Figure:
    """A confusion matrix, shaded by the share of each true class; counts are written for up to 12 classes."""
    counts = np.asarray(matrix)
    d = len(counts)
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    size = min(1.5 + 0.36 * d, 5.5)
    figure = Figure(figsize=(size + 0.8, size))
    axes = figure.add_subplot()
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    if d <= 12:
        for i, j in np.ndindex(d, d):
            colour = "white" if share[i, j] > 0.55 else "#1a1a19"
            axes.text(j, i, f"{counts[i, j]}", ha="center", va="center", fontsize=8, color=colour)
        names = classes or [str(k) for k in range(d)]
        axes.set_xticks(range(d), names, rotation=0 if d == 2 else 90)
        axes.set_yticks(range(d), names)
    axes.set(xlabel="predicted", ylabel="true", title=title)
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8).outline.set_visible(False)
    return figure


def step_heights(temperatures: Sequence[float], threshold: float = 0.5) -> tuple[np.ndarray, dict[float, np.ndarray]]:
    """The linear step on a fine grid of probabilities, for `steps` to draw."""
    import torch

    from east.losses.steps import linear

    p = torch.linspace(0, 1, 501)
    tau = torch.tensor(threshold)
    return p.numpy(), {t: linear(p, tau, t).numpy() for t in temperatures}


def softened(
    probabilities: np.ndarray, labels: np.ndarray, temperatures: Sequence[float], metrics: Sequence[str]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Soft metrics of stored predictions [n, d] by temperature, and the hard ones, for `soft_against_hard` to draw."""
    import torch

    from east.confusion import Confusion
    from east.losses import MetricLoss
    from east.metrics import METRICS

    p, y = torch.as_tensor(probabilities), torch.as_tensor(labels)
    logits = p.clamp_min(1e-30).log()
    soft = {
        name: [1 - float(MetricLoss(name, temperature=float(t))(logits, y)) for t in temperatures] for name in metrics
    }
    counts = Confusion.from_predictions(p.argmax(-1), y, p.shape[-1])
    return soft, {name: float(METRICS[name](counts)) for name in metrics}


def figure_of(table: "ResultTable", released: "ResultTable | None" = None) -> Figure:
    """The figure of a table, of the kind that its config names."""
    if table.figure == "dots":
        return dots(table, released)
    return {"lines": lines, "ranks": ranks, "leads": leads}[table.figure](table)
