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
    """`versions` of Python, east and the libraries that compute, and the `git` commit of this checkout, if it is one.

    "+changes" marks code that differs from the commit; changes in results/ do not count.
    """
    versions = {"python": platform.python_version(), "east": __version__}
    versions |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn")}
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not shutil.which("git"):
        return {"versions": versions, "git": None}
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
    return {"versions": versions, "git": f"{commit}+changes" if commit and changed else commit or None}


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False).stdout.strip()
