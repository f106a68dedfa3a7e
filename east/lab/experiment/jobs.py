"""A job: trials that train as one population, in any process. Each is evaluated and recorded when it ends."""

import os
import shutil
import traceback
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from east.lab import data
from east.lab.experiment import records
from east.lab.experiment.executors import Lost
from east.lab.experiment.ledger import Ledger, model_folder
from east.lab.experiment.records import Record
from east.lab.experiment.runs import check_code, load, splits_of
from east.lab.settings.settings import Settings
from east.lab.training import engine, evaluation, loggers
from east.lab.training.checkpoint import Identity, trials_in
from east.lab.training.devices import describe_device
from east.lab.training.objective import build_loss
from east.lab.training.population import Outcome, Trial
from east.lab.training.provenance import provenance
from east.lab.training.scores import Evaluation


@dataclass(frozen=True)
class Job:
    """Trials to train together, and everything that their process needs to know."""

    trials: tuple[Trial, ...]
    run: int  # index of the command's run that they belong to
    settings: Settings  # of that run; a worker may be in another folder, so its paths are absolute
    checkpoints: str  # the folder of its family
    progress: str | None = None  # the folder for a file about its progress, if a worker runs it


def delete_checkpoints(family: Path, recorded: Set[Identity]) -> None:
    """Delete unreadable checkpoints and those of recorded trials; other settings of the family keep theirs."""
    files = [*family.glob("*.safetensors")]
    done = [file for file in files if trials_in(file) <= recorded]
    for file in done:
        file.unlink(missing_ok=True)
    if len(done) == len(files):  # what else is there are damaged checkpoints that were set aside
        shutil.rmtree(family, ignore_errors=True)
        with suppress(OSError):  # other families have theirs
            family.parent.rmdir()


@dataclass
class Finished:
    """The trials that a job has recorded, and a line for each failure."""

    recorded: list[Identity] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


def run_job(job: Job) -> Finished | Lost:
    """Train one population and record its trials. Runs in any process."""
    try:
        ledger = Ledger(job.settings)
        ledger.read(job.trials)
        trials = ledger.missing(job.trials)
        return train_and_record(trials, job) if trials else Finished()
    except Exception as error:  # the other jobs continue
        if os.environ.get("EAST_DEBUG"):
            traceback.print_exc()
        return Lost(f"{type(error).__name__}: {error}")


def train_and_record(trials: Sequence[Trial], job: Job) -> Finished:
    """Train trials and record them; delete a population's checkpoint once all of its trials are recorded."""
    loaded = load(job.settings.dataset, job.settings.data_dir)
    if trials[0].config.dataset.fingerprint not in (None, loaded.fingerprint):
        raise data.DataError(f"{loaded.name} has changed since this command started. Rerun the command.")
    check_code(trials[0].config)
    splits = splits_of(loaded, trials)
    finished, next_splits = Finished(), iter(splits)
    for outcomes, checkpoint in trained(trials, splits, job):
        for outcome in outcomes:
            trial, its_splits = outcome.trial, next(next_splits)
            name = f"{loaded.name} {trial.config.loss.name}"
            if outcome.status == "failed":
                finished.failures.append(f"{name} seed {trial.seed}: {outcome.error}")
            try:
                evaluate_and_record(outcome, its_splits, job)
                finished.recorded.append(trial.identity)
                if outcome.status == "done" and trial.stage == "trial" and job.settings.save_model:
                    from east.lab.training import saved

                    model = saved.from_outcome(outcome, loaded, its_splits)
                    model.save(model_folder(trial, job.settings.results_dir))
            except Exception as error:  # such as a full disk; the others are still recorded
                finished.failures.append(f"{name}: {type(error).__name__}: {error}")
                checkpoint = None
        if checkpoint:
            checkpoint.unlink(missing_ok=True)
    return finished


def trained(
    trials: Sequence[Trial], splits: Sequence[data.Splits], job: Job
) -> Iterator[tuple[list[Outcome], Path | None]]:
    """The outcomes of one population after another, each with the checkpoint to delete once they are recorded."""
    settings, results_dir = job.settings, Path(job.settings.results_dir)
    if trials[0].config.loss.classical:
        from east.lab.training import classical

        return (([classical.fit(t, s)], None) for t, s in zip(trials, splits, strict=True))
    options: dict[str, Any] = {
        "device": settings.device,
        "checkpoint": Path(job.checkpoints),
        "progress": Path(job.progress, f"{trials[0].config.key}-{trials[0].seed}.json") if job.progress else True,
        "start_logger": None if settings.logger == "none" else partial(loggers.start, settings.logger, results_dir),
        "compile": settings.compile,
    }
    if trials[0].config.ensemble.name != "none":
        from east.lab.training import ensemble

        return (([ensemble.fit(t, s, **options)], None) for t, s in zip(trials, splits, strict=True))
    return engine.train_in_turn(trials, splits, **options)


def evaluate_and_record(outcome: Outcome, splits: data.Splits, job: Job) -> None:
    """Judge an outcome by the scores and decisions of its config, and record it."""
    trial, settings = outcome.trial, job.settings
    parts = ("val", "test") if trial.stage == "trial" else ("val",)  # so that no search can choose by a test score
    stored: dict[str, Any] = {"data": {n: getattr(splits, n) for n in ("name", "fingerprint", "sizes", "index_hash")}}
    names = ("history", "best", "epochs", "stopped", "status", "error", "seconds", "ensemble")
    stored |= {name: getattr(outcome, name) for name in names}
    arrays = None
    if outcome.status == "done":
        stored |= evaluated(outcome, splits, parts)
        arrays = {f"{part}_{n}": getattr(outcome, n)[part] for part in parts for n in ("probabilities", "labels")}
    device = "cpu" if trial.config.loss.classical else describe_device(settings.device)
    record = Record(trial.config, trial.seed, trial.stage, device=device, **stored, **provenance())  # type: ignore[arg-type]
    with suppress(FileExistsError):  # another process was faster, with the same result
        records.write(settings.results_dir, record, arrays, force=settings.force)


def evaluated(outcome: Outcome, splits: data.Splits, parts: Sequence[str]) -> Evaluation:
    """The scores of a finished trial on these parts; a search is judged by argmax alone."""
    trial, loss, trained_for = outcome.trial, outcome.trial.config.loss, None
    if "metric" in loss.options and not loss.classical:
        built = build_loss(loss, splits.classes, splits.train.labels, splits.positive)
        if loss.name == "metric" or evaluation.trains_other_metric(built):
            trained_for = evaluation.validation_metric(built, splits.positive)
    decisions = trial.config.decisions if trial.stage == "trial" else ()  # a search would tune them for nothing
    if trial.config.ensemble.name != "none":  # its probabilities serve every metric
        decisions = (*dict.fromkeys((*decisions, *(evaluation.EXPECTED + name for name in evaluation.tunable()))),)
    probabilities, labels = ({part: of[part] for part in parts} for of in (outcome.probabilities, outcome.labels))
    return evaluation.evaluate(probabilities, labels, splits.positive, decisions, trained_for)
