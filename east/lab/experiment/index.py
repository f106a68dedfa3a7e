"""An index of a results folder in one compact file, so that a command need not open every record.

    results/runs/.index     per file: its name, its stamp, and what planning needs of each record in it

A file counts as unchanged while its size, times and inode are the same. The index is only a copy: a command that finds
it missing, damaged or out of date reads the files themselves and replaces the index atomically. Writers need no lock:
the last one wins, and the next scan reads what it missed.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import TypeAdapter

from east.lab.experiment import checked
from east.lab.files import read_regular, write_atomically
from east.lab.training.scores import Best

VERSION = 3
FEWEST_RECORDS = 64  # a smaller folder is read just as quickly without an index
SETTLED_SECONDS = 2  # a younger file may change again without a change of its times
MOST_BYTES = 1 << 30


class Stamp(NamedTuple):
    """What changes when a file does. A copied folder has other stamps, so an index copied with it is not used."""

    size: int
    modified: int
    changed: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> "Stamp":
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    @property
    def settled(self) -> bool:
        return max(self.modified, self.changed) < time.time_ns() - SETTLED_SECONDS * 10**9


class IndexRow(NamedTuple):
    """What planning and selection need of one record, and its position in its file."""

    key: str
    family: str
    seed: int
    stage: Literal["search", "trial"]
    status: Literal["done", "failed"]
    best: Best
    epochs: int
    stopped: str | None
    seconds: float | None
    git: str | None
    error: str | None
    config: str  # as JSON; the index file holds its position in a list of configs instead
    offset: int = 0
    length: int | None = None  # None: the whole file


Number = int | float | None
PackedBest = tuple[Number, Number, Number, Number, Number]
Packed = tuple[str, str, int, Literal["search", "trial"], Literal["done", "failed"], PackedBest, int,
               str | None, float | None, str | None, str | None, int, int, int | None]  # fmt: skip
ADAPTER = TypeAdapter(tuple[int, list[str], dict[str, tuple[tuple[int, int, int, int], list[Packed]]]])


def unpacked(row: Packed, configs: Sequence[str]) -> IndexRow:
    return IndexRow(*row[:5], Best(*row[5]), *row[6:11], configs[row[11]], *row[12:])


@dataclass
class Index:
    """The rows of every file: `known` from the last scan, `now` from this one."""

    file: Path
    known: Mapping[str, tuple[Stamp, list[IndexRow]]]
    now: dict[str, tuple[Stamp, list[IndexRow]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """The index of a folder; an empty one if there is none, or none that can be trusted."""
        file = folder / ".index"
        try:
            content = read_regular(file, MOST_BYTES)
            body, _, stored = content.rpartition(b"\n")
            if stored != checked.digest(body):
                return cls(file, {})
            version, configs, files = ADAPTER.validate_json(body)
            if version != VERSION:
                return cls(file, {})
            known = {
                name: (
                    Stamp(*stamp),
                    [unpacked(row, configs) for row in rows],
                )
                for name, (stamp, rows) in files.items()
            }
            return cls(file, known)
        except (OSError, ValueError, IndexError, RecursionError):
            return cls(file, {})

    def rows(self, name: str, stamp: Stamp) -> list[IndexRow] | None:
        """The records of a file, if it has not changed since they were read."""
        known_stamp, rows = self.known.get(name, (None, []))
        if known_stamp != stamp:
            return None
        self.now[name] = stamp, rows
        return rows

    def put(self, name: str, stamp: Stamp, rows: list[IndexRow]) -> None:
        """Remember the records of a file that was just read."""
        if stamp.settled:
            self.now[name] = stamp, rows

    def write(self) -> None:
        """Store what this scan found, if anything changed and the folder is large enough."""
        before, after = ({name: stamp for name, (stamp, _) in files.items()} for files in (self.known, self.now))
        if before == after or sum(len(rows) for _, rows in self.now.values()) < FEWEST_RECORDS:
            return
        configs: dict[str, int] = {}
        files = {
            name: (stamp, [(*row[:11], configs.setdefault(row.config, len(configs)), *row[12:]) for row in rows])
            for name, (stamp, rows) in self.now.items()
        }
        body = json.dumps([VERSION, list(configs), files], separators=(",", ":")).encode()
        with suppress(OSError):  # a read-only folder, for example, goes without an index
            write_atomically(self.file, lambda stream: stream.write(body + b"\n" + checked.digest(body)))
