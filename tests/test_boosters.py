"""XGBoost, LightGBM and CatBoost predict the same after a round trip through text; skipped if not installed."""

import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from east.baselines import Booster
from east.lab.data.common import split
from east.lab.training import boosters, portable, timing
from east.lab.training.boosters import LIBRARIES
from tests.test_classical import problem, table, trial


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("classes, labelled", [(2, (0, 1)), (5, (0, 2, 4)), (3, (1,))])
def test_a_model_saved_as_text_predicts_the_same(library, classes, labelled):
    pytest.importorskip(library)
    inputs, labels = problem(300, len(labelled))
    model = Booster(library, iterations=10).fit(inputs, np.array(labelled)[labels], classes)
    p = model.probabilities(inputs)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)
    assert not np.delete(p, labelled, axis=1).any()
    assert (p.argmax(1) == np.array(labelled)[labels]).mean() > 0.6
    module = portable.build(portable.state_of(model, inputs))
    np.testing.assert_allclose(module(torch.from_numpy(inputs)).numpy(), p, atol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_that_is_not_installed_is_named(library):
    if find_spec(library):
        pytest.skip(f"{library} is installed")
    with pytest.raises(ValueError, match=f"{library} is not installed: pip install {library}"):
        Booster(library)


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_time_of_a_library_is_estimated_from_a_few_trees(library, monkeypatch):
    """Every tree takes at least 2 ms here."""
    monkeypatch.setattr(boosters, "find_spec", lambda name: name)
    monkeypatch.setattr(Booster, "fit", lambda self, *_: time.sleep(0.002 * self.iterations))
    monkeypatch.setattr(Booster, "probabilities", lambda self, inputs: np.full((len(inputs), 2), 0.5))
    assert timing.fit_seconds(trial(library, iterations=200).config, split(table())) > 0.1


def test_an_unknown_library_is_refused():
    with pytest.raises(ValueError, match="did you mean 'xgboost'"):
        Booster("xgbost")
