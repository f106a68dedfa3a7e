"""Decision rules against brute force: every threshold for two classes, random rules for three; east.decide."""

import inspect
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import metrics as sk
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression
from torch.nn.functional import one_hot

import east
from east import METRICS, Confusion, MetricCrossEntropy, MetricLoss, decisions
from east.decisions import Affine, Argmax, Gains, Threshold, expected, tuned
from east.lab.settings.settings import LossSection
from east.lab.tasks.compare import parse_score
from east.lab.training.crossfit import judge_for
from east.lab.training.evaluation import evaluate, metric_of
from east.lab.training.objective import build_loss
from east.losses import slopes

GOLDEN = [0.9, 0.7, 0.6, 0.45, 0.4, 0.35, 0.3, 0.2, 0.15, 0.1, 0.05, 0.05]
COSTS = [[0.0, 1.0, 3.0], [2.0, 0.0, 1.0], [5.0, 4.0, 0.0]]


def measure(name, classes, positive=None):
    """A metric with its required parameters, for the positive class if it has one."""
    parameters = {}
    if name == "cost":
        parameters["costs"] = torch.tensor(COSTS)[:classes, :classes].tolist()
    if classes == 2 and "average" in inspect.signature(METRICS[name]).parameters:
        parameters |= {"average": "positive", "positive": positive}
    return partial(METRICS[name], **parameters)


def drawn(n, classes, seed, rare=0.0):
    """Calibrated probabilities [n, d] and labels [n] drawn from them; `rare` makes the later classes rarer."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(n, classes, generator=generator, dtype=torch.float64) - rare * torch.arange(classes)
    p = logits.softmax(-1)
    return p, torch.multinomial(p, 1, generator=generator).squeeze(-1)


def value_of(rule, p, truth, metric):
    return float(metric(Confusion.from_shares(rule.decide(p), truth)))


def both(p, y, metric, positive=None):
    """The expected and the tuned rule, each with the truth that it maximises the metric on."""
    return (expected(p, metric, positive), p), (tuned(p, y, metric, positive), one_hot(y, p.shape[-1]).double())


def columns(values):
    return torch.stack((1 - values, values), -1)


def best_of_all_cuts(p, truth, metric, positive):
    """The metric's maximum over every subset {p >= t}, including the empty and the full one."""
    values = []
    for t in [2.0, *p[:, positive].tolist()]:
        chosen = torch.where(p[:, positive] >= t, positive, 1 - positive)
        matrix = truth.T @ one_hot(chosen, 2).double()
        values.append(float(metric(Confusion.from_matrix(matrix))))
    return max(values)


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("rare", [0.0, 3.0])
def test_two_classes_get_the_best_of_all_thresholds(name, positive, rare):
    metric = measure(name, 2, positive)
    for seed in range(5):
        p, y = drawn(30, 2, seed, rare)
        p = (p * 20).round() / 20  # with ties
        for rule, truth in both(p, y, metric, positive):
            found = value_of(rule, p, truth, metric)
            assert found == pytest.approx(best_of_all_cuts(p, truth, metric, positive), abs=1e-9)


@pytest.mark.parametrize(
    "values, labels, name, decided",
    [
        ([0.2, 0.4, 0.6, 0.9], [1, 1, 1, 1], "accuracy", [1, 1, 1, 1]),
        ([0.2, 0.4, 0.6, 0.9], [0, 0, 0, 0], "accuracy", [0, 0, 0, 0]),
        ([0.2, 0.4, 0.6, 0.9], [1, 1, 1, 0], "f1", [1, 1, 1, 1]),  # F1 of scores that point the wrong way
        ([1.0, 0.0], [0, 0], "accuracy", [0, 0]),
        ([1.0, 0.0], [1, 1], "accuracy", [1, 1]),
        ([0.5, np.nextafter(0.5, 1)], [0, 1], "accuracy", [0, 1]),  # adjacent floats
    ],
)
def test_every_set_of_rows_above_a_threshold_can_be_chosen(values, labels, name, decided):
    p = columns(torch.tensor(values, dtype=torch.float64))
    assert tuned(p, torch.tensor(labels), measure(name, 2, 1), 1).decide(p).tolist() == decided


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("labelled", [True, False])
def test_a_metric_that_is_undefined_for_some_decisions_can_be_tuned(classes, labelled):
    """The precision of a class that is never predicted is NaN here, and 0 in east's own metric."""
    random = np.random.default_rng(0)
    p = random.dirichlet(np.ones(classes), 60)
    labels = np.array([random.choice(classes, p=row) for row in p]) if labelled else None
    decision = east.decide(p, lambda c: c.diagonal[..., 1] / c.predicted[..., 1], labels)
    defined = east.decide(p, lambda c: METRICS["precision"](c, average="positive"), labels)
    assert decision.value == pytest.approx(defined.value)
    assert decision.value > 0.5


def test_the_threshold_for_expected_f1_is_half_of_it():
    """t = F(t)/2 = .331707 with F = .663415 is the best of all thresholds."""
    decision = east.decide(GOLDEN, "f1")
    assert decision.value == pytest.approx(0.663415, abs=1e-6)
    assert 0.3 < decision.rule.threshold <= 0.35
    assert decision.predict(GOLDEN).sum() == 6
    assert decision.predict([0.331708, 0.3]).tolist() == [1, 0]


SMOOTH = [name for name in METRICS if name not in ("precision", "npv")]  # these reward a single safe prediction


@pytest.mark.parametrize("name", SMOOTH)
@pytest.mark.parametrize("rare", [0.0, 1.5])
def test_three_classes_are_not_beaten_by_random_rules(name, rare):
    metric, generator = measure(name, 3), torch.Generator().manual_seed(0)
    for seed in range(2):
        p, y = drawn(300, 3, seed, rare)
        for rule, truth in both(p, y, metric):
            found = value_of(rule, p, truth, metric)
            for _ in range(150):
                scale = torch.randn(3, generator=generator, dtype=torch.float64).exp()
                shift = 0.2 * torch.randn(3, generator=generator, dtype=torch.float64)
                other = (p * scale + shift).argmax(-1)
                # On labels the objective is noisy, and the random rules get 150 tries at that noise.
                slack = 1e-3 if truth is p else 0.03
                assert float(metric(Confusion.from_shares(other, truth))) <= found + slack


def test_classes_that_argmax_never_predicts_are_found():
    """If argmax never predicts a class, MCC and G-mean have no slope there; the soft start has one."""
    p, _ = drawn(500, 3, 0)
    p = 0.2 * p + torch.tensor([0.75, 0.04, 0.01])
    p = p / p.sum(-1, keepdim=True)
    assert p.argmax(-1).unique().tolist() == [0]
    for name in ("mcc", "gmean"):
        metric = METRICS[name]
        assert value_of(Argmax(), p, p, metric) == 0
        assert value_of(expected(p, metric), p, p, metric) > 0.03


def test_costs_are_minimised_exactly():
    """Bayes' rule: the class with the lowest expected cost, row by row."""
    p, _ = drawn(200, 3, 1)
    rule = expected(p, measure("cost", 3))
    assert isinstance(rule, Gains)
    np.testing.assert_array_equal(rule.decide(p), (p @ torch.tensor(COSTS).double()).argmin(-1))


@pytest.mark.parametrize(
    ("rule", "content"),
    [
        (Argmax(), None),
        (Threshold(0.3, 0), {"threshold": 0.3}),
        (Affine((1.0, 2.0)), {"weights": [1.0, 2.0]}),
        (Affine((1.0, 2.0), (0.0, -0.5)), {"scale": [1.0, 2.0], "shift": [0.0, -0.5]}),
        (Gains(((1.0, 0.0), (0.0, 3.0))), {"gains": [[1.0, 0.0], [0.0, 3.0]]}),
    ],
)
def test_rules_survive_json(rule, content):
    assert rule.to_json() == content
    assert decisions.from_json(json.loads(json.dumps(rule.to_json())), positive=0) == rule
    p, _ = drawn(10, 2, 0)
    assert rule.decide(p.float().reshape(2, 5, 2)).shape == (2, 5)
    with pytest.raises(ValueError, match="expected threshold, weights"):
        decisions.from_json({"cut": 0.5})


def test_rules_compute_what_they_say():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    assert Affine((1.0, 2.0, 1.0)).decide(p).tolist() == [1, 2]
    assert Affine((1.0, 1.0, 1.0), (0.0, 0.0, 0.35)).decide(p).tolist() == [2, 2]
    assert Gains(((0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0))).decide(p).tolist() == [1, 2]
    assert Threshold(0.5, 0).decide(p[:, :2]).tolist() == [0, 1]


def test_records_store_the_expected_decisions():
    p, y = drawn(300, 3, 2, 1.0)
    q, z = drawn(200, 3, 3, 1.0)
    given = {"val": p.numpy(), "test": q.numpy()}
    labels = {"val": y.numpy(), "test": z.numpy()}
    names = ["expected_f1", "expected_quadratic_kappa", "plugin_f1"]
    result = evaluate(given, labels, None, names)
    json.dumps(result, allow_nan=False)
    for name in names:
        decision = result["decisions"][name]
        predicted = decisions.from_json(decision["rule"]).decide(q)
        assert decision["confusion"]["test"] == sk.confusion_matrix(z, predicted).tolist()
    # No labels are used: other validation labels give the same rule.
    again = evaluate(given, labels | {"val": y.roll(1).numpy()}, None, ["expected_f1"])
    assert again["decisions"]["expected_f1"]["rule"] == result["decisions"]["expected_f1"]["rule"]


def test_decide_helps_a_logistic_regression():
    X, y = make_classification(6000, 10, n_informative=4, weights=[0.93], class_sep=0.7, random_state=0)
    model = LogisticRegression().fit(X[:2000], y[:2000])
    unlabelled, test = model.predict_proba(X[2000:4000]), model.predict_proba(X[4000:])
    truth = y[4000:]
    best = max(sk.f1_score(truth, test[:, 1] >= t) for t in np.linspace(0.02, 0.9, 89))
    argmax = sk.f1_score(truth, test.argmax(1))
    for decision in (east.decide(unlabelled, "f1"), east.decide(unlabelled, "f1", labels=y[2000:4000])):
        found = sk.f1_score(truth, decision.predict(test))
        assert found > argmax + 0.05
        assert found > best - 0.03
        np.testing.assert_array_equal(decision(test), decision.predict(test[:, 1]))


def test_decide_takes_arrays_tensors_and_single_columns():
    p, y = drawn(100, 2, 0)
    rules = {east.decide(x, "mcc").rule.threshold for x in (p, p.numpy(), p[:, 1], p[:, 1:], p[:, 1].tolist())}
    assert len(rules) == 1
    of_labels = {east.decide(p, "f1", y.numpy().astype(kind)).rule for kind in ("bool", "uint16", "uint64", "int64")}
    assert len(of_labels) == 1
    decision = east.decide(p.requires_grad_(), "f1", labels=y.bool())
    assert isinstance(decision.predict(p), torch.Tensor)
    assert isinstance(decision.predict(p.detach().numpy()), np.ndarray)
    zero = east.decide(p, "f1", y, positive=0)
    assert zero.value == pytest.approx(sk.f1_score(y, zero.predict(p), pos_label=0))
    macro = east.decide(p, "f1", y, average="macro")
    assert macro.value == pytest.approx(sk.f1_score(y, macro.predict(p), average="macro"))
    for beta in (2, 0.5):
        rule = east.decide(p, "fbeta", y, beta=beta)
        assert rule.value == pytest.approx(sk.fbeta_score(y, rule.predict(p), beta=beta))
    truth, frame = y.numpy(), pd.DataFrame(p.detach().numpy())
    assert east.decide(frame, "f1", pd.Series(truth)).rule == east.decide(p, "f1", y).rule
    for hard in (truth, truth.astype(bool), np.eye(2, dtype=int)[truth]):  # decisions for probabilities
        np.testing.assert_array_equal(east.decide(hard, "f1", truth).predict(hard), truth)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):  # which may miss their range by rounding
        assert east.decide(p.to(dtype), "mcc", y).value == pytest.approx(east.decide(p, "mcc", y).value, abs=0.01)
    with pytest.raises(ValueError, match="expected 2 classes, got 3"):
        decision.predict(np.eye(3))
    own = east.decide(p, lambda c: METRICS["mcc"](c), y)
    assert own.rule == east.decide(p, "mcc", y).rule


@pytest.mark.filterwarnings("error")
def test_decide_warns_of_probabilities_that_are_far_from_the_classes():
    X, y = make_classification(4000, 10, n_informative=4, weights=[0.93], class_sep=0.7, random_state=0)
    fair, balanced = (
        LogisticRegression(class_weight=w).fit(X[:2000], y[:2000]).predict_proba(X[2000:]) for w in (None, "balanced")
    )
    east.decide(fair, "f1", y[2000:])
    east.decide(balanced, "f1")  # nothing to compare with
    with pytest.warns(UserWarning, match=r"mean probability of 1 is 0.444, but its share is 0.079: class weights"):
        east.decide(balanced, "f1", y[2000:])


@pytest.mark.filterwarnings("error")
def test_decide_warns_of_a_rule_that_predicts_one_class():
    """Expected precision is highest for the single surest row, recall if everything is positive."""
    p, y = drawn(1000, 2, 0, 1.0)
    for metric, words in (("precision", "999 of 1,000 rows to class 0"), ("recall", "1,000 of 1,000 rows to class 1")):
        with pytest.warns(UserWarning, match=f"the best rule for {metric} gives {words}"):
            east.decide(p, metric)
    for metric in ("f1", "mcc", "accuracy"):
        east.decide(p, metric)
        east.decide(p, metric, y)


@pytest.mark.filterwarnings("error")
def test_the_best_precision_with_a_recall_of_at_least_90_percent():
    p, y = drawn(500, 2, 0, 1.0)
    precision, recall, _ = sk.precision_recall_curve(y, p[:, 1])
    decision = east.decide(p, "precision", y, at_least={"recall": 0.9})
    assert decision.value == pytest.approx(precision[recall >= 0.9].max())
    assert sk.recall_score(y, decision.predict(p)) >= 0.9
    expected = east.decide(p, "precision", at_least={"recall": 0.9})
    assert expected.value == pytest.approx(decision.value, abs=0.05)
    zero = east.decide(p, "precision", y, positive=0, at_least={"recall": 0.9})
    assert sk.recall_score(y, zero.predict(p), pos_label=0) >= 0.9
    assert zero.rule.positive == 0
    assert east.decide(p, "f1", y, at_least={"mcc": 0.3}) == east.decide(p, "f1", y)
    with pytest.raises(ValueError, match=r"some threshold meets, got .*'specificity': 0\.99"):
        east.decide(p, "f1", y, at_least={"recall": 0.9, "specificity": 0.99})
    with pytest.raises(ValueError, match="at_least: expected two classes, got 3"):
        east.decide(drawn(50, 3, 0)[0], "f1", at_least={"recall": 0.9})


@pytest.mark.parametrize("classes", [2, 3])
def test_rows_with_a_large_margin_are_decided_better(classes):
    """The margin is 0 where the decision changes."""
    p, y = drawn(2000, classes, 0, 1.0)
    decision = east.decide(p, "f1")
    margin, right = decision.margin(p.numpy()), (decision.predict(p) == y).numpy()
    assert right[margin >= np.quantile(margin, 0.3)].mean() > right.mean() + 0.05
    assert decision.margin(p).equal(torch.from_numpy(margin))
    if classes == 2:
        np.testing.assert_allclose(margin, 2 * np.abs(p[:, 1] - decision.rule.threshold))


WRONG = [
    ({"probabilities": [[0.5, 0.6]]}, "rows that sum to 1, got sums from 1.1 to 1.1"),
    ({"probabilities": [[2.0, -1.0]]}, "expected 0 to 1, got -1 to 2: logits"),
    ({"probabilities": [[float("nan"), 1.0]]}, "expected 0 to 1"),
    ({"probabilities": [0, 2]}, "expected 0 to 1, got 0 to 2"),
    ({"probabilities": [0, 1j]}, "expected numbers"),
    ({"probabilities": np.zeros((2, 2, 2))}, r"shape \[2, 2, 2\]"),
    ({"probabilities": [0.5, 0.2], "labels": [1]}, r"one per row, \[2\], got shape \[1\]"),
    ({"probabilities": [0.5, 0.2], "labels": [1, 2]}, "labels: expected 0 to 1, got 1 to 2"),
    ({"probabilities": [0.5, 0.2], "labels": [0.0, 1.0]}, "expected integers"),
    ({"labels": np.array(["no", "yes"] * 10)}, "labels: expected class indices"),
    ({"metric": "f_1"}, "metric"),
    ({"metric": "cost"}, "cost needs costs"),
    ({"avrage": "macro"}, "did you mean 'average'"),
    ({"average": "none"}, "unknown average 'none'"),
    ({"positive": 7}, "positive: expected a class from 0 to 1, got 7"),
    ({"positive": -1}, "positive: expected a class from 0 to 1, got -1"),
    ({"average": "macro", "positive": 0}, "expected average='positive' with it"),
]


@pytest.mark.parametrize("arguments, message", WRONG)
def test_decide_explains_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        east.decide(**{"probabilities": np.linspace(0, 1, 20)} | arguments)


@pytest.mark.parametrize("classes", [2, 3])
def test_integer_weights_repeat_rows(classes):
    p, labels = drawn(60, classes, seed=1, rare=1.0)
    times = torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(2))
    again = p.repeat_interleave(times, 0), labels.repeat_interleave(times)
    metric = measure("f1", classes, positive=1)
    for rule, of_repeated in (
        (tuned(p, labels, metric, weights=times), tuned(*again, metric)),
        (expected(p, metric, weights=times), expected(again[0], metric)),
    ):
        assert rule.decide(again[0]).equal(of_repeated.decide(again[0]))


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_a_metric_that_indexes_its_counts_from_the_left_is_refused(classes):
    p, y = drawn(30, classes, 0)
    words = r"one number per leading index, .*from the right, as in c\.diagonal\[\.\.\., 1\]"
    wrong = [(lambda c: c.diagonal[1] / c.actual[1], words), (lambda c: c.matrix[0, 1], words)]
    wrong += [(lambda c: c.diagonal.sum(), words), (lambda c: c.diagonal[3], "out of bounds.*; index classes from the")]
    for metric, message in wrong:
        for labels in (y, None):
            with pytest.raises(ValueError, match=message):
                east.decide(p, metric, labels)
    for name in METRICS if classes < 4 else ():
        assert slopes.reads_matrix(measure(name, classes, 1), classes) is (name in ("cost", "quadratic_kappa"))


def weights_by_all_scores(p, y, metric, start):
    """Coordinate ascent that looks at the scores of all classes for every class of every sweep."""
    logs, weights = p.clamp_min(1e-30).log(), start.double().clone()

    def value(w):
        return float(metric(Confusion.from_predictions((logs + w).argmax(-1), y, len(w))))

    best = value(weights)
    for _ in range(decisions.SWEEPS):
        previous = best
        for k in range(len(weights)):
            tried = [torch.where(torch.arange(len(weights)) == k, w, weights) for w in decisions.LOG_WEIGHTS]
            values = [value(w) for w in tried]
            if max(values) > best + 1e-12:
                best = max(values)
                weights = tried[int(np.argmax(values))]
        if best == previous:
            break
    return weights.exp()


@pytest.mark.parametrize("seed", range(6))
def test_class_weights_are_those_of_a_search_over_all_scores(seed):
    """Also where many scores are equal, so that the order of the classes decides."""
    p, y = drawn(40, 4, seed, 0.5)
    p = (8 * p).round().clamp_min(seed % 2) / 8
    y[:4] = torch.arange(4)
    for start in (torch.zeros(4), -p.mean(0).log()):
        found = decisions.best_weights(p, one_hot(y, 4).double(), METRICS["f1"], start)
        np.testing.assert_array_equal(found.scale, weights_by_all_scores(p, y, METRICS["f1"], start))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_class_without_validation_rows_keeps_its_neutral_weight(weighted):
    """Its mean probability on these rows says little: 1 / mean would be 1e6."""
    p, y = drawn(300, 3, 0, 1.0)
    p = torch.cat((p, torch.full((300, 1), 1e-6)), 1)
    y[::10] = 3 if weighted else y[::10]
    truth = one_hot(y, 4).double() * ((y < 3)[:, None] if weighted else 1)
    for start in (torch.zeros(4), -p.mean(0).log()):
        assert decisions.best_weights(p, truth, METRICS["f1"], start).scale[3] == 1


@pytest.mark.parametrize("name", ["f1", "precision", "recall", "jaccard"])
@pytest.mark.parametrize("classes, average", [(2, "positive"), (3, "macro")])
def test_averages_mean_the_same_everywhere(name, classes, average):
    """With two classes the score of the positive one, with more the mean over classes."""
    p, labels = drawn(200, classes, seed=3, rare=0.5)
    hard = Confusion.from_predictions(p.argmax(-1), labels, classes)
    wanted = getattr(sk, f"{name}_score")(labels, p.argmax(-1), average="binary" if classes == 2 else "macro")
    judge = judge_for(name, None, None, np.arange(classes), np.ones(classes))
    section, positive = LossSection(name="metric", target="east.losses.MetricLoss", metric=name), {2: 1}.get(classes)
    losses = [MetricLoss(name), MetricCrossEntropy(name), build_loss(section, "abc"[:classes], positive=positive)]
    scores = [METRICS[name], judge.metric, *(partial(loss.metric, **loss.metric_parameters) for loss in losses)]
    scores += [metric_of(name, positive), partial(METRICS[name], average=average)]
    assert [float(score(hard)) for score in scores] == pytest.approx([wanted] * len(scores))
    data = SimpleNamespace(classes=tuple("abc"[:classes]), positive=positive, labels=labels.numpy())
    assert judge.name == parse_score(name, None, data).name == f"{name}_{average}"
    assert east.decide(p, name, labels) == east.decide(p, f"{name}_{average}", labels)
