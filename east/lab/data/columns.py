"""What the columns of a file hold: numbers, words or dates. Ids, free text and empty columns are not features.

    columns = read_columns(frame, categorical=["postcode"], keep=[], path="my.csv")

The kind of a column depends on all of its rows. The encoding learns from values (medians, categories, the first date).
"""

import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from east.lab.data.common import DataError, digest, listed, shown
from east.lab.data.notation import find_decimal, is_unclear, level_numbers, split_unit

if TYPE_CHECKING:
    import pandas as pd

FEW = 10  # a column of mixed numbers and text, such as 0 1 2 3+, with at most this many values is categorical
LEVELS = 1000  # a text column with at most this many different words is categorical
OWN = 50  # the most frequent categories that get their own feature; if two or more are left, they share one
LARGEST = float(np.finfo(np.float32).max)
ID = re.compile(r"(?i:^|.*[^a-z])(?i:id|uuid|guid|index|rowid)$|.*[a-z](?:ID|Id)$|^Unnamed: \d+$")
# Tried in this order: 03/04/2024 is read as March 4 unless another row has a day above 12 in front.
DATE_FORMATS = (
    "ISO8601", "%Y/%m/%d", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%Y.%m.%d",
    "%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S", "%d.%m.%y",
    "%m/%d/%Y", "%m/%d/%Y %H:%M", "%m/%d/%Y %H:%M:%S", "%m/%d/%Y %I:%M %p", "%m/%d/%Y %I:%M:%S %p", "%m/%d/%y",
    "%d/%m/%Y", "%d/%m/%Y %H:%M", "%d/%m/%Y %H:%M:%S", "%d/%m/%y", "%d-%m-%Y", "%m-%d-%Y",
    "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%d-%b-%y", "%b %d, %Y", "%B %d, %Y", "%d/%b/%Y:%H:%M:%S %z",
    "%Y-%m", "%m/%Y", "%b-%Y", "%b %Y", "%B %Y",
)  # fmt: skip
ISO_START = re.compile(r"\d{4}-\d{2}-\d{2}([T ]|$)")
DAY = 86400.0


@dataclass(frozen=True)
class Numbers:
    name: str
    values: np.ndarray  # float64 [n], NaN where missing
    decimal: str | None = None  # the decimal mark in the file; None if no number shows it
    unit: str | None = None  # the currency or percent sign of all numbers


@dataclass(frozen=True)
class Words:
    name: str
    codes: np.ndarray  # int64 [n], into `levels`; -1 where missing
    levels: tuple[str, ...]  # in alphabetical order
    text: bool  # False: numbers used as names, such as postcodes


@dataclass(frozen=True)
class Dates:
    name: str
    days: np.ndarray  # float64 [n] since 1970-01-01, NaN where missing
    format: str  # one of DATE_FORMATS


@dataclass(frozen=True)
class Dropped:
    """A column that is not used as a feature, and why."""

    name: str
    reason: str


Column = Numbers | Words | Dates


@dataclass(frozen=True)
class Columns:
    """The columns of a file, typed but not yet encoded."""

    used: tuple[Column, ...]
    dropped: tuple[Dropped, ...] = ()
    frame: "pd.DataFrame | None" = field(default=None, compare=False, repr=False)  # as read; its index numbers the rows

    def take(self, rows: np.ndarray) -> "Columns":
        frame = None if self.frame is None else self.frame.iloc[rows]
        return replace(self, used=tuple(take(column, rows) for column in self.used), frame=frame)

    def hidden_digests(self) -> list[str]:
        """Digests of the columns that the features do not fully reflect: those with rare words or a unit."""
        digests = []
        for column in self.used:
            if isinstance(column, Words) and len(column.levels) > OWN + 1:
                digests += [digest(column.codes), words_digest(column.levels)]
            if isinstance(column, Numbers) and column.unit:
                digests.append(digest(np.array(column.unit)))
        return digests

    def fine_digests(self) -> list[str]:
        """Digests of the numbers that are too fine for the float32 of features."""
        return [digest(c.values) for c in self.used if isinstance(c, Numbers) and is_fine(c.values)]


def words_digest(levels: Sequence[str]) -> str:
    """The digest of np.array(levels), which would give every word the space of the longest."""
    longest = max(map(len, levels))
    state = hashlib.sha256(f"<U{longest}({len(levels)},)".encode())
    for level in levels:
        state.update(level.encode("utf-32-le", "surrogatepass").ljust(4 * longest, b"\0"))
    return state.hexdigest()


def take(column: Column, rows: np.ndarray) -> Column:
    """Some rows of a column."""
    match column:
        case Numbers():
            return replace(column, values=column.values[rows])
        case Words():
            return replace(column, codes=column.codes[rows])
        case Dates():
            return replace(column, days=column.days[rows])


def read_columns(
    frame: "pd.DataFrame", categorical: Sequence[str], keep: Sequence[str], path: str, decimals: Mapping[str, str] = {}
) -> Columns:
    """Every column of the frame; those in `keep` are used even if they look like ids or free text.

    decimals: the decimal marks of columns, as far as the file shows them.
    """
    used, dropped, faults = detect_all(frame, categorical, keep, decimals)
    if faults:
        raise DataError(
            f"{path}: some columns cannot be used. Repair them, leave them out (dataset.drop=[…]) or "
            f"make them categories (dataset.categorical=[…]):{listed(faults)}"
        )
    if not used:
        reasons = "".join(f"; {shown(column.name)} {column.reason}" for column in dropped[:5])
        raise DataError(f"{path}: no feature column is left besides the target{reasons}.")
    return Columns(tuple(used), tuple(dropped))


def detect_all(
    frame: "pd.DataFrame",
    categorical: Sequence[Hashable],
    keep: Sequence[Hashable],
    decimals: Mapping[str, str] = {},
) -> tuple[list[Column], list[Dropped], list[str]]:
    """The columns that can be used, those that cannot, and a line for each that the user has to decide about."""
    used: list[Column] = []
    dropped: list[Dropped] = []
    faults = []
    for name, values in frame.items():
        try:
            column = detect(str(name), values, name in categorical, name in keep, decimals.get(str(name)))
        except DataError as error:
            faults.append(f"column {shown(name)} {error}")
            continue
        if isinstance(column, Dropped):
            dropped.append(column)
        else:
            used.append(column)
    return used, dropped, faults


def detect(
    name: str, values: "pd.Series", categorical: bool = False, keep: bool = False, decimal: str | None = None
) -> Column | Dropped:
    """Detect the kind of a column from all of its rows. DataError if the user has to decide."""
    import pandas as pd

    types = pd.api.types
    present = values.dropna()
    if present.empty:
        return Dropped(name, "is empty")
    if categorical:
        return words_column(name, values)
    if isinstance(values.dtype, pd.CategoricalDtype):  # names, also where they look like numbers
        return unless_free_text(words_column(name, values), keep)
    if types.is_datetime64_any_dtype(values):
        return Dates(name, as_days(values), "ISO8601")
    if is_boolean(values):
        return Numbers(name, values.astype("boolean").to_numpy(dtype=float, na_value=np.nan))
    if is_text(values):
        return detect_text(words_column(name, values), keep, decimal)
    if not types.is_numeric_dtype(values) or types.is_complex_dtype(values):
        return Dropped(name, f"is of type {values.dtype}, which is neither numbers, text nor dates")
    column = Numbers(name, values.to_numpy(dtype=float, na_value=np.nan), decimal)
    check_range(column.values, values.index)
    return unless_id(column, keep)


def detect_text(column: Words, keep: bool, decimal: str | None = None) -> Column | Dropped:
    """Detect whether text holds numbers, dates or categories, or is not a feature."""
    counts = np.bincount(column.codes[column.codes >= 0], minlength=len(column.levels))
    levels, rows = len(column.levels), int(counts.sum())
    unit, bare = split_unit(column.levels)
    numbers = level_numbers(bare, decimal)
    format, days = level_dates(column.levels)
    for kind, values in (("numbers", numbers), ("dates", days)):
        stray = np.isnan(values)
        few = levels <= FEW and kind == "numbers"
        if 0 < counts[stray].sum() < 0.5 * rows and levels > FEW:
            example = shown(column.levels[int(np.flatnonzero(stray)[0])])
            count = int(counts[stray].sum())
            measured = f"numbers with {unit}" if unit and kind == "numbers" else kind
            raise DataError(f"has {measured}, but also {count:,} {'text' if count == 1 else 'texts'} such as {example}")
        if not stray.any() and not few:
            by_row = np.append(values, np.nan)[column.codes]
            if kind == "dates":
                return Dates(column.name, by_row, format)
            check_range(by_row)
            return unless_id(Numbers(column.name, by_row, decimal or find_decimal(bare), unit), keep)
    if not keep and levels > FEW and is_unclear(bare):
        example = next(level for level in column.levels if "," in level)
        return Dropped(
            column.name,
            f"has numbers in an unclear notation: {shown(example)} may have a decimal comma or a thousands separator; "
            "write such numbers without separators",
        )
    return unless_free_text(column, keep)


def unless_id(column: Numbers, keep: bool) -> Numbers | Dropped:
    """The column, unless it is an id."""
    if not keep and is_id(column.name, column.values):
        return Dropped(column.name, "is an id: a different whole number in every row")
    return column


def unless_free_text(column: Words, keep: bool) -> Words | Dropped:
    """The column, unless it has so many different words that it is free text or an id."""
    levels, rows = len(column.levels), int((column.codes >= 0).sum())
    if not keep and (levels > LEVELS or (levels > FEW and 2 * levels > rows)):
        example = shown(column.levels[int(column.codes[column.codes >= 0][0])])
        return Dropped(
            column.name,
            f"is free text or an id: {levels:,} different values in {rows:,} rows: {example}; "
            f"dataset.keep=[{column.name}] would use its frequent values",
        )
    return column


def words_column(name: str, values: "pd.Series") -> Words:
    """The values as words, coded by their alphabetical order."""
    import pandas as pd

    present = values.notna().to_numpy()
    codes = np.full(len(values), -1, dtype=np.int64)
    # As objects: an array of strings would give every row the space of the longest.
    codes[present], levels = pd.factorize(words(values[present]), sort=True)
    return Words(name, codes, tuple(levels.tolist()), is_text(values))


def words(column: "pd.Series") -> np.ndarray:
    """Values as stripped text; 1.0 is "1", since a missing value makes whole numbers floats."""
    import pandas as pd

    if pd.api.types.is_float_dtype(column):
        return np.array([str(int(value)) if value.is_integer() else str(value) for value in column], dtype=object)
    return column.astype(str).str.strip().to_numpy(dtype=object)


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


def parse_dates(levels: Sequence[str], format: str) -> np.ndarray:
    """Days since 1970 as float64 [levels], NaN for words in another format; times with a zone are converted to UTC."""
    import pandas as pd

    texts = pd.Series(levels, dtype=object)
    if format == "ISO8601":  # which would also accept a bare year, or a number of eight digits
        texts = texts.where(np.array([bool(ISO_START.match(level)) for level in levels], dtype=bool))
    return as_days(pd.to_datetime(texts, format=format, errors="coerce", utc=True))


def as_days(values: "pd.Series") -> np.ndarray:
    """Dates as float64 days since 1970-01-01, NaN where missing."""
    if getattr(values.dt, "tz", None) is not None:
        values = values.dt.tz_convert("UTC").dt.tz_localize(None)
    seconds = values.to_numpy().astype("datetime64[s]").astype(np.int64)
    return np.where(values.isna(), np.nan, seconds / DAY)


def tells_class(column: Column, labels: np.ndarray) -> bool:
    """Whether the column alone tells the class of every row: each word by itself, numbers and dates by their range.

    Missing values count as a word, or as the largest number. Words that hardly repeat, and classes with fewer than
    FEW rows, prove nothing.
    """
    match column:
        case Words(codes=values) | Numbers(values=values) | Dates(days=values):
            ranks = np.unique(values, return_inverse=True)[1]
    order = np.lexsort((labels, ranks))
    new_value, new_class = np.diff(ranks[order]) != 0, np.diff(labels[order]) != 0
    counts = np.bincount(labels)
    if counts[counts > 0].min() < FEW or (new_class & ~new_value).any():
        return False
    if isinstance(column, Words):
        return FEW * (1 + int(new_value.sum())) <= len(labels)
    return 1 + int(new_class.sum()) == int(np.count_nonzero(counts))


def check_range(values: np.ndarray, index: "pd.Index | None" = None) -> None:
    """DataError if a number does not fit in float32, in which networks compute; it names the first."""
    bad = np.flatnonzero(np.abs(values) > LARGEST)
    if not len(bad):
        return
    row, value = row_number(int(bad[0]), index), values[bad[0]]
    if np.isinf(value):
        raise DataError(f"has an infinite value in row {row:,}")
    raise DataError(f"has {value:g} in row {row:,}, too large for 32-bit numbers (at most {LARGEST:.2g})")


def is_fine(values: np.ndarray) -> bool:
    """Whether float32 would round these numbers by more than a thousandth of their standard deviation."""
    present = values[~np.isnan(values)]
    return len(present) > 0 and bool(np.spacing(np.float32(np.abs(present).max())) > 1e-3 * present.std() > 0)


def row_number(position: int, index: "pd.Index | None" = None) -> int:
    """The number of a row, counted from 1 below the header; the index of a portion knows where it begins."""
    import pandas as pd

    return int(index[position] if isinstance(index, pd.RangeIndex) else position) + 1


def is_id(name: str, values: np.ndarray) -> bool:
    """Whether a column is named like an id and has a different whole number in every row."""
    whole = len(values) > FEW and bool(np.isfinite(values).all()) and bool((values == np.floor(values)).all())
    return whole and ID.match(name) is not None and len(np.unique(values)) == len(values)


def is_text(column: "pd.Series") -> bool:
    import pandas as pd

    types = pd.api.types
    return (
        types.is_string_dtype(column) or types.is_object_dtype(column) or isinstance(column.dtype, pd.CategoricalDtype)
    )


def is_boolean(column: "pd.Series") -> bool:
    """Whether a column is True and False, including those with blanks, which pandas reads as objects."""
    import pandas as pd

    return pd.api.types.infer_dtype(column, skipna=True) == "boolean"
