"""The engine: what it fits, how it cools, and that a trial depends only on itself."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from east.lab import models
from east.lab.data import split
from east.lab.data.common import Part, Splits
from east.lab.settings.settings import Hyper, ModelSection
from east.lab.training import engine, loggers, population
from east.lab.training.annealing import HISTORY
from east.lab.training.engine import train
from east.lab.training.evaluation import evaluate
from east.lab.training.optimizer import Adam, Average
from east.lab.training.population import Outcome, Trial
from east.losses import CrossEntropy, MetricLoss
from tests.made import ended_at_checkpoint, real, science

LOSSES = {
    "ce": {"name": "ce", "_target_": "east.losses.CrossEntropy"},
    "f1": {"name": "f1", "_target_": "east.losses.MetricLoss", "metric": "f1"},
    "f1_macro": {"name": "f1", "_target_": "east.losses.MetricLoss", "metric": "f1", "average": "macro"},
    "f1_ce": {"name": "f1_ce", "_target_": "east.losses.MetricCrossEntropy", "metric": "f1"},
    "mcc_ce": {"name": "mcc_ce", "_target_": "east.losses.MetricCrossEntropy", "metric": "mcc", "counts": "validation"},
    "state": {"name": "state", "_target_": f"{__name__}.Remembering"},
}


def config(loss="ce", model=None, schedule="none", hyper=None, annealing=None, **protocol):
    return science(
        dataset={"name": "toy", "kind": "table"},
        model=model or {"name": "mlp", "hidden": [16, 8]},
        loss=LOSSES[loss],
        annealing={"name": schedule, "schedule": schedule, **(annealing or {})},
        protocol={"name": "east", "patience": 5, "max_epochs": 10, **protocol},
        hyper={"lr": 0.01, "batch_size": 32, "dropout": 0.25, "weight_decay": 0.01, **(hyper or {})},
    )


def splits_of(inputs, labels, seed=0, kind="table", classes=("no", "yes")):
    order = np.random.default_rng(seed).permutation(len(labels))
    cuts = np.split(order, [int(0.64 * len(order)), int(0.8 * len(order))])
    parts = [Part(inputs[i], labels[i], i) for i in map(torch.as_tensor, cuts)]
    positive = 1 if len(classes) == 2 else None
    return Splits(*parts, classes, "toy", positive, "f", f"{seed}", torch.zeros(3), torch.ones(3), kind)


def toy():
    """Two classes, one in four positive, with some overlap."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(400, generator=generator) < 0.25).long()
    return splits_of(torch.randn(400, 5, generator=generator) + 1.2 * labels[:, None], labels)


@pytest.fixture(scope="module")
def blobs():
    return toy()


def outcome_of(splits, *arguments, seed=0, **options):
    """The outcome of one trial; the other arguments are those of `config`."""
    return train([Trial(config(*arguments, **options), seed)], splits)[0]


def same(a: Outcome, b: Outcome) -> bool:
    """True if they are equal to the last bit, except for the time it took."""
    arrays = all(np.array_equal(a.probabilities[part], b.probabilities[part]) for part in a.probabilities)
    weights = all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
    plain = ("status", "error", "stopped", "epochs", "best", "history")
    return arrays and weights and all(getattr(a, name) == getattr(b, name) for name in plain)


def close(a: Outcome, b: Outcome) -> bool:
    pairs = [(a.probabilities[part], b.probabilities[part]) for part in ("val", "test")]
    losses = np.allclose(a.history["val_loss"], b.history["val_loss"], atol=1e-4)
    return losses and all(np.allclose(*pair, atol=1e-3) for pair in pairs)


def scores(outcome, part="test"):
    return evaluate(outcome.probabilities, outcome.labels, 1)["scores"][part]


def predicted(outcome, splits):
    """Test probabilities of an ordinary module with the weights of the outcome."""
    net = models.build(outcome.trial.config.model, splits.test.inputs.shape[1:], len(splits.classes))
    net.load_state_dict(outcome.weights)
    with torch.no_grad():
        return net.eval()(splits.prepare(splits.test.inputs)).softmax(-1).numpy()


@pytest.mark.parametrize("loss", ["ce", "f1"])
def test_separable_data_are_fitted_to_the_last_row(loss):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (600,), generator=generator)
    inputs = torch.randn(600, 2, generator=generator) * 0.3 + 4 * torch.tensor([[0, 1], [1, -1], [-1, -1]])[labels]
    outcome = outcome_of(splits_of(inputs, labels, classes=("a", "b", "c")), loss, max_epochs=30, patience=30)
    assert (outcome.probabilities["test"].argmax(1) == outcome.labels["test"]).all()


def test_an_outcome_is_complete(blobs):
    outcome = outcome_of(blobs, "f1", seed=3)
    assert outcome.status == "done"
    assert outcome.probabilities["test"].dtype == np.float32
    assert np.array_equal(outcome.labels["val"], blobs.val.labels)
    assert {name: len(values) for name, values in outcome.history.items()} == dict.fromkeys(HISTORY, outcome.epochs)
    best = outcome.history["val_loss"].index(min(outcome.history["val_loss"]))
    assert outcome.best.epoch == best + 1
    assert outcome.best.val_loss == outcome.history["val_loss"][best]
    np.testing.assert_allclose(outcome.probabilities["test"], predicted(outcome, blobs), rtol=1e-5)
    assert outcome.best.val_metric == pytest.approx(1 - scores(outcome, "val")["f1_pos"])
    json.dumps([outcome.history, outcome.best])


def test_the_same_seed_gives_the_same_outcome_without_touching_the_callers_generator(blobs):
    before = torch.get_rng_state()
    first, again, other = (outcome_of(blobs, seed=seed) for seed in (1, 1, 2))
    assert same(first, again)
    assert not close(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_batches_cover_an_epoch_and_differ_between_epochs_and_seeds(blobs):
    population_of_two = population.Population([(Trial(config(), seed), blobs) for seed in (7, 8)], torch.device("cpu"))
    epochs = []
    for epoch in range(2):
        for annealing in population_of_two.annealing:
            annealing.course.epochs = epoch
        epochs += torch.cat([inputs[..., 0] for inputs, *_ in population_of_two.batches()], dim=1)
    everything = blobs.train.inputs[:, 0].sort().values
    assert all(torch.equal(order.sort().values, everything) for order in epochs)
    assert len({tuple(order.tolist()) for order in epochs}) == 4


@pytest.mark.parametrize("name, decoupled", [("AdamW", True), ("Adam", False)])
def test_updates_match_torchs_optimiser_for_each_trial(name, decoupled):
    torch.manual_seed(0)
    settings = [(0.01, 0.1, None), (0.001, 0.0, 0.5), (1.0, 0.0, None), (0.01, 0.1, None)]
    hyper = [Hyper(lr=lr, weight_decay=decay, clip=clip) for lr, decay, clip in settings]
    stack = models.Stack([models.MLP(4, [6], 3) for _ in hyper])
    learned, theirs = stack.weights[:, : stack.learned], []
    rows = {"first": torch.zeros_like(learned), "second": torch.zeros_like(learned), "steps": torch.zeros(4, 1)}
    ours = Adam(stack, {"weights": stack.weights} | rows, hyper, decoupled)
    for row, h in zip(learned, hyper, strict=True):
        weight = torch.nn.Parameter(row.clone())
        theirs.append((weight, getattr(torch.optim, name)([weight], lr=h.lr, weight_decay=h.weight_decay)))
    for step in range(30):
        gradients = torch.randn_like(learned) * 10 ** torch.randn(())
        stack.gradient.copy_(gradients)
        ours.step()
        for (weight, optimizer), gradient, h in zip(theirs, gradients, hyper, strict=True):
            weight.grad = gradient.clone()
            if h.clip:
                torch.nn.utils.clip_grad_norm_([weight], h.clip)
            optimizer.step()
        if step == 15:  # cooling resets one trial's moments
            for moment in rows.values():
                moment[1] = 0
            theirs[1][1].state.clear()
    expected = torch.stack([weight.detach() for weight, _ in theirs])
    torch.testing.assert_close(learned, expected, atol=2e-5, rtol=2e-5)


@pytest.fixture
def scripted(monkeypatch):
    """Scripted validation losses; remembers temperatures, and the weights before and after each epoch."""
    script = SimpleNamespace(losses=[], starts=[], ends=[], temperatures=[])
    batches, measured = population.Population.batches, population.Population.measured

    def watched_batches(self):
        script.starts.append(self.net.weights.clone())
        return batches(self)

    def watched_measured(self, weights):
        script.ends.append(weights.clone())
        return measured(self, weights)

    def scripted_losses(loss, *arguments):
        script.temperatures.append(loss.temperature.tolist())
        return torch.tensor(script.losses.pop(0))

    monkeypatch.setattr(population.Population, "batches", watched_batches)
    monkeypatch.setattr(population.Population, "measured", watched_measured)
    monkeypatch.setattr(population, "validation_loss", scripted_losses)
    return script


def test_each_stage_returns_to_its_best_weights_then_cools_and_stops_after_p_out(blobs, scripted):
    # P_in = 2, P_out = 2. Stage 1 is best at epoch 2, stage 2 at epoch 5; stages 3 and 4 do not improve.
    scripted.losses = [[v] for v in (0.9, 0.5, 0.6, 0.7, 0.4, 0.45, 0.41, 0.40, 0.5, 0.6, 0.4, 0.6, 0.7)]
    annealing = {"T0": 0.2, "r": 0.8, "T_min": 0.01, "patience": 2, "delta": 1e-4}
    outcome = outcome_of(blobs, "f1", schedule="geometric", annealing=annealing, patience=2, max_epochs=99)
    assert scripted.losses == []
    expected = [0.2 * 0.8**k for k, epochs in enumerate((4, 3, 3, 3)) for _ in range(epochs)]
    assert [T for (T,) in scripted.temperatures] == pytest.approx(expected)
    assert outcome.history["temperature"] == pytest.approx(expected)
    assert (outcome.stopped, outcome.epochs, outcome.best.epoch) == ("coolings", 13, 5)
    assert (outcome.best.temperature, outcome.best.val_loss) == pytest.approx((0.2 * 0.8, 0.4))
    for cooled_after, best in ((4, 2), (7, 5), (10, 8)):
        assert torch.equal(scripted.starts[cooled_after], scripted.ends[best - 1])
    assert not torch.equal(scripted.starts[3], scripted.ends[1]), "within a stage training goes on from where it is"
    kept = models.Stack([models.build(outcome.trial.config.model, (5,), 2)]).state_dict(scripted.ends[4][0])
    assert all(torch.equal(weight, kept[name]) for name, weight in outcome.weights.items())


def test_warm_up_trains_like_cross_entropy(blobs):
    warm, plain = (outcome_of(blobs, loss, seed=3, max_epochs=4, warmup=w) for loss, w in (("f1", 3), ("ce", 0)))
    assert warm.history["train_loss"][:3] == plain.history["train_loss"][:3]
    assert warm.history["train_loss"][3] != plain.history["train_loss"][3]
    assert warm.best.epoch == 4


def test_cooling_resets_the_moments_unless_they_are_kept(blobs, scripted):
    scripted.losses = [[0.5, 0.5]] * 6  # one new minimum, then one epoch without: it cools after every second epoch
    rules = [{"T0": 0.2, "r": 0.5, "patience": 2, "keep_optimizer": keep} for keep in (False, True)]
    settings = [config("f1", schedule="geometric", annealing=rule, patience=1, max_epochs=99) for rule in rules]
    train([Trial(one, 0) for one in settings], blobs)
    assert [torch.equal(*scripted.ends[epoch]) for epoch in range(6)] == [True] * 2 + [False] * 4


def test_a_diverging_trial_fails_with_a_reason_and_the_others_continue(blobs):
    settings = [config(hyper={"lr": 0.01}), config(), config(hyper={"lr": 0.002})]
    settings[1] = settings[1].but(hyper=settings[1].hyper.but(lr=1e6))  # beyond what a config allows
    trials = [Trial(setting, seed) for seed, setting in enumerate(settings)]
    good, bad, fine = train(trials, blobs)
    assert (good.status, bad.status, fine.status) == ("done", "failed", "done")
    assert "diverged in epoch" in bad.error
    assert (bad.stopped, bad.probabilities, bad.epochs) == ("diverged", {}, len(bad.history["epoch"]))
    assert close(good, train(trials[:1], blobs)[0])
    assert close(fine, train(trials[2:], blobs)[0])


@pytest.mark.parametrize("loss", ["ce", "f1"])
def test_single_logits_give_two_probabilities(blobs, loss):
    outcome = outcome_of(blobs, loss, {"name": "mlp_btg", "hidden": [32, 16], "outputs": 1})
    np.testing.assert_allclose(outcome.probabilities["test"].sum(1), 1, rtol=1e-6)
    assert scores(outcome)["auroc"] > 0.8


def test_validation_can_be_the_mean_of_batches_as_in_released_code():
    loss = MetricLoss("f1", average="macro")
    logits, labels = torch.randn(2, 50, 2), torch.randint(0, 2, (2, 50))
    expected = torch.stack([loss.per_trial(logits[:, k : k + 20], labels[:, k : k + 20]) for k in (0, 20, 40)]).mean(0)
    torch.testing.assert_close(population.validation_loss(loss, logits, labels, 20), expected)
    torch.testing.assert_close(population.validation_loss(loss, logits, labels, None), loss.per_trial(logits, labels))


def test_graphs_are_judged_pair_by_pair():
    people = torch.randn(200, 4, 4, generator=torch.Generator().manual_seed(0))
    first, second = torch.triu_indices(4, 4, offset=1)
    labels = ((people[:, first, :2] - people[:, second, :2]).norm(dim=-1) < 1.5).long()
    splits, model = splits_of(people, labels, kind="graph"), {"name": "gnn", "hidden": 16, "outputs": 1}
    outcome = outcome_of(splits, "f1_macro", model, hyper={"dropout": 0.0}, max_epochs=15, patience=15)
    assert outcome.probabilities["test"].shape == (40 * 6, 2)
    assert scores(outcome)["f1_macro"] > 0.85


TINY = {"name": "tiny_darknet", "width": 0.1}


def images(n):
    """Images of two classes that differ in brightness."""
    labels = torch.arange(n) % 2
    noise = torch.randint(0, 128, (n, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    return splits_of((noise + 100 * labels[:, None, None, None]).to(torch.uint8), labels, kind="image")


def test_images_train_through_any_module_and_repeat_exactly():
    splits, hyper = images(120), {"batch_size": 16, "dropout": 0.5}
    trials = [Trial(config("ce", TINY | {"width": 0.25}, hyper=hyper, max_epochs=3), seed) for seed in (0, 1)]
    outcomes = train(trials, splits)
    assert all(o.history["train_loss"][-1] < o.history["train_loss"][0] for o in outcomes)
    assert same(outcomes[1], train(trials[1:], splits)[0])
    np.testing.assert_allclose(outcomes[0].probabilities["test"], predicted(outcomes[0], splits), rtol=1e-5)


def test_a_users_module_trains(blobs):
    outcome = outcome_of(blobs, "f1", {"name": "custom", "target": "tests.test_models.OwnNet"})
    assert set(outcome.weights) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}


def test_small_data_keep_their_last_batch_unless_it_is_a_single_row():
    steps = {(256, 256): 1, (256, 200): 2, (256, 128): 2, (256, 100): 2, (257, 256): 1, (1, 256): 1}
    assert {sizes: population.batches_of(*sizes) for sizes in steps} == steps


@pytest.mark.parametrize("left", [1, 0])
def test_a_last_batch_of_one_image_is_left_out(left):
    splits = images(20)
    outcome = outcome_of(splits, "ce", TINY, hyper={"batch_size": len(splits.train.labels) - left}, max_epochs=2)
    assert outcome.status == "done"
    assert {int(v) for k, v in outcome.weights.items() if "num_batches" in k} == {outcome.best.epoch}


def test_images_train_in_mixed_precision_when_asked():
    """bfloat16 has an eight-bit fraction: the loss is near that of float32, but not equal to it."""
    options = {"hyper": {"batch_size": 10}, "max_epochs": 1}
    single, half = (
        outcome_of(images(20), "ce", TINY, precision=name, **options).history["train_loss"][0]
        for name in ("float32", "bfloat16")
    )
    assert half != single
    assert half == pytest.approx(single, abs=0.2)


def test_batch_norm_refuses_batches_of_one_image():
    with pytest.raises(ValueError, match=r"at least 2 samples, got hyper\.batch_size=1"):
        outcome_of(images(20), "ce", TINY, hyper={"batch_size": 1})


def averaged(stack, decays, steps, train):
    """The running mean of the weights over steps that train(stack), and the weights after each."""
    rows = {"weights": stack.weights, "mean": stack.weights.clone(), "mean_steps": torch.zeros(len(decays), 1)}
    average, seen = Average(stack, rows, decays), []
    for _ in range(steps):
        train(stack)
        average.update()
        seen.append(stack.weights.clone())
    return average.mean, seen


def test_the_mean_of_the_weights_is_arithmetic_at_first_then_exponential():
    stack, expected = models.Stack([models.MLP(2, [3], 2) for _ in range(2)]), 0.0
    mean, seen = averaged(stack, [0.75, None], 12, lambda stack: stack.weights.copy_(torch.randn_like(stack.weights)))
    for step, weights in enumerate(seen):
        decay = min(0.75, step / (step + 1))
        expected = decay * expected + (1 - decay) * weights[0]
    torch.testing.assert_close(mean, torch.stack((expected, seen[-1][1])))


def test_batch_norm_statistics_are_averaged_too():
    stack = models.Stack([models.build(ModelSection(**TINY), (3, 16, 16), 2)])
    mean, seen = averaged(stack, [0.9], 4, lambda stack: stack(torch.rand(1, 8, 3, 16, 16), training=True))
    expected = torch.stack(seen).mean(0)
    expected[:, stack.counters] = 4  # the number of batches is counted, not averaged
    torch.testing.assert_close(mean, expected)
    assert not torch.equal(mean[:, stack.learned :], stack.weights[:, stack.learned :])


def test_averaged_weights_are_used_if_they_validate_better(blobs):
    settings = [config(hyper={"average": a, "lr": 0.05}, patience=8, max_epochs=8) for a in (None, 0.95)]
    raw, mean = train([Trial(s, 0) for s in settings], blobs)
    gains = np.subtract(raw.history["val_loss"], mean.history["val_loss"])
    assert gains.min() > -1e-5
    assert gains.max() > 1e-3
    np.testing.assert_allclose(mean.probabilities["test"], predicted(mean, blobs), rtol=1e-5)


class Remembering(CrossEntropy):
    """Cross-entropy weighted by running class counts, one state per trial; stops by the metric."""

    stops_by = "metric"

    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(0)

    def value(self, logits, labels, weights):
        if logits.requires_grad:
            now = labels.float().mean(-1)
            self.seen = 0.9 * self.seen + 0.1 * now.detach() if self.seen.numel() else now.detach()
        return super().value(logits, labels, weights) * (1 + (self.seen if self.seen.numel() else 0))

    def keep(self, rows):
        self.seen = self.seen[rows]

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state.clone()


def stopped_and_resumed(trials, splits, folder, saves):
    """The outcomes of a training that was stopped right after a checkpoint and resumed."""
    ended_at_checkpoint(saves, KeyboardInterrupt(), lambda: train(trials, splits, checkpoint=folder))
    return train(trials, splits, checkpoint=folder)


def varied(loss, points, schedule="none", **protocol):
    """Trials of seeds 0, 1, … with these hyperparameters; `r` is of the annealing."""
    return [
        Trial(
            config(
                loss,
                schedule=schedule,
                hyper={name: value for name, value in point.items() if name != "r"},
                annealing={"r": point.get("r", 0.5), "patience": 2, "T_min": 0.05},
                **{"patience": 2, "max_epochs": 12, **protocol},
            ),
            seed,
        )
        for seed, point in enumerate(points)
    ]


HYPER = [{"lr": 0.01}, {"lr": 0.001, "dropout": 0.5, "r": 0.8}, {"weight_decay": 0.3, "r": 0.9}, {"clip": 0.1},
         {"dropout": 0.0, "r": 0.8}]  # fmt: skip
AVERAGES = [{"average": average} for average in (None, 0.9)] * 5
POPULATIONS = {
    "a temperature, other hyperparameters": varied("f1", HYPER, "geometric", max_epochs=40),
    "averages": varied("ce", [{"average": a, "lr": 0.05} for a in (None, 0.9, 0.99)], patience=3, max_epochs=25),
    "a loss with a state": varied("state", [{}] * 4),
    "counts of training batches": varied("f1_ce", AVERAGES),
    "counts on validation": varied("mcc_ce", AVERAGES),
    "warm-up": varied("f1", [{"r": 0.5}, {"r": 0.8, "average": 0.9}, {"r": 0.9}], "geometric", warmup=4, max_epochs=25),
    "splits of their own": varied("ce", [{}] * 3, max_epochs=25),
}


@pytest.mark.parametrize("name", POPULATIONS)
def test_a_trial_is_the_same_alone_in_a_population_and_after_a_resume(name, blobs, tmp_path):
    trials, splits = POPULATIONS[name], [blobs] * len(POPULATIONS[name])
    if name == "splits of their own":
        parts = (blobs.train, blobs.val, blobs.test)
        everything = torch.cat([p.inputs for p in parts]), torch.cat([p.labels for p in parts])
        splits = [splits_of(*everything, seed) for seed in (1, 2, 1)]
    company = train(trials, splits)
    left = sorted(outcome.epochs for outcome in company)
    assert left[0] < left[-1], "trials should leave at different times, or nothing is shown"
    for trial, its_splits, outcome in zip(trials, splits, company, strict=True):
        assert outcome.trial is trial
        assert np.array_equal(outcome.labels["test"], its_splits.test.labels)
        assert close(outcome, train([trial], its_splits)[0])
    resumed = stopped_and_resumed(trials, splits, tmp_path, saves=left[len(left) // 2 - 1])
    assert all(same(a, b) for a, b in zip(company, resumed, strict=True))


def test_a_loss_may_stop_training_by_the_metric(blobs):
    outcome = outcome_of(blobs, "state", seed=1, patience=12, max_epochs=12)
    lowest = min(outcome.history["val_metric"])
    assert outcome.best.val_metric == lowest
    assert outcome.history["val_metric"][outcome.best.epoch - 1] == lowest


def undefined(c):
    """A user's metric that is always 0/0."""
    return c.diagonal.sum(-1) * torch.nan


def never(c):
    """A user's metric that is never finite."""
    return c.diagonal.sum(-1) * 0 - torch.inf


@pytest.mark.parametrize("metric", [undefined, never])
def test_a_trial_never_ends_with_its_initial_weights(blobs, monkeypatch, metric):
    loss = {"name": "own", "_target_": "east.losses.MetricCrossEntropy", "metric": f"{__name__}.{metric.__name__}"}
    monkeypatch.setitem(LOSSES, "own", loss)
    trial = Trial(config("own"), 0)
    (outcome,) = train([trial], blobs)
    if metric is undefined:  # it counts as 0, and cross-entropy breaks the ties
        assert (outcome.status, outcome.best.val_metric) == ("done", 1.0)
        assert outcome.best.epoch == 1 + np.argmin(outcome.history["val_loss"])
        initial = population.initial(trial, blobs).state_dict()
        assert not any(torch.equal(tensor, outcome.weights[name]) for name, tensor in initial.items())
    else:
        assert outcome.status == "failed"
        assert not outcome.weights
        assert outcome.error == "no epoch was kept: its metric on validation was never a finite number"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError(), FileNotFoundError()])
def test_a_checkpoint_that_cannot_be_read_for_now_is_kept(blobs, tmp_path, monkeypatch, error):
    """One that another command has deleted meanwhile is not missed."""

    def fail(_, file):
        raise error if file.exists() else FileNotFoundError

    trials = [Trial(config(max_epochs=4), 0)]
    monkeypatch.setattr(population.Population, "load", fail)
    if isinstance(error, FileNotFoundError):
        assert same(*stopped_and_resumed(trials, blobs, tmp_path, saves=2), *train(trials, blobs))
    else:
        with pytest.raises(type(error)):
            stopped_and_resumed(trials, blobs, tmp_path, saves=2)
        assert [file.suffix for file in tmp_path.iterdir()] == [".safetensors"]


def test_a_checkpoint_is_used_only_by_its_own_trials(blobs):
    members = [(Trial(config(), 0), blobs)]
    assert population.identity(members) == population.identity([(Trial(config(), 0), blobs)])
    others = [(Trial(config(), 1), blobs), (Trial(config(patience=6), 0), blobs)]
    others.append((Trial(config(), 0), dataclasses.replace(blobs, index_hash="else")))
    assert len({population.identity(members), *(population.identity([m]) for m in others)}) == 4


def test_a_population_too_large_for_memory_is_halved(blobs, monkeypatch):
    sizes, original = [], engine.train_population

    def small_memory(members, *arguments):
        sizes.append(len(members))
        if len(members) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(members, *arguments)

    monkeypatch.setattr(engine, "train_population", small_memory)
    trials = [Trial(config(max_epochs=1), seed) for seed in range(5)]
    outcomes = train(trials, blobs)
    assert [o.trial.seed for o in outcomes] == [0, 1, 2, 3, 4]
    assert sizes == [5, 2, 3, 1, 2]


def sizes(*changes):
    """How many trials with these changes of the config train together."""
    members = [(Trial(config(**change), seed), toy()) for seed, change in enumerate(changes)]
    return [len(group) for group in engine.populations(members, torch.device("cpu"))]


@pytest.mark.parametrize(
    "hidden, batch, expected",
    [([512, 256, 128], 1024, [1] * 10), ([512, 256, 128], 128, [5, 5]), ([512, 256, 128], 256, [4, 4, 2]),
     ([32, 16], 1024, [10])],
)  # fmt: skip
def test_wide_nets_train_in_small_populations_on_a_cpu(hidden, batch, expected):
    assert sizes(*[{"model": {"name": "mlp", "hidden": hidden}, "hyper": {"batch_size": batch}}] * 10) == expected


def test_trials_of_other_settings_train_in_a_population_of_their_own():
    assert sizes({}, {}, {"hyper": {"batch_size": 64}}, {"loss": "f1"}, {"patience": 6}) == [2, 1, 1, 1]


def test_tensorboard_gets_every_epoch_of_trials_that_differ_only_in_cooling(blobs, tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trials = [Trial(config("f1", schedule="geometric", annealing={"r": r}, max_epochs=3), 0) for r in (0.5, 0.8)]
    outcomes = train(trials, blobs, start_logger=partial(loggers.start, "tensorboard", tmp_path))
    folders = (tmp_path / "tensorboard").iterdir()
    logged = [EventAccumulator(str(folder)).Reload().Scalars("val_loss") for folder in folders]
    expected = sorted(outcome.history["val_loss"] for outcome in outcomes)
    assert sorted([event.value for event in events] for events in logged) == [pytest.approx(v) for v in expected]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_covers_the_network_and_the_loss(blobs, monkeypatch, backend):
    """By the operations of the graphs that the compiler gets."""
    captured, compile, run = [], torch.compile, torch._dynamo.lookup_backend(backend)

    def watched(graph, inputs):
        captured.append(graph.print_readable(print_output=False))
        return run(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(compile, backend=watched))
    trials = [Trial(config(hyper={"dropout": 0.0}, max_epochs=2), seed) for seed in (0, 1)]
    for plain, compiled in zip(train(trials, blobs), train(trials, blobs, compile=True), strict=True):
        assert close(plain, compiled)
    assert any("baddbmm" in graph for graph in captured)
    assert any("cross_entropy" in graph or "softmax" in graph for graph in captured)


@pytest.mark.slow
def test_cross_entropy_on_mammography_scores_as_published():
    paper = {"name": "mlp", "hidden": [512, 256, 128]}
    settings = config("ce", paper, hyper={"lr": 1e-3, "batch_size": 256}, patience=10, max_epochs=100)
    for outcome in train([Trial(settings, seed) for seed in range(2)], split(real("mammography"))):
        assert 0.62 <= scores(outcome)["f1_pos"] <= 0.80


@pytest.mark.parametrize("loss", ["ce", "f1", "f1_ce"])
def test_integer_weights_repeat_rows(loss):
    """In training and in early stopping, if every step sees all rows."""
    splits, config_of = toy(), config(loss, hyper={"batch_size": 10_000, "dropout": 0.0}, max_epochs=12)
    generator = torch.Generator().manual_seed(0)

    def parts(change):
        return dataclasses.replace(splits, train=change(splits.train), val=change(splits.val))

    times = {len(part): torch.randint(0, 4, (len(part),), generator=generator) for part in (splits.train, splits.val)}
    heavy = parts(lambda part: dataclasses.replace(part, weights=times[len(part)].float()))
    long = parts(lambda part: Part(*(t.repeat_interleave(times[len(part)], 0) for t in (part.inputs, part.labels,
                                                                                       part.index))))  # fmt: skip
    (weighted,), (repeated,), (plain,) = (
        train([Trial(config_of, 1)], some, device="cpu", progress=False) for some in (heavy, long, splits)
    )
    for name in ("train_loss", "val_loss", "val_metric"):
        np.testing.assert_allclose(weighted.history[name], repeated.history[name], atol=1e-5)
    assert abs(weighted.history["val_loss"][-1] - plain.history["val_loss"][-1]) > 1e-3
