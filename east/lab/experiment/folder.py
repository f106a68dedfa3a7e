"""Find the files of a results folder, which may hold anything: links, pipes, folders, damaged files."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from east.choices import printable
from east.lab.experiment.index import Stamp

NAMED = 5  # damaged files that a command lists by name; it counts the others
DEPTH = 3  # runs/<dataset>/<loss>/<key>


@dataclass
class Refused:
    """Files that are not records, and why."""

    lines: list[str] = field(default_factory=list)

    def add(self, place: object, reason: BaseException | str) -> None:
        """Add a file, a folder or a line of a file."""
        if isinstance(reason, OSError) and reason.strerror:
            reason = reason.strerror  # without the path, which the message names anyway
        self.lines.append(printable(f"{place} is not a record ({first_line(reason)}); skipped"))

    def warn(self, root: Path) -> None:
        """Warn of the first few one by one, and of the others in one line."""
        for line in self.lines[:NAMED]:
            warnings.warn(line, stacklevel=4)
        if (unnamed := len(self.lines) - NAMED) > 0:
            others = "1 other is not a record" if unnamed == 1 else f"{unnamed:,} others are not records"
            warnings.warn(f"{others} below {printable(str(root))}; skipped", stacklevel=4)


def first_line(reason: object) -> str:
    return (str(reason) or type(reason).__name__).partition("\n")[0]


class RecordFile(NamedTuple):
    """A file that should hold records; `source` is its path relative to the results folder."""

    path: str
    source: str
    stamp: Stamp


def run_files(root: Path, refused: Refused) -> Iterator[RecordFile]:
    """The files runs/*/*/*/*.json, in order."""
    yield from _below(root / "runs", "runs", DEPTH, refused)


def export_files(root: Path, refused: Refused) -> Iterator[RecordFile]:
    """The files records/*.jsonl, in order."""
    yield from _files(root / "records", "records", ".jsonl", refused)


def _below(folder: str | Path, source: str, depth: int, refused: Refused) -> Iterator[RecordFile]:
    if depth == 0:
        yield from _files(folder, source, ".json", refused)
        return
    for entry in _entries(folder, refused):
        if entry.name.startswith(".") or f"{source}/{entry.name}" == "runs/checkpoints":
            continue
        try:
            is_folder = entry.is_dir()
            if entry.is_symlink() and not os.path.exists(entry.path):
                raise OSError("it is a link that leads nowhere")
        except OSError as error:
            refused.add(entry.path, error)
            continue
        if is_folder:
            yield from _below(entry.path, f"{source}/{entry.name}", depth - 1, refused)


def _files(folder: str | Path, source: str, ending: str, refused: Refused) -> Iterator[RecordFile]:
    for entry in _entries(folder, refused):
        if entry.name.startswith(".") or not entry.name.endswith(ending):
            continue
        try:
            yield RecordFile(entry.path, f"{source}/{entry.name}", Stamp.of(entry.stat()))
        except FileNotFoundError:
            if entry.is_symlink():  # otherwise another process has just removed it
                refused.add(entry.path, "it is a link that leads nowhere")
        except OSError as error:
            refused.add(entry.path, error)


def _entries(folder: str | Path, refused: Refused) -> list[os.DirEntry]:
    """What a folder holds, sorted by name; nothing if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        refused.add(folder, error)
        return []
