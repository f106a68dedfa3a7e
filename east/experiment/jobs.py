"""A job: trials that train as one population, in any process. Each is evaluated and recorded when it ends."""

import os
import shutil
import traceback
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from east import data, losses
from east.experiment import records
from east.experiment.executors import Lost
from east.experiment.ledger import Ledger, model_folder
from east.experiment.records import Record
from east.experiment.runs import load, splits_of
from east.settings.settings import Settings
from east.training import classical, engine, evaluation, saved
from east.training.devices import describe_device
from east.training.population import Identity, Outcome, Trial, trials_in
from east.training.provenance import provenance
from east.training.scores import Evaluation


@dataclass(frozen=True)
class Job:
    """Trials to train together, and everything that their process needs to know."""

    trials: tuple[Trial, ...]
    run: int  # index of the command's run that they belong to
    settings: Settings  # of that run; a worker may be in another folder, so its paths are absolute
    checkpoints: str  # the folder of its family
    heartbeat: str | None = field(default=None, compare=False)  # file for its progress, if a worker runs it


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


def run_job(job: Job) -> list[str] | Lost:
    """Train one population and record its trials; return a line for each that failed. Runs in any process."""
    try:
        trials = Ledger(job.settings).missing(job.trials)
        return train_and_record(trials, job) if trials else []
    except Exception as error:  # the other jobs continue
        if os.environ.get("EAST_DEBUG"):
            traceback.print_exc()
        return Lost(f"{type(error).__name__}: {error}")


def train_and_record(trials: Sequence[Trial], job: Job) -> list[str]:
    """Train trials and record them; delete a population's checkpoint once all of its trials are recorded."""
    loaded = load(job.settings.dataset, job.settings.data_dir)
    if trials[0].config.dataset.fingerprint not in (None, loaded.fingerprint):
        raise data.DataError(f"{loaded.name} has changed since this command started. Rerun the command.")
    splits = splits_of(loaded, trials)
    lines, next_splits = [], iter(splits)
    for outcomes, checkpoint in trained(trials, splits, job):
        for outcome in outcomes:
            try:
                line = evaluate_and_record(outcome, loaded, next(next_splits), job)
            except Exception as error:  # such as a full disk; the others are still recorded
                line = f"{loaded.name} {outcome.trial.config.loss.name}: {type(error).__name__}: {error}"
                checkpoint = None
            lines += [line] if line else []
        if checkpoint:
            checkpoint.unlink(missing_ok=True)
    return lines


def trained(
    trials: Sequence[Trial], splits: Sequence[data.Splits], job: Job
) -> Iterator[tuple[list[Outcome], Path | None]]:
    """The outcomes of one population after another, each with the checkpoint to delete once they are recorded."""
    settings = job.settings
    if trials[0].config.loss.classical:
        return (([classical.fit(t, s, keep=settings.save_model)], None) for t, s in zip(trials, splits, strict=True))
    return engine.train_in_turn(
        trials,
        splits,
        device=settings.device,
        checkpoint=Path(job.checkpoints),
        progress=Path(job.heartbeat) if job.heartbeat else True,
        tensorboard=Path(settings.results_dir) / "tensorboard" if settings.tensorboard else None,
        compile=settings.compile,
    )


def evaluate_and_record(outcome: Outcome, loaded: data.Data, splits: data.Splits, job: Job) -> str | None:
    """Record an outcome, and save its model if the job says so; return a line if the trial failed."""
    trial, config, settings = outcome.trial, outcome.trial.config, job.settings
    parts = ("val", "test") if trial.stage == "trial" else ("val",)  # so that no search can choose by a test score
    judged: Evaluation = {"confusion": {}, "scores": {}, "decisions": {}}
    arrays = None
    if outcome.status == "done":
        judged = evaluated(outcome, splits, parts)
        arrays = {f"{part}_probabilities": outcome.probabilities[part] for part in parts}
        arrays |= {f"{part}_labels": outcome.labels[part] for part in parts}
    record = Record(
        config=config,
        seed=trial.seed,
        stage=trial.stage,
        data={name: getattr(splits, name) for name in ("name", "fingerprint", "sizes", "index_hash")},
        device="cpu" if config.loss.classical else describe_device(settings.device),
        history=outcome.history,
        best=outcome.best,
        epochs=outcome.epochs,
        stopped=outcome.stopped,
        status=outcome.status,
        error=outcome.error,
        seconds=outcome.seconds,
        **provenance(),
        **judged,
    )
    with suppress(FileExistsError):  # another process was faster, with the same result
        records.write(settings.results_dir, record, arrays, force=settings.force)
    # Last: the record stays if this fails.
    if outcome.status == "done" and trial.stage == "trial" and settings.save_model:
        saved.from_outcome(outcome, loaded, splits).save(model_folder(trial, settings.results_dir))
    if outcome.status == "failed":
        return f"{splits.name} {config.loss.name} seed {trial.seed}: {outcome.error}"
    return None


def evaluated(outcome: Outcome, splits: data.Splits, parts: Sequence[str]) -> Evaluation:
    """The scores of a finished trial on these parts; a search is judged by argmax alone."""
    trial, trained_for = outcome.trial, None
    loss = trial.config.loss
    if loss.name == "metric":  # it trains any metric, so no other score says how well it did
        built = losses.build(loss, splits.classes, splits.train.labels, splits.positive)
        trained_for = evaluation.validation_metric(built, splits.positive)
    probabilities = {part: outcome.probabilities[part] for part in parts}
    labels = {part: outcome.labels[part] for part in parts}
    decisions = trial.config.decisions if trial.stage == "trial" else ()  # a search would tune them for nothing
    return evaluation.evaluate(probabilities, labels, splits.positive, decisions, trained_for)
