"""Trials that train together: their data, networks, random streams and early stopping, and the checkpoint of it all.

All randomness of a trial is a function of its own seed, without generator state: a trial sees the same weights, batches
and masks alone or with others, before or after a resume.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import safetensors.torch
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from torch import Tensor, nn

from east import losses
from east.confusion import Confusion
from east.decisions import defined
from east.lab import models
from east.lab.data.common import Splits
from east.lab.files import write_atomically
from east.lab.models.mlp import Dropout, Masks
from east.lab.settings.sections import Science
from east.lab.training.annealing import Annealing, Course
from east.lab.training.averaging import Average
from east.lab.training.evaluation import metric_of, validation_metric
from east.lab.training.objective import build_loss
from east.lab.training.optimizer import Adam
from east.lab.training.scores import Best, Stacked
from east.losses.inputs import two_or_more

CHECKPOINT = "3"  # version of the layout; a checkpoint of another version is not resumed
COURSES = TypeAdapter(list[Course])

Identity: TypeAlias = tuple[str, int, str]  # key, seed and stage of a trial


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
    status: str  # done | failed
    error: str | None
    stopped: str | None  # patience | stage_epochs | coolings | coldest | max_epochs | diverged | fitted
    epochs: int
    seconds: float  # its share of the population's time
    best: Best
    history: dict[str, list]  # HISTORY, one entry per epoch; temperatures are None where the loss has none
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)  # val, test: float32 [n, d]
    labels: dict[str, np.ndarray] = field(default_factory=dict)  # val, test: int64 [n]
    weights: dict[str, Tensor] = field(default_factory=dict)  # state dict of the ordinary module
    fitted: nn.Module | None = None  # a classical model, or the mixture of an ensemble
    ensemble: Stacked | None = None

    @property
    def order(self) -> tuple[float, float]:
        """Lowest for the best outcome: validation loss, then what breaks its ties; infinite if no weights were kept."""
        return math.inf if self.best.val_loss is None else self.best.val_loss, self.best.tie or 0.0


class Validated(NamedTuple):
    """Weights [alive, N] and what they achieve on validation: loss, 1 - metric, its tie-breaker [alive], decisions."""

    weights: Tensor
    loss: Tensor
    metric: Tensor
    tie: Tensor
    predicted: Tensor  # [alive, n]


class Rows:
    """One part of the data on the device: the rows of all distinct splits.

    index [P, n]: numbers of each trial's rows; a trial that has fewer than n repeats its first row with weight 0.
    sizes: the rows of each trial. weights: how much each row counts; None: all count 1. kept [P, n]: False for
    repeated rows; None: nothing is repeated.
    """

    def __init__(self, members: Sequence[Member], part: str, device: torch.device):
        distinct = {splits.index_hash: getattr(splits, part) for _, splits in members}
        parts, position = list(distinct.values()), list(distinct)
        joined = (
            (lambda values: torch.cat(values).to(device)) if len(parts) > 1 else lambda values: values[0].to(device)
        )
        self.inputs, self.labels = joined([p.inputs for p in parts]), joined([p.labels for p in parts])
        self.weights = None if parts[0].weights is None else joined([p.weights for p in parts])
        lengths = [len(p) for p in parts]
        places, inside = torch.arange(max(lengths)), torch.tensor(lengths)[:, None]
        real = places < inside
        numbers = places * real + torch.tensor([0, *accumulate(lengths[:-1])])[:, None]
        of_trial = [position.index(splits.index_hash) for _, splits in members]
        self.sizes = [lengths[k] for k in of_trial]
        self.index = numbers[of_trial].to(device)
        self.kept = None if real.all() else real[of_trial].to(device)

    def at(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs [P, n, ...], labels [P, n, ...] and weights [P, n] of the rows with these numbers [P, n]."""
        flat = index.flatten()  # index_select copies row by row, four times as fast as inputs[index]
        inputs, labels = (t.index_select(0, flat).unflatten(0, index.shape) for t in (self.inputs, self.labels))
        return inputs, labels, None if self.weights is None else self.weights[index]

    def weights_at(self, trials: Tensor) -> Tensor | None:
        """The weights [P, n] of these trials' rows: 0 for repeated ones."""
        given = None if self.weights is None else self.weights[self.index[trials]]
        if self.kept is None:
            return given
        kept = self.kept[trials].float()
        return kept if given is None else given * kept


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
        self.protocol, self.batch = config.protocol, config.hyper.batch_size or 1
        self.steps = batches_of(min(self.train.sizes), self.batch)
        self.used = rows_used(min(self.train.sizes), self.batch)
        mixed = self.protocol.precision == "bfloat16" and splits.kind != "table"
        self.autocast = torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()

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
        self.current = self.numbers(self.alive)
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
        alive = self.alive
        seeds, epoch = [self.trials[p].seed for p in alive], self.annealing[alive[0]].course.epochs + 1
        generators = [torch.Generator().manual_seed(stream(seed, "shuffle", epoch)) for seed in seeds]
        sizes = [self.train.sizes[p] for p in alive]
        order = torch.stack(
            [torch.randperm(n, generator=g)[: self.used] for n, g in zip(sizes, generators, strict=True)]
        )
        order = self.train.index[self.current].gather(1, order.to(self.device))
        keys = [stream(seed, "dropout", epoch) for seed in seeds]
        if self.net.mlp is None:  # only if needed: seeding is slow where torch finds no accelerator
            torch.manual_seed(keys[0])
        on_device = torch.tensor(keys, device=self.device)
        for step in range(self.steps):
            inputs, labels, weights = self.train.at(order[:, step * self.batch : (step + 1) * self.batch])
            masks = self.dropout.masks(on_device, step, inputs.shape[1]) if self.dropout else None
            yield self.prepared(inputs), labels, weights, masks

    def prepared(self, inputs: Tensor) -> Tensor:
        """Inputs [P, n, ...] as the networks see them; images in the memory layout that is fastest for convolutions."""
        inputs = self.splits.prepare(inputs)
        if self.splits.kind == "image" and self.device.type != "mps" and len(inputs) == 1:
            inputs = inputs.squeeze(0).contiguous(memory_format=torch.channels_last).unsqueeze(0)
        return inputs

    @torch.no_grad()
    def predict(self, data: Rows, trials: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits [alive, n, d], d >= 2, labels and weights [alive, n] of these trials' rows, in float32."""
        few, index = 256 if self.device.type == "cpu" else 1024, data.index[trials]  # what fits the cache is faster
        logits = []
        for part in index.split(self.batch if self.splits.kind == "image" else max(self.batch, few), dim=1):
            logits.append(self.net(self.prepared(data.at(part)[0])))
        flat, labels = samples(torch.cat(logits, dim=1), data.labels[index])
        return two_or_more(flat), labels, data.weights_at(trials)

    def validate(self) -> Validated:
        """Evaluate the weights, and their running mean if a trial averages them; the better of the two counts."""
        result = self.validated(self.rows["weights"])
        if self.average:
            mean = self.validated(self.rows["mean"])
            new, old = (mean.metric, result.metric) if self.by_metric else (mean.loss, result.loss)
            better = ((new < old) | ((new == old) & (mean.tie < result.tie)))[:, None]
            result = Validated(*(torch.where(better.to(m.device).view(-1, *[1] * (m.ndim - 1)), m, r)
                                 for m, r in zip(mean, result, strict=True)))  # fmt: skip
        if isinstance(self.loss, losses.MetricCrossEntropy) and self.loss.source == "validation":
            self.loss.set_counts(self.counts(result.predicted))
        return result

    def validated(self, weights: Tensor) -> Validated:
        self.net.put(weights)
        logits, labels, row_weights = self.predict(self.val, self.current)
        self.net.put(self.rows["weights"])
        batch = self.batch if self.protocol.val_reduce == "batch_mean" else None
        loss = validation_loss(self.loss, logits, labels, batch, row_weights)
        predicted = logits.argmax(-1)
        metric = 1 - self.metric(self.counts(predicted))
        tie = self.cross_entropy.per_trial(logits, labels, row_weights) if self.by_metric else torch.zeros_like(loss)
        return Validated(weights, loss.cpu().double(), metric.double(), tie.cpu().double(), predicted)

    def counts(self, predicted: Tensor) -> Confusion:
        """Counts of validation decisions [alive, n], on the CPU: they are in float64, which not every device has."""
        labels, weights = self.val.labels[self.val.index[self.current]].flatten(1), self.val.weights_at(self.current)
        on_cpu = None if weights is None else weights.cpu()
        return Confusion.from_predictions(predicted.cpu(), labels.cpu(), len(self.splits.classes), on_cpu)

    def end_epoch(self, train_loss: Tensor, validated: Validated) -> None:
        """Let early stopping judge an epoch; keep, restore and drop weights as it decides. train_loss: [alive]."""
        alive, numbers = self.alive, (validated.loss, validated.metric, validated.tie, train_loss.cpu())
        verdicts = [
            self.annealing[p].update(*epoch)
            for p, *epoch in zip(alive, *(values.tolist() for values in numbers), strict=True)
        ]
        rows, weights = self.rows, self.rows["weights"]
        if improved := [row for row, verdict in enumerate(verdicts) if verdict.improved]:
            index = self.numbers(improved)
            rows["stage_best"][index] = validated.weights[index]
        if kept := [row for row, verdict in enumerate(verdicts) if verdict.kept]:
            self.result[self.numbers([alive[row] for row in kept])] = rows["stage_best"][self.numbers(kept)]
        if cooled := [row for row, verdict in enumerate(verdicts) if verdict.cooled]:
            index = self.numbers(cooled)
            weights[index] = rows["stage_best"][index]
            if self.average:
                rows["mean"][index], rows["mean_steps"][index] = weights[index], 0.0
            forget = [row for row in cooled if not self.trials[alive[row]].config.annealing.keep_optimizer]
            for name in ("first", "second", "steps"):
                rows[name][self.numbers(forget)] = 0.0
        if len(self.alive) < len(alive):
            staying = self.numbers([row for row, p in enumerate(alive) if p in self.alive])
            self.put({name: tensor[staying] for name, tensor in rows.items()})
            self.loss.keep(staying)

    def numbers(self, values: Iterable[int]) -> Tensor:
        return torch.tensor([*values], dtype=torch.long, device=self.device)

    def outcomes(self) -> list[Outcome]:
        """The outcomes of the trials, with the predictions of the weights that they kept."""
        self.net.put(self.result)
        everyone = self.numbers(range(len(self.trials)))
        predictions = {
            part: (*self.predict(data, everyone)[:2], [n * data.labels.shape[1:].numel() for n in data.sizes])
            for part, data in (("val", self.val), ("test", self.test))
        }
        outcomes = []
        for p, (trial, course) in enumerate(zip(self.trials, (a.course for a in self.annealing), strict=True)):
            error = course.error
            if error is None and course.best == Best():  # the weights would be the initial ones
                error = "no epoch was kept: its metric on validation was never a finite number"
            shared = (course.stopped, course.epochs, course.seconds, course.best, course.history)
            outcomes.append(Outcome(trial, "failed" if error else "done", error, *shared))
            if not error:
                for part, (logits, labels, sizes) in predictions.items():
                    outcomes[p].probabilities[part] = logits[p, : sizes[p]].softmax(-1).cpu().numpy()
                    outcomes[p].labels[part] = labels[p, : sizes[p]].cpu().numpy()
                outcomes[p].weights = self.net.state_dict(self.result[p])
        return outcomes

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint; `loss` is the state that a loss carries from step to step, if it has any."""
        stateful = type(self.loss).get_extra_state is not nn.Module.get_extra_state
        state = {"loss": self.loss.get_extra_state().detach().contiguous()} if stateful else {}
        return self.rows | {"result": self.result} | state

    def save(self, file: Path) -> None:
        """Write a checkpoint. If this is interrupted, the previous one stays intact."""
        tensors, state = self.tensors(), json.dumps([asdict(annealing.course) for annealing in self.annealing])
        file.parent.mkdir(parents=True, exist_ok=True)
        about = {"format": CHECKPOINT, "state": state, "digest": digest(state, tensors)}
        about["trials"] = json.dumps([trial.identity for trial in self.trials])
        content = safetensors.torch.save(tensors, metadata=about)
        write_atomically(file, lambda stream: stream.write(content))

    def load(self, file: Path) -> None:
        """Resume from a checkpoint; ValueError or SafetensorError if it is damaged or has another layout."""
        with safe_open(file, framework="pt", device=str(self.device)) as stored:
            about = stored.metadata() or {}
            if about.get("format") != CHECKPOINT:
                raise ValueError("it was written by another version")
            # Copied, because the last digits of a product depend on the memory alignment of its factors.
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118 (not a dict)
        if about.get("digest") != digest(about.get("state", ""), tensors):
            raise ValueError("its content has changed since it was written")
        courses = COURSES.validate_python(json.loads(about["state"]))
        for annealing, course in zip(self.annealing, courses, strict=True):
            annealing.course = course
        if "loss" in tensors:
            self.loss.set_extra_state(tensors.pop("loss"))
        self.result = tensors.pop("result")
        self.put(tensors)


def batches_of(rows: int, batch: int) -> int:
    """The number of batches per epoch: whole ones only, unless fewer than two fit; then the remainder counts as well.

    A remainder of one row is left out: batch norm cannot normalise it.
    """
    if rows >= 2 * batch:
        return rows // batch
    return max(1, math.ceil(rows / batch) - (rows % batch == 1))


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


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash of everything in a checkpoint: a bit that flips on disk must not become a result."""
    state = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        state.update(tensor.flatten().view(torch.uint8).numpy().data)
    return state.hexdigest()


def stream(seed: int, purpose: str, epoch: int = 0) -> int:
    """The seed, below 2^63, of one of a trial's random streams."""
    digest = hashlib.blake2b(f"{seed} {purpose} {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial(trial: Trial, splits: Splits) -> nn.Module:
    """The trial's network before training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(trial.seed, "init"))
        config, shape = trial.config, splits.train.inputs.shape[1:]
        return models.build(config.model, shape, len(splits.classes), config.hyper.dropout or 0.0)


def trials_in(file: Path) -> set[Identity]:
    """The trials of a checkpoint; none if it does not say, or cannot be read."""
    try:
        with safe_open(file, framework="pt") as stored:
            return {(key, seed, stage) for key, seed, stage in json.loads(stored.metadata()["trials"])}
    except Exception:  # a damaged file can raise nearly anything
        return set()


def identity(members: Sequence[Member]) -> str:
    """The name of a population's checkpoint; only the same trials on the same rows have the same name."""
    text = json.dumps(
        [(t.config.to_json(), t.seed, s.fingerprint, s.index_hash) for t, s in members], sort_keys=True, default=str
    )
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
