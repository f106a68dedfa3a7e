"""Which trials of a command are already on record."""

import warnings
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from east.lab.experiment import records
from east.lab.experiment.record import UNREADABLE, Record
from east.lab.settings.settings import Settings
from east.lab.training.checkpoint import Identity
from east.lab.training.population import Trial


class Ledger:
    """The records of a command's trials, and which trials are still to be trained.

    settings: with `force`, only trials of this command count as done; with `save_model`, a trial without
    its model counts as missing. scanned: records read beforehand.
    """

    def __init__(self, settings: Settings, scanned: Iterable[Record] = ()):
        self.settings = settings
        self.records = {} if settings.force else {record.identity: record for record in scanned}
        self.checked: set[Identity] = set()  # those whose arrays were compared with their record

    def read(self, trials: Iterable[Trial], recorded: Collection[Identity] = ()) -> None:
        """Read the records that these trials may have by now. recorded: those that this command has just written."""
        for trial in trials:
            if not self.settings.force or trial.identity in recorded:
                with suppress(*UNREADABLE):
                    self.records[trial.identity] = records.read(self._file(trial), whole=False)

    def find(self, trial: Trial) -> Record | None:
        """The record of a trial, if it has one, and the arrays beside it are its own."""
        identity = trial.identity
        if identity in self.records and identity not in self.checked:
            self.checked.add(identity)
            try:
                records.check_arrays(self.records[identity], self._file(trial))
            except ValueError as error:
                warnings.warn(f"{error}; its trial is trained again", stacklevel=2)
                del self.records[identity]
        return self.records.get(identity)

    def _file(self, trial: Trial) -> Path:
        return records.path(self.settings.results_dir, trial.config, trial.seed, trial.stage)

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Trials without a record, or without the model that this command needs."""
        return [trial for trial in trials if not self._complete(trial)]

    def _complete(self, trial: Trial) -> bool:
        record = self.find(trial)
        if record is None:
            return records.status(self._file(trial)) == "newer"  # never overwritten, so training would be pointless
        if record.status == "failed" or trial.stage == "search":
            return True  # failures are results too: the same trial would fail again
        return not self.settings.save_model or has_model(trial, self.settings.results_dir)


def model_folder(trial: Trial, results_dir: str | Path) -> Path:
    """Where save_model=true saves the model of a trial."""
    name = f"{trial.config.dataset.name}-{trial.config.loss.name}"
    return Path(results_dir) / "models" / f"{name}-{trial.config.key}-seed{trial.seed}"


def has_model(trial: Trial, results_dir: str | Path) -> bool:
    """True if the model of a trial is saved and complete."""
    from east.lab.training import saved

    return saved.is_intact(model_folder(trial, results_dir))
