"""Files of rows and columns, read into pandas frames: CSV (also gzipped), Parquet, Feather, Excel.

A file's first bytes decide its format, not its name. Text may be UTF-8, UTF-16, or Windows-1252 (Latin-1).
"""

import codecs
import gzip
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any, cast

import pandas as pd
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from east.choices import ConfigError, choose, install_hint
from east.lab.data.common import DataError, enumerated, shown

BLOCK = 1 << 20
MOST_COLUMNS, LONGEST_LINE = 100_000, 1 << 26  # more would fill the memory
DELIMITERS = ",;\t|"  # those that are detected
BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
    b"ARROW1": "Feather",
    b"FEA1": "Feather",
    b"PK\x03\x04": "Excel",
}
SEP = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)  # a first line that Excel writes and reads
MARKUP = re.compile(r"\s*(?:(<!doctype|<html|<\?xml)|[\[{]\s*[{\"]|[\[{]\s*$)", re.IGNORECASE)
MISSING = (
    *("", "?", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A"),
    *("NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
LAID_OUT = "For other text, set dataset.delimiter, or dataset.header to the line that names the columns."
EXPECTED = f"Expected CSV (also gzipped), Parquet, Feather or Excel (.xlsx); unpack a ZIP archive first. {LAID_OUT}"


def one_delimiter(typed: str) -> str:
    r"""The delimiter as typed: `tab` and `\t` are a tab, `\s+` is any blank space."""
    delimiter = "\t" if typed in ("tab", r"\t") else typed
    if len(delimiter) != 1 and delimiter != r"\s+":  # pandas would take it for a pattern
        raise ValueError(r"one character, tab or \s+ (blank space)")
    return delimiter


class Layout(BaseModel):
    """Layout of a file; None means detected."""

    model_config = ConfigDict(frozen=True, strict=True)
    delimiter: Annotated[str, AfterValidator(one_delimiter)] | None = None
    sheet: str | None = None  # of a workbook; None: the first
    header: Annotated[int, Field(ge=1)] | None = None  # the line with the names of the columns; None: the first
    missing: Annotated[tuple[str, ...], Field(strict=False)] = ()  # words that stand for missing values

    @property
    def skip(self) -> int:
        return (self.header or 1) - 1


DETECTED = Layout()


def read(path: str | Path, layout: Layout = DETECTED, as_written: Iterable[str] | None = None) -> pd.DataFrame:
    """The whole file, with NaN for missing values. as_written: columns of a text file that stay text; None: all."""
    options: dict[str, Any] = {}
    if as_written is not None:  # parsing numbers while reading is five times as fast as afterwards
        options = {"dtype": dict.fromkeys(as_written, str), "na_values": [*MISSING, *layout.missing]}
    return with_gaps(next(portions(path, layout, **options)), layout)


def with_gaps(written: pd.DataFrame, layout: Layout = DETECTED) -> pd.DataFrame:
    """The frame with NaN for the words, or the numbers of a typed column, that stand for missing values."""
    codes = pd.to_numeric(pd.Series(layout.missing, dtype=object), errors="coerce").dropna()
    text = written.select_dtypes(["object", "str", "string", "category"])
    gaps = text.isin([*MISSING, *layout.missing, *codes.astype(float).astype(str)])
    frame = written.assign(**text.mask(gaps).infer_objects())
    return frame.mask(frame.isin([*codes])) if len(codes) else frame


def portions(
    path: str | Path, layout: Layout = DETECTED, rows: int | None = None, **options: Any
) -> Iterator[pd.DataFrame]:
    """The file as frames of `rows` rows each, or as a single one; only text is read in portions.

    Cells of text files are as they are written (00012, 1E5 and NA), unless options of pandas.read_csv say otherwise.
    """
    path = regular(path)
    kind = file_kind(path)
    try:
        if kind in ("text", "gzip"):
            yield from text_portions(path, layout, rows, options)
        else:
            yield read_binary(path, kind, layout)
    except ImportError:
        package = "openpyxl" if kind == "Excel" else "pyarrow"
        raise DataError(f"{path} is a {kind} file, which needs {package}: {install_hint('files')}") from None
    except (DataError, ConfigError):
        raise
    except Exception as error:  # on damaged files the readers raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} cannot be read as a table: {shown(reason, 200, quoted=False)}. {EXPECTED}") from error


def text_portions(path: Path, layout: Layout, rows: int | None, options: dict[str, Any]) -> Iterator[pd.DataFrame]:
    """Portions of a text file. Rows longer than the header are an error, where pandas would only warn.

    One extra empty field is fine: some programs end every row with a delimiter.
    """
    charset, delimiter, skip = text_format(path, layout)
    common: dict[str, Any] = {"sep": delimiter, "encoding": charset, "skiprows": skip}
    common |= {"dtype": str, "keep_default_na": False, "na_values": [""], "skipinitialspace": True}
    common |= {"low_memory": False} if delimiter.isascii() else {"engine": "python"}  # one type for a whole column
    with opened(path) as file:
        names = pd.read_csv(file, header=None, nrows=1, **common).iloc[0]
    refuse_duplicates(names.dropna(), path)  # blank ones will be numbered
    with opened(path) as file:
        reader = pd.read_csv(file, index_col=False, iterator=True, chunksize=rows, **common | options)
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
        near = get_close_matches(path.name, [beside.name for beside in path.parent.glob("*")], n=1)
        raise DataError(f"there is no file {path}{f', did you mean {path.with_name(near[0])}?' if near else '.'}")
    if not path.is_file():
        raise DataError(f"{path} is not a regular file but a {'folder' if path.is_dir() else 'pipe or device'}.")
    return path


def file_kind(path: Path) -> str:
    """text, gzip, Parquet, Feather or Excel, by the first bytes."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), "text")


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
    if duplicates := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(
            f"{f'{path}: ' if str(path) else ''}column names must differ, but more than one column is called "
            f"{enumerated(map(shown, duplicates))}. Rename or delete one of them."
        )


def opened(path: Path) -> IO[bytes]:
    """The bytes of a text file, unpacked if it is gzipped."""
    return cast(IO[bytes], gzip.open(path, "rb")) if file_kind(path) == "gzip" else open(path, "rb")


def text_format(path: Path, layout: Layout = DETECTED) -> tuple[str, str, int]:
    """Character set, delimiter and lines above the names; the whole file is checked for bytes that are not UTF-8."""
    charset, delimiter = find_charset(path), layout.delimiter
    with TextIOWrapper(opened(path), charset) as file:
        lines = enumerate(islice(file, layout.skip, None), start=layout.skip + 1)
        number, first = next(((number, line) for number, line in lines if line.strip()), (0, ""))
    if said := SEP.fullmatch(first):
        return charset, delimiter or said[1], number
    if delimiter is None:
        if markup := MARKUP.match(first):
            raise ValueError(f"it looks like {'HTML or XML' if markup[1] else 'JSON'}")
        outside = re.sub(r'"[^"]*("|$)', "", first)  # a quoted name may contain any delimiter
        delimiter = max(DELIMITERS, key=outside.count)
    if len(delimiter) == 1 and first.count(delimiter) >= MOST_COLUMNS:
        raise ValueError(f"it has {first.count(delimiter) + 1:,} columns, more than {MOST_COLUMNS:,}")
    return charset, delimiter, layout.skip


def find_charset(path: Path) -> str:
    """The character set of the byte order mark, else the first of UTF-8, Windows-1252 and Latin-1 that fits."""
    with opened(path) as file:
        start = file.read(BLOCK)
    marked = next((charset for mark, charset in BOMS.items() if start.startswith(mark)), None)
    if marked is None and 0 in start:
        raise ValueError("it has zero bytes, so it is not text that can be read; save it as CSV in UTF-8, or as .xlsx")
    for charset in (marked,) if marked else ("utf-8", "cp1252"):
        with suppress(UnicodeDecodeError), TextIOWrapper(opened(path), charset, newline="") as text:
            line = 0  # characters since it began
            while block := text.read(BLOCK):
                line = len(block) - block.rindex("\n") if "\n" in block else line + len(block)
                if line > LONGEST_LINE:
                    raise ValueError(f"it has a line of more than {LONGEST_LINE:,} characters")
            return charset
    return marked or "latin-1"
