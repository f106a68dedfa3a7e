"""task=run and task=train: search hyperparameters, select, train the trials, and show their scores."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pandas as pd

from east.lab.experiment import records
from east.lab.experiment.ledger import has_model
from east.lab.experiment.record import Record
from east.lab.experiment.runs import Run
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.tasks import plan
from east.lab.training.scores import Margins

SCORES = {  # in records -> as shown
    "f1_pos": "f1_positive",
    **{name: name for name in ("f1_macro", "accuracy", "balanced_accuracy", "mcc", "auroc_thresholded", "trained_for")},
}


def main(_: Command, *settings: Settings) -> int:
    """Carry out a command; return 0 if all of its trials are on record."""
    work = plan.made(settings)
    if settings[0].dry_run:
        print(work.text())
        return 0
    work.carry_out()
    text, complete = results(work)
    print(text)
    return 0 if complete else 1


def validation_score(settings: Sequence[Settings]) -> float:
    """Mean validation score of a command's recorded trials, which an optimising sweeper maximises."""
    work = plan.made(settings)
    found = [work.ledger.find(trial) for run in work.runs for trial in run.trials]
    return mean(1 - record.best.val_metric for record in found if record and record.best.val_metric is not None)


def results(work: plan.Plan) -> tuple[str, bool]:
    """A table of scores, the chosen hyperparameters and what went wrong; True if every trial is on record."""
    rows: dict[str, dict[str, str]] = {}
    lines, gaps = [], []
    for name, run in zip(plan.run_names(work.runs), work.runs, strict=True):
        found = [record for trial in run.trials if (record := work.ledger.find(trial))]
        done = [record for record in found if record.status == "done"]
        if done:
            rows[name] = score_row([record.scores.get("test", {}) for record in done])
        if done and all("thresholds" in record.decisions for record in done):
            by_threshold = [record.decisions["thresholds"]["scores"].get("test", {}) for record in done]
            rows[f"{name}, mean over thresholds"] = score_row(by_threshold)
        lines += [f"{name}: {note}" for note in run_notes(run, done)]
        gaps += [f"{name}: {gap}" for gap in shortfall(run, found)]
    table = [pd.DataFrame.from_dict(rows, orient="index").fillna("").to_string()] if rows else []
    reason = [f"first reason: {failure}" for failure in work.failures[:1]]
    return "\n".join([*table, *lines, *gaps, *reason]), not gaps


def score_row(tested: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A row of the table: test scores of some trials."""
    row = {"trials": str(len(tested))}
    for stored, score in SCORES.items():
        if values := [value for one in tested if isinstance(value := one.get(stored), float)]:
            row[score] = f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
    return row


def run_notes(run: Run, done: Sequence[Record]) -> Iterator[str]:
    """What the search chose, where a single trial is recorded, and signs that its scores mean little."""
    settings, loss = run.settings, run.science.loss
    if run.chosen and settings.searched:
        values = dict(run.chosen.hyper) | {"r": run.chosen.annealing.r}
        yield "chosen: " + ", ".join(f"{name} {values[name]}" for name in settings.grid()[0])
    if settings.trial_count == 1 and done:
        exported = done[0].source and Path(settings.results_dir, done[0].source)
        file = exported or records.path(settings.results_dir, run.trials[0].config, run.trials[0].seed)
        yield f"{done[0].epochs} epochs, {done[0].stopped}; {file}"
    counts = [Margins.of([record.confusion["test"]]) for record in done if "test" in record.confusion]
    if unseen := max((int((c.actual == 0).sum()) for c in counts), default=0):
        yield f"{unseen} of {counts[0].classes} classes have no test rows: try split.stratify=true, or more rows"
    if collapsed := sum((c.actual > 0).sum() > 1 and (c.predicted > 0).sum() == 1 for c in counts):
        advice = ["protocol.warmup=10"] if loss.anneals else []
        advice += ["a lower hyper.lr", "a larger hyper.batch_size"]
        advice += ["loss.average=positive for a rare positive class"] if loss.options.get("average") == "macro" else []
        yield f"{collapsed} of {len(done)} trials predict one class only; try {' or '.join(advice)}"


def shortfall(run: Run, found: Sequence[Record]) -> Iterator[str]:
    """What is missing from a run."""
    if run.chosen is None:
        yield "no trials, because its search is incomplete or no point of it could be trained"
        return
    failed = sum(record.status == "failed" for record in found)
    missing = len(run.trials) - len(found)
    if failed + missing:
        yield f"of {len(run.trials)} trials, {failed} failed, {missing} missing"
    if run.settings.save_model:
        unsaved = sum(not has_model(trial, run.settings.results_dir) for trial in run.trials) - failed - missing
        if unsaved > 0:
            yield f"{unsaved} of the models could not be saved"
