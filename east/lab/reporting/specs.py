"""What a table consists of: conf/table/<name>.yaml, checked, and the empty cells that its rows and columns make.

A paper's table has `paper` and `table`, which identify its published numbers. Our own tables may set more, in
command-line syntax:

    overrides: {split.stratify: true}                      for every run of the table
    rows: {name: {loss: f1, annealing: none, loss.step: none, decision: plugin}}
    columns: [{dataset: [keel set=abalone19], metric: {f1: f1_positive}, rows: {name: …}}]
    questions: [{row: F1*, against: CE, column: f1, blocks: [adult]}]

`decision: plugin` is the rule tuned on validation for the column's metric, `expected` the one that needs no labels.
`decisions: [argmax, plugin, expected]` repeats every row once per decision.
Datasets and metrics may have their own labels. Each entry of a list of columns is a sub-table, which may be named by
`block` and may have other rows. `blocks: metric` makes a block per metric and a column per dataset.
`flipped` exchanges rows and columns on paper. `ranked` compares the rows over all datasets; `details: false` shows
nothing else. `figure` is dots, lines, ranks or leads. `reference` is the row to compare with instead of cross-entropy.
`base` is the table that this one repeats with other values.
`questions` are what the table was made to answer: only these comparisons are corrected for multiplicity.
`grid` is the search space of all rows, fixed before any test score is seen. It replaces the protocol's grid; a preset
with a smaller grid searches that one, again for all rows.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from east.choices import ConfigError, choose, groups
from east.lab.files import yaml_content
from east.lab.reporting import papers
from east.lab.reporting.cells import Cell, Options, decided
from east.lab.settings.settings import Grid

VARIANTS = ("clean", "released")
CLASS_INDEX = {"cifar10": {"dog": 5, "frog": 6}, "caltech256": {"dog": 55, "frog": 79}}
POSITIVE = 1

Labels = tuple[str, ...] | dict[str, str]  # names, or label -> name
DecisionName = Literal["argmax", "plugin", "expected"]
DECIDED: dict[DecisionName, str] = {"argmax": "", "plugin": " + plug-in", "expected": " + expected"}


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class RowSpec(Strict):
    """A loss with its beta; `typed` collects annealing=…, ensemble=… and every key with a dot."""

    loss: str
    beta: float | dict[str, JsonValue] | None = None
    class_: str | None = Field(None, alias="class")
    block: str | None = None
    decision: DecisionName | None = None
    released: Options = {}  # what its released variant types instead
    typed: Options = {}

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, values: Options) -> Options:
        typed = {name: value for name, value in values.items() if "." in name or name in ("annealing", "ensemble")}
        return {name: value for name, value in values.items() if name not in typed} | (
            {"typed": typed} if typed else {}
        )


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
    """A table. Without `rows` it has one per setting on record, limited to `datasets` and `losses`."""

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
    flipped: bool = False
    ranked: bool = False
    details: bool = True
    figure: Literal["dots", "lines", "ranks", "leads"] = "dots"
    reference: str | None = None
    next: str | None = None  # what to do next, printed below the table's answer
    datasets: tuple[str, ...] | None = None
    losses: tuple[str, ...] | None = None
    scores: tuple[str, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _one_column_is_a_list(cls, values: Options) -> Options:
        columns = values.get("columns")
        return values | {"columns": [columns]} if isinstance(columns, Mapping) else values

    @model_validator(mode="after")
    def _questions_name_rows(self) -> "Spec":
        for question in self.questions:
            for row in (question.row, question.against):
                choose(f"row in a question of table {self.name}", row, dict(_decided(self, self.rows)))
        return self

    def changed(self, **values: object) -> "Spec":
        """A copy with other values."""
        return Spec.model_validate(dict(self) | values)


def names(config_dir: str | None = None) -> list[str]:
    """All tables: the papers' in order, then ours and those in the user's folder."""
    ranks = {paper: rank for rank, paper in enumerate(papers.PROTOCOLS)}
    return sorted(sorted(groups(config_dir)["table"]), key=lambda name: ranks.get(name.rpartition("_")[0], len(ranks)))


def papers_tables() -> list[str]:
    """The tables of the papers."""
    return [name for name in names() if spec(name).paper]


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
        columns = shared["columns"] if isinstance(shared["columns"], list) else [shared["columns"]]
        shared["columns"] = [{key: value for key, value in axes.items() if key != "rows"} for axes in columns]
    overrides = {**shared.get("overrides", {}), **values.get("overrides", {})}
    return {key: value for key, value in (shared | values).items() if key != "base"} | {"overrides": overrides}


def usual_preset(table: Spec) -> str:
    """The preset that fills a table: `paper` for a paper's table, the quickest one shown for ours."""
    return "paper" if table.paper else table.preset or "lean"


def blank_cells(table: Spec, variant: str, **common: Any) -> Iterator[Cell]:
    """The empty cells of a table: rows times columns, each with its published number; `common` is for every cell."""
    for axes in table.columns:
        rows = dict(_decided(table, {label: axes.rows.get(label, row) for label, row in table.rows.items()}))
        for (dataset_label, words), (label, row) in product(_labelled(axes.dataset), rows.items()):
            dataset, *options = words.split()
            typed = {f"dataset.{name}": yaml.safe_load(text) for name, text in (word.split("=", 1) for word in options)}
            request = _request(table, row, dataset, typed, variant)
            ideal = papers.RELEASED_PROTOCOLS.get(str(request.get("protocol")), {}) if variant == "released" else {}
            classes = axes.class_ or (row.class_ or table.class_,)
            for class_name, (name, metric) in product(classes, _labelled(table.metric or axes.metric)):
                per_class = metric in ("precision", "recall")
                of_class = class_name if per_class else None
                score_label = f"{name} {of_class}" if of_class else name
                by_metric = table.blocks == "metric"
                block, column = (score_label, dataset_label) if by_metric else (dataset_label, score_label)
                block = axes.block or block
                yield Cell(
                    block=f"{block}, {row.block}" if row.block else block,
                    row=label,
                    column=column,
                    request=request,
                    ideal=dict(ideal),
                    score=_score(table, row, dataset, metric, variant),
                    position=CLASS_INDEX[dataset][of_class] if of_class else POSITIVE if per_class else None,
                    published=_published(table, row, dataset, metric, of_class),
                    asked=table.trials,
                    grid=table.grid,
                    **common,
                )


def _request(table: Spec, row: RowSpec, dataset: str, options: Options, variant: str) -> Options:
    """What is typed to fill a row's cells."""
    request: Options = {"dataset": dataset, "loss": row.loss, "protocol": table.protocol}
    beta = {"loss.beta": row.beta} if row.beta is not None else {}
    typed = options | table.overrides | row.typed
    request |= beta | {name: value for name, value in typed.items() if name.startswith("loss.")} | typed
    if variant == "released":
        request |= {"dataset": papers.RELEASED_DATASETS.get(dataset, dataset)}
        request |= papers.RELEASED_LOSSES.get(row.loss, {}) | row.released
    return request if request["protocol"] else {name: value for name, value in request.items() if name != "protocol"}


def _published(table: Spec, row: RowSpec, dataset: str, metric: str, of_class: str | None) -> papers.Published | None:
    betas = tuple(row.beta.items()) if isinstance(row.beta, dict) else None
    return _index(table.paper, table.table).get((dataset, row.loss, betas, metric, of_class, row.block))


@cache
def _index(paper: str | None, table: int | None) -> dict[tuple, papers.Published]:
    of_table = (cell for cell in papers.cells() if (cell.paper, cell.table) == (paper, table))
    return {(c.dataset, c.our_loss, c.our_beta, c.metric, c.class_, c.block): c for c in of_table}


def _score(table: Spec, row: RowSpec, dataset: str, metric: str, variant: str) -> str:
    score = papers.score_of(table.paper, dataset, row.loss, metric)
    if variant == "released" and table.paper == "btg" and row.loss in papers.LOGIT_JUDGED:
        return f"logit_{score}"
    return score if row.decision in (None, "argmax") else decided(score, row.decision)


def _decided(table: Spec, rows: Mapping[str, RowSpec | None]) -> Iterator[tuple[str, RowSpec]]:
    """The rows that are not null, each repeated for every decision of the table unless it has its own."""
    for label, row in rows.items():
        if row and (row.decision or not table.decisions):
            yield label, row
        elif row:
            yield from ((label + DECIDED[name], row.model_copy(update={"decision": name})) for name in table.decisions)


def _labelled(axis: Labels) -> list[tuple[str, str]]:
    """(label, entry). In a list an entry is its own label; of "keel set=abalone19", the label is abalone19."""
    return list(axis.items()) if isinstance(axis, dict) else [(entry.rpartition("=")[2], entry) for entry in axis]
