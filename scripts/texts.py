#!/usr/bin/env python3
"""Render the texts, in which every number of ours is an expression over the committed records.

    scripts/texts.py            # writes README.md, docs/*.md, results/README.md and the findings
    scripts/texts.py --check    # writes nothing; exit code 1 and a diff if a text is not current

The templates are in docs/templates, under the paths of what they render. They are Jinja, with the methods of `Numbers`
as functions: `{{ cell("east_v2_1", "adult", "CE") }}` is "0.651 ± 0.006", `{{ … |f("pm") }}` the published mean.
"""

import argparse
import difflib
import sys
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from statistics import mean, stdev

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import east
from east.lab.experiment import records
from east.lab.reporting import papers, statistics, tables
from east.lab.reporting.catalogue import Catalogue

ROOT = Path(__file__).resolve().parents[1]
TEMPLATES, RESULTS = ROOT / "docs" / "templates", ROOT / "results"
WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
FOUR = ("cocktailparty", "adult", "mammography", "kaggle")
MATCHED = {"F1*": "f1", "Acc*": "accuracy", "MCC*": "mcc"}
TWO, MANY, PAPERS = ("held out, two classes",), ("held out, many classes",), ("the papers' tables",)
EPOCHS = {"paper": 5000, "budget": 300, "lean": 40}  # of a preset; runs with another limit do not count


def signed(number: float, digits: int = 3) -> str:
    return f"{number:+.{digits}f}".replace("-", "−")


def p_value(p: float | None) -> str:
    return "< 0.001" if p is not None and p < 0.001 else f"{p or 0:.3f}"


@dataclass(frozen=True)
class Trials:
    """The scores of one setting's trials. In a text: "0.158 ± 0.016".

    `f("m")` is the mean, `f("s")` the deviation, `f("ends")` lowest to highest, `f("p")` what is published, `f("pm")`
    the published mean.
    """

    values: tuple[float, ...]
    published: tuple[str, str] = ("", "")

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        return mean(self.values)

    def __format__(self, what: str) -> str:
        middle = f"{self.mean:.3f}".replace("-", "−")
        spread = f"{stdev(self.values):.3f}" if self.n > 1 else ""
        ends = f"{min(self.values):.3f} to {max(self.values):.3f}"
        shown = {"": f"{middle} ± {spread}", "m": middle, "s": spread, "ends": ends}
        return (shown | {"p": " ± ".join(self.published), "pm": self.published[0]})[what]

    def __str__(self) -> str:
        return format(self, "")


@dataclass(frozen=True)
class Difference:
    """A mean difference and its 95 % interval. In a text: "+0.014 [+0.009, +0.019]".

    `f("to")` is "+0.014, +0.009 to +0.019", `f("d")` the mean, `f("ends")` the interval, `f("h")` Holm's p-value.
    """

    mean: float
    low: float
    high: float
    p: float | None = None
    p_holm: float | None = None
    n: int = 0
    wins: int = 0

    @classmethod
    def of(cls, pair: tables.RowPair | statistics.Paired) -> "Difference":
        return cls(
            pair.difference, pair.low or 0.0, pair.high or 0.0, pair.p, getattr(pair, "p_holm", None), pair.n, pair.wins
        )

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def __format__(self, what: str) -> str:
        middle, low, high = (signed(number) for number in (self.mean, self.low, self.high))
        shown = {"": f"{middle} [{low}, {high}]", "to": f"{middle}, {low} to {high}", "d": middle}
        return (shown | {"ends": f"{low} to {high}", "h": p_value(self.p_holm)})[what]

    def __str__(self) -> str:
        return format(self, "")


class Numbers:
    """What templates can ask of the tables and of the records. Public methods are the templates' functions."""

    TWO, MANY, PAPERS, FOUR = TWO, MANY, PAPERS, FOUR
    FIVE = ("f1", "accuracy", "mcc", "dice", "ce")

    @cached_property
    def _records(self):
        return east.records.load(RESULTS)

    @cached_property
    def _catalogue(self) -> Catalogue:
        return Catalogue(records.scan(RESULTS))

    @cache  # noqa: B019
    def _table(self, name: str) -> tables.ResultTable:
        """A table; the suffix _released asks for that variant."""
        variant = "released" if name.endswith("_released") else "clean"
        return tables.build(name.removesuffix("_released"), RESULTS, variant=variant, scanned=self._catalogue)

    @cache  # noqa: B019
    def _pairs(self, table: str) -> list[tables.RowPair]:
        return tables.comparisons(self._table(table))

    def words(self, number: int) -> str:
        return WORDS[number]

    # Cells of tables

    def _cell(self, table: str, block: str, row: str, column: str) -> tables.Cell:
        return self._table(table).blocks[block][row, column]

    def cell(self, table: str, block: str, row: str, column: str = "f1") -> Trials:
        """A cell's trials."""
        shown = self._cell(table, block, row, column)
        published = tuple(f"{shown.published}".split(" ± ")) if shown.published else ("", "")
        return Trials(tuple(shown.values.values()), published)

    def against_published(self, table: str, block: str, row: str, column: str = "f1") -> str:
        """Cells of a Markdown row: published, ours, number of trials, the difference with its interval, the verdict."""
        ours, gap = self.cell(table, block, row, column), self._cell(table, block, row, column).gap
        difference = Difference(gap.difference, gap.difference_low, gap.difference_high)
        return f"{ours:p} | {ours} | {ours.n} | {difference} | {gap.word}"

    def cells(self, table: str, block: str, rows: list[str], column: str) -> list[float]:
        """The means of several rows."""
        return [self.cell(table, block, row, column).mean for row in rows]

    def constant(self, table: str, block: str, row: str, column: str) -> float:
        """What always predicting the most frequent class scores."""
        return self._cell(table, block, row, column).gap.constant

    def capped(self, table: str, block: str, row: str, column: str = "f1_macro") -> int:
        """How many of a cell's trials ended at the epoch limit."""
        return sum(r.stopped == "max_epochs" for r in self._cell(table, block, row, column).shown.scored)

    def epochs_of(self, table: str, block: str, row: str, column: str = "f1_macro") -> list[int]:
        return [r.epochs for r in self._cell(table, block, row, column).shown.scored]

    def val_losses(self, table: str, block: str, row: str, column: str = "accuracy") -> list[float]:
        """The lowest validation loss of each of a cell's trials."""
        return [r.best.val_loss for r in self._cell(table, block, row, column).shown.scored]

    def reaching(self, table: str, block: str, row: str, original: str) -> int:
        """How many trials of a row reach the mean that is published for it."""
        published = self._cell(original, block, row, "f1").published.mean
        return sum(value >= published for value in self.cell(table, block, row, "f1_positive").values)

    def unpredicted(self) -> list[int]:
        """How many of CIFAR-10's classes each trial of Acc* and MCC* never predicts."""
        trials = (self._cell("cifar10", "cifar10", row, "f1_macro").shown.scored for row in ("Acc*", "MCC*"))
        matrices = [record.confusion["test"] for scored in trials for record in scored]
        return [sum(not any(column) for column in zip(*matrix, strict=True)) for matrix in matrices]

    def judged(self, table: str, block: str | tuple | None = None, row: str | None = None) -> list[tables.Cell]:
        """The cells that have a verdict."""
        blocks = (block,) if isinstance(block, str) else block
        cells = [c for c in self._table(table).cells if c.gap.word]
        return [c for c in cells if (blocks is None or c.block in blocks) and row in (None, c.row)]

    def fitting(self, table: str, block: str | tuple | None = None, row: str | None = None) -> int:
        """How many intervals contain 0."""
        return sum(c.gap.difference_low <= 0 <= c.gap.difference_high for c in self.judged(table, block, row))

    def verdicts(self, table: str, block: str | None = None) -> dict[str, int]:
        words = [c.gap.word for c in self.judged(table, block)]
        return {word: words.count(word) for word in statistics.WORDS}

    def ticked(self, table: str) -> int:
        return sum(c.gap.ticked for c in self.judged(table))

    def published(self) -> int:
        return len(papers.cells())

    @cache  # noqa: B019
    def cells_run(self, variants: tuple[str, ...] = ("", "_released")) -> int:
        """Published cells that have trials of ours, by the formulas (""), with the quirks, or by either."""
        return tables.cells_run(self._table(name + kind) for name in tables.papers_tables() for kind in variants)

    # Comparisons

    def pair(self, table: str, block: str, column: str, row: str, against: str = "CE", over: str = "seed"):
        """A paired comparison below a table."""
        for pair in self._pairs(table):
            if (pair.question, pair.over) == ((block, column, row, against), over):
                return Difference.of(pair)
        raise LookupError(f"{table} has no comparison of {row} with {against} for {column} on {block}")

    def declared(self, table: str) -> list[float]:
        """The corrected p-values of the questions that a table declares and answers."""
        return [pair.p_holm for pair in self._pairs(table) if pair.p_holm is not None]

    def matched(self) -> dict[tuple[str, str], Difference]:
        """The twelve declared questions of EAST's Table 1."""
        asked = [(block, row, column) for block in FOUR for row, column in MATCHED.items()]
        return {(block, row): self.pair("east_v2_1", block, column, row) for block, row, column in asked}

    def matched_at_paper(self) -> int:
        """How many of them follow the paper's protocol."""
        return sum(self._cell("east_v2_1", block, row, "f1").preset == "paper" for block, row in self.matched())

    def won(self) -> dict[str, int]:
        """How often EAST's loss has the higher mean, is significantly ahead, significantly behind."""
        pairs = self.matched().values()
        significant = [pair.mean > 0 for pair in pairs if pair.p_holm < 0.05]
        ahead = sum(significant)
        return {
            "higher": sum(pair.mean > 0 for pair in pairs),
            "significantly": ahead,
            "behind": len(significant) - ahead,
        }

    # The contest

    def _means(self, row: str, blocks: tuple[str, ...], name: str = "contest") -> dict[str, float]:
        """Dataset -> mean over splits of a row."""
        found = (self._table(name).means(block).get(row, {}) for block in blocks)
        return {dataset: value for by_dataset in found for dataset, value in by_dataset.items()}

    def lead(self, row, against="CE + plug-in", blocks=TWO + MANY, name="contest", real: bool = False) -> Difference:
        """The lead of a row over another, over the datasets of some blocks."""
        ours = {d: v for d, v in self._means(row, blocks, name).items() if not (real and "Gaussians" in d)}
        return Difference.of(statistics.paired(ours, self._means(against, blocks, name), overlap=0.0))

    def corrected_lead(self, row: str) -> float:
        """Its p-value over all held-out datasets, corrected by Holm for all rows of the table."""
        rows = [name for name in self._table("contest").means(TWO[0]) if name != "CE + plug-in"]
        return dict(zip(rows, statistics.holm([self.lead(name).p for name in rows]), strict=True))[row]

    def stack_against(self, row: str) -> Difference:
        """The lead of the stack over a peer on the tables that no choice was made on; a declared question."""
        return self.pair("contest_ensembles", "held out", tables.ALL, "Stack + expected", row, "dataset")

    def lag(self, row: str, dataset: str) -> float:
        """How far a row is behind the reference on one of the papers' tables."""
        return self._means("CE + plug-in", PAPERS)[dataset] - self._means(row, PAPERS)[dataset]

    def held_out(self, classes: str | None = None, real: bool = False) -> int:
        """How many held-out datasets there are, of those with "two" or "many" classes."""
        datasets = self._means("Metric CE", {"two": TWO, "many": MANY, None: TWO + MANY}[classes])
        return sum(not (real and "Gaussians" in dataset) for dataset in datasets)

    def smallest_group(self) -> statistics.Paired:
        """Lead of metric cross-entropy with many classes and fewer than 10 validation rows of the rarest."""
        leads = next(r for r in self._table("contest").rankings if r.block == MANY[0]).leads
        return next(group for name, group in leads.items() if name != tables.ALL)["Metric CE"]

    def averaging(self, row: str) -> Difference:
        """What averaged weights change in a row, over the held-out datasets."""
        averaged, plain = (self._means(row, TWO + MANY, name) for name in ("contest_averaged", "contest"))
        return Difference.of(statistics.paired(averaged, plain, overlap=0.0))

    def averaged_rows(self) -> int:
        """Rows of networks with averaged weights; trees and logistic regression have none."""
        cells = [c for c in self._table("contest_averaged").cells if (c.block,) in (TWO, MANY) and c.values]
        return len({c.row for c in cells if c.trains_networks})

    # Records

    def _setting(self, stage: str, dataset: str, loss: str, preset: str, **options):
        """The records of a setting by EAST's protocol, without a warm-up unless it is given."""
        d, names = self._records, {"split": "split.seed", "lr": "hyper.lr", "warmup": "protocol.warmup"}
        wanted = {"split.seed": 0, "protocol": "east", "stage": stage, "status": "done"}
        wanted |= {"dataset": dataset, "loss": loss, "preset": preset}
        wanted |= {"loss.average": "macro"} if loss == "f1" else {}
        wanted |= {names[name]: value for name, value in options.items()}
        found = d
        for column, value in wanted.items():
            found = found[found[column] == value]
        return found if "warmup" in options else found[found["protocol.warmup"].isna()]

    def trials(self, dataset: str, loss: str, preset: str, score: str = "test.f1_positive", **options) -> Trials:
        """The trials of a setting that no table shows, such as one of a shorter preset."""
        found = self._setting("trial", dataset, loss, preset, **options)
        if found["key"].nunique() != 1:
            raise LookupError(f"{dataset} {loss} {preset} {options}: {found['key'].nunique()} settings have trials")
        return Trials(tuple(found[score.replace("f1_positive", "f1_pos")]))

    def epochs(self, dataset: str, loss: str, preset: str) -> float:
        """Mean epochs of a setting's trials."""
        return self._setting("trial", dataset, loss, preset)["epochs"].mean()

    def collapsed(self, dataset: str, preset: str) -> int:
        """Points of a search at which Acc* never predicts a positive: all that were searched."""
        found = self._setting("search", dataset, "accuracy", preset)
        matrices = [m["val"] for m in found[found["protocol.max_epochs"] == EPOCHS[preset]]["confusion"]]
        if not all(matrix[0][1] == matrix[1][1] == 0 for matrix in matrices):
            raise ValueError("some points predict positives: reword the text")
        return len(matrices)

    def rates(self) -> list[dict[str, float]]:
        """F1*'s learning rates on CIFAR-10 by validation loss, the lowest first."""
        found = self._setting("search", "cifar10", "f1", "half").sort_values("best.val_loss")
        return found.rename(columns={"hyper.lr": "lr", "best.val_loss": "val_loss"}).to_dict("records")

    def hours(self, datasets, protocol: str, preset: str, losses=None, stratified: bool = False) -> float:
        """Core-hours of the records of a preset, with its searches. Forests and CCS have no epochs."""
        d = self._records
        found = d[(d["protocol"] == protocol) & (d["preset"] == preset) & d["dataset"].isin(list(datasets))]
        limits = found["protocol.max_epochs"]
        found = found[(limits.isna() | (limits == EPOCHS[preset])) & (found["split.stratify"] == stratified)]
        return found[found["loss"].isin(list(losses or found["loss"]))]["seconds"].sum() / 3600


def render(numbers: Numbers) -> dict[Path, str]:
    """Path -> rendered text."""
    jinja = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    jinja.filters |= {"f": format, "signed": signed, "mean": mean}
    jinja.globals |= {name: getattr(numbers, name) for name in dir(numbers) if not name.startswith("_")}
    names = [file.relative_to(TEMPLATES).as_posix() for file in TEMPLATES.rglob("*") if file.is_file()]
    return {ROOT / name: jinja.get_template(name).render() for name in sorted(names)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = False
    for path, text in render(Numbers()).items():
        current = path.read_text(encoding="utf-8")
        if text != current:
            stale = True
            name = path.relative_to(ROOT).as_posix()
            lines = (current.splitlines(), text.splitlines())
            print(*difflib.unified_diff(*lines, name, f"{name}, rendered", lineterm="", n=0), sep="\n")
            if not check:
                path.write_text(text, encoding="utf-8")
    sys.exit(check and stale)


if __name__ == "__main__":
    main()
