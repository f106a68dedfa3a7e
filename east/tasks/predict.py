"""task=predict: label new rows, or a folder of images, with a saved model."""

from pathlib import Path

from east.choices import ConfigError
from east.settings.command import Command
from east.settings.compose import settings
from east.training import saved


def main(command: Command) -> int:
    asked = settings(command)
    missing = [f"{name}=…" for name in ("checkpoint", "input", "output") if not getattr(asked, name)]
    if not (asked.checkpoint and asked.input and asked.output):
        raise ConfigError(f"task=predict needs {' '.join(missing)}: a saved model, the rows to predict, and a new file")
    if Path(asked.output).expanduser().exists() and not asked.force:
        raise ConfigError(f"output={asked.output} exists already; force=true replaces it")
    rows = saved.predict_file(saved.load(asked.checkpoint, asked.device), asked.input, asked.output, asked.keep)
    print(f"{rows:,} rows predicted: {asked.output}")
    return 0
