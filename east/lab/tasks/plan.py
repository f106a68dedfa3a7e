"""The plan of a command: what it trains, how long that takes here, and what would take less. It prints itself.

Planning downloads nothing. A dry run prints the plan, any other command carries it out.
"""

import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import mean
from typing import Any

import pandas as pd
import torch

from east.choices import ConfigError
from east.lab import bars, data
from east.lab.bars import duration
from east.lab.data import DataError
from east.lab.data.sources import folders
from east.lab.experiment import executors, protocols, records
from east.lab.experiment.executors import Place
from east.lab.experiment.ledger import Ledger
from east.lab.experiment.runs import Run, load, planned_device, split_options
from east.lab.experiment.scheduler import carry_out, stages
from east.lab.reporting.labels import labels
from east.lab.settings.settings import Science, Settings
from east.lab.training import timing
from east.lab.training.devices import hidden, pick_device
from east.lab.training.timing import Size

MINUTE, DAY = 60, 86400
MANY_ROWS = 5_000  # from which two quick trials are worth a process each
ASSUMED = f"calculated with {timing.GPU_FLOPS / 1e12:.0f} TFLOP/s"
# Training parts of the papers' datasets, to plan before downloading them.
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
    """One run of a plan. `run` is None if its data are not here yet; without a size it is not timed."""

    settings: Settings
    run: Run | None = None
    size: Size | None = None
    done: Mapping[str, int] = field(default_factory=Counter)  # trainings on record, by stage

    @property
    def science(self) -> Science:
        return self.run.science if self.run else self.settings.science(self.settings.dataset.name, None)

    @property
    def stages(self) -> list[tuple[int, int]]:
        """Trainings on record and planned, of the search and of the trials."""
        searches, trials = protocols.searches(self.settings), self.settings.trial_count
        return [(self.done["search"], searches), (self.done["trial"], trials)]

    @property
    def todo(self) -> list[int]:
        return [planned - done for done, planned in self.stages]

    def seconds(self, of_trial: Callable[[Science, Size, float], float]) -> float | None:
        """Seconds of all trainings one after another, assuming that a trial takes as long as a search point."""
        search, trials = self.todo
        if not search + trials:
            return 0.0
        if self.size is None:
            return None
        if self.settings.loss.classical:
            if self.run is None or self.size.kind != "table":
                return None
            loaded = load(self.settings.dataset, self.settings.data_dir)
            splits = data.split(loaded, **split_options(self.settings.split.at(0)))
            return trials * timing.classical_seconds(self.science, splits)
        grid = self.settings.grid() if self.settings.searched else [{}]
        points = [self.science.with_grid_point(point) for point in grid]
        epochs = [timing.usual_epochs(point, self.size) for point in points]
        each = mean(of_trial(point, self.size, length) for point, length in zip(points, epochs, strict=True))
        searches = sum(count for _, count in protocols.rounds(self.settings)) or 1
        return each * (search * protocols.whole_searches(self.settings, epochs[0]) / searches + trials)


@dataclass
class Plan:
    """The runs of a command and where they run. lenient: whether runs that are not possible are left out."""

    items: list[Item]
    place: Place
    ledger: Ledger
    lenient: bool = False
    failures: list[str] = field(default_factory=list)  # a line for each
    calculated: bool = False  # the times are those of a GPU that is not here, or not free

    def __post_init__(self) -> None:
        self.calculated = bool(self.place.executor.gpus)

    @property
    def runs(self) -> list[Run]:
        """The runs whose data are here: all of them once the plan is carried out."""
        return [item.run for item in self.items if item.run]

    @property
    def width(self) -> int:
        """How many trainings run at once."""
        if self.place.executor.name in ("ray", "submitit"):
            return self.place.parallel
        return max(1, min(self.place.parallel, sum(sum(item.todo) for item in self.items)))

    @property
    def device(self) -> torch.device:
        """Where steps are timed: on a cluster's kind of device, if this machine has it."""
        planned = planned_device(self.ledger.settings)
        return pick_device("auto") if planned.type == "cuda" and not torch.cuda.is_available() else planned

    @cached_property
    def costs(self) -> list[float | None]:
        """Seconds of each run on one slot; None if unknown."""
        threads = 1 if self.width > 1 else torch.get_num_threads()  # as in a worker
        with timing.threads(threads), bars.bar("timing a few steps"):
            if self.device.type == "cuda" and not self.place.executor.gpus:
                try:
                    return self.timed_on_gpu()
                except RuntimeError as error:  # it is in use, or full
                    bars.say(f"the GPU cannot be timed now ({str(error).partition(chr(10))[0]})")
                    self.calculated = True
            of_trial = timing.gpu_seconds if self.calculated else partial(timing.trial_seconds, device=self.device)
            return [item.seconds(of_trial) for item in self.items]

    def timed_on_gpu(self) -> list[float | None]:
        """`costs`, by the first steps on a GPU of this machine; RuntimeError if it is not free.

        Workers on GPUs need them for themselves, so a worker times as well: its hold of the GPU ends with it.
        """
        of_trial = partial(timing.trial_seconds, device=self.device)
        if self.place.executor.name == "inline":
            return [item.seconds(of_trial) for item in self.items]
        alone = replace(self.place, executor=self.place.executor.but(retries=0), slots=self.place.slots[:1])
        [(_, answer)] = executors.execute(partial(seconds_of, of_trial=of_trial), deque([self.items]), alone)
        if isinstance(answer, executors.Lost):
            raise RuntimeError(answer.reason)
        return answer

    @property
    def seconds(self) -> float:
        """Seconds of all runs that can be timed."""
        return sum(filter(None, self.costs)) / self.width

    def summary(self) -> str:
        """What is trained, how long that takes, and where."""
        search, trials = (sum(counts) for counts in zip(*(item.todo for item in self.items), strict=True))
        units = ((search, "search training"), (trials, "trial"))
        parts = [f"{count} {unit}{'s' if count > 1 else ''}" for count, unit in units if count]
        nets = ", ".join(dict.fromkeys(item.science.model.name for item in self.items))
        untimed = f" (not timed: {count} of {len(self.items)} runs)" if (count := self.costs.count(None)) else ""
        at_once = f"{self.width} at once" if self.width > 1 else "one at a time"
        where = f"on this machine ({self.device.type}, {at_once})"
        if self.calculated:
            where = f"on GPUs ({at_once}, {ASSUMED})"
        elif self.place.executor.name in ("ray", "submitit"):
            where = f"on cores as fast as this machine's ({at_once})"
        return f"{' and '.join(parts) or 'nothing'} of {nets}: about {duration(self.seconds)}{untimed} {where}"

    def text(self) -> str:
        """The plan as a table: what is done, and how long the rest takes on one slot."""
        lines = []
        for item, cost in zip(self.items, self.costs, strict=True):
            counts = [f"{done} of {planned}" if planned else "none" for done, planned in item.stages]
            note = "" if item.run else ", data not here yet"
            lines.append([*counts, ("not timed" if cost is None else duration(cost)) + note])
        table = pd.DataFrame(lines, run_names(self.items), ["search", "trials", "time left, one at a time"])
        return f"{table.to_string()}\n{self.summary()}"

    def confirm(self) -> None:
        """Print the estimate if it is over a minute; ConfigError if it is over a day and the user declines."""
        if self.seconds > DAY:
            instead = "Instead: preset=budget, lean or quick trains for less (dry_run=true says how long)"
            if self.device.type == "cpu" and not self.place.executor.gpus:
                networks = [item for item in self.items if not item.settings.loss.classical]
                on_gpu = duration(sum(item.seconds(timing.gpu_seconds) or 0 for item in networks))
                instead += f"; one GPU would take about {on_gpu} ({ASSUMED})"
            confirm(f"{self.summary()}. {instead}.", self.ledger.settings.yes)
        elif self.seconds >= MINUTE:
            bars.say(f"{self.summary()}.", sys.stdout)

    def carry_out(self) -> None:
        """Confirm, download what is missing and train. `failures` gets a line per failure."""
        self.confirm()
        self.attempt(lambda item: item if item.run else replace(item, run=Run.of(item.settings)))
        for note in dict.fromkeys(note for run in self.runs for note in run.notes):
            print(note, flush=True)
        self.failures += carry_out(self.runs, self.ledger, self.place) if self.runs else []

    def attempt(self, prepare: Callable[[Item], Item]) -> None:
        """Prepare each item. If the plan is lenient, those for which that is not possible are left out."""
        items, self.items = self.items, []
        for item in items:
            try:
                self.items.append(prepare(item))
            except (DataError, ConfigError) as error:
                if not self.lenient:
                    raise
                names = f"{item.settings.dataset.name} {item.settings.loss.name}"
                self.failures.append(f"{names}: {str(error).splitlines()[0]}")


def seconds_of(items: Sequence[Item], of_trial: Callable[[Science, Size, float], float]) -> Any:
    """The seconds of each item, in a worker."""
    try:
        return [item.seconds(of_trial) for item in items]
    except RuntimeError as error:  # of CUDA
        return executors.Lost(str(error))


def confirm(line: str, yes: bool) -> None:
    """Ask whether to start what this line says, unless `yes`; ConfigError if the user declines or cannot be asked."""
    if yes:
        bars.say(line, sys.stdout)
    elif not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"{line}\nyes=true starts it anyway.")
    else:
        bars.say(line)
        if input("Start anyway? [y/N] ").strip().lower() not in ("y", "yes"):
            raise ConfigError("not started")


def made(settings: Sequence[Settings], ledger: Ledger | None = None, lenient: bool = False) -> Plan:
    """The plan of the runs with these settings. lenient: leave out those that are not possible, and note the reason."""
    ledger = ledger or Ledger(settings[0], records.scan(settings[0].results_dir))
    work = Plan([Item(of_run) for of_run in settings], Place(ledger.settings.executor), ledger, lenient)
    work.attempt(partial(here, ledger=ledger))
    if absent := ", ".join(dict.fromkeys(item.settings.dataset.name for item in work.items if not item.run)):
        bars.say(f"{absent}: still to be downloaded or decoded", sys.stdout)
    much = any(one.settings.preset.name != "quick" or (one.size and one.size.rows > MANY_ROWS) for one in work.items)
    work.place = executors.choose_place(ledger.settings, much)
    if ledger.settings.device == "auto" and work.device.type == "cpu" and (note := hidden()):
        bars.say(f"{note}: training on the CPU", sys.stdout)
    return work


def here(item: Item, ledger: Ledger) -> Item:
    """The item with its data if they need no download, and with what is on record."""
    settings = item.settings
    downloadable = bool(data.dataset(settings.dataset.loader).stored)
    folders(settings.data_dir)  # fails if the user's does not exist
    try:
        with offline(downloadable):
            run = Run.of(settings)
    except DataError:
        if not downloadable:
            raise
        return replace(item, size=size_of(settings))
    return Item(settings, run, run.size, finished(run, ledger))


@contextmanager
def offline(disable: bool) -> Iterator[None]:
    """Disable downloads in this block if `disable`, and the decoding of images, which takes minutes."""
    before = os.environ.get("EAST_OFFLINE", "")
    os.environ["EAST_OFFLINE"] = "plan" if disable else before
    try:
        yield
    finally:
        os.environ["EAST_OFFLINE"] = before


def size_of(settings: Settings) -> Size | None:
    """The size of a dataset that is not downloaded yet, if known."""
    size, dataset = SIZES.get(settings.dataset.loader), settings.dataset
    if size is None:
        return None
    if "size" in dataset.options:
        size = replace(size, shape=(3, int(dataset.options["size"]), int(dataset.options["size"])))
    return size if dataset.limit is None else replace(size, rows=min(size.rows, round(0.64 * dataset.limit)))


def finished(run: Run, ledger: Ledger) -> Counter[str]:
    """How many trainings of a run are on record, by stage."""
    done = Counter[str]()
    for stage in stages(run, ledger):
        done[stage[0].stage] += len(stage) - len(ledger.missing(stage))
    return done


def run_names(runs: Sequence[Item] | Sequence[Run]) -> list[str]:
    """Names of runs, with as many of their settings as it takes to tell them apart."""
    sciences = [run.science for run in runs]
    return labels([f"{science.dataset.name} {science.loss.name}" for science in sciences], sciences)
