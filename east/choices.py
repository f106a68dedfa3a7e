"""Names that people type: looked up with a suggestion when they are misspelt."""

from collections.abc import Iterable
from difflib import get_close_matches


def choose(kind: str, name: str, choices: Iterable[str]) -> str:
    """`name`, if it is one of `choices`; otherwise a ValueError that suggests the nearest and lists them all.

    >>> choose("metric", "f1", ["f1", "mcc"])
    'f1'
    """
    choices = sorted(choices)
    if name in choices:
        return name
    near = get_close_matches(str(name).lower(), choices, n=1)
    hint = f", did you mean {near[0]!r}?" if near else "."
    raise ValueError(f"unknown {kind} {name!r}{hint} Choices: {', '.join(choices)}")
