"""Ensembles: networks that differ in fold and seed, other classifiers cross-fitted beside them, stacked by log-loss.

The training and validation rows of a split are pooled and divided into folds. Each member trains on all folds but one,
which it is stopped on, so every row has probabilities from members that did not train on it: the row is out of fold.
Components are mixed by the weights with the lowest out-of-fold log-loss. A rule needs no other rows; new rows get the
mixture of the mean probabilities of all members.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from east.confusion import Confusion
from east.lab.data.common import Part, Splits, digest, fingerprint
from east.lab.settings.sections import EnsembleSection
from east.lab.training import crossfit, engine, evaluation, objective
from east.lab.training.population import Outcome, Trial, stream
from east.lab.training.scores import Best

Fold = tuple[np.ndarray, np.ndarray]  # rows of the pool to train on, rows held out


def pooled(splits: Splits) -> Part:
    """The training and validation rows as one part."""
    parts = (splits.train, splits.val)

    def joined(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    inputs, labels, index = (torch.cat([getattr(p, n) for p in parts]) for n in ("inputs", "labels", "index"))
    return Part(inputs, labels, index, groups=joined("groups"))


def member_splits(splits: Splits, pool: Part, fold: Fold) -> Splits:
    """The splits of one member: trained and scaled on the rows of a fold's complement, stopped on the fold."""
    train, held = (torch.from_numpy(rows) for rows in fold)
    mean, std = torch.zeros(()), torch.ones(())
    if splits.kind == "table":
        values = pool.inputs[train].double()
        std, mean = torch.std_mean(values, 0, correction=0)
        std = torch.where(values.amax(0) > values.amin(0), std, 1.0)

    def part(of: Part, rows: Tensor) -> Part:
        inputs = of.inputs[rows]
        scaled = ((inputs - mean) / std).float() if splits.kind == "table" else inputs
        return Part(scaled, of.labels[rows], of.index[rows], None if of.weights is None else of.weights[rows])

    parts = part(pool, train), part(pool, held), part(splits.test, torch.arange(len(splits.test)))
    names = [splits.index_hash, *(digest(of.index) for of in parts[:2])]
    return replace(splits, train=parts[0], val=parts[1], test=parts[2], index_hash=fingerprint(names))


@dataclass(frozen=True)
class CrossFitted:
    """Probabilities of one component: `held_out` [n, d] of the pool's rows, NaN for rows in no fold; `new` [m, d]."""

    held_out: np.ndarray
    new: np.ndarray
    outcomes: tuple[Outcome, ...] = ()


def cross_fit_networks(trial: Trial, splits: Splits, folds: Sequence[Fold], seeds: int, **options: Any) -> CrossFitted:
    """Train `seeds` networks per fold as members of populations; a row's probabilities are a mean over members."""
    pool = pooled(splits)
    config = trial.config.but(ensemble=EnsembleSection())
    members = []
    for number, fold in enumerate([fold for fold in folds for _ in range(seeds)]):
        seed = stream(trial.seed, "member", number) % 2**32
        members.append((Trial(config, seed, trial.stage), member_splits(splits, pool, fold), fold[1]))
    members.sort(key=lambda member: len(member[1].train))  # members with as many rows train together
    outcomes = engine.train([m[0] for m in members], [m[1] for m in members], **options)
    d = len(splits.classes)
    total, times, new = np.zeros((len(pool), d)), np.zeros((len(pool), 1)), []
    for (_, _, held), outcome in zip(members, outcomes, strict=True):
        if outcome.status == "done":
            total[held] += outcome.probabilities["val"]
            times[held] += 1
            new.append(outcome.probabilities["test"])
    if not new:
        raise RuntimeError(f"no member could be trained: {outcomes[0].error}")
    with np.errstate(invalid="ignore"):
        return CrossFitted(total / times, np.mean(new, 0), tuple(outcomes))


def fit(trial: Trial, splits: Splits, **options: Any) -> Outcome:
    """Train the ensemble of a trial. `val` of the outcome are the pooled rows out of fold, `test` the new ones.

    `best.val_loss` is the log-loss out of fold, `best.val_metric` 1 - M of argmax there.
    """
    started, section, pool = time.perf_counter(), trial.config.ensemble, pooled(splits)
    labels, groups = pool.labels.numpy(), None if pool.groups is None else pool.groups.numpy()
    folds = crossfit.folds_of(section.folds, pool.inputs, labels, trial.seed, groups)
    fitted = [cross_fit_networks(trial, splits, folds, section.repeats, **options)]
    covered = np.flatnonzero(~np.isnan([component.held_out[:, 0] for component in fitted]).any(0))
    held_out, truth = np.stack([component.held_out[covered] for component in fitted]), labels[covered]
    of_truth = held_out[:, np.arange(len(truth)), truth]
    weights = crossfit.mixture_weights(of_truth)
    probabilities = {
        "val": np.tensordot(weights, held_out, 1).astype(np.float32),
        "test": np.tensordot(weights, np.stack([component.new for component in fitted]), 1).astype(np.float32),
    }
    outcomes = [outcome for component in fitted for outcome in component.outcomes]
    loss = objective.build_loss(trial.config.loss, splits.classes, pool.labels, splits.positive)
    predicted = torch.from_numpy(probabilities["val"].argmax(1))
    confusion = Confusion.from_predictions(predicted, torch.from_numpy(truth), len(splits.classes))
    metric = float(evaluation.validation_metric(loss, splits.positive)(confusion))
    log_loss = -np.log((weights @ of_truth).clip(crossfit.LEAST)).mean()
    return Outcome(
        trial=trial,
        status="done",
        error=None,
        stopped="fitted",
        epochs=sum(outcome.epochs for outcome in outcomes),
        seconds=time.perf_counter() - started,
        best=Best(val_loss=float(log_loss), val_metric=1 - metric),
        history={},
        probabilities=probabilities,
        labels={"val": truth, "test": splits.test.labels.numpy()},
    )
