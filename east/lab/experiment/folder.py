"""Find the files of a results folder, which may hold anything: links, pipes, folders, damaged files."""

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from east.choices import printable
from east.lab.files import open_regular

NAMED = 5  # damaged files that a command lists by name; it counts the others
DEPTH = 3  # runs/<dataset>/<loss>/<key>
LONGEST_LINE = 1 << 28  # bytes


class RecordFile(NamedTuple):
    """A file that should hold records; `source` is its path relative to the results folder."""

    path: str
    source: str


@dataclass
class Refused:
    """Files that are not records, and why."""

    messages: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # messages about what could not be read to its end
    lines: dict[str, list[bytes]] = field(default_factory=dict)  # of exports, by source

    def add(self, place: object, reason: BaseException) -> None:
        """Add a file, a folder or a line of a file. Those that another process has just removed do not count."""
        why = first_line(reason)
        if isinstance(reason, OSError):
            why = reason.strerror or why  # without the path, which the message names anyway
            if isinstance(reason, FileNotFoundError):
                if not os.path.islink(str(place)):
                    return
                why = "it is a link that leads nowhere"
        self.messages.append(printable(f"{place} is not a record ({why}); skipped"))
        if isinstance(reason, OSError):
            self.unread.append(printable(f"{place} cannot be read ({why})"))

    def lines_of(self, file: RecordFile) -> Iterator[tuple[int, bytes]]:
        """Number and content of every line of a file that is not blank."""
        try:
            with open_regular(file.path) as stream:
                for number, line in enumerate(iter(partial(stream.readline, LONGEST_LINE), b""), 1):
                    if len(line) == LONGEST_LINE:
                        raise OSError(f"line {number} has more than {LONGEST_LINE:,} bytes")
                    if line.strip():
                        yield number, line
        except OSError as error:
            self.add(file.path, error)

    def add_line(self, file: RecordFile, number: int, line: bytes, reason: BaseException) -> None:
        self.add(f"{file.path}, line {number},", reason)
        self.lines.setdefault(file.source, []).append(line.rstrip() + b"\n")

    def warn(self, root: Path) -> None:
        """Warn of the first few one by one, and of the others in one line."""
        for message in self.messages[:NAMED]:
            warnings.warn(message, stacklevel=4)
        if (unnamed := len(self.messages) - NAMED) > 0:
            others = "1 other is not a record" if unnamed == 1 else f"{unnamed:,} others are not records"
            warnings.warn(f"{others} below {printable(str(root))}; skipped", stacklevel=4)


def first_line(reason: object) -> str:
    return (str(reason) or type(reason).__name__).partition("\n")[0]


def run_files(root: Path, refused: Refused) -> Iterator[RecordFile]:
    """The files runs/*/*/*/*.json, in order."""
    yield from _below(RecordFile(f"{root}/runs", "runs"), DEPTH, ".json", refused)


def export_files(root: Path, refused: Refused) -> list[RecordFile]:
    """The files records/*.jsonl, in order."""
    return [*_below(RecordFile(f"{root}/records", "records"), 0, ".jsonl", refused)]


def _below(folder: RecordFile, depth: int, ending: str, refused: Refused) -> Iterator[RecordFile]:
    try:
        names = sorted(os.listdir(folder.path))
    except NotADirectoryError:
        return
    except OSError as error:
        refused.add(folder.path, error)
        return
    for name in names:
        entry = RecordFile(f"{folder.path}/{name}", f"{folder.source}/{name}")
        if name.startswith(".") or entry.source == "runs/checkpoints":
            continue
        if depth:
            yield from _below(entry, depth - 1, ending, refused)
        elif name.endswith(ending):
            yield entry
