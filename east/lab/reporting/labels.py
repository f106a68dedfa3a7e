"""Names for settings that share a loss, by the values in which they differ."""

from collections.abc import Mapping, Sequence

from east.lab.settings.command import typed
from east.lab.settings.identity import SEARCHED, Json
from east.lab.settings.settings import Science

VARIED = (*(f"hyper.{name}" for name in SEARCHED), "annealing.r")  # by a search


def labels(name: str, configs: Sequence[Science]) -> list[str]:
    """Names for several settings of one loss."""
    flat: list[dict[str, Json]] = []
    for config in configs:
        sections = {section: values for section, values in config.to_json().items() if isinstance(values, dict)}
        values = {
            f"{s}.{n}".removesuffix(".name"): value for s, found in sections.items() for n, value in found.items()
        }
        flat.append({"preset": config.preset} | values | dict.fromkeys(VARIED))
    return distinct_names(name, flat)


def distinct_names(name: str, settings: Sequence[Mapping[str, Json]]) -> list[str]:
    """The name, followed by as few of the values as it takes to tell the settings apart.

    >>> distinct_names("f1", [{"loss.step": "linear", "split.seed": 0}, {"loss.step": "none", "split.seed": 0}])
    ['f1, loss.step=linear', 'f1, loss.step=none']
    """
    names = [name] * len(settings)
    for key in dict.fromkeys(key for values in settings for key in values):
        suffixes = [f", {key}={typed(values[key])}" if values.get(key) is not None else "" for values in settings]
        longer = [label + suffix for label, suffix in zip(names, suffixes, strict=True)]
        if len(set(longer)) > len(set(names)):
            names = longer
    return names
