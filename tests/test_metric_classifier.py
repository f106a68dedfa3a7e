"""MetricClassifier and cross-fitting: scikit-learn's checks, rows out of fold, the stack's weights, the rule."""

import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_iris, make_classification
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from sklearn.model_selection import GridSearchCV, GroupKFold, TimeSeriesSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

from east import Confusion, MetricClassifier, decide
from east.lab.training.crossfit import mixture_weights
from tests.made import RowNumbers

BY_RULE = "predict follows the rule for the metric, not the largest probability; decision='argmax' passes"


def expected_failures(classifier):
    return {} if classifier.decision == "argmax" else {"check_classifiers_train": BY_RULE}


@parametrize_with_checks(
    [MetricClassifier(LogisticRegression(), cv=2, decision=decision) for decision in ("argmax", "expected", "tuned")],
    expected_failed_checks=expected_failures,
)
def test_scikit_learns_checks(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which text is positive, classes with few rows
        check(estimator)


@pytest.fixture(scope="module")
def rare():
    return make_classification(2000, 8, n_informative=5, weights=[0.93], flip_y=0.05, random_state=1)


@pytest.mark.parametrize("cv", [2, 5, 7])
def test_no_row_is_judged_by_a_model_that_trained_on_it(cv):
    X = np.arange(103.0)[:, None]
    y = np.random.default_rng(0).integers(0, 2, 103)
    model = MetricClassifier(RowNumbers(), "accuracy", cv=cv, random_state=0).fit(X, y)
    assert (model.oof_probabilities_ == 0.5).all()
    assert model.predict_proba(X).max() < 1  # new rows are averaged over all folds
    assert len(model.estimators_[0]) == len(model.fold_scores_) == cv


def test_the_rule_is_that_of_decide_on_the_rows_out_of_fold(rare):
    X, y = rare
    for decision, labels in (("expected", None), ("tuned", y)):
        model = MetricClassifier(LogisticRegression(), "f1", decision=decision, random_state=0).fit(X, y)
        assert model.rule_ == decide(model.oof_probabilities_, "f1", labels).rule
        decided = model.rule_.decide(torch.from_numpy(model.oof_probabilities_)).numpy()
        assert model.oof_score_ == pytest.approx(f1_score(y, decided))
        assert model.score(X, y) == pytest.approx(f1_score(y, model.predict(X)))


def test_refit_on_all_rows_is_the_classifier_itself(rare):
    X, y = rare
    model = MetricClassifier(LogisticRegression(), refit="all", random_state=0).fit(X, y)
    assert np.allclose(model.predict_proba(X), LogisticRegression().fit(X, y).predict_proba(X))


class TestStack:
    def test_weights_equal_those_of_a_general_convex_solver(self):
        random = np.random.default_rng(0)
        for models, rows in ((2, 50), (3, 400), (5, 1000)):
            p, weights = random.beta(2, 1, (models, rows)), random.uniform(0, 3, rows)

            def loss(w, p=p, weights=weights):
                return -(np.log(w @ p) * weights).sum() / weights.sum()

            start, simplex = np.full(models, 1 / models), {"type": "eq", "fun": lambda w: w.sum() - 1}
            solved = minimize(loss, start, bounds=[(0, 1)] * models, constraints=simplex, options={"ftol": 1e-12}).x
            assert mixture_weights(p, weights) == pytest.approx(solved, abs=0.01)
            assert loss(mixture_weights(p, weights)) <= loss(solved) + 1e-6

    def test_noise_gets_no_weight_and_a_single_classifier_all(self, rare):
        X, y = rare
        stack = [LogisticRegression(), DummyClassifier(strategy="uniform", random_state=0)]
        assert MetricClassifier(stack, random_state=0).fit(X, y).weights_ == pytest.approx([1, 0], abs=0.03)
        alone, listed = (MetricClassifier(e, random_state=0).fit(X, y) for e in (stack[0], stack[:1]))
        assert (alone.predict_proba(X) == listed.predict_proba(X)).all()


class TestMeaning:
    def test_two_classes_score_the_positive_one_and_more_all(self, rare):
        X, y = rare
        two = MetricClassifier(LogisticRegression(), "f1").fit(X, y)
        assert two.score(X, y) == pytest.approx(f1_score(y, two.predict(X)))
        X, y = load_iris(return_X_y=True)
        many = MetricClassifier(DecisionTreeClassifier(max_depth=2), "f1").fit(X, y)
        assert many.score(X, y) == pytest.approx(f1_score(y, many.predict(X), average="macro"))

    def test_the_rarer_of_two_texts_is_positive_and_said_so(self, rare):
        X, y = rare
        names = np.where(y == 1, "fraud", "ok")  # fraud is first by the alphabet
        with pytest.warns(UserWarning, match="'fraud', the rarer class"):
            model = MetricClassifier(LogisticRegression(), random_state=0).fit(X, names)
        assert model.score(X, names) == pytest.approx(f1_score(names, model.predict(X), pos_label="fraud"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            given = MetricClassifier(LogisticRegression(), positive="fraud", random_state=0).fit(X, names)
            MetricClassifier(LogisticRegression(), "f1_macro", random_state=0).fit(X, names)
        assert (given.predict(X) == model.predict(X)).all()

    def test_costs_and_betas(self, rare):
        X, y = rare
        cheap, dear = (
            MetricClassifier(
                LogisticRegression(), "cost", metric_parameters={"costs": [[0, 1], [c, 0]]}, random_state=0
            )
            for c in (1, 20)
        )
        assert dear.fit(X, y).predict(X).sum() > 2 * cheap.fit(X, y).predict(X).sum()
        assert dear.rule_.threshold == pytest.approx(1 / 21, abs=0.01)  # where the expected costs are equal
        beta = MetricClassifier(LogisticRegression(), "fbeta", metric_parameters={"beta": 3}).fit(X, y)
        assert beta.score(X, y) == pytest.approx(sklearn.metrics.fbeta_score(y, beta.predict(X), beta=3))

    @pytest.mark.parametrize(
        "parameters, named",
        [
            ({"positive": 7}, "positive"),
            ({"metric": "f2"}, "f2"),
            ({"metric_parameters": {"gamma": 1}}, "gamma"),
            ({"decision": "best"}, "decision"),
            ({"refit": "some"}, "refit"),
            ({"cv": 1}, "cv"),
            ({"estimator": []}, "expected at least one classifier"),
        ],
    )
    def test_wrong_parameters_are_named(self, rare, parameters, named):
        with pytest.raises(ValueError, match=named):
            MetricClassifier(**{"estimator": LogisticRegression()} | parameters).fit(*rare)

    def test_a_metric_of_the_users_own(self, rare):
        def hits(c: Confusion) -> torch.Tensor:
            return c.diagonal[..., 1] - 0.2 * c.predicted[..., 1]

        X, y = rare
        model = MetricClassifier(LogisticRegression(), hits, random_state=0).fit(X, y)
        assert model.rule_.threshold == pytest.approx(0.2, abs=0.02)


class TestFolds:
    def test_groups_stay_together(self):
        random = np.random.default_rng(0)
        groups = np.repeat(np.arange(60), 5)
        X, y = groups[:, None] + random.normal(0, 0.01, (300, 1)), np.repeat(random.integers(0, 2, 60), 5)
        tree = DecisionTreeClassifier(random_state=0)
        assert MetricClassifier(tree, "accuracy", random_state=0).fit(X, y).oof_score_ > 0.95
        for cv in (5, GroupKFold(5)):
            grouped = MetricClassifier(tree, "accuracy", cv=cv, random_state=0).fit(X, y, groups=groups)
            assert grouped.oof_score_ < 0.75  # labels are random by group: nothing can be learnt

    def test_folds_in_time_leave_the_oldest_rows_undecided(self, rare):
        model = MetricClassifier(LogisticRegression(), cv=TimeSeriesSplit(4), refit="all").fit(*rare)
        assert np.isnan(model.oof_probabilities_[:400]).all()
        assert not np.isnan(model.oof_probabilities_[400:]).any()

    @pytest.mark.parametrize("rows, folds", [(1, 5), (2, 2), (3, 3)])
    def test_a_class_of_few_rows_means_fewer_folds_and_a_single_row_stays_in_training(self, rows, folds):
        X, y = make_classification(100, 5, random_state=0)
        y[y == 1] = 0
        y[:rows] = 1
        few = (
            f"{folds} folds of 5: one class has only {rows} rows" if rows > 1 else "a single row or group is always in"
        )
        with pytest.warns(UserWarning, match=few):
            model = MetricClassifier(LogisticRegression(), random_state=0).fit(X, y)
        assert len(model.fold_scores_) == folds
        assert model.predict_proba(X).shape == (100, 2)


def test_probabilities_of_a_reweighted_model_are_called_out(rare):
    balanced = LogisticRegression(class_weight="balanced")
    with pytest.warns(UserWarning, match="mean probability of 1"):
        MetricClassifier(balanced, random_state=0).fit(*rare)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MetricClassifier(balanced, decision="tuned", random_state=0).fit(*rare)
        MetricClassifier(LogisticRegression(), random_state=0).fit(*rare)


def test_sample_weights_count_in_models_rule_and_score(rare):
    X, y = rare
    weights = np.where(y == 1, 3.0, 1.0)
    repeated = np.repeat(np.arange(len(y)), weights.astype(int))
    model = MetricClassifier(LogisticRegression(), random_state=0).fit(X, y, sample_weight=weights)
    decided = model.rule_.decide(torch.from_numpy(model.oof_probabilities_)).numpy()
    assert model.oof_score_ == pytest.approx(f1_score(y[repeated], decided[repeated]))
    assert model.predict(X).sum() > MetricClassifier(LogisticRegression(), random_state=0).fit(X, y).predict(X).sum()


def test_metadata_are_routed_by_request(rare):
    X, y = rare
    weights, groups = np.ones(len(y)), np.arange(len(y)) % 9
    with sklearn.config_context(enable_metadata_routing=True):
        inner = LogisticRegression().set_fit_request(sample_weight=True)
        model = MetricClassifier(inner, cv=GroupKFold(3), random_state=0)
        model.set_fit_request(sample_weight=True).set_score_request(sample_weight=False)
        search = GridSearchCV(model, {"estimator__C": [0.1, 1]}, cv=GroupKFold(2))
        search.fit(X, y, sample_weight=weights, groups=groups)
    assert search.best_score_ > 0


def test_frames_pipelines_and_pickles(rare):
    X, y = rare
    frame = pd.DataFrame(X, columns=[f"f{k}" for k in range(8)])
    model = MetricClassifier(make_pipeline(StandardScaler(), LogisticRegression()), "mcc", random_state=0, n_jobs=2)
    model.fit(frame, y)
    assert [*model.feature_names_in_] == [*frame.columns]
    assert (pickle.loads(pickle.dumps(model)).predict(frame) == model.predict(frame)).all()
