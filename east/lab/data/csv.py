"""Your own table: a CSV, Parquet, Feather or Excel file with numbers, words, dates and missing values."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from east.choices import ConfigError, choose
from east.lab.data import files
from east.lab.data.columns import Columns, Dates, Dropped, Numbers, Words, detect, read_columns, words, words_column
from east.lab.data.common import DataError, Table, shown
from east.lab.data.encoding import Encoding
from east.lab.data.sources import Dataset, Root

if TYPE_CHECKING:
    import pandas as pd

Names = str | int | Sequence[str | int] | None


def csv(
    root: Root = None,
    *,
    path: str | None = None,
    target: str | int | None = None,
    drop: Names = None,
    categorical: Names = None,
    positive: str | None = None,
    delimiter: str | None = None,
    group: str | int | None = None,
    time: str | int | None = None,
    keep: Names = None,
) -> Table:
    """The column `target` of the file `path` is the class; all others except `drop`, `group` and `time` are features.

    categorical: columns of numbers that are names, such as postcodes. positive: the positive class, which comes second
    of two; by default the larger of two numbers or the rarer of two words. Rows with the same `group` stay together in
    a split. With `time`, the oldest rows are for training and the newest for the test. Columns in `keep` are features
    even if they are the group or the time, or look like ids or free text.
    """
    if path is None:
        raise DataError("dataset=csv needs dataset.path=FILE and dataset.target=COLUMN.")
    file, delimiter = files.regular(path), files.named_delimiter(delimiter)
    as_names = dict.fromkeys(names(categorical), ".")  # cells of a categorical column are names, with any marks
    frame, decimals = files.read_marked(file, delimiter, decimals=as_names)
    if target is None:
        columns = shown(", ".join(map(str, frame.columns)), 300, quoted=False)
        raise DataError(f"dataset.target=COLUMN is missing: which column of {path} is the class? Columns: {columns}")
    if len(frame.columns) == 1 and str(target) in str(frame.columns[0]) and str(target) not in frame:
        raise DataError(
            f"{path} seems to have a single column, {shown(frame.columns[0])}. Say what is between the columns: "
            "dataset.delimiter=':' (or tab, or any other character); only , ; | and tab are detected."
        )
    labels = [str(name) for name in (target, group) if name is not None]
    frame = with_written_names(frame.rename(columns=str), file, delimiter, as_names, labels)
    table = from_frame(
        "csv",
        frame,
        target,
        drop=drop,
        categorical=categorical,
        positive=positive,
        path=str(path),
        group=group,
        time=time,
        keep=keep,
        decimals=decimals,
        own=True,
    )
    note = files.text_format(file, delimiter).note if files.is_text(file) else None
    encoding = None if table.encoding is None else replace(table.encoding, delimiter=delimiter)
    return replace(table, encoding=encoding, file_note=note)


def with_written_names(
    frame: "pd.DataFrame", file: Path, delimiter: str | None, categorical: Collection[str], labels: Sequence[str]
) -> "pd.DataFrame":
    """The frame with the words of the file where names were read as numbers, so that 1.1 and 1.10 stay different.

    A categorical column stays numbers if all are written as usual: 7 or 7.0, but not 007. `labels`, the target and the
    group, stay numbers unless two words are the same number, so that their names remain those of older models.
    """
    import pandas as pd

    numeric = [name for name in frame if name in {*categorical, *labels} and frame[name].dtype.kind in "iuf"]
    if not numeric or files.file_kind(file) in ("Parquet", "Feather"):  # whose columns have types
        return frame
    written = next(files.portions(file, delimiter, text=numeric, columns=numeric)).rename(columns=str)
    for name in numeric:
        texts = {re.sub(r"\.0*$", "", text) for text in files.distinct(written[name])}
        usual = {*words(pd.Series(frame[name].dropna().unique()))}
        if len(texts) > len(usual) or (name in categorical and texts != usual):
            frame[name] = written[name]
    return frame


def from_frame(
    name: str,
    frame: "pd.DataFrame",
    target: str | int,
    drop: Names = None,
    categorical: Names = None,
    positive: str | None = None,
    path: str = "",
    group: str | int | None = None,
    time: str | int | None = None,
    keep: Names = None,
    decimals: Mapping[str, str] = {},
    own: bool = False,
) -> Table:
    """A table of features and classes from a frame; the options are those of `csv`.

    decimals: the decimal marks of columns, as far as the file shows them. own: see Data.
    """
    frame = frame.rename(columns=str).reset_index(drop=True)
    files.refuse_duplicates(frame.columns, path)
    target, drop, categorical, keep = str(target), names(drop), names(categorical), names(keep)
    if group is not None and time is not None:
        raise ConfigError("dataset.group and dataset.time cannot be combined: rows are split by one or the other")
    split_by = {role: str(column) for role, column in (("group", group), ("time", time)) if column is not None}
    refuse_missing_columns((target, *drop, *categorical, *keep, *split_by.values()), frame, path)
    if target in split_by.values():
        raise ConfigError(f"dataset.target, dataset.group and dataset.time must differ, got {target!r} twice")
    labels, classes, positive_index = encode_labels(frame[target], target, positive, path)
    unused = [Dropped(column, f"is the {role}") for role, column in split_by.items() if column not in keep]
    used = frame.drop(columns=list({target, *drop, *(column.name for column in unused)}))
    raw = read_columns(used, categorical, keep, path, decimals)
    raw = Columns(raw.used, (*unused, *raw.dropped), frame)
    encoding = Encoding((), (), target, classes, positive_index).fitted(raw)
    return Table(
        features=encoding.features(raw),
        labels=torch.from_numpy(labels),
        classes=classes,
        name=name,
        positive=positive_index,
        columns=encoding.feature_names,
        raw=raw,
        encoding=encoding,
        groups=group_numbers(frame[split_by["group"]], path) if "group" in split_by else None,
        time=time_numbers(frame[split_by["time"]], path) if "time" in split_by else None,
        source=str(path),
        path=str(path),
        own=own,
    )


def refuse_missing_columns(columns: Sequence[str], frame: "pd.DataFrame", path: str) -> None:
    """DataError if the frame lacks one of the columns that were named."""
    try:
        for column in columns:
            choose("column", column, frame.columns)
    except ValueError as error:
        nameless = sum(name.startswith("Unnamed: ") for name in frame.columns)
        hint = ". Delete what is above the names of the columns" if 2 * nameless > len(frame.columns) else ""
        raise DataError(f"{path}: {shown(error, 500, quoted=False)}{hint}") from None


def group_numbers(column: "pd.Series", path: str) -> Tensor:
    """int64 [n]: the same number for every row of a group."""
    refuse_gaps(column, f"dataset.group={column.name}", path)
    return torch.from_numpy(words_column(str(column.name), column).codes)


def time_numbers(column: "pd.Series", path: str) -> Tensor:
    """float64 [n], larger is later: dates as days, numbers unchanged."""
    refuse_gaps(column, f"dataset.time={column.name}", path)
    try:
        detected = detect(str(column.name), column, keep=True)
    except DataError as error:
        raise DataError(f"{path}: dataset.time={column.name} {error}; expected dates or numbers") from None
    match detected:
        case Dates(days=values) | Numbers(values=values):
            return torch.from_numpy(values.copy())
        case Words(levels=levels):
            got = f"text such as {shown(levels[0])}"
        case Dropped(reason=reason):
            got = f"a column that {reason}"
    raise DataError(f"{path}: dataset.time={column.name} expects dates or numbers, got {got}.")


def refuse_gaps(column: "pd.Series", name: str, path: str) -> None:
    """DataError if values are missing: a row without group or time belongs to no part of the split."""
    empty = np.flatnonzero(column.isna())
    if len(empty):
        raise DataError(f"{path}: {name} is missing in {row_list(empty, len(column))}. Fill or delete these rows.")


def row_list(rows: np.ndarray, total: int) -> str:
    """How many rows, and the numbers of the first five, counted from 1 below the header."""
    first = ", ".join(str(row + 1) for row in rows[:5])
    return f"{len(rows):,} of {total:,} rows (rows {first}{', …' if len(rows) > 5 else ''})"


def names(typed: Names) -> list[str]:
    """Columns as they were typed, one or several: ab, [a, b], or [0], since a name may look like a number."""
    if typed is None:
        return []
    return [str(name) for name in ([typed] if isinstance(typed, str | int | float) else typed)]


def encode_labels(
    column: "pd.Series", target: str, positive: str | None, path: str
) -> tuple[np.ndarray, tuple[str, ...], int | None]:
    """Labels int64 [n], class names, and the index of the positive class.

    Classes are in the order of their numbers, even if these are stored as text; or of ordered categories; or of words.
    """
    import pandas as pd

    empty = np.flatnonzero(column.isna())
    if len(empty):
        raise DataError(
            f"{path}: the label {target!r} is missing in {row_list(empty, len(column))}. Fill or delete these rows. "
            "Empty cells, ?, NA, N/A, NaN, None and null count as missing; rename a class with such a name."
        )
    numeric = pd.api.types.is_numeric_dtype(column)
    if numeric and np.isinf(column.to_numpy(dtype=float)).any():
        raise DataError(f"{path}: the target {target!r} has infinite values; expected finite numbers or text.")
    values, labels, counts = np.unique(
        column.to_numpy() if numeric else words(column), return_inverse=True, return_counts=True
    )
    numbers = ranks = None if numeric else distinct_numbers(values)
    if isinstance(column.dtype, pd.CategoricalDtype) and column.dtype.ordered:
        ranks = column.cat.categories.astype(str).str.strip().get_indexer_for(pd.Index(values))
    if ranks is not None:
        order = np.argsort(ranks)
        values, labels, counts = values[order], np.argsort(order)[labels], counts[order]
    numeric = numeric or numbers is not None
    classes = words(pd.Series(values)).tolist()
    if len(classes) < 2:
        got = f"only {shown(classes[0])}" if classes else "no rows"
        raise DataError(f"{path}: the target {target!r} needs at least two classes, found {got}.")
    if len(classes) > 2 and 2 * len(classes) > len(column):
        raise DataError(
            f"{path}: the target {target!r} has {len(classes):,} different values in {len(column):,} rows; "
            "classes should repeat. Is it a number to predict, or a name?"
        )
    if positive is not None:
        try:
            positive = choose(f"class of {target!r}", str(positive), classes)
        except ValueError as error:
            raise DataError(f"{path}: {shown(error, 500, quoted=False)}") from None
    if len(classes) > 2:
        return labels, tuple(classes), None if positive is None else classes.index(positive)
    positive_index = classes.index(positive) if positive is not None else 1 if numeric else int(counts.argmin())
    if positive_index == 0:
        labels, classes = 1 - labels, classes[::-1]
    return labels, tuple(classes), 1


def distinct_numbers(values: np.ndarray) -> np.ndarray | None:
    """Words as numbers [d], if each is one and no two are the same, as 1 and 01 are; else None."""
    import pandas as pd

    numbers = pd.to_numeric(pd.Series(values, dtype=object), errors="coerce").to_numpy(dtype=float)
    return numbers if np.isfinite(numbers).all() and len(np.unique(numbers)) == len(numbers) else None


DATASETS = {
    "csv": Dataset(
        load=csv,
        kind="table",
        about="your own CSV, Parquet, Feather or Excel file: dataset.path=FILE dataset.target=COLUMN",
        licence="your own",
        citation="your own",
        where="your file",
    )
}
