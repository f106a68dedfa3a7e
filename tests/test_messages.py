"""A user's mistake gives exit code 2 or 3 and a few lines that say what to do, at once and without a traceback."""

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
BAD = [
    # names
    ("task=tabel", "did you mean 'table'?"),
    ("loss=f11", "did you mean 'f1'?"),
    ("dataset=adlut", "did you mean 'adult'?"),
    ("mammography", "did you mean dataset=mammography?"),
    ("one.csv", "did you mean dataset.path=one.csv?"),
    ("dataset=one.csv", "did you mean dataset.path=one.csv?"),
    ("path=one.csv", "did you mean 'dataset.path'?"),
    ("los=f1", "did you mean 'loss'?"),
    ("protocol=btgg", "did you mean 'btg'?"),
    ("preset=papr", "did you mean 'paper'?"),
    ("search=gridd", "did you mean 'grid'?"),
    ("executor=rayy", "did you mean 'ray'?"),
    ("hyper.lrr=1", "did you mean 'hyper.lr'?"),
    ("lr=0.1", "did you mean"),
    ("loss.nothing=1", "unknown parameter of f1 'nothing'"),
    ("losses=[f1,cee]", "did you mean 'ce'?"),
    ("datasets=[adultt]", "did you mean 'adult'?"),
    ("device=gpu", "did you mean 'cuda'? Choices: auto, cpu, cuda, mps"),
    ("selection=val_los", "did you mean 'val_loss'?"),
    # numbers
    ("hyper.lr=abc", "hyper.lr: expected a number, got 'abc'"),
    ("hyper.lr=nan", "hyper.lr: expected"),
    ("trials=0", "trials: expected at least 1"),
    ("seed=-1", "seed: expected at least 0"),
    ("dataset.limit=2", "dataset.limit: expected at least 3"),
    ("annealing.r=1.5", "annealing.r: expected"),
    ("protocol.patience=0", "protocol.patience: expected"),
    ("executor=processes executor.slots=0", "executor.slots: expected"),
    ("split.fractions=[0.8,0.2]", "three positive numbers"),
    ("split.seed=-1", "split.seed: expected"),
    ("dataset=digits dataset.imbalance=0", "at least 1; got 0"),
    ("dataset=synthetic dataset.seed=-1", "expected a seed of at least 0"),
    # parts that do not fit together
    ("model.hidden=[-4]", "model.hidden"),
    ("model.hidden=abc", "model.hidden: expected a value such as [512, 256, 128]"),
    ("model=darknet19", "does not take table data"),
    ("model=custom", "model.target"),
    ("model=custom model.target=nowhere.Net", "cannot import 'nowhere.Net'"),
    ("loss=metric loss.metric=f11", "did you mean 'f1'?"),
    ("loss=metric loss.metric=nowhere.f", "'nowhere.f' cannot be imported"),
    ("loss.average=macroo", "average"),
    ("loss=fbeta loss.beta=-1", "beta"),
    ("loss=fbeta loss.beta={dgo:2}", "unknown class 'dgo'"),
    ("loss.temperature=-1", "temperature"),
    ("loss.temprature=0.1", "unknown parameter of f1 'temprature'"),
    ("loss._target_=east.losses.Dise", "cannot import 'east.losses.Dise'"),
    ("loss=focal loss.gamma=abc", "loss=focal: unsupported operand type"),
    ("loss=metric loss.metric=fbeta loss.betta=2", "did you mean 'beta'?"),
    ("loss=metric loss.parameters.beta=2", "unknown parameter of balanced_accuracy 'beta'"),
    ("loss=metric loss.parameters=3", "loss=metric: "),
    ("loss=ce loss.ignore_index=3", "loss.ignore_index: it has no effect"),
    ("loss=f1_ce loss.gather=true", "loss.gather: it has no effect"),
    ("annealing=geometric loss=ce", "needs a loss with a temperature"),
    ("protocol.decisions=[foo]", "unknown decision 'foo'"),
    ("protocol.decisions=[plugin_f11] loss=rf", "did you mean 'plugin_f1'?"),
    ("protocol.decisions=[thresholds]", "decision 'thresholds' is for two classes"),
    ("loss=rf loss.n_estimaters=5", "did you mean 'n_estimators'?"),
    ("loss=ccs loss.decode=foo dry_run=true", "unknown decode 'foo'. Choices: argmax, set"),
    ("losses=f1,ce", "losses=[f1,ce]"),
    ("losses=[]", "expected a list such as losses=[f1,ce]"),
    ("losses=[f1] loss.average=positive", "cannot be combined with losses=[…]"),
    ("dataset=digits executor=ray executor.address=127.0.0.1:1", "no Ray cluster answers there"),
    # the user's own files
    ("dataset=csv", "dataset.path"),
    ("dataset.path=nowhere.csv dataset.target=y", "nowhere.csv"),
    ("dataset.path=on.csv dataset.target=y", "did you mean one.csv?"),
    ("dataset.path=caf\udce9.csv dataset.target=y", r"dataset.path=caf\udce9.csv: expected UTF-8"),
    ("dataset.path=page.csv dataset.target=y", "it looks like HTML"),
    ("dataset.path=one.csv", "which column of one.csv is the class? Columns: x, y"),
    ("dataset.path=one.csv dataset.target=z", "z"),
    ("dataset.path=one.csv dataset.target=y", "class"),
    ("dataset.path=empty.csv dataset.target=y", "empty"),
    ("dataset.path=noise.csv dataset.target=y", "noise.csv"),
    ("dataset.path=folder", "folder"),
    ("dataset.path=folder dataset.target=y", "unknown key 'dataset.target'"),
    ("dataset=images dataset.path=one.csv", "one.csv"),
    ("dataset=mammography data_dir=nowhere", "nowhere"),
    ("results_dir=/proc/nowhere", "cannot be written to"),
    ("results_dir=one.csv", "expected a folder, but"),
    ("results_dir=one.csv/below", "expected a folder, but"),
    ("--config-dir nowhere loss=f1", "expected a folder"),
    ("--config-dir conf loss=broken", "broken.yaml"),
    # other tasks
    ("task=reproduce", "needs table=…"),
    ("task=reproduce table=east_v2_9", "did you mean 'east_v2_"),
    ("task=table table=nope", "unknown table 'nope'"),
    ("task=table format=docx", "docx"),
    ("task=reproduce table=quickstart format=mrkdown", "unknown format 'mrkdown', did you mean 'markdown'?"),
    ("task=predict", "checkpoint"),
    ("task=predict checkpoint=nowhere input=one.csv output=out.csv", "nowhere"),
    ("task=compare dataset=digits score=f11", "did you mean"),
    ("task=compare losses=[f1]", "does not take losses"),
    ("task=compare dataset=digits score=auroc", "cannot choose decisions; choose another score"),
    ("task=compare dataset=digits score=cost", "needs your costs"),
    ("task=compare dataset=digits candidates=forest", "did you mean 'rf'?"),
    ("task=compare dataset=digits candidates=", "candidates: expected a list"),
    ("task=predict checkpoint=kept input=one.csv output=out.csv", "did you mean kept/model?"),
    ("task=predict keep={a:1}", "keep: expected a list or 'all'"),
    ("checkpoint=m input=one.csv output=b.csv", "did you mean task=predict or task=evaluate or task=export?"),
    ("score=mcc minutes=1", "score=mcc: did you mean task=compare?"),
    ("dataset.path=one.csv dataset.target=y minutes=1", "minutes=1: did you mean task=compare?"),
    ("table=east_v2_1", "did you mean task=table or task=reproduce?"),
    ("task=data dataset=digits dataset.positive=12", "positive must be a digit"),
    ("task=data dataset=digits dataset.positive=3.0", "positive must be a digit 0…9 or null, got 3.0"),
    ("task=data dataset=digits dataset.positive=true", "positive must be a digit 0…9 or null, got True"),
    # Hydra's grammar
    ("loss=f1(", "special characters need quotes"),
    ("loss=f1,ce", "several values need -m"),
    ("+hyper.x=1", "keys cannot be added"),
    ("~loss", "keys cannot be added to or deleted"),
    ("-m loss=f1,cee", "did you mean 'ce'?"),
    ("-m trials=2.5,3", "trials: expected a whole number, got 2.5"),
    ("--nonsense", "--nonsense"),
    ("--cfg jb", "jb"),
]  # fmt: skip


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


@pytest.mark.parametrize(("words", "expected"), BAD)
def test_a_mistake_gives_a_short_explanation(words, expected, folder, east_run):
    own = words.split()
    small = [] if any(word.startswith(("task=", "dataset", "-")) for word in own) else SMALL
    results = [] if "results_dir" in words else ["results_dir=results"]
    answer = east_run(*small, *own, *results)
    check(answer.code, answer.err, expected)
    assert not (folder / "results" / "runs").exists()


def test_at_least_sixty_mistakes_are_tested():
    assert len(BAD) >= 60


REAL = [
    "hyper.lrr=1",
    "loss=f11",
    "mammography",
    "results_dir=one.csv",
    "-m loss=f1,cee",
    "--nonsense",
    "--cfg jb",
    "--config-dir conf loss=broken",
    "losses=[]",
    "trials=0",
    "device=gpu",
    "dataset.path=nowhere.csv dataset.target=y",
]


@pytest.mark.slow
@pytest.mark.parametrize("words", REAL)
def test_a_mistake_gives_a_short_explanation_in_a_process_too(words, folder):
    expected = next(sentence for mistake, sentence in BAD if mistake == words)
    command = [sys.executable, "-m", "east.lab.cli", *words.split()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment(),
                            stdin=subprocess.DEVNULL)  # fmt: skip
    check(answer.returncode, answer.stderr, expected)


def test_mistyped_names_and_values_are_refused_without_torch(folder):
    """Checking them needs neither data nor a function's signature."""
    light = [
        words for words, _ in BAD[: BAD.index(("split.seed=-1", "split.seed: expected"))] if "nothing" not in words
    ]
    script = (
        "import sys; from east.lab import cli\n"
        f"codes = [cli.run(words.split()) for words in {light!r}]\n"
        "sys.exit(set(codes) != {2} or 'torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment()
    )
    assert answer.returncode == 0, answer.stderr
    assert len(light) > 25


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


def unread(*words: str) -> subprocess.CompletedProcess:
    """east-run, whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "east.lab.cli", *words]
    answer = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=environment())
    os.close(writer)
    return answer


def test_a_closed_pipe_is_not_an_error(tmp_path):
    """As in `east-run --help | head -1` and `east-run task=table | head -1`, whose work is done before it prints."""
    for words in (["--help"], ["task=table", "table=all", f"results_dir={tmp_path}"]):
        answer = unread(*words)
        assert answer.returncode == 0
        assert "closed" not in answer.stderr
        assert "Error" not in answer.stderr
    assert (tmp_path / "tables" / "btg_1.md").exists()


def test_a_closed_pipe_fails_a_command_that_has_not_trained_yet(tmp_path):
    """As in `east-run dataset=mammography | head -1`, which stops at the second line."""
    answer = unread(*TINY, f"results_dir={tmp_path}")
    assert answer.returncode == 1
    assert answer.stderr.endswith("stdout was closed. Rerun the same command to resume.\n")
    assert not list(tmp_path.rglob("seed-*.json"))


def test_another_broken_pipe_is_an_error(monkeypatch, east_run):
    """As of a worker that died: it says nothing about our output."""
    monkeypatch.setattr("east.lab.tasks.run.main", lambda *_: (_ for _ in ()).throw(BrokenPipeError("worker")))
    answer = east_run(*TINY)
    assert answer.code == 1
    assert "BrokenPipeError: worker" in answer.err
