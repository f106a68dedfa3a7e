"""What a table consists of: conf/table/<name>.yaml, checked, and the empty cells that its rows and columns make.

A paper's table has `paper` and `table`, which identify its published numbers. Our own tables may set more, in
command-line syntax:

    overrides: {split.stratify: true}                      for every run of the table
    rows: {name: {loss: f1, annealing: none, loss.step: none, decision: plugin}}
    columns: [{dataset: [keel set=abalone19], metric: {f1: f1_positive}, rows: {name: …}}]
    questions: [{row: F1*, against: CE, column: f1, blocks: [adult]}]

`decision: plugin` is the rule tuned on validation for the column's metric, `expected` the one that needs no labels.
`decisions: [argmax, plugin, expected]` repeats every row once per decision.
Datasets and metrics may have their own labels; a dataset may also set what is not its own, as in "adult
split.stratify=false". Each entry of a list of columns is a sub-table, which may be named by `block` and may have other
rows. `blocks: metric` makes a block per metric and a column per dataset. `ranked` shows how the rows compare over all
datasets, and no cells. `reference` is the row to compare with instead of cross-entropy. `base` is the table that this
one repeats with other values.
`questions` are what the table was made to answer: only these comparisons are corrected for multiplicity.
`grid` is the search space of all rows, fixed before any test score is seen. It replaces the protocol's grid; a preset
with a smaller grid searches that one, again for all rows.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from east.choices import ConfigError, choose, groups
from east.lab.files import yaml_content
from east.lab.reporting import papers
from east.lab.reporting.cells import Cell, Options, decided
from east.lab.settings.settings import Grid

CLASS_INDEX = {"cifar10": {"dog": 5, "frog": 6}, "caltech256": {"dog": 55, "frog": 79}}
POSITIVE = 1

Labels = tuple[str, ...] | dict[str, str]  # names, or label -> name
DecisionName = Literal["argmax", "plugin", "expected"]
DECIDED: dict[DecisionName, str] = {"argmax": "", "plugin": " + plug-in", "expected": " + expected"}


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class RowSpec(Strict):
    """A loss; `typed` collects annealing=…, ensemble=… and every key with a dot."""

    loss: str
    class_: str | None = Field(None, alias="class")
    block: str | None = None
    decision: DecisionName | None = None
    released: Options = {}  # what its released variant types instead
    typed: Options = {}

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, values: Options) -> Options:
        typed = {name: value for name, value in values.items() if "." in name or name in ("annealing", "ensemble")}
        return {name: v for name, v in values.items() if name not in typed} | ({"typed": typed} if typed else {})

    @property
    def betas(self) -> papers.Betas | None:
        """Of single classes."""
        beta = self.typed.get("loss.beta")
        return tuple(beta.items()) if isinstance(beta, dict) else None  # type: ignore[arg-type]


class ColumnsSpec(Strict):
    """Datasets times classes times metrics; `rows` replaces rows of the table; null leaves one out."""

    dataset: Labels
    metric: Labels
    block: str | None = None
    class_: tuple[str, ...] | None = Field(None, alias="class")
    rows: dict[str, RowSpec | None] = {}


class Question(Strict):
    """Is `row` better than `against` in this column (null: over all columns)? Asked of each of the blocks."""

    row: str
    against: str
    column: str | None = None
    blocks: tuple[str, ...]


class Spec(Strict):
    """A table. Without `rows` it has one per setting on record, and these `scores`."""

    name: str
    title: str
    source: str
    paper: Literal["east_v2", "east_v1", "btg"] | None = None
    table: int | None = None
    protocol: str | None = None
    trials: int | None = None
    preset: str | None = None  # the quickest preset shown
    overrides: Options = {}
    class_: str | None = Field(None, alias="class")
    rows: dict[str, RowSpec] = {}
    columns: tuple[ColumnsSpec, ...] = ()
    metric: Labels | None = None  # replaces the columns' metrics
    decisions: tuple[DecisionName, ...] = ()
    grid: Grid | None = None
    questions: tuple[Question, ...] = ()
    blocks: Literal["dataset", "metric"] = "dataset"
    ranked: bool = False
    reference: str | None = None
    next: str | None = None  # what to do next, printed below the table's answer
    scores: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names_its_rows(self) -> "Spec":
        rows = _decided(self, self.rows)
        for name in (name for question in self.questions for name in (question.row, question.against)):
            choose(f"row in a question of table {self.name}", name, rows)
        if self.ranked:
            choose(f"reference of table {self.name}, which is ranked", str(self.reference), rows)
        return self


def names(config_dir: str | None = None) -> list[str]:
    """All tables: the papers' in order, then ours and those in the user's folder."""
    every = sorted(groups(config_dir)["table"])
    of_papers = [name for paper in papers.PAPERS for name in every if name.rpartition("_")[0] == paper]
    return [*of_papers, *(name for name in every if name not in of_papers)]


def papers_tables() -> list[str]:
    """The tables of the papers."""
    return [name for name in names() if name.rpartition("_")[0] in papers.PAPERS]


def chosen(table: str) -> list[str]:
    """The tables that table=… stands for."""
    return papers_tables() if table == "all" else [table]


def spec(name: str, config_dir: str | None = None) -> Spec:
    """Read conf/table/<name>.yaml, or the one in the user's folder."""
    file = groups(config_dir)["table"][choose("table", name, names(config_dir))]
    try:
        table = Spec.model_validate(_values(name, config_dir))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{file}: {place}: {first['msg']}, got {first['input']!r}") from error
    if table.name != file.stem:
        raise ConfigError(f"{file}: expected name: {file.stem}, as the file is called, got {table.name!r}")
    return table


def _values(name: str, config_dir: str | None) -> dict[str, Any]:
    """The values in a table's file, merged into its base."""
    values = yaml_content(groups(config_dir)["table"][choose("table", name, names(config_dir))])
    if "base" not in values:
        return values
    shared = dict(_values(values["base"], config_dir))
    if "rows" in values:  # a column's exceptions belong to the rows that they were written for
        shared["columns"] = [{key: v for key, v in axes.items() if key != "rows"} for axes in shared["columns"]]
    overrides = {**shared.get("overrides", {}), **values.get("overrides", {})}
    return {name: v for name, v in (shared | values).items() if name != "base"} | {"overrides": overrides}


def usual_preset(table: Spec) -> str:
    """The preset that fills a table: `paper` for a paper's table, the quickest one shown for ours."""
    return "paper" if table.paper else table.preset or "lean"


def blank_cells(table: Spec, variant: str, **common: Any) -> Iterator[Cell]:
    """The empty cells of a table: rows times columns, each with its published number; `common` is for every cell."""
    numbers = _published(table.paper, table.table)
    for axes in table.columns:
        rows = _decided(table, {label: axes.rows.get(label, row) for label, row in table.rows.items()})
        for (dataset_label, words), (label, row) in product(_labelled(axes.dataset), rows.items()):
            dataset, *options = words.split()
            request = _request(table, row, dataset, options, variant)
            ideal = papers.RELEASED_PROTOCOLS.get(str(request.get("protocol")), {}) if variant == "released" else {}
            classes = axes.class_ or (row.class_ or table.class_,)
            for class_name, (name, metric) in product(classes, _labelled(table.metric or axes.metric)):
                per_class = metric in ("precision", "recall")
                of_class = class_name if per_class else None
                block, column = dataset_label, f"{name} {of_class}" if of_class else name
                if table.blocks == "metric":
                    block, column = column, block
                block = axes.block or block
                yield Cell(
                    block=f"{block}, {row.block}" if row.block else block,
                    row=label,
                    column=column,
                    request=request,
                    ideal=dict(ideal),
                    score=_score(table, row, dataset, metric, variant),
                    position=CLASS_INDEX[dataset][of_class] if of_class else POSITIVE if per_class else None,
                    published=numbers.get((dataset, row.loss, row.betas, metric, of_class, row.block, row.decision)),
                    asked=table.trials,
                    grid=table.grid,
                    **common,
                )


def _request(table: Spec, row: RowSpec, dataset: str, options: list[str], variant: str) -> Options:
    """What is typed to fill a row's cells."""
    words = (word.split("=", 1) for word in options)
    of_data = {name if "." in name else f"dataset.{name}": yaml.safe_load(text) for name, text in words}
    typed = table.overrides | of_data | row.typed
    request: Options = {"dataset": dataset, "loss": row.loss, "protocol": table.protocol}
    request |= {name: value for name, value in typed.items() if name.startswith("loss.")} | typed
    if variant == "released":
        request |= {"dataset": papers.RELEASED_DATASETS.get(dataset, dataset)}
        request |= papers.RELEASED_LOSSES.get(row.loss, {}) | row.released
    return request if request["protocol"] else {name: value for name, value in request.items() if name != "protocol"}


@cache
def _published(paper: str | None, table: int | None) -> dict[tuple, papers.Published]:
    of_table = (cell for cell in papers.cells() if (cell.paper, cell.table) == (paper, table))
    return {(c.dataset, c.our_loss, c.our_beta, c.metric, c.class_, c.block, None): c for c in of_table}


def _score(table: Spec, row: RowSpec, dataset: str, metric: str, variant: str) -> str:
    score = papers.score_of(table.paper, dataset, row.loss, metric)
    if variant == "released" and table.paper == "btg" and row.loss in papers.LOGIT_JUDGED:
        return f"logit_{score}"
    return score if row.decision in (None, "argmax") else decided(score, row.decision)


def _decided(table: Spec, rows: Mapping[str, RowSpec | None]) -> dict[str, RowSpec]:
    """The rows that are not null, each repeated for every decision of the table unless it has its own."""
    decided: dict[str, RowSpec] = {}
    for label, row in ((label, row) for label, row in rows.items() if row):
        own = row.decision or not table.decisions
        each = {label + DECIDED[name]: row.model_copy(update={"decision": name}) for name in table.decisions}
        decided |= {label: row} if own else each
    return decided


def _labelled(axis: Labels) -> list[tuple[str, str]]:
    """(label, entry). In a list an entry is its own label; of "keel set=abalone19", the label is abalone19."""
    return list(axis.items()) if isinstance(axis, dict) else [(entry.rpartition("=")[2], entry) for entry in axis]
