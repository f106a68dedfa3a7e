"""Records beside the published numbers: one cell per number of a paper, in Markdown, LaTeX, CSV, JSON and plain text.

A table is a file conf/table/<name>.yaml: rows say which loss, columns which dataset and metric. The published numbers
and the footnotes come from papers.py. Each cell finds its family of records, lets the selection rule choose one
setting, and shows that setting's trials. Nothing here needs torch.

Tables of our own may say more, in the words of the command line:

    overrides: {split.stratify: true}                      of every run of the table
    rows: {name: {loss: f1, annealing: none, loss.step: none, decision: plugin}}
    columns: [{dataset: [keel set=abalone19], metric: {f1: f1_pos}, rows: {name: …}}]

`decision: plugin` is the threshold, or the class weights, tuned on validation for the column's metric. Datasets and
metrics may have a label of their own; a list of columns has sub-tables whose rows may differ. `blocks: metric` makes a
block per metric and a column per dataset, `flipped` exchanges rows and columns on paper, `ranks` compares the rows over
all datasets, `figure` is dots, lines or ranks, `reference` the row to compare with instead of cross-entropy.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, cached_property
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from east.choices import CONF, choose
from east.experiment import records
from east.reporting import papers, statistics, writers
from east.settings.command import Command
from east.settings.compose import PAPER_DATASETS
from east.settings.identity import SECTIONS
from east.settings.sections import Loss

VARIANTS = ("clean", "released")
PRESETS = ("paper", "budget", "lean", "quick")  # from the fullest to the quickest
PRESET_MARKS = {"budget": "†", "lean": "¶", "quick": "‡"}
SETTINGS_MARK = "§"
REFERENCES = ("ce", "bce")  # what a loss is compared with
ROPE = 0.01  # scores that differ by less are practically equal
OVERLAP = 0.20 / 0.64  # test rows / training rows of the papers' splits, see statistics.t_interval

PLUGIN = "plugin_"
TUNED_FOR = {"f1_pos": "f1", "f1_macro": "f1", "accuracy": "accuracy", "mcc": "mcc"}  # score -> the plug-in's metric
PLUGGED = ("ce", "f1")  # losses that the papers' tables also show with a plug-in decision, where the records have it
CLASS_INDEX = {"cifar10": {"dog": 5, "frog": 6}, "caltech256": {"dog": 55, "frog": 79}}
POSITIVE = 1

FREE = ("_target_", "fingerprint", "path", "root", "r")  # places, and what a search varies: no other experiment


@dataclass
class Cell:
    """One number of a table: what it needs, what was published, and what our trials say."""

    block: str
    row: str
    column: str
    dataset: str
    loss: str
    protocol: str | None
    score: str  # "test.f1_pos", or "thresholds.test.f1_pos": the mean over decision thresholds
    position: int | None = None  # the class of a score that has one value per class
    parameters: dict[str, Any] = field(default_factory=dict)  # of the loss, beyond its config file
    overrides: dict[str, Any] = field(default_factory=dict)  # of everything else: annealing, dataset.imbalance, …
    family: str | None = None  # this family of records and no other
    published: dict[str, Any] | None = None  # the entry of published.yaml
    findings: list[str] = field(default_factory=list)
    trials: int | None = None  # how many the protocol asks for
    values: dict[int, float] = field(default_factory=dict)  # seed -> score
    splits: dict[tuple, float] = field(default_factory=dict)  # (split, seed) -> score, where there are several splits
    failed: int = 0
    settings: int = 0  # how many families of records fit
    split: int | str | None = None  # its seed; "trial": every trial has its own
    rule: str = "val_loss"  # that selected the setting
    tried: bool = False  # its records hold finished trials, whether or not those have this score
    asked: str = "paper"  # the preset of the command that fills it
    preset: str | None = None
    key: str | None = None
    sources: list[str] = field(default_factory=list)
    commits: set[str] = field(default_factory=set)

    @property
    def recorded(self) -> str:
        """The dataset's name in records: a KEEL set has its own."""
        return "-".join([self.dataset, *filter(None, [self.overrides.get("dataset.set")])])

    @property
    def measure(self) -> str:
        """The score without the plug-in rule: a decision, not another measure."""
        own = f" of {self.row}" if self.score.endswith(".trained_for") else ""  # a metric of its own is no other row's
        return (self.score.partition(".")[2] if self.score.startswith(PLUGIN) else self.score) + own

    @property
    def summary(self) -> statistics.Summary:
        return statistics.summarize(list(self.values.values()))

    @property
    def difference(self) -> float | None:
        return self.summary.mean - self.published["mean"] if self.values and self.published else None

    @property
    def inside(self) -> bool | None:
        """None with fewer than two trials: there is no spread to judge by."""
        ours = self.summary
        if ours.std is None or not self.published:
            return None
        return statistics.inside(ours.mean, ours.std, self.published["mean"], self.published["std"])

    @property
    def marks(self) -> str:
        return PRESET_MARKS.get(self.preset or "", "") + (SETTINGS_MARK if self.settings > 1 else "")


@dataclass
class Table:
    """Cells with their caption. Blocks are sub-tables, one per dataset, with the same kind of rows and columns."""

    name: str
    title: str
    caption: str
    cells: list[Cell]
    findings: dict[str, dict]  # those that touch a cell, in order of appearance
    flipped: bool = False  # on paper a line per column
    ranked: bool = False  # rows are compared over all columns, instead of within each
    figure: str = "dots"
    reference: str | None = None  # the row that all others are compared with; None: those of cross-entropy

    @cached_property
    def blocks(self) -> dict[str, dict[tuple[str, str], Cell]]:
        """Block -> (line, column on paper) -> cell."""
        found: dict[str, dict[tuple[str, str], Cell]] = {}
        for cell in self.cells:
            place = (cell.column, cell.row) if self.flipped else (cell.row, cell.column)
            found.setdefault(cell.block, {})[place] = cell
        return found

    def letter(self, finding: str) -> str:
        return "abcdefghijklmnopqrstuvwxyz"[list(self.findings).index(finding)]

    def best(self, cell: Cell, which: str) -> bool:
        """Is this the highest of its column, to three decimals? `which`: "ours" or "published".

        A column of one number has no best, nor has one whose rows show different scores; a single trial is none.
        """
        column = [c for c in self.blocks[cell.block].values() if c.column == cell.column]
        if which == "published":
            means = {c.row: c.published["mean"] for c in column if c.published}
        elif len({c.measure for c in column}) == 1:
            means = {c.row: round(c.summary.mean, 3) for c in column if len(c.values) > 1}
        else:
            means = {}
        return len(means) > 1 and means.get(cell.row) == max(means.values())

    @cached_property
    def rankings(self) -> list[dict]:
        """Of a table that ranks its rows, for each block: mean ranks over the columns that every row has trials for.

        `friedman` is the p-value of "all rank alike"; ranks less than `critical_difference` apart are not told apart
        (Nemenyi). `signs`: cross-entropy, plain and with plug-in -> each row against it by the Bayesian sign test.
        """
        return [entry for block in self.blocks if (entry := self._ranking(block))] if self.ranked else []

    def _ranking(self, block: str) -> dict | None:
        means: dict[str, dict[str, float]] = {}
        for cell in self.blocks[block].values():
            means.setdefault(cell.row, {}).update({cell.column: cell.summary.mean} if cell.values else {})
        columns = [column for column in next(iter(means.values())) if all(column in row for row in means.values())]
        if len(columns) < 2:
            return None
        scores = {row: [own[column] for column in columns] for row, own in means.items()}
        references = dict.fromkeys(cell.row for cell in self.blocks[block].values() if cell.loss in REFERENCES)
        signs = {
            rival: {
                row: vars(statistics.sign_test(np.subtract(own, scores[rival]), ROPE))
                for row, own in scores.items()
                if row != rival
            }
            for rival in references
        }
        return {
            "block": block,
            "columns": columns,
            "ranks": statistics.mean_ranks(scores),
            "friedman": statistics.friedman(scores)[1],
            "critical_difference": statistics.critical_difference(len(scores), len(columns)),
            "rope": ROPE,
            "signs": signs,
        }

    @property
    def missing(self) -> list[str]:
        """Commands that fill the cells without records, each once."""
        return list(dict.fromkeys(command(cell) for cell in self.cells if not cell.values and not cell.family))


def names() -> list[str]:
    """All tables: the papers' in their order, then our own."""
    found = sorted(file.stem for file in (CONF / "table").glob("*.yaml"))
    ranks = {paper: rank for rank, paper in enumerate(papers.PROTOCOLS)}
    return sorted(found, key=lambda name: ranks.get(name.rpartition("_")[0], len(ranks)))


def spec(name: str) -> dict[str, Any]:
    """The content of conf/table/<name>.yaml."""
    return _conf("table", choose("table", name, names()))


def usual_preset(table: Mapping) -> str:
    """What fills a table's cells: a paper's as the paper did it, our own as quickly as they accept."""
    return "paper" if "paper" in table else table.get("preset", "lean")


def command(cell: Cell) -> str:
    """The command that fills a cell."""
    words = [f"dataset={cell.dataset}", f"loss={cell.loss}", *([f"protocol={cell.protocol}"] if cell.protocol else [])]
    selection = [f"selection={cell.rule}"] if cell.rule != "val_loss" else []
    automatic = "paper" if cell.dataset in PAPER_DATASETS else "quick"
    preset = [f"preset={cell.asked}"] if cell.asked != automatic else []
    return shlex.join(["east-run", *words, *overrides(cell), *preset, *selection])


def said(cell: Cell) -> dict[str, Any]:
    """What the command line says besides dataset, loss and protocol, such as {"loss.beta": {"dog": 0.25}}."""
    return {f"loss.{name}": value for name, value in cell.parameters.items()} | cell.overrides


def overrides(cell: Cell) -> list[str]:
    """The same as words, such as ["loss.beta={dog:0.25}"]."""
    return [f"{name}={_hydra(value)}" for name, value in said(cell).items()]


def build(
    table: str | Mapping,
    results_dir: str | Path = "results",
    *,
    rule: str = "val_loss",
    variant: str = "clean",
    preset: str | None = None,
    today: date | None = None,
    found: Sequence[Mapping] | None = None,
) -> Table:
    """A table (a name of conf/table, or such a mapping) with what the records hold.

    `rule` selects the setting, `variant="released"` asks for the papers' quirks, `preset` is the quickest one to accept
    (default: lean, or what the table says). `found` are the records, if they were read before by `records.scan`.
    """
    table = spec(table) if isinstance(table, str) else table
    choose("variant", variant, VARIANTS)
    choose("selection rule", rule, records.RULES)
    quickest = choose("preset", preset or table.get("preset", "lean"), PRESETS)
    accepted = PRESETS[: PRESETS.index(quickest) + 1]
    found = records.scan(results_dir) if found is None else found
    if "rows" not in table and quickest == PRESETS[-1]:  # whoever takes the quickest takes presets of their own as well
        accepted += tuple(sorted({record["config"].get("preset") or "" for record in found} - {*PRESETS, ""}))
    families = _families(found)
    cells = list(_cells(table, variant) if "rows" in table else _grid(table, families, accepted))
    cells = _with_plugin(cells) if "paper" in table else cells
    for cell in cells:
        cell.asked = preset or usual_preset(table)
        _fill(cell, families, rule, accepted)
    if "rows" not in table:  # a score that no record of a dataset has, such as positive-class F1 of ten classes
        scored = {(cell.block, cell.column) for cell in cells if cell.values}
        cells = [cell for cell in cells if (cell.block, cell.column) in scored]
    elif "paper" in table:
        cells = [cell for cell in cells if cell.published or cell.values]
    touched = {name for cell in cells for name in cell.findings}
    notes = {finding["id"]: finding for finding in papers.findings() if finding["id"] in touched}
    caption = _caption(table, cells, rule, variant, today or date.today())
    style = {name: table[name] for name in ("flipped", "ranked", "figure", "reference") if name in table}
    return Table(table["name"], table["title"], caption, cells, notes, **style)


def build_all(results_dir: str | Path = "results", **options) -> list[Table]:
    """Every table of the papers."""
    found = records.scan(results_dir)
    return [build(name, results_dir, found=found, **options) for name in names() if "paper" in spec(name)]


def render(table: str | Mapping, results_dir: str | Path = "results", format: str = "markdown", **options) -> str:
    """A table, or "all" tables of the papers, as text. `options` are those of `build`."""
    choose("format", format, writers.WRITERS)
    tables = build_all(results_dir, **options) if table == "all" else [build(table, results_dir, **options)]
    return writers.WRITERS[format](tables, [comparisons(found) for found in tables])


@dataclass(frozen=True)
class Missing:
    """A run that a table needs: the command that makes it, and how many of its trials are done."""

    command: Command
    done: int
    trials: int


def plan(table: str | Mapping, results_dir: str | Path = "results", preset: str = "paper", **options) -> list[Missing]:
    """The runs a table (or "all") still needs, each once.

    A run counts if it has the asked preset or a fuller one.
    """
    options |= {"preset": preset}
    tables = build_all(results_dir, **options) if table == "all" else [build(table, results_dir, **options)]
    runs: dict[str, Missing] = {}
    for cell in (cell for found in tables for cell in found.cells):
        if cell.trials and len(cell.values) < cell.trials:
            needs = {"dataset": cell.dataset, "loss": cell.loss, "protocol": cell.protocol, **said(cell)}
            runs.setdefault(command(cell), Missing(Command(needs), len(cell.values), cell.trials))
    return list(runs.values())


def comparisons(table: Table) -> list[dict]:
    """Every loss against cross-entropy (or the table's reference row) in the same column: paired by seed, and by split
    where there are several.

    Only what shares protocol, preset and splits is compared. `p_holm` is corrected for all comparisons of the table.
    A table that ranks its rows compares them over datasets instead: `Table.rankings`.
    """
    found = []
    for block, cells in table.blocks.items() if not table.ranked else ():
        for cell in cells.values():
            if cell.row == table.reference:
                continue
            column = [c for c in cells.values() if c.column == cell.column]
            rivals = [c for c in column if (c.row == table.reference if table.reference else c.loss in REFERENCES)]
            if cell.loss in REFERENCES and cell.score == cell.measure:
                rivals = [c for c in rivals if c.score == c.measure]  # its own plug-in is compared with it once
            alike = ("measure", "protocol", "preset", "split")
            for rival in (c for c in rivals if c is not cell and all(getattr(c, n) == getattr(cell, n) for n in alike)):
                where = {"block": block, "column": cell.column, "row": cell.row, "against": rival.row}
                overlap = OVERLAP if cell.split == "trial" else 0.0
                means = map(statistics.by_split, (cell.splits, rival.splits))
                pairs = {"seed": statistics.paired(cell.values, rival.values, overlap=overlap)}
                pairs["split"] = statistics.paired(*means, overlap=OVERLAP)
                found += [where | {"over": unit} | vars(pair) for unit, pair in pairs.items() if pair.n > 1]
    corrected = statistics.holm([entry["p"] for entry in found])
    return [entry | {"p_holm": p} for entry, p in zip(found, corrected, strict=True)]


def _cells(table: Mapping, variant: str) -> Iterator[Cell]:
    """The empty cells of a table: rows times columns, each with its published number."""
    paper, columns = table.get("paper"), table["columns"]
    told_apart = ("dataset", "our_loss", "our_beta", "metric", "class", "block")
    here = (cell for cell in papers.cells() if (cell["paper"], cell["table"]) == (paper, table.get("table")))
    index = {tuple(map(cell.get, told_apart)): cell for cell in here}
    for axes in columns if isinstance(columns, list) else [columns]:
        rows = {label: row for label, row in (table["rows"] | axes.get("rows", {})).items() if row}
        for (place, words), (label, row) in product(_labelled(axes["dataset"]), rows.items()):
            dataset, *options = words.split()
            further = {f"dataset.{name}": value for name, value in map(_option, options)}
            further |= table.get("overrides", {}) | {n: v for n, v in row.items() if "." in n or n == "annealing"}
            need = {"dataset": dataset, "protocol": table["protocol"], "loss": row["loss"]}
            need |= {"beta": row["beta"]} if "beta" in row else {}
            need |= {n.removeprefix("loss."): further.pop(n) for n in list(further) if n.startswith("loss.")}
            if variant == "released":
                need |= papers.RELEASED_LOSSES.get(row["loss"], {}) | row.get("released", {})
                need["dataset"] = papers.RELEASED_DATASETS.get(dataset, dataset)
            needed = {name: need.pop(name) for name in ("dataset", "loss", "protocol")}
            needed |= {"parameters": need, "overrides": further, "trials": table["trials"]}
            classes = axes.get("class", [row.get("class", table.get("class"))])
            for class_name, (name, metric) in product(classes, _labelled(axes["metric"])):
                per_class = metric in ("precision", "recall")
                of_class = class_name if per_class else None
                known = index.get(
                    (dataset, row["loss"], papers.pairs(row.get("beta")), metric, of_class, row.get("block"))
                )
                column = f"{name} {of_class}" if of_class else name
                block, column = (column, place) if table.get("blocks") == "metric" else (place, column)
                score = papers.score_of(paper, dataset, row["loss"], metric)
                if variant == "released" and paper == "btg" and row["loss"] in papers.LOGIT_JUDGED:
                    score = f"logit_{score}"
                yield Cell(
                    block=f"{block}, {row['block']}" if "block" in row else block,
                    row=label,
                    column=column,
                    score=plugged(score) if row.get("decision") == "plugin" else score,
                    position=CLASS_INDEX[dataset][of_class] if of_class else POSITIVE if per_class else None,
                    published=known,
                    findings=papers.findings_of(known) if known else [],
                    **needed,
                )


def _labelled(axis: Sequence[str] | Mapping[str, str]) -> list[tuple[str, str]]:
    """(label, what it stands for); entries of a list are their own label, options of a dataset left out."""
    return list(axis.items()) if isinstance(axis, Mapping) else [(entry.rpartition("=")[2], entry) for entry in axis]


def _option(words: str) -> tuple[str, Any]:
    name, _, value = words.partition("=")
    return name, yaml.safe_load(value)


def plugged(score: str) -> str:
    """A score of argmax as that of the decision tuned for it.

    >>> plugged("test.f1_pos")
    'plugin_f1.test.f1_pos'
    """
    tuned_for = TUNED_FOR[choose("score with a plug-in decision", score.removeprefix("test."), TUNED_FOR)]
    return f"{PLUGIN}{tuned_for}.{score}"


def _with_plugin(cells: Sequence[Cell]) -> list[Cell]:
    """A paper's cells, and below those of each block the rows that plug-in decisions make of the same trials."""
    rows = {where: list(row) for where, row in groupby(cells, key=lambda cell: (cell.block, cell.row))}
    found: dict[str, list[Cell]] = {block: [] for block, _ in rows}
    for (block, label), row in rows.items():
        if row[0].loss in PLUGGED and all(cell.score.removeprefix("test.") in TUNED_FOR for cell in row):
            changed = {"row": f"{label} + plug-in", "published": None, "findings": []}
            found[block] += [replace(cell, score=plugged(cell.score), **changed) for cell in row]
    own = groupby(cells, key=lambda cell: cell.block)
    return [cell for block, group in own for cell in (*group, *found[block])]


def _grid(table: Mapping, families: Mapping, accepted: Sequence[str]) -> Iterator[Cell]:
    """The cells of a table without rows: one row per family of records, among `datasets`, `losses`, `families`.

    Data have a block of their own, even if they share a name, as two files of dataset=csv do.
    """
    asked = {name: table.get(name) for name in ("datasets", "losses", "families")}
    wanted = lambda name, value: asked[name] is None or value in asked[name]  # noqa: E731
    blocks: dict[str, dict[str, dict[str, list]]] = {}  # dataset -> its fingerprint -> loss -> families
    for key in sorted(families, key=str):
        dataset, loss = key[:2]
        for family in families[key] if wanted("datasets", dataset) and wanted("losses", loss) else ():
            config = family[0]["config"]
            # A part of the data is no result of the dataset: a table has it only where it asks for that part.
            part = config["dataset"].get("limit") is not None
            if not part and _preset(family) in accepted and wanted("families", family[0]["family"]):
                same = blocks.setdefault(dataset, {}).setdefault(config["dataset"].get("fingerprint"), {})
                same.setdefault(loss, []).append(family)
    for dataset, by_data in blocks.items():
        for block, by_loss in zip(_data_labels(dataset, by_data), by_data.values(), strict=True):
            for loss, found in by_loss.items():
                yield from _grid_rows(block, dataset, loss, found, table["scores"])


def _data_labels(dataset: str, by_data: Mapping[str, Mapping[str, list]]) -> list[str]:
    """Names for the data behind one dataset's name: with what was said of them, else with their fingerprints."""
    if len(by_data) == 1:
        return [dataset]
    sections = [next(iter(by_loss.values()))[0][0]["config"]["dataset"] for by_loss in by_data.values()]
    told = [{n: v for n, v in section.items() if n not in ("name", "fingerprint")} for section in sections]
    named = labels(dataset, [{"dataset": section} for section in told])
    return named if len(set(named)) == len(named) else [f"{dataset}, data {str(mark)[:8]}" for mark in by_data]


def _grid_rows(block: str, dataset: str, loss: str, found: Sequence, scores: Sequence[str]) -> Iterator[Cell]:
    configs = [family[0]["config"] for family in found]
    told = [config["loss"].get("metric") if loss == "metric" else loss for config in configs]
    named = labels(loss, configs) if len(set(told)) < len(told) else told
    for label, config, family in zip(named, configs, found, strict=True):
        protocol = config.get("protocol", {}).get("name")
        tried = any((record["stage"], record["status"]) == ("trial", "done") for record in family)
        for name in scores:
            score = papers.score_of(None, dataset, loss, name)
            known = papers.published_for(dataset, loss, protocol, score) if _complete(family[0], dataset) else None
            yield Cell(
                block=block,
                row=label,
                column=name,
                dataset=dataset,
                loss=loss,
                protocol=protocol,
                family=family[0]["family"],
                tried=tried,
                score=score,
                position=POSITIVE if name in ("precision", "recall") else None,
                published=known,
                findings=papers.findings_of(known) if known else [],
            )


def labels(loss: str, configs: Sequence[Mapping]) -> list[str]:
    """Names for several settings of one loss: as many of their values as it takes to tell them apart."""
    flat = []
    for config in configs:
        sections = [(name, config[name]) for name in SECTIONS if name != "hyper"]
        values = {f"{s}.{n}".removesuffix(".name"): v for s, section in sections for n, v in section.items()}
        flat.append({"preset": config.get("preset")} | values | {"annealing.r": None})
    labels = [loss] * len(flat)
    for name in dict.fromkeys(name for values in flat for name in values):
        said = [f", {name}={_hydra(values[name])}" if values.get(name) is not None else "" for values in flat]
        longer = [label + more for label, more in zip(labels, said, strict=True)]
        if len(set(longer)) > len(set(labels)):
            labels = longer
    return labels


def _families(found: Iterable[Mapping]) -> dict[tuple, list[list[Mapping]]]:
    """(dataset, loss, protocol) -> families of records."""
    families: dict[str, list[Mapping]] = {}
    for record in found:
        families.setdefault(record["family"], []).append(record)
    index: dict[tuple, list] = {}
    for family in families.values():
        config = family[0]["config"]
        where = (config["dataset"]["name"], config["loss"]["name"], config.get("protocol", {}).get("name"))
        index.setdefault(where, []).append(family)
    return index


def _fill(cell: Cell, families: Mapping, rule: str, accepted: Sequence[str]) -> None:
    """Put the trials of the selected setting into a cell: those of the fullest preset that has any."""
    cell.rule = rule
    known = families.get((cell.recorded, cell.loss, cell.protocol), [])
    fitting = [family for family in known if _preset(family) in accepted and _fits(family[0], cell)]
    if not cell.family:
        fitting = list(filter(None, (_at_rates(family, cell) for family in fitting)))
    for preset in accepted:
        by_split: dict[Any, list] = {}
        for family in (f for f in fitting if _preset(f) == preset):
            key = records.select(family, rule)
            trials = [r for r in family if r["key"] == key and r["stage"] == "trial"]
            cell.failed += sum(r["status"] == "failed" for r in trials)  # counts where nothing succeeded
            values = {r["seed"]: value for r in trials if (value := _value(r, cell)) is not None}
            if values:
                split = family[0]["config"].get("split", {}).get("seed", 0)
                by_split.setdefault(split, []).append((len(values), key, values, trials))
        homes = by_split if cell.family else [split for split in _usual_splits(cell) if split in by_split]
        if not homes:
            continue
        cell.split = next(iter(homes))
        home = by_split[cell.split]
        _, cell.key, values, trials = max(home, key=lambda found: found[:2])
        cell.values = dict(sorted(values.items()))
        cell.failed = sum(r["status"] == "failed" for r in trials)
        cell.preset, cell.settings = preset, len(home)
        cell.sources = sorted({r["source"] for r in trials})
        cell.commits = {r["git"] for r in trials if r["git"]}
        if len(by_split) > 1:
            several = ((s, max(found)[2]) for s, found in by_split.items())
            # Where every trial has a split of its own, its seed is the split's.
            cell.splits = {(k if s == "trial" else s, k): v for s, found in several for k, v in found.items()}
        return


def _usual_splits(cell: Cell) -> tuple[Any, Any]:
    """Where the protocol's own trials are, before others."""
    return ("trial", 0) if _conf("protocol", cell.protocol)["new_split"] else (0, "trial")


def _fits(record: Mapping, cell: Cell) -> bool:
    """Is this what the cell asks for? Nothing in its config may contradict what the command of the cell composes."""
    if cell.family:
        return record["family"] == cell.family
    if not _complete(record, cell.dataset):
        return False
    config = record["config"]
    standard = _standard(cell, config["preset"], config["dataset"]["kind"])
    said = ((section, name, value) for section in standard for name, value in config.get(section, {}).items())
    # Any other parameter of a loss makes it another loss; other sections may tell more than their files.
    checked = (
        entry for entry in said if entry[1] not in FREE and (entry[0] == "loss" or entry[1] in standard[entry[0]])
    )
    if any(standard[section].get(name) != value for section, name, value in checked):
        return False
    # What the cell asks for beyond the files must have been done; a record from before there was an option has not.
    return config.get("protocol", {}).get("warmup", 0) == standard["protocol"].get("warmup", 0)


def _complete(record: Mapping, dataset: str) -> bool:
    """Were all classes of the papers' dataset there? A folder with some of Caltech256's is not Caltech256."""
    classes = len(record["confusion"].get("test", ()))  # none where the trial failed
    return not classes or classes == papers.MULTICLASS.get(dataset, classes)


def _at_rates(family: Sequence[Mapping], cell: Cell) -> list[Mapping]:
    """The records of a family that cool as the cell asks: at its own rate, else at those that the preset searches."""
    files, protocol = _conf("preset", _preset(family)), _conf("protocol", cell.protocol)
    own = files["preset"]
    if "annealing.r" in cell.overrides:
        rates = [cell.overrides["annealing.r"]]
    elif (own["search"] or protocol["search"]) != "none":
        rates = (own["grid"] or protocol["grid"])["r"]
    else:
        rates = [(_conf("annealing", protocol["annealing"]) | files.get("annealing", {})).get("r")]
    return [record for record in family if record["config"].get("annealing", {}).get("r") in (None, *rates)]


def _standard(cell: Cell, preset: str, kind: str) -> dict[str, dict[str, Any]]:
    """The sections of a cell's config by the files of conf/: protocol and loss, changed by preset and overrides."""
    files = _conf("preset", preset)
    loss, protocol, own = _conf("loss", cell.loss) | cell.parameters, _conf("protocol", cell.protocol), files["preset"]
    names = {"dataset": cell.dataset, "protocol": cell.protocol}
    if not Loss.model_validate(loss).classical:
        names["model"] = own["model"].get(kind, protocol["model"][kind])
        names["annealing"] = cell.overrides.get(
            "annealing", protocol["annealing"] if Loss.model_validate(loss).anneals else "none"
        )
    standard = {section: _conf(section, name) | files.get(section, {}) for section, name in names.items()}
    standard |= {"loss": loss, "split": {"stratify": False}}
    standard["dataset"] |= own["dataset"].get(cell.dataset, {}) | {"name": cell.recorded}
    for name, value in cell.overrides.items():
        section, _, key = name.partition(".")
        if key:
            standard.setdefault(section, {})[key] = value
    return standard


@cache
def _conf(group: str, name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


def _preset(family: Sequence[Mapping]) -> str | None:
    labels = {record["config"].get("preset") for record in family} - {None}
    return next((preset for preset in (*PRESETS, *sorted(labels)) if preset in labels), None)


def _value(record: Mapping, cell: Cell) -> float | None:
    """The cell's score in a record; None if the trial failed or was not judged by it."""
    *rule, split, name = cell.score.split(".")
    scores = record["decisions"].get(rule[0], {}).get("scores", {}) if rule else record["scores"]
    value = scores.get(split, {}).get(name) if record["status"] == "done" else None
    if value is None and rule and cell.position is not None and rule[0] in record["decisions"]:
        return _mean_over(record["decisions"][rule[0]]["confusion"][split], name, cell.position)
    return value[cell.position] if isinstance(value, list) and cell.position is not None else value


def _mean_over(matrices: Sequence, name: str, k: int) -> float:
    """Precision or recall of class k, mean over the confusion matrices of several thresholds; 0 where undefined."""
    wholes = [sum(row[k] for row in matrix) if name == "precision" else sum(matrix[k]) for matrix in matrices]
    ratios = [matrix[k][k] / whole if whole else 0.0 for matrix, whole in zip(matrices, wholes, strict=True)]
    return sum(ratios) / len(ratios)


def _hydra(value: Any) -> str:
    """A value as the command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{_hydra(item)}" for name, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _caption(table: Mapping, cells: Sequence[Cell], rule: str, variant: str, today: date) -> str:
    filled = [cell for cell in cells if cell.values]
    presets = sorted({cell.preset for cell in filled}, key=lambda preset: (*PRESETS, preset).index(preset))
    commits = sorted({commit for cell in filled for commit in cell.commits})
    facts = [
        f"selection rule {rule}",
        *([f"protocol {table['protocol']}"] if "protocol" in table else []),
        f"{variant} variant",
        f"preset {', '.join(presets)}" if presets else "no records yet",
        *([f"records of commit {', '.join(commits)}"] if commits else []),
        f"rendered {today.isoformat()}",
    ]
    asked = "/asked for" if any(cell.trials for cell in cells) else ""
    narrow = ", bare means where the page is narrow" if table.get("ranked") else ""
    legend = f"Ours: mean ± sample standard deviation (trials done{asked}){narrow}."
    if any(cell.published for cell in cells):
        legend += (
            " Δ: ours − published; ✓ at most 2·sqrt(s_ours² + s_published²) apart, s_published at least 0.005,"
            " ✗ further. Bold: column's best."
        )
    return f"{table['source']}. {legend} {'; '.join(facts).capitalize()}."
