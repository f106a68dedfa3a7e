"""Intervals and tests against SciPy, and against derivations small enough to do by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from east.lab.reporting import statistics

scores = st.lists(st.floats(0, 1), min_size=3, max_size=12).filter(lambda v: np.std(v) > 1e-6)


@given(scores)
def test_summary_and_t_interval_equal_scipy(values):
    found = statistics.summarize(values)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (found.mean, found.std) == pytest.approx((np.mean(values), np.std(values, ddof=1)))


def test_fewer_than_two_values_have_no_interval():
    assert statistics.summarize([]) == statistics.Summary(0, None, None, None, None)
    assert statistics.summarize([0.5]) == statistics.Summary(1, 0.5, None, None, None)


def test_overlapping_splits_widen_the_interval():
    """n = 10, test/train = 0.2/0.64: the half-width grows by sqrt((1/10 + 0.3125) / (1/10)) = 2.031."""
    values = np.random.default_rng(0).normal(size=10)
    plain, wide = (np.ptp(statistics.t_interval(values, overlap=o)) for o in (0, 0.2 / 0.64))
    assert wide / plain == pytest.approx(2.031, abs=1e-3)


@given(scores)
def test_the_corrected_t_test_without_overlap_is_students(values):
    zeros = dict.fromkeys(range(20), 0.0)
    plain, corrected = (statistics.paired(dict(enumerate(values)), zeros, overlap).p for overlap in (0.0, 0.3))
    assert plain == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert corrected >= plain - 1e-12


@pytest.mark.parametrize("overlap", [0.0, 0.3])
def test_equal_differences_have_no_interval(overlap):
    """Two seeds that happen to differ by the same amount say nothing about a third."""
    found = statistics.paired({0: 0.5, 1: 0.7}, {0: 0.25, 1: 0.45}, overlap=overlap)
    assert (found.low, found.high, found.p) == (None, None, 0.5)
    assert found.difference == pytest.approx(0.25)


def exactly(mean, std, n=10):
    """n numbers with this mean and sample standard deviation."""
    values = np.linspace(-1, 1, n)
    return mean + std * (values - values.mean()) / values.std(ddof=1)


@given(scores, st.floats(0, 1), st.floats(0.005, 0.4))
def test_welch_equals_scipy(ours, mean, std):
    expected = stats.ttest_ind(ours, exactly(mean, std), equal_var=False).confidence_interval()
    found = statistics.welch(ours, mean, std)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def test_a_published_deviation_of_zero_counts_as_half_a_hundredth():
    assert statistics.welch([0.7, 0.8], 0.5, 0.0) == statistics.welch([0.7, 0.8], 0.5, 0.005)
    assert statistics.published_interval(0.5, 0.0) == statistics.published_interval(0.5, 0.005)


@given(st.floats(0, 1), st.floats(0.005, 0.4))
def test_published_means_get_the_same_interval_as_ours(mean, std):
    found = statistics.published_interval(mean, std)
    assert (found.low, found.high) == pytest.approx(statistics.t_interval(exactly(mean, std)))


@pytest.mark.parametrize(
    "low, high, word",
    [
        (-0.02, 0.02, "reproduced"),
        (0.0, 0.01, "reproduced"),
        (0.001, 0.02, "close"),
        (-0.019, -0.001, "close"),
        (0.001, 0.021, "differs"),
        (0.1, 0.2, "differs"),
        (-0.021, 0.0, "imprecise"),
        (-0.5, 0.5, "imprecise"),
    ],
)
def test_each_interval_gets_one_word(low, high, word):
    assert statistics.verdict(statistics.Interval(low, high)) == word


def test_sign_flip_by_hand():
    """|+1 +2 +3| = 6 is reached by 2 of 8 patterns; |1 + 2 - 3| = 0 by all."""
    assert statistics.sign_flip([1, 2, 3]) == 2 / 8
    assert statistics.sign_flip([1, 2, -3]) == 1


@given(st.lists(st.integers(-100, 100), min_size=2, max_size=9).filter(sum))
def test_sign_flip_equals_scipy(differences):
    expected = stats.permutation_test(
        (np.array(differences),), np.sum, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    # SciPy doubles the smaller tail; the null distribution is symmetric, so both count the same patterns
    assert statistics.sign_flip(differences) == pytest.approx(expected.pvalue, abs=1e-9)


def test_sign_flip_with_many_values_is_drawn_and_never_zero():
    drawn = statistics.sign_flip(np.full(40, 0.1))
    assert 0 < drawn < 1e-3
    noise = np.random.default_rng(3).normal(0.2, 1, 25)
    assert statistics.sign_flip(noise) == pytest.approx(stats.ttest_1samp(noise, 0).pvalue, abs=0.03)


def test_pairs_are_matched_by_seed_and_the_rest_are_left_out():
    a, b = {0: 0.9, 1: 0.8, 2: 0.7, 9: 0.0}, {2: 0.6, 1: 0.6, 0: 0.6}
    found = statistics.paired(a, b)
    assert (found.n, found.wins, found.losses, found.p) == (3, 3, 0, 0.25)
    assert found.difference == pytest.approx(0.2)
    expected = stats.ttest_rel([0.9, 0.8, 0.7], [0.6, 0.6, 0.6]).confidence_interval()
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert statistics.paired(a, {}) is None
    assert statistics.paired(a, {0: 0.5}).p is None


def test_holm_matches_an_example_by_hand():
    """Holm 1979's procedure on p = .01 .04 .03 .005: 4*.005, 3*.01, 2*.03, then max(.06, .04)."""
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


@given(st.lists(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=4, max_size=4), min_size=2, max_size=5))
def test_a_rank_is_one_plus_those_ahead_plus_half_of_the_ties(rows):
    found = statistics.rank_columns({str(i): row for i, row in enumerate(rows)}).mean(1)
    for i, own in enumerate(rows):
        columns = list(zip(own, *rows, strict=True))
        ranks = [sum(v > x for v in others) + (sum(v == x for v in others) + 1) / 2 for x, *others in columns]
        assert found[i] == pytest.approx(np.mean(ranks))


@given(st.lists(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=4, max_size=4), min_size=3, max_size=5))
def test_friedman_equals_scipy(scores):
    found = statistics.friedman(statistics.rank_columns(dict(enumerate(scores))))
    expected = (0.0, 1.0)  # every column is one tie
    if any(len(set(column)) > 1 for column in zip(*scores, strict=True)):
        expected = stats.friedmanchisquare(*scores)
    assert found == pytest.approx(tuple(expected))


def test_the_critical_difference_matches_the_literature():
    """Demšar 2006, section 3.2.4: four classifiers on 14 datasets, q = 2.569 at 0.05, hence 1.25."""
    assert statistics.critical_difference(4, 14) == pytest.approx(2.569 * (4 * 5 / (6 * 14)) ** 0.5, abs=1e-3)


def test_sign_test_by_hand():
    """Three wins, and a prior of one equal data set: the share of wins is Beta(3, 1), above 1/2 with 1 - (1/2)^3.

    Dirichlet(1, 1, 1) is symmetric. Without data the prior decides: equal.
    """
    wins = statistics.sign_test([0.2, 0.3, 0.4], rope=0.1)
    assert (wins.behind, wins.equal, wins.ahead) == pytest.approx((0, 0.125, 0.875), abs=0.005)
    even = statistics.sign_test([-1, 1], rope=0.1)
    assert (even.behind, even.equal, even.ahead) == pytest.approx((1 / 3, 1 / 3, 1 / 3), abs=0.01)
    assert statistics.sign_test([], rope=0.1) == statistics.SignTest(0.0, 1.0, 0.0)
    assert statistics.sign_test([0.01, -0.01] * 9, rope=0.01).equal > 0.99, "the bounds of the region belong to it"
