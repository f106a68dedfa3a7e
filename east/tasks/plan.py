"""What a command will do and how long it will take, before it starts; nothing is downloaded to find out."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from typing import TypeVar

import torch

from east import data, display
from east.choices import ConfigError
from east.data import DataError
from east.data.common import assign
from east.display import duration
from east.experiment import executors, protocols
from east.experiment.executors import Place
from east.experiment.runs import Run, load, split_options
from east.experiment.scheduler import Progress, ledger_of
from east.reporting import tables, writers
from east.settings.sections import Science
from east.settings.settings import Settings
from east.training import timing
from east.training.devices import pick_device
from east.training.timing import Size

T = TypeVar("T")
MINUTE, DAY = 60, 86400
SMALL = 100_000  # row visits that take under a minute on any machine: not worth timing
SHORTER = ("budget", "lean", "quick")  # presets, longest first
# Sizes of the papers' datasets, to plan before downloading them.
SIZES = {
    "adult": Size(26_048, (13,), 2),
    "adult_released": Size(26_048, (13,), 2),
    "caltech256": Size(19_588, (3, 64, 64), 257, "image"),
    "cifar10": Size(40_000, (3, 32, 32), 10, "image"),
    "cifar10_frog": Size(40_000, (3, 32, 32), 2, "image"),
    "cifar10_transportation": Size(40_000, (3, 32, 32), 2, "image"),
    "cocktailparty": Size(3_072, (22,), 2),
    "kaggle": Size(182_276, (29,), 2),
    "mammography": Size(7_156, (6,), 2),
}


@dataclass(frozen=True)
class Item:
    """One run of a plan. Without data (`run`) its records are unknown; without a size it is not timed."""

    settings: Settings
    run: Run | None
    size: Size | None
    done: Counter[str]  # trainings on record, by stage
    epochs: float | None = None  # taken by similar trials, if any are on record

    @property
    def science(self) -> Science:
        return self.run.science if self.run else self.settings.science(self.settings.dataset.name, None)

    @property
    def todo(self) -> tuple[int, int]:
        """Trainings of the search and trials that are not on record."""
        searches, trials = protocols.searches(self.settings), self.settings.trial_count
        return searches - self.done["search"], trials - self.done["trial"]

    @property
    def visits(self) -> float:
        """How many times training visits a row."""
        return 0 if self.size is None else sum(self.todo) * self.size.rows * self.usual(self.science, self.size)

    def usual(self, config: Science, size: Size) -> float:
        """Epochs of a trial."""
        return self.epochs or timing.usual_epochs(config, size)

    def seconds(self, of_trial: Callable[[Science, Size, float], float]) -> float | None:
        """Total sequential time, assuming that a trial takes as long as a search point."""
        if self.settings.loss.classical or self.size is None:
            return None if any(self.todo) else 0.0
        points = [self.science.with_grid_point(point) for point in self.settings.grid() if self.settings.searched]
        points = points or [self.science]
        each = [of_trial(point, self.size, self.usual(point, self.size)) for point in points]
        rounds = protocols.rounds(self.settings)
        shares = [count * min((epochs or 1e9) / self.usual(points[0], self.size), 1) for epochs, count in rounds]
        planned = sum(count for _, count in rounds) or 1
        search, trials = self.todo
        return mean(each) * (search * sum(shares) / planned + trials)


@dataclass(frozen=True)
class Plan:
    """The runs of a command. `shorter` gives the settings of the same command under another preset."""

    items: Sequence[Item]
    place: Place
    shorter: Callable[[str], Sequence[Settings]]

    @property
    def settings(self) -> Settings:
        return self.items[0].settings

    @property
    def width(self) -> int:
        """How many trainings run at once."""
        executor = self.place.executor
        if executor.name in ("ray", "submitit"):
            return executor.parallel if executor.address or executor.cluster != "local" else len(executors.slots("cpu"))
        return max(1, min(len(self.place.slots), sum(sum(item.todo) for item in self.items)))

    @property
    def device(self) -> torch.device:
        return pick_device(self.settings.device)

    def costs(self) -> list[float | None]:
        """Seconds of each run on one slot of this machine; None if unknown."""
        if all(item.size and item.size.kind == "table" for item in self.items):
            visits = sum(item.visits for item in self.items)
            if visits < SMALL:
                return [MINUTE * item.visits / SMALL for item in self.items]
        with one_thread(self.width > 1), display.activity("timing a few steps"):
            of_trial = partial(timing.trial_seconds, device=self.device)
            return [item.seconds(of_trial) for item in self.items]

    def on_gpu(self) -> float:
        """Seconds on one GPU, by arithmetic."""
        return sum(item.seconds(timing.gpu_seconds) or 0 for item in self.items)

    def runs(self, failures: list[str] | None = None) -> list[Run]:
        """Every run with its data, downloaded if necessary.

        failures: gets a line for every run that cannot be carried out; without it, the first one raises.
        """
        tried = [item.run or attempted(item.settings, Run.of, failures) for item in self.items]
        return [run for run in tried if run]

    def text(self) -> str:
        """The plan as a table: what is done and how long the rest takes, on one slot."""
        lines = [("", "search", "trials", "time left" if self.width == 1 else "time left, one at a time")]
        costs = self.costs()
        for name, item, cost in zip(names(self.items), self.items, costs, strict=True):
            searches, trials = protocols.searches(item.settings), item.settings.trial_count
            searched = f"{item.done['search']} of {searches}" if searches else "none"
            here = "" if item.run else ", data not downloaded yet"
            left = f"{'not timed' if cost is None else duration(cost)}{here}"
            lines.append((name, searched, f"{item.done['trial']} of {trials}", left))
        known = [cost for cost in costs if cost is not None]
        total = f"time left: about {duration(sum(known) / self.width)} on this machine, {slots(self.width)}"
        rest = costs.count(None)
        return f"{writers.aligned(lines)}\n{total}" + (f"; {rest} runs are not timed" if rest else "")

    def confirmed(self) -> float:
        """Print the estimate if it is more than a minute, and return the seconds. ConfigError if the user declines.

        More than a day on a CPU needs a yes: typed, or yes=true where nobody can be asked.
        """
        executor = self.place.executor
        seconds = sum(cost for cost in self.costs() if cost is not None) / self.width
        if executor.gpus:
            seconds = self.on_gpu() / self.width
        if seconds < MINUTE:
            return seconds
        line = f"{self.amount()}: about {duration(seconds)} {self.where()}."
        absurd = seconds > DAY and self.device.type == "cpu" and not executor.gpus
        if not absurd:
            display.say(line, sys.stdout)
            return seconds
        line = f"{line} {self.instead(seconds)}"
        if self.settings.yes:
            display.say(line, sys.stdout)
        elif not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError(f"{line}\nyes=true starts it anyway.")
        else:
            display.say(line)
            if input("Start anyway? [y/N] ").strip().lower() not in ("y", "yes"):
                raise ConfigError("not started")
        return seconds

    def amount(self) -> str:
        """How much there is to train."""
        search, trials = (sum(counts) for counts in zip(*(item.todo for item in self.items), strict=True))
        nets = ", ".join(dict.fromkeys(item.science.model.name for item in self.items))
        parts = [f"{count} {what}" for count, what in ((search, "search trainings"), (trials, "trials")) if count]
        return f"{' and '.join(parts) or 'nothing'} of {nets}"

    def where(self) -> str:
        executor = self.place.executor
        if executor.gpus:
            return f"on {slots(self.width)} with a GPU each, by arithmetic ({assumed()})"
        if executor.name in ("ray", "submitit"):
            return f"on {slots(self.width)} as fast as this machine's cores"
        return f"on this machine ({self.device.type}, {slots(self.width)})"

    def instead(self, seconds: float) -> str:
        """Suggest alternatives to a plan that takes far too long."""
        options = []
        for preset in SHORTER:
            try:
                other = made(self.shorter(preset))
            except ConfigError:  # this command does not work under that preset
                continue
            takes = sum(cost for cost in other.costs() if cost is not None) / other.width
            if takes < min(seconds / 2, DAY):
                options.append(f"preset={preset} takes about {duration(takes)}")
        options.append(f"one GPU about {duration(self.on_gpu())} by arithmetic ({assumed()})")
        return f"Instead: {'; '.join(options)}."


def assumed() -> str:
    return f"{timing.GPU_FLOPS / 1e12:.0f} TFLOP/s assumed"


def slots(count: int) -> str:
    return f"{count} at once" if count > 1 else "one at a time"


@contextmanager
def one_thread(single: bool) -> Iterator[None]:
    """Limit torch to one thread, as in a worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if single else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def made(
    asked: Sequence[Settings],
    shorter: Callable[[str], Sequence[Settings]] = lambda preset: (),
    failures: list[str] | None = None,
) -> Plan:
    """The plan of these settings. Missing data are not downloaded.

    shorter: the settings of the same command under another preset, or none.
    failures: gets a line for every run that cannot be carried out; without it, the first one raises.
    """
    if not asked:
        raise ConfigError("nothing to do")
    items = [one for settings in asked if (one := attempted(settings, item, failures))]
    runs = [one.run for one in items if one.run]
    if runs:
        items = on_record(items, runs)
    much = any(settings.preset.name != "quick" for settings in asked)
    return Plan(items, executors.choose_place(asked[0], much), shorter)


def attempted(settings: Settings, make: Callable[[Settings], T], failures: list[str] | None) -> T | None:
    """`make(settings)`, or None and a line for `failures`."""
    try:
        return make(settings)
    except (DataError, ConfigError) as error:
        if failures is None:
            raise
        failures.append(f"{settings.dataset.name} {settings.loss.name}: {str(error).splitlines()[0]}")
        return None


def item(settings: Settings) -> Item:
    """A run with its data, if no download is needed."""
    name = settings.dataset.name.partition("-")[0]
    fetched = bool(data.datasets()[name].needs)
    try:
        with offline(fetched):
            run = Run.of(settings)
    except DataError:
        if not fetched or settings.data_dir:  # a folder named by the user should contain the data
            raise
        return Item(settings, None, size_of(settings), Counter())
    loaded = load(settings.dataset, settings.data_dir)
    rows = len(assign(loaded, **split_options(settings.split.at(0)))[0])
    return Item(settings, run, Size.of(loaded, rows), Counter())


@contextmanager
def offline(wanted: bool) -> Iterator[None]:
    """Disable downloads if `wanted`."""
    before = os.environ.get("EAST_OFFLINE")
    if wanted:
        os.environ["EAST_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("EAST_OFFLINE", None)
        else:
            os.environ["EAST_OFFLINE"] = before


def size_of(settings: Settings) -> Size | None:
    """The size of a dataset that is not downloaded yet, if known."""
    size, dataset = SIZES.get(settings.dataset.name), settings.dataset
    if size is None:
        return None
    if "size" in dataset.options:
        size = replace(size, shape=(3, int(dataset.options["size"]), int(dataset.options["size"])))
    return size if dataset.limit is None else replace(size, rows=min(size.rows, round(0.64 * dataset.limit)))


def on_record(items: Sequence[Item], runs: Sequence[Run]) -> list[Item]:
    """Add what the results folder holds: finished trainings, and the epochs that similar trials took."""
    ledger = ledger_of(runs)
    took: dict[tuple, list[int]] = {}
    for record in ledger.records.values():
        if record.status == "done" and record.epochs:
            took.setdefault(alike(record.config), []).append(record.epochs)
    result = []
    for one in items:
        if one.run is None:
            result.append(one)
            continue
        progress, done = Progress(one.run, ledger), Counter[str]()
        while True:
            done[progress.stage[0].stage] += len(progress.stage) - len(progress.missing())
            if progress.missing() or not progress.advance():
                break
        known = took.get(alike(one.run.science))
        result.append(replace(one, done=done, epochs=median(known) if known else None))
    return result


def alike(config: Science) -> tuple:
    """A key shared by trials that should take about as many epochs."""
    protocol = config.protocol
    return (
        *(config.dataset.name, config.dataset.limit, config.model.name, config.loss.name),
        *(protocol.patience, protocol.stage_epochs, protocol.max_epochs),
    )


def names(items: Sequence[Item] | Sequence[Run]) -> list[str]:
    """Names of runs, with as many of their settings as it takes to tell them apart."""
    sciences = [one.science for one in items]
    alike: dict[str, list[Science]] = {}
    for science in sciences:
        alike.setdefault(name(science), []).append(science)
    labels = {one: iter(tables.labels(one, group)) for one, group in alike.items()}
    return [next(labels[name(science)]) for science in sciences]


def name(science: Science) -> str:
    return f"{science.dataset.name} {science.loss.name}"
