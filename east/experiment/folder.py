"""Look through a results folder that may hold anything: links, pipes, folders, damaged files."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from east.choices import printable
from east.experiment.index import Stamp

NAMED = 5  # damaged files that a command lists by name; it counts the others
DEPTH = 3  # runs/<dataset>/<loss>/<key>


@dataclass
class Refused:
    """Files that are not records, and why."""

    lines: list[str] = field(default_factory=list)

    def add(self, what: object, reason: BaseException | str) -> None:
        if isinstance(reason, OSError) and reason.strerror:
            reason = reason.strerror  # without the path, which the message names anyway
        self.lines.append(printable(f"{what} is not a record ({first_line(reason)}); skipped"))

    def tell(self, root: Path) -> None:
        """One warning for each of the first, one for all others."""
        for line in self.lines[:NAMED]:
            warnings.warn(line, stacklevel=4)
        if (more := len(self.lines) - NAMED) > 0:
            others = "1 other is" if more == 1 else f"{more:,} others are"
            warnings.warn(f"{others} not records below {printable(str(root))}; skipped", stacklevel=4)


def first_line(reason: object) -> str:
    return (str(reason) or type(reason).__name__).partition("\n")[0]


class Found(NamedTuple):
    """A file that should hold records; `source` is its name below the results folder."""

    path: str
    source: str
    stamp: Stamp


def run_files(root: Path, refused: Refused) -> Iterator[Found]:
    """The files runs/*/*/*/*.json, in order."""
    yield from _below(root / "runs", "runs", DEPTH, refused)


def export_files(root: Path, refused: Refused) -> Iterator[Found]:
    """The files records/*.jsonl, in order."""
    yield from _files(root / "records", "records", ".jsonl", refused)


def _below(folder: str | Path, source: str, depth: int, refused: Refused) -> Iterator[Found]:
    if depth == 0:
        yield from _files(folder, source, ".json", refused)
        return
    for entry in _entries(folder, refused):
        if entry.name.startswith(".") or f"{source}/{entry.name}" == "runs/checkpoints":
            continue
        try:
            inside = entry.is_dir()
            if entry.is_symlink() and not os.path.exists(entry.path):
                raise OSError("it is a link that leads nowhere")
        except OSError as error:
            refused.add(entry.path, error)
            continue
        if inside:
            yield from _below(entry.path, f"{source}/{entry.name}", depth - 1, refused)


def _files(folder: str | Path, source: str, ending: str, refused: Refused) -> Iterator[Found]:
    for entry in _entries(folder, refused):
        if entry.name.startswith(".") or not entry.name.endswith(ending):
            continue
        try:
            yield Found(entry.path, f"{source}/{entry.name}", Stamp.of(entry.stat()))
        except FileNotFoundError:
            if entry.is_symlink():  # otherwise another process has just removed it
                refused.add(entry.path, "it is a link that leads nowhere")
        except OSError as error:
            refused.add(entry.path, error)


def _entries(folder: str | Path, refused: Refused) -> list[os.DirEntry]:
    """What a folder holds, by name; nothing where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        refused.add(folder, error)
        return []
