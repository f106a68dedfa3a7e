"""CONTRIBUTING.md's table: adding a part needs only the changes listed there.

Everything is added from a temporary folder: the configs by --config-dir, the code beside them.
"""

import sys
from pathlib import Path

import pytest

import east.lab.data
from east import metrics
from east.lab import cli
from east.lab.experiment import records

METRIC = '''
from east.metrics import ratio

def hits(c, *, share=1.0):
    """Share of correct samples, times a constant."""
    return share * ratio(c.diagonal.sum(-1), c.total)
'''

LOSS = """
from east.losses.inputs import Loss

class Focused(Loss):
    def __init__(self, power: float = 2.0):
        super().__init__()
        self.power = power

    def value(self, logits, labels, weights):
        p = logits.softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return ((1 - p) ** self.power * -p.clamp_min(1e-12).log()).mean(-1)
"""

DATASET = """
import torch
from east.lab.data.common import Table
from east.lab.data.sources import Dataset

def stripes(root=None, *, width: int = 4) -> Table:
    values = torch.arange(200, dtype=torch.float32)[:, None].repeat(1, width) % 17
    labels = (values[:, 0] > 8).long()
    return Table(features=values, labels=labels, classes=("thin", "wide"), name="stripes", positive=1, source="here")

DATASETS = {"stripes": Dataset(load=stripes, kind="table", about="numbers modulo 17", licence="none needed",
                               citation="this test", where="built in")}
"""

NETWORK = '''
from torch import nn

class Straight(nn.Linear):
    """One linear map."""

    def __init__(self, inputs_shape, outputs, bias=True):
        super().__init__(inputs_shape[0], outputs, bias=bias)
'''

CONFIGS = {
    "loss/hits.yaml": "{name: hits, _target_: east.losses.MetricLoss, metric: hits, step: linear, threshold: 0.5}",
    "loss/focused.yaml": "{name: focused, _target_: added_loss.Focused, power: 3.0}",
    "dataset/stripes.yaml": "{name: stripes, kind: table, limit: null, width: 4}",
    "model/straight.yaml": "{name: straight, target: added_network.Straight, parameters: {bias: false}, outputs: null}",
    "table/added.yaml": """
name: added
title: All that was added
source: a test
preset: quick
protocol: east
trials: 2
rows: {hits: {loss: hits}, focused: {loss: focused}}
grid: {lr: [0.01], dropout: [0.25], r: [0.9], batch_size: {stripes: [32, 64]}}
columns: [{dataset: [stripes], metric: [accuracy, f1_positive]}]
""",
}


@pytest.fixture
def added(tmp_path, monkeypatch) -> list[str]:
    """Adds a metric, two losses, a dataset, a network and a table; returns the arguments that make them known."""
    for name, text in CONFIGS.items():
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    modules = tmp_path / "modules"
    (modules / "data").mkdir(parents=True)
    code = {"added_metric": METRIC, "added_loss": LOSS, "data/stripes": DATASET, "added_network": NETWORK}
    for name, text in code.items():
        (modules / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setattr(east.lab.data, "__path__", [*east.lab.data.__path__, str(modules / "data")])
    import added_metric

    monkeypatch.setitem(metrics.METRICS, "hits", added_metric.hits)
    yield ["--config-dir", str(tmp_path / "conf")]
    for name in ("added_metric", "added_loss", "added_network", "east.lab.data.stripes"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("no_figures")
def test_added_parts_are_planned_run_and_listed_like_our_own(added, east_run, tmp_path):
    """A metric, two losses and a dataset in one table, with commands that do not know them in advance."""
    plan = east_run(*added, "task=reproduce", "table=added", "preset=paper", "dry_run=true").out
    assert plan.count("0 of 2 ") == 2, "searched at the two points of the table's own grid"
    empty = east_run(*added, "task=table", "table=added").out
    assert f"east-run --config-dir {added[1]} dataset=stripes loss=hits" in empty
    answer = east_run(*added, "task=reproduce", "table=added", "executor=inline", "device=cpu")
    assert answer.code == 0, answer.err
    assert "added: 2 runs to do" in answer.out
    found = records.scan(tmp_path)
    assert {(one.status, one.config.dataset.name) for one in found} == {("done", "stripes")}
    assert sorted(one.config.loss.name for one in found) == ["focused", "focused", "hits", "hits"]
    assert "(2/2" in east_run(*added, "task=table", "table=added").out
    assert "every run is done" in east_run(*added, "task=reproduce", "table=added", "dry_run=true").out
    assert "numbers modulo 17" in east_run(*added, "task=data", "dataset=all").out
    listed = east_run(*added, "--help").out
    assert all(name in listed for name in ("hits", "focused", "stripes", "straight", "added"))
    assert east_run(*added, "task=report").code == 0
    assert "All that was added" in (tmp_path / "report.html").read_text()


def test_an_invalid_table_names_the_bad_key(added, east_run):
    file = Path(added[1]) / "table" / "added.yaml"
    text = file.read_text()
    for wrong, words in {
        "rwos: {}\n": "rwos: Extra inputs are not permitted",
        "name: other\n": "expected name: added, as the file is called, got 'other'",
    }.items():
        file.write_text(text + wrong)
        answer = east_run(*added, "task=table", "table=added")
        assert answer.code == cli.BAD_CONFIG
        assert words in answer.err
    assert "did you mean 'added'?" in east_run(*added, "task=table", "table=aded").err


@pytest.mark.usefixtures("no_figures")
def test_added_parts_take_options_and_suggest_spellings(added, east_run, tmp_path):
    parts = ["dataset=stripes", "loss=focused", "model=straight"]
    tiny = [*added, *parts, "preset=quick", "protocol.max_epochs=1", "device=cpu"]
    answer = east_run(*tiny, "loss.power=2", "dataset.width=3", "trials=1")
    assert answer.code == 0, answer.err
    (found,) = records.scan(tmp_path)
    assert (found.status, found.config.model.name, found.config.loss.options["power"]) == ("done", "straight", 2)
    for words, meant in ((["loss.powr=2"], "power"), (["loss=hits", "loss.metric=hitz"], "hits")):
        refused = east_run(*tiny, *words)
        assert refused.code == cli.BAD_CONFIG
        assert f"did you mean {meant!r}?" in refused.err
