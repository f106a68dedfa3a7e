"""Everything that may run on a GPU, on a device that is not the CPU: no tensor stays behind, and the numbers agree."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from east import METRICS, EASTClassifier, MetricLoss
from east.choices import CONF
from east.lab.data.common import Part, Splits
from east.lab.models.darknet import Convolution3x3
from east.lab.training import devices, engine, saved
from east.lab.training.population import Population, Trial
from east.losses import classic
from tests.elsewhere import CLOSE, ELSEWHERE, REAL, elsewhere, waits, without_waiting
from tests.made import science

SECTIONS = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((CONF / "loss").glob("*.yaml"))}
# AP-Perf solves a game by NumPy on the CPU.
LOSSES = [name for name, section in SECTIONS.items() if section.get("trains") != "classical" and name != "ap_perf"]
GEOMETRIC = {"name": "geometric", "schedule": "geometric", "T0": 0.2, "r": 0.5, "patience": 2, "T_min": 0.01}


def trial(loss, model, seed=0, epochs=5):
    protocol = {"name": "east", "patience": 2, "stage_epochs": 2, "max_epochs": epochs}
    hyper = {"lr": 0.01, "batch_size": 32, "dropout": 0.25, "weight_decay": 0.01, "clip": 1.0}
    return Trial(science(model=model, loss=loss, annealing=GEOMETRIC, protocol=protocol, hyper=hyper), seed)


def splits_of(shape, kind, classes=("no", "yes"), seed=0, pairs=None):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(len(classes), (200,), generator=generator)
    inputs = torch.rand(200, *shape, generator=generator) + labels.view(-1, *(1,) * len(shape)) / 2
    inputs = (100 * inputs).to(torch.uint8) if kind == "image" else inputs
    labels = labels[:, None].repeat(1, pairs) if pairs else labels
    parts = [Part(inputs[i], labels[i], i) for i in torch.arange(200).split([120, 40, 40])]
    positive = 1 if len(classes) == 2 else None
    return Splits(*parts, classes, "toy", positive, "f", f"{seed}", torch.zeros(3), torch.ones(3), kind)


@pytest.fixture(autouse=True)
def same_arithmetic(monkeypatch):
    """Disable a fast path of the CPU: it rounds differently, which Adam's first steps amplify, and has tests."""
    monkeypatch.setattr(Convolution3x3, "forward", torch.nn.Conv2d.forward)


def loss_section(name):
    return SECTIONS[name] | ({"metric": "kappa"} if name == "metric" else {})


def small_mlp(loss):
    single = loss.startswith(("btg", "wmw", "bce", "sol"))
    return {"name": "mlp_btg", "hidden": [8], "outputs": 1} if single else {"name": "mlp", "hidden": [16, 8]}


@pytest.mark.parametrize("loss", [*LOSSES, "averages"])
def test_a_training_step_never_waits_for_the_device_and_the_end_of_an_epoch_once(loss):
    """Also where a metric stops training and a mean of the weights is validated as well."""
    name = "f1_ce" if loss == "averages" else loss
    trials = [trial(loss_section(name), small_mlp(name), seed) for seed in range(3)]
    if loss == "averages":
        trials = [replace(one, config=one.config.but(hyper=one.config.hyper.but(average=0.9))) for one in trials]
    with elsewhere():
        population = Population([(one, splits_of((5,), "table")) for one in trials], ELSEWHERE)
        for _ in range(2):
            steps = engine.training_steps(population, engine.losses_of)
            next(steps)  # an epoch starts with its shuffled order, and the first one with what a loss prepares
            with without_waiting():
                *_, losses = steps
            population.end_epoch(losses)
            assert REAL or +(waits - Counter(upload=99)) == {"download": 1}


@pytest.mark.parametrize("products, convolutions, told", [(False, False, "off"), (False, True, "cudnn"),
                                                          (True, True, "matmul and cudnn")])  # fmt: skip
def test_records_name_what_is_rounded_to_tf32(monkeypatch, products, convolutions, told):
    monkeypatch.setattr(devices, "pick_device", torch.device)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=products))
    monkeypatch.setattr(torch.backends, "cudnn", SimpleNamespace(allow_tf32=convolutions))
    assert devices.describe_device("cuda") == f"cuda (A100, tf32 {told})"


def test_mixed_devices_are_an_error():
    with elsewhere(), pytest.raises(RuntimeError, match=r"(?i)expected all tensors"):
        torch.zeros(3, device=ELSEWHERE) + torch.ones(3)


def value_and_gradient(loss, logits, labels, weights):
    logits = logits.clone().requires_grad_()
    value = loss(logits, labels, weights)
    value.backward()
    return value.detach().cpu(), logits.grad.cpu()


@pytest.mark.parametrize("classes", [2, 5, 64, 3000])
@pytest.mark.parametrize("metric", sorted(METRICS))
def test_losses_and_gradients_are_the_same_on_another_device(metric, classes):
    if metric in ("quadratic_kappa", "cost") and classes > 100:
        pytest.skip("needs the whole matrix")
    costs = {"costs": [[float(i != j) for j in range(classes)] for i in range(classes)]} if metric == "cost" else {}
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(30, classes, generator=generator, dtype=torch.float64)
    labels, weights = torch.randint(classes, (30,), generator=generator), torch.rand(30, dtype=torch.float64)
    for given in ((logits, labels, None), (logits, labels, weights)):
        expected = value_and_gradient(MetricLoss(metric, **costs), *given)
        with elsewhere():
            moved = [None if tensor is None else tensor.to(ELSEWHERE) for tensor in given]
            torch.testing.assert_close(value_and_gradient(MetricLoss(metric, **costs), *moved), expected)


@pytest.mark.parametrize("classes", [2, 5])
def test_a_temperature_of_numpy_is_a_number_on_any_device(classes):
    loss, logits = MetricLoss("f1_macro", temperature=np.float32(0.1)), torch.randn(9, classes)
    with elsewhere():
        there = loss(logits.to(ELSEWHERE), torch.arange(9).to(ELSEWHERE) % classes)
        torch.testing.assert_close(there.cpu(), loss(logits, torch.arange(9) % classes))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_population_trains_the_same_on_another_device(loss, monkeypatch):
    monkeypatch.setattr(classic, "MOST_PAIRS", 0)
    trials = [trial(loss_section(loss), small_mlp(loss), seed) for seed in range(3)]
    compared(trials, splits_of((5,), "table"))


@pytest.mark.parametrize("name, width, side", [("tiny_darknet", 0.1, 16), ("darknet19", 0.05, 32)])
def test_images_train_the_same_on_another_device(name, width, side):
    """In the first epoch; later Adam has amplified rounding errors, as kernels have another memory layout there."""
    splits = splits_of((3, side, side), "image", tuple("abc"))
    compared([trial(loss_section("f1"), {"name": name, "width": width}, epochs=1)], splits)


def test_a_checkpoint_moves_between_devices(tmp_path):
    member = trial(loss_section("ce"), {"name": "tiny_darknet", "width": 0.1}), splits_of((3, 16, 16), "image")
    with elsewhere():
        there = Population([member], ELSEWHERE)
        *_, losses = engine.training_steps(there, engine.losses_of)
        there.end_epoch(losses)
        there.save(tmp_path / "file")
        state = there.net.state_dict(there.rows["weights"][0])
    here = Population([member], torch.device("cpu"))
    here.load(tmp_path / "file")
    for name, tensor in here.net.state_dict(here.rows["weights"][0]).items():
        assert torch.equal(tensor, state[name])


def test_graphs_train_the_same_on_another_device():
    compared([trial(loss_section("f1"), {"name": "gnn"})], splits_of((4, 4), "graph", pairs=6))


def test_an_estimator_fits_and_predicts_the_same_on_another_device(monkeypatch):
    X, y = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32), np.arange(120) % 3
    settings = {"hidden": (8,), "max_epochs": 3, "random_state": 0, "batch_size": 32}
    here = EASTClassifier(**settings, device="cpu").fit(X, y).predict_proba(X)
    for module in (engine, saved):
        monkeypatch.setattr(module, "pick_device", lambda name: ELSEWHERE)
    with elsewhere():
        there = EASTClassifier(**settings).fit(X, y).predict_proba(X)
    np.testing.assert_allclose(there, here, atol=CLOSE)


def compared(trials, splits):
    here = engine.train(trials, splits, device="cpu", progress=False)
    with elsewhere():
        there = engine.train_population([(one, splits) for one in trials], ELSEWHERE)
    for ours, theirs in zip(here, there, strict=True):
        assert (ours.status, ours.stopped, ours.epochs) == (theirs.status, theirs.stopped, theirs.epochs)
        np.testing.assert_allclose(ours.probabilities["test"], theirs.probabilities["test"], atol=CLOSE)
        assert all(weight.device.type == "cpu" for weight in theirs.weights.values())
