"""Tables: records beside the published numbers, in Markdown, LaTeX, CSV, JSON and plain text. Nothing here needs torch.

specs.py says what a table consists of, cells.py which records fill a cell and how it is judged, fidelity.py how fully
they follow the protocol, writers.py how a table looks.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from east.choices import choose
from east.lab.experiment import records
from east.lab.experiment.records import Record
from east.lab.reporting import papers, recorded, statistics, writers
from east.lab.reporting.cells import TUNED_FOR, Cell, command, decided, fill, fill_shorter, typed_command
from east.lab.reporting.entries import Catalogue
from east.lab.reporting.fidelity import PRESETS
from east.lab.reporting.recorded import labels
from east.lab.reporting.specs import VARIANTS, Question, Spec, blank_cells, names, papers_tables, spec, usual_preset
from east.lab.settings.command import Command

__all__ = ["Cell", "ResultTable", "Spec", "blank_cells", "build", "build_all", "command", "comparisons"]
__all__ += ["labels", "names", "papers_tables", "plan", "render", "spec", "usual_preset"]

REFERENCES = ("ce", "bce")  # losses that the others are compared with
RAREST = {"fewer than 10": (0, 10), "10 to 29": (10, 30), "30 or more": (30, math.inf)}  # validation rows of that class
ROPE = 0.01  # scores that differ by at most this are practically equal
PLUGGED = ("ce", "f1")  # losses that the papers' tables also show with a plug-in decision, if it is on record


@dataclass(frozen=True)
class RowPair:
    """Two rows of a column, trial by trial. `p_holm` is corrected over the table's questions; None if it is not one."""

    block: str
    column: str
    row: str
    against: str
    over: str  # a key of `writers.UNITS`
    n: int
    difference: float
    low: float | None
    high: float | None
    wins: int
    p: float
    training: str | None = None  # the preset of both, where the table shows one of them with a fuller one
    p_holm: float | None = None


@dataclass(frozen=True)
class Ranking:
    """The rows of a block by their mean rank over the columns that every row has trials for.

    friedman: p-value of "all rank alike". critical_difference: closer ranks do not differ significantly (Nemenyi).
    signs: a row of cross-entropy, or the reference row -> each other row against it, by the Bayesian sign test.
    leads: a group of datasets (all, or by validation rows of the rarest class) -> each row's lead over the reference.
    """

    block: str
    columns: list[str]
    ranks: dict[str, float]
    friedman: float
    critical_difference: float
    rope: float
    signs: dict[str, dict[str, statistics.SignTest]]
    reference: str | None = None
    leads: dict[str, dict[str, statistics.Lead]] = field(default_factory=dict)


@dataclass(frozen=True)
class Missing:
    """A run that a table still needs: its command, how many of its trials are done or failed, and of how many."""

    command: Command
    done: int
    trials: int


@dataclass
class ResultTable:
    """Cells with their caption. Blocks are sub-tables, usually one per dataset."""

    name: str
    title: str
    caption: str
    cells: list[Cell]
    findings: dict[str, papers.Footnote]  # id -> a finding about its cells, in the order of findings.yaml
    flipped: bool = False  # on paper a line per column
    ranked: bool = False  # rows are compared over all columns, instead of within each
    details: bool = True  # whether cells are shown besides the ranks
    figure: str = "dots"
    reference: str | None = None  # the row that all others are compared with; None: the rows of cross-entropy
    next: str | None = None  # what to do next
    questions: tuple[Question, ...] = ()
    reproduce: str = ""  # the command that fills all empty cells

    @property
    def declared(self) -> int:
        """How many questions the table asks, each of one block."""
        return sum(len(question.blocks) for question in self.questions)

    @cached_property
    def blocks(self) -> dict[str, dict[tuple[str, str], Cell]]:
        """Block -> (line, column on paper) -> cell."""
        blocks: dict[str, dict[tuple[str, str], Cell]] = {}
        for cell in self.cells:
            place = (cell.column, cell.row) if self.flipped else (cell.row, cell.column)
            blocks.setdefault(cell.block, {})[place] = cell
        return blocks

    def column(self, cell: Cell) -> list[Cell]:
        """All cells in the column of a cell."""
        return [c for c in self.blocks[cell.block].values() if c.column == cell.column]

    def letter(self, finding: str) -> str:
        """a, b, …, z, aa, bb, …: the mark of a finding."""
        repeats, place = divmod(list(self.findings).index(finding), 26)
        return "abcdefghijklmnopqrstuvwxyz"[place] * (repeats + 1)

    def best(self, cell: Cell, which: str) -> bool:
        """Whether this is the highest number of its column, to three decimals. `which`: "ours" or "published".

        There is no best in a column with one number or with different scores in its rows; single trials do not count.
        """
        column = self.column(cell)
        means: dict[str, float] = {}
        if len({c.measure for c in column}) > 1:
            return False
        if which == "published":
            means = {c.row: c.published.mean for c in column if c.published}
        else:
            means = {c.row: round(c.summary.mean or 0.0, 3) for c in column if len(c.values) > 1}
        return len(means) > 1 and means.get(cell.row) == max(means.values())

    @cached_property
    def rankings(self) -> list[Ranking]:
        """One per block, of a table that ranks its rows."""
        return [ranking for block in self.blocks if (ranking := self._ranking(block))] if self.ranked else []

    def _ranking(self, block: str) -> Ranking | None:
        means: dict[str, dict[str, float]] = {}
        for cell in self.blocks[block].values():
            mean = cell.summary.mean
            means.setdefault(cell.row, {}).update({} if mean is None else {cell.column: mean})
        columns = [column for column in next(iter(means.values())) if all(column in row for row in means.values())]
        if len(columns) < 2:
            return None
        scores = {row: [by_column[column] for column in columns] for row, by_column in means.items()}
        references = dict.fromkeys(cell.row for cell in self.blocks[block].values() if cell.loss in REFERENCES)
        rivals = [self.reference] if self.reference else list(references)
        against = lambda row, rival: statistics.sign_test(np.subtract(scores[row], scores[rival]).tolist(), ROPE)  # noqa: E731
        return Ranking(
            block,
            columns,
            statistics.mean_ranks(scores),
            statistics.friedman(scores)[1],
            statistics.critical_difference(len(scores), len(columns)),
            ROPE,
            {rival: {row: against(row, rival) for row in scores if row != rival} for rival in rivals},
            self.reference,
            self._leads(block, columns, scores) if self.reference else {},
        )

    def _leads(
        self, block: str, columns: Sequence[str], scores: dict[str, list[float]]
    ) -> dict[str, dict[str, statistics.Lead]]:
        """Each row's lead over the reference row: over all datasets, and by the size of the rarest class."""
        rarest = {cell.column: cell.rarest or 0 for cell in self.blocks[block].values() if cell.row == self.reference}
        groups = {statistics.ALL: columns} | {
            name: [column for column in columns if low <= rarest[column] < high] for name, (low, high) in RAREST.items()
        }
        leads: dict[str, dict[str, statistics.Lead]] = {}
        for name, members in groups.items():
            places = [columns.index(column) for column in members]
            for row, values in scores.items():
                if row != self.reference and places:
                    differences = [values[place] - scores[self.reference or ""][place] for place in places]
                    leads.setdefault(name, {})[row] = statistics.lead(differences)
        return leads

    @property
    def missing(self) -> list[str]:
        """Commands that fill the empty cells, each once."""
        return list(dict.fromkeys(command(cell) for cell in self.cells if not cell.values and not cell.family))


def build(
    table: str | Spec,
    results_dir: str | Path = "results",
    *,
    rule: str = "val_loss",
    variant: str = "clean",
    preset: str | None = None,
    today: date | None = None,
    scanned: Iterable[Record] | Catalogue | None = None,
    config_dir: str | None = None,
) -> ResultTable:
    """A table, or the one of that name in conf/table, filled from the records.

    `rule` selects the setting, `variant="released"` includes the released code's quirks, `preset` is the quickest one
    to accept (default: lean, or what the table says). `scanned` are the records, if they have been read already, or
    a catalogue of them that several tables share. `config_dir` is a folder with the user's configs, where this table
    may be.
    """
    table = spec(table, config_dir) if isinstance(table, str) else table
    choose("variant", variant, VARIANTS)
    choose("selection rule", rule, records.RULES)
    quickest = choose("preset", preset or table.preset or "lean", PRESETS)
    accepted = PRESETS[: PRESETS.index(quickest) + 1]
    scanned = records.scan(results_dir) if scanned is None else scanned
    catalogue = scanned if isinstance(scanned, Catalogue) else Catalogue(scanned)
    if table.rows:
        cells = list(blank_cells(table, variant))
    else:
        if quickest == PRESETS[-1]:  # the quickest includes users' presets
            accepted += tuple(sorted({entry.label or "" for entry in catalogue.entries} - {*PRESETS, ""}))
        cells = list(recorded.blank_cells(table, catalogue, accepted))
    cells = _with_plugin(cells) if table.paper else cells
    for cell in cells:
        cell.command_preset, cell.config_dir = preset or usual_preset(table), config_dir
        fill(cell, catalogue, rule, accepted)
    if table.rows and not table.ranked:
        fill_shorter(cells, catalogue)
    cells = _worth_showing(table, cells)
    ids = {name for cell in cells for name in cell.findings}
    findings = {finding.id: finding for finding in papers.findings() if finding.id in ids}
    caption = _caption(table, cells, rule, variant, today or date.today())
    names_of_shared = ("flipped", "ranked", "details", "figure", "reference", "next", "questions")
    shared = {name: getattr(table, name) for name in names_of_shared}
    reproduce = _reproduce(table, rule, variant, preset or usual_preset(table), config_dir)
    return ResultTable(table.name, table.title, caption, cells, findings, reproduce=reproduce, **shared)


def _reproduce(table: Spec, rule: str, variant: str, preset: str, config_dir: str | None) -> str:
    """The command that fills all empty cells, with the options that are not the usual ones."""
    typed = {"selection": rule, "variant": variant, "preset": preset}
    usual = ("val_loss", "clean", usual_preset(table))
    options = {name: value for (name, value), default in zip(typed.items(), usual, strict=True) if value != default}
    folder = ["--config-dir", config_dir] if config_dir else []
    return shlex.join(["east-run", *folder, *Command({"task": "reproduce", "table": table.name} | options).words])


def _worth_showing(table: Spec, cells: list[Cell]) -> list[Cell]:
    """The cells without columns that a dataset's records lack, such as positive-class F1 of ten classes.

    A table with rows shows blocks with results first.
    """
    if not table.rows:
        scored = {(cell.block, cell.column) for cell in cells if cell.values}
        return [cell for cell in cells if (cell.block, cell.column) in scored]
    if table.paper:
        shown = {(cell.block, cell.row) for cell in cells if cell.published or cell.values}
        cells = [cell for cell in cells if (cell.block, cell.row) in shown]
    filled = {cell.block for cell in cells if cell.values}
    return sorted(cells, key=lambda cell: cell.block not in filled)


def build_all(
    results_dir: str | Path = "results", scanned: Iterable[Record] | None = None, **options: Any
) -> list[ResultTable]:
    """Every table of the papers."""
    catalogue = Catalogue(records.scan(results_dir) if scanned is None else scanned)
    return [build(name, results_dir, scanned=catalogue, **options) for name in papers_tables()]


def render(table: str | Spec, results_dir: str | Path = "results", format: str = "markdown", **options: Any) -> str:
    """A table, or "all" tables of the papers, as text. `options` are those of `build`."""
    choose("format", format, writers.WRITERS)
    tables = build_all(results_dir, **options) if table == "all" else [build(table, results_dir, **options)]
    return writers.WRITERS[format](tables, [comparisons(built) for built in tables])


def plan(
    table: str | Spec, results_dir: str | Path = "results", preset: str = "paper", **options: Any
) -> list[Missing]:
    """The runs that a table (or "all") still needs, each once. Trials of this preset or a fuller one count as done.

    A run needs as many trials as the table asks for and the preset trains. Failed ones are not trained again.
    """
    options |= {"preset": preset}
    tables = build_all(results_dir, **options) if table == "all" else [build(table, results_dir, **options)]
    runs: dict[str, Missing] = {}
    for cell in (cell for built in tables for cell in built.cells):
        done = len(cell.values) + cell.failed if cell.is_ideal else 0
        settings = cell.composed(preset) if cell.trials else None
        trials = min(cell.trials or 0, settings.trial_count) if settings else cell.trials
        if trials and done < trials:
            runs.setdefault(command(cell), Missing(typed_command(cell), done, trials))
    return list(runs.values())


def comparisons(table: ResultTable) -> list[RowPair]:
    """Every loss against cross-entropy (or the table's reference row) in the same column, and the declared questions.

    Trials are paired by seed on one split, and by split where every trial has its own. Only cells that share protocol
    and splits are compared, by the fullest training that both have on record. A table that ranks its rows answers its
    questions over the datasets of a block; all other rows are in `ResultTable.rankings`.
    """
    questions = [(block, q.column or statistics.ALL, q.row, q.against) for q in table.questions for block in q.blocks]
    if table.ranked:
        pairs = [pair for block, _, row, against in questions for pair in _over_datasets(table, block, row, against)]
    else:
        rivals = ((cell, rival) for cell in table.cells for rival in _rivals(table, cell, questions))
        pairs = [pair for cell, rival in rivals for pair in _paired(cell, rival)]
    # One p-value for each question: its first pair, over seeds if the protocol has one split.
    first: dict[tuple[str, str, str, str], int] = {}
    for index, pair in enumerate(pairs):
        if (question := (pair.block, pair.column, pair.row, pair.against)) in questions:
            first.setdefault(question, index)
    unanswered = [1.0] * (len(questions) - len(first))  # the correction is for all that was declared
    p_values = statistics.holm([*(pairs[index].p for index in first.values()), *unanswered])
    corrected = dict(zip(first.values(), p_values, strict=False))
    return [replace(pair, p_holm=corrected.get(index)) for index, pair in enumerate(pairs)]


def answer(table: ResultTable) -> str | None:
    """One sentence about a table with a reference row: which row is best in the first column, and how sure that is."""
    first = [cell for cell in table.column(table.cells[0]) if cell.values] if table.cells else []
    if not first or not table.reference:
        return None
    best = max(first, key=lambda cell: cell.summary.mean or 0.0)
    sentence = f"Highest {best.column}: {best.row}, {best.summary.mean:.3f}"
    place = best.block, best.column, best.row, table.reference
    pair = next((p for p in comparisons(table) if (p.block, p.column, p.row, p.against) == place), None)
    if pair is None or pair.low is None or pair.high is None:
        return f"{sentence}."
    sure = "more than chance" if pair.low > 0 else "too close to call"
    lead = f"{pair.difference:+.3f} [{pair.low:+.3f}, {pair.high:+.3f}]".replace("-", "−")
    return f"{sentence}; over {pair.against} {lead}: {sure} with {pair.n} {pair.over}s."


def _rivals(table: ResultTable, cell: Cell, questions: Sequence[tuple[str, str, str, str]]) -> Iterator[Cell]:
    """The cells of the same measure that a cell is compared with."""
    for rival in table.column(cell):
        declared = (cell.block, cell.column, cell.row, rival.row) in questions
        is_reference = rival.row == table.reference if table.reference else rival.loss in REFERENCES
        if rival is cell or not (declared or (is_reference and cell.row != table.reference)):
            continue
        plain = cell.loss in REFERENCES and cell.score == cell.measure
        if plain and rival.score != rival.measure:
            continue  # the comparison is in the plug-in row
        if cell.measure == rival.measure:
            yield rival


def _trained_alike(cell: Cell, rival: Cell) -> tuple[Cell, Cell] | None:
    """Both cells by the fullest preset that both have, on the same splits; None if there is none.

    Presets matter only between networks.
    """
    pairs: list[tuple[Cell | None, Cell | None]] = [(cell, rival)]
    if cell.trains_networks and rival.trains_networks:
        pairs = [(cell.trained_by(preset), rival.trained_by(preset)) for preset in (cell.preset, *PRESETS)]
    for ours, theirs in pairs:
        if ours and theirs and (ours.protocol, ours.split) == (theirs.protocol, theirs.split):
            return ours, theirs
    return None


def _paired(cell: Cell, rival: Cell) -> list[RowPair]:
    if (alike := _trained_alike(cell, rival)) is None:
        return []
    shown_alike = alike[0] is cell and alike[1] is rival
    cell, rival = alike
    training = None if shown_alike else cell.preset
    pairs = {}
    if cell.split != "trial":
        pairs["seed"] = statistics.paired(cell.values, rival.values)
    ours, theirs = statistics.by_split(cell.splits), statistics.by_split(rival.splits)
    pairs["split"] = statistics.paired(ours, theirs, overlap=max(cell.overlap, rival.overlap))
    names = (cell.block, cell.column, cell.row, rival.row)
    return [RowPair(*names, unit, **vars(pair), training=training) for unit, pair in pairs.items() if pair.n > 1]


def _over_datasets(table: ResultTable, block: str, row: str, against: str) -> Iterator[RowPair]:
    """One row against another by their means on each dataset of a block."""
    means: dict[str, dict[str, float]] = {row: {}, against: {}}
    for cell in table.blocks.get(block, {}).values():
        if cell.row in means and cell.summary.mean is not None:
            means[cell.row][cell.column] = cell.summary.mean
    pair = statistics.paired(means[row], means[against], overlap=0.0)
    if pair.n > 1:
        yield RowPair(block, statistics.ALL, row, against, "dataset", **vars(pair))


def _with_plugin(cells: Sequence[Cell]) -> list[Cell]:
    """A paper's cells, followed in each block by rows of the same trials with plug-in decisions."""
    rows = {names: list(row) for names, row in groupby(cells, key=lambda cell: (cell.block, cell.row))}
    plugged: dict[str, list[Cell]] = {block: [] for block, _ in rows}
    for (block, label), row in rows.items():
        if row[0].loss in PLUGGED and all(cell.score.removeprefix("test.") in TUNED_FOR for cell in row):
            for cell in row:
                new_label, score = f"{label} + plug-in", decided(cell.score, "plugin")
                plugged[block].append(replace(cell, row=new_label, score=score, published=None, findings=[]))
    return [c for block, group in groupby(cells, key=lambda cell: cell.block) for c in (*group, *plugged[block])]


def _caption(table: Spec, cells: Sequence[Cell], rule: str, variant: str, today: date) -> str:
    filled = [cell for cell in cells if cell.values]
    trained = {cell.preset or "" for cell in filled if cell.trains_networks}
    presets = sorted(trained, key=lambda preset: (*PRESETS, preset).index(preset))
    commits = sorted({commit for cell in filled for commit in cell.commits})
    facts = [
        f"selection rule {rule}",
        *([f"protocol {table.protocol}"] if table.protocol else []),
        f"{variant} variant",
        *([f"training {', '.join(presets)}"] if presets else [] if filled else ["no records yet"]),
        *([f"records of commit {', '.join(commits)}"] if commits else []),
        f"rendered {today.isoformat()}",
    ]
    of_how_many = "/asked for" if any(cell.trials for cell in cells) else ""
    narrow = ", bare means where the page is narrow" if table.ranked else ""
    legend = f"Ours: mean ± sample standard deviation (trials done{of_how_many}){narrow}."
    if any(cell.capped for cell in cells):
        legend += " Capped: more than half of the trials ended at the epoch limit."
    if any(cell.published for cell in cells):
        legend += (
            " Δ: ours − published with Welch's 95 % interval (published n = 10, s at least 0.005). "
            f"{statistics.MEANING} Bold: column's best."
        )
    return f"Source: {table.source}. {legend} {facts[0][:1].upper()}{'; '.join(facts)[1:]}."
