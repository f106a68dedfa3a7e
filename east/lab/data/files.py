"""Files of rows and columns, read into pandas frames: CSV (also gzipped), Parquet, Feather, Excel.

A file's first bytes decide its format, not its name. Text may be UTF-8, UTF-16, or Windows-1252 (Latin-1).
"""

import codecs
import gzip
import os
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np

from east.choices import ConfigError, install_hint
from east.lab.data.common import DataError, shown
from east.lab.data.notation import NUMBER, are_numbers, find_decimal, level_numbers, split_unit

if TYPE_CHECKING:
    import pandas as pd

BLOCK = 1 << 20
DELIMITERS = ",;\t|"  # those that are detected; others must be said
SAMPLE = 1000  # rows of a new file that are searched for a decimal comma, if training did not show one
BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PAR1": "Parquet",
    b"ARROW1": "Feather",
    b"FEA1": "Feather",
    b"PK\x03\x04": "Excel",
    b"\xd0\xcf\x11\xe0": "old Excel",
}
AS_WRITTEN: dict[str, Any] = {"dtype": str, "keep_default_na": False}  # options of pandas
SEP = re.compile(r'"?sep=(.)"?[\r\n]*', re.IGNORECASE)  # a first line that Excel writes and reads
UNEVEN = re.compile(r"Expected (\d+) fields in line (\d+), saw (\d+)")  # as pandas says it
NEEDS = {"Parquet": "pyarrow", "Feather": "pyarrow", "Excel": "openpyxl"}
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


def read(
    path: str | Path, delimiter: str | None = None, text: Collection[str] = (), decimals: Mapping[str, str] = {}
) -> "pd.DataFrame":
    """The whole file as a frame. The default `delimiter` is the most frequent one in the first line.

    text, decimals: what is known of its columns, see `portions`. The marks of other columns are found.
    """
    return read_marked(path, named_delimiter(delimiter), text, decimals)[0]


def named_delimiter(typed: str | None) -> str | None:
    r"""The delimiter as it was typed: `tab` and `\t` are a tab, `\s+` is any blank space. None: it will be detected."""
    delimiter = "\t" if typed in ("tab", r"\t") else typed
    if delimiter is not None and len(delimiter) != 1 and delimiter != r"\s+":
        raise ConfigError(rf"dataset.delimiter: expected one character, tab or \s+ (blank space), got {typed!r}")
    return delimiter


def read_marked(
    path: str | Path,
    delimiter: str | None = None,
    text: Collection[str] = (),
    decimals: Mapping[str, str] = {},
    rows: int | None = None,
) -> tuple["pd.DataFrame", dict[str, str]]:
    """The first `rows` of a file (None: all), and the decimal marks of its columns as far as they are clear.

    A column's own numbers decide first. One such as 48.253 or 1,500 is read by the others: a decimal comma anywhere in
    the file makes its point a thousands separator, and a file with commas between columns has no other decimal commas.
    """
    frame = next(portions(path, delimiter, rows, text=text, decimals=decimals))
    path = regular(path)
    if not is_text(path):
        return frame, dict(decimals)
    undecided = [str(name) for name in frame if name not in text and name not in decimals]
    marks, comma = text_marks(frame[undecided], text_format(path, delimiter).delimiter)
    floats = [name for name in undecided if frame[name].dtype.kind == "f"]
    if comma:
        frame[floats] = next(portions(path, delimiter, rows, text=floats))[floats]  # 48.253 may mean 48253
        whole = [name for name in undecided if frame[name].dtype.kind in "iu"]
        marks |= dict.fromkeys(whole, ",")
        marks |= {name: "," if all(map(NUMBER[","].fullmatch, distinct(frame[name]))) else "." for name in floats}
    else:
        marks |= {name: "." for name in floats if (frame[name].dropna() % 1 != 0).any()}
    for name, mark in marks.items():
        frame[name] = converted(frame[name], mark)
    return frame, {**marks, **decimals}


def text_marks(frame: "pd.DataFrame", delimiter: str) -> tuple[dict[str, str], bool]:
    """The decimal marks of columns of text that hold numbers, as far as they are clear; is there a decimal comma?

    A point that separates thousands (1.234.567) is no proof of one: ids are written like this, too.
    """
    import pandas as pd

    text = {str(name): values for name, values in frame.items() if pd.api.types.is_string_dtype(values)}
    words = {name: split_unit(distinct(values))[1] for name, values in text.items()}
    words = {name: levels for name, levels in words.items() if are_numbers(levels)}
    marks = {name: find_decimal(levels) for name, levels in words.items()}
    comma = any(mark == "," and any("," in level for level in words[name]) for name, mark in marks.items())
    default = "," if comma else "." if delimiter == "," else None
    found = {name: mark or default for name, mark in marks.items()}
    return {name: mark for name, mark in found.items() if mark}, comma


def distinct(values: "pd.Series") -> list[str]:
    """The different words of a column of text, without blanks around them."""
    return [str(value).strip() for value in values.dropna().unique()]


def converted(values: "pd.Series", decimal: str) -> "pd.Series":
    """A column of text as numbers with this decimal mark; unchanged if it has other words, or is no text."""
    import pandas as pd

    if not pd.api.types.is_string_dtype(values):
        return values
    codes, levels = pd.factorize(values)
    numbers = level_numbers([str(level).strip() for level in levels], decimal)
    return values if np.isnan(numbers).any() else pd.Series(np.append(numbers, np.nan)[codes], values.index)


def portions(
    path: str | Path,
    delimiter: str | None = None,
    rows: int | None = None,
    *,
    text: Collection[str] = (),
    decimals: Mapping[str, str] = {},
    as_written: bool = False,
    columns: list[str] | None = None,
) -> Iterator["pd.DataFrame"]:
    """The file as frames of `rows` rows each, or as a single one; only text is read in portions.

    text: columns that are words even where all of them look like numbers, such as 01.
    decimals: the decimal marks of columns; a point if nothing is said.
    as_written: copy every cell (00012, 1E5, NA) instead of reading numbers and missing values.
    columns: those of a text file to read; None: all.
    """
    import pandas as pd

    path = regular(path)
    kind = file_kind(path)
    try:
        if kind in ("text", "gzip"):
            yield from text_portions(path, delimiter, rows, text, decimals, as_written, columns)
        else:
            yield read_binary(path, kind, text, as_written)
    except pd.errors.ParserWarning:
        raise DataError(
            f"{path} cannot be read as a table: expected one field per column named in the first line, got rows with "
            "more. Name every column, or set the delimiter (dataset.delimiter=…)."
        ) from None
    except ImportError:
        raise DataError(
            f"{path} is a {kind} file, which needs {NEEDS.get(kind, 'pyarrow')}: {install_hint('files')}"
        ) from None
    except DataError:
        raise
    except Exception as error:  # on damaged files the readers raise nearly anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if uneven := UNEVEN.search(reason):
            raise DataError(
                f"{path} cannot be read as a table: line {uneven[2]} has {uneven[3]} fields, but the first line has "
                f"{uneven[1]}. Delete what is above the names of the columns, or set dataset.delimiter=…."
            ) from error
        advice = f" {ADVICE[kind]}" if kind in ADVICE else ""
        raise DataError(f"{path} cannot be read as a table: {shown(reason, 200, quoted=False)}.{advice}") from error


def text_portions(
    path: Path,
    delimiter: str | None,
    rows: int | None,
    text: Collection[str],
    decimals: Mapping[str, str],
    as_written: bool,
    columns: list[str] | None,
) -> Iterator["pd.DataFrame"]:
    """`portions` of a text file, with the errors of pandas."""
    import pandas as pd

    format = text_format(path, delimiter)
    refuse_duplicates(header(path, format), path)
    commas = [name for name, mark in decimals.items() if mark == ","]
    typed = {"dtype": dict.fromkeys([*text, *commas], str), "na_values": ["?"]}
    with opened(path) as file:
        reader = pd.read_csv(
            file,
            sep=format.delimiter,
            encoding=format.charset,
            skiprows=format.skip,
            **(AS_WRITTEN if as_written else typed),
            skipinitialspace=True,
            usecols=columns,
            low_memory=False,
            index_col=False,
            iterator=True,
            chunksize=rows,
        )
        for frame in refuse_long_rows(reader):
            yield frame.assign(**{name: converted(frame[name], ",") for name in commas if name in frame})


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


def is_text(path: Path) -> bool:
    """Whether it is a CSV file, gzipped or not, and so can be read in portions."""
    return file_kind(path) in ("text", "gzip")


def read_binary(path: Path, kind: str, text: Collection[str] = (), as_written: bool = False) -> "pd.DataFrame":
    """A Parquet or Feather file, or the first sheet of an Excel workbook. A named index becomes columns again.

    as_written: text of a workbook stays text, and whole numbers stay whole beside missing ones.
    """
    import pandas as pd

    if kind == "old Excel":
        raise ValueError("it is in Excel's old format (.xls). Save it as .xlsx or CSV")
    if kind == "Excel":
        first = pd.read_excel(path, header=None, nrows=1, engine="openpyxl")
        names = first.iloc[0].dropna().tolist() if len(first) else []
        refuse_duplicates(map(str, names), path)
        if as_written:
            return pd.read_excel(path, engine="openpyxl", dtype=object, keep_default_na=False).infer_objects()
        types = {name: str for name in names if str(name) in text}
        return pd.read_excel(path, engine="openpyxl", na_values=["?"], dtype=types)
    reader = pd.read_parquet if kind == "Parquet" else pd.read_feather
    frame = reader(path, dtype_backend="numpy_nullable") if as_written else reader(path)
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


def text_format(path: Path, delimiter: str | None = None) -> TextFormat:
    """Character set and delimiter of a text file; the whole file is checked for bytes that are not UTF-8."""
    charset = find_charset(path)
    with codecs.getreader(charset)(opened(path)) as file:
        lines = enumerate(file, start=1)
        number, first = next(((k, line) for k, line in lines if line.strip()), (0, ""))
    if said := SEP.fullmatch(first):
        return TextFormat(charset, delimiter or said[1], skip=number)
    if delimiter is None:
        if markup := re.match(r"\s*(?:(<!doctype|<html|<\?xml)|[\[{]\s*[{\"]|[\[{]\s*$)", first, re.IGNORECASE):
            raise ValueError(f"it looks like {'HTML or XML' if markup[1] else 'JSON'}")
        outside = re.sub(r'"[^"]*("|$)', "", first)  # a quoted name may contain any delimiter
        delimiter = max(DELIMITERS, key=outside.count)
    return TextFormat(charset, delimiter)


def find_charset(path: Path) -> str:
    """The character set by byte order mark; else UTF-8 if valid, UTF-16 if every other byte is 0, else Windows-1252."""
    decoder, valid, zeros, bytes_seen = codecs.getincrementaldecoder("utf-8")(), True, False, set[int]()
    with opened(path) as file:
        start = file.read(BLOCK)
        for bom, charset in BOMS.items():
            if start.startswith(bom):
                return charset
        for block in chain([start], iter(lambda: file.read(BLOCK), b""), [b""]):  # the last ends the text
            zeros = zeros or 0 in block
            if valid:
                try:
                    decoder.decode(block, final=not block)
                except UnicodeDecodeError:
                    valid = False
            if not valid:
                bytes_seen.update(block)
    if zeros:
        return utf16_without_mark(start)
    if valid:
        return "utf-8"
    undefined = {0x81, 0x8D, 0x8F, 0x90, 0x9D}
    return "latin-1" if bytes_seen & undefined else "cp1252"


def utf16_without_mark(start: bytes) -> str:
    """The byte order: Western text in UTF-16 has a 0 in nearly every other byte. Other files with zeros are refused."""
    even, odd = start[0::2].count(0), start[1::2].count(0)
    many, few = 0.4 * len(start), 0.05 * len(start)  # of len / 2
    if odd > many and even < few:
        return "utf-16-le"
    if even > many and odd < few:
        return "utf-16-be"
    raise ValueError("it has zero bytes, so it is not text, or text in an unknown character set; save it as UTF-8")


def header(path: Path, format: TextFormat) -> list[str]:
    """The names in the first line as they are written, without blank ones."""
    import pandas as pd

    with opened(path) as file:
        first = pd.read_csv(
            file,
            sep=format.delimiter,
            encoding=format.charset,
            skiprows=format.skip,
            header=None,
            nrows=1,
            dtype=str,
            skipinitialspace=True,
            keep_default_na=False,
        )
    return [name for name in first.iloc[0].tolist() if name]


def refuse_long_rows(reader: Iterator["pd.DataFrame"]) -> Iterator["pd.DataFrame"]:
    """The frames of a reader; pandas' warning about rows longer than the header becomes an error.

    One extra empty field is fine: some programs end every row with a delimiter.
    """
    import pandas as pd

    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = next(reader, None)
        if frame is None:
            return
        yield frame
