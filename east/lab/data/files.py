"""Files of rows and columns, read into pandas frames: CSV (also gzipped), Parquet, Feather, Excel.

A file's first bytes decide its format, not its name. Text may be UTF-8, UTF-16, or Windows-1252 (Latin-1), and its
cells are read as they are written; what they mean is the business of `detection` and `columns`.
"""

import codecs
import gzip
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, cast

import pandas as pd
from pydantic import BaseModel, ConfigDict, Field

from east.choices import ConfigError, choose, install_hint
from east.lab.data.common import DataError, shown

BLOCK = 1 << 20
MOST_COLUMNS, LONGEST_LINE = 100_000, 1 << 26  # more would fill the memory
DELIMITERS = ",;\t|"  # those that are detected; others must be said
BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
    b"ARROW1": "Feather",
    b"FEA1": "Feather",
    b"PK\x03\x04": "Excel",
    b"\xd0\xcf\x11\xe0": "old Excel",
}
SEP = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)  # a first line that Excel writes and reads
UNEVEN = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")  # as pandas says it
NEEDS = {"Parquet": "pyarrow", "Feather": "pyarrow", "Excel": "openpyxl"}
MISSING = (
    *("", "?", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
ADVICE = {
    "Excel": "It is a ZIP archive: unpack it first, unless it is a damaged Excel workbook (.xlsx).",
    "text": "Expected CSV (also gzipped), Parquet, Feather or Excel (.xlsx).",
}


@dataclass(frozen=True)
class TextFormat:
    """How a text file is written."""

    charset: str  # a name that Python knows
    delimiter: str
    skip: int = 0  # lines above the names of the columns

    @property
    def note(self) -> str | None:
        """What the user should know, if the charset was a guess."""
        if self.charset in ("utf-8", "utf-8-sig", "utf-16"):
            return None
        name = {"cp1252": "Windows-1252 (Latin-1)", "latin-1": "Latin-1"}.get(self.charset, self.charset.upper())
        return f"the text is not UTF-8 and was read as {name}. If words look wrong, save the file as UTF-8"


class Layout(BaseModel):
    """How a file is laid out, as far as it is not detected."""

    model_config = ConfigDict(frozen=True, strict=True)
    delimiter: Annotated[str, Field(pattern=r"(?s)^(.|\\s\+)$")] | None = None  # pandas takes longer ones for a pattern
    sheet: str | None = None  # of a workbook; None: the first
    header: Annotated[int, Field(ge=1)] | None = None  # the line with the names of the columns; None: the first
    missing: Annotated[tuple[str, ...], Field(strict=False)] = ()  # words that stand for missing values

    @property
    def skip(self) -> int:
        return (self.header or 1) - 1


DETECTED = Layout()


def read(path: str | Path, layout: Layout = DETECTED) -> pd.DataFrame:
    """The whole file as a frame."""
    return with_gaps(next(portions(path, layout)), layout)


def with_gaps(written: pd.DataFrame, layout: Layout = DETECTED) -> pd.DataFrame:
    """The frame with NaN for the words, or the numbers of a typed column, that stand for missing values."""
    text = written.select_dtypes(["object", "str", "string", "category"])
    frame = written.assign(**text.mask(text.isin([*MISSING, *layout.missing])).infer_objects())
    codes = pd.to_numeric(pd.Series(layout.missing, dtype=object), errors="coerce").dropna()
    return frame.mask(frame.isin([*codes])) if len(codes) else frame


def checked_layout(
    delimiter: str | None, sheet: str | int | None, header: int | None, missing: Iterable[str]
) -> Layout:
    r"""The layout as it was typed: `tab` and `\t` are a tab, `\s+` is any blank space."""
    typed, delimiter = delimiter, "\t" if delimiter in ("tab", r"\t") else delimiter
    if delimiter is not None and len(delimiter) != 1 and delimiter != r"\s+":
        raise ConfigError(rf"dataset.delimiter: expected one character, tab or \s+ (blank space), got {typed!r}")
    if header is not None and (type(header) is not int or header < 1):
        raise ConfigError(f"dataset.header: expected the number of a line, from 1, got {header!r}")
    sheet = None if sheet is None else str(sheet)
    return Layout(delimiter=delimiter, sheet=sheet, header=header, missing=tuple(missing))


def portions(path: str | Path, layout: Layout = DETECTED, rows: int | None = None) -> Iterator[pd.DataFrame]:
    """The file as frames of `rows` rows each, or as a single one; only text is read in portions.

    Cells are as they are written: 00012, 1E5 and NA are copied, where a file has text.
    """
    path = regular(path)
    kind = file_kind(path)
    try:
        if kind in ("text", "gzip"):
            yield from text_portions(path, layout, rows)
        else:
            yield read_binary(path, kind, layout)
    except pd.errors.ParserWarning:
        raise DataError(
            f"{path} cannot be read as a table: expected one field per column named in the first line, got rows with "
            "more. Name every column, or set the delimiter (dataset.delimiter=…)."
        ) from None
    except ImportError:
        raise DataError(
            f"{path} is a {kind} file, which needs {NEEDS.get(kind, 'pyarrow')}: {install_hint('files')}"
        ) from None
    except (DataError, ConfigError):
        raise
    except Exception as error:  # on damaged files the readers raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if uneven := UNEVEN.search(reason):
            raise DataError(
                f"{path} cannot be read as a table: line {uneven[2]} has {uneven[3]} fields, but the first line has "
                f"{uneven[1]}. If it names the columns, set dataset.header={uneven[2]}; or set dataset.delimiter=…."
            ) from error
        advice = f" {ADVICE[kind]}" if kind in ADVICE else ""
        raise DataError(f"{path} cannot be read as a table: {shown(reason, 200, quoted=False)}.{advice}") from error


def text_portions(path: Path, layout: Layout, rows: int | None) -> Iterator[pd.DataFrame]:
    """`portions` of a text file, with the errors of pandas; its warning about rows longer than the header is one, too.

    One extra empty field is fine: some programs end every row with a delimiter.
    """
    format = text_format(path, layout)
    options: dict[str, Any] = {
        "sep": format.delimiter,
        "encoding": format.charset,
        "skiprows": format.skip,
        "dtype": str,
        "keep_default_na": False,
        "na_values": [""],
        "skipinitialspace": True,
    }
    with opened(path) as file:
        names = pd.read_csv(file, header=None, nrows=1, **options).iloc[0]
    refuse_duplicates(names.dropna(), path)  # blank ones will be numbered
    with opened(path) as file:
        reader = pd.read_csv(file, index_col=False, iterator=True, chunksize=rows, **options)
        while True:
            with warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
                frame = next(reader, None)
            if frame is None:
                return
            yield frame


def regular(path: str | Path) -> Path:
    """The path, if it is a regular file; otherwise DataError."""
    path = Path(path).expanduser()
    if not path.exists():
        near = get_close_matches(path.name, names_in(path.parent), n=1)
        raise DataError(f"there is no file {path}{f', did you mean {path.with_name(near[0])}?' if near else '.'}")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file but a {'folder' if path.is_dir() else 'pipe or device'}.")
    return path


def names_in(folder: Path) -> list[str]:
    """Names of the entries of a folder; none if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def file_kind(path: Path) -> str:
    """text, gzip, Parquet, Feather, Excel or old Excel, by the first bytes."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), "text")


def is_text_file(path: Path) -> bool:
    """Whether it is a CSV file, gzipped or not, and so can be read in portions."""
    return file_kind(path) in ("text", "gzip")


def sheets(path: Path) -> list[str]:
    """The names of the sheets of a workbook; of other files none."""
    if file_kind(path) != "Excel":
        return []
    with pd.ExcelFile(path, engine="openpyxl") as workbook:
        return [*map(str, workbook.sheet_names)]


def read_binary(path: Path, kind: str, layout: Layout) -> pd.DataFrame:
    """A Parquet or Feather file, or a sheet of an Excel workbook. A named index becomes columns again.

    Text of a workbook stays text, and whole numbers stay whole beside missing ones.
    """
    if kind == "old Excel":
        raise ValueError("it is in Excel's old format (.xls). Save it as .xlsx or CSV")
    if kind == "Excel":
        known = sheets(path)
        sheet = known[0] if layout.sheet is None else choose("sheet", layout.sheet, known)
        options: dict[str, Any] = {"sheet_name": sheet, "skiprows": layout.skip, "engine": "openpyxl"}
        refuse_duplicates(map(str, pd.read_excel(path, header=None, nrows=1, **options).stack()), path)
        return pd.read_excel(path, dtype=object, keep_default_na=False, **options).infer_objects()
    reader = pd.read_parquet if kind == "Parquet" else pd.read_feather
    frame = reader(path, dtype_backend="numpy_nullable")
    refuse_duplicates(map(str, frame.columns), path)
    return frame.reset_index() if any(name is not None for name in frame.index.names) else frame


def refuse_duplicates(names: Iterable[str], path: str | Path) -> None:
    """Refuse two columns with the same name; pandas would silently rename the second."""
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        where = f"{path}: " if str(path) else ""
        more = f" and {len(duplicates) - 5} more" if len(duplicates) > 5 else ""
        raise DataError(
            f"{where}column names must differ, but more than one column is called "
            f"{', '.join(map(shown, duplicates[:5]))}{more}. Rename or delete one of them."
        )


def opened(path: Path) -> IO[bytes]:
    """The bytes of a text file, unpacked if it is gzipped."""
    return cast(IO[bytes], gzip.open(path, "rb")) if file_kind(path) == "gzip" else open(path, "rb")


def text_format(path: Path, layout: Layout = DETECTED) -> TextFormat:
    """Character set and delimiter of a text file; the whole file is checked for bytes that are not UTF-8."""
    charset, delimiter = find_charset(path), layout.delimiter
    with TextIOWrapper(opened(path), charset) as file:
        lines = enumerate(islice(file, layout.skip, None), start=layout.header or 1)
        number, first = next(((k, line) for k, line in lines if line.strip()), (0, ""))
    if said := SEP.fullmatch(first):
        return TextFormat(charset, delimiter or said[1], skip=number)
    if delimiter is None:
        if markup := re.match(r"\s*(?:(<!doctype|<html|<\?xml)|[\[{]\s*[{\"]|[\[{]\s*$)", first, re.IGNORECASE):
            raise ValueError(f"it looks like {'HTML or XML' if markup[1] else 'JSON'}")
        outside = re.sub(r'"[^"]*("|$)', "", first)  # a quoted name may contain any delimiter
        delimiter = max(DELIMITERS, key=outside.count)
    if len(delimiter) == 1 and first.count(delimiter) >= MOST_COLUMNS:
        raise ValueError(f"it has {first.count(delimiter) + 1:,} columns, more than {MOST_COLUMNS:,}")
    return TextFormat(charset, delimiter, layout.skip)


def find_charset(path: Path) -> str:
    """The character set by byte order mark; UTF-16 if every other byte is 0; else the first that can read the file."""
    with opened(path) as file:
        start = file.read(BLOCK)
    marked = next((charset for mark, charset in BOMS.items() if start.startswith(mark)), None)
    if marked is None and 0 in start:
        marked = utf16_without_mark(start)
    for charset in (marked,) if marked else ("utf-8", "cp1252"):
        with suppress(UnicodeDecodeError), TextIOWrapper(opened(path), charset, newline="") as text:
            line = 0  # characters since it began
            while block := text.read(BLOCK):
                line = len(block) - block.rindex("\n") if "\n" in block else line + len(block)
                if line > LONGEST_LINE:
                    raise ValueError(f"it has a line of more than {LONGEST_LINE:,} characters")
            return charset
    return marked or "latin-1"


def utf16_without_mark(start: bytes) -> str:
    """The byte order: Western text in UTF-16 has a 0 in nearly every other byte. Other files with zeros are refused."""
    even, odd = start[0::2].count(0), start[1::2].count(0)
    many, few = 0.4 * len(start), 0.05 * len(start)  # of len / 2
    if odd > many and even < few:
        return "utf-16-le"
    if even > many and odd < few:
        return "utf-16-be"
    raise ValueError("it has zero bytes, so it is not text, or text in an unknown character set; save it as UTF-8")
