"""Steps against eq. 4 as printed, against torch-btg, and against properties of the dynamic threshold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_btg.confusion import linear_approx, sig

from east.losses import steps

TEMPERATURES = (0.01, 0.05, 0.1, 0.2, 0.39)
temperatures = st.floats(1e-3, 0.39)
thresholds = st.floats(0.02, 0.98)
fractions = st.floats(0, 1)
logit_rows = st.integers(2, 12).flatmap(lambda d: st.lists(st.floats(-8, 8), min_size=d, max_size=d))


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def eq4(p, tau, T):
    """Eq. 4, arXiv 2405.20954, branch by branch: slopes m1, m2, m3."""
    tau_m = 5 * T * torch.minimum(tau, 1 - tau)
    lo, hi = tau - tau_m / 2, tau + tau_m / 2
    m1, m2, m3 = T / lo, (1 - 2 * T) / tau_m, T / (1 - hi)
    return torch.where(
        p < lo, p * m1, torch.where(p > hi, p * m3 + (1 - T - m3 * hi), p * m2 + (0.5 - m2 * tau))
    ), torch.stack((m1, m2, m3))


def memberships(logits, T):
    p = logits.softmax(-1)
    return steps.normalised(steps.linear(p, steps.dynamic_threshold(p), T))


@pytest.mark.parametrize("T", TEMPERATURES)
def test_the_ramps_follow_equation_4(T):
    p, tau = torch.linspace(0, 1, 401).double(), torch.linspace(0.01, 0.99, 99).double().unsqueeze(-1)
    torch.testing.assert_close(steps.linear(p, tau, T), eq4(p, tau, T)[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(
        steps.linear(p.float(), tau.float(), T), eq4(p, tau, T)[0].float(), atol=2e-6 / T, rtol=0
    )


def test_the_linear_step_at_one_fifth_matches_bridging_the_gap():
    p, tau = torch.linspace(0, 1, 401), torch.linspace(0.1, 0.9, 9).unsqueeze(-1)
    torch.testing.assert_close(steps.linear(p, tau, 0.2), linear_approx(delta=0.2)(p, tau), atol=1e-5, rtol=0)


def test_the_sigmoid_step_matches_bridging_the_gap():
    p, tau = torch.linspace(0, 1, 401), torch.linspace(0.1, 0.9, 9).unsqueeze(-1)
    torch.testing.assert_close(steps.sigmoid(p, tau, 10.0), sig(k=10)(p, tau))


def test_the_cosine_step_integrates_the_raised_cosine():
    """SOL draws its threshold from (1 + cos(pi u)) / (2 de), u = (p - mu) / de; integrated by the midpoint rule."""
    mu, de, cells = 0.5, 0.1, 100_000
    middles = (torch.arange(cells).double() + 0.5) / cells
    u = (middles - mu) / de
    density = torch.where(u.abs() < 1, (1 + torch.cos(math.pi * u)) / (2 * de), 0.0)
    distribution = density.cumsum(0) / cells
    ends = (torch.arange(cells).double() + 1) / cells
    torch.testing.assert_close(steps.cosine(ends, double(mu), 1 / de), distribution, atol=1e-6, rtol=0)


@given(p=fractions, other=fractions, tau=thresholds, T=temperatures)
@settings(deadline=None)
def test_the_step_is_symmetric_and_lipschitz(p, other, tau, T):
    """H(1-p, 1-tau) = 1 - H(p, tau), and |H(p) - H(p')| <= max(m1, m2, m3) |p - p'|: theorem 4.1, BtG."""
    p, other, tau = double(p), double(other), double(tau)
    H = steps.linear(p, tau, T)
    assert float(steps.linear(1 - p, 1 - tau, T)) == pytest.approx(1 - float(H), abs=1e-9)
    slopes = eq4(p, tau, T)[1]
    assert abs(float(H - steps.linear(other, tau, T))) <= float(slopes.max() * (p - other).abs()) + 1e-9


@pytest.mark.parametrize("T", TEMPERATURES)
@pytest.mark.parametrize("distance", [1e-2, 1e-4, 1e-6])
def test_memberships_are_lipschitz_in_the_probabilities(T, distance):
    """Theorem 5.1 of the first version: near points of the simplex give near rows of the confusion matrix.

    With m the largest slope, |dH/dp| <= m and |dH/dtau| <= 2 m (as p1 <= 2 tau), so |dH_j| <= 3 m |dp|; the sum of H is
    at least H(p1) >= 1/2, so |dg_j| <= 3 m (1 + d) |dp| / (1/2). Slopes are largest at the least tau, 1/(2d).
    """
    d, generator = 5, torch.Generator().manual_seed(0)
    logits, direction = torch.randn(2, 2000, d, generator=generator, dtype=torch.float64)
    moved = logits + distance * direction
    change = (memberships(moved, T) - memberships(logits, T)).abs().amax(-1)
    slope = eq4(double(0), double(1 / (2 * d)), T)[1].max()
    assert (change <= 6 * slope * (1 + d) * (moved.softmax(-1) - logits.softmax(-1)).abs().amax(-1)).all()


@given(row=logit_rows, T=temperatures, shift=st.floats(-50, 50), data=st.data())
@settings(deadline=None)
def test_memberships_sum_to_1_and_keep_the_order(row, T, shift, data):
    z = double(row)
    g = memberships(z, T)
    assert float(g.sum()) == pytest.approx(1)
    assert g[z.argmax()] >= g.max() - 1e-12
    torch.testing.assert_close(memberships(z + shift, T), g, atol=1e-9, rtol=0)
    order = torch.tensor(data.draw(st.permutations(range(len(row)))))
    torch.testing.assert_close(memberships(z[order], T), g[order], atol=1e-12, rtol=0)


@given(row=logit_rows)
@settings(deadline=None)
def test_the_dynamic_threshold_is_between_half_the_maximum_and_one_half(row):
    p = double(row).softmax(-1)
    tau = float(steps.dynamic_threshold(p))
    assert float(p.max()) / 2 - 1e-12 <= tau <= 0.5 + 1e-12
    assert tau >= 1 / (2 * len(row)) - 1e-12


@given(row=logit_rows, T=temperatures)
@settings(deadline=None)
def test_the_gap_of_the_top_two_decides_the_top_class(row, T):
    """On the middle piece H(p1) = 1/2 + (1-2T)/(5T) tanh((z1-z2)/2); beyond T < 0.4 tanh((z1-z2)/2) the sample is hard:
    its class is above hi, all others below lo, and g differs from one-hot by less than 2 T d."""
    z = double(row)
    p, (first, second) = z.softmax(-1), z.topk(2).values
    tau, tanh = steps.dynamic_threshold(p), float(torch.tanh((first - second) / 2))
    lo, hi = tau * (1 - 2.5 * T), tau * (1 + 2.5 * T)
    top = p.max()
    if abs(T - 0.4 * tanh) < 1e-9:
        return
    assert bool((top > hi) & (p[p < top] < lo).all()) == (0.4 * tanh > T)
    if 0.4 * tanh < T:
        assert float(steps.linear(top, tau, T)) == pytest.approx(0.5 + (1 - 2 * T) / (5 * T) * tanh)
    else:
        onehot = torch.nn.functional.one_hot(z.argmax(), len(row))
        assert float((memberships(z, T) - onehot).abs().sum()) <= 2 * T * len(row) / (1 - T)


@pytest.mark.parametrize("T", TEMPERATURES)
def test_ties_share_equally_at_every_temperature(T):
    """m classes on top: 1/m each while the rest vanishes; uniform probabilities: 1/d each."""
    tied = memberships(double([30.0, 30, 30, 0, 0]), T)
    torch.testing.assert_close(tied, double([1 / 3, 1 / 3, 1 / 3, 0, 0]), atol=1e-9, rtol=0)
    torch.testing.assert_close(memberships(torch.zeros(6).double(), T), torch.full((6,), 1 / 6).double())


@pytest.mark.parametrize(
    "T, H, g",
    [
        (0.2, (0.65, 0.35, 0.2), (0.541667, 0.291667, 0.166667)),
        (0.1, (0.9, 0.1, 0.066667), (0.84375, 0.09375, 0.0625)),
        (0.02, None, (0.973921, 0.015647, 0.010432)),
    ],
)
def test_memberships_match_numbers_by_hand(T, H, g):
    p = double((0.5, 0.3, 0.2))
    stepped = steps.linear(p, steps.dynamic_threshold(p), T)
    torch.testing.assert_close(steps.normalised(stepped), double(g), atol=1e-5, rtol=0)
    if H:
        torch.testing.assert_close(stepped, double(H), atol=1e-5, rtol=0)
