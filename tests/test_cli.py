"""east-run as users see it: help, exit codes, messages, sweeps."""

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from east.choices import CONF, ConfigError, groups
from east.lab import cli
from east.lab.data import DataError, load
from east.lab.experiment import records
from east.lab.reporting import tables
from east.lab.tasks import plan
from east.lab.tasks import reproduce as task_reproduce
from east.lab.tasks import run as task_run
from tests.commands import TINY, environment, record_files


def test_help_names_tasks_groups_and_examples(capsys):
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    for group, names in groups().items():
        assert re.search(rf"^  {group} +{next(iter(names))}", text, re.MULTILINE)
        assert all(name in text for name in names)
    assert all(re.search(rf"\b{task}\b", text) for task in cli.TASKS)
    assert text.count("\n  east-run") == 5
    assert max(map(len, text.splitlines())) <= 120


def test_help_is_quick_and_light():
    """No torch, pandas, scikit-learn or Hydra is imported, and it takes less than a second of CPU time."""
    answer = subprocess.run([sys.executable, "-X", "importtime", "-m", "east.lab.cli", "--help"], capture_output=True,
                            text=True, env=environment(), check=True)  # fmt: skip
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in answer.stderr.splitlines()}
    assert "east" in imported
    assert not imported & {"torch", "pandas", "sklearn", "numpy", "hydra", "matplotlib"}
    cumulative = [
        int(line.split("|")[1]) for line in answer.stderr.splitlines() if re.search(r"\| +\d+ \| +east", line)
    ]
    assert max(cumulative) < 500_000


def test_version(capsys):
    assert cli.run(["--version"]) == 0
    assert re.fullmatch(r"east \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_debug_shows_the_traceback(east_run):
    with pytest.raises(ConfigError, match="unknown loss 'f11'"):
        east_run("loss=f11", "++debug=True")


@pytest.mark.parametrize("folder", ["Bob's files", "a,b", "back\\slash", "[x]"])
def test_your_own_configs_may_be_in_any_folder(folder, tmp_path, east_run):
    (tmp_path / folder / "loss").mkdir(parents=True)
    (tmp_path / folder / "loss" / "mine.yaml").write_text("{name: mine, _target_: east.losses.Dice}")
    answer = east_run("--config-dir", str(tmp_path / folder), "loss=mine", "--cfg", "job", "-p", "loss._target_")
    assert (answer.code, answer.err) == (0, "")
    assert "east.losses.Dice" in answer.out
    assert "mine" in east_run("--config-dir", str(tmp_path / folder), "--help").out


def test_the_config_of_your_own_metric_is_shown(tmp_path, monkeypatch, east_run):
    """Its parameters are known from the file in the working directory."""
    (tmp_path / "shown_metric.py").write_text("def hits(c, share=1.0):\n    return share * c.diagonal.sum(-1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    answer = east_run("loss=metric", "loss.metric=shown_metric.hits", "loss.share=0.5", "--cfg", "job", "-p", "loss")
    assert "share: 0.5" in answer.out


def test_train_announces_and_plans_one_trial_without_a_search(east_run):
    answer = east_run("task=train", *TINY, "preset=budget", "dry_run=true")
    assert "digits: f1 | protocol=east preset=budget search=none" in answer.out
    assert re.search(r"digits f1 +none +0 of 1", answer.out)
    for word in ("search=grid", "trials=7", "search.factor=2"):
        answer = east_run("task=train", *TINY, word)
        assert answer.code == cli.BAD_CONFIG
        assert f"{word}: task=train trains one trial without a search" in answer.err


@pytest.mark.usefixtures("no_figures")
def test_a_run_reuses_trained_trials_and_prints_the_same_again(tmp_path, capsys):
    results = f"results_dir={tmp_path}"
    assert cli.run(["task=train", "seed=1", *TINY, results]) == 0
    assert re.search(r"^digits f1: 2 epochs, max_epochs; .*seed-1.json$", capsys.readouterr().out, re.MULTILINE)
    assert [path.name for path in record_files(tmp_path)] == ["seed-1.json"]
    assert cli.run([*TINY, results, "dry_run=true"]) == 0
    assert re.search(r"digits f1 +none +1 of 2", capsys.readouterr().out)
    assert cli.run([*TINY, results]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^digits f1 +2 +0\.\d{3} ± 0\.\d{3} ", printed, re.MULTILINE)
    before = record_files(tmp_path)
    assert [path.name for path in before] == ["seed-0.json", "seed-1.json"]
    assert cli.run([*TINY, results]) == 0
    assert capsys.readouterr().out == printed
    assert record_files(tmp_path) == before


def test_a_read_only_results_folder_can_still_be_printed(tmp_path, tiny_results, monkeypatch, capsys):
    """Existing results are printed, with a one-line warning instead of written files."""
    shutil.copytree(tiny_results, tmp_path, dirs_exist_ok=True)
    run, table = [*TINY, "dataset.limit=null"], ["task=table", "table=grid", "preset=quick"]
    commands = [[*command, f"results_dir={tmp_path}"] for command in (run, table)]
    printed = [(cli.run(command), capsys.readouterr().out)[1] for command in commands]
    shutil.rmtree(tmp_path / "tables")
    shutil.rmtree(tmp_path / "figures")

    def mkdir(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for command, before in zip(commands, printed, strict=True):
        assert cli.run(command) == 0
        told = capsys.readouterr()
        missing = [line.split()[0] for line in before.splitlines() if line not in told.out]
        assert missing == ([] if command is commands[0] else ["written"])
    assert re.fullmatch(r"warning: not written: .*Permission denied.*\n", told.err)


def test_a_command_without_arguments_is_the_quickstart(monkeypatch):
    seen = []
    monkeypatch.setattr(task_reproduce, "main", lambda command, *_: seen.append(command) or 0)
    monkeypatch.setattr(task_run, "main", lambda command, *_: seen.append(command) or 0)
    cli.run([])
    cli.run(["device=cpu"])
    cli.run(["dataset=digits"])
    assert seen == [cli.QUICKSTART, {**cli.QUICKSTART, "device": "cpu"}, {"dataset": "digits"}]


def test_the_whole_config_can_be_shown(capsys):
    assert cli.run(["--cfg", "job", "loss=ce", "dataset=adult"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.001" in shown
    assert "name: mlp" in shown


def test_shells_complete_names(monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", "east-run loss=btg_f")
    monkeypatch.setattr(sys, "argv", ["east-run"])
    assert cli.run(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["loss=btg_f1", "loss=btg_f2", "loss=btg_f3"]
    assert cli.run(["-sc", "install=bash"]) == 0
    assert "complete -o nospace" in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_a_sweep_writes_only_below_results_dir(tmp_path, monkeypatch, east_run):
    monkeypatch.chdir(tmp_path)
    answer = east_run("-m", "loss=f1,ce", *TINY, "trials=1", "results_dir=out")
    assert answer.code == 0, answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in tmp_path.glob("out/sweeps/*")] == ["multirun.yaml"], "no folder for each job"
    assert {path.parts[-3] for path in record_files(tmp_path)} == {"f1", "ce"}
    assert re.findall(r"^# (loss=\w+)", answer.out, re.MULTILINE) == ["loss=f1", "loss=ce"]
    assert "yes=" not in answer.out, "nobody typed it"
    assert re.findall(r"^digits (\w+) +1 ", answer.out, re.MULTILINE) == ["f1", "ce", "f1", "ce"], (
        "one table at the end"
    )


@pytest.mark.usefixtures("no_figures")
def test_an_optimising_sweeper_gets_the_validation_score(tmp_path, east_run):
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hyper.lr=interval(0.001,0.1)"]
    answer = east_run("-m", *search, *TINY, "loss=ce", "trials=2")
    assert answer.code == 0, answer.err
    assert re.search(r"best_params:\n  hyper.lr: 0\.\d+\nbest_value: 0\.\d+", answer.out)
    scores = defaultdict(list)
    for record in records.scan(tmp_path):
        scores[record.config.hyper.lr].append(1 - record.best.val_metric)
    best = max(sum(values) / 2 for values in scores.values())
    assert float(answer.out.split()[-1]) == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_launcher_trains_the_jobs_and_one_table_shows_them(launcher, east_run):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher", reason="it is not installed")
    answer = east_run("-m", "loss=f1,ce", f"hydra/launcher={launcher}", *TINY, "trials=1")
    assert answer.code == 0, answer.err
    assert re.search(r"^digits f1 +1 .*\ndigits ce +1 ", answer.out, re.MULTILINE)


def test_a_sweep_leaves_paths_unchanged(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(task_run, "main", lambda _, settings: seen.append(settings) or 0)
    monkeypatch.setattr(sys, "argv", ["east-run"])
    monkeypatch.setattr(cli, "confirmed", lambda jobs: [])  # there is no such file
    odd = ["dataset=csv", "dataset.path=daten (1).csv", "dataset.target=été", f"results_dir={tmp_path / 'é'}"]
    assert cli.run(["-m", "loss=f1,ce", *odd]) == 0
    assert {(one.dataset.options["path"], one.dataset.options["target"]) for one in seen} == {("daten (1).csv", "été")}
    assert [one.loss.name for one in seen] == ["f1", "ce"]


def test_a_failed_job_of_a_sweep_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def task(command, *_):
        if command.get("loss") == "ce":
            raise RuntimeError("no luck")
        print("done", command.get("loss"))
        return 0

    monkeypatch.setattr(task_run, "main", task)
    monkeypatch.setattr(sys, "argv", ["east-run"])
    assert cli.run(["-m", "loss=f1,ce,mcc", f"results_dir={tmp_path}"]) == 1
    told = capsys.readouterr()
    assert re.findall("done .*", told.out) == ["done f1", "done mcc"]
    assert "RuntimeError: no luck" in told.err


@pytest.mark.usefixtures("no_figures")
def test_table_records_and_data_print(tmp_path, tiny_results, capsys):
    shutil.copytree(tiny_results, tmp_path, dirs_exist_ok=True)
    assert cli.run(["task=table", "table=grid", "preset=quick", f"results_dir={tmp_path}"]) == 0
    assert "digits" in capsys.readouterr().out
    assert cli.run(["task=table", "table=grid", "preset=quick", "format=json", f"results_dir={tmp_path}"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.run(["task=records", f"results_dir={tmp_path}"]) == 0
    assert "digits.jsonl  2 records" in capsys.readouterr().out
    assert cli.run(["task=data", "dataset=digits"]) == 0
    assert "1,797" in capsys.readouterr().out
    assert cli.run(["task=data", "dataset=digits", "split.seed=trial"]) == 0
    assert "the sizes are those of split.seed=0" in capsys.readouterr().out
    assert cli.run(["task=data", "dataset=all"]) == 0
    assert "mammography" in capsys.readouterr().out
    assert (
        cli.run(["task=reproduce", "table=quickstart", "preset=quick", "dry_run=true", f"results_dir={tmp_path}"]) == 0
    )
    assert "3 runs to do" in capsys.readouterr().out


def test_reproduce_runs_the_requested_part_of_a_table(tmp_path, capsys):
    for name in ("mammography", "adult"):
        try:
            load(name, limit=100)
        except DataError as error:
            pytest.skip(str(error).splitlines()[0])
    table = ["task=reproduce", "table=east_v2_1", "preset=quick", "dry_run=true", f"results_dir={tmp_path}"]
    assert cli.run([*table, "datasets=[mammography]", "losses=[f1,ce]"]) == 0
    told = capsys.readouterr().out
    assert "east_v2_1: 2 runs to do" in told
    assert "mammography ce" in told
    assert cli.run([*table, "dataset=adult", "loss=mcc"]) == 0
    assert "east_v2_1: 1 run to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        (["datasets=[mamography]"], "unknown dataset of table=east_v2_1 'mamography', did you mean 'mammography'?"),
        (["losses=[f1x]"], "unknown loss of table=east_v2_1 'f1x', did you mean 'f1'?"),
        (["losses=[f1,wmw]"], "unknown loss of table=east_v2_1 'wmw'"),
        (["dataset=digits"], "unknown dataset of table=east_v2_1 'digits'. Choices: adult, caltech256, cifar10"),
        (["datasets=cifar10_frog"], "unknown dataset of table=east_v2_1 'cifar10_frog', did you mean 'cifar10'?"),
        (["table=all", "dataset=digits"], "unknown dataset of table=all 'digits'"),
    ],
)
def test_reproduce_refuses_what_its_table_does_not_have(words, message, east_run):
    answer = east_run("task=reproduce", "table=east_v2_1", "dry_run=true", *words)
    assert answer.code == cli.BAD_CONFIG
    assert message in answer.err


@pytest.fixture
def no_plan(monkeypatch):
    """Neither data nor a schedule are needed."""
    monkeypatch.setattr(plan, "made", lambda *_, **__: plan.Plan([], None, None))


@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize("table", ["quickstart", "all"])
def test_reproduce_takes_the_default_preset_by_its_name(table, east_run):
    told = [east_run("task=reproduce", f"table={table}", *typed, "dry_run=true") for typed in ([], ["preset=auto"])]
    assert told[0] == told[1]
    assert told[0].code == 0


@pytest.mark.usefixtures("no_plan")
@pytest.mark.parametrize("table, names, runs", [("all", "datasets=cifar10_frog", 3), ("btg_1", "losses=wmw", 4)])
def test_reproduce_takes_one_name_instead_of_a_list(table, names, runs, east_run):
    assert f"{table}: {runs} runs to do" in east_run("task=reproduce", f"table={table}", names, "dry_run=true").out


@pytest.mark.usefixtures("no_figures")
def test_reproduce_shows_runs_that_fill_no_cell(tmp_path, capsys):
    short = ["table=quickstart", "protocol.decisions=[]", "protocol.max_epochs=1", "trials=1", "executor=inline",
             f"results_dir={tmp_path}"]  # fmt: skip
    assert cli.run(["task=reproduce", *short]) == 0
    told = capsys.readouterr().out
    assert "note: trials with protocol.decisions=[] protocol.max_epochs=1 do not fill cells of the table" in told
    assert re.search(r"^digits ce +1 +0\.\d{3} ", told, re.MULTILINE)


@pytest.mark.usefixtures("no_figures")
def test_reproduce_trains_what_the_user_typed_even_if_the_table_is_full(tmp_path, monkeypatch, east_run):
    """The user's values win over the table's, and records of the table are of other trials."""
    table = tables.spec("quickstart")
    short = table.overrides | {"trials": 1, "protocol.max_epochs": 1}
    monkeypatch.setattr(tables, "spec", lambda name, folder=None: table.changed(overrides=short, trials=1))
    of_table = ["task=reproduce", "table=quickstart", "loss=ce", "executor=inline"]
    assert east_run(*of_table).code == 0
    assert "every run is done" in east_run(*of_table, "dry_run=true").out
    changed = [*of_table, "model.hidden=[8]", "trials=2"]
    told = east_run(*changed).out
    assert "quickstart: 1 run to do, except for trials on record" in told
    configs = [json.loads(text) for text in record_files(tmp_path).values()]
    assert sorted((record["config"]["model"]["hidden"], record["seed"]) for record in configs) == [
        ([8], 0),
        ([8], 1),
        ([64, 32], 0),
    ]
    before = record_files(tmp_path)
    assert east_run(*changed).out == told
    assert record_files(tmp_path) == before, "what is on record is not trained again"


@pytest.mark.usefixtures("no_figures")
def test_the_quickstart_fills_its_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = tables.spec("quickstart")
    short = table.overrides | {"trials": 2, "protocol.max_epochs": 30}
    monkeypatch.setattr(tables, "spec", lambda name, folder=None: table.changed(overrides=short, trials=2))
    assert cli.run([]) == 0
    told = capsys.readouterr().out
    assert "Metric CE" in told
    assert re.search(r"\nHighest f1_macro: .* with 2 splits\.\nNext: your own table: east-run task=compare", told)
    assert cli.run(["task=reproduce", "table=quickstart", "dry_run=true"]) == 0
    assert "quickstart: every run is done" in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_classes_without_test_rows_are_reported(tmp_path, capsys):
    few = [*TINY, "dataset.limit=30", "protocol.max_epochs=1", "trials=1", f"results_dir={tmp_path}"]
    assert cli.run(few) == 0
    assert "classes have no test rows: try split.stratify=true" in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_a_run_shows_the_metric_it_was_trained_for(tmp_path, capsys):
    small = [*TINY, "protocol.max_epochs=1", f"results_dir={tmp_path}"]
    assert cli.run([*small, "loss=metric", "loss.metric=kappa"]) == 0
    shown = capsys.readouterr().out
    assert "trained_for" in shown
    assert re.search(r"^digits metric .*\d\.\d{3}", shown, re.MULTILINE)
    assert cli.run([*small, "loss=f1"]) == 0
    assert "trained_for" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_figures")
def test_a_run_says_when_its_trials_have_collapsed(tmp_path, capsys):
    rare = ["dataset=synthetic", "dataset.imbalance=200", "dataset.rows=2000", "preset=quick", "protocol.max_epochs=2"]
    assert cli.run([*rare, "losses=[f1,ce]", "hyper.lr=0.01", "trials=1", f"results_dir={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert "synthetic f1: 1 of 1 trials predict one class only; try protocol.warmup=10 or a lower hyper.lr" in told
    assert told.count("loss.average=positive") == 1, "cross-entropy has no average"


@pytest.mark.usefixtures("no_figures")
def test_your_own_protocols_and_presets_work_like_ours(tmp_path, capsys):
    """Protocols and presets from --config-dir are run and shown like ours."""
    for group, name, ours in (("protocol", "mine", "east"), ("preset", "tiny", "quick")):
        text = (CONF / group / f"{ours}.yaml").read_text().replace(f"name: {ours}", f"name: {name}")
        (tmp_path / "own" / group).mkdir(parents=True)
        (tmp_path / "own" / group / f"{name}.yaml").write_text(text)
    small = [*TINY, "loss=ce", "protocol.max_epochs=1"]
    for own in (["protocol=mine", "preset=quick"], ["preset=tiny"]):
        assert cli.run(["--config-dir", f"{tmp_path}/own", *small, *own, f"results_dir={tmp_path}"]) == 0
        told = capsys.readouterr().out
        assert "f1_macro" in told
    made = {(record.config.protocol.name, record.config.preset) for record in records.scan(tmp_path)}
    assert made == {("mine", "quick"), ("east", "tiny")}


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("task", ["train", "run"])
def test_a_model_that_cannot_be_saved_is_reported_and_fails_the_command(task, tmp_path, monkeypatch, capsys):
    (tmp_path / "models").write_text("in the way")
    arguments = [f"task={task}", *TINY, "protocol.max_epochs=1", "trials=1", "save_model=true",
                 f"results_dir={tmp_path}"]  # fmt: skip
    assert cli.run(arguments) == 1
    assert "could not be saved" in capsys.readouterr().out
    (tmp_path / "models").unlink()
    assert cli.run(arguments) == 0
    assert "could not be saved" not in capsys.readouterr().out
