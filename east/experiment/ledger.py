"""What a results folder already holds, as a command needs to know it."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from east.experiment import records
from east.experiment.records import Record
from east.training.population import Trial


class Ledger:
    """Answers whether a trial is done; reads files that appear while the command runs.

    found: records read beforehand. force: only what this command has trained counts.
    models, probabilities: a trial without them counts as missing.
    """

    def __init__(
        self,
        results_dir: str | Path,
        found: Iterable[Record] = (),
        force: bool = False,
        models: bool = False,
        probabilities: bool = False,
    ):
        self.results_dir, self.force, self.models, self.probabilities = results_dir, force, models, probabilities
        self.found = {} if force else {record.identity: record for record in found}
        self.ended: set[tuple[str, int, str]] = set()

    def find(self, trial: Trial) -> Record | None:
        """The record of a trial, if it has a readable one."""
        identity = trial.identity
        if identity not in self.found and (not self.force or identity in self.ended):
            with suppress(*records.UNREADABLE):
                self.found[identity] = records.read(
                    records.path(self.results_dir, trial.config, trial.seed, trial.stage)
                )
        return self.found.get(identity)

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Trials without a record, or without the model or the probabilities that this command needs."""
        return [trial for trial in trials if not self._complete(trial)]

    def _complete(self, trial: Trial) -> bool:
        record, file = self.find(trial), records.path(self.results_dir, trial.config, trial.seed)
        if record is None:
            return records.is_newer(file)  # it stays, so training would be pointless
        if record.status == "failed" or trial.stage == "search":
            return True  # failures are results too: the same trial would fail again
        if self.probabilities and not records.has_arrays(file):
            return False
        return not self.models or model_folder(trial, self.results_dir).exists()

    def end(self, trials: Iterable[Trial]) -> None:
        """Note that this command has trained these."""
        self.ended |= {trial.identity for trial in trials}

    def ranking(self, keys: Iterable[str], rule: str) -> list[str]:
        """Keys of searched points from best to worst; those that could not be trained are left out."""
        keys = set(keys)
        found = [record for record in self.found.values() if record.key in keys and record.stage == "search"]
        order = []
        while (best := records.select(found, rule)) is not None:
            order.append(best)
            found = [record for record in found if record.key != best]
        return order


def model_folder(trial: Trial, results_dir: str | Path) -> Path:
    """Where save_model keeps what the trial has trained."""
    name = f"{trial.config.dataset.name}-{trial.config.loss.name}"
    return Path(results_dir) / "models" / f"{name}-{trial.config.key}-seed{trial.seed}"
