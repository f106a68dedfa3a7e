"""Plan, run what is missing, select, run the trials; with tiny networks or with jobs that only pretend to train."""

import importlib
import pickle
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import cohen_kappa_score

from east.choices import ConfigError
from east.lab.experiment import executors, protocols, records, runs, scheduler
from east.lab.experiment.jobs import Finished, run_job
from east.lab.experiment.runs import Run
from east.lab.experiment.scheduler import carry_out
from east.lab.settings.command import Command
from east.lab.settings.compose import settings as composed
from east.lab.settings.settings import DatasetSection, Executor
from east.lab.training import devices, engine, population, saved
from east.lab.training.population import Outcome, Trial
from east.lab.training.progress import Epoch
from east.lab.training.scores import Best
from tests.made import ended_at_checkpoint, science

TINY = ["dataset=digits", "dataset.limit=120", "model.hidden=[8]", "protocol.max_epochs=2", "protocol.decisions=[]",
        "executor=inline", "device=cpu", "preset=quick"]  # fmt: skip
GRID = ["search=grid", "preset=budget", "protocol.max_epochs=2", "trials=2"]  # lr x batch_size: 4 points


def settings(words):
    return composed(Command.parse(words))


def run_of(folder, *overrides):
    return Run.of(settings([*TINY, f"results_dir={folder}", *overrides]))


def recorded(folder):
    return {(r.key, r.seed): r for r in records.scan(folder)}


@pytest.fixture
def pretend(monkeypatch):
    """Jobs that record the validation loss lr x batch_size at once; those with a seed or loss in `broken` are lost."""
    seen, broken = [], set()

    def run_job(job):
        for trial in job.trials:
            name, hyper = trial.config.loss.name, trial.config.hyper
            seen.append((name, trial.stage, trial.seed))
            if trial.seed in broken or name in broken:
                return executors.Lost("broken")
            best = Best(hyper.lr * hyper.batch_size, -hyper.lr)
            record = records.Record(trial.config, trial.seed, trial.stage, best=best)
            records.write(job.settings.results_dir, record, force=job.settings.force)
        return Finished([trial.identity for trial in job.trials])

    monkeypatch.setattr(scheduler, "run_job", run_job)
    run_job.seen, run_job.broken = seen, broken
    return run_job


def test_trials_are_recorded_once(tmp_path, monkeypatch):
    run = run_of(tmp_path, "trials=3", "hyper.batch_size=32")
    assert carry_out([run]) == []
    first = recorded(tmp_path)
    assert sorted(seed for _, seed in first) == [0, 1, 2]
    for one in first.values():
        assert (one.status, one.stage, one.device, one.config.preset) == ("done", "trial", "cpu", "quick")
        assert one.data["fingerprint"] == one.config.dataset.fingerprint
        assert sum(one.data["sizes"].values()) == 120
        assert np.sum(one.confusion["test"]) == one.data["sizes"]["test"]
        assert Path(tmp_path, one.source).with_suffix(".npz").exists()
    monkeypatch.setattr(engine, "train_in_turn", None)  # raises if it is called
    again = run_of(tmp_path, "trials=3", "hyper.batch_size=32")
    assert carry_out([again]) == []
    assert recorded(tmp_path) == first
    assert not (tmp_path / "runs" / "checkpoints").exists()


def test_a_model_that_cannot_be_saved_loses_no_result(tmp_path, monkeypatch):
    """The record is written, and the failure is reported on every run until the model is saved as well."""

    def of(*_):
        raise OSError("no space")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(saved, "from_outcome", of)
            assert carry_out([run_of(tmp_path, "trials=1", "save_model=true")]) == ["digits f1: OSError: no space"]
        assert [record.status for record in records.scan(tmp_path)] == ["done"]
    assert carry_out([run_of(tmp_path, "trials=1", "save_model=true")]) == []
    assert list((tmp_path / "models").iterdir())


def test_a_metric_that_is_not_among_the_scores_is_recorded(tmp_path):
    words = {
        "kappa": ["loss=metric", "loss.metric=kappa"],
        "kappa_ce": ["loss=metric_ce", "loss.metric=kappa"],
        "f2": ["loss=fbeta", "loss.beta=2.0"],
        "weighted": ["loss=f1", "loss.average=weighted"],
        "f1": ["loss=f1"],
        "ce": ["loss=ce"],
    }
    shown = {}
    for name, overrides in words.items():
        assert carry_out([run_of(tmp_path / name, *overrides, "trials=1")]) == []
        ((_, record),) = recorded(tmp_path / name).items()
        shown[name] = record.scores["test"].get("trained_for")
        if name.startswith("kappa"):
            stored = np.load((tmp_path / name / record.source).with_suffix(".npz"))
            predicted = stored["test_probabilities"].argmax(-1)
            assert shown[name] == pytest.approx(cohen_kappa_score(stored["test_labels"], predicted), abs=1e-6)
    assert [name for name, score in shown.items() if score is None] == ["f1", "ce"]


def test_a_search_records_no_test_scores(tmp_path):
    """No scores, counts or probabilities of test rows, so nothing can be chosen by them."""
    assert carry_out([run_of(tmp_path, *GRID, "hyper.lr=0.01", "trials=1", "protocol.decisions=[plugin_f1]")]) == []
    for record in recorded(tmp_path).values():
        parts = {"val"} if record.stage == "search" else {"val", "test"}
        assert set(record.scores) == set(record.confusion) == parts
        assert set(record.decisions) == (set() if record.stage == "search" else {"plugin_f1"})
        stored = np.load((tmp_path / record.source).with_suffix(".npz"))
        assert set(stored) == {f"{part}_{what}" for part in parts for what in ("probabilities", "labels")}
    assert sorted(record.stage for record in recorded(tmp_path).values()) == ["search", "search", "trial"]


def test_the_search_chooses_by_the_named_rule(tmp_path, pretend):
    """val_loss is lr x batch here, lowest at 0.001 x 256; val_metric is -lr, lowest at 0.01, where there are ties."""
    by_loss, by_metric = run_of(tmp_path, *GRID), run_of(tmp_path, *GRID, "selection=val_metric")
    carry_out([by_loss])
    assert (by_loss.chosen.hyper.lr, by_loss.chosen.hyper.batch_size) == (0.001, 256)
    family = [r for r in recorded(tmp_path).values() if r.family == by_loss.science.family]
    assert records.select(family, "val_loss") == by_loss.chosen.key, "tables choose the same point"
    assert [stage for _, stage, _ in pretend.seen] == ["search"] * 4 + ["trial"] * 2
    assert [seed for _, _, seed in pretend.seen] == [1000] * 4 + [0, 1]
    pretend.seen.clear()
    carry_out([by_metric])
    assert by_metric.chosen.hyper.lr == 0.01
    assert [stage for _, stage, _ in pretend.seen] == ["trial"] * 2  # the search was already recorded


def test_halving_trains_the_best_in_full(tmp_path, pretend):
    """Of 4 points 2 continue, then 1; the last is trained in full, and only its family holds the trials."""
    halving = ["search=halving", "search.factor=2", "search.epochs=1", "search.rounds=2", "protocol.max_epochs=8"]
    run = run_of(tmp_path, *GRID, *halving)
    carry_out([run])
    assert [stage for _, stage, _ in pretend.seen] == ["search"] * (4 + 2 + 1) + ["trial"] * 2
    epochs = [r.config.protocol.max_epochs for r in recorded(tmp_path).values() if r.stage == "search"]
    assert sorted(epochs) == [1, 1, 1, 1, 2, 2, 8]
    family = [r for r in recorded(tmp_path).values() if r.family == run.chosen.family]
    assert records.select(family, "val_loss") == run.chosen.key
    assert (run.chosen.hyper.lr, run.chosen.hyper.batch_size) == (0.001, 256)


def test_a_search_ranks_its_points_by_its_own_seeds_only(tmp_path, pretend):
    """An interrupted search with equal budgets leaves a second seed of the best point, which must not count here."""
    run = run_of(tmp_path, *GRID, "loss=ce")
    best = run.science.with_grid_point({"lr": 0.001, "batch_size": 256})
    records.write(tmp_path, records.Record(best, 1001, "search", best=Best(99.0, 0.0)))
    carry_out([run])
    assert (run.chosen.hyper.lr, run.chosen.hyper.batch_size) == (0.001, 256)


def test_runs_share_one_queue(tmp_path, pretend, monkeypatch):
    """If the second run's jobs end first, its trials begin before the first run has finished its search."""

    def last_first(function, queue, place):
        while queue:
            job = queue.pop()
            yield job, function(job)

    monkeypatch.setitem(executors.RUNNERS, "inline", last_first)
    carry_out([run_of(tmp_path, *GRID, f"loss={loss}") for loss in ("f1", "ce")])
    assert [(loss, stage) for loss, stage, _ in pretend.seen] == (
        [("ce", "search")] * 4 + [("ce", "trial")] * 2 + [("f1", "search")] * 4 + [("f1", "trial")] * 2
    )


def test_a_lost_search_stops_only_its_own_run(tmp_path, pretend, capsys):
    pretend.broken.add("ce")
    runs = [run_of(tmp_path, *GRID, f"loss={loss}") for loss in ("ce", "f1")]
    failures = carry_out(runs)
    assert failures == ["digits ce: broken"] * 2  # one job per batch size
    assert capsys.readouterr().err.count("failed: digits ce: broken") == 2
    assert (runs[0].chosen, runs[0].trials) == (None, [])
    assert len(recorded(tmp_path)) == 4 + 2
    pretend.broken.clear()
    assert carry_out([run_of(tmp_path, *GRID, "loss=ce")]) == []
    assert len(recorded(tmp_path)) == 2 * (4 + 2)


def test_force_repeats_everything_and_takes_nothing_from_old_records(tmp_path, pretend):
    carry_out([run_of(tmp_path, *GRID)])
    pretend.seen.clear()
    run = run_of(tmp_path, *GRID, "force=true")
    carry_out([run])
    assert len(pretend.seen) == 4 + 2
    assert run.chosen.hyper.batch_size == 256
    pretend.broken.add("f1")
    again = run_of(tmp_path, *GRID, "force=true")
    assert set(carry_out([again])) == {"digits f1: broken"}
    assert again.chosen is None


def test_a_broken_record_is_repeated_and_an_export_counts_as_done(tmp_path, pretend):
    carry_out([run_of(tmp_path, "trials=3")])
    next((tmp_path / "runs").rglob("seed-1.json")).write_text("{")
    pretend.seen.clear()
    with pytest.warns(UserWarning, match="not a record"):
        carry_out([run_of(tmp_path, "trials=3")])
    assert [seed for _, _, seed in pretend.seen] == [1]
    records.export(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    pretend.seen.clear()
    carry_out([run_of(tmp_path, "trials=3")])
    assert pretend.seen == []


def test_a_failed_trial_is_named_and_recorded_and_not_repeated(tmp_path, monkeypatch, capsys):
    def train_in_turn(trials, splits, **_):
        yield [Outcome(t, "failed", "diverged in epoch 1", "diverged", 1, 0.1, Best(), {}) for t in trials], None

    monkeypatch.setattr(engine, "train_in_turn", train_in_turn)
    line = "digits f1 seed 0: diverged in epoch 1"
    assert carry_out([run_of(tmp_path, "trials=1")]) == [line]
    assert f"failed: {line}" in capsys.readouterr().err
    (record,) = recorded(tmp_path).values()
    assert (record.status, record.error) == ("failed", "diverged in epoch 1")
    assert carry_out([run_of(tmp_path, "trials=1")]) == []


def test_an_error_in_one_job_does_not_stop_the_others(tmp_path, monkeypatch):
    real = engine.train_in_turn

    def train_in_turn(trials, splits, **options):
        if trials[0].seed == 0:
            raise MemoryError("no room")
        return real(trials, splits, **options)

    monkeypatch.setattr(engine, "train_in_turn", train_in_turn)
    monkeypatch.setattr(scheduler, "population_size", lambda config, device, trials: 1)
    assert carry_out([run_of(tmp_path, "trials=2")]) == ["digits f1: MemoryError: no room"]
    assert [seed for _, seed in recorded(tmp_path)] == [1]


def test_a_checkpoint_stays_until_all_its_trials_are_recorded(tmp_path, monkeypatch):
    """A trial that cannot be written does not affect its population, and its training can be resumed."""
    monkeypatch.setattr(engine, "CHECKPOINT_SECONDS", 0)
    write = records.write

    def full(folder, record, *rest, **options):
        if record.seed == 1:
            raise OSError("no space")
        return write(folder, record, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(records, "write", full)
        assert carry_out([run_of(tmp_path, "trials=3")]) == ["digits f1: OSError: no space"]
    assert sorted(seed for _, seed in recorded(tmp_path)) == [0, 2]
    assert list(tmp_path.rglob("*.safetensors"))
    assert carry_out([run_of(tmp_path, "trials=3")]) == []
    assert sorted(seed for _, seed in recorded(tmp_path)) == [0, 1, 2]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.fixture
def checkpointed(tmp_path):
    """A function that carries out a run up to its first checkpoint."""

    def start(*overrides):
        interruption = KeyboardInterrupt()
        ended_at_checkpoint(1, interruption, lambda: carry_out([run_of(tmp_path, *overrides)]))
        return interruption

    return start


@pytest.mark.parametrize("other", [["hyper.lr=0.0001", "trials=1"], ["seed=5", "trials=1"], ["trials=3"]])
def test_a_finished_command_leaves_the_checkpoints_of_others(other, tmp_path, checkpointed):
    assert checkpointed(*other).__notes__ == [scheduler.RESUMABLE]
    (kept,) = tmp_path.rglob("*.safetensors")
    for _ in range(2):  # the second time there is nothing to train
        assert carry_out([run_of(tmp_path, "trials=1")]) == []
        assert list(tmp_path.rglob("*.safetensors")) == [kept]
    assert carry_out([run_of(tmp_path, *other)]) == []
    assert not (tmp_path / "runs" / "checkpoints").exists()


def test_a_checkpoint_is_deleted_once_other_commands_have_recorded_its_trials(tmp_path, checkpointed):
    """Two commands share the trials of the interrupted one; the last that finishes deletes the checkpoint."""
    checkpointed("trials=2")
    for seed in (0, 1):
        assert list(tmp_path.rglob("*.safetensors"))
        assert carry_out([run_of(tmp_path, "trials=1", f"seed={seed}")]) == []
    assert not (tmp_path / "runs" / "checkpoints").exists()


def test_a_population_finds_its_checkpoint_however_the_work_is_divided(tmp_path, checkpointed, monkeypatch):
    """Here populations of one trial each: first three in one job, then the last one alone."""
    monkeypatch.setattr(engine, "population_size", lambda config, device, trials: 1)
    checkpointed("trials=3")
    (kept,) = tmp_path.rglob("*.safetensors")
    resumed, load = [], population.Population.load
    monkeypatch.setattr(population.Population, "load", lambda self, file: resumed.append(file) or load(self, file))
    assert carry_out([run_of(tmp_path, "trials=1")]) == []
    assert resumed == [kept]


def test_a_checkpoint_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    def save(self, file):
        raise OSError("no space")

    monkeypatch.setattr(engine, "CHECKPOINT_SECONDS", 0)
    monkeypatch.setattr(population.Population, "save", save)
    with pytest.warns(UserWarning, match="no checkpoint written: no space"):
        assert carry_out([run_of(tmp_path, "trials=1")]) == []
    assert len(recorded(tmp_path)) == 1


def test_data_that_change_during_a_command_are_not_recorded_as_the_old_data(tmp_path, monkeypatch):
    run = run_of(tmp_path, "trials=1")
    run.science = run.science.but(dataset=run.science.dataset.but(fingerprint="of yesterday"))
    said = "digits has changed since this command started. Rerun the command."
    assert carry_out([run]) == [f"digits f1: DataError: {said}"]
    assert not recorded(tmp_path)


def test_a_trial_that_force_trained_but_could_not_record_is_not_taken_from_its_old_record(tmp_path, monkeypatch):
    carry_out([run_of(tmp_path, *GRID)])
    write = records.write

    def full(folder, record, *rest, **options):
        if record.stage == "search" and record.config.hyper.lr == max(lrs):
            raise OSError("no space")
        return write(folder, record, *rest, **options)

    again = run_of(tmp_path, *GRID, "force=true")
    lrs = {point["lr"] for point in again.settings.grid()}
    monkeypatch.setattr(records, "write", full)
    assert set(carry_out([again])) == {"digits f1: OSError: no space"}
    assert again.chosen is None  # its search is incomplete


def test_a_full_disk_stops_training(tmp_path, pretend, monkeypatch):
    """Once results can no longer be written, nothing more is trained."""
    pretend.broken.add("ce")
    checks = []

    def check_writable(folder):
        checks.append(folder)
        if len(checks) > 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(scheduler, "check_writable", check_writable)
    with pytest.raises(OSError, match="No space left"):
        carry_out([run_of(tmp_path, *GRID, "loss=ce")])
    assert len(pretend.seen) == 1


def test_a_read_only_folder_is_reported_before_any_training(tmp_path, pretend):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written to"):
        carry_out([run_of(tmp_path / "file")])
    assert pretend.seen == []


def test_workers_tell_their_progress_and_an_interruption_leaves_no_trace_of_it(tmp_path, monkeypatch):
    """The files of a running job and of its killed worker are deleted, after the workers have ended."""
    said = []

    def interrupted(function, queue, place):
        try:
            for k, job in enumerate(queue):
                Epoch(1.0 + k, 2, 3, 0.5 + k / 10).write(Path(job.progress, f"{k}.json"))
            said.append(scheduler.running(Path(job.progress)))
            yield queue.popleft(), Finished()
            raise KeyboardInterrupt
        finally:
            assert Path(job.progress).exists()

    monkeypatch.setitem(executors.RUNNERS, "processes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out([run_of(tmp_path, "trials=4", "executor=processes", "executor.slots=2")])
    assert said == ["6 running (epoch 3), best validation score 0.700"]
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_jobs_are_cut_alike_before_and_after_an_interruption(tmp_path):
    """A checkpoint belongs to exactly its population's trials, so finished trials are removed after cutting jobs."""
    run = run_of(tmp_path, "trials=10")
    run.chosen = run.science
    stage, place = run.trials, executors.Place(Executor(name="processes"), (None, None))
    before = scheduler.cut(stage, stage, run, 0, place, place.width)
    after = scheduler.cut(stage, stage[5:], run, 0, place, place.width)
    seeds = [[trial.seed for trial in job.trials] for job in before]
    assert seeds == [[0, 1, 2, 3, 4], [5, 6, 7], [8], [9]]
    assert after == before[1:]
    assert pickle.loads(pickle.dumps(before)) == before  # any executor can pickle them


def test_a_job_can_run_in_another_folder(tmp_path, monkeypatch):
    """All its paths are absolute, and the record has the path as it was typed."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("my.csv").write_text("\n".join(["x,y", *(f"{k / 7},{k % 2}" for k in range(40))]))
    file = ["dataset=csv", "dataset.path=my.csv", "dataset.target=y", "dataset.limit=null"]
    run = run_of("results", *file, "data_dir=data", "trials=1")
    run.chosen = run.science
    place = executors.Place(Executor(name="processes"), (None,))
    (job,) = scheduler.cut(run.trials, run.trials, run, 0, place, 1)
    assert job.settings.data_dir == str(tmp_path / "here" / "data")
    monkeypatch.chdir(tmp_path)
    assert run_job(job).failures == []
    (record,) = recorded(tmp_path / "here" / "results").values()
    assert record.config.dataset.options["path"] == "my.csv"
    assert record.key == run.science.key


def test_with_many_runs_each_stays_on_one_worker(tmp_path):
    """With eight runs per worker, a run's trials stay together; with fewer they are distributed."""
    place = executors.Place(Executor(name="processes"), (None, None))
    runs = [run_of(tmp_path, "trials=4", f"hyper.lr={0.001 * k}") for k in range(1, 17)]
    for count, jobs in ((16, 16), (2, 2 * 3)):
        plan = scheduler.Scheduler(runs[:count], scheduler.Ledger(runs[0].settings), place)
        assert len(plan.start()) == jobs


def test_populations_are_as_wide_as_the_cache_allows(tmp_path):
    run = run_of(tmp_path, "trials=10", "model.hidden=[512,256,128]", "hyper.batch_size=256")
    run.chosen = run.science
    found = scheduler.cut(run.trials, run.trials, run, 0, executors.Place(Executor(name="inline")), 1)
    widest = engine.population_size(run.science, devices.pick_device("cpu"), 10)
    assert max(len(job.trials) for job in found) == widest < 10


@pytest.mark.parametrize(
    ("overrides", "executor"),
    [
        (["executor=auto", "preset=quick"], "inline"),
        (["executor=auto", "preset=budget"], "processes"),
        (["executor=inline", "preset=budget"], "inline"),
        (["executor=processes", "preset=quick"], "processes"),
    ],
)
def test_auto_uses_processes_if_there_is_work_for_them(tmp_path, monkeypatch, overrides, executor):
    monkeypatch.setattr(executors, "slots", lambda device: [None, None])
    asked = settings([*TINY, f"results_dir={tmp_path}", *overrides])
    much = asked.preset.name != "quick"
    assert executors.choose_place(asked, much).executor.name == executor
    monkeypatch.setattr(executors, "slots", lambda device: [None])
    assert executors.choose_place(asked.but(executor=Executor(name="auto")), much).executor.name == "inline"


def test_a_file_that_has_changed_is_loaded_again(tmp_path, monkeypatch):
    options = {"name": "csv", "kind": "table", "path": "my.csv", "target": "y"}
    for folder, rows in (("a", 20), ("b", 30), ("b", 40)):
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        lines = [f"{k / 7},{k % 2}" for k in range(rows)]
        Path("my.csv").write_text("\n".join(["x,y", *lines]))
        assert len(runs.load(DatasetSection(**options), None).labels) == rows
    assert runs.load(DatasetSection(**options), None) is runs.load(DatasetSection(**options), None)
    before = runs.state_of(tmp_path)
    Path("new.png").touch()
    assert runs.state_of(tmp_path) != before, "also an image of a folder"


def test_a_run_keeps_the_notes_on_its_file(tmp_path):
    """Several datasets would have to be loaded again for them: only the last one stays in memory."""
    (tmp_path / "my.csv").write_text("\n".join(["x,age,y", *(f"{k / 7},,{k % 2}" for k in range(40))]))
    run = run_of(tmp_path, "dataset=csv", f"dataset.path={tmp_path}/my.csv", "dataset.target=y", "dataset.limit=null")
    (note,) = run.notes
    assert note == "csv: column 'age' is not used: it is empty"


def test_trials_with_the_same_rows_share_them_in_memory():
    loaded = runs.load(DatasetSection(name="digits", kind="table", limit=120), None)
    trials = [
        Trial(science(split={"seed": split, "folds": folds}), seed)
        for split, folds in ((0, None), ("trial", None), (0, 2))
        for seed in range(4)
    ]
    splits = runs.splits_of(loaded, trials)
    assert [len({id(one.train.inputs) for one in splits[k : k + 4]}) for k in (0, 4)] == [1, 4]
    assert len({id(one) for one in splits[8:]}) == 2


def test_every_trial_of_bridging_the_gap_has_a_split_of_its_own(tmp_path):
    run = run_of(tmp_path, "protocol=btg", "loss=bce", "dataset.positive=3", "model=mlp_btg", "trials=3")
    carry_out([run])
    assert len({r.data["index_hash"] for r in recorded(tmp_path).values()}) == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss=fbeta", "loss.beta={77: 2}"], "77"),
        (["model=mlp_btg"], "model=mlp_btg: expected logits [n, 10], one for each class of digits, got [2, 1] for n=2"),
        (
            ["model.outputs=20"],
            "got [2, 20] for n=2; its last layer must have `outputs` units, and model.outputs is 20",
        ),
        (["loss=f1", "loss.step=lniear"], "did you mean 'linear'?"),
        (["device=cuda"], "not available here"),
    ],
)
def test_incompatible_parts_are_refused_before_any_work(tmp_path, overrides, words, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError) as error:
        run_of(tmp_path, *overrides)
    assert words in str(error.value)


NETS = """
import torch
from torch import nn

class Wide(nn.Sequential):
    def __init__(self, inputs_shape, outputs, width=12):
        super().__init__(nn.Flatten(), nn.Linear(64, width))

class Two(Wide):
    def forward(self, x):
        return super().forward(x), x

class Broken(Wide):
    def forward(self, x):
        return x.nothing

class Pairs(nn.Linear):
    def __init__(self, inputs_shape, outputs):
        super().__init__(inputs_shape[-1], outputs)

def made(inputs_shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
"""
CUSTOM = [word for word in TINY if not word.startswith("model")] + ["loss=ce", "trials=1", "model=custom"]


@pytest.fixture
def nets(tmp_path, monkeypatch):
    """A user's networks, in a module of their own."""
    (tmp_path / "own_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    yield [*CUSTOM, f"results_dir={tmp_path / 'results'}"]
    sys.modules.pop("own_nets", None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.target=own_nets.Wide"], "expected logits [n, 10], one for each class of digits, got [2, 12] for n=2"),
        (["model.target=own_nets.Two"], "expected logits [n, 10], one for each class of digits, got ['tuple']"),
        (["model.target=own_nets.Broken"], "model.target=own_nets.Broken: it fails for inputs [2, 64]; AttributeError"),
        (["model.target=own_nets.made", "save_model=true"], "save_model=true: model.target 'own_nets.made': expected"),
    ],
)
def test_a_users_network_that_does_not_fit_is_refused_before_any_work(nets, overrides, words):
    with pytest.raises(ConfigError) as error:
        Run.of(settings([*nets, *overrides]))
    assert words in str(error.value)


def test_a_users_network_that_fits_is_accepted(nets):
    Run.of(settings([*nets, "model.target=own_nets.Wide", "model.parameters={width: 10}", "save_model=true"]))
    Run.of(settings([*nets, "model.target=own_nets.made"]))
    graphs = SimpleNamespace(classes=("a", "b"), inputs=torch.zeros(4, 10, 3), name="graphs")
    runs.check_network(settings([*nets, "model.target=own_nets.Pairs"]), graphs)  # logits [n, pairs, d]


def test_code_that_changes_before_a_worker_imports_it_is_not_recorded_as_the_old_code(nets, tmp_path):
    run = Run.of(settings([*nets, "model.target=own_nets.made"]))
    (tmp_path / "own_nets.py").write_text(NETS + "\n# changed")
    del sys.modules["own_nets"]  # as in a worker, which imports it now
    assert carry_out([run]) == ["digits ce: ConfigError: the code of own_nets.made has changed since this command "
                                "started. Rerun the command."]  # fmt: skip
    assert not recorded(tmp_path / "results")


def test_code_edited_after_its_import_is_refused_until_it_is_imported_again(nets, tmp_path):
    before = Run.of(settings([*nets, "model.target=own_nets.made"]))
    (tmp_path / "own_nets.py").write_text(NETS + "\n# changed")
    with pytest.raises(ConfigError, match=r"own_nets.py has changed since it was imported. Restart Python"):
        Run.of(settings([*nets, "model.target=own_nets.made"]))
    assert carry_out([before]) == []  # it still trains with the code that it was planned with
    importlib.reload(sys.modules["own_nets"])
    after = Run.of(settings([*nets, "model.target=own_nets.made"]))
    assert after.science.model.code != before.science.model.code
    assert carry_out([after]) == []
    assert len(recorded(tmp_path / "results")) == 2


def test_the_gpu_of_a_cluster_need_not_exist_here(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elsewhere = ("executor=ray executor.gpus=1", "executor=submitit executor.gpus=1", "executor=submitit")
    for executor in elsewhere:  # executor.slurm may ask for a GPU
        run = run_of(tmp_path, "device=cuda", *executor.split())
        run.chosen = run.science
        assert scheduler.cut(run.trials, run.trials, run, 0, executors.Place(run.settings.executor), 1)
    for executor in ("executor=submitit executor.cluster=local", "executor=ray"):
        with pytest.raises(ConfigError, match="not available here"):
            run_of(tmp_path, "device=cuda", *executor.split())


def test_the_plan_is_what_runs(tmp_path, pretend):
    for overrides in (["trials=3"], GRID, [*GRID, "search=halving"], [*GRID, "loss=ce", "search.equal_budget=true"]):
        pretend.seen.clear()
        run = run_of(tmp_path / str(len(overrides)), *overrides)
        carry_out([run])
        assert len(pretend.seen) == protocols.planned(run.settings)
