"""task=export: write a saved model as ONNX, with its encoding, scaling and decision rule as JSON beside it."""

from pathlib import Path

from east.choices import ConfigError
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.training import saved
from east.lab.training.export import beside, export


def main(_: Command, settings: Settings) -> int:
    needs = ("checkpoint", "output")
    checkpoint, output = settings.required(needs, "a saved model and a new file, such as output=model.onnx")
    target = Path(output).expanduser()
    for file in (target, beside(target)):
        if file.exists() and not settings.force:
            raise ConfigError(f"{file} exists already; force=true replaces it")
    written = export(saved.load(checkpoint, trust=settings.trust), output)
    print(f"exported: {written} and {beside(written)}")
    return 0
