"""task=export: write a saved model as ONNX, with its encoding, scaling and decision rule as JSON beside it."""

from pathlib import Path

from east.choices import ConfigError
from east.settings import compose
from east.settings.command import Command
from east.training import saved
from east.training.export import beside, export


def main(command: Command) -> int:
    settings = compose.settings(command)
    if not (settings.checkpoint and settings.output):
        missing = " ".join(f"{name}=…" for name in ("checkpoint", "output") if not getattr(settings, name))
        raise ConfigError(f"task=export needs {missing}: a saved model and a new file, such as output=model.onnx")
    target = Path(settings.output).expanduser()
    for file in (target, beside(target)):
        if file.exists() and not settings.force:
            raise ConfigError(f"{file} exists already; force=true replaces it")
    written = export(saved.load(settings.checkpoint, trust=settings.trust), settings.output)
    print(f"exported: {written} and {beside(written)}")
    return 0
