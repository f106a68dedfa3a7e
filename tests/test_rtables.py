"""dataset=rtables: tables that are converted by scripts/rtables and verified by their checksums."""

import csv

import pytest

import east
from east.lab.data.rtables import INDEX
from east.lab.data.sources import copies


@pytest.fixture
def empty_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("EAST_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("pooch.os_cache", lambda name: tmp_path / "cache")
    return tmp_path


@pytest.mark.parametrize(
    "name, classes, positive, groups",
    [("Arrests", ("Yes", "No"), 1, False), ("headInjury", ("0", "1"), 1, False), ("Ketchup", None, None, True)],
)
def test_a_table_has_the_classes_and_groups_of_the_index(name, classes, positive, groups):
    if not copies(f"rtables/{name}.csv"):
        pytest.skip("the tables have not been converted: scripts/rtables")
    table = east.data.load("rtables", set=name)
    assert table.name == f"rtables-{name}"
    assert classes in (None, table.classes)
    assert table.positive == positive
    assert (table.groups is not None) == groups


def test_a_table_that_was_not_converted_names_the_script(empty_folders):
    with pytest.raises(east.data.DataError, match="scripts/rtables"):
        east.data.load("rtables", set="BEPS")


def test_a_changed_table_is_refused(empty_folders):
    (empty_folders / "rtables").mkdir()
    (empty_folders / "rtables" / "BEPS.csv").write_text("vote\nLabour\n")
    with pytest.raises(east.data.DataError, match=r"BEPS\.csv"):
        east.data.load("rtables", set="BEPS")


def test_the_index_names_each_table_once():
    with INDEX.open(newline="") as file:
        names = [row["name"] for row in csv.DictReader(file)]
    assert len(names) == len(set(names)) == 23
