"""A user's mistake gives exit code 2 or 3 and a few lines that name it, at once and without a traceback."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from east.choices import ConfigError
from east.lab import cli
from east.lab.training.devices import pick_device
from tests.commands import TINY, environment

SMALL = ["dataset=digits", "dataset.limit=120", "preset=quick"]
TYPOS = """
task=tabel                                | did you mean 'table'?
mammography                               | did you mean dataset=mammography?
compare                                   | did you mean task=compare or preset=compare?
qqqq                                      | 'qqqq': expected name=value, such as dataset=mammography
one.csv                                   | did you mean dataset.path=one.csv?
dataset=one.csv                           | did you mean dataset.path=one.csv?
dataset=adlut                             | did you mean 'adult'?
loss=f11                                  | did you mean 'f1'?
loss=F1                                   | did you mean 'f1'?
los=f1                                    | did you mean 'loss'?
protocol=btgg                             | did you mean 'btg'?
preset=papr                               | did you mean 'paper'?
search=gridd                              | did you mean 'grid'?
executor=rayy                             | did you mean 'ray'?
losses=[f1,cee]                           | did you mean 'ce'?
datasets=[adultt]                         | did you mean 'adult'?
device=gpu                                | did you mean 'cuda'? Choices: auto, cpu, cuda, mps
selection=val_los                         | did you mean 'val_loss'?
annealing.outer=firm                      | unknown annealing.outer 'firm'. Choices: hard, soft
path=one.csv                              | did you mean 'dataset.path'?
lr=0.1                                    | did you mean 'hyper.lr'?
hyper.lrr=1                               | did you mean 'hyper.lr'?
hyper={lrr:1}                             | did you mean 'hyper.lr'?
protocol.hyper.lrr=1                      | did you mean
preset.grid.lrr=[1]                       | did you mean 'preset.grid.lr'?
annealing.gamma=1                         | Choices: annealing.T0
dataset=csv dataset.drop.foo=1            | did you mean 'dataset.drop'?
search.foo=1                              | unknown key 'search.foo'
hyper.lr.foo=3                            | hyper.lr
hyper.lr=fast                             | hyper.lr: expected a valid number, got 'fast'
hyper.lr=nan                              | hyper.lr
hyper.lr=-1                               | hyper.lr
hyper.dropout=1                           | hyper.dropout
hyper.average=2                           | hyper.average
hyper.batch_size=0.5                      | hyper.batch_size
hyper.batch_size=0                        | hyper.batch_size
hyper.batch_size=true                     | hyper.batch_size
hyper=3                                   | hyper:
trials=0                                  | trials: expected greater than or equal to 1, got 0
trials=2.5                                | trials
seed=-1                                   | seed
seed=4294967296                           | seed
seed=4294967295 trials=2                  | seed=4294967295 trials=2: expected seeds below 2^32
seed=4294967290 preset=budget             | seed=4294967290 trials=10
dataset.limit=2                           | dataset.limit
annealing.r=1.5                           | annealing.r
protocol.patience=0                       | protocol.patience
protocol.hyper.lr=-1                      | hyper.lr
protocol.hyper.batch_size={table:0.5}     | hyper.batch_size
protocol.grid.lr=[-1]                     | protocol.grid.lr
protocol.grid.lr=[]                       | protocol.grid.lr: expected a list with at least one entry
protocol.grid.batch_size.table=[0]        | protocol.grid.batch_size.table
executor=processes executor.slots=0       | executor.slots
split.fractions=[0.8,0.2]                 | three positive numbers
split.fractions=[0.8,0.1,0.2]             | three positive numbers
split.fractions=[a,b,c]                   | split.fractions
split.seed=-1                             | split.seed
split.seed=abc                            | split.seed: expected a valid integer or 'trial', got 'abc'
split.stratify=null                       | split.stratify
model.hidden=512                          | model.hidden: expected a value such as [512, 256, 128], got 512
dataset=synthetic dataset.rows=many       | dataset.rows: expected a value such as 10000, got 'many'
loss=rf loss.n_estimators=abc             | loss.n_estimators: expected a value such as 100, got 'abc'
loss._target_=3                           | loss._target_
dataset=adult preset=budget preset.grid.batch_size={image:[1]} | expected sizes for 'table' or 'adult', got ['image']
model=darknet19                           | does not take table data; choices for digits: mlp
dataset=cifar10 model=gnn                 | does not take image data
annealing=geometric loss=ce               | needs a loss with a temperature
model=custom                              | model.target has no default
dataset.name=foo                          | dataset.name comes from the chosen file: write dataset=… instead
dataset={name:foo}                        | write dataset=… instead
dataset.kind=image                        | write dataset=… instead
loss.has_temperature=maybe                | write loss=… instead
preset.search=grid                        | write search=… instead
protocol={search:foo}                     | write search=… instead
protocol.model.table=foo                  | write model=… instead
preset.dataset.digits.imbalance=3         | preset.dataset.digits.imbalance comes from the chosen file
loss=rf search=grid                       | search=grid: a search needs a loss that trains a network, got rf
losses=[rf,logistic] search={factor:3}    | search.factor=3: a search needs a loss that trains a network, got rf, log
losses=f1                                 | losses: expected a list
losses=[]                                 | losses: expected a list
losses=f1,ce                              | losses=[f1,ce]
losses=[f1,ce] loss={beta:2}              | loss.beta=2: `loss` and `loss.*` cannot be combined with losses=[…]
losses=[f1,ce] loss=mcc                   | loss=mcc: `loss`
datasets=[adult] dataset.split=pooled     | combined with datasets=[…]
loss=f1,ce                                | several values need -m
dataset.path=a,b.csv                      | dataset.path: several values need -m; a comma inside a value needs
+extra=1                                  | unknown key 'extra'
~loss                                     | ~loss: nothing can be deleted from the config
hydra.run.dir=here                        | hydra.run.dir=here: Hydra itself only runs sweeps (-m)
hydra.verbose=true                        | debug=true
hydra/launcher=joblib                     | Hydra itself only runs sweeps
experiment=mine                           | there is no group of experiments
--config-name mine                        | --config-name: there is one config; --config-dir DIR adds
-cn mine                                  | --config-name
--info                                    | --cfg job shows the config
-p hyper                                  | -p hyper shows a part of the config: add --cfg job
-m loss=f1,ce hydra/launcher=submitit_slurm | hydra/launcher=submitit_slurm needs hydra-submitit-launcher: pip install
-m loss=f1 hydra/sweeper=optuna           | hydra/sweeper=optuna needs hydra-optuna-sweeper: pip install
loss=[f1                                  | special characters need quotes inside the shell's quotes: "loss=['f1']"
dataset=csv dataset.drop=[été,b]          | "dataset.drop=['été','b']"
été=1                                     | cannot read été=1: expected name=value
-m loss=f1,cee                            | did you mean 'ce'?
-m trials=2.5,3                           | trials
--nonsense                                | --nonsense
--cfg jb                                  | jb
--config-dir                              | --config-dir
--config-dir nowhere loss=f1              | expected a folder
--config-dir= task=data                   | expected a folder
--config-dir conf loss=broken             | broken.yaml
task=reproduce                            | task=reproduce needs table=…: all, east_v2_1, 
task=reproduce table=btg_1 protocol=btg   | protocol=btg: table=btg_1 has a protocol of its own
task=table losses=[nonsense]              | losses=['nonsense']: task=table does not read it
task=report dataset.limit=10              | dataset.limit=10: task=report does not read it
task=table table=nope                     | unknown table 'nope'
task=table format=docx                    | docx
task=predict keep={a:1}                   | keep
checkpoint=m input=one.csv output=b.csv   | did you mean task=predict or task=evaluate or task=export?
score=mcc minutes=1                       | score=mcc: task=run does not read it; did you mean task=compare?
dataset.path=one.csv minutes=1            | minutes=1: task=run does not read it; did you mean task=compare?
table=east_v2_1                           | did you mean task=reproduce or task=table?
task=run minutes=5 score=mcc               | minutes=5: task=run does not read it; did you mean task=compare?
task=run checkpoint=nowhere               | task=predict or task=evaluate or task=export?
task=data hyper.lr=5                      | hyper.lr=5: task=data does not read it
task=report results_dir=reslts            | results_dir=reslts: there is no such folder
task=records results_dir=reslts           | results_dir=reslts: there is no such folder
task=table results_dir=reslts             | results_dir=reslts: there is no such folder
"""
MISFITS = """
loss.nothing=1                            | unknown parameter of f1 'nothing'
loss.temprature=0.1                       | unknown parameter of f1 'temprature'
loss.average=macroo                       | average
loss.temperature=-1                       | temperature
loss=fbeta loss.beta=-1                   | beta
loss=fbeta loss.beta={dgo:2}              | unknown class 'dgo'
loss=metric loss.metric=f11               | did you mean 'f1'?
loss=metric loss.metric=nowhere.f         | 'nowhere.f' cannot be imported
loss=metric loss.metric=fbeta loss.betta=2 | did you mean 'beta'?
loss=metric loss.parameters.beta=2        | unknown parameter of balanced_accuracy 'beta'
loss=metric loss.parameters=3             | loss=metric:
loss._target_=east.losses.Dise            | cannot import 'east.losses.Dise'
loss=focal loss.gamma=abc                 | loss=focal: unsupported operand type
loss=ce loss.ignore_index=3               | loss.ignore_index: it has no effect
loss=f1_ce loss.gather=true               | loss.gather: it has no effect
loss=rf loss.n_estimaters=5               | did you mean 'n_estimators'?
loss=ccs loss.decode=foo dry_run=true     | unknown decode 'foo'. Choices: argmax, set
model.hidden=[-4]                         | model.hidden
model=custom model.target=nowhere.Net     | cannot import 'nowhere.Net'
protocol.decisions=[foo]                  | unknown decision 'foo'
protocol.decisions=[plugin_f11] loss=rf   | did you mean 'plugin_f1'?
protocol.decisions=[thresholds]           | decision 'thresholds' is for two classes
dataset=digits dataset.imbalance=0        | at least 1; got 0
task=data dataset=digits dataset.positive=12 | positive must be a digit
dataset=synthetic dataset.seed=-1         | expected a seed of at least 0
dataset=digits executor=ray executor.address=127.0.0.1:1 | no Ray cluster answers there
dataset=csv                               | dataset.path
dataset.path=nowhere.csv dataset.target=y | nowhere.csv
dataset.path=on.csv dataset.target=y      | did you mean one.csv?
dataset.path=page.csv dataset.target=y    | it looks like HTML
dataset.path=one.csv                      | which column of one.csv is the class? Columns: x, y
dataset.path=one.csv dataset.target=z     | z
dataset.path=one.csv dataset.target=y     | class
dataset.path=empty.csv dataset.target=y   | empty
dataset.path=noise.csv dataset.target=y   | noise.csv
dataset.path=folder                       | folder
dataset.path=folder dataset.target=y      | unknown key 'dataset.target'
dataset=images dataset.path=one.csv       | one.csv
dataset=mammography data_dir=nowhere      | nowhere
results_dir=/proc/nowhere                 | cannot be written to
results_dir=one.csv/below                 | cannot be written to
task=reproduce table=east_v2_9            | did you mean 'east_v2_
task=reproduce table=quickstart format=mrkdown | did you mean 'markdown'?
task=predict                              | checkpoint
task=predict checkpoint=nowhere input=one.csv output=out.csv | nowhere
task=predict checkpoint=kept input=one.csv output=out.csv | did you mean kept/model?
task=compare dataset=digits score=f11     | did you mean
task=compare losses=[f1]                  | losses=['f1']: task=compare does not read it
task=compare dataset=digits score=auroc   | choose another score
task=compare dataset=digits score=cost    | needs your costs
task=compare dataset=digits candidates=forest | did you mean 'rf'?
task=compare dataset=digits candidates=   | candidates
"""
rows = lambda table: [tuple(part.strip() for part in line.split("|")) for line in table.strip().splitlines()]  # noqa: E731


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


def check(code: int, said: str, expected: str) -> None:
    assert code in (2, 3), said
    assert expected in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) <= 6
    assert "Finished trials are saved" not in said, "there are none"


@pytest.mark.parametrize(("words", "expected"), [*rows(TYPOS), *rows(MISFITS)])
def test_a_mistake_gives_a_short_explanation(words, expected, folder, east_run):
    own = words.split()
    small = [] if any(word.startswith(("task=", "dataset", "seed=", "-")) for word in own) else SMALL
    results = [] if "results_dir" in words or words == "--config-dir" else ["results_dir=results"]
    answer = east_run(*results, *small, *own)
    check(answer.code, answer.err, expected)
    assert not (folder / "results").exists()


def test_a_path_that_is_not_utf8_is_refused(folder, east_run):
    check(
        *[getattr(east_run("dataset.path=caf\udce9.csv"), name) for name in ("code", "err")],
        r"caf\udce9.csv: expected UTF-8",
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", ["mammography", "-m loss=f1,cee", "--nonsense", "--cfg jb", "losses=[]"])
def test_a_mistake_gives_a_short_explanation_in_a_process_too(words, folder):
    command = [sys.executable, "-m", "east.lab.cli", *words.split()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment(),
                            stdin=subprocess.DEVNULL)  # fmt: skip
    check(answer.returncode, answer.stderr, dict(rows(TYPOS))[words])


def test_mistyped_names_and_values_are_refused_without_torch(folder):
    """Checking them needs neither data nor a function's signature."""
    light = [words for words, _ in rows(TYPOS) if not words.startswith("task=")]
    script = (
        "import sys; from east.lab import cli\n"
        f"codes = [cli.run(words.split()) for words in {light!r}]\n"
        "sys.exit(set(codes) != {2} or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert answer.returncode == 0, answer.stderr


def test_a_network_that_cannot_read_its_files_is_explained(folder, monkeypatch, east_run):
    Path("pretrained_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, inputs_shape, outputs):\n"
        "        open('weights.pt')\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    answer = east_run(*SMALL, "model=custom", "model.target=pretrained_net.Net")
    check(answer.code, answer.err, "config: [Errno 2] No such file or directory: 'weights.pt'")


def test_a_warning_is_printed_once(capsys):
    def task():
        for k in range(3):
            warnings.warn("a record is damaged", stacklevel=k + 1)
        return 0

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.guarded(task, []) == 0
    assert capsys.readouterr().err == "warning: a record is damaged\n"


def test_a_missing_device_is_a_config_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda' is not available here; choices:"):
        pick_device("cuda")


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


def test_another_broken_pipe_is_an_error(monkeypatch, east_run):
    """As of a worker that died: it says nothing about our output."""
    monkeypatch.setattr("east.lab.tasks.run.main", lambda *_: (_ for _ in ()).throw(BrokenPipeError("worker")))
    answer = east_run(*TINY)
    assert answer.code == 1
    assert "BrokenPipeError: worker" in answer.err
