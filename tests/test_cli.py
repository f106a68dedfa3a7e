"""east-run as its users meet it: help, exit codes, messages, sweeps; and what a kill at any moment leaves behind."""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from east import cli
from east.choices import CONF, groups
from east.settings.compose import settings
from east.tasks import run as task_run

TINY = ["dataset=digits", "dataset.limit=120", "model.hidden=[8]", "protocol.max_epochs=2", "protocol.decisions=[]",
        "device=cpu", "preset=quick"]  # fmt: skip
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}


def command(*arguments):
    return [sys.executable, "-m", "east.cli", *arguments]


def east_run(*arguments, cwd=None):
    """Run east-run in a process of its own."""
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    return subprocess.run(command(*arguments), capture_output=True, text=True, cwd=cwd, env=environment, timeout=900)


def records_in(folder):
    return {path: path.read_text() for path in sorted(Path(folder).rglob("seed-*.json"))}


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
    """No torch, pandas, scikit-learn or Hydra; within a second of processor time."""
    answer = subprocess.run([sys.executable, "-X", "importtime", "-m", "east.cli", "--help"], capture_output=True,
                            text=True, env=ENVIRONMENT, check=True)  # fmt: skip
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


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["task=tabel"], 2, "did you mean 'table'?"),
        (["loss=f11"], 2, "did you mean 'f1'?"),
        (["mammography"], 2, "'mammography': expected name=value, did you mean dataset=mammography?"),
        (["compare"], 2, "did you mean task=compare or preset=compare?"),
        (["qqqq"], 2, "'qqqq': expected name=value, such as dataset=mammography"),
        (["hyper.batch_size=0.5"], 2, "whole number"),
        (["losses=[f1,cee]"], 2, "did you mean 'ce'?"),
        (["-m", "loss=f1,cee"], 2, "did you mean 'ce'?"),
        (["-m", "loss=f1", "trials=2.5,3"], 2, "whole number"),
        (["dataset=digits", "dataset.positive=12"], 2, "positive must be a digit"),
        (["task=data", "dataset=digits", "dataset.imbalance=0"], 2, "at least 1; got 0"),
        (["dataset=digits", "split.fractions=[0.8,0.2]"], 2, "three positive numbers"),
        (["loss=fbeta", "loss.beta={dgo: 2}"], 2, "unknown class 'dgo'"),
        (["dataset=csv", "dataset.path=/nowhere.csv", "dataset.target=y"], 3, "/nowhere.csv"),
        (["--config-dir", "/nowhere", "loss=f1"], 2, "expected a folder"),
    ],
)
def test_errors_are_a_line_and_an_exit_code(arguments, code, words, capsys, tmp_path):
    assert cli.run([*arguments, f"results_dir={tmp_path / 'results'}"]) == code
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error
    assert len(error.splitlines()) <= 3
    assert not (tmp_path / "results").exists()


def test_debug_shows_the_traceback():
    answer = east_run("loss=f11", "debug=true")
    assert "Traceback" in answer.stderr


def test_train_then_run_then_print(tmp_path, capsys):
    results = f"results_dir={tmp_path}"
    assert cli.run(["task=train", "seed=1", *TINY, results]) == 0
    assert "digits f1 seed 1: 2 epochs" in capsys.readouterr().out
    assert [path.name for path in records_in(tmp_path)] == ["seed-1.json"]
    assert cli.run([*TINY, results, "dry_run=true"]) == 0
    assert re.search(r"digits f1 +none +1 of 2", capsys.readouterr().out)
    assert cli.run([*TINY, results]) == 0
    printed = capsys.readouterr().out
    assert "digits (120 rows)" in printed
    before = records_in(tmp_path)
    assert [path.name for path in before] == ["seed-0.json", "seed-1.json"]
    assert cli.run([*TINY, results]) == 0
    assert capsys.readouterr().out == printed
    assert records_in(tmp_path) == before


def test_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch, capsys):
    """What is done is printed, with a warning of one line in place of the files."""
    arguments = [*TINY, "dataset.limit=null", "trials=1", f"results_dir={tmp_path}"]
    table = ["task=table", "table=grid", "preset=quick", f"results_dir={tmp_path}"]
    printed = {}
    for command in (arguments, table):
        assert cli.run(command) == 0
        printed[command[0]] = capsys.readouterr().out
    shutil.rmtree(tmp_path / "tables")
    shutil.rmtree(tmp_path / "figures")

    def mkdir(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for command in (arguments, table):
        assert cli.run(command) == 0
        told = capsys.readouterr()
        assert re.fullmatch(r"warning: not written: .*Permission denied.*\n", told.err)
        missing = [line for line in printed[command[0]].splitlines() if line not in told.out]
        assert [line.split()[0] for line in missing] == ["figure:" if command is arguments else "written"]


def test_the_quickstart_compares_two_losses(monkeypatch):
    seen = []
    monkeypatch.setattr(task_run, "main", lambda command: seen.append(command.values) or 0)
    cli.run([])
    cli.run(["device=cpu"])
    cli.run(["dataset=digits"])
    assert seen == [cli.QUICKSTART, {**cli.QUICKSTART, "device": "cpu"}, {"dataset": "digits"}]


def test_the_whole_config_can_be_shown(capsys):
    assert cli.run(["--cfg", "job", "loss=ce", "dataset=adult"]) == 0
    shown = capsys.readouterr().out
    assert "lr: 0.001" in shown
    assert "name: mlp" in shown


def test_shells_complete_names():
    asked = ENVIRONMENT | {"COMP_LINE": "east-run loss=btg_f"}
    answer = subprocess.run(command("-sc", "query=bash"), capture_output=True, text=True, env=asked, check=True)
    assert answer.stdout.split() == ["loss=btg_f1", "loss=btg_f2", "loss=btg_f3"]
    answer = subprocess.run(command("-sc", "install=bash"), capture_output=True, text=True, env=asked, check=True)
    assert "complete -o nospace" in answer.stdout


def test_a_sweep_writes_below_results_dir_alone(tmp_path):
    answer = east_run("-m", "loss=f1,ce", *TINY, "trials=1", "results_dir=out", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.parts[-3] for path in records_in(tmp_path)} == {"f1", "ce"}
    assert re.findall(r"^# (loss=\w+)", answer.stdout, re.MULTILINE) == ["loss=f1", "loss=ce"]


def test_a_sweep_takes_paths_as_they_are(tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(task_run, "main", lambda command: seen.append(settings(command)) or 0)
    monkeypatch.setattr(sys, "argv", ["east-run"])
    odd = ["dataset=csv", "dataset.path=daten (1).csv", "dataset.target=été", f"results_dir={tmp_path / 'é'}"]
    assert cli.run(["-m", "loss=f1,ce", *odd]) == 0
    assert {(one.dataset.options["path"], one.dataset.options["target"]) for one in seen} == {("daten (1).csv", "été")}
    assert [one.loss.name for one in seen] == ["f1", "ce"]


def test_a_job_of_a_sweep_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def task(command):
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


def test_table_records_and_data_print(tmp_path, capsys):
    cli.run([*TINY, "dataset.limit=null", "trials=1", f"results_dir={tmp_path}"])
    capsys.readouterr()
    assert cli.run(["task=table", "table=grid", "preset=quick", f"results_dir={tmp_path}"]) == 0
    assert "digits" in capsys.readouterr().out
    assert cli.run(["task=table", "table=grid", "preset=quick", "format=json", f"results_dir={tmp_path}"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert cli.run(["task=records", f"results_dir={tmp_path}"]) == 0
    assert "digits.jsonl  1 records" in capsys.readouterr().out
    assert cli.run(["task=data", "dataset=digits"]) == 0
    assert "1,797" in capsys.readouterr().out
    assert cli.run(["task=data", "dataset=digits", "split.seed=trial"]) == 0
    assert "the sizes are those of split.seed=0" in capsys.readouterr().out
    assert cli.run(["task=data", "dataset=all"]) == 0
    assert "mammography" in capsys.readouterr().out
    assert (
        cli.run(["task=reproduce", "table=quickstart", "preset=quick", "dry_run=true", f"results_dir={tmp_path}"]) == 0
    )
    assert "2 runs are missing" in capsys.readouterr().out


def test_reproduce_runs_what_is_asked_for_of_a_table(tmp_path, capsys):
    table = ["task=reproduce", "table=east_v2_1", "preset=quick", "dry_run=true", f"results_dir={tmp_path}"]
    assert cli.run([*table, "datasets=[mammography]", "losses=[f1,ce]"]) == 0
    told = capsys.readouterr().out
    assert "east_v2_1: 2 runs are missing" in told
    assert "mammography ce" in told
    assert cli.run([*table, "dataset=adult", "loss=mcc"]) == 0
    assert "east_v2_1: 1 runs are missing" in capsys.readouterr().out
    for wrong in (["task=reproduce"], [*table, "protocol=btg"]):
        assert cli.run([*wrong, f"results_dir={tmp_path}"]) == 2
        assert "takes a table=…, and that table's protocol. Choices: all, east_v2_1" in capsys.readouterr().err


def test_reproduce_shows_what_fills_no_cell(tmp_path, capsys):
    short = ["table=quickstart", "protocol.max_epochs=1", "executor=inline", f"results_dir={tmp_path}"]
    assert cli.run(["task=reproduce", *short]) == 0
    told = capsys.readouterr().out
    assert "note: with protocol.max_epochs=1 trials fill no cell of the table" in told
    assert "digits (imbalance 10)" in told
    assert "preset quick" in told


def test_the_quickstart_fills_its_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run([]) == 0
    assert "digits (imbalance 10)" in capsys.readouterr().out
    assert cli.run(["task=table", "table=quickstart"]) == 0
    assert "(2/2)" in capsys.readouterr().out
    assert cli.run(["task=reproduce", "table=quickstart", "dry_run=true"]) == 0
    assert "quickstart: 0 runs are missing" in capsys.readouterr().out


def test_classes_without_test_rows_are_told(tmp_path, capsys):
    few = ["dataset=digits", "dataset.limit=30", "protocol.max_epochs=1", "trials=1", f"results_dir={tmp_path}"]
    assert cli.run(few) == 0
    assert "classes have no test rows: try split.stratify=true" in capsys.readouterr().out


def test_a_run_shows_the_metric_it_was_trained_for(tmp_path, capsys):
    small = ["dataset=digits", "dataset.limit=300", "protocol.max_epochs=1", "trials=2", f"results_dir={tmp_path}"]
    assert cli.run([*small, "loss=metric", "loss.metric=kappa"]) == 0
    shown = capsys.readouterr().out
    assert "trained_for" in shown
    assert re.search(r"^kappa .*\d\.\d{3}", shown, re.MULTILINE)
    assert cli.run([*small, "loss=f1"]) == 0
    assert "trained_for" not in capsys.readouterr().out


def test_a_run_says_when_its_trials_have_collapsed(tmp_path, capsys):
    rare = ["dataset=synthetic", "dataset.imbalance=200", "dataset.rows=2000", "preset=quick", "protocol.max_epochs=2"]
    assert cli.run([*rare, "losses=[f1,ce]", "hyper.lr=0.01", "trials=1", f"results_dir={tmp_path}"]) == 0
    told = capsys.readouterr().out
    assert "synthetic f1: 1 of 1 trials predict one class only; try protocol.warmup=10, a lower hyper.lr or" in told
    assert told.count("loss.average=positive") == 1, "cross-entropy has no average"


def test_protocols_and_presets_of_ones_own(tmp_path, capsys):
    """Those of --config-dir are run and shown like ours."""
    for group, name, ours in (("protocol", "mine", "east"), ("preset", "tiny", "quick")):
        text = (CONF / group / f"{ours}.yaml").read_text().replace(f"name: {ours}", f"name: {name}")
        (tmp_path / "own" / group).mkdir(parents=True)
        (tmp_path / "own" / group / f"{name}.yaml").write_text(text)
    small = ["dataset=digits", "dataset.limit=300", "loss=ce", "protocol.max_epochs=1", "trials=2", "executor=inline"]
    for own in (["protocol=mine", "preset=quick"], ["preset=tiny"]):
        assert cli.run(["--config-dir", f"{tmp_path}/own", *small, *own, f"results_dir={tmp_path}"]) == 0
        told = capsys.readouterr().out
        assert "f1_macro" in told
        assert own[-1].replace("=", " ") in told


@pytest.mark.parametrize("task", ["train", "run"])
def test_a_model_that_could_not_be_saved_is_told_and_fails_the_command(task, tmp_path, monkeypatch, capsys):
    (tmp_path / "models").write_text("in the way")
    small = ["dataset=digits", "dataset.limit=300", "loss=f1", "preset=quick", "protocol.max_epochs=1", "trials=1"]
    arguments = [f"task={task}", *small, "save_model=true", "executor=inline", f"results_dir={tmp_path}"]
    assert cli.run(arguments) == 1
    assert "could not be saved" in capsys.readouterr().out
    (tmp_path / "models").unlink()
    assert cli.run(arguments) == 0
    assert "could not be saved" not in capsys.readouterr().out


LONG = ["dataset=digits", "dataset.limit=400", "device=cpu", "preset=quick", "protocol.max_epochs=6", "model=mlp",
        "hyper.batch_size=1024", "protocol.decisions=[]", "annealing=none"]  # fmt: skip


PROCESSES = ["executor=processes", "executor.slots=2"]


def start(folder, *arguments):
    """east-run in a process group of its own; with batches of 1024 every trial is a job.

    A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
    """
    arguments = arguments if any(a.startswith("executor=") for a in arguments) else [*arguments, *PROCESSES]
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    return subprocess.Popen(command(*LONG, f"results_dir={folder}", *arguments), env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip


def wait_for_records(process, folder, count, seconds=300):
    deadline = time.monotonic() + seconds
    while len(records_in(folder)) < count and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def group_of(leader):
    """Living processes of a process group."""
    stats = subprocess.run(["ps", "-eo", "pid=,pgid=,stat="], capture_output=True, text=True, check=True).stdout
    fields = [line.split() for line in stats.splitlines()]
    return [int(pid) for pid, group, state in fields if int(group) == leader and not state.startswith("Z")]


@pytest.mark.slow
def test_killed_at_ten_random_moments(tmp_path):
    """After kill -9 ten times and one last run: 40 records, none broken, none written again once it existed."""
    dice, seen = random.Random(0), {}
    for _ in range(10):
        process = start(tmp_path, "trials=40")
        wait_for_records(process, tmp_path, len(seen) + dice.randrange(4))
        time.sleep(dice.random())
        process.kill()
        process.communicate()
        time.sleep(0.5)  # workers end when they notice
        now = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in records_in(tmp_path)}
        assert now.items() >= seen.items()
        seen = now
    process = start(tmp_path, "trials=40")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "(40)" in out
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in seen} == seen
    texts = records_in(tmp_path)
    assert sorted(json.loads(text)["seed"] for text in texts.values()) == list(range(40))
    assert {json.loads(text)["status"] for text in texts.values()} == {"done"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_then_resumed(tmp_path, number):
    """Ctrl-C reaches every process of the group, SIGTERM the first alone: code 130, a hint, no traceback, no orphan."""
    process = start(tmp_path, "trials=12")
    wait_for_records(process, tmp_path, 2)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Finished trials are saved. Rerun the same command to resume." in err
    assert "Traceback" not in err
    assert "leaked" not in err
    deadline = time.monotonic() + 20
    while group_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    kept = records_in(tmp_path)
    assert 2 <= len(kept) < 12
    process = start(tmp_path, "trials=12")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert len(records_in(tmp_path)) == 12
    assert records_in(tmp_path).items() >= kept.items()


@pytest.mark.slow
def test_a_killed_worker_is_replaced(tmp_path):
    process = start(tmp_path, "trials=12")
    wait_for_records(process, tmp_path, 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(workers[-1]), signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert len(records_in(tmp_path)) == 12


@pytest.mark.slow
def test_two_identical_commands_at_once(tmp_path):
    both = [start(tmp_path, "trials=8") for _ in range(2)]
    assert [(process.communicate(timeout=600), process.returncode)[1] for process in both] == [0, 0]
    assert sorted(json.loads(text)["seed"] for text in records_in(tmp_path).values()) == list(range(8))
    assert not list(Path(tmp_path).rglob("*.tmp"))


@pytest.mark.slow
def test_a_full_disk_is_told_and_survived(tmp_path):
    """A file system of 300 kB: it fills up, the command stops, what was written is whole."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs privileges")
    try:
        process = start(tmp_path, "trials=40")
        _, err = process.communicate(timeout=600)
        assert process.returncode == 1
        assert "No space left" in err
        assert "Rerun the same command to resume." in err
        assert "Traceback" not in err
        kept = records_in(tmp_path)
        assert 0 < len(kept) < 40
        assert all(json.loads(text)["status"] == "done" for text in kept.values())
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        answer = east_run(*LONG, *PROCESSES, "trials=40", f"results_dir={tmp_path}")
        assert answer.returncode == 1
        assert "Read-only file system" in answer.stderr
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


CHECKPOINTING = """
import sys
from east import cli
from east.training import engine, population
engine.CHECKPOINT_SECONDS = 0.0
loaded = population.Population.load
def load(self, file):
    open({marks!r}, "a").write(file.name + "\\n")
    loaded(self, file)
population.Population.load = load
if __name__ == "__main__":
    sys.exit(cli.run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_killed_trial_goes_on_from_its_checkpoint(tmp_path):
    """The populations of the second command are those of the first, their results those of an undisturbed one."""
    script, marks = tmp_path / "run.py", tmp_path / "marks"
    script.write_text(CHECKPOINTING.format(marks=str(marks)))
    epochs = [f"protocol.{name}=400" for name in ("max_epochs", "stage_epochs", "patience")]
    long = [*LONG, *PROCESSES, *epochs, "trials=3", f"results_dir={tmp_path / 'results'}"]
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path(cli.__file__).parent.parent)}
    process = subprocess.Popen([sys.executable, str(script), *long], env=environment, start_new_session=True)
    deadline = time.monotonic() + 300
    while len(list(tmp_path.rglob("*.safetensors"))) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (stale,) = {path.parent for path in tmp_path.rglob("*.safetensors")}
    (stale / "of-another-grouping.safetensors").touch()
    assert subprocess.run([sys.executable, str(script), *long], env=environment, timeout=900).returncode == 0
    assert len(set(marks.read_text().split())) >= 1
    assert not list(tmp_path.rglob("*.safetensors"))
    undisturbed = [argument for argument in long if not argument.startswith("results_dir")]
    assert east_run(*undisturbed, f"results_dir={tmp_path / 'other'}").returncode == 0
    ours, theirs = (
        {path.name: json.loads(text) for path, text in records_in(tmp_path / name).items()}
        for name in ("results", "other")
    )
    assert ours.keys() == theirs.keys()
    assert all(ours[name]["scores"] == theirs[name]["scores"] for name in ours)
    assert all(ours[name]["history"] == theirs[name]["history"] for name in ours)


def descendants(pid):
    """All processes below this one."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [one for child in children for one in (int(child), *descendants(int(child)))]


def kill(process):
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@pytest.fixture
def ray_cluster(monkeypatch):
    """Two nodes on loopback: their address and the processes of head and second node, which has most of the cores."""
    pytest.importorskip("ray")
    with socket.socket() as free, tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
                    "PYTHONPATH": str(Path(cli.__file__).parent.parent)}  # fmt: skip
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
            monkeypatch.setitem(ENVIRONMENT, name, value)
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--object-store-memory=100000000"]
        head = [*ray, "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=1",
                "--include-dashboard=false", f"--temp-dir={folder}"]  # fmt: skip
        second = [*ray, f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.3", "--num-cpus=2"]
        nodes = []
        try:
            for start_node in (head, second):
                nodes.append(subprocess.Popen(start_node, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
                for line in nodes[-1].stdout:
                    if "Ray runtime started" in line:
                        break
                assert nodes[-1].poll() is None
            yield f"127.0.0.1:{port}", nodes[1]
        finally:
            for node in nodes:
                kill(node)


@pytest.mark.slow
def test_ray_survives_the_loss_of_a_node(tmp_path, ray_cluster):
    """One of two nodes is killed in the middle: all trials finish, with the results of executor=inline."""
    address, node = ray_cluster
    longer = ["trials=8", "protocol.max_epochs=60", "protocol.stage_epochs=60", "protocol.patience=60"]
    process = start(tmp_path / "ray", *longer, "executor=ray", f"executor.address={address}")
    wait_for_records(process, tmp_path / "ray", 1)
    kill(node)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "failed" not in err
    assert "(8)" in out
    alone = start(tmp_path / "inline", *longer, "executor=inline")
    alone.communicate(timeout=600)
    ours, theirs = (
        {path.name: json.loads(text) for path, text in records_in(tmp_path / name).items()}
        for name in ("ray", "inline")
    )
    assert len(ours) == 8
    assert ours.keys() == theirs.keys()
    assert all(ours[name]["confusion"] == theirs[name]["confusion"] for name in ours)


@pytest.mark.slow
def test_submitit_trains_the_same(tmp_path):
    pytest.importorskip("submitit")
    process = start(tmp_path / "submitit", "trials=3", "executor=submitit", "executor.cluster=local")
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    alone = start(tmp_path / "inline", "trials=3", "executor=inline")
    alone.communicate(timeout=600)
    ours, theirs = (
        {path.name: json.loads(text) for path, text in records_in(tmp_path / name).items()}
        for name in ("submitit", "inline")
    )
    assert len(ours) == 3
    assert all(ours[name]["confusion"] == theirs[name]["confusion"] for name in theirs)
