"""Trials that train together: their identity, data, random streams, and the state saved in a checkpoint."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn

from east.lab import models
from east.lab.data.common import Splits
from east.lab.files import write_atomically
from east.lab.settings.sections import Science
from east.lab.training.annealing import Annealing, Verdict
from east.lab.training.averaging import Average
from east.lab.training.optimizer import Adam
from east.lab.training.scores import Best
from east.losses import Loss

CHECKPOINT = 2  # version of the layout; a checkpoint of another version is not resumed
HISTORY = ("epoch", "temperature", "train_loss", "val_loss", "val_metric")

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
        sections = [getattr(self.config, name).to_json() for name in ("dataset", "split", "model", "loss", "protocol")]
        return json.dumps([sections, self.config.hyper.batch_size])


Member = tuple[Trial, Splits]


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

    @property
    def order(self) -> tuple[float, float]:
        """Lowest for the best outcome: validation loss, then what breaks its ties; infinite if no weights were kept."""
        return math.inf if self.best.val_loss is None else self.best.val_loss, self.best.tie or 0.0


class CheckpointState(TypedDict):
    """What a checkpoint holds besides tensors, as JSON."""

    annealing: dict[str, list]
    alive: list[int]
    history: list[dict[str, list]]  # this and what follows: one entry per trial
    errors: list[str | None]
    seconds: list[float]


class Population:
    """Everything that changes while trials train; a checkpoint saves it.

    alive: numbers of the trials in the rows of `net`, `optimizer` and `stage_best`, which shrink as trials end.
    stage_best: [alive, N], weights at the lowest validation loss of the current temperature. result: [P, N], weights of
    the best stage so far.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        net: models.Stack,
        optimizer: Adam,
        annealing: Annealing,
        average: Average,
        loss: "LossState",
    ):
        self.trials, self.net, self.optimizer, self.annealing = trials, net, optimizer, annealing
        self.average, self.loss = average, loss
        self.keep_optimizer = np.array([trial.config.annealing.keep_optimizer for trial in trials])
        self.alive = np.arange(len(trials))
        self.stage_best = net.weights.clone()
        self.result = net.weights.clone()
        self.history: list[dict[str, list]] = [{name: [] for name in HISTORY} for _ in trials]
        self.errors: list[str | None] = [None for _ in trials]
        self.seconds = np.zeros(len(trials))

    def log(self, p: int, entry: Mapping[str, Any]) -> None:
        """Add an epoch to trial p's history; a loss that is not finite ends the trial."""
        for name, number in entry.items():
            self.history[p][name].append(number)
        if not (math.isfinite(entry["train_loss"]) and math.isfinite(entry["val_loss"])):
            self.annealing.fail(p)
            self.errors[p] = (
                f"diverged in epoch {entry['epoch']}: training loss {entry['train_loss']:.3g}, "
                f"validation loss {entry['val_loss']:.3g}"
            )

    def follow(self, verdict: Verdict, validated: Tensor) -> None:
        """Keep, restore and drop weights as early stopping decided. validated [alive, N]: the weights it judged."""

        def rows(mask: np.ndarray) -> Tensor:
            return torch.as_tensor(np.flatnonzero(mask[self.alive]), device=self.net.weights.device)

        if verdict.improved.any():
            improved = rows(verdict.improved)
            self.stage_best[improved] = validated[improved]
        if verdict.kept.any():
            kept = rows(verdict.kept)
            self.result[torch.as_tensor(self.alive, device=kept.device)[kept]] = self.stage_best[kept]
        if verdict.cooled.any():
            cooled = rows(verdict.cooled)
            self.net.weights[cooled] = self.stage_best[cooled]
            self.average.restart(cooled)
            self.optimizer.reset(rows(verdict.cooled & ~self.keep_optimizer))
        if not self.annealing.active[self.alive].all():
            staying = rows(self.annealing.active)
            self.alive = self.alive[self.annealing.active[self.alive]]
            self.stage_best = self.stage_best[staying]
            self.net.put(self.net.weights[staying])
            self.optimizer.keep(staying)
            self.average.keep(staying)
            self.loss.keep(staying)

    def outcome(self, p: int, predictions: Mapping[str, tuple[Tensor, Tensor]]) -> Outcome:
        best, error = self.annealing.best_of(p), self.errors[p]
        if error is None and best == Best():  # the weights would be the initial ones
            error = "no epoch was kept: its metric on validation was never a finite number"
        failed = error is not None
        outcome = Outcome(
            trial=self.trials[p],
            status="failed" if failed else "done",
            error=error,
            stopped=self.annealing.stopped[p],
            epochs=int(self.annealing.epochs[p]),
            seconds=float(self.seconds[p]),
            best=best,
            history=self.history[p],
        )
        if not failed:
            for part, (logits, labels) in predictions.items():
                outcome.probabilities[part] = logits[p].softmax(-1).cpu().numpy()
                outcome.labels[part] = labels[p].cpu().numpy()
            outcome.weights = self.net.state_dict(self.result[p])
        return outcome

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint: `result` has a row for every trial, the others for every trial alive."""
        weights = {"weights": self.net.weights, "stage_best": self.stage_best, "result": self.result}
        return weights | self.optimizer.state() | self.average.state() | self.loss.state()

    def save(self, file: Path) -> None:
        """Write a checkpoint. If this is interrupted, the previous one stays intact."""
        tensors = self.tensors()
        state: CheckpointState = {
            "annealing": self.annealing.state(),
            "alive": self.alive.tolist(),
            "history": self.history,
            "errors": self.errors,
            "seconds": self.seconds.tolist(),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(state)
        about = {"format": str(CHECKPOINT), "state": text, "digest": digest(text, tensors)}
        about["trials"] = json.dumps([trial.identity for trial in self.trials])
        content = safetensors.torch.save(tensors, metadata=about)
        write_atomically(file, lambda stream: stream.write(content))

    def load(self, file: Path) -> None:
        """Resume from a checkpoint; ValueError or SafetensorError if it is damaged or has another layout."""
        device = str(self.net.weights.device)
        with safe_open(file, framework="pt", device=device) as stored:
            about = stored.metadata() or {}
            if about.get("format") != str(CHECKPOINT):
                raise ValueError("it was written by another version")
            # Copied, because the last digits of a product depend on the memory alignment of its factors.
            tensors = {name: stored.get_tensor(name).clone() for name in stored.keys()}  # noqa: SIM118 (not a dict)
        if about.get("digest") != digest(about.get("state", ""), tensors):
            raise ValueError("its content has changed since it was written")
        state: CheckpointState = json.loads(about["state"])
        self.check_layout(tensors, state)
        self.stage_best, self.result = tensors["stage_best"], tensors["result"]
        self.net.put(tensors["weights"])
        self.optimizer.restore(tensors)
        self.average.restore(tensors)
        self.loss.restore(tensors)
        self.annealing.restore(state["annealing"])
        self.alive, self.seconds = np.array(state["alive"], dtype=int), np.array(state["seconds"])
        self.history, self.errors = state["history"], state["errors"]

    def check_layout(self, tensors: Mapping[str, Tensor], state: CheckpointState) -> None:
        """ValueError unless this is what a population of these trials would write."""
        expected, count, alive = self.tensors(), len(self.trials), state["alive"]
        per_trial: tuple[list, ...] = (state["history"], state["errors"], state["seconds"])
        if alive != sorted({*alive} & {*range(count)}) or any(len(values) != count for values in per_trial):
            raise ValueError(f"expected the state of {count} trials")
        if expected.keys() != tensors.keys():
            raise ValueError(f"expected the tensors {', '.join(expected)}, got {', '.join(tensors)}")
        for name, tensor in expected.items():
            shape = [count if name == "result" else len(alive), *tensor.shape[1:]]
            if name != "loss" and ([*tensors[name].shape], tensors[name].dtype) != (shape, tensor.dtype):
                raise ValueError(f"{name}: expected shape {shape}, got {[*tensors[name].shape]}")


class LossState:
    """The state that a loss carries from step to step, one row per trial; most losses have none."""

    def __init__(self, loss: Loss):
        self.loss = loss
        self.stateful = type(loss).get_extra_state is not nn.Module.get_extra_state

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.loss.keep(rows)

    def state(self) -> dict[str, Tensor]:
        return {"loss": self.loss.get_extra_state().detach().contiguous()} if self.stateful else {}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        if self.stateful:
            self.loss.set_extra_state(tensors["loss"])


@dataclass
class Rows:
    """One part of the data on the device: inputs and labels of all distinct splits, one after the other.

    start [P]: where the `count` rows of each trial's split begin. weights: how much each row counts; None: all count 1.
    """

    inputs: Tensor
    labels: Tensor
    start: Tensor
    count: int
    weights: Tensor | None = None

    @classmethod
    def of(cls, members: Sequence[Member], part: str, device: torch.device) -> "Rows":
        distinct = {splits.index_hash: getattr(splits, part) for _, splits in members}
        parts, position = list(distinct.values()), list(distinct)
        count = len(parts[0].labels)
        single = len(parts) == 1  # spares a copy
        weights = [p.weights for p in parts if p.weights is not None]
        return cls(
            (parts[0].inputs if single else torch.cat([p.inputs for p in parts])).to(device),
            (parts[0].labels if single else torch.cat([p.labels for p in parts])).to(device),
            torch.tensor([position.index(splits.index_hash) * count for _, splits in members], device=device),
            count,
            torch.cat(weights).to(device) if weights else None,
        )

    def __len__(self) -> int:
        return self.count

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs [P, n, ...] and labels [P, n, ...] of the rows with these numbers [P, n]."""
        flat = index.flatten()  # index_select copies row by row, four times as fast as inputs[index]
        inputs, labels = (t.index_select(0, flat).unflatten(0, index.shape) for t in (self.inputs, self.labels))
        return inputs, labels

    def weights_at(self, index: Tensor) -> Tensor | None:
        """Weights [P, n] of the rows with these numbers [P, n]."""
        return None if self.weights is None else self.weights[index]

    def index(self, trials: Tensor) -> Tensor:
        """The numbers [alive, n] of all rows of these trials."""
        return torch.arange(self.count, device=trials.device) + self.start[trials, None]

    def order(self, seeds: Sequence[int], trials: Tensor, epoch: int) -> Tensor:
        """Row numbers [alive, n] in the order of an epoch, which depends only on seed and epoch."""
        generators = [torch.Generator().manual_seed(stream(seed, "shuffle", epoch)) for seed in seeds]
        shuffled = torch.stack([torch.randperm(self.count, generator=g) for g in generators])
        return shuffled.to(self.start.device) + self.start[trials, None]


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
