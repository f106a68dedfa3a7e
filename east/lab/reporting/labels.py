"""Names for settings that share a name, by the values in which they differ."""

from collections.abc import Mapping, Sequence

from east.lab.settings.command import typed
from east.lab.settings.identity import SEARCHED, Json
from east.lab.settings.settings import Science

VARIED = (*(f"hyper.{name}" for name in SEARCHED), "annealing.r")  # by a search


def labels(names: Sequence[str], configs: Sequence[Science]) -> list[str]:
    """Distinct names for settings, except for those that differ only in what a search varies."""
    flat: list[dict[str, Json]] = []
    for config in configs:
        values: dict[str, Json] = {"preset": config.preset}
        for section, found in config.to_json().items():
            if isinstance(found, dict):
                values |= {f"{section}.{name}".removesuffix(".name"): value for name, value in found.items()}
        flat.append(values | dict.fromkeys(VARIED))
    return distinct_names(names, flat)


def distinct_names(names: Sequence[str], settings: Sequence[Mapping[str, Json]]) -> list[str]:
    """Each name, followed by as few of its values as it takes to tell it from others of the same name.

    >>> distinct_names(["f1", "f1"], [{"step": "linear", "split.seed": 0}, {"step": "none", "split.seed": 0}])
    ['f1, step=linear', 'f1, step=none']
    """
    longer = list(names)
    for name in set(names):
        same = [k for k, other in enumerate(names) if other == name]
        for key in dict.fromkeys(key for k in same for key in settings[k]):
            given = {k: settings[k].get(key) for k in same}
            extended = {k: longer[k] + (f", {key}={typed(v)}" if v is not None else "") for k, v in given.items()}
            if len({*extended.values()}) > len({longer[k] for k in same}):
                longer = [extended.get(k, label) for k, label in enumerate(longer)]
    return longer
