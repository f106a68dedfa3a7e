"""Tables as text. Each writer takes tables and returns one string."""

import json
from collections.abc import Callable, Iterator, Sequence
from textwrap import fill
from typing import TypeAlias

from east.lab.reporting import papers
from east.lab.reporting.cells import MARKS, Cell
from east.lab.reporting.tables import ALL, Ranking, ResultTable, RowPair, comparisons, content, presets_of

WIDTH = 110  # of running text in a terminal
MOST_COMMANDS = 40  # more would not be read
LATEX: dict[str, str | int | None] = {
    **{char: f"\\{char}" for char in "&%_#{}$"},
    **{"^": r"\textasciicircum{}", "~": r"\textasciitilde{}", "\\": r"\textbackslash{}", "<": "$<$", ">": "$>$"},
    **{"±": r"$\pm$", "−": "$-$", "Δ": r"$\Delta$", "✓": r"$\bullet$", "·": r"$\cdot$", "²": "$^2$"},
    **{"▽": r"$\triangledown$", "△": r"$\triangle$", "◇": r"$\Diamond$", "◊": r"$\diamond$", "½": r"$\frac12$"},
    **{"≠": r"$\neq$", "‖": r"$\|$", "†": r"\dag{}", "‡": r"\ddag{}", "¶": r"\P{}", "§": r"\S{}"},
    "'": r"{\textquotesingle}",
}
COMPARED = ["data", "score", "pair", "over", "difference [95 % interval]", "wins", "p", "p (Holm)"]
UNITS = {
    "seed": "Over seeds (initialisations on one split): t interval, sign-flip test.",
    "split": "Over splits (a new one for every trial, of the same rows): Nadeau and Bengio's corrected t interval and "
    "test.",
    "dataset": "Over datasets (the mean of their splits): t interval and t-test.",
}

Lines: TypeAlias = list[list[str]]  # of a grid, header first


class Text:
    """How tables look in a terminal; the other formats are variants."""

    bold, raised, preamble = "{}", " [{}]", ""

    def escape(self, text: str) -> str:
        return text

    def heading(self, text: str, level: int = 2) -> str:
        return text

    def paragraph(self, text: str) -> str:
        return fill(text, WIDTH)

    def grid(self, lines: Lines) -> str:
        return aligned(lines)

    def block(self, table: ResultTable, name: str) -> str:
        """The columns stand below each other, to fit a terminal."""
        cells = table.blocks[name]
        width = 4 if any(cell.published for cell in cells.values()) else 2
        lines = [[name, "ours", "published", "Δ"]]
        for column in dict.fromkeys(column for _, column in cells):
            lines += [[column_heading(table, name, column), "", "", ""]]
            lines += [[f"  {r}", *texts(table, cell, self)] for (r, c), cell in cells.items() if c == column]
        return self.grid([line[:width] for line in lines])

    def notes(self, entries: Sequence[tuple[str, str]]) -> str:
        return "\n".join(fill(f"[{mark}] {note}", WIDTH, subsequent_indent="    ") for mark, note in entries)

    def commands(self, lines: Sequence[str]) -> str:
        return "\n".join(["Not run yet:", *(f"  {line}" for line in lines)])


class Markdown(Text):
    bold, raised = "**{}**", "<sup>{}</sup>"

    def escape(self, text: str) -> str:
        return text.replace("|", r"\|").replace("*", r"\*")

    def heading(self, text: str, level: int = 2) -> str:
        return f"{'#' * level} {text}"

    def paragraph(self, text: str) -> str:
        return self.escape(text)

    def grid(self, lines: Lines) -> str:
        rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
        return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])

    def block(self, table: ResultTable, name: str) -> str:
        return f"{self.heading(name, 3)}\n\n{self.grid(block(table, name, self))}"

    def notes(self, entries: Sequence[tuple[str, str]]) -> str:
        return "\n".join(f"- {self.raised.format(mark)} {self.escape(text)}" for mark, text in entries)

    def commands(self, lines: Sequence[str]) -> str:
        return "\n".join([f"{self.heading('Not run yet', 3)}\n", "```bash", *lines, "```"])


class Latex(Markdown):
    bold, raised = r"\textbf{{{}}}", r"\textsuperscript{{{}}}"
    preamble = "% needs \\usepackage{amssymb,booktabs,graphicx,textcomp}"

    def escape(self, text: str) -> str:
        return text.translate(str.maketrans(LATEX))

    def heading(self, text: str, level: int = 2) -> str:
        return rf"\{'sub' * (level - 2)}section*{{{self.escape(text)}}}"

    def grid(self, lines: Lines) -> str:
        """A tabular, as wide as the page at most."""
        header, *body = [" & ".join(line) + r" \\" for line in lines]
        narrow = r"\noindent\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
        columns = rf"\begin{{tabular}}{{l{'r' * (len(lines[0]) - 1)}}}"
        return "\n".join([narrow, columns, r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}}"])

    def notes(self, entries: Sequence[tuple[str, str]]) -> str:
        return (
            rf"{{\scriptsize {' '.join(f'{self.raised.format(self.escape(m))}~{self.escape(t)}' for m, t in entries)}}}"
        )

    def commands(self, lines: Sequence[str]) -> str:
        return ""


def rendered(tables: Sequence[ResultTable], style: Text) -> str:
    """Tables with their captions, footnotes, comparisons and the commands that fill empty cells."""
    parts = [style.preamble]
    escaped = lambda lines: [list(map(style.escape, line)) for line in lines]  # noqa: E731
    for table in tables:
        parts += [style.heading(table.spec.title), style.paragraph(table.caption)]
        parts += [] if table.spec.ranked else [style.block(table, name) for name in table.blocks]
        parts += [style.notes(entries)] if (entries := list(notes(table))) else []
        for entry in table.rankings:
            parts += [style.paragraph(ranks_explained(entry)), style.grid(escaped(ranks(entry)))]
        if pairs := comparisons(table):
            parts += [style.heading("Paired comparisons", 3), style.paragraph(how_compared(table, pairs))]
            parts += [style.grid(escaped([COMPARED, *map(compared, pairs)]))]
        parts += [style.commands(to_run(table))] if table.missing else []
    return "\n\n".join(filter(None, parts)) + "\n"


def block(table: ResultTable, name: str, style: Text) -> Lines:
    """A block; only columns with published numbers show them and the difference."""
    cells = table.blocks[name]
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    width = {c: 3 if any(cells[row, c].published for row in rows) else 1 for c in columns}
    header = [""]
    for c in columns:
        header += [style.escape(column_heading(table, name, c)), "published", style.escape("Δ")][: width[c]]
    words = {key: texts(table, cell, style)[: width[key[1]]] for key, cell in cells.items()}
    return [header, *([style.escape(row), *(word for c in columns for word in words[row, c])] for row in rows)]


def texts(table: ResultTable, cell: Cell, style: Text) -> list[str]:
    """A cell as three strings: ours, published, difference."""

    def emphasis(which: str, number: str) -> str:
        return (style.bold if table.best(cell, which) else "{}").format(style.escape(number.replace("-", "−")))

    published = emphasis("published", f"{cell.published}") if cell.published else ""
    letters = ",".join(letter(list(table.findings).index(name)) for name in cell.findings)
    published += style.raised.format(letters) if letters else ""
    ours, shown = cell.summary, cell.shown
    if not ours.n:
        lacking = not table.spec.rows and any(record.status == "done" for record in shown.records)
        number = style.escape(f"failed ({shown.failed})" if shown.failed else "—" if lacking else "not run")
    else:
        number = emphasis("ours", f"{ours.mean:.3f}" + (f" ± {ours.std:.3f}" if ours.std is not None else ""))
        count = f"{ours.n}/{cell.asked}" if cell.asked else f"{ours.n}"
        facts = [count, *([f"{shown.failed} failed"] if shown.failed else []), *(["capped"] if shown.capped else [])]
        number += style.escape(f" ({', '.join(facts)})")
        number += style.raised.format(style.escape(cell.marks)) if cell.marks else ""
    return [number, published, style.escape(difference(cell))]


def letter(place: int) -> str:
    """a, b, …, z, aa, bb, …: the mark of a finding."""
    return "abcdefghijklmnopqrstuvwxyz"[place % 26] * (place // 26 + 1)


def difference(cell: Cell) -> str:
    """Ours minus published with its interval and word, such as "+0.010 [−0.002, +0.018] reproduced ✓"."""
    gap = cell.gap
    if gap.difference is None:
        return ""
    word = f" {gap.word}{' ✓' if gap.ticked else ''}" if gap.word else ""
    return spanned(gap.difference, gap.difference_low, gap.difference_high) + word


def spanned(middle: float, low: float | None, high: float | None) -> str:
    """A number with its interval, if it has one: +0.010 [−0.002, +0.018]."""
    ends = "" if low is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{middle:+.3f}{ends}".replace("-", "−")


def column_heading(table: ResultTable, block: str, column: str) -> str:
    """A column's name with its score and, if mixed, its presets.

    For example "f1 (f1_positive; RF, CCS: f1_macro; mixed training: paper, budget)".
    """
    rows: dict[str, list[str]] = {}
    cells = [cell for (_, name), cell in table.blocks[block].items() if name == column]
    for cell in cells:
        rows.setdefault(papers.shown(cell.measure).replace("test.", ""), []).append(cell.row)
    first, *others = rows
    obvious = not others and (first == block or column.partition(" ")[0].endswith(first))
    facts = [] if obvious else [first, *(f"{', '.join(rows[score])}: {score}" for score in others)]
    if len(presets := presets_of(cells)) > 1:
        facts.append(f"mixed training: {', '.join(presets)}")
    return f"{column} ({'; '.join(facts)})" if facts else column


def notes(table: ResultTable) -> Iterator[tuple[str, str]]:
    """Footnotes as (mark, text): the meaning of the marks, then the findings."""
    used = {mark for cell in table.cells for mark in cell.marks}
    yield from ((mark, text) for mark, text in MARKS.values() if mark in used)
    for place, finding in enumerate(table.findings.values()):
        yield letter(place), f"{finding.status.capitalize()}: {finding.text} {finding.evidence}"


def compared(pair: RowPair) -> list[str]:
    """One paired comparison as strings."""
    span = spanned(pair.difference, pair.low, pair.high)
    training = f" ({pair.training})" if pair.training else ""
    head = [pair.block, pair.column, f"{pair.row} − {pair.against}{training}", f"{pair.n} {pair.over}s"]
    holm = "—" if pair.p_holm is None else f"{pair.p_holm:.3f}"
    return [*head, span if "[" in span else f"{span} [—]", f"{pair.wins}/{pair.n}", f"{pair.p:.3f}", holm]


def how_compared(table: ResultTable, pairs: Sequence[RowPair]) -> str:
    """Which intervals, tests and corrections the comparisons use."""
    units, answered = {pair.over for pair in pairs}, sum(pair.p_holm is not None for pair in pairs)
    sentences, declared = [sentence for unit, sentence in UNITS.items() if unit in units], len(table.questions)
    if not answered:
        sentences.append(
            "None of these comparisons was declared in advance: p-values are not corrected for multiple testing."
        )
    elif declared == 1:
        sentences.append("The table declares one question, so there is nothing to correct for.")
    else:
        open_ = f", {declared - answered} of which are open: not run, or not with the same training and splits"
        which = f"the {declared} questions that the table declares{open_ if declared > answered else ''}"
        sentences.append(f"Holm's correction is over {which}.")
    if any(pair.training for pair in pairs):
        sentences.append(
            "In brackets: the training that is compared, where the table shows one of the two with fuller training."
        )
    return " ".join(sentences)


def ranks_explained(entry: Ranking) -> str:
    """What the ranks of a block mean."""
    return (
        f"Ranks by {entry.block} over {len(entry.columns)} datasets, 1 is best. Friedman: p = {entry.friedman:.2g}; "
        f"mean ranks less than {entry.critical_difference:.2f} apart cannot be told apart (Nemenyi, 95 %). "
        "Bayesian sign test: how probable it is that a loss is behind the one named, practically equal "
        f"(within {entry.rope:g}), or ahead of it on the largest share of datasets. "
        f"Lead: mean difference to {entry.reference} over datasets with its 95 % interval, and on how many a row "
        "is ahead and behind; then by how many validation rows the positive or rarest class has."
    )


def ranks(entry: Ranking) -> Lines:
    """A line per row of a block, from best to worst."""
    signs, groups = entry.signs[entry.reference], [(g, next(iter(of.values())).n, of) for g, of in entry.leads.items()]
    heads = [f"lead, {n} datasets" if group == ALL else f"{group} ({n})" for group, n, _ in groups]
    lines = [["loss", "mean rank", f"behind {entry.reference}", "equal", "ahead", *heads]]
    for name in sorted(entry.ranks, key=lambda name: entry.ranks[name]):
        odds = [f"{p:.3f}" for p in vars(signs[name]).values()] if name in signs else [""] * 3
        leads = [of.get(name) for *_, of in groups]
        won = [f"{spanned(p.difference, p.low, p.high)} {p.wins}:{p.losses}" if p else "" for p in leads]
        lines.append([name, f"{entry.ranks[name]:.2f}", *odds, *won])
    return lines


def to_run(table: ResultTable) -> list[str]:
    """Commands that fill the empty cells; if there are many, the first few and one that runs all of them."""
    missing = table.missing
    if len(missing) <= MOST_COMMANDS:
        return missing
    return [*missing[:3], f"# and {len(missing) - 3} more; all of them: {table.reproduce}"]


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of words as text, the first column aligned left and the others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(line).rstrip() for line in padded)


def answer(table: ResultTable) -> str:
    """Which row leads the reference row most in the first column, how sure that is, and what to do next."""
    pairs = [p for p in comparisons(table) if p.column == table.cells[0].column and p.low is not None]
    sentence = ""
    if best := max(pairs, key=lambda pair: pair.difference, default=None):
        sure = "more than chance" if (best.low or 0.0) > 0 else "too close to call"
        lead = spanned(best.difference, best.low, best.high)
        sentence = f"{best.column}: {best.row} over {best.against} {lead}: {sure} with {best.n} {best.over}s."
    return f"{sentence}\nNext: {table.spec.next}"


def csv(tables: Sequence[ResultTable]) -> str:
    """One line per cell; lists and mappings as JSON."""
    import pandas as pd

    cells = [cell for table in tables for cell in content(table)["cells"]]
    as_json = lambda value: json.dumps(value) if isinstance(value, list | dict) else value  # noqa: E731
    return pd.DataFrame(cells, dtype=object).map(as_json).to_csv(index=False)


def json_(tables: Sequence[ResultTable]) -> str:
    """A list of tables: see `tables.content`."""
    return json.dumps([content(table) for table in tables], indent=1, ensure_ascii=False) + "\n"


WRITERS: dict[str, Callable[[Sequence[ResultTable]], str]] = {
    "markdown": lambda tables: rendered(tables, Markdown()),
    "latex": lambda tables: rendered(tables, Latex()),
    "text": lambda tables: rendered(tables, Text()),
    "csv": csv,
    "json": json_,
}
