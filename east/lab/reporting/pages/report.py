"""One self-contained HTML page about a results folder: its trials, tables, figures, findings and records.

No external requests, light and dark, readable on a phone; only sorting needs JavaScript.
"""

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from datetime import date
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from east.lab.experiment import records
from east.lab.experiment.records import Record
from east.lab.files import read_regular, write_text
from east.lab.reporting import papers, plots, statistics, tables, writers
from east.lab.reporting.entries import Catalogue
from east.lab.reporting.pages import html
from east.lab.reporting.tables import ResultTable

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

STYLE = writers.Style("<strong>{}</strong>", "<sup>{}</sup>", escape)
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
DRAWING = {"svg", "g", "path", "defs", "clipPath", "rect", "use", "style", "text", "tspan", "image", "line", "circle"}
MOST_SVG_BYTES = 1 << 25
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", XLINK)
TEMPERATURES = [0.2, 0.1, 0.05, 0.01]
FOLDED = 100  # rows above which a table is folded, so that the next one is in reach
EXAMPLES = 12  # datasets with figures of a trial
SHOWN_SCORES = ("f1_pos", "f1_macro", "accuracy", "balanced_accuracy", "mcc")


def write(results_dir: str | Path = "results", target: str | Path | None = None, **options: Any) -> Path:
    """Write the page, by default to <results_dir>/report.html; `options` go to `page` and `tables.build`."""
    target = Path(target or Path(results_dir) / "report.html")
    write_text(target, page(results_dir, **options))
    return target


def page(
    results_dir: str | Path = "results", today: date | None = None, config_dir: str | None = None, **options: Any
) -> str:
    """The whole page as text."""
    scanned = records.scan(results_dir)
    today = today or date.today()
    options |= {"scanned": Catalogue(scanned), "today": today, "config_dir": config_dir}
    build = lambda name, **changes: tables.build(name, results_dir, **{**options, **changes})  # noqa: E731
    papers = [build(name) for name in tables.papers_tables()]
    released = {table.name: build(table.name, variant="released") for table in papers}
    settings = _finished(scanned)
    left_out = {*released, *(["grid"] if len(settings) > FOLDED else [])}  # `held` lists every setting
    ours = [build(name) for name in tables.names(config_dir) if name not in left_out]
    ours = [table for table in ours if table.name == "quickstart" or _has_trials(table)]
    with_trials = [table for table in papers if _has_trials(table) or _has_trials(released[table.name])]
    every = [*papers, *(table for table in released.values() if _differs(table, papers)), *ours]
    sections = {
        "held": ("What this folder holds", _held(settings, Path(results_dir))),
        "own": ("Runs and tables of this folder", "".join(_table(table) for table in ours if _has_trials(table))),
        "tables": ("The papers' tables", _papers(papers, with_trials, released)),
        "figures": ("Figures", _figures(with_trials, ours, scanned, Path(results_dir)) if scanned else ""),
        "findings": (
            "Findings about the published numbers",
            _findings({table.name for table in with_trials}) if with_trials else "",
        ),
        "records": ("Records", _records(every, scanned) if scanned else ""),
    }
    sections = {name: section for name, section in sections.items() if section[1]}
    links = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, (title, _) in sections.items())
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{text}</section>' for name, (title, text) in sections.items())
    header = (
        "<h1>Results</h1><p>Your runs and comparisons first, then the tables of EAST (arXiv 2405.20954) "
        f"and Bridging the Gap (NeurIPS 2022) that have trials here. Written {today.isoformat()}.</p>"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>'
    )
    return html.document("east: results", header, body, script=html.read("report.js"))


def _has_trials(table: ResultTable) -> bool:
    return any(cell.values for cell in table.cells)


def _differs(released: ResultTable, papers: Sequence[ResultTable]) -> bool:
    """Whether the released variant of a table shows records that the clean one does not."""
    clean = next(table for table in papers if table.name == released.name)
    keys = {(cell.block, cell.row, cell.column): cell.key for cell in clean.cells}
    return any(cell.values and cell.key != keys.get((cell.block, cell.row, cell.column)) for cell in released.cells)


def _finished(scanned: Sequence[Record]) -> dict[str, list[Record]]:
    """The finished trials of each setting, by its key."""
    trials: dict[str, list[Record]] = {}
    for record in scanned:
        if (record.stage, record.status) == ("trial", "done"):
            trials.setdefault(record.key, []).append(record)
    return trials


def _held(trials: Mapping[str, list[Record]], results_dir: Path) -> str:
    """The pages of comparisons and evaluations; then every setting with finished trials, and its scores."""
    pages = _pages(results_dir, "compare", "Comparisons") + _pages(results_dir, "evaluate", "Evaluations")
    if not trials and not pages:
        return (
            "<p>No records yet. These commands make some:</p><pre>east-run\neast-run task=compare dataset.path=my.csv "
            "dataset.target=label\neast-run task=reproduce table=east_v2_1 dry_run=true</pre>"
        )
    lines = []
    for group in sorted(trials.values(), key=lambda group: (_data_name(group[0]), group[0].config.loss.name)):
        config = group[0].config
        part = f" ({config.dataset.limit} rows)" if config.dataset.limit else ""
        means = [_mean([record.scores.get("test", {}).get(name) for record in group]) for name in SHOWN_SCORES]
        name = f"{_data_name(group[0])}{part}, {config.loss.name}"
        lines.append([escape(name), escape(f"{config.protocol.name} {config.preset or ''}"), str(len(group)), *means])
    header = ["data, loss", "protocol, preset", "trials", *map(papers.shown, SHOWN_SCORES)]
    label = "Finished trials: means on test rows"
    return f"{pages}{_folded(_simple(header, lines, label, words=2), len(lines))}"


def _pages(results_dir: Path, folder: str, title: str) -> str:
    """Links to the pages in a folder."""
    links = "".join(
        f'<li><a href="{escape(file.relative_to(results_dir).as_posix())}">{escape(_page_name(file))}</a></li>'
        for file in sorted((results_dir / folder).glob("**/*.html"))
    )
    return f"<h3>{title}</h3><ul>{links}</ul>" if links else ""


def _data_name(record: Record) -> str:
    """The name of the data; of a user's file or folder its own name, since the dataset is just csv or images."""
    path = record.config.dataset.options.get("path")
    return Path(str(path)).name if path else record.config.dataset.name


def _page_name(file: Path) -> str:
    """The name of a page; of a report.html its folder's name."""
    return file.parent.name if file.stem == "report" else file.stem


def _mean(values: Sequence[float | list[float] | None]) -> str:
    numbers = [value for value in values if isinstance(value, int | float)]
    return _number(sum(numbers) / len(numbers)) if numbers else ""


def _papers(
    papers: Sequence[ResultTable], with_trials: Sequence[ResultTable], released: Mapping[str, ResultTable]
) -> str:
    """The tables that have trials, and the names of the others."""
    without = [table.name for table in papers if table not in with_trials]
    note = (
        f"<p>No trials yet for {', '.join(without)}. <code>east-run task=reproduce table=NAME dry_run=true</code> says "
        "what a table takes.</p>"
    )
    shown = "".join(_table(table, released[table.name]) for table in with_trials)
    return (_overview(with_trials) + shown if with_trials else "") + (note if without else "")


def _overview(papers: Sequence[ResultTable]) -> str:
    counts = {table.name: _counts(table) for table in papers}
    names = ["published cells", "with our trials", "at the paper's protocol", "reproduced or close ✓"]
    totals = zip([*names, *statistics.WORDS], map(sum, zip(*counts.values(), strict=True)), strict=True)
    boxes = "".join(f"<li><strong>{number}</strong> {name}</li>" for name, number in totals)
    link = '<a href="#{0}">{0}</a> {1}'
    lines = [[link.format(t.name, escape(t.title)), *map(str, counts[t.name])] for t in papers]
    header = ["table", "cells", "with trials", "at the paper's protocol", "✓", *statistics.WORDS]
    return (
        f'<ul class="facts">{boxes}</ul><p class="caption">By Welch\'s 95 % interval of ours − published. '
        f"{statistics.MEANING}</p>{_simple(header, lines, 'What each table holds')}"
    )


def _counts(table: ResultTable) -> list[int]:
    """How many cells are published, have trials of ours, follow the paper's protocol, are ticked, have each verdict."""
    cells = [cell for cell in table.cells if cell.published]
    facts = [(True, bool(cell.values), cell.papers_protocol, cell.ticked) for cell in cells]
    verdicts = [sum(cell.word == word for cell in cells) for word in statistics.WORDS]
    return [*(sum(column) for column in zip(*facts, strict=True)), *verdicts]


def _table(table: ResultTable, released: ResultTable | None = None, level: int = 3) -> str:
    """One table as HTML, with its notes, its comparisons and the commands that fill its empty cells."""
    anchor = table.name if level == 3 else f"{table.name}-released"
    parts = [f'<section id="{anchor}"><h{level}>{escape(table.title)}</h{level}>']
    parts += [f'<p class="caption">{escape(table.caption)}</p>']
    blocks = "".join(_block(table, block) for block in table.blocks)
    parts += [_folded(blocks, len({(cell.block, cell.row) for cell in table.cells}))]
    notes = "".join(f"<dt><sup>{escape(mark)}</sup></dt><dd>{escape(text)}</dd>" for mark, text in writers.notes(table))
    parts += [f'<dl class="notes">{notes}</dl>'] if notes else []
    for sentence, (header, *lines) in map(writers.ranked, table.rankings):
        label = f"{table.title}: ranks"
        parts += [f"<p>{escape(sentence)}</p>", _simple(header, [list(map(escape, line)) for line in lines], label)]
    if pairs := tables.comparisons(table):
        lines = [[escape(word) for word in writers.compared(pair)] for pair in pairs]
        parts += [f"<p>{escape(writers.how_compared(table, pairs))}</p>"]
        parts += [_simple(writers.COMPARED, lines, f"{table.title}: paired comparisons", words=4)]
    if table.missing:
        commands = escape("\n".join(table.missing))
        parts += [
            f"<details><summary>Commands for missing cells ({len(table.missing)})</summary>"
            f"<pre>{commands}</pre></details>"
        ]
    if released is not None and _differs(released, [table]):
        inner = _table(released, level=level + 1)
        parts += [f"<details><summary>Released-code variant</summary>{inner}</details>"]
    return "".join(parts) + "</section>"


def _block(table: ResultTable, block: str) -> str:
    cells = table.blocks[block]
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    published = {column for (_, column), cell in cells.items() if cell.published}
    top, below, index = "", "", 1
    for column in columns:
        words = ["ours", "published", "Δ"] if column in published else ["ours"]
        title = escape(writers.heading(table, block, column))
        top += f'<th scope="colgroup" colspan="{len(words)}">{title}</th>'
        for word in words:
            below += f'<th scope="col" data-column="{index}"><button type="button">{word}</button></th>'
            index += 1
    head = f'<thead><tr><th scope="col" rowspan="2">{escape(block)}</th>{top}</tr><tr>{below}</tr></thead>'
    body = ""
    for row in rows:
        line = "".join(_cell(table, cells[row, column], column in published) for column in columns)
        body += f'<tr><th scope="row">{escape(row)}</th>{line}</tr>'
    return html.scrolling(f"{table.title}, {block}", f"{head}<tbody>{body}</tbody>")


def _cell(table: ResultTable, cell: tables.Cell, with_published: bool) -> str:
    ours, published, difference = writers.texts(table, cell, STYLE)
    if cell.values:
        first = f'<td data-value="{cell.summary.mean:.6f}"><a href="#k-{cell.key}">{ours}</a></td>'
    else:
        first = f'<td class="missing" title="{escape(tables.command(cell))}">{ours}</td>'
    if not with_published:
        return first
    value = f' data-value="{cell.published.mean}"' if cell.published else ""
    gap = f' data-value="{cell.difference:.6f}"' if cell.difference is not None else ""
    verdict = ' class="good"' if cell.ticked else ' class="bad"' if cell.word == "differs" else ""
    return f"{first}<td{value}>{published}</td><td{gap}{verdict}>{difference}</td>"


def _folded(text: str, rows: int) -> str:
    """Tables as they are, or behind a line to click if they are long."""
    return text if rows <= FOLDED else f"<details><summary>{rows:,} rows</summary>{text}</details>"


def _simple(header: Sequence[str], lines: Iterable[Sequence[str]], label: str, words: int = 1) -> str:
    """A table whose cells are HTML; the first `words` columns are text, the first is the row's header."""
    kind = lambda i: ' class="word"' if i < words else ""  # noqa: E731
    head = "".join(
        f'<th scope="col" data-column="{i}"{kind(i)}><button type="button">{escape(name)}</button></th>'
        for i, name in enumerate(header)
    )
    rows = "".join(
        f'<tr><th scope="row">{line[0]}</th>'
        + "".join(f"<td{kind(i)}>{w}</td>" for i, w in enumerate(line) if i)
        + "</tr>"
        for line in lines
    )
    return html.scrolling(label, f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>")


def _findings(shown: Set[str]) -> str:
    """What is known about the published numbers; `shown` are the tables that can be linked to."""
    parts = []
    for finding in papers.findings():
        tag = f'<span class="tag {finding.status}">{finding.status}</span>'
        parts += [
            f'<dt id="f-{finding.id}">{tag} {escape(finding.text)}</dt>'
            f"<dd>{escape(finding.evidence)}{_links(finding.id, shown)}</dd>"
        ]
    return f"<dl>{''.join(parts)}</dl>"


def _links(finding: str, shown: Set[str]) -> str:
    """Links to the tables with cells that a finding is about."""
    about = (cell for cell in papers.cells() if finding in papers.findings_of(cell))
    names = dict.fromkeys(f"{cell.paper}_{cell.table}" for cell in about)
    return (
        " " + ", ".join(f'<a href="#{name}">{name}</a>' if name in shown else name for name in names) if names else ""
    )


def _records(every: Sequence[ResultTable], scanned: Sequence[Record]) -> str:
    """Each setting behind a cell: its values, and its trials with links to their files."""
    by_key: dict[str, list[Record]] = {}
    for record in scanned:
        by_key.setdefault(record.key, []).append(record)
    keys = dict.fromkeys(cell.key for table in every for cell in table.cells if cell.values and cell.key)
    parts = [_setting(key, sorted(by_key[key], key=lambda record: record.seed)) for key in keys]
    return "".join(parts) or "<p>No records yet. The tables above say which commands make them.</p>"


def _setting(key: str, trials: Sequence[Record]) -> str:
    config = trials[0].config
    title = f"{_data_name(trials[0])}, {config.loss.name}"
    hyper = ", ".join(f"{name} {value}" for name, value in config.hyper.to_json().items() if value is not None)
    preset = f"preset {config.preset}" if config.preset else ""
    facts = [fact for fact in (f"protocol {config.protocol.name}", preset, hyper) if fact]
    origin = sorted({f"commit {r.git} on {r.device}" if r.git else f"on {r.device}" for r in trials})
    header = ["seed", "stage", "status", *map(papers.shown, SHOWN_SCORES), "epochs", "seconds", "file"]
    lines = []
    for r in trials:
        # A setting is chosen by validation alone, so test scores of search records are never shown.
        scores = r.scores.get("test", {}) if r.stage == "trial" else {}
        status = r.status if r.status == "done" else r.error or r.status
        link = f'<a href="{escape(r.source)}">{escape(Path(r.source).name)}</a>'
        numbers = [_number(scores.get(name)) for name in SHOWN_SCORES]
        words = [escape(str(word)) for word in (r.seed, r.stage, status)]
        lines.append([*words, *numbers, escape(str(r.epochs)), _number(r.seconds, 1), link])
    return (
        f'<section id="k-{escape(key)}"><h3>{escape(title)} <code>{escape(key)}</code></h3>'
        f'<p class="caption">{escape("; ".join([*facts, *origin]))}</p>{_simple(header, lines, f"Trials of {key}")}'
        "</section>"
    )


def _number(value: float | list[float] | None, places: int = 3) -> str:
    return f"{value:.{places}f}" if isinstance(value, int | float) else ""


def _figures(
    papers: Sequence[ResultTable], ours: Sequence[ResultTable], scanned: Sequence[Record], results_dir: Path
) -> str:
    figures = [(caption, _svg(figure)) for caption, figure in _drawn(papers, ours, scanned, results_dir)]
    studies = sorted((results_dir / "studies").glob("*.svg"))
    figures += [(f"Study: {file.stem}", svg) for file in studies if (svg := _checked_svg(file))]
    return f'<div class="gallery">{"".join(_inline(i, *entry) for i, entry in enumerate(figures))}</div>'


def _drawn(
    papers: Sequence[ResultTable], ours: Sequence[ResultTable], scanned: Sequence[Record], results_dir: Path
) -> Iterator[tuple[str, "Figure"]]:
    """(caption, figure): the step, then the tables, then example trials."""
    yield "The step at several temperatures, threshold 0.5", plots.steps(*plots.step_heights(TEMPERATURES), 0.5)
    for betas in (table for table in papers if table.name == "east_v2_6"):
        yield f"{betas.title}: a point per beta", plots.tradeoff(betas)
    for table in [*papers, *(table for table in ours if table.name != "grid")]:
        if _has_trials(table):
            yield table.title, plots.figure_of(table)
    in_cells = {cell.key for table in papers for cell in table.cells}
    for record in _examples(scanned, in_cells):
        name = f"{_data_name(record)}, {record.config.loss.name}, seed {record.seed}"
        file = results_dir / record.source
        history, stored = _history(record, file), _arrays(file)
        if "epoch" in history and len(set(map(len, history.values()))) == 1:
            yield f"Training: {name}", plots.curves(history, name)
        if "test_probabilities" in stored and "test_labels" in stored:
            temperatures = [0.2 * 0.7**k for k in range(15)]
            soft, hard = plots.softened(
                stored["test_probabilities"], stored["test_labels"], temperatures, ["f1", "mcc"]
            )
            yield f"Soft metrics of fixed predictions: {name}", plots.soft_against_hard(temperatures, soft, hard)
        if record.confusion.get("test"):
            yield f"Confusion matrix, test: {name}", plots.confusion(record.confusion["test"], title=name)


def _history(record: Record, file: Path) -> dict[str, list]:
    """The history of a record; none if its file has become unreadable."""
    if record.history or file.suffix != ".json":
        return record.history
    try:
        return records.read(file).history
    except records.UNREADABLE as error:
        warnings.warn(f"{file} cannot be read ({error}); not shown", stacklevel=2)
        return {}


def _arrays(file: Path) -> dict[str, "np.ndarray"]:
    """The probabilities beside a record; none if they are missing or damaged."""
    try:
        return records.arrays(file)
    except (OSError, ValueError) as error:
        if file.with_suffix(".npz").exists():
            warnings.warn(f"{error}; not shown", stacklevel=2)
        return {}


def _examples(scanned: Sequence[Record], in_cells: set[str | None]) -> list[Record]:
    """A trial with seed 0 for each of a few datasets: rather one of this folder's runs, behind a cell, or of F1*."""

    def preference(record: Record) -> tuple[bool, ...]:
        return record.source.startswith("runs/"), record.key in in_cells, record.config.loss.name == "f1"

    trials = [r for r in scanned if (r.stage, r.status, r.seed) == ("trial", "done", 0) and not r.config.dataset.limit]
    chosen = {_data_name(r): r for r in sorted(trials, key=preference)}  # the last of each dataset stays
    return sorted(chosen.values(), key=preference, reverse=True)[:EXAMPLES]


def _svg(figure: "Figure") -> str:
    stream = io.StringIO()
    with plots.style():
        figure.savefig(stream, format="svg", metadata={"Date": None}, facecolor="none")
    return stream.getvalue()


def _checked_svg(file: Path) -> str | None:
    """The drawing in a file if it only draws; otherwise None, with a warning.

    The page includes drawings as markup, so a script or a link in one would work there.
    """
    try:
        root = ElementTree.fromstring(read_regular(file, MOST_SVG_BYTES))
        for metadata in root.findall(f"{{{SVG}}}metadata"):
            root.remove(metadata)
        for element in root.iter():
            tag = str(element.tag).removeprefix(f"{{{SVG}}}")
            if tag not in DRAWING:
                raise ValueError(f"<{tag.rpartition('}')[2]}> does not draw")
            for name, value in element.attrib.items():
                is_link = name.endswith("href") and not value.startswith(("#", "data:image/png;base64,"))
                refers = re.search(r"\\|url\((?!#)", value, re.IGNORECASE)
                if is_link or refers or name.lower().startswith("on"):
                    raise ValueError(f"{name.rpartition('}')[2]}={value!r} does not draw")
            if tag == "style" and re.search(r"[<@\\]|url\(", element.text or "", re.IGNORECASE):
                raise ValueError("its style refers to something else")
        return ElementTree.tostring(root, encoding="unicode")  # as parsed and checked here, not as it was written
    except (OSError, ValueError, ElementTree.ParseError) as error:
        warnings.warn(f"{file} is left out: expected a drawing without scripts and links ({error})", stacklevel=2)
        return None


def _inline(number: int, caption: str, svg: str) -> str:
    """An SVG as a figure of the page, with the page's text colour and ids that are unique on the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.S)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1g{number}-", svg.replace(plots.INK, "currentColor"))
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
