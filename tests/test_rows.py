"""Every row of the papers' thirteen tables, clean and released, has a command that runs to its end."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from east import cli
from east.data import DataError, load
from east.experiment import records
from east.reporting import tables

LIMIT = 512
CALTECH = ("056.dog", "080.frog", "105.horse")  # no part of the real images that is small has a frog


def commands() -> dict[str, list[str]]:
    """What fills an empty table, for all of them, each once: name -> overrides."""
    found = {}
    for name in tables.names():
        for variant in tables.VARIANTS if "paper" in tables.spec(name) else ():
            for run in tables.plan(name, "no results yet", preset="quick", variant=variant):
                groups = [f"{group}={run[group]}" for group in ("dataset", "loss", "protocol")]
                found.setdefault(" ".join([*groups, *run["overrides"]]), [*groups, *run["overrides"]])
    return found


COMMANDS = commands()


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


def test_the_tables_need_many_runs():
    losses = {line.split()[1] for line in COMMANDS}
    assert {"loss=f1", "loss=rf", "loss=ccs", "loss=ap_perf", "loss=btg_released", "loss=wmw_released"} <= losses
    assert len(COMMANDS) > 100


@pytest.mark.slow
@pytest.mark.parametrize("line", COMMANDS)
def test_every_row_runs(line, caltech, tmp_path, monkeypatch):
    dataset = line.split()[0].removeprefix("dataset=")
    small = [f"dataset.limit={LIMIT}", "protocol.max_epochs=1", "trials=1", "preset=quick", "executor=inline"]
    if dataset == "caltech256":
        monkeypatch.setenv("EAST_DATA_DIR", str(caltech))
    try:
        load(dataset, limit=LIMIT)
    except DataError as error:
        pytest.skip(str(error).splitlines()[0])
    assert cli.run([*COMMANDS[line], *small, f"results_dir={tmp_path}"]) == cli.DONE
    (record,) = records.scan(tmp_path)
    assert record["status"] == "done"
    assert 0 <= record["scores"]["test"]["accuracy"] <= 1
