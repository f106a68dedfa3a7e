"""scripts/gpu_check, with the CPU as its device."""

import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest

from tests.commands import ROOT


@pytest.fixture
def gpu_check(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    module = module_from_spec(spec_from_loader("gpu_check", loader))
    loader.exec_module(module)
    return module


def test_checks_become_a_file_and_a_table_and_an_error_is_one_of_its_rows(gpu_check, tmp_path, monkeypatch, capsys):
    done, train = [], gpu_check.engine.train
    monkeypatch.setattr(
        gpu_check.engine, "train", lambda *a, **options: done or done.extend(train(*a, **options)) or done
    )
    monkeypatch.setitem(gpu_check.CHECKS, "tests", lambda *_: 1 / 0)
    words = ["--device", "cpu", "--cell", "digits/9b95c103c5d9", "--rounds", "1", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words, "--only", "tests", "cell", "losses"])
    assert gpu_check.main() == 1
    error, score, _, *losses = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (error["here"], error["fine"]) == ("ZeroDivisionError: division by zero", False)
    assert score["here"] == score["expected"].removesuffix(" (cpu)")
    assert score["fine"]
    assert len(losses) == 2 * len(gpu_check.SHAPES)
    out = capsys.readouterr().out
    assert f"| {score['what']} | {score['here']} | {score['expected']} |  |" in out
    assert "| no error | **no** |" in out
    monkeypatch.setattr(gpu_check, "f1_score", lambda *_, **__: 0.9)
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words, "--only", "cell"])
    assert gpu_check.main() == 1, "beyond a standard deviation"
