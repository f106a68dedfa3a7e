"""Metrics against scikit-learn on thousands of random cases, against the golden batch, and their symmetries."""

import inspect
import warnings
from functools import partial

import numpy as np
import pytest
import sklearn
import torch
from sklearn import metrics as oracle

from east import metrics
from east.confusion import Confusion
from east.losses import MetricCrossEntropy, MetricLoss, steps
from east.metrics import METRICS


@pytest.fixture(autouse=True)
def quick_scikit_learn():
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about every undefined score
        yield


def random_cases(d, cases, seed=0):
    """Labels and predictions [cases, n] of all difficulties: skewed, one-sided and absent classes, few samples."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(d, 0.5), size=(2, cases, 1)).cumsum(-1)
    labels, predictions = (rng.random((2, cases, 25, 1)) > shares[..., :-1]).sum(-1)
    agree = rng.random((cases, 25)) < rng.random((cases, 1))
    predictions = np.where(agree, labels, predictions)
    few = rng.integers(1, 25, size=cases)  # some cases are a few samples, repeated
    index = np.arange(25) % np.where(rng.random(cases) < 0.3, few, 25)[:, None]
    return np.take_along_axis(labels, index, 1), np.take_along_axis(predictions, index, 1)


def confusion_of(labels, predictions, d):
    return Confusion.from_predictions(torch.as_tensor(predictions), torch.as_tensor(labels), d)


@pytest.mark.parametrize("d", [2, 3, 6])
def test_scores_of_each_class_match_scikit_learn(d):
    """Each class of each case is one label of a multilabel problem, so that scikit-learn scores all at once."""
    cases = 2000
    labels, predictions = random_cases(d, cases)
    c = confusion_of(labels, predictions, d)
    actual, predicted = (np.eye(d, dtype=bool)[x].swapaxes(0, 1).reshape(25, cases * d) for x in (labels, predictions))
    precision, recall, f1, _ = oracle.precision_recall_fscore_support(actual, predicted, zero_division=0)
    expected = {
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "fbeta": oracle.fbeta_score(actual, predicted, beta=2.5, average=None, zero_division=0),
        "jaccard": oracle.jaccard_score(actual, predicted, average=None, zero_division=0),
        "fowlkes_mallows": np.sqrt(precision * recall),
        "specificity": oracle.recall_score(~actual, ~predicted, average=None, zero_division=0),
        "npv": oracle.precision_score(~actual, ~predicted, average=None, zero_division=0),
    }
    shares = actual.mean(0).reshape(cases, d)
    assert (shares == 0).any(-1).mean() > 0.1  # absent classes are among the cases
    assert expected.keys() == {name for name in METRICS if "average" in inspect.signature(METRICS[name]).parameters}
    for name, scores in expected.items():
        scores = scores.reshape(cases, d)
        metric = partial(METRICS[name], c, **({"beta": 2.5} if name == "fbeta" else {}))
        for score, wanted in (
            (metric(average="none"), scores),
            (metric(), scores[:, 1] if d == 2 else scores.mean(-1)),
            (metric(average="macro"), scores.mean(-1)),
            (metric(average="positive"), scores[:, 1]),
            (metric(average="positive", positive=0), scores[:, 0]),
            (metric(average="weighted"), (scores * shares).sum(-1)),
            (metric(average="macro", absent="ignore"), np.nanmean(np.where(shares > 0, scores, np.nan), -1)),
        ):
            np.testing.assert_allclose(score, wanted, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("d", [2, 3, 6])
@pytest.mark.parametrize("cases", [150, pytest.param(1500, marks=pytest.mark.nightly)])
def test_scores_of_all_classes_together_match_scikit_learn(d, cases):
    labels, predictions = random_cases(d, cases, seed=cases)
    c = confusion_of(labels, predictions, d)
    for name, score in (
        ("accuracy", oracle.accuracy_score),
        ("balanced_accuracy", oracle.balanced_accuracy_score),
        ("youden", partial(oracle.balanced_accuracy_score, adjusted=True)),
        ("mcc", oracle.matthews_corrcoef),
        ("kappa", oracle.cohen_kappa_score),
        ("quadratic_kappa", partial(oracle.cohen_kappa_score, labels=range(d), weights="quadratic")),
    ):
        wanted = [score(y, h) for y, h in zip(labels, predictions, strict=True)]
        wanted = np.where(np.isfinite(wanted), wanted, 0)  # 0/0
        np.testing.assert_allclose(METRICS[name](c), wanted, atol=1e-9, err_msg=name)


def test_the_geometric_mean_and_the_cost_follow_their_formulas():
    labels, predictions = random_cases(3, 300)
    c = confusion_of(labels, predictions, 3)
    costs = np.arange(9).reshape(3, 3)
    np.testing.assert_allclose(metrics.cost(c, costs=costs), -costs[labels, predictions].mean(-1))
    found = labels == predictions
    recalls = [[found[i][y == k].mean() for k in np.unique(y)] for i, y in enumerate(labels)]
    wanted = [np.prod(r) ** (1 / len(r)) for r in recalls]
    np.testing.assert_allclose(metrics.gmean(c), wanted, atol=1e-9)


GOLDEN_LABELS = torch.tensor([0, 0, 1, 2])
P = [[0.5, 0.3, 0.2], [0.2, 0.7, 0.1], [0.1, 0.6, 0.3], [0.05, 0.15, 0.8]]


def golden_batch(T, dtype):
    p = torch.tensor(P, dtype=dtype)
    memberships = steps.normalised(steps.linear(p, steps.dynamic_threshold(p), T))
    return Confusion.from_memberships(memberships, GOLDEN_LABELS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "T, name, parameters, expected",
    [
        (0.2, "accuracy", {}, 0.546298),
        (0.2, "f1", {}, 0.555059),
        (0.2, "fbeta", {"beta": 1}, 0.555059),
        (0.2, "mcc", {}, 0.387694),
        (0.2, "kappa", {}, 0.350201),
        (0.2, "balanced_accuracy", {}, 0.610737),
        (0.2, "gmean", {}, 0.574675),
        (0.2, "jaccard", {}, 0.392605),
        (0.2, "fowlkes_mallows", {}, 0.581051),
        (0.2, "quadratic_kappa", {}, 0.508006),
        (0.2, "fbeta", {"beta": 0.25, "average": "none"}, (0.786664, 0.364616, 0.624400)),
        (0.2, "fbeta", {"beta": 5, "average": "none"}, (0.361117, 0.623416, 0.824928)),
        (0.05, "accuracy", {}, 0.720327),
        (0.05, "f1", {}, 0.744014),
        (0.05, "mcc", {}, 0.653404),
    ],
)
def test_golden_batch(T, name, parameters, expected, dtype):
    """By hand from equations 4 and 5: the score of soft counts, and the loss in its closed form."""
    score = METRICS[name](golden_batch(T, dtype), **parameters)
    torch.testing.assert_close(score, torch.tensor(expected, dtype=dtype), atol=1e-5, rtol=0)
    if score.ndim == 0:
        loss = MetricLoss(name, temperature=T, **parameters)(torch.tensor(P, dtype=dtype).log(), GOLDEN_LABELS)
        torch.testing.assert_close(loss, 1 - score, atol=1e-5, rtol=0)


def with_parameters(name, d):
    """The metric, with costs if it needs them."""
    return partial(METRICS[name], costs=np.arange(d * d).reshape(d, d)) if name == "cost" else METRICS[name]


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 7.0, 1e5, 1e30])
def test_scores_do_not_depend_on_the_scale_of_the_counts(name, scale):
    """Also where a class is almost absent, or almost never predicted."""
    matrix = torch.rand(20, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix[10:, 2] *= 1e-8
    matrix[15:, :, 1] *= 1e-9
    metric = with_parameters(name, 4)
    for dtype in (torch.float64, torch.float32):
        counts = matrix.to(dtype)
        torch.testing.assert_close(metric(Confusion.from_matrix(scale * counts)), metric(Confusion.from_matrix(counts)))


@pytest.mark.parametrize("name", METRICS)
def test_a_class_within_rounding_of_the_total_is_absent(name):
    """Scores and gradients are those of a class without samples and predictions."""
    counts = torch.tensor([[5.0, 3, 1], [2, 4, 2], [1, 1, 7]], dtype=torch.float64)
    counts[2], counts[:, 2] = 0, 0
    almost = counts.clone()
    almost[2, 2], almost[0, 2] = 1e-14, 2e-14
    metric, results = with_parameters(name, 3), []
    for matrix in (almost, counts):
        matrix.requires_grad_()
        score = metric(Confusion.from_matrix(matrix))
        results.append((score, torch.autograd.grad(score, matrix)[0]))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", METRICS)
def test_counts_and_the_matrix_give_the_same_score_and_only_two_metrics_need_the_matrix(name):
    generator = torch.Generator().manual_seed(0)
    memberships = torch.randn(3, 50, 4, generator=generator, dtype=torch.float64).softmax(-1)
    c = Confusion.from_memberships(memberships, torch.randint(4, (3, 50), generator=generator))
    of_matrix = with_parameters(name, 4)(Confusion.from_matrix(c.matrix))
    needed = name in ("cost", "quadratic_kappa")
    matrix = (lambda: c.matrix) if needed else (lambda: pytest.fail(f"{name} asked for the d x d matrix"))
    torch.testing.assert_close(
        with_parameters(name, 4)(Confusion(c.diagonal, c.actual, c.predicted, matrix)), of_matrix
    )


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    "matrix",
    [
        pytest.param([[9, 0, 0], [0, 0, 0], [0, 0, 0]], id="one cell"),
        pytest.param([[5, 3, 1], [0, 0, 0], [0, 0, 0]], id="one class"),
        pytest.param([[5, 0, 0], [3, 0, 0], [1, 0, 0]], id="one prediction"),
        pytest.param([[0, 4, 0], [0, 0, 4], [4, 0, 0]], id="all wrong"),
        pytest.param([[4, 0, 0], [0, 4, 0], [0, 0, 4]], id="all right"),
        pytest.param([[0, 0, 0], [0, 0, 0], [0, 0, 0]], id="no weight at all"),
        pytest.param([[1e-16, 1e-27, 0], [1e-16, 1e-27, 0], [0, 0, 0]], id="tiny weights, almost one prediction"),
    ],
)
def test_degenerate_counts_have_finite_scores_and_gradients(name, matrix):
    counts = torch.tensor(matrix, dtype=torch.float32, requires_grad=True)
    score = with_parameters(name, 3)(Confusion.from_matrix(counts))
    score.backward()
    assert score.isfinite()
    assert counts.grad.isfinite().all()


def test_rare_classes_are_not_treated_as_absent():
    """One positive in ten million, and it is found: perfect by every score."""
    c = Confusion.from_matrix(torch.tensor([[1e7, 0], [0, 1]], dtype=torch.float64))
    for name in METRICS.keys() - {"cost"}:
        assert float(METRICS[name](c)) == pytest.approx(1), name


def test_beta_moves_from_precision_to_recall_and_may_be_given_per_class_or_as_a_tensor():
    c = golden_batch(0.2, torch.float64)
    torch.testing.assert_close(metrics.fbeta(c, beta=1e-4), metrics.precision(c), atol=1e-6, rtol=0)
    torch.testing.assert_close(metrics.fbeta(c, beta=1e4), metrics.recall(c), atol=1e-6, rtol=0)
    alone = [metrics.fbeta(c, beta=b, average="none") for b in (0.25, 1.0, 5.0)]
    wanted = torch.stack([alone[k][k] for k in range(3)])
    torch.testing.assert_close(metrics.fbeta(c, beta=[0.25, 1, 5], average="none"), wanted)
    torch.testing.assert_close(metrics.fbeta(c, beta=torch.tensor(0.25), average="none"), alone[0])


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda c: metrics.f1(c, average="makro"), ("average 'makro'", "did you mean 'macro'", "weighted")),
        (lambda c: metrics.f1(c, absent="ignored"), ("absent 'ignored'", "did you mean 'ignore'", "zero")),
        (lambda c: metrics.f1(c, average="positive", positive=3), ("positive class 3", "0 to 2")),
        (lambda c: metrics.fbeta(c, beta=[1, 2]), ("beta", "shape () or (3,)", "(2,)")),
        (lambda c: metrics.cost(c, costs=[[0, 1], [1, 0]]), ("costs", "shape (3, 3)", "(2, 2)")),
        (lambda c: metrics.resolve("fbet"), ("metric 'fbet'", "did you mean 'fbeta'", "youden")),
        (lambda c: metrics.resolve("east.metrics.nothing"), ("east.metrics.nothing", "cannot be imported")),
        (lambda c: metrics.resolve("no_such_package.metric"), ("no_such_package", "cannot be imported")),
        (lambda c: metrics.resolve("east.metrics.MIN_SHARE"), ("expected a function", "float")),
        (lambda c: metrics.resolve(5), ("metric '5'", "youden")),
    ],
)
def test_wrong_parameters_are_named(call, words):
    with pytest.raises(ValueError) as error:
        call(golden_batch(0.2, torch.float64))
    assert all(word in str(error.value) for word in words)


def test_a_metric_is_found_by_name_or_path_and_a_name_may_include_its_average():
    """One vocabulary for scores: f1_positive in Python is what score=f1_positive is on the command line."""
    assert metrics.resolve("mcc") is metrics.resolve("east.metrics.mcc") is metrics.resolve(metrics.mcc)
    logits, labels = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    for name, average in (("f1_positive", "positive"), ("f1_pos", "positive"), ("recall_macro", "macro")):
        metric = name.partition("_")[0]
        for loss in (MetricLoss, MetricCrossEntropy):
            assert loss(name)(logits, labels) == loss(metric, average=average)(logits, labels)
    with pytest.raises(ValueError, match="f1_macro is f1 with average='macro', got 'positive'"):
        MetricLoss("f1_macro", average="positive")
    for name in ("mcc_macro", "f1_mean"):
        with pytest.raises(ValueError, match=f"unknown metric '{name}'"):
            metrics.parse(name)
