"""Loggers take the curves of training; a class with the methods of `Logger` is all it takes to add one."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from east.choices import import_by_path
from east.lab.settings.settings import LOGGERS
from east.lab.training.population import Trial


class Logger(Protocol):
    """The log of one trial, made without arguments in the process that trains it."""

    def start(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        """Begin, before the first epoch. config: everything that determines the trial. folder: results_dir."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of an epoch. A trial that was killed is started again, and goes on from its checkpoint."""

    def close(self) -> None:
        """End, also after an error."""


class TensorBoard:
    def start(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard" / name))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Weights & Biases; its own environment variables set the rest, such as WANDB_MODE=offline and WANDB_PROJECT."""

    def start(self, name: str, config: Mapping[str, Any], folder: Path) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", "east")
        plain = wandb.Settings(console="off")  # it does not record the progress bars
        # create_new: the trials of a population are logged side by side, in one process.
        self.run = wandb.init(
            project=project, name=name, config={**config}, dir=folder, reinit="create_new", settings=plain
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


def start(logger: str, folder: Path, trial: Trial) -> Logger:
    """Start the log of a trial. logger: a name of LOGGERS or a dotted path."""
    config = trial.config
    hyper = "-".join(f"{name}{value}" for name, value in config.hyper.to_json().items() if value is not None)
    name = f"{config.dataset.name}-{config.loss.name}-{hyper}-{config.key}-seed{trial.seed}"
    started = import_by_path(LOGGERS.get(logger, logger))()
    started.start(name, {**config.to_json(), "seed": trial.seed, "stage": trial.stage}, folder)
    return started


@contextmanager
def logging(
    trials: Sequence[Trial], start: Callable[[Trial], Logger] | None
) -> Iterator[Callable[[int, Mapping[str, list]], None]]:
    """A function that logs the last epoch of a trial's history, given its number; it does nothing without `start`."""
    with ExitStack() as opened:
        loggers = [opened.enter_context(closing(start(trial))) for trial in trials] if start else []

        def log(p: int, history: Mapping[str, list]) -> None:
            if loggers:
                values = {name: numbers[-1] for name, numbers in history.items() if name != "epoch"}
                loggers[p].log(history["epoch"][-1], {name: v for name, v in values.items() if v is not None})

        yield log
