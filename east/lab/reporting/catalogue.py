"""The records of a results folder by their settings: what tables look up, and the scores that they read.

Records are alike if their settings are equal apart from some keys. That decides which records fill a cell, which
preset they were trained by, and which points of a grid were searched; a preset's label never does.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from east.lab.experiment.record import Record
from east.lab.settings import identity
from east.lab.settings.settings import Science
from east.lab.training.scores import Margins

AXES = (*identity.SEARCHED, "r")  # of a grid
Point: TypeAlias = tuple[float | None, ...]  # values of AXES
SplitSeed: TypeAlias = int | str  # "trial": every trial has its own split
Family: TypeAlias = Sequence[Record]  # the points of one search and the trials of the chosen one; nothing else differs


class Catalogue:
    """The records of a folder, family by family."""

    def __init__(self, records: Iterable[Record]):
        families: dict[str, list[Record]] = {}
        for record in records:
            families.setdefault(record.family, []).append(record)
        self.families = list(families.values())
        self._by_names: dict[tuple[str, str, str], list[Family]] = {}
        for family in self.families:
            self._by_names.setdefault(names_of(family[0].config), []).append(family)
        self._indexes: dict[Any, dict[str, list[Family]]] = {}

    def alike(self, config: Science, ignored: frozenset[str]) -> list[Family]:
        """The families with these settings, except in the ignored keys and in what a search varies."""
        names = names_of(config)
        if (names, ignored) not in self._indexes:
            index = self._indexes[names, ignored] = {}
            for family in self._by_names.get(names, ()):
                index.setdefault(_identity_without(ignored, family[0].config), []).append(family)
        return self._indexes[names, ignored].get(_identity_without(ignored, config), [])


def names_of(config: Science) -> tuple[str, str, str]:
    """Dataset, loss and protocol."""
    return config.dataset.name, config.loss.name, config.protocol.name


def _identity_without(ignored: frozenset[str], config: Science) -> str:
    """A family's hash that does not depend on some keys, written as "section.key"."""
    sections = ((name, values) for name, values in config.to_json().items() if isinstance(values, dict))
    return identity.family(
        {name: {key: v for key, v in values.items() if f"{name}.{key}" not in ignored} for name, values in sections}
    )


def searched(family: Family) -> set[Point]:
    """The points of the grid that a search tried."""
    return {point_of(r.config) for r in family if r.stage == "search" and r.status == "done"}


def point_of(config: Science) -> Point:
    """The values of a config on the axes of the grid."""
    values = config.annealing.to_json() | config.hyper.to_json()
    return tuple(values.get(name) for name in AXES)  # type: ignore[misc]


def score(record: Record, name: str, position: int | None) -> float | None:
    """A score such as "thresholds.test.f1_pos", or None; `position` is the class of one with a value per class."""
    *rule, split, metric = name.split(".")
    judged: Mapping[str, Any] = record.decisions.get(rule[0], {}) if rule else {"scores": record.scores}
    value = judged.get("scores", {}).get(split, {}).get(metric) if record.status == "done" else None
    if isinstance(value, list):
        return value[position] if position is not None and position < len(value) else None
    return value


def class_sizes(record: Record, split: str) -> list[int]:
    """How many rows of a split each class has; empty if the record does not tell."""
    matrix = record.confusion.get(split)
    return Margins.of([matrix]).actual[0].astype(int).tolist() if matrix else []
