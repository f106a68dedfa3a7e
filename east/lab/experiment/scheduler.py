"""What to train next: each run goes through the rounds of its search, then its trials, and all share one queue.

`Scheduler` decides, without training anything; `carry_out` hands its jobs to an executor and reports back. Trials
with a record are skipped, so rerunning a command finishes it.
"""

import math
import tempfile
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from east.choices import ConfigError
from east.lab import bars
from east.lab.experiment import executors, protocols, records
from east.lab.experiment.executors import Lost, Place
from east.lab.experiment.jobs import Job, delete_checkpoints, run_job
from east.lab.experiment.ledger import Ledger
from east.lab.experiment.runs import Run, planned_device
from east.lab.files import sweep
from east.lab.settings.settings import EnsembleSection, Science, Settings
from east.lab.training.checkpoint import Identity
from east.lab.training.engine import population_size
from east.lab.training.population import Trial
from east.lab.training.progress import Epoch

MANY_RUNS = 8  # per worker: enough to keep each one busy without splitting a run
RESUMABLE = "What is finished is saved. Rerun the same command to resume."


class Progress:
    """How far one run has come: the rounds left of its search, the points still in it, and its current trials."""

    def __init__(self, run: Run, ledger: Ledger):
        self.run, self.ledger = run, ledger
        self.rounds = deque(protocols.rounds(run.settings))
        self.points = run.settings.grid() if self.rounds else [{}]
        self.stage: list[Trial] = []
        self._begin()

    def _begin(self) -> None:
        """Set up the trials of the next round, or the final trials."""
        if self.rounds:
            seeds = protocols.search_seeds(self.run.settings)
            self.stage = [Trial(config, seed, "search") for config in self._configs() for seed in seeds]
        else:
            self.run.chosen = self.run.science.with_grid_point(self.points[0])
            self.stage = self.run.trials

    def _configs(self) -> list[Science]:
        epochs, count = self.rounds[0]
        single = self.run.science.but(ensemble=EnsembleSection())  # an ensemble has the best single network's point
        return [single.with_grid_point(point, epochs) for point in self.points[:count]]

    def missing(self) -> list[Trial]:
        """Trials that the current stage still needs."""
        return self.ledger.missing(self.stage)

    def advance(self) -> bool:
        """Move to the next stage; False when the run is over, complete or not."""
        if not self.rounds or self.missing():
            return False
        configs = self._configs()
        place = {config.key: k for k, config in enumerate(configs)}
        ranked = self.ledger.ranking(self.stage, self.run.settings.selection)
        self.points = [self.points[place[key]] for key in ranked]
        self.rounds.popleft()
        if not self.points:  # none could be trained
            return False
        self._begin()
        return True


class Scheduler:
    """Turns runs into jobs. Call `start`, then `finish` for every finished job, until no jobs are left."""

    def __init__(self, runs: Sequence[Run], ledger: Ledger, place: Place):
        self.ledger, self.place = ledger, place
        self.progress = [Progress(run, ledger) for run in runs]
        self.open = [0] * len(runs)  # unfinished jobs of the current stage
        self.total = sum(protocols.planned(run.settings) for run in runs)
        self.done = 0  # trials that are on record or lost
        # A step of a small stack costs nearly as much as one of a large stack, so no run is divided if there are many.
        self.workers = 1 if len(runs) >= MANY_RUNS * place.width else place.width

    def start(self) -> list[Job]:
        return [job for number in range(len(self.progress)) for job in self._next(number)]

    def finish(self, job: Job, recorded: Iterable[Identity]) -> list[Job]:
        """Note that a job has finished, and what it recorded; return the jobs that were waiting for it."""
        self.ledger.note_trained(recorded)
        self.done += len(job.trials)
        self.open[job.run] -= 1
        if self.open[job.run] or not self.progress[job.run].advance():
            return []
        return self._next(job.run)

    def _next(self, number: int) -> list[Job]:
        """The jobs of a run's next stage that is not fully on record."""
        progress = self.progress[number]
        while True:
            missing = progress.missing()
            self.done += len(progress.stage) - len(missing)
            if missing:
                jobs = cut(progress.stage, missing, progress.run, number, self.place, self.workers)
                self.open[number] = len(jobs)
                return jobs
            if not progress.advance():
                return []

    def sweep(self) -> None:
        """Delete the checkpoints of finished trials; those of other settings of the same family stay."""
        unfinished = {trial.identity for progress in self.progress for trial in progress.missing()}
        for family in {progress.run.checkpoints for progress in self.progress}:
            delete_checkpoints(family, self.ledger.records.keys() - unfinished)


def cut(
    stage: Sequence[Trial], missing: Sequence[Trial], run: Run, number: int, place: Place, workers: int
) -> list[Job]:
    """Divide the missing trials of a stage into jobs.

    The whole stage is divided first, then finished trials are dropped, so that a rerun finds its checkpoints.
    """
    inline = place.executor.name == "inline"
    # Inline jobs find the data that the plan has loaded only by the paths that it used.
    settings = run.settings if inline else with_absolute_paths(run.settings)
    device = planned_device(settings)
    unfinished = {trial.identity for trial in missing}
    checkpoints = str(run.checkpoints.resolve())
    jobs = []
    for population in populations(stage, device, workers):
        if trials := tuple(trial for trial in population if trial.identity in unfinished):
            heartbeat = str(Path(settings.results_dir, "runs", "progress", f"{uuid.uuid4().hex}.json"))
            jobs.append(Job(trials, number, settings, checkpoints, None if inline else heartbeat))
    return jobs


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
    failures: list[str] = []
    place = place or executors.choose_place(settings, any(run.settings.preset.name != "quick" for run in runs))
    scheduler = Scheduler(runs, ledger, place)
    queue = deque(scheduler.start())
    if queue:
        check_writable(settings.results_dir)
        for folder in ("runs", "models", "records"):
            sweep(Path(settings.results_dir, folder))
    watch = Watch(scheduler)
    with (
        bars.bar("training", scheduler.total, "trial", watch.describe, scheduler.done) as shown,
        noting_how_to_resume(),
        closing(watch),
        closing(executors.execute(run_job, queue, place)) as results,  # workers end before their files are deleted
    ):
        watch.add(queue)
        for job, result in results:
            lost = isinstance(result, Lost)
            lines = [f"{runs[job.run].name}: {result.reason}"] if lost else result.failures
            failures += lines
            for line in lines:
                bars.say(f"failed: {line}")
                check_writable(settings.results_dir)
            next_jobs = scheduler.finish(job, () if lost else result.recorded)
            shown.update(scheduler.done - shown.n)
            watch.remove(job)
            watch.add(next_jobs)
            queue.extend(next_jobs)
    scheduler.sweep()
    return failures


@contextmanager
def noting_how_to_resume() -> Iterator[None]:
    """Add a note to what interrupts the work from outside: Ctrl-C, a full disk."""
    try:
        yield
    except (KeyboardInterrupt, OSError) as error:
        error.add_note(RESUMABLE)
        raise


class Watch:
    """The running jobs of a command. Those in other processes write their progress to files."""

    def __init__(self, scheduler: Scheduler):
        self.scheduler = scheduler
        self.open: dict[int, Job] = {}
        self.best: float | None = None  # highest validation metric of any trial

    def add(self, jobs: Iterable[Job]) -> None:
        # Replaced, not changed: the bar's thread reads it.
        self.open = {**self.open, **{id(job): job for job in jobs}}

    def close(self) -> None:
        """Delete the files of jobs that were interrupted."""
        for job in self.open.values():
            self._delete_heartbeat(job)

    def _delete_heartbeat(self, job: Job) -> None:
        if job.heartbeat:
            Path(job.heartbeat).unlink(missing_ok=True)  # left by a worker that was killed

    def remove(self, job: Job) -> None:
        self.open = {number: running for number, running in self.open.items() if number != id(job)}
        self._delete_heartbeat(job)
        for trial in job.trials:
            record = self.scheduler.ledger.find(trial)
            shortfall = record.best.val_metric if record else None  # 1 - metric
            self._note_score(None if shortfall is None else 1 - shortfall)

    def _note_score(self, score: float | None) -> None:
        if score is not None and (self.best is None or score > self.best):
            self.best = score

    def describe(self) -> str:
        """How many trials are running, and the best score so far."""
        files = [Path(job.heartbeat) for job in self.open.values() if job.heartbeat]
        running = [epoch for file in files if (epoch := Epoch.read(file))]
        for epoch in running:
            self._note_score(epoch.best)
        parts = []
        if running:
            furthest = max(epoch.epoch for epoch in running)
            parts.append(f"{sum(epoch.training for epoch in running)} running (epoch {furthest:.0f})")
        if self.best is not None:
            parts.append(f"best validation score {self.best:.3f}")
        return ", ".join(parts)


def check_writable(results_dir: str) -> None:
    """ConfigError if the results folder cannot be written to: better now than after hours of training."""
    try:
        Path(results_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results_dir) as file:
            file.write(bytes(1 << 16))
    except (PermissionError, FileExistsError, FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"results_dir={results_dir} cannot be written to: {error.strerror}") from error
