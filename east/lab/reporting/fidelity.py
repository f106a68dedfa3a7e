"""How fully a record follows a protocol: its preset, and how much of the grid was searched.

Both are derived from the values in the records (patience, limits, cooling, grid), never from the preset's label.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TypeAlias

from pydantic import JsonValue

from east.choices import ConfigError, groups, without_imports
from east.lab.reporting.entries import AXES, Catalogue, Entry, Family, Point, SplitSeed
from east.lab.settings import compose, identity
from east.lab.settings.command import Command
from east.lab.settings.identity import Json
from east.lab.settings.sections import DatasetSection
from east.lab.settings.settings import Grid, Protocol, Settings

PRESETS = ("paper", "patience", "half", "budget", "lean", "quick")  # from the fullest to the quickest
VARIED = (*(f"hyper.{name}" for name in identity.SEARCHED), "annealing.r")  # by a search
ANSWERS = 1 << 17  # kept in memory: the cells of a row, and several tables, ask the same question about a record
# What may differ between a record and a command.
IGNORED = ("dataset.fingerprint", "dataset.path", "split.seed", "loss.code", "model.code", *VARIED)

Options: TypeAlias = dict[str, JsonValue]


@dataclass(kw_only=True)
class Request:
    """The runs that a cell needs: their command without its preset."""

    dataset: str
    loss: str
    protocol: str | None
    parameters: Options = field(default_factory=dict)  # loss parameters beyond its config file
    overrides: Options = field(default_factory=dict)  # everything else: annealing, dataset.imbalance, …
    ideal: Options = field(default_factory=dict)  # preferred overrides; trials without them are second best
    grid: Grid | None = None  # what the table's rows are searched over; None: the protocol's grid
    family: str | None = None  # only this family of records
    config_dir: str | None = None  # the user's own configs

    @property
    def recorded(self) -> str:
        """The dataset's name in records: a variant has that of its dataset, a KEEL set its own."""
        if self.family:
            return self.dataset  # from a record
        options = {key.removeprefix("dataset."): v for key, v in self.overrides.items() if key.startswith("dataset.")}
        return _dataset(self.dataset, self.config_dir).but(**options).recorded

    @property
    def choices(self) -> Options:
        """The command's values, apart from `ideal` and `grid`."""
        choices: Options = {"dataset": self.dataset, "loss": self.loss}
        choices |= {"protocol": self.protocol} if self.protocol else {}
        return choices | {f"loss.{name}": value for name, value in self.parameters.items()} | self.overrides

    @property
    def command(self) -> str:
        """The command's values as JSON, with the table's grid."""
        return json.dumps(self.choices | ({"protocol.grid": self.grid.to_json()} if self.grid else {}))

    def composed(self, preset: str) -> Settings | None:
        """The settings of a run under a preset; None if the preset lacks a key, such as a cooling rate."""
        return _composed(self.command, preset, self.config_dir)

    @property
    def trains_networks(self) -> bool:
        return not compose.is_classical(self.loss, self.config_dir)

    @property
    def axes(self) -> Options:
        """The grid axes that the command must set, because the table differs there from the protocol."""
        if not self.grid or not self.protocol or not self.trains_networks:
            return {}
        protocol, kind = _protocol(self.protocol, self.config_dir).grid, _dataset(self.dataset, self.config_dir).kind
        axes: Options = {}
        for name in ("lr", "dropout", "r"):
            if getattr(self.grid, name) != getattr(protocol, name):
                axes[f"protocol.grid.{name}"] = list(getattr(self.grid, name))
        sizes = self.grid.batch_sizes(self.dataset, kind, self.loss)
        if sizes != protocol.batch_sizes(self.dataset, kind, self.loss):
            axes["protocol.grid.batch_size"] = {self.dataset: list(sizes)}
        return axes


@cache
def _dataset(name: str, config_dir: str | None) -> DatasetSection:
    return compose.from_file(DatasetSection, "dataset", name, config_dir)


@cache
def _protocol(name: str, config_dir: str | None) -> Protocol:
    return compose.from_file(Protocol, "protocol", name, config_dir)


@cache
def _composed(command: str, preset: str, config_dir: str | None) -> Settings | None:
    folder = {"config_dir": config_dir} if config_dir else {}
    try:
        with without_imports():  # the parameters may come from someone else's record
            return compose.settings(Command({**json.loads(command), **folder, "preset": preset}))
    except (ConfigError, ValueError):
        return None


def trained_as(entry: Entry, request: Request) -> str | None:
    """The fullest preset whose command composes exactly the record's settings."""
    if not request.family:
        command, folder = request.command, request.config_dir
        ignored = frozenset(({*IGNORED} - {*request.overrides}) | {*request.ideal, *VARIED})  # a family varies VARIED
        fitting = (preset for preset in PRESETS if _fits(entry, command, preset, folder, ignored))
        return next(fitting, None) if entry.has_all_classes(request.dataset) else None
    known = groups(request.config_dir)
    if entry.config.protocol.name not in known["protocol"]:
        return entry.label
    presets = [*PRESETS, *([entry.label] if entry.label in known["preset"] else [])]
    return next((preset for preset in presets if _trained_alike(entry, preset, request.config_dir)), None)


@lru_cache(maxsize=ANSWERS)
def _fits(entry: Entry, command: str, preset: str, config_dir: str | None, ignored: frozenset[str]) -> bool:
    """Whether the command makes this record under this preset, except in ignored keys."""
    settings = _composed(command, preset, config_dir)
    if settings is None:
        return False
    science = settings.science(settings.dataset.recorded, None)
    if settings.loss.options.get("average") is None:  # the record holds the average resolved from the data
        ignored |= {"loss.average"}
    return all(_alike(entry, getattr(science, name).to_json(), name, ignored) for name in identity.SECTIONS)


@lru_cache(maxsize=ANSWERS)
def _trained_alike(entry: Entry, preset: str, config_dir: str | None) -> bool:
    """Whether the record's protocol, schedule and network match a preset."""
    config, known = entry.config, groups(config_dir)
    dataset = config.dataset.name.partition(" (")[0].partition("-")[0]  # "digits (120 rows)" and keel-abalone19
    choices = {"dataset": dataset, "loss": config.loss.name, "protocol": config.protocol.name}
    if not all(name in known[group] for group, name in choices.items()):
        return False
    loss = entry.sections["loss"].items()
    parameters = {f"loss.{name}": value for name, value in loss if name not in ("name", "_target_")}
    settings = _composed(json.dumps({**choices, **parameters}), preset, config_dir)
    if settings is None:
        return False
    science = settings.science(config.dataset.name, None)
    sections = ("protocol", "annealing", "model")
    return all(_alike(entry, getattr(science, name).to_json(), name, IGNORED) for name in sections)


def _alike(entry: Entry, composed: Mapping[str, Json], section: str, ignored: Iterable[str]) -> bool:
    """Whether a section of a record equals the composed one, except in ignored keys; 5 equals 5.0."""
    recorded, expected = (
        identity.plain({name: value for name, value in values.items() if f"{section}.{name}" not in ignored}, float)
        for values in (entry.sections[section], composed)
    )
    return recorded == expected


def cooling_rates(settings: Settings) -> set[Json]:
    """The cooling rates that records of a command can have: those it searches, else the one it sets; and None."""
    searched: set[Json] = {p["r"] for p in settings.grid() if "r" in p} if settings.searched else set()
    return {None, *(searched or {settings.annealing.r})}


def searched_as(request: Request, preset: str | None, family: Family, catalogue: Catalogue) -> str | None:
    """How the grid was searched: "grid", "halving", "part", "wider", "other"; None if there is nothing to search."""
    grid = grid_points(request, preset)
    if not grid:
        return None
    searched = {entry.point for entry in family if entry.done and not entry.is_trial}
    if grid <= searched:
        return "grid" if grid == searched else "wider"
    if searched - grid:
        return "other"
    return "halving" if searched and grid <= catalogue.searched_at_any_length(family) else "part"


def grid_points(request: Request, preset: str | None) -> set[Point]:
    """The points that the command searches under a preset; axes that are not searched have their fixed value."""
    settings = request.composed(preset) if preset in PRESETS and request.protocol else None
    if settings is None or not settings.searched:
        return set()
    fixed = {name: getattr(settings.hyper, name) for name in AXES[:-1]} | {"r": None}
    return {tuple((fixed | point)[name] for name in AXES) for point in settings.grid()}


def usual_splits(request: Request) -> tuple[SplitSeed, SplitSeed]:
    """Split seeds to look for, the protocol's own first."""
    protocol, folder = request.protocol, request.config_dir
    known = protocol in groups(folder)["protocol"]  # that of a record may be someone else's
    return ("trial", 0) if known and _protocol(str(protocol), folder).new_split else (0, "trial")
