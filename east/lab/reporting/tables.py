"""Tables: records beside the published numbers, compared with each other and ranked. Nothing here needs torch.

specs.py says what a table consists of, cells.py which records fill a cell and how it is judged, writers.py how a table
looks.
"""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from east.choices import choose
from east.lab.experiment import records
from east.lab.experiment.record import Record
from east.lab.reporting import papers, statistics
from east.lab.reporting.catalogue import Catalogue, names_of
from east.lab.reporting.cells import PRESETS, Cell, Trials, chosen_settings, command, fill, over_splits, typed_command
from east.lab.reporting.labels import distinct_names, labels
from east.lab.reporting.specs import Spec, blank_cells, chosen, names, papers_tables, spec, usual_preset
from east.lab.settings.command import Command
from east.lab.settings.identity import Json
from east.lab.settings.settings import DatasetSection, LossSection

__all__ = ["Cell", "ResultTable", "Spec", "blank_cells", "build", "chosen", "command", "comparisons", "names"]
__all__ += ["papers_tables", "plan", "spec", "usual_preset"]

REFERENCES = ("ce", "bce")  # losses that the others are compared with
ALL = "all"  # datasets of a block
RAREST = {"fewer than 10": (0, 10), "10 to 29": (10, 30), "30 or more": (30, math.inf)}  # validation rows of that class
ROPE = 0.01  # scores that differ by at most this are practically equal

Question: TypeAlias = tuple[str, str, str, str]  # block, column or ALL, row, against


@dataclass(frozen=True, kw_only=True)
class RowPair(statistics.Paired):
    """Two rows of a column, trial by trial. `p_holm` is corrected over the table's questions; None if it is not one."""

    block: str
    column: str
    row: str
    against: str
    over: str  # a key of `writers.UNITS`
    p: float  # of at least two pairs
    training: str | None = None  # the preset of both, where the table shows one of them with a fuller one
    p_holm: float | None = None

    @property
    def question(self) -> Question:
        return self.block, self.column, self.row, self.against


@dataclass(frozen=True)
class Ranking:
    """The rows of a block by their mean rank over the columns that every row has trials for.

    friedman: p-value of "all rank alike". critical_difference: closer ranks do not differ significantly (Nemenyi).
    signs: the reference row -> each other row against it, by the Bayesian sign test. leads: a group of datasets (all,
    or by validation rows of the rarest class) -> each row's lead over the reference.
    """

    block: str
    columns: list[str]
    ranks: dict[str, float]
    friedman: float
    critical_difference: float
    rope: float
    signs: dict[str, dict[str, statistics.SignTest]]
    reference: str
    leads: dict[str, dict[str, statistics.Paired]]


@dataclass
class ResultTable:
    """Filled cells and their caption. Blocks are sub-tables, usually one per dataset."""

    spec: Spec
    caption: str
    cells: list[Cell]
    reproduce: str = ""  # the command that fills all empty cells

    @cached_property
    def questions(self) -> list[Question]:
        return [(block, q.column or ALL, q.row, q.against) for q in self.spec.questions for block in q.blocks]

    @cached_property
    def blocks(self) -> dict[str, dict[tuple[str, str], Cell]]:
        """Block -> (row, column) -> cell."""
        blocks: dict[str, dict[tuple[str, str], Cell]] = {}
        for cell in self.cells:
            blocks.setdefault(cell.block, {})[cell.row, cell.column] = cell
        return blocks

    def column(self, cell: Cell) -> list[Cell]:
        """All cells in the column of a cell."""
        return [c for c in self.blocks[cell.block].values() if c.column == cell.column]

    @cached_property
    def findings(self) -> dict[str, papers.Footnote]:
        """Id -> a finding about these cells, in the order of findings.yaml."""
        ids = {name for cell in self.cells for name in cell.findings}
        return {finding.id: finding for finding in papers.findings() if finding.id in ids}

    def best(self, cell: Cell, which: str) -> bool:
        """Whether this is the highest number of its column, to three decimals. `which`: "ours" or "published".

        There is no best in a column with one number or with different scores in its rows; single trials do not count.
        """
        column = self.column(cell)
        if which == "published":
            means = {c.row: c.published.mean for c in column if c.published}
        else:
            means = {c.row: round(c.summary.mean or 0.0, 3) for c in column if len(c.values) > 1}
        same_measure = len({c.measure for c in column}) == 1
        return same_measure and len(means) > 1 and means.get(cell.row) == max(means.values())

    def means(self, block: str) -> dict[str, dict[str, float]]:
        """Row -> column -> mean, of one block."""
        means: dict[str, dict[str, float]] = {}
        for (row, column), cell in self.blocks.get(block, {}).items():
            mean = cell.summary.mean
            means.setdefault(row, {}).update({} if mean is None else {column: mean})
        return means

    @cached_property
    def rankings(self) -> list[Ranking]:
        """One per block, of a table that ranks its rows."""
        return [ranking for block in self.blocks if (ranking := _ranking(self, block))] if self.spec.ranked else []

    @property
    def missing(self) -> list[str]:
        """Commands that fill the empty cells, each once."""
        empty = (cell for cell in self.cells if not cell.values) if self.spec.rows else ()
        return list(dict.fromkeys(map(command, empty)))


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
    quickest = choose("preset", preset or table.preset or "lean", PRESETS)
    scanned = records.scan(results_dir) if scanned is None else scanned
    catalogue = scanned if isinstance(scanned, Catalogue) else Catalogue(scanned)
    filled_by = preset or usual_preset(table)
    common = {"rule": rule, "command_preset": filled_by, "config_dir": config_dir}
    cells = list(blank_cells(table, variant, **common))
    for cell in cells:
        fill(cell, catalogue, PRESETS[: PRESETS.index(quickest) + 1])
    cells = _worth_showing(table, cells if table.rows else list(_listed(table, catalogue, **common)))
    caption = _caption(table, cells, rule, variant, today or date.today())
    typed = {"selection": (rule, "val_loss"), "variant": (variant, "clean"), "preset": (filled_by, usual_preset(table))}
    options = {name: value for name, (value, usual) in typed.items() if value != usual}
    folder = ["--config-dir", config_dir] if config_dir else []
    words = Command({"task": "reproduce", "table": table.name} | options).words
    return ResultTable(table, caption, cells, shlex.join(["east-run", *folder, *words]))


def _listed(table: Spec, catalogue: Catalogue, **common: Any) -> Iterator[Cell]:
    """A row per family of records; results on part of the data are not results on the dataset.

    Different data get different blocks even if they share a name, such as two files of dataset=csv.
    """
    families = [family for family in catalogue.families if family[0].config.dataset.limit is None]
    families.sort(key=lambda family: names_of(family[0].config))
    data = [family[0].config.dataset for family in families]
    blocks = distinct_names([section.name for section in data], list(map(_data_options, data)))
    for block, members in groupby(sorted(zip(blocks, families, strict=True), key=itemgetter(0)), key=itemgetter(0)):
        own = [family for _, family in members]
        configs = [family[0].config for family in own]
        for row, family in zip(labels([_loss_name(c.loss) for c in configs], configs), own, strict=True):
            request = dict(zip(("dataset", "loss", "protocol"), names_of(family[0].config), strict=True))
            for column in table.scores:
                score = papers.score_of(None, request["dataset"], request["loss"], column)
                cell = Cell(block=block, row=row, column=column, request={**request}, score=score, **common)
                found = list(chosen_settings(family, cell, every=True))
                if scored := [trials for trials in found if trials.values]:
                    cell.trained[""] = over_splits(family[0].config.split.seed, scored)
                elif found:
                    cell.trained[""] = max(found, key=lambda trials: trials.failed)
                yield cell


def _data_options(data: DatasetSection) -> dict[str, Json]:
    values = {f"dataset.{name}": value for name, value in data.to_json().items() if name != "name"}
    return values | {"dataset.fingerprint": values.pop("dataset.fingerprint", None)}  # comes last


def _loss_name(loss: LossSection) -> str:
    return f"metric {loss.options.get('metric')}" if loss.name == "metric" else loss.name


def cells_run(tables: Iterable[ResultTable]) -> int:
    """How many published cells have trials of ours, each counted once."""
    return len({id(cell.published) for table in tables for cell in table.cells if cell.published and cell.values})


def plan(
    table: str | Spec,
    results_dir: str | Path = "results",
    preset: str = "paper",
    scanned: Iterable[Record] | None = None,
    **options: Any,
) -> list[Command]:
    """Commands for the runs that a table (or "all") still needs, each once.

    Trials of this preset or a fuller one count as done, and failed ones are not trained again. A run needs as many
    trials as the table asks for and the preset trains.
    """
    catalogue = Catalogue(records.scan(results_dir) if scanned is None else scanned)
    runs: dict[str, Command] = {}
    for one in chosen(table) if isinstance(table, str) else [table]:
        for cell in build(one, preset=preset, scanned=catalogue, **options).cells:
            done = len(cell.values) + cell.shown.failed if cell.shown.is_ideal else 0
            settings = cell.composed(preset) if cell.asked else None
            trials = min(cell.asked or 0, settings.trial_count) if settings else cell.asked
            if trials and done < trials:
                runs.setdefault(command(cell), typed_command(cell))
    return list(runs.values())


def _worth_showing(table: Spec, cells: list[Cell]) -> list[Cell]:
    """Blocks with results first. A paper's table has further rows, of decisions that the paper did not take, if they
    are on record. A table without rows has no columns that a dataset's records lack, such as positive-class F1 of ten
    classes.
    """
    if not table.rows:
        scored = {(cell.block, cell.column) for cell in cells if cell.values}
        return [cell for cell in cells if (cell.block, cell.column) in scored]
    shown = {(cell.block, cell.row) for cell in cells if cell.published or cell.values or not table.paper}
    filled = {cell.block for cell in cells if cell.values}
    return sorted((c for c in cells if (c.block, c.row) in shown), key=lambda cell: cell.block not in filled)


def presets_of(cells: Sequence[Cell]) -> list[str]:
    """How the networks of some cells were trained, from the fullest preset to the quickest."""
    presets = {cell.preset for cell in cells if cell.preset and cell.trains_networks}
    return [preset for preset in PRESETS if preset in presets]


def _caption(table: Spec, cells: Sequence[Cell], rule: str, variant: str, today: date) -> str:
    filled = [cell for cell in cells if cell.values]
    presets = presets_of(cells)
    commits = sorted({record.git for cell in filled for record in cell.shown.records if record.git})
    facts = [
        f"selection rule {rule}",
        *([f"protocol {table.protocol}"] if table.protocol else []),
        f"{variant} variant",
        *([f"training {', '.join(presets)}"] if presets else [] if filled else ["no records yet"]),
        *([f"records of commit {', '.join(commits)}"] if commits else []),
        f"rendered {today.isoformat()}",
    ]
    of_how_many = "/asked for" if any(cell.asked for cell in cells) else ""
    narrow = ", bare means where the page is narrow" if table.ranked else ""
    legend = f"Ours: mean ± sample standard deviation (trials done{of_how_many}){narrow}."
    if any(cell.shown.capped for cell in cells):
        legend += " Capped: more than half of the trials ended at the epoch limit."
    if any(cell.published for cell in cells):
        legend += (
            " Δ: ours − published with Welch's 95 % interval (published n = 10, s at least 0.005). "
            f"{statistics.MEANING} Bold: column's best."
        )
    return f"Source: {table.source}. {legend} {facts[0][:1].upper()}{'; '.join(facts)[1:]}."


def _ranking(table: ResultTable, block: str) -> Ranking | None:
    means = {row: by_column for row, by_column in table.means(block).items() if by_column}  # rows that have been run
    reference = str(table.spec.reference)
    if reference not in means:
        return None
    columns = [column for column in next(iter(means.values())) if all(column in row for row in means.values())]
    if len(columns) < 2:
        return None
    scores = {row: [by_column[column] for column in columns] for row, by_column in means.items()}
    ranks = statistics.rank_columns(scores)
    rarest = {column: table.blocks[block][reference, column].shown.rarest for column in columns}
    signs: dict[str, statistics.SignTest] = {}
    leads: dict[str, dict[str, statistics.Paired]] = {}
    for row in (row for row in scores if row != reference):
        differences = [a - b for a, b in zip(scores[row], scores[reference], strict=True)]
        signs[row] = statistics.sign_test(differences, ROPE)
    for group, (low, high) in {ALL: (0, math.inf), **RAREST}.items():
        shared = {column: means[reference][column] for column in columns if low <= rarest[column] < high}
        found = {row: statistics.paired(own, shared, 0.0) for row, own in means.items() if row != reference}
        leads |= {group: {row: lead for row, lead in found.items() if lead}} if shared else {}
    return Ranking(
        block,
        columns,
        dict(zip(scores, ranks.mean(1).tolist(), strict=True)),
        statistics.friedman(ranks)[1],
        statistics.critical_difference(len(scores), len(columns)),
        ROPE,
        {reference: signs},
        reference,
        leads,
    )


def comparisons(table: ResultTable) -> list[RowPair]:
    """Every loss against cross-entropy (or the table's reference row) in the same column, and the declared questions.

    Trials are paired by seed on one split, and by split where every trial has its own. Only cells that share protocol
    and splits are compared, by the fullest training that both have on record. A table that ranks its rows answers its
    questions over the datasets of a block; all other rows are in `ResultTable.rankings`.
    """
    if table.spec.ranked:
        pairs = [pair for question in table.questions for pair in _over_datasets(table, question)]
    else:
        rivals = ((cell, rival) for cell in table.cells if table.spec.rows for rival in _rivals(table, cell))
        pairs = [pair for cell, rival in rivals for pair in _paired(table, cell, rival)]
    # One p-value for each question: its first pair, over seeds if the protocol has one split.
    first: dict[Question, int] = {}
    for index, pair in enumerate(pairs):
        if pair.question in table.questions:
            first.setdefault(pair.question, index)
    unanswered = [1.0] * (len(table.questions) - len(first))  # the correction is for all that was declared
    p_values = statistics.holm([*(pairs[index].p for index in first.values()), *unanswered])
    corrected = dict(zip(first.values(), p_values, strict=False))
    return [replace(pair, p_holm=corrected.get(index)) for index, pair in enumerate(pairs)]


def _rivals(table: ResultTable, cell: Cell) -> Iterator[Cell]:
    """The cells of the same measure that a cell is compared with."""
    reference = table.spec.reference
    for rival in table.column(cell):
        declared = (cell.block, cell.column, cell.row, rival.row) in table.questions
        is_reference = rival.row == reference if reference else rival.loss in REFERENCES
        if rival is cell or not (declared or (is_reference and cell.row != reference)):
            continue
        if cell.loss in REFERENCES and cell.score == cell.measure and rival.score != rival.measure:
            continue  # the comparison is in the plug-in row
        if cell.measure == rival.measure:
            yield rival


def _paired(table: ResultTable, cell: Cell, rival: Cell) -> Iterator[RowPair]:
    if (alike := _trained_alike(table, cell, rival)) is None:
        return
    ours, theirs, training = alike
    pairs = {} if ours.split == "trial" else {"seed": statistics.paired(ours.values, theirs.values)}
    pairs["split"] = statistics.paired(ours.splits, theirs.splits, max(ours.overlap, theirs.overlap))
    for unit, pair in pairs.items():
        if pair and pair.n > 1:
            place: dict[str, Any] = {"block": cell.block, "column": cell.column, "row": cell.row, "against": rival.row}
            yield RowPair(**vars(pair), **place, over=unit, training=training)


def _trained_alike(table: ResultTable, cell: Cell, rival: Cell) -> tuple[Trials, Trials, str | None] | None:
    """The trials of both by the fullest preset in this column that both have, on the same splits, and the preset if the
    table shows a fuller one; None if there are none. Presets matter only between networks.
    """
    if cell.request.get("protocol") != rival.request.get("protocol"):
        return None
    if not (cell.trains_networks and rival.trains_networks):
        return (cell.shown, rival.shown, None) if cell.shown.split == rival.shown.split else None
    shown = {c.preset for c in table.column(cell) if c is cell or c.trains_networks}
    for preset in (cell.preset or "", *PRESETS):
        ours, theirs = cell.trained.get(preset), rival.trained.get(preset)
        if ours and theirs and ours.split == theirs.split and preset in shown:
            return ours, theirs, None if cell.preset == rival.preset == preset else preset
    return None


def _over_datasets(table: ResultTable, question: Question) -> Iterator[RowPair]:
    """One row against another by their means on each dataset of a block."""
    block, column, row, against = question
    means = table.means(block)
    pair = statistics.paired(means.get(row, {}), means.get(against, {}), overlap=0.0)
    if pair and pair.n > 1:
        yield RowPair(**vars(pair), block=block, column=column, row=row, against=against, over="dataset")


def flat(table: ResultTable, cell: Cell) -> dict[str, Any]:
    """A cell as a row of CSV and JSON."""
    shown, published, gap = cell.shown, cell.published, asdict(cell.gap)
    values = {"block": cell.block, "row": cell.row, "column": cell.column}
    values |= {name: cell.request.get(name) for name in ("dataset", "loss", "protocol")}  # type: ignore[misc]
    typed = {name: value for name, value in cell.request.items() if name not in values}
    return {
        **{"table": table.spec.name, **values, "parameters": typed, "score": papers.shown(cell.score)},
        **{**asdict(cell.summary), "trials": cell.asked, "failed": shown.failed, "capped": shown.capped},
        **{"published_mean": published and published.mean, "published_std": published and published.std, **gap},
        **{"findings": cell.findings, "preset": cell.preset or None, "search": shown.search, "key": shown.key},
        **{"sources": sorted({record.source for record in shown.records}), "values": dict(cell.values)},
    }


def content(table: ResultTable) -> dict[str, Any]:
    """A table as JSON: name, title, caption, cells (with the value of every seed), comparisons, findings, what is
    missing, rankings."""
    return {
        **{"name": table.spec.name, "title": table.spec.title, "caption": table.caption},
        "cells": [flat(table, cell) for cell in table.cells],
        "comparisons": [asdict(pair) for pair in comparisons(table)],
        "findings": [finding.model_dump(exclude={"cells"}) for finding in table.findings.values()],
        "missing": table.missing,
        "rankings": [asdict(ranking) for ranking in table.rankings],
    }
