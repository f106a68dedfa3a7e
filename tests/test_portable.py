"""Classical models saved as tensors predict what scikit-learn's objects predict, or are not written."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from east.baselines import GradientBoosting, LogisticRegression, RandomForest
from east.lab.data import DataError
from east.lab.training import portable
from tests.test_classical import problem

MODELS = [
    LogisticRegression(1.0),
    GradientBoosting(0.3, leaves=31, iterations=15, min_samples_leaf=2),
    GradientBoosting(0.1, leaves=3, iterations=1),
    RandomForest(9),
    RandomForest(3, min_samples_leaf=20),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("classes, labelled", [(2, (0, 1)), (4, (0, 1, 2, 3)), (5, (1, 4)), (6, (0, 2, 5)), (3, (2,))])
def test_predictions_match_also_for_classes_missing_from_training(model, classes, labelled):
    inputs, labels = problem(300, len(labelled))
    inputs = inputs.round(1)  # rows exactly on a threshold
    model.fit(inputs, np.array(labelled)[labels], classes)
    module = portable.build(portable.state_of(model, inputs))
    others = np.concatenate([inputs, 10 * np.random.RandomState(1).randn(500, 5).astype(np.float32)])
    found = module(torch.from_numpy(others)).numpy()
    assert found.shape == (800, classes)
    np.testing.assert_allclose(found, model.probabilities(others), atol=1e-6)


def test_only_the_chosen_iterations_are_kept():
    inputs, labels = problem(300, 3)
    model = GradientBoosting(iterations=(2, 40)).fit(
        inputs[:150], labels[:150], 3, validation=(inputs[150:], 2 - labels[150:])
    )
    assert model.iterations == 2
    assert len(portable.state_of(model, inputs)["roots"]) == 2 * 3


@pytest.mark.parametrize(
    "predictors, message",
    [
        ([[SimpleNamespace(nodes={"leaf": np.zeros(1)})]], "KeyError: 'is_leaf'"),
        ([[SimpleNamespace(arrays=None)]], "AttributeError"),
        (None, "predictions differ by"),
    ],
)
def test_trees_of_an_unknown_version_are_refused(predictors, message):
    inputs, labels = problem(300, 2)
    model = GradientBoosting(leaves=4, iterations=3).fit(inputs, labels, 2)
    model.model._predictors = model.model._predictors[::-1] if predictors is None else predictors
    if predictors is None:  # leaves that differ from those scikit-learn predicts with
        model.probabilities = lambda rows: np.full((len(rows), 2), 0.5)
    with pytest.raises(ValueError, match=f"cannot read the trees of scikit-learn .*{message}"):
        portable.state_of(model, inputs)


def test_tensors_of_a_network_are_unchanged():
    assert portable.build(torch.nn.Linear(3, 2).state_dict()) is None


@pytest.mark.parametrize("name, change", [("left", 0), ("right", 99_999), ("roots", -1), ("value", None)])
def test_trees_with_cycles_are_refused(name, change):
    inputs, labels = problem(100, 2)
    state = portable.state_of(RandomForest(2).fit(inputs, labels, 2), inputs)
    if change is None:
        del state[name]
    else:
        state[name] = torch.full_like(state[name], change)
    with pytest.raises(DataError, match="a saved model of trees"):
        portable.build(state)
