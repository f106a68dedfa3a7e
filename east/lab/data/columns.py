"""Kinds of columns (numbers, words, dates, unused) and the features they become.

A typed column is a pandas Series: float64 numbers (NaN where missing), float64 days since 1970-01-01, or a category of
words in alphabetical order. Each kind learns from training rows (`fit`), turns typed values into features, and reads
its column from new rows (`read`), or refuses it. As JSON it is part of a saved model, which may come from anyone.
"""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from math import floor
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
import pandas as pd
from pandas.api import types
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

from east.choices import choose
from east.lab.data.common import DataError, shown
from east.lab.data.notation import UNITS, Mark, inferred, level_numbers, split_unit

OWN = 50  # the most frequent categories that get their own feature; if two or more are left, they share one
MISSING, OTHER = "(missing)", "(other)"
LARGEST = float(np.finfo(np.float32).max)
DAY = 86400.0
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


def days_of(text: object) -> float:
    """Days since 1970-01-01 of 2024-01-31 or 2024-01-31T12:30:00."""
    try:
        return datetime.fromisoformat(str(text)).replace(tzinfo=UTC).timestamp() / DAY
    except ValueError:
        raise ValueError("expected a date such as 2024-01-31") from None


def as_text(days: float) -> str:
    """The inverse of `days_of`."""
    return str(np.datetime64(round(days * DAY), "s")).removesuffix("T00:00:00")


Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Days = Annotated[float, PlainValidator(days_of), PlainSerializer(as_text, when_used="json")]
# A parser could take for ever with any other format.
DateFormat = Annotated[str, AfterValidator(lambda format: choose("date format", format, DATE_FORMATS))]


class Kind(BaseModel):
    """Base of all kinds."""

    model_config = ConfigDict(frozen=True, strict=True)
    name: str


class Measured(Kind):
    """Numbers or dates. Missing ones become the median; if training rows had any, a further feature marks them."""

    parts: ClassVar[tuple[str, ...]]  # endings of the names of its features
    median: Number = 0.0
    indicator: bool = False

    def fit(self, values: pd.Series) -> Self:
        median = 0.0 if values.isna().all() else float(values.median())
        return self.model_copy(update={"median": median, "indicator": values.hasnans})

    @property
    def feature_names(self) -> list[str]:
        return [f"{self.name}{part}" for part in (*self.parts, *["_missing"] * self.indicator)]

    def features(self, values: pd.Series) -> np.ndarray:
        absent = values.isna().to_numpy()
        marks = [absent] if self.indicator else []
        return np.stack([*self.filled(values.fillna(self.median).to_numpy()), *marks], axis=1).astype(np.float64)

    def filled(self, values: np.ndarray) -> list[np.ndarray]:
        """Features of numbers or days [n] without gaps."""
        raise NotImplementedError

    @property
    def gaps(self) -> str:
        return ", missing values become the median and are marked" if self.indicator else ""


class Numeric(Measured):
    """One feature, the number."""

    kind: Literal["numeric"] = "numeric"
    parts = ("",)
    decimal: Mark | None = None  # the decimal mark of training; None: not shown there
    unit: Annotated[str, Field(pattern=f"^[{UNITS}]$")] | None = None  # the currency or percent sign of training

    def filled(self, numbers: np.ndarray) -> list[np.ndarray]:
        return [numbers]

    @property
    def what(self) -> str:
        marks = [*([self.unit] if self.unit else []), *(["a decimal comma"] if self.decimal == "," else [])]
        return f"numbers with {' and '.join(marks)}" if marks else "numbers"

    def read(self, values: pd.Series) -> pd.Series:
        """New rows of this column; DataError says what was expected and what it got."""
        if self.unit is None and self.decimal != ",":
            values = inferred(values)
        if (self.unit is None and is_plain(values)) or values.isna().all():
            return in_range(as_floats(values))
        text = as_words(values)
        unit, bare = split_unit([*text.cat.categories])
        numbers = level_numbers(bare, self.decimal) if unit == self.unit else np.full(len(bare), np.nan)
        return in_range(by_level(text, numbers, self.what))

    def describe(self) -> str:
        return f"{self.what}, median {self.median:g}{self.gaps}"


class Categorical(Kind):
    """A 0/1 feature for each category. Unknown words count as `other` if there is such a feature, else all are 0.

    A word "(missing)" or "(other)" in the file means the same as here.
    """

    kind: Literal["categorical"] = "categorical"
    text: bool  # False: numbers used as names
    categories: Annotated[tuple[str, ...], Field(strict=False)] = ()  # alphabetical, then "(missing)" if there were any
    other: bool = False  # whether rare words share an extra feature

    def fit(self, values: pd.Series) -> Self:
        counts = values.value_counts(sort=False)  # in alphabetical order
        counts = counts[counts > 0]
        other = len(counts) > OWN + 1
        frequent = counts.nlargest(OWN).index.difference([OTHER]) if other else counts.index
        missing = [MISSING] if values.hasnans and MISSING not in frequent else []
        categories = (*(level for level in counts.index if level in frequent), *missing)
        return self.model_copy(update={"categories": categories, "other": other})

    @property
    def feature_names(self) -> list[str]:
        return [f"{self.name}={category}" for category in (*self.categories, *[OTHER] * self.other)]

    def features(self, values: pd.Series) -> np.ndarray:
        place = {category: k for k, category in enumerate(self.categories)}
        unknown = len(place) if self.other else -1
        by_code = [*(place.get(level, unknown) for level in values.cat.categories), place.get(MISSING, -1)]
        column = np.array(by_code)[values.cat.codes]  # code -1, missing, is the last
        features = np.zeros((len(values), len(place) + self.other), dtype=np.float32)
        rows = np.flatnonzero(column >= 0)
        features[rows, column[rows]] = 1
        return features

    def read(self, values: pd.Series) -> pd.Series:
        """New rows of this column. A few rows of 0 1 2 3+ may look like numbers, and one of them may be new."""
        known = {*self.categories}
        if not self.text or known <= {"True", "False", MISSING}:
            values = inferred(values)
        text = as_words(values)
        levels = [*text.cat.categories]
        if levels and not (is_text(values) if self.text else is_plain(values)):
            usual = {*words(as_numbers(known).dropna())}  # where numbers are written otherwise, a new 1 might mean 01
            if not self.text or not ((usual and usual <= known) or {*levels} <= known):
                raise DataError(f"expected {'text' if self.text else 'numbers'}, got {values.dtype}")
        numbers = bool(levels) and as_numbers(levels).notna().all() and as_numbers(known).isna().all()
        if self.text and numbers and not self.other:  # the file has probably mixed up its columns
            example = shown("".join(self.categories[:1]))
            raise DataError(f"expected text such as {example}, got numbers such as {shown(levels[0])}")
        return text

    def describe(self) -> str:
        first = ", ".join(shown(category, 20, quoted=False) for category in self.categories[:6])
        more = ", …" if len(self.categories) > 6 else ""
        count = "1 category" if len(self.categories) == 1 else f"{len(self.categories)} categories"
        return f"{count}{', rarer ones together' if self.other else ''}: {first}{more}"


class Date(Measured):
    """Year, month, weekday (Monday is 0) and days since the first date of training."""

    kind: Literal["date"] = "date"
    parts = ("_year", "_month", "_weekday", "_days")
    format: DateFormat
    median: Days = 0.0  # days since 1970-01-01; in JSON 2024-01-31
    origin: Days = 0.0

    def fit(self, values: pd.Series) -> Self:
        return super().fit(values).model_copy(update={"origin": 0.0 if values.isna().all() else float(values.min())})

    def filled(self, days: np.ndarray) -> list[np.ndarray]:
        date = np.floor(days).astype(np.int64).astype("datetime64[D]")
        month = date.astype("datetime64[M]").astype(np.int64)
        weekday = (date.astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
        return [month // 12 + 1970, month % 12 + 1, weekday, days - self.origin]

    def read(self, values: pd.Series) -> pd.Series:
        """New rows of this column: dates, or text in the format of training."""
        if types.is_datetime64_any_dtype(values):
            return as_days(values)
        text = as_words(values)
        day = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=floor(self.median))
        example = day.strftime("%Y-%m-%d" if self.format == "ISO8601" else self.format)
        return by_level(text, parse_dates([*text.cat.categories], self.format), f"dates such as {example}")

    def describe(self) -> str:
        return f"dates ({self.format}) as year, month, weekday and days since {as_text(self.origin)}{self.gaps}"


class Dropped(Kind):
    """A column that is no feature, and why."""

    kind: Literal["dropped"] = "dropped"
    reason: str

    def describe(self) -> str:
        return f"not used: {self.reason}"


Encoder = Numeric | Categorical | Date


def is_text(column: pd.Series) -> bool:
    """True for text, categories and mixed objects."""
    text = types.is_string_dtype(column) or types.is_object_dtype(column)
    return text or isinstance(column.dtype, pd.CategoricalDtype)


def is_plain(column: pd.Series) -> bool:
    """True for numbers, and for True and False, even beside blanks, where they are objects."""
    numbers = types.is_numeric_dtype(column) and not types.is_complex_dtype(column)
    return numbers or types.infer_dtype(column, skipna=True) == "boolean"


def words(column: pd.Series) -> np.ndarray:
    """Values as stripped text; 1.0 is "1", since a missing value makes whole numbers floats."""
    if types.is_float_dtype(column):
        return np.array([str(int(value)) if value.is_integer() else str(value) for value in column], dtype=object)
    return column.astype(str).str.strip().to_numpy(dtype=object)


def as_words(column: pd.Series) -> pd.Series:
    """The values as a category of words."""
    present = column.notna().to_numpy()
    codes = np.full(len(column), -1, dtype=np.int64)
    # As objects: an array of strings would give every row the space of the longest.
    codes[present], levels = pd.factorize(words(column[present]), sort=True)
    return pd.Series(pd.Categorical.from_codes(codes, pd.Index(levels, dtype=object)), column.index)


def as_numbers(levels: Iterable[str]) -> pd.Series:
    """The words as numbers, NaN for those that are none."""
    return pd.to_numeric(pd.Series([*levels], dtype=object), errors="coerce")


def as_floats(column: pd.Series) -> pd.Series:
    """Numbers or truth values as float64."""
    return pd.Series(column.to_numpy(dtype=float, na_value=np.nan), column.index)


def as_days(dates: pd.Series) -> pd.Series:
    """Dates as float64 days since 1970-01-01; times with a zone are converted to UTC."""
    if getattr(dates.dt, "tz", None) is not None:
        dates = dates.dt.tz_convert("UTC").dt.tz_localize(None)
    seconds = dates.astype("datetime64[s]").astype(np.int64)
    return (seconds / DAY).where(dates.notna())


def parse_dates(levels: Sequence[str], format: str) -> np.ndarray:
    """Days since 1970 as float64 [levels], NaN for words in another format."""
    texts = pd.Series(levels, dtype=object)
    if format == "ISO8601":  # which would also accept a bare year, or a number of eight digits
        texts = texts.where(np.array([bool(ISO_START.match(level)) for level in levels], dtype=bool))
    return as_days(pd.to_datetime(texts, format=format, errors="coerce", utc=True)).to_numpy()


def by_level(text: pd.Series, numbers: np.ndarray, expected: str = "") -> pd.Series:
    """Each row's number, NaN where its word is missing; DataError for a word without a number if one is expected."""
    strays = np.flatnonzero(np.isnan(numbers))
    if expected and len(strays):
        raise DataError(f"expected {expected}, got {shown(text.cat.categories[strays[0]])}")
    return pd.Series(np.append(numbers, np.nan)[text.cat.codes], text.index)


def in_range(values: pd.Series) -> pd.Series:
    """The values, if all fit in float32, in which networks compute; otherwise DataError names the first."""
    bad = np.flatnonzero(np.abs(values.to_numpy()) > LARGEST)
    if len(bad):
        row = bad[0] + (values.index.start if isinstance(values.index, pd.RangeIndex) else 0)  # of the whole file
        raise DataError(f"has {values.iloc[bad[0]]:g} in row {row + 1:,}; 32-bit numbers are at most {LARGEST:.2g}")
    return values
