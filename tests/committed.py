"""The tables that follow from the committed records, each built once for all tests of a process."""

import json
import re
import shutil
import tempfile
from datetime import date
from functools import cache
from pathlib import Path

from east.lab.experiment import records
from east.lab.reporting import tables
from tests.tracked import tracked

RESULTS = Path(__file__).parents[1] / "results"
FILES = tracked("results/tables")
FOLDER = tempfile.TemporaryDirectory()  # until the tests end, because records are read from it when needed


@cache
def scanned():
    """Only the committed records, because a working copy may hold other runs."""
    shutil.copytree(RESULTS / "records", Path(FOLDER.name, "records"))
    return records.scan(FOLDER.name)


def built(stem, kept):
    """A table from these records; east_v2_1_released is a variant of east_v2_1."""
    name, released = re.fullmatch(r"(\w+?)(_released)?", stem).groups()
    file = RESULTS / "tables" / f"{stem}.md"
    day = re.search(r"rendered (\d{4}-\d\d-\d\d)", file.read_text())[1] if file.exists() else "2026-01-01"
    variant = "released" if released else "clean"
    return tables.build(name, scanned=kept, variant=variant, today=date.fromisoformat(day))


@cache
def table(stem):
    return built(stem, scanned())


@cache
def content(stem):
    """A table as `format=json` prints it."""
    return json.loads(json.dumps(tables.content(table(stem))))
