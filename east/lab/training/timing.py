"""How long training takes on this machine: timed steps of the real network and loss, or two small fits, scaled up."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from east.lab import models
from east.lab.data.common import Data, Kind, Part, Splits, stratified
from east.lab.settings.settings import Science
from east.lab.training.engine import losses_of, population_size, training_steps
from east.lab.training.population import Population, Trial, batches_of

STEPS = 3
ENOUGH = 0.6  # seconds of timed steps after which timing stops
STEP_OPERATIONS = 1e10  # of a timed step: a quarter of a second on a core; larger batches are scaled up
SAMPLED, LEAST = 20, 200  # a classifier is timed on one in so many rows, but on at least so many
VALIDATION = 1 / 12  # cost relative to an epoch's training: forward passes over a quarter as many rows
USUAL = {True: 12, False: 4}  # epochs per patience, with and without cooling: about what the committed trials took
GPU_FLOPS = 1e13  # operations per second that a GPU is assumed to sustain
GPU_STEP = 2e-3  # seconds that even the smallest step takes on a GPU
STACKED = {"cpu": 4}  # trials timed together where the engine would stack them; on a GPU ten cost little more than one

_KNOWN: dict[tuple, float] = {}  # what this process has already timed or counted


@dataclass(frozen=True)
class Size:
    """The size of a dataset: training rows, shape of a row, number of classes."""

    rows: int
    shape: tuple[int, ...]
    classes: int
    kind: Kind = "table"

    @classmethod
    def of(cls, data: Data, rows: int) -> "Size":
        """The size of data with `rows` training rows."""
        return cls(rows, tuple(data.inputs.shape[1:]), len(data.classes), data.kind)

    def stand_in(self, rows: int) -> Splits:
        """Made-up data of the same shape, whose three parts are the same rows."""
        generator, labels = torch.Generator().manual_seed(0), torch.arange(rows) % self.classes
        inputs = torch.randn(rows, *self.shape, generator=generator)
        if self.kind == "image":
            inputs = inputs.abs().to(torch.uint8)
        if self.kind == "graph":
            labels = labels[:, None].repeat(1, self.shape[0] * (self.shape[0] - 1) // 2)
        part, classes = Part(inputs, labels, torch.arange(rows)), tuple(map(str, range(self.classes)))
        positive, scale = 1 if self.classes == 2 else None, (torch.zeros(3), torch.ones(3))
        return Splits(part, part, part, classes, "timing", positive, "", "", *scale, self.kind)


def trial_seconds(config: Science, size: Size, epochs: float, device: torch.device) -> float:
    """Seconds of a trial of `epochs` epochs, stacked with others if the engine would do so; of all networks of one."""
    return config.ensemble.members * steps_of(config, size, epochs) * step_seconds(config, size, device)


def classical_seconds(config: Science, splits: Splits) -> float:
    """Seconds of fitting and evaluating a classical model."""
    from east.lab.training import classical

    train = splits.train

    def fit(rows: np.ndarray) -> None:
        sample = replace(train, inputs=train.inputs[rows], labels=train.labels[rows], weights=None)
        classical.fit(Trial(config, 0), replace(splits, train=sample))

    return fit_seconds(fit, train.labels.numpy(), [len(train)])


def fit_seconds(fit: Callable[[np.ndarray], object], labels: np.ndarray, lengths: Sequence[int]) -> float:
    """Seconds of fits to so many rows each: the line through two fits to small samples of the rows."""
    many = min(len(labels), max(LEAST, len(labels) // SAMPLED))
    counts, seconds = (max(many // 2, 1), many), []
    for count_of_rows in counts:
        sample = stratified(labels, count_of_rows, np.random.RandomState(0), least=1)
        started = time.perf_counter()
        fit(sample)
        seconds.append(time.perf_counter() - started)
    per_row = max(seconds[1] - seconds[0], seconds[1] / 4) / (counts[1] - counts[0] or 1)  # a first fit may be slow
    return sum(seconds[1] + per_row * max(0, length - many) for length in lengths)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with so many threads in this block, such as one, as workers do."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def steps_of(config: Science, size: Size, epochs: float) -> float:
    """Steps of a trial; validation counts as the number of training steps that take as long."""
    return (batches_of(size.rows, batch_of(config, size)) * (1 + VALIDATION) + 1) * epochs


def batch_of(config: Science, size: Size) -> int:
    return min(config.hyper.batch_size or 1, size.rows)


def usual_epochs(config: Science, size: Size) -> float:
    """How many epochs such a trial usually takes; early stopping decides."""
    protocol, cools = config.protocol, config.loss.anneals and config.annealing.schedule != "none"
    length = USUAL[cools] * protocol.patience
    if not cools and protocol.stage_epochs:
        length = min(length, protocol.stage_epochs)
    length = min(length + protocol.warmup, protocol.max_epochs)
    return length if protocol.count == "epochs" else math.ceil(length / batches_of(size.rows, batch_of(config, size)))


def step_seconds(config: Science, size: Size, device: torch.device) -> float:
    """Seconds of a step per trial. Of a batch that takes long, a part is timed and scaled up."""
    batch = batch_of(config, size)
    timed = min(batch, max(4, int(STEP_OPERATIONS / max(operations(config, size), 1))))
    if device.type != "cpu":  # where half a batch may take as long as a whole one
        timed = batch
    hyper = config.hyper.but(batch_size=timed, lr=1e-3, dropout=0.25 if config.hyper.dropout else 0.0)
    loss = config.loss.but(**without_class_names(config.loss.options))
    config = config.but(hyper=hyper, loss=loss, model=models.untrained(config.model))
    together = population_size(config, device, STACKED.get(device.type, 10))
    # Not the config's key: points of a grid that differ in cooling, patience or rates take the same time.
    # Nor the metric of a loss: MCC takes about as long as F1. Nor any loss of images: the network takes a hundred times
    # as long.
    key = (
        str(config.model.to_json()),
        None if size.kind == "image" else (config.loss.target, str(config.loss.options.get("threshold"))),
        str(hyper.to_json()),
        config.protocol.precision,
        (size.kind, size.shape, size.classes),
        device,
        together,
        torch.get_num_threads(),
    )
    if key not in _KNOWN:
        _KNOWN[key] = measured(config, size, device, together)
    return _KNOWN[key] * batch / timed


def without_class_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a loss without names of classes, which made-up rows do not have; its steps take as long."""
    nested = options.get("parameters")
    named = {"beta": 1.0} if isinstance(options.get("beta"), Mapping) else {}
    named |= {"positive": 0} if isinstance(options.get("positive"), str) else {}
    return {**options, **named, **({"parameters": without_class_names(nested)} if nested else {})}


def measured(config: Science, size: Size, device: torch.device, together: int) -> float:
    """Seconds per trial of the fastest of a few steps of `together` stacked trials on made-up rows."""
    batch = config.hyper.batch_size or 1
    splits = size.stand_in(max(batch, 2 * size.classes, 6))
    population = Population([(Trial(config, seed), splits) for seed in range(together)], device)
    seconds: list[float] = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        started = time.perf_counter()
        for _ in islice(chain.from_iterable(training_steps(population, losses_of) for _ in count()), STEPS + 1):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
            if sum(seconds[1:]) > ENOUGH:
                break
            started = time.perf_counter()
    return min(seconds[1:]) / together  # the first step also allocates and compiles: up to a thousand times as long


def gpu_seconds(config: Science, size: Size, epochs: float) -> float:
    """How long a trial would take on a GPU, by arithmetic: operations at GPU_FLOPS, and GPU_STEP for every step."""
    together = 10 if config.model.name in models.TOGETHER else 1
    step = batch_of(config, size) * operations(config, size) / GPU_FLOPS + GPU_STEP / together
    return steps_of(config, size, epochs) * step


def operations(config: Science, size: Size) -> float:
    """Floating-point operations of training on one row: a forward pass, and twice as many for its gradient."""
    key = (str(config.model.to_json()), size)
    if key not in _KNOWN:
        net = models.build(models.untrained(config.model), size.shape, size.classes)
        _KNOWN[key] = 3 * forward_operations(net, size.shape)
    return _KNOWN[key]


def forward_operations(net: nn.Module, shape: tuple[int, ...]) -> float:
    """Operations of linear and convolutional layers on one row: two for every use of a weight.

    torch's FlopCounterMode counts the rest as well, but it imports the compiler, which takes longer than the timing.
    """
    counts: list[float] = []

    def count_uses(layer: nn.Module, _: object, outputs: Tensor) -> None:
        weight = layer.weight
        assert isinstance(weight, Tensor)
        counts.append(2 * weight.numel() * outputs.numel() / weight.shape[0])

    for layer in net.eval().modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            layer.register_forward_hook(count_uses)
    with torch.no_grad():
        net(torch.zeros(1, *shape))
    return sum(counts)
