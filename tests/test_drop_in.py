"""MetricLoss in place of torch's losses: shapes, multilabel, soft targets, ignored labels, and errors."""

import copy
import math
import tracemalloc
import warnings

import numpy as np
import pytest
import sklearn.metrics as oracle
import torch
import torch.nn.functional as F
from torchmetrics.functional import classification as theirs

from east import METRICS, MetricLoss, losses
from east.losses import WMW, CrossEntropy, Dice, Focal, SigmoidF1

FAMILY = [CrossEntropy(), Focal(), Dice(), SigmoidF1(), MetricLoss("f1"), MetricLoss("mcc"), MetricLoss("gmean"),
          MetricLoss("f1", threshold=[0.3, 0.6]), MetricLoss("f1", step="sigmoid", threshold=0.5)]  # fmt: skip
BINARY_FAMILY = [*FAMILY, WMW()]
HARD = 1e-6  # a temperature at which clear decisions have soft counts equal to the hard ones


def named(loss):
    return f"{type(loss).__name__}({loss.extra_repr()})"


def batch(*shape, seed=0, dtype=torch.float64):
    """Logits with classes in axis 1, and labels."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return logits, torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)


def value_and_gradient(loss, logits, *rest):
    logits = logits.detach().clone().requires_grad_()
    value = loss(logits, *rest)
    assert value.shape == ()
    return value.detach(), torch.autograd.grad(value, logits)[0]


# Shapes


@pytest.mark.parametrize("loss", FAMILY, ids=named)
@pytest.mark.parametrize("trailing", [(), (5,), (4, 3), (2, 3, 2)])
def test_trailing_axes_are_samples(loss, trailing):
    logits, labels = batch(6, 4, *trailing)
    weights = torch.rand(labels.shape, dtype=torch.float64)
    rows = logits.movedim(1, -1).reshape(-1, 4)
    value, gradient = value_and_gradient(loss, logits, labels, weights)
    wanted, by_row = value_and_gradient(loss, rows, labels.reshape(-1), weights.reshape(-1))
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(gradient.movedim(1, -1).reshape(-1, 4), by_row)


@pytest.mark.parametrize("loss", BINARY_FAMILY, ids=named)
def test_single_logits_of_pixels_stand_for_two(loss):
    """Of rows: tests/test_losses.py."""
    logits, labels = batch(8, 2, 3, 2)
    z = logits[:, 1:]
    wanted = loss(torch.cat((torch.zeros_like(z), z), 1), labels)
    for y in (labels, labels.bool(), labels.double(), labels.int()):
        torch.testing.assert_close(loss(z, y), wanted)
        torch.testing.assert_close(loss(z, y.unsqueeze(1)), wanted)


def test_cross_entropy_matches_torch_for_every_kind_of_input():
    for shape in ((7, 4), (3, 4, 5), (2, 4, 3, 3)):
        logits, labels = batch(*shape)
        labels.view(-1)[::3] = -100
        torch.testing.assert_close(CrossEntropy()(logits, labels), F.cross_entropy(logits, labels))
        targets = torch.rand(shape, dtype=torch.float64).softmax(1)
        torch.testing.assert_close(CrossEntropy()(logits, targets), F.cross_entropy(logits, targets))
    z, shares = torch.randn(9, 1), torch.rand(9, 1)
    torch.testing.assert_close(CrossEntropy()(z, shares), F.binary_cross_entropy_with_logits(z, shares))


def test_a_weight_per_row_counts_for_its_pixels():
    logits, labels = batch(3, 4, 2, 2)
    weights = torch.tensor([1.0, 0.0, 2.0])
    pixels = weights[:, None, None].expand(3, 2, 2)
    torch.testing.assert_close(MetricLoss("f1")(logits, labels, weights), MetricLoss("f1")(logits, labels, pixels))


# Soft targets


@pytest.mark.parametrize("loss", FAMILY, ids=named)
@pytest.mark.parametrize("classes", [2, 4])
def test_soft_targets_count_fractionally(loss, classes):
    """A target of k/4 counts like k of four copies; one-hot targets count like indices."""
    logits, labels = batch(12, classes)
    _, others = batch(12, classes, seed=1)
    share = torch.tensor([0.25, 0.5, 1.0] * 4, dtype=torch.float64)
    targets = share[:, None] * F.one_hot(labels, classes) + (1 - share[:, None]) * F.one_hot(others, classes)
    times = torch.cat((4 * share, 4 * (1 - share)))
    copies = loss(torch.cat((logits, logits)), torch.cat((labels, others)), times)
    torch.testing.assert_close(loss(logits, targets), copies)
    torch.testing.assert_close(loss(logits, F.one_hot(labels, classes).double()), loss(logits, labels))


def test_soft_targets_in_bfloat16_count_though_they_are_rounded():
    """Probabilities of a teacher in bfloat16: rounded, some of 20,000 rows sum to 0.997."""
    logits, _ = batch(20_000, 5)
    targets = logits.softmax(1)
    rounded = targets.bfloat16()
    assert (rounded.double().sum(1) - 1).abs().max() > 1e-3
    torch.testing.assert_close(MetricLoss("f1")(logits, rounded), MetricLoss("f1")(logits, targets), atol=1e-3, rtol=0)


# Ignored labels


@pytest.mark.parametrize("loss", BINARY_FAMILY, ids=named)
def test_an_ignored_sample_does_not_count(loss):
    logits, labels = batch(20, 2)
    ignored = torch.arange(20) % 3 == 0
    value, gradient = value_and_gradient(loss, logits, labels.masked_fill(ignored, -100))
    wanted, of_others = value_and_gradient(loss, logits[~ignored], labels[~ignored])
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(gradient[~ignored], of_others)
    assert (gradient[ignored] == 0).all()
    zero_weight = value_and_gradient(loss, logits, labels, (~ignored).double())
    torch.testing.assert_close(zero_weight, (value, gradient))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", [*BINARY_FAMILY, losses.MetricCrossEntropy("f1")], ids=named)
def test_logits_of_an_ignored_sample_may_be_anything(loss, garbage):
    """As padding is in sequences and images; torch's cross_entropy has a finite loss then, but a gradient of NaN."""
    images = [(2, 2, 128, 128)] if isinstance(loss, MetricLoss) and loss.threshold == "dynamic" else []
    for shape in ((12, 2), (6, 2, 3), (6, 1, 3), *images):
        logits, _ = batch(*shape)
        chance = torch.rand(2, shape[0], *shape[2:], generator=torch.Generator().manual_seed(1))
        labels, ignored = (chance[0] < 0.5).long(), chance[1] < 0.3
        padded = logits.masked_fill(ignored.unsqueeze(1), garbage)
        as_label, as_weight = labels.masked_fill(ignored, -100), (~ignored).double()
        wanted = value_and_gradient(copy.deepcopy(loss), logits, as_label)
        kinds = [(as_label,), (labels, as_weight), *([(as_label.double(),)] if shape[1] == 1 else [])]
        for target in kinds:
            torch.testing.assert_close(value_and_gradient(copy.deepcopy(loss), padded, *target), wanted)
        padded[0], as_label[0] = math.nan, 0
        assert loss(padded, as_label).isnan()  # what counts is not hidden


def test_a_multilabel_cell_that_is_ignored_may_be_anything():
    logits, labels = torch.randn(12, 4), torch.arange(48).reshape(12, 4) % 2
    ignored = torch.arange(48).reshape(12, 4) % 5 == 0
    padded, as_label = logits.masked_fill(ignored, math.nan), labels.masked_fill(ignored, -100)
    for average in ("macro", "micro", "weighted", "samples"):
        loss = MetricLoss("f1", multilabel=True, average=average)
        wanted = value_and_gradient(loss, logits, as_label)
        for target in (as_label, as_label.float()):
            torch.testing.assert_close(value_and_gradient(loss, padded, target), wanted)


@pytest.mark.parametrize("loss", BINARY_FAMILY, ids=named)
@pytest.mark.parametrize("shape", [(6, 2), (1, 2, 1, 1), (6, 1)])
def test_a_batch_that_is_all_ignored_has_no_loss_and_no_gradient(loss, shape):
    logits, _ = batch(*shape)
    labels = torch.full((shape[0], *shape[2:]), -100)
    value, gradient = value_and_gradient(loss, logits, labels)
    assert value == 0
    assert (gradient == 0).all()


def test_another_index_can_be_ignored():
    logits, labels = batch(30, 4)
    loss = MetricLoss("f1", ignore_index=255)
    torch.testing.assert_close(
        loss(logits, labels.masked_fill(labels == 2, 255)),
        MetricLoss("f1")(logits, labels.masked_fill(labels == 2, -100)),
    )
    with pytest.raises(ValueError, match="labels: expected 0 to 3, got -100 to 3"):
        loss(logits, labels.masked_fill(labels == 2, -100))


@pytest.mark.parametrize("options", [{}, {"multilabel": True}])
def test_masking_compiles_without_a_break(options):
    torch.compiler.reset()
    loss = MetricLoss("mcc", **options)
    logits, labels = batch(20, 4, dtype=torch.float32)
    if options:
        labels = torch.randint(2, logits.shape)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for some in (labels.masked_fill(labels == 1, -100), torch.full_like(labels, -100)):
        results = [value_and_gradient(function, logits, some) for function in (loss, compiled)]
        torch.testing.assert_close(*results, atol=1e-6, rtol=1e-4)


# Overwritten labels


@pytest.mark.parametrize("loss", BINARY_FAMILY, ids=named)
@pytest.mark.parametrize("which", ["labels", "weights"])
def test_labels_and_weights_overwritten_before_backward_raise_or_do_not_matter(loss, which):
    logits, labels = batch(20, 2)
    weights = torch.rand(20, dtype=torch.float64)
    wanted = value_and_gradient(loss, logits, labels, weights)[1]
    value = loss(logits.requires_grad_(), labels, weights)
    (labels if which == "labels" else weights).mul_(0)
    try:
        (gradient,) = torch.autograd.grad(value, logits)
    except RuntimeError:  # torch says that they were modified by an inplace operation
        return
    torch.testing.assert_close(gradient, wanted)


# Multilabel


@pytest.mark.parametrize("metric", sorted(METRICS.keys() - {"cost"}))
def test_multilabel_averages_are_means_of_binary_losses(metric):
    logits, _ = batch(30, 5)
    labels = (torch.rand(30, 5, generator=torch.Generator().manual_seed(1)) < 0.4).long()
    binary = MetricLoss(metric)
    each = torch.stack([binary(logits[:, k], labels[:, k]) for k in range(5)])
    loss = MetricLoss(metric, multilabel=True)
    for y in (labels, labels.bool(), labels.double()):
        torch.testing.assert_close(loss(logits, y), each.mean())
    weighted = MetricLoss(metric, multilabel=True, average="weighted")(logits, labels)
    support = labels.sum(0).double()
    torch.testing.assert_close(weighted, (each * support).sum() / support.sum())
    micro = MetricLoss(metric, multilabel=True, average="micro")(logits, labels)
    torch.testing.assert_close(micro, binary(logits.reshape(-1), labels.reshape(-1)))


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "samples"])
def test_multilabel_averages_match_scikit_learn(average):
    logits, _ = batch(40, 6)
    labels = (torch.rand(40, 6, generator=torch.Generator().manual_seed(1)) < 0.3).long()
    labels[:, 2] = 0  # never positive
    labels[3] = 0  # a sample without labels
    for metric in ("f1", "precision", "recall", "jaccard"):
        loss = MetricLoss(metric, multilabel=True, average=average, temperature=HARD)
        wanted = getattr(oracle, f"{metric}_score")(labels, logits > 0, average=average, zero_division=0)
        assert float(loss(logits, labels)) == pytest.approx(1 - wanted, abs=1e-4), metric


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "samples"])
def test_a_multilabel_batch_without_positives_scores_0(average):
    """As in scikit-learn with zero_division=0; a batch that is all ignored has no score."""
    logits, _ = batch(6, 4)
    loss = MetricLoss("f1", multilabel=True, average=average)
    labels = torch.zeros(6, 4).long()
    assert oracle.f1_score(labels, logits > 0, average=average, zero_division=0) == 0
    value, gradient = value_and_gradient(loss, logits, labels)
    assert value == 1
    assert gradient.isfinite().all()
    assert value_and_gradient(loss, logits, labels - 100)[0] == 0


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", "samples"])
def test_multilabel_passes_gradcheck(average):
    logits, _ = batch(4, 3, 2)
    labels = (torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(1)) < 0.5).long()
    labels[0, 1] = -100
    weights = torch.rand(4, 2, dtype=torch.float64)
    loss = MetricLoss("f1", multilabel=True, average=average)
    assert torch.autograd.gradcheck(lambda z: loss(z, labels, weights), logits.requires_grad_())


# The limit T -> 0


CASES = 100  # of each kind; every class occurs and is predicted


def clear_logits(predictions, classes, generator):
    """Logits [n, d, ...] far from ties; the largest entry is the prediction."""
    logits = torch.rand((len(predictions), classes, *predictions.shape[1:]), generator=generator, dtype=torch.float64)
    return logits.scatter_add(1, predictions.unsqueeze(1), torch.full_like(logits[:, :1], 3))


def cases(shape, classes, seed):
    """Labels and predictions with every class among the pairs that count, and some ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(CASES):
        labels, predictions = torch.randint(classes, (2, *shape), generator=generator)
        agree = torch.rand(shape, generator=generator) < 0.5
        predictions = torch.where(agree, labels, predictions)
        labels.view(-1)[:classes] = torch.arange(classes)
        predictions.view(-1)[:classes] = torch.arange(classes).roll(1)
        labels.view(-1)[classes:][torch.rand(labels.numel() - classes, generator=generator) < 0.2] = -100
        yield labels, predictions, clear_logits(predictions, classes, generator)


MULTICLASS = {
    ("f1", "macro"): theirs.multiclass_f1_score,
    ("f1", "weighted"): theirs.multiclass_f1_score,
    ("f1", "micro"): theirs.multiclass_f1_score,
    ("precision", "macro"): theirs.multiclass_precision,
    ("recall", "macro"): theirs.multiclass_recall,
    ("specificity", "macro"): theirs.multiclass_specificity,
    ("jaccard", "macro"): theirs.multiclass_jaccard_index,
    ("jaccard", "micro"): theirs.multiclass_jaccard_index,
    ("mcc", None): theirs.multiclass_matthews_corrcoef,
    ("kappa", None): theirs.multiclass_cohen_kappa,
}


@pytest.mark.parametrize("shape", [(40,), (2, 5, 6)], ids=["multiclass", "segmentation"])
def test_near_zero_temperature_matches_torchmetrics_multiclass(shape):
    losses_of = {
        key: MetricLoss(key[0], temperature=HARD, **({"average": key[1]} if key[1] else {})) for key in MULTICLASS
    }
    for k, (labels, predictions, logits) in enumerate(cases(shape, 4, seed=len(shape))):
        for (name, average), theirs_of in [*MULTICLASS.items()][k % 2 :: 2]:
            options = {"average": average} if average else {}
            wanted = theirs_of(predictions, labels, num_classes=4, ignore_index=-100, **options)
            ours = losses_of[name, average](logits, labels)
            assert float(ours) == pytest.approx(1 - float(wanted), abs=1e-4), (name, average)


MULTILABEL = {
    "f1": theirs.multilabel_f1_score,
    "precision": theirs.multilabel_precision,
    "recall": theirs.multilabel_recall,
    "jaccard": theirs.multilabel_jaccard_index,
    "specificity": theirs.multilabel_specificity,
}


@pytest.mark.parametrize("average", ["macro", "micro", "weighted"])
@pytest.mark.parametrize("shape", [(30, 4), (3, 4, 3, 3)], ids=["rows", "pixels"])
def test_near_zero_temperature_matches_torchmetrics_multilabel(shape, average):
    generator = torch.Generator().manual_seed(len(shape))
    for k in range(CASES):
        labels, predictions = torch.randint(2, (2, *shape), generator=generator)
        labels[0], labels[1] = 0, 1  # every label occurs and is missed, and is predicted
        predictions[0], predictions[1] = 1, 1
        labels[2:][torch.rand(labels[2:].shape, generator=generator) < 0.2] = -100
        name = [*MULTILABEL][k % 5]
        wanted = MULTILABEL[name](predictions, labels, num_labels=4, average=average, ignore_index=-100)
        loss = MetricLoss(name, multilabel=True, average=average, temperature=HARD)
        assert float(loss(torch.where(predictions == 1, 3.0, -3.0), labels)) == pytest.approx(
            1 - float(wanted), abs=1e-4
        ), name


# Weights


SCALES = [(torch.float64, 1e-30), (torch.float64, 1e30), (torch.float32, 1e-15), (torch.float32, 1e15)]


@pytest.mark.parametrize("dtype, scale", SCALES, ids=str)
@pytest.mark.parametrize("classes", [2, 3])
def test_the_scale_of_the_weights_does_not_matter(classes, dtype, scale):
    """On an ordinary batch, and where a class is almost never predicted."""
    several = [MetricLoss(name, threshold=t) for name in sorted(METRICS.keys() - {"cost"}) for t in ("dynamic", 0.5)]
    several += [MetricLoss("precision_weighted"), MetricLoss("recall", absent="ignore"), losses.MetricCrossEntropy()]
    several += [losses.MetricCrossEntropy(metric, form="soft_targets") for metric in ("mcc", "quadratic_kappa")]
    several += [CrossEntropy(), Focal(), Dice(), SigmoidF1(), *([WMW(), losses.AUROCLoss()] if classes == 2 else [])]
    for logits, labels in (batch(30, classes, dtype=dtype), batch(30, classes, seed=1, dtype=dtype)):
        logits[:, 0] += 8 * (labels == 0).sum()
        weights = torch.rand(30, generator=torch.Generator().manual_seed(1), dtype=dtype)
        for loss in several:
            (value, gradient), scaled = (
                value_and_gradient(copy.deepcopy(loss), logits, labels, w) for w in (weights, weights * scale)
            )
            tolerance = 1e-3 * float(gradient.norm()) + 1e-9
            torch.testing.assert_close(scaled, (value, gradient), rtol=1e-4, atol=tolerance)


# Refusals


z, y = batch(6, 4)
dense, pixels = batch(2, 3, 4, 5)
REFUSED = {
    "tokens": (lambda loss: loss(torch.randn(2, 5, 3), torch.zeros(2, 5).long()),
               ("(2, 5)", "(2, 5, 3)", "move the classes to axis 1: logits.transpose(1, 2)", "per_trial")),
    "classes last": (lambda loss: loss(dense.movedim(1, -1), pixels), ("axis 1: logits.movedim(-1, 1)",)),
    "integer multilabel": (lambda loss: loss(z, torch.ones(6, 4).long()),
                           ("(6, 4)", "multilabel=True", "unsqueeze(1)", "argmax(1)")),
    "boolean multilabel": (lambda loss: loss(z, torch.ones(6, 4).bool()), ("multilabel=True", "unsqueeze(1)")),
    "float multilabel": (lambda loss: loss(z, torch.ones(6, 4)), ("soft targets", "sum to 1", "4", "multilabel=True")),
    "float indices": (lambda loss: loss(z, y.float()), ("integer labels", "4 classes", "float32")),
    "labels of another shape": (lambda loss: loss(z, y[:5]), ("(5,)", "(6, 4)", "expected (6,) for 4 classes")),
    "labels of single logits": (lambda loss: loss(z[:, :1], y[:5] % 2), ("expected (6,) or (6, 1)", "single logits")),
    "column labels of flat logits": (lambda loss: loss(z[:, 0], y[:, None]), ("(6, 1)", "(6,): labels.squeeze(1)")),
    "column labels": (lambda loss: loss(z, y[:, None]), ("(6, 1)", "expected (6,): labels.squeeze(1)")),
    "masks with a channel": (lambda loss: loss(dense, pixels[:, None]), ("expected (2, 4, 5): labels.squeeze(1)",)),
    "NaN soft targets": (lambda loss: loss(z, z / 0 * 0), ("soft targets", "sum to 1", "nan to nan")),
    "negative soft targets": (lambda loss: loss(z, torch.tensor([[2.0, -1, 0, 0]] * 6)), ("soft targets",)),
    "complex labels": (lambda loss: loss(z, y.cfloat()), ("integers, booleans or floats, got torch.complex64",)),
    "shares beyond 1": (lambda loss: loss(z[:, 0], y / 2), ("probabilities from 0 to 1", "1.5")),
    "weights of another shape": (lambda loss: loss(dense, pixels, torch.ones(2, 4)), ("weights", "(2, 4, 5) or (2,)")),
    "weights as a list": (lambda loss: loss(z, y, [1] * 6), ("weights as a tensor", "list")),
    "nothing": (lambda loss: loss(z[:0], y[:0]), ("at least one sample", "(0, 4)")),
    "a population of rows": (lambda loss: loss.per_trial(z[0], y[0]), ("[P, n, d]", "(4,)")),
    "float labels of a population": (lambda loss: loss.per_trial(z[None], y[None].float()), ("integer labels",)),
    "weights of a population": (lambda loss: loss.per_trial(z[None], y[None], torch.ones(6)), ("(1, 6)", "(6,)")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("loss", [MetricLoss("f1"), CrossEntropy(), Dice()], ids=named)
def test_an_error_says_what_to_write_instead(loss, case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError) as error:
        call(loss)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_ap_perf_refuses_soft_labels():
    pytest.importorskip("ap_perf")
    with pytest.raises(ValueError, match="APPerf: expected no weights and no soft targets"):
        losses.APPerf()(z[:, 0], torch.rand(6))


def test_repr_shows_metric_average_and_step():
    rest = "step=linear, threshold=dynamic, temperature=0.2)"
    assert repr(MetricLoss("f1_macro")) == f"MetricLoss(f1, average=macro, {rest}"
    assert repr(MetricLoss("f1")) == f"MetricLoss(f1, average=positive with two classes, else macro, {rest}"
    assert repr(MetricLoss("f1", classes="abc")) == f"MetricLoss(f1, average=macro, {rest}"
    assert "mcc, step=sigmoid (slope 73), threshold=0.5" in repr(
        MetricLoss("mcc", step="sigmoid", slope=73, threshold=0.5)
    )
    assert "average=samples, multilabel" in repr(MetricLoss("f1", multilabel=True, average="samples"))


# Degenerate batches in float32


STEPS = [
    *({"temperature": T, "threshold": t} for T in (0.02, 0.1, 0.2, 0.4) for t in ("dynamic", 0.5, 0.9, [0.1, 0.6])),
    *({"step": "sigmoid", "slope": slope, "threshold": t} for slope in (10, 73) for t in ("dynamic", 0.1, [0.3, 0.6])),
    *({"step": "cosine", "slope": 3, "threshold": t} for t in ("dynamic", 0.5, [0.1, 0.9])),
    {"step": "none"},
]


def is_like_float64(metric, options, logits, labels):
    """Whether the value is that of float64 and the gradient is of ordinary size."""
    d = logits.shape[1]
    costs = {"costs": 1 - torch.eye(d)} if metric == "cost" else {}
    with warnings.catch_warnings(action="ignore"):  # temperatures above 0.25
        loss = MetricLoss(metric, **costs, **options)
    value, gradient = value_and_gradient(loss, logits, labels)
    targets = labels.double() if labels.is_floating_point() else labels
    return abs(float(value) - float(loss(logits.double(), targets))) <= 1e-3 and float(gradient.norm()) < 1e3


@pytest.mark.parametrize("metric", sorted(METRICS))
def test_float32_matches_float64_on_every_batch(metric):
    """One-class, saturated, one-sided and ordinary batches of 32 to 1,024 samples, with every kind of step."""
    for seed in range(3 * len(STEPS)):
        generator = torch.Generator().manual_seed(seed)
        d, n = (2, 3, 10, 2, 40)[seed % 5], int(torch.randint(32, 1025, (), generator=generator))
        scale = (1.0, 10 ** (5 * float(torch.rand((), generator=generator)) - 1))[seed % 2]
        logits = scale * torch.randn(n, d, generator=generator)
        logits[:, 0] += (0, 4 * scale, 20, 50)[seed // 2 % 4]
        labels, best = torch.randint(d, (n,), generator=generator), logits.argmax(-1)
        labels = (labels, torch.zeros_like(labels), best, best.index_fill(0, labels[:1], d - 1))[seed // 3 % 4]
        if seed % 7 == 0:
            labels = F.one_hot(labels, d).float()
        options = STEPS[seed % len(STEPS)]
        assert is_like_float64(metric, options, logits, labels), (seed, options)


@pytest.mark.parametrize("options", [STEPS[0], {"step": "sigmoid", "slope": 73, "threshold": 0.1}], ids=str)
@pytest.mark.parametrize("classes", [2, 3])
def test_float32_matches_float64_on_images(classes, options):
    """65,536 pixels, one of them positive: false positives are a small difference of large counts."""
    logits = 5 * torch.randn(1 << 16, classes, generator=torch.Generator().manual_seed(1))
    labels = torch.zeros(1 << 16).long()
    labels[0] = 1
    assert [metric for metric in METRICS if not is_like_float64(metric, options, logits, labels)] == []


@pytest.mark.parametrize("metric", ["kappa", "npv"])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_gradients_of_almost_certain_predictions_are_not_rounding_errors(classes, metric):
    """Almost all mass is in one column, so that the slopes by counts are huge, and cancel."""
    loss = MetricLoss(metric, temperature=0.02, threshold=0.3)
    for seed in range(8):
        logits = 2 * torch.randn(64, classes, generator=torch.Generator().manual_seed(seed))
        logits[:, 0] += 25
        labels = torch.arange(64) % (1 + seed % 2)
        (_, ours), (_, exact) = (value_and_gradient(loss, z, labels) for z in (logits, logits.double()))
        assert (ours - exact).norm() < 1e-3 * exact.norm() + 1e-5


def test_a_class_that_is_never_found_makes_the_geometric_mean_0():
    """One class of ten is never found: 0, as for hard decisions; the other classes keep their gradient."""
    labels = torch.arange(100) % 10
    logits = 30 * F.one_hot(torch.where(labels == 9, 0, labels), 10).float()
    logits[labels == 1, 2] += 29.9
    value, gradient = value_and_gradient(MetricLoss("gmean", temperature=0.05), logits, labels)
    assert value == 1
    assert gradient[labels == 1].abs().max() > 1e-4
    assert gradient.norm() < 1e3


def peak_memory(loss, logits, labels):
    """What torch and NumPy allocate at most for forward and backward, including the gradient, in bytes."""
    tracemalloc.start()
    loss(logits, labels).backward()
    arrays = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    logits.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss(logits, labels).backward()
    logits.grad = None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return arrays + np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max()


def soft_dice(logits, labels):
    p, y = logits.softmax(1), F.one_hot(labels, logits.shape[1]).movedim(-1, 1)
    return 1 - (2 * (p * y).sum((0, 2, 3)) / (p + y).sum((0, 2, 3))).mean()


def test_segmentation_needs_less_memory_than_a_plain_soft_dice():
    logits = torch.randn(4, 21, 128, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.randint(21, (4, 128, 128), generator=torch.Generator().manual_seed(1))
    for loss in (MetricLoss("f1"), MetricLoss("mcc")):
        loss(logits, labels).backward()  # import modules before measuring
        logits.grad = None
        peak, of_dice = (peak_memory(one, logits, labels) for one in (loss, soft_dice))
        assert logits.nbytes <= peak <= of_dice, (peak / logits.nbytes, of_dice / logits.nbytes)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_weights_are_checked_however_they_come_in(bad):
    logits, labels, weights = torch.zeros(3, 2), torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.ones(3, 2)
    weights[1, 1] = bad
    for call in (
        lambda: MetricLoss("f1", multilabel=True)(logits, labels, weights),
        lambda: MetricLoss("f1").per_trial(logits[None], labels[None, :, 0], weights[None, :, 1]),
        lambda: MetricLoss("f1")(logits, labels[:, 0], weights[:, 1]),
    ):
        with pytest.raises(ValueError, match="weights: expected finite numbers of at least 0"):
            call()
