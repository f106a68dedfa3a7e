"""Plans on GPUs, with the CPU in their place."""

import pytest
import torch

from east.lab.experiment import executors
from east.lab.settings.command import Command
from east.lab.settings.compose import settings
from east.lab.tasks import plan
from east.lab.training import timing

WORDS = ["dataset=digits", "loss=f1", "preset=quick", "device=cpu", "executor=processes", "executor.slots=2"]


def plan_on_gpus(tmp_path, monkeypatch, *words):
    made = plan.made([settings(Command.parse([*WORDS, f"results_dir={tmp_path}", *words]))])
    monkeypatch.setattr(plan.Plan, "device", torch.device("cuda"))
    return made


def test_gpus_are_timed_in_a_worker_so_that_none_is_held_here(tmp_path, monkeypatch):
    work, places = plan_on_gpus(tmp_path, monkeypatch), []

    def execute(function, queue, place):
        places.append(place)
        function.keywords["of_trial"].keywords["device"] = torch.device("cpu")
        yield from executors.processes(function, queue, place)

    monkeypatch.setattr(executors, "execute", execute)
    monkeypatch.setattr(timing, "step_seconds", None)  # here; a worker has its own
    assert work.costs[0] > 0
    assert len(places[0].slots) == 1
    assert "on this machine (cuda, 2 at once)" in work.summary()


def test_the_time_of_a_gpu_that_is_in_use_is_calculated_and_days_are_asked_for(tmp_path, monkeypatch, capsys):
    def busy(*_, **__):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    monkeypatch.setattr(timing, "trial_seconds", busy)
    work = plan_on_gpus(tmp_path, monkeypatch, "executor=inline")
    assert "calculated with 10 TFLOP/s" in work.summary()
    assert (
        "cannot be timed now (CUDA error: all CUDA-capable devices are busy or unavailable)" in capsys.readouterr().err
    )
    work.costs = [10.0 * plan.DAY]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(
        plan.ConfigError, match=r"about 10 days .*quick trains for less \(dry_run=true says how long\)\."
    ):
        work.confirm()


def test_gpus_that_are_named_but_not_there_are_mentioned(east_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    told = "CUDA_VISIBLE_DEVICES=1 is set, but PyTorch finds no GPU"
    assert told in east_run("dataset=digits", "loss=f1", "preset=quick", "dry_run=true").out
    assert told in east_run("dataset=digits", "loss=f1", "device=cuda").err
    assert told not in east_run("dataset=digits", "loss=f1", "preset=quick", "device=cpu", "dry_run=true").out
