"""The loss by NumPy gives what torch's operations give, for every metric with hand-derived slopes."""

import numpy as np
import pytest
import torch

from east import MetricLoss
from east.losses import on_cpu
from east.losses.nodes import soft_metric_loss
from east.metrics import WITH_SLOPES


def both(monkeypatch, logits, *rest):
    """Loss and gradient computed by NumPy and by torch."""
    results = []
    for covers in (on_cpu.covers, lambda _: False):
        monkeypatch.setattr(on_cpu, "covers", covers)
        z = logits.clone().requires_grad_()
        loss = soft_metric_loss(z, *rest)
        results.append((loss.detach(), torch.autograd.grad(loss.sum(), z)[0]))
    return results


@pytest.mark.parametrize("metric", WITH_SLOPES, ids=lambda metric: metric.__name__)
@pytest.mark.parametrize("lead", [(), (3,)], ids=["batch", "population"])
def test_numpy_and_torch_agree(metric, lead, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    for case in range(20):
        n, d = 1 + 5 * case, (2, 3, 10, 40, 257)[case % 5]
        dtype, tolerance = (torch.float64, 1e-10) if case % 2 else (torch.float32, 2e-5)
        z = torch.randn(*lead, n, d, dtype=dtype, generator=draw) * case
        z = z.round() if case % 4 == 0 else z  # ties; in case 0 among all classes
        y = torch.randint(d, (*lead, n), generator=draw)
        w = torch.rand(*lead, n, dtype=dtype, generator=draw) if case % 4 == 3 else None
        T = torch.tensor([0.02, 0.2, 0.4], dtype=dtype) if lead and case % 2 else 0.01 + 0.02 * case
        small, large = both(monkeypatch, z, y, w, metric, {}, T, case % 6 == 4)
        torch.testing.assert_close(small, large, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("classes", [2, 4, 40])
def test_logits_are_not_modified_in_any_layout(classes):
    loss, y = MetricLoss("mcc"), torch.arange(6) % classes
    for z in (torch.randn(classes, 6).T, torch.randn(6, classes), torch.randn(1, classes).expand(6, -1)):
        before = z.clone()
        expected = loss(z.double(), y)
        torch.testing.assert_close(loss(z.requires_grad_(), y), expected, check_dtype=False)
        assert torch.equal(z, before)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_classes_is_refused(label):
    z, y = torch.randn(2, 5, 3), torch.zeros(2, 5, dtype=torch.long)
    y[0, 4] = label
    with pytest.raises(ValueError, match=f"labels.*{label}"):
        MetricLoss("f1").per_trial(z, y)
    with pytest.raises(ValueError, match=f"labels.*{label}"):
        MetricLoss("f1")(z[0], y[0])


@pytest.mark.parametrize("classes", [2, 5, 50])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(classes):
    z, y = torch.randn(20, classes).requires_grad_(), torch.arange(20) % classes
    loss = MetricLoss("f1")(z, y)
    loss.backward(retain_graph=True)
    first = z.grad.clone()
    z.grad.zero_()
    loss.backward(retain_graph=True)
    assert torch.equal(z.grad, first)
    z.grad.zero_()
    (2 * loss).backward()
    assert torch.equal(z.grad, 2 * first)


def test_large_batches_and_compilation_are_left_to_torch(monkeypatch):
    assert on_cpu.covers(torch.empty(1024, 10))
    assert on_cpu.covers(torch.empty(1024, on_cpu.MANY_CLASSES - 1))
    assert not on_cpu.covers(torch.empty(1024, on_cpu.MANY_CLASSES))
    assert not on_cpu.covers(torch.empty(50, 1024).T), "pixels"
    assert not on_cpu.covers(torch.empty(on_cpu.MOST_ENTRIES, 2))
    assert not on_cpu.covers(torch.empty(4, 2, device="meta"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not on_cpu.covers(torch.empty(4, 2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_argmax_compares_floats_by_their_bits_as_numpy_does_by_value(dtype):
    p = np.random.default_rng(0).choice([0.0, 1e-40, 1e-7, 0.3, 0.5, 1.0], (2, 300, 40)).astype(dtype)  # many ties
    p[..., :7] = -1.0
    assert (on_cpu.argmax(p) == p.argmax(-1)).all()
