"""A table's cells: which records fill each, and how it compares with the published number. Nothing here needs torch.

A cell finds the families of records that its command makes under each preset, lets the selection rule choose one
setting of each, and shows the trials of the fullest preset on record.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

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
    overlap,
    point_of,
    score,
)
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.settings.compose import PAPER_DATASETS
from east.lab.settings.identity import Json
from east.lab.settings.settings import DatasetSection, Grid, Protocol, Settings

PRESETS = ("paper", "patience", "half", "budget", "lean", "quick")  # from the fullest to the quickest
CUSTOM = "custom"  # training settings of no preset
MARKS = {
    "▽": "the paper's patience: Darknet-19 at half width in mixed precision, no search and at most 400 epochs.",
    "△": "half training: Darknet-19 at half width in mixed precision, no search and at most 30 epochs.",
    "†": "budget training: a smaller grid, a shorter patience and at most 300 epochs.",
    "¶": "lean training: a few points of the grid and at most 40 epochs.",
    "‡": "quick training: no search and at most 20 epochs.",
    "◇": "training settings of no preset.",
    "◊": "not searched over the whole grid.",
    "½": "searched over the whole grid by successive halving.",
    "+": "searched over the preset's grid and more points.",
    "≠": "searched over other points than the preset's grid.",
    "‖": "validation loss of the whole split, where the released code averages over batches.",
    "§": "the records hold several settings that fit; the one with the most trials is shown.",
}
PRESET_MARKS = {"patience": "▽", "half": "△", "budget": "†", "lean": "¶", "quick": "‡", CUSTOM: "◇"}
SEARCH_MARKS = {"part": "◊", "halving": "½", "wider": "+", "other": "≠"}
# What may differ between a record and a command, besides what a search varies.
IGNORED = frozenset(("dataset.fingerprint", "dataset.path", "split.seed", "loss.code", "model.code"))
LIMITS = ("max_epochs", "stage_epochs")  # why a trial that was still improving stopped

DECISION_PREFIXES = ("plugin_", "expected_")  # of scores under a rule other than argmax
# Scores -> the metric that a decision rule for them is made for.
TUNED_FOR = {"f1_pos": "f1", "f1_macro": "f1", "accuracy": "accuracy", "mcc": "mcc", "gmean": "gmean"}

Options: TypeAlias = dict[str, JsonValue]  # command-line values by name

summarize = lru_cache(maxsize=1 << 16)(statistics.summarize)  # a table asks for a cell's summary many times


@dataclass(frozen=True)
class Trials:
    """The trials of one setting, as a cell sees them."""

    values: Mapping[int, float] = field(default_factory=dict)  # seed -> score
    records: Sequence[Record] = ()  # of all trials, also failed ones
    is_ideal: bool = True  # trained with the settings of the cell's `ideal`
    family: Family | None = None
    search: str | None = None  # "grid", "halving", "part", …, see `searched_as`; None: nothing to search
    settings: int = 0  # how many families of records fit
    splits: Mapping[tuple[SplitSeed, int], float] = field(default_factory=dict)  # (split, seed) -> score, over splits

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
        """Test rows / training rows, see `statistics.t_interval`."""
        return max(map(overlap, self.scored), default=0.0)

    @property
    def rarest(self) -> int | None:
        """The fewest validation rows of the positive class of two, or of the rarest class that has any."""
        sizes = filter(None, (class_sizes(record, "val") for record in self.scored))
        least = (rows[1] if len(rows) == 2 else min(filter(None, rows), default=None) for rows in sizes)
        return min((count for count in least if count is not None), default=None)

    @property
    def sources(self) -> list[str]:
        return sorted({record.source for record in self.records})


NOTHING = Trials()


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
    listed: Family | None = None  # in a table without rows: these records, however they were trained
    trained: dict[str, Trials] = field(
        default_factory=dict
    )  # by preset, judged by the records' values; the first is shown

    @property
    def dataset(self) -> str:
        return str(self.request["dataset"])

    @property
    def loss(self) -> str:
        return str(self.request["loss"])

    @property
    def protocol(self) -> str | None:
        name = self.request.get("protocol")
        return str(name) if name else None

    @property
    def trains_networks(self) -> bool:
        return not compose.is_classical(self.loss, self.config_dir)

    @property
    def shown(self) -> Trials:
        return next(iter(self.trained.values()), NOTHING)

    @property
    def preset(self) -> str | None:
        return next(iter(self.trained), None) if self.values else None

    @property
    def values(self) -> Mapping[int, float]:
        return self.shown.values

    @property
    def findings(self) -> list[str]:
        return papers.findings_of(self.published) if self.published else []

    @property
    def measure(self) -> str:
        """The score without its decision rule: a different rule does not make it a different measure."""
        row = f" of {self.row}" if self.score.endswith(".trained_for") else ""  # each row has its own metric
        return (self.score.partition(".")[2] if self.score.startswith(DECISION_PREFIXES) else self.score) + row

    @property
    def summary(self) -> statistics.Summary:
        return summarize(tuple(self.values.values()))

    @property
    def difference(self) -> float | None:
        mean = self.summary.mean
        return mean - self.published.mean if mean is not None and self.published else None

    @property
    def interval(self) -> statistics.Interval | None:
        """Interval of ours minus published; None with fewer than two trials, which have no spread."""
        return self._against_published(list(self.values.values()))

    @property
    def word(self) -> str | None:
        return statistics.verdict(self.interval) if self.interval else None

    @property
    def constant(self) -> list[float]:
        return best_constant(self) if self.published else []

    @property
    def constant_word(self) -> str | None:
        """The verdict on always predicting one class; see `best_constant`."""
        interval = self._against_published(self.constant)
        return statistics.verdict(interval) if interval else None

    @property
    def ticked(self) -> bool:
        """Reproduced or close, and no constant prediction earns as good a verdict."""
        good = ("reproduced", "close")
        return self.word in good and self.constant_word not in good[: good.index(self.word) + 1]

    @property
    def marks(self) -> str:
        search = SEARCH_MARKS.get(self.shown.search or "", "")
        others = ("" if self.shown.is_ideal else "‖") + ("§" if self.shown.settings > 1 else "")
        return PRESET_MARKS.get(self.preset or "", "") + search + others

    @cached_property
    def axes(self) -> Options:
        """The grid axes that the command must set, because the table differs there from the protocol."""
        if not self.grid or not self.protocol or not self.trains_networks:
            return {}
        usual = compose.from_file(Protocol, "protocol", self.protocol, self.config_dir).grid
        names = ("lr", "dropout", "r")
        axes: Options = {
            f"protocol.grid.{name}": list(getattr(self.grid, name))
            for name in names
            if getattr(self.grid, name) != getattr(usual, name)
        }
        kind = compose.from_file(DatasetSection, "dataset", self.dataset, self.config_dir).kind
        sizes, others = (grid.batch_sizes(self.dataset, kind, self.loss) for grid in (self.grid, usual))
        return axes | ({"protocol.grid.batch_size": {self.dataset: list(sizes)}} if sizes != others else {})

    def composed(self, preset: str) -> Settings | None:
        """The settings of a run under a preset; None if the preset lacks a key, such as a cooling rate."""
        grid = {"protocol.grid": self.grid.to_json()} if self.grid else {}
        return composed(json.dumps(self.request | grid), preset, self.config_dir)

    def _against_published(self, values: Sequence[float]) -> statistics.Interval | None:
        if len(values) < 2 or not self.published:
            return None
        return statistics.welch(values, self.published.mean, self.published.std)


@lru_cache(maxsize=1 << 14)
def composed(request: str, preset: str, config_dir: str | None) -> Settings | None:
    """The settings of a command, which is given as JSON; None if it cannot be carried out."""
    folder = {"config_dir": config_dir} if config_dir else {}
    try:
        with without_imports():  # the parameters may come from someone else's record
            return compose.settings(Command({**json.loads(request), **folder, "preset": preset}))
    except (ConfigError, ValueError):
        return None


def fill(cell: Cell, catalogue: Catalogue, accepted: Sequence[str], all_presets: bool = True) -> None:
    """Put the trials of the selected settings into a cell by preset: of the fullest one alone, or of all accepted ones.

    If no trial has the cell's score, those of the usual splits that failed or lack it are kept instead.
    """
    known: set[Family] = set()  # a family counts for the fullest preset that trains like it
    without_values: list[Trials] = []
    for preset in accepted:
        if (settings := cell.composed(preset)) is None:
            continue
        families = [
            f for f in matching(cell, settings, catalogue) if f not in known and f.has_all_classes(cell.dataset)
        ]
        known |= {*families}
        kept = [part for family in families if (part := of_command(family, settings)).records]
        found = [trials for family in kept for trials in chosen_settings(family, cell)]
        usual: tuple[SplitSeed, ...] = ("trial", 0) if settings.protocol.new_split else (0, "trial")
        without_values += [trials for trials in found if not trials.values and trials.split in usual]
        with_values = [trials for trials in found if trials.values]
        own = next((split for split in usual if any(trials.split == split for trials in with_values)), None)
        if own is None:
            continue
        shown = over_splits(own, with_values)
        search = searched_as(grid_points(settings), shown.family, catalogue) if cell.protocol and shown.family else None
        cell.trained[preset] = replace(shown, search=search)
        if not all_presets:
            return
    if without_values and not cell.trained:
        cell.trained[CUSTOM] = max(without_values, key=lambda trials: (trials.is_ideal, trials.failed))


def matching(cell: Cell, settings: Settings, catalogue: Catalogue) -> list[Family]:
    """The families of records that a cell's command makes."""
    ignored = frozenset((IGNORED - cell.request.keys()) | cell.ideal.keys())
    if settings.loss.options.get("average") is None:  # the record holds the average resolved from the data
        ignored |= {"loss.average"}
    return catalogue.alike(settings.science(settings.dataset.recorded, None), ignored)


def of_command(family: Family, settings: Settings) -> Family:
    """The records of a family that a command makes: at the cooling rates that it may have, and without a search only
    those at its own point, if there are any; other points were set by hand."""
    searched: set[Json] = {p["r"] for p in settings.grid() if "r" in p} if settings.searched else set()
    rates = {None, *(searched or {settings.annealing.r})}
    kept = [record for record in family.records if record.config.annealing.to_json().get("r") in rates]
    if not settings.searched:
        point = point_of(settings.science(settings.dataset.recorded, None))
        kept = [record for record in kept if point_of(record.config) == point] or kept
    return Family(kept)


def chosen_settings(family: Family, cell: Cell) -> Iterator[Trials]:
    """The setting that the rule chooses; of a family that is listed but was never searched, every setting."""
    key = records.select(family.records, cell.rule)
    keys = [key] if key else []
    if key is None and not family.searched:
        tried = list(dict.fromkeys(record.key for record in family.trials))
        none_done = all(record.status == "failed" for record in family.records)  # a rule chooses only among successes
        keys = tried if cell.listed else tried[:1] if none_done else []
    ideal = [(name.split("."), value) for name, value in cell.ideal.items()]
    is_ideal = all(getattr(family.config, section).to_json().get(key) == value for (section, key), value in ideal)
    for key in keys:
        trials = sorted((r for r in family.trials if r.key == key), key=lambda record: record.seed)
        values = {r.seed: value for r in trials if (value := score(r, cell.score, cell.position)) is not None}
        yield Trials(values, trials, is_ideal, family)


def over_splits(own: SplitSeed, found: Sequence[Trials]) -> Trials:
    """The setting to show of one split, with its scores on all splits.

    With a split per trial only those trials count: several trials of one split would give it more weight.
    """
    best: dict[SplitSeed | None, Trials] = {}
    for trials in sorted(found, key=lambda trials: (trials.is_ideal, len(trials.values), trials.key)):
        best[trials.split] = trials
    splits: dict[tuple[SplitSeed, int], float] = {}
    if "trial" in best:
        splits = {(seed, seed): value for seed, value in best["trial"].values.items()}
    elif len(best) > 1:
        splits = {(split or 0, seed): v for split, trials in best.items() for seed, v in trials.values.items()}
    fitting = sum(trials.split == own and trials.is_ideal == best[own].is_ideal for trials in found)
    return replace(best[own], splits=splits, settings=fitting)


def grid_points(settings: Settings) -> set[Point]:
    """The points that a command searches; axes that are not searched have their fixed value."""
    fixed = {name: getattr(settings.hyper, name) for name in AXES[:-1]} | {"r": None}
    return {tuple((fixed | p)[name] for name in AXES) for p in settings.grid()} if settings.searched else set()


def searched_as(grid: set[Point], family: Family, catalogue: Catalogue) -> str | None:
    """How the grid was searched: "grid", "halving", "part", "wider", "other"; None if there is nothing to search.

    The rounds of successive halving differ in their epochs.
    """
    searched = family.searched
    if not grid:
        return None
    if grid <= searched:
        return "grid" if grid == searched else "wider"
    if searched - grid:
        return "other"
    rounds = catalogue.alike(family.config, frozenset({"protocol.max_epochs"}))
    return "halving" if searched and grid <= set[Point]().union(*(other.searched for other in rounds)) else "part"


def best_constant(cell: Cell) -> list[float]:
    """The score of always predicting one class, trial by trial, for the class that comes closest to the paper.

    Not for the class that scores highest: if a paper publishes F1 0.00, the rival is "never positive".
    """
    counts = [rows for record in cell.shown.scored if (rows := class_sizes(record, "test"))]
    if not counts or not cell.published:
        return []
    name, published = cell.score.rpartition(".")[2], cell.published.mean
    scores = [[constant_score(name, c, k, cell.position) for c in counts] for k in range(len(counts[0]))]
    known = [[score for score in row if score is not None] for row in scores]
    return min(known, key=lambda row: abs(sum(row) / max(len(row), 1) - published))


def constant_score(name: str, actual: Sequence[int], k: int, position: int | None = None) -> float | None:
    """A score of always predicting class k, given the test rows `actual` of each class; None for other scores.

    >>> constant_score("accuracy", [90, 10], 0), constant_score("f1_pos", [90, 10], 0)
    (0.9, 0.0)
    """
    share = actual[k] / sum(actual)
    fbeta = lambda beta: (1 + beta**2) * share / (1 + beta**2 * share)  # noqa: E731
    of_positive = {"f1_pos": 1, "f2_pos": 2, "f3_pos": 3}
    if name in of_positive:
        return fbeta(of_positive[name]) if k == 1 else 0.0
    if name in ("precision", "recall"):
        return (share if name == "precision" else float(actual[k] > 0)) if k == position else 0.0
    if name in ("balanced_accuracy", "auroc_thresholded"):
        return 1 / sum(count > 0 for count in actual) if actual[k] else 0.0
    return {"accuracy": share, "f1_macro": fbeta(1) / len(actual), "mcc": 0.0}.get(name)


def decided(score: str, decision: str) -> str:
    """The name of an argmax score under the decision rule made for it: "plugin" or "expected".

    >>> decided("test.f1_pos", "plugin")
    'plugin_f1.test.f1_pos'
    """
    made_for = TUNED_FOR[choose(f"score with the decision {decision}", score.removeprefix("test."), TUNED_FOR)]
    return f"{decision}_{made_for}.{score}"


def typed_command(cell: Cell) -> Command:
    """The command that fills a cell, without its preset."""
    return Command(cell.request | cell.ideal | cell.axes)


def command(cell: Cell) -> str:
    """The command that fills a cell, as one types it in a shell."""
    automatic = "paper" if cell.dataset in PAPER_DATASETS else "quick"
    options: Options = {"preset": cell.command_preset} if cell.command_preset != automatic else {}
    options |= {"selection": cell.rule} if cell.rule != "val_loss" else {}
    folder = ["--config-dir", cell.config_dir] if cell.config_dir else []
    return shlex.join(["east-run", *folder, *typed_command(cell).but(options).words])
