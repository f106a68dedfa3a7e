"""AP-Perf against a linear programme for the game it solves, over all label vectors, and the package's own layer."""

import re
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from east.choices import install_hint
from east.lab.settings.settings import LossSection
from east.lab.training.objective import build_loss
from east.losses import APPerf

CONF = Path(__file__).parent.parent / "conf" / "loss" / "ap_perf.yaml"
pytest.importorskip("ap_perf", reason=install_hint("apperf"))
pytest.importorskip("numba", reason=install_hint("apperf"))


def batch(*shape: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return scale * torch.randn(*shape, generator=generator), torch.randint(2, shape, generator=generator)


def game(z: np.ndarray, y: np.ndarray, beta: float) -> tuple[float, np.ndarray]:
    """n L and its gradient q - y: min over Q of max over answers of E_Q[F_beta(answer, .) - z .], as a programme."""
    from scipy.optimize import linprog

    vectors = np.array(list(product([0, 1], repeat=len(z))))
    counts = vectors.sum(1)
    whole = beta**2 * counts + counts[:, None]  # [answer, truth]
    fbeta = np.divide((1 + beta**2) * (vectors @ vectors.T), whole, out=np.ones(whole.shape), where=whole > 0)
    m = len(vectors)
    solution = linprog(
        np.append(-vectors @ z, 1.0),  # Q and the value v of the best answer
        A_ub=np.column_stack((fbeta, -np.ones(m))),
        b_ub=np.zeros(m),
        A_eq=np.append(np.ones(m), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0, None)] * m + [(None, None)],
    )
    q = solution.x[:m] @ vectors
    return 1 - solution.fun - y @ z, q - y


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("truth", [(0, 1, 1, 0), (0, 0, 0, 0), (1, 1, 1, 1)])
def test_loss_and_gradient_are_those_of_the_game(beta, truth):
    z = torch.tensor([0.3, -0.2, 0.1, -0.45], dtype=torch.float64, requires_grad=True)
    value = APPerf(beta, max_iter=500)(z, torch.tensor(truth))
    value.backward()
    expected, gradient = game(z.detach().numpy(), np.array(truth), beta)
    assert 4 * value.item() == pytest.approx(expected, abs=2e-3)
    np.testing.assert_allclose(4 * z.grad.numpy(), gradient, atol=2e-3)
    assert value > 0


def test_the_gradient_per_sample_is_that_of_the_packages_layer():
    from ap_perf.layer import MetricLayer

    loss = APPerf()
    z, y = batch(20)
    z.requires_grad_()
    (3 * loss(z, y)).backward()  # the layer's own backward would drop the factor
    w = z.detach().clone().requires_grad_()
    MetricLayer(loss.metric, {"max_iter": 50})(w, y).backward()
    torch.testing.assert_close(z.grad, 3 * w.grad / 20)


def test_single_logits_and_two_logits_give_one_number_per_trial():
    loss = build_loss(LossSection.model_validate(yaml.safe_load(CONF.read_text())), ("no", "yes"))
    z, y = batch(2, 3, 12)
    values = loss.per_trial(z[..., None], y)
    assert values.shape == (2, 3)
    torch.testing.assert_close(values[1, 2], loss(z[1, 2], y[1, 2]))
    torch.testing.assert_close(values, loss.per_trial(torch.stack((torch.ones_like(z), z + 1), -1), y))


def test_a_large_batch_is_solved_in_blocks():
    z, y = batch(50)
    loss = APPerf(block=20)
    blocks = zip(z.tensor_split(3), y.tensor_split(3), strict=True)
    torch.testing.assert_close(loss(z, y), sum(len(a) * loss(a, b) for a, b in blocks) / 50)


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_finite_logits_give_finite_numbers(scale):
    z, y = batch(2, 20, scale=scale)
    z.requires_grad_()
    value = APPerf().per_trial(z[..., None], y)
    value.sum().backward()
    assert value.isfinite().all()
    assert z.grad.isfinite().all()


def test_a_diverged_trial_is_nan_and_leaves_the_others_alone():
    z, y = batch(2, 20)
    alone = APPerf()(z[1], y[1])
    z[0, 3] = torch.inf
    value = APPerf().per_trial(z[..., None], y)
    assert value[0].isnan()
    torch.testing.assert_close(value[1], alone)


def test_bad_input_is_refused():
    z, y = batch(20)
    with pytest.raises(ValueError, match="no weights"):
        APPerf()(z, y, torch.full((20,), 2.0))
    with pytest.raises(ValueError, match="two classes or a single logit, got 3"):
        APPerf()(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="expected 0 to 1, got 1 to 2"):
        APPerf()(z, y + 1)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ap_perf.common_metrics", None)
    with pytest.raises(ValueError, match=f"^ap_perf is not installed: {re.escape(install_hint('apperf'))}$"):
        APPerf()
