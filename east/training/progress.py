"""What surrounds training without being part of it: the progress bar, TensorBoard, and when to write a checkpoint."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tqdm import tqdm

from east.choices import install_hint
from east.training.annealing import Annealing
from east.training.population import Population, Trial

LINE_SECONDS = 5.0


class Progress:
    """A bar that counts epochs, and shows the temperature, the best validation score and how many trials are left.

    shown: whether there is a bar, on terminals only; or a function that gets a line instead, after the first epoch and
    then every LINE_SECONDS.
    """

    def __init__(self, annealing: Annealing, shown: bool | Callable[[str], None]):
        self.annealing = annealing
        self.say, self.said = shown if callable(shown) else None, -LINE_SECONDS
        self.bar = tqdm(
            total=int(annealing.max_epochs.max()),
            bar_format="epoch {n:.1f} of at most {total} [{elapsed}{postfix}]",
            disable=None if shown is True else True,
            leave=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.close()

    def part_of_epoch(self, share: float) -> None:
        self.bar.update(share)

    def end_of_epoch(self, epoch: int, temperature: float | None, warming: bool) -> None:
        self.bar.n = epoch
        hottest = "" if temperature is None else f"T {temperature:.3g}, "
        best = "warm-up" if warming else f"best {1 - self.annealing.lowest_metric:.3f}"
        alive = f"alive {self.annealing.active.sum()}/{len(self.annealing.active)}"
        self.bar.set_postfix_str(f"{hottest}{best}, {alive}", refresh=False)
        if self.say and time.monotonic() - self.said >= LINE_SECONDS:
            self.say(f"epoch {epoch} of at most {self.bar.total}: {hottest}{best}, {alive}")
            self.said = time.monotonic()


class TensorBoard:
    """A TensorBoard writer for each trial; without a folder, nothing."""

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
            name = f"{config.dataset.name}-{config.loss.name}-{hyper}-seed{trial.seed}"
            self.writers.append(SummaryWriter(str(Path(folder) / name)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for writer in self.writers:
            writer.close()

    def add(self, p: int, entry: Mapping[str, float | None]) -> None:
        """An epoch of trial p, as in its history."""
        for name, value in entry.items() if self.writers else ():
            if name != "epoch" and value is not None:
                self.writers[p].add_scalar(name, value, entry["epoch"])


class Checkpoints:
    """Writes the population to a file, once `seconds` have passed since the last time; without a file, never."""

    def __init__(self, population: Population, file: Path | None, seconds: float):
        self.population, self.file, self.seconds = population, file, seconds
        self.last = time.monotonic()

    def write_if_due(self) -> None:
        if self.file is None or time.monotonic() - self.last < self.seconds:
            return
        try:
            self.population.save(self.file)
        except OSError as error:  # a full disk, or another command has cleared the folder: training goes on
            warnings.warn(f"no checkpoint written: {error}", stacklevel=2)
        self.last = time.monotonic()
