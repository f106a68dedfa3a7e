"""task=export: write a saved model as ONNX, with its encoding, scaling and decision rule as JSON beside it."""

from pathlib import Path

from east.choices import ConfigError
from east.settings.command import Command
from east.settings.compose import settings
from east.training import saved
from east.training.export import beside, export


def main(command: Command) -> int:
    asked = settings(command)
    if not (asked.checkpoint and asked.output):
        missing = " ".join(f"{name}=…" for name in ("checkpoint", "output") if not getattr(asked, name))
        raise ConfigError(f"task=export needs {missing}: a saved model and a new file, such as output=model.onnx")
    target = Path(asked.output).expanduser()
    for file in (target, beside(target)):
        if file.exists() and not asked.force:
            raise ConfigError(f"{file} exists already; force=true replaces it")
    written = export(saved.load(asked.checkpoint, trust=asked.trust), asked.output)
    print(f"exported: {written} and {beside(written)}")
    return 0
