"""The committed tables are what the committed records say."""

import csv
import json
import re
import shutil
from datetime import date
from functools import cache
from pathlib import Path

import pytest
import yaml

from east import cli
from east.experiment import records
from east.reporting import papers, tables
from east.reporting.writers import WRITERS

RESULTS = Path(__file__).parents[1] / "results"
FORMATS = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json"}
FILES = sorted((RESULTS / "tables").iterdir())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The committed records alone: a working copy may hold runs of its own."""
    folder = tmp_path_factory.mktemp("committed")
    shutil.copytree(RESULTS / "records", folder / "records")
    return records.scan(folder)


def builder(kept):
    """stem -> the table that these records make, each built once; east_v2_1_released is a variant of east_v2_1."""

    @cache
    def build(stem):
        name, released = re.fullmatch(r"(\w+?)(_released)?", stem).groups()
        file = RESULTS / "tables" / f"{stem}.md"
        day = re.search(r"rendered (\d{4}-\d\d-\d\d)", file.read_text())[1] if file.exists() else "2026-01-01"
        variant = "released" if released else "clean"
        return tables.build(name, found=kept, variant=variant, today=date.fromisoformat(day))

    return build


@pytest.fixture(scope="module")
def committed(found):
    return builder(found)


def test_there_are_results():
    assert {file.suffix for file in FILES} == set(FORMATS)
    assert {"east_v2_1", "east_v2_1_released", "btg_1", "splits"} <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_table_is_rendered_from_the_records(file, committed):
    table = committed(file.stem)
    assert WRITERS[FORMATS[file.suffix]]([table], [tables.comparisons(table)]) == file.read_text()


@pytest.mark.usefixtures("no_figures")
def test_the_command_writes_the_same_table(tmp_path):
    shutil.copytree(RESULTS / "records", tmp_path / "records")
    assert cli.run(["task=table", "table=east_v2_1", f"results_dir={tmp_path}"]) == 0
    ours, theirs = ((folder / "tables" / "east_v2_1.csv").read_text() for folder in (tmp_path, RESULTS))
    assert ours == theirs


def test_a_split_of_its_own_for_every_trial_is_as_many_splits(committed):
    table = committed("plugin")
    cell = next(c for c in table.cells if (c.block, c.row, c.column) == ("mammography", "F1*", "f1_positive"))
    assert {split for split, _ in cell.splits} == set(range(10))
    over_splits = [e.n for e in tables.comparisons(table) if e.over == "split" and e.block == "mammography"]
    assert set(over_splits) == {10}


def test_every_record_says_where_it_comes_from(found):
    assert found
    for record in found:
        assert record.git
        assert record.versions["torch"]
        assert record.data
        assert record.status != "done" or record.confusion["test" if record.stage == "trial" else "val"]


# the values of the first 1,690 records, whatever the tables call them now


def first_tables(golden):
    """File stem -> the lines of values.csv, as numbers, by (block, row, column) in today's labels."""
    labels = yaml.safe_load((golden / "labels.yaml").read_text())
    found = {}
    with open(golden / "values.csv", newline="") as file:
        for line in csv.DictReader(file):
            place = tuple(labels.get(line[name], line[name]) for name in ("block", "row", "column"))
            numbers = (line[name] for name in ("n", "mean", "std", "published_mean", "published_std"))
            found.setdefault(line["table"], {})[place] = [float(number) if number else None for number in numbers]
    return found


FIRST = Path(__file__).parent / "golden" / "tables"


@pytest.fixture(scope="module")
def first_records(found):
    """The records that values.csv was made of: later runs may fill cells better, but may not hide a change of rules."""
    with open(FIRST / "records.csv", newline="") as file:
        kept = {(line["key"], int(seed)) for line in csv.DictReader(file) for seed in line["seeds"].split()}
    first = [record for record in found if (record.key, record.seed) in kept]
    assert len(first) == len(kept) == 1690
    return first


@pytest.fixture(scope="module")
def first(first_records):
    return builder(first_records)


@pytest.mark.parametrize(
    "stem, expected", first_tables(FIRST).items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_first_records_still_give_their_values(stem, expected, first):
    (written,) = json.loads(WRITERS["json"]([first(stem)], [[]]))
    numbers = ("n", "mean", "std", "published_mean", "published_std")
    actual = {(c["block"], c["row"], c["column"]): [c[number] for number in numbers] for c in written["cells"]}
    known = {place: values for place, values in actual.items() if values[0] or values[3] is not None}
    assert known.keys() == expected.keys()
    for place, values in expected.items():
        assert known[place] == [None if v is None else pytest.approx(v, rel=1e-12) for v in values], place


# what the findings say of our runs, recomputed from the confusion matrices


def by_hand(records_of_key, score):
    """Mean and sample deviation of a score over the trials of a key, from their confusion matrices alone."""
    values = []
    for record in records_of_key:
        rule = record.decisions.get("logit_thresholds" if score.startswith("logit") else "thresholds", {})
        matrices = rule["confusion"]["test"] if "thresholds" in score else [record.confusion["test"]]
        f1 = [2 * m[1][1] / whole if (whole := sum(m[1]) + m[0][1] + m[1][1]) else 0.0 for m in matrices]
        values.append(sum(f1) / len(f1))
    mean = sum(values) / len(values)
    return mean, (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5


SAID = [  # finding, table, block, row, column, and whether the deviation is printed as well
    ("adult_loader", "east_v2_1_released", "adult", "CE", "f1", True),
    ("adult_loader", "east_v2_1_released", "adult", "F1*", "f1", True),
    ("adult_loader", "east_v2_1", "adult", "CE", "f1", False),
    ("adult_loader", "east_v2_1", "adult", "F1*", "f1", False),
    ("adult_loader", "east_v1_2_released", "adult", "CE", "f1", False),
    ("adult_loader_others", "east_v2_1_released", "adult", "MCC*", "f1", True),
    ("adult_loader_others", "east_v2_1", "adult", "MCC*", "f1", False),
    ("adult_loader_others", "east_v1_2_released", "adult", "F1*", "f1", True),
    ("adult_loader_others", "east_v1_2", "adult", "F1*", "f1", False),
    ("adult_loader_others", "east_v2_1_released", "adult", "Acc*", "f1", True),
    ("adult_loader_others", "east_v2_1", "adult", "Acc*", "f1", True),
    ("accuracy_collapse", "warmup", "mammography", "Acc*, warm", "f1_positive", True),
    ("accuracy_collapse", "warmup", "kaggle", "Acc*, warm", "f1_positive", True),
    ("mammography_gap", "east_v2_1", "mammography", "CE", "f1", True),
    ("mammography_gap", "east_v2_1", "mammography", "F1*", "f1", True),
    ("mammography_gap", "east_v2_1", "mammography", "MCC*", "f1", True),
    ("mammography_gap", "splits", "mammography", "CE", "f1_positive", True),
    ("mammography_gap", "splits", "mammography", "F1*", "f1_positive", True),
    ("f1_trained", "f1_average", "kaggle", "F1*, positive class", "f1_positive", False),
    ("f1_trained", "warmup", "kaggle", "F1*, warm", "f1_positive", True),
    ("f1_trained", "f1_average", "adult_released", "F1*, positive class", "f1_positive", True),
]


@pytest.mark.parametrize("finding, stem, block, row, column, spread", SAID)
def test_what_a_finding_says_of_our_runs_is_on_record(finding, stem, block, row, column, spread, first, first_records):
    (cell,) = [c for c in first(stem).cells if (c.block, c.row, c.column) == (block, row, column)]
    check_said(finding, cell, first_records, spread)


def check_said(finding, cell, kept, spread=True):
    mean, deviation = by_hand([r for r in kept if (r.key, r.stage) == (cell.key, "trial")], cell.score)
    (text,) = [" ".join(f.evidence.split()) for f in papers.findings() if f.id == finding]
    assert (f"{mean:.3f} ± {deviation:.3f}" if spread else f"{mean:.3f}") in text


def test_the_corrupted_adult_explains_bridging_the_gaps_column(committed, found):
    """Scores of its rows, and how many of the 15 cells have an interval that contains 0: 14, and 1 by the formulas."""
    counts = []
    for stem in ("btg_1_released", "btg_1"):
        adult = [cell for cell in committed(stem).cells if cell.block == "adult" and cell.interval]
        assert len(adult) == 15
        counts.append(sum(cell.interval.low <= 0 <= cell.interval.high for cell in adult))
    assert counts == [14, 1]
    for cell in committed("btg_1_released").cells:
        if (cell.block, cell.column) == ("adult", "f1") and cell.row in ("F1*", "Acc*", "AUROC*", "BCE"):
            check_said("adult_loader", cell, found)


def test_how_many_cells_of_adult_are_compatible(first):
    """Welch's interval contains 0 in 11 of 15 cells on the corrupted data and in 3 on clean data."""
    counts = []
    for stem in ("east_v2_1_released", "east_v2_1"):
        adult = [c for c in first(stem).cells if c.block == "adult"]
        counts.append(sum(c.interval.low <= 0 <= c.interval.high for c in adult if c.interval))
    assert counts == [11, 3]


def test_one_number_for_one_question(first):
    """F1* against CE over splits is the same comparison in every table that prints it."""
    found = {}
    for name, column in [("splits", "f1_positive"), ("east_v2_1", "f1"), ("plugin", "f1_positive")]:
        for pair in tables.comparisons(first(name)):
            if (pair.column, pair.row, pair.against, pair.over) == (column, "F1*", "CE", "split"):
                found.setdefault(pair.block, {})[name] = (pair.n, pair.difference, pair.low, pair.high, pair.p)
    assert found["mammography"].keys() == found["cocktailparty"].keys() == {"splits", "east_v2_1", "plugin"}
    assert all(len(set(numbers.values())) == 1 for numbers in found.values())
    assert not any(pair.over == "seed" for pair in tables.comparisons(first("splits")))


def test_no_search_record_shows_its_test_score(first_records, first):
    """The scores of early searches may be anything: no table changes."""
    silent = [r if r.stage == "trial" else r.but(scores={}, decisions={}) for r in first_records]
    for name in ("east_v2_1", "grid"):
        ours, theirs = (WRITERS["csv"]([build(name)], [[]]) for build in (first, builder(silent)))
        assert ours == theirs
