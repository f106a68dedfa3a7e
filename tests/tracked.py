"""Files of the repository that are committed: a working copy also holds what its owner has run and rendered."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tracked(folder: str = ".") -> list[Path]:
    listed = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout", allow_module_level=True)
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def exported(folder: Path = ROOT / "results" / "records") -> list[dict]:
    """The records of an export as JSON, with the values that they share put in; read without code of east."""
    lines = {file.name: file.read_text(encoding="utf-8").splitlines() for file in sorted(folder.glob("*.jsonl"))}
    shared = {line["id"]: line["value"] for line in map(json.loads, lines.pop("configs.jsonl", ()))}
    found = []
    for record in (json.loads(line) for name in lines for line in lines[name]):
        config = {name: shared.get(value, value) if isinstance(value, str) else value
                  for name, value in record["config"].items()}  # fmt: skip
        named = {name: shared[record[name]] for name in ("data", "versions") if isinstance(record[name], str)}
        found.append({"decisions": {}, **record, **named, "config": config})
    return found
