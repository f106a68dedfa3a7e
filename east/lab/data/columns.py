"""What a column of a table is, and how it becomes features: numbers, words, dates, or nothing.

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
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator

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


def known_format(format: str) -> str:
    """The format, if it is one of ours: another could take a parser for ever."""
    if format not in DATE_FORMATS:
        raise ValueError(f"expected a date format such as %d.%m.%Y, got {shown(format)}")
    return format


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


class Kind(BaseModel):
    """What all kinds have in common."""

    model_config = ConfigDict(frozen=True, strict=True)
    name: str


class Measured(Kind):
    """Numbers or dates. Missing ones become the median; if training rows had any, a further feature marks them."""

    parts: ClassVar[tuple[str, ...]]  # endings of the names of its features
    median: Number = 0.0
    indicator: bool = False

    def fit(self, values: pd.Series) -> Self:
        present = values.dropna()
        median = float(present.median()) if len(present) else 0.0
        return self.model_copy(update={"median": median, "indicator": len(present) < len(values)})

    @property
    def feature_names(self) -> list[str]:
        return [f"{self.name}{part}" for part in (*self.parts, "_missing")[: len(self.parts) + self.indicator]]

    def features(self, values: pd.Series) -> np.ndarray:
        given = values.to_numpy()
        absent = np.isnan(given)
        parts = [*self.filled(np.where(absent, self.median, given)), absent]
        return np.stack(parts[: len(self.parts) + self.indicator], axis=1).astype(np.float64)

    def filled(self, values: np.ndarray) -> list[np.ndarray]:
        """The features of numbers or days [n] without gaps."""
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
        if self.unit is None and not is_text(values):
            raise DataError(f"expected numbers, got {values.dtype}")
        text = as_words(values)
        unit, bare = split_unit([*text.cat.categories])
        numbers = level_numbers(bare, self.decimal) if unit == self.unit else np.full(len(bare), np.nan)
        refuse_strays(text, numbers, self.what)
        return in_range(by_level(text, numbers))

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
        frequent = {*counts.nlargest(OWN if other else len(counts)).index} - ({OTHER} if other else set())
        categories = [level for level in counts.index if level in frequent]
        missing = [MISSING] if values.hasnans and MISSING not in categories else []
        return self.model_copy(update={"categories": (*categories, *missing), "other": other})

    @property
    def feature_names(self) -> list[str]:
        return [f"{self.name}={category}" for category in (*self.categories, OTHER)[: self.width]]

    @property
    def width(self) -> int:
        return len(self.categories) + self.other

    def features(self, values: pd.Series) -> np.ndarray:
        place = {category: k for k, category in enumerate(self.categories)}
        unknown = len(self.categories) if self.other else -1
        by_code = [*(place.get(level, unknown) for level in values.cat.categories), place.get(MISSING, -1)]
        column = np.array(by_code)[values.cat.codes]  # code -1, missing, is the last
        features = np.zeros((len(values), self.width), dtype=np.float32)
        rows = np.flatnonzero(column >= 0)
        features[rows, column[rows]] = 1
        return features

    def read(self, values: pd.Series) -> pd.Series:
        """New rows of this column. A few rows of 0 1 2 3+ may look like numbers, and one of them may be new."""
        if not self.text or {*self.categories} <= {"True", "False", MISSING}:
            values = inferred(values)
        if not (is_text(values) if self.text else is_plain(values)) and not self.same_words(values):
            raise DataError(f"expected {'text' if self.text else 'numbers'}, got {values.dtype}")
        text = as_words(values)
        levels = [*text.cat.categories]
        numbers = bool(levels) and as_numbers(levels).notna().all() and as_numbers(self.categories).isna().all()
        if self.text and numbers and not self.other:  # the file has probably mixed up its columns
            expected, got = shown(self.categories[0]), shown(levels[0])
            raise DataError(f"expected text such as {expected}, got numbers such as {got}")
        return text

    def same_words(self, values: pd.Series) -> bool:
        """Whether numbers may be the words of training, where these are written otherwise, or text the numbers."""
        known = {*self.categories}
        usual = {*words(as_numbers(known).dropna())}  # where numbers are written otherwise, a new 1 might mean 01
        present = values.dropna()
        return not len(present) or (self.text and (0 < len(usual & known) == len(usual) or {*words(present)} <= known))

    def describe(self) -> str:
        first = ", ".join(shown(category, 20, quoted=False) for category in self.categories[:6])
        more = ", …" if len(self.categories) > 6 else ""
        count = "1 category" if len(self.categories) == 1 else f"{len(self.categories)} categories"
        return f"{count}{', rarer ones together' if self.other else ''}: {first}{more}"


class Date(Measured):
    """Year, month, weekday (Monday is 0) and days since the first date of training."""

    kind: Literal["date"] = "date"
    parts = ("_year", "_month", "_weekday", "_days")
    format: Annotated[str, AfterValidator(known_format)]
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
        if is_date(values):
            return as_days(values)
        text = as_words(values)
        days = parse_dates([*text.cat.categories], self.format)
        refuse_strays(text, days, f"dates such as {self.example}")
        return by_level(text, days)

    @property
    def example(self) -> str:
        day = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=floor(self.median))
        return day.strftime("%Y-%m-%d" if self.format == "ISO8601" else self.format)

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
    types = pd.api.types
    return (
        types.is_string_dtype(column) or types.is_object_dtype(column) or isinstance(column.dtype, pd.CategoricalDtype)
    )


def is_plain(column: pd.Series) -> bool:
    """Whether a column is numbers, or True and False, including those with blanks, which pandas reads as objects."""
    types = pd.api.types
    numbers = types.is_numeric_dtype(column) and not types.is_complex_dtype(column)
    return numbers or types.infer_dtype(column, skipna=True) == "boolean"


def is_date(column: pd.Series) -> bool:
    return pd.api.types.is_datetime64_any_dtype(column)


def words(column: pd.Series) -> np.ndarray:
    """Values as stripped text; 1.0 is "1", since a missing value makes whole numbers floats."""
    if pd.api.types.is_float_dtype(column):
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


def by_level(text: pd.Series, numbers: np.ndarray) -> pd.Series:
    """The number of each row's word, NaN where it is missing."""
    return pd.Series(np.append(numbers, np.nan)[text.cat.codes], text.index)


def refuse_strays(text: pd.Series, numbers: np.ndarray, expected: str) -> None:
    """DataError if a word has no number."""
    strays = np.flatnonzero(np.isnan(numbers))
    if len(strays):
        raise DataError(f"expected {expected}, got {shown(text.cat.categories[strays[0]])}")


def in_range(values: pd.Series) -> pd.Series:
    """DataError if a number does not fit in float32, in which networks compute; it names the first."""
    bad = np.flatnonzero(np.abs(values.to_numpy()) > LARGEST)
    if not len(bad):
        return values
    value = values.iloc[bad[0]]
    index = values.index if isinstance(values.index, pd.RangeIndex) else range(len(values))  # that of a portion goes on
    row = int(index[bad[0]]) + 1
    if np.isinf(value):
        raise DataError(f"has an infinite value in row {row:,}")
    raise DataError(f"has {value:g} in row {row:,}, too large for 32-bit numbers (at most {LARGEST:.2g})")
