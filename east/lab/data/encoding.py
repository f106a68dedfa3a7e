"""How the columns of a file become features, so that new rows can be encoded the same way later, or refused.

Everything here is learnt from training rows and saved with a model as plain JSON:

    {"columns": [{"name": "age", "kind": "numeric", "median": 38.0, "indicator": true, "decimal": "."},
                 {"name": "job", "kind": "categorical", "text": true, "categories": ["clerk", "nurse"], "other": false},
                 {"name": "seen", "kind": "date", "format": "%d.%m.%Y", "origin": "2024-01-01", …},
                 {"name": "note", "kind": "dropped", "reason": "is free text …"}],
     "target": "income", "classes": ["low", "high"], "positive": 1, "delimiter": null}
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from east.lab.data.columns import (
    DATE_FORMATS,
    DAY,
    LARGEST,
    OWN,
    Column,
    Columns,
    Dates,
    Dropped,
    Numbers,
    Words,
    as_days,
    check_range,
    is_boolean,
    is_text,
    parse_dates,
    take,
    words,
    words_column,
)
from east.lab.data.common import DataError, shown
from east.lab.data.files import refuse_duplicates
from east.lab.data.notation import SEPARATOR, UNITS, level_numbers, split_unit

if TYPE_CHECKING:
    import pandas as pd

MISSING, OTHER = "(missing)", "(other)"
PARTS = ("year", "month", "weekday", "days")  # of a date
T = TypeVar("T")
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True)
class Numeric:
    """One feature. Missing numbers become the median; if training rows had any, a second feature marks them."""

    name: str
    median: float
    indicator: bool
    decimal: str | None = None  # the decimal mark of training; None: not shown there, or saved before it was noted
    unit: str | None = None  # the currency or percent sign of training

    @classmethod
    def fit(cls, column: Numbers) -> Self:
        present = column.values[~np.isnan(column.values)]
        median = float(np.median(present)) if len(present) else 0.0
        return cls(column.name, median, len(present) < len(column.values), column.decimal, column.unit)

    @property
    def feature_names(self) -> list[str]:
        return [self.name, f"{self.name}_missing"][: 1 + self.indicator]

    def features(self, column: Numbers) -> np.ndarray:
        absent = np.isnan(column.values)
        values = np.where(absent, self.median, column.values)
        return np.stack([values, absent][: 1 + self.indicator], axis=1)

    @property
    def kind(self) -> str:
        marks = [*([self.unit] if self.unit else []), *(["a decimal comma"] if self.decimal == "," else [])]
        return f"numbers with {' and '.join(marks)}" if marks else "numbers"

    def typed(self, values: "pd.Series") -> Numbers:
        """Read new rows of this column; DataError says what was expected and what it got."""
        import pandas as pd

        plain = self.unit is None and (pd.api.types.is_numeric_dtype(values) or is_boolean(values))
        if plain or values.isna().all():
            column = Numbers(self.name, values.to_numpy(dtype=float, na_value=np.nan))
        else:
            text = words_column(self.name, values)
            unit, levels = split_unit(text.levels)
            numbers = level_numbers(levels, self.decimal)
            strays = np.isnan(numbers) if unit == self.unit else np.full(len(numbers), True)
            if not is_text(values) and self.unit is None:
                raise DataError(f"expected numbers, got {values.dtype}")
            if strays.any():
                stray = text.levels[int(np.flatnonzero(strays)[0])]
                raise DataError(f"expected {self.kind}, got {shown(stray)}")
            column = Numbers(self.name, np.append(numbers, np.nan)[text.codes])
        check_range(column.values, values.index)
        return column

    def describe(self) -> str:
        gaps = ", missing values become the median and are marked" if self.indicator else ""
        return f"{self.kind}, median {self.median:g}{gaps}"


@dataclass(frozen=True)
class Categorical:
    """A 0/1 feature for each category. Unknown words count as `other` if there is such a feature, else all are 0.

    A word "(missing)" or "(other)" in the file means the same as here.
    """

    name: str
    categories: tuple[str, ...]  # in alphabetical order, then "(missing)" if training had missing values
    text: bool  # False: numbers used as names
    other: bool = False  # whether rare words share an extra feature

    @classmethod
    def fit(cls, column: Words) -> Self:
        present = column.codes[column.codes >= 0]
        counts = np.bincount(present, minlength=len(column.levels))
        seen = int(np.count_nonzero(counts))
        other = seen > OWN + 1
        frequent = np.argsort(-counts, kind="stable")[: OWN if other else seen]
        levels = [column.levels[code] for code in sorted(frequent)]
        categories = [level for level in levels if level != OTHER or not other]
        missing = [MISSING] if len(present) < len(column.codes) and MISSING not in categories else []
        return cls(column.name, (*categories, *missing), column.text, other)

    @property
    def feature_names(self) -> list[str]:
        return [f"{self.name}={category}" for category in (*self.categories, OTHER)[: self.width]]

    @property
    def width(self) -> int:
        return len(self.categories) + self.other

    def features(self, column: Words) -> np.ndarray:
        position = {category: k for k, category in enumerate(self.categories)}
        unknown = len(self.categories) if self.other else -1
        by_level = [position.get(level, unknown) for level in column.levels] + [position.get(MISSING, -1)]
        by_row = np.array(by_level)[column.codes]  # code -1, missing, is the last
        features = np.zeros((len(by_row), self.width), dtype=np.float32)
        rows = np.flatnonzero(by_row >= 0)
        features[rows, by_row[rows]] = 1
        return features

    @property
    def written_as_text(self) -> bool:
        """Whether a file's cells are the categories themselves; True and False are how pandas prints TRUE and false."""
        return self.text and not set(self.categories) <= {"True", "False", MISSING}

    def typed(self, values: "pd.Series") -> Words:
        """Read new rows of this column. A few rows of 0 1 2 3+ may look like numbers, and one of them may be new."""
        import pandas as pd

        if self.text and is_text(values):
            return self.typed_words(words_column(self.name, values))
        if not self.text:
            fits = pd.api.types.is_numeric_dtype(values) or values.isna().all() or is_boolean(values)
        else:
            known = set(self.categories)
            fits = has_numbers(known) or set(words(values.dropna())) <= known
        if not fits:
            raise DataError(f"expected {'text' if self.text else 'numbers'}, got {values.dtype}")
        return words_column(self.name, values)

    def typed_words(self, column: Words) -> Words:
        """Refuse words that are all numbers if no category is one: the file has probably mixed up its columns."""
        numbers = bool(column.levels) and as_numbers(column.levels).notna().all()
        if numbers and not self.other and as_numbers(self.categories).isna().all():
            expected, got = shown(self.categories[0]), shown(column.levels[0])
            raise DataError(f"expected text such as {expected}, got numbers such as {got}")
        return column

    def describe(self) -> str:
        first = ", ".join(shown(c, 20, quoted=False) for c in self.categories[:6])
        more = ", …" if len(self.categories) > 6 else ""
        count = "1 category" if len(self.categories) == 1 else f"{len(self.categories)} categories"
        return f"{count}{', rarer ones together' if self.other else ''}: {first}{more}"


@dataclass(frozen=True)
class Date:
    """Year, month, weekday (Monday is 0) and days since the first date of training; missing dates as for `Numeric`."""

    name: str
    format: str
    origin: float  # days since 1970-01-01
    median: float  # days since 1970-01-01
    indicator: bool

    @classmethod
    def fit(cls, column: Dates) -> Self:
        present = column.days[~np.isnan(column.days)]
        origin, median = (float(present.min()), float(np.median(present))) if len(present) else (0.0, 0.0)
        return cls(column.name, column.format, origin, median, len(present) < len(column.days))

    @property
    def feature_names(self) -> list[str]:
        return [f"{self.name}_{part}" for part in (*PARTS, "missing")[: len(PARTS) + self.indicator]]

    def features(self, column: Dates) -> np.ndarray:
        absent = np.isnan(column.days)
        days = np.where(absent, self.median, column.days)
        date = np.floor(days).astype(np.int64).astype("datetime64[D]")
        month = date.astype("datetime64[M]").astype(np.int64)
        weekday = (date.astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
        parts = [month // 12 + 1970, month % 12 + 1, weekday, days - self.origin, absent]
        return np.stack(parts[: len(PARTS) + self.indicator], axis=1).astype(np.float64)

    def typed(self, values: "pd.Series") -> Dates:
        """Read new rows of this column: dates, or text in the format of training."""
        import pandas as pd

        if pd.api.types.is_datetime64_any_dtype(values):
            return Dates(self.name, as_days(values), self.format)
        text = words_column(self.name, values)
        days = parse_dates(text.levels, self.format)
        if np.isnan(days).any():
            stray = shown(text.levels[int(np.flatnonzero(np.isnan(days))[0])])
            raise DataError(f"expected dates such as {self.example}, got {stray}")
        return Dates(self.name, np.append(days, np.nan)[text.codes], self.format)

    @property
    def example(self) -> str:
        day = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(days=math.floor(self.median))
        return day.strftime("%Y-%m-%d" if self.format == "ISO8601" else self.format)

    def describe(self) -> str:
        gaps = ", missing dates become the median and are marked" if self.indicator else ""
        return f"dates ({self.format}) as {', '.join(PARTS[:-1])} and days since {as_text(self.origin)}{gaps}"


Encoder = Numeric | Categorical | Date


def encoder(column: Column) -> Encoder:
    """An encoder fitted on the training rows of a column."""
    match column:
        case Numbers():
            return Numeric.fit(column)
        case Words():
            return Categorical.fit(column)
        case Dates():
            return Date.fit(column)


@dataclass(frozen=True)
class Encoding:
    """How all columns of a file are encoded, in the order of their features, and its classes."""

    columns: tuple[Encoder, ...]
    dropped: tuple[Dropped, ...] = ()
    target: str | None = None
    classes: tuple[str, ...] = ()
    positive: int | None = None
    delimiter: str | None = None

    def fitted(self, columns: Columns, rows: np.ndarray | None = None) -> "Encoding":
        """The encoding learnt from these rows (None: all) of the columns."""
        used = columns.used if rows is None else [take(column, rows) for column in columns.used]
        return replace(self, columns=tuple(map(encoder, used)), dropped=columns.dropped)

    def features(self, columns: Columns) -> Tensor:
        """Features float32 [n, f] of typed columns, which must be in the order of `self.columns`."""
        return torch.from_numpy(self.array(columns, np.float32))

    def array(self, columns: Columns, dtype: type[np.floating]) -> np.ndarray:
        """`features` as an array, for callers that scale before rounding to float32."""
        parts = [
            encoder.features(column)  # type: ignore[arg-type]  # each kind of encoder has its kind of column
            for encoder, column in zip(self.columns, columns.used, strict=True)
        ]
        return np.concatenate(parts, axis=1, dtype=dtype, casting="unsafe")

    @property
    def text_columns(self) -> list[str]:
        """Columns, and maybe the target, that are text in a new file too, even if it has only their numbers or TRUE."""
        named = [column.name for column in self.columns if isinstance(column, Categorical) and column.written_as_text]
        classes = set(self.classes)
        inferred = classes <= {"True", "False"} or classes == set(words(as_numbers(classes).dropna()))
        return named if inferred or self.target is None else [*named, self.target]

    @property
    def decimals(self) -> dict[str, str]:
        """The decimal marks of the columns that showed them in training; numbers used as names have a point."""
        marks = {column.name: column.decimal for column in self.columns if isinstance(column, Numeric)}
        marks |= {column.name: "." for column in self.columns if isinstance(column, Categorical) and not column.text}
        return {name: mark for name, mark in marks.items() if mark}

    @property
    def feature_names(self) -> tuple[str, ...]:
        """age, age_missing, job=clerk, job=nurse, seen_year, …; a second age_missing is called age_missing_2."""
        used: dict[str, None] = {}
        for name in (name for column in self.columns for name in column.feature_names):
            numbered = (f"{name}_{k}" for k in count(2))
            used[name if name not in used else next(new for new in numbered if new not in used)] = None
        return tuple(used)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each column that is not used."""
        return tuple(f"column {shown(column.name)} is not used: it {column.reason}" for column in self.dropped)

    def describe(self, most: int = 30) -> list[str]:
        """A line for each column: what it is and how it is encoded."""
        texts = [(column.name, column.describe()) for column in self.columns]
        texts += [(column.name, f"not used: {column.reason}") for column in self.dropped]
        names = [shown(name, 40, quoted=False) for name, _ in texts[:most]]
        width = max([20, *map(len, names)])
        lines = [f"{name:<{width}} {text}" for name, (_, text) in zip(names, texts, strict=False)]
        return [*lines, *([f"… and {len(texts) - most} more columns"] if len(texts) > most else [])]

    def to_json(self) -> dict[str, Json]:
        return {
            "columns": [column_to_json(column) for column in (*self.columns, *self.dropped)],
            "target": self.target,
            "classes": list(self.classes),
            "positive": self.positive,
            "delimiter": self.delimiter,
        }

    @classmethod
    def from_json(cls, value: object) -> "Encoding":
        """The inverse of `to_json`; it also reads models saved before there were dates and dropped columns."""
        json = UntrustedJson(value, "the encoding")
        columns = [column_from_json(column) for column in json.items("columns")]
        positive = json.optional("positive", int)
        classes = tuple(json.words("classes")) if json.has("classes") else ()
        if positive is not None and not 0 <= positive < max(1, len(classes)):
            raise DataError(f"the encoding: expected 'positive' to number one of {len(classes)} classes")
        delimiter = json.optional("delimiter", str)
        # pandas would take a longer one for a regular expression.
        if delimiter not in (None, r"\s+") and len(str(delimiter)) != 1:
            raise DataError(f"the encoding: expected 'delimiter' to be one character, got {shown(delimiter)}")
        return cls(
            columns=tuple(column for column in columns if not isinstance(column, Dropped)),
            dropped=tuple(column for column in columns if isinstance(column, Dropped)),
            target=json.optional("target", str),
            classes=classes,
            positive=positive,
            delimiter=delimiter,
        )


def encode(frame: "pd.DataFrame", encoding: Encoding) -> Tensor:
    """Features float32 [n, f] of a frame with the columns of `encoding`; other columns are ignored."""
    return encoding.features(typed_columns(frame, encoding))


def typed_columns(frame: "pd.DataFrame", encoding: Encoding) -> Columns:
    """The columns of `encoding` from a frame of new rows, in its order; DataError names those that do not fit."""
    frame = frame.rename(columns=str)
    refuse_duplicates(frame.columns, "")
    missing = [column.name for column in encoding.columns if column.name not in frame]
    if missing:
        raise DataError(f"columns are missing: {enumerated(missing)}. Found: {enumerated(frame.columns)}.")
    typed: list[Column] = []
    wrong = []
    for column in encoding.columns:
        try:
            typed.append(column.typed(frame[column.name]))
        except DataError as error:
            wrong.append(f"{shown(column.name, quoted=False)} ({error})")
    if wrong:
        raise DataError(f"columns do not fit those of training: {enumerated(wrong, 200)}.")
    return Columns(tuple(typed))


def enumerated(names: Iterable[str], most: int = 60) -> str:
    """Names for a message, each cut after `most` characters, and how many more there are."""
    names = list(names)
    more = [f"and {len(names) - 20} more"] if len(names) > 20 else []
    return ", ".join([*(shown(name, most, quoted=False) for name in names[:20]), *more])


def has_numbers(categories: set[str]) -> bool:
    """Whether some categories are numbers, all in the notation of `words`: otherwise a new 1 might mean 01."""
    numbers = as_numbers(categories).dropna()
    return not numbers.empty and set(words(numbers)) <= categories


def as_numbers(levels: Iterable[str]) -> "pd.Series":
    """The words as numbers, NaN for those that are none."""
    import pandas as pd

    return pd.to_numeric(pd.Series(sorted(levels), dtype=object), errors="coerce")


def as_text(days: float) -> str:
    """Days since 1970 as 2024-01-31, or 2024-01-31T12:30:00."""
    text = str(np.datetime64(round(days * DAY), "s"))
    return text.removesuffix("T00:00:00")


def column_to_json(column: Encoder | Dropped) -> dict[str, Json]:
    match column:
        case Numeric(name, median, indicator, decimal, unit):
            marks = {key: mark for key, mark in (("decimal", decimal), ("unit", unit)) if mark is not None}
            return {"name": name, "kind": "numeric", "median": median, "indicator": indicator, **marks}
        case Categorical(name, categories, text, other):
            return {"name": name, "kind": "categorical", "text": text, "categories": categories, "other": other}
        case Date(name, format, origin, median, indicator):
            dates = {"origin": as_text(origin), "median": as_text(median)}
            return {"name": name, "kind": "date", "format": format, **dates, "indicator": indicator}
        case Dropped(name, reason):
            return {"name": name, "kind": "dropped", "reason": reason}


def column_from_json(value: object) -> Encoder | Dropped:
    json = UntrustedJson(value, "a column of the encoding")
    name, kind = json.required("name", str), json.required("kind", str)
    match kind:
        case "numeric":
            decimal = json.optional("decimal", str)
            if decimal not in (None, *SEPARATOR):
                raise DataError(f"column {shown(name)}: expected a point or a comma as 'decimal', got {shown(decimal)}")
            unit = json.optional("unit", str)
            if unit not in (None, *UNITS):
                raise DataError(f"column {shown(name)}: expected one of {UNITS} as 'unit', got {shown(unit)}")
            return Numeric(name, json.number("median"), json.required("indicator", bool), decimal, unit)
        case "categorical":
            other = json.optional("other", bool) or False
            return Categorical(name, tuple(json.words("categories")), json.required("text", bool), other)
        case "date":
            format = json.required("format", str)
            if format not in DATE_FORMATS:
                raise DataError(f"column {shown(name)}: expected a date format such as %d.%m.%Y, got {shown(format)}")
            return Date(name, format, json.days("origin"), json.days("median"), json.required("indicator", bool))
        case "dropped":
            return Dropped(name, json.required("reason", str))
    raise DataError(f"column {shown(name)}: expected kind numeric, categorical, date or dropped, got {shown(kind)}")


class UntrustedJson:
    """A JSON object from an untrusted file: every value is checked when it is read. name: for error messages."""

    def __init__(self, value: object, name: str):
        if not isinstance(value, Mapping):
            raise DataError(f"{name}: expected an object, got {shown(value)}")
        self.values, self.name = value, name

    def has(self, key: str) -> bool:
        return key in self.values

    def required(self, key: str, kind: type[T]) -> T:
        value = self.values.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise DataError(f"{self.name}: expected {key!r} to be of type {kind.__name__}, got {shown(value)}")
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        return None if self.values.get(key) is None else self.required(key, kind)

    def number(self, key: str) -> float:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise DataError(f"{self.name}: expected {key!r} to be a finite number, got {shown(value)}")
        return float(value)

    def items(self, key: str) -> Sequence[object]:
        value = self.values.get(key)
        if not isinstance(value, list | tuple):
            raise DataError(f"{self.name}: expected {key!r} to be a list, got {shown(value)}")
        return value

    def words(self, key: str) -> list[str]:
        words = [value for value in self.items(key) if isinstance(value, str)]
        if len(words) < len(self.items(key)):
            raise DataError(f"{self.name}: expected {key!r} to be a list of words")
        return words

    def days(self, key: str) -> float:
        value = self.required(key, str)
        try:
            return datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp() / DAY
        except ValueError:
            raise DataError(
                f"{self.name}: expected {key!r} to be a date such as 2024-01-31, got {shown(value)}"
            ) from None
