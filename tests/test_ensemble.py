"""Ensembles: members of one population train as they would alone, and no row is judged by a network that saw it."""

import numpy as np
import pytest
import torch

from east.lab import data
from east.lab.settings.sections import (
    DatasetSection,
    EnsembleSection,
    Hyper,
    LossSection,
    ModelSection,
    Science,
    Training,
)
from east.lab.training import engine, ensemble
from east.lab.training.crossfit import folds_of
from east.lab.training.population import Trial

NETWORKS = EnsembleSection(name="networks", folds=3, repeats=2)


def config(**changed):
    base = Science(
        dataset=DatasetSection(name="synthetic"),
        model=ModelSection(name="mlp", hidden=[16, 8]),
        loss=LossSection(name="f1", target="east.losses.MetricLoss", metric="f1", step="linear", average="macro"),
        protocol=Training(name="test", patience=3, max_epochs=6),
        hyper=Hyper(lr=0.01, batch_size=32, dropout=0.25, weight_decay=0.01),
    )
    return base.but(**changed)


@pytest.fixture(scope="module")
def splits():
    return data.split(data.load("synthetic", rows=500, imbalance=4, classes=3), seed=0)


def unequal(pool, sizes):
    """Folds whose held-out rows have these numbers."""
    everything, ends = np.arange(len(pool)), np.cumsum(sizes)
    held = [everything[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [(np.setdiff1d(everything, rows), rows) for rows in held]


@pytest.mark.parametrize("batch", [32, 256])
def test_members_train_together_as_they_would_alone(splits, batch):
    pool = ensemble.pooled(splits)
    trial = Trial(config(hyper=config().hyper.but(batch_size=batch)), 5)
    members = [
        (Trial(trial.config, seed), ensemble.member_splits(splits, pool, fold))
        for seed, fold in enumerate(unequal(pool, [100, 103, 97, 60]))
    ]
    together = engine.train([t for t, _ in members], [s for _, s in members])
    populations = engine.populations(members, torch.device("cpu"))
    assert batch > 32 or len(populations) < len(members), "unequal folds share a population"
    for outcome, (own, its_splits) in zip(together, members, strict=True):
        alone = engine.train([own], its_splits)[0]
        assert (outcome.epochs, outcome.stopped) == (alone.epochs, alone.stopped)
        for part in ("val", "test"):
            np.testing.assert_allclose(outcome.probabilities[part], alone.probabilities[part], atol=1e-5)
            np.testing.assert_array_equal(outcome.labels[part], alone.labels[part])


def test_members_are_scaled_by_their_own_rows(splits):
    pool = ensemble.pooled(splits)
    fold = unequal(pool, [100])[0]
    own = ensemble.member_splits(splits, pool, fold)
    torch.testing.assert_close(own.train.inputs.mean(0), torch.zeros(pool.inputs.shape[1]), atol=1e-5, rtol=0)
    torch.testing.assert_close(own.train.inputs.std(0, correction=0), torch.ones(pool.inputs.shape[1]))
    assert own.val.inputs.mean(0).abs().max() > 1e-3


def test_no_row_out_of_fold_meets_a_network_that_trained_on_it(splits, monkeypatch):
    """Each row carries its number as an input; networks that remember numbers give it away."""
    seen = []

    def train(trials, members, **_):
        seen.extend((set(m.train.index.tolist()), set(m.val.index.tolist())) for m in members)
        return engine_train(trials, members)

    engine_train = engine.train
    monkeypatch.setattr(engine, "train", train)
    ensemble.fit(Trial(config(ensemble=NETWORKS), 0), splits)
    pool = set(ensemble.pooled(splits).index.tolist())
    assert len(seen) == 6
    assert all(not train & held and train | held == pool for train, held in seen)
    assert sorted(row for _, held in seen for row in held) == sorted([*pool, *pool]), "every row twice, by two seeds"


def test_an_ensemble_gives_every_pooled_row_and_new_rows(splits):
    outcome = ensemble.fit(Trial(config(ensemble=NETWORKS), 0), splits)
    pool = ensemble.pooled(splits)
    assert outcome.status == "done"
    np.testing.assert_array_equal(outcome.labels["val"], pool.labels.numpy())
    np.testing.assert_array_equal(outcome.labels["test"], splits.test.labels.numpy())
    for part, rows in (("val", len(pool)), ("test", len(splits.test))):
        assert outcome.probabilities[part].shape == (rows, 3)
        np.testing.assert_allclose(outcome.probabilities[part].sum(1), 1, atol=1e-5)
    truth = outcome.probabilities["val"][np.arange(len(pool)), pool.labels]
    assert outcome.best.val_loss == pytest.approx(-np.log(truth).mean(), rel=1e-5)
    again = ensemble.fit(Trial(config(ensemble=NETWORKS), 0), splits)
    np.testing.assert_array_equal(outcome.probabilities["test"], again.probabilities["test"])
    other = ensemble.fit(Trial(config(ensemble=NETWORKS), 1), splits)
    assert np.abs(outcome.probabilities["test"] - other.probabilities["test"]).max() > 1e-3


def test_an_interrupted_population_of_members_resumes(splits, tmp_path, monkeypatch):
    pool = ensemble.pooled(splits)
    folds = folds_of(3, pool.inputs, pool.labels.numpy(), 0)
    trial = Trial(config(), 0)
    whole = ensemble.cross_fit_networks(trial, splits, folds, 2)
    monkeypatch.setattr(engine, "CHECKPOINT_SECONDS", 0.0)
    ends = engine.Population.end_epoch

    def killed(self, *numbers):
        ends(self, *numbers)
        if self.annealing[0].course.epochs == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.Population, "end_epoch", killed)
        with pytest.raises(KeyboardInterrupt):
            ensemble.cross_fit_networks(trial, splits, folds, 2, checkpoint=tmp_path)
    assert [*tmp_path.glob("*.safetensors")]
    resumed = ensemble.cross_fit_networks(trial, splits, folds, 2, checkpoint=tmp_path)
    np.testing.assert_array_equal(resumed.held_out, whole.held_out)
    np.testing.assert_array_equal(resumed.new, whole.new)
    assert not [*tmp_path.glob("*.safetensors")]
