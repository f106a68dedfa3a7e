"""What a user should know about a table before models are compared on it, and what to do about it.

for finding in findings(table):
    print(finding.message)
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from east.lab.data.columns import Categorical, Date, Encoder, Numeric
from east.lab.data.common import Table, shown
from east.lab.data.detection import FEW, ID

SUBJECT = re.compile(
    r"(?i)(.*[^a-z])?(patient|subject|person|participant|proband|individual|user|customer|client|member|student|family|"
    r"household|animal|machine|device|sensor|vehicle|site|session|batch)s?([^a-z]?(id|no|nr|number|name|code))?"
)
CODE = re.compile(r"(?i)(.*[^a-z])?(zip|plz|fips|postal|post[^a-z]?code|zip[^a-z]?code|postal[^a-z]?code|.*[^a-z]code)")
ABOVE_CHANCE = 10  # so many times the pairs of equal rows that independent columns would give
PARTS = 3  # a split by time needs as many different times: for training, validation and test
OF_VALUES = 0.5  # share of a column's variance that lies between the values of a subject


@dataclass(frozen=True)
class Finding:
    """Something about a table that a user should check; `message` is a sentence for them."""

    kind: Literal["repeats", "group", "time", "counter", "code", "tells", "alike"]
    message: str
    column: str | None = None  # None: it is about all of them, or about the classes


def findings(table: Table) -> list[Finding]:
    """Everything found in the columns of a file, and in its classes."""
    found = [*alike(table.classes)]
    if table.raw is None or table.encoding is None:
        return found
    if (count := len(table.raw) - len(np.unique(equal_rows(table)))) > 0:
        tied = "far more than by chance: they stay in one part" if repeats_tied(table) else "as by chance"
        found.append(Finding("repeats", f"{count:,} of {len(table.raw):,} rows repeat an earlier one, {tied}"))
    for column in table.encoding.used:
        found += about_column(column, table.raw, table.labels.numpy(), table.stratifiable)
    return found


def about_column(column: Encoder, typed: pd.DataFrame, labels: np.ndarray, stratifiable: bool) -> Iterator[Finding]:
    """What is remarkable about one column. Groups and time are suggested only where the split has neither."""
    name, values = column.name, typed[column.name]
    if tells_class(values, labels):
        yield Finding(
            "tells",
            f"column {shown(name)} alone determines the class of every row. If it is known only after the class "
            f"(leakage), leave it out: dataset.drop=[{name}]",
            name,
        )
    whole = isinstance(column, Numeric) and bool((values.dropna() % 1 == 0).all())
    if whole and values.is_unique and values.max() - values.min() == len(values) - 1 >= FEW:
        yield Finding("counter", f"column {shown(name)} counts the rows; leave it out: dataset.drop=[{name}]", name)
    elif whole and CODE.fullmatch(name) and values.nunique() > FEW:
        advice = f"if they are names, use dataset.categorical=[{name}]"
        yield Finding("code", f"column {shown(name)} was read as numbers, but looks like codes; {advice}", name)
    if stratifiable and isinstance(column, Date) and values.nunique() >= PARTS:
        advice = f"if the model will predict the future, use dataset.time={name}"
        yield Finding("time", f"column {shown(name)} holds dates; {advice}", name)
    if stratifiable and (whole or isinstance(column, Categorical)) and is_subject(name, typed):
        advice = f"if those of one value belong together, use dataset.group={name}"
        message = f"column {shown(name)} has {values.nunique():,} values in {len(values):,} rows; {advice}"
        yield Finding("group", message, name)


def is_subject(name: str, typed: pd.DataFrame) -> bool:
    """Whether a column looks like a patient or machine: many rows for each of its values, and a name such as theirs.

    Words need no such name if another column of numbers hardly varies within them, as the age of a patient does.
    """
    values = typed[name]
    count, rows = values.nunique(), len(values)
    if not FEW < count <= rows / 2:
        return False
    if SUBJECT.fullmatch(name) or ID.match(name):
        return True
    numbers = typed.select_dtypes("number")
    chance = (count - 1) / (rows - 1)  # share of the variance between values if these mean nothing
    within = (numbers - numbers.groupby(values, observed=True).transform("mean")).var(ddof=0) / numbers.var(ddof=0)
    return values.dtype == "category" and bool(((1 - within - chance) / (1 - chance) > OF_VALUES).any())


def equal_rows(table: Table) -> np.ndarray:
    """A number for each row [n], the same for rows with equal columns."""
    return pd.factorize(pd.util.hash_pandas_object(columns_of(table), index=False))[0]


def columns_of(table: Table) -> pd.DataFrame:
    return pd.DataFrame(table.features.numpy()) if table.raw is None else table.raw


def repeats_tied(table: Table) -> bool:
    """Whether equal rows must have been copied: some column is continuous, and chance repeats far fewer rows.

    Chance draws each column for itself. Two rows agree in one as different rows do, or because its values are few.
    """
    columns, numbers = columns_of(table), equal_rows(table)
    different = columns.iloc[np.unique(numbers, return_index=True)[1]]
    repeated = int((np.bincount(numbers) > 1).sum())
    expected, continuous = pairs_of(np.array([len(columns)])), False
    for _, values in different.items():
        counts = values.value_counts(dropna=False).to_numpy()
        possible = float(len(counts))
        if values.dtype != "category" and len(counts) > FEW:
            grid = (values.dropna() * (1e6 if values.abs().max() < 1e12 else 1)).round().astype(np.int64).to_numpy()
            possible = np.ptp(grid) / max(np.gcd.reduce(grid - grid[0]), 1) + 1
            continuous |= bool(possible > ABOVE_CHANCE * len(counts))
        expected *= pairs_of(counts) / max(pairs_of(np.array([len(different)])), 1) + 1 / possible
    return continuous and repeated > ABOVE_CHANCE * max(expected, 0.1)


def pairs_of(counts: np.ndarray) -> float:
    """Pairs of equal rows, where so many are equal."""
    return float((counts * (counts - 1.0) / 2).sum())


def alike(classes: Sequence[str]) -> list[Finding]:
    """Classes that differ only in capital letters, invisible characters, or ways to write an accent."""
    visible = {name: "".join(c for c in name if unicodedata.category(c) != "Cf") for name in classes}
    plain = {name: unicodedata.normalize("NFKC", text).casefold().strip() for name, text in visible.items()}
    counts = Counter(plain.values())
    twins = [ascii(name) if unicodedata.normalize("NFC", visible[name]) != name else repr(name) for name in classes
             if counts[plain[name]] > 1]  # fmt: skip
    differ = "these classes differ only in capital letters, accents or invisible characters"
    return [Finding("alike", f"{differ}: {', '.join(twins[:20])}")] if twins else []


def tells_class(column: pd.Series, labels: np.ndarray) -> bool:
    """Whether a typed column alone tells the class of every row: each word by itself, numbers and dates by their range.

    Missing values count as a word, or as the largest number. Words that hardly repeat, and classes with fewer than
    FEW rows, prove nothing.
    """
    by_word = column.dtype == "category"
    ranks = np.unique(column.cat.codes if by_word else column, return_inverse=True)[1]
    order = np.lexsort((labels, ranks))
    new_value, new_class = np.diff(ranks[order]) != 0, np.diff(labels[order]) != 0
    counts = np.bincount(labels)
    if counts[counts > 0].min() < FEW or (new_class & ~new_value).any():
        return False
    if by_word:
        return FEW * (1 + int(new_value.sum())) <= len(labels)
    return 1 + int(new_class.sum()) == int(np.count_nonzero(counts))
