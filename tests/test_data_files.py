"""Files of every format and character set give the same table, or an error that says what is wrong."""

import gzip
import os
import re
import tracemalloc

import numpy as np
import pandas as pd
import pytest
import torch

from east.choices import install_hint
from east.lab.data import DataError, detection, encode, files, load
from east.lab.data.files import read


def frame(rows: int = 40) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "größe": [1.5 + k for k in range(rows)],
            "city": ["Zürich" if k % 2 else "Orléans" for k in range(rows)],
            "seen": pd.date_range("2024-01-30", periods=rows, freq="D"),
            "label": [k % 3 == 0 for k in range(rows)],
        }
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "a.csv"
    frame().to_csv(path, index=False)
    return load("csv", path=str(path), target="label")


@pytest.mark.parametrize("charset", ["utf-8", "utf-8-sig", "utf-16", "latin-1", "cp1252"])
@pytest.mark.parametrize("gzipped", [False, True])
def test_every_character_set_gives_the_same_table(tmp_path, expected, charset, gzipped):
    content = frame().to_csv(index=False).encode(charset)
    path = tmp_path / "table.txt"
    path.write_bytes(gzip.compress(content) if gzipped else content)
    table = load("csv", path=str(path), target="label")
    assert (table.fingerprint, table.columns) == (expected.fingerprint, expected.columns)
    guessed = charset in ("latin-1", "cp1252")
    assert any("save the file as UTF-8" in note for note in table.notes) == guessed


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "\nSEP=;", "sep=\t", "sep=:"])
@pytest.mark.parametrize("charset", ["utf-8-sig", "utf-16"])
def test_the_line_in_which_excel_names_the_delimiter_is_skipped(tmp_path, expected, line, charset):
    delimiter = line.strip('"\n')[-1]
    content = frame().to_csv(index=False, sep=delimiter, lineterminator="\r\n")
    (tmp_path / "a.csv").write_bytes(f"{line}\r\n{content}".encode(charset))
    for typed in (None, delimiter):
        table = load("csv", path=str(tmp_path / "a.csv"), target="label", delimiter=typed)
        assert (table.fingerprint, table.columns) == (expected.fingerprint, expected.columns)


def test_text_that_turns_latin_1_late_is_detected(tmp_path):
    """It is detected beyond the first block, and every chunk is decoded alike."""
    rows = "\n".join(["1.5,Bern,0", "2.5,Bern,1"] * 100_000)
    (tmp_path / "a.csv").write_bytes(f"x,city,label\n{rows}\n3.5,Zürich,1\n".encode("latin-1"))
    parts = list(files.portions(tmp_path / "a.csv", rows=150_000))
    assert [len(part) for part in parts] == [150_000, 50_001]
    assert parts[1]["city"].iloc[-1] == "Zürich"


def written(path, **columns) -> str:
    """A file of 20 rows with semicolons, each column repeating some cells, and a label."""
    rows = zip(*(np.resize(cells, 20) for cells in columns.values()), strict=True)
    lines = [";".join((*columns, "label")), *(";".join((*row, str(k % 2))) for k, row in enumerate(rows))]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


SHARES = {"share": ["0,534", "1,500"], "amount": ["48.253", "1.250"], "version": ["2.1", "3"]}
NOTATIONS = [
    ({"x": ["1,5", "-2", "3,25"]}, {"x": [1.5, -2, 3.25]}),
    ({"x": ["1.5", "-2", "3"], "y": ["1,5", "2,5"]}, {"x": [1.5, -2, 3]}),
    ({"x": ["1,500", "2,500", "3,500"]}, {"x": ["1,500", "2,500", "3,500"]}),  # ambiguous
    ({"x": ["0,125", "1,500", "-2,750"]}, {"x": [0.125, 1.5, -2.75]}),
    ({"x": ["1,500", "1234,500"]}, {"x": [1.5, 1234.5]}),
    (SHARES, {"share": [0.534, 1.5], "amount": [48253, 1250], "version": [2.1, 3]}),
    *(
        (
            {"x": ["1,5", "2,25", "unknown"], "note": ["a", "b", version], "z": ["1,500"]},
            {"note": ["a", "b", version], "z": [1.5]},
        )
        for version in ("2.1.3", "2.1", "1.234.567")
    ),
]


@pytest.mark.parametrize("columns, expected", NOTATIONS)
def test_a_decimal_comma_anywhere_makes_points_thousands_separators(tmp_path, columns, expected):
    frame, marks = detection.understood(written(tmp_path / "a.csv", **columns), files.DETECTED, (), ())
    typed = detection.detect_all(frame, keep=[*frame], decimals=marks)[1]
    assert {name: typed[name][: len(values)].tolist() for name, values in expected.items()} == expected


def test_a_saved_encoding_knows_the_decimal_marks(tmp_path):
    encoding = load("csv", path=written(tmp_path / "a.csv", **SHARES), target="label").encoding
    assert [column.decimal for column in encoding.columns] == [",", ",", "."]
    assert encoding.describe()[0].split(maxsplit=1)[1] == "numbers with a decimal comma, median 1.017"


def test_a_quoted_comma_in_a_file_with_commas_separates_thousands(tmp_path):
    rows = "\n".join(f'"{70 + k},977",{k}.125,{k % 2}' for k in range(20))
    (tmp_path / "a.csv").write_text(f"x,y,label\n{rows}\n")
    table = load("csv", path=str(tmp_path / "a.csv"), target="label")
    assert table.features[1].tolist() == [71977, 1.125]
    assert [column.decimal for column in table.encoding.columns] == [".", "."]


def test_units_follow_the_notation_of_the_file(tmp_path):
    path = written(tmp_path / "a.csv", Preis=[f"{k}.250 €" for k in range(1, 21)], Anteil=["0,5 %", "12,25 %"] * 10)
    table = load("csv", path=path, target="label")
    assert table.encoding.columns[0].describe() == "numbers with € and a decimal comma, median 10750"
    assert table.columns == ("Preis", "Anteil=0,5 %", "Anteil=12,25 %")  # few values are categories
    new = read(path, table.encoding)
    assert torch.equal(encode(new, table.encoding), table.features)


def test_numbers_in_an_unclear_notation_are_named_as_such(tmp_path):
    path = written(tmp_path / "a.csv", x=[f"{k},500" for k in range(1, 21)], y=["a", "b", "c"])
    (note,) = load("csv", path=path, target="label").notes
    assert note.startswith("column 'x' is not used: it has numbers in an unclear notation: '1,500' may have a decimal")
    path = written(tmp_path / "a.csv", x=[f"{k},5" if k % 2 else f"{k}.5" for k in range(20)], y=["a", "b", "c"])
    assert "numbers in an unclear notation: '1,5'" in load("csv", path=path, target="label").notes[0]


def test_categorical_columns_keep_their_marks(tmp_path):
    path = written(tmp_path / "a.csv", x=["0,5", "1,5"], size=["1,5", "2,5"], version=["2.125", "3.125"])
    table = load("csv", path=path, target="label", categorical=["size", "version"])
    assert table.columns == ("x", "size=1,5", "size=2,5", "version=2.125", "version=3.125")
    assert load("csv", path=path, target="x", drop="label").classes == ("0.5", "1.5")
    new = read(path, table.encoding)
    assert torch.equal(encode(new, table.encoding), table.features)


@pytest.mark.parametrize("method, package", [("parquet", "pyarrow"), ("feather", "pyarrow"), ("excel", "openpyxl")])
@pytest.mark.parametrize("name", ["table", "table.csv"])
def test_formats_are_recognised_by_content(tmp_path, monkeypatch, expected, method, package, name):
    pytest.importorskip(package)
    made = tmp_path / ("a.xlsx" if method == "excel" else "a")
    getattr(frame(), f"to_{method}")(made, **({"index": False} if method == "excel" else {}))
    path = made.rename(tmp_path / name)
    table = load("csv", path=str(path), target="label")
    assert (table.fingerprint, table.columns) == (expected.fingerprint, expected.columns)

    def missing(*arguments, **options):
        raise ImportError(f"Missing optional dependency '{package}'")

    monkeypatch.setattr(pd, f"read_{method}", missing)
    with pytest.raises(DataError, match=f"which needs {package}: {re.escape(install_hint('files'))}"):
        read(path)


def test_the_index_of_a_parquet_file_is_a_column(tmp_path):
    pytest.importorskip("pyarrow")
    frame().set_index("city").to_parquet(tmp_path / "a.parquet")
    assert sorted(read(tmp_path / "a.parquet")) == sorted(frame())


@pytest.mark.parametrize("format", ["csv", "xlsx"])
def test_duplicate_columns_are_refused(tmp_path, format):
    pytest.importorskip("openpyxl")
    path, twice = tmp_path / f"a.{format}", frame().set_axis(["size", "city", "size", "label"], axis=1)
    (twice.to_csv if format == "csv" else twice.to_excel)(path, index=False)
    with pytest.raises(DataError, match=r"column names must differ, but more than one column is called 'size'"):
        read(path)
    (tmp_path / "b.csv").write_text("a, a.1,,,label\n1,2,3,4,5\n")  # blank names are not duplicates
    assert list(read(tmp_path / "b.csv"))[:2] == ["a", "a.1"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "No columns to parse"),
        (b"\x89PNG\r\n\xff\xfe\x00\x01", "has zero bytes, so it is not text"),
        (b"a,b\n1,2\n1,2,3,4\n", "Expected 2 fields in line 3, saw 4.*dataset.header"),
        (b"PK\x03\x04 some archive", "unpack a ZIP archive first"),
        (b"<!DOCTYPE html><html>", "it looks like HTML or XML"),
        (b'[{"a": 1}]', "it looks like JSON"),
        (b"PAR1 cut", ""),
        (b"ARROW1 cut", ""),
        (gzip.compress(b"a,b\n1,2\n" * 1000, mtime=0)[:40], ""),
        (b"a,b\n" + b"x" * 100_000 + b",1,2,3\n", ""),
    ],
)
def test_a_file_that_is_not_a_table_is_refused_by_name(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.csv cannot be read as a table: .*{message}") as caught:
        read(tmp_path / "a.csv")
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 600, "a huge line is never printed whole"


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "customers.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match=r"there is no file .*custmers\.csv, did you mean .*/customers\.csv\?"):
        read(tmp_path / "custmers.csv")
    with pytest.raises(DataError, match="is not a regular file but a folder"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(DataError, match="is not a regular file but a pipe or device"):
        read(tmp_path / "pipe.csv")


def people(rows: int = 40) -> pd.DataFrame:
    """A number with a word for missing values, an amount in an accountant's notation, and a class."""
    return pd.DataFrame(
        {
            "age": ["unknown" if k == 3 else 20 + k for k in range(rows)],
            "balance": [f"({k}.50)" if k % 2 else f"1,{k:03}.25" for k in range(rows)],
            "state": ["ill" if k % 3 else "well" for k in range(rows)],
        }
    )


@pytest.mark.parametrize("format", ["csv", "xlsx"])
def test_a_file_says_where_its_columns_are_named_and_what_is_missing(tmp_path, format):
    """Below a title, in the second sheet of a workbook; a saved encoding reads new files of this layout."""
    pytest.importorskip("openpyxl")
    path, options = tmp_path / f"a.{format}", {"target": "state", "header": 3, "missing": "unknown"}
    if format == "csv":
        path.write_text("Report of May\n\n" + people().to_csv(index=False))
    else:
        options["sheet"] = "2024"
        with pd.ExcelWriter(path) as book:
            pd.DataFrame({"about": ["first page"]}).to_excel(book, sheet_name="about", index=False)
            people().to_excel(book, sheet_name="2024", index=False, startrow=2)
        with pytest.raises(DataError, match=r"unknown column 'state'.*dataset.sheet=NAME reads another: 2024"):
            load("csv", path=str(path), target="state")
        with pytest.raises(ValueError, match=r"unknown sheet '2042', did you mean '2024'"):
            load("csv", path=str(path), **options | {"sheet": 2042})
    table = load("csv", path=str(path), **options)
    assert table.columns == ("age", "age_missing", "balance")
    assert table.features[3].tolist() == [40, 1, -3.5]
    assert table.features[4].tolist() == [24, 0, 1004.25]
    assert torch.equal(encode(read(path, table.encoding), table.encoding), table.features)
    with pytest.raises(DataError, match=r"'age' has numbers, but also text, such as 'unknown', .*missing=\[unknown\]"):
        load("csv", path=str(path), **options | {"missing": None})
    with pytest.raises(ValueError, match=r"dataset\.header: expected .* got 0"):
        load("csv", path=str(path), **options | {"header": 0})


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_numbers_that_stand_for_missing_values_are_found_in_typed_columns_too(tmp_path, format):
    pytest.importorskip("pyarrow")
    path, rows = tmp_path / "a", frame().assign(größe=[-9, 1.5] * 20)  # in the text -9.0
    rows.to_parquet(path) if format == "parquet" else rows.to_csv(path, index=False)
    table = load("csv", path=str(path), target="label", missing=[-9])
    assert table.columns[:2] == ("größe", "größe_missing")
    assert table.features[:2, 1].tolist() == [1, 0]
    assert torch.equal(encode(read(path, table.encoding), table.encoding), table.features)


@pytest.mark.parametrize(
    "content, message",
    [
        (gzip.compress(b"a,b\n" + b"x" * (1 << 27)), "it has a line of more than 67,108,864 characters"),
        (b",".join(b"x%d" % k for k in range(200_000)) + b"\n", "it has 200,000 columns, more than 100,000"),
    ],
)
def test_files_that_would_fill_the_memory_are_refused_at_once(tmp_path, content, message):
    (tmp_path / "a.csv").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.csv")
    assert tracemalloc.get_traced_memory()[1] < 5e7
    tracemalloc.stop()
