"""The committed tables follow from the committed records."""

import csv
import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import yaml

from east.lab import cli
from east.lab.reporting import papers, tables
from east.lab.reporting.writers import WRITERS
from tests.committed import FILES, RESULTS, built, scanned, table


def test_every_table_of_the_papers_is_committed_and_no_table_in_another_format():
    assert {file.suffix for file in FILES} == {".md"}
    assert {*tables.papers_tables(), "east_v2_1_released", "splits"} <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_table_is_rendered_from_the_records(file):
    shown = table(file.stem)
    assert WRITERS["markdown"]([shown]) == file.read_text()


def test_the_command_writes_the_committed_table(tmp_path):
    shutil.copytree(RESULTS / "records", tmp_path / "records")
    assert cli.run(["task=table", "table=btg_3", f"results_dir={tmp_path}"]) == 0
    ours, theirs = ((folder / "tables" / "btg_3.md").read_text() for folder in (tmp_path, RESULTS))
    assert ours.partition("rendered")[2][11:] == theirs.partition("rendered")[2][11:]
    assert (tmp_path / "figures" / "btg_3.svg").is_file()
    assert cli.run(["task=table", "table=btg_3", f"results_dir={tmp_path}", "format=pdf"]) == 0
    assert (tmp_path / "figures" / "btg_3.pdf").read_bytes().startswith(b"%PDF")


def test_trials_with_their_own_splits_count_as_that_many_splits():
    cell = next(c for c in table("splits").cells if (c.block, c.row, c.column) == ("mammography", "F1*", "f1_positive"))
    assert set(cell.shown.splits) == set(range(10))
    splits = tables.comparisons(table("splits"))
    over_splits = [e.n for e in splits if e.over == "split" and e.block == "mammography"]
    assert set(over_splits) == {10}


def test_every_record_says_where_it_comes_from():
    assert scanned()
    for record in scanned():
        assert record.git
        assert record.versions["torch"]
        assert record.data
        assert record.status != "done" or record.confusion["test" if record.stage == "trial" else "val"]


# The values of the first 1,690 records, under today's labels


def first_tables(golden):
    """File stem -> (block, row, column) in today's labels -> the numbers of values.csv."""
    labels = yaml.safe_load((golden / "labels.yaml").read_text())
    numbers_of = {}
    with open(golden / "values.csv", newline="") as file:
        for line in csv.DictReader(file):
            place = tuple(labels.get(line[name], line[name]) for name in ("block", "row", "column"))
            numbers = (line[name] for name in ("n", "mean", "std", "published_mean", "published_std"))
            numbers_of.setdefault(line["table"], {})[place] = [float(number) if number else None for number in numbers]
    return numbers_of


FIRST = Path(__file__).parent / "golden" / "tables"


@pytest.fixture(scope="module")
def first_records():
    """The records that values.csv was made from, so that later runs cannot hide a change of the rules."""
    with open(FIRST / "records.csv", newline="") as file:
        kept = {(line["key"], int(seed)) for line in csv.DictReader(file) for seed in line["seeds"].split()}
    first = [record for record in scanned() if (record.key, record.seed) in kept]
    assert len(first) == len(kept) == 1690
    return first


@pytest.fixture(scope="module")
def first(first_records):
    """stem -> the table built from the first records."""
    return cache(lambda stem: built(stem, first_records))


@pytest.mark.parametrize(
    "stem, expected", first_tables(FIRST).items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_first_records_still_give_the_first_values(stem, expected, first):
    (written,) = json.loads(WRITERS["json"]([first(stem)]))
    numbers = ("n", "mean", "std", "published_mean", "published_std")
    actual = {(c["block"], c["row"], c["column"]): [c[number] for number in numbers] for c in written["cells"]}
    known = {place: values for place, values in actual.items() if values[0] or values[3] is not None}
    assert known.keys() == expected.keys()
    for place, values in expected.items():
        assert known[place] == [None if v is None else pytest.approx(v, rel=1e-12) for v in values], place


def test_the_same_comparison_has_the_same_number_in_every_table(first):
    """F1* against CE over splits is the same comparison in every table that prints it."""
    comparisons = {}
    for name, column in [("splits", "f1_positive"), ("east_v2_1", "f1"), ("plugin", "f1_positive")]:
        for pair in tables.comparisons(first(name)):
            if (pair.column, pair.row, pair.against, pair.over) == (column, "F1*", "CE", "split"):
                comparisons.setdefault(pair.block, {})[name] = (pair.n, pair.difference, pair.low, pair.high, pair.p)
    assert comparisons["mammography"].keys() == comparisons["cocktailparty"].keys() == {"splits", "east_v2_1", "plugin"}
    assert all(len(set(numbers.values())) == 1 for numbers in comparisons.values())
    assert not any(pair.over == "seed" for pair in tables.comparisons(first("splits")))


def test_every_cell_that_differs_has_a_cause_or_says_that_it_is_open():
    meaning = {  # say what a column or row is, not why it differs
        *("f1_positive", "caltech_accuracy", "auroc_thresholded", "f1_macro_baselines", "reused_rows"),
        *("weak_baseline", "graph_positive", "claimed_win"),
    }
    for stem in sorted({file.stem for file in FILES if not file.stem.startswith("contest")}):
        for cell in table(stem).cells:
            if cell.gap.word == "differs":
                assert set(cell.findings) - meaning, f"{stem}: {cell.block} {cell.row} {cell.column}"


def test_a_cell_that_differs_even_with_the_quirks_is_not_called_explained():
    """The quirks are the confirmed causes; what is left is suspected, open or impossible."""
    status = {finding.id: finding.status for finding in papers.findings()}
    stems = {file.stem for file in FILES if file.stem.startswith(("east_v", "btg"))}
    for stem in sorted(stem for stem in stems if f"{stem}_released" not in stems):
        for cell in table(stem).cells:
            if cell.gap.word == "differs":
                left = {status[name] for name in cell.findings}
                assert left & {"suspected", "open"} or "ccs_impossible" in cell.findings, (stem, cell.row, cell.column)


def test_tables_do_not_depend_on_test_scores_of_searches(first_records, first):
    """Without the scores of early searches, no table changes."""
    silent = [r if r.stage == "trial" else r.but(scores={}, decisions={}) for r in first_records]
    for name in ("east_v2_1", "grid"):
        ours, theirs = (WRITERS["csv"]([shown]) for shown in (first(name), built(name, silent)))
        assert ours == theirs
