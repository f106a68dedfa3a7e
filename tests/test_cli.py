"""east-run as users see it: help, tasks, sweeps. Mistakes and their exit codes are in test_messages.py."""

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from east.choices import groups
from east.lab import cli
from east.lab.data import DataError, load
from east.lab.experiment import executors, records
from east.lab.reporting import tables
from east.lab.settings.settings import Executor, Settings
from east.lab.tasks import plan
from east.lab.tasks import reproduce as task_reproduce
from east.lab.tasks import run as task_run
from tests.commands import TINY, environment, record_files
from tests.conftest import EastRun
from tests.made import changed

pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture
def out(east_run: EastRun) -> Callable[..., str]:
    """Run a command that must succeed; return what it prints."""

    def run(*words: str) -> str:
        answer = east_run(*words)
        assert answer.code == 0, answer.err
        return answer.out

    return run


def test_help_names_tasks_groups_and_examples(out):
    text = out("--help")
    for group, names in groups().items():
        assert re.search(rf"^  {group} +{next(iter(names))}", text, re.MULTILINE)
        assert all(name in text for name in names)
    assert all(re.search(rf"^  {task} +\w", text, re.MULTILINE) for task in cli.TASKS)
    assert text.count("\n  east-run") == 5
    assert max(map(len, text.splitlines())) <= 120
    assert re.fullmatch(r"east \d+\.\d+\.\d+\n", out("--version"))


def test_every_setting_is_read_by_a_task_and_explained_in_its_help(out):
    everywhere = {"task", "results_dir", "config_dir", "debug", "fixed"}
    read = {name for task in cli.TASKS.values() for name in task.reads}
    assert read - {"datasets", "losses"} == Settings.model_fields.keys() - everywhere
    for name, task in cli.TASKS.items():
        shown = re.findall(r'^"?(\w+)"?:', out(f"task={name}", "--help").partition("\n")[2], re.MULTILINE)
        assert {*shown} == {*task.reads}, name


def test_help_is_quick_and_light():
    """No torch, pandas, scikit-learn or Hydra is imported, and it takes less than half a second."""
    answer = subprocess.run([sys.executable, "-X", "importtime", "-m", "east.lab.cli", "--help"], capture_output=True,
                            text=True, env=environment(), check=True)  # fmt: skip
    lines = re.findall(r"\| +(\d+) \| +(\w+)", answer.stderr)
    assert "east" in {name for _, name in lines}
    assert not {name for _, name in lines} & {"torch", "pandas", "sklearn", "numpy", "hydra", "matplotlib"}
    assert max(int(microseconds) for microseconds, name in lines if name == "east") < 500_000


@pytest.mark.parametrize("folder", ["Bob's files", "a,b", "[x]"])
def test_your_own_configs_may_be_in_any_folder(folder, tmp_path, out):
    own = tmp_path / folder / "loss" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("{name: mine, _target_: east.losses.Dice}")
    assert "Dice" in out("--config-dir", f"{tmp_path / folder}", "loss=mine", "--cfg", "job", "-p", "loss._target_")
    assert "mine" in out("--config-dir", f"{tmp_path / folder}", "--help")


def test_a_run_reuses_trained_trials_and_prints_the_same_again(tmp_path, out, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (file,) = re.findall(
        r"^digits f1: 2 epochs, max_epochs; (.*)$", out("task=train", "seed=1", *TINY, "results_dir=here"), re.M
    )
    assert [str(path) for path in record_files(Path("here"))] == [file]
    assert re.search(r"digits f1 +none +1 of 2", out(*TINY, "results_dir=here", "dry_run=true"))
    planned = out("task=train", *TINY, "preset=budget", "dry_run=true")
    assert "digits: f1 | protocol=east preset=budget search=none" in planned
    assert re.search(r"digits f1 +none +0 of 1", planned), "one trial without a search"
    printed = out(*TINY, "results_dir=here")
    assert re.search(r"^digits f1 +2 +0\.\d{3} ± 0\.\d{3} ", printed, re.MULTILINE)
    before = record_files(tmp_path)
    assert [path.name for path in before] == ["seed-0.json", "seed-1.json"]
    assert out(*TINY, "results_dir=here") == printed
    assert record_files(tmp_path) == before


def test_a_command_without_arguments_is_the_quickstart(monkeypatch):
    seen = []
    monkeypatch.setattr(task_reproduce, "main", lambda command, *_: seen.append(command) or 0)
    monkeypatch.setattr(task_run, "main", lambda command, *_: seen.append(command) or 0)
    cli.run([])
    cli.run(["device=cpu"])
    cli.run(["dataset=digits"])
    assert seen == [cli.QUICKSTART, {**cli.QUICKSTART, "device": "cpu"}, {"dataset": "digits"}]


def test_shells_complete_names(monkeypatch, capsys):
    monkeypatch.setenv("COMP_LINE", "east-run loss=btg_f")
    monkeypatch.setattr(sys, "argv", ["east-run"])
    for query, expected in (("query", "loss=btg_f1 loss=btg_f2 loss=btg_f3"), ("install", "complete -o nospace")):
        assert cli.run(["-sc", f"{query}=bash"]) == 0
        assert expected in " ".join(capsys.readouterr().out.split())


def test_a_sweep_writes_only_below_results_dir_and_ends_with_one_table(tmp_path, monkeypatch, out):
    monkeypatch.chdir(tmp_path)
    text = out("-m", "loss=f1,ce", *TINY, "trials=1", "results_dir=out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in tmp_path.glob("out/sweeps/*")] == ["multirun.yaml"], "no folder for each job"
    assert {path.parts[-3] for path in record_files(tmp_path)} == {"f1", "ce"}
    assert re.findall(r"^# (loss=\w+)", text, re.MULTILINE) == ["loss=f1", "loss=ce"]
    assert "yes=" not in text, "nobody typed it"
    assert re.findall(r"^digits (\w+) +1 ", text, re.MULTILINE) == ["f1", "ce", "f1", "ce"]


def test_an_optimising_sweeper_gets_the_validation_score(tmp_path, out):
    pytest.importorskip("optuna", reason="the extra optuna is not installed")
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hyper.lr=interval(0.001,0.1)"]
    text = out("-m", *search, *TINY, "loss=ce", "trials=2")
    assert re.search(r"best_params:\n  hyper.lr: 0\.\d+\nbest_value: 0\.\d+", text)
    scores = defaultdict(list)
    for record in records.scan(tmp_path):
        scores[record.config.hyper.lr].append(1 - record.best.val_metric)
    best = max(sum(values) / 2 for values in scores.values())
    assert float(text.split()[-1]) == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_a_launcher_trains_the_jobs_and_one_table_shows_them(launcher, out):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher", reason="it is not installed")
    text = out("-m", "loss=f1,ce", f"hydra/launcher={launcher}", *TINY, "trials=1")
    assert re.search(r"^digits f1 +1 .*\ndigits ce +1 ", text, re.MULTILINE)


def test_a_sweep_leaves_paths_unchanged(tmp_path, monkeypatch, out):
    seen = []
    monkeypatch.setattr(task_run, "main", lambda _, settings: seen.append(settings) or 0)
    monkeypatch.setattr(cli, "confirmed", lambda jobs: [])  # there is no such file
    odd = ["dataset=csv", "dataset.path=daten (1).csv", "dataset.target=été", f"results_dir={tmp_path / 'é'}"]
    out("-m", "loss=f1,ce", *odd)
    assert {(one.dataset.options["path"], one.dataset.options["target"]) for one in seen} == {("daten (1).csv", "été")}
    assert [one.loss.name for one in seen] == ["f1", "ce"]


def test_a_failed_job_of_a_sweep_does_not_stop_the_others(monkeypatch, east_run):
    def task(command, *_):
        if command.get("loss") == "ce":
            raise RuntimeError("no luck")
        print("done", command.get("loss"))
        return 0

    monkeypatch.setattr(task_run, "main", task)
    answer = east_run("-m", "loss=f1,ce,mcc", "dataset=digits", "preset=quick")
    assert answer.code == 1
    assert re.findall("done .*", answer.out) == ["done f1", "done mcc"]
    assert "RuntimeError: no luck" in answer.err


@pytest.mark.parametrize(
    "words, expected",
    [
        (["task=table", "table=grid", "preset=quick"], "digits"),
        (["task=table", "table=grid", "preset=quick", "format=json"], '"digits"'),
        (["task=records"], "digits.jsonl  2 records"),
        (["task=data", "dataset=digits"], "1,797"),
        (["task=data", "dataset=digits", "split.seed=trial"], "the sizes are those of split.seed=0"),
        (["task=data", "dataset=all"], "mammography"),
        (["task=reproduce", "table=quickstart", "preset=quick", "dry_run=true"], "3 runs to do"),
        (["task=reproduce", "table=all", "datasets=cifar10_frog", "dry_run=true"], "all: 3 runs to do"),
    ],
)
def test_a_task_prints(words, expected, tmp_path, tiny_results, monkeypatch, out):
    shutil.copytree(tiny_results, tmp_path, dirs_exist_ok=True)
    nothing = plan.Plan([], executors.Place(Executor(name="inline")), None)  # neither data nor time
    monkeypatch.setattr(plan, "made", lambda *_, **__: nothing)
    text = out(*words)
    assert expected in text
    if "format=json" in words:
        assert json.loads(text)


def test_reproduce_runs_the_requested_part_of_a_table(out):
    try:
        load("mammography", limit=100)
    except DataError as error:
        pytest.skip(str(error).splitlines()[0])
    words = ["task=reproduce", "table=east_v2_1", "preset=quick", "dry_run=true"]
    text = out(*words, "datasets=[mammography]", "losses=[f1,ce]")
    assert "east_v2_1: 2 runs to do" in text
    assert "mammography ce" in text
    assert "note: there are no records in " in text


@pytest.mark.parametrize(
    "words, message",
    [
        (["datasets=[mamography]"], "unknown dataset of table=east_v2_1 'mamography', did you mean 'mammography'?"),
        (["losses=[f1,wmw]"], "unknown loss of table=east_v2_1 'wmw'"),
        (["table=all", "dataset=digits"], "unknown dataset of table=all 'digits'"),
    ],
)
def test_reproduce_refuses_what_its_table_does_not_have(words, message, east_run):
    answer = east_run("task=reproduce", "table=east_v2_1", "dry_run=true", *words)
    assert answer.code == cli.BAD_CONFIG
    assert message in answer.err


def test_reproduce_trains_what_the_user_typed_even_if_the_table_is_full(tmp_path, monkeypatch, east_run):
    """The user's values win over the table's, records of the table are of other trials, and nothing is done twice."""
    table = tables.spec("quickstart")
    short = table.overrides | {"trials": 1, "protocol.max_epochs": 1}
    monkeypatch.setattr(tables, "spec", lambda name, folder=None: changed(table, overrides=short, trials=1))
    of_table = ["task=reproduce", "table=quickstart", "loss=ce", "executor=inline"]
    assert east_run(*of_table).code == 0
    assert "every run is done" in east_run(*of_table, "dry_run=true").out
    smaller = [*of_table, "model.hidden=[8]", "trials=2"]
    told = east_run(*smaller).out
    assert "quickstart: 1 run to do, except for trials on record" in told
    assert "note: trials with model.hidden=[8] do not fill cells of the table" in told
    assert re.search(r"^digits ce +2 +0\.\d{3} ", told, re.MULTILINE)
    before = record_files(tmp_path)
    configs = [json.loads(text) for text in before.values()]
    found = sorted((record["config"]["model"]["hidden"], record["seed"]) for record in configs)
    assert found == [([8], 0), ([8], 1), ([64, 32], 0)]
    assert east_run(*smaller).out == told
    assert record_files(tmp_path) == before


def test_the_quickstart_fills_its_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = tables.spec("quickstart")
    short = table.overrides | {"trials": 2, "protocol.max_epochs": 30}
    monkeypatch.setattr(tables, "spec", lambda name, folder=None: changed(table, overrides=short, trials=2))
    assert cli.run([]) == 0
    told = capsys.readouterr().out
    assert "Metric CE" in told
    assert re.search(r"\nf1_macro: .* over CE .* with 2 splits\.\nNext: your own table: east-run task=compare", told)
    assert cli.run(["task=reproduce", "table=quickstart", "dry_run=true"]) == 0
    assert "quickstart: every run is done" in capsys.readouterr().out


RARE = ["dataset=synthetic", "dataset.imbalance=200", "dataset.rows=2000", "preset=quick", "protocol.max_epochs=2",
        "losses=[f1,ce]", "hyper.lr=0.01", "trials=1"]  # fmt: skip


def test_a_run_notes_what_its_scores_mean(out):
    assert out(*TINY, "dataset.limit=30", "trials=1").count("classes have no test rows: try split.stratify=true") == 1
    text = out(*RARE)
    assert "synthetic f1: 1 of 1 trials predict one class only; try protocol.warmup=10 or a lower hyper.lr" in text
    assert text.count("loss.average=positive") == 1, "cross-entropy has no average"


def test_a_model_that_cannot_be_saved_is_reported_and_fails_the_command(tmp_path, capsys):
    (tmp_path / "models").write_text("in the way")
    arguments = ["task=train", *TINY, "protocol.max_epochs=1", "save_model=true",
                 f"results_dir={tmp_path}"]  # fmt: skip
    assert cli.run(arguments) == 1
    assert "could not be saved" in capsys.readouterr().out
    (tmp_path / "models").unlink()
    assert cli.run(arguments) == 0
    assert "could not be saved" not in capsys.readouterr().out
