"""task=run: search hyperparameters, select, train the trials, and show them beside the published numbers."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from east.lab.experiment import records
from east.lab.experiment.ledger import model_folder
from east.lab.experiment.records import Matrix, Record
from east.lab.experiment.runs import Run
from east.lab.experiment.scheduler import carry_out
from east.lab.reporting import plots, tables, writers
from east.lab.settings.command import Command
from east.lab.settings.compose import all_settings
from east.lab.settings.settings import Settings
from east.lab.tasks import plan
from east.lab.training.population import Trial

ByIdentity = Mapping[tuple[str, int, str], Record]


def main(command: Command, *settings: Settings) -> int:
    """Carry out a command; return 0 if all of its trials are on record."""
    return perform(command, settings, results)


def perform(
    command: Command,
    settings: Sequence[Settings],
    show: Callable[[Sequence[Run], Sequence[str]], tuple[str, bool]],
) -> int:
    """Plan, confirm if it takes days, train, and print what `show` returns for the runs and failures."""
    work = plan.made(settings, lambda preset: all_settings(command.but(preset=preset)))
    if work.settings.dry_run:
        print(work.text())
        return 0
    work.confirmed()
    runs = work.runs()
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        print(note, flush=True)
    text, complete = show(runs, carry_out(runs))
    print(text)
    return 0 if complete else 1


def results(runs: Sequence[Run], failures: Sequence[str]) -> tuple[str, bool]:
    """A table of runs beside published numbers, its figure and the failures; and whether all is done."""
    settings = runs[0].settings
    by_identity = {record.identity: record for record in records.scan(settings.results_dir)}
    keys = {run.chosen.key for run in runs if run.chosen}
    shown = [with_data_label(record) for record in by_identity.values() if record.key in keys]
    spec = tables.spec("grid").changed(title="Results")
    built = tables.build(
        spec,
        settings.results_dir,
        rule=settings.selection,
        preset="quick",
        scanned=shown,
        config_dir=settings.config_dir,
    )
    named = list(zip(plan.names(runs), runs, strict=True))
    lines = [f"{name}: {gap}" for name, run in named if (gap := shortfall(run, by_identity))]
    complete = not lines
    lines = [f"chosen for {name}: {choice(run)}" for name, run in named if run.chosen and run.settings.searched] + lines
    for name, run in named:
        on_record = [by_identity.get(trial.identity) for trial in run.trials]
        done = [record for record in on_record if record and record.status == "done"]
        matrices = [record.confusion["test"] for record in done]
        rows = max((training_rows(record) for record in done), default=0)
        lines += [f"{name}: {note}" for note in (unseen(matrices), collapse(run, matrices, rows)) if note]
    if failures:
        lines.append(f"first reason: {failures[0]}")
    if built.cells:
        name = "-".join(["run", *sorted({figure_name(run) for run in runs})][:5])
        with shown_anyway():
            files = plots.save(plots.dots(built), Path(settings.results_dir) / "figures" / name)
            lines = [f"figure: {files[0]}", *lines]
        lines = [writers.WRITERS["text"]([built], [tables.comparisons(built)]).rstrip(), *lines]
    return "\n".join(lines), complete


def figure_name(run: Run) -> str:
    """Dataset and loss, with a fingerprint if different data may share the name."""
    dataset = run.science.dataset
    shared = dataset.name in ("csv", "images") or dataset.limit is not None
    return run.name.replace(" ", f"-{(dataset.fingerprint or '')[:6]}-" if shared else "-")


@contextmanager
def shown_anyway() -> Iterator[None]:
    """Turn errors in writing files into warnings, so that results are printed even in a read-only folder."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"not written: {error}", stacklevel=3)


def choice(run: Run) -> str:
    """The hyperparameters chosen by the search."""
    assert run.chosen is not None
    values = dict(run.chosen.hyper) | {"r": run.chosen.annealing.r}
    return ", ".join(f"{name} {values[name]}" for name in run.settings.grid()[0])


def with_data_label(record: Record) -> Record:
    """A record of partial data under another name, such as "adult (500 rows)": tables leave out partial data."""
    dataset = record.config.dataset
    imbalance = dataset.options.get("imbalance")
    changes = [f"{dataset.limit} rows"] if dataset.limit else []
    changes += [f"imbalance {imbalance:g}"] if imbalance not in (None, 1) else []
    if not changes or dataset.name == "synthetic":
        return record
    renamed = dataset.but(name=f"{dataset.name} ({', '.join(changes)})", limit=None)
    return record.but(config=record.config.but(dataset=renamed))


def shortfall(run: Run, by_identity: ByIdentity) -> str | None:
    """What is missing from a run, or None."""
    if run.chosen is None:
        return "no trials, because its search is incomplete or no point of it could be trained"
    on_record = [by_identity.get(trial.identity) for trial in run.trials]
    states = [record.status if record else None for record in on_record]
    failed, missing = states.count("failed"), states.count(None)
    unsaved = sum(lacks_model(run, trial) for trial, state in zip(run.trials, states, strict=True) if state == "done")
    gaps = [f"of {len(states)} trials, {failed} failed, {missing} missing"] if failed + missing else []
    gaps += [f"{unsaved} of the models could not be saved"] if unsaved else []
    return "; ".join(gaps) or None


def lacks_model(run: Run, trial: Trial) -> bool:
    """Whether a requested model is missing."""
    return run.settings.save_model and not model_folder(trial, run.settings.results_dir).exists()


def training_rows(record: Record) -> int:
    sizes = record.data.get("sizes")
    return int(sizes["train"]) if isinstance(sizes, dict) else 0  # type: ignore[arg-type]


def unseen(matrices: Sequence[Matrix]) -> str | None:
    """A note if some classes have no test rows."""
    missing = max((sum(not any(row) for row in matrix) for matrix in matrices), default=0)
    if not missing:
        return None
    return f"{missing} of {len(matrices[0])} classes have no test rows: try split.stratify=true, or more rows"


def collapse(run: Run, matrices: Sequence[Matrix], rows: int) -> str | None:
    """A note if trials predict a single class, as metric losses can if the others are rare.

    rows: training rows, the largest possible batch.
    """
    tested = [matrix for matrix in matrices if sum(map(any, matrix)) > 1]
    one_class = sum(sum(map(any, zip(*matrix, strict=True))) == 1 for matrix in tested)
    if not one_class:
        return None
    advice, batch_size = ["a lower hyper.lr"], (run.chosen or run.science).hyper.batch_size
    if run.science.loss.anneals:
        advice = ["protocol.warmup=10", *advice]
    if (batch_size or 0) < rows:
        advice.append("a larger hyper.batch_size")
    if run.science.loss.options.get("average") == "macro":
        advice.append("loss.average=positive for a rare positive class")
    words = f"{', '.join(advice[:-1])} or {advice[-1]}" if len(advice) > 1 else advice[0]
    return f"{one_class} of {len(matrices)} trials predict one class only; try {words}"
