"""task=predict: label new rows, or a folder of images, with a saved model."""

from pathlib import Path

from east.choices import ConfigError
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.training import saved


def main(_: Command, settings: Settings) -> int:
    needs = ("checkpoint", "input", "output")
    checkpoint, *files = settings.required(needs, "a saved model, the rows to predict, and a new file")
    source, target = (Path(file).expanduser() for file in files)
    if source.resolve() == target.resolve():
        raise ConfigError(f"output={settings.output} is the input itself; write the predictions to another file")
    if target.exists() and not settings.force:
        raise ConfigError(f"output={settings.output} exists already; force=true replaces it")
    model = saved.load(checkpoint, settings.device, settings.trust)
    rows = saved.predict_file(model, source, target, settings.keep, settings.safe_csv)
    print(f"{rows:,} rows predicted: {settings.output}")
    return 0
