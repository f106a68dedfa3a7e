"""Which records fill a cell of a table, and what they say beside the published number. Nothing here needs torch.

A cell finds the families of records that fit it, lets the selection rule choose one setting, and shows that setting's
trials: those of the fullest protocol on record. How full a protocol is follows from the values in the records
(patience, limits, cooling, grid), never from the preset's label. `Entry` alone knows how a record is laid out.
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import yaml
from pydantic import JsonValue

from east.choices import CONF, ConfigError, choose
from east.experiment import records
from east.experiment.records import Record
from east.reporting import papers, statistics
from east.settings import identity
from east.settings.command import Command
from east.settings.compose import PAPER_DATASETS, settings
from east.settings.settings import Settings as Composed

PRESETS = ("paper", "budget", "lean", "quick")  # from the fullest to the quickest
CUSTOM = "custom"  # training settings of no preset
MARKS = {
    "†": "budget training: a smaller grid, a shorter patience and at most 300 epochs.",
    "¶": "lean training: a few points of the grid and at most 40 epochs.",
    "‡": "quick training: no search and at most 20 epochs.",
    "◇": "training settings of no preset.",
    "◊": "not searched over the whole grid.",
    "½": "searched over the whole grid by successive halving.",
    "+": "searched over more points than the table's grid.",
    "‖": "validation loss of the whole split, where the released code averages over batches.",
    "§": "the records hold several settings that fit; the one with the most trials is shown.",
}
PRESET_MARKS = {"budget": "†", "lean": "¶", "quick": "‡", CUSTOM: "◇"}
SEARCH_MARKS = {"part": "◊", "halving": "½", "wider": "+"}

DECISIONS = ("plugin_", "expected_")  # how the name of a score begins that a decision rule has changed
TUNED_FOR = {
    "f1_pos": "f1",
    "f1_macro": "f1",
    "accuracy": "accuracy",
    "mcc": "mcc",
    "gmean": "gmean",
}  # score -> the plug-in's metric
LIMITS = ("max_epochs", "stage_epochs")  # how a trial ends that was still improving
COMPARED = ("dataset", "split", "model", "loss", "annealing", "protocol")  # sections that make an experiment
IGNORED = ("dataset.fingerprint", "dataset.path", "split.seed", "annealing.r")  # places, splits, what a search varies
AXES = ("lr", "dropout", "batch_size", "r")

Settings = dict[str, JsonValue]
Point = tuple[JsonValue, ...]  # values of AXES


@dataclass(frozen=True, eq=False)
class Entry:
    """One record as tables see it."""

    record: Record

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings as they are stored, without what has its default."""
        return self.record.config.to_json()

    @property
    def key(self) -> str:
        return self.record.key

    @property
    def family(self) -> str:
        return self.record.family

    @property
    def seed(self) -> int:
        return self.record.seed

    @property
    def done(self) -> bool:
        return self.record.status == "done"

    @property
    def is_trial(self) -> bool:
        """Search records are for choosing a setting; their test scores are never shown."""
        return self.record.stage == "trial"

    @property
    def dataset(self) -> str:
        return self.section("dataset")["name"]

    @property
    def loss(self) -> str:
        return self.section("loss")["name"]

    @property
    def protocol(self) -> str | None:
        return self.section("protocol").get("name")

    @property
    def label(self) -> str | None:
        """The preset that the run was started with, whatever else its command line changed."""
        return self.config.get("preset")

    @property
    def split(self) -> int | str:
        return self.section("split").get("seed", 0)

    @property
    def source(self) -> str:
        return self.record.source

    @property
    def commit(self) -> str | None:
        return self.record.git

    @property
    def at_limit(self) -> bool:
        """Whether training ended at an epoch limit."""
        return self.record.stopped in LIMITS

    @property
    def point(self) -> Point:
        """Where in the grid it is."""
        hyper, rate = self.section("hyper"), self.section("annealing").get("r")
        return (*(hyper.get(name) for name in AXES[:-1]), rate)

    def section(self, name: str) -> Mapping[str, Any]:
        return self.config.get(name) or {}

    @property
    def actual(self) -> list[int]:
        """Test rows of each class; empty where the trial failed."""
        return [sum(row) for row in self.record.confusion.get("test", ())]

    def has_all_classes(self, dataset: str) -> bool:
        """Were all classes of the papers' dataset there? A folder with some of Caltech256's is not Caltech256."""
        classes = len(self.record.confusion.get("test", ()))
        return not classes or classes == papers.MULTICLASS.get(dataset, classes)

    @property
    def rarest(self) -> int | None:
        """Validation rows of the positive class of two, or of the rarest class that has any."""
        rows = [sum(row) for row in self.record.confusion.get("val", ())]
        return rows[1] if len(rows) == 2 else min(filter(None, rows), default=None)

    def value(self, score: str, position: int | None) -> float | None:
        """A score such as "thresholds.test.f1_pos"; None if the trial failed or was not judged by it."""
        *rule, split, name = score.split(".")
        decision = self.record.decisions.get(rule[0]) if rule else None
        scores = decision.get("scores", {}) if decision else {} if rule else self.record.scores
        value = scores.get(split, {}).get(name) if self.done else None
        if value is None and decision and position is not None:
            return mean_over(decision["confusion"][split], name, position)
        if isinstance(value, list):
            return value[position] if position is not None else None
        return value

    def same_but_for_epochs(self) -> str:
        """What the rounds of a search by successive halving have in common."""
        protocol = {name: value for name, value in self.section("protocol").items() if name != "max_epochs"}
        return identity.family({**self.config, "protocol": protocol})


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
    parameters: Settings = field(default_factory=dict)  # of the loss, beyond its config file
    overrides: Settings = field(default_factory=dict)  # of everything else: annealing, dataset.imbalance, …
    ideal: Settings = field(default_factory=dict)  # further overrides; trials without them are second best
    family: str | None = None  # this family of records and no other
    published: papers.Published | None = None
    findings: list[str] = field(default_factory=list)
    trials: int | None = None  # how many the protocol asks for
    values: dict[int, float] = field(default_factory=dict)  # seed -> score
    splits: dict[tuple[int | str, int], float] = field(default_factory=dict)  # (split, seed) -> score, over splits
    constant: list[float] = field(default_factory=list)  # what always predicting one class scores, trial by trial
    failed: int = 0
    capped: bool = False  # more than half of the trials ended at an epoch limit
    settings: int = 0  # how many families of records fit
    split: int | str | None = None  # its seed; "trial": every trial has its own
    rule: str = "val_loss"  # that selected the setting
    tried: bool = False  # its records hold finished trials, whether or not those have this score
    asked: str = "paper"  # the preset of the command that fills it
    preset: str | None = None  # whose training the records had, by their values
    search: str | None = None  # over the preset's grid: "grid", "halving", "part", "wider"; None: nothing to search
    as_asked: bool = True  # with the settings of `ideal`
    rarest: int | None = None  # validation rows of the positive class, or of the rarest that has any
    key: str | None = None
    sources: list[str] = field(default_factory=list)
    commits: set[str] = field(default_factory=set)

    @property
    def recorded(self) -> str:
        """The dataset's name in records: a KEEL set has its own."""
        subset = self.overrides.get("dataset.set")
        return f"{self.dataset}-{subset}" if subset else self.dataset

    @property
    def measure(self) -> str:
        """The score without the rule that decided: it is not another measure."""
        own = f" of {self.row}" if self.score.endswith(".trained_for") else ""  # a metric of its own is no other row's
        return (self.score.partition(".")[2] if self.score.startswith(DECISIONS) else self.score) + own

    @property
    def trains_networks(self) -> bool:
        return self.loss not in papers.BASELINES

    @property
    def summary(self) -> statistics.Summary:
        return statistics.summarize(list(self.values.values()))

    @property
    def papers_protocol(self) -> bool:
        """Trained and searched as the paper says, by the values in the records."""
        return self.preset == "paper" and self.search in (None, "grid") and self.as_asked

    @property
    def difference(self) -> float | None:
        mean = self.summary.mean
        return mean - self.published.mean if mean is not None and self.published else None

    @property
    def interval(self) -> statistics.Interval | None:
        """Of ours minus published; None with fewer than two trials: there is no spread to judge by."""
        return self._against_published(list(self.values.values()))

    @property
    def word(self) -> str | None:
        return statistics.verdict(self.interval) if self.interval else None

    @property
    def constant_word(self) -> str | None:
        """The word that the best constant prediction earns."""
        interval = self._against_published(self.constant)
        return statistics.verdict(interval) if interval else None

    @property
    def ticked(self) -> bool:
        """Reproduced or close, and no constant prediction earns that word or a better one."""
        good = ("reproduced", "close")
        if self.word not in good:
            return False
        return self.constant_word not in good[: good.index(self.word) + 1]

    @property
    def marks(self) -> str:
        search = SEARCH_MARKS.get(self.search or "", "") if self.published else ""
        others = ("" if self.as_asked else "‖") + ("§" if self.settings > 1 else "")
        return PRESET_MARKS.get(self.preset or "", "") + search + others

    def _against_published(self, values: Sequence[float]) -> statistics.Interval | None:
        if len(values) < 2 or not self.published:
            return None
        return statistics.welch(values, self.published.mean, self.published.std)


class Ledger:
    """The records by what a cell looks for."""

    def __init__(self, found: Iterable[Record]):
        self.entries = [Entry(record) for record in found]
        families: dict[str, list[Entry]] = {}
        for entry in self.entries:
            families.setdefault(entry.family, []).append(entry)
        self.families: dict[tuple[str, str, str | None], list[list[Entry]]] = {}
        for family in families.values():
            where = (family[0].dataset, family[0].loss, family[0].protocol)
            self.families.setdefault(where, []).append(family)

    def of(self, cell: Cell) -> list[list[Entry]]:
        known = self.families.get((cell.recorded, cell.loss, cell.protocol), [])
        return [family for family in known if not cell.family or family[0].family == cell.family]

    @cached_property
    def searched(self) -> dict[str, set[Point]]:
        """Points that were searched, with the rounds of successive halving in one place."""
        found: dict[str, set[Point]] = {}
        for entry in self.entries:
            if entry.done and not entry.is_trial:
                found.setdefault(entry.same_but_for_epochs(), set()).add(entry.point)
        return found


@dataclass(frozen=True)
class Candidate:
    """A family's chosen setting, with those of its trials that have the cell's score."""

    as_asked: bool
    key: str
    values: dict[int, float]
    family: list[Entry]

    @property
    def order(self) -> tuple[bool, int, str]:
        return self.as_asked, len(self.values), self.key

    @property
    def trials(self) -> list[Entry]:
        return [entry for entry in self.family if entry.key == self.key and entry.is_trial]


def fill(cell: Cell, ledger: Ledger, rule: str, accepted: Sequence[str]) -> None:
    """Put the trials of the selected setting into a cell: those of the fullest preset that has any."""
    cell.rule = rule
    by_preset: dict[str, list[list[Entry]]] = {}
    for family in ledger.of(cell):
        preset = trained_as(family[0], cell)
        if cell.family:  # listed whatever its training was
            by_preset.setdefault(preset or CUSTOM, []).append(family)
        elif preset and preset in accepted and (asked := composed(cell, preset)):
            kept = [entry for entry in family if _rate_fits(entry, asked)]
            by_preset.setdefault(preset, []).extend([kept] if kept else [])
    for preset in by_preset if cell.family else accepted:
        by_split: dict[int | str, list[Candidate]] = {}
        for family in by_preset.get(preset, ()):
            if candidate := _candidate(family, cell, rule):
                by_split.setdefault(family[0].split, []).append(candidate)
        homes = list(by_split) if cell.family else [split for split in _usual_splits(cell) if split in by_split]
        if homes:
            cell.preset = preset
            _show(cell, homes[0], by_split, ledger)
            return


def _candidate(family: list[Entry], cell: Cell, rule: str) -> Candidate | None:
    key = records.select((entry.record for entry in family), rule)
    trials = [entry for entry in family if entry.key == key and entry.is_trial]
    cell.failed += sum(not entry.done for entry in trials)  # counts where nothing succeeded
    values = {e.seed: value for e in trials if (value := e.value(cell.score, cell.position)) is not None}
    asked = {tuple(name.split(".")): value for name, value in cell.ideal.items()}
    as_asked = all(family[0].section(section).get(name) == value for (section, name), value in asked.items())
    return Candidate(as_asked, key, dict(sorted(values.items())), family) if key and values else None


def _show(cell: Cell, home: int | str, by_split: Mapping[int | str, list[Candidate]], ledger: Ledger) -> None:
    """Fill the cell from its home split; keep the scores on other splits beside."""
    best = {split: max(candidates, key=lambda one: one.order) for split, candidates in by_split.items()}
    shown = best[home]
    cell.split = home
    trials = shown.trials
    scored = [entry for entry in trials if entry.seed in shown.values]
    cell.key, cell.values, cell.as_asked = shown.key, shown.values, shown.as_asked
    cell.failed = sum(not entry.done for entry in trials)
    cell.settings = len(by_split[home])
    cell.rarest = min((entry.rarest for entry in scored if entry.rarest is not None), default=None)
    cell.capped = 2 * sum(entry.at_limit for entry in scored) > len(scored)
    cell.sources = sorted({entry.source for entry in trials})
    cell.commits = {entry.commit for entry in trials if entry.commit}
    cell.search = _search(cell, shown.family, ledger) if cell.published else None
    cell.constant = best_constant(scored, cell) if cell.published else []
    # A comparison over splits is one over splits alone: trials that share a split would weigh that one differently.
    if "trial" in best:
        cell.splits = {(seed, seed): value for seed, value in best["trial"].values.items()}
    elif len(best) > 1:
        cell.splits = {(split, seed): v for split, one in best.items() for seed, v in one.values.items()}


def _usual_splits(cell: Cell) -> tuple[int | str, int | str]:
    """Where the protocol's own trials are, before others."""
    return ("trial", 0) if conf("protocol", cell.protocol)["new_split"] else (0, "trial")


# How full was the protocol?


def trained_as(entry: Entry, cell: Cell) -> str | None:
    """The fullest preset whose command for this cell composes the very settings of the record."""
    if not cell.family:
        fitting = (preset for preset in PRESETS if _fits(entry, cell, preset))
        return next(fitting, None) if entry.has_all_classes(cell.dataset) else None
    if not (entry.protocol and _has_conf("protocol", entry.protocol)):
        return entry.label
    known = [*PRESETS, *([entry.label] if entry.label and _has_conf("preset", entry.label) else [])]
    return next((preset for preset in known if _trained_alike(entry, preset)), None)


def _fits(entry: Entry, cell: Cell, preset: str) -> bool:
    """Whether the record is what the cell's command makes under this preset, at whatever point of its grid."""
    asked = composed(cell, preset)
    if asked is None:
        return False
    science = asked.science(cell.recorded, None).to_json()
    ignored = ({*IGNORED} - {*cell.overrides}) | {*cell.ideal, "annealing.r"}  # a family has several rates
    if asked.loss.options.get("average", "given") is None:  # the record has the one that the data gave it
        ignored.add("loss.average")
    return all(_without(entry.section(s), s, ignored) == _without(science[s], s, ignored) for s in COMPARED)


def _trained_alike(entry: Entry, preset: str) -> bool:
    """Whether the record's protocol, schedule and network are those of a preset."""
    section = entry.section
    dataset = entry.dataset.partition(" (")[0].partition("-")[0]  # keel-abalone19 and "digits (120 rows)" have files
    choices = {"dataset": dataset, "loss": entry.loss, "protocol": entry.protocol}
    if not all(_has_conf(group, str(name)) for group, name in choices.items()):
        return False
    own = {f"loss.{name}": value for name, value in section("loss").items() if name not in ("name", "_target_")}
    asked = _composed(json.dumps({**choices, **own}), preset)
    if asked is None:
        return False
    science, names = asked.science(entry.dataset, None).to_json(), ("protocol", "annealing", "model")
    return all(_without(section(name), name, IGNORED) == _without(science[name], name, IGNORED) for name in names)


def _without(section: Any, name: str, ignored: Iterable[str]) -> dict[str, Any]:
    """A section's JSON without some of its keys, with equal numbers written equally."""
    return identity.plain({key: value for key, value in section.items() if f"{name}.{key}" not in ignored}, float)


def _rate_fits(entry: Entry, asked: Composed) -> bool:
    """A family holds the points of a grid: each must cool at a rate that the command would try, or be told."""
    rate = entry.section("annealing").get("r")
    tried: set[float | None] = {point["r"] for point in asked.grid() if "r" in point} if asked.searched else set()
    return rate is None or rate in (tried or {asked.annealing.r})


def composed(cell: Cell, preset: str) -> Composed | None:
    """The settings of the command that fills a cell, as a run composes them; None if the preset has no such key."""
    needs = {"dataset": cell.dataset, "loss": cell.loss, "protocol": cell.protocol, **cell.overrides}
    needs |= {f"loss.{name}": value for name, value in cell.parameters.items()}
    return _composed(json.dumps(needs), preset)


@cache
def _composed(needs: str, preset: str) -> Composed | None:
    try:
        return settings(Command({**json.loads(needs), "preset": preset}))
    except ConfigError:  # such as annealing.r of a loss that a preset does not cool
        return None


def _search(cell: Cell, family: Sequence[Entry], ledger: Ledger) -> str | None:
    """Which part of the grid was searched before these trials."""
    wanted = grid_points(cell)
    if not wanted:
        return None
    full = {entry.point for entry in family if entry.done and not entry.is_trial}
    if full - wanted:
        return "wider"
    if wanted <= full:
        return "grid"
    shorter = ledger.searched.get(family[0].same_but_for_epochs(), set())
    return "halving" if full and wanted <= shorter else "part"


def grid_points(cell: Cell) -> set[Point]:
    """The points that the cell's command searches under its preset; what the cell fixes is not searched."""
    if cell.preset not in PRESETS or not cell.protocol:
        return set()
    asked = composed(cell, cell.preset)
    if asked is None:
        return set()
    hyper = {name: getattr(asked.hyper, name) for name in AXES[:-1]}
    points = asked.grid() if asked.searched else []
    return {tuple((hyper | {"r": None} | point).get(name) for name in AXES) for point in points}


def _has_conf(group: str, name: str) -> bool:
    return (CONF / group / f"{name}.yaml").is_file()


@cache
def conf(group: str, name: str | None) -> dict[str, Any]:
    """A file of conf/."""
    return yaml.safe_load((CONF / group / f"{name}.yaml").read_text())


# Scores that follow from counts


def best_constant(trials: Sequence[Entry], cell: Cell) -> list[float]:
    """The cell's score of always predicting one class, in each trial: for the class that comes closest to the paper.

    Not for the class that scores highest: where a paper publishes F1 0.00, "never positive" is the one to be told from.
    """
    name = cell.score.rpartition(".")[2]
    counts = [entry.actual for entry in trials if entry.actual]
    if not counts or not cell.published:
        return []
    scores = [[constant_score(name, c, k, cell.position) for c in counts] for k in range(len(counts[0]))]
    known = [[score for score in row if score is not None] for row in scores]
    published = cell.published.mean
    return min(known, key=lambda row: abs(sum(row) / max(len(row), 1) - published))


def constant_score(name: str, actual: Sequence[int], k: int, position: int | None = None) -> float | None:
    """A score of always predicting class k, where `actual` rows of each class are tested; None if it has none.

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


def mean_over(matrices: Sequence[Sequence[Sequence[int]]], name: str, k: int) -> float:
    """Precision or recall of class k, mean over the confusion matrices of several thresholds; 0 where undefined."""
    wholes = [sum(row[k] for row in matrix) if name == "precision" else sum(matrix[k]) for matrix in matrices]
    ratios = [matrix[k][k] / whole if whole else 0.0 for matrix, whole in zip(matrices, wholes, strict=True)]
    return sum(ratios) / len(ratios)


# Words for a cell


def decided(score: str, decision: str) -> str:
    """A score of argmax as that of a decision made for it: "plugin" or "expected".

    >>> decided("test.f1_pos", "plugin")
    'plugin_f1.test.f1_pos'
    """
    made_for = TUNED_FOR[choose(f"score with the decision {decision}", score.removeprefix("test."), TUNED_FOR)]
    return f"{decision}_{made_for}.{score}"


def command(cell: Cell) -> str:
    """The command that fills a cell."""
    words = [f"dataset={cell.dataset}", f"loss={cell.loss}", *([f"protocol={cell.protocol}"] if cell.protocol else [])]
    selection = [f"selection={cell.rule}"] if cell.rule != "val_loss" else []
    further = [f"{name}={on_command_line(value)}" for name, value in settings_of(cell).items()]
    automatic = "paper" if cell.dataset in PAPER_DATASETS else "quick"
    preset = [f"preset={cell.asked}"] if cell.asked != automatic else []
    return shlex.join(["east-run", *words, *further, *preset, *selection])


def settings_of(cell: Cell) -> Settings:
    """What the command line says besides dataset, loss and protocol, such as {"loss.beta": {"dog": 0.25}}."""
    return {f"loss.{name}": value for name, value in cell.parameters.items()} | cell.overrides | cell.ideal


def typed_command(cell: Cell) -> Command:
    """The command that fills a cell, for those who carry it out; without its preset."""
    return Command({"dataset": cell.dataset, "loss": cell.loss, "protocol": cell.protocol, **settings_of(cell)})


def on_command_line(value: JsonValue) -> str:
    """A value as Hydra takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}:{on_command_line(item)}" for name, item in value.items()) + "}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
