"""The training engine: a population of trials at once, one trial being a population of one.

The trials of a population share data, network, loss and batch size, and are stacked in a leading dimension P. What
differs between them (seed, learning rate, dropout, weight decay, schedule, patience, split) is one number per trial.
Everything random in a trial is a function of its own seed: no generator is carried along, so a trial sees the same
weights, batches and masks alone or in company, before or after a resume. `train_population` is the whole method.
"""

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from east import losses, models
from east.choices import choose, install_hint
from east.confusion import Confusion
from east.data.common import Splits
from east.training.annealing import Annealing
from east.training.devices import pick_device
from east.training.evaluation import validation_metric
from east.training.optimizer import Adam
from east.training.population import HISTORY, Member, Outcome, Population, Rows, Trial, identity, initial, stream

CACHE_BYTES = 4 << 20  # activations of a step that a CPU core computes without waiting for memory
CHECKPOINT_SECONDS = 60.0
EVALUATION_ROWS = 1024
OPTIMIZERS = ("adam", "adamw")
VAL_REDUCE = ("split", "batch_mean")


def train(trials: Sequence[Trial], splits: Splits | Sequence[Splits], **options: Any) -> list[Outcome]:
    """Train the trials; their outcomes come in the same order, and no checkpoint stays. Options of `train_in_turn`."""
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
    progress: bool = True,
    tensorboard: Path | None = None,
    compile: bool = False,
) -> Iterator[tuple[list[Outcome], Path | None]]:
    """Train one population after the other: its outcomes, and the checkpoint to remove when they are in safety.

    trials: share dataset, model, loss, batch size and optimiser. splits: one for all of them, or one each.
    checkpoint: a folder. What it holds of these very trials is continued.
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
    progress: bool = False,
    tensorboard: Path | None = None,
    compile: bool = False,
) -> list[Outcome]:
    """Train P trials in step, epoch by epoch, each with its own temperature and early stopping; those that end leave.

    Section 4, arXiv 2405.20954: train at one temperature until early stopping, go back to that stage's best weights,
    cool, and stop when cooling no longer helps. A loss without a temperature has a single stage.
    """
    trials, first = [trial for trial, _ in members], members[0][1]
    splits = replace(first, mean=first.mean.to(device), std=first.std.to(device))  # once, not at every step
    config, hyper = trials[0].config, [trial.config["hyper"] for trial in trials]
    batch, protocol = hyper[0]["batch_size"], config["protocol"]
    train_set, val_set, test_set = (Rows.of(members, part, device) for part in ("train", "val", "test"))
    batches = len(train_set) // batch if len(train_set) >= 2 * batch else math.ceil(len(train_set) / batch)
    rates = torch.tensor([float(h["dropout"]) for h in hyper], device=device)
    dropping = any(h["dropout"] for h in hyper)
    by_batches = choose("val_reduce", protocol.get("val_reduce") or "split", VAL_REDUCE) == "batch_mean"

    loss = losses.build(config["loss"], splits.classes, splits.train.labels, splits.positive).to(device)
    metric = validation_metric(loss, splits.positive)
    annealing = Annealing([trial.config for trial in trials], loss.anneals, getattr(loss, "temperature", 0.2))
    net = models.Stack([initial(trial, splits) for trial in trials], device)
    optimizer = Adam(net, hyper, decoupled=protocol["optimizer"] == "adamw")
    population = Population(trials, net, optimizer, annealing)
    if file is not None and file.exists():
        population.load(file)
    forward = torch.compile(net.__call__) if compile else net
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=splits.kind == "image" and device.type == "cuda")
    saved = time.monotonic()

    with ExitStack() as resources:
        # Modules with random layers of their own draw from the global generator; it is put back afterwards.
        resources.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        bar = resources.enter_context(progress_bar(annealing, progress))
        writers = [resources.enter_context(writer) for writer in open_writers(trials, tensorboard)]

        while len(population.alive):
            started, alive = time.perf_counter(), population.alive
            epoch = int(annealing.epochs[alive[0]]) + 1
            rows = torch.as_tensor(alive, device=device)
            temperature = annealing.temperature
            if loss.anneals:
                loss.temperature = torch.tensor(temperature[alive], dtype=torch.float32, device=device)
            order = train_set.order([trials[p].seed for p in alive], rows, epoch)
            seeds = [stream(trials[p].seed, "dropout", epoch) for p in alive]
            keys = torch.tensor(seeds, device=device)
            torch.manual_seed(seeds[0])
            dropout, total = rates[rows], torch.zeros(len(alive), device=device)
            warming = annealing.warming.any()  # all or none: trials of a population share their protocol
            objective = losses.CrossEntropy() if warming else loss

            for step in range(batches):
                index = order[:, step * batch : (step + 1) * batch]
                noise = (keys, step, dropout) if dropping else None
                with autocast:
                    logits = forward(prepared(splits, train_set.inputs[index], device), training=True, noise=noise)
                values = objective(*samples(logits, train_set.labels[index]))
                optimizer.step(torch.autograd.grad(values.sum(), net.leaves, materialize_grads=True))
                total += values.detach()
                bar.update(1 / batches)

            logits, labels = predict(net, val_set, rows, splits, batch)
            values = validation_loss(loss, logits, labels, batch if by_batches else None)
            decisions = Confusion.from_predictions(logits.argmax(-1).cpu(), labels.cpu(), logits.shape[-1])
            numbers = np.full((len(trials), 3), np.nan)
            numbers[alive, :2] = torch.stack([total / batches, values], dim=1).cpu()
            numbers[alive, 2] = 1 - metric(decisions)

            for p in alive:
                T = float(temperature[p]) if loss.anneals else None
                entry = dict(zip(HISTORY, [epoch, T, *numbers[p].tolist()], strict=True))
                population.log(p, entry)
                for name in HISTORY[1:] if writers else ():
                    if entry[name] is not None:
                        writers[p].add_scalar(name, entry[name], epoch)
            population.follow(annealing.update(numbers[:, 1], numbers[:, 2]))
            population.seconds[alive] += (time.perf_counter() - started) / len(alive)
            bar.n = epoch
            hottest = f"T {temperature[alive].max():.3g}, " if loss.anneals else ""
            left = f"alive {len(population.alive)}/{len(trials)}"
            best = "warm-up" if warming else f"best {1 - annealing.lowest_metric:.3f}"
            bar.set_postfix_str(f"{hottest}{best}, {left}", refresh=False)
            if file is not None and time.monotonic() - saved >= CHECKPOINT_SECONDS:
                try:
                    population.save(file)
                except OSError as error:  # a full disk, or another command has cleared the folder: training goes on
                    warnings.warn(f"no checkpoint written: {error}", stacklevel=2)
                saved = time.monotonic()

    net.put(population.result)
    everyone = torch.arange(len(trials), device=device)
    predictions = {
        part: predict(net, data, everyone, splits, batch) for part, data in (("val", val_set), ("test", test_set))
    }
    return [population.outcome(p, predictions) for p in range(len(trials))]


def prepared(splits: Splits, inputs: Tensor, device: torch.device) -> Tensor:
    """What the networks see of inputs [P, n, ...]; images lie in memory as the fastest convolutions want them."""
    inputs = splits.prepare(inputs)
    if splits.kind == "image" and device.type != "mps" and len(inputs) == 1:
        inputs = inputs.squeeze(0).contiguous(memory_format=torch.channels_last).unsqueeze(0)
    return inputs


def samples(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """logits [P, n, d] and labels [P, n]; where a sample has several labels, as a graph has pairs, each counts."""
    return logits.flatten(1, -2), labels.flatten(1)


@torch.no_grad()
def predict(net: models.Stack, data: Rows, trials: Tensor, splits: Splits, batch: int) -> tuple[Tensor, Tensor]:
    """Logits [alive, n, d], d >= 2, and labels [alive, n] of all rows, in float32."""
    rows = batch if splits.kind == "image" else max(batch, EVALUATION_ROWS)
    index = torch.arange(len(data), device=trials.device) + data.start[trials, None]
    chunks = [net(prepared(splits, data.inputs[part], trials.device)) for part in index.split(rows, dim=1)]
    logits, labels = samples(torch.cat(chunks, dim=1), data.labels[index])
    if logits.shape[-1] == 1:
        logits = torch.cat((torch.zeros_like(logits), logits), dim=-1)
    return logits, labels


@torch.no_grad()
def validation_loss(loss: nn.Module, logits: Tensor, labels: Tensor, batch: int | None) -> Tensor:
    """The loss [P] of a whole split, or, as Bridging the Gap's code has it, the mean loss of its batches."""
    if batch is None:
        return loss(logits, labels)
    pairs = zip(logits.split(batch, dim=1), labels.split(batch, dim=1), strict=True)
    return torch.stack([loss(*pair) for pair in pairs]).mean(0)


def population_size(config: Mapping[str, Any], device: torch.device) -> int | None:
    """The most trials of such a config that should train together; None for no limit.

    Only MLPs are computed together. On a CPU a step's activations should stay in the cache: wider stacks are slower. On
    a GPU there is no such limit, and `train` halves a population that does not fit the memory.
    """
    if config["model"]["name"] not in models.TOGETHER:
        return 1
    if device.type != "cpu":
        return None
    return max(1, CACHE_BYTES // (4 * config["hyper"]["batch_size"] * max(1, sum(config["model"]["hidden"]))))


def populations(members: Sequence[Member], device: torch.device) -> list[Sequence[Member]]:
    """Members that train together, in the given order.

    Splits of one size can be stacked, unless more than their rows differs: the scaling of images, class weights, the
    features of a file whose categories were learnt from other training rows.
    """
    config, splits = members[0][0].config, members[0][1]
    most = population_size(config, device) or len(members)
    apart = splits.kind == "image" or config["loss"].get("class_weights") == "balanced"

    def shape(splits: Splits) -> tuple[dict[str, int], torch.Size]:
        return splits.sizes, splits.train.inputs.shape[1:]

    groups = groupby(members, lambda member: member[1].index_hash if apart else shape(member[1]))
    return [group[k : k + most] for _, g in groups for group in [list(g)] for k in range(0, len(group), most)]


def check(trials: Sequence[Trial], splits: Sequence[Splits]) -> None:
    """Refuse trials that cannot train together, and hyperparameters that no trial can have."""
    if not trials or len(splits) != len(trials):
        raise ValueError(
            f"expected trials and one split for all or one each, got {len(trials)} and {len(splits)} splits"
        )
    first = trials[0].config
    for trial in trials:
        config, hyper = trial.config, trial.config["hyper"]
        for section in ("dataset", "model", "loss", "protocol"):
            if config[section] != first[section]:
                raise ValueError(
                    f"trials of one population share {section!r}: {config[section]} is not {first[section]}"
                )
        if hyper["batch_size"] != first["hyper"]["batch_size"]:
            sizes = f"{hyper['batch_size']} is not {first['hyper']['batch_size']}"
            raise ValueError(f"trials of one population share hyper.batch_size: {sizes}")
        if not (isinstance(hyper["batch_size"], int) and hyper["batch_size"] > 0):
            raise ValueError(f"hyper.batch_size: expected a positive whole number, got {hyper['batch_size']!r}")
        if not 0 <= hyper["dropout"] <= 255 / 256:
            raise ValueError(f"hyper.dropout: expected a rate from 0 to below 1, got {hyper['dropout']!r}")
        choose("optimizer", config["protocol"]["optimizer"], OPTIMIZERS)


def progress_bar(annealing: Annealing, shown: bool) -> tqdm:
    return tqdm(
        total=int(annealing.max_epochs.max()),
        bar_format="epoch {n:.1f} of at most {total} [{elapsed}{postfix}]",
        disable=None if shown else True,
        leave=False,
    )


def open_writers(trials: Sequence[Trial], folder: Path | None) -> list:
    """A TensorBoard writer per trial, or none."""
    if folder is None:
        return []
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(f"tensorboard is not installed: {install_hint('tensorboard')}") from error
    names = []
    for trial in trials:
        hyper = "-".join(f"{name}{value}" for name, value in trial.config["hyper"].items() if value is not None)
        names.append(f"{trial.config['dataset']['name']}-{trial.config['loss']['name']}-{hyper}-seed{trial.seed}")
    return [SummaryWriter(str(Path(folder) / name)) for name in names]
