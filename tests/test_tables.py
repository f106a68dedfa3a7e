"""Tables: every published cell once, the right records in each cell, and exact text from committed records."""

import csv
import functools
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from sklearn import metrics

from east.lab.experiment import records
from east.lab.experiment.runs import Run
from east.lab.reporting import cells, papers, specs, tables
from east.lab.reporting.catalogue import Catalogue
from east.lab.reporting.writers import WRITERS
from east.lab.settings import identity
from east.lab.settings.command import Command
from east.lab.settings.compose import settings
from east.lab.settings.settings import LossSection, Science, Settings
from east.lab.training.scores import Best
from tests.made import changed, put_values, rendered

GOLDEN = Path(__file__).parent / "golden"
DAY = date(2026, 1, 2)
QUICK = specs.Spec(  # two trials of twenty epochs, as in the golden records
    name="quick",
    title="F1 against cross-entropy on embedded data",
    source="this project",
    preset="quick",
    protocol="east",
    trials=2,
    overrides={"dataset.imbalance": 10},
    rows={"F1*": {"loss": "f1"}, "CE": {"loss": "ce"}},
    columns=({"dataset": ["digits"], "metric": ["f1_macro", "accuracy", "mcc"]},),
)
EXTENSIONS = {"markdown": "md", "latex": "tex", "csv": "csv", "json": "json", "text": "txt"}


def cell(table, **where):
    """The one cell with these attributes."""
    (found,) = [c for c in table.cells if all(getattr(c, name) == value for name, value in where.items())]
    return found


@pytest.fixture(scope="module")
def east_v2_1():
    return tables.build("east_v2_1", GOLDEN, today=DAY)


# Published numbers


def test_all_341_published_cells_appear_and_none_twice():
    every = [
        c.published
        for table in [tables.build(name, "/nowhere") for name in tables.papers_tables()]
        for c in table.cells
    ]
    assert len(every) == 341
    assert None not in every
    assert len({id(p) for p in every}) == 341


@pytest.mark.parametrize(
    "paper, dataset, loss, metric, expected",
    [
        ("east_v2", "adult", "f1", "f1", "test.f1_pos"),
        ("east_v2", "adult", "rf", "f1", "test.f1_macro"),
        ("east_v2", "cifar10", "ce", "f1", "test.f1_macro"),
        ("east_v2", "caltech256", "ce", "acc", "test.balanced_accuracy"),
        ("east_v2", "caltech256", "rf", "acc", "test.accuracy"),
        ("btg", "mammography", "btg_f2", "f3", "thresholds.test.f3_pos"),
        (None, "digits", "ce", "plugin_f1.f1_macro", "plugin_f1.test.f1_macro"),
    ],
)
def test_the_papers_metrics_map_to_our_names(paper, dataset, loss, metric, expected):
    assert papers.score_of(paper, dataset, loss, metric) == expected


def test_findings_match_cells_and_have_a_status():
    for finding in papers.findings():
        assert finding.text
        assert finding.evidence
        for pattern in finding.cells:
            assert any(papers.matches(pattern, cell) for cell in papers.cells()), f"{finding.id}: {pattern}"
    ids = [finding.id for finding in papers.findings()]
    assert len(set(ids)) == len(ids)


# Which records fill a cell


def test_the_selection_rule_decides_and_an_unrun_choice_is_shown_as_not_run():
    by_loss, by_metric = (tables.build("east_v2_1", GOLDEN, rule=rule) for rule in records.RULES)
    where = {"dataset": "mammography", "row": "F1*", "column": "f1"}
    assert len(cell(by_loss, **where).values) == 5
    assert not cell(by_metric, **where).values, "the point with the lowest 1 - M has no trials"
    assert "selection rule val_metric" in by_metric.caption.lower()
    assert "east-run dataset=mammography loss=f1 protocol=east selection=val_metric" in by_metric.missing


def test_a_table_may_name_the_row_to_compare_with():
    spec = changed(tables.spec("east_v2_6"), reference="beta 1")
    pairs = tables.comparisons(tables.build(spec, GOLDEN))
    assert {(e.row, e.against) for e in pairs} == {("beta 0.25", "beta 1"), ("beta 5", "beta 1")}


def test_some_classes_of_a_dataset_are_not_the_dataset():
    found = records.scan(GOLDEN)
    whole = [r for r in found if r.config.dataset.name == "cifar10"]
    part = [r.but(confusion={"test": [row[:9] for row in r.confusion["test"][:9]]}) for r in whole]
    filled = [sum(bool(c.values) for c in tables.build("east_v2_6", scanned=some).cells) for some in (whole, part)]
    assert filled[0] > filled[1] == 0


def test_a_table_shows_the_records_of_its_preset():
    default = tables.build("east_v2_1", GOLDEN)
    acc = cell(default, dataset="mammography", row="Acc*", column="accuracy")
    assert (acc.preset, acc.marks) == ("budget", "†◊")
    assert not cell(
        tables.build("east_v2_1", GOLDEN, preset="paper"), dataset="mammography", row="Acc*", column="accuracy"
    ).values
    assert not cell(tables.build(QUICK, GOLDEN, preset="budget"), row="CE", column="mcc").values
    assert cell(tables.build(QUICK, GOLDEN), row="CE", column="mcc").marks == "‡"


@pytest.fixture(scope="module")
def standard():
    """A record of the paper's setting: F1* on Mammography."""
    key = cell(tables.build("east_v2_1", GOLDEN), dataset="mammography", row="F1*", column="f1").shown.key
    return next(r for r in records.scan(GOLDEN) if (r.key, r.seed) == (key, 0))


@pytest.mark.parametrize(
    "words",
    [
        ["dataset.limit=500"],
        ["loss.average=positive"],
        ["annealing=none"],
        ["model.hidden=[8]"],
        ["model=mlp_btg"],
        ["split.stratify=true"],
        ["protocol.patience=51"],
    ],
)
def test_records_of_other_settings_never_enter_the_papers_table(words, tmp_path):
    put(tmp_path, ["loss=f1", "preset=paper", *words])
    assert not f1_cell(tmp_path).values
    put(tmp_path, ["loss=f1", "preset=paper"])
    assert f1_cell(tmp_path).shown.settings == 1


def test_different_data_of_the_same_name_get_separate_blocks():
    """Two files of dataset=csv, or digits with different imbalance."""
    source = next(r for r in records.scan(GOLDEN) if r.config.dataset.name == "digits")
    found = []
    for imbalance, loss in [(1, "focal"), (1, "ce"), (10, "ce")]:
        config = source.config.to_json()
        config["dataset"] |= {"imbalance": imbalance, "fingerprint": f"data {imbalance}"}
        config["loss"] |= {"name": loss}
        typed = Science.model_validate(config)
        found += [source.but(config=typed, seed=seed) for seed in (0, 1)]
    built = tables.build("grid", scanned=found)
    assert list(built.blocks) == ["digits, dataset.imbalance=1", "digits, dataset.imbalance=10"]


def test_two_settings_that_both_fit_are_marked(tmp_path):
    """The same config on two states of the data: the larger one is shown and marked."""
    source = next(r for r in records.scan(GOLDEN) if r.config.loss.name == "dice")
    for fingerprint, seeds in [("old", 3), ("new", 2)]:
        config = source.config.but(dataset=source.config.dataset.but(fingerprint=fingerprint))
        for seed in range(seeds):
            records.write(tmp_path, records.Record(config=config, seed=seed, scores=source.scores))
    found = cell(tables.build("east_v2_1", tmp_path), dataset="mammography", row="Dice", column="f1")
    assert (len(found.values), found.shown.settings, found.marks) == (3, 2, "◊§")


def test_the_released_variant_asks_for_the_quirks():
    east, btg = (tables.build(name, GOLDEN, variant="released") for name in ("east_v2_1", "btg_1"))
    ce = cell(east, block="adult", row="CE", column="f1")
    assert (ce.dataset, len(ce.values), ce.published.mean) == ("adult_released", 2, 0.148)
    assert ce.gap.word == "imprecise", "two trials"
    assert cell(east, block="mammography", row="Dice", column="f1").loss == "dice_released"
    assert (
        tables.command(cell(btg, block="kaggle", row="Acc*", column="accuracy"))
        == "east-run dataset=kaggle loss=btg_released protocol=btg loss.metric=accuracy protocol.val_reduce=batch_mean"
    )
    assert cell(btg, block="kaggle", row="BCE", column="f1").score == "logit_thresholds.test.f1_pos"
    beta = cell(tables.build("east_v2_6", GOLDEN, variant="released"), row="beta 2.5", column="recall dog")
    assert (beta.request["loss.beta"], beta.published.mean) == (2.5, 0.705)


# Plan and commands


def test_an_empty_cell_says_which_command_fills_it(east_v2_1):
    found = cell(east_v2_1, dataset="mammography", row="MCC*", column="mcc")
    assert tables.command(found) == "east-run dataset=mammography loss=mcc protocol=east"
    assert tables.command(found) in rendered("east_v2_1", GOLDEN)
    beta = cell(tables.build("east_v2_4", "/nowhere"), block="caltech256, frog", row="F^R frog", column="recall frog")
    assert tables.command(beta) == "east-run dataset=caltech256 loss=fbeta protocol=east 'loss.beta={frog:5}'"


def test_the_plan_lists_each_missing_run_once():
    one_by_one = {str(run) for name in tables.papers_tables() for run in tables.plan(name, "/nowhere")}
    together = [str(run) for run in tables.plan("all", "/nowhere")]
    assert len(together) == len(set(together)), "tables share runs"
    assert set(together) == one_by_one


@pytest.mark.parametrize(
    "loss, trials, preset, planned",
    [
        ("f1", 6, "budget", False),  # five done, one failed
        ("f1", 7, "budget", True),
        ("accuracy", 3, "budget", False),
        ("accuracy", 3, "paper", True),  # budget trials do not count for the paper's preset
    ],
)
def test_trials_of_the_preset_or_a_fuller_one_count_as_done(loss, trials, preset, planned):
    runs = tables.plan(changed(tables.spec("east_v2_1"), trials=trials), GOLDEN, preset=preset)
    assert (("mammography", loss) in {(run["dataset"], run["loss"]) for run in runs}) == planned


@pytest.mark.parametrize(
    "statuses, to_do",
    [(["done"], 1), (["failed"], 1), (["done", "failed"], 0), (["failed", "failed"], 0)],
)
def test_a_failed_trial_is_not_to_do(statuses, to_do, tmp_path):
    """The same trial would fail again, so no command trains it twice. The table asks for ten, preset=quick for two."""
    table = changed(QUICK, rows={"CE": {"loss": "ce"}}, trials=10)
    words = ("dataset=digits", "loss=ce", "dataset.imbalance=10")
    for seed, status in enumerate(statuses):
        scores = {"test": dict.fromkeys(("f1_macro", "accuracy", "mcc"), 0.5)} if status == "done" else {}
        records.write(tmp_path, records.Record(science(*words, "preset=quick"), seed, scores=scores, status=status))
    other = science(*words, "preset=quick", "split.seed=3")
    for seed in range(2):
        records.write(tmp_path, records.Record(other, seed, status="failed"))  # trials that no cell shows
    assert len(tables.plan(table, tmp_path, preset="quick")) == to_do
    shown = tables.build(table, tmp_path, preset="quick").cells[0]
    assert (len(shown.values), shown.shown.failed) == (statuses.count("done"), statuses.count("failed"))


# Our own tables

OWN = ["ablation", "keel", "plugin"]


def small(name):
    """A table with one dataset per group of columns, because composing a config takes a while."""
    spec = tables.spec(name)
    first = lambda axis: dict([*axis.items()][:1]) if isinstance(axis, dict) else axis[:1]  # noqa: E731
    groups = [group.model_copy(update={"dataset": first(group.dataset)}) for group in spec.columns]
    return changed(spec, columns=groups)


@pytest.mark.parametrize("name", OWN)
def test_the_runs_that_a_table_plans_are_the_records_that_it_shows(name, tmp_path):
    """With the records that every planned run would write, no cell is empty, and none has several settings to show."""
    plan, keys = tables.plan(small(name), "/nowhere", preset="quick"), set()
    for run in plan:
        config = settings(run.but(preset="quick"))
        subset = config.dataset.options.get("set")
        plain = config.science(f"{config.dataset.name}-{subset}" if subset else config.dataset.name, "fingerprint")
        scores = {"test": dict.fromkeys(("f1_pos", "f1_macro", "accuracy", "mcc"), 0.5)}
        decisions = {f"plugin_{metric}": {"scores": scores} for metric in ("f1", "accuracy", "mcc")}
        for seed in range(2):
            records.write(tmp_path, records.Record(config=plain, seed=seed, scores=scores, decisions=decisions))
        keys.add(plain.key)
    assert len(keys) == len(plan) > 0, "every run is another experiment"
    table = tables.build(small(name), tmp_path, preset="quick")
    assert not table.missing
    assert {(c.shown.settings, len(c.values)) for c in table.cells} == {(1, 2)}
    assert {c.preset for c in table.cells if c.trains_networks} == {"quick"}
    assert {c.preset for c in table.cells if not c.trains_networks} <= {"paper"}, "a forest is trained in one way"


def test_a_table_finds_the_records_of_dataset_variants(tmp_path):
    """Records have the name of the loaded data, which is not always that of the file."""
    (tmp_path / "dataset").mkdir()
    (tmp_path / "dataset" / "digits-rare.yaml").write_text("{name: digits-rare, imbalance: 5}")
    table = changed(QUICK, overrides={}, columns=({"dataset": ["digits-rare"], "metric": ["f1_macro"]},))
    for loss in ("f1", "ce"):
        words = ["dataset=digits-rare", f"loss={loss}", "preset=quick", f"config_dir={tmp_path}"]
        config = Run.of(settings(Command.parse(words))).science
        assert config.dataset.name == "digits"
        for seed in range(2):
            records.write(tmp_path, records.Record(config=config, seed=seed, scores={"test": {"f1_macro": 0.5}}))
    assert not tables.plan(table, tmp_path, preset="quick", config_dir=str(tmp_path))


@functools.cache
def science(*words):
    """The settings of a command, for data with some fingerprint."""
    asked = settings(Command.parse(words))
    return asked.science(asked.dataset.name, "fingerprint")


def put(folder, overrides, seed=0, stage="trial", val_loss=0.3, f1=0.5, plugin=None, **more):
    """A record of mammography with the config that the overrides compose."""
    plain = science("dataset=mammography", *overrides)
    one = lambda value: {"test": dict.fromkeys(("f1_pos", "accuracy", "mcc"), value)}  # noqa: E731
    rules = {} if plugin is None else {f"plugin_{m}": {"scores": one(plugin)} for m in ("f1", "accuracy", "mcc")}
    best = Best(val_loss, val_loss)
    records.write(folder, records.Record(plain, seed, stage, scores=one(f1), decisions=rules, best=best, **more))


def test_other_cooling_rates_stay_out_of_the_papers_tables(tmp_path):
    """A rate that the preset does not search may win its own table, but is not the paper's F1*."""
    for rate, val_loss, f1 in [(0.9, 0.3, 0.6), (0.5, 0.1, 0.9)]:
        overrides = ["loss=f1", "preset=paper", f"annealing.r={rate}"]
        put(tmp_path, overrides, seed=1000, stage="search", val_loss=val_loss)
        put(tmp_path, overrides, f1=f1)
    paper = cell(tables.build("east_v2_1", tmp_path), dataset="mammography", row="F1*", column="f1")
    assert list(paper.values.values()) == [0.6]
    own = tables.build("cooling", tmp_path)
    at = {c.row: list(c.values.values()) for c in own.cells if (c.block, c.column) == ("mammography", "f1_positive")}
    assert at == {"r = 0.5": [0.9], "r = 0.7": [], "r = 0.8": [], "r = 0.9": [0.6], "r = 0.95": []}


def test_a_hyperparameter_set_by_hand_does_not_empty_a_row_that_is_not_searched(tmp_path):
    """Nor does an unfinished search. A table of all records shows the setting with the most trials, and marks it."""
    quick = ["loss=ce", "preset=quick", "search=none"]
    for seed, overrides in enumerate([[], ["hyper.lr=0.3"], ["hyper.lr=0.4"], ["hyper.lr=0.4"]]):
        put(tmp_path, [*quick, *overrides], seed=seed, f1=0.1 * (seed + 1))
    listed = cell(tables.build("grid", tmp_path), row="ce", column="f1_positive")
    assert (list(listed.values), listed.shown.settings) == ([2, 3], 3)
    assert "§" in listed.marks
    put(tmp_path, [*quick, "hyper.lr=0.5"], seed=1000, stage="search", val_loss=0.1)
    found = cell(tables.build("east_v2_1", tmp_path, preset="quick"), dataset="mammography", row="CE", column="f1")
    assert found.values == {0: 0.1}


OWN_PROTOCOL = """
name: mine
search: grid
model: {table: mlp}
hyper: {lr: 0.001, batch_size: 128, dropout: 0.25, weight_decay: 0.01}
grid: {lr: [0.01], dropout: [0.25], r: [0.9], batch_size: {table: [128]}}
"""


@pytest.mark.parametrize("text, split", [(OWN_PROTOCOL + "new_split: true\n", "trial"), (OWN_PROTOCOL, 0)])
def test_a_table_of_your_own_protocol_is_planned_and_filled(text, split, tmp_path):
    """The protocol may leave its defaults to another file or to the program, the dataset's file its kind."""
    for file, content in {"protocol/mine": text, "dataset/digits-rare": "{name: digits-rare, imbalance: 9}"}.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / f"{file}.yaml").write_text(content)
    grid = {"lr": [0.1], "dropout": [0.25], "r": [0.9], "batch_size": {"table": [64]}}
    columns = ({"dataset": ["digits-rare"], "metric": ["f1_macro"]},)
    table = changed(QUICK, protocol="mine", overrides={}, rows={"CE": {"loss": "ce"}}, columns=columns, grid=grid)
    (run,) = tables.plan(table, tmp_path, preset="quick", config_dir=str(tmp_path))
    assert run.get("protocol.grid.lr") == [0.1]
    assert run.get("protocol.grid.batch_size") == {"digits-rare": [64]}
    config = settings(run.but(preset="quick", config_dir=str(tmp_path))).science("digits", "fingerprint")
    for seed in range(2):
        records.write(tmp_path, records.Record(config=config, seed=seed, scores={"test": {"f1_macro": 0.5}}))
    (filled,) = tables.build(table, tmp_path, preset="quick", config_dir=str(tmp_path)).cells
    assert (len(filled.values), filled.shown.split) == (2, split)


def test_a_classical_model_of_your_own_does_not_count_as_the_papers_training(tmp_path):
    """Its file says so; the caption and the count of cells at the paper's protocol are about networks."""
    (tmp_path / "loss").mkdir()
    forest = "{name: forest50, _target_: east.baselines.RandomForest, trains: classical, n_estimators: 50}"
    (tmp_path / "loss" / "forest50.yaml").write_text(forest)
    put(tmp_path, ["loss=forest50", "preset=paper", f"config_dir={tmp_path}"])
    columns = ({"dataset": ["mammography"], "metric": ["f1_positive"]},)
    own = changed(QUICK, overrides={}, rows={"50 trees": {"loss": "forest50"}}, columns=columns)
    built = tables.build(own, tmp_path, config_dir=str(tmp_path))
    filled = next(c for c in built.cells if c.values)
    assert (filled.preset, filled.trains_networks) == ("paper", False)
    assert "training paper" not in built.caption


def test_records_of_an_unknown_protocol_are_listed(standard):
    """Its file is in someone else's folder."""
    other = standard.but(config=standard.config.but(protocol=standard.config.protocol.but(name="theirs")))
    assert '"theirs"' in rendered("grid", scanned=[other], format="json")


# How close to the paper's protocol a record is, judged by its values


def f1_cell(folder, **options):
    return cell(tables.build("east_v2_1", folder, **options), dataset="mammography", row="F1*", column="f1")


@pytest.mark.parametrize(
    "change, preset",
    [
        ([], "paper"),
        (["protocol.patience=10", "protocol.stage_epochs=60", "protocol.max_epochs=300", "annealing.patience=2",
          "annealing.T_min=0.01", "annealing.r=0.8"], "budget"),
        (["protocol.max_epochs=600"], None),
        (["annealing.T_min=0.01"], None),
    ],
)  # fmt: skip
def test_a_label_does_not_make_it_the_papers_protocol(tmp_path, change, preset):
    """42 committed records say preset=paper, and were trained for 60 or 600 epochs at most."""
    put(tmp_path, ["loss=f1", "preset=paper", *change])
    assert f1_cell(tmp_path).preset == preset


def search(folder, points, *overrides):
    for lr, batch, dropout, r in points:
        words = [f"hyper.lr={lr}", f"hyper.batch_size={batch}", f"hyper.dropout={dropout}", f"annealing.r={r}"]
        put(folder, ["loss=f1", "preset=paper", *words, *overrides], seed=1000, stage="search", val_loss=lr + r + batch)


@pytest.mark.parametrize(
    "full, short, found, mark",
    [
        ([0.001], [], "part", "◊"),
        ([0.001], [0.001, 0.01], "halving", "½"),
        ([0.001, 0.01], [], "grid", ""),
        ([0.0001, 0.001, 0.01], [], "wider", "+"),
        ([0.0001, 0.001], [], "other", "≠"),  # not wider: it leaves out a point of the grid
    ],
)
def test_the_papers_protocol_needs_the_papers_grid(full, short, found, mark, tmp_path, monkeypatch):
    """A grid of two points, lr 0.01 and 0.001, instead of 60; the lowest rate that was searched is chosen."""
    points = [{"lr": lr, "dropout": 0.25, "r": 0.8, "batch_size": 128} for lr in (0.01, 0.001)]
    monkeypatch.setattr(Settings, "grid", lambda self: points if self.loss.name == "f1" else [])
    hyper = [f"hyper.lr={full[0]}", "hyper.batch_size=128", "hyper.dropout=0.25", "annealing.r=0.8"]
    put(tmp_path, ["loss=f1", "preset=paper", *hyper])
    search(tmp_path, [(lr, 128, 0.25, 0.8) for lr in full])
    search(tmp_path, [(lr, 128, 0.25, 0.8) for lr in short], "protocol.max_epochs=5")
    assert (f1_cell(tmp_path).shown.search, f1_cell(tmp_path).marks) == (found, mark)


@pytest.mark.parametrize("name", tables.names())
def test_all_rows_of_a_table_are_searched_over_one_space(name):
    """The same points on each dataset and preset, apart from the cooling rate, which not every loss has."""
    rows, asked = {}, {}
    for cell in specs.blank_cells(tables.spec(name), "clean"):
        further = {key: value for key, value in cell.request.items() if not key.startswith("dataset.")}
        rows[json.dumps(further)] = cell  # one KEEL dataset stands for all
    for cell in rows.values():
        for preset in cells.PRESETS if cell.trains_networks else ():
            composed = cell.composed(preset)
            points = cells.grid_points(composed) if composed else set()
            asked.setdefault((cell.dataset, preset), []).append(points)
    for where, grids in asked.items():
        assert len({frozenset(point[:-1] for point in points) for points in grids}) == 1, where
        rates = {frozenset(point[-1] for point in points) - {None} for points in grids} - {frozenset()}
        assert len(rates) <= 1 or name == "cooling", where  # its rows are the rates


def test_the_papers_tables_state_their_grid():
    """The grid is in the table's yaml and includes what the paper's protocol gives each row."""
    for name in tables.papers_tables():
        table = tables.spec(name)
        for cell in specs.blank_cells(table, "clean"):
            points, plain = (cells.grid_points(c.composed("paper")) for c in (cell, replace(cell, grid=None)))
            assert bool(table.grid) == bool(plain) or cell.loss in papers.BASELINES
            assert plain <= points


def test_the_command_of_a_cell_states_a_grid_that_differs_from_the_protocols():
    """So the typed command and task=reproduce search what the table states."""
    sizes = "[128,256,512,1024,2048,4096,8192]"
    commands = {(c.dataset, c.row): c for c in specs.blank_cells(tables.spec("east_v2_1"), "clean")}
    assert f"protocol.grid.batch_size={{kaggle:{sizes}}}" in cells.command(commands["kaggle", "CE"])
    for place, cell in commands.items():
        typed = settings(cells.typed_command(cell).but(preset="paper"))
        assert typed.grid() == cell.composed("paper").grid(), place
        assert ("protocol.grid" in cells.command(cell)) == (place[0] == "kaggle" and place[1] not in ("Acc*", "MCC*"))


def test_the_fullest_protocol_on_record_is_shown_and_a_mixed_column_says_so(tmp_path):
    for seed in range(2):
        put(tmp_path, ["loss=f1", "preset=budget"], seed, f1=0.6)
        put(tmp_path, ["loss=ce", "preset=budget"], seed, f1=0.5)
    assert (f1_cell(tmp_path).preset, f1_cell(tmp_path).marks) == ("budget", "†◊")
    assert "mixed training" not in rendered("east_v2_1", tmp_path)
    put(tmp_path, ["loss=f1", "preset=paper"], 0, f1=0.7)
    assert (f1_cell(tmp_path).preset, list(f1_cell(tmp_path).values.values())) == ("paper", [0.7])
    text = rendered("east_v2_1", tmp_path)
    assert "| f1 (f1_positive; mixed training: paper, budget) |" in text


def test_capped_means_more_than_half_ended_at_the_epoch_limit(tmp_path):
    for seed, stopped in enumerate(["max_epochs", "stage_epochs", "patience", "coolings"]):
        put(tmp_path, ["loss=f1", "preset=paper"], seed, stopped=stopped)
    assert not f1_cell(tmp_path).shown.capped, "two of four"
    put(tmp_path, ["loss=f1", "preset=paper"], 4, stopped="max_epochs")
    assert f1_cell(tmp_path).shown.capped
    text = rendered("east_v2_1", tmp_path)
    assert "(5/10, capped)" in text
    assert "Capped: more than half of the trials ended at the epoch limit." in text


def test_the_released_variant_prefers_validation_by_batches_and_marks_its_absence(tmp_path):
    where = {"dataset": "mammography", "row": "F1*", "column": "f1"}
    for reduce, value in [("split", 0.5), ("batch_mean", 0.7)]:
        words = ["loss=btg_released", "protocol=btg", "preset=paper", f"protocol.val_reduce={reduce}"]
        plain = science("dataset=mammography", *words)
        rules = {"thresholds": {"scores": {"test": {"f1_pos": value}}}}
        records.write(tmp_path, records.Record(plain, 0, decisions=rules))
        shown = cell(tables.build("btg_1", tmp_path, variant="released"), **where)
        assert list(shown.values.values()) == [value]
        assert ("‖" in shown.marks) == (reduce == "split") == (not shown.shown.is_ideal)
        columns = ({"dataset": ["mammography"], "metric": {"f1": "f1"}},)
        one = changed(tables.spec("btg_1"), trials=1, columns=columns)
        needed = tables.plan(one, tmp_path, variant="released")
        asked = {"dataset": "mammography", "loss": "btg_released", "protocol": "btg"}
        assert (asked | {"protocol.val_reduce": "batch_mean"} in needed) == (reduce == "split")


# Constant predictions


@pytest.mark.parametrize("actual", [[90, 10], [3, 97], [20, 30, 50]])
def test_scores_of_a_constant_prediction_match_scikit_learn(actual):
    labels, options = np.repeat(np.arange(len(actual)), actual), {"zero_division": 0, "labels": range(len(actual))}
    of = lambda name, *position: cells.constant_scores(name, [actual], *position)[0]  # noqa: E731
    for k, constant in enumerate(np.full(len(labels), k) for k in range(len(actual))):
        expected = {
            "accuracy": metrics.accuracy_score(labels, constant),
            "balanced_accuracy": metrics.balanced_accuracy_score(labels, constant),
            "mcc": metrics.matthews_corrcoef(labels, constant),
            "f1_macro": metrics.f1_score(labels, constant, average="macro", **options),
        }
        if len(actual) == 2:
            expected |= {f"f{b}_pos": metrics.fbeta_score(labels, constant, beta=b, zero_division=0) for b in (1, 2, 3)}
            expected |= {"auroc_thresholded": metrics.roc_auc_score(labels, constant)}
        assert {name: of(name)[k] for name in expected} == pytest.approx(expected)
        for name, oracle in [("precision", metrics.precision_score), ("recall", metrics.recall_score)]:
            found = [of(name, position)[k] for position in range(len(actual))]
            assert found == pytest.approx(oracle(labels, constant, average=None, **options))


@pytest.mark.parametrize("negatives, ticked", [(2184, False), (1200, True)])
def test_a_cell_gets_no_tick_if_a_constant_prediction_earns_the_same_word(tmp_path, negatives, ticked):
    """Published accuracy of CE on Mammography: 0.990. With 53 positives among 2,237 rows "never" has 0.976: close."""
    for seed in range(10):
        missed = 40 - seed // 4  # and 5 false alarms: accuracy 0.980
        rows = [[negatives - 5, 5], [missed, 2237 - negatives - missed]]
        put(tmp_path, ["loss=ce", "preset=paper"], seed, f1=0.98, confusion={"test": rows})
    found = cell(tables.build("east_v2_1", tmp_path), dataset="mammography", row="CE", column="accuracy")
    assert (found.gap.word, found.gap.ticked) == ("close", ticked)
    assert found.gap.constant == pytest.approx(negatives / 2237)
    assert ("close ✓" in rendered("east_v2_1", tmp_path)) == ticked


def test_plug_in_rows_are_below_the_papers_rows_if_recorded(tmp_path):
    for seed in range(3):
        put(tmp_path, ["loss=f1", "preset=paper"], seed, f1=0.6 + 0.01 * seed)
        put(tmp_path, ["loss=ce", "preset=paper"], seed, f1=0.5, plugin=0.7)
    table = tables.build("east_v2_1", tmp_path)
    rows = [c.row for c in table.cells if c.block == "mammography" and c.column == "mcc"]
    assert rows == ["F1*", "Acc*", "MCC*", "Dice", "CE", "CE + plug-in"]
    found = cell(table, block="mammography", row="CE + plug-in", column="f1")
    assert (found.score, found.published, set(found.values.values())) == ("plugin_f1.test.f1_pos", None, {0.7})
    assert not any("plug-in" in c.row for c in table.cells if c.block != "mammography")
    pairs = {(e.row, e.against): e.difference for e in tables.comparisons(table) if e.column == "f1"}
    expected = {("F1*", "CE"): 0.11, ("F1*", "CE + plug-in"): -0.09, ("CE + plug-in", "CE"): 0.2}
    assert pairs == pytest.approx(expected)


def test_ranks_match_numbers_by_hand():
    """F1* is ahead of CE on all 31 sets by 0.1, RF equal within 0.01, everything else behind and tied."""
    table = tables.build(changed(tables.spec("keel"), reference="CE"), "/nowhere")
    level = {"F1*": 0.6, "CE": 0.5, "RF": 0.495}
    for c in table.cells:
        put_values(c, {0: level.get(c.row, 0.2)})
    f1, mcc = table.rankings
    assert (f1.block, mcc.block, len(f1.columns)) == ("f1", "mcc", 31)
    assert f1.ranks == {n: {"F1*": 1, "CE": 2, "RF": 3}.get(n, 7) for n in f1.ranks}
    assert f1.friedman < 1e-6
    signs = f1.signs["CE"]
    assert min(signs["F1*"].ahead, signs["RF"].equal, signs["Dice"].behind) > 0.999
    assert "CE" not in signs
    assert not tables.comparisons(table), "compared over datasets, not within each"
    assert r"F1\* | 1.00 |" in WRITERS["markdown"]([table])


def test_ranks_leave_out_datasets_that_a_row_lacks():
    table = tables.build("keel", "/nowhere")
    for c in table.cells:
        put_values(c, {} if (c.row, c.column) == ("RF", "yeast5") else {0: 0.5})
    assert {len(entry.columns) for entry in table.rankings} == {30}
    for c in table.cells:
        put_values(c, c.values if c.row != "RF" else {})
    assert tables.build("keel", "/nowhere").rankings == []


# Statistics in tables


def test_rows_are_compared_by_the_fullest_training_that_both_have(tmp_path):
    for seed in range(4):
        for preset, f1 in [("paper", 0.9), ("budget", 0.6), ("lean", 0.5)]:
            put(tmp_path, ["loss=ce", f"preset={preset}"], seed, f1=f1)
        put(tmp_path, ["loss=f1", "preset=budget"], seed, f1=0.7)
        put(tmp_path, ["loss=mcc", "preset=paper"], seed, f1=0.8)
        put(tmp_path, ["loss=dice", "preset=quick"], seed, f1=0.8)
    table = tables.build("east_v2_1", tmp_path)
    found = {e.row: (round(e.difference, 6), e.training) for e in tables.comparisons(table) if e.column == "f1"}
    assert found == {"F1*": (0.1, "budget"), "MCC*": (-0.1, None)}, "quick training is accepted by no table of a paper"
    assert cell(table, row="CE", column="f1", dataset="mammography").summary.mean == pytest.approx(0.9)
    text = rendered("east_v2_1", tmp_path, "text")
    assert "F1* − CE (budget)" in text
    assert "(budget)" not in rendered("east_v2_1", tmp_path, "text", preset="paper"), "budget training is refused"


def test_holm_is_over_all_declared_questions_and_no_others(tmp_path):
    for seed in range(8):
        for loss, f1 in [("f1", 0.7), ("accuracy", 0.65), ("mcc", 0.6), ("dice", 0.6), ("ce", 0.5)]:
            put(tmp_path, [f"loss={loss}", "preset=paper"], seed, f1=f1 + 0.01 * seed * (loss != "ce"))
    found = tables.comparisons(tables.build("east_v2_1", tmp_path))
    assert len(found) == 12, "four losses in three columns"
    corrected = {(e.row, e.column): e.p_holm for e in found if e.p_holm is not None}
    assert corrected.keys() == {("F1*", "f1"), ("Acc*", "accuracy"), ("MCC*", "mcc")}
    assert set(corrected.values()) == {12 * 2 / 2**8}, "twelve questions, sign flips of eight seeds"
    text = rendered("east_v2_1", tmp_path)
    assert "over the 12 questions that the table declares, 9 of which are open" in text


def test_the_questions_of_table_1_are_the_12_matched_pairs():
    questions = tables.spec("east_v2_1").questions
    assert sum(len(question.blocks) for question in questions) == 12
    for name in tables.names():
        cells = list(specs.blank_cells(tables.spec(name), "clean"))
        places = {(c.block, column, c.row) for c in cells for column in (c.column, None)}
        for q in tables.spec(name).questions:
            for block in q.blocks:
                assert {(block, q.column, q.row), (block, q.column, q.against)} <= places, f"{name}: {q}"
    with pytest.raises(ValueError, match="unknown row in a question of table east_v2_1 'F2"):
        changed(tables.spec("east_v2_1"), questions=[questions[0].model_copy(update={"row": "F2*"})])


def test_the_best_is_bold_but_never_a_single_trial_or_mixed_scores(east_v2_1):
    f1 = [c for c in east_v2_1.cells if (c.block, c.column) == ("mammography", "f1")]
    assert [c.row for c in f1 if east_v2_1.best(c, "ours")] == ["F1*"], "Dice has the highest mean, of one trial"
    assert [c.row for c in f1 if east_v2_1.best(c, "published")] == ["MCC*"]
    mixed = tables.build("east_v2_3", GOLDEN)
    assert not any(mixed.best(c, which) for c in mixed.cells if c.column == "f1" for which in ("ours", "published"))


def test_every_setting_of_the_grid_has_a_row_of_its_own(tmp_path):
    """loss=metric loss.metric=accuracy is not loss=accuracy."""
    golden = next(r for r in records.scan(GOLDEN) if r.config.loss.name == "accuracy")
    options = {"name": "metric", "_target_": golden.config.loss.target, "metric": "accuracy"}
    for loss in (golden.config.loss, LossSection(**options)):
        records.write(tmp_path, golden.but(config=golden.config.but(loss=loss), source=""))
    table = tables.build("grid", tmp_path)
    assert sum(map(len, table.blocks.values())) == len(table.cells)
    assert {cell.row for cell in table.cells} == {"accuracy", "metric accuracy"}


# text


@pytest.mark.parametrize(
    "name, format, options",
    [
        ("east_v2_1", "markdown", {}),
        ("east_v2_1", "text", {"variant": "released"}),
        ("east_v2_1", "latex", {}),
        ("east_v2_6", "csv", {}),
        ("btg_4", "json", {}),
    ],
)
def test_tables_render_to_the_committed_text(name, format, options):
    """Exact text from the committed records; EAST_GOLDEN=write rewrites it after an intended change."""
    stem = "-".join([name, *options.values()])
    file = GOLDEN / "rendered" / f"{stem}.{EXTENSIONS[format]}"
    text = rendered(name, GOLDEN, format, today=DAY, **options)
    if os.environ.get("EAST_GOLDEN") == "write":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_csv_and_json_hold_every_cell():
    lines = list(csv.DictReader(io.StringIO(rendered("east_v2_1", GOLDEN, "csv"))))
    (written,) = json.loads(rendered("east_v2_1", GOLDEN, "json"))
    assert len(lines) == len(written["cells"]) == 90
    (mine,) = [c for c in written["cells"] if (c["block"], c["row"], c["column"]) == ("mammography", "F1*", "f1")]
    assert len(mine["values"]) == mine["n"] == 5
    assert all((GOLDEN / source).is_file() for source in mine["sources"])


def test_the_grid_table_shows_every_setting_once():
    grid = tables.build("grid", GOLDEN)
    assert len({(c.block, c.row, c.column) for c in grid.cells}) == len(grid.cells)
    assert "f1_positive" not in {c.column for c in grid.cells if c.block == "digits"}
    assert len(cell(grid, row="btg_f1", column="thresholds.f1_positive").values) == 3


def test_a_corrupt_file_is_named_and_the_table_still_renders(tmp_path):
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    bad = tmp_path / "runs" / "adult" / "f1" / "abc" / "seed-0.json"
    bad.parent.mkdir(parents=True)
    bad.write_text("{")
    with pytest.warns(UserWarning, match="seed-0.json is not a record"):
        assert "0.800 ± 0.050" in rendered("east_v2_1", tmp_path)


def test_two_thousand_records_render_within_three_seconds(tmp_path):
    source = next(r for r in records.scan(GOLDEN) if r.config.dataset.name == "mammography")
    rng = random.Random(0)
    (tmp_path / "records").mkdir()
    with open(tmp_path / "records" / "many.jsonl", "w") as file:
        for i in range(2_000):
            stored = source.to_json()
            stored["config"]["hyper"] |= {"lr": 1e-6 * (1 + i // 10)}
            stored["config"]["loss"] |= {"name": rng.choice(["f1", "ce", "mcc"])}
            file.write(json.dumps(stored | {"seed": i % 10, "key": identity.key(stored["config"])}) + "\n")
    start = time.process_time()  # CPU time of this process, so that a busy machine does not matter
    catalogue = Catalogue(records.scan(tmp_path))
    for name in tables.papers_tables():
        rendered(name, scanned=catalogue)
    assert time.process_time() - start < 3


def test_tables_do_not_import_torch():
    code = "import sys; from east.lab.reporting import tables, writers; table = tables.build('east_v2_1', '/nowhere')"
    code += "; writers.WRITERS['text']([table]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_latex_compiles(tmp_path):
    if not shutil.which("pdflatex"):
        pytest.skip("no TeX engine: pdflatex is not installed")
    every = [tables.build(name, GOLDEN, today=DAY) for name in (*tables.papers_tables(), "grid", "ablation")]
    ranked = tables.build("keel", "/nowhere")
    for c in ranked.cells:
        put_values(c, {0: 0.5})
    body = WRITERS["latex"]([*every, ranked])
    preamble = (
        r"\documentclass{article}\usepackage[margin=2cm]{geometry}\usepackage{amssymb,booktabs,graphicx,textcomp}"
    )
    (tmp_path / "all.tex").write_text(preamble + "\\begin{document}\n" + body + "\\end{document}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "Overfull" not in done.stdout
    assert (tmp_path / "all.pdf").stat().st_size > 10_000


def test_the_golden_records_match_their_generator(tmp_path):
    from tests.golden.generate import generate

    generate(tmp_path)
    records.export(tmp_path)
    for file in (GOLDEN / "records").glob("*.jsonl"):
        assert (tmp_path / "records" / file.name).read_text() == file.read_text()
