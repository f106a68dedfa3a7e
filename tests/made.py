"""Small settings for tests; sections that a test leaves out have defaults."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from east.lab.reporting.cells import Cell, Trials
from east.lab.settings.sections import LossSection, Science
from east.lab.training import objective

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


def put_values(cell: Cell, values: dict[int, float], rarest: int | None = None) -> None:
    """Fill a cell with scores by seed; `rarest`: validation rows of the positive class."""
    record = {"config": SimpleNamespace(split=SimpleNamespace(seed=0)), "status": "done", "git": None, "stopped": None}
    record |= {"confusion": {"val": [[99, 0], [0, rarest or 0]]}, "data": {}, "key": "made", "source": ""}
    trials: Any = [SimpleNamespace(seed=seed, **record) for seed in values]
    cell.trained = {"paper": Trials(values, trials)}
