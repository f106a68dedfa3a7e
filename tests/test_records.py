"""Records: identity, atomic files, queries, export, selection."""

import gc
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from east.lab import files
from east.lab.experiment import records
from east.lab.experiment.ledger import Ledger
from east.lab.experiment.record import Record
from east.lab.experiment.records import PREFIXES
from east.lab.settings import identity
from east.lab.settings.command import Command
from east.lab.settings.compose import settings
from east.lab.training.population import Trial
from east.lab.training.provenance import provenance
from east.lab.training.scores import Best, Cells
from tests.made import GOLDEN, science

ROOT = Path(__file__).resolve().parents[1]


def done(results_dir):
    """(key, seed) -> status of all trials."""
    return {(found.key, found.seed): found.status for found in records.scan(results_dir) if found.stage == "trial"}


def config(loss="f1", lr=0.001, r=0.9, **dataset):
    return {
        "dataset": {"name": "mammography", "kind": "table", "limit": None, "fingerprint": "abc", **dataset},
        "split": {"seed": 0, "fractions": [0.64, 0.16, 0.2], "stratify": False},
        "model": {"name": "mlp", "hidden": [512, 256, 128]},
        "loss": {"name": loss, "_target_": "east.losses.MetricLoss", "metric": "f1"},
        "annealing": {"name": "geometric", "schedule": "geometric", "T0": 0.2, "r": r},
        "protocol": {"name": "east", "optimizer": "adamw", "patience": 50},
        "hyper": {"lr": lr, "batch_size": 256, "dropout": 0.25, "weight_decay": 0.01, "clip": None},
        "preset": "paper",
    }


def record(seed=0, score=0.75, stage="trial", best=None, status="done", **kwargs):
    return Record(
        config=science(config(**kwargs)),
        seed=seed,
        stage=stage,
        data={"name": "mammography", "fingerprint": "abc", "sizes": [6, 2, 2]},
        confusion={"val": [[1, 0], [1, 0]], "test": [[1, 0], [0, 1]]},
        scores={"val": {"auroc": score - 0.1}, "test": {"auroc": score}},
        decisions={"thresholds": {"at": [0.4, 0.6], "confusion": {"test": [[[1, 0], [0, 1]], [[1, 0], [1, 0]]]}}},
        best=best or Best(val_loss=0.2, val_metric=0.7, temperature=0.1, epoch=3),
        epochs=100,
        status=status,
        history={"epoch": list(range(100)), "val_loss": [1 / (i + 3) for i in range(100)]},
    )


def test_the_key_depends_only_on_the_science():
    base = config()
    same = [
        {**base, "preset": "budget"},
        {**base, "hyper": {**base["hyper"], "batch_size": 256.0}},
        {**base, "split": {**base["split"], "fractions": (0.64, 0.16, 0.2)}},
        dict(reversed(base.items())),
        config(root="/somewhere", path="/a/file"),  # the fingerprint identifies the data, not the path
    ]
    assert {identity.key(other) for other in same} == {identity.key(base)}
    different = [config(lr=0.01), config(loss="ce"), config(limit=100), config(fingerprint="def"), config(r=0.8)]
    assert len({identity.key(other) for other in [base, *different]}) == 6
    assert identity.family(config(lr=0.01, r=0.8)) == identity.family(base) != identity.family(config(loss="ce"))


def test_the_key_is_stable_across_processes_and_versions():
    """A changed hash orphans every result; a deliberate change must raise SCHEMA."""
    assert identity.SCHEMA == 1
    assert (
        identity.key({"dataset": {"name": "digits"}, "loss": {"name": "f1"}, "hyper": {"lr": 1e-3}}) == "d696683fdb13"
    )


def test_a_record_survives_a_round_trip_at_its_path(tmp_path):
    one = record()
    file = records.write(tmp_path, one)
    assert (
        file
        == tmp_path / "runs" / "mammography" / "f1" / one.key / "seed-0.json"
        == records.path(tmp_path, one.config, 0)
    )
    found = records.read(file)
    assert found.but(scores=one.scores, decisions=one.decisions) == one
    assert (found.scores["test"]["auroc"], found.scores["test"]["f1_pos"]) == (0.75, 1.0)
    assert json.loads(file.read_text())["key"] == one.key
    assert file.read_text().count("\n") == 3, "the history is the second line, the digest the third"


def test_numpy_numbers_are_stored_plainly_and_nan_as_null(tmp_path):
    one = record(best=Best(val_loss=np.float32(0.5), val_metric=float("nan"), epoch=np.int64(3)))
    one.confusion = {"test": np.eye(2, dtype=np.int64)}
    stored = records.read(records.write(tmp_path, one))
    assert stored.best == Best(val_loss=0.5, epoch=3)
    assert stored.confusion == {"test": [[1, 0], [0, 1]]}
    with pytest.raises(ValueError, match="serializing to JSON"):
        records.write(tmp_path, record(best=Best(val_loss=object())), force=True)


def test_done_records_are_never_overwritten_without_force_but_failed_and_broken_ones_are(tmp_path):
    file = records.write(tmp_path, record(status="failed"))
    records.write(tmp_path, record(score=0.1))
    with pytest.raises(FileExistsError, match="force=true"):
        records.write(tmp_path, record(score=0.2))
    assert records.read(file).scores["test"]["auroc"] == 0.1
    records.write(tmp_path, record(score=0.3), force=True)
    assert records.read(file).scores["test"]["auroc"] == 0.3
    file.write_text(file.read_text()[:-5])
    records.write(tmp_path, record(score=0.4))
    assert records.read(file).scores["test"]["auroc"] == 0.4


def test_arrays_are_stored_beside_the_record_and_named_by_their_digest(tmp_path):
    stored = {"test_probabilities": np.eye(2, dtype=np.float32), "test_labels": np.arange(2)}
    file = records.write(tmp_path, record(), arrays=stored)
    with np.load(file.with_suffix(".npz"), allow_pickle=False) as found:
        assert found["test_probabilities"].dtype == np.float32
        assert {name: values.tolist() for name, values in found.items()} == {n: v.tolist() for n, v in stored.items()}
    content = file.with_suffix(".npz").read_bytes()
    assert records.read(file).arrays == hashlib.blake2b(content, digest_size=16).hexdigest()


def test_a_record_never_appears_without_its_arrays(tmp_path):
    with pytest.raises(ValueError, match="inhomogeneous"):
        records.write(tmp_path, record(), arrays={"broken": [[1], [1, 2]]})
    assert done(tmp_path) == {}
    assert not [file for file in tmp_path.rglob("*") if file.is_file()], "and nothing half-written stays"


def test_temporary_files_of_ended_processes_are_swept_and_those_of_living_ones_stay(tmp_path):
    folder = records.write(tmp_path, record()).parent
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {
        "dead": f".seed-1.json.{files.machine()}-{ended.pid}.2.tmp",
        "alive": f".seed-2.json.{files.machine()}-{os.getpid()}.2.tmp",
        "elsewhere": ".seed-3.json.00000000-1.2.tmp",
        "old": ".seed-4.json.00000000-1.2.tmp",
    }
    for name in names.values():
        (folder / name).write_text('{"half":')
    os.utime(folder / names["old"], (time.time() - 2 * files.STALE_SECONDS,) * 2)
    (tmp_path / "models" / f".m.{files.machine()}-{ended.pid}.2.tmp").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "b" / "c").mkdir(parents=True)
    files.sweep(tmp_path)
    assert {name for name in names if (folder / names[name]).exists()} == {"alive", "elsewhere"}
    assert not (tmp_path / "models").exists(), "folders without content go"
    assert not (tmp_path / "runs" / "a").exists()
    assert len(records.load(tmp_path)) == 1


def test_the_frame_has_one_flat_row_per_trial(tmp_path):
    for seed in range(3):
        records.write(tmp_path, record(seed=seed, score=0.7 + seed / 100))
    frame = records.load(tmp_path).sort_values("seed")
    row = frame.iloc[2]
    assert (row.dataset, row.loss, row.model, row.preset, row["hyper.lr"]) == (
        "mammography",
        "f1",
        "mlp",
        "paper",
        0.001,
    )
    assert list(frame["test.auroc"]) == [0.7, 0.71, 0.72]
    assert list(frame["test.f1_pos"]) == [1.0] * 3
    assert list(frame["thresholds.test.f1_pos"]) == [0.5] * 3
    assert row["val.recall"] == [1.0, 0.0]
    assert row["best.val_loss"] == 0.2
    assert row.confusion["test"] == [[1, 0], [0, 1]]
    assert (tmp_path / row.source).is_file()


def test_a_folder_without_records_is_empty(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a results folder"):
        records.load(tmp_path / "nowhere")
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    assert records.load(tmp_path / "empty").empty
    assert done(tmp_path / "nowhere") == {}
    assert records.export(tmp_path) == {}


def test_an_export_counts_as_done_in_a_fresh_clone(tmp_path):
    here, clone = tmp_path / "here", tmp_path / "clone"
    for seed in (0, 1, 1000):
        records.write(here, record(seed=seed, stage="search" if seed == 1000 else "trial"), arrays={"x": np.zeros(2)})
    records.write(here, record(seed=2, status="failed"))
    records.write(here, record(seed=1, stage="search"))  # a trial has the same seed
    assert records.export(here) == {"mammography": 4}
    clone.mkdir()
    (here / "records").rename(clone / "records")
    assert set(done(clone).values()) == {"done"}
    assert len(records.scan(clone)) == 4
    ours, theirs = records.load(here), records.load(clone)
    assert sorted(theirs["val.auroc"]) == sorted(ours[ours.status == "done"]["val.auroc"])
    lines = [json.loads(line) for line in (clone / "records" / "mammography.jsonl").read_text().splitlines()]
    assert sorted(len(line["history"].get("epoch", [])) for line in lines) == [0, 0, 40, 40]
    assert lines[0]["history"]["epoch"][0] == 0
    assert lines[0]["history"]["epoch"][-1] == 99


def test_an_export_is_stable_deduplicated_and_keeps_earlier_exports(tmp_path):
    records.write(tmp_path, record(seed=5))
    records.export(tmp_path)
    for folder in (tmp_path / "runs").glob("*/*/*"):
        for file in folder.iterdir():
            file.unlink()
    records.write(tmp_path, record(seed=1))
    file = tmp_path / "records" / "mammography.jsonl"
    old = file.read_text()
    assert records.export(tmp_path) == {"mammography": 2}
    assert old in file.read_text(), "one line is added, none is changed"
    once = file.read_text()
    records.export(tmp_path)
    assert file.read_text() == once


def test_an_export_keeps_the_line_of_a_file_that_became_unreadable(tmp_path):
    """What was exported earlier is then all that is left."""
    file = records.write(tmp_path, record(seed=3))
    records.write(tmp_path, record(seed=4))
    assert records.export(tmp_path) == {"mammography": 2}
    before = (tmp_path / "records" / "mammography.jsonl").read_bytes()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.warns(UserWarning, match="seed-3.json is not a record"):
        assert records.export(tmp_path) == {"mammography": 2}
    assert (tmp_path / "records" / "mammography.jsonl").read_bytes() == before


def test_an_export_keeps_lines_that_it_cannot_read(tmp_path):
    for seed in range(3):
        records.write(tmp_path, record(seed=seed))
    records.export(tmp_path)
    file = tmp_path / "records" / "mammography.jsonl"
    good, newer, damaged = file.read_bytes().splitlines(keepends=True)
    newer, damaged = newer.replace(b'"schema":1', b'"schema":2'), damaged[:-50]
    file.write_bytes(newer + good + damaged)
    for old in (tmp_path / "runs").rglob("*.json"):
        old.unlink()
    for _ in range(2):
        assert records.export(tmp_path) == {"mammography": 1}
        assert set(file.read_bytes().splitlines()) == {good.rstrip(), newer.rstrip(), damaged.rstrip()}


@pytest.mark.parametrize("stage", PREFIXES)
def test_a_trial_with_a_record_of_a_newer_version_is_not_trained_again(stage, tmp_path):
    one = record(stage=stage)
    file = records.write(tmp_path, one)
    file.write_bytes(file.read_bytes().replace(b'"schema":1', b'"schema":2'))
    assert Ledger(settings(Command({"results_dir": str(tmp_path)}))).missing([Trial(one.config, one.seed, stage)]) == []


@pytest.mark.parametrize("classes", [257, 3000])
def test_matrices_of_many_classes_are_stored_as_cells(classes, tmp_path):
    """Dense matrices of 8,300 classes made a file too large to read."""
    cells = Cells(classes, [[3, classes - 1, 7], [200, 0, 1]])
    rules = {"plugin_f1": {"rule": None, "confusion": {"test": cells}, "scores": {}}}
    older = {"val": [*cells]} if classes < 300 else {}  # a run's file of an older version has the dense matrix
    file = records.write(tmp_path, record().but(confusion={"test": cells, **older}, decisions=rules))
    assert older or file.stat().st_size < 10_000
    assert records.export(tmp_path) == {"mammography": 1}
    assert (tmp_path / "records" / "mammography.jsonl").stat().st_size < 10_000
    (scanned,) = records.scan(tmp_path)
    file.unlink()
    (exported,) = records.scan(tmp_path)
    for read in (scanned, exported):
        matrices = (*read.confusion.values(), *read.decisions["plugin_f1"]["confusion"].values())
        assert all(matrix.cells == cells.cells and len(matrix) == classes for matrix in matrices)


def test_a_done_export_beats_a_failed_run(tmp_path):
    records.write(tmp_path, record())
    records.export(tmp_path)
    records.write(tmp_path, record(status="failed"), force=True)
    assert set(done(tmp_path).values()) == {"done"}


def point(lr, val_loss, val_metric, seed=1000, **kwargs):
    return record(lr=lr, seed=seed, stage="search", best=Best(val_loss, val_metric), **kwargs)


def test_selection_follows_either_rule():
    search = [point(0.1, 0.30, 0.2), point(0.01, 0.20, 0.3), point(0.001, float("nan"), 0.1, status="failed")]
    assert records.select(search, "val_loss") == search[1].key
    assert records.select(search, "val_metric") == search[0].key
    with pytest.raises(ValueError, match="did you mean 'val_loss'"):
        records.select(search, "val_los")


NAN = float("nan")
SEARCHES = {
    "the seeds of a point are averaged": ([(0.1, 0.1), (0.1, 0.5), (0.01, 0.25), (0.01, 0.25)], [0.01]),
    "numbers that are not finite are ignored, ties broken by key": (
        [(0.1, NAN), (0.01, 0.2), (0.001, 0.2)],
        [0.01, 0.001],
    ),
    "the lowest loss is chosen": ([(0.1, 0.3), (0.01, 0.2)], [0.01]),
}


@pytest.mark.parametrize("kind", SEARCHES)
def test_the_point_with_the_lowest_mean_loss_is_selected(kind, tmp_path):
    points, best = SEARCHES[kind]
    search = [point(lr, loss, 0.5, seed=1000 + k) for k, (lr, loss) in enumerate(points)]
    trial = record(lr=0.5, best=Best(0.0, 1.0))  # selection never looks at trials
    assert records.select([*search, trial]) == min(point(lr, 0, 0).key for lr in best)


def test_without_a_search_the_only_setting_is_selected():
    assert records.select([record(seed=0), record(seed=1)]) == record().key
    assert records.select([record(lr=0.1), record(lr=0.2)]) is None, "two settings and no search: nothing to choose by"
    assert records.select([]) is None


def test_concurrent_writers_leave_complete_files(tmp_path):
    """Four processes write the same forty trials at once; every file is complete and was written once."""
    forks = multiprocessing.get_context("fork")  # fork, because a new interpreter would import torch first
    together = forks.Barrier(4)

    def write_forty():
        together.wait(60)
        written = 0
        for seed in range(40):
            with suppress(FileExistsError):
                records.write(tmp_path, record(seed=seed))
                written += 1
        sys.exit(written)

    writers = [forks.Process(target=write_forty) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert sum(writer.exitcode for writer in writers) == 40
    assert len(done(tmp_path)) == 40
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    ("count", "seconds"), [(2_000, 2.5), pytest.param(10_000, 5, marks=[pytest.mark.slow, pytest.mark.nightly])]
)
def test_ten_thousand_records_load_within_five_seconds(tmp_path, count, seconds):
    """By day a fifth of them."""
    template = records.write(tmp_path, record())
    text = "".join(template.read_text().splitlines(keepends=True)[:2]).rstrip(",\n") + "}\n"  # without the digest
    for seed in range(1, count):
        template.with_name(f"seed-{seed}.json").write_text(text.replace('"seed":0,"stage"', f'"seed":{seed},"stage"'))
    gc.collect()  # what earlier tests left behind is not ours to pay for
    start = time.process_time()  # CPU time of this process, so that a busy machine does not matter
    frame = records.load(tmp_path)
    elapsed = time.process_time() - start
    assert len(frame) == count
    assert elapsed < seconds


def test_bad_names_and_stages_are_refused(tmp_path):
    with pytest.raises(ValueError, match="plain name"):
        records.path(tmp_path, science(config(name="../../etc")), 0)
    with pytest.raises(ValueError, match=r"loss\.name"):
        identity.key({"dataset": {"name": "digits"}})


def test_provenance_names_versions_and_commit():
    found = provenance()
    assert {"python", "east", "torch", "numpy"} <= found["versions"].keys()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (found["git"] or "").removesuffix("+changes") == head[:12]  # both are empty where there is no repository


def test_a_frame_hides_the_test_scores_of_a_search(tmp_path):
    """Records of early searches hold test scores, which must not be visible to anyone choosing a setting."""
    matrices = {"val": [[1, 1], [1, 1]], "test": [[2, 0], [0, 2]]}
    rules = {"plugin_f1": {"confusion": matrices}}
    for seed, stage in [(0, "trial"), (1000, "search")]:
        records.write(tmp_path, record(seed=seed, stage=stage).but(confusion=matrices, decisions=rules))
    trial, search = (records.load(tmp_path).set_index("stage").loc[stage] for stage in ("trial", "search"))
    assert (trial["test.f1_pos"], trial["plugin_f1.test.f1_pos"], trial["confusion"]) == (1.0, 1.0, matrices)
    assert np.isnan(search["test.f1_pos"])
    assert np.isnan(search["plugin_f1.test.f1_pos"])
    assert search["confusion"] == {"val": matrices["val"]}
    assert search["val.f1_pos"] == search["plugin_f1.val.f1_pos"] == 0.5


def test_an_export_of_an_older_version_is_read_and_becomes_slim(tmp_path):
    """Its lines hold every score, and each its own config: nothing but the lines changes."""
    shutil.copytree(GOLDEN / "older", tmp_path / "older")
    slim = {one.identity: one for one in records.scan(GOLDEN)}
    for _ in range(2):
        older = records.scan(tmp_path / "older")
        assert len(older) == 8
        for one in older:
            same = slim[one.identity]
            assert one == same.but(source=one.source, history=one.history)
            assert one.decisions.keys() == same.decisions.keys()
        records.export(tmp_path / "older")
    lines = {line for file in (GOLDEN / "records").glob("*.jsonl") for line in file.read_bytes().splitlines()}
    assert {line for file in (tmp_path / "older").rglob("*.jsonl") for line in file.read_bytes().splitlines()} <= lines


def test_scores_are_those_of_the_matrices(tmp_path):
    """A record cannot claim others; those that do not follow from a matrix are kept as they are."""
    claimed = {"val": {}, "test": {"f1_macro": -1.0, "auroc": 0.75, "trained_for": -17.0}}
    records.write(tmp_path, record().but(scores=claimed, confusion={"test": [[3, 1], [2, 4]]}))
    (found,) = records.scan(tmp_path)
    assert found.scores["test"]["f1_macro"] == pytest.approx((6 / 9 + 8 / 11) / 2)
    assert (found.scores["test"]["auroc"], found.scores["test"]["trained_for"]) == (0.75, -17.0)
    assert found.decisions["thresholds"]["scores"]["test"]["accuracy"] == pytest.approx((1 + 0.5) / 2)


@pytest.mark.parametrize("positive, f1_pos", [({}, 0.4), ({"positive": 0}, 2 / 3), ({"positive": None}, None)])
def test_the_positive_class_of_several_is_stated_or_follows_from_an_older_score(tmp_path, positive, f1_pos):
    matrix = {"test": [[3, 1, 0], [0, 1, 2], [2, 0, 1]]}  # F1 by class: 2/3, 0.4, 1/3
    one = record().but(confusion=matrix, scores={"test": {"f1_pos": 0.4}}, data={"name": "x", **positive})
    records.write(tmp_path, one)
    for _ in range(2):
        (found,) = records.scan(tmp_path)
        assert found.scores["test"]["f1_pos"] == (None if f1_pos is None else pytest.approx(f1_pos))
        records.export(tmp_path)
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
