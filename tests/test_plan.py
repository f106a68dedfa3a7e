"""What a command says before long work, when it asks for confirmation, and what it shows while it works."""

import io
import re
import sys

import numpy as np
import pytest
import torch

from east.lab import data
from east.lab.data import sources
from east.lab.experiment import executors
from east.lab.experiment.runs import load, split_options
from east.lab.settings.command import Command
from east.lab.settings.compose import all_settings, settings
from east.lab.settings.settings import Executor
from east.lab.tasks import plan
from east.lab.training import engine, timing
from east.lab.training.population import Trial
from east.lab.training.timing import Size
from tests.commands import TINY
from tests.made import science

LONG = ["dataset=cifar10", "loss=f1", "device=cpu"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working directory without records, which every plan would read."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_data(tmp_path, monkeypatch):
    """An empty cache, and a network that must not be used."""
    monkeypatch.setenv("EAST_DATA_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def refuse(*_, **__):
        raise AssertionError("something was downloaded")

    monkeypatch.setattr("east.lab.data.sources.download", refuse)
    monkeypatch.setattr("east.lab.data.sources.unpack", refuse)


@pytest.fixture
def slow(monkeypatch):
    """A machine on which every step takes a second."""
    monkeypatch.setattr(timing, "step_seconds", lambda *_: 1.0)


@pytest.mark.parametrize(
    "words, trainings",
    [
        (["preset=quick"], 2),
        (["preset=budget"], 2 + 4),
        (["preset=paper"], 2 + 30),
        (["preset=paper", "search=halving"], 2 + 30 * 5 / 20 + 10 * 15 / 20 + 3),
        (["preset=paper", "search.equal_budget=true"], 2 + 2 * 30),
        (["search=none", "protocol.grid.batch_size={image:[32]}"], 2),  # no grid for these data, and none is needed
    ],
)
def test_an_estimate_includes_the_search_and_every_trial(words, trainings):
    common = ["dataset=digits", "protocol.max_epochs=20", "trials=2", "loss=ce"]
    item = plan.Item(settings(Command.parse([*common, *words])), size=Size(1000, (64,), 10))
    assert item.seconds(lambda *_: 10.0) == pytest.approx(10 * trainings)


@pytest.mark.parametrize("cores", [1, 8])
@pytest.mark.parametrize("loss", ["f1", "ce"])
@pytest.mark.parametrize("dataset", ["mammography", "kaggle", "cifar10"])
def test_quick_is_never_slower_than_lean(dataset, loss, cores, monkeypatch):
    """Also on several cores: a large quick run gets a process for each of its two trials."""
    monkeypatch.setattr(executors, "slots", lambda device: [None] * cores)
    monkeypatch.setattr(plan.Plan, "device", torch.device("cpu"))
    monkeypatch.setattr(plan, "here", lambda item, ledger: plan.replace(item, size=plan.size_of(item.settings)))
    monkeypatch.setattr(timing, "step_seconds", lambda config, size, _: 1 + timing.batch_of(config, size) / 100)
    quick, lean = (
        plan.made([settings(Command({"dataset": dataset, "loss": loss, "preset": preset, "device": "cpu"}))]).seconds
        for preset in ("quick", "lean")
    )
    assert quick <= lean


def test_a_classifier_is_timed_by_fits_to_two_small_samples(monkeypatch):
    """The rest is a straight line: here a second, and a hundredth more for each row."""
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    labels, sizes = np.arange(40_000) % 2, []

    def fit(rows):
        sizes.append(len(rows))
        clock[0] += 1 + len(rows) / 100

    assert timing.fit_seconds(fit, labels, [32_000, 8_000]) == pytest.approx(2 + 400)
    assert sizes == [1_000, 2_000]
    words = Command.parse(["dataset=digits", "loss=logistic", "trials=3", "preset=quick"])
    monkeypatch.setattr(timing, "classical_seconds", lambda config, splits: float(len(splits.train)))
    assert plan.made([settings(words)]).costs == [3 * 1149]


@pytest.mark.usefixtures("no_data", "slow")
def test_a_dry_run_downloads_nothing(east_run):
    answer = east_run(*LONG, "dry_run=true")
    assert answer.code == 0, answer.err
    assert re.search(r"cifar10 f1 +0 of 48 +0 of 10 +\d+ \w+, data not here yet", answer.out)
    assert answer.out.splitlines()[1] == "cifar10: still to be downloaded or decoded", "before anything is timed"
    answer = east_run("task=reproduce", "table=east_v2_1", "datasets=[cifar10,mammography]", "dry_run=true")
    assert answer.code == 0, answer.err
    assert "mammography f1" in answer.out


@pytest.mark.usefixtures("no_data")
def test_a_plan_decodes_no_images():
    with plan.offline(True), pytest.raises(data.DataError, match="photographs is not decoded yet"):
        sources.decoded("photographs", lambda: pytest.fail("decoded"))


@pytest.mark.usefixtures("no_data")
def test_a_data_folder_without_the_files_does_not_forbid_downloading_them(tmp_path, monkeypatch, east_run):
    mammography, fetched = ["dataset=mammography", "preset=quick", f"data_dir={tmp_path}"], []

    def unreachable(source, *_):
        fetched.append(source)
        raise data.DataError("no connection")

    assert "data not here yet" in east_run(*mammography, "dry_run=true").out
    for step in ("download", "unpack"):
        monkeypatch.setattr(f"east.lab.data.sources.{step}", unreachable)
    answer = east_run(*mammography)
    assert answer.code == 3
    assert fetched
    assert "EAST_OFFLINE" not in answer.err


def test_a_variant_of_a_dataset_has_its_size(tmp_path):
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "mammography-mine.yaml").write_text("{name: mammography-mine, kind: table, limit: 1000}")
    variant = settings(Command({"dataset": "mammography-mine", "config_dir": str(tmp_path)}))
    assert plan.size_of(variant) == Size(640, (6,), 2)


@pytest.mark.usefixtures("no_data", "slow")
def test_days_on_a_cpu_are_refused_if_nobody_can_be_asked(east_run, monkeypatch):
    """A sweep asks once for all of its jobs."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    for words, trainings in (
        (LONG, "48 search trainings and 10"),
        (["-m", *LONG, "seed=0,50"], "96 search trainings and 20"),
    ):
        answer = east_run(*words)
        assert answer.code == 2
        assert f"{trainings} trials of darknet19: about" in answer.err
        assert re.search(r"Instead: .*one GPU would take about .* \(calculated with", answer.err)
        assert answer.err.count("yes=true starts it anyway") == 1


@pytest.mark.usefixtures("no_data", "slow")
@pytest.mark.parametrize(("typed", "started"), [("y\n", True), ("\n", False)])
def test_days_on_a_cpu_need_confirmation_in_a_terminal(typed, started, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys, "stderr", Terminal())
    work = plan.made(all_settings(Command.parse(LONG)))
    if started:
        work.confirm()
    else:
        with pytest.raises(plan.ConfigError, match="not started"):
            work.confirm()


@pytest.mark.usefixtures("slow")
def test_minutes_are_announced_and_seconds_are_not(monkeypatch, capsys):
    few = plan.made(all_settings(Command.parse([*TINY, "dataset.limit=null", "protocol.max_epochs=40", "trials=4"])))
    few.confirm()
    assert re.match(r"4 trials of mlp: about \d+ min on this machine", capsys.readouterr().out)
    plan.made(all_settings(Command.parse(TINY))).confirm()
    assert capsys.readouterr().out == ""


def test_a_local_ray_is_planned_with_the_cores_of_this_machine(monkeypatch):
    monkeypatch.setattr(executors, "slots", lambda device: [None, None])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert plan.Plan([], executors.Place(Executor(name="ray")), None).width == 2


def test_steps_of_a_larger_network_take_longer():
    hyper = {"batch_size": 512, "dropout": 0.0, "weight_decay": 0.0}
    configs = [science(model={"name": "mlp", "hidden": [width]}, hyper=hyper) for width in (8, 4096)]
    narrow, wide = (timing.step_seconds(config, Size(2000, (20,), 2), torch.device("cpu")) for config in configs)
    assert 0 < narrow < wide


def test_operations_match_torchs_count():
    from torch.utils.flop_counter import FlopCounterMode

    nn = torch.nn
    net = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(900, 10))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, 3, 32, 32))
    assert timing.forward_operations(net, (3, 32, 32)) == counter.get_total_flops()


def test_grid_points_that_take_the_same_time_are_timed_once(monkeypatch):
    timed = []
    monkeypatch.setattr(timing, "measured", lambda *setting: timed.append(setting) or 1.0)
    monkeypatch.setattr(timing, "_KNOWN", {})
    for words in ([], ["protocol.precision=bfloat16"]):
        asked = settings(Command.parse([*LONG, "preset=paper", *words]))
        for point in asked.grid():
            one = asked.science("cifar10", None).with_grid_point(point)
            timing.step_seconds(one, plan.SIZES["cifar10"], torch.device("cpu"))
    assert len(timed) == 2


@pytest.mark.parametrize(
    "words",
    [
        ["loss=fbeta", "loss.beta={malignant: 2.0}"],
        ["loss=fbeta", "loss.average=positive", "loss.positive=malignant"],
        ["loss=metric", "loss.metric=fbeta", "loss.parameters={beta: {malignant: 2.0, benign: 1.0}}"],
        ["loss=metric_ce", "loss.metric=f1", "loss.parameters={average: positive, positive: malignant}"],
    ],
)
def test_losses_that_name_classes_can_be_timed(words):
    composed = settings(Command.parse(["dataset=mammography", *words]))
    config = composed.science("mammography", None).but(hyper=composed.hyper.but(batch_size=32, lr=0.1, dropout=0.0))
    assert timing.trial_seconds(config, Size(100, (6,), 2), 1, torch.device("cpu")) > 0


@pytest.mark.parametrize("name, kind, shape", [("tiny_darknet", "image", (3, 16, 16)), ("gnn", "graph", (6, 4))])
def test_images_and_graphs_can_be_timed(name, kind, shape):
    config = science(model={"name": name}, hyper={"batch_size": 8, "dropout": 0.0, "lr": 0.1, "weight_decay": 0.0})
    assert timing.trial_seconds(config, Size(100, shape, 2, kind), 3, torch.device("cpu")) > 0


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "mammography" else pytest.mark.nightly) for n in plan.SIZES if n != "caltech256"],
)
def test_known_sizes_of_missing_data_are_right(name):
    asked = settings(Command.parse([f"dataset={name}"]))
    try:
        with plan.offline(True):
            loaded = load(asked.dataset, None)
    except data.DataError:
        pytest.skip(f"{name} is not here")
    splits = data.split(loaded, **split_options(asked.split))
    size = plan.size_of(asked)
    assert size == Size(len(splits.train), tuple(splits.train.inputs.shape[1:]), len(loaded.classes), loaded.kind)


@pytest.mark.usefixtures("no_figures")
def test_seeds_below_two_to_the_32_including_the_searchs_can_be_used(tmp_path, east_run):
    """A trial with the search's seed and settings is a trial of its own."""
    search = [*TINY, "preset=budget", "protocol.max_epochs=1", "hyper.lr=0.01", "hyper.batch_size=64", "trials=1"]
    answer = east_run(*search, "search=grid", "seed=1000")
    assert answer.code == 0, answer.err
    files = sorted(file.name for file in tmp_path.rglob("se*-1000.json"))
    assert files == ["search-1000.json", "seed-1000.json"]
    assert east_run(*TINY, "seed=4294967295", "trials=1").code == 0
    assert list(tmp_path.rglob("seed-4294967295.json"))
    assert Trial(science(), 1, "search").identity != Trial(science(), 1).identity


def test_timing_a_large_network_with_many_classes_takes_a_few_small_steps(monkeypatch):
    """An epoch of the stand-in has two rows per class: timing whole epochs took minutes for 257 classes."""
    rows, real = [], engine.samples
    monkeypatch.setattr(engine, "samples", lambda p, labels: rows.append(labels.shape[-1]) or real(p, labels))
    monkeypatch.setattr(timing, "operations", lambda *_: timing.STEP_OPERATIONS / 8)
    hyper = {"batch_size": 64, "dropout": 0.0, "lr": 0.1, "weight_decay": 0.0}
    config = science(model={"name": "tiny_darknet"}, hyper=hyper)
    assert timing.step_seconds(config, Size(1000, (3, 16, 16), 257, "image"), torch.device("cpu")) > 0
    assert rows == [8] * len(rows)
    assert len(rows) <= timing.STEPS + 1


def test_a_plan_for_a_clusters_gpu_is_timed_on_this_machine(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["dataset=digits", "loss=f1", "preset=quick", "device=cuda", "executor=ray", "executor.gpus=1"]
    assert plan.made([settings(Command.parse(words))]).device.type != "cuda"
