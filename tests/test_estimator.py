"""EASTClassifier: scikit-learn's own checks, and our promises beyond them."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_classification
from sklearn.exceptions import DataConversionWarning
from sklearn.metrics import f1_score, matthews_corrcoef
from sklearn.model_selection import GridSearchCV, TunedThresholdClassifierCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_classifiers_train, parametrize_with_checks

import east
from east import EASTClassifier
from east.metrics import mcc


def quick(metric="f1", **parameters):
    """A single network, unless `members` says otherwise."""
    return EASTClassifier(metric, **{"members": 1, "max_epochs": 25, "random_state": 0, "device": "cpu", **parameters})


@pytest.fixture(scope="module")
def rare():
    """One row in ten is positive."""
    return make_classification(1200, 8, n_informative=5, weights=[0.9], flip_y=0.02, class_sep=1.2, random_state=1)


def expected_failures(estimator):
    """Checks of scikit-learn that fail for a known reason."""
    failures = dict.fromkeys(
        [f"check_sample_weight_equivalence_on_{kind}_data" for kind in ("dense", "sparse")],
        "repeated rows fall into other batches than weighted ones; "
        "tests/test_training.py shows the equivalence for whole batches, tests/test_drop_in.py for the losses",
    )
    if estimator.members > 1 and estimator.decision != "argmax":
        failures["check_classifiers_train"] = "predict follows the rule for the metric, not the largest probability"
    return failures


def tiny(metric, loss="metric_ce", **changed):
    quick = {"members": 1, "max_epochs": 20, "hidden": (16,), "lr": 0.02, "dropout": 0.0, "device": "cpu"}
    return EASTClassifier(metric, loss=loss, **{**quick, **changed})


TWO = tiny("f1", None, members=2, folds=2)


@parametrize_with_checks([TWO, tiny("f1_macro", "metric")], expected_failed_checks=expected_failures)
def test_scikit_learn_checks(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which text is positive, classes with few rows
        check(estimator)


def test_predictions_agree_with_the_largest_probability_if_asked_for():
    check_classifiers_train("EASTClassifier", clone(TWO).set_params(decision="argmax"))


@pytest.mark.nightly
@parametrize_with_checks([EASTClassifier()], expected_failed_checks=expected_failures)
def test_scikit_learn_checks_of_the_defaults(estimator, check):
    check(estimator)


def test_score_is_the_metric_it_trained_for(rare):
    X, y = rare
    for metric, parameters, oracle in (
        ("f1", {}, f1_score),
        ("f1_macro", {}, lambda a, b, **w: f1_score(a, b, average="macro", **w)),
        ("mcc", {}, matthews_corrcoef),
    ):
        model = quick(metric, **parameters).fit(X, y)
        weights = np.random.default_rng(0).uniform(0.5, 2, len(y))
        assert model.score(X, y) == pytest.approx(oracle(y, model.predict(X)))
        assert model.score(X, y, weights) == pytest.approx(oracle(y, model.predict(X), sample_weight=weights))
        assert model.score(X, y) > 0.6


class TestEnsemble:
    """Ten networks by default, each stopped on its own fold; the rule is found on rows out of fold."""

    def test_the_defaults_are_ten_networks_on_cross_entropy_with_the_expected_rule(self, rare):
        X, y = rare
        model = EASTClassifier(max_epochs=15, random_state=0, device="cpu").fit(X[::2], y[::2])
        assert (len(model.outcomes_), model.folds_, model.oof_probabilities_.shape) == (10, 5, (600, 2))
        assert model.rule_ == east.decide(model.oof_probabilities_, "f1").rule
        decided = model.rule_.decide(torch.from_numpy(model.oof_probabilities_)).numpy()
        assert model.oof_score_ == pytest.approx(f1_score(y[::2], decided))
        assert model.score(X[1::2], y[1::2]) > 0.45
        config = model.outcomes_[0].trial.config
        assert (config.model.options["hidden"], config.hyper.dropout, config.loss.name) == ([64, 32], 0.25, "ce")
        config = quick(max_epochs=1).fit(X, y).outcomes_[0].trial.config
        assert (config.model.options["hidden"], config.hyper.dropout, config.loss.name) == ([128, 64], 0.1, "metric_ce")

    def test_probabilities_are_the_mean_over_networks_and_no_row_meets_one_that_saw_it(self, rare):
        X, y = rare
        model = quick(members=4, folds=2, max_epochs=3).fit(X, y)
        inputs = torch.from_numpy((X - model.mean_) / model.scale_)
        each = torch.stack([network(inputs) for network in model.net_.predictors]).detach()
        np.testing.assert_allclose(model.predict_proba(X), each.mean(0))
        for k in range(4):
            held = np.isclose(each[k].numpy(), model.outcomes_[k].probabilities["val"][0], atol=1e-4).all(1)
            assert held.any()

    def test_members_fewer_than_folds_mean_as_many_folds_and_rare_classes_fewer(self, rare):
        X, y = rare
        assert quick(members=3, max_epochs=1).fit(X, y).folds_ == 3
        few = np.where(np.arange(len(y)) < 2, 1, 0)
        with pytest.warns(UserWarning, match="2 folds of 5"):
            model = quick(members=10, max_epochs=1).fit(X, few)
        assert (model.folds_, len(model.outcomes_)) == (2, 10)
        assert quick(members=10, max_epochs=1).fit(X[:2], [0, 1]).folds_ == 1  # nothing can be held out


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


def test_a_model_can_be_pickled_and_cloned(rare):
    X, y = rare
    model = quick(mcc, hidden=(16,)).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert clone(model).get_params() == model.get_params()
    assert not hasattr(clone(model), "net_")


def test_scikit_learns_pipelines_and_searches_work(rare):
    X, y = rare
    pipeline = make_pipeline(StandardScaler(), quick())
    search = GridSearchCV(pipeline, {"eastclassifier__metric": ["f1", "mcc"], "eastclassifier__hidden": [(32,)]}, cv=2)
    assert search.fit(X, y).best_score_ > 0.5
    assert cross_val_score(quick(max_epochs=8), X, y, cv=3).shape == (3,)
    tuned = TunedThresholdClassifierCV(quick(), scoring="f1", cv=2).fit(X, y)
    assert f1_score(y, tuned.predict(X)) > 0.5


def test_frames_and_named_classes_are_accepted():
    X, y = load_iris(return_X_y=True, as_frame=True)
    names = y.map({0: "setosa", 1: "versicolor", 2: "virginica"})
    model = quick(max_epochs=60).fit(X, names)
    assert list(model.feature_names_in_) == list(X.columns)
    assert set(model.predict(X)) <= set(names)
    assert model.predict_proba(X).shape == model.decision_function(X).shape == (150, 3)
    assert model.score(X, names) > 0.9
    with pytest.raises(ValueError, match="feature names"):
        model.predict(X.rename(columns={X.columns[0]: "other"}))


def test_classes_with_one_or_two_rows_are_used_for_training():
    X = np.arange(22.0)[:, None]
    y = np.array([0] * 19 + [1] * 2 + [2])
    model = quick(max_epochs=3).fit(X, y)
    assert model.predict_proba(X).shape == (22, 3)
    assert sorted(np.unique(model.outcomes_[0].labels["val"])) == [0]


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"metric": "mc"}, "did you mean 'mcc'"),
        ({"loss": "bce"}, "'loss' parameter of EASTClassifier must be a str among"),
        ({"decision": "plug"}, "'decision' parameter .* among"),
        ({"missing": "mean"}, "'missing' parameter .* among"),
        ({"metric": "fbeta", "beta": "two"}, "beta: expected a number of at least 0, got 'two'"),
        ({"costs": [[0, 1], [5, 0]]}, "unknown parameter of f1 'costs'"),
        ({"metric": "mcc", "average": "macro"}, "unknown parameter of mcc 'average'"),
        ({"positive": "fraud"}, r"positive: expected one of the classes \[0, 1\], got 'fraud'"),
        ({"sample_weight": 0.0}, r"[Ww]eights? .*zero"),
        ({"sample_weight": -1.0}, r"[Nn]egative"),
        ({"class_weight": {"fraud": 2.0}}, "class_weight"),
        ({"annealing": "exponential"}, "geometric"),
        ({"members": 0}, "'members' parameter .* Got 0"),
        ({"folds": 1}, "'folds' parameter .* Got 1"),
        ({"warmup": -1}, "'warmup' parameter .* Got -1"),
        ({"batch_size": 1.5}, "'batch_size' parameter .* Got 1.5"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"device": "tpu"}, "unknown device"),
        ({"hidden": "12"}, "'hidden' parameter"),
        ({"hidden": 16}, "'hidden' parameter"),
        *(({"step": "foo", "loss": loss}, "'step' parameter") for loss in ("metric", "metric_ce", "ce")),
        ({"lr": 1e10}, "'lr' parameter"),
        ({"weight_decay": -1}, "'weight_decay' parameter .* Got -1"),
        ({"metric": lambda c: c.diagonal[1]}, "one number per leading index, .*; index classes from the right"),
        ({"dropout": 0.999}, "'dropout' parameter"),
    ],
)
def test_errors_name_the_parameter(rare, parameters, message):
    weight = np.full(len(rare[1]), parameters.pop("sample_weight", 1.0))
    with pytest.raises(ValueError, match=message):
        quick(**parameters).fit(*rare, sample_weight=weight)


def test_the_score_counts_classes_missing_from_training(rare):
    X, y = rare
    model = quick("f1_macro", max_epochs=5).fit(X, y)
    others = np.where(np.arange(len(y)) % 7 == 0, 7, y)
    assert model.score(X, others) == pytest.approx(f1_score(others, model.predict(X), average="macro"))


def test_a_constant_column_is_not_amplified(rare):
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
    with pytest.raises(RuntimeError, match="no member could be trained: diverged"):
        quick(lr=1e3, weight_decay=1e3).fit(X, y)


@pytest.mark.parametrize("labels", [(2, 1), ("good", "bad"), (False, True), (-1, 1), (1.0, 2.0)])
def test_the_positive_class_is_a_label(labels):
    """Wherever it is among the sorted labels, and also if it is a number."""
    X = np.random.default_rng(0).normal(size=(300, 3)).astype(np.float32)
    y = np.array(labels)[(X[:, 0] > 1).astype(int)]
    model = EASTClassifier("f1", positive=labels[1], max_epochs=20, random_state=0).fit(X, y)
    wanted = f1_score(y == labels[1], model.predict(X) == labels[1])
    assert wanted > 0.5
    assert model.score(X, y) == pytest.approx(wanted)
    assert 0 < model.oof_score_ < 1


def people(rows=300):
    """A frame with numbers, words, dates and categories, some of them missing; and who earns much."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "age": random.normal(40, 10, rows),
            "job": random.choice(["clerk", "nurse", "smith"], rows),
            "seen": pd.date_range("2024-01-01", periods=rows),
            "plan": pd.Categorical(random.integers(0, 3, rows)),
            "member": random.random(rows) > 0.5,
        }
    )
    return frame, np.where((frame["age"] > 45) == (frame["job"] != "smith"), "high", "low")


def test_a_frame_is_encoded_column_by_column():
    frame, y = people()
    model = quick(hidden=(32,), lr=0.01).fit(frame, y)
    assert model.encoding_.feature_names == (
        "age", "job=clerk", "job=nurse", "job=smith", "seen_year", "seen_month", "seen_weekday", "seen_days",
        "plan=0", "plan=1", "plan=2", "member",
    )  # fmt: skip
    assert model.n_features_in_ == 5
    assert model.score(frame, y) > 0.8
    # Single rows are encoded as they were among others; a job that training did not have sets no indicator.
    np.testing.assert_allclose(model.predict_proba(frame.iloc[7:8]), model.predict_proba(frame)[7:8])
    assert np.isfinite(model.predict_proba(frame.iloc[:3].assign(job="pilot"))).all()
    with pytest.raises(ValueError, match=r"do not fit those of training: age \(expected numbers"):
        model.predict(frame.assign(age="old"))
    with pytest.raises(ValueError, match="expected a DataFrame with the columns of training, got ndarray"):
        model.predict(frame.to_numpy())
    with pytest.raises(ValueError, match="yet now missing:\n- age"):
        model.predict(frame.drop(columns="age"))


def test_columns_that_cannot_be_features_are_named():
    frame, y = people()
    with pytest.warns(UserWarning, match=r"column 'note' is not used: it is free text .*'category'\) would"):
        quick(max_epochs=1).fit(frame.assign(note=[f"called on day {k}" for k in range(len(y))]), y)
    mixed = frame.assign(size=[*map(str, range(len(y) - 1)), "big"])
    with pytest.raises(ValueError, match=r"(?s)make them categories .*column 'size' has numbers, but also text"):
        quick().fit(mixed, y)


def test_missing_values_are_refused_or_filled_and_marked():
    frame, y = people()
    frame.loc[::7, "age"] = np.nan
    frame.loc[::9, "job"] = None
    with pytest.raises(ValueError, match=r"NaN, a missing value, in 'age', 'job': .*missing='median'"):
        quick().fit(frame, y)
    model = quick(missing="median", max_epochs=2).fit(frame, y)
    assert {"age_missing", "job=(missing)"} <= set(model.encoding_.feature_names)
    X = frame[["age"]].to_numpy()
    of_array = quick(missing="median", max_epochs=2).fit(X, y)
    assert of_array.encoding_.feature_names == ("x0", "x0_missing")
    gap, median = of_array.encoding_.columns[0].median, np.nanmedian(X)
    assert gap == pytest.approx(median, abs=1)  # of the training rows
    assert np.isfinite(of_array.predict_proba([[np.nan]])).all()
    with pytest.raises(ValueError, match=r"Input X contains NaN, a missing value: .*missing='median'"):
        quick(max_epochs=1).fit(X, y)


def test_sparse_input_is_made_dense_below_a_stated_size(rare, monkeypatch):
    X, y = rare
    X = np.where(X > 1, X, 0)
    dense, sparse = quick(max_epochs=3).fit(X, y), quick(max_epochs=3).fit(scipy.sparse.csc_array(X), y)
    np.testing.assert_array_equal(dense.predict_proba(X), sparse.predict_proba(scipy.sparse.coo_array(X)))
    monkeypatch.setattr("east.estimator.MOST_NUMBERS", X.size - 1)
    with pytest.raises(ValueError, match=r"made dense up to 9,599 numbers, got the shape \(1200, 8\)"):
        quick().fit(scipy.sparse.csr_array(X), y)


@pytest.mark.parametrize("loss", ["metric", "metric_ce", "ce"])
def test_weights_steer_every_loss(rare, loss):
    """Weighted positives are predicted more often; a weight of 0 removes a row."""
    X, y = rare
    plain, heavy = quick(loss=loss), quick(loss=loss)
    often = heavy.fit(X, y, sample_weight=np.where(y == 1, 20.0, 1.0)).predict(X).sum()
    assert often > 1.3 * plain.fit(X, y).predict(X).sum()
    by_class = quick(loss=loss, class_weight={0: 1.0, 1: 20.0}).fit(X, y)
    np.testing.assert_array_equal(by_class.predict_proba(X), heavy.predict_proba(X))
    kept = np.arange(len(y)) % 3 > 0
    absent = quick(loss=loss, max_epochs=2).fit(X[kept], y[kept]).predict_proba(X)
    np.testing.assert_array_equal(absent, quick(loss=loss, max_epochs=2).fit(X, y, kept).predict_proba(X))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_decision_rule_is_chosen_on_the_validation_rows(classes, weighted):
    """No threshold or other rule scores higher there than plugin; expected needs no labels."""
    X, y = make_classification(600, 6, n_informative=4, n_classes=classes, n_clusters_per_class=1,
                               weights=[0.8, 0.1][: classes - 1], flip_y=0.1, random_state=3)  # fmt: skip
    weights = np.random.default_rng(0).uniform(0.2, 3, len(y)) if weighted else None
    by_rule = {
        decision: quick(loss="ce", decision=decision, max_epochs=6, hidden=(8,)).fit(X, y, weights)
        for decision in ("argmax", "plugin", "expected")
    }
    scores = {decision: model.oof_score_ for decision, model in by_rule.items()}
    assert scores["plugin"] >= max(scores.values())
    assert scores["plugin"] > scores["argmax"]
    p = by_rule["argmax"].predict_proba(X)
    np.testing.assert_array_equal(by_rule["argmax"].predict(X), p.argmax(1))
    for model in by_rule.values():  # the network is the same
        np.testing.assert_array_equal(model.predict_proba(X), p)
        np.testing.assert_array_equal(model.predict(X), model.rule_.decide(torch.from_numpy(p)).numpy())
        average = "binary" if classes == 2 else "macro"
        assert model.score(X, y) == pytest.approx(f1_score(y, model.predict(X), average=average))


def test_costs_have_true_classes_in_rows(rare):
    X, y = rare
    costs = np.array([[0.0, 1.0], [20.0, 0.0]])
    model = quick("cost", costs=costs).fit(X, y)
    mean = costs[y, model.predict(X)].mean()
    assert model.score(X, y) == pytest.approx(-mean)
    assert model.predict(X).sum() > 1.5 * y.sum()


@pytest.mark.parametrize(
    "dtype, options", [(object, {}), (str, {"metric": "f1_positive"}), ("category", {}), ("string", {"loss": "ce"})]
)
def test_of_two_words_the_rarer_one_is_positive(rare, dtype, options):
    """Their alphabetical order says nothing, and "ok" comes after "fraud"."""
    X, y = rare
    words = pd.Series(np.where(y == 1, "fraud", "ok")).astype(dtype)
    with pytest.warns(UserWarning, match="scored as positive: 'fraud', the rarer class"):
        model = quick(**options, max_epochs=3).fit(X, words)
    named = quick(**options, positive="fraud", max_epochs=3).fit(X, words)
    wanted = f1_score(words, model.predict(X), pos_label="fraud")
    assert model.score(X, words) == named.score(X, words) == pytest.approx(wanted)


@pytest.mark.parametrize("loss, stages", [("metric_ce", 1), ("metric", 9)])
@pytest.mark.parametrize("rows, longest, patience", [(300, 1500, 250), (1_000_000, 20, 5)])
def test_training_is_as_long_as_in_the_contest_by_default(loss, stages, rows, longest, patience):
    """3,000 gradient steps and a patience of 500 in batches of 128, but at least 20 and 5 epochs."""
    protocol = EASTClassifier(members=1, loss=loss)._config(rows, {}).protocol
    assert (protocol.max_epochs, protocol.patience) == (longest, patience)
    assert protocol.stage_epochs == -(-longest // stages)
    every_epoch = EASTClassifier(loss="metric", annealing="per_epoch")._config(300, {}).protocol
    assert every_epoch.stage_epochs == every_epoch.max_epochs == 1500


@pytest.mark.parametrize("members", [1, 4])
def test_a_classifier_becomes_a_saved_model(members, tmp_path):
    frame, y = people()
    model = quick(mcc, members=members, decision="plugin", max_epochs=3).fit(frame, y)
    again = east.load(model.to_model().save(tmp_path / "model"))
    np.testing.assert_allclose(again.predict_proba(frame), model.predict_proba(frame), atol=1e-6)
    np.testing.assert_array_equal(again.predict(frame), model.predict(frame))
    assert again.about.decision == "plugin_mcc"


@pytest.mark.parametrize("gap", [None, np.nan, pd.NA])
def test_missing_targets_of_a_frame_are_refused_in_plain_words(gap):
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "b": ["x", "y", "x", "y"]})
    fitted = quick(max_epochs=1).fit(frame, ["no", "yes", "no", "yes"])
    for call in (quick(max_epochs=1).fit, fitted.score):
        with pytest.raises(ValueError, match="Input y contains NaN"):
            call(frame, pd.Series(["no", "yes", "no", gap]))
