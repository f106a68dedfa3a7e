"""What the columns of a file hold: numbers, words or dates. Ids, free text and empty columns are not features.

    columns, typed, faults = detect_all(frame, categorical=["postcode"], keep=[])

The kind of a column depends on all of its rows. The encoding learns from values (medians, categories, the first date).
"""

import re
from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
import pandas as pd

from east.lab.data.columns import (
    DATE_FORMATS,
    Categorical,
    Date,
    Dropped,
    Encoder,
    Numeric,
    as_days,
    as_floats,
    as_words,
    by_level,
    in_range,
    is_date,
    is_plain,
    is_text,
    parse_dates,
    words,
)
from east.lab.data.common import DataError, shown
from east.lab.data.notation import (
    NUMBER,
    Mark,
    are_numbers,
    converted,
    find_decimal,
    inferred,
    is_unclear,
    level_numbers,
    split_unit,
)

FEW = 10  # a column of mixed numbers and text, such as 0 1 2 3+, with at most this many values is categorical
LEVELS = 1000  # a text column with at most this many different words is categorical
ID = re.compile(r"(?i:^|.*[^a-z])(?i:id|uuid|guid|index|rowid)$|.*[a-z](?:ID|Id)$|^Unnamed: \d+$")


def understood(
    written: pd.DataFrame, delimiter: str, labels: Collection[str], categorical: Collection[str]
) -> tuple[pd.DataFrame, dict[str, Mark]]:
    """The text of a file as numbers where a column has nothing else, and the decimal marks of columns that show them.

    A column's own numbers decide first. One such as 48.253 or 1,500 is read by the others: a decimal comma anywhere in
    the file makes its point a thousands separator, and a file with commas between columns has no other decimal commas.
    Names stay as written where numbers would lose something: of a `categorical` column unless all are usual (7 or 7.0,
    but not 007); of `labels`, the target and the group, if two words are the same number, as 1.1 and 1.10 are.
    """
    frame = {str(name): inferred(values) for name, values in written.items()}
    text = {name: distinct(values) for name, values in frame.items() if name not in categorical and is_text(values)}
    bare = {name: split_unit(levels)[1] for name, levels in text.items()}
    clear = {name: find_decimal(levels) for name, levels in bare.items() if are_numbers(levels)}
    comma = any(mark == "," and any("," in level for level in bare[name]) for name, mark in clear.items())
    default: Mark | None = "," if comma else "." if delimiter == "," else None
    marks = {name: known for name, mark in clear.items() if (known := mark or default)}
    for name, values in frame.items():
        kind = "" if name in categorical else values.dtype.kind
        if comma and kind in "iuf":
            marks[name] = "," if kind != "f" or all(map(NUMBER[","].fullmatch, distinct(written[name]))) else "."
        elif kind == "f" and (values.dropna() % 1 != 0).any():
            marks[name] = "."
    for name, mark in marks.items():
        if name in text or mark == ",":
            frame[name] = converted(written[name], mark)
    for name in {*labels, *categorical} & {*frame}:
        if frame[name].dtype.kind in "iuf":
            usual = {*words(frame[name].dropna())}
            texts = {re.sub(r"\.0*$", "", text) for text in distinct(written[name])}
            if len(texts) > len(usual) or (name in categorical and texts != usual):
                frame[name] = written[name]
    return pd.DataFrame(frame), marks


def distinct(written: pd.Series) -> list[str]:
    """The different words of a column of text, without blanks around them."""
    return [str(value).strip() for value in written.dropna().unique()]


def detect_all(
    frame: pd.DataFrame,
    categorical: Collection[Hashable] = (),
    keep: Collection[Hashable] = (),
    decimals: Mapping[str, Mark] = {},
) -> tuple[list[Encoder | Dropped], pd.DataFrame, list[str]]:
    """The kinds of all columns, typed values of those that can be used, and a line for each the user must decide about.

    Columns in `keep` are used even if they look like ids or free text. decimals: the decimal marks of columns.
    """
    columns: list[Encoder | Dropped] = []
    typed: dict[str, pd.Series] = {}
    faults = []
    for label, values in frame.items():
        name = str(label)
        try:
            column, found = detect(name, values, label in categorical, label in keep, decimals.get(name))
        except DataError as error:
            faults.append(f"column {shown(name)} {error}")
            continue
        columns.append(column)
        if not isinstance(column, Dropped):
            typed[name] = found
    return columns, pd.DataFrame(typed, frame.index), faults


def detect(
    name: str, values: pd.Series, categorical: bool = False, keep: bool = False, decimal: Mark | None = None
) -> tuple[Encoder | Dropped, pd.Series]:
    """Detect the kind of a column from all of its rows. DataError if the user has to decide."""
    if values.isna().all():
        return Dropped(name=name, reason="is empty"), values
    column: Encoder | Dropped
    named = categorical or isinstance(values.dtype, pd.CategoricalDtype)  # even where they look like numbers
    if is_date(values) and not named:
        return Date(name=name, format="ISO8601"), as_days(values)
    if is_plain(values) and not named:
        column, typed = Numeric(name=name, decimal=decimal), in_range(as_floats(values))
    elif named or is_text(values):
        typed = as_words(values)
        column = words_only = Categorical(name=name, text=is_text(values))
        if not named:
            column, typed = detect_text(words_only, typed, decimal, keep)
    else:
        return Dropped(name=name, reason=f"is of type {values.dtype}: neither numbers, text nor dates"), values
    reason = None if keep or categorical else unusable(column, typed)
    return (Dropped(name=name, reason=reason) if reason else column), typed


def detect_text(
    column: Categorical, text: pd.Series, decimal: Mark | None, keep: bool
) -> tuple[Encoder | Dropped, pd.Series]:
    """Detect whether words are numbers, dates or categories. DataError if most are, but not all."""
    levels, counts = [*text.cat.categories], text.value_counts(sort=False).to_numpy()
    unit, bare = split_unit(levels)
    numbers = Numeric(name=column.name, decimal=decimal or find_decimal(bare), unit=unit)
    format, days = level_dates(levels)
    few = len(levels) <= FEW
    for kind, values in ((numbers, level_numbers(bare, decimal)), (Date(name=column.name, format=format), days)):
        stray = np.isnan(values)
        count = int(counts[stray].sum())
        if 0 < count < 0.5 * counts.sum() and not few:
            what = "dates" if isinstance(kind, Date) else f"numbers with {unit}" if unit else "numbers"
            word = levels[int(np.flatnonzero(stray)[0])]
            offer = f"; if that is a missing value: dataset.missing=[{word}]" if len(word) <= 20 else ""
            texts = "text" if count == 1 else "texts"
            raise DataError(f"has {what}, but also {count:,} {texts} such as {shown(word)}{offer}")
        if not stray.any() and not (few and kind is numbers):
            return kind, in_range(by_level(text, values))
    if not (keep or few) and is_unclear(bare):
        example = shown(next(level for level in levels if "," in level))
        reason = (
            f"has numbers in an unclear notation: {example} may have a decimal comma or a thousands separator; "
            "write such numbers without separators"
        )
        return Dropped(name=column.name, reason=reason), text
    return column, text


def unusable(column: Encoder | Dropped, typed: pd.Series) -> str | None:
    """Why a column is no feature: it is an id, or has so many different words that it is free text or an id."""
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


def level_dates(levels: Sequence[str]) -> tuple[str, np.ndarray]:
    """The date format of most words, and their days since 1970 as float64 [levels], NaN for the others."""
    best, most = ("ISO8601", np.full(len(levels), np.nan)), 0
    sample = levels[:: max(1, len(levels) // 100)]
    for format in DATE_FORMATS:
        if 2 * np.isfinite(parse_dates(sample, format)).sum() <= len(sample):
            continue
        days = parse_dates(levels, format)
        count = int(np.isfinite(days).sum())
        if count > most:
            best, most = (format, days), count
        if most == len(levels):
            break
    return best
