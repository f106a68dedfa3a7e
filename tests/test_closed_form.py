"""The closed form against the same function differentiated by autograd, and on another device."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from east import MetricLoss, metrics
from east.confusion import Confusion
from east.losses import closed_form, steps
from east.losses.closed_form import Form
from east.metrics import WITH_SLOPES
from tests.elsewhere import ELSEWHERE, elsewhere

# From few classes to many, on both sides of every switch of algorithm; logits from flat to those of a trained net.
SHAPES = [(1, 2), (50, 2), (50, 3), (40, 10), (20, 31), (20, 32), (8, 600), (4, 3000)]
SCALES = [0.0, 0.3, 3.0, 30.0]
TEMPERATURES = [1e-3, 0.05, 0.1, 0.2, 0.39]


class Counted(torch.autograd.Function):
    """Soft counts with the closed form's gradient."""

    @staticmethod
    def forward(ctx, logits, *rest):
        counts, ctx.gradient = closed_form.count(logits, *rest)
        return tuple(torch.as_tensor(x, dtype=logits.dtype) for x in counts)

    @staticmethod
    def backward(ctx, by_diagonal, by_missed, by_false_positives):
        D = by_diagonal - by_missed - by_false_positives  # if only the diagonal grows, both kinds of errors fall
        return ctx.gradient(D.numpy(), by_false_positives.numpy()), None, None, None


def soft_counts(logits, labels, weights, temperature, detach_threshold=False, thresholds=None):
    return Counted.apply(logits, labels, weights, Form(temperature, thresholds, detach_threshold))


def composed(logits, labels, weights, temperature, detach_threshold=False):
    """Eq. 4 and 5 composed from elementary operations."""
    p = logits.softmax(-1)
    threshold = steps.dynamic_threshold(p)
    threshold = threshold.detach() if detach_threshold else threshold
    T = temperature[..., None, None] if isinstance(temperature, torch.Tensor) else temperature
    c = Confusion.from_memberships(steps.normalised(steps.linear(p, threshold, T)), labels, weights)
    return c.diagonal, c.missed, c.false_positives


def batch(shape, scale=1.0, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(shape[-1], shape[:-1], generator=generator)
    # Most samples are right, as after training: raise the logit of their class.
    right = torch.rand(labels.shape, generator=generator) < 0.7
    labels = torch.where(right, logits.argmax(-1), labels)
    return logits.to(dtype), labels


def values_and_gradient(function, logits, *rest):
    """All counts, and the gradient of a random combination of them."""
    logits = logits.clone().requires_grad_()
    counts = function(logits, *rest)
    generator = torch.Generator().manual_seed(1)
    mixture = sum((torch.randn(c.shape, generator=generator, dtype=torch.float64) * c).sum() for c in counts)
    return *counts, *torch.autograd.grad(mixture, logits)


def assert_closed_form_is_composed(logits, *rest, tolerance=1e-9):
    ours, plain = values_and_gradient(soft_counts, logits, *rest), values_and_gradient(composed, logits, *rest)
    for name, a, b in zip(("diagonal", "missed", "false positives", "gradient"), ours, plain, strict=True):
        assert a.shape == b.shape
        size = max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, atol=tolerance * size, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("T", TEMPERATURES)
@pytest.mark.parametrize("scale", SCALES[1:])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_closed_form_matches_autograd(shape, scale, T):
    logits, labels = batch(shape, scale)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for detach_threshold in (False, True):
        assert_closed_form_is_composed(logits, labels, None, T, detach_threshold)
        assert_closed_form_is_composed(logits, labels, weights, T, detach_threshold)


@pytest.mark.parametrize("shape", SHAPES)
def test_equal_logits_count_alike(shape):
    """Every membership is 1/d. Ties leave the gradient undefined, so it only has to be finite."""
    logits, labels = batch(shape, 0.0)
    diagonal, missed, false_positives, gradient = values_and_gradient(soft_counts, logits, labels, None, 0.1)
    n, d = shape
    torch.testing.assert_close(diagonal + missed, torch.bincount(labels, minlength=d).double())
    torch.testing.assert_close(diagonal + false_positives, torch.full((d,), n / d, dtype=torch.float64))
    torch.testing.assert_close(diagonal, torch.bincount(labels, minlength=d) / d, check_dtype=False)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("ties", [(2, 1, 0), (2, 2, 0), (2, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("classes", [3, 10, 40, 600, 3000])
def test_ties_for_the_largest_count_as_composed(ties, classes):
    """Counts are those of the composed form; the gradient of a row sums to 0, whichever entry a tie favours."""
    logits, labels = batch((30, classes), 0.1)
    logits[:, :3] = logits.new_tensor(ties) + 1
    *counts, gradient = values_and_gradient(soft_counts, logits, labels, None, 0.2)
    torch.testing.assert_close(tuple(counts), composed(logits, labels, None, 0.2))
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(30, dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("thresholds", [None, (0.2, 0.7)])
@pytest.mark.parametrize("shape", [(50, 2), (2, 3, 8, 2), (40, 10), (2, 3, 8, 12), (20, 40), (2, 3, 8, 40)])
def test_another_device_counts_alike(shape, thresholds):
    """There tensors do what NumPy does on a CPU."""
    logits, labels = batch(shape, 3.0)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    T = torch.linspace(0.02, 0.3, labels[..., 0].numel()).double().reshape(shape[:-2])
    for detach in (False, True):
        counts, gradient = closed_form.count(logits, labels, weights, Form(T, thresholds, detach))
        slopes = [
            torch.randn(counts.diagonal.shape, generator=torch.Generator().manual_seed(k)).double() for k in (0, 1)
        ]
        by_hand = gradient(*(x.numpy() for x in slopes))
        with elsewhere():
            there = [x.to(ELSEWHERE) for x in (logits, labels, weights, T)]
            distant, other = closed_form.count(*there[:3], Form(there[3], thresholds, detach))
            for ours, theirs in zip(counts, distant, strict=True):
                torch.testing.assert_close(theirs.cpu(), torch.as_tensor(ours))
            torch.testing.assert_close(other(*(x.to(ELSEWHERE) for x in slopes)).cpu(), by_hand)


@pytest.mark.parametrize("classes", [2, 10, 64, 3000])
def test_a_nan_row_makes_the_loss_nan(classes):
    """It does not raise, so the engine can end the diverged trial and continue with the others."""
    logits, labels = batch((2, 30, classes), 3.0)
    logits[0, 4] = torch.nan
    values = MetricLoss("f1").per_trial(logits.requires_grad_(), labels)
    assert values.isnan().tolist() == [True, False]
    assert torch.autograd.grad(values[1], logits)[0][1].isfinite().all()


@pytest.mark.parametrize("classes", [2, 5, 50])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(classes):
    """Also where the first gradient is kept as it is, and would be overwritten by the sum with the second."""
    z, y = torch.randn(20, classes).requires_grad_(), torch.arange(20) % classes
    loss = MetricLoss("f1")(z, y)
    loss.backward(retain_graph=True)
    first = z.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(z.grad, 2 * first)
    z.grad.zero_()
    (2 * loss).backward()
    assert torch.equal(z.grad, 2 * first)


def share_of_hits(c):
    """Has no hand-derived slopes."""
    return c.diagonal.sum(-1) / c.total


@pytest.mark.parametrize("metric", ["mcc", share_of_hits])
@pytest.mark.parametrize("classes", [2, 3, 64])
def test_no_tensor_of_a_batch_outlives_backward(classes, metric):
    """Keeping the loss does not keep the batch, as with any torch loss; a second backward is refused."""
    logits = torch.randn(30, classes, requires_grad=True) * 1.0
    kept, loss = weakref.ref(logits), MetricLoss(metric)(logits, torch.arange(30) % classes)
    del logits
    loss.backward(retain_graph=True)
    loss.backward()
    assert kept() is None
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def test_no_gradient_is_computed_where_none_is_needed(monkeypatch):
    logits, labels = batch((30, 5), 3.0)
    wanted = MetricLoss("f1")(logits, labels)

    def refused(*_):
        raise AssertionError("computed a gradient")

    monkeypatch.setattr(closed_form, "count", lambda *a, count=closed_form.count: (count(*a)[0], refused))
    assert MetricLoss("f1")(logits, labels) == wanted
    with torch.no_grad():
        assert MetricLoss("f1")(logits.requires_grad_(), labels) == wanted
    with pytest.raises(AssertionError, match="computed a gradient"):
        MetricLoss("f1")(logits, labels)


@pytest.mark.parametrize("metric", ["mcc", share_of_hits])
@pytest.mark.parametrize("threshold", ["dynamic", 0.3, [0.2, 0.6]])
@pytest.mark.parametrize("classes", [2, 5])
def test_a_second_derivative_is_refused_however_it_is_asked_for(classes, threshold, metric):
    """With respect to weights behind the logits, and by torch's hessian. It would be 0."""
    x, labels = torch.randn(6, 4, requires_grad=True), torch.arange(6) % classes
    weights = torch.randn(4, classes, requires_grad=True)
    loss = MetricLoss(metric, threshold=threshold)
    with pytest.raises(RuntimeError, match="has no second derivative; instead, compute the metric"):
        torch.autograd.grad(loss(x @ weights, labels), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.functional.hessian(lambda z: loss(z, labels), torch.randn(6, classes))


@pytest.mark.parametrize("metric", ["f1", share_of_hits])
@pytest.mark.parametrize("classes", [2, 3, 64])
def test_backward_under_autocast_is_exact(classes, metric):
    logits, labels = batch((30, classes), 3.0, dtype=torch.float32)
    logits.requires_grad_()
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            gradients += torch.autograd.grad(MetricLoss(metric)(logits, labels), logits)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("classes", [2, 4, 40])
def test_logits_are_not_modified_in_any_layout(classes):
    loss, y = MetricLoss("mcc"), torch.arange(6) % classes
    for z in (torch.randn(classes, 6).T, torch.randn(6, classes), torch.randn(1, classes).expand(6, -1)):
        before = z.clone()
        expected = loss(z.double(), y)
        torch.testing.assert_close(loss(z.requires_grad_(), y), expected, check_dtype=False)
        assert torch.equal(z, before)


@pytest.mark.parametrize("scale", SCALES[1:])
@pytest.mark.parametrize("classes", [2, 5, 64, 2500])
@pytest.mark.parametrize("lead", [(4,), (2, 2), (1,)])
def test_a_population_counts_like_its_members(lead, classes, scale):
    """With one temperature per member, or one for all."""
    logits, labels = batch((*lead, 12, classes), scale)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    T = torch.linspace(0.02, 0.3, labels[..., 0].numel()).double().reshape(lead)
    for temperature in (0.1, torch.tensor(0.1).double(), T):
        for w in (None, weights):
            assert_closed_form_is_composed(logits, labels, w, temperature)
    together = values_and_gradient(soft_counts, logits, labels, weights, T)[:3]
    for index in torch.cartesian_prod(*(torch.arange(k) for k in lead)).reshape(-1, len(lead)).tolist():
        i = tuple(index)
        for all_counts, counts in zip(
            together, soft_counts(logits[i], labels[i], weights[i], float(T[i])), strict=True
        ):
            torch.testing.assert_close(all_counts[i], counts)


@pytest.mark.parametrize("dtype_tolerance", [(0.2, 2e-6), (0.01, 2e-5), (1e-3, 2e-4)])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_is_enough(shape, dtype_tolerance):
    T, tolerance = dtype_tolerance
    logits, labels = batch(shape, 3.0)
    exact = soft_counts(logits, labels, None, T)
    for ours, wanted in zip(soft_counts(logits.float(), labels, None, T), exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - wanted).abs().max() <= tolerance * shape[0]


SCORES = {
    "f1": {},
    "f1 weighted": {"average": "weighted"},
    "f1 positive": {"average": "positive", "positive": 0},
    "f1 micro": {"average": "micro"},
    "f1 of present classes": {"absent": "ignore"},
    "fbeta": {"beta": 2.5},
    "fbeta of one element": {"beta": torch.tensor(0.5)},
    "jaccard": {},
    "precision": {},
    "recall": {},
    "accuracy": {},
    "mcc": {},
    "balanced_accuracy": {},
    "youden": {},
    "gmean": {},
    "kappa": {},
    "fowlkes_mallows": {},
    "fowlkes_mallows weighted": {"average": "weighted"},
    "fowlkes_mallows micro": {"average": "micro"},
    "specificity": {},
    "specificity positive": {"average": "positive"},
    "specificity micro": {"average": "micro"},
    "npv": {},
    "npv weighted": {"average": "weighted"},
    "npv micro": {"average": "micro"},
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_slopes_by_hand_match_autograd(score, weighted):
    """For every metric that has them, on batches of all sizes with missing classes."""
    loss = MetricLoss(score.split()[0], **SCORES[score])
    assert loss.metric in WITH_SLOPES
    for shape in [*SHAPES, (3, 40, 10), (2, 3, 8, 4)]:
        logits, labels = batch(shape, 3.0)
        labels = labels.clamp_max(max(1, shape[-1] // 2))
        weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2)).double() if weighted else None
        results = []
        for value in (
            loss.per_trial(logits.requires_grad_(), labels, weights),
            1 - loss.metric(loss.confusion(logits, labels, weights), **loss.metric_parameters),
        ):
            results.append((value, *torch.autograd.grad(value.sum(), logits)))
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def test_every_metric_with_slopes_is_tested():
    assert {MetricLoss(name.split()[0]).metric for name in SCORES} == set(WITH_SLOPES)


def test_a_metric_set_later_is_used():
    logits, labels = batch((40, 3), 3.0)
    loss = MetricLoss("f1")
    loss.metric = metrics.jaccard
    torch.testing.assert_close(loss(logits, labels), 1 - metrics.jaccard(loss.confusion(logits, labels)))


@pytest.mark.parametrize("metric", ["f1", "accuracy", "mcc", "quadratic_kappa"])
@pytest.mark.parametrize("shape", [(6, 2), (5, 4), (2, 66), (2, 3, 5)])
def test_gradcheck(shape, metric):
    logits, labels = batch(shape, 1.0, seed=3)
    loss = MetricLoss(metric)
    assert torch.autograd.gradcheck(lambda z: loss.per_trial(z, labels), logits.requires_grad_())


@pytest.mark.parametrize("T", [1e-3, 0.05, 0.2, 0.3, 0.4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_extreme_logits_stay_finite(shape, dtype, T):
    for scale in (0.0, 1e-6, 1e2, 1e4):
        logits, labels = batch(shape, scale, dtype=dtype)
        for detach_threshold in (False, True):
            for result in values_and_gradient(soft_counts, logits, labels, None, T, detach_threshold):
                assert result.isfinite().all()


@pytest.mark.parametrize("thresholds", [(0.7,), tuple(k / 10 for k in range(1, 10))], ids=str)
@pytest.mark.parametrize("shape", [(40, 2), (2, 3, 8, 2), (40, 3), (20, 40), (2, 3, 8, 12)], ids=str)
def test_fixed_thresholds_count_as_composed(shape, thresholds):
    for scale, T in ((0.01, 0.2), (0.3, 0.05), (3.0, 0.2), (30.0, 1e-3)):
        logits, labels = batch(shape, scale)
        weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        loss = MetricLoss("f1", threshold=thresholds, temperature=T)

        def plain(z, *rest, loss=loss):
            c = loss.confusion(z, *rest)
            return c.diagonal, c.missed, c.false_positives

        for w in (None, weights):
            ours = values_and_gradient(soft_counts, logits, labels, w, T, False, thresholds)
            torch.testing.assert_close(ours, values_and_gradient(plain, logits, labels, w), atol=1e-9, rtol=1e-9)


def test_small_memberships_of_two_classes_keep_their_precision():
    """float32 against float64, where one probability is as small as 1e-13."""
    logits, labels = torch.tensor([[0.0, 30.0], [25.0, 0.0], [0.0, 0.1]]), torch.tensor([0, 1, 1])
    ours, exact = (soft_counts(z, labels, None, 0.2, False, (0.1, 0.5, 0.9)) for z in (logits, logits.double()))
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=0)


class Largest(TorchDispatchMode):
    """Remembers the largest number of elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.untyped_storage().nbytes() // leaf.element_size() for leaf in tree_leaves(result)
                 if isinstance(leaf, torch.Tensor)]  # fmt: skip
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("metric", ["f1", "accuracy", "mcc", "kappa", "gmean", "fowlkes_mallows"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_a_hundred_thousand_classes_never_build_a_matrix(metric, scale):
    """No operation in forward or backward returns more than a few times the logits, let alone 10^10 elements."""
    logits, labels = batch((4, 100_000), scale, dtype=torch.float32)
    logits.requires_grad_()
    with Largest() as largest:
        MetricLoss(metric)(logits, labels).backward()
    assert logits.grad.isfinite().all()
    assert logits.numel() <= largest.elements <= 4 * logits.numel()
