"""Four unseen tables, from `east-run` to saved model, page and predictions; and a network trained by hand.

A quarter of the rows is held out from everything. There the winner must be within 0.02 of the best candidate, or inside
the 95 % interval of the paired difference. By day small tables and a few candidates, at night all of it.
"""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer, make_classification
from sklearn.metrics import f1_score
from torch import nn

import east
from east.lab import cli, data
from east.lab.data.columns import words
from east.lab.experiment import records
from east.lab.experiment.ledger import model_folder
from east.lab.reporting import comparison
from east.lab.training.population import Trial

QUICK = ["candidates=[logistic,boosting,ce]", "protocol.max_epochs=6", "trials=1", "model.hidden=[16]"]


def fraud(rows: int) -> pd.DataFrame:
    """Rare fraud with text, dates, ids and gaps; it depends on amount, country and account age."""
    random = np.random.default_rng(1)
    opened = pd.Timestamp("2019-01-01") + pd.to_timedelta(random.integers(0, 1500, rows), "D")
    frame = pd.DataFrame(
        {
            "id": [f"T{number:06d}" for number in random.permutation(rows)],
            "opened": opened.strftime("%d.%m.%Y"),
            "amount": random.lognormal(4, 1, rows).round(2),
            "country": random.choice(["NL", "DE", "FR", "US", "BR"], rows, p=[0.4, 0.3, 0.15, 0.1, 0.05]),
            "items": random.poisson(3, rows).astype(float),
            "remark": [
                " ".join(random.choice(["fast", "gift", "home", "late", "new"], 4)) + f" {k}" for k in range(rows)
            ],
        }
    )
    young = (opened > pd.Timestamp("2022-06-01")).astype(float)
    z = 1.3 * (np.log(frame["amount"]) - 4) + 2.5 * (frame["country"] == "BR") + 1.5 * young - 4
    frame["fraud"] = np.where(random.random(rows) < 1 / (1 + np.exp(-z)), "yes", "no")
    frame.loc[random.random(rows) < 0.1, "amount"] = np.nan
    frame.loc[random.random(rows) < 0.05, "country"] = None
    return frame


def six(rows: int) -> pd.DataFrame:
    X, y = make_classification(
        rows, 12, n_informative=8, n_classes=6, weights=[0.4, 0.25, 0.15, 0.1, 0.06, 0.04], random_state=2
    )
    return pd.DataFrame(X.round(4), columns=[f"x{k}" for k in range(12)]).assign(kind=[f"kind {k}" for k in y])


def wide(rows: int) -> pd.DataFrame:
    X, y = make_classification(rows, 50, n_informative=15, weights=[0.9], flip_y=0.02, class_sep=0.7, random_state=3)
    return pd.DataFrame(X.round(4), columns=[f"x{k}" for k in range(50)]).assign(label=y)


def ten(rows: int) -> pd.DataFrame:
    """Benign tumours and ten malignant ones that the comparison sees."""
    found = load_breast_cancer(as_frame=True).frame.rename(columns={"target": "benign"})
    benign, malignant = found[found["benign"] == 1], found[found["benign"] == 0]
    return pd.concat([benign.sample(rows, random_state=0), malignant.sample(13, random_state=0)])


TABLES = {"fraud": (fraud, "fraud"), "six": (six, "kind"), "wide": (wide, "label"), "ten": (ten, "benign")}
CASES = [
    pytest.param("fraud", 800, QUICK, id="fraud"),
    pytest.param("ten", 300, QUICK, id="ten"),
    pytest.param("six", 400, QUICK, id="six", marks=pytest.mark.slow),
    pytest.param("fraud", 8000, [], id="fraud-full", marks=[pytest.mark.slow, pytest.mark.nightly]),
    pytest.param("six", 8000, [], id="six-full", marks=[pytest.mark.slow, pytest.mark.nightly]),
    pytest.param("wide", 133_333, [], id="wide-full", marks=[pytest.mark.slow, pytest.mark.nightly]),
    pytest.param("ten", 350, [], id="ten-full", marks=[pytest.mark.slow, pytest.mark.nightly]),
]


@pytest.mark.parametrize("name, rows, words", CASES)
def test_the_winner_is_as_good_as_any_on_rows_held_out_from_everything(
    name, rows, words, tmp_path, monkeypatch, capsys
):
    make, target = TABLES[name]
    whole = make(rows)
    held = whole.groupby(target).sample(frac=0.25, random_state=0)
    monkeypatch.chdir(tmp_path)
    whole.drop(held.index).to_csv("table.csv", index=False)
    held.to_csv("held.csv", index=False)
    arguments = ["dataset=csv", "dataset.path=table.csv", f"dataset.target={target}", "device=cpu", *words]
    arguments += ["dataset.positive=0"] if name == "ten" else []
    assert cli.run(["task=compare", *arguments, "keep_models=all"]) == 0
    text = capsys.readouterr().out
    if name == "ten":
        # A single trial is judged on the half of the validation rows that did not stop it.
        assert re.search("the choice is uncertain: only (1 validation row|2 validation rows) of '0'", text)
    if name == "fraud":
        assert "not used" in text  # the id, and the free text

    folder = next(Path("results/compare").iterdir())
    scores = pd.read_csv(folder / "scores.csv")
    parts, measure = on_held_out(held, target, scores)
    values = np.array([float(measure(part.confusion)) for part in parts])
    best, winner = int(values.argmax()), int(np.flatnonzero(scores["winner"])[0])
    drawn = comparison.resampled([parts[best], parts[winner]], measure)
    low = np.nanquantile(drawn[0] - drawn[1], 0.025)
    row = scores.iloc[winner]
    print(f"{name}: {row.candidate} by {row.decision} {values[winner]:.3f}, best {values[best]:.3f}, from {low:+.3f}")
    assert values[best] - values[winner] <= 0.02 or low <= 0

    command = text.strip().splitlines()[-1].split()[1:]
    assert cli.run([*command[:2], "input=held.csv", "output=p.csv", "keep=all"]) == 0
    assert len(pd.read_csv("p.csv")) == len(held)
    assert cli.run(["task=evaluate", command[1], "input=held.csv"]) == 0


def on_held_out(held, target, scores):
    """Decisions of each row of scores.csv on the held-out rows, with the rule of its recorded probabilities."""
    result, trials = [], {}
    for record in records.scan("results"):
        trials.setdefault(record.config.loss.name, {})[record.seed] = record.config
    for row in scores.itertuples():
        configs = trials[{"east": "f1"}.get(row.candidate, row.candidate)]
        arrays = {seed: records.arrays(records.path("results", config, seed)) for seed, config in configs.items()}
        model = east.load(model_folder(Trial(configs[row.seed], row.seed), "results"))
        positive = model.about.positive
        measure = partial(east.METRICS["f1"], average="macro" if positive is None else "positive")
        folds = configs[row.seed].split.folds
        judged = comparison.judge(row.candidate, "", arrays, folds, {"val": None, "test": None}, measure, positive)
        (rule,) = (one.rule for one in judged if one.decision == row.decision)
        p, place = torch.from_numpy(model.predict_proba(held)), {name: k for k, name in enumerate(model.classes)}
        labels = torch.tensor([place[word] for word in words(held[target])])
        result.append(comparison.Decided(p, labels, rule.decide(p)))
    return result, measure


@pytest.mark.slow
@pytest.mark.nightly
def test_a_network_is_as_good_as_the_same_network_trained_by_hand(tmp_path, monkeypatch, capsys):
    """Plain PyTorch: same layers, optimiser and number of steps, the weights of the best epoch on validation."""
    monkeypatch.chdir(tmp_path)
    wide(8000).to_csv("table.csv", index=False)
    words = ["dataset=csv", "dataset.path=table.csv", "dataset.target=label", "candidates=[ce]", "device=cpu"]
    assert cli.run(["task=compare", *words]) == 0
    ours = float(re.search(r"^cross-entropy +\d\.\d+ +(\d\.\d+)", capsys.readouterr().out, re.MULTILINE).group(1))
    splits = data.split(data.load("csv", path="table.csv", target="label"), seed=0, stratify=True)
    theirs = np.mean([by_hand(splits, seed) for seed in range(3)])
    print(f"east-run {ours:.3f}, by hand {theirs:.3f}")
    assert ours == pytest.approx(theirs, abs=0.02)


def by_hand(splits, seed: int, steps: int = 2000, batch: int = 128) -> float:
    torch.manual_seed(seed)
    x, y = splits.train.inputs, splits.train.labels
    sizes = [(x.shape[1], 128), (128, 64)]
    layers = [layer for a, b in sizes for layer in (nn.Linear(a, b), nn.ReLU(), nn.Dropout(0.25))]
    net = nn.Sequential(*layers, nn.Linear(64, 2))
    optimiser = torch.optim.AdamW(net.parameters(), lr=0.003, weight_decay=0.01)
    best, kept, order = np.inf, None, torch.randperm(len(x))
    for step in range(steps):
        rows, order = order[:batch], order[batch:]
        loss = nn.functional.cross_entropy(net(x[rows]), y[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if len(order) < batch or step == steps - 1:
            order = torch.randperm(len(x))
            with torch.no_grad():
                net.eval()
                missed = float(nn.functional.cross_entropy(net(splits.val.inputs), splits.val.labels))
                best, kept = min((best, kept), (missed, net(splits.test.inputs).argmax(1)), key=lambda pair: pair[0])
                net.train()
    return float(f1_score(splits.test.labels, kept))
