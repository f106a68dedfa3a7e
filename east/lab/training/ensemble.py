"""Ensembles: networks that differ in fold and seed, other classifiers cross-fitted beside them, stacked by log-loss.

The training and validation rows of a split are pooled and divided into folds. Each member trains on all folds but one,
which it is stopped on, so every row has probabilities from members that did not train on it: the row is out of fold.
Components are mixed by the weights with the lowest out-of-fold log-loss. A rule needs no other rows; new rows get the
mixture of the mean probabilities of all members. A forest of independent rows is fitted once: its trees that did not
draw a row judge it out of bag.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import entr
from sklearn.ensemble._forest import ForestClassifier
from torch import Tensor, nn

from east.choices import ConfigError, choose
from east.confusion import Confusion
from east.lab import models
from east.lab.data.common import Part, Splits, digest, fingerprint
from east.lab.settings.settings import EnsembleSection, LossSection, Split
from east.lab.training import crossfit, engine, evaluation, objective
from east.lab.training.classical import Estimator, Fitted
from east.lab.training.crossfit import Fold
from east.lab.training.population import Outcome, Trial, stream
from east.lab.training.scores import Best, Matrix
from east.losses.inputs import two_or_more

NETWORKS = "networks"
COMPONENTS: dict[str, dict[str, Any]] = {
    "constant": {"target": "sklearn.dummy.DummyClassifier"},
    "rf": {"target": "sklearn.ensemble.RandomForestClassifier", "n_estimators": 300, "min_samples_leaf": 2},
    "extratrees": {"target": "sklearn.ensemble.ExtraTreesClassifier", "n_estimators": 300, "bootstrap": True},
    "boosting": {"target": "sklearn.ensemble.HistGradientBoostingClassifier"},
    "logistic": {"target": "sklearn.linear_model.LogisticRegression", "max_iter": 1000, "n_jobs": None},
}
NEGLIGIBLE = 1e-6  # the predictors of a component of at most this weight are not kept
OUT_OF_BAG = math.exp(-1)  # the share of a forest's trees that did not draw a given row
REPEATED = 0.01  # rows count as independent if at most this share of them repeats another one
COLDEST, HOTTEST = 1.0, 100.0  # temperatures that smooth out-of-fold probabilities


class UntrainableError(RuntimeError):
    """All networks of an ensemble have diverged."""


class ScaledNetwork(nn.Module):
    """A network with a scaling of its own, as a predictor: inputs [n, ...] to probabilities [n, d]."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Tensor, std: Tensor):
        super().__init__()
        self.net = net
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, inputs: Tensor) -> Tensor:
        return two_or_more(self.net((inputs - self.mean) / self.std)).softmax(-1)


class Mixture(nn.Module):
    """A weighted mean of the probabilities [n, d] of several predictors, networks first; their weights sum to 1."""

    weights: Tensor

    def __init__(self, shares: Mapping[nn.Module, float]):
        super().__init__()
        self.predictors = nn.ModuleList(sorted(shares, key=lambda predictor: isinstance(predictor, Fitted)))
        self.register_buffer("weights", torch.tensor([shares[predictor] for predictor in self.predictors]).float())

    @property
    def networks(self) -> list[Any]:
        """The networks among the predictors, without their scaling."""
        return [predictor.net for predictor in self.predictors if isinstance(predictor, ScaledNetwork)]

    def forward(self, inputs: Tensor) -> Tensor:
        each = zip(self.weights, self.predictors, strict=True)
        return torch.stack([weight * predictor(inputs).to(weight) for weight, predictor in each]).sum(0)


@dataclass(frozen=True)
class Component:
    """One kind of classifier, cross-fitted: its predictors and their mean probabilities.

    held_out [n, d]: of the pool's rows, by predictors that did not train on them; NaN for rows in no fold.
    new [m, d]: of the test rows, by all predictors. outcomes: of its networks. temperature: that smoothed `held_out`.
    """

    held_out: np.ndarray
    new: np.ndarray
    predictors: Sequence[nn.Module]
    outcomes: Sequence[Outcome] = ()
    temperature: float = 1.0


def mixture(components: Mapping[str, Component], weights: Mapping[str, float]) -> Mixture:
    """The predictor of new rows: the mean over each component's predictors, mixed by the components' weights."""
    return Mixture({
        predictor: weight / len(components[name].predictors)
        for name, weight in weights.items()
        if weight > NEGLIGIBLE
        for predictor in components[name].predictors
    }).eval()  # fmt: skip


def pooled(splits: Splits) -> Part:
    """The training and validation rows as one part."""
    pairs = zip(vars(splits.train).values(), vars(splits.val).values(), strict=True)
    joined: list[Any] = [None if train is None else torch.cat((train, val)) for train, val in pairs]
    return Part(*joined)


def divided(section: EnsembleSection, pool: Part, seed: int) -> list[Fold]:
    """The rows of the pool that each fold trains on, and those that it holds out.

    Rows of a group stay together. Rows with a time are held out in blocks, the newer half of them, by members that
    trained on older rows.
    """
    labels, groups = pool.labels.numpy(), None if pool.groups is None else pool.groups.numpy()
    if pool.time is None:
        return crossfit.folds_of(section.folds, pool.inputs, labels, seed, groups)
    when = pool.time.numpy()
    starts = np.quantile(when, np.linspace(0.5, 1, section.folds, endpoint=False), method="higher")
    starts = np.unique(starts.clip(when[when > when.min()].min()))
    ends = [*starts[1:], np.inf]
    held = [np.flatnonzero((start <= when) & (when < end)) for start, end in zip(starts, ends, strict=True)]
    return [(np.flatnonzero(when < start), rows) for start, rows in zip(starts, held, strict=True)]


def member_splits(splits: Splits, pool: Part, fold: Fold, unseen: np.ndarray | None = None) -> Splits:
    """The splits of one member: trained and scaled on the rows of a fold's complement, stopped on the fold.

    unseen: bool [n], rows of the pool that early stopping ignores, unless a fold has no others.
    `mean` and `std` of a table are those of the pool's inputs, which the split has scaled already.
    """
    table, mean, std = splits.kind == "table", splits.mean, splits.std
    if table:
        values = pool.inputs[fold[0]].double()
        std, mean = torch.std_mean(values, 0, correction=0)
        std = torch.where(values.amax(0) > values.amin(0), std, 1.0)

    def scaled(part: Part) -> Part:
        return replace(part, inputs=((part.inputs - mean) / std).float()) if table else part

    def at(rows: np.ndarray) -> Part:
        values: list[Any] = [None if v is None else v[rows] for v in vars(pool).values()]
        return Part(*values)

    train, val = map(at, fold)
    names = [splits.index_hash, digest(train.index), digest(val.index)]
    if unseen is not None:
        seen = torch.from_numpy(~unseen[fold[1]] | unseen[fold[1]].all()).float()
        val = replace(val, weights=seen if val.weights is None else seen * val.weights)
        names.append(digest(seen))
    parts = replace(splits, train=scaled(train), val=scaled(val), test=scaled(splits.test))
    return replace(parts, index_hash=fingerprint(names), mean=mean, std=std)


def cross_fit_networks(
    trial: Trial,
    splits: Splits,
    folds: Sequence[Fold],
    count: int,
    smooth: bool = False,
    unseen: np.ndarray | None = None,
    **options: Any,
) -> Component:
    """Train `count` networks, in turn for each fold, as members of populations.

    smooth: see `smoothing`. unseen: see `member_splits`. options: see `engine.train`.
    """
    pool, config = pooled(splits), trial.config.but(ensemble=EnsembleSection())
    members = []
    for number in range(count):
        fold = folds[number % len(folds)]
        member = Trial(config, stream(trial.seed, "member", number) % 2**32, trial.stage)
        members.append((member, member_splits(splits, pool, fold, unseen), fold[1]))
    members.sort(key=lambda member: len(member[1].train))  # members with as many rows train together
    trials, each_splits, held = zip(*members, strict=True)
    outcomes = engine.train(trials, each_splits, **options)
    trained = [done for done in zip(each_splits, held, outcomes, strict=True) if done[2].status == "done"]
    if not trained:
        raise UntrainableError(f"no member could be trained: {outcomes[0].error}")
    judged = [(rows, outcome.probabilities["val"]) for _, rows, outcome in trained]
    held_out = crossfit.out_of_fold(judged, len(pool), len(splits.classes))
    temperature = smoothing(held_out, np.concatenate([p for _, p in judged]), len(trained)) if smooth else COLDEST
    return Component(
        held_out=tempered(held_out, temperature),
        new=np.mean([outcome.probabilities["test"] for *_, outcome in trained], 0),
        predictors=[predictor(its_splits, outcome) for its_splits, _, outcome in trained],
        outcomes=[outcome for *_, outcome in trained],
        temperature=temperature,
    )


def predictor(splits: Splits, outcome: Outcome) -> ScaledNetwork:
    """The trained network of a member with its scaling; that of images is shared by all members."""
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, then replaced
        model = models.untrained(outcome.trial.config.model)
        net = models.build(model, splits.train.inputs.shape[1:], len(splits.classes))
    net.load_state_dict(outcome.weights)
    own = splits.kind == "table"
    mean, std = (splits.mean.float(), splits.std.float()) if own else (torch.zeros(1), torch.ones(1))
    return ScaledNetwork(net.eval(), mean, std)


def smoothing(means: np.ndarray, each: np.ndarray, count: int) -> float:
    """The temperature at which means of few members are as smooth as means of all.

    means [n, d]: out of fold, NaN for rows in no fold. each [n m, d]: the probabilities that they average. A mean of m
    members has the entropy a - c/m, to first order. It is known for single members and for `means`, which gives c and
    the entropy of a mean of all, which are `count`.
    """
    means = means[~np.isnan(means).any(1)]
    averaged = len(each) / len(means)
    if averaged <= 1:
        return COLDEST
    single, known = (entr(p).sum(1).mean(dtype=float) for p in (each, means))
    target = known + (known - single) / (1 - 1 / averaged) * (1 / averaged - 1 / count)

    def excess(temperature: float) -> float:
        return entr(tempered(means, temperature)).sum(1).mean() - target

    return brentq(excess, COLDEST, HOTTEST) if excess(COLDEST) < 0 < excess(HOTTEST) else COLDEST


def tempered(p: np.ndarray, temperature: float) -> np.ndarray:
    """Probabilities [n, d] to the power of 1 / temperature, normalised."""
    if temperature == 1:
        return p
    powers = p ** (1 / temperature)
    return powers / powers.sum(1, keepdims=True)


def independent(pool: Part) -> bool:
    """True if a row says nothing about another: no groups, no time, and hardly any repeated rows."""
    if pool.groups is not None or pool.time is not None:
        return False
    return 1 - len(np.unique(pool.inputs.flatten(1).numpy(), axis=0)) / len(pool) <= REPEATED


def out_of_bag(estimator: Estimator, independent: bool) -> bool:
    """True if a single forest judges the rows, each by the trees that did not draw it."""
    forest = estimator.unfitted(0)
    return independent and isinstance(forest, ForestClassifier) and forest.bootstrap


def cross_fit_estimator(
    estimator: Estimator, splits: Splits, folds: Sequence[Fold], independent: bool, seed: int
) -> Component:
    """Fit a classifier for each fold; a forest of independent rows once.

    A forest for each fold has as many trees as judge a row out of bag.
    """
    pool, d = pooled(splits), len(splits.classes)
    inputs, labels, classes = pool.inputs.numpy(), pool.labels.numpy(), np.arange(d)
    model = estimator.unfitted(seed)
    if out_of_bag(estimator, independent):
        forest = model.set_params(oob_score=True).fit(inputs, labels)
        fitted, held_out = [forest], crossfit.spread(forest.oob_decision_function_, forest.classes_, classes)
        held_out = np.where(held_out.any(1, keepdims=True), held_out, np.nan)  # zeros: every tree drew the row
    else:
        if isinstance(model, ForestClassifier) and model.bootstrap:
            model.set_params(n_estimators=math.ceil(OUT_OF_BAG * model.n_estimators))
        fitted, held_out = crossfit.cross_fit(model, inputs, labels, classes, folds, {})
    predictors = [Fitted(model, d, torch.from_numpy(model.classes_)) for model in fitted]
    new = np.mean([p.probabilities(splits.test.inputs.numpy()).numpy() for p in predictors], 0)
    return Component(held_out, new, predictors)


def estimator_named(component: str) -> Estimator:
    """The classifier of a component; ConfigError if there is none of this name."""
    if "." not in component:
        choose("component", component, [NETWORKS, *COMPONENTS])
    return Estimator(pca=None, **COMPONENTS.get(component, {"target": component}))


def check_ensemble(section: EnsembleSection, loss: LossSection, kind: str, split: Split) -> None:
    """ConfigError if data of this kind cannot have such an ensemble, or not with this split."""
    if split.folds is not None:
        raise ConfigError(f"split.folds={split.folds}: ensemble={section.name} judges all rows out of its own folds; "
                          "leave it out, and set ensemble.folds for their number")  # fmt: skip
    others = [component for component in section.components if component != NETWORKS]
    for component in others:
        estimator_named(component)
    if loss.classical:
        raise ConfigError(f"ensemble={section.name} needs a loss for its networks, such as loss=ce, got {loss.name}; "
                          "name other classifiers in ensemble.components")  # fmt: skip
    if kind == "graph" or (others and kind != "table"):
        raise ConfigError(f"ensemble={section.name}: {', '.join(others) or NETWORKS} cannot take {kind}s")


def components_of(trial: Trial, splits: Splits, folds: Sequence[Fold], **options: Any) -> dict[str, Component]:
    """The components of a trial's ensemble by name. options: see `engine.train`."""
    section = trial.config.ensemble
    others = [name for name in section.components if name != NETWORKS]
    apart = bool(others) and independent(pooled(splits))
    components = {
        name: cross_fit_estimator(estimator_named(name), splits, folds, apart, stream(trial.seed, name) % 2**32)
        for name in others
    }
    if NETWORKS in section.components:  # last, because only they leave checkpoints
        components[NETWORKS] = cross_fit_networks(trial, splits, folds, section.members, section.smooth, **options)
    return components


def fit_best(trial: Trial, splits: Splits, **options: Any) -> Outcome:
    """Train a network at every point of the ensemble's grid, on the trial's own split, and keep the best on validation.

    Unlike a search before the trials, this one never sees a row that tests another trial.
    """
    config, points = trial.config.but(ensemble=EnsembleSection()), trial.config.ensemble.points
    trials = [Trial(config.with_grid_point(point), trial.seed, trial.stage) for point in points]
    outcomes = engine.train(trials, splits, **options)
    names = [f"lr {point['lr']:g}, dropout {point['dropout']:g}" for point in points]
    trained = {name: o for name, o in zip(names, outcomes, strict=True) if o.status == "done"}
    if not trained:
        return replace(outcomes[0], trial=trial)
    best = min(trained.values(), key=lambda outcome: (outcome.best.val_metric, outcome.best.val_loss))
    return replace(
        best,
        trial=trial,
        seconds=sum(outcome.seconds for outcome in outcomes),
        ensemble={
            "folds": 1,
            "weights": {name: float(outcome is best) for name, outcome in zip(names, outcomes, strict=True)},
            "epochs": [outcome.epochs for outcome in outcomes],
            "temperature": 1.0,
            "confusion": {n: by_argmax(o.probabilities["val"], splits.val.labels) for n, o in trained.items()},
        },
    )


def by_argmax(p: np.ndarray, labels: Tensor) -> Matrix:
    """The confusion matrix of the most probable classes."""
    return evaluation.matrix(torch.from_numpy(p.argmax(1)), labels, p.shape[1])


def fit(trial: Trial, splits: Splits, **options: Any) -> Outcome:
    """Train the ensemble of a trial. `val` of the outcome are the pooled rows out of fold, `test` the new ones.

    `best.val_loss` is the log-loss out of fold, `best.val_metric` 1 - M of argmax there.
    """
    if trial.config.ensemble.name == "best":
        return fit_best(trial, splits, **options)
    started, pool = time.perf_counter(), pooled(splits)
    folds = divided(trial.config.ensemble, pool, trial.seed)
    try:
        components = components_of(trial, splits, folds, **options)
    except UntrainableError as error:
        return Outcome(trial, "failed", str(error), "diverged", seconds=time.perf_counter() - started)
    held_out = np.stack([component.held_out for component in components.values()])
    mixing, mixed, used = crossfit.mixture_of(held_out, pool.labels.numpy())
    weights, truth = dict(zip(components, mixing.tolist(), strict=True)), pool.labels[used]
    loss = objective.build_loss(trial.config.loss, splits.classes, pool.labels, splits.positive)
    counts = Confusion.from_predictions(torch.from_numpy(mixed[used].argmax(1)), truth, len(splits.classes))
    val_metric = 1 - float(evaluation.validation_metric(loss, splits.positive)(counts))
    log_loss = float(-np.log(mixed[used, truth].clip(crossfit.LEAST)).mean())
    new = np.tensordot(mixing, np.stack([component.new for component in components.values()]), 1)
    epochs = [outcome.epochs for component in components.values() for outcome in component.outcomes]
    return Outcome(
        trial,
        epochs=sum(epochs),
        seconds=time.perf_counter() - started,
        best=Best(val_loss=log_loss, val_metric=val_metric),
        probabilities={"val": mixed[used].astype(np.float32), "test": new.astype(np.float32)},
        labels={"val": truth.numpy(), "test": splits.test.labels.numpy()},
        fitted=mixture(components, weights),
        ensemble={
            "folds": len(folds),
            "weights": weights,
            "epochs": epochs,
            "temperature": max(component.temperature for component in components.values()),
            "confusion": {name: by_argmax(c.held_out[used], truth) for name, c in components.items()},
        },
    )
