"""The training engine: a population of trials at once, one trial being a population of one.

The trials of a population share data, network, loss and batch size, and are stacked in a leading dimension P. What
differs between them (seed, learning rate, dropout, weight decay, schedule, patience, split) is one number per trial.
Everything random in a trial is a function of its own seed: no generator is carried along, so a trial sees the same
weights, batches and masks alone or in company, before or after a resume. `train_population` is the whole method.
"""

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from east import losses, models
from east.annealing import Annealing, Verdict
from east.choices import choose
from east.confusion import Confusion
from east.data.common import Splits
from east.evaluation import validation_metric

CACHE_BYTES = 4 << 20  # activations of a step that a CPU core computes without waiting for memory
CHECKPOINT_SECONDS = 60.0
EVALUATION_ROWS = 1024
HISTORY = ("epoch", "temperature", "train_loss", "val_loss", "val_metric")
OPTIMIZERS = ("adam", "adamw")
VAL_REDUCE = ("split", "batch_mean")
DEVICES = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Trial:
    """One training run: a resolved scientific config and a seed."""

    config: dict[str, Any]
    seed: int
    stage: str = "trial"  # or "search"


Member = tuple[Trial, Splits]


@dataclass
class Outcome:
    """What a trial came to. A failed one has its error and its history, but no predictions."""

    trial: Trial
    status: str  # done | failed
    error: str | None
    stopped: str  # patience | stage_epochs | coolings | coldest | max_epochs | diverged
    epochs: int
    seconds: float  # its share of the population's time
    best: dict[str, float | None]  # val_loss, val_metric, temperature and epoch of the weights that were kept
    history: dict[str, list]  # HISTORY, one entry per epoch; no temperature where the loss has none
    probabilities: dict[str, np.ndarray] = field(default_factory=dict)  # val, test: float32 [n, d]
    labels: dict[str, np.ndarray] = field(default_factory=dict)  # val, test: int64 [n]
    weights: dict[str, Tensor] = field(default_factory=dict)  # state dict of the ordinary module


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


class Population:
    """What changes while trials train; everything that a checkpoint holds.

    alive: the trials behind the rows of `net`, `optimizer` and `stage_best`, which shrink as trials end.
    stage_best: [alive, N], weights at the lowest validation loss of the current temperature. result: [P, N], weights of
    the best stage so far.
    """

    def __init__(self, trials: Sequence[Trial], net: models.Stack, optimizer: "Adam", annealing: Annealing):
        self.trials, self.net, self.optimizer, self.annealing = trials, net, optimizer, annealing
        self.keep_optimizer = np.array([bool(t.config["annealing"].get("keep_optimizer")) for t in trials])
        self.alive = np.arange(len(trials))
        self.stage_best = net.weights.clone()
        self.result = net.weights.clone()
        self.history: list[dict[str, list]] = [{name: [] for name in HISTORY} for _ in trials]
        self.errors: list[str | None] = [None for _ in trials]
        self.seconds = np.zeros(len(trials))

    def log(self, p: int, entry: Mapping[str, Any]) -> None:
        """Add an epoch to trial p's history; a loss that is no longer a number ends the trial."""
        for name, number in entry.items():
            self.history[p][name].append(number)
        if not (math.isfinite(entry["train_loss"]) and math.isfinite(entry["val_loss"])):
            self.annealing.fail(p)
            self.errors[p] = (
                f"diverged in epoch {entry['epoch']}: training loss {entry['train_loss']:.3g}, "
                f"validation loss {entry['val_loss']:.3g}"
            )

    def follow(self, verdict: Verdict) -> None:
        """Remember, restore and drop weights as early stopping says."""

        def rows(mask: np.ndarray) -> Tensor:
            return torch.as_tensor(np.flatnonzero(mask[self.alive]), device=self.net.weights.device)

        improved, kept, cooled = rows(verdict.improved), rows(verdict.kept), rows(verdict.cooled)
        self.stage_best[improved] = self.net.weights[improved]
        self.result[torch.as_tensor(self.alive, device=kept.device)[kept]] = self.stage_best[kept]
        self.net.weights[cooled] = self.stage_best[cooled]
        self.optimizer.reset(rows(verdict.cooled & ~self.keep_optimizer))
        staying = rows(self.annealing.active)
        if len(staying) < len(self.alive):
            self.alive = self.alive[self.annealing.active[self.alive]]
            self.stage_best = self.stage_best[staying]
            self.net.put(self.net.weights[staying])
            self.optimizer.keep(staying)

    def outcome(self, p: int, predictions: Mapping[str, tuple[Tensor, Tensor]]) -> Outcome:
        failed = self.errors[p] is not None
        outcome = Outcome(
            trial=self.trials[p],
            status="failed" if failed else "done",
            error=self.errors[p],
            stopped=self.annealing.stopped[p],
            epochs=int(self.annealing.epochs[p]),
            seconds=float(self.seconds[p]),
            best=self.annealing.best_of(p),
            history=self.history[p],
        )
        if not failed:
            for part, (logits, labels) in predictions.items():
                outcome.probabilities[part] = logits[p].softmax(-1).cpu().numpy()
                outcome.labels[part] = labels[p].cpu().numpy()
            outcome.weights = self.net.state_dict(self.result[p])
        return outcome

    def save(self, file: Path) -> None:
        """Write a checkpoint under another name, then rename it: whoever is killed here leaves the last one intact."""
        tensors = {"weights": self.net.weights, "stage_best": self.stage_best, "result": self.result}
        state = {
            "annealing": self.annealing.state(),
            "alive": self.alive.tolist(),
            "history": self.history,
            "errors": self.errors,
            "seconds": self.seconds.tolist(),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}.tmp")
        save_file({**tensors, **self.optimizer.state()}, written, metadata={"state": json.dumps(state)})
        with open(written, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(written, file)

    def load(self, file: Path) -> None:
        device = str(self.net.weights.device)
        with safe_open(file, framework="pt", device=device) as stored:
            state = json.loads(stored.metadata()["state"])
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dict)
        self.stage_best, self.result = tensors["stage_best"], tensors["result"]
        self.net.put(tensors["weights"])
        self.optimizer.restore(tensors)
        self.annealing.restore(state["annealing"])
        self.alive, self.seconds = np.array(state["alive"], dtype=int), np.array(state["seconds"])
        self.history, self.errors = state["history"], state["errors"]


class Adam:
    """Adam, and AdamW if `decoupled`, on the rows of a Stack: torch.optim's formulas with a number per trial.

    hyper: lr, weight_decay and clip (of the gradient's norm; None for none) of each trial.
    """

    BETAS, EPS = (0.9, 0.999), 1e-8

    def __init__(self, net: models.Stack, hyper: Sequence[Mapping[str, Any]], decoupled: bool):
        self.net, self.decoupled = net, decoupled
        learned = net.weights[:, : net.learned]
        self.first, self.second, self.gradient, self.scratch = (torch.zeros_like(learned) for _ in range(4))
        self.steps, self.lr, self.decay, self.clip = (
            torch.tensor(values, dtype=torch.float32, device=learned.device)[:, None]
            for values in (
                [0] * len(hyper),
                [h["lr"] for h in hyper],
                [h["weight_decay"] for h in hyper],
                [math.inf if h.get("clip") is None else h["clip"] for h in hyper],
            )
        )
        self.decays = any(h["weight_decay"] for h in hyper)
        self.clips = any(h.get("clip") is not None for h in hyper)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One update from the gradients [P, ...] of the stack's leaves."""
        weights, gradient = self.net.weights[:, : self.net.learned], self.gradient
        torch.cat([g.flatten(1) for g in gradients], dim=1, out=gradient)
        if self.clips:
            gradient.mul_((self.clip / gradient.norm(dim=1, keepdim=True)).clamp_max(1))
        if self.decays and self.decoupled:
            weights.mul_(1 - self.lr * self.decay)
        elif self.decays:
            gradient.addcmul_(weights, self.decay)
        self.steps += 1
        # 1 - beta^t by expm1: the plain difference loses four digits of float32 in the first steps.
        first_bias, second_bias = (-torch.expm1(self.steps * math.log(beta)) for beta in self.BETAS)
        self.first.lerp_(gradient, 1 - self.BETAS[0])
        self.second.mul_(self.BETAS[1]).addcmul_(gradient, gradient, value=1 - self.BETAS[1])
        root = second_bias.sqrt()
        torch.sqrt(self.second, out=self.scratch)
        self.scratch.add_(self.EPS * root).div_(self.lr * root / first_bias)
        weights.addcdiv_(self.first, self.scratch, value=-1)

    def reset(self, rows: Tensor) -> None:
        """Forget the moments of these rows."""
        self.first[rows], self.second[rows], self.steps[rows] = 0, 0, 0

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        for name in ("first", "second", "gradient", "scratch", "steps", "lr", "decay", "clip"):
            setattr(self, name, getattr(self, name)[rows])

    def state(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("first", "second", "steps", "lr", "decay", "clip")}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        for name in self.state():
            setattr(self, name, tensors[name])
        self.gradient, self.scratch = torch.zeros_like(self.first), torch.zeros_like(self.first)


@dataclass
class Rows:
    """A part of the data on the device: inputs and labels of all distinct splits, one after the other.

    start: [P], where the `count` rows of each trial's split begin.
    """

    inputs: Tensor
    labels: Tensor
    start: Tensor
    count: int

    @classmethod
    def of(cls, members: Sequence[Member], part: str, device: torch.device) -> "Rows":
        distinct = {splits.index_hash: getattr(splits, part) for _, splits in members}
        parts, position = list(distinct.values()), list(distinct)
        count = len(parts[0].labels)
        one = len(parts) == 1
        return cls(
            (parts[0].inputs if one else torch.cat([p.inputs for p in parts])).to(device),
            (parts[0].labels if one else torch.cat([p.labels for p in parts])).to(device),
            torch.tensor([position.index(splits.index_hash) * count for _, splits in members], device=device),
            count,
        )

    def __len__(self) -> int:
        return self.count

    def order(self, seeds: Sequence[int], trials: Tensor, epoch: int) -> Tensor:
        """Row numbers [alive, n] in the order of an epoch, which depends on seed and epoch alone."""
        generators = [torch.Generator().manual_seed(stream(seed, "shuffle", epoch)) for seed in seeds]
        shuffled = torch.stack([torch.randperm(self.count, generator=g) for g in generators])
        return shuffled.to(self.start.device) + self.start[trials, None]


def stream(seed: int, purpose: str, epoch: int = 0) -> int:
    """The seed, below 2^63, of one of a trial's random streams."""
    digest = hashlib.blake2b(f"{seed} {purpose} {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial(trial: Trial, splits: Splits) -> nn.Module:
    """The trial's network before training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(trial.seed, "init"))
        config, shape = trial.config, splits.train.inputs.shape[1:]
        return models.build(config["model"], shape, len(splits.classes), config["hyper"]["dropout"])


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

    Splits of one size can be stacked, unless more than their rows differs: the scaling of images, class weights.
    """
    config, splits = members[0][0].config, members[0][1]
    most = population_size(config, device) or len(members)
    apart = splits.kind == "image" or config["loss"].get("class_weights") == "balanced"
    groups = groupby(members, lambda member: member[1].index_hash if apart else member[1].sizes)
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


def pick_device(name: str) -> torch.device:
    """The device of that name; `auto` is the fastest kind there is."""
    kind = choose("device", name.partition(":")[0], DEVICES)
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if kind == "auto":
        name = kind = next(kind for kind in ("cuda", "mps", "cpu") if available[kind])
    if not available[kind]:
        raise ValueError(
            f"device {name!r} is not available here; choices: {', '.join(k for k in available if available[k])}"
        )
    return torch.device(name)


def describe_device(device: str = "auto") -> str:
    """The device as a record names it: CUDA with its model, and whether its products are rounded to TF32."""
    chosen = pick_device(device)
    if chosen.type != "cuda":
        return chosen.type
    return (
        f"cuda ({torch.cuda.get_device_name(chosen)}, tf32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'})"
    )


def identity(members: Sequence[Member]) -> str:
    """The name of a population's checkpoint: only the very same trials on the same rows find it."""
    text = json.dumps(
        [(t.config, t.seed, s.fingerprint, s.index_hash) for t, s in members], sort_keys=True, default=str
    )
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


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
        raise ValueError("tensorboard is not installed: pip install 'east[tensorboard]'") from error
    names = []
    for trial in trials:
        hyper = "-".join(f"{name}{value}" for name, value in trial.config["hyper"].items() if value is not None)
        names.append(f"{trial.config['dataset']['name']}-{trial.config['loss']['name']}-{hyper}-seed{trial.seed}")
    return [SummaryWriter(str(Path(folder) / name)) for name in names]
