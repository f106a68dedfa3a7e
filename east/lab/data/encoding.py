"""Turns the columns of a file into features; new rows are encoded the same way, or refused.

Everything here is learnt from training rows and saved with a model as plain JSON:

    {"columns": [{"name": "age", "kind": "numeric", "median": 38.0, "indicator": true, "decimal": ".", "unit": null},
                 {"name": "job", "kind": "categorical", "text": true, "categories": ["clerk", "nurse"], "other": false},
                 {"name": "seen", "kind": "date", "format": "%d.%m.%Y", "origin": "2024-01-01", …},
                 {"name": "note", "kind": "dropped", "reason": "is free text …"}],
     "target": "income", "classes": ["low", "high"], "positive": 1, "delimiter": null}
"""

from itertools import count
from typing import Annotated, Any, Self

import numpy as np
import pandas as pd
import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor

from east.lab.data.columns import OWN, Categorical, Dropped, Encoder, Numeric, as_numbers, is_text, words
from east.lab.data.common import DataError, digest, enumerated, shown
from east.lab.data.files import Layout, refuse_duplicates
from east.lab.data.notation import converted, inferred

LONG = 1000  # characters of a word; in an array every word has the space of the longest


class Encoding(Layout):
    """Encoding of all columns of a file, in the order of their features, and its classes."""

    columns: Annotated[tuple[Annotated[Encoder | Dropped, Field(discriminator="kind")], ...], Field(strict=False)]
    target: str | None = None
    classes: Annotated[tuple[str, ...], Field(strict=False)] = ()
    positive: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def positive_is_a_class(self) -> Self:
        if self.positive is not None and self.positive >= max(1, len(self.classes)):
            raise ValueError(f"expected 'positive' to number one of {len(self.classes)} classes")
        return self

    @property
    def used(self) -> list[Encoder]:
        return [column for column in self.columns if not isinstance(column, Dropped)]

    def fitted(self, typed: pd.DataFrame) -> Self:
        """The encoding learnt from these rows of the typed columns."""
        columns = [column if isinstance(column, Dropped) else column.fit(typed[column.name]) for column in self.columns]
        return self.model_copy(update={"columns": tuple(columns)})

    def features(self, typed: pd.DataFrame, dtype: type[np.floating] = np.float32) -> Tensor:
        """Features [n, f] of the typed columns; float64 for callers that scale before rounding to float32."""
        parts = [column.features(typed[column.name]) for column in self.used]
        return torch.from_numpy(np.concatenate(parts, axis=1, dtype=dtype, casting="unsafe"))

    def class_names(self, column: pd.Series) -> np.ndarray:
        """The classes of new rows: 1.0, or 1,0 in another notation, is 1 if it was so in training."""
        numbers, known = as_numbers(self.classes).dropna(), {*self.classes}
        plain = known <= {"True", "False"} or known == {*words(numbers)}
        numbers = inferred(column) if plain else column
        return words(converted(column, ",") if plain and numbers is column and is_text(column) else numbers)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """age, age_missing, job=clerk, job=nurse, seen_year, …; a second age_missing is called age_missing_2."""
        used: dict[str, None] = {}
        for name in (name for column in self.used for name in column.feature_names):
            numbered = (f"{name}_{k}" for k in count(2))
            used[name if name not in used else next(new for new in numbered if new not in used)] = None
        return tuple(used)

    @property
    def notes(self) -> tuple[str, ...]:
        """A line for each column that is not used."""
        dropped = [column for column in self.columns if isinstance(column, Dropped)]
        return tuple(f"column {shown(column.name)} is not used: it {column.reason}" for column in dropped)

    def describe(self, most: int = 30) -> list[str]:
        """A line for each column: what it is and how it is encoded."""
        names = [shown(column.name, 40, quoted=False) for column in self.columns[:most]]
        width = max([20, *map(len, names)])
        lines = [f"{name:<{width}} {column.describe()}" for name, column in zip(names, self.columns, strict=False)]
        more = len(self.columns) - most
        return [*lines, *([f"… and {more} more columns"] if more > 0 else [])]

    def hidden_digests(self, typed: pd.DataFrame, fine: bool) -> list[str]:
        """Digests of what features lose: rare words, units and, if `fine`, digits beyond float32."""
        digests, unrounded = [], []
        for column in self.used:
            values = typed[column.name]
            if isinstance(column, Categorical) and len(values.cat.categories) > OWN + 1:
                levels = [word if len(word) < LONG else digest(np.array(word)) for word in values.cat.categories]
                digests += [digest(values.cat.codes.to_numpy(np.int64)), digest(np.array(levels))]
            if isinstance(column, Numeric):
                digests += [digest(np.array(column.unit))] if column.unit else []
                unrounded += [digest(values.to_numpy())] if fine and is_fine(values) else []
        return [*digests, *unrounded]

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The inverse of `to_json`; it also reads models saved before there were dates and dropped columns."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place, reason = ".".join(map(str, first["loc"])), shown(first["msg"], 200, quoted=False)
            raise DataError(f"the encoding: {place}: {reason}, got {shown(first['input'])}") from None


def encode(frame: pd.DataFrame, encoding: Encoding) -> Tensor:
    """Features float32 [n, f] of a frame with the columns of `encoding`; other columns are ignored."""
    return encoding.features(typed_columns(frame, encoding))


def typed_columns(frame: pd.DataFrame, encoding: Encoding) -> pd.DataFrame:
    """The columns of `encoding` from a frame of new rows; DataError names those that do not fit."""
    frame = frame.rename(columns=str)
    refuse_duplicates(frame.columns, "")
    missing = [column.name for column in encoding.used if column.name not in frame]
    if missing:
        raise DataError(f"columns are missing: {enumerated(missing)}. Found: {enumerated(frame.columns)}.")
    typed, wrong = {}, []
    for column in encoding.used:
        try:
            typed[column.name] = column.read(frame[column.name])
        except DataError as error:
            wrong.append(f"{shown(column.name, quoted=False)} ({error})")
    if wrong:
        raise DataError(f"columns do not fit those of training: {enumerated(wrong, 200)}.")
    return pd.DataFrame(typed, frame.index)


def is_fine(values: pd.Series) -> bool:
    """True if float32 would round these numbers by more than a thousandth of their standard deviation."""
    present = values.dropna().to_numpy()
    return len(present) > 0 and bool(np.spacing(np.float32(np.abs(present).max())) > 1e-3 * present.std() > 0)
