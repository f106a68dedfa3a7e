"""Scores against scikit-learn; decision rules against exhaustive search."""

import json

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from east import losses
from east.confusion import Confusion
from east.decisions import Argmax, from_json, tuned
from east.lab.training import evaluation
from east.lab.training.evaluation import evaluate, validation_metric
from east.lab.training.scores import Cells
from east.metrics import f1, mcc

RNG = np.random.default_rng(0)


def drawn(n, classes, sharpness=1.5):
    labels = RNG.integers(0, classes, n)
    logits = RNG.normal(size=(n, classes)) + sharpness * np.eye(classes)[labels]
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return p.astype(np.float32), labels


def parts(classes):
    drawings = {part: drawn(n, classes) for part, n in (("val", 400), ("test", 500))}
    return {k: p for k, (p, _) in drawings.items()}, {k: y for k, (_, y) in drawings.items()}


@pytest.fixture(scope="module")
def binary():
    return parts(2)


@pytest.fixture(scope="module")
def multiclass():
    return parts(5)


def test_binary_scores_equal_scikit_learn(binary):
    p, y = binary[0]["test"], binary[1]["test"]
    result, predicted = evaluate(*binary, positive=1), binary[0]["test"].argmax(1)
    assert result["confusion"]["test"] == sk.confusion_matrix(y, predicted).tolist()
    expected = {
        "f1_pos": sk.f1_score(y, predicted),
        "f1_macro": sk.f1_score(y, predicted, average="macro"),
        "accuracy": sk.accuracy_score(y, predicted),
        "balanced_accuracy": sk.balanced_accuracy_score(y, predicted),
        "mcc": sk.matthews_corrcoef(y, predicted),
        "gmean": np.sqrt(np.prod(sk.recall_score(y, predicted, average=None))),
        "auroc": sk.roc_auc_score(y, p[:, 1]),
        "auroc_thresholded": sk.roc_auc_score(y, predicted),
        "average_precision": sk.average_precision_score(y, p[:, 1]),
        "precision": sk.precision_score(y, predicted, average=None).tolist(),
        "recall": sk.recall_score(y, predicted, average=None).tolist(),
    }
    assert result["scores"]["test"] == {name: pytest.approx(value, abs=1e-9) for name, value in expected.items()}
    json.dumps(result, allow_nan=False)


def test_multiclass_scores_equal_scikit_learn(multiclass):
    p, y = multiclass[0]["test"].astype(float), multiclass[1]["test"]
    scores, predicted = evaluate(*multiclass, positive=None)["scores"]["test"], p.argmax(1)
    one_hot, decided = np.eye(5)[y], np.eye(5)[predicted]
    expected = {
        "f1_macro": sk.f1_score(y, predicted, average="macro"),
        "mcc": sk.matthews_corrcoef(y, predicted),
        "auroc": np.mean([sk.roc_auc_score(one_hot[:, k], p[:, k]) for k in range(5)]),
        "average_precision": sk.average_precision_score(one_hot, p, average="macro"),
        "auroc_thresholded": np.mean([sk.roc_auc_score(one_hot[:, k], decided[:, k]) for k in range(5)]),
    }
    assert {name: scores[name] for name in expected} == pytest.approx(expected)
    assert scores["f1_pos"] is None


def test_tied_scores_match_scikit_learn():
    p1 = np.array([0.1, 0.4, 0.4, 0.4, 0.8, 0.8, 0.9, 0.4], dtype=np.float32)
    y = np.array([0, 0, 1, 1, 0, 1, 1, 0])
    p = np.stack([1 - p1, p1], axis=1)
    scores = evaluate({"val": p}, {"val": y}, positive=1)["scores"]["val"]
    assert scores["auroc"] == pytest.approx(sk.roc_auc_score(y, p1))
    assert scores["average_precision"] == pytest.approx(sk.average_precision_score(y, p1))


def test_a_part_with_one_class_has_no_ranking_scores():
    scores = evaluate({"val": np.full((2, 2), 0.5)}, {"val": np.array([0, 0])}, positive=1)["scores"]["val"]
    assert scores["auroc"] is scores["average_precision"] is None


def test_threshold_scores_are_means_over_nine_decisions(binary):
    p, y = binary[0]["test"][:, 1], binary[1]["test"]
    decision = evaluate(*binary, positive=1, decisions=["thresholds"])["decisions"]["thresholds"]
    at = np.array([k / 10 for k in range(1, 10)], dtype=np.float32)
    assert decision["at"] == pytest.approx(at)
    assert decision["confusion"]["test"] == [sk.confusion_matrix(y, p >= t).tolist() for t in at]
    scores = decision["scores"]["test"]
    for beta in (1, 2, 3):
        expected = np.mean([sk.fbeta_score(y, p >= t, beta=beta) for t in at])
        assert scores[f"f{beta}_pos"] == pytest.approx(expected)
    assert scores["accuracy"] == pytest.approx(np.mean([sk.accuracy_score(y, p >= t) for t in at]))
    assert scores["auroc_thresholded"] == pytest.approx(np.mean([sk.roc_auc_score(y, p >= t) for t in at]))


def test_logit_thresholds_are_compared_with_log_odds(binary):
    p, y = binary[0]["test"].astype(float), binary[1]["test"]
    decision = evaluate(*binary, positive=1, decisions=["logit_thresholds"])["decisions"]["logit_thresholds"]
    logit = np.log(p[:, 1] / p[:, 0])
    assert decision["confusion"]["test"] == [sk.confusion_matrix(y, logit >= k / 10).tolist() for k in range(1, 10)]
    assert decision["at"] == pytest.approx([1 / (1 + np.exp(-k / 10)) for k in range(1, 10)])


def best_threshold(values, labels, metric):
    return tuned(torch.stack((1 - values, values), -1), labels.long(), metric).threshold


def test_equally_good_thresholds_are_broken_towards_one_half():
    values = torch.tensor([0.1, 0.2, 0.55, 0.9])
    labels = torch.tensor([False, False, True, True])
    assert best_threshold(values, labels, mcc) == pytest.approx((0.2 + 0.55) / 2)
    # t = 0.3 and t = 0.6 are both right three times in four.
    values, labels = torch.tensor([0.2, 0.4, 0.8]), torch.tensor([True, False, True])
    assert best_threshold(values, labels, lambda c: c.diagonal.sum(-1)) == pytest.approx(0.6)


def test_constant_probabilities_are_decided_at_one_half():
    labels = torch.tensor([True, False, True, False])
    for constant in (0.3, 0.7):
        assert (constant >= best_threshold(torch.full((4,), constant), labels, mcc)) == (constant >= 0.5)


def test_a_plugin_rule_improves_the_metric_on_validation(multiclass):
    # Classes 3 and 4 get half their probability: weights must restore them.
    p = {part: values * np.array([1, 1, 1, 0.3, 0.3], dtype=np.float32) for part, values in multiclass[0].items()}
    result = evaluate(p, multiclass[1], positive=None, decisions=["plugin_f1"])
    decision = result["decisions"]["plugin_f1"]
    assert decision["scores"]["val"]["f1_macro"] > result["scores"]["val"]["f1_macro"] + 0.02
    assert decision["scores"]["test"]["f1_macro"] > result["scores"]["test"]["f1_macro"]
    predicted = from_json(decision["rule"]).decide(torch.from_numpy(p["test"]))
    assert decision["confusion"]["test"] == sk.confusion_matrix(multiclass[1]["test"], predicted).tolist()


def test_argmax_stays_if_no_rule_is_better():
    p = torch.eye(3).repeat(4, 1) * 0.91 + 0.03
    assert tuned(p, torch.arange(3).repeat(4), f1) == Argmax()


def test_unknown_decisions_are_refused(binary, multiclass):
    with pytest.raises(ValueError, match="did you mean 'plugin_f1'"):
        evaluate(*binary, positive=1, decisions=["plugin_f"])
    with pytest.raises(ValueError, match="did you mean 'expected_mcc'"):
        evaluate(*binary, positive=1, decisions=["expected_mc"])
    with pytest.raises(ValueError, match="for two classes, got 5"):
        evaluate(*multiclass, positive=None, decisions=["thresholds"])


def test_losses_are_validated_with_their_own_metric():
    predictions, labels = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 1, 0, 1, 1])
    c = Confusion.from_predictions(predictions, labels, 2)
    y, z = labels.numpy(), predictions.numpy()
    cases = [
        (losses.MetricLoss("mcc"), sk.matthews_corrcoef(y, z)),
        (losses.MetricLoss("f1", average="positive"), sk.f1_score(y, z)),
        (losses.MetricLoss("f1_macro"), sk.f1_score(y, z, average="macro")),
        (losses.CrossEntropy(), sk.f1_score(y, z)),
        (losses.MetricCrossEntropy("mcc"), sk.matthews_corrcoef(y, z)),
        (losses.AUROCLoss(), sk.balanced_accuracy_score(y, z)),
    ]
    for loss, expected in cases:
        assert float(validation_metric(loss, 1)(c)) == pytest.approx(expected)
    assert float(validation_metric(losses.CrossEntropy(), None)(c)) == pytest.approx(sk.f1_score(y, z, average="macro"))


def test_very_many_classes_are_counted_by_cell(monkeypatch):
    """The same scores and counts, but no matrix of all classes, which would fill the memory."""
    parts = {part: drawn(300, 6) for part in ("val", "test")}
    given = {part: p for part, (p, _) in parts.items()}, {part: y for part, (_, y) in parts.items()}
    dense = evaluate(*given, positive=None, decisions=["plugin_f1"])
    monkeypatch.setattr(evaluation, "DENSE_CLASSES", 5)
    monkeypatch.setattr(evaluation, "counts", None)
    sparse = evaluate(*given, positive=None, decisions=["plugin_f1"])
    assert sparse["scores"] == dense["scores"]
    for judged, expected in ((sparse, dense), (sparse["decisions"]["plugin_f1"], dense["decisions"]["plugin_f1"])):
        for part, matrix in judged["confusion"].items():
            assert isinstance(matrix, Cells)
            assert list(matrix) == expected["confusion"][part]
