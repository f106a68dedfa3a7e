"""Tables as text. Each writer takes tables and their paired comparisons and returns one string."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from east.reporting.tables import Cell, Table

MARKS = {
    "†": "budget preset: a smaller grid and shorter training than the paper's.",
    "¶": "lean preset: a few points of the grid and at most 40 epochs.",
    "‡": "quick preset: no search and very short training.",
    "§": "the records hold several settings that fit; the one with the most trials is shown.",
}
WIDTH = 110  # of running text in a terminal
LATEX = {
    **{char: f"\\{char}" for char in "&%_#{}$"},
    **{"^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "\\": r"\textbackslash{}", "<": "$<$", ">": "$>$"},
    **{"±": r"$\pm$", "−": "$-$", "Δ": r"$\Delta$", "✓": r"$\bullet$", "✗": r"$\circ$", "·": r"$\cdot$", "²": "$^2$"},
    **{"†": r"\dag{}", "‡": r"\ddag{}", "¶": r"\P{}", "§": r"\S{}", "'": r"{\textquotesingle}"},
}


@dataclass(frozen=True)
class Style:
    """How a format writes what all of them say."""

    bold: str
    raised: str
    escape: Callable[[str], str] = str
    narrow: bool = False  # a table of many columns shows bare means


MARKDOWN = Style("**{}**", "<sup>{}</sup>", lambda text: text.replace("|", r"\|").replace("*", r"\*"))
TEXT = Style("{}", " [{}]", narrow=True)
TEX = Style(
    r"\textbf{{{}}}", r"\textsuperscript{{{}}}", lambda text: "".join(LATEX.get(c, c) for c in text), narrow=True
)


def texts(table: "Table", cell: "Cell", style: Style) -> list[str]:
    """A cell in three words: ours, published, difference."""
    ours, escape = cell.summary, style.escape

    def emphasis(which: str, number: str) -> str:
        return (style.bold if table.best(cell, which) else "{}").format(escape(number.replace("-", "−")))

    if ours.n and table.ranked and style.narrow:
        mine = emphasis("ours", f"{ours.mean:.3f}")
    elif ours.n:
        number = f"{ours.mean:.3f}" + (f" ± {ours.std:.3f}" if ours.std is not None else "")
        count = (
            f" ({ours.n}{f'/{cell.trials}' if cell.trials else ''}{f', {cell.failed} failed' if cell.failed else ''})"
        )
        mine = emphasis("ours", number) + escape(count)
        mine += style.raised.format(escape(cell.marks)) if cell.marks else ""
    else:
        without = "—" if cell.tried else "not run"
        mine = escape(f"failed ({cell.failed})" if cell.failed else without)
    theirs = difference = ""
    if cell.published:
        places = 2 if cell.published["paper"] == "btg" else 3  # as printed
        letters = ",".join(map(table.letter, cell.findings))
        theirs = emphasis("published", f"{cell.published['mean']:.{places}f} ± {cell.published['std']:.2f}")
        theirs += style.raised.format(letters) if letters else ""
    if cell.difference is not None:
        verdict = {True: " ✓", False: " ✗", None: ""}[cell.inside]
        difference = escape(f"{cell.difference:+.3f}".replace("-", "−") + verdict)
    return [mine, theirs, difference]


def layout(table: "Table", style: Style) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Each block as (name, header, lines); published and difference appear where anything was published."""
    for block, cells in table.blocks.items():
        rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
        known = {column for (_, column), cell in cells.items() if cell.published}
        width = {column: 3 if column in known else 1 for column in columns}
        header = [""]
        for column in columns:
            header += [style.escape(heading(table, block, column)), "published", style.escape("Δ")][: width[column]]
        lines = [
            [style.escape(row), *(word for c in columns for word in texts(table, cells[row, c], style)[: width[c]])]
            for row in rows
        ]
        yield block, header, lines


def heading(table: "Table", block: str, column: str) -> str:
    """A column's name, with the score of ours that it shows: "f1 (f1_pos; RF, CCS: f1_macro)"."""
    rows: dict[str, list[str]] = {}
    for (row, name), cell in table.blocks[block].items():
        if name == column:
            rows.setdefault(cell.measure.replace("test.", ""), []).append(row)
    first, *others = rows
    if table.flipped or (not others and (first == block or column.partition(" ")[0].endswith(first))):
        return column
    exceptions = [f"; {', '.join(rows[score])}: {score}" for score in others]
    return f"{column} ({first}{''.join(exceptions)})"


def notes(table: "Table") -> Iterator[tuple[str, str]]:
    """Footnotes as (mark, text): what the marks mean, then the findings."""
    used = {mark for cell in table.cells for mark in cell.marks}
    yield from ((mark, text) for mark, text in MARKS.items() if mark in used)
    for name, finding in table.findings.items():
        yield table.letter(name), f"{finding['status'].capitalize()}: {finding['text']} {finding['evidence']}"


def compared(entry: dict) -> list[str]:
    """One paired comparison as words."""
    ends = "—" if entry["low"] is None else f"{entry['low']:+.3f}, {entry['high']:+.3f}"
    interval = f"{entry['difference']:+.3f} [{ends}]".replace("-", "−")
    head = [entry["block"], entry["column"], f"{entry['row']} − {entry['against']}", f"{entry['n']} {entry['over']}s"]
    return [*head, interval, f"{entry['wins']}/{entry['n']}", f"{entry['p']:.3f}", f"{entry['p_holm']:.3f}"]


COMPARED = ["data", "score", "pair", "over", "difference [95 % interval]", "wins", "p", "p (Holm)"]


def ranked(entry: dict) -> tuple[str, list[list[str]]]:
    """The ranks of one block: a sentence, and a line per row from best to worst, header first."""
    methods = sorted(entry["ranks"], key=entry["ranks"].get)
    sentence = (
        f"Ranks by {entry['block']} over {len(entry['columns'])} datasets, 1 is best. Friedman: p = "
        f"{entry['friedman']:.2g}; mean ranks less than {entry['critical_difference']:.2f} apart are not told apart "
        "(Nemenyi, 95 %)."
    )
    if entry["signs"]:
        sentence += (
            " Bayesian sign test: how probable it is that a loss is behind the one named, practically equal "
            f"(within {entry['rope']:g}), or ahead of it on the largest share of datasets."
        )
    lines = [["loss", "mean rank"], *([name, f"{entry['ranks'][name]:.2f}"] for name in methods)]
    for rival, signs in entry["signs"].items():
        lines[0] += [f"behind {rival}", "equal", "ahead"]
        for line in lines[1:]:
            line += [f"{p:.3f}" for p in signs[line[0]].values()] if line[0] in signs else [""] * 3
    return sentence, lines


def markdown(tables: Sequence["Table"], pairs: Sequence[list[dict]]) -> str:
    parts = []
    for table, entries in zip(tables, pairs, strict=True):
        parts += [f"## {table.title}", MARKDOWN.escape(table.caption)]
        for block, header, lines in layout(table, MARKDOWN):
            parts += [f"### {block}", _pipes(header, lines)]
        parts += ["\n".join(f"- <sup>{mark}</sup> {MARKDOWN.escape(text)}" for mark, text in notes(table))]
        for sentence, (header, *lines) in map(ranked, table.rankings):
            parts += [sentence, _pipes(header, [list(map(MARKDOWN.escape, line)) for line in lines])]
        if entries:
            parts += [
                "### Paired comparisons",
                _pipes(COMPARED, [list(map(MARKDOWN.escape, compared(e))) for e in entries]),
            ]
        if table.missing:
            parts += ["### Not run yet", "```bash\n" + "\n".join(table.missing) + "\n```"]
    return "\n\n".join(filter(None, parts)) + "\n"


def _pipes(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def text(tables: Sequence["Table"], pairs: Sequence[list[dict]]) -> str:
    """For the terminal."""
    parts = []
    for table, entries in zip(tables, pairs, strict=True):
        parts += [table.title, fill(table.caption, WIDTH)]
        for block, header, lines in layout(table, TEXT):
            wide = [[block, *header[1:]], *lines]
            parts += [aligned(stacked(table, block) if "published" in header else wide)]
        indented = (fill(f"[{mark}] {note}", WIDTH, subsequent_indent="    ") for mark, note in notes(table))
        parts += ["\n".join(indented)]
        for sentence, lines in map(ranked, table.rankings):
            parts += [fill(sentence, WIDTH), aligned(lines)]
        if entries:
            parts += [aligned([COMPARED, *map(compared, entries)])]
        if table.missing:
            parts += ["Not run yet:\n" + "\n".join(f"  {line}" for line in table.missing)]
    return "\n\n".join(filter(None, parts)) + "\n"


def stacked(table: "Table", block: str) -> list[list[str]]:
    """A block with its scores below each other, to fit a terminal."""
    cells = table.blocks[block]
    lines = [[block, "ours", "published", "Δ"]]
    for column in dict.fromkeys(column for _, column in cells):
        lines += [[heading(table, block, column), "", "", ""]]
        lines += [[f"  {r}", *texts(table, cell, TEXT)] for (r, c), cell in cells.items() if c == column]
    return lines


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of words in columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def latex(tables: Sequence["Table"], pairs: Sequence[list[dict]]) -> str:
    parts = [r"% needs \usepackage{booktabs,graphicx,textcomp}"]
    for table in tables:
        parts += [r"\begin{table}[p]", r"\centering", rf"\caption{{{TEX.escape(f'{table.title}. {table.caption}')}}}"]
        blocks = list(layout(table, TEX))
        columns = max((len(header) - 1 for _, header, _ in blocks), default=0)
        parts += [
            rf"\label{{tab:{table.name}}}",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",  # narrow tables are not blown up
            rf"\begin{{tabular}}{{l{'r' * columns}}}",
        ]
        for block, header, lines in blocks:
            body = [" & ".join(line) + r" \\" for line in [[TEX.escape(block), *header[1:]], *lines]]
            parts += [r"\toprule", body[0], r"\midrule", *body[1:]]
        parts += [r"\bottomrule", r"\end{tabular}}", r"\par\smallskip"]
        if table.rankings:  # a page of their own
            parts += [r"\end{table}", r"\begin{table}[p]", r"\centering"]
        for sentence, (header, *lines) in map(ranked, table.rankings):
            body = [" & ".join(map(TEX.escape, line)) + r" \\" for line in [header, *lines]]
            parts += [TEX.escape(sentence) + r"\par\smallskip", rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"]
            parts += [r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule", r"\end{tabular}\par\smallskip"]
        footnotes = [rf"\textsuperscript{{{TEX.escape(mark)}}}~{TEX.escape(note)}" for mark, note in notes(table)]
        parts += (
            [r"\begin{minipage}{\linewidth}\scriptsize", " ".join(footnotes), r"\end{minipage}"] if footnotes else []
        )
        parts += [r"\end{table}", ""]
    return "\n".join(parts)


def flat(table: "Table", cell: "Cell") -> dict:
    """A cell as one line of numbers."""
    ours, known = cell.summary, cell.published or {}
    where = {"table": table.name, "block": cell.block, "row": cell.row, "column": cell.column, "dataset": cell.dataset}
    what = {
        "loss": cell.loss,
        "parameters": cell.parameters | cell.overrides,
        "protocol": cell.protocol,
        "score": cell.score,
    }
    mine = {"mean": ours.mean, "std": ours.std, "low": ours.low, "high": ours.high, "n": ours.n, "trials": cell.trials}
    theirs = {"published_mean": known.get("mean"), "published_std": known.get("std")}
    verdict = {"difference": cell.difference, "inside": cell.inside, "findings": cell.findings}
    origin = {"failed": cell.failed, "preset": cell.preset, "key": cell.key, "sources": cell.sources}
    return where | what | mine | theirs | verdict | origin


def csv_(tables: Sequence["Table"], pairs: Sequence[list[dict]]) -> str:
    """One line per cell; lists and mappings as JSON."""
    cells = [flat(table, cell) for table in tables for cell in table.cells]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(cells[0]) if cells else [], lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in cell.items()})
    return stream.getvalue()


def json_(tables: Sequence["Table"], pairs: Sequence[list[dict]]) -> str:
    """A list of tables: name, title, caption, cells (with the value of every seed), comparisons, findings, missing, and
    the rankings of a table that has them."""
    found = [
        {"name": table.name, "title": table.title, "caption": table.caption}
        | {"cells": [flat(table, cell) | {"values": cell.values} for cell in table.cells]}
        | {"comparisons": entries, "findings": list(table.findings.values()), "missing": table.missing}
        | ({"rankings": table.rankings} if table.ranked else {})
        for table, entries in zip(tables, pairs, strict=True)
    ]
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


WRITERS = {"markdown": markdown, "latex": latex, "csv": csv_, "json": json_, "text": text}
