"""Small settings for tests; sections that a test leaves out have defaults."""

from pathlib import Path
from typing import Any

from torch import nn

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
