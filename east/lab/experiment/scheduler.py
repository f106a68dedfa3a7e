"""Schedules training: each run goes through the rounds of its search, then its trials, and all share one queue.

`Scheduler` decides, without training anything; `carry_out` hands its jobs to an executor and reports back. Trials
with a record are skipped, so rerunning a command finishes it.
"""

import math
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from east.choices import ConfigError
from east.lab import bars
from east.lab.experiment import executors, protocols, records
from east.lab.experiment.executors import Lost, Place
from east.lab.experiment.jobs import Job, delete_checkpoints, run_job
from east.lab.experiment.ledger import Ledger
from east.lab.experiment.runs import Run, planned_device
from east.lab.files import machine, sweep
from east.lab.settings.settings import EnsembleSection, Settings
from east.lab.training.checkpoint import Identity
from east.lab.training.engine import population_size
from east.lab.training.population import Trial
from east.lab.training.progress import Epoch

MANY_RUNS = 8  # per worker: enough to keep each one busy without splitting a run
RESUMABLE = "What is finished is saved. Rerun the same command to resume."


def stages(run: Run, ledger: Ledger) -> Iterator[list[Trial]]:
    """The rounds of a run's search, then its trials. There is no next stage unless this one is fully on record."""
    settings, points = run.settings, run.settings.grid() if run.settings.searched else [{}]
    single = run.science.but(ensemble=EnsembleSection())  # an ensemble has the best single network's point
    for epochs, count in protocols.rounds(settings):
        moved = [(single.with_grid_point(point, epochs), point) for point in points[:count]]
        stage = [Trial(config, seed, "search") for config, _ in moved for seed in protocols.search_seeds(settings)]
        yield stage
        if ledger.missing(stage):
            return
        by_key = {config.key: point for config, point in moved}
        ranked = records.ranked(filter(None, map(ledger.find, stage)), settings.selection)
        points = [by_key[key] for key in ranked]
        if not points:  # none could be trained
            return
    run.chosen = run.science.with_grid_point(points[0])
    yield run.trials


class Scheduler:
    """Turns runs into jobs. Call `start`, then `finish` for every finished job, until no jobs are left."""

    def __init__(self, runs: Sequence[Run], ledger: Ledger, place: Place):
        self.runs, self.ledger, self.place = runs, ledger, place
        self.stages = [stages(run, ledger) for run in runs]
        self.stage: list[list[Trial]] = [[] for _ in runs]  # the current one
        self.open = [0] * len(runs)  # unfinished jobs of the current stage
        self.total = sum(protocols.planned(run.settings) for run in runs)
        self.done = 0  # trials that are on record or lost
        # A step of a small stack costs nearly as much as one of a large stack, so no run is divided if there are many.
        self.workers = 1 if len(runs) >= MANY_RUNS * place.width else place.width

    def start(self) -> list[Job]:
        return [job for number in range(len(self.runs)) for job in self._next(number)]

    def finish(self, job: Job, recorded: Collection[Identity]) -> list[Job]:
        """Note that a job has finished, and what it recorded; return the jobs that were waiting for it."""
        self.ledger.read(job.trials, recorded)
        self.done += len(job.trials)
        self.open[job.run] -= 1
        return [] if self.open[job.run] else self._next(job.run)

    def _next(self, number: int) -> list[Job]:
        """The jobs of a run's next stage that is not fully on record."""
        for stage in self.stages[number]:
            self.stage[number] = stage
            missing = self.ledger.missing(stage)
            self.done += len(stage) - len(missing)
            if missing:
                jobs = cut(stage, missing, self.runs[number], number, self.place, self.workers)
                self.open[number] = len(jobs)
                return jobs
        return []

    def sweep(self) -> None:
        """Delete the checkpoints of finished trials; those of other settings of the same family stay."""
        unfinished = {trial.identity for stage in self.stage for trial in self.ledger.missing(stage)}
        for family in {run.checkpoints for run in self.runs}:
            delete_checkpoints(family, self.ledger.records.keys() - unfinished)


def cut(
    stage: Sequence[Trial], missing: Sequence[Trial], run: Run, number: int, place: Place, workers: int
) -> list[Job]:
    """Divide the missing trials of a stage into jobs.

    The whole stage is divided first, then finished trials are dropped, so that a rerun finds its checkpoints.
    """
    # Inline jobs find the data that the plan has loaded only by the paths that it used.
    inline = place.executor.name == "inline"
    settings = run.settings if inline else with_absolute_paths(run.settings)
    unfinished = {trial.identity for trial in missing}
    left = (
        tuple(trial for trial in population if trial.identity in unfinished)
        for population in populations(stage, planned_device(settings), workers)
    )
    progress = None if inline else str(progress_folder(settings.results_dir))
    return [Job(trials, number, settings, str(run.checkpoints.resolve()), progress) for trials in left if trials]


def with_absolute_paths(settings: Settings) -> Settings:
    """The settings as a worker in another folder needs them."""
    absolute = lambda path: path and str(Path(path).expanduser().absolute())  # noqa: E731
    dataset = settings.dataset
    if path := dataset.options.get("path"):
        dataset = dataset.but(path=absolute(path))
    return settings.but(
        dataset=dataset,
        results_dir=str(Path(settings.results_dir).resolve()),
        data_dir=absolute(settings.data_dir),
        config_dir=absolute(settings.config_dir),
    )


def populations(stage: Sequence[Trial], device: torch.device, width: int) -> list[list[Trial]]:
    """Divide a stage into populations that can be stacked, ordered and sized to keep `width` workers busy to the end.

    The slowest come first: small batches, then small learning rates. On CPUs populations shrink towards the end
    (guided self-scheduling, Polychronopoulos and Kuck 1987), because early stopping is unpredictable: an idle worker
    then waits for at most one trial. A GPU trains large populations best: each gets one.
    """
    groups: dict[str, list[Trial]] = {}
    for trial in sorted(stage, key=lambda t: (t.config.hyper.batch_size or 0, t.config.hyper.lr or 0)):
        groups.setdefault(trial.stacking_key, []).append(trial)
    parts, left = [], len(stage)
    for group in groups.values():
        most = min(population_size(group[0].config, device, len(group)), math.ceil(len(group) / width))
        while group:
            size = min(most, math.ceil(left / width)) if device.type == "cpu" else most
            parts.append(group[:size])
            group = group[size:]
            left -= len(parts[-1])
    return parts


def carry_out(runs: Sequence[Run], ledger: Ledger | None = None, place: Place | None = None) -> list[str]:
    """Search, select and train every run; return a line per failure, each printed as it happens.

    ledger, place: those of the plan, so that the records are read once.
    """
    settings = runs[0].settings
    ledger = ledger or Ledger(settings, records.scan(settings.results_dir))
    place = place or executors.choose_place(settings, any(run.settings.preset.name != "quick" for run in runs))
    scheduler = Scheduler(runs, ledger, place)
    failures: list[str] = []
    queue = deque(scheduler.start())
    if queue:
        check_writable(settings.results_dir)
        for folder in ("runs", "models", "records"):
            sweep(Path(settings.results_dir, folder))
    progress = progress_folder(settings.results_dir)
    try:
        with (
            bars.bar("training", scheduler.total, "trial", partial(running, progress), scheduler.done) as shown,
            closing(executors.execute(run_job, queue, place)) as results,
        ):
            for job, result in results:
                lost = isinstance(result, Lost)
                lines = [f"{runs[job.run].name}: {result.reason}"] if lost else result.failures
                failures += lines
                for line in lines:
                    bars.say(f"failed: {line}")
                    check_writable(settings.results_dir)
                queue.extend(scheduler.finish(job, () if lost else result.recorded))
                shown.update(scheduler.done - shown.n)
    except (KeyboardInterrupt, OSError) as error:  # Ctrl-C, a full disk
        error.add_note(RESUMABLE)
        raise
    finally:
        shutil.rmtree(progress, ignore_errors=True)
    scheduler.sweep()
    return failures


def progress_folder(results_dir: str) -> Path:
    """Where the workers of this process write how far they are. A later command sweeps it if this one is killed."""
    return Path(results_dir, "runs", f".progress.{machine()}-{os.getpid()}.0.tmp")


def running(progress: Path) -> str:
    """How many trials are training in workers, and their best score so far."""
    epochs = [epoch for file in progress.glob("*.json") if (epoch := Epoch.read(file))]
    if not epochs:
        return ""
    best = max((epoch.best for epoch in epochs if epoch.best is not None), default=None)
    score = "" if best is None else f", best validation score {best:.3f}"
    return f"{sum(epoch.training for epoch in epochs)} running (epoch {max(e.epoch for e in epochs):.0f}){score}"


def check_writable(results_dir: str) -> None:
    """ConfigError if the results folder cannot be written to: better now than after hours of training."""
    try:
        Path(results_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results_dir) as file:
            file.write(bytes(1 << 16))
    except (PermissionError, FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"results_dir={results_dir} cannot be written to: {error.strerror}") from error
