"""Counts against scikit-learn and against the full matrix; the papers' laws of large numbers."""

import math
import pickle

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from east import metrics
from east.confusion import Confusion


def batch(seed=0, lead=(), n=40, d=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    memberships = torch.randn(*lead, n, d, generator=generator, dtype=dtype).softmax(-1)
    return memberships, torch.randint(d, (*lead, n), generator=generator)


def assert_same(a, b, **tolerance):
    for name in ("diagonal", "actual", "predicted", "total", "matrix"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), **tolerance, msg=lambda m, name=name: name + m)


def test_hard_counts_match_scikit_learn_for_a_whole_population():
    rng = np.random.default_rng(0)
    predictions, labels = rng.integers(0, 4, (2, 50, 30))
    labels[:10] = np.minimum(labels[:10], 2)  # absent classes
    c = Confusion.from_predictions(torch.as_tensor(predictions), torch.as_tensor(labels), classes=4)
    expected = [confusion_matrix(y, h, labels=range(4)) for y, h in zip(labels, predictions, strict=True)]
    assert_same(c, Confusion.from_matrix(torch.as_tensor(np.array(expected))))
    assert_same(Confusion.from_matrix(expected[0].tolist()), Confusion.from_matrix(expected[0]))
    assert_same(c, Confusion.from_predictions(predictions, labels, classes=4))  # arrays
    assert c.matrix.dtype == torch.float64


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("weighted", [False, True])
def test_margins_and_diagonal_are_those_of_the_matrix(lead, weighted):
    """C[i, j] = sum over samples of class i of weight times membership in j; row sums are the class counts."""
    memberships, labels = batch(lead=lead)
    weights = torch.rand(labels.shape, dtype=torch.float64) if weighted else None
    c = Confusion.from_memberships(memberships, labels, weights)
    rows = torch.nn.functional.one_hot(labels, 5).double() * (1 if weights is None else weights.unsqueeze(-1))
    matrix = torch.einsum("...ni,...nj->...ij", rows, memberships)
    assert_same(c, Confusion.from_matrix(matrix))
    torch.testing.assert_close(c.actual, rows.sum(-2))


def test_one_hot_memberships_count_as_predictions():
    predictions, labels = torch.randint(5, (2, 3, 40), generator=torch.Generator().manual_seed(0))
    hard = Confusion.from_predictions(predictions, labels, classes=5)
    assert_same(Confusion.from_memberships(torch.nn.functional.one_hot(predictions, 5).double(), labels), hard)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Confusion.from_predictions(torch.tensor([0, 3]), torch.tensor([0, 1]), 3), ("predictions", "0 to 2")),
        (lambda: Confusion.from_predictions(torch.tensor([0, 1]), torch.tensor([-1, 1]), 3), ("labels", "-1 to 1")),
        (lambda: Confusion.from_predictions(torch.tensor([0.2]), torch.tensor([1]), 3), ("integers", "float32")),
        (lambda: Confusion.from_predictions([0, 1, 1], [1], 2), ("one per prediction, [3]", "shape [1]")),
        (lambda: Confusion.from_predictions([0, 1, 1], 1, 2), ("one per prediction, [3]", "shape []")),
        (lambda: Confusion.from_predictions([0], np.array([2**64 - 1], np.uint64), 2), ("labels", "0 to 1")),
        (lambda: Confusion.from_matrix(torch.ones(2, 3)), ("[..., d, d]", "(2, 3)")),
    ],
)
def test_wrong_input_is_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)


# A finite population of 60 items is the distribution: a sample of size n is how often each item is drawn.
ITEMS, ITEM_LABELS = batch(seed=3, n=60, d=4)
POPULATION = Confusion.from_memberships(ITEMS, ITEM_LABELS)


def samples_of(n, draws=1000):
    """Soft counts of `draws` random samples of size n from the population."""
    times = np.random.default_rng(n).multinomial(n, np.full(60, 1 / 60), size=draws)
    return Confusion.from_memberships(ITEMS.expand(draws, 60, 4), ITEM_LABELS, torch.as_tensor(times))


@pytest.mark.parametrize("delta", [0.5, 0.1, 0.01])
@pytest.mark.parametrize("n", [50, 500])
def test_the_confusion_of_a_sample_is_near_that_of_the_population(n, delta):
    """Theorem 5.8: max |C_n / n - C| <= sqrt(log(2 d^2 / delta) / (2 n)) with probability at least 1 - delta."""
    distance = (samples_of(n).matrix / n - POPULATION.matrix / 60).abs().amax((-2, -1))
    bound = math.sqrt(math.log(2 * 4**2 / delta) / (2 * n))
    assert (distance <= bound).double().mean() >= 1 - delta


def test_the_distance_falls_with_the_square_root_of_the_sample_size():
    """Theorem 5.9: on logarithmic axes the slope is -1/2."""
    sizes = [50, 200, 800, 3200, 12800]
    errors = [float((samples_of(n).matrix / n - POPULATION.matrix / 60).abs().amax((-2, -1)).mean()) for n in sizes]
    assert np.polyfit(np.log(sizes), np.log(errors), 1)[0] == pytest.approx(-0.5, abs=0.03)


@pytest.mark.parametrize("beta", [0.25, 1.0, 5.0])
def test_hard_and_soft_fbeta_have_the_same_limit(beta):
    """Eq. 10 and 14 of the first version: with class shares q and mean memberships P[k] both tend to
    mean_k (1+b^2) P_kk q_k / (b^2 q_k + sum_j P_jk q_j)."""
    n, generator = 400_000, torch.Generator().manual_seed(0)
    q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    P = torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.2, 0.3, 0.5]], dtype=torch.float64)
    limit = ((1 + beta**2) * P.diagonal() * q / (beta**2 * q + q @ P)).mean()
    labels = torch.multinomial(q, n, replacement=True, generator=generator)
    hard = torch.multinomial(P[labels], 1, generator=generator).squeeze(-1)
    gammas = torch.as_tensor(np.random.default_rng(0).standard_gamma(3 * P[labels].numpy()))
    soft = gammas / gammas.sum(-1, keepdim=True)  # Dirichlet
    for c in (Confusion.from_predictions(hard, labels, 3), Confusion.from_memberships(soft, labels)):
        assert float(metrics.fbeta(c, beta=beta)) == pytest.approx(float(limit), abs=0.004)


def test_weighted_predictions_match_scikit_learn():
    """Also as weighted shares of the classes, of which some samples have several."""
    random = np.random.default_rng(0)
    predicted, labels, others = (torch.from_numpy(x) for x in random.integers(0, 3, (3, 50)))
    weights, shared = (torch.from_numpy(x) for x in random.uniform(0, 3, (2, 50)))
    wanted = Confusion.from_matrix(confusion_matrix(labels, predicted, sample_weight=weights))
    assert_same(Confusion.from_predictions(predicted, labels, 3, weights), wanted)
    more = Confusion.from_matrix(
        wanted.matrix + torch.from_numpy(confusion_matrix(others, predicted, sample_weight=shared))
    )
    one_hot = torch.nn.functional.one_hot
    assert_same(
        Confusion.from_shares(predicted, weights[:, None] * one_hot(labels) + shared[:, None] * one_hot(others)), more
    )


INTEGERS = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in INTEGERS])
def test_predictions_and_labels_may_be_any_integers(dtype):
    predictions, labels = torch.tensor([1, 0, 1], dtype=dtype), torch.tensor([1, 1, 0], dtype=dtype)
    assert Confusion.from_predictions(predictions, labels, 2).matrix.tolist() == [[0, 1], [1, 1]]


def test_counts_can_be_pickled():
    counts = Confusion.from_memberships(*batch())
    restored = pickle.loads(pickle.dumps(counts))
    assert torch.equal(restored.matrix, counts.matrix)
    assert metrics.f1(restored) == metrics.f1(counts)
