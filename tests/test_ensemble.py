"""Ensembles: members train as they would alone, and no row is judged by a model that saw it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import entr, softmax

from east.choices import ConfigError
from east.lab import cli, data
from east.lab.data.common import Part
from east.lab.experiment import records
from east.lab.settings.settings import EnsembleSection, Split
from east.lab.training import engine, ensemble
from east.lab.training.population import Trial
from tests.commands import TINY
from tests.made import RowNumbers, ended_at_checkpoint, science

NETWORKS = EnsembleSection(name="networks", folds=3, repeats=2)


def config(**changed):
    hyper = {"lr": 0.01, "batch_size": 32, "dropout": 0.25, "weight_decay": 0.01}
    loss = {"name": "f1", "_target_": "east.losses.MetricLoss", "metric": "f1", "step": "linear", "average": "macro"}
    protocol = {"name": "test", "patience": 3, "max_epochs": 6}
    base = science(model={"name": "mlp", "hidden": [16, 8]}, loss=loss, protocol=protocol, hyper=hyper)
    return base.but(**changed)


def stack(*components, folds=3, **options):
    return EnsembleSection(name="stack", folds=folds, components=components, **options)


def fitted(splits, section, seed=0):
    return ensemble.fit(Trial(config(ensemble=section), seed), splits)


@pytest.fixture(scope="module")
def splits():
    return data.split(data.load("synthetic", rows=500, imbalance=4, classes=3), seed=0)


def made(inputs, labels, **changed):
    """Splits with these rows in training and validation, and ten of them as new rows."""
    index, half = torch.arange(len(labels)), len(labels) // 2
    given = {name: torch.as_tensor(values) for name, values in changed.items()}
    given |= {"inputs": torch.as_tensor(inputs).float(), "labels": torch.as_tensor(labels), "index": index}
    parts = [Part(**{n: v[rows] for n, v in given.items()}) for rows in (index[:half], index[half:], index[:10])]
    classes, width = tuple(map(str, range(int(max(labels)) + 1))), given["inputs"].shape[1]
    return data.Splits(*parts, classes, "made", 1, "", "", torch.zeros(width), torch.ones(width))


def unequal(pool, sizes):
    """Folds whose held-out rows have these numbers."""
    everything, ends = np.arange(len(pool)), np.cumsum(sizes)
    held = [everything[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [(np.setdiff1d(everything, rows), rows) for rows in held]


@pytest.mark.parametrize("batch, sizes", [(32, [80] * 5), (256, [80] * 5), (32, [100, 103, 97, 60, 40])])
def test_ten_members_train_together_as_they_would_alone(splits, batch, sizes):
    pool = ensemble.pooled(splits)
    trial = Trial(config(hyper=config().hyper.but(batch_size=batch)), 5)
    members = [
        (Trial(trial.config, seed), ensemble.member_splits(splits, pool, fold))
        for seed, fold in enumerate(2 * unequal(pool, sizes))
    ]
    together = engine.train([t for t, _ in members], [s for _, s in members])
    populations = engine.populations(members, torch.device("cpu"))
    assert len(set(sizes)) > 1 or len(populations) == 1
    for outcome, (own, its_splits) in zip(together, members, strict=True):
        alone = engine.train([own], its_splits)[0]
        assert (outcome.epochs, outcome.stopped) == (alone.epochs, alone.stopped)
        for part in ("val", "test"):
            np.testing.assert_allclose(outcome.probabilities[part], alone.probabilities[part], atol=1e-5)
            np.testing.assert_array_equal(outcome.labels[part], alone.labels[part])


def test_an_interrupted_population_of_members_resumes(splits, tmp_path):
    trial = Trial(config(ensemble=NETWORKS), 0)
    whole = ensemble.fit(trial, splits)
    ended_at_checkpoint(4, KeyboardInterrupt(), lambda: ensemble.fit(trial, splits, checkpoint=tmp_path))
    assert [*tmp_path.glob("*.safetensors")]
    resumed = ensemble.fit(trial, splits, checkpoint=tmp_path)
    for part in ("val", "test"):
        np.testing.assert_array_equal(resumed.probabilities[part], whole.probabilities[part])
    assert not [*tmp_path.glob("*.safetensors")]


class Noise(RowNumbers):
    def predict_proba(self, X):
        return np.random.default_rng(len(X)).dirichlet(np.ones(len(self.classes_)), len(X))


def test_the_best_of_a_grid_is_the_point_that_is_best_on_validation(splits):
    section = EnsembleSection(name="best", lr=(0.01, 1e-5), dropout=(0.0, 0.25))
    outcome = fitted(splits, section)
    alone = [engine.train([Trial(config().with_grid_point(point), 0)], [splits])[0] for point in section.points]
    chosen = alone[list(outcome.ensemble["weights"].values()).index(1.0)]
    assert outcome.best.val_metric == pytest.approx(min(one.best.val_metric for one in alone), abs=1e-6)
    np.testing.assert_allclose(outcome.probabilities["test"], chosen.probabilities["test"], atol=1e-5)
    assert outcome.weights.keys() == chosen.weights.keys()


@pytest.fixture(scope="module")
def numbers():
    """Rows that are their number, also as a code of random digits, and a random bit as label."""
    random = np.random.default_rng(0)
    return made(np.column_stack((np.arange(200.0), random.normal(size=(200, 150)))), random.integers(0, 2, 200))


class TestOutOfFold:
    """Only a model that trained on a row knows its label."""

    def test_a_classifier_judges_rows_that_it_did_not_see(self, numbers):
        outcome = fitted(numbers, stack("tests.made.RowNumbers"))
        assert (outcome.probabilities["val"] == 0.5).all()
        assert outcome.probabilities["test"].max() > 0.8, "new rows are averaged over all folds"

    @pytest.mark.parametrize("component", ["networks", "rf", "extratrees", "boosting", "logistic"])
    def test_no_component_knows_the_label_of_a_row_out_of_fold(self, component, numbers):
        protocol = config().protocol.but(max_epochs=40, patience=40)
        trial = Trial(config(ensemble=stack(component), protocol=protocol), 0)
        outcome = ensemble.fit(trial, numbers)
        labels = outcome.labels["val"]
        assert abs((outcome.probabilities["val"].argmax(1) == labels).mean() - 0.5) < 0.1
        if component != "boosting":  # its leaves hold 20 rows
            known = outcome.fitted(ensemble.pooled(numbers).inputs).argmax(1).numpy()
            assert (known == labels).mean() > 0.85

    def test_members_train_on_all_folds_but_the_one_they_are_stopped_on(self, splits, monkeypatch):
        seen, made_splits = [], ensemble.member_splits
        monkeypatch.setattr(ensemble, "member_splits", lambda *a: (seen.append(made_splits(*a)), seen[-1])[1])
        fitted(splits, NETWORKS)
        pool = set(ensemble.pooled(splits).index.tolist())
        parts = [(set(member.train.index.tolist()), set(member.val.index.tolist())) for member in seen]
        assert all(not train & held and train | held == pool for train, held in parts)
        assert sorted(row for _, held in parts for row in held) == sorted([*pool, *pool]), "every row twice"

    @pytest.mark.parametrize("rows", ["some", "all"])
    def test_labels_of_unseen_rows_do_not_stop_the_members_that_judge_them(self, rows, splits):
        """Unless a fold has no other rows, as the newest may have none."""
        pool = ensemble.pooled(splits)
        fold = unequal(pool, [100])[0]
        unseen = np.isin(np.arange(len(pool)), fold[1][::2] if rows == "some" else fold[1])
        wrong = replace(pool, labels=torch.where(torch.from_numpy(unseen), (pool.labels + 1) % 3, pool.labels))
        nothing = replace(pool, **{name: getattr(pool, name)[:0] for name in ("inputs", "labels", "index")})
        trial, best = Trial(config(), 0), []
        for part in (pool, wrong):
            made = ensemble.cross_fit_networks(
                trial, replace(splits, train=part, val=nothing), [fold], 1, unseen=unseen, device="cpu"
            )
            best.append((made.outcomes[0].best, made.held_out[fold[1]].tolist()))
        assert (best[0] == best[1]) == (rows == "some")

    def test_members_are_scaled_by_their_own_rows(self, splits):
        pool = ensemble.pooled(splits)
        own = ensemble.member_splits(splits, pool, unequal(pool, [100])[0])
        torch.testing.assert_close(own.train.inputs.mean(0), torch.zeros(pool.inputs.shape[1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(own.train.inputs.std(0, correction=0), torch.ones(pool.inputs.shape[1]))
        assert own.val.inputs.mean(0).abs().max() > 1e-3


class TestFolds:
    def test_only_independent_rows_are_judged_out_of_bag(self):
        random = np.random.default_rng(0)
        inputs, labels = random.normal(size=(120, 4)), random.integers(0, 2, 120)
        for changed, models in (
            ({}, 1),
            ({"groups": np.arange(120) // 3}, 3),
            ({"time": np.arange(120.0)}, 3),
            ({"inputs": inputs[np.arange(120) // 2]}, 3),
        ):
            rows = changed.pop("inputs", inputs)
            forests = fitted(made(rows, labels, **changed), stack("rf")).fitted.predictors
            assert len(forests) == models
            assert len(forests[0].estimator.estimators_) == (300 if models == 1 else 111)  # as many as judge a row

    @pytest.mark.filterwarnings("ignore:Some inputs do not have OOB scores")
    def test_a_row_that_every_tree_drew_has_no_probabilities_out_of_bag(self, splits):
        small = ensemble.Estimator("sklearn.ensemble.RandomForestClassifier", pca=None, n_estimators=3)
        held_out = ensemble.cross_fit_estimator(small, splits, [], True, 0).held_out
        drawn = np.isnan(held_out).all(1)
        assert 0 < drawn.sum() < len(drawn)
        np.testing.assert_allclose(held_out[~drawn].sum(1), 1)

    def test_groups_stay_together_and_time_goes_forward(self):
        random = np.random.default_rng(0)
        inputs, labels, section = random.normal(size=(120, 4)), random.integers(0, 2, 120), stack("logistic", folds=4)
        groups = np.arange(120) // 3
        for train, held in ensemble.divided(section, ensemble.pooled(made(inputs, labels, groups=groups)), 0):
            assert not set(groups[train]) & set(groups[held])
        when = random.permutation(60.0 * (np.arange(120) // 2))
        folds = ensemble.divided(section, ensemble.pooled(made(inputs, labels, time=when)), 0)
        assert len(folds) == 4
        assert all(when[train].max() < when[held].min() for train, held in folds)
        newer = np.concatenate([held for _, held in folds])
        assert len(newer) == len(set(newer)) == 60
        assert when[newer].min() >= np.median(when)
        outcome = fitted(made(inputs, labels, time=when), section)
        assert len(outcome.labels["val"]) == 60

    def test_a_class_of_few_rows_means_fewer_folds_and_as_many_members(self):
        random = np.random.default_rng(0)
        labels = np.repeat([0, 1, 2], [60, 40, 2])
        rows = made(random.normal(size=(102, 3)), labels)
        with pytest.warns(UserWarning, match="2 folds of 5"):
            outcome = fitted(rows, stack("networks", "logistic", folds=5))
        assert outcome.ensemble["folds"] == 2
        assert len(outcome.ensemble["epochs"]) == 10


class TestStack:
    """tests/test_metric_classifier.py compares the weights with those of a general convex solver."""

    def test_it_gives_every_pooled_row_and_new_rows(self, splits):
        section = stack("networks", "logistic", "boosting", repeats=1)
        outcome, pool = fitted(splits, section), ensemble.pooled(splits)
        np.testing.assert_array_equal(outcome.labels["val"], pool.labels.numpy())
        np.testing.assert_array_equal(outcome.labels["test"], splits.test.labels.numpy())
        for part, rows in (("val", len(pool)), ("test", len(splits.test))):
            assert outcome.probabilities[part].shape == (rows, 3)
            np.testing.assert_allclose(outcome.probabilities[part].sum(1), 1, atol=1e-5)
        truth = outcome.probabilities["val"][np.arange(len(pool)), pool.labels]
        assert outcome.best.val_loss == pytest.approx(-np.log(truth).mean(), rel=1e-5)
        assert sum(outcome.ensemble["weights"].values()) == pytest.approx(1)
        assert sum(outcome.ensemble["epochs"]) == outcome.epochs > 0
        assert all(np.sum(matrix) == len(pool) for matrix in outcome.ensemble["confusion"].values())
        with torch.no_grad():  # the models that are kept are those that predicted
            kept = outcome.fitted(splits.test.inputs)
        np.testing.assert_allclose(kept, outcome.probabilities["test"], atol=1e-6)
        again, other = (fitted(splits, section, seed).probabilities["test"] for seed in (0, 1))
        np.testing.assert_array_equal(outcome.probabilities["test"], again)
        assert np.abs(outcome.probabilities["test"] - other).max() > 1e-3

    def test_noise_gets_no_weight_and_a_single_component_all(self, splits):
        noisy = fitted(splits, stack("logistic", f"{__name__}.Noise"))
        assert noisy.ensemble["weights"]["logistic"] == pytest.approx(1, abs=0.03)
        for component in ("logistic", "networks", "rf"):
            alone = fitted(splits, stack(component))
            trial = Trial(config(ensemble=stack(component)), 0)
            folds = ensemble.divided(stack(component), ensemble.pooled(splits), 0)
            itself = ensemble.components_of(trial, splits, folds)[component]
            assert alone.ensemble["weights"] == {component: 1.0}
            np.testing.assert_allclose(alone.probabilities["val"], itself.held_out, atol=1e-6)
            np.testing.assert_allclose(alone.probabilities["test"], itself.new, atol=1e-6)

    def test_it_is_a_trial_with_one_record(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        words = [*TINY, "ensemble=stack", "ensemble.folds=2", "ensemble.components=[networks,logistic]", "trials=1"]
        assert cli.run([*words, "loss=ce", "results_dir=out"]) == 0
        (record,) = records.scan("out")
        stored = record.ensemble
        assert (stored["folds"], len(stored["epochs"]), [*stored["weights"]]) == (2, 4, ["logistic", "networks"])
        for matrix in (record.confusion["val"], *stored["confusion"].values()):
            assert np.sum(matrix) == record.data["sizes"]["train"] + record.data["sizes"]["val"]
        assert {"expected_f1", "expected_mcc", "expected_gmean"} <= set(record.decisions), "one fit serves every metric"
        assert records.read(tmp_path / "out" / record.source).ensemble == stored

    def test_networks_that_diverge_are_a_failure_on_record(self, splits):
        hyper = config().hyper.but(lr=1e3, weight_decay=1e3)
        outcome = ensemble.fit(Trial(config(ensemble=NETWORKS, hyper=hyper), 0), splits)
        assert (outcome.status, outcome.stopped) == ("failed", "diverged")
        assert "no member could be trained" in outcome.error

    @pytest.mark.parametrize(
        "section, loss, kind, message",
        [
            (NETWORKS, "folds", "table", r"split\.folds=3: ensemble=networks judges all rows"),
            (stack("rff"), "ce", "table", "rff"),
            (stack("os.path"), "ce", "table", "os.path"),
            (stack("rf"), "rf", "table", "ensemble=stack needs a loss for its networks"),
            (stack("networks", "rf"), "ce", "image", "rf cannot take images"),
            (NETWORKS, "ce", "graph", "networks cannot take graphs"),
        ],
    )
    def test_what_cannot_be_stacked_is_refused(self, section, loss, kind, message):
        trains = {"trains": "classical"} if loss == "rf" else {}
        given = science(loss={"name": loss, "_target_": "east.baselines.RandomForest", **trains}).loss
        with pytest.raises(ConfigError, match=message):
            ensemble.check_ensemble(section, given, kind, Split(folds=3 if loss == "folds" else None))


class TestSmoothing:
    """Out-of-fold rows are means of fewer networks than new rows."""

    def test_two_members_tell_how_smooth_a_mean_of_ten_is(self):
        random = np.random.default_rng(0)
        truth = random.normal(0, 2, (4000, 1, 3))
        members = softmax(truth + random.normal(0, 1, (4000, 10, 3)), -1)
        entropy = lambda p: entr(p).sum(-1).mean()  # noqa: E731
        pairs = members[:, :2].mean(1)
        temperature = ensemble.smoothing(pairs, members[:, :2].reshape(-1, 3), 10)
        smooth = ensemble.tempered(pairs, temperature)
        assert temperature > 1
        wanted = entropy(members.mean(1))
        assert abs(entropy(smooth) - wanted) < 0.25 * (wanted - entropy(pairs))

    def test_it_is_off_unless_asked_for(self, splits):
        plain, smooth = (fitted(splits, NETWORKS.but(smooth=smooth)) for smooth in (False, True))
        assert plain.ensemble["temperature"] == 1 < smooth.ensemble["temperature"]
        assert entr(smooth.probabilities["val"]).mean() > entr(plain.probabilities["val"]).mean()
        np.testing.assert_array_equal(smooth.probabilities["test"], plain.probabilities["test"])
