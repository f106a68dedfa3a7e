"""Reading the YAML files of conf/ and of a user's folder."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from east.choices import ConfigError

Composed = dict[str, Any]  # a config before it is validated


def read(file: Path) -> Composed:
    return _read(file, file.stat().st_mtime_ns)


@cache
def _read(file: Path, _changed: int) -> Composed:
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected names and values, got {type(content).__name__}")
    return content
