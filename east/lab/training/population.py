"""Trials that train together: their data, networks, random streams and early stopping, and the checkpoint of it all.

All randomness of a trial is a function of its own seed, without generator state: a trial sees the same weights, batches
and masks alone or with others, before or after a resume.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from east import losses
from east.confusion import Confusion
from east.decisions import defined
from east.lab import models
from east.lab.data.common import Splits
from east.lab.models.mlp import Dropout, Masks
from east.lab.settings.settings import Science
from east.lab.training.annealing import NO_BEST, Annealing
from east.lab.training.checkpoint import Identity, read_checkpoint, write_checkpoint
from east.lab.training.evaluation import metric_of, validation_metric
from east.lab.training.objective import build_loss
from east.lab.training.optimizer import Adam, Average
from east.lab.training.scores import Best, Stacked
from east.losses.inputs import two_or_more

UNITS = 1 << 28  # of stacked networks that a GPU computes at once: a gigabyte


@dataclass(frozen=True)
class Trial:
    """One training run: a resolved scientific config and a seed."""

    config: Science
    seed: int
    stage: str = "trial"  # or "search"

    @property
    def identity(self) -> Identity:
        """What identifies the trial's record."""
        return self.config.key, self.seed, self.stage

    @property
    def stacking_key(self) -> str:
        """Equal for trials that can train as one population."""
        shared = ("dataset", "split", "model", "loss", "protocol", "ensemble")
        sections = [getattr(self.config, name) for name in shared]
        return repr([*sections, self.config.hyper.batch_size])  # a metric may be a function, which JSON cannot hold


Member: TypeAlias = tuple[Trial, Splits]


@dataclass
class Outcome:
    """The result of a trial. A failed trial has an error and a history, but no predictions."""

    trial: Trial
    status: str = "done"  # | failed
    error: str | None = None
    stopped: str | None = "fitted"  # | patience | stage_epochs | coolings | coldest | max_epochs | diverged
    epochs: int = 0
    seconds: float = 0.0  # its share of the population's time
    best: Best = NO_BEST
    history: dict[str, list] = field(default_factory=dict)  # HISTORY; temperatures are None where the loss has none
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)  # val, test: float32 [n, d]
    labels: dict[str, np.ndarray] = field(default_factory=dict)  # val, test: int64 [n]
    weights: dict[str, Tensor] = field(default_factory=dict)  # state dict of the ordinary module
    fitted: nn.Module | None = None  # a classical model, or the mixture of an ensemble
    ensemble: Stacked | None = None


class Rows:
    """One part of the data on the device: the rows of all distinct splits.

    index [P, n]: numbers of each trial's rows; a trial that has fewer than n repeats its first row. sizes: the rows of
    each trial. counts [P, n]: how much each row counts, repeated ones 0; None: all count 1.
    """

    def __init__(self, members: Sequence[Member], part: str, device: torch.device):
        distinct = {splits.index_hash: getattr(splits, part) for _, splits in members}
        parts, of_trial = list(distinct.values()), [list(distinct).index(splits.index_hash) for _, splits in members]

        def joined(name: str) -> Any:
            values = [getattr(p, name) for p in parts]
            return None if values[0] is None else (torch.cat(values) if len(values) > 1 else values[0]).to(device)

        self.inputs, self.labels, self.weights = map(joined, ("inputs", "labels", "weights"))
        numbers = pad_sequence(torch.arange(sum(map(len, parts))).split([*map(len, parts)]), True, -1)[of_trial]
        self.sizes, kept = [len(parts[k]) for k in of_trial], numbers >= 0
        self.index = torch.where(kept, numbers, numbers[:, :1]).to(device)
        given = 1.0 if self.weights is None else self.weights[self.index]
        self.counts = None if self.weights is None and kept.all() else kept.to(device) * given

    def at(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs [P, n, ...], labels [P, n, ...] and weights [P, n] of the rows with these numbers [P, n]."""
        flat = index.flatten()  # index_select copies row by row, four times as fast as inputs[index]
        inputs, labels = (t.index_select(0, flat).unflatten(0, index.shape) for t in (self.inputs, self.labels))
        return inputs, labels, None if self.weights is None else self.weights[index]


class Population:
    """P trials that train in step, and everything that changes while they do.

    A trial's course (early stopping, history) is in `annealing[p]`. alive: numbers of the trials that still train.
    rows: tensors with a row for each of them: `weights` [alive, N]; `stage_best`, the best ones of the current
    temperature; the moments of Adam and the running mean. result [P, N]: weights of each trial's best stage so far.
    """

    def __init__(self, members: Sequence[Member], device: torch.device):
        self.trials, splits = [trial for trial, _ in members], members[0][1]
        config, self.device = self.trials[0].config, device
        # Moved once, not at every step.
        self.splits = replace(splits, mean=splits.mean.to(device), std=splits.std.to(device))
        self.train, self.val, self.test = (Rows(members, part, device) for part in ("train", "val", "test"))
        labels, weights = self.val.labels[self.val.index], self.val.counts
        self.truth = labels.flatten(1).cpu(), None if weights is None else weights.cpu()  # of the validation rows
        self.protocol, self.batch = config.protocol, config.hyper.batch_size or 1
        self.steps = batches_of(min(self.train.sizes), self.batch)
        self.used = rows_used(min(self.train.sizes), self.batch)
        self.mixed = self.protocol.precision == "bfloat16" and splits.kind != "table"
        # The orders of the next epoch are drawn while a device trains; a CPU has nothing to wait for.
        self.ahead = None if device.type == "cpu" else ThreadPoolExecutor()
        self.drawn: dict[tuple[int, int], Future[Tensor]] = {}  # by trial and epoch

        self.loss = build_loss(config.loss, splits.classes, splits.train.labels, splits.positive).to(device)
        self.cross_entropy = losses.CrossEntropy()  # for the warm-up, and to break ties
        stop_by = self.protocol.stop_by or self.loss.stops_by
        self.by_metric, own = stop_by != "loss", stop_by in ("loss", "metric")
        metric = validation_metric(self.loss, splits.positive) if own else metric_of(stop_by, splits.positive)
        self.metric = defined(metric)  # a user's own may be 0/0
        temperature = getattr(self.loss, "temperature", 0.2)
        self.annealing = [
            Annealing(trial.config, self.loss.anneals, temperature, self.by_metric, self.steps) for trial in self.trials
        ]

        self.net = models.Stack([initial(trial, splits) for trial in self.trials], device)
        if self.net.counters and min(self.batch, self.used) < 2:
            got = f"hyper.batch_size={self.batch}" if self.batch < 2 else f"{self.used} training rows"
            raise ValueError(f"batch norm needs batches of at least 2 samples, got {got}")
        # Rows to predict at once: on a CPU what fits its cache, on a GPU what needs no more memory than training.
        of_cache = self.batch if splits.kind == "image" else max(self.batch, 256)
        of_memory = UNITS // (len(self.trials) * sum(self.net.mlp.sizes)) if self.net.mlp else 8 * self.batch
        self.at_once = of_cache if device.type == "cpu" else max(self.batch, of_memory)
        weights, learned = self.net.weights, self.net.weights[:, : self.net.learned]
        self.result = weights.clone()
        none = weights.new_zeros(len(weights), 1)
        rows = {"weights": weights, "stage_best": weights.clone(), "steps": none}
        rows |= {"first": torch.zeros_like(learned), "second": torch.zeros_like(learned)}
        if any(trial.config.hyper.average for trial in self.trials):
            rows |= {"mean": weights.clone(), "mean_steps": none.clone()}
        self.put(rows)

    @property
    def alive(self) -> list[int]:
        return [p for p, annealing in enumerate(self.annealing) if annealing.course.stopped is None]

    def put(self, rows: dict[str, Tensor]) -> None:
        """Train with these rows, one for each trial alive."""
        self.rows, hyper = rows, [self.trials[p].config.hyper for p in self.alive]
        self.net.put(rows["weights"])
        if not hyper:
            return
        self.current = torch.tensor(self.alive, device=self.device)
        self.optimizer = Adam(self.net, rows, hyper, decoupled=self.protocol.optimizer == "adamw")
        self.average = Average(self.net, rows, [h.average for h in hyper]) if "mean" in rows else None
        self.dropout: Dropout | None = None
        if self.net.mlp is not None and any(trial.config.hyper.dropout for trial in self.trials):
            rates = torch.tensor([h.dropout for h in hyper], device=self.device)
            self.dropout = Dropout(rates, self.net.mlp.sizes[1:-1], min(self.batch, self.used))

    def objective(self) -> losses.Loss:
        """The loss of the coming epoch, at the temperatures of its trials; cross-entropy during warm-up."""
        annealing = [self.annealing[p] for p in self.alive]
        if self.loss.anneals:
            temperatures = [a.temperature for a in annealing]
            self.loss.temperature = torch.tensor(temperatures, dtype=torch.float32, device=self.device)
        return self.cross_entropy if annealing[0].warming else self.loss  # all warm up or none: they share a protocol

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Masks | None]]:
        """Inputs, labels [alive, n, ...], weights [alive, n] and dropout masks of each step; a function of seeds."""
        alive, epoch = self.alive, self.annealing[self.alive[0]].course.epochs + 1
        drawn = [self.drawn[p, epoch].result() if (p, epoch) in self.drawn else self.shuffled(p, epoch) for p in alive]
        if self.ahead:
            self.drawn = {(p, epoch + 1): self.ahead.submit(self.shuffled, p, epoch + 1) for p in alive}
        order = self.train.index[self.current].gather(1, torch.stack(drawn).to(self.device).long())
        keys = [stream(self.trials[p].seed, "dropout", epoch) for p in alive]
        if self.net.mlp is None:  # only if needed: seeding is slow where torch finds no accelerator
            torch.manual_seed(keys[0])
        on_device = torch.tensor(keys, device=self.device)
        for step, rows in enumerate(order.split(self.batch, dim=1)):
            inputs, labels, weights = self.train.at(rows)
            masks = self.dropout.masks(on_device, step, inputs.shape[1]) if self.dropout else None
            yield self.prepared(inputs), labels, weights, masks

    def shuffled(self, p: int, epoch: int) -> Tensor:
        """Which of its rows a trial uses in an epoch, in order. The same on every device, so the CPU draws them."""
        generator = torch.Generator().manual_seed(stream(self.trials[p].seed, "shuffle", epoch))
        return torch.randperm(self.train.sizes[p], generator=generator, dtype=torch.int32)[: self.used]

    def prepared(self, inputs: Tensor) -> Tensor:
        """Inputs [P, n, ...] as the networks see them; images in the memory layout that is fastest for convolutions."""
        inputs = self.splits.prepare(inputs)
        if self.splits.kind == "image" and self.device.type != "mps" and len(inputs) == 1:
            inputs = inputs.squeeze(0).contiguous(memory_format=torch.channels_last).unsqueeze(0)
        return inputs

    @torch.no_grad()
    def predict(self, data: Rows, trials: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits [alive, n, d], d >= 2, labels and weights [alive, n] of these trials' rows, in float32."""
        index = data.index[trials]
        parts = index.split(self.at_once, dim=1)
        logits = torch.cat([self.net(self.prepared(data.at(part)[0])) for part in parts], dim=1)
        flat, labels = samples(logits, data.labels[index])
        return two_or_more(flat), labels, None if data.counts is None else data.counts[trials]

    @torch.no_grad()
    def validated(self, train_loss: Tensor) -> tuple[Tensor, list[tuple[float, ...]]]:
        """Weights [alive, N] and their validation loss, 1 - metric, tie-breaker and training loss, trial by trial.

        They are the present weights or their running mean, whichever is better. The numbers come to the CPU together:
        it waits for the device only here.
        """
        candidates = [self.rows[name] for name in ("weights", "mean") if name in self.rows]
        measured = map(torch.stack, zip(*map(self.measured, candidates), strict=True))
        train, losses_of, ties, predicted = together_on_cpu(train_loss, *measured)
        self.net.put(candidates[0])
        metrics = torch.stack([1 - self.metric(self.confusion(each)) for each in predicted])
        values = metrics if self.by_metric else losses_of
        tied = (values[-1] == values[0]) & (ties[-1] < ties[0])
        better = (values[-1] < values[0]) | tied  # than the first candidate
        chosen = better.long(), torch.arange(len(better))
        if isinstance(self.loss, losses.MetricCrossEntropy) and self.loss.source == "validation":
            self.loss.set_counts(self.confusion(predicted[chosen]))
        numbers = (losses_of[chosen], metrics[chosen], ties[chosen], train)
        weights = candidates[0]
        if self.average:
            weights = torch.where(better.to(self.device)[:, None], candidates[-1], weights)
        return weights, [*zip(*(tensor.tolist() for tensor in numbers), strict=True)]

    def measured(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Validation loss and tie-breaker [alive] of these weights, and their decisions [alive, n]."""
        self.net.put(weights)
        logits, labels, row_weights = self.predict(self.val, self.current)
        batch = self.batch if self.protocol.val_reduce == "batch_mean" else None
        loss, predicted = validation_loss(self.loss, logits, labels, batch, row_weights), logits.argmax(-1)
        tie = self.cross_entropy.per_trial(logits, labels, row_weights) if self.by_metric else torch.zeros_like(loss)
        return loss, tie, predicted.int()

    def confusion(self, predicted: Tensor) -> Confusion:
        """The counts of decisions [alive, n]; on the CPU, in float64, which not every device has."""
        (labels, weights), classes = self.truth, len(self.splits.classes)
        counts = None if weights is None else weights[self.alive]
        return Confusion.from_predictions(predicted, labels[self.alive], classes, counts)

    def end_epoch(self, train_loss: Tensor) -> None:
        """Let early stopping judge an epoch; keep, restore and drop weights as it decides. train_loss: [alive]."""
        alive, rows = self.alive, self.rows
        validated, numbers = self.validated(train_loss)
        verdicts = [self.annealing[p].update(*each) for p, each in zip(alive, numbers, strict=True)]
        forget = [v.cooled and not self.trials[p].config.annealing.keep_optimizer
                  for p, v in zip(alive, verdicts, strict=True)]  # fmt: skip
        improved, kept, cooled, forgetful = (self.places(flags) for flags in (*zip(*verdicts, strict=True), forget))
        rows["stage_best"][improved] = validated[improved]
        self.result[self.current[kept]] = rows["stage_best"][kept]
        rows["weights"][cooled] = rows["stage_best"][cooled]
        for name in ("first", "second", "steps"):
            rows[name][forgetful] = 0.0
        if self.average:
            rows["mean"][cooled], rows["mean_steps"][cooled] = rows["weights"][cooled], 0.0
        if len(self.alive) < len(alive):
            staying = self.places(self.annealing[p].course.stopped is None for p in alive)
            self.put({name: tensor[staying] for name, tensor in rows.items()})
            self.loss.keep(staying)

    def places(self, flags: Iterable[bool]) -> Tensor:
        """Where the flags are true; found on the CPU, so that nothing waits for the device."""
        return torch.tensor([place for place, flag in enumerate(flags) if flag], dtype=torch.long, device=self.device)

    def outcomes(self) -> list[Outcome]:
        """The outcomes of the trials, with the predictions of the weights that they kept."""
        self.net.put(self.result)
        everyone, outcomes = torch.arange(len(self.trials), device=self.device), []
        parts = {"val": self.val, "test": self.test}
        predicted = {part: self.predict(data, everyone) for part, data in parts.items()}
        for p, (trial, course) in enumerate(zip(self.trials, (a.course for a in self.annealing), strict=True)):
            unkept = "no epoch was kept: its metric on validation was never a finite number"  # only the initial weights
            error = course.error or (unkept if course.best == NO_BEST else None)
            shared = (course.stopped, course.epochs, course.seconds, course.best, course.history)
            outcome = Outcome(trial, "failed" if error else "done", error, *shared)
            outcomes.append(outcome)
            if error:
                continue
            outcome.weights = self.net.state_dict(self.result[p])
            for part, (logits, labels, _) in predicted.items():
                n = parts[part].sizes[p] * parts[part].labels.shape[1:].numel()  # a graph has a label for each pair
                outcome.probabilities[part] = logits[p, :n].softmax(-1).cpu().numpy()
                outcome.labels[part] = labels[p, :n].cpu().numpy()
        return outcomes

    def save(self, file: Path) -> None:
        """Write a checkpoint, with the state that the loss carries from step to step, if it has any.

        If this is interrupted, the previous one stays intact.
        """
        tensors = self.rows | {"result": self.result}
        if type(self.loss).get_extra_state is not nn.Module.get_extra_state:
            tensors["loss"] = self.loss.get_extra_state().detach()
        on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        write_checkpoint(file, on_cpu, [a.course for a in self.annealing], [trial.identity for trial in self.trials])

    def load(self, file: Path) -> None:
        """Resume from a checkpoint; ValueError or SafetensorError if it is damaged or has another layout."""
        tensors, courses = read_checkpoint(file, self.device)
        for annealing, course in zip(self.annealing, courses, strict=True):
            annealing.course = course
        if "loss" in tensors:
            self.loss.set_extra_state(tensors.pop("loss").clone())
        # Copied, because the last digits of a product depend on the memory alignment of its factors.
        rows = {name: tensor.clone() for name, tensor in tensors.items()}
        self.result = rows.pop("result")
        self.put(rows)


def batches_of(rows: int, batch: int) -> int:
    """The number of batches per epoch: whole ones only, unless fewer than two fit; then the remainder counts as well.

    A remainder of one row is left out: batch norm cannot normalise it.
    """
    return rows // batch if rows >= 2 * batch else max(1, math.ceil(rows / batch) - (rows % batch == 1))


def rows_used(rows: int, batch: int) -> int:
    """The number of rows in the batches of an epoch."""
    return min(rows, batches_of(rows, batch) * batch)


def samples(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [P, n, d] and labels [P, n]; if a sample has several labels, like the pairs of a graph, each counts."""
    return logits.flatten(1, -2), labels.flatten(1)


@torch.no_grad()
def validation_loss(
    loss: losses.Loss, logits: Tensor, labels: Tensor, batch: int | None, weights: Tensor | None = None
) -> Tensor:
    """The loss [P] of a whole split or, as in Bridging the Gap's code, the mean loss over its batches."""
    if batch is None:
        return loss.per_trial(logits, labels, weights)
    parts = [x.split(batch, dim=1) for x in (logits, labels, weights) if x is not None]
    return torch.stack([loss.per_trial(*part) for part in zip(*parts, strict=True)]).mean(0)


def together_on_cpu(*tensors: Tensor) -> list[Tensor]:
    """The tensors on the CPU, brought there as one: it waits for the device at each transfer."""
    brought = torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors]).cpu()
    parts = brought.split([tensor.nbytes for tensor in tensors])
    return [p.clone().view(t.dtype).view(t.shape) for p, t in zip(parts, tensors, strict=True)]


def stream(seed: int, purpose: str, epoch: int = 0) -> int:
    """The seed, below 2^63, of one of a trial's random streams."""
    name = f"{seed} {purpose} {epoch}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def initial(trial: Trial, splits: Splits) -> nn.Module:
    """The trial's network before training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(trial.seed, "init"))
        config, shape = trial.config, splits.train.inputs.shape[1:]
        return models.build(config.model, shape, len(splits.classes), config.hyper.dropout or 0.0)


def identity(members: Sequence[Member]) -> str:
    """The name of a population's checkpoint; only the same trials on the same rows have the same name."""
    described = [(t.config.to_json(), t.seed, s.fingerprint, s.index_hash) for t, s in members]
    # The order of numbers in a row depends on how kernels are stored.
    layout = [] if members[0][0].config.model.name in models.TOGETHER else ["kernels channels last"]
    text = json.dumps([*described, *layout], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
