"""Your own files: tables of all kinds, and folders of images."""

import json
import tracemalloc
from itertools import repeat

import numpy as np
import pandas as pd
import pytest
import torch

from east.choices import ConfigError
from east.lab.data import DataError, Encoding, encode, load, split
from east.lab.data.columns import OWN, Dropped, as_words
from east.lab.data.common import leave_out
from east.lab.data.csv import from_frame
from east.lab.data.detection import LEVELS, detect
from east.lab.data.files import read
from east.lab.data.findings import tells_class
from east.lab.data.notation import level_numbers, split_unit
from east.lab.training.engine import populations
from east.lab.training.population import Trial
from tests.made import science


def frame(rows: int = 60) -> pd.DataFrame:
    """Numbers with gaps, words with gaps, postcodes, and a label; a third of the rows is "ill"."""
    return pd.DataFrame(
        {
            "age": [None if k == 0 else 20.0 + k for k in range(rows)],
            "job": [None if k == 1 else ("nurse", "clerk")[k % 2] for k in range(rows)],
            "postcode": [(1010, 2020, 3030)[k % 3] for k in range(rows)],
            "smokes": [k % 4 == 0 for k in range(rows)],
            "state": ["ill" if k % 3 == 0 else "well" for k in range(rows)],
        }
    )


def table_of(**columns):
    """A table of these columns and the label."""
    return from_frame("csv", frame().assign(**columns)[[*columns, "state"]], "state")


def saved(table) -> Encoding:
    """The encoding of a table, as a saved model has it."""
    return Encoding.from_json(json.loads(json.dumps(table.encoding.to_json())))


def write(path, table: pd.DataFrame, **options) -> str:
    table.to_csv(path, index=False, **options)
    return str(path)


def test_columns_become_features(tmp_path):
    table = load("csv", path=write(tmp_path / "a.csv", frame()), target="state", categorical=["postcode"])
    words = "age age_missing job=clerk job=nurse job=(missing) postcode=1010 postcode=2020 postcode=3030 smokes"
    assert table.columns == (*words.split(),)
    median = np.median(np.arange(21.0, 80.0))
    assert table.features[0].tolist() == [median, 1, 0, 1, 0, 1, 0, 0, 1]  # no age, nurse, 1010, smokes
    assert table.features[1].tolist() == [21, 0, 0, 0, 1, 0, 1, 0, 0]  # 21, no job, 2020
    assert table.features[3].tolist() == [23, 0, 1, 0, 0, 1, 0, 0, 0]  # 23, clerk, 1010
    assert table.classes == ("well", "ill")  # the rarer word is positive
    assert table.positive == 1
    assert table.labels.tolist() == [int(k % 3 == 0) for k in range(60)]


def coded(path, name: str, codes: list[str]) -> str:
    """A file with these codes in the column `name`, a number and a class."""
    rows = [f"{codes[k % len(codes)]},{k % 7},{'ab'[k // 3 % 2]}" for k in range(60)]
    path.write_text("\n".join([f"{name},x,y", *rows]) + "\n")
    return str(path)


@pytest.mark.parametrize(
    "codes",
    [
        ["1.1", "1.10", "1.2"],
        ["007", "08", "7"],
        ["007", "08"],
        ["900719925474099301", "900719925474099302", ""],
        ["+5", "12345678901234567890123", "5"],
    ],
)
def test_categories_are_the_words_of_the_file(tmp_path, codes):
    """As numbers, 1.10 would be 1.1, and 18 digits beside an empty cell would be rounded."""
    table = load("csv", path=coded(tmp_path / "a.csv", "code", codes), target="y", categorical=["code"])
    assert table.columns[:-1] == tuple(f"code={code or '(missing)'}" for code in codes)
    encoding = Encoding.from_json(table.encoding.to_json())
    rows = read(tmp_path / "a.csv", encoding)
    np.testing.assert_array_equal(encode(rows, encoding), table.features)
    (tmp_path / "new.csv").write_text("code,x\n7,1\n")
    row = encode(read(tmp_path / "new.csv", encoding), encoding)[0]
    assert row[:-1].tolist() == [float(code == "7") for code in codes], "007 is another name"


@pytest.mark.parametrize("written", [["1", "2", "10"], ["1.0", "2.0", "10.0"], ["1", "2", "10", ""]])
def test_whole_numbers_keep_their_names_as_categories(tmp_path, written):
    """Also if pandas has written them beside missing values: models from either file read the other."""
    table = load("csv", path=coded(tmp_path / "a.csv", "code", written), target="y", categorical=["code"])
    assert table.columns[:3] == ("code=1", "code=10", "code=2")
    assert not table.encoding.columns[0].text
    assert (table.fingerprint == "f94b14761f73bc3c") == ("" in written), "of trials recorded with earlier versions"


def test_classes_and_groups_that_are_the_same_number_stay_apart(tmp_path):
    path = coded(tmp_path / "a.csv", "version", ["1.1", "1.10", "1.2"])
    table = load("csv", path=path, target="version")
    assert table.classes == ("1.1", "1.10", "1.2")
    assert np.bincount(table.labels).tolist() == [20, 20, 20]
    assert [*table.encoding.class_names(pd.Series(["1.10", "2.0"]))] == ["1.10", "2.0"], "for task=evaluate, too"
    assert len(load("csv", path=path, target="y", group="version").groups.unique()) == 3
    assert load("csv", path=coded(tmp_path / "b.csv", "level", ["1", "1.0", "2"]), target="level").classes == ("1", "2")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_common_delimiters_are_detected(tmp_path, delimiter):
    table = load("csv", path=write(tmp_path / "a.csv", frame(), sep=delimiter), target="state")
    assert table.fingerprint == load("csv", path=write(tmp_path / "b.csv", frame()), target="state").fingerprint


@pytest.mark.parametrize(
    "header, typed, columns",
    [
        ("a,b\tlabel", "tab", ("a,b",)),
        ("a,b\tlabel", r"\t", ("a,b",)),
        ("a:b:label", ":", ("a", "b")),
        ("a§b§label", "§", ("a", "b")),
        ("a   b label", r"\s+", ("a", "b")),
        ('"x; y; z; w","b","label"', None, ("x; y; z; w", "b")),  # a delimiter inside quotes does not count
    ],
)
def test_a_delimiter_can_be_typed(tmp_path, header, typed, columns):
    rows = "1\t0\n2\t1\n" if len(columns) == 1 else "1,2,0\n3,4,1\n"
    between = {":": ":", "§": "§", r"\s+": " "}.get(typed, ",")
    (tmp_path / "a.csv").write_text(f"{header}\n" + rows.replace(",", between) * 30)
    assert load("csv", path=str(tmp_path / "a.csv"), target="label", delimiter=typed).columns == columns


@pytest.mark.parametrize("typed", ["::", "", "comma"])
def test_a_delimiter_is_one_character(tmp_path, typed):
    with pytest.raises(ConfigError, match=f"expected one character, tab or .* got '{typed}'"):
        load("csv", path=write(tmp_path / "a.csv", frame()), target="state", delimiter=typed)


def test_rows_longer_than_the_header_do_not_shift(tmp_path):
    path = tmp_path / "a.csv"
    expected = load("csv", path=write(path, frame()), target="state")
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *(f"{row}," for row in rows)]))
    assert load("csv", path=str(path), target="state").fingerprint == expected.fingerprint
    for part in (rows, rows[1:]):
        path.write_text("\n".join([header, *(f"{k},{row}" for k, row in enumerate(part))]))
        with pytest.raises(DataError, match=r"a\.csv cannot be read as a table: .*dataset\.delimiter"):
            load("csv", path=str(path), target="state")


@pytest.mark.parametrize("content", ["age:job:state\n" + "1:2:3\n" * 9, "Survey,,\nage,job,state\n1,2,3\n"])
def test_a_file_that_is_laid_out_otherwise_gets_advice(tmp_path, content):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(DataError, match=r"unknown column 'state'.*dataset\.delimiter, or dataset\.header"):
        load("csv", path=str(tmp_path / "a.csv"), target="state")


def test_options_choose_columns_and_the_positive_class(tmp_path):
    path = write(tmp_path / "a.csv", frame())
    table = load("csv", path=path, target="state", drop=["job", "age"], positive="well")
    assert (table.columns, table.classes) == (("postcode", "smokes"), ("ill", "well"))
    assert table.labels.float().mean() == pytest.approx(2 / 3)
    table = load("csv", path=path, target="state", drop="job", categorical="postcode")
    words = "age age_missing postcode=1010 postcode=2020 postcode=3030 smokes"
    assert (table.columns, table.classes) == ((*words.split(),), ("well", "ill"))


def test_column_names_may_be_numbers(tmp_path):
    numbered = frame().set_axis(range(5), axis=1)
    path = write(tmp_path / "a.csv", numbered)
    for drop in (0, [0], ["0"]):
        table = load("csv", path=path, target=4, drop=drop, categorical=[2])
        assert table.columns == ("1=clerk", "1=nurse", "1=(missing)", "2=1010", "2=2020", "2=3030", "3")
        assert table.encoding.target == "4"
    np.testing.assert_array_equal(encode(numbered, table.encoding), table.features)


@pytest.mark.parametrize("dtype", ["int64", str, object, "category", "string", "float64"])
def test_numbers_are_labels_also_if_stored_as_text(tmp_path, dtype):
    """The larger one is positive, though it is frequent; ten classes are in the order of their numbers."""
    two = pd.Series([int(k % 3 > 0) for k in range(60)]).astype(dtype)
    table = from_frame("csv", frame().assign(state=two), "state")
    assert ([float(name) for name in table.classes], int(table.labels.sum())) == ([0, 1], 40)
    path = write(tmp_path / "a.csv", frame().assign(state=pd.Series([k % 12 for k in range(60)]).astype(dtype)))
    table = load("csv", path=path, target="state", positive=10)
    assert (table.classes, table.positive) == (tuple(map(str, range(12))), 10)
    assert table.labels.tolist() == [k % 12 for k in range(60)]


@pytest.mark.parametrize(
    "labels, classes",
    [
        (["1", "01", "2"], ("01", "1", "2")),  # 1 and 01 are different names
        (["10", "9", "9a"], ("10", "9", "9a")),
        (["10", "9", "inf"], ("10", "9", "inf")),
        (["003", "010", "1"], ("1", "003", "010")),
        (pd.Categorical(["low", "high", "middle"], ["low", "middle", "high"], ordered=True), ("low", "middle", "high")),
        (pd.Categorical([0.5, 10.0, 2.0], [10.0, 2.0, 0.5], ordered=True), ("10.0", "2.0", "0.5")),
        (pd.Categorical(["low", "high", "middle"], ["low", "middle", "high"]), ("high", "low", "middle")),
    ],
)
def test_classes_are_ordered_by_number_or_category_or_word(labels, classes):
    repeated = pd.Series(labels).take(list(range(3)) * 20).reset_index(drop=True)
    table = from_frame("csv", frame().assign(state=repeated), "state")
    assert table.classes == classes
    assert [table.classes[k] for k in table.labels] == [str(label) for label in repeated]


def test_new_rows_are_encoded_as_in_training():
    table = from_frame("csv", frame(), "state", categorical=["postcode"])
    assert saved(table) == table.encoding
    np.testing.assert_array_equal(encode(frame(), saved(table)), table.features)
    new = {"postcode": [3030, 9999], "smokes": [True, False], "job": ["nurse", "pilot"], "age": [30, None]}
    expected = [[30, 0, 0, 1, 0, 0, 0, 1, 1], [50, 1, 0, 0, 0, 0, 0, 0, 0]]  # what training never saw is all 0
    assert encode(pd.DataFrame(new).assign(extra="ignored"), saved(table)).tolist() == expected


def test_few_distinct_numbers_with_a_stray_text_are_categories():
    table = table_of(job=["0", "1", "2", "3+"] * 15)
    assert table.columns == ("job=0", "job=1", "job=2", "job=3+")
    for job, expected in ((2, [0, 0, 1, 0]), (0, [1, 0, 0, 0]), (4, [0, 0, 0, 0]), (None, [0, 0, 0, 0])):
        assert encode(pd.DataFrame({"job": [job, 2]}), table.encoding).tolist() == [expected, [0, 0, 1, 0]]
    with pytest.raises(DataError, match=r"job \(expected text, got int64\)"):  # they have lost their leading zeros
        encode(pd.DataFrame({"job": [1, 2, 3]}), table_of(job=["01", "02", "2A"] * 20).encoding)


@pytest.mark.parametrize(
    "labels, written, names",
    [
        (["01", "02", "A1"], ["01", "1"], ["01", "1"]),
        (["01", "02", "03"], ["01", "1"], ["01", "1"]),
        ([1, 2, 3], ["1.0", "02"], ["1", "2"]),
        ([1.5, 2.0, 3.0], ["1.50", "2.0"], ["1.5", "2"]),
        ([1.5, 2.0, 3.0], ["1,5", "2,0"], ["1.5", "2"]),
        ([True, False, True], ["TRUE", "false"], ["True", "False"]),
    ],
)
def test_labels_that_were_words_are_words_in_new_files(labels, written, names):
    encoding = from_frame("csv", frame().assign(state=labels * 20), "state").encoding
    assert [*encoding.class_names(pd.Series(written))] == names


@pytest.mark.parametrize("categorical, expected", [(None, [[1], [0], [0]]), ("smokes", [[0, 1], [1, 0], [0, 0]])])
def test_a_blank_among_true_and_false_is_a_missing_value(tmp_path, categorical, expected):
    table = from_frame("csv", frame(), "state", ["age", "job", "postcode"], categorical)
    (tmp_path / "new.csv").write_text("smokes,note\nTrue,1\nFalse,2\n,3\n")
    assert encode(read(tmp_path / "new.csv"), table.encoding).tolist() == expected


def test_new_rows_that_do_not_fit_are_refused_by_name():
    encoding = from_frame("csv", frame(), "state").encoding
    with pytest.raises(DataError, match=r"columns are missing: age, job\. Found: postcode, smokes, state"):
        encode(frame().drop(columns=["age", "job"]), encoding)
    with pytest.raises(
        DataError, match=r"do not fit.*age \(expected numbers, got .*\), job \(expected text, got int64\)"
    ):
        encode(frame().assign(age="old", job=3), encoding)
    with pytest.raises(DataError, match=r"age \(has -1e\+300 in row 1; 32-bit numbers"):
        encode(frame().assign(age=-1e300), encoding)
    with pytest.raises(DataError, match=r"column names must differ.*called 'age'"):
        encode(frame().rename(columns={"job": "age"}), encoding)


def dated(rows: int = 60) -> pd.DataFrame:
    """A visit every other day from 2024-01-30, the first without a date; three visits per patient."""
    days = pd.date_range("2024-01-30", periods=rows, freq="2D")
    return frame(rows).assign(seen=[None, *days.strftime("%d.%m.%Y")[1:]], patient=[f"p{k // 3}" for k in range(rows)])


FORMATS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%d-%b-%Y"]
MONTHS = ["%Y-%m", "%m/%Y", "%b-%Y", "%b %Y", "%B %Y"]


@pytest.mark.parametrize("format, freq", [*zip(FORMATS, repeat("3D")), *zip(MONTHS, repeat("MS"))])
def test_dates_become_numbers(format, freq):
    """pandas' calendar is the oracle; days of the month above 12 distinguish 13/02 from 02/13."""
    days = pd.Series(pd.date_range("2023-12-25", periods=60, freq=freq))
    table = table_of(seen=days.dt.strftime(format))
    assert table.columns == ("seen_year", "seen_month", "seen_weekday", "seen_days")
    expected = [days.dt.year, days.dt.month, days.dt.day_of_week, (days - days[0]).dt.days]
    np.testing.assert_array_equal(table.features, np.stack(expected, axis=1))
    assert torch.equal(table_of(seen=days).features, table.features)


def test_times_of_a_web_server_are_read():
    times = pd.Series(pd.date_range("2024-03-30 23:00", periods=60, freq="17min", tz="Europe/Berlin"))
    written = times.dt.strftime("%d/%b/%Y:%H:%M:%S %z")  # summer time begins in between: +0100, then +0200
    np.testing.assert_allclose(table_of(seen=written).features[:, 3], np.arange(60) * 17 / 1440, rtol=1e-6)


def test_missing_dates_become_the_median_and_are_marked():
    table = table_of(seen=dated()["seen"])
    assert table.columns[-1] == "seen_missing"
    days = table.features[:, 3]
    assert (table.features[0, 4], float(days[0])) == (1, float(np.median(days[1:])))
    new = encode(pd.DataFrame({"seen": ["31.12.2025", None]}), saved(table))
    assert new[0].tolist() == [2025, 12, 2, (pd.Timestamp("2025-12-31") - pd.Timestamp("2024-02-01")).days, 0]
    with pytest.raises(DataError, match=r"seen \(expected dates such as 30.03.2024, got '2025-12-31'\)"):
        encode(pd.DataFrame({"seen": ["2025-12-31"]}), saved(table))


def test_numbers_stored_as_text_are_numbers_but_codes_with_leading_zeros_are_words():
    numbers = table_of(job=[f"{k}.5" for k in range(60)])
    assert numbers.columns == ("job",)
    assert encode(pd.DataFrame({"job": ["7.5"]}), numbers.encoding).tolist() == [[7.5]]
    assert table_of(job=[f"{k % 20:03}" for k in range(60)]).columns[:2] == ("job=000", "job=001")


@pytest.mark.parametrize(
    "texts, unit, expected",
    [
        (["25,981.63", "1,500", "-7"], None, [25981.63, 1500, -7]),
        (["1,234,567", "1,500", "2"], None, [1234567, 1500, 2]),
        (["1.234,56", "1.500", "0,5"], None, [1234.56, 1500, 0.5]),
        (["25,981.63", "12,34.5"], None, [25981.63, np.nan]),
        (["$1,500.25", "-$0.50", "$ 12"], "$", [1500.25, -0.5, 12]),
        (["12.5%", "-3 %", "0%"], "%", [12.5, -3, 0]),
        (["1.234,50 €", "0,5 €", "€ -7"], "€", [1234.5, 0.5, -7]),
        (["\N{MINUS SIGN}1.5", "2.25", "(3)"], None, [-1.5, 2.25, -3]),
    ],
)
def test_numbers_are_read_with_their_separators_units_and_signs(texts, unit, expected):
    found, bare = split_unit(texts)
    assert found == unit
    np.testing.assert_array_equal(level_numbers(bare), expected)


def test_new_rows_need_the_unit_of_training():
    rates = pd.Series([f"{k}.5%" for k in range(60)])
    table, dollars = table_of(rate=rates), table_of(rate=rates.str.replace("%", "$"))
    assert table.features.flatten().tolist() == [k + 0.5 for k in range(60)]
    assert torch.equal(dollars.features, table.features)
    assert dollars.fingerprint != table.fingerprint, "the saved model differs"
    assert encode(pd.DataFrame({"rate": ["7%", None]}), saved(table)).flatten().tolist() == [7, 30]
    for cells in (["7"], [0.07], ["$7"], ["7%", "0.07"]):  # 7% may be 7 or 0.07 there
        with pytest.raises(DataError, match=r"rate \(expected numbers with %, got '(7|0.07|\$7)'\)"):
            encode(pd.DataFrame({"rate": cells}), saved(table))
    with pytest.raises(DataError, match=r"'rate' has numbers with %, but also text, such as '0.07'"):
        table_of(rate=["0.07", *rates[1:]])


def test_frequent_words_have_a_feature_each_and_the_rest_share_one():
    """Word k occurs k + 1 times; of the 80 words the last 50 are the most frequent."""
    words = [f"w{k:02}" for k in range(80) for _ in range(k + 1)]
    table = from_frame("csv", pd.DataFrame({"word": words, "y": np.arange(len(words)) % 2}), "y")
    assert table.columns == (*(f"word=w{k:02}" for k in range(80 - OWN, 80)), "word=(other)")
    assert table.features.sum(0).tolist() == [*range(81 - OWN, 81), sum(range(81 - OWN))]
    new = encode(pd.DataFrame({"word": ["w79", "w00", "never seen", None]}), table.encoding)
    assert new[:, [-2, -1]].tolist() == [[1, 0], [0, 1], [0, 1], [0, 0]]
    assert new.sum(1).tolist() == [1, 1, 1, 0]


def test_one_long_text_does_not_make_every_row_long():
    cells = ["short", None, "x" * 100_000, "été", "Ärger", "short", "short 2", "𝒳", "\ufb01"]
    texts = pd.Series(cells * 50, dtype=object)
    tracemalloc.start()
    column = as_words(texts)
    assert tracemalloc.get_traced_memory()[1] < 10e6, "the text itself has 5 MB"
    tracemalloc.stop()
    assert [*column.cat.categories] == sorted(set(texts.dropna()))
    assert column.astype(object).where(column.notna(), None).tolist() == texts.where(texts.notna(), None).tolist()


def test_ids_free_text_and_empty_columns_are_dropped_with_a_note():
    rows = 3000
    columns = {
        "age": None,
        "customerId": np.random.RandomState(0).permutation(rows) + 1000,
        "note": [f"saw {k} again" for k in range(rows)],
        "city": [f"city {k % (LEVELS + 1)}" for k in range(rows)],
        "job": [f"job {k % LEVELS}" for k in range(rows)],
    }
    table = from_frame("csv", frame(rows).assign(**columns), "state")
    assert {column.name for column in table.encoding.used} == {"job", "postcode", "smokes"}
    reasons = ("it is empty", "it is an id", "it is free text or an id: 3,000", "it is free text or an id: 1,001")
    for note, name, reason in zip(table.notes, columns, reasons, strict=False):
        assert note.startswith(f"column '{name}' is not used: {reason}")
    ids = np.random.RandomState(0).permutation(60) + 1000
    for values in (ids, ids.astype(str), pd.array(ids.astype(str), "string")):
        some = frame().assign(customerId=values)
        assert from_frame("csv", some, "state").notes == (table.notes[1],)
        assert "customerId" in from_frame("csv", some, "state", keep="customerId").columns
    with pytest.raises(DataError, match=r"no feature column is left .* column 'age' is not used: it is empty"):
        table_of(age=None)


def test_a_category_column_holds_names_even_if_they_look_like_numbers():
    codes = [(1010, 2020, 3030)[k % 3] for k in range(60)]
    for categories in (codes, [str(code) for code in codes], [f"2024-01-{k % 20 + 1:02}" for k in range(60)]):
        rows = frame().assign(postcode=pd.Categorical(categories))
        table = from_frame("csv", rows, "state", ["age", "job", "smokes"])
        assert table.columns == tuple(f"postcode={code}" for code in sorted(set(map(str, categories))))
        plain = rows.assign(postcode=categories)  # a CSV file has no categories
        np.testing.assert_array_equal(encode(plain, table.encoding), table.features)
    everyone = frame().assign(name=pd.Categorical([f"person {k}" for k in range(60)]))
    assert "is free text or an id" in from_frame("csv", everyone, "state").notes[0]


def test_columns_that_tell_the_class_are_found():
    labels, numbers = np.repeat([0, 1, 2], 20), np.arange(60.0)
    returning = np.array(["a", "b", "c", "d"])[np.arange(60) // 10 % 4]  # a and b return in the last class
    for values, expected in (
        (numbers, True),
        (np.where(numbers < 20, np.nan, numbers), True),  # missing in one class only
        (numbers % 20, False),
        (np.where(numbers % 20 < 10, np.nan, labels), False),  # missing in every class
        (np.array(["x", "y", "z"])[labels], True),
        (returning, False),
        (np.array([f"{label} {k % 5}" for k, label in enumerate(labels)]), False),  # 15 words in 60 rows
        (pd.date_range("2024-01-01", periods=60), True),
    ):
        assert tells_class(detect("c", pd.Series(values), keep=True)[1], labels) is expected
    assert not tells_class(detect("c", pd.Series(numbers))[1], np.repeat([0, 1], [57, 3])), "three rows may be luck"


def test_a_huge_cell_is_never_printed_whole():
    book = "x" * 100_000
    note = from_frame("csv", frame().assign(job=[f"{book}{k}" for k in range(60)]), "state").notes[0]
    assert len(note) < 250
    for change in ({"job": [*range(59), book]}, {"state": book}):
        with pytest.raises(DataError) as caught:
            from_frame("csv", frame().assign(**change), "state")
        assert len(str(caught.value)) < 1000
    dates = from_frame("csv", dated(), "state").encoding
    with pytest.raises(DataError, match="100,000 characters") as caught:
        encode(dated().assign(seen=book), dates)
    assert len(str(caught.value)) < 300


def test_everything_is_learnt_from_the_training_rows_alone():
    """A row outside the training part changes neither the encoding nor the scaling, whatever it holds."""
    data = dated(300)
    table = from_frame("csv", data, "state")
    splits = split(table)
    rare, outside = data.copy(), np.concatenate([splits.val.index, splits.test.index])
    for name, value in {"age": 1e6, "job": "only here", "seen": "01.01.1900"}.items():
        rare.loc[outside, name] = value
    other = split(from_frame("csv", rare, "state"))
    assert other.encoding == splits.encoding != from_frame("csv", rare, "state").encoding
    assert torch.equal(other.train.inputs, splits.train.inputs)
    assert torch.equal(other.mean, splits.mean)
    train = data.iloc[splits.train.index.numpy()]
    by_name = {column.name: column for column in splits.encoding.used}
    assert by_name["age"].median == np.nanmedian(train["age"])
    assert set(by_name["job"].categories) - {"(missing)"} == set(train["job"].dropna())
    expected = (encode(data, splits.encoding)[splits.test.index] - splits.mean) / splits.std
    torch.testing.assert_close(splits.test.inputs, expected.float())


def test_seconds_since_1970_keep_their_differences():
    """float32 is exact to 128 seconds there, so scaling comes before rounding; a constant stays 0."""
    seconds = 1.7e9 + np.random.RandomState(0).permutation(600)
    rows = pd.DataFrame({"seen": seconds, "share": 0.1, "label": np.where(seconds % 2, "odd", "even")})
    table = from_frame("csv", rows, "label")
    splits = split(table)
    train = seconds[splits.train.index]
    expected = np.stack([(train - train.mean()) / train.std(), np.zeros(len(train))], axis=1).astype(np.float32)
    np.testing.assert_allclose(splits.train.inputs, expected, rtol=1e-6, atol=1e-12)
    assert splits.train.inputs.dtype == torch.float32
    assert len(np.unique(splits.train.inputs[:, 0])) == len(train)
    assert from_frame("csv", rows.assign(seen=seconds + 1), "label").fingerprint != table.fingerprint


def test_splits_with_different_numbers_of_features_train_separately():
    """Each seed's training rows have their own frequent words; only networks of the same shape can be stacked."""
    words = [f"w{k % 17}" for k in range(40)]
    table = from_frame("csv", frame(40).assign(job=words, age=1.0), "state")
    splits = [split(table, seed=seed) for seed in range(6)]
    widths = [one.train.inputs.shape[1] for one in splits]
    assert len(set(widths)) > 1
    members = [(Trial(science(hyper={"batch_size": 8}), seed), one) for seed, one in enumerate(splits)]
    for population in populations(members, torch.device("cpu")):
        assert len({one.train.inputs.shape for _, one in population}) == 1


def test_rows_of_a_group_stay_together():
    table = from_frame("csv", dated(300), "state", group="patient")
    assert not any("patient" in name for name in table.columns)
    assert table.encoding.columns[0] == Dropped(name="patient", reason="is the group")
    patients = dated(300)["patient"].to_numpy()
    splits = split(table, seed=4)
    parts = [set(patients[part.index]) for part in (splits.train, splits.val, splits.test)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 100
    assert not table.stratifiable
    asked = from_frame("csv", dated(300), "state", group="patient", keep="patient")
    assert any("patient" in name for name in asked.columns)
    one = from_frame("csv", dated(300).assign(patient=["a", "b"] * 150), "state", group="patient")
    with pytest.raises(DataError, match="too few rows to split: 2 groups of rows"):
        split(one)


def test_time_splits_oldest_to_newest():
    days = np.random.RandomState(0).permutation(300) // 4  # four rows per day
    dates = (pd.Timestamp("2020-02-01") + pd.to_timedelta(days, "D")).strftime("%Y-%m-%d")
    table = from_frame("csv", frame(300).assign(when=dates), "state", time="when")
    splits = split(table)
    train, val, test = (days[part.index] for part in (splits.train, splits.val, splits.test))
    assert train.max() < val.min() <= val.max() < test.min()
    assert splits.sizes == {"train": 192, "val": 48, "test": 60}
    assert split(table, seed=7).index_hash == splits.index_hash
    assert not any("when" in name for name in table.columns)
    with pytest.raises(ValueError, match="split by time; that cannot be stratified"):
        split(table, stratify=True)
    with pytest.raises(DataError, match="at least 3 different times, got 2"):
        split(from_frame("csv", frame().assign(when=[1, 2] * 30), "state", time="when"))
    with pytest.raises(ValueError, match="cannot be combined"):
        from_frame("csv", dated(), "state", time="seen", group="patient")


def test_names_groups_and_times_are_part_of_the_fingerprint(tmp_path):
    """Saved models contain the names."""
    swapped = frame().replace({"state": {"ill": "well", "well": "ill"}})
    tables = frame(), swapped, frame().rename(columns={"age": "years"}), frame().replace({"job": {"nurse": "midwife"}})
    paths = [write(tmp_path / f"{k}.csv", table) for k, table in enumerate(tables)]
    prints = [load("csv", path=path, target="state").fingerprint for path in paths]
    grouped = [dated().assign(patient=patient) for patient in ("a", ["a", "b"] * 30)]
    prints += [from_frame("csv", rows, "state", group="patient").fingerprint for rows in grouped]
    prints += [from_frame("csv", dated().assign(t=t), "state", time="t").fingerprint for t in (range(60), range(1, 61))]
    assert len(set(prints)) == 8


def test_a_fold_that_holds_all_validation_rows_is_refused():
    """Early stopping would see no rows: every epoch has a loss of 0, and the first is kept."""
    rows = frame().assign(patient=np.arange(60) % 7)
    splits = split(from_frame("csv", rows, "state", group="patient"))
    with pytest.raises(DataError, match=r"split\.folds=3 needs at least two groups of rows"):
        leave_out(splits, 3, 0)
    assert leave_out(splits, 3, 1).val.weights.all()


def test_a_limited_table_keeps_its_columns_and_groups():
    table = from_frame("csv", dated(300), "state", group="patient").limited(100)
    splits = split(table)
    assert (len(table.raw), len(table.groups), sum(splits.sizes.values())) == (100, 100, 100)
    assert splits.train.inputs.shape[1] == len(splits.encoding.feature_names)


def test_an_encoding_saved_before_dates_and_rare_words_is_read():
    age = {"name": "age", "kind": "numeric", "median": 38, "indicator": True}
    job = {"name": "job", "kind": "categorical", "text": True, "categories": ["clerk", "nurse", "(missing)"]}
    old = {"columns": [age, job], "target": "income", "classes": ["low", "high"], "positive": 1}
    new = encode(pd.DataFrame({"age": [30, None, 40], "job": ["nurse", None, "pilot"]}), Encoding.from_json(old))
    assert new.tolist() == [[30, 0, 0, 1, 0], [38, 1, 0, 0, 1], [40, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    "column, message",
    [
        ({"name": "a", "kind": "numeric", "median": float("nan"), "indicator": True}, "median: .* less than or equal"),
        ({"name": "a", "kind": "numeric", "median": 10**400, "indicator": True}, "median: "),
        ({"name": "a", "kind": "numeric", "median": 1.0, "indicator": "yes"}, "indicator: .* valid bool"),
        ({"name": "a", "kind": "numeric", "median": 1, "indicator": True, "unit": "kg"}, "unit: "),
        ({"name": "a", "kind": "categorical", "text": True, "categories": ["x", 3]}, "categories.1: .* valid string"),
        ({"name": "a", "kind": "date", "format": "%Q"}, "unknown date format"),
        ({"name": "a", "kind": "date", "format": "ISO8601", "origin": "soon"}, "origin: .* expected a date"),
        ({"name": "a", "kind": "os.system"}, "'os.system' found using 'kind' does not match any of"),
        ("x" * 10_000, "valid dictionary"),
    ],
)
def test_an_encoding_from_a_file_is_checked(column, message):
    with pytest.raises(DataError, match=message) as caught:
        Encoding.from_json({"columns": [column]})
    assert len(str(caught.value)) < 300


DAYS = [f"2024-01-{1 + k % 28:02}" for k in range(59)]
UNUSABLE = [
    ({}, {"target": "stat"}, r"unknown column 'stat', did you mean 'state'\?"),
    ({}, {"drop": ["jobs"]}, r"unknown column 'jobs', did you mean 'job'\?"),
    ({}, {"group": "stat"}, r"unknown column 'stat', did you mean 'state'\?"),
    ({}, {"positive": "sick"}, r"unknown class of 'state' 'sick'.*Choices: ill, well"),
    ({}, {"group": "age"}, r"dataset.group=age is missing in 1 of 60 rows \(rows 1\)"),
    ({"state": "ill"}, {}, r"'state' needs at least two classes, found only 'ill'"),
    ({"state": [None, "ill", "well"] * 20}, {}, r"'state' is missing in 20 of 60 rows \(rows 1, 4, 7, 10, 13, …\)"),
    ({"state": ["None", "ill", "well"] * 20}, {}, r"is missing in.*None and null count as missing; rename a class"),
    ({"state": np.arange(60) / 7}, {}, r"'state' has 60 different values in 60 rows"),
    ({"job": [*range(58), "twelve", "dozen"]}, {}, r"'job' has numbers, but also text, such as 'dozen', in 2 of 60"),
    ({"job": [*DAYS, "soon"]}, {}, r"column 'job' has dates, but also text, such as 'soon'"),
    ({"age": [1.0, 2.0, -np.inf] * 20}, {}, r"column 'age' has -inf in row 3"),
    ({"age": [*range(58), 1e300, 2e300]}, {}, r"'age' has 1e\+300 in row 59; 32-bit numbers are at most 3.4e\+38"),
    ({"job": ["a", "b"] * 30}, {"time": "job"}, r"dataset.time=job expects dates or numbers, got text such as 'a'"),
]


@pytest.mark.parametrize("change, options, message", UNUSABLE)
def test_unusable_columns_say_why(tmp_path, change, options, message):
    path = write(tmp_path / "a.csv", frame().assign(**change))
    with pytest.raises(DataError, match=message) as caught:
        load("csv", **{"path": path, "target": "state", **options})
    assert str(caught.value).startswith(path)
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("word, name", [("(missing)", "c=(missing)"), ("(other)", "c=(other)")])
def test_words_that_look_like_our_own_share_their_feature(word, name):
    """An empty cell is "(missing)"; of more than 51 words, the rare ones are "(other)"."""
    words = [word, "u", None] if word == "(missing)" else [word, *(f"w{k:02}" for k in range(60))]
    table = from_frame("csv", pd.DataFrame({"c": words * 30, "y": ["p", "q", "q"] * (10 * len(words))}), "y")
    assert len(set(table.columns)) == len(table.columns)
    assert table.features.sum(1).eq(1).all()
    with_word = torch.tensor([value == word or value is None for value in words * 30])
    assert table.features[with_word, table.columns.index(name)].eq(1).all()
    assert Encoding.from_json(table.encoding.to_json()) == table.encoding


def test_features_of_different_columns_have_different_names():
    rows = pd.DataFrame({"a": [None, 1.5, 2.5] * 20, "a_missing": range(60), "y": ["p", "q"] * 30})
    table = from_frame("csv", rows.assign(a_missing_2=0.5 * rows.a_missing), "y")
    assert table.columns == ("a", "a_missing", "a_missing_2", "a_missing_2_2")
    assert table.features[1].tolist() == [1.5, 0, 1, 0.5]
