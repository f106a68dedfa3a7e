"""Progress of training: bars, and reports from workers."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from east.lab import bars
from east.lab.files import write_atomically
from east.lab.training.population import Population

HEARTBEAT = 2.0  # seconds between progress reports from a worker to its parent


class Epoch(NamedTuple):
    """The progress of a population; a worker writes it to a file for the command that started it."""

    epoch: float
    training: int  # trials that have not stopped yet
    trials: int
    best: float | None = None  # highest validation metric so far
    temperature: float | None = None

    @classmethod
    def of(cls, population: Population, epoch: float) -> "Epoch":
        courses = [annealing.course for annealing in population.annealing]
        found = [
            b.val_metric for course in courses for b in (course.best, course.stage_best) if b.val_metric is not None
        ]
        training = [annealing for annealing in population.annealing if annealing.course.stopped is None]
        temperatures = [annealing.temperature for annealing in training if annealing.temperature is not None]
        best = 1 - min(found) if found else None
        return cls(epoch, len(training), len(courses), best, max(temperatures, default=None))

    def describe(self) -> str:
        """Temperature, best validation score, and how many trials are still training."""
        temperature = [] if self.temperature is None else [f"T {self.temperature:.3g}"]
        best = [] if self.best is None else [f"best validation score {self.best:.3f}"]
        training = [f"{self.training} of {self.trials} trials still training"] if self.trials > 1 else []
        return ", ".join([*temperature, *best, *training])

    def write(self, file: Path) -> None:
        """Write it for `read`; if that fails, training goes on without being seen."""
        with suppress(OSError):
            write_atomically(file, json.dumps(self))

    @classmethod
    def read(cls, file: Path) -> "Epoch | None":
        try:
            return cls(*json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # not written yet, or already deleted
            return None


@contextmanager
def reporting(population: Population, output: bool | Path) -> Iterator[Callable[[], None]]:
    """A function to call after every step.

    output: True shows a bar, False nothing; a file is rewritten every few seconds, for the command that waits for this
    worker, and deleted in the end.
    """
    epoch, due = float(max(annealing.course.epochs for annealing in population.annealing)), 0.0

    def step_done() -> None:
        nonlocal epoch, due
        epoch += 1 / population.steps
        if isinstance(output, Path) and time.monotonic() >= due:
            Epoch.of(population, epoch).write(output)
            due = time.monotonic() + HEARTBEAT

    def describe() -> str:
        shown.n = round(epoch, 1)
        return Epoch.of(population, epoch).describe()

    total = max(annealing.max_epochs for annealing in population.annealing)
    bar: Any = bars.bar("epochs", total, "epoch", describe) if output is True else nullcontext()
    with bar as shown:
        yield step_done
    if isinstance(output, Path):
        output.unlink(missing_ok=True)
