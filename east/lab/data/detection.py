"""Detects whether a column holds numbers, words or dates. Ids, free text and empty columns are not used.

    columns, typed, faults = detect_all(frame, categorical=["postcode"], keep=[])

The kind of a column depends on all of its rows. The encoding learns from values (medians, categories, the first date).
"""

import re
from collections.abc import Collection, Hashable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from pandas.api import types

from east.lab.data import columns, files, notation
from east.lab.data.columns import Categorical, Date, Dropped, Encoder, Numeric
from east.lab.data.common import DataError, shown
from east.lab.data.notation import Mark

FEW = 10  # a column of mixed numbers and text, such as 0 1 2 3+, with at most this many values is categorical
LEVELS = 1000  # a text column with at most this many different words is categorical
ID = re.compile(r"(?i:^|.*[^a-z])(?i:id|uuid|guid|index|rowid)$|.*[a-z](?:ID|Id)$|^Unnamed: \d+$")


def understood(
    path: Path, layout: files.Layout, labels: Collection[str], categorical: Collection[str]
) -> tuple[pd.DataFrame, dict[str, Mark]]:
    """The columns of a text file, and the decimal marks of those that show them.

    A column's own numbers decide first. One such as 48.253 or 1,500 is read by the others: a decimal comma anywhere in
    the file makes its point a thousands separator, and a file with commas between columns has no other decimal commas.
    Names, of classes, groups and categories, are numbers only where these lose nothing.
    """
    named = {*labels, *categorical}
    frame = files.read(path, layout, as_written=named).rename(columns=str)
    text = [str(name) for name in frame if name not in named and types.is_string_dtype(frame[name])]
    read = {name: notation.split_unit(notation.distinct(frame[name])) for name in text}  # unit, and words without it
    clear = {name: notation.find_decimal(words) for name, (_, words) in read.items() if may_be_numbers(words)}
    comma = any(mark == "," and any("," in word for word in read[name][1]) for name, mark in clear.items())
    default: Mark | None = "," if comma else "." if files.text_format(path, layout)[1] == "," else None
    marks = {name: known for name, mark in clear.items() if (known := mark or default)}
    numeric = [*map(str, frame.select_dtypes("number"))]
    if comma:
        frame[numeric] = files.read(path, layout).rename(columns=str)[numeric]
        read |= {name: notation.split_unit(notation.distinct(frame[name])) for name in numeric}
        marks |= {name: notation.find_decimal(read[name][1]) or "," for name in numeric}
    for name, (unit, words) in read.items():
        if name in marks and unit is None:
            frame[name] = notation.converted(frame[name], marks[name], words)
    marks |= {name: "." for name in numeric if name not in marks and (frame[name] % 1 > 0).any()}
    for name in named & {*frame}:
        frame[name] = lossless(frame[name], name in categorical, comma)
    return frame, marks


def may_be_numbers(levels: list[str]) -> bool:
    """True if at least half of the first words are numbers in some notation, and none is a code such as 007."""
    first = levels[: notation.GLANCE]
    return 2 * sum(bool(notation.marks_of(level)) for level in first) >= max(1, len(first)) and not any(
        map(notation.CODE.match, levels)
    )


def lossless(written: pd.Series, exactly: bool, comma: bool) -> pd.Series:
    """Words as numbers, unless two words are one number (1.1 and 1.10), or `exactly` and one is unusual (007)."""
    numbers = notation.inferred(written)
    if numbers is written and comma and not exactly:
        numbers = notation.converted(written, ",")
    if numbers.dtype.kind not in "iuf":
        return numbers
    usual = {*columns.words(numbers.dropna())}
    texts = {re.sub(r"\.0*$", "", word) for word in notation.distinct(written)}
    return written if len(texts) > len(usual) or (exactly and texts != usual) else numbers


def detect_all(
    frame: pd.DataFrame,
    categorical: Collection[Hashable] = (),
    keep: Collection[Hashable] = (),
    decimals: Mapping[str, Mark] = {},
) -> tuple[list[Encoder | Dropped], pd.DataFrame, list[str]]:
    """Kinds of all columns, typed values of the usable ones, and a line for each that the user must decide about.

    Columns in `keep` are used even if they look like ids or free text. decimals: the decimal marks of columns.
    """
    found: dict[str, tuple[Encoder | Dropped, pd.Series]] = {}
    faults = []
    for label, values in frame.items():
        name = str(label)
        try:
            found[name] = detect(name, values, label in categorical, label in keep, decimals.get(name))
        except DataError as error:
            faults.append(f"column {shown(name)} {error}")
    typed = {name: values for name, (kind, values) in found.items() if not isinstance(kind, Dropped)}
    return [kind for kind, _ in found.values()], pd.DataFrame(typed, frame.index), faults


def detect(
    name: str, values: pd.Series, categorical: bool = False, keep: bool = False, decimal: Mark | None = None
) -> tuple[Encoder | Dropped, pd.Series]:
    """Detect the kind of a column from all of its rows. DataError if the user has to decide."""
    column: Encoder | Dropped
    if values.isna().all():
        return Dropped(name=name, reason="is empty"), values
    if categorical or isinstance(values.dtype, pd.CategoricalDtype):  # even where they look like numbers
        column, typed = Categorical(name=name, text=columns.is_text(values)), columns.as_words(values)
    elif types.is_datetime64_any_dtype(values):
        return Date(name=name, format="ISO8601"), columns.as_days(values)
    elif columns.is_plain(values):
        column, typed = Numeric(name=name, decimal=decimal), columns.in_range(columns.as_floats(values))
    elif columns.is_text(values):
        column, typed = detect_text(name, columns.as_words(values), decimal, keep)
    else:
        return Dropped(name=name, reason=f"is of type {values.dtype}: neither numbers, text nor dates"), values
    reason = None if keep or categorical else unusable(column, typed)
    return (Dropped(name=name, reason=reason) if reason else column), typed


def detect_text(name: str, text: pd.Series, decimal: Mark | None, keep: bool) -> tuple[Encoder | Dropped, pd.Series]:
    """Detect whether words are numbers, dates or categories. DataError if most are, but not all."""
    levels, counts = [*text.cat.categories], text.value_counts(sort=False).to_numpy()
    unit, bare = notation.split_unit(levels)
    few = len(levels) <= FEW
    for kind, values in readings(name, levels, unit, bare, decimal):
        stray = np.isnan(values)
        count = int(counts[stray].sum())
        if 0 < count < 0.5 * counts.sum() and not few:
            what = "dates" if isinstance(kind, Date) else f"numbers with {unit}" if unit else "numbers"
            word = levels[int(np.flatnonzero(stray)[0])]
            offer = f"; if that is a missing value: dataset.missing=[{word}]" if len(word) <= 20 else ""
            raise DataError(
                f"has {what}, but also text, such as {shown(word)}, in {count:,} of {counts.sum():,} rows{offer}"
            )
        if not stray.any() and (isinstance(kind, Date) or not few):
            return kind, columns.in_range(columns.by_level(text, values))
    commas = [level for level in levels if "," in level]
    if not (keep or few) and commas and all(map(notation.marks_of, bare)) and notation.find_decimal(bare) is None:
        reason = (
            f"has numbers in an unclear notation: {shown(commas[0])} may have a decimal comma or a thousands "
            "separator; write such numbers without separators"
        )
        return Dropped(name=name, reason=reason), text
    return Categorical(name=name, text=True), text


def readings(
    name: str, levels: list[str], unit: str | None, bare: list[str], decimal: Mark | None
) -> Iterator[tuple[Numeric | Date, np.ndarray]]:
    """Read words as numbers, then as dates. Yields the column and float64 [levels], NaN for words that do not fit."""
    yield (
        Numeric(name=name, decimal=decimal or notation.find_decimal(bare), unit=unit),
        notation.level_numbers(bare, decimal),
    )
    sample = levels[:: max(1, len(levels) // 100)]
    days = {
        format: columns.parse_dates(levels, format)
        for format in columns.DATE_FORMATS
        if 2 * np.isfinite(columns.parse_dates(sample, format)).sum() > len(sample)
    }
    if days:
        best = max(days, key=lambda format: np.isfinite(days[format]).sum())
        yield Date(name=name, format=best), days[best]


def unusable(column: Encoder | Dropped, typed: pd.Series) -> str | None:
    """Reason not to use a column: it is an id, or has so many different words that it is free text or an id."""
    present = typed.dropna()
    if isinstance(column, Numeric) and ID.match(column.name):
        whole = len(typed) > FEW and len(present) == len(typed) and bool((typed % 1 == 0).all())
        return "is an id: a different whole number in every row" if whole and typed.is_unique else None
    if isinstance(column, Categorical):
        levels, rows = len(typed.cat.categories), len(present)
        if levels > LEVELS or (levels > FEW and 2 * levels > rows):
            return (
                f"is free text or an id: {levels:,} different values in {rows:,} rows: {shown(present.iloc[0])}; "
                f"dataset.keep=[{column.name}] would use its frequent values"
            )
    return None
