"""Tables as text. Each writer takes tables and their paired comparisons and returns one string."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import TYPE_CHECKING

from east.lab.reporting import papers, statistics
from east.lab.reporting.cells import MARKS
from east.lab.reporting.fidelity import PRESETS

if TYPE_CHECKING:
    from east.lab.reporting.statistics import Lead
    from east.lab.reporting.tables import Cell, Ranking, ResultTable, RowPair

WIDTH = 110  # of running text in a terminal
MOST_COMMANDS = 40  # more would not be read
LATEX = {
    **{char: f"\\{char}" for char in "&%_#{}$"},
    **{"^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "\\": r"\textbackslash{}", "<": "$<$", ">": "$>$"},
    **{"±": r"$\pm$", "−": "$-$", "Δ": r"$\Delta$", "✓": r"$\bullet$", "✗": r"$\circ$", "·": r"$\cdot$", "²": "$^2$"},
    **{"▽": r"$\triangledown$", "△": r"$\triangle$", "◇": r"$\Diamond$", "◊": r"$\diamond$", "½": r"$\frac12$"},
    **{"≠": r"$\neq$", "‖": r"$\|$", "†": r"\dag{}", "‡": r"\ddag{}", "¶": r"\P{}", "§": r"\S{}"},
    "'": r"{\textquotesingle}",
}


@dataclass(frozen=True)
class Style:
    """How one output format renders the shared content."""

    bold: str
    raised: str
    escape: Callable[[str], str] = str
    narrow: bool = False  # a table of many columns shows bare means


MARKDOWN = Style("**{}**", "<sup>{}</sup>", lambda text: text.replace("|", r"\|").replace("*", r"\*"))
TEXT = Style("{}", " [{}]", narrow=True)
TEX = Style(
    r"\textbf{{{}}}", r"\textsuperscript{{{}}}", lambda text: "".join(LATEX.get(c, c) for c in text), narrow=True
)


def texts(table: "ResultTable", cell: "Cell", style: Style) -> list[str]:
    """A cell as three strings: ours, published, difference."""
    return [_ours(table, cell, style), _published(table, cell, style), style.escape(difference(cell))]


def _ours(table: "ResultTable", cell: "Cell", style: Style) -> str:
    ours = cell.summary
    if not ours.n:
        empty = "—" if cell.has_trials else "not run"
        return style.escape(f"failed ({cell.failed})" if cell.failed else empty)
    if table.ranked and style.narrow:
        return _emphasis(table, cell, "ours", f"{ours.mean:.3f}", style)
    number = f"{ours.mean:.3f}" + (f" ± {ours.std:.3f}" if ours.std is not None else "")
    count = f"{ours.n}/{cell.trials}" if cell.trials else f"{ours.n}"
    facts = [count, *([f"{cell.failed} failed"] if cell.failed else []), *(["capped"] if cell.capped else [])]
    raised = style.raised.format(style.escape(cell.marks)) if cell.marks else ""
    return _emphasis(table, cell, "ours", number, style) + style.escape(f" ({', '.join(facts)})") + raised


def _published(table: "ResultTable", cell: "Cell", style: Style) -> str:
    published = cell.published
    if not published:
        return ""
    letters = ",".join(map(table.letter, cell.findings))
    text = f"{published.mean:.{published.places}f} ± {published.std:.2f}"
    number = _emphasis(table, cell, "published", text, style)
    return number + (style.raised.format(letters) if letters else "")


def _emphasis(table: "ResultTable", cell: "Cell", which: str, number: str, style: Style) -> str:
    return (style.bold if table.best(cell, which) else "{}").format(style.escape(number.replace("-", "−")))


def difference(cell: "Cell") -> str:
    """Ours minus published with its interval and word, such as "+0.010 [−0.002, +0.018] reproduced ✓"."""
    if cell.difference is None:
        return ""
    if cell.interval is None:
        return _signed(cell.difference)
    ends = f"[{_signed(cell.interval.low)}, {_signed(cell.interval.high)}]"
    return f"{_signed(cell.difference)} {ends} {cell.word}{' ✓' if cell.ticked else ''}"


def _signed(number: float) -> str:
    return f"{number:+.3f}".replace("-", "−")


def layout(table: "ResultTable", style: Style) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Each block as (name, header, lines); only columns with published numbers show them and the difference."""
    for block, cells in table.blocks.items() if table.details else ():
        rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
        published = {column for (_, column), cell in cells.items() if cell.published}
        width = {column: 3 if column in published else 1 for column in columns}
        header = [""]
        for column in columns:
            header += [style.escape(heading(table, block, column)), "published", style.escape("Δ")][: width[column]]
        lines = [
            [style.escape(row), *(word for c in columns for word in texts(table, cells[row, c], style)[: width[c]])]
            for row in rows
        ]
        yield block, header, lines


def heading(table: "ResultTable", block: str, column: str) -> str:
    """A column's name with its score and, if mixed, its presets.

    For example "f1 (f1_positive; RF, CCS: f1_macro; mixed training: paper, budget)".
    """
    rows: dict[str, list[str]] = {}
    cells = [cell for (_, name), cell in table.blocks[block].items() if name == column]
    for cell in cells:
        score = cell.measure.partition(" of ")[0]  # trained_for is one score, though each row has its own metric
        rows.setdefault(papers.shown(score).replace("test.", ""), []).append(cell.row)
    first, *others = rows
    obvious = table.flipped or (not others and (first == block or column.partition(" ")[0].endswith(first)))
    facts = [] if obvious else [first, *(f"{', '.join(rows[score])}: {score}" for score in others)]
    presets = {cell.preset or "" for cell in cells if cell.values and cell.trains_networks and not cell.family}
    if len(presets) > 1 and not table.flipped:
        ordered = sorted(presets, key=lambda preset: (*PRESETS, preset).index(preset))
        facts.append(f"mixed training: {', '.join(ordered)}")
    return f"{column} ({'; '.join(facts)})" if facts else column


def notes(table: "ResultTable") -> Iterator[tuple[str, str]]:
    """Footnotes as (mark, text): the meaning of the marks, then the findings."""
    used = {mark for cell in table.cells for mark in cell.marks}
    yield from ((mark, text) for mark, text in MARKS.items() if mark in used)
    for name, finding in table.findings.items():
        yield table.letter(name), f"{finding.status.capitalize()}: {finding.text} {finding.evidence}"


def compared(pair: "RowPair") -> list[str]:
    """One paired comparison as strings."""
    ends = "—" if pair.low is None or pair.high is None else f"{_signed(pair.low)}, {_signed(pair.high)}"
    training = f" ({pair.training})" if pair.training else ""
    head = [pair.block, pair.column, f"{pair.row} − {pair.against}{training}", f"{pair.n} {pair.over}s"]
    holm = "—" if pair.p_holm is None else f"{pair.p_holm:.3f}"
    return [*head, f"{_signed(pair.difference)} [{ends}]", f"{pair.wins}/{pair.n}", f"{pair.p:.3f}", holm]


COMPARED = ["data", "score", "pair", "over", "difference [95 % interval]", "wins", "p", "p (Holm)"]
UNITS = {
    "seed": "Over seeds (initialisations on one split): t interval, sign-flip test.",
    "split": "Over splits (a new one for every trial, of the same rows): Nadeau and Bengio's corrected t interval and "
    "test.",
    "dataset": "Over datasets (the mean of their splits): t interval and t-test.",
}


def how_compared(table: "ResultTable", pairs: Sequence["RowPair"]) -> str:
    """Which intervals, tests and corrections the comparisons use."""
    units, answered = {pair.over for pair in pairs}, sum(pair.p_holm is not None for pair in pairs)
    sentences = [sentence for unit, sentence in UNITS.items() if unit in units]
    if not answered:
        sentences.append(
            "None of these comparisons was declared in advance: p-values are not corrected for multiple testing."
        )
    else:
        unanswered = table.declared - answered
        why = f", {unanswered} of which are open: not run, or not with the same training and splits"
        declared = f"the {table.declared} questions that the table declares{why if unanswered else ''}"
        one = "The table declares one question, so there is nothing to correct for."
        sentences.append(one if table.declared == 1 else f"Holm's correction is over {declared}.")
    if any(pair.training for pair in pairs):
        sentences.append(
            "In brackets: the training that is compared, where the table shows one of the two with fuller training."
        )
    return " ".join(sentences)


def ranked(entry: "Ranking") -> tuple[str, list[list[str]]]:
    """The ranks of one block: a sentence, and a line per row from best to worst, header first."""
    methods = sorted(entry.ranks, key=lambda name: entry.ranks[name])
    sentence = (
        f"Ranks by {entry.block} over {len(entry.columns)} datasets, 1 is best. Friedman: p = {entry.friedman:.2g}; "
        f"mean ranks less than {entry.critical_difference:.2f} apart cannot be told apart (Nemenyi, 95 %)."
    )
    if entry.signs:
        sentence += (
            " Bayesian sign test: how probable it is that a loss is behind the one named, practically equal "
            f"(within {entry.rope:g}), or ahead of it on the largest share of datasets."
        )
    if entry.leads:
        sentence += (
            f" Lead: mean difference to {entry.reference} over datasets with its 95 % interval, and on how many a row "
            "is ahead and behind; then by how many validation rows the positive or rarest class has."
        )
    lines = [["loss", "mean rank"], *([name, f"{entry.ranks[name]:.2f}"] for name in methods)]
    for rival, signs in entry.signs.items():
        lines[0] += [f"behind {rival}", "equal", "ahead"]
        for line in lines[1:]:
            line += [f"{p:.3f}" for p in vars(signs[line[0]]).values()] if line[0] in signs else [""] * 3
    for group, leads in entry.leads.items():
        datasets = next(iter(leads.values())).datasets
        lines[0] += [f"lead, {datasets} datasets" if group == statistics.ALL else f"{group} ({datasets})"]
        for line in lines[1:]:
            line += [lead(leads[line[0]])] if line[0] in leads else [""]
    return sentence, lines


def lead(entry: "Lead") -> str:
    """A lead over datasets, such as "+0.010 [−0.002, +0.018] 12:3"."""
    ends = "" if entry.low is None or entry.high is None else f" [{_signed(entry.low)}, {_signed(entry.high)}]"
    return f"{_signed(entry.mean)}{ends} {entry.ahead}:{entry.behind}"


def markdown(tables: Sequence["ResultTable"], pairs: Sequence[list["RowPair"]]) -> str:
    parts = []
    for table, entries in zip(tables, pairs, strict=True):
        parts += [f"## {table.title}", MARKDOWN.escape(table.caption)]
        for block, header, lines in layout(table, MARKDOWN):
            parts += [f"### {block}", _pipes(header, lines)]
        parts += ["\n".join(f"- <sup>{mark}</sup> {MARKDOWN.escape(text)}" for mark, text in notes(table))]
        for sentence, (header, *lines) in map(ranked, table.rankings):
            parts += [sentence, _pipes(header, [list(map(MARKDOWN.escape, line)) for line in lines])]
        if entries:
            lines = [list(map(MARKDOWN.escape, compared(pair))) for pair in entries]
            parts += ["### Paired comparisons", how_compared(table, entries), _pipes(COMPARED, lines)]
        if table.missing:
            parts += ["### Not run yet", "```bash\n" + "\n".join(to_run(table)) + "\n```"]
    return "\n\n".join(filter(None, parts)) + "\n"


def _pipes(header: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *lines])


def text(tables: Sequence["ResultTable"], pairs: Sequence[list["RowPair"]]) -> str:
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
            parts += [fill(how_compared(table, entries), WIDTH), aligned([COMPARED, *map(compared, entries)])]
        if table.missing:
            parts += ["Not run yet:\n" + "\n".join(f"  {line}" for line in to_run(table))]
    return "\n\n".join(filter(None, parts)) + "\n"


def to_run(table: "ResultTable") -> list[str]:
    """Commands that fill the empty cells; if there are many, the first few and one that runs all of them."""
    if len(table.missing) <= MOST_COMMANDS:
        return table.missing
    first = table.missing[:3]
    return [*first, f"# and {len(table.missing) - len(first)} more; all of them: {table.reproduce}"]


def stacked(table: "ResultTable", block: str) -> list[list[str]]:
    """A block with its columns below each other, to fit a terminal."""
    cells = table.blocks[block]
    lines = [[block, "ours", "published", "Δ"]]
    for column in dict.fromkeys(column for _, column in cells):
        lines += [[heading(table, block, column), "", "", ""]]
        lines += [[f"  {r}", *texts(table, cell, TEXT)] for (r, c), cell in cells.items() if c == column]
    return lines


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of words as text, the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def latex(tables: Sequence["ResultTable"], pairs: Sequence[list["RowPair"]]) -> str:
    parts = [r"% needs \usepackage{amssymb,booktabs,graphicx,textcomp}"]
    for table in tables:
        parts += [r"\begin{table}[p]", r"\centering", rf"\caption{{{TEX.escape(f'{table.title}. {table.caption}')}}}"]
        parts += [rf"\label{{tab:{table.name}}}"]
        blocks = list(layout(table, TEX))
        if blocks:
            columns = max(len(header) - 1 for _, header, _ in blocks)
            narrow = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"  # never enlarged
            parts += [narrow, rf"\begin{{tabular}}{{l{'r' * columns}}}"]
            for block, header, lines in blocks:
                body = [" & ".join(line) + r" \\" for line in [[TEX.escape(block), *header[1:]], *lines]]
                parts += [r"\toprule", body[0], r"\midrule", *body[1:]]
            parts += [r"\bottomrule", r"\end{tabular}}", r"\par\smallskip"]
        if blocks and table.rankings:
            parts += [r"\end{table}", r"\begin{table}[p]", r"\centering"]  # ranks have a page of their own
        parts += _latex_rankings(table)
        footnotes = [rf"\textsuperscript{{{TEX.escape(mark)}}}~{TEX.escape(note)}" for mark, note in notes(table)]
        if footnotes:
            parts += [r"\begin{minipage}{\linewidth}\scriptsize", " ".join(footnotes), r"\end{minipage}"]
        parts += [r"\end{table}", ""]
    return "\n".join(parts)


def _latex_rankings(table: "ResultTable") -> list[str]:
    """A table's ranks."""
    parts: list[str] = []
    for sentence, (header, *lines) in map(ranked, table.rankings):
        body = [" & ".join(map(TEX.escape, line)) + r" \\" for line in [header, *lines]]
        parts += [TEX.escape(sentence) + r"\par\smallskip", rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"]
        parts += [r"\toprule", body[0], r"\midrule", *body[1:], r"\bottomrule", r"\end{tabular}\par\smallskip"]
    return parts


def flat(table: "ResultTable", cell: "Cell") -> dict[str, object]:
    """A cell as one row of a CSV file."""
    ours, published, interval = cell.summary, cell.published, cell.interval
    constant = sum(cell.constant) / len(cell.constant) if cell.constant else None
    return {
        **{"table": table.name, "block": cell.block, "row": cell.row, "column": cell.column, "dataset": cell.dataset},
        **{"loss": cell.loss, "parameters": cell.parameters | cell.overrides, "protocol": cell.protocol},
        **{"score": papers.shown(cell.score), "mean": ours.mean, "std": ours.std, "low": ours.low, "high": ours.high},
        **{"n": ours.n, "trials": cell.trials, "failed": cell.failed, "capped": cell.capped},
        **{"published_mean": published.mean if published else None},
        **{"published_std": published.std if published else None},
        **{"difference": cell.difference, "difference_low": interval.low if interval else None},
        **{"difference_high": interval.high if interval else None, "word": cell.word, "ticked": cell.ticked},
        **{"constant": constant, "constant_word": cell.constant_word, "findings": cell.findings},
        **{"preset": cell.preset, "search": cell.search, "papers_protocol": cell.papers_protocol},
        **{"key": cell.key, "sources": cell.sources},
    }


def _finding(finding: papers.Footnote) -> dict[str, str]:
    return {"id": finding.id, "status": finding.status, "text": finding.text, "evidence": finding.evidence}


def csv_(tables: Sequence["ResultTable"], pairs: Sequence[list["RowPair"]]) -> str:
    """One line per cell; lists and mappings as JSON."""
    cells = [flat(table, cell) for table in tables for cell in table.cells]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, fieldnames=list(cells[0]) if cells else [], lineterminator="\n")
    writer.writeheader()
    for cell in cells:
        writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in cell.items()})
    return stream.getvalue()


def json_(tables: Sequence["ResultTable"], pairs: Sequence[list["RowPair"]]) -> str:
    """A list of tables: name, title, caption, cells (with the value of every seed), comparisons, findings, missing, and
    rankings if the table has them."""
    entries = [
        {"name": table.name, "title": table.title, "caption": table.caption}
        | {"cells": [flat(table, cell) | {"values": cell.values} for cell in table.cells]}
        | {"comparisons": [asdict(pair) for pair in comparisons]}
        | {"findings": [_finding(finding) for finding in table.findings.values()], "missing": table.missing}
        | ({"rankings": [asdict(ranking) for ranking in table.rankings]} if table.ranked else {})
        for table, comparisons in zip(tables, pairs, strict=True)
    ]
    return json.dumps(entries, indent=1, ensure_ascii=False) + "\n"


WRITERS = {"markdown": markdown, "latex": latex, "csv": csv_, "json": json_, "text": text}
