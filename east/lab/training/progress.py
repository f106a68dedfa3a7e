"""Side effects of training: progress bars and reports, and TensorBoard."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from east.choices import install_hint
from east.lab import bars
from east.lab.files import temporary_name
from east.lab.training.population import Population, Trial

HEARTBEAT = 2.0  # seconds between progress reports from a worker to its parent


@dataclass(frozen=True)
class Epoch:
    """The progress of a population; a worker writes it to a file for the command that started it."""

    epoch: float
    max_epochs: int
    training: int  # trials that have not stopped yet
    trials: int
    best: float | None = None  # highest validation metric so far
    temperature: float | None = None

    @classmethod
    def of(cls, population: Population, epoch: float) -> "Epoch":
        annealing = population.annealing
        temperatures = [annealing[p].temperature for p in population.alive]
        best = [
            m for a in annealing for m in (a.course.best.val_metric, a.course.stage_best.val_metric) if m is not None
        ]
        return cls(
            epoch,
            max(a.max_epochs for a in annealing),
            len(temperatures),
            len(annealing),
            1 - min(best) if best else None,
            max((T for T in temperatures if T is not None), default=None),
        )

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


@contextmanager
def reporting(population: Population, output: bool | Path) -> Iterator[Callable[[], None]]:
    """A function to call after every step.

    output: True shows a bar, False nothing; a file is rewritten every few seconds, for the command that waits for this
    worker, and deleted in the end.
    """
    epoch, written = float(max(annealing.course.epochs for annealing in population.annealing)), time.monotonic()

    def step_done() -> None:
        nonlocal epoch, written
        epoch += 1 / population.steps
        if isinstance(output, Path) and time.monotonic() - written > HEARTBEAT:
            Epoch.of(population, epoch).write(output)
            written = time.monotonic()

    def describe() -> str:
        shown.n = round(epoch, 1)
        return Epoch.of(population, epoch).describe()

    with ExitStack() as resources:
        now = Epoch.of(population, epoch)
        if isinstance(output, Path):
            now.write(output)
            resources.callback(output.unlink, missing_ok=True)
        elif output:
            shown = resources.enter_context(bars.bar("epochs", now.max_epochs, "epoch", describe))
        yield step_done


@contextmanager
def tensorboard_writers(
    trials: Sequence[Trial], folder: Path | None
) -> Iterator[Callable[[int, Mapping[str, list]], None]]:
    """A function that logs the last epoch of a trial's history, given its number; it does nothing without a folder."""
    writers = []
    if folder is not None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(f"tensorboard is not installed: {install_hint('tensorboard')}") from error
        for trial in trials:
            config = trial.config
            hyper = "-".join(f"{name}{value}" for name, value in config.hyper.to_json().items() if value is not None)
            name = f"{config.dataset.name}-{config.loss.name}-{hyper}-{config.key}-seed{trial.seed}"
            writers.append(SummaryWriter(str(Path(folder) / name)))

    def log(p: int, history: Mapping[str, list]) -> None:
        for name, values in history.items() if writers else ():
            if name != "epoch" and values[-1] is not None:
                writers[p].add_scalar(name, values[-1], history["epoch"][-1])

    try:
        yield log
    finally:
        for writer in writers:
            writer.close()
