"""Which code computed a trial: versions and commit."""

import platform
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TypedDict

from east import __version__


class Provenance(TypedDict):
    """Fields of a record and of a saved model."""

    versions: dict[str, str]
    git: str | None


@cache
def provenance() -> Provenance:
    """`versions` of what computes and the `git` state of this checkout (None when installed)."""
    versions = {"python": platform.python_version(), "east": __version__}
    versions |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn")}
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return {"versions": versions, "git": None}
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+changes", "--abbrev=12", "--exclude=*"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"versions": versions, "git": answer.stdout.strip() or None}
