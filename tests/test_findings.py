"""What is found in small tables, and what is not."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import pytest

from east.lab.data.csv import from_frame
from east.lab.data.findings import Finding, alike, equal_rows, findings, repeats_tied


def table(rows: int = 200, **columns):
    """A number that means nothing, a coin flip, and these columns."""
    random = np.random.RandomState(0)
    plain = {"x": random.randn(rows).round(3), "y": random.randint(0, 2, rows)}
    return from_frame("t", pd.DataFrame(plain | columns), "y", keep=[*columns])


def kinds(found: Iterable[Finding]) -> list[tuple[str, str | None]]:
    return [(finding.kind, finding.column) for finding in found]


def test_a_plain_table_has_no_findings():
    assert not kinds(findings(table(colour=["red", "blue"] * 100, size=np.arange(200) % 23)))


def test_copied_rows_stay_together_and_rows_of_categories_do_not():
    random = np.random.RandomState(1)
    copied = from_frame("t", pd.concat([pd.DataFrame({"x": random.randn(80), "y": random.randint(0, 2, 80)})] * 5), "y")
    assert len(np.unique(equal_rows(copied))) == 80
    assert repeats_tied(copied)
    (finding,) = findings(copied)
    assert finding.message == ("320 of 400 rows repeat an earlier one, far more than by chance: they stay in one part")
    words = {f"c{k}": random.choice(list("abc"), 400) for k in range(4)}
    by_nature = from_frame("t", pd.DataFrame(words | {"y": random.randint(0, 2, 400)}), "y")
    assert not repeats_tied(by_nature)
    assert next(findings(by_nature)).message == "319 of 400 rows repeat an earlier one, as by chance"
    coarse = from_frame("t", pd.DataFrame({"x": random.randint(0, 60, 400), "y": random.randint(0, 2, 400)}), "y")
    assert not repeats_tied(coarse), "one column of 60 values"
    zeros = pd.DataFrame({"x": np.where(random.rand(400) < 0.9, 0, random.rand(400)), "y": random.randint(0, 2, 400)})
    assert not repeats_tied(from_frame("t", zeros, "y")), "most are 0"


@pytest.mark.parametrize(
    "name, values, expected",
    [
        ("patient", [f"p{k // 5}" for k in range(200)], "group"),
        ("subject_id", np.arange(200) // 4, "group"),
        ("who", np.repeat([f"n{k}" for k in range(40)], 5), None),
        ("seen", pd.date_range("2024-01-01", periods=200).strftime("%d.%m.%Y"), "time"),
        ("nr", np.random.RandomState(0).permutation(200) + 1, "counter"),
        ("zip", np.arange(200) * 7 % 50 + 10_000, "code"),
        ("area_code", np.arange(200) * 7 % 50, "code"),
        ("age", np.arange(200) * 7 % 50, None),
    ],
)
def test_a_remarkable_column_is_named_with_its_advice(name, values, expected):
    found = [*findings(table(**{name: values}))]
    assert kinds(found) == ([(expected, name)] if expected else [])
    assert all(f"={name}" in finding.message or f"=[{name}]" in finding.message for finding in found)


def test_words_within_which_a_number_hardly_varies_look_like_subjects():
    who = [f"w{k // 10}" for k in range(200)]
    age = np.repeat(np.random.default_rng(0).normal(50, 15, 20), 10) + np.arange(200) % 10 / 10
    assert kinds(findings(table(who=who, age=age))) == [("group", "who")]


def test_no_group_is_suggested_where_there_is_one():
    who = np.repeat([f"n{k}" for k in range(40)], 5)
    frame = pd.DataFrame({"patient": who, "x": np.random.RandomState(0).randn(200), "y": [0, 1] * 100})
    assert kinds(findings(from_frame("t", frame, "y"))) == [("group", "patient")]
    assert not kinds(findings(from_frame("t", frame, "y", group="patient", keep="patient")))


def test_a_column_that_tells_the_class_is_named():
    labels = [0, 1] * 100
    leaky = from_frame("t", pd.DataFrame({"x": np.random.RandomState(0).randn(200), "after": labels, "y": labels}), "y")
    assert kinds(findings(leaky)) == [("tells", "after")]


@pytest.mark.parametrize("twins", [("yes", "Yes"), ("Zürich", "Zu\u0308rich"), ("yes", "ye\u200bs"), ("a", "a\u00ad")])
def test_classes_that_look_alike_are_named(twins):
    assert alike([*twins, "other"]) == [*twins]
    assert not alike(["yes", "no", "Zürich"])
    labelled = from_frame("t", pd.DataFrame({"x": np.random.RandomState(0).randn(200), "y": [*twins] * 100}), "y")
    (finding,) = findings(labelled)
    assert finding.kind == "alike"
    assert finding.message.isascii()
