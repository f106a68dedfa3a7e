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
    source, target = Path(asked.input).expanduser(), Path(asked.output).expanduser()
    if source.resolve() == target.resolve():
        raise ConfigError(f"output={asked.output} is the input itself; write the predictions to another file")
    if target.exists() and not asked.force:
        raise ConfigError(f"output={asked.output} exists already; force=true replaces it")
    model = saved.load(asked.checkpoint, asked.device, asked.trust)
    rows = saved.predict_file(model, source, target, asked.keep, asked.safe_csv)
    print(f"{rows:,} rows predicted: {asked.output}")
    return 0
