"""A user's mistake gives exit code 2 or 3 and a few lines that name it, at once and without a traceback."""

import os
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from east.lab import cli
from tests.commands import TINY, environment

SMALL = ["dataset=digits", "dataset.limit=120", "preset=quick"]
TYPOS = """
task=tabel                                | 2 | did you mean 'table'?
mammography                               | 2 | did you mean dataset=mammography?
compare                                   | 2 | did you mean task=compare or preset=compare?
one.csv                                   | 2 | did you mean dataset.path=one.csv?
dataset=one.csv                           | 2 | did you mean dataset.path=one.csv?
dataset=adlut                             | 2 | did you mean 'adult'?
loss=f11                                  | 2 | did you mean 'f1'?
los=f1                                    | 2 | did you mean 'loss'?
preset=papr                               | 2 | did you mean 'paper'?
losses=[f1,cee]                           | 2 | did you mean 'ce'?
datasets=[adultt]                         | 2 | did you mean 'adult'?
device=gpu                                | 2 | did you mean 'cuda'? Choices: auto, cpu, cuda, mps
selection=val_los                         | 2 | did you mean 'val_loss'?
path=one.csv                              | 2 | did you mean 'dataset.path'?
lr=0.1                                    | 2 | did you mean 'hyper.lr'?
hyper.lrr=1                               | 2 | did you mean 'hyper.lr'?
protocol.hyper.lrr=1                      | 2 | did you mean
preset.grid.lrr=[1]                       | 2 | did you mean 'preset.grid.lr'?
annealing.gamma=1                         | 2 | Choices: annealing.T0
dataset=csv dataset.drop.foo=1            | 2 | did you mean 'dataset.drop'?
hyper.lr.foo=3                            | 2 | hyper.lr
hyper.lr=fast                             | 2 | hyper.lr: expected a valid number, got 'fast'
hyper.lr=-1                               | 2 | hyper.lr
hyper.dropout=1                           | 2 | hyper.dropout
hyper.batch_size=0.5                      | 2 | hyper.batch_size
hyper=3                                   | 2 | hyper:
trials=0                                  | 2 | trials: expected greater than or equal to 1, got 0
seed=-1                                   | 2 | seed
seed=4294967296                           | 2 | seed
seed=4294967295 trials=2                  | 2 | seed=4294967295 trials=2: expected seeds below 2^32
dataset.limit=2                           | 2 | dataset.limit
protocol.hyper.batch_size={table:0.5}     | 2 | hyper.batch_size
protocol.grid.lr=[]                       | 2 | protocol.grid.lr: expected at least 1 item
protocol.grid.batch_size.table=[0]        | 2 | protocol.grid.batch_size.table
executor=processes executor.slots=0       | 2 | executor.slots
split.fractions=[0.8,0.1,0.2]             | 2 | three positive numbers
split.seed=abc                            | 2 | split.seed: expected a valid integer or 'trial', got 'abc'
model.hidden=512                          | 2 | model.hidden: expected a value such as [512, 256, 128], got 512
dataset=synthetic dataset.rows=many       | 2 | dataset.rows: expected a value such as 10000, got 'many'
loss=rf loss.n_estimators=abc             | 2 | loss.n_estimators: expected a value such as 100, got 'abc'
loss._target_=3                           | 2 | loss._target_
dataset=adult preset=budget preset.grid.batch_size={image:[1]} | 2 | expected sizes for 'table' or 'adult'
model=darknet19                           | 2 | does not take table data; choices for digits: mlp
annealing=geometric loss=ce               | 2 | needs a loss with a temperature
model=custom                              | 2 | model=custom needs model.target=…
dataset.name=foo                          | 2 | dataset.name comes from the chosen file: write dataset=… instead
dataset.kind=image                        | 2 | write dataset=… instead
protocol={search:foo}                     | 2 | write search=… instead
protocol.model.table=foo                  | 2 | write model=… instead
loss=rf search=grid                       | 2 | search=grid: a search needs a loss that trains a network, got rf
losses=[rf,logistic] search={factor:3}    | 2 | search.factor=3: a search needs a loss that trains a network
losses=[]                                 | 2 | losses: expected a list
losses=[f1,ce] loss={beta:2}              | 2 | loss.beta=2: `loss` and `loss.*` cannot be combined with losses=[…]
loss=f1,ce                                | 2 | several values need -m
dataset.path=a,b.csv                      | 2 | or quotes: "dataset.path='a, b'"
+extra=1                                  | 2 | unknown key 'extra'
~loss                                     | 2 | ~loss: nothing can be deleted from the config
hydra.run.dir=here                        | 2 | hydra.run.dir=here: Hydra itself only runs sweeps (-m)
hydra.verbose=true                        | 2 | debug=true
experiment=mine                           | 2 | --config-dir DIR can be presets
--config-name mine                        | 2 | --config-name mine; there is one config: --config-dir DIR adds
-p hyper                                  | 2 | -p hyper shows a part of the config: add --cfg job
loss=[f1                                  | 2 | inside the shell's quotes: "loss='…'" or "loss=['…']"
dataset=csv dataset.drop=[été,b]          | 2 | "dataset.drop='…'" or
été=1                                     | 2 | cannot read été=1: expected name=value
-m loss=f1,cee                            | 2 | did you mean 'ce'?
-m trials=2.5,3                           | 2 | trials
--nonsense                                | 2 | --nonsense
--config-dir                              | 2 | --config-dir
--config-dir nowhere loss=f1              | 2 | expected a folder
--config-dir= task=data                   | 2 | expected a folder
--config-dir conf loss=broken             | 2 | broken.yaml
task=reproduce                            | 2 | task=reproduce needs table=…: all, east_v2_1,
task=reproduce table=btg_1 protocol=btg   | 2 | protocol=btg: table=btg_1 has a protocol of its own
task=report dataset.limit=10              | 2 | dataset.limit=10: task=report does not read it
task=table table=nope                     | 2 | unknown table 'nope'
task=table format=docx                    | 2 | docx
task=predict keep={a:1}                   | 2 | keep
checkpoint=m input=one.csv output=b.csv   | 2 | did you mean task=predict or task=evaluate or task=export?
score=mcc minutes=1                       | 2 | score=mcc: task=run does not read it; did you mean task=compare?
table=east_v2_1                           | 2 | did you mean task=reproduce or task=table?
task=run minutes=5 score=mcc              | 2 | minutes=5: task=run does not read it; did you mean task=compare?
task=run checkpoint=nowhere               | 2 | task=predict or task=evaluate or task=export?
task=data hyper.lr=5                      | 2 | hyper.lr=5: task=data does not read it
task=report results_dir=reslts            | 2 | results_dir=reslts: there is no such folder
task=records results_dir=reslts           | 2 | results_dir=reslts: there is no such folder
task=table results_dir=reslts             | 2 | results_dir=reslts: there is no such folder
"""
MISFITS = """
loss.nothing=1                            | 2 | unknown parameter of f1 'nothing'
loss.temprature=0.1                       | 2 | unknown parameter of f1 'temprature'
loss.temperature=-1                       | 2 | temperature
loss=fbeta loss.beta={dgo:2}              | 2 | unknown class 'dgo'. Choices: 0, 1, 2
loss=metric loss.metric=f11               | 2 | did you mean 'f1'?
loss=metric loss.metric=nowhere.f         | 2 | 'nowhere.f' cannot be imported
loss=metric loss.metric=fbeta loss.betta=2 | 2 | did you mean 'beta'?
loss=metric loss.parameters.beta=2        | 2 | unknown parameter of balanced_accuracy 'beta'
loss._target_=east.losses.Dise            | 2 | cannot import 'east.losses.Dise'
loss=focal loss.gamma=abc                 | 2 | loss=focal: unsupported operand type
loss=ce loss.ignore_index=3               | 2 | loss.ignore_index: it has no effect
loss=rf loss.n_estimaters=5               | 2 | did you mean 'n_estimators'?
loss=ccs loss.decode=foo dry_run=true     | 2 | unknown decode 'foo'. Choices: argmax, set
model.hidden=[-4]                         | 2 | model.hidden
model=custom model.target=nowhere.Net     | 2 | cannot import 'nowhere.Net'
protocol.decisions=[plugin_f11] loss=rf   | 2 | did you mean 'plugin_f1'?
protocol.decisions=[thresholds]           | 2 | decision 'thresholds' is for two classes
task=data dataset=digits dataset.positive=12 | 2 | positive must be a digit
dataset=digits executor=ray executor.address=127.0.0.1:1 | 2 | no Ray cluster answers there
dataset=csv                               | 3 | dataset.path
dataset.path=nowhere.csv dataset.target=y | 3 | nowhere.csv
dataset.path=on.csv dataset.target=y      | 3 | did you mean one.csv?
dataset.path=page.csv dataset.target=y    | 3 | it looks like HTML
dataset.path=one.csv                      | 3 | which column of one.csv is the class? Columns: x, y
dataset.path=one.csv dataset.target=y     | 3 | class
dataset.path=empty.csv dataset.target=y   | 3 | empty
dataset.path=noise.csv dataset.target=y   | 3 | noise.csv
dataset.path=folder                       | 3 | folder
dataset.path=folder dataset.target=y      | 2 | unknown key 'dataset.target'
dataset=images dataset.path=one.csv       | 3 | one.csv
dataset=mammography data_dir=nowhere      | 3 | nowhere
results_dir=/proc/nowhere                 | 2 | cannot be written to
task=reproduce table=east_v2_9            | 2 | did you mean 'east_v2_
task=predict                              | 2 | checkpoint
task=predict checkpoint=nowhere input=one.csv output=out.csv | 3 | nowhere
task=predict checkpoint=kept input=one.csv output=out.csv | 3 | did you mean kept/model?
task=compare dataset=digits score=f11     | 2 | did you mean
task=compare dataset=digits score=auroc   | 2 | choose another score
task=compare dataset=digits score=cost    | 2 | score=cost needs costs=[[0,1],[10,0]]
task=compare dataset=digits candidates=forest | 2 | did you mean 'rf'?
task=compare dataset=digits candidates=   | 2 | candidates
"""
WORKS = """
+loss.slope=10 loss=anyloss --cfg job -p loss        | slope: 10
++hyper.lr=0.5 --cfg job --resolve -p hyper.lr       | 0.5
--cfg job dataset=adult loss=ce                      | name: mlp
task=compare --help                                  | minutes: null              # for task=compare
task=predict --help                                  | checkpoint: null
-m dataset=digits,synthetic task=data                | 1,797
-m loss=glob(btg_f*) dataset=synthetic dry_run=true  | synthetic btg_f3
"""


def rows(table: str) -> list[tuple[str, ...]]:
    return [tuple(part.strip() for part in line.split("|")) for line in table.strip().splitlines()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a few invalid files."""
    monkeypatch.chdir(tmp_path)
    Path("one.csv").write_text("x,y\n" + "1,a\n" * 40)
    Path("empty.csv").write_text("")
    Path("noise.csv").write_bytes(bytes(range(256)) * 8)
    Path("folder").mkdir()
    Path("page.csv").write_text("<!DOCTYPE html>\n<html></html>\n")
    Path("kept/model").mkdir(parents=True)
    Path("kept/model/model.json").write_text("{}")
    Path("conf/loss").mkdir(parents=True)
    Path("conf/loss/broken.yaml").write_text("name: [broken\n")
    return tmp_path


def check(code: int, said: str, expected: tuple[str, str]) -> None:
    assert (str(code), expected[1] in said) == (expected[0], True), said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) <= 6
    assert "What is finished is saved" not in said, "there is nothing"


@pytest.mark.parametrize(("words", "code", "expected"), [*rows(TYPOS), *rows(MISFITS)])
def test_a_mistake_gives_a_short_explanation(words, code, expected, folder, east_run):
    own = words.split()
    small = [] if any(word.startswith(("task=", "dataset", "seed=", "-")) for word in own) else SMALL
    results = [] if "results_dir" in words or words == "--config-dir" else ["results_dir=results"]
    answer = east_run(*results, *small, *own)
    check(answer.code, answer.err, (code, expected))
    assert not (folder / "results").exists()


@pytest.mark.parametrize(("words", "expected"), rows(WORKS))
def test_what_hydras_users_type_works(words, expected, folder, east_run):
    answer = east_run(*words.split())
    assert (answer.code, answer.err) == (0, "")
    assert expected in answer.out


def test_a_path_that_is_not_utf8_is_refused(folder, east_run):
    answer = east_run("dataset.path=caf\udce9.csv")
    check(answer.code, answer.err, ("2", r"caf\udce9.csv: expected UTF-8"))


@pytest.mark.parametrize("word", ["hydra/launcher=submitit_slurm", "hydra/launcher=joblib", "hydra/sweeper=optuna"])
def test_a_missing_plugin_is_named_with_its_extra(word, folder, monkeypatch, capsys):
    def version(distribution):
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr("east.lab.settings.command.version", version)
    name, kind = word.partition("=")[2].partition("_")[0], word.partition("/")[2].partition("=")[0]
    assert cli.run(["-m", "loss=f1,ce", word]) == 2
    assert f"needs hydra-{name}-{kind}: pip install" in capsys.readouterr().err


def test_mistyped_names_and_values_are_refused_without_torch(folder):
    """Checking them needs neither data nor a function's signature. In a process of their own, as users run them."""
    light = [words for words, *_ in rows(TYPOS) if not words.startswith("task=")]
    script = (
        "import sys; from east.lab import cli\n"
        f"codes = [cli.run(words.split()) for words in {light!r}]\n"
        "sys.exit(set(codes) != {2} or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert answer.returncode == 0, answer.stderr


def test_a_warning_is_printed_once(capsys):
    def task():
        for k in range(3):
            warnings.warn("a record is damaged", stacklevel=k + 1)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.guarded(task, []) == 0
    assert capsys.readouterr().err == "warning: a record is damaged\n"


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (TINY, 1)])
def test_a_closed_pipe_ends_a_command_without_a_traceback(words, code, tmp_path):
    """As in `east-run --help | head -1`, whose work is done, and in `east-run dataset=adult | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    results = [] if words == ["--help"] else [f"results_dir={tmp_path}"]
    command = [sys.executable, "-m", "east.lab.cli", *words, *results]
    answer = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment())
    os.close(writer)
    assert answer.returncode == code
    assert "Traceback" not in answer.stderr
    assert ("Rerun the same command to resume" in answer.stderr) == bool(code)
    assert not list(tmp_path.rglob("seed-*.json"))
