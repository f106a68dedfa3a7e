"""EASTClassifier: scikit-learn's own checks, and what it promises beyond them."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import DataConversionWarning
from sklearn.metrics import f1_score, matthews_corrcoef
from sklearn.model_selection import GridSearchCV, TunedThresholdClassifierCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from east import EASTClassifier
from east.metrics import mcc


def quick(metric="f1", **parameters):
    return EASTClassifier(metric, **{"max_epochs": 25, "random_state": 0, "device": "cpu", **parameters})


@pytest.fixture(scope="module")
def rare():
    """One row in ten is positive."""
    return make_classification(1200, 8, n_informative=5, weights=[0.9], flip_y=0.02, class_sep=1.2, random_state=1)


@parametrize_with_checks([EASTClassifier(max_epochs=40, device="cpu")])
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.mark.nightly
@parametrize_with_checks([EASTClassifier()])
def test_scikit_learn_checks_of_the_defaults(estimator, check):
    check(estimator)


def test_score_is_the_metric_it_trained_for(rare):
    X, y = rare
    for metric, parameters, oracle in (
        ("f1", {"average": "positive"}, f1_score),
        ("f1", None, lambda a, b, **w: f1_score(a, b, average="macro", **w)),
        ("mcc", None, matthews_corrcoef),
    ):
        model = quick(metric, metric_parameters=parameters).fit(X, y)
        weights = np.random.default_rng(0).uniform(0.5, 2, len(y))
        assert model.score(X, y) == pytest.approx(oracle(y, model.predict(X)))
        assert model.score(X, y, weights) == pytest.approx(oracle(y, model.predict(X), sample_weight=weights))
        assert model.score(X, y) > 0.6


def test_a_recall_hungry_metric_finds_more_of_the_rare_class(rare):
    X, y = rare
    found = {
        beta: quick("fbeta", metric_parameters={"average": "positive", "beta": beta}).fit(X, y).predict(X).sum()
        for beta in (0.25, 5.0)
    }
    assert found[5.0] > y.sum() > found[0.25]


def test_metric_may_be_a_function(rare):
    X, y = rare
    named, given = quick("mcc").fit(X, y), quick(mcc).fit(X, y)
    np.testing.assert_array_equal(named.predict_proba(X), given.predict_proba(X))


def test_several_initialisations_are_one_population_and_the_best_is_kept(rare):
    X, y = rare
    many = quick(n_init=3).fit(X, y)
    scores = [1 - outcome.best["val_metric"] for outcome in many.outcomes_]
    assert len(set(scores)) > 1
    assert many.validation_score_ == max(scores)
    # Each member trains as it would alone.
    alone = quick().fit(X, y)
    np.testing.assert_allclose(many.outcomes_[0].history["val_loss"], alone.outcomes_[0].history["val_loss"], rtol=1e-3)


def test_equal_random_states_give_equal_models_and_leave_the_global_generators_alone(rare):
    X, y = rare
    torch.manual_seed(5)
    np.random.seed(5)
    first = quick().fit(X, y).predict_proba(X)
    drawn = torch.rand(1).item(), np.random.rand()
    torch.manual_seed(5)
    np.random.seed(5)
    assert drawn == (torch.rand(1).item(), np.random.rand())
    np.testing.assert_array_equal(first, quick().fit(X, y).predict_proba(X))
    assert not np.array_equal(first, quick(random_state=1).fit(X, y).predict_proba(X))


def test_pickle_and_clone(rare):
    X, y = rare
    model = quick(mcc, hidden=(16,)).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(model), "net_")


def test_pipeline_grid_search_cross_validation_and_threshold(rare):
    X, y = rare
    pipeline = make_pipeline(StandardScaler(), quick())
    search = GridSearchCV(pipeline, {"eastclassifier__metric": ["f1", "mcc"], "eastclassifier__hidden": [(32,)]}, cv=2)
    assert search.fit(X, y).best_score_ > 0.5
    assert cross_val_score(quick(max_epochs=8), X, y, cv=3).shape == (3,)
    tuned = TunedThresholdClassifierCV(quick(), scoring="f1", cv=2).fit(X, y)
    assert f1_score(y, tuned.predict(X)) > 0.5


def test_frames_and_named_classes():
    X, y = load_iris(return_X_y=True, as_frame=True)
    names = y.map({0: "setosa", 1: "versicolor", 2: "virginica"})
    model = quick(max_epochs=60).fit(X, names)
    assert list(model.feature_names_in_) == list(X.columns)
    assert set(model.predict(X)) <= set(names)
    assert model.predict_proba(X).shape == model.decision_function(X).shape == (150, 3)
    assert model.score(X, names) > 0.9
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X.rename(columns={X.columns[0]: "other"}))


def test_classes_of_one_or_two_rows_are_learned_from():
    X = np.arange(22.0)[:, None]
    y = np.array([0] * 19 + [1] * 2 + [2])
    model = quick(max_epochs=3).fit(X, y)
    assert model.predict_proba(X).shape == (22, 3)
    assert sorted(np.unique(model.outcomes_[0].labels["val"])) == [0]


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"metric": "mc"}, "did you mean 'mcc'"),
        ({"metric_parameters": {"averge": "macro"}}, "average"),
        ({"annealing": "exponential"}, "geometric"),
        ({"n_init": 0}, "n_init: expected a whole number of at least 1, got 0"),
        ({"warmup": -1}, "warmup: expected a whole number of at least 0, got -1"),
        ({"batch_size": 1.5}, "batch_size: expected a whole number of at least 1, got 1.5"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"device": "tpu"}, "unknown device"),
    ],
)
def test_errors_name_the_parameter(rare, parameters, message):
    with pytest.raises(ValueError, match=message):
        quick(**parameters).fit(*rare)


def test_a_class_that_was_not_there_in_training_is_never_found(rare):
    X, y = rare
    model = quick(max_epochs=5).fit(X, y)
    others = np.where(np.arange(len(y)) % 7 == 0, 7, y)
    assert model.score(X, others) == pytest.approx(f1_score(others, model.predict(X), average="macro"))


def test_a_constant_column_is_not_magnified(rare):
    X, y = rare
    model = quick(max_epochs=1).fit(np.column_stack((X, np.full(len(X), 0.1))), y)
    moved = model.decision_function(np.column_stack((X, np.full(len(X), 0.2))))
    assert np.abs(moved).max() < 1e3


def test_frames_and_numpy_numbers_as_scikit_learn_passes_them(rare):
    X, y = rare
    target = pd.DataFrame({"y": y})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataConversionWarning)
        model = quick(max_epochs=2, batch_size=np.int64(256)).fit(X, target)
        assert 0 <= model.score(X, target) <= 1


def test_divergence_is_reported(rare):
    X, y = rare
    with pytest.raises(RuntimeError, match="no initialisation could be trained: diverged"):
        quick(lr=1e3, weight_decay=1e3).fit(X, y)


def test_frame_of_strings_is_refused(rare):
    with pytest.raises(ValueError, match="could not convert string"):
        quick().fit(pd.DataFrame({"job": ["nurse", "clerk"] * 5}), [0, 1] * 5)


@pytest.mark.parametrize("labels", [(2, 1), ("good", "bad"), (False, True)])
def test_the_positive_class_is_a_label(labels):
    """Whatever its place among the sorted labels, a number included."""
    X = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    y = np.array(labels)[(X[:, 0] > 1).astype(int)]
    parameters = {"average": "positive", "positive": labels[1]}
    model = EASTClassifier("f1", metric_parameters=parameters, max_epochs=20, random_state=0).fit(X, y)
    wanted = f1_score(y == labels[1], model.predict(X) == labels[1])
    assert wanted > 0.5
    assert model.score(X, y) == pytest.approx(wanted)
    assert 0 < model.validation_score_ < 1


def test_layers_are_a_sequence():
    with pytest.raises(ValueError, match="hidden: expected the sizes of the layers, such as"):
        EASTClassifier(hidden=16).fit(np.eye(4), [0, 1, 0, 1])
