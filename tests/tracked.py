"""Files of the repository that are committed: a working copy also holds what its owner has run and rendered."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tracked(folder: str = ".") -> list[Path]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout", allow_module_level=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
