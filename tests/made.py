"""Small settings for tests; sections that a test leaves out have defaults."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, ClassifierMixin
from torch import nn

from east.lab.data import datasets, load
from east.lab.data.common import Data
from east.lab.reporting import tables
from east.lab.reporting.cells import Cell, Trials
from east.lab.reporting.specs import Spec
from east.lab.reporting.writers import WRITERS
from east.lab.settings.settings import LossSection, Science
from east.lab.training import engine, objective, population

GOLDEN = Path(__file__).parent / "golden"  # a results folder with a few records of many kinds
DEFAULTS = {
    "dataset": {"name": "made"},
    "model": {"name": "mlp", "hidden": [8]},
    "loss": {"name": "ce", "_target_": "east.losses.CrossEntropy"},
    "protocol": {"name": "test", "patience": 5, "max_epochs": 5},
}


def science(config: dict[str, Any] | None = None, **sections: Any) -> Science:
    """Typed settings of a trial, from plain mappings."""
    return Science.model_validate({**DEFAULTS, **(config or {}), **sections})


def build_loss(config: dict[str, Any], *arguments: Any, **options: Any) -> nn.Module:
    """build_loss for a plain mapping."""
    return objective.build_loss(LossSection.model_validate(config), *arguments, **options)


def real(name: str, **options: Any) -> Data:
    """A dataset whose files are already cached; tests never download."""
    if datasets()[name].cached() is None:
        pytest.skip(f"{name} is not in $EAST_DATA_DIR or the cache: east-run task=data dataset={name}")
    return load(name, **options)


class RowNumbers(ClassifierMixin, BaseEstimator):
    """Knows the rows that it was trained on: probability 1 for the true class of those, 1/2 for all others."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> "RowNumbers":
        self.classes_, self.seen_ = np.unique(y), dict(zip(X[:, 0].tolist(), y.tolist(), strict=True))
        return self

    def predict_proba(self, X: np.ndarray) -> np.ndarray:
        return np.array([np.eye(2)[self.seen_[x]] if x in self.seen_ else [0.5, 0.5] for x in X[:, 0].tolist()])


def ended_at_checkpoint(number: int, error: BaseException, work: Callable[[], object]) -> list[Path]:
    """Let work() write a checkpoint after every epoch and end with the error after this many; the files written."""
    written: list[Path] = []
    save = population.Population.save

    def save_then_end(self: population.Population, file: Path) -> None:
        save(self, file)
        written.append(file)
        if len(written) == number:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "CHECKPOINT_SECONDS", 0.0)
        patch.setattr(population.Population, "save", save_then_end)
        with pytest.raises(type(error)):
            work()
    return written


def changed(table: Spec, **values: Any) -> Spec:
    """A table with other values."""
    return Spec.model_validate(dict(table) | values)


def rendered(table: str | Spec, results_dir: str | Path = "results", format: str = "markdown", **options: Any) -> str:
    """A table from the records of a folder, in some format."""
    return WRITERS[format]([tables.build(table, results_dir, **options)])


def put_values(cell: Cell, values: dict[int, float], rarest: int | None = None) -> None:
    """Fill a cell with scores by seed; `rarest`: validation rows of the positive class."""
    record = {"config": SimpleNamespace(split=SimpleNamespace(seed=0)), "status": "done", "git": None, "stopped": None}
    record |= {"confusion": {"val": [[99, 0], [0, rarest or 0]]}, "data": {}, "key": "made", "source": ""}
    trials: Any = [SimpleNamespace(seed=seed, **record) for seed in values]
    cell.trained = {"paper": Trials(values, trials)}
    for name in ("summary", "gap"):  # of earlier values
        vars(cell).pop(name, None)
