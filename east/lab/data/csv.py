"""Your own table: a CSV, Parquet, Feather or Excel file with numbers, words, dates and missing values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from east.choices import ConfigError, choose
from east.lab.data import files
from east.lab.data.columns import Dropped, Measured, as_numbers, as_words
from east.lab.data.common import DataError, Table, enumerated, listed, shown
from east.lab.data.detection import detect, detect_all, understood
from east.lab.data.encoding import Encoding
from east.lab.data.notation import Mark
from east.lab.data.sources import Dataset, Root
from east.lab.settings.messages import validated

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
    sheet: str | int | None = None,
    header: int | None = None,
    missing: Names = None,
) -> Table:
    """The column `target` of the file `path` is the class; all others except `drop`, `group` and `time` are features.

    categorical: columns of numbers that are names, such as postcodes. positive: the positive class, which comes second
    of two; by default the larger of two numbers or the rarer of two words. Rows with the same `group` stay together in
    a split. With `time`, the oldest rows are for training and the newest for the test. Columns in `keep` are features
    even if they are the group or the time, or look like ids or free text. sheet: of a workbook, by its name. header:
    the line with the names of the columns. missing: words that stand for missing values.
    """
    if path is None:
        raise DataError("dataset=csv needs dataset.path=FILE and dataset.target=COLUMN.")
    sheet = None if sheet is None else str(sheet)
    said = {"delimiter": delimiter, "sheet": sheet, "header": header, "missing": as_list(missing)}
    file, layout = files.regular(path), validated(files.Layout, said, "dataset")
    note, decimals = None, dict[str, Mark]()
    if files.file_kind(file) in ("text", "gzip"):
        frame, decimals = understood(file, layout, [*as_list(target), *as_list(group)], as_list(categorical))
        if not files.text_format(file, layout)[0].startswith("utf"):
            note = "the text was read as Windows-1252 (Latin-1); if words look wrong, save the file as UTF-8"
    else:
        frame = files.read(file, layout).rename(columns=str)
        if sheet is None and (others := files.sheets(file)[1:]):
            note = f"only the first sheet was read; dataset.sheet=NAME reads another: {enumerated(others)}"
    if target is None:
        text = shown(", ".join(frame.columns), 300, quoted=False)
        raise DataError(f"dataset.target=COLUMN is missing: which column of {path} is the class? Columns: {text}")
    choices = drop, categorical, positive, str(path), group, time, keep
    try:
        table = from_frame("csv", frame, target, *choices, decimals=decimals, layout=layout, own=True)
    except DataError as error:
        nameless = len(frame.columns) == 1 or frame.columns.str.startswith("Unnamed: ").mean() >= 0.5
        advice = f". {files.LAID_OUT}" if nameless and str(target) not in frame else ""
        raise DataError(f"{error}{f' ({note})' if note else ''}{advice}") from None
    return replace(table, file_note=note)


def from_frame(
    name: str,
    frame: pd.DataFrame,
    target: str | int,
    drop: Names = None,
    categorical: Names = None,
    positive: str | None = None,
    path: str = "",
    group: str | int | None = None,
    time: str | int | None = None,
    keep: Names = None,
    decimals: Mapping[str, Mark] = {},
    layout: files.Layout = files.DETECTED,
    own: bool = False,
) -> Table:
    """A table of features and classes from a frame; the options are those of `csv`.

    decimals: the decimal marks of columns, as far as the file shows them. layout: that of the file. own: see Data.
    """
    frame = frame.rename(columns=str).reset_index(drop=True)
    files.refuse_duplicates(frame.columns, path)
    target, drop, categorical, keep = str(target), as_list(drop), as_list(categorical), as_list(keep)
    if group is not None and time is not None:
        raise ConfigError("dataset.group and dataset.time cannot be combined: rows are split by one or the other")
    split_by = {role: str(column) for role, column in (("group", group), ("time", time)) if column is not None}
    for column in (target, *drop, *categorical, *keep, *split_by.values()):
        choose_in_file("column", column, frame.columns, path)
    if target in split_by.values():
        raise ConfigError(f"dataset.target, dataset.group and dataset.time must differ, got {target!r} twice")
    labels, classes, positive_index = encode_labels(frame[target], target, positive, path)
    unused = [Dropped(name=column, reason=f"is the {role}") for role, column in split_by.items() if column not in keep]
    rest = frame.drop(columns=list({target, *drop, *(column.name for column in unused)}))
    columns, raw, faults = detect_all(rest, categorical, keep, decimals)
    if faults:
        advice = "Repair them, leave them out (dataset.drop=[…]) or make them categories (dataset.categorical=[…])"
        raise DataError(f"{path}: some columns cannot be used. {advice}:{listed(faults)}")
    about = {"target": target, "classes": classes, "positive": positive_index, **layout.model_dump()}
    encoding = Encoding(columns=(*unused, *columns), **about).fitted(raw)
    if not encoding.used:
        raise DataError(f"{path}: no feature column is left besides the target{'; '.join(['', *encoding.notes[:5]])}.")
    for role, column in split_by.items():
        refuse_gaps(frame[column], f"dataset.{role}={column}", path)
    groups = as_words(frame[split_by["group"]]).cat.codes.to_numpy(np.int64) if "group" in split_by else None
    return Table(
        features=encoding.features(raw),
        labels=torch.from_numpy(labels),
        classes=classes,
        name=name,
        positive=positive_index,
        columns=encoding.feature_names,
        raw=raw,
        written=frame,
        encoding=encoding,
        groups=None if groups is None else torch.from_numpy(groups),
        time=time_numbers(frame[split_by["time"]], path) if "time" in split_by else None,
        source=str(path),
        path=str(path),
        own=own,
    )


def choose_in_file(kind: str, name: str, choices: Iterable[str], path: str) -> str:
    """The name, if it is one of the choices; otherwise DataError, since the file lacks it."""
    try:
        return choose(kind, name, choices)
    except ConfigError as error:
        raise DataError(f"{path}: {shown(error, 500, quoted=False)}") from None


def time_numbers(column: pd.Series, path: str) -> Tensor:
    """float64 [n], larger is later: dates as days, numbers unchanged."""
    try:
        kind, values = detect(str(column.name), column, keep=True)
    except DataError as error:
        raise DataError(f"{path}: dataset.time={column.name} {error}; expected dates or numbers") from None
    if isinstance(kind, Measured):
        return torch.from_numpy(values.to_numpy(copy=True))
    got = shown(values.iloc[0])
    raise DataError(f"{path}: dataset.time={column.name} expects dates or numbers, got text such as {got}.")


def refuse_gaps(column: pd.Series, name: str, path: str) -> None:
    """DataError if values are missing: a row without class, group or time cannot be used."""
    empty = np.flatnonzero(column.isna())
    if len(empty):
        first = ", ".join(str(row + 1) for row in empty[:5])  # counted from 1 below the header
        rows = f"{len(empty):,} of {len(column):,} rows (rows {first}{', …' if len(empty) > 5 else ''})"
        raise DataError(
            f"{path}: {name} is missing in {rows}. Fill or delete these rows. Empty cells, ?, NA, N/A, NaN, None and "
            "null count as missing; rename a class with such a name."
        )


def as_list(typed: Names) -> list[str]:
    """Columns as they were typed, one or several: ab, [a, b], or [0], since a name may look like a number."""
    if typed is None:
        return []
    return [str(name) for name in ([typed] if isinstance(typed, str | int | float) else typed)]


def encode_labels(
    column: pd.Series, target: str, positive: str | None, path: str
) -> tuple[np.ndarray, tuple[str, ...], int | None]:
    """Labels int64 [n], class names, and the index of the positive class.

    Classes are in the order of their numbers, even if these are stored as text; or of ordered categories; or of words.
    """
    refuse_gaps(column, f"the label {target!r}", path)
    text = as_words(column)
    levels, counts = text.cat.categories, text.value_counts(sort=False).to_numpy()
    numbers = as_numbers(levels).to_numpy(float)
    if len(levels) < 2:
        got = f"only {shown(levels[0])}" if len(levels) else "no rows"
        raise DataError(f"{path}: the target {target!r} needs at least two classes, found {got}.")
    if len(levels) > 2 and 2 * len(levels) > len(column):
        raise DataError(
            f"{path}: the target {target!r} has {len(levels):,} different values in {len(column):,} rows; "
            "classes should repeat. Is it a number to predict, or a name?"
        )
    unique = np.isfinite(numbers).all() and len(np.unique(numbers)) == len(levels)  # which 1 and 01 are not
    numeric = pd.api.types.is_numeric_dtype(column) or bool(unique)
    ranks = numbers if numeric else np.zeros(len(levels))
    if isinstance(column.dtype, pd.CategoricalDtype) and column.dtype.ordered:
        ranks = column.cat.categories.astype(str).str.strip().get_indexer_for(levels)
    order = np.argsort(ranks, kind="stable")
    if positive is not None:
        positive = choose_in_file(f"class of {target!r}", str(positive), levels, path)
    elif len(levels) == 2:
        positive = levels[order[1] if numeric else order[counts[order].argmin()]]
    if len(levels) == 2:
        order = np.argsort(levels == positive, kind="stable")
    classes = tuple(levels[order])
    return np.argsort(order)[text.cat.codes], classes, None if positive is None else classes.index(positive)


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
