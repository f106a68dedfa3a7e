"""How long training takes on this machine: a few timed steps of the real network and loss, on made-up rows."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn

from east.lab import models
from east.lab.data.common import Data, Graphs, Images, Table, split
from east.lab.settings.sections import LossSection, Science
from east.lab.training.engine import Setup, batches_of, population_size, samples
from east.lab.training.population import Trial

STEPS = 3
ENOUGH = 0.6  # seconds of timed steps after which timing stops
STEP_OPERATIONS = 5e10  # of a timed step of images, at most: about a second on a core
COMPUTE_BOUND = 0.05  # seconds: a step this long takes time in proportion to its batch
VALIDATION = 1 / 12  # cost relative to an epoch's training: forward passes over a quarter as many rows
USUAL = {True: 12, False: 4}  # epochs per patience, with and without cooling: about what the committed trials took
GPU_FLOPS = 1e13  # operations per second that a GPU is assumed to sustain
GPU_STEP = 2e-3  # seconds that even the smallest step takes on a GPU
STACKED = 4  # trials timed together where the engine would stack them

_KNOWN: dict[tuple, float] = {}  # what this process has already timed or counted


@dataclass(frozen=True)
class Size:
    """What matters for time in a dataset: training rows, the shape of a row, and the number of classes."""

    rows: int
    shape: tuple[int, ...]
    classes: int
    kind: str = "table"

    @classmethod
    def of(cls, data: Data, rows: int) -> "Size":
        """The size of data with `rows` training rows."""
        return cls(rows, tuple(data.inputs.shape[1:]), len(data.classes), data.kind)

    def stand_in(self, rows: int) -> Data:
        """Made-up data of the same shape."""
        generator = torch.Generator().manual_seed(0)
        labels, names = torch.arange(rows) % self.classes, tuple(map(str, range(self.classes)))
        positive = 1 if self.classes == 2 else None
        if self.kind == "image":
            pixels = torch.randint(256, (rows, *self.shape), generator=generator, dtype=torch.uint8)
            return Images(pixels=pixels, labels=labels, classes=names, name="timing", positive=positive)
        values = torch.randn(rows, *self.shape, generator=generator)
        if self.kind == "graph":
            pairs = self.shape[0] * (self.shape[0] - 1) // 2
            labels = labels[:, None].repeat(1, pairs)
            return Graphs(nodes=values, labels=labels, classes=names, name="timing", positive=positive)
        return Table(features=values, labels=labels, classes=names, name="timing", positive=positive)


def trial_seconds(config: Science, size: Size, epochs: float, device: torch.device) -> float:
    """How long a trial of `epochs` epochs takes, stacked with others if the engine would do so."""
    return steps_of(config, size, epochs) * step_seconds(config, size, device)


def steps_of(config: Science, size: Size, epochs: float) -> float:
    """Steps of a trial; validation counts as the number of training steps that take as long."""
    batch = min(config.hyper.batch_size or 1, size.rows)
    return (batches_of(size.rows, batch) * (1 + VALIDATION) + 1) * epochs


def usual_epochs(config: Science, size: Size) -> float:
    """How many epochs such a trial usually takes; early stopping decides."""
    protocol, cools = config.protocol, config.loss.anneals and config.annealing.schedule != "none"
    length = USUAL[cools] * protocol.patience
    if not cools and protocol.stage_epochs:
        length = min(length, protocol.stage_epochs)
    length = min(length + protocol.warmup, protocol.max_epochs)
    if protocol.count == "epochs":
        return length
    return math.ceil(length / batches_of(size.rows, min(config.hyper.batch_size or 1, size.rows)))


def step_seconds(config: Science, size: Size, device: torch.device) -> float:
    """Seconds of a step per trial. If steps are long, a smaller batch is timed and scaled up."""
    batch = min(config.hyper.batch_size or 1, size.rows)
    small = min(batch, 32)
    if size.kind == "image":
        small = min(small, max(4, int(STEP_OPERATIONS / operations(config, size))))
    seconds = timed_step(config, small, size, device)
    if small == batch or seconds > COMPUTE_BOUND:
        return seconds * batch / small
    full = min(batch, 2048)
    return timed_step(config, full, size, device) * batch / full


def timed_step(config: Science, batch: int, size: Size, device: torch.device) -> float:
    """Seconds per trial of a step of `batch` rows, timed once per process."""
    hyper = config.hyper.but(batch_size=batch, lr=1e-3, dropout=0.25 if config.hyper.dropout else 0.0)
    config = config.but(hyper=hyper, loss=without_class_names(config.loss))
    together = population_size(config, device, STACKED)
    # Not the config's key: points of a grid that differ in cooling, patience or rates take the same time.
    sections = tuple(str(section.to_json()) for section in (config.model, config.loss, config.hyper))
    key = (*sections, config.protocol.precision, size, device, together, torch.get_num_threads())
    if key not in _KNOWN:
        _KNOWN[key] = _time(config, batch, size, device, together)
    return _KNOWN[key]


def without_class_names(loss: LossSection) -> LossSection:
    """The loss without names of classes, which made-up rows do not have; it takes as long."""

    def unnamed(options: Mapping[str, Any]) -> dict[str, Any]:
        changed = {"beta": 1.0} if isinstance(options.get("beta"), Mapping) else {}
        return changed | ({"positive": 0} if isinstance(options.get("positive"), str) else {})

    parameters = loss.options.get("parameters") or {}
    within = {"parameters": {**parameters, **unnamed(parameters)}} if unnamed(parameters) else {}
    return loss.but(**unnamed(loss.options), **within)


def _time(config: Science, batch: int, size: Size, device: torch.device, together: int) -> float:
    splits = split(size.stand_in(2 * max(batch, 2 * size.classes, 6)), fractions=(0.5, 0.25, 0.25))
    setup = Setup([(Trial(config, seed), splits) for seed in range(together)], device)
    if setup.loss.anneals:
        setup.loss.temperature = torch.full((together,), 0.1, device=device)
    seconds: list[float] = []
    batches = (batch for epoch in count(1) for batch in setup.batches(setup.population.alive, epoch))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        for inputs, labels, weights, masks in islice(batches, STEPS + 1):
            started = time.perf_counter()
            with setup.autocast:
                logits = setup.net(inputs, training=True, masks=masks)
            setup.optimizer.step(setup.net.gradient(setup.loss.per_trial(*samples(logits, labels), weights)))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
            if sum(seconds[1:]) > ENOUGH:
                break
    return min(seconds[1:]) / together  # the first step also allocates and compiles: up to a thousand times as long


def gpu_seconds(config: Science, size: Size, epochs: float) -> float:
    """How long a trial would take on a GPU, by arithmetic: operations at GPU_FLOPS, and GPU_STEP for every step."""
    steps = steps_of(config, size, epochs)
    batch = min(config.hyper.batch_size or 1, size.rows)
    together = 10 if config.model.name in models.TOGETHER else 1
    return steps * (batch * operations(config, size) / GPU_FLOPS + GPU_STEP / together)


def operations(config: Science, size: Size) -> float:
    """Floating-point operations of training on one row: a forward pass, and twice as many for its gradient."""
    key = (str(config.model.to_json()), size)
    if key not in _KNOWN:
        _KNOWN[key] = 3 * forward_operations(models.build(config.model, size.shape, size.classes), size.shape)
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
