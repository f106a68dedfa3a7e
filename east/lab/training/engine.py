"""The training engine: it trains a population of trials at once; a single trial is a population of one.

The trials of a population share data, network, loss, batch size and protocol, and are stacked in a leading dimension P.
They may differ in seed, split, learning rate, dropout, weight decay and annealing. `train_population` is the method.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from east.lab import models
from east.lab.data.common import Splits
from east.lab.files import set_aside
from east.lab.models.mlp import Masks
from east.lab.settings.settings import Science
from east.lab.training.devices import pick_device
from east.lab.training.loggers import Logger, logging
from east.lab.training.population import Member, Outcome, Population, Trial, identity, rows_used, samples
from east.lab.training.progress import reporting
from east.losses.inputs import Loss

CACHE_BYTES = 18 << 20  # what a step of a population may touch without falling out of the last-level cache
CHECKPOINT_SECONDS = 60.0


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
    **options: Any,
) -> Iterator[tuple[list[Outcome], Path | None]]:
    """Train one population after the other; yield its outcomes and the checkpoint to delete once they are saved.

    splits: one for all trials, or one each. checkpoint: a folder; a checkpoint of exactly these trials is resumed.
    options: see `train_population`.
    """
    each = [splits] * len(trials) if isinstance(splits, Splits) else splits
    target = pick_device(device)
    waiting = populations(list(zip(trials, each, strict=True)), target)
    while waiting:
        members = waiting.pop(0)
        file = Path(checkpoint) / f"{identity(members)}.safetensors" if checkpoint else None
        try:
            outcomes = train_population(members, target, file, **options)
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
    progress: bool | Path = False,
    start_logger: Callable[[Trial], Logger] | None = None,
    compile: bool = False,
) -> list[Outcome]:
    """Train P trials in step, each with its own temperature and early stopping; finished trials leave the population.

    Section 4, arXiv 2405.20954: train at one temperature until early stopping, go back to that stage's best weights,
    cool, and stop when cooling no longer helps. A loss without a temperature has a single stage.
    file: the checkpoint. progress: show a bar, or rewrite a file every few seconds.
    """
    population = resumed(members, device, file) if file else Population(members, device)
    saved = time.monotonic()
    if population.splits.kind == "image":
        torch.backends.cudnn.benchmark = True  # it times its algorithms, once for each shape
    # Modules with random layers draw from the global generator; its state is restored afterwards.
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        reporting(population, progress) as step_done,
        logging(population.trials, start_logger) as log,
    ):
        while alive := population.alive:
            started, train_loss = time.perf_counter(), torch.zeros(len(alive), device=device)
            for losses in training_steps(population, torch.compile(losses_of) if compile else losses_of):
                train_loss += losses
                step_done()
            population.end_epoch(train_loss / population.steps)
            for p in alive:
                course = population.annealing[p].course
                course.seconds += (time.perf_counter() - started) / len(alive)
                log(p, course.history)
            if file and time.monotonic() - saved >= CHECKPOINT_SECONDS:
                try:
                    population.save(file)
                except OSError as error:  # the disk is full, or another command deleted the folder
                    warnings.warn(f"no checkpoint written: {error}", stacklevel=2)
                saved = time.monotonic()
    return population.outcomes()


def training_steps(population: Population, losses_of: Callable[..., Tensor]) -> Iterator[Tensor]:
    """Train for one epoch; yields the losses [alive] of each step."""
    objective, net = population.objective(), population.net
    for inputs, labels, weights, masks in population.batches():
        losses = losses_of(net, objective, inputs, labels, weights, masks, population.mixed)
        net.backward(losses)
        population.optimizer.step()
        if population.average:
            population.average.update()
        yield losses.detach()


def losses_of(
    net: models.Stack, objective: Loss, inputs: Tensor, labels: Tensor, weights: Tensor | None, masks: Masks | None,
    mixed: bool,
) -> Tensor:  # fmt: skip
    """The losses [alive] of a batch."""
    with torch.autocast(inputs.device.type, torch.bfloat16) if mixed else nullcontext():
        logits = net(inputs, training=True, masks=masks)
    return objective.per_trial(*samples(logits, labels), weights)


def resumed(members: Sequence[Member], device: torch.device, file: Path) -> Population:
    """A population restored from its checkpoint, or a new one if there is none or it cannot be read."""
    population = Population(members, device)
    try:
        population.load(file)
    except FileNotFoundError:  # there is none, or another command has recorded these trials and deleted it
        pass
    except (OSError, MemoryError, torch.OutOfMemoryError):  # of this machine: the file may be good
        raise
    except Exception as error:  # a damaged file can raise nearly anything
        kept = set_aside(file)
        reason = str(error).partition("\n")[0]
        warnings.warn(f"{file} is a damaged checkpoint ({reason}); set aside as {kept.name}, and its trials start over",
                      stacklevel=2)  # fmt: skip
        return Population(members, device)  # the first may be half restored
    return population


def populations(members: Sequence[Member], device: torch.device) -> list[Sequence[Member]]:
    """Groups of members that train together, in the given order.

    They share a stacking key. Splits can be stacked if an epoch has as many rows in all of them and only the rows
    differ. They do not share a population if they also differ in the scaling of images, in class weights, or in the
    number of features (categories of a file are learnt from its training rows).
    """

    def alike(member: Member) -> tuple:
        (trial, splits), config = member, member[0].config
        if splits.kind == "image" or config.loss.options.get("class_weights") == "balanced":
            return trial.stacking_key, splits.index_hash
        rows = rows_used(len(splits.train), config.hyper.batch_size or 1)
        in_batches = len(splits.val) if config.protocol.val_reduce == "batch_mean" else 0  # of equal size, then
        return trial.stacking_key, rows, in_batches, splits.train.inputs.shape[1:]

    parts: list[Sequence[Member]] = []
    for _, members_alike in groupby(members, alike):
        group = list(members_alike)
        size = population_size(group[0][0].config, device, len(group))
        parts += [group[k : k + size] for k in range(0, len(group), size)]
    return parts


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
    floats = 4 * sum(a * b for a, b in pairwise(hidden)) + 2 * (config.hyper.batch_size or 1) * sum(hidden)
    most = max(1, CACHE_BYTES // (4 * max(1, floats)))
    return math.ceil(trials / math.ceil(trials / most))
