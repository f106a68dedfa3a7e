"""Every row of the papers' tables, clean and released: its command composes, fills its cell, and runs."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from east.lab import cli
from east.lab.data import DataError, datasets, load
from east.lab.experiment import records
from east.lab.reporting import tables
from east.lab.settings.command import Command
from east.lab.settings.compose import settings

pytestmark = pytest.mark.usefixtures("no_figures")

KINDS = datasets()
VARIANTS = ("clean", "released")
PAPERS = [name for name in tables.names() if tables.spec(name).paper]
LIMITS = {"table": 256, "image": 64, "graph": 256}  # rows
CALTECH = ("056.dog", "080.frog", "105.horse")  # no small part of the real images has a frog
PAIRS_OF_PEOPLE = 15  # of the six people in a scene; each pair has a label
SMALL = {"protocol.max_epochs": 1, "trials": 1, "preset": "quick", "executor": "inline", "device": "cpu"}


def planned() -> Iterator[tuple[str, str, Command]]:
    """The commands that fill the papers' empty tables: table, variant, command."""
    for name in PAPERS:
        for variant in VARIANTS:
            for command in tables.plan(name, "no results yet", preset="quick", variant=variant):
                yield name, variant, command


PLANNED = list(planned())


def pairs() -> dict[str, list[Command]]:
    """Loss and kind of data -> their commands, those on small data first."""
    order = ("caltech256", "mammography", "cocktailparty", "cocktailparty_graph")
    found: dict[str, list[Command]] = {}
    for _, _, command in PLANNED:
        found.setdefault(f"{command.get('loss')} {KINDS[command.get('dataset')].kind}", []).append(command)
    place = {name: k for k, name in enumerate(order)}
    return {pair: sorted(own, key=lambda c: place.get(c.get("dataset"), len(order))) for pair, own in found.items()}


PAIRS = pairs()


@pytest.fixture(scope="module")
def caltech(tmp_path_factory) -> Path:
    """A folder of noise in Caltech-256's layout."""
    root = tmp_path_factory.mktemp("caltech")
    noise = np.random.RandomState(0)
    for folder in CALTECH:
        (root / "caltech256" / "256_ObjectCategories" / folder).mkdir(parents=True)
        for k in range(12):
            image = Image.fromarray(noise.randint(0, 256, (40, 40, 3), dtype=np.uint8))
            number = folder.partition(".")[0]
            image.save(root / "caltech256" / "256_ObjectCategories" / folder / f"{number}_{k + 1:04d}.jpg")
    return root


def test_the_tables_need_every_kind_of_loss():
    losses = {pair.split()[0] for pair in PAIRS}
    assert {"f1", "rf", "ccs", "ap_perf", "btg_released", "wmw_released"} <= losses
    assert {pair.split()[1] for pair in PAIRS} == {"table", "image", "graph"}


def scored(cells) -> dict:
    """Scores and decisions of a record with everything that these cells show."""
    scores: dict = {"test": {}}
    decisions: dict = {}
    for cell in cells:
        *rule, split, name = cell.score.split(".")
        room = decisions.setdefault(rule[0], {"scores": {"test": {}}})["scores"] if rule else scores
        room[split][name] = 0.5 if cell.position is None else [0.5] * (cell.position + 1)
    return {"scores": scores, "decisions": decisions}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PAPERS)
def test_the_cells_of_a_table_find_the_records_of_its_commands(name, variant):
    """With the records that the planned commands would write, every cell shows one setting and none is empty."""
    options = {"results_dir": "no results yet", "preset": "quick", "variant": variant}
    judged, trials = scored(tables.build(name, **options).cells), tables.spec(name).trials
    made = []
    for command in (command for table, kind, command in PLANNED if (table, kind) == (name, variant)):
        quick, data = command.but(preset="quick"), (command.get("dataset"), "fingerprint")
        science = settings(quick).science(*data)
        assert settings(Command.parse(quick.words)).science(*data).key == science.key, "typed by hand it is the same"
        made += [records.Record(config=science, seed=seed, **judged) for seed in range(trials)]
    keys = {record.key for record in made}
    assert len(made) == trials * len(keys) > 0, "every run is another experiment"
    table = tables.build(name, scanned=made, **options)
    assert {cell.shown.key for cell in table.cells} == keys
    assert {(cell.shown.settings, len(cell.values)) for cell in table.cells} == {(1, trials)}
    assert not tables.plan(name, scanned=made, **options)


def shrunk(command: Command) -> Command:
    return command.but(SMALL | {"dataset.limit": LIMITS[KINDS[command.get("dataset")].kind]})


NIGHTLY = ("ap_perf table",)  # minutes of compilation; test_ap_perf.py trains it on small batches


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=pytest.mark.nightly if pair in NIGHTLY else ()) for pair in PAIRS]
)
def test_a_row_of_every_loss_and_kind_of_data_runs(pair, caltech, tmp_path, monkeypatch):
    command = shrunk(PAIRS[pair][0])
    if command.get("dataset") == "caltech256":
        monkeypatch.setenv("EAST_DATA_DIR", str(caltech))
    try:
        load(command.get("dataset"), limit=command.get("dataset.limit"))
    except DataError as error:
        pytest.skip(str(error).splitlines()[0])
    assert cli.run(command.but(results_dir=str(tmp_path)).words) == cli.DONE
    (record,) = records.scan(tmp_path)
    assert (record.status, record.error) == ("done", None)
    asked = settings(command)
    assert record.key == asked.science(record.data["name"], record.data["fingerprint"]).key
    for split in ("val", "test"):
        matrix = np.array(record.confusion[split])
        assert matrix.sum() == record.data["sizes"][split] * (PAIRS_OF_PEOPLE if asked.dataset.kind == "graph" else 1)
        assert record.scores[split]["accuracy"] == pytest.approx(np.trace(matrix) / matrix.sum())
        for name, score in record.scores[split].items():
            for value in score if isinstance(score, list) else [score]:
                assert value is None or (-1 if name == "mcc" else 0) <= value <= 1, name
    assert asked.loss.classical or math.isfinite(record.best.val_loss)
    assert asked.loss.classical or record.epochs == 1
