"""task=run: search hyperparameters, select, train the trials, and show their scores."""

from collections.abc import Callable, Sequence
from statistics import mean, stdev

import pandas as pd

from east.lab.experiment.ledger import Ledger, model_folder
from east.lab.experiment.records import Matrix, Record
from east.lab.experiment.runs import Run
from east.lab.settings.command import Command
from east.lab.settings.compose import all_settings
from east.lab.settings.settings import Settings
from east.lab.tasks import plan
from east.lab.training.population import Trial

SCORES = {  # in records -> as shown
    "f1_pos": "f1_positive",
    **{name: name for name in ("f1_macro", "accuracy", "balanced_accuracy", "mcc", "auroc_thresholded", "trained_for")},
}


def main(command: Command, *settings: Settings) -> int:
    """Carry out a command; return 0 if all of its trials are on record."""
    return carry_out(command, settings, results)


def carry_out(
    command: Command,
    settings: Sequence[Settings],
    show: Callable[[Sequence[Run], Ledger, Sequence[str]], tuple[str, bool]],
) -> int:
    """Plan, train, and print what `show` returns for the runs, their records and the failures: a text, and if all is
    done."""
    work = plan.made(settings, lambda preset: all_settings(command.but(preset=preset)))
    if work.settings.dry_run:
        print(work.text())
        return 0
    runs, failures = work.carry_out()
    text, complete = show(runs, work.ledger, failures)
    print(text)
    return 0 if complete else 1


def results(runs: Sequence[Run], ledger: Ledger, failures: Sequence[str]) -> tuple[str, bool]:
    """A table of scores, the chosen hyperparameters and what went wrong; True if every trial is on record."""
    rows: dict[str, dict[str, str]] = {}
    lines, gaps = [], []
    for name, run in zip(plan.names(runs), runs, strict=True):
        found = [record for trial in run.trials if (record := ledger.find(trial))]
        done = [record for record in found if record.status == "done"]
        rows |= scores(name, done)
        if run.chosen and run.settings.searched:
            lines.append(f"chosen for {name}: {choice(run)}")
        gaps += [f"{name}: {gap}" for gap in (shortfall(run, found),) if gap]
        lines += [f"{name}: {note}" for note in (unseen(done), collapse(run, done)) if note]
    table = [pd.DataFrame.from_dict(rows, orient="index").fillna("").to_string()] if rows else []
    reason = [f"first reason: {failures[0]}"] if failures else []
    return "\n".join([*table, *lines, *gaps, *reason]), not gaps


def scores(name: str, done: Sequence[Record]) -> dict[str, dict[str, str]]:
    """Rows of a table: test scores of the trials, and those over the list of thresholds if they were judged by one."""
    if not done:
        return {}
    rows = {name: [record.scores["test"] for record in done]}
    if all("thresholds" in record.decisions for record in done):
        rows[f"{name}, mean over thresholds"] = [record.decisions["thresholds"]["scores"]["test"] for record in done]
    shown: dict[str, dict[str, str]] = {}
    for row, tested in rows.items():
        shown[row] = {"trials": str(len(done))}
        for stored, score in SCORES.items():
            values = [value for one in tested if isinstance(value := one.get(stored), float)]
            if values:
                shown[row][score] = f"{mean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")
    return shown


def choice(run: Run) -> str:
    """The hyperparameters chosen by the search."""
    assert run.chosen is not None
    values = dict(run.chosen.hyper) | {"r": run.chosen.annealing.r}
    return ", ".join(f"{name} {values[name]}" for name in run.settings.grid()[0])


def shortfall(run: Run, found: Sequence[Record]) -> str | None:
    """What is missing from a run, or None."""
    if run.chosen is None:
        return "no trials, because its search is incomplete or no point of it could be trained"
    failed = sum(record.status == "failed" for record in found)
    missing, unsaved = len(run.trials) - len(found), sum(lacks_model(run, trial) for trial in run.trials)
    gaps = [f"of {len(run.trials)} trials, {failed} failed, {missing} missing"] if failed + missing else []
    gaps += [f"{unsaved - failed - missing} of the models could not be saved"] if unsaved > failed + missing else []
    return "; ".join(gaps) or None


def lacks_model(run: Run, trial: Trial) -> bool:
    """True if a requested model is missing."""
    return run.settings.save_model and not model_folder(trial, run.settings.results_dir).exists()


def unseen(done: Sequence[Record]) -> str | None:
    """A note if some classes have no test rows."""
    matrices = [record.confusion["test"] for record in done]
    missing = max((sum(not any(row) for row in matrix) for matrix in matrices), default=0)
    if not missing:
        return None
    return f"{missing} of {len(matrices[0])} classes have no test rows: try split.stratify=true, or more rows"


def collapse(run: Run, done: Sequence[Record]) -> str | None:
    """A note if trials predict a single class, as metric losses can if the others are rare."""
    collapsed = [record for record in done if predicts_one_class(record.confusion["test"])]
    if not collapsed:
        return None
    loss, advice = run.science.loss, ["a lower hyper.lr", "a larger hyper.batch_size"]
    if loss.anneals:
        advice = ["protocol.warmup=10", *advice]
    if loss.options.get("average") == "macro":
        advice.append("loss.average=positive for a rare positive class")
    return f"{len(collapsed)} of {len(done)} trials predict one class only; try {' or '.join(advice)}"


def predicts_one_class(matrix: Matrix) -> bool:
    """True if all rows of several classes are predicted as one class."""
    return sum(map(any, matrix)) > 1 and sum(map(any, zip(*matrix, strict=True))) == 1
