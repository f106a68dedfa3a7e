"""What a command will do and what it costs, before it begins."""

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from east.choices import ConfigError
from east.data import DataError
from east.experiment import executors, protocols
from east.experiment.records import Record
from east.experiment.runs import Run
from east.experiment.scheduler import Progress, ledger_of
from east.reporting import tables, writers
from east.settings.sections import Science
from east.settings.settings import Settings


def loadable(asked: Sequence[Settings]) -> tuple[list[Run], list[str]]:
    """Runs whose data is here or can be fetched, with the classes they need, and a line for each of the others."""
    runs, failures = [], []
    for settings in asked:
        try:
            runs.append(Run.of(settings))
        except (DataError, ConfigError) as error:
            failures.append(f"{settings.dataset.name} {settings.loss.name}: {str(error).splitlines()[0]}")
    return runs, failures


def names(runs: Sequence[Run]) -> list[str]:
    """Names of runs, with as many of their settings as it takes to tell them apart."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(run.name, []).append(run)
    labels = {name: iter(tables.labels(name, [run.science for run in group])) for name, group in alike.items()}
    return [next(labels[run.name]) for run in runs]


def text(runs: Sequence[Run]) -> str:
    """Trials of each run, how many are done, and the time the rest will take by the speed measured so far."""
    lines, costs = [("run", "search", "trials", "estimate")], []
    ledger = ledger_of(runs)
    known = speeds(ledger.found.values())
    for name, run in zip(names(runs), runs, strict=True):
        trials, searches = run.settings.trial_count, protocols.searches(run.settings)
        progress, done = Progress(run, ledger), Counter[str]()
        while True:
            done[progress.stage[0].stage] += len(progress.stage) - len(progress.missing())
            if progress.missing() or not progress.advance():
                break
        todo = searches + trials - done.total()
        seconds = known.get(speed_key(run.science))
        costs.append(0.0 if not todo else None if seconds is None else todo * seconds)
        searched = f"{done['search']} of {searches}" if searches else "none"
        lines.append((name, searched, f"{done['trial']} of {trials}", duration(costs[-1])))
    places = len(executors.slots(runs[0].settings.device))
    known_costs = [cost for cost in costs if cost is not None]
    total = f"{duration(sum(known_costs) / places)} on the {places} slots of this machine" if known_costs else "unknown"
    unknown = costs.count(None)
    if unknown:
        total += f", and {unknown} runs of unknown speed (a first trial tells)"
    return f"{writers.aligned(lines)}\ntime left: {total}"


def speed_key(config: Science) -> tuple[str | int | None, ...]:
    """Trials that take about as long: the same data and network under the same preset."""
    return (config.dataset.name, config.dataset.limit, config.model.name, config.protocol.name, config.preset)


def speeds(found: Iterable[Record]) -> dict[tuple, float]:
    """Median seconds of the trials on record, by `speed_key`."""
    seconds: dict[tuple, list[float]] = {}
    for record in found:
        if record.seconds and record.status == "done":
            seconds.setdefault(speed_key(record.config), []).append(record.seconds)
    return {key: median(values) for key, values in seconds.items()}


def duration(seconds: float | None) -> str:
    """Seconds in the unit that reads best."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
