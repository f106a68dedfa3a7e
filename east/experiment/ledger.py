"""Which trials of a command are already on record."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from east.experiment import records
from east.experiment.records import Record
from east.settings.settings import Settings
from east.training.population import Trial


class Ledger:
    """Knows which trials are done, and reads records that appear while the command runs.

    scanned: records read beforehand. force: only trials of this command count as done.
    models, probabilities: a trial without them counts as missing.
    """

    def __init__(
        self,
        results_dir: str | Path,
        scanned: Iterable[Record] = (),
        force: bool = False,
        models: bool = False,
        probabilities: bool = False,
    ):
        self.results_dir, self.force, self.models, self.probabilities = results_dir, force, models, probabilities
        self.records = {} if force else {record.identity: record for record in scanned}
        self.trained: set[tuple[str, int, str]] = set()

    @classmethod
    def of(cls, settings: Settings, scanned: Iterable[Record] = ()) -> "Ledger":
        """The ledger of a command with these settings."""
        return cls(settings.results_dir, scanned, settings.force, settings.save_model, settings.keep_probabilities)

    def find(self, trial: Trial) -> Record | None:
        """The record of a trial, if it has a readable one."""
        identity = trial.identity
        if identity not in self.records and (not self.force or identity in self.trained):
            with suppress(*records.UNREADABLE):
                file = records.path(self.results_dir, trial.config, trial.seed, trial.stage)
                self.records[identity] = records.read(file)
        return self.records.get(identity)

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Trials without a record, or without the model or the probabilities that this command needs."""
        return [trial for trial in trials if not self._complete(trial)]

    def _complete(self, trial: Trial) -> bool:
        record, file = self.find(trial), records.path(self.results_dir, trial.config, trial.seed, trial.stage)
        if record is None:
            return records.status(file) == "newer"  # never overwritten, so training would be pointless
        if record.status == "failed" or trial.stage == "search":
            return True  # failures are results too: the same trial would fail again
        if self.probabilities and not records.has_arrays(file):
            return False
        return not self.models or model_folder(trial, self.results_dir).exists()

    def note_trained(self, trials: Iterable[Trial]) -> None:
        """Note that this command has trained these trials."""
        self.trained |= {trial.identity for trial in trials}

    def ranking(self, keys: Iterable[str], rule: str) -> list[str]:
        """Keys of searched points from best to worst; those that could not be trained are left out."""
        keys = set(keys)
        left = [record for record in self.records.values() if record.key in keys and record.stage == "search"]
        ranked = []
        while (best := records.select(left, rule)) is not None:
            ranked.append(best)
            left = [record for record in left if record.key != best]
        return ranked


def model_folder(trial: Trial, results_dir: str | Path) -> Path:
    """Where save_model=true saves the model of a trial."""
    name = f"{trial.config.dataset.name}-{trial.config.loss.name}"
    return Path(results_dir) / "models" / f"{name}-{trial.config.key}-seed{trial.seed}"
