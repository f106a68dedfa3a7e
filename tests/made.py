"""Small settings for tests: what a section leaves open has a plain default."""

from typing import Any

from east.settings.sections import Science

DEFAULTS = {
    "dataset": {"name": "made"},
    "model": {"name": "mlp", "hidden": [8]},
    "loss": {"name": "ce", "_target_": "east.losses.CrossEntropy"},
    "protocol": {"name": "test", "patience": 5, "max_epochs": 5},
}


def science(config: dict[str, Any] | None = None, **sections: Any) -> Science:
    """Typed settings of a trial from plain mappings."""
    return Science.model_validate({**DEFAULTS, **(config or {}), **sections})
