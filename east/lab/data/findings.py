"""Warnings about a table, with advice, before models are compared on it.

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

from east.lab.data.columns import Date, Numeric
from east.lab.data.common import Table, shown
from east.lab.data.detection import FEW, ID

SUBJECT = re.compile(
    r"(?i)(.*[^a-z])?(patient|subject|person|participant|proband|individual|user|customer|client|member|student|family|"
    r"household|animal|machine|device|sensor|vehicle|site|session|batch)s?([^a-z]?(id|no|nr|number|name|code))?"
)
CODE = re.compile(r"(?i)(.*[^a-z])?(zip|plz|fips|postal|(zip|post|postal|.*[^a-z])[^a-z]?code)")
ABOVE_CHANCE = 10  # so many times the pairs of equal rows that independent columns would give
PARTS = 3  # a split by time needs as many different times: for training, validation and test
OF_VALUES = 0.5  # share of a number's variance that lies between the values of a subject


@dataclass(frozen=True)
class Finding:
    """Something about a table that the user should check; `message` says what and why."""

    kind: Literal["repeats", "group", "time", "counter", "code", "tells", "alike"]
    message: str
    column: str | None = None  # None: it is about all of them, or about the classes


def findings(table: Table) -> Iterator[Finding]:
    """Check the classes and columns of a file. Groups and time are suggested only where the split has neither."""
    if twins := alike(table.classes):
        message = "these classes differ only in capital letters, accents or invisible characters"
        yield Finding("alike", f"{message}: {', '.join(map(ascii, twins))}")
    if table.raw is None or table.encoding is None:
        return
    if (count := len(table.raw) - len(np.unique(equal_rows(table)))) > 0:
        tied = "far more than by chance: they stay in one part" if repeats_tied(table) else "as by chance"
        yield Finding("repeats", f"{count:,} of {len(table.raw):,} rows repeat an earlier one, {tied}")
    for column in table.encoding.used:
        name, values = column.name, table.raw[column.name]
        count = values.nunique()
        if tells_class(values, table.labels.numpy()):
            advice = f"If it is known only after the class (leakage), leave it out: dataset.drop=[{name}]"
            yield Finding("tells", f"column {shown(name)} alone determines the class of every row. {advice}", name)
        if isinstance(column, Numeric) and is_whole(values) and count > FEW:
            if count == len(values) == values.max() - values.min() + 1:
                advice = f"leave it out: dataset.drop=[{name}]"
                yield Finding("counter", f"column {shown(name)} counts the rows; {advice}", name)
            elif CODE.fullmatch(name):
                advice = f"if they are names, use dataset.categorical=[{name}]"
                yield Finding("code", f"column {shown(name)} was read as numbers, but looks like codes; {advice}", name)
        if not table.stratifiable:
            continue
        if isinstance(column, Date):
            if count >= PARTS:
                advice = f"if the model will predict the future, use dataset.time={name}"
                yield Finding("time", f"column {shown(name)} holds dates; {advice}", name)
        elif FEW < count <= len(values) / 2 and is_whole(values) and is_subject(name, table.raw):
            advice = f"if those of one value belong together, use dataset.group={name}"
            yield Finding("group", f"column {shown(name)} has {count:,} values in {len(values):,} rows; {advice}", name)


def is_whole(values: pd.Series) -> bool:
    """True for words and for whole numbers."""
    return values.dtype == "category" or bool((values.dropna() % 1 == 0).all())


def is_subject(name: str, typed: pd.DataFrame) -> bool:
    """True for the name of a patient or machine, and for words within which a number hardly varies, such as an age."""
    named = bool(SUBJECT.fullmatch(name) or ID.match(name))
    if named or typed[name].dtype != "category":
        return named
    values, numbers = typed[name], typed.select_dtypes("number")
    chance = (values.nunique() - 1) / (len(values) - 1)  # share of the variance between values if these mean nothing
    within = (numbers - numbers.groupby(values, observed=True).transform("mean")).var(ddof=0) / numbers.var(ddof=0)
    return bool(((1 - within - chance) / (1 - chance) > OF_VALUES).any())


def alike(classes: Sequence[str]) -> list[str]:
    """The classes that look like another one."""
    visible = ("".join(c for c in name if unicodedata.category(c) != "Cf") for name in classes)
    plain = [unicodedata.normalize("NFKC", name).casefold().strip() for name in visible]
    counts = Counter(plain)
    return [name for name, looks in zip(classes, plain, strict=True) if counts[looks] > 1]


def equal_rows(table: Table) -> np.ndarray:
    """A number for each row [n], the same for rows with equal columns."""
    return pd.factorize(pd.util.hash_pandas_object(columns_of(table), index=False))[0]


def columns_of(table: Table) -> pd.DataFrame:
    return pd.DataFrame(table.features.numpy()) if table.raw is None else table.raw


def repeats_tied(table: Table) -> bool:
    """True if equal rows must have been copied: some column is continuous, and chance repeats far fewer rows.

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
    """Number of pairs within groups of these sizes."""
    return float((counts * (counts - 1.0) / 2).sum())


def tells_class(column: pd.Series, labels: np.ndarray) -> bool:
    """True if a typed column alone tells the class of every row: each word by itself, numbers and dates by their range.

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
