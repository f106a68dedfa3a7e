"""A table's cells: which records fill each, and how it compares with the published number. Nothing here needs torch.

A cell finds the families of records that its command makes under each preset, lets the selection rule choose one
setting of each, and shows the trials of the fullest preset on record.
"""

import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from pydantic import JsonValue

from east.choices import ConfigError, choose, without_imports
from east.lab.experiment import records
from east.lab.experiment.record import Record
from east.lab.reporting import papers, statistics
from east.lab.reporting.catalogue import (
    AXES,
    Catalogue,
    Family,
    Point,
    SplitSeed,
    class_sizes,
    point_of,
    score,
    searched,
)
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.settings.compose import PAPER_DATASETS
from east.lab.settings.identity import Json
from east.lab.settings.settings import DatasetSection, Grid, Protocol, Settings
from east.lab.training.scores import MEANS, Margins

PRESETS = ("paper", "patience", "half", "budget", "lean", "quick")  # from the fullest to the quickest
HALF = "Darknet-19 at half width in mixed precision, no search and"
# What is unusual about a cell's trials -> its mark, and what the mark means.
MARKS = {
    "patience": ("▽", f"the paper's patience: {HALF} at most 400 epochs."),
    "half": ("△", f"half training: {HALF} at most 30 epochs."),
    "budget": ("†", "budget training: a smaller grid, a shorter patience and at most 300 epochs."),
    "lean": ("¶", "lean training: a few points of the grid and at most 40 epochs."),
    "quick": ("‡", "quick training: no search and at most 20 epochs."),
    "part": ("◊", "not searched over the whole grid."),
    "halving": ("½", "searched over the whole grid by successive halving."),
    "wider": ("+", "searched over the preset's grid and more points."),
    "other": ("≠", "searched over other points than the preset's grid."),
    "whole split": ("‖", "validation loss of the whole split, where the released code averages over batches."),
    "several": ("§", "the records hold several settings that fit; the one with the most trials is shown."),
}
# What may differ between a record and a command, besides what a search varies.
IGNORED = frozenset(("dataset.fingerprint", "dataset.path", "split.seed", "loss.code", "model.code"))
LIMITS = ("max_epochs", "stage_epochs")  # why a trial that was still improving stopped

DECISION_PREFIXES = ("plugin_", "expected_")  # of scores under a rule other than argmax
# Scores -> the metric that a decision rule for them is made for.
TUNED_FOR = {"f1_pos": "f1", "f1_macro": "f1", "accuracy": "accuracy", "mcc": "mcc", "gmean": "gmean"}

Options: TypeAlias = dict[str, JsonValue]  # command-line values by name


@dataclass(frozen=True)
class Trials:
    """The trials of one setting, as a cell sees them."""

    values: Mapping[int, float] = field(default_factory=dict)  # seed -> score
    records: Sequence[Record] = ()  # of all trials, also failed ones
    is_ideal: bool = True  # trained with the settings of the cell's `ideal`
    family: Family = ()  # with its search
    search: str | None = None  # "grid", "halving", "part", …, see `searched_as`; None: nothing to search
    settings: int = 0  # how many families of records fit
    splits: Mapping[SplitSeed, float] = field(default_factory=dict)  # split -> mean score, if there are several

    @property
    def scored(self) -> list[Record]:
        return [record for record in self.records if record.seed in self.values]

    @property
    def failed(self) -> int:
        return sum(record.status == "failed" for record in self.records)

    @property
    def key(self) -> str | None:
        return self.records[0].key if self.records else None

    @property
    def split(self) -> SplitSeed | None:
        return self.records[0].config.split.seed if self.records else None

    @property
    def capped(self) -> bool:
        """True if more than half of the trials ended at an epoch limit."""
        return 2 * sum(record.stopped in LIMITS for record in self.scored) > len(self.scored)

    @property
    def overlap(self) -> float:
        """Test rows / training rows, see `statistics.standard_error`; 0 if no record tells."""
        sizes = (record.data.get("sizes") for record in self.scored)
        return max((s["test"] / s["train"] for s in sizes if isinstance(s, dict) and s.get("train")), default=0.0)

    @property
    def rarest(self) -> int:
        """The fewest validation rows of the positive class of two, or of the rarest class that has any."""
        sizes = filter(None, (class_sizes(record, "val") for record in self.scored))
        return min((rows[1] if len(rows) == 2 else min(filter(None, rows), default=0) for rows in sizes), default=0)


@dataclass(frozen=True)
class Gap:
    """Ours minus published with Welch's interval and its verdict; `constant` is `best_constant`, with its verdict."""

    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    word: str | None = None
    ticked: bool = False  # reproduced or close, and no constant prediction earns as good a verdict
    constant: float | None = None
    constant_word: str | None = None


@dataclass(kw_only=True)
class Cell:
    """One number of a table: the command that makes it, the published number, and our trials."""

    block: str
    row: str
    column: str
    request: Options  # the command's values without its preset: dataset, loss, protocol, loss.beta, …
    score: str  # "test.f1_pos", or "thresholds.test.f1_pos": the mean over decision thresholds
    position: int | None = None  # the class of a score that has one value per class
    published: papers.Published | None = None
    asked: int | None = None  # how many trials the table needs
    ideal: Options = field(default_factory=dict)  # preferred settings; trials without them are second best
    grid: Grid | None = None  # what the table's rows are searched over; None: the protocol's grid
    rule: str = "val_loss"  # that selects the setting
    command_preset: str = "paper"  # of the command that fills it
    config_dir: str | None = None  # the user's own configs
    trained: dict[str, Trials] = field(default_factory=dict)  # by preset, as their values tell; "": no or any preset

    @property
    def dataset(self) -> str:
        return str(self.request["dataset"])

    @property
    def loss(self) -> str:
        return str(self.request["loss"])

    @property
    def trains_networks(self) -> bool:
        return not compose.is_classical(self.loss, self.config_dir)

    @property
    def shown(self) -> Trials:
        return next(iter(self.trained.values()), Trials())

    @property
    def preset(self) -> str | None:
        return next(iter(self.trained), None) or None

    @property
    def values(self) -> Mapping[int, float]:
        return self.shown.values

    @property
    def findings(self) -> list[str]:
        return papers.findings_of(self.published) if self.published else []

    @property
    def measure(self) -> str:
        """The score without its decision rule: a different rule does not make it a different measure."""
        return self.score.partition(".")[2] if self.score.startswith(DECISION_PREFIXES) else self.score

    @cached_property
    def summary(self) -> statistics.Summary:
        return statistics.summarize([*self.values.values()])

    @cached_property
    def gap(self) -> Gap:
        return gap_of(self)

    @property
    def marks(self) -> str:
        shown, unusual = self.shown, [self.preset, self.shown.search]
        unusual += ["whole split"] * (not shown.is_ideal) + ["several"] * (shown.settings > 1)
        return "".join(MARKS[name][0] for name in unusual if name in MARKS)

    def composed(self, preset: str) -> Settings | None:
        """The settings of a run under a preset; None if the preset lacks a key, such as a cooling rate."""
        grid = {"protocol.grid": self.grid.to_json()} if self.grid else {}
        return composed(json.dumps(self.request | grid), preset, self.config_dir)


@lru_cache(maxsize=1 << 14)
def composed(request: str, preset: str, config_dir: str | None) -> Settings | None:
    """The settings of a command, which is given as JSON; None if it cannot be carried out."""
    folder = {"config_dir": config_dir} if config_dir else {}
    try:
        with without_imports():  # the parameters may come from someone else's record
            return compose.settings(Command({**json.loads(request), **folder, "preset": preset}))
    except (ConfigError, ValueError):
        return None


def fill(cell: Cell, catalogue: Catalogue, accepted: Sequence[str]) -> None:
    """Put the trials of the selected settings into a cell, by preset.

    If no trial has the cell's score, those of the usual splits that failed or lack it are kept instead.
    """
    known: set[str] = set()  # a family counts for the fullest preset that trains like it
    without_values: list[Trials] = []
    for preset in accepted:
        if (settings := cell.composed(preset)) is None:
            continue
        families = [f for f in matching(cell, settings, catalogue) if f[0].family not in known]
        known |= {family[0].family for family in families}
        found = [trials for family in families for trials in chosen_settings(of_command(family, settings), cell)]
        usual: tuple[SplitSeed, ...] = ("trial", 0) if settings.protocol.new_split else (0, "trial")
        without_values += [trials for trials in found if not trials.values and trials.split in usual]
        with_values = [trials for trials in found if trials.values]
        own = next((split for split in usual if any(trials.split == split for trials in with_values)), None)
        if own is None:
            continue
        shown = over_splits(own, with_values)
        cell.trained[preset] = replace(shown, search=searched_as(settings, shown.family, catalogue))
    if without_values and not cell.trained:
        cell.trained[""] = max(without_values, key=lambda trials: (trials.is_ideal, trials.failed))


def matching(cell: Cell, settings: Settings, catalogue: Catalogue) -> list[Family]:
    """The families of records that a cell's command makes, on all classes: part of Caltech256 is not Caltech256."""
    ignored = frozenset((IGNORED - cell.request.keys()) | cell.ideal.keys())
    if settings.loss.options.get("average") is None:  # the record holds the average resolved from the data
        ignored |= {"loss.average"}
    found = catalogue.alike(settings.science(settings.dataset.recorded, None), ignored)
    classes = [len(next(iter(family[0].confusion.values()), ())) for family in found]  # 0: it has no matrix
    return [f for f, n in zip(found, classes, strict=True) if n in (0, papers.MULTICLASS.get(cell.dataset, n))]


def of_command(family: Family, settings: Settings) -> Family:
    """The records of a family that a command makes: at the cooling rates that it may have, and without a search only
    those at its own point, if there are any; other points were set by hand."""
    rates: set[Json] = {p["r"] for p in settings.grid() if "r" in p} if settings.searched else set()
    rates = {None, *(rates or {settings.annealing.r})}
    kept = [record for record in family if record.config.annealing.to_json().get("r") in rates]
    if not settings.searched:
        point = point_of(settings.science(settings.dataset.recorded, None))
        kept = [record for record in kept if point_of(record.config) == point] or kept
    return kept


def chosen_settings(family: Family, cell: Cell, every: bool = False) -> Iterator[Trials]:
    """The setting that the rule chooses; with `every`, each setting of a family that was never searched."""
    trials = sorted((record for record in family if record.stage == "trial"), key=lambda record: record.seed)
    key = records.select(family, cell.rule)
    keys = [key] if key else []
    if key is None and not searched(family):
        keys = list(dict.fromkeys(record.key for record in family if record.stage == "trial"))
        if not every:  # a rule chooses only among successes
            keys = keys[:1] if all(record.status == "failed" for record in family) else []
    for key in keys:
        own = [record for record in trials if record.key == key]
        values = {r.seed: value for r in own if (value := score(r, cell.score, cell.position)) is not None}
        yield Trials(values, own, is_ideal(family[0], cell.ideal), family)


def is_ideal(record: Record, ideal: Options) -> bool:
    """True if a record was made with these settings."""
    config = record.config.to_json()
    places = ((name.split("."), value) for name, value in ideal.items())
    return all(config[section].get(key) == value for (section, key), value in places)  # type: ignore[union-attr]


def over_splits(own: SplitSeed, found: Sequence[Trials]) -> Trials:
    """The setting to show of one split, with its mean score on each split.

    With a split per trial only those trials count: several trials of one split would give it more weight.
    """
    best: dict[SplitSeed | None, Trials] = {}
    for trials in sorted(found, key=lambda trials: (trials.is_ideal, len(trials.values), trials.key)):
        best[trials.split] = trials
    splits: dict[SplitSeed, float] = {}
    if "trial" in best:
        splits = dict(best["trial"].values)  # type: ignore[arg-type]
    elif len(best) > 1:
        splits = {split or 0: math.fsum(t.values.values()) / len(t.values) for split, t in best.items()}
    fitting = sum(trials.split == own and trials.is_ideal == best[own].is_ideal for trials in found)
    return replace(best[own], splits=splits, settings=fitting)


def grid_points(settings: Settings) -> set[Point]:
    """The points that a command searches; axes that are not searched have their fixed value."""
    fixed = {name: getattr(settings.hyper, name) for name in AXES[:-1]} | {"r": None}
    return {tuple((fixed | p)[name] for name in AXES) for p in settings.grid()} if settings.searched else set()


def searched_as(settings: Settings, family: Family, catalogue: Catalogue) -> str | None:
    """How the grid was searched: "grid", "halving", "part", "wider", "other"; None if there is nothing to search.

    The rounds of successive halving differ in their epochs.
    """
    grid, tried = grid_points(settings), searched(family)
    if not grid:
        return None
    if grid <= tried:
        return "grid" if grid == tried else "wider"
    if tried - grid:
        return "other"
    rounds = catalogue.alike(family[0].config, frozenset({"protocol.max_epochs"}))
    return "halving" if tried and grid <= set[Point]().union(*map(searched, rounds)) else "part"


def gap_of(cell: Cell) -> Gap:
    """A cell against its published number; with fewer than two trials, which have no spread, without an interval."""
    if not cell.published or not cell.values:
        return Gap()
    paper, mean, constant = cell.published, cell.summary.mean or 0.0, best_constant(cell)
    ours, other = (
        statistics.welch(values, paper.mean, paper.std) if len(values) > 1 else None
        for values in ([*cell.values.values()], constant)
    )
    word, constant_word = (interval and statistics.verdict(interval) for interval in (ours, other))
    good = {"reproduced": ("reproduced",), "close": ("reproduced", "close")}
    ticked = word in good and constant_word not in good[word]
    middle = math.fsum(constant) / len(constant) if constant else None
    low, high = ours or (None, None)
    return Gap(mean - paper.mean, low, high, word, ticked, middle, constant_word)


def best_constant(cell: Cell) -> list[float]:
    """The score of always predicting one class, trial by trial, for the class that comes closest to the paper.

    Not for the class that scores highest: if a paper publishes F1 0.00, the rival is "never positive".
    """
    sizes = [rows for record in cell.shown.scored if (rows := class_sizes(record, "test"))]
    if not sizes or not cell.published:
        return []
    scores = constant_scores(cell.score.rpartition(".")[2], sizes, cell.position)
    return scores[:, np.abs(scores.mean(0) - cell.published.mean).argmin()].tolist()


def constant_scores(name: str, actual: Sequence[Sequence[int]], position: int | None = None) -> np.ndarray:
    """A score [n, d] of always predicting each of d classes, given how many rows [n, d] the classes have."""
    rows = np.array(actual, dtype=float)[:, None] * np.ones((len(actual[0]), 1))  # [n, predicted class, class]
    chosen = np.eye(rows.shape[-1])
    counts = Margins(rows * chosen, rows, rows.sum(-1, keepdims=True) * chosen)
    scores = MEANS[name](counts, 1 if rows.shape[-1] == 2 else None)
    return scores if position is None else scores[..., position]


def decided(score: str, decision: str) -> str:
    """The name of an argmax score under the decision rule made for it: "plugin" or "expected".

    >>> decided("test.f1_pos", "plugin")
    'plugin_f1.test.f1_pos'
    """
    made_for = TUNED_FOR[choose(f"score with the decision {decision}", score.removeprefix("test."), TUNED_FOR)]
    return f"{decision}_{made_for}.{score}"


def typed_command(cell: Cell) -> Command:
    """The command that fills a cell, without its preset; it sets the grid axes where the table's differ."""
    command = Command(cell.request | cell.ideal)
    if not cell.grid or not cell.request.get("protocol") or not cell.trains_networks:
        return command
    usual = compose.from_file(Protocol, "protocol", str(cell.request["protocol"]), cell.config_dir).grid
    kind = compose.from_file(DatasetSection, "dataset", cell.dataset, cell.config_dir).kind
    axes: Options = {
        f"protocol.grid.{name}": list(getattr(cell.grid, name))
        for name in ("lr", "dropout", "r")
        if getattr(cell.grid, name) != getattr(usual, name)
    }
    sizes, others = (grid.batch_sizes(cell.dataset, kind, cell.loss) for grid in (cell.grid, usual))
    return command.but(axes | ({"protocol.grid.batch_size": {cell.dataset: list(sizes)}} if sizes != others else {}))


def command(cell: Cell) -> str:
    """The command that fills a cell, as one types it in a shell."""
    automatic = "paper" if cell.dataset in PAPER_DATASETS else "quick"
    options: Options = {"preset": cell.command_preset} if cell.command_preset != automatic else {}
    options |= {"selection": cell.rule} if cell.rule != "val_loss" else {}
    folder = ["--config-dir", cell.config_dir] if cell.config_dir else []
    return shlex.join(["east-run", *folder, *typed_command(cell).but(options).words])
