"""What all tests share: one thread, real data if available, commands in this process, a small results folder."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every process that tests start

import pytest

from east.lab import cli
from tests.commands import ROOT, TINY

SHARED_DATA = ROOT.parent / "shared" / "data"  # scripts/test looks there as well
if SHARED_DATA.is_dir():
    os.environ.setdefault("EAST_DATA_DIR", str(SHARED_DATA))


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


EastRun = Callable[..., Answer]


def unsaved(figure: object, file: Path) -> Path:
    """Replaces plots.save: names the figure without drawing it, which takes longer than training a tiny network."""
    return file


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name their figures without drawing them."""
    monkeypatch.setattr("east.lab.reporting.plots.save", unsaved)


@pytest.fixture
def east_run(capsys: pytest.CaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EastRun:
    """Run east-run in this process; results go to the test's own folder unless it sets results_dir."""
    monkeypatch.setattr(sys, "argv", ["east-run"])  # Hydra's multirun rewrites it
    monkeypatch.setenv("EAST_DEBUG", "")  # debug=true sets it

    def run(*arguments: str) -> Answer:
        results = [] if any(word.startswith("results_dir=") for word in arguments) else [f"results_dir={tmp_path}"]
        capsys.readouterr()
        code = cli.run([*arguments, *results])
        return Answer(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trials of F1 on all digits. Tests copy the folder and never write into it."""
    folder = tmp_path_factory.mktemp("tiny_results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("east.lab.reporting.plots.save", unsaved)
        assert cli.run([*TINY, "dataset.limit=null", f"results_dir={folder}"]) == 0
    return folder
