"""task=train: one trial with seed=…, and with the given hyperparameters or the protocol's, without a search."""

from collections.abc import Sequence
from pathlib import Path

from east.lab.experiment import records
from east.lab.experiment.ledger import Ledger
from east.lab.experiment.runs import Run
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.tasks import run


def main(command: Command, *settings: Settings) -> int:
    """Train; return 0 if every trial is on record."""
    return run.carry_out(command, settings, trials)


def trials(runs: Sequence[Run], ledger: Ledger, failures: Sequence[str]) -> tuple[str, bool]:
    """Scores of single trials; True if all of them and their models are saved."""
    folder, lines, complete = ledger.settings.results_dir, [], True
    for one_run, trial in [(of_trial, trial) for of_trial in runs for trial in of_trial.trials]:
        record, name = ledger.find(trial), f"{one_run.name} seed {trial.seed}"
        if record is None or record.status == "failed":
            lines.append(f"{name} failed: {record.error if record else '; '.join(failures)}")
            complete = False
            continue
        file = Path(folder, record.source) if record.source else records.path(folder, trial.config, trial.seed)
        scores = {score: value for score, value in record.scores["test"].items() if isinstance(value, float)}
        lines += [
            f"{name}: {record.epochs} epochs, {record.stopped}, {record.seconds or 0:.1f} s",
            f"  test   {'  '.join(f'{score} {value:.4f}' for score, value in scores.items())}",
            f"  record {file}",
        ]
        if run.lacks_model(one_run, trial):
            lines.append(f"{name}: the model could not be saved: {'; '.join(failures)}")
            complete = False
    return "\n".join(lines), complete
