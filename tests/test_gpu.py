"""Plans on GPUs, and scripts/gpu_check, with the CPU in their place."""

import json
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest
import torch

from east.lab.experiment import executors
from east.lab.settings.command import Command
from east.lab.settings.compose import settings
from east.lab.tasks import plan
from east.lab.training import timing
from tests.commands import ROOT


@pytest.fixture
def work(tmp_path, monkeypatch):
    words = f"dataset=digits loss=f1 device=cpu executor=processes executor.slots=2 results_dir={tmp_path}"
    made = plan.made([settings(Command.parse(words.split()))])
    monkeypatch.setattr(plan.Plan, "device", torch.device("cuda"))
    return made


def test_gpus_are_timed_in_a_worker_so_that_none_is_held_here(work, monkeypatch):
    def execute(function, queue, place):
        assert len(place.slots) == 1
        function.keywords["of_trial"].keywords["device"] = torch.device("cpu")
        yield from executors.processes(function, queue, place)

    monkeypatch.setattr(executors, "execute", execute)
    monkeypatch.setattr(timing, "step_seconds", None)  # here; a worker has its own
    assert "on this machine (cuda, 2 at once)" in work.summary()
    assert work.costs[0] > 0


def test_the_time_of_a_gpu_that_is_in_use_is_calculated_and_days_are_asked_for(work, monkeypatch, capsys):
    lost = executors.Lost("CUDA error: all devices are busy\nmore")
    monkeypatch.setattr(executors, "execute", lambda *_: [(None, lost)])
    assert "calculated with 10 TFLOP/s" in work.summary()
    assert "cannot be timed now (CUDA error: all devices are busy)" in capsys.readouterr().err
    work.costs = [20.0 * plan.DAY]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(plan.ConfigError, match=r"about 10 days .* for less \(dry_run=true says how long\)\.\n"):
        work.confirm()


def test_gpus_that_are_named_but_not_there_are_mentioned(east_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    told = "CUDA_VISIBLE_DEVICES=1 is set, and PyTorch finds no GPU"
    assert told in east_run("dataset=digits", "loss=f1", "dry_run=true").out
    assert told in east_run("dataset=digits", "loss=f1", "device=cuda").err


def test_checks_of_a_gpu_become_a_file_and_a_table_and_an_error_is_one_of_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    loader = SourceFileLoader("gpu_check", str(ROOT / "scripts" / "gpu_check"))
    loader.exec_module(gpu_check := module_from_spec(spec_from_loader("gpu_check", loader)))
    monkeypatch.setitem(gpu_check.CHECKS, "tests", lambda *_: 1 / 0)
    words = ["--device", "cpu", "--cell", "digits/9b95c103c5d9", "--rounds", "1", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *words, "--only", "tests", "cell", "losses"])
    assert gpu_check.main() == 1
    error, score, _, *losses = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (error["here"], error["fine"]) == ("ZeroDivisionError: division by zero", False)
    assert score["fine"], score
    assert len(losses) == 2 * len(gpu_check.SHAPES)
    assert f"| {score['what']} | {score['here']} | {score['expected']} |  |" in capsys.readouterr().out
