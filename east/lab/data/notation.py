"""How numbers are written in text: 1234.5, 1,234.5 or 1.234,5. A notation is named by its decimal mark.

1,500 and 48.253 fit both. Another number shows the mark: 0,5 and 1.234,56 can only have a decimal comma.
Numbers may have a unit, a currency or percent sign: $1,234.50 or 12,5 %.
"""

import re
from collections import Counter
from collections.abc import Sequence
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
ACCOUNTING = re.compile(rf"\A([{UNITS}]?)\s*\(([^()+-]*\d[^()+-]*)\)\Z")  # (764.99) is negative
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


def converted(written: pd.Series, decimal: Mark, words: list[str] | None = None) -> pd.Series:
    """Text as numbers with this decimal mark, unless some of its `words` are none, or codes too long for numbers."""
    numbers = level_numbers(distinct(written) if words is None else words, decimal)
    fit = bool((np.abs(numbers) < 2**63).all())
    return pd.Series(np.append(numbers, np.nan)[pd.factorize(written)[0]], written.index) if fit else written


def distinct(written: pd.Series) -> list[str]:
    """The different words of a column of text, without blanks around them."""
    return [str(word).strip() for word in written.dropna().unique()]


def split_unit(levels: list[str]) -> tuple[str | None, list[str]]:
    """The unit of most words, and the words without it; those with another unit, or none, become blank.

    Typographic minus signs and an accountant's parentheses become a plain minus sign.

    >>> split_unit(["$1,500", "-$0.50", "€3", "$ (5)"]), split_unit(["12 kg", "(764.99)"])
    (('$', ['1,500', '-0.50', '', '-5']), (None, ['12 kg', '-764.99']))
    """
    if {"(", "\N{MINUS SIGN}"} & {*"".join(levels)}:
        levels = [ACCOUNTING.sub(r"-\1\2", level.replace("\N{MINUS SIGN}", "-")) for level in levels]
    first = levels[:GLANCE]
    counts = Counter(match[2] + match[4] for match in map(MEASURE.fullmatch, first) if match)
    unit, count = next(iter(counts.most_common(1)), ("", 0))
    if len(unit) != 1 or 2 * count < len(first):
        return None, levels
    matches = map(MEASURE.fullmatch, levels)
    return unit, [match[1] + match[3] if match and match[2] + match[4] == unit else "" for match in matches]


def level_numbers(levels: Sequence[str], decimal: Mark | None = None) -> np.ndarray:
    """float64 [levels], NaN for words that are not numbers. Without `decimal`, the words themselves must show it.

    Then all are NaN if one has a leading zero, as codes do.

    >>> level_numbers(["25,981.63", "1,500"]), level_numbers(["1,500"]), level_numbers(["1,500"], ",")
    (array([25981.63,  1500.  ]), array([nan]), array([1.5]))
    """
    if decimal is None and any(map(CODE.match, levels)):
        return np.full(len(levels), np.nan)
    if decimal := decimal or find_decimal(levels):
        number, separator = NUMBER[decimal], SEPARATOR[decimal]
        if any(separator in level for level in levels):
            levels = [level.replace(separator, "") if number.fullmatch(level) else "" for level in levels]
        levels = [level.replace(decimal, ".") for level in levels]
    return pd.to_numeric(pd.Series(levels, dtype=object), errors="coerce").to_numpy(dtype=float)


def find_decimal(levels: Sequence[str]) -> Mark | None:
    """The decimal mark that these words show; None if they show none, or both."""
    shown = {marks[0] for marks in map(marks_of, levels) if len(marks) == 1}
    return shown.pop() if len(shown) == 1 else None


def marks_of(level: str) -> list[Mark]:
    """The decimal marks with which a word is a number."""
    return [mark for mark, number in NUMBER.items() if number.fullmatch(level)]
