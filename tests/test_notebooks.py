"""The notebooks run from top to bottom in an empty folder, and their committed outputs are what they print."""

import json
import re
import subprocess
import sys

import pytest

from tests.commands import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def outputs(notebook: dict) -> list[dict]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", ())]


def text(notebook: dict) -> str:
    printed = [output.get("text") or output["data"].get("text/plain", "") for output in outputs(notebook)]
    return "".join(line for lines in printed for line in lines)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_prints_what_is_committed(file, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "agg")
    command = [sys.executable, str(ROOT / "scripts" / "notebooks.py"), "--here", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a reader would see a warning"
    now, committed = text(json.loads(done.stdout)), text(json.loads(file.read_text()))
    number = re.compile(r"-?\d+\.\d+")
    assert number.sub("…", now) == number.sub("…", committed), "run scripts/notebooks.py"
    assert [*map(float, number.findall(now))] == pytest.approx([*map(float, number.findall(committed))], abs=0.05)


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_small(file):
    notebook = json.loads(file.read_text())
    assert file.stat().st_size < 60_000
    assert sum("image/png" in output.get("data", ()) for output in outputs(notebook)) <= 1
