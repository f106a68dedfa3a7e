"""MetricCrossEntropy: weights against numbers by hand and autograd, gradients, and its state."""

import inspect
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import east
from east import METRICS, Confusion, MetricCrossEntropy, MetricLoss
from east.lab.data.common import Part, Splits
from east.lab.settings.settings import DatasetSection, Hyper, LossSection, ModelSection, Science, Training
from east.lab.training import engine, population
from east.losses import CrossEntropy
from east.losses.metric_cross_entropy import FORMS

TWO, THREE, NEVER = [[90, 10], [4, 6]], [[50, 3, 2], [5, 20, 5], [1, 2, 12]], [[990, 0], [10, 0]]
POSITIVE = {"average": "positive"}
GOLDEN = [  # by hand: counts, smoothing, metric, parameters, weights before the floor
    (TWO, 0, "f1", POSITIVE, (0.46154, 1.53846)),
    (TWO, 0, "f1_macro", {}, (0.53370, 1.46630)),
    (TWO, 0, "mcc", {}, (0.41755, 1.58245)),
    (TWO, 0, "accuracy", {}, (1, 1)),
    (TWO, 0, "gmean", {}, (0.12500, 1.87500)),
    (TWO, 0, "balanced_accuracy", {}, (0.18182, 1.81818)),
    (THREE, 0, "f1", {}, (0.71271, 0.99587, 1.29142)),
    (THREE, 0, "mcc", {}, (0.91129, 0.96313, 1.12558)),
    (THREE, 0, "gmean", {}, (0.39130, 0.97826, 1.63043)),
    (THREE, 0, "balanced_accuracy", {}, (0.46154, 0.84615, 1.69231)),
    (TWO, 0.01, "f1", POSITIVE, (0.45871, 1.54129)),
    (TWO, 0.01, "f1_macro", {}, (0.53107, 1.46893)),
    (TWO, 0.01, "mcc", {}, (0.41630, 1.58370)),
    (TWO, 0.01, "gmean", {}, (0.12400, 1.87600)),
    (THREE, 0.01, "f1", {}, (0.71047, 0.99523, 1.29430)),
    (THREE, 0.01, "mcc", {}, (0.90884, 0.96450, 1.12666)),
    (THREE, 0.01, "gmean", {}, (0.39022, 0.97707, 1.63271)),
    (NEVER, 0.01, "f1", POSITIVE, (0.0002, 1.9998)),
    (NEVER, 0.01, "f1_macro", {}, (0.00527, 1.99473)),
    (NEVER, 0.01, "mcc", {}, (0.02, 1.98)),
    (NEVER, 0.01, "balanced_accuracy", {}, (0.02, 1.98)),
]
COSTS = [[0.0, 1.0, 3.0], [2.0, 0.0, 1.0], [5.0, 4.0, 0.0]]
OF_MATRIX = {"cost", "quadratic_kappa"}
EVERY = [(name, {"costs": COSTS} if name == "cost" else {}) for name in METRICS]
AVERAGED = [
    ("fbeta", {"beta": beta, **average})
    for beta in (0.25, [0.5, 1.0, 3.0])
    for average in (POSITIVE, {"average": "weighted"}, {"absent": "ignore"}, {"average": "positive", "positive": 2})
]
by_form = pytest.mark.parametrize("form", FORMS)


def loss_at(counts, metric, dtype=torch.float64, **options):
    """A loss with its slopes at given counts, and the targets it derives from them."""
    loss = MetricCrossEntropy(metric, counts="validation", **options)
    loss.set_counts(torch.tensor(counts))
    logits = torch.zeros(*torch.tensor(counts).shape[:-2], 1, len(counts[0]), dtype=dtype)
    return loss, loss.targets_for(logits)


def totals(targets):
    """The weight of a sample of each class."""
    return targets.rows(torch.eye(targets.diagonal.shape[-1], dtype=targets.diagonal.dtype)).sum(-1)


def slopes(counts, metric, smoothing=0.01, **parameters):
    """dM/dC at the smoothed matrix, through the full d x d form."""
    c = torch.tensor(counts, dtype=torch.float64)
    t = c.sum(-1) / c.sum()
    leaf = (c + smoothing * c.sum() * t[:, None] * t).requires_grad_()
    return torch.autograd.grad(METRICS[metric](Confusion.from_matrix(leaf), **parameters), leaf)[0]


def drawn(n=40, classes=3, lead=(), seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*lead, n, classes, generator=generator, dtype=dtype)
    labels = torch.randint(classes, (*lead, n), generator=generator)
    labels[..., :classes] = torch.arange(classes)
    return logits.requires_grad_(), labels, torch.rand(*lead, n, generator=generator, dtype=dtype)


def value_and_gradient(loss, logits, *rest):
    value = loss(logits, *rest)
    return value.detach(), torch.autograd.grad(value.sum(), logits)[0]


@pytest.mark.parametrize(("counts", "smoothing", "metric", "parameters", "expected"), GOLDEN)
def test_weights_match_numbers_by_hand(counts, smoothing, metric, parameters, expected):
    _, targets = loss_at(counts, metric, smoothing=smoothing, floor=1e-9, **parameters)
    assert targets.diagonal.tolist() == pytest.approx(expected, abs=6e-6)
    _, floored = loss_at(counts, metric, smoothing=smoothing, **parameters)
    assert floored.diagonal.tolist() == pytest.approx([max(0.02, w) for w in expected], abs=6e-6)


@pytest.mark.parametrize(("metric", "parameters"), EVERY + AVERAGED)
@by_form
def test_the_value_follows_the_plain_formula(metric, parameters, form):
    """Against the d x d slopes by autograd, cross-entropy from probabilities, and a Python loop over the samples."""
    logits, labels, weights = drawn()
    loss, _ = loss_at(THREE, metric, form=form, floor=1e-9, **parameters)
    G, log_p, cost, weight = slopes(THREE, metric, **parameters), logits.softmax(-1).log(), 0.0, 0.0
    for i, k in enumerate(labels.tolist()):
        g = G[k] - G[k].min() if form == "soft_targets" else torch.zeros(3, dtype=torch.float64)
        if form == "class_weights":
            g[k] = max(0.0, float(G[k, k] - (G[k].sum() - G[k, k]) / 2))
        cost, weight = cost - weights[i] * (g * log_p[i]).sum(), weight + weights[i] * g.sum()
    torch.testing.assert_close(loss(logits, labels, weights), cost / weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean", "quadratic_kappa"])
def test_gradients_pass_gradcheck_and_two_classes_have_one_form(metric):
    logits, labels, weights = drawn(12)
    for form in FORMS:
        for given in (weights, None):
            assert torch.autograd.gradcheck(
                lambda z, f=form, w=given: loss_at(THREE, metric, form=f)[0](z, labels, w), logits
            )
    batch = drawn(classes=2)
    torch.testing.assert_close(*(loss_at(TWO, metric, form=form)[0](*batch) for form in FORMS))


@pytest.mark.parametrize(("metric", "parameters"), EVERY)
@pytest.mark.parametrize("counts", [[[980, 0, 10], [5, 0, 0], [2, 0, 3]], [[900, 0, 0], [90, 0, 0], [10, 0, 0]]])
@by_form
def test_a_net_that_never_predicts_a_class_has_finite_weights(metric, parameters, counts, form):
    loss, targets = loss_at(counts, metric, torch.float32, form=form, **parameters)
    assert totals(targets).isfinite().all()
    assert (totals(targets) >= 0.0199).all()
    assert float(totals(targets).mean()) == pytest.approx(1, abs=0.03)
    _, gradient = value_and_gradient(loss, *drawn(dtype=torch.float32)[:2])
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("metric", sorted(METRICS.keys() - OF_MATRIX))
def test_a_hundred_thousand_classes_train(metric):
    """No d x d matrix is built: it would have 40 GB."""
    logits, labels = torch.randn(4, 100_000, requires_grad=True), torch.arange(4)
    for form in FORMS:
        loss = MetricCrossEntropy(metric, form=form)
        _, gradient = value_and_gradient(loss, logits, labels)
        assert loss.counts.shape == (3, 100_000)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("metric", ["f1", "jaccard", "recall", "precision", "mcc", "gmean", "quadratic_kappa"])
def test_classes_without_samples_leave_the_others_alone_and_weigh_about_as_much(metric):
    """Their slope is a division by zero."""
    with_empty = [[50, 3, 2, 0], [5, 20, 5, 0], [1, 2, 12, 0], [0, 0, 0, 0]]
    for form in FORMS:
        weights = totals(loss_at(with_empty, metric, form=form)[1])
        assert weights[:3].max() / weights[:3].min() > 1.05  # not all at the floor
        assert 0.3 < weights[3] / weights[:3].mean() < 3


def test_your_own_metric_works():
    def by_margins(c):
        return 2 * c.diagonal[..., 1] / (c.actual + c.predicted)[..., 1]

    def by_cells(c):
        m = c.matrix
        return 2 * m[..., 1, 1] / (2 * m[..., 1, 1] + m[..., 0, 1] + m[..., 1, 0])

    expected = loss_at(TWO, "f1", **POSITIVE)[1].diagonal
    for metric, cells in ((by_margins, False), (by_cells, True)):
        loss, targets = loss_at(TWO, metric)
        assert loss.in_cells is cells
        torch.testing.assert_close(targets.diagonal, expected)
    with pytest.raises(ValueError, match="expected one number per leading index"):
        loss_at(TWO, lambda c: c.diagonal)
    with pytest.raises(ValueError, match="differentiable"):
        loss_at(TWO, lambda c: c.diagonal.detach().sum(-1))


@by_form
def test_where_nothing_tells_the_classes_apart_it_is_cross_entropy(form):
    logits, labels, _ = drawn()
    pairs = drawn(classes=2)[:2]
    cases = [
        (MetricCrossEntropy("f1_macro", form=form).eval(), logits, labels),  # no counts yet
        (MetricCrossEntropy("f1_macro", form=form, counts="validation"), logits, labels),
        (loss_at([[10, 0], [0, 0]], "mcc", form=form)[0], *pairs),  # slopes of zero
    ]
    # With one label per sample, micro averages rise with accuracy alone.
    micro = ("f1", "precision", "recall", "fbeta", "jaccard", "fowlkes_mallows")
    cases += [(MetricCrossEntropy(name, average="micro", form=form), logits, labels) for name in micro]
    # Slopes at counts of one class differ by rounding alone, which must not be magnified.
    one = [(name, torch.randn(64, 5, generator=torch.Generator().manual_seed(k)).requires_grad_()) for k in range(20)
           for name in ("precision", "npv", "kappa", "quadratic_kappa")]  # fmt: skip
    cases += [(MetricCrossEntropy(name, form=form), z, torch.zeros(64, dtype=torch.long)) for name, z in one]
    for loss, z, y in cases:
        torch.testing.assert_close(loss(z, y), F.cross_entropy(z, y))


def test_counts_are_a_running_mean_that_includes_the_current_batch():
    """The first batch sets them, each later one has a weight of 5 %; a batch is counted before slopes are computed."""
    loss, seen = MetricCrossEntropy("f1", **POSITIVE), []
    for seed in range(3):
        logits, labels, weights = drawn(classes=2, seed=seed)
        value = loss(logits, labels, weights)
        seen.append(Confusion.from_predictions(logits.argmax(-1), labels, 2, weights).matrix)
    expected = 0.95 * (0.95 * seen[0] + 0.05 * seen[1]) + 0.05 * seen[2]
    torch.testing.assert_close(loss.counts, torch.stack((expected.diagonal(), expected.sum(-1), expected.sum(-2))))
    fixed, _ = loss_at(expected.tolist(), "f1", **POSITIVE)
    torch.testing.assert_close(value, fixed(logits, labels, weights))


def test_counts_change_only_in_training():
    logits, labels, _ = drawn()
    loss = MetricCrossEntropy("f1")
    with pytest.warns(UserWarning, match="plain cross-entropy until it is called outside"):
        torch.func.grad(lambda z: loss(z, labels))(logits.detach())
    loss(logits, labels)
    before, (other, other_labels, _) = loss.counts.clone(), drawn(seed=5)
    loss(other.detach(), other_labels)
    with torch.no_grad():
        loss(other, other_labels)
    with warnings.catch_warnings(action="error"):
        torch.func.grad(lambda z: loss(z, other_labels))(other.detach())
    loss.eval()(other, other_labels)
    torch.testing.assert_close(loss.counts, before, rtol=0, atol=0)
    loss.train()(other, other_labels)
    assert not torch.equal(loss.counts, before)


@by_form
@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean", "quadratic_kappa"])
def test_integer_weights_repeat_rows_and_weight_0_removes_them(metric, form):
    logits, labels, _ = drawn(60, 4)
    weights = torch.randint(4, (60,), generator=torch.Generator().manual_seed(0))
    weighted, repeated = MetricCrossEntropy(metric, form=form), MetricCrossEntropy(metric, form=form)
    rows = torch.arange(60).repeat_interleave(weights)
    for scale in (1.0, 2.0):  # the second batch is weighted by the counts of the first
        often = (scale * logits)[rows].detach().requires_grad_()
        value, gradient = value_and_gradient(
            weighted, (scale * logits).detach().requires_grad_(), labels, weights.double()
        )
        expected, by_row = value_and_gradient(repeated, often, labels[rows])
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient, torch.zeros_like(logits).index_add(0, rows, by_row))
    torch.testing.assert_close(weighted.counts, repeated.counts)
    value, gradient = value_and_gradient(weighted, logits, labels, torch.zeros(60))
    assert float(value) == float(gradient.abs().sum()) == 0


@pytest.mark.parametrize("scale", [1e37, 1e-40, 1e-45])
@by_form
@pytest.mark.parametrize("metric", ["f1", "mcc", "gmean", "quadratic_kappa"])
def test_the_scale_of_the_weights_does_not_matter(metric, form, scale):
    """Neither where their sum overflows in float32 nor where they are subnormal."""
    logits, labels, _ = drawn(120, dtype=torch.float32)
    one, other = MetricCrossEntropy(metric, form=form), MetricCrossEntropy(metric, form=form)
    for _ in range(2):
        results = [
            value_and_gradient(one, logits, labels),
            value_and_gradient(other, logits, labels, torch.full((120,), scale)),
        ]
        torch.testing.assert_close(*results)
    of_trial = [
        loss.eval().per_trial(logits, labels, torch.full((120,), w)) for loss, w in ((one, 1.0), (other, scale))
    ]
    torch.testing.assert_close(*of_trial)


@by_form
@pytest.mark.parametrize("metric", ["f1", "mcc", "jaccard", "quadratic_kappa"])
def test_ten_trials_together_match_ten_alone_also_after_some_have_left(metric, form):
    together, alone = MetricCrossEntropy(metric, form=form), [MetricCrossEntropy(metric, form=form) for _ in range(10)]
    together.keep([0])  # no counts yet: nothing to do
    rows = torch.arange(10)
    for step, staying in enumerate((range(10), [0, 2, 3, 7, 9], [1, 4])):
        staying = torch.tensor(staying)
        together.keep(staying) if step else None
        rows = rows[staying]
        logits, labels, weights = drawn(lead=(10,), seed=step)
        for given in (weights, None):
            values = together.per_trial(logits[rows], labels[rows], None if given is None else given[rows])
            singles = [alone[p](logits[p], labels[p], None if given is None else given[p]) for p in rows]
            torch.testing.assert_close(values, torch.stack(singles))
    torch.testing.assert_close(together.counts, torch.stack([alone[p].counts for p in rows]))
    together.keep(rows == 9)  # a mask
    torch.testing.assert_close(together.counts, alone[9].counts[None])
    with pytest.raises(ValueError, match=r"keep\(rows\)"):
        together.per_trial(logits, labels)


@pytest.mark.parametrize("metric", ["f1", "quadratic_kappa"])
def test_the_state_loads_into_a_fresh_loss(metric, tmp_path):
    loss, batches = MetricCrossEntropy(metric), [drawn(seed=seed, dtype=torch.float32)[:2] for seed in range(3)]
    fresh = MetricCrossEntropy(metric)
    fresh.load_state_dict(loss.state_dict())  # before any count
    assert fresh.counts is None
    loss(*batches[0])
    torch.save(loss.state_dict(), tmp_path / "loss.pt")
    fresh.load_state_dict(torch.load(tmp_path / "loss.pt", weights_only=True))
    for batch in batches[1:]:
        assert torch.equal(loss(*batch), fresh(*batch))


@by_form
@pytest.mark.parametrize("metric", ["f1", "mcc", "quadratic_kappa"])
def test_validation_counts_stay_until_they_are_set_again(metric, form):
    """Counts of ten trials, also where some have left, are those of ten losses."""
    together = MetricCrossEntropy(metric, form=form, counts="validation")
    cells = torch.randint(1, 50, (10, 3, 3), generator=torch.Generator().manual_seed(0))
    logits, labels, weights = drawn(lead=(10,))
    together.set_counts(cells)
    for rows in (torch.arange(10), torch.tensor([0, 3, 8])):
        together.keep(rows)
        values, gradient = value_and_gradient(
            together.per_trial, logits[rows].detach().requires_grad_(), labels[rows], weights[rows]
        )
        for k, row in enumerate(rows.tolist()):
            alone, _ = loss_at(cells[row].tolist(), metric, form=form)
            of_one = value_and_gradient(alone, logits[row].detach().requires_grad_(), labels[row], weights[row])
            torch.testing.assert_close((values[k], gradient[k]), of_one)
    with pytest.raises(ValueError, match="counts='validation'"):
        MetricCrossEntropy(metric).set_counts(cells)


def test_the_engine_sets_the_validation_counts(monkeypatch):
    """After every epoch, from the decisions on validation rows."""
    seen, plain = [], MetricCrossEntropy.set_counts
    monkeypatch.setattr(MetricCrossEntropy, "set_counts", lambda self, c: (seen.append(c), plain(self, c)))
    parts = [Part(torch.randn(n, 4), torch.arange(n) % 3, torch.arange(n)) for n in (60, 30, 30)]
    splits = Splits(*parts, ("a", "b", "c"), "made", None, "", "made", torch.zeros(4), torch.ones(4))
    config = Science(
        dataset=DatasetSection(name="made"),
        model=ModelSection(name="mlp", hidden=[8]),
        loss=LossSection(name="f1_ce", target="east.losses.MetricCrossEntropy", metric="f1", counts="validation"),
        protocol=Training(name="short", patience=3, max_epochs=3),
        hyper=Hyper(lr=1e-2, batch_size=20, dropout=0.0, weight_decay=0.0),
    )
    engine.train([population.Trial(config, seed) for seed in range(2)], splits, device="cpu", progress=False)
    assert [c.actual.tolist() for c in seen] == 3 * [[[10, 10, 10]] * 2]


def test_half_precision_computes_in_float32_and_counts_in_float64():
    logits, labels, _ = drawn(dtype=torch.float32)
    half = logits.detach().bfloat16().requires_grad_()
    one, other = MetricCrossEntropy("mcc"), MetricCrossEntropy("mcc")
    torch.testing.assert_close(one(half, labels), other(half.float(), labels))
    assert one.counts.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric": "f2"}, "metric"),
        ({"form": "weights"}, "form"),
        ({"decay": 1.0}, "decay: expected 0 <= decay < 1, got 1.0"),
        ({"floor": 0}, "floor: expected more than 0"),
        ({"counts": "test"}, "counts"),
        ({"metric": "cost"}, "needs costs"),
        ({"bta": 2}, "beta|average"),
        ({"temperature": 0.1}, "unknown parameter of f1 'temperature'"),
        ({"multilabel": True, "average": "samples"}, "a sample has no running counts"),
    ],
)
def test_errors_say_what_is_expected(arguments, message):
    with pytest.raises(ValueError, match=message):
        MetricCrossEntropy(**arguments)


@pytest.mark.parametrize("average", ["macro", "weighted", "micro"])
@by_form
def test_multilabel_is_one_binary_problem_per_label(average, form):
    """Each label has its own counts, and the losses are averaged; micro is one problem over all cells."""
    generator, micro = torch.Generator().manual_seed(0), average == "micro"
    new = partial(MetricCrossEntropy, "f1", multilabel=True, average=average, form=form)
    loss, each = new(), [MetricCrossEntropy("f1", average="positive", form=form) for _ in range(1 if micro else 3)]
    for _ in range(6):
        z = torch.randn(40, 3, generator=generator).requires_grad_()
        labels = (torch.rand(40, 3, generator=generator) < torch.tensor([0.5, 0.3, 0.1])).long()
        shares = labels.sum(0).float() if average == "weighted" else torch.ones(3)

        def expected(z, labels=labels, shares=shares):
            if micro:
                return each[0](z.reshape(-1), labels.reshape(-1))
            return (
                torch.stack([one(z[:, k], labels[:, k]) for k, one in enumerate(each)]) * shares
            ).sum() / shares.sum()

        torch.testing.assert_close(value_and_gradient(loss, z, labels), value_and_gradient(expected, z))
    assert loss.counts.shape == ((3, 2) if micro else (3, 3, 2))
    again = new()
    again.load_state_dict(loss.state_dict())
    torch.testing.assert_close(again.eval()(z, labels), loss.eval()(z, labels))


def test_multilabel_ignores_cells_and_survives_labels_without_positives():
    logits, labels = torch.randn(20, 4, requires_grad=True), torch.zeros(20, 4, dtype=torch.long)
    labels[:10, 0], labels[5:, 1], labels[:, 3] = 1, -100, -100
    value, gradient = value_and_gradient(MetricCrossEntropy("f1", multilabel=True), logits, labels)
    assert value.isfinite()
    assert gradient.isfinite().all()
    assert (gradient[5:, 1] == 0).all()
    assert (gradient[:, 3] == 0).all()
    assert (gradient[:, 0] != 0).all()


@pytest.mark.parametrize("metric", ["f1", "mcc", "quadratic_kappa"])
@by_form
@pytest.mark.parametrize("weighted", [False, True])
def test_soft_labels_count_as_one_weighted_sample_per_class(metric, form, weighted):
    logits, labels, weights = drawn(classes=4)
    shares = 0.7 * F.one_hot(labels, 4) + 0.3 / 4
    weights = weights if weighted else None
    repeated = logits.detach().repeat_interleave(4, 0).requires_grad_()
    copies = (torch.arange(4).repeat(len(logits)), (shares if weights is None else shares * weights[:, None]).flatten())
    soft, hard = MetricCrossEntropy(metric, form=form), MetricCrossEntropy(metric, form=form)
    for _ in range(2):  # the second step has counts of two batches
        value, gradient = value_and_gradient(soft, logits, shares, weights)
        expected, by_copy = value_and_gradient(hard, repeated, *copies)
        torch.testing.assert_close((value, gradient), (expected, by_copy.unflatten(0, (-1, 4)).sum(1)))
    torch.testing.assert_close(soft.counts, hard.counts)


@pytest.mark.parametrize("loss", [MetricCrossEntropy("f1"), MetricLoss("f1"), CrossEntropy()])
def test_soft_labels_of_a_thousand_classes_need_no_copies(loss):
    logits = torch.randn(256, 1000, requires_grad=True)
    shares = torch.full((256, 1000), 0.1 / 1000).scatter_add_(1, torch.arange(256)[:, None], torch.full((256, 1), 0.9))
    with torch.profiler.profile(profile_memory=True) as profiler:
        loss(logits, shares).backward()
    assert max(event.self_cpu_memory_usage for event in profiler.events()) <= 4 * 256 * 1000 * 4  # bytes


@pytest.mark.parametrize("loss", [MetricLoss, MetricCrossEntropy])
def test_a_signature_shows_every_parameter(loss):
    shown = inspect.signature(loss).parameters
    assert {"classes", "absent", "gather", "multilabel", "ignore_index", "metric_parameters"} < {*shown}
    with pytest.raises(ValueError, match="unknown parameter of f1 'betta'"):
        loss("f1", betta=2)


@pytest.mark.parametrize("metric", ["f1", "quadratic_kappa"])
def test_an_evaluation_in_inference_mode_leaves_training_alone(metric):
    logits, labels, _ = drawn()
    loss = MetricCrossEntropy(metric, counts="validation")
    with torch.inference_mode():
        loss.set_counts(Confusion.from_predictions(logits.argmax(-1), labels, 3))
        evaluated = loss(logits.detach(), labels)
    value = loss(logits, labels)
    value.backward()
    torch.testing.assert_close(value.detach(), evaluated.clone())


def test_decisions_can_be_found_in_inference_mode():
    probabilities = torch.rand(50, 3, generator=torch.Generator().manual_seed(0)).softmax(-1)
    with torch.inference_mode():
        inside = east.decide(probabilities, "f1").predict(probabilities)
    assert (inside == east.decide(probabilities, "f1").predict(probabilities)).all()
