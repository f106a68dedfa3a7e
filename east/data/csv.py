"""Your own table: a CSV file of any delimiter, or Parquet, with numbers, categories and missing values.

How its columns become features is kept as a plain object, the `encoding`, so that new rows can be encoded in the same
way later, or refused:

    {"columns": [{"name": "age", "kind": "numeric", "median": 38.0, "indicator": true},
                 {"name": "job", "kind": "categorical", "text": true, "categories": ["clerk", "nurse"]}],
     "target": "income", "classes": ["low", "high"], "positive": 1, "delimiter": null}
"""

import gzip
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from east.choices import choose, install_hint
from east.data.common import DataError, Table, listed
from east.data.sources import Dataset

if TYPE_CHECKING:
    import pandas as pd

FEW = 10  # numbers with a stray text among them, such as 0 1 2 3+, are categories up to here
MANY = 50  # a text column of more different values is no category unless it is called one
MISSING = "(missing)"
Names = str | int | Sequence[str | int] | None


def csv(
    root=None,
    *,
    path: str | None = None,
    target: str | int | None = None,
    drop: Names = None,
    categorical: Names = None,
    positive: str | None = None,
    delimiter: str | None = None,
) -> Table:
    """The column `target` of the file `path` is the class, all others but `drop` are features.

    `categorical` are columns of numbers that are names, such as postcodes. Of two classes the positive one comes
    second: the larger of two numbers, the rarer of two words, unless `positive` says which.
    """
    if path is None or target is None:
        raise DataError("dataset=csv needs dataset.path=FILE and dataset.target=COLUMN.")
    frame = read(path, delimiter)
    table = from_frame("csv", frame, target, drop, categorical, positive, path)
    return replace(table, encoding={**table.encoding, "delimiter": delimiter})


def read(path: str | Path, delimiter: str | None = None) -> "pd.DataFrame":
    """A CSV file (also .gz; the delimiter is the one its first line has most of) or a Parquet file."""
    return next(portions(path, delimiter))


def portions(path: str | Path, delimiter: str | None = None, rows: int | None = None) -> Iterator["pd.DataFrame"]:
    """The file as frames of so many `rows`, or as one; a Parquet file always is one."""
    import pandas as pd

    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"there is no file {path}.")
    try:
        if path.suffix in (".parquet", ".pq"):
            yield pd.read_parquet(path)
            return
        if delimiter is None:
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8-sig") as file:
                header = file.readline()
            outside = re.sub(r'"[^"]*("|$)', "", header)  # a quoted name may contain any of them
            delimiter = max(",;\t|", key=outside.count)
        options = {"na_values": ["?"], "skipinitialspace": True, "encoding": "utf-8-sig", "low_memory": False}
        with pd.read_csv(path, sep=delimiter, index_col=False, iterator=True, chunksize=rows, **options) as reader:
            yield from strictly(reader)
    except pd.errors.ParserWarning:
        raise DataError(
            f"{path} cannot be read as a table: expected one field per column that the first line names, got rows of "
            "more. Name every column, or say what separates them (dataset.delimiter=…)."
        ) from None
    except ImportError:
        raise DataError(f"{path} needs a Parquet reader: {install_hint('files')}") from None
    except (OSError, ValueError) as error:  # pandas' and pyarrow's parsing errors are ValueErrors
        raise DataError(f"{path} cannot be read as a table: {str(error).splitlines()[0]}") from error


def strictly(reader: Iterator["pd.DataFrame"]) -> Iterator["pd.DataFrame"]:
    """The frames of a reader; rows longer than the header, of which pandas only warns, raise that warning.

    One more field is no fault where it is empty: some programs end every row with a delimiter.
    """
    import pandas as pd

    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = next(reader, None)
        if frame is None:
            return
        yield frame


def from_frame(
    name: str,
    frame: "pd.DataFrame",
    target: str | int,
    drop: Names = None,
    categorical: Names = None,
    positive: str | None = None,
    path: str = "",
) -> Table:
    """A table of features and classes out of a frame of columns."""
    frame = frame.rename(columns=str)
    target, drop, categorical = str(target), names(drop), names(categorical)
    try:
        for column in (target, *drop, *categorical):
            choose("column", column, frame.columns)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    labels, classes, positive_index = encode_labels(frame[target], target, positive, path)
    features = frame.drop(columns=[target, *drop])
    if features.columns.empty:
        raise DataError(f"{path}: no feature column is left beside the target {target!r}.")
    encoding = {
        "columns": learn(features, categorical, path),
        "target": target,
        "classes": list(classes),
        "positive": positive_index,
    }
    return Table(
        features=encode(features, encoding),
        labels=torch.from_numpy(labels),
        classes=classes,
        name=name,
        positive=positive_index,
        columns=feature_names(encoding),
        encoding=encoding,
        source=str(path),
        path=str(path),
    )


def names(given: Names) -> list[str]:
    """Columns as they are typed, one or several: ab, [a, b], or [0], since a name may look like a number."""
    if given is None:
        return []
    return [str(name) for name in ([given] if isinstance(given, str | int | float) else given)]


def encode_labels(
    column: "pd.Series", target: str, positive: str | None, path: str
) -> tuple[np.ndarray, tuple[str, ...], int | None]:
    """Labels int64 [n], class names, and the index of the positive class."""
    import pandas as pd

    empty = np.flatnonzero(column.isna())
    if len(empty):
        some = ", ".join(str(row + 1) for row in empty[:5])
        raise DataError(
            f"{path}: {len(empty):,} of {len(column):,} rows have no label in {target!r} (rows {some}"
            f"{', …' if len(empty) > 5 else ''}). Fill or delete these rows. "
            "Empty cells, ?, NA, N/A, NaN, None and null mean that a value is missing; rename a class called so."
        )
    numeric = pd.api.types.is_numeric_dtype(column)
    if numeric and np.isinf(column.to_numpy(dtype=float)).any():
        raise DataError(f"{path}: the target {target!r} has infinite values; expected finite numbers or text.")
    values, labels, counts = np.unique(
        column.to_numpy() if numeric else words(column), return_inverse=True, return_counts=True
    )
    classes = words(pd.Series(values)).tolist()
    if len(classes) < 2:
        got = f"only {classes[0]!r}" if classes else "no rows"
        raise DataError(f"{path}: the target {target!r} needs at least two classes, found {got}.")
    if len(classes) > 2 and 2 * len(classes) > len(column):
        raise DataError(
            f"{path}: the target {target!r} has {len(classes):,} different values in {len(column):,} rows; "
            "classes repeat. Is it a number to predict, or a name?"
        )
    if positive is not None:
        try:
            positive = choose(f"class of {target!r}", str(positive), classes)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
    if len(classes) > 2:
        return labels, tuple(classes), None if positive is None else classes.index(positive)
    first = classes.index(positive) if positive is not None else 1 if numeric else int(counts.argmin())
    if first == 0:
        labels, classes = 1 - labels, classes[::-1]
    return labels, tuple(classes), 1


def learn(features: "pd.DataFrame", categorical: Sequence[str], path: str) -> list[dict]:
    """The encoding of each column. Medians and categories are those of the whole file; scaling is left to the split."""
    columns, faults = [], []
    for name, column in features.items():
        try:
            columns.append({"name": name, **learn_column(column, name in categorical)})
        except DataError as error:
            faults.append(f"column {name!r} {error}")
    if faults:
        raise DataError(
            f"{path}: some columns cannot be used as they are. Repair them, leave them out (dataset.drop=[…]) or "
            f"call them categories (dataset.categorical=[…]):{listed(faults)}"
        )
    return columns


def learn_column(column: "pd.Series", categorical: bool) -> dict:
    """Its kind, with the median or the categories; DataError says why it is neither."""
    import pandas as pd

    present = column.dropna()
    if present.empty:
        raise DataError("is empty")
    text = is_text(column)
    if not (text or pd.api.types.is_numeric_dtype(column)):
        raise DataError(f"is of type {column.dtype}, neither numbers nor text")
    if categorical or text:
        values = words(present)
        categories = np.unique(values)
        if text and not categorical:
            numbers = pd.to_numeric(pd.Series(values), errors="coerce")
            stray = values[numbers.isna()]
            if 0 < len(stray) < 0.5 * len(values) and len(categories) > FEW:
                raise DataError(f"has numbers, but also {len(stray):,} texts such as {stray[0]!r}")
            if len(categories) > MANY:
                raise DataError(f"is text with {len(categories):,} different values such as {values[0]!r}")
        missing = [MISSING] if len(present) < len(column) else []
        return {"kind": "categorical", "text": text, "categories": categories.tolist() + missing}
    values = present.to_numpy(dtype=float)
    if overflows(values):
        raise DataError("has infinite values")
    return {"kind": "numeric", "median": float(np.median(values)), "indicator": len(present) < len(column)}


def encode(frame: "pd.DataFrame", encoding: dict) -> Tensor:
    """Features float32 [n, f] of a frame with the columns of `encoding`; further columns are ignored.

    A number that is missing becomes the median of training; where training had missing ones too, a column of 0 and 1
    tells them apart. A category becomes one column of 0 and 1; one that training did not have is all 0.
    """
    import pandas as pd

    frame = frame.rename(columns=str)
    expected = encoding["columns"]
    missing = [column["name"] for column in expected if column["name"] not in frame]
    if missing:
        raise DataError(f"columns are missing: {', '.join(missing)}. Found: {', '.join(frame.columns)}.")
    wrong = []
    for column in expected:
        found = frame[column["name"]]
        text = column["kind"] == "categorical" and column["text"]
        if text:  # a few rows of 0 1 2 3+ may look like numbers, and one may be new
            categories = set(column["categories"])
            fits = is_text(found) or has_numbers(categories) or set(words(found.dropna())) <= categories
        else:
            fits = pd.api.types.is_numeric_dtype(found) or found.isna().all() or is_boolean(found)
        if not fits:
            wrong.append(f"{column['name']} (expected {'text' if text else 'numbers'}, got {found.dtype})")
        elif column["kind"] == "numeric" and overflows(found.to_numpy(dtype=float, na_value=np.nan)):
            wrong.append(f"{column['name']} (infinite values)")
    if wrong:
        raise DataError(f"columns do not fit those of training: {', '.join(wrong)}.")
    parts = []
    for column in expected:
        found = frame[column["name"]]
        absent = found.isna().to_numpy()
        if column["kind"] == "numeric":
            values = found.to_numpy(dtype=float, na_value=np.nan)
            parts.append(np.where(absent, column["median"], values)[:, None])
            if column["indicator"]:
                parts.append(absent[:, None])
        else:
            values = np.full(len(found), MISSING, dtype=object)
            values[~absent] = words(found[~absent])
            parts.append(values[:, None] == np.array(column["categories"], dtype=object))
    return torch.from_numpy(np.concatenate(parts, axis=1, dtype=np.float32, casting="unsafe"))


def has_numbers(categories: set[str]) -> bool:
    """Whether some are numbers, all written as `words` writes them: a 1 of new rows cannot be told to be a 01."""
    import pandas as pd

    numbers = pd.to_numeric(pd.Series(sorted(categories)), errors="coerce").dropna()
    return not numbers.empty and set(words(numbers)) <= categories


def feature_names(encoding: dict) -> tuple[str, ...]:
    """Names of the encoded features: age, age_missing, job=clerk, job=nurse."""
    names = []
    for column in encoding["columns"]:
        if column["kind"] == "numeric":
            names += [column["name"]] + [f"{column['name']}_missing"] * column["indicator"]
        else:
            names += [f"{column['name']}={category}" for category in column["categories"]]
    return tuple(names)


def is_text(column: "pd.Series") -> bool:
    import pandas as pd

    types = pd.api.types
    return (
        types.is_string_dtype(column) or types.is_object_dtype(column) or isinstance(column.dtype, pd.CategoricalDtype)
    )


def is_boolean(column: "pd.Series") -> bool:
    """Whether it is True and False; with a blank among them pandas reads them as objects."""
    import pandas as pd

    return pd.api.types.infer_dtype(column, skipna=True) == "boolean"


def overflows(values: np.ndarray) -> bool:
    """Whether some of the numbers are infinite, or would be as float32."""
    return bool((np.abs(values) > np.finfo(np.float32).max).any())


def words(column: "pd.Series") -> np.ndarray:
    """Values as stripped text; 1.0 is "1", since a missing value makes whole numbers floats."""
    import pandas as pd

    if pd.api.types.is_float_dtype(column):
        return np.array([str(int(value)) if value.is_integer() else str(value) for value in column], dtype=object)
    return column.astype(str).str.strip().to_numpy(dtype=object)


DATASETS = {
    "csv": Dataset(
        load=csv,
        kind="table",
        about="your own CSV or Parquet file: dataset.path=FILE dataset.target=COLUMN",
        licence="your own",
        citation="your own",
        where="your file",
    )
}
