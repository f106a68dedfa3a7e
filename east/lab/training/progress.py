"""What accompanies training without affecting it: progress, TensorBoard, and when to write a checkpoint."""

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tqdm.auto import tqdm

from east.choices import install_hint
from east.lab import bars
from east.lab.files import temporary_name
from east.lab.training.annealing import Annealing
from east.lab.training.population import Population, Trial

HEARTBEAT = 2.0  # seconds between progress reports from a worker to its parent
LINE_SECONDS = 5.0  # seconds between lines, if a function is to receive them


@dataclass(frozen=True)
class Epoch:
    """How far a population has trained; a worker writes it to a file for the command that started it."""

    epoch: float
    max_epochs: int
    training: int  # trials that have not stopped yet
    trials: int
    best: float | None = None  # highest validation metric so far
    temperature: float | None = None

    def describe(self) -> str:
        """Temperature, best validation score, and how many trials are still training."""
        temperature = [] if self.temperature is None else [f"T {self.temperature:.3g}"]
        best = [] if self.best is None else [f"best validation score {self.best:.3f}"]
        training = [f"{self.training} of {self.trials} trials still training"] if self.trials > 1 else []
        return ", ".join([*temperature, *best, *training])

    def write(self, file: Path) -> None:
        """Write it for `read`; if that fails, training goes on without being seen."""
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = temporary_name(file)
            temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
            temporary.replace(file)

    @classmethod
    def read(cls, file: Path) -> "Epoch | None":
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # not written yet, or already deleted
            return None


class ProgressBar:
    """Reports the progress of a population, epoch by epoch.

    output: True shows a bar, False nothing; a file is rewritten every few seconds, for the command that
    waits for the worker; a function receives a line after the first epoch and then every LINE_SECONDS.
    """

    def __init__(self, annealing: Annealing, output: bool | Path | Callable[[str], None]):
        self.annealing, self.output = annealing, output
        self.epoch = 0.0
        self.temperature: float | None = None
        self.best: float | None = None
        self.last_write = self.last_line = -math.inf
        self.shown: tqdm | None = None
        self.resources = ExitStack()

    def __enter__(self) -> Self:
        if self.output is True:
            bar = bars.bar("epochs", self.now.max_epochs, "epoch", lambda: self.now.describe())
            self.shown = self.resources.enter_context(bar)
        self._report()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.resources.close()
        if isinstance(self.output, Path):
            with suppress(OSError):
                self.output.unlink(missing_ok=True)

    @property
    def now(self) -> Epoch:
        active = self.annealing.active
        max_epochs = int(self.annealing.max_epochs.max())
        return Epoch(self.epoch, max_epochs, int(active.sum()), len(active), self.best, self.temperature)

    def part_of_epoch(self, share: float) -> None:
        self.epoch += share
        self._report()

    def end_of_epoch(self, epoch: int, temperature: float | None, warming: bool) -> None:
        lowest = self.annealing.lowest_metric
        self.epoch, self.temperature = epoch, None if temperature is None else float(temperature)
        self.best = None if warming or math.isinf(lowest) else 1 - lowest
        self._report()
        if callable(self.output) and time.monotonic() - self.last_line >= LINE_SECONDS:
            self.output(f"epoch {epoch} of at most {self.now.max_epochs}, {self.now.describe()}".removesuffix(", "))
            self.last_line = time.monotonic()

    def _report(self) -> None:
        if self.shown is not None:
            self.shown.update(round(self.epoch, 1) - self.shown.n)
        if isinstance(self.output, Path) and time.monotonic() - self.last_write > HEARTBEAT:
            self.now.write(self.output)
            self.last_write = time.monotonic()


class TensorBoard:
    """A TensorBoard writer for each trial; does nothing without a folder."""

    def __init__(self, trials: Sequence[Trial], folder: Path | None):
        self.writers = []
        if folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(f"tensorboard is not installed: {install_hint('tensorboard')}") from error
        for trial in trials:
            config = trial.config
            hyper = "-".join(f"{name}{value}" for name, value in config.hyper.to_json().items() if value is not None)
            name = f"{config.dataset.name}-{config.loss.name}-{hyper}-{config.key}-seed{trial.seed}"
            self.writers.append(SummaryWriter(str(Path(folder) / name)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for writer in self.writers:
            writer.close()

    def add(self, p: int, entry: Mapping[str, float | None]) -> None:
        """Log an epoch of trial p; `entry` is that of its history."""
        for name, value in entry.items() if self.writers else ():
            if name != "epoch" and value is not None:
                self.writers[p].add_scalar(name, value, entry["epoch"])


class Checkpoints:
    """Saves the population to a file every `seconds`; never without a file."""

    def __init__(self, population: Population, file: Path | None, seconds: float):
        self.population, self.file, self.seconds = population, file, seconds
        self.last = time.monotonic()

    def write_if_due(self) -> None:
        if self.file is None or time.monotonic() - self.last < self.seconds:
            return
        try:
            self.population.save(self.file)
        except OSError as error:  # the disk is full, or another command deleted the folder: training continues
            warnings.warn(f"no checkpoint written: {error}", stacklevel=2)
        self.last = time.monotonic()
