"""Records as tables see them, grouped by what a cell looks for. Only `Entry` knows the layout of a record."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from east.lab.experiment.record import Record
from east.lab.reporting import papers
from east.lab.settings import identity
from east.lab.settings.identity import Json
from east.lab.settings.sections import Science
from east.lab.training.scores import Margins, Matrix

AXES = (*identity.SEARCHED, "r")  # of a grid
LIMITS = ("max_epochs", "stage_epochs")  # why a trial that was still improving stopped

Point: TypeAlias = tuple[float | None, ...]  # values of AXES
SplitSeed: TypeAlias = int | str  # "trial": every trial has its own split


@dataclass(frozen=True, eq=False)
class Entry:
    """One record."""

    record: Record

    @property
    def config(self) -> Science:
        return self.record.config

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
        """Whether it is a trial, not part of a search, whose test scores are never shown."""
        return self.record.stage == "trial"

    @property
    def label(self) -> str | None:
        """The preset that the run was started with, even if its command changed other settings."""
        return self.config.preset

    @property
    def split(self) -> SplitSeed:
        return self.config.split.seed

    @property
    def at_limit(self) -> bool:
        """Whether training ended at an epoch limit."""
        return self.record.stopped in LIMITS

    @property
    def point(self) -> Point:
        """Its values on the axes of the grid."""
        return _point(self.sections["hyper"], self.sections["annealing"])

    @property
    def sections(self) -> dict[str, dict[str, Json]]:
        """The settings as stored, section by section, without defaults."""
        return _sections(self.config)

    @property
    def actual(self) -> list[int]:
        """Test rows of each class; empty for a failed trial and for a search."""
        return actual(self.record.confusion.get("test", ()))

    def has_all_classes(self, dataset: str) -> bool:
        """Whether it has all classes of the papers' dataset: part of Caltech256 is not Caltech256."""
        classes = len(next(iter(self.record.confusion.values()), ()))
        return not classes or classes == papers.MULTICLASS.get(dataset, classes)

    @property
    def overlap(self) -> float:
        """Test rows / training rows; 0 if the record does not tell."""
        sizes = self.record.data.get("sizes")
        return sizes["test"] / sizes["train"] if isinstance(sizes, dict) and sizes.get("train") else 0.0  # type: ignore[operator]

    @property
    def rarest(self) -> int | None:
        """Validation rows of the positive class of two, or of the rarest class that has any."""
        rows = actual(self.record.confusion.get("val", ()))
        return rows[1] if len(rows) == 2 else min(filter(None, rows), default=None)

    def value(self, score: str, position: int | None) -> float | None:
        """A score such as "thresholds.test.f1_pos"; None if the trial failed or does not have it."""
        *rule, split, name = score.split(".")
        decision = self.record.decisions.get(rule[0]) if rule else None
        scores = decision.get("scores", {}) if decision else {} if rule else self.record.scores
        value = scores.get(split, {}).get(name) if self.done else None
        if isinstance(value, list):
            return value[position] if position is not None and position < len(value) else None
        return value

    @cached_property
    def family_of_any_length(self) -> str:
        """The family regardless of the number of epochs: the rounds of successive halving share it."""
        protocol = {name: value for name, value in self.sections["protocol"].items() if name != "max_epochs"}
        return identity.family({**self.sections, "protocol": protocol})


def point_of(config: Science) -> Point:
    """The values of a config on the axes of the grid."""
    return _point(config.hyper.to_json(), config.annealing.to_json())


def _point(hyper: Mapping[str, Json], annealing: Mapping[str, Json]) -> Point:
    return tuple((annealing if name == "r" else hyper).get(name) for name in AXES)  # type: ignore[misc]


_SECTIONS: dict[int, tuple[Science, dict[str, dict[str, Json]]]] = {}  # by id of the config, which stays referenced


def _sections(config: Science) -> dict[str, dict[str, Json]]:
    """A config as JSON, cached: the trials of one setting share their config."""
    if id(config) not in _SECTIONS:
        _SECTIONS[id(config)] = config, {name: getattr(config, name).to_json() for name in identity.SECTIONS}
    return _SECTIONS[id(config)][1]


Family: TypeAlias = list[Entry]  # the points of one search, and the trials of the chosen point


class Catalogue:
    """The records by dataset, loss and protocol."""

    def __init__(self, records: Iterable[Record]):
        self.entries = [Entry(record) for record in records]
        families: dict[str, Family] = {}
        for entry in self.entries:
            families.setdefault(entry.family, []).append(entry)
        self.families: dict[tuple[str, str, str | None], list[Family]] = {}
        for family in families.values():
            self.families.setdefault(names_of(family), []).append(family)

    def searched_at_any_length(self, family: Family) -> set[Point]:
        """Points searched in a family or in one that differs only in epochs, like the rounds of successive halving."""
        length_free = family[0].family_of_any_length
        relatives = self.families[names_of(family)]
        rounds = (other for other in relatives if other[0].family_of_any_length == length_free)
        return {entry.point for other in rounds for entry in other if entry.done and not entry.is_trial}


def names_of(family: Family) -> tuple[str, str, str]:
    """Dataset, loss and protocol."""
    config = family[0].config
    return config.dataset.name, config.loss.name, config.protocol.name


def actual(matrix: Matrix) -> list[int]:
    """How many rows each true class has."""
    return Margins.of([matrix]).actual[0].astype(int).tolist() if len(matrix) else []
