"""Losses: golden values, other people's implementations, finite gradients, and errors for wrong input."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.func import grad, vmap
from torch_btg import loss as released

from east import METRICS, MetricCrossEntropy, MetricLoss
from east.confusion import Confusion
from east.losses import (
    WMW,
    AUROCLoss,
    CrossEntropy,
    Dice,
    Focal,
    ReleasedBtG,
    ReleasedDice,
    ReleasedWMW,
    SigmoidF1,
    of_metric,
)
from tests.made import build_loss

CONFIGS = {path.stem: yaml.safe_load(path.read_text()) for path in Path(__file__).parents[1].glob("conf/loss/*.yaml")}
CONFIGS = {name: config for name, config in CONFIGS.items() if config["_target_"].startswith("east.losses.")}
del CONFIGS["ap_perf"]  # the solver of an optional package
BINARY = {"btg_auroc", "btg_released", "wmw", "wmw_released"}
TENTHS = [k / 10 for k in range(1, 10)]
BTG_P, BTG_Y = (0.9, 0.6, 0.4, 0.2, 0.1), (1, 1, 0, 1, 0)


def build(name, classes=2, **overrides):
    """A loss of conf/loss; class weights balanced for one sample per class."""
    names = [f"class {k}" for k in range(classes)]
    return build_loss(CONFIGS[name] | overrides, names, labels=torch.arange(classes), positive=1)


def batch(*shape, seed=0, dtype=torch.float32, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, generator=generator)
    return logits.to(dtype), torch.randint(shape[-1], shape[:-1], generator=generator)


def classes_of(name, classes):
    """Two for binary losses, else `classes`."""
    return 2 if name in BINARY else classes


def gradient(loss, logits, *rest):
    logits = logits.detach().clone().requires_grad_()
    return torch.autograd.grad(loss(logits, *rest).sum(), logits)[0]


def single_logits():
    """The example of Bridging the Gap as single logits."""
    return torch.tensor(BTG_P, dtype=torch.float64).logit(), torch.tensor(BTG_Y)


# Golden values, by hand from equations 4 and 5


def test_golden_bridging_the_gap():
    scores = [0.763970, 0.738255, 0.711813, 0.702703, 0.658915, 0.631579, 0.560658, 0.493151, 0.361669]
    for t, score in zip(TENTHS, scores, strict=True):
        loss = MetricLoss("f1", threshold=t, average="positive")
        assert float(loss(*single_logits())) == pytest.approx(1 - score, abs=1e-5)
    assert float(build("btg_f1")(*single_logits())) == pytest.approx(1 - 0.624746, abs=1e-5)
    assert float(build("btg_accuracy")(*single_logits())) == pytest.approx(1 - 0.628946, abs=1e-5)


# Other implementations, and formulas written out


def test_a_fixed_threshold_is_bridging_the_gap_written_out():
    """tp = sum y H, fp = sum (1-y) H, fn = sum y (1-H); per threshold, then the mean; the area with both ends."""
    z, y = batch(30, 2, dtype=torch.float64)
    p, positive = z.softmax(-1)[:, 1], y.double()

    def stepped(t):
        """Section 4 of the paper with delta = 0.2."""
        width = min(t, 1 - t)
        lo, hi = t - width / 2, t + width / 2
        upper = 0.8 + 0.2 * (p - hi) / (1 - hi)
        return torch.where(p < lo, 0.2 * p / lo, torch.where(p > hi, upper, 0.5 + 0.6 * (p - t) / width))

    heights = [stepped(t) for t in TENTHS]
    negative = 1 - positive
    counts = [(positive @ H, negative @ H, positive @ (1 - H), negative @ (1 - H)) for H in heights]
    for beta, name in ((1, "btg_f1"), (2, "btg_f2"), (3, "btg_f3")):
        fbeta = sum((1 + beta**2) * tp / ((1 + beta**2) * tp + beta**2 * fn + fp) for tp, fp, fn, _ in counts) / 9
        assert float(build(name)(z, y)) == pytest.approx(1 - float(fbeta))
    accuracy = sum((tp + tn) / 30 for tp, _, _, tn in counts) / 9
    assert float(build("btg_accuracy")(z, y)) == pytest.approx(1 - float(accuracy))
    roc = [(1.0, 1.0), *((fp / (fp + tn), tp / (tp + fn)) for tp, fp, fn, tn in counts), (0.0, 0.0)]
    fpr, tpr = torch.tensor(roc[::-1], dtype=torch.float64).T
    assert float(build("btg_auroc")(z, y)) == pytest.approx(1 - float(torch.trapezoid(tpr, fpr)))
    shuffled = AUROCLoss(threshold=TENTHS[::-1])
    torch.testing.assert_close(shuffled(z, y), build("btg_auroc")(z, y))


@pytest.mark.parametrize("prevalence", [0.5, 0.1])
@pytest.mark.parametrize(
    "parameters, theirs",
    [
        ({"metric": "fbeta", "beta": 1.0}, lambda: released.fb_loss(beta=1.0)),
        ({"metric": "f1"}, lambda: released.fb_loss(beta=1.0)),
        ({"metric": "fbeta", "beta": 3.0}, lambda: released.fb_loss(beta=3.0)),
        ({"metric": "accuracy"}, lambda: released.accuracy_loss()),
        ({"metric": "auroc"}, lambda: released.auroc_loss()),
        ({"step": "sigmoid"}, lambda: released.mean_fbeta_approx_loss_on(approx=released_sigmoid())),
        (
            {"metric": "accuracy", "step": "sigmoid"},
            lambda: released.mean_accuracy_approx_loss_on(approx=released_sigmoid()),
        ),
    ],
)
def test_the_released_bridging_the_gap_matches_torch_btg(parameters, theirs, prevalence, monkeypatch):
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)  # torch-btg moves to CUDA unconditionally
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(64, generator=generator)
    labels = (torch.rand(64, generator=generator) < prevalence).long()
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    ours, wanted = ReleasedBtG(**parameters)(a, labels), theirs()(b.sigmoid(), labels)[0]
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)
    ours.backward(), wanted.backward()
    torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-3)


def released_sigmoid():
    from torch_btg.confusion import sig

    return sig(k=10)


def test_anyloss_follows_its_formulas():
    """A = 1 / (1 + exp(-73 (p - 0.5))); scores of arXiv 2405.14745 with N the batch."""
    z, y = batch(40, 2, dtype=torch.float64, scale=0.1)
    A, y1, N = 1 / (1 + torch.exp(-73 * (z.softmax(-1)[:, 1] - 0.5))), y.double(), 40
    tp, tn = (y1 * A).sum(), ((1 - y1) * (1 - A)).sum()
    scores = {
        "f1": 2 * (y1 * A).sum() / (y1.sum() + A.sum()),
        "accuracy": (N - y1.sum() - A.sum() + 2 * (y1 * A).sum()) / N,
        "gmean": (tp * tn / (y1.sum() * (1 - y1).sum())).sqrt(),
        "balanced_accuracy": (tp / y1.sum() + tn / (1 - y1).sum()) / 2,
    }
    torch.testing.assert_close(build("anyloss")(z, y), 1 - scores["f1"])
    for name, score in scores.items():
        average = {"average": "positive"} if name == "f1" else {}
        torch.testing.assert_close(
            MetricLoss(name, step="sigmoid", slope=73, threshold=0.5, **average)(z, y), 1 - score
        )
    beta4 = 5 * (y1 * A).sum() / (4 * y1.sum() + A.sum())
    torch.testing.assert_close(build("anyloss", metric="fbeta", beta=2.0)(z, y), 1 - beta4)


def test_the_score_oriented_loss_follows_its_formula():
    """F(p) = (1 + u + sin(pi u) / pi) / 2, u = (p - 0.5) / 0.1; the uniform threshold gives F(p) = p."""
    z, y = batch(40, 2, dtype=torch.float64, scale=0.2)
    p, y1 = z.softmax(-1)[:, 1], y.double()
    u = ((p - 0.5) / 0.1).clamp(-1, 1)
    for loss, H in ((build("sol"), 0.5 * (1 + u + torch.sin(math.pi * u) / math.pi)),
                    (build("sol", step="none", slope=None), p)):  # fmt: skip
        torch.testing.assert_close(loss(z, y), 1 - 2 * (y1 * H).sum() / (y1.sum() + H.sum()))


def test_balanced_class_weights_are_those_of_bridging_the_gap():
    """n / (d n_k): cocktail party has 1454 positives of 4800 (.72, 1.65), mammography 260 of 11183 (.51, 21.5)."""
    for n, positives, wanted in ((4800, 1454, (0.72, 1.65)), (11183, 260, (0.51, 21.5))):
        labels = torch.arange(n) < positives
        loss = build_loss(CONFIGS["ce_weighted"], ["no", "yes"], labels.long())
        assert loss.class_weights == pytest.approx(wanted, abs=0.01)


def test_wmw_follows_its_formula_and_is_zero_for_separated_scores():
    z, y = batch(30, 2, dtype=torch.float64)
    p = z.softmax(-1)[:, 1]
    pairs = [max(0.0, 0.2 - float(x - w)) ** 3 for x in p[y == 1] for w in p[y == 0]]
    assert float(WMW()(z, y)) == pytest.approx(sum(pairs) / len(pairs))
    separated = torch.where(y == 1, 3.0, -3.0)
    assert float(WMW()(separated, y)) == 0
    one_class = torch.zeros(30, requires_grad=True)
    WMW()(one_class, torch.ones(30, dtype=torch.long)).backward()
    assert (one_class.grad == 0).all()


def test_released_wmw_depends_only_on_positives():
    """It ignores how well positives and negatives are separated, and is lowest if all positives are equal."""
    y = torch.arange(20) % 2
    z = torch.randn(20, generator=torch.Generator().manual_seed(0))
    moved = torch.where(y == 0, z - 100, z)
    torch.testing.assert_close(ReleasedWMW()(moved, y), ReleasedWMW()(z, y))
    equal = torch.where(y == 1, 0.7, z)
    assert float(ReleasedWMW()(equal, y)) == pytest.approx(0.2**3)
    assert float(ReleasedWMW()(z, y)) > 0.2**3
    assert (gradient(ReleasedWMW(), equal, y).abs() < 1e-7).all()


def dice(p, Y):
    """2 sum p y / (sum p^2 + sum y^2)."""
    return 2 * (p * Y).sum(0) / ((p**2).sum(0) + (Y**2).sum(0) + 1e-7)


SHARES = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
FORMULAS = [  # a loss, and its value from logits z, one-hot labels Y, and the true class's probability p_y
    (CrossEntropy(), lambda z, Y, p_y: -p_y.log().mean()),
    (CrossEntropy([1, 2, 3, 4]), lambda z, Y, p_y: -(Y @ SHARES * p_y.log()).sum() / (Y @ SHARES).sum()),
    (Focal(), lambda z, Y, p_y: -((1 - p_y) ** 2 * p_y.log()).mean()),
    (Focal(gamma=0.0), lambda z, Y, p_y: -p_y.log().mean()),
    (Focal(class_weights=[1, 2, 3, 4]), lambda z, Y, p_y: -(Y @ SHARES * (1 - p_y) ** 2 * p_y.log()).mean()),
    (Dice(), lambda z, Y, p_y: 1 - dice(z.softmax(-1), Y)[:3].mean()),  # of the classes that are present
    (ReleasedDice(), lambda z, Y, p_y: 1 - dice(z.T, (Y @ torch.arange(4.0).double()).expand(4, -1)).mean() / 2),
    (SigmoidF1(2.0, 0.3), lambda z, Y, p_y: 1 - f1_of(1 / (1 + torch.exp(-2.0 * (z + 0.3))), Y).mean()),
]


def f1_of(S, Y):
    return 2 * (S * Y).sum(0) / (2 * S * Y + S * (1 - Y) + (1 - S) * Y).sum(0)


@pytest.mark.parametrize("loss, formula", FORMULAS, ids=lambda x: type(x).__name__)
def test_a_baseline_follows_its_formula(loss, formula):
    z, y = batch(30, 4, dtype=torch.float64)
    y = y.clamp_max(2)  # class 3 is absent
    Y = F.one_hot(y, 4).double()
    torch.testing.assert_close(loss(z, y), formula(z, Y, (z.softmax(-1) * Y).sum(1)))


def test_with_more_classes_a_threshold_applies_to_each_and_is_normalised():
    z, y = batch(30, 4, dtype=torch.float64)
    H = torch.sigmoid(10 * (z.softmax(-1) - 0.3))
    c = Confusion.from_memberships(H / H.sum(-1, keepdim=True), y)
    torch.testing.assert_close(MetricLoss("mcc", step="sigmoid", threshold=0.3)(z, y), 1 - METRICS["mcc"](c))


# What every loss promises


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_builds_a_loss(name):
    assert CONFIGS[name]["name"] == name
    loss = build(name)
    z, y = batch(32, 2)
    value = loss(z, y)
    assert value.shape == ()
    assert value.dtype == torch.float32
    assert gradient(loss, z, y).abs().max() > 0
    assert loss.anneals == (CONFIGS[name].get("step") == "linear" and isinstance(loss, MetricLoss))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_single_logit_stands_for_two(name):
    z, y = batch(16, 2)
    z = z[:, 1]
    loss = build(name)
    wanted = loss(torch.stack((torch.zeros_like(z), z), -1), y)
    for logits, labels in ((z, y), (z[:, None], y), (z[:, None], y[:, None])):
        torch.testing.assert_close(loss(logits, labels), wanted)
        torch.testing.assert_close(loss(logits, labels, torch.ones_like(labels)), wanted)
    torch.testing.assert_close(loss.per_trial(z[None, :, None], y[None]), wanted[None])
    assert loss(z[:1], y[:1]).shape == ()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_population_scores_like_its_members(name):
    d = classes_of(name, 4)
    z, y = batch(3, 2, 20, d)
    weights = torch.rand(3, 2, 20)
    loss = build(name, d)
    for w in (None, weights):
        together = loss.per_trial(z, y, w)
        assert together.shape == (3, 2)
        alone = [[loss(z[i, j], y[i, j], None if w is None else w[i, j]) for j in range(2)] for i in range(3)]
        torch.testing.assert_close(together, torch.stack([torch.stack(row) for row in alone]))


@pytest.mark.parametrize("name", CONFIGS)
def test_integer_weights_repeat_samples(name):
    d = classes_of(name, 4)
    z, y = batch(20, d)
    times = torch.randint(0, 4, (20,), generator=torch.Generator().manual_seed(1))
    loss = build(name, d)
    repeated = loss(z.repeat_interleave(times, 0), y.repeat_interleave(times))
    torch.testing.assert_close(loss(z, y, times), repeated, atol=1e-6, rtol=1e-5)


def degenerate(d):
    """Name -> logits [n, d] and labels of batches that break careless losses."""
    n = 12
    z, y = batch(n, d)
    onehot = F.one_hot(y, d).float()
    one_class, shifted = torch.zeros_like(y), (y + 1) % d
    return {
        "one class": (z, one_class),
        "last class alone": (z, one_class + d - 1),
        "absent classes": (z, y % min(d, 2)),
        "one sample": (z[:1], y[:1]),
        "uniform": (torch.zeros(n, d), y),
        "uniform and one class": (torch.zeros(n, d), one_class),
        "large": (1e4 * z, y),
        "large and one class": (1e4 * z, one_class),
        "all correct": (1e4 * onehot, y),
        "all correct, mildly": (5 * onehot, y),
        "all wrong": (1e4 * onehot, shifted),
        "one class, all wrong": (1e4 * F.one_hot(one_class + 1, d).float(), one_class),
        "one class, all correct": (1e4 * F.one_hot(one_class, d).float(), one_class),
        "equal to the label": (y.float().unsqueeze(-1).expand(n, d), y),
    }


def assert_finite(call, z, y, weights):
    """Values and gradients of every case are finite; otherwise the cases are listed."""
    z = z.detach().requires_grad_()
    values = call(z, y, weights)
    (slopes,) = torch.autograd.grad(values.sum(), z)
    wrong = ~(values.isfinite() & slopes.isfinite().flatten(values.ndim).all(-1))
    assert not wrong.any(), wrong.nonzero()
    return values


def together(cases):
    """All cases with more than one sample as one population [cases, n, d]."""
    large = {name: case for name, case in cases.items() if len(case[1]) > 1}
    return torch.stack([z for z, _ in large.values()]), torch.stack([y for _, y in large.values()]), list(large)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_batch_breaks_a_loss(name):
    for d in {2, classes_of(name, 5), classes_of(name, 70)}:
        cases = degenerate(d)
        z, y, names = together(cases)
        loss, alone = build(name, d), build(name, d)
        for T in (1e-3, 0.02, 0.2, 0.3, 0.4) if loss.anneals else (None,):
            if T:
                with warnings.catch_warnings(action="ignore"):
                    loss.temperature = alone.temperature = T
            for weights in (None, torch.zeros(y.shape), torch.rand(y.shape)):
                assert_finite(loss.per_trial, z, y, weights)
            for case in names if T in (None, 0.02) else ():
                assert_finite(alone, *cases[case], torch.zeros(12))  # nothing counts
                assert_finite(build(name, d, **({"temperature": T} if T else {})), *cases[case], None)
            assert_finite(alone, *cases["one sample"], None)


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_is_computed_in_float32(name):
    d = classes_of(name, 4)
    loss = build(name, d)
    for dtype in (torch.float16, torch.bfloat16):
        z, y = batch(20, d, dtype=dtype)
        value = loss(z, y)
        assert value.dtype == torch.float32
        assert value == loss(z.float(), y)
        assert gradient(loss, z, y).dtype == dtype
        torch.testing.assert_close(gradient(loss, z, y), gradient(loss, z.float(), y).to(dtype))


@pytest.mark.parametrize("name", CONFIGS)
def test_autocast_changes_nothing(name):
    d = classes_of(name, 4)
    loss, (z, y) = build(name, d), batch(20, d)
    calls = []
    loss.register_forward_hook(lambda *_: calls.append(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(z, y)
        half = loss(z.bfloat16(), y)
    assert inside == loss(z, y)
    assert half == loss(z.bfloat16(), y)
    assert inside.dtype == half.dtype == torch.float32
    assert len(calls) == 4  # hooks see one call once


@pytest.mark.parametrize("name", CONFIGS)
def test_float64_stays_float64(name):
    z, y = batch(20, 2, dtype=torch.float64)
    loss = build(name)
    value = loss(z, y, torch.rand(20))
    assert value.dtype == torch.float64
    assert float(loss(z, y)) == pytest.approx(float(loss(z.float(), y)), abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_vmap_and_grad_match_a_loop(name):
    d = classes_of(name, 4)
    loss, (z, y) = (
        build(name, d).eval(),
        batch(3, 20, d),
    )  # in training some losses keep counts, which torch.func must not change
    torch.testing.assert_close(vmap(loss)(z, y), loss.per_trial(z, y))
    wanted = torch.stack([gradient(loss, z[k], y[k]) for k in range(3)])
    torch.testing.assert_close(vmap(grad(loss))(z, y), wanted, atol=1e-6, rtol=1e-4)


def assert_compiled_is_eager(name, **options):
    torch.compiler.reset()
    d = classes_of(name, 4)
    loss, (z, y) = build(name, d), batch(20, d)
    results = []
    for function in (loss, torch.compile(loss, **options)):
        logits = z.clone().requires_grad_()
        value = function(logits, y)
        results.append((value.detach(), *torch.autograd.grad(value, logits)))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["f1", "mcc"])
def test_compiled_matches_eager(name):
    assert_compiled_is_eager(name, backend="aot_eager", fullgraph=True)


RARELY_COMPILED = ["mcc", "btg_f1", "btg_auroc", "anyloss", "ce_weighted", "wmw"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["f1", *(pytest.param(name, marks=pytest.mark.nightly) for name in RARELY_COMPILED)])
def test_compiled_by_inductor_matches_eager(name):
    assert_compiled_is_eager(name)


def test_cooling_does_not_recompile():
    """torch.compile treats a number as a constant first, as a variable once it changes, and then never recompiles."""
    torch.compiler.reset()
    graphs = []
    loss, (z, y) = MetricLoss("f1"), batch(20, 4)
    compiled = torch.compile(loss, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for k in range(6):
        loss.temperature = 0.2 * 0.9**k
        torch.testing.assert_close(compiled(z, y), loss(z, y))
    assert len(graphs) <= 2


# MetricLoss


@pytest.mark.parametrize("metric", sorted(METRICS.keys() - {"cost"}))
def test_the_loss_tends_to_one_minus_the_hard_metric(metric):
    """M(C_T) -> M(C) along the schedule T_k = 0.2 * 0.5^k."""
    z, y = batch(200, 5, dtype=torch.float64)
    y = torch.where(torch.arange(200) % 3 > 0, z.argmax(-1), y)
    hard = METRICS[metric](Confusion.from_predictions(z.argmax(-1), y, 5))
    loss = MetricLoss(metric)
    distances = []
    for T in (0.2, 0.05, 0.01, 1e-3):
        loss.temperature = T
        distances.append(abs(float(1 - loss(z, y) - hard)))
    assert distances[-1] < 0.01
    assert distances[-1] < distances[0]


def test_every_member_may_have_its_own_temperature():
    z, y = batch(3, 20, 4)
    loss = MetricLoss("f1")
    T = torch.tensor([0.05, 0.1, 0.2], dtype=torch.float64)
    for threshold in ("dynamic", 0.3, [0.3, 0.6]):
        loss = MetricLoss("f1", threshold=threshold, temperature=T)
        together = loss.per_trial(z, y)
        assert together.dtype == torch.float32
        for k in range(3):
            loss.temperature = float(T[k])
            torch.testing.assert_close(together[k], loss(z[k], y[k]))


@pytest.mark.parametrize("d", [3, 70])
def test_a_detached_threshold_changes_only_the_gradient(d):
    z, y = batch(30, d)
    plain, detached = MetricLoss("f1"), MetricLoss("f1", detach_threshold=True)
    assert plain(z, y) == detached(z, y)
    a, b = gradient(plain, z, y).flatten(), gradient(detached, z, y).flatten()
    assert not torch.allclose(a, b)
    assert F.cosine_similarity(a, b, dim=0) > 0.9
    z, y = batch(30, 2)
    torch.testing.assert_close(gradient(plain, z, y), gradient(detached, z, y))


def test_weights_and_temperature_can_be_learned():
    """The closed form has no derivative for them, so autograd takes over."""
    z, y = batch(10, 3, dtype=torch.float64)
    weights = torch.rand(10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: MetricLoss("f1")(z, y, w), weights)
    T = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: MetricLoss("f1", temperature=t)(z, y), T)


def test_absent_classes_count_unless_ignored():
    z, y = batch(30, 5)
    y = y % 2
    scores = METRICS["f1"](MetricLoss("f1").confusion(z, y), average="none")
    torch.testing.assert_close(MetricLoss("f1")(z, y), 1 - scores.mean())
    torch.testing.assert_close(MetricLoss("f1", absent="ignore")(z, y), 1 - scores[:2].mean())


def recall_of_the_last(confusion, power=1.0):
    return (confusion.diagonal[..., -1] / confusion.actual[..., -1].clamp_min(1e-12)) ** power


def asymmetry(confusion):
    """A metric that needs the off-diagonal cells."""
    return -(confusion.matrix - confusion.matrix.mT).square().sum((-2, -1)) / confusion.total**2


def test_any_function_of_a_confusion_can_be_the_metric(monkeypatch):
    z, y = batch(3, 30, 4)
    loss = MetricLoss(recall_of_the_last, power=2.0)
    torch.testing.assert_close(
        loss.per_trial(z, y), 1 - METRICS["recall"](loss.confusion(z, y), average="positive", positive=3) ** 2
    )
    assert MetricLoss("east.metrics.mcc").per_trial(z, y).shape == (3,)
    matrix = MetricLoss(asymmetry)
    c = Confusion.from_memberships(matrix.memberships(z), y)
    torch.testing.assert_close(matrix.per_trial(z, y), 1 - asymmetry(c))
    assert gradient(matrix.per_trial, z, y).abs().max() > 0
    assert MetricLoss(lambda c: c.diagonal.sum(-1) / c.total).per_trial(z, y).shape == (3,)


def test_beta_and_the_positive_class_can_be_given_by_name():
    z, y = batch(30, 3)
    names = ["cat", "dog", "frog"]
    by_name = MetricLoss("fbeta", beta={"dog": 0.25}, classes=names)
    torch.testing.assert_close(by_name(z, y), MetricLoss("fbeta", beta=[1, 0.25, 1])(z, y))
    frog = MetricLoss("f1", average="positive", positive="frog", classes=names)
    torch.testing.assert_close(frog(z, y), MetricLoss("f1", average="positive", positive=2)(z, y))
    built = build_loss(CONFIGS["fbeta"] | {"beta": {"dog": 0.25}}, names)
    torch.testing.assert_close(built(z, y), by_name(z, y))


def test_the_positive_class_comes_from_the_data():
    z, y = batch(30, 3)
    names = ["cat", "dog", "frog"]
    built = build_loss(CONFIGS["f1"] | {"average": "positive"}, names, positive=2)
    torch.testing.assert_close(built(z, y), MetricLoss("f1", average="positive", positive=2)(z, y))
    with pytest.raises(ValueError, match=r"none of the 3 classes is the positive one; set dataset.positive=…"):
        build_loss(CONFIGS["anyloss"], names)


def test_a_config_may_hold_parameters_of_a_metric():
    z, y = batch(30, 2)
    costs = [[0, 1], [50, 0]]
    loss = build_loss(CONFIGS["metric"] | {"metric": "cost", "parameters": {"costs": costs}}, ["no", "yes"])
    torch.testing.assert_close(loss(z, y), MetricLoss("cost", costs=costs)(z, y))
    with pytest.raises(ValueError, match=r"unknown parameter of cost 'cost'.*Choices: .*costs"):
        build_loss(CONFIGS["metric"] | {"metric": "cost", "parameters": {"cost": costs}}, ["no", "yes"])


# Training


def toy(d, n=400, noise=1.0, seed=0):
    """Gaussian blobs in the plane, one per class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % d
    angle = 2 * math.pi * y / d
    return torch.stack((angle.cos(), angle.sin()), -1) * 3 + noise * torch.randn(n, 2, generator=generator), y


def trained(loss, x, y, d, steps=150):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, d))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(x), y).backward()
        optimiser.step()
    return net(x).argmax(-1)


def test_raising_beta_of_a_class_raises_its_recall():
    x, y = toy(3, noise=2.0)
    recalls = []
    for beta in (0.25, 1.0, 5.0):
        predicted = trained(MetricLoss("fbeta", beta=[beta, 1, 1]), x, y, 3)
        recalls.append(float((predicted[y == 0] == 0).float().mean()))
    assert recalls[0] < recalls[1] < recalls[2]


# Wrong input


z4, y4 = batch(6, 4)
POSITIVE = {"metric": "f1", "average": "positive"}
REFUSED = [  # parameters, and what the message names
    ({"metric": "mc"}, "metric 'mc', did you mean 'mcc'.*kappa"),
    ({"step": "liner"}, "step 'liner', did you mean 'linear'.*none"),
    *(({"temperature": T}, f"0 < T <= 0.4, got.*{T}") for T in (0.0, 0.5, math.nan)),
    ({"temperature": torch.tensor([0.1, 0.5])}, "0 < T <= 0.4"),
    ({"temperature": "0.1"}, "got '0.1'"),
    ({"metric": "fbeta", "beta": {"dgo": 2}, "classes": ["cat", "dog"]}, "class 'dgo', did you mean 'dog'"),
    ({"metric": "fbeta", "beta": {"dog": 2}}, "'dog'.*`classes`"),
    *(({"metric": "fbeta", "beta": beta}, "beta: expected a number of at least 0") for beta in (-1, math.nan)),
    *(({"metric": "fbeta", "beta": [1, b, 1]}, "beta: expected finite numbers") for b in (-2, math.nan, math.inf)),
    *(({"metric": "fbeta", "beta": {"b": b}, "classes": "ab"}, "beta: expected finite") for b in (-1.0, math.inf)),
    *(({"metric": "fbeta", "beta": b, "multilabel": True}, "beta: expected") for b in ([0.5, 2], -1, {"a": 2.0}, "2")),
    ({**POSITIVE, "positive": "fog", "classes": ["cat", "frog"]}, "class 'fog', did you mean 'frog'"),
    *(({**POSITIVE, "positive": k}, f"the index or name of a class, got {k}") for k in (True, 1.5)),
    ({"metric": "f1_macro", "positive": 0}, "expected average='positive' with it"),
    ({**POSITIVE, "multilabel": True}, "average 'positive'.*macro.*samples"),
    ({"metric": "mcc", "multilabel": True, "average": "samples"}, "average 'samples'.*weighted"),
    ({"multilabel": True, "positive": 1}, "positive.*multilabel=True"),
    ({"average": "samples"}, "average 'samples'.*micro"),
    ({"metric": "mcc", "average": "micro"}, "unknown parameter of mcc 'average': it takes no parameters"),
    ({"ignore_index": None}, "ignore_index.*integer.*None"),
    ({"average": "none"}, "average 'none'.*macro.*positive"),
    ({"absent": "skip"}, "absent 'skip'.*ignore, zero"),
    ({"metric": "mcc", "absent": "ignore"}, "absent='ignore' does not apply"),
    ({"bta": 2}, "parameter of f1 'bta'.*average"),
    ({"threshold": 1.0}, "threshold.*between 0 and 1.*1.0"),
    ({"threshold": "dynamc"}, "'dynamic'.*'dynamc'"),
    ({"threshold": []}, r"threshold.*list.*\[\]"),
    ({"slope": 3.0}, "slope.*sigmoid.*3.0.*'linear'"),
    ({"step": "sigmoid", "slope": -1.0}, "slope.*positive.*-1.0"),
    ({"gather": "maybe"}, "gather.*'auto'.*'maybe'"),
    ({"metric": "cost"}, "cost needs costs"),
    ({"metric": "cost", "costs": [[0, math.nan], [1, 0]]}, "costs: expected finite numbers"),
]
WEIGHTS = torch.ones(6)
REFUSED_INPUT = [  # a loss, its arguments, and what the message names
    (MetricLoss(), (z4, y4 + 4), "labels.*0 to 3.*4 to"),
    (MetricLoss(), (z4, y4 - 4), "labels.*0 to 3.*-4 to"),
    (MetricLoss(), (y4, y4), "floating-point logits.*torch.int64"),
    (MetricLoss(), (z4.numpy(), y4.numpy()), "expected tensors, got logits"),
    (MetricLoss(), (z4[0, 0], y4[0]), "at least one sample"),
    (MetricLoss(), (z4, torch.nn.functional.one_hot(y4, 4)), r"are ambiguous: .* for one-hot labels use labels.argmax"),
    (MetricLoss(), (z4, y4, torch.ones(5)), r"weights.*\(6,\).*\(5,\)"),
    *((loss, (z4, y4, w * WEIGHTS), "weights: expected finite numbers of at least 0")
      for loss in (MetricLoss(), MetricCrossEntropy()) for w in (-1.0, math.nan, math.inf)),
    (MetricLoss(temperature=torch.tensor([0.1, 0.2])), (z4, y4), r"temperature.*\(\).*\(2,\)"),
    (MetricLoss("fbeta", beta=[1, 2]), (z4, y4), r"beta: expected shape \(\) or \(4,\), got \(2,\)"),
    (MetricLoss("f1", average="positive", positive=4), (z4, y4), "positive class 4.*0 to 3"),
    (MetricLoss("f1", multilabel=True), (z4, y4), r"the same shape \[n, L, ...\], got \(6, 4\) and"),
    (MetricLoss(lambda c: c.diagonal), (z4, y4), "one number per leading index"),
    (CrossEntropy([1.0, 2.0]), (z4, y4), "class_weights: expected 4, got 2"),
    *((loss("f1", classes=["a", "b"]), (z4, y4), "expected 4 names, one per class of the logits, got 2")
      for loss in (MetricLoss, MetricCrossEntropy)),
]  # fmt: skip


@pytest.mark.parametrize("parameters, message", REFUSED)
def test_wrong_parameters_are_named(parameters, message):
    with pytest.raises(ValueError, match=message):
        MetricLoss(**parameters)


@pytest.mark.parametrize("loss, arguments, message", REFUSED_INPUT)
def test_wrong_input_is_named(loss, arguments, message):
    with pytest.raises(ValueError, match=message):
        loss(*arguments)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: setattr(MetricLoss("f1"), "temperature", 1.0), "0 < T <= 0.4, got 1.0"),
        (lambda: AUROCLoss(threshold=0.5), "list of thresholds.*0.5"),
        (lambda: AUROCLoss(step="none"), "a step.*'none'"),
        (lambda: build_loss(CONFIGS["ce_weighted"], "ab"), "balanced.*training labels"),
        (lambda: build_loss(CONFIGS["wmw"] | {"gama": 1}, "ab"), "parameter of WMW 'gama', did you mean 'gamma'"),
    ],
)
def test_other_mistakes_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("label", [-1, 2])
def test_every_loss_refuses_a_label_out_of_range(name, label):
    z, y = batch(6, 2)
    y[3] = label
    with pytest.raises(ValueError, match="expected 0 to 1, got"):
        build(name)(z, y)


@pytest.mark.parametrize("name", sorted(BINARY))
def test_binary_losses_refuse_more_classes(name):
    with pytest.raises(ValueError, match="expected two classes or a single logit, got 4"):
        build(name)(z4, y4)


def test_a_resumed_training_keeps_its_temperature():
    net = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2), "loss": MetricLoss("f1", temperature=0.05)})
    again = torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2), "loss": MetricLoss("f1")})
    again.load_state_dict(net.state_dict())
    assert again["loss"].temperature == 0.05
    again["loss"].temperature = np.float32(0.1)
    each = MetricLoss("f1", temperature=torch.tensor([0.1, 0.05]))
    other = MetricLoss("f1")
    other.load_state_dict(each.state_dict())
    assert other.temperature.tolist() == pytest.approx([0.1, 0.05])


def test_a_sample_that_no_cosine_step_reaches_keeps_its_probabilities():
    """At a threshold of 0.5, a sample without a probability above 0.4 is below every step of half-width 1/10."""
    loss, logits = MetricLoss("f1", step="cosine", threshold=0.5), torch.randn(50, 20, dtype=torch.float64)
    p, memberships = logits.softmax(-1), loss.memberships(logits)
    unreached = p.amax(-1) < 0.4
    assert unreached.any()
    assert not unreached.all()
    torch.testing.assert_close(memberships[unreached], p[unreached])
    torch.testing.assert_close(memberships.sum(-1), torch.ones(50, dtype=torch.float64))
    labels = torch.arange(50) % 20
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), logits.requires_grad_())


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 4, 5)])
def test_soft_targets_work_under_vmap(shape):
    logits = torch.randn(2, *shape)
    together = torch.func.vmap(MetricLoss("f1"))(logits, logits.softmax(2))
    torch.testing.assert_close(together, torch.stack([MetricLoss("f1")(z, z.softmax(1)) for z in logits]))


@pytest.mark.parametrize("kind", [MetricLoss, MetricCrossEntropy, CrossEntropy])
def test_probabilities_and_classes_in_the_last_axis_bring_one_warning(kind):
    def told(logits, labels):
        """The warnings of five calls."""
        loss = kind()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(5):
                loss(logits, labels)
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught]

    z, y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3
    square, rows = torch.randn(8, 3, 3), torch.stack((y, y, y), 1)
    [probabilities], [last_axis] = told(z.softmax(1), y), told(square, rows)
    assert "sum to 1 like probabilities" in probabilities
    assert "transpose(1, 2)" in last_axis
    meant = (z, y), (z.log_softmax(1), y), (square.transpose(1, 2), rows)
    assert [told(*inputs) for inputs in meant] == [[], [], []]


def test_the_new_default_average_of_two_classes_is_said_once():
    of_metric.warn_of_default.cache_clear()
    logits, labels = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in (MetricLoss("f1"), MetricCrossEntropy("f1"), MetricLoss("f1_positive"), MetricLoss("mcc")):
            loss(logits, labels)
        MetricLoss("f1")(torch.randn(4, 3), labels)
    assert [(w.category, w.filename) for w in caught] == [(FutureWarning, __file__)]
