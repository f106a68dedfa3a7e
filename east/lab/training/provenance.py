"""Which code computed a trial: versions and commit."""

import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from east import __version__


@cache
def provenance() -> dict[str, Any]:
    """`versions` of Python, east and the libraries that compute, and the `git` commit of this checkout, if it is one.

    "+changes" marks code that differs from the commit; changes in results/ do not count.
    """
    versions = {"python": platform.python_version(), "east": __version__}
    versions |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn")}
    root, found = Path(__file__).resolve().parents[3], ["", ""]
    changed = "status --porcelain --untracked-files=no -- . :(exclude)results"
    with suppress(OSError):  # git is not installed
        for k, words in enumerate(["rev-parse --short=12 HEAD", changed] if (root / ".git").exists() else []):
            ended = subprocess.run(["git", "-C", root, *words.split()], capture_output=True, text=True, check=False)
            found[k] = ended.stdout.strip()
    commit, changes = found
    return {"versions": versions, "git": f"{commit}+changes" if commit and changes else commit or None}
