"""How numbers are written in text: 1234.5, 1,234.5 or 1.234,5. A notation is named by its decimal mark.

1,500 and 48.253 fit both. Another number shows the mark: 0,5 and 1.234,56 can only have a decimal comma.
Numbers may have a unit, a currency or percent sign: $1,234.50 or 12,5 %.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import numpy as np
import pandas as pd

Mark: TypeAlias = Literal[".", ","]
SEPARATOR: dict[Mark, Mark] = {".": ",", ",": "."}  # decimal mark -> thousands separator
NUMBER = {
    decimal: re.compile(rf"[+-]?(?=[.,]?\d)(\d*|[1-9]\d{{0,2}}(\{separator}\d{{3}})+)(\{decimal}\d*)?([eE][+-]?\d+)?")
    for decimal, separator in SEPARATOR.items()
}
UNITS = "%$€£¥₹₽₩₺₪₫฿₴"
ACCOUNTING = re.compile(rf"([{UNITS}]?)\s*\(([^()+-]*\d[^()+-]*)\)")  # (764.99) is negative
MEASURE = re.compile(rf"([+-]?)([{UNITS}]?)\s*([+-]?[\d.,]+(?:[eE][+-]?\d+)?)\s*([{UNITS}]?)")
CODE = re.compile(r"-?0\d+(?![\d.,])")  # 007, but not 07,5
TRUTH = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}
GLANCE = 1000  # words that decide whether a column may hold numbers


def inferred(written: pd.Series) -> pd.Series:
    """Text as numbers or truth values, if each of its words is one; everything else is unchanged."""
    if pd.api.types.infer_dtype(written, skipna=True) != "string":
        return written
    try:
        numbers = pd.to_numeric(written)
        return written if numbers.dtype == object else numbers  # which it is for codes too long for numbers
    except (ValueError, TypeError):  # as soon as a word is no number
        return written.map(TRUTH) if written.dropna().isin(TRUTH).all() else written


def converted(written: pd.Series, decimal: Mark) -> pd.Series:
    """Text as numbers with this decimal mark; unchanged if it has other words, or codes too long for numbers."""
    codes, levels = pd.factorize(written)
    numbers = level_numbers(signed(levels), decimal)
    fit = bool((np.abs(numbers) < 2**63).all())
    return pd.Series(np.append(numbers, np.nan)[codes], written.index) if fit else written


def signed(levels: Iterable[str]) -> list[str]:
    """Words with a minus sign where they have a typographic one, or parentheses.

    >>> signed(["(764.99)", "$ (5)", "\N{MINUS SIGN}1", "a (b)"])
    ['-764.99', '-$5', '-1', 'a (b)']
    """
    levels = [str(level).strip().replace("\N{MINUS SIGN}", "-") for level in levels]
    return [f"-{match[1]}{match[2]}" if (match := ACCOUNTING.fullmatch(level)) else level for level in levels]


def split_unit(levels: Sequence[str]) -> tuple[str | None, list[str]]:
    """The unit of most words, and the words without it; those with another unit, or none, become blank.

    >>> split_unit(["$1,500", "-$0.50", "€3"]), split_unit(["12 kg"])
    (('$', ['1,500', '-0.50', '']), (None, ['12 kg']))
    """
    levels = signed(levels)
    first = [MEASURE.fullmatch(level) for level in levels[:GLANCE]]
    counts = Counter(match[2] + match[4] for match in first if match)
    unit = max(UNITS, key=lambda unit: counts[unit])
    if not counts[unit] or 2 * counts[unit] < len(first):
        return None, levels
    matches = map(MEASURE.fullmatch, levels)
    return unit, [match[1] + match[3] if match and match[2] + match[4] == unit else "" for match in matches]


def level_numbers(levels: Sequence[str], decimal: Mark | None = None) -> np.ndarray:
    """float64 [levels], NaN for words that are not numbers. Without `decimal`, the words themselves must show it.

    Then all are NaN if one has a leading zero, as codes do.

    >>> level_numbers(["25,981.63", "1,500"]), level_numbers(["1,500"]), level_numbers(["1,500"], ",")
    (array([25981.63,  1500.  ]), array([nan]), array([1.5]))
    """
    if decimal is None and any(CODE.match(level) for level in levels):
        return np.full(len(levels), np.nan)
    decimal = decimal or find_decimal(levels)
    texts = levels if decimal is None else [python_number(level, decimal) for level in levels]
    return pd.to_numeric(pd.Series(texts, dtype=object), errors="coerce").to_numpy(dtype=float)


def python_number(level: str, decimal: Mark) -> str:
    """A number in Python's notation; blank if its separators are not where thousands end."""
    if SEPARATOR[decimal] not in level:
        return level.replace(decimal, ".")
    return level.replace(SEPARATOR[decimal], "").replace(decimal, ".") if NUMBER[decimal].fullmatch(level) else ""


def find_decimal(levels: Sequence[str]) -> Mark | None:
    """The decimal mark that these words show; None if they show none, or both."""
    shown = [mark for mark in SEPARATOR if any(shows(level, mark) for level in levels)]
    return shown[0] if len(shown) == 1 else None


def shows(level: str, decimal: Mark) -> bool:
    """Whether a word is a number with this decimal mark only."""
    return not NUMBER[SEPARATOR[decimal]].fullmatch(level) and NUMBER[decimal].fullmatch(level) is not None


def is_number(level: str) -> bool:
    return any(number.fullmatch(level) for number in NUMBER.values())


def are_numbers(levels: Sequence[str]) -> bool:
    """Whether at least half of the first words are numbers in some notation, and none is a code such as 007."""
    first = levels[:GLANCE]
    return 2 * sum(map(is_number, first)) >= max(1, len(first)) and not any(map(CODE.match, levels))


def is_unclear(levels: Sequence[str]) -> bool:
    """Whether all words are numbers, some with commas, but they show no decimal mark, or both."""
    return any("," in level for level in levels) and all(map(is_number, levels)) and find_decimal(levels) is None
