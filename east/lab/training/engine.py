"""The training engine: it trains a population of trials at once; a single trial is a population of one.

The trials of a population share data, network, loss, batch size and protocol, and are stacked in a leading dimension P.
They may differ in seed, split, learning rate, dropout, weight decay and annealing. All randomness of a trial is a
function of its own seed, without generator state: a trial sees the same weights, batches and masks alone or with
others, before or after a resume. `train_population` is the whole method.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from east import losses
from east.confusion import Confusion
from east.decisions import defined
from east.lab import models
from east.lab.data.common import Splits
from east.lab.files import set_aside
from east.lab.models.mlp import Dropout, Masks
from east.lab.settings.sections import Science
from east.lab.training.annealing import Annealing
from east.lab.training.averaging import Average
from east.lab.training.devices import pick_device
from east.lab.training.evaluation import metric_of, validation_metric
from east.lab.training.objective import build_loss
from east.lab.training.optimizer import Adam
from east.lab.training.population import (
    HISTORY,
    LossState,
    Member,
    Outcome,
    Population,
    Rows,
    Trial,
    identity,
    initial,
    stream,
)
from east.lab.training.progress import Checkpoints, ProgressBar, TensorBoard
from east.losses.inputs import two_or_more

CACHE_BYTES = 18 << 20  # what a step of a population may touch without falling out of the last-level cache
CHECKPOINT_SECONDS = 60.0
EVALUATION_ROWS = {"cpu": 256}  # evaluated at once, at least; 1024 on other devices, where the cache matters less


def train(trials: Sequence[Trial], splits: Splits | Sequence[Splits], **options: Any) -> list[Outcome]:
    """Train the trials, return their outcomes in order, and delete the checkpoints. Options: see `train_in_turn`."""
    populations = list(train_in_turn(trials, splits, **options))
    for _, file in populations:
        if file:
            file.unlink(missing_ok=True)
    return [outcome for outcomes, _ in populations for outcome in outcomes]


def train_in_turn(
    trials: Sequence[Trial],
    splits: Splits | Sequence[Splits],
    *,
    device: str = "auto",
    checkpoint: Path | None = None,
    progress: bool | Path | Callable[[str], None] = True,
    tensorboard: Path | None = None,
    compile: bool = False,
) -> Iterator[tuple[list[Outcome], Path | None]]:
    """Train one population after the other; yield its outcomes and the checkpoint to delete once they are saved.

    trials: must share dataset, model, loss, batch size and protocol. splits: one for all trials, or one each.
    checkpoint: a folder; a checkpoint of exactly these trials is resumed.
    """
    trials = list(trials)
    each = [splits] * len(trials) if isinstance(splits, Splits) else list(splits)
    check(trials, each)
    target = pick_device(device)
    waiting = populations(list(zip(trials, each, strict=True)), target)
    while waiting:
        members = waiting.pop(0)
        file = Path(checkpoint) / f"{identity(members)}.safetensors" if checkpoint else None
        try:
            outcomes = train_population(members, target, file, progress, tensorboard, compile)
        except torch.OutOfMemoryError:
            if len(members) == 1:
                raise
            half = len(members) // 2
            waiting[:0] = [members[:half], members[half:]]
        else:
            yield outcomes, file


def train_population(
    members: Sequence[Member],
    device: torch.device,
    file: Path | None = None,
    progress: bool | Path | Callable[[str], None] = False,
    tensorboard: Path | None = None,
    compile: bool = False,
) -> list[Outcome]:
    """Train P trials in step, each with its own temperature and early stopping; finished trials leave the population.

    Section 4, arXiv 2405.20954: train at one temperature until early stopping, go back to that stage's best weights,
    cool, and stop when cooling no longer helps. A loss without a temperature has a single stage.
    """
    setup = resumed(members, device, file)
    net, loss, annealing, population = setup.net, setup.loss, setup.annealing, setup.population
    forward = torch.compile(net.__call__) if compile else net
    checkpoints = Checkpoints(population, file, CHECKPOINT_SECONDS)

    with ExitStack() as resources:
        # Modules with random layers draw from the global generator; its state is restored afterwards.
        resources.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        bar = resources.enter_context(ProgressBar(annealing, progress))
        board = resources.enter_context(TensorBoard(setup.trials, tensorboard))

        while len(population.alive):
            started, alive, temperature = time.perf_counter(), population.alive, annealing.temperature
            epoch = annealing.epoch
            warming = bool(annealing.warming.any())  # all warm up or none: they share a protocol
            if loss.anneals:
                loss.temperature = torch.tensor(temperature[alive], dtype=torch.float32, device=device)
            objective = setup.cross_entropy if warming else loss
            train_loss = torch.zeros(len(alive), device=device)

            for inputs, labels, weights, masks in setup.batches(alive, epoch):
                with setup.autocast:
                    logits = forward(inputs, training=True, masks=masks)
                values = objective.per_trial(*samples(logits, labels), weights)
                setup.optimizer.step(net.gradient(values))
                setup.average.update()
                train_loss += values.detach()
                bar.part_of_epoch(1 / setup.steps)

            checked = setup.validate(alive)
            for p, entry in checked.entries(
                alive, epoch, train_loss / setup.steps, temperature if loss.anneals else None
            ):
                population.log(p, entry)
                board.add(p, entry)
            verdict = annealing.update(*checked.numbers(alive, len(setup.trials)))
            population.follow(verdict, checked.weights)
            population.seconds[alive] += (time.perf_counter() - started) / len(alive)
            bar.end_of_epoch(epoch, temperature[alive].max() if loss.anneals else None, warming)
            checkpoints.write_if_due()

    return setup.outcomes()


def resumed(members: Sequence[Member], device: torch.device, file: Path | None) -> "Setup":
    """A population restored from its checkpoint, or a new one if there is none or it cannot be read."""
    setup = Setup(members, device)
    if file is None or not file.exists():
        return setup
    try:
        setup.population.load(file)
        return setup
    except FileNotFoundError:  # another command has recorded these trials and deleted it
        return setup
    except (OSError, MemoryError, torch.OutOfMemoryError):  # of this machine: the file may be good
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        kept = set_aside(file)
        reason = str(error).partition("\n")[0]
        warnings.warn(f"{file} is a damaged checkpoint ({reason}); set aside as {kept.name}, and its trials start over",
                      stacklevel=2)  # fmt: skip
    return Setup(members, device)  # the first may be half restored


class Setup:
    """Everything a population trains with: data on the device, network, loss, optimiser, early stopping."""

    def __init__(self, members: Sequence[Member], device: torch.device):
        self.trials, first = [trial for trial, _ in members], members[0][1]
        config, hyper = self.trials[0].config, [trial.config.hyper for trial in self.trials]
        self.device, self.batch = device, batch_size(config)
        # Moved once, not at every step.
        self.splits = replace(first, mean=first.mean.to(device), std=first.std.to(device))
        self.train, self.val, self.test = (Rows.of(members, part, device) for part in ("train", "val", "test"))
        self.steps = batches_of(len(self.train), self.batch)
        self.rates = torch.tensor([dropout(trial.config) for trial in self.trials], device=device)
        self.drops = any(h.dropout for h in hyper)
        self._dropout: Dropout | None = None
        self.val_batch = self.batch if config.protocol.val_reduce == "batch_mean" else None
        mixed = config.protocol.precision == "bfloat16" and self.splits.kind != "table"
        self.autocast = torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()

        splits = self.splits
        self.loss = build_loss(config.loss, splits.classes, splits.train.labels, splits.positive).to(device)
        self.cross_entropy = losses.CrossEntropy()  # for the warm-up, and to break ties
        stop_by = config.protocol.stop_by
        named = None if stop_by in (None, "loss") else stop_by
        metric = metric_of(named, splits.positive) if named else validation_metric(self.loss, splits.positive)
        self.metric = defined(metric)  # a user's own may be 0/0
        self.by_metric = bool(named) or (stop_by is None and self.loss.stops_by == "metric")
        temperature = getattr(self.loss, "temperature", 0.2)
        self.annealing = Annealing(
            [t.config for t in self.trials], self.loss.anneals, temperature, self.by_metric, self.steps
        )
        self.net = models.Stack([initial(trial, splits) for trial in self.trials], device)
        if self.net.counters and min(self.batch, len(self.train)) < 2:
            got = f"hyper.batch_size={self.batch}" if self.batch < 2 else f"{len(self.train)} training rows"
            raise ValueError(f"batch norm needs batches of at least 2 samples, got {got}")
        self.optimizer = Adam(self.net, hyper, decoupled=config.protocol.optimizer == "adamw")
        self.average = Average(self.net, [h.average for h in hyper])
        self.population = Population(
            self.trials, self.net, self.optimizer, self.annealing, self.average, LossState(self.loss)
        )

    def batches(self, alive: np.ndarray, epoch: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Masks | None]]:
        """Inputs, labels [alive, n, ...], weights [alive, n] and dropout masks of each step; a function of seeds."""
        rows = torch.as_tensor(alive, device=self.device)
        order = self.train.order([self.trials[p].seed for p in alive], rows, epoch)
        seeds = [stream(self.trials[p].seed, "dropout", epoch) for p in alive]
        if self.net.mlp is None:  # only if needed: seeding is slow where torch finds no accelerator
            torch.manual_seed(seeds[0])
        dropout, keys = self.dropout(rows), torch.tensor(seeds, device=self.device)
        for step in range(self.steps):
            index = order[:, step * self.batch : (step + 1) * self.batch]
            inputs, labels = self.train.at(index)
            masks = dropout.masks(keys, step, inputs.shape[1]) if dropout else None
            yield prepared(self.splits, inputs, self.device), labels, self.train.weights_at(index), masks

    def dropout(self, rows: Tensor) -> Dropout | None:
        """The masks of an epoch, in the previous epoch's memory unless a trial has left."""
        if not self.drops or self.net.mlp is None:
            return None
        if self._dropout is None or len(self._dropout.dropped) != len(rows):
            widest = min(self.batch, len(self.train))
            self._dropout = Dropout(self.rates[rows], self.net.mlp.sizes[1:-1], widest)
        return self._dropout

    def validate(self, alive: np.ndarray) -> "Validated":
        """Evaluate the weights, and their running mean if a trial averages them; the better of the two counts."""
        raw = self.validated(alive, self.net.weights)
        result = raw if not self.average.on else raw.better(self.validated(alive, self.average.mean), self.by_metric)
        if isinstance(self.loss, losses.MetricCrossEntropy) and self.loss.source == "validation":
            self.loss.set_counts(result.confusion)
        return result

    def validated(self, alive: np.ndarray, weights: Tensor) -> "Validated":
        current, trials = self.net.weights, torch.as_tensor(alive, device=self.device)
        self.net.put(weights)
        logits, labels = predict(self.net, self.val, trials, self.splits, self.batch)
        self.net.put(current)
        row_weights = self.val.weights_at(self.val.index(trials))
        values = validation_loss(self.loss, logits, labels, self.val_batch, row_weights)
        predicted, classes = logits.argmax(-1), logits.shape[-1]
        metric = 1 - self.metric(hard_counts(predicted, labels, classes, row_weights))
        tie = self.cross_entropy.per_trial(logits, labels, row_weights) if self.by_metric else torch.zeros_like(values)
        return Validated(
            weights, values.cpu().double(), metric.double(), tie.cpu().double(), predicted, labels, classes, row_weights
        )

    def outcomes(self) -> list[Outcome]:
        """The outcomes of the trials, with the predictions of the weights that they kept."""
        self.net.put(self.population.result)
        everyone = torch.arange(len(self.trials), device=self.device)
        predictions = {
            part: predict(self.net, data, everyone, self.splits, self.batch)
            for part, data in (("val", self.val), ("test", self.test))
        }
        return [self.population.outcome(p, predictions) for p in range(len(self.trials))]


@dataclass
class Validated:
    """Validation results of weights [alive, N]: loss, 1 - metric and its tie-breaker, [alive] each."""

    weights: Tensor
    loss: Tensor
    metric: Tensor
    tie: Tensor
    predicted: Tensor  # [alive, n]
    labels: Tensor  # [alive, n]
    classes: int
    row_weights: Tensor | None  # [alive, n]

    @property
    def confusion(self) -> Confusion:
        return hard_counts(self.predicted, self.labels, self.classes, self.row_weights)

    def better(self, other: "Validated", by_metric: bool) -> "Validated":
        """The better of the two, trial by trial."""
        wins = other.loss < self.loss
        if by_metric:
            wins = (other.metric < self.metric) | ((other.metric == self.metric) & (other.tie < self.tie))
        rows = wins.to(self.weights.device)[:, None]
        return replace(
            self,
            weights=torch.where(rows, other.weights, self.weights),
            loss=torch.where(wins, other.loss, self.loss),
            metric=torch.where(wins, other.metric, self.metric),
            tie=torch.where(wins, other.tie, self.tie),
            predicted=torch.where(rows, other.predicted, self.predicted),
        )

    def numbers(self, alive: np.ndarray, trials: int) -> np.ndarray:
        """Loss, metric and tie-breaker [3, P] for early stopping; nan for trials that have left."""
        table = np.full((3, trials), np.nan)
        table[:, alive] = torch.stack([self.loss, self.metric, self.tie])
        return table

    def entries(
        self, alive: np.ndarray, epoch: int, train_loss: Tensor, temperature: np.ndarray | None
    ) -> Iterator[tuple[int, dict[str, float | None]]]:
        """Each trial with its history entry."""
        for p, trained, loss, metric in zip(
            alive, train_loss.cpu().tolist(), self.loss.tolist(), self.metric.tolist(), strict=True
        ):
            T = None if temperature is None else float(temperature[p])
            yield int(p), dict(zip(HISTORY, [epoch, T, trained, loss, metric], strict=True))


def hard_counts(predicted: Tensor, labels: Tensor, classes: int, weights: Tensor | None) -> Confusion:
    """Counts of decisions [alive, n], on the CPU: they are in float64, which not every device has."""
    on_cpu = None if weights is None else weights.cpu()
    return Confusion.from_predictions(predicted.cpu(), labels.cpu(), classes, on_cpu)


def batches_of(rows: int, batch: int) -> int:
    """The number of batches per epoch: whole ones only, unless fewer than two fit; then the remainder counts as well.

    A remainder of one row is left out: batch norm cannot normalise it.
    """
    if rows >= 2 * batch:
        return rows // batch
    return max(1, math.ceil(rows / batch) - (rows % batch == 1))


def prepared(splits: Splits, inputs: Tensor, device: torch.device) -> Tensor:
    """Inputs [P, n, ...] as the networks see them; images in the memory layout that is fastest for convolutions."""
    inputs = splits.prepare(inputs)
    if splits.kind == "image" and device.type != "mps" and len(inputs) == 1:
        inputs = inputs.squeeze(0).contiguous(memory_format=torch.channels_last).unsqueeze(0)
    return inputs


def samples(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [P, n, d] and labels [P, n]; if a sample has several labels, like the pairs of a graph, each counts."""
    return logits.flatten(1, -2), labels.flatten(1)


@torch.no_grad()
def predict(net: models.Stack, data: Rows, trials: Tensor, splits: Splits, batch: int) -> tuple[Tensor, Tensor]:
    """Logits [alive, n, d], d >= 2, and labels [alive, n] of all rows, in float32."""
    rows = batch if splits.kind == "image" else max(batch, EVALUATION_ROWS.get(trials.device.type, 1024))
    logits_of, labels_of = [], []
    for part in data.index(trials).split(rows, dim=1):
        inputs, labels = data.at(part)
        logits_of.append(net(prepared(splits, inputs, trials.device)))
        labels_of.append(labels)
    logits, labels = samples(torch.cat(logits_of, dim=1), torch.cat(labels_of, dim=1))
    return two_or_more(logits), labels


@torch.no_grad()
def validation_loss(
    loss: losses.Loss, logits: Tensor, labels: Tensor, batch: int | None, weights: Tensor | None = None
) -> Tensor:
    """The loss [P] of a whole split or, as in Bridging the Gap's code, the mean loss over its batches."""
    if batch is None:
        return loss.per_trial(logits, labels, weights)
    parts = [x.split(batch, dim=1) for x in (logits, labels, weights) if x is not None]
    return torch.stack([loss.per_trial(*part) for part in zip(*parts, strict=True)]).mean(0)


def population_size(config: Science, device: torch.device, trials: int) -> int:
    """How many of these trials should train together, so that all populations are of nearly equal size.

    Only MLPs are computed together. On a CPU, what a step touches should stay in the cache: the weights between hidden
    layers, their gradient and two moments, the hidden units and their gradients. The first and the last layer are left
    out: a config does not know their sizes. A GPU has no such limit; a population that does not fit its memory is
    halved.
    """
    if config.model.name not in models.TOGETHER:
        return 1
    if device.type != "cpu":
        return trials
    hidden = config.model.options["hidden"]
    floats = 4 * sum(a * b for a, b in pairwise(hidden)) + 2 * batch_size(config) * sum(hidden)
    most = max(1, CACHE_BYTES // (4 * max(1, floats)))
    return math.ceil(trials / math.ceil(trials / most))


def populations(members: Sequence[Member], device: torch.device) -> list[Sequence[Member]]:
    """Groups of members that train together, in the given order.

    Splits of equal size can be stacked if only their rows differ. They do not share a population if they also differ
    in the scaling of images, in class weights, or in the number of features (categories of a file are learnt from its
    training rows).
    """
    config, splits = members[0][0].config, members[0][1]
    apart = splits.kind == "image" or config.loss.options.get("class_weights") == "balanced"

    def shape(splits: Splits) -> tuple[dict[str, int], torch.Size]:
        return splits.sizes, splits.train.inputs.shape[1:]

    parts: list[Sequence[Member]] = []
    for _, members_alike in groupby(members, lambda member: member[1].index_hash if apart else shape(member[1])):
        group = list(members_alike)
        size = population_size(config, device, len(group))
        parts += [group[k : k + size] for k in range(0, len(group), size)]
    return parts


def check(trials: Sequence[Trial], splits: Sequence[Splits]) -> None:
    """Refuse trials that cannot train together, and impossible hyperparameters."""
    if not trials or len(splits) != len(trials):
        raise ValueError(
            f"expected trials and one split for all or one each, got {len(trials)} and {len(splits)} splits"
        )
    first = trials[0].config
    for config in (trial.config for trial in trials):
        for section in ("dataset", "model", "loss", "protocol"):
            ours, theirs = getattr(config, section), getattr(first, section)
            if ours != theirs:
                raise ValueError(f"trials of one population share {section!r}: {ours} is not {theirs}")
        if config.hyper.batch_size != first.hyper.batch_size:
            raise ValueError(
                "trials of one population share hyper.batch_size: "
                f"{config.hyper.batch_size} is not {first.hyper.batch_size}"
            )
        batch_size(config)
        dropout(config)


def batch_size(config: Science) -> int:
    """The number of rows per step."""
    batch = config.hyper.batch_size
    if not (isinstance(batch, int) and batch > 0):
        raise ValueError(f"hyper.batch_size: expected a positive whole number, got {batch!r}")
    return batch


def dropout(config: Science) -> float:
    """The share of hidden units that a step drops."""
    rate = config.hyper.dropout
    if rate is None or not 0 <= rate <= 255 / 256:
        raise ValueError(f"hyper.dropout: expected a rate from 0 to below 1, got {rate!r}")
    return float(rate)
