"""One JSON file per trial: its settings, its scores, and what computed it. An existing file means the trial is done.

    results/runs/<dataset>/<loss>/<key>/seed-<n>.json     the record; then a line of history, and one with its digest
    results/runs/<dataset>/<loss>/<key>/seed-<n>.npz      validation and test probabilities and labels, written first
    results/runs/<dataset>/<loss>/<key>/search-<n>.json   the same for a training of the search; formerly seed-1000
    results/records/<dataset>.jsonl                       exported records, committed; they count as done too

`key` is the hash of the scientific config, `family` the hash without what a search varies: the points of one grid are
one family. Files are written under a temporary name and renamed, so any number of processes may share a results folder.
Every record is checked when it is read (checked.py); a bad one is skipped with a warning that names it.
"""

import gc
import json
import math
import os
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from east.choices import ConfigError, choose, printable
from east.lab.experiment import checked
from east.lab.experiment.checked import MOST_BYTES, UNREADABLE, NewerError
from east.lab.experiment.folder import RecordFile, Refused, export_files, first_line, run_files
from east.lab.experiment.index import Index, IndexRow
from east.lab.files import open_regular, read_regular, write_atomically
from east.lab.settings.identity import SCHEMA, Json, plain
from east.lab.settings.sections import Science
from east.lab.settings.settings import SelectionRule
from east.lab.training.scores import DENSE_CLASSES, Best, Cells, JudgedRule, Matrix, Scores, Stacked

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

STAGES = ("search", "trial")
STATUSES = ("done", "failed")
RULES = get_args(SelectionRule)
HISTORY_POINTS = 40
EXPORTED_DENSE = 16  # classes; larger matrices are exported as cells
KEPT_BYTES = 1 << 14  # the record of a larger file does not stay in memory, and is read again when needed
MOST_ARRAY_BYTES = 1 << 33  # unpacked; a larger archive is not read


@dataclass
class Record:
    """Everything that is stored about one trial; missing numbers are None."""

    config: Science
    seed: int
    stage: str = "trial"  # or "search"; tables never average search records
    data: dict[str, Json] = field(default_factory=dict)  # name, fingerprint, sizes, index_hash
    confusion: dict[str, Matrix] = field(default_factory=dict)  # val, test: by argmax
    scores: dict[str, Scores] = field(default_factory=dict)  # val, test
    decisions: dict[str, JudgedRule] = field(default_factory=dict)  # other rules: thresholds, plugin_<metric>
    best: Best = field(default_factory=Best)
    epochs: int = 0
    stopped: str | None = None
    status: str = "done"
    error: str | None = None
    seconds: float | None = None
    device: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    git: str | None = None
    schema: int = SCHEMA
    history: dict[str, list] = field(default_factory=dict)  # one list per quantity, one entry per epoch
    ensemble: Stacked | None = field(default_factory=lambda: None)  # a default would be a class attribute
    key: str = field(default="", compare=False)  # key and family of `config`
    family: str = field(default="", compare=False)
    source: str = field(default="", compare=False)  # the file it was read from, relative to results_dir

    @property
    def identity(self) -> tuple[str, int, str]:
        """Key, seed and stage, which identify a trial."""
        return self.key, self.seed, self.stage

    if not TYPE_CHECKING:  # otherwise a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Fields that the index does not hold are read from the record's file on first access."""
            origin = self.__dict__.get("_origin") if name in UNINDEXED else None
            if origin is None:
                raise AttributeError(f"a record has no {name!r}")
            self.__dict__ |= {"config": checked.science(origin.row.config)} if name == "config" else origin.read()
            return self.__dict__[name]

    def __post_init__(self) -> None:
        choose("stage", self.stage, STAGES)
        choose("status", self.status, STATUSES)
        if self.schema != SCHEMA:
            raise ValueError(f"expected a record of schema {SCHEMA}, got schema {self.schema}")
        self.key, self.family = self.key or self.config.key, self.family or self.config.family

    def to_json(self) -> dict[str, Json]:
        stored = {name: getattr(self, name) for name in STORED}
        stored |= {"config": self.config.to_json(), "best": self.best.to_json()}
        if self.ensemble:
            stored["ensemble"] = {**self.ensemble, "confusion": _stored_matrices(self.ensemble["confusion"])}
        else:
            del stored["ensemble"]
        stored["confusion"] = _stored_matrices(self.confusion)
        stored["decisions"] = {
            rule: {**judged, "confusion": _stored_matrices(judged["confusion"])} if "confusion" in judged else judged
            for rule, judged in self.decisions.items()
        }
        return plain(stored)

    def but(self, **changes: Any) -> "Record":
        """A copy with other values; key and family follow a new config."""
        if "config" in changes:
            changes = {"key": "", "family": ""} | changes
        return replace(self, **changes)


PREFIXES = {"trial": "seed", "search": "search"}  # of file names, by stage
STORED = [f.name for f in fields(Record) if f.name not in ("family", "source")]
INDEXED = IndexRow._fields[: IndexRow._fields.index("config")]
UNINDEXED = {f.name for f in fields(Record)} - {*INDEXED, "schema", "source"}


@dataclass(frozen=True)
class Origin:
    """Where an indexed record is stored."""

    root: Path
    source: str
    row: IndexRow

    def record(self) -> Record:
        """The record with only its indexed fields in memory."""
        record = object.__new__(Record)
        record.__dict__ |= dict(zip(INDEXED, self.row, strict=False))
        record.__dict__ |= {"schema": SCHEMA, "source": self.source, "_origin": self}
        return record

    def read(self) -> dict[str, Any]:
        """The fields that the index does not hold, read from the file."""
        file = f"{self.root}/{self.source}"  # building a Path would take longer than everything else here
        try:
            with open_regular(file) as stream:
                stream.seek(self.row.offset)
                content = stream.read(MOST_BYTES if self.row.length is None else self.row.length)
            values = checked.parse(content, known=True)
            matrices = checked.confusion(values)
        except UNREADABLE as error:
            raise OSError(f"{file} has become unreadable: {first_line(error)}") from error
        if (values["key"], values["seed"]) != (self.row.key, self.row.seed):
            raise OSError(f"{file} changed while it was being read: rerun the command")
        history = {} if self.source.startswith("runs/") else values.get("history", {})
        stored = {**values, "confusion": matrices, "history": history, "config": checked.science(self.row.config)}
        return {name: stored.get(name) for name in UNINDEXED}


def path(results_dir: str | Path, config: Science, seed: int, stage: str = "trial") -> Path:
    """The path of this trial's record, whether or not it exists."""
    return Path(results_dir) / "runs" / _below_runs(config, config.key, seed, stage)


def _below_runs(config: Science, key: str, seed: int, stage: str) -> str:
    try:
        dataset, loss = (checked.check_name(name) for name in (config.dataset.name, config.loss.name))
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    return f"{dataset}/{loss}/{key}/{PREFIXES[stage]}-{int(seed)}.json"


def write(results_dir: str | Path, record: Record, arrays: Mapping | None = None, force: bool = False) -> Path:
    """Store a record, and `arrays` (name -> ndarray) beside it; return its path.

    A finished record is not overwritten (FileExistsError) unless `force` is set, or its arrays are missing or damaged
    and new ones are given. A failed or unreadable record is always overwritten, one of a newer version of east never.
    """
    target = path(results_dir, record.config, record.seed, record.stage)
    before = status(target) if os.path.lexists(target) else None  # a dangling link is overwritten too
    if before == "newer":
        raise FileExistsError(f"{target} comes from a newer version of east and is not overwritten")
    if not force and before == "done" and (arrays is None or has_arrays(target)):
        raise FileExistsError(f"{target} exists and is done; force=true replaces it")
    if arrays is not None:
        import numpy as np

        write_atomically(target.with_suffix(".npz"), lambda file: np.savez_compressed(file, **arrays))
    write_atomically(target, lambda file: file.write(_dumps(record)), replace=force or before is not None)
    return target


def read(file: str | Path) -> Record:
    """The record in a file, with its history. ValueError or OSError if the file holds anything else."""
    return _record(read_regular(Path(file), MOST_BYTES), whole=True)[0]


def arrays(file: str | Path) -> "dict[str, np.ndarray]":
    """The arrays stored beside the record in `file`; a ValueError that names the file if they are damaged."""
    import numpy as np

    stored = Path(file).with_suffix(".npz")
    try:
        with open_regular(stored) as stream:
            with zipfile.ZipFile(stream) as archive:
                if sum(member.file_size for member in archive.infolist()) > MOST_ARRAY_BYTES:
                    raise ValueError(f"it unpacks to more than {MOST_ARRAY_BYTES:,} bytes")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as opened:
                loaded = dict(opened)
        _check_arrays(loaded)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive can raise nearly anything
        raise ValueError(f"{stored} cannot be read ({printable(first_line(error))})") from None
    return loaded


def _check_arrays(loaded: "Mapping[str, np.ndarray]") -> None:
    """Check that probabilities [n, d] are finite and from 0 to 1, and that labels [n] are among their classes."""
    for name, labels in loaded.items():
        part, _, kind = name.partition("_")
        if kind != "labels" or f"{part}_probabilities" not in loaded:
            continue
        probabilities = loaded[f"{part}_probabilities"]
        if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or labels.dtype.kind not in "iu":
            raise ValueError(f"{part}: expected probabilities [n, d] and labels [n]")
        if not ((probabilities >= -1e-6) & (probabilities <= 1 + 1e-6)).all():
            raise ValueError(f"{part}: expected probabilities from 0 to 1")
        if len(labels) and not 0 <= labels.min() <= labels.max() < probabilities.shape[1]:
            raise ValueError(f"{part}: expected labels of the {probabilities.shape[1]} classes")


def has_arrays(file: str | Path) -> bool:
    """Whether a record's arrays exist and are intact; warns of damaged ones."""
    try:
        return bool(arrays(file))
    except FileNotFoundError:
        return False
    except ValueError as error:
        warnings.warn(str(error), stacklevel=2)
        return False


def scan(results_dir: str | Path) -> list[Record]:
    """All records; those of runs/ without their history.

    Files that are not records are skipped with a warning. Runs take precedence over exports, done over failed.
    """
    root, refused = Path(results_dir), Refused()
    by_identity: dict[tuple[str, int, str], Record] = {}
    with _without_garbage_collection():
        index = Index.read(root / "runs")
        for record in (*_runs(root, index, refused), *_exports(root, index, refused)):
            known = by_identity.get(record.identity)
            if known is None or (known.status, record.status) == ("failed", "done"):
                by_identity[record.identity] = record
        index.write()
    refused.warn(root)
    return list(by_identity.values())


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which would traverse all records again and again while they accumulate."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load(results_dir: str | Path) -> "pd.DataFrame":
    """`scan` as a frame, one row per trial.

    Columns: key family stage seed status …; a section's name under the section (`dataset`, `loss`, `model`), its other
    values with a dot (`hyper.lr`); scores by split (`test.f1_pos`), under other decision rules with the rule first
    (`thresholds.test.f1_pos`); `best.val_loss`; `confusion` ({val, test}); `source`, the path below `results_dir`.
    Records of a search show no test scores: settings are chosen on validation rows.
    """
    import pandas as pd

    if not any(Path(results_dir, name).is_dir() for name in ("runs", "records")):
        raise FileNotFoundError(f"{results_dir} is not a results folder: expected one with runs or records in it")
    scanned = scan(results_dir)
    configs = {(record.key, record.config.preset): record.config for record in scanned}  # the key has no preset
    flat = {setting: _flat_config(config) for setting, config in configs.items()}
    return pd.DataFrame([_flatten(record, flat[record.key, record.config.preset]) for record in scanned])


def export(results_dir: str | Path) -> dict[str, int]:
    """Write all finished records to records/<dataset>.jsonl; return the number of records per dataset.

    One line per record in a fixed order, so that a commit shows only what is new. Earlier exports stay, at the end also
    lines that cannot be read, such as those of a newer version. Probabilities are not exported; a trial keeps at most
    40 epochs of its history, a search record none.
    """
    root = Path(results_dir)
    datasets: dict[str, dict[tuple, bytes]] = {}
    exports = {file.path: list(_lines(file)) for file in export_files(root, Refused())}
    earlier = {line for lines in exports.values() for line in lines}
    for record in scan(root):
        if record.status == "done" and (line := _exported(root, record, earlier)):
            order = (record.config.loss.name, *record.identity)
            datasets.setdefault(record.config.dataset.name, {})[order] = line
    for dataset, lines in datasets.items():
        target = root / "records" / f"{checked.check_name(dataset)}.jsonl"
        written = [lines[order] for order in sorted(lines)]
        others = set(exports.get(str(target), [])).difference(written)
        unreadable = [line.rstrip() + b"\n" for line in sorted(others) if line.strip() and not _identity(line)]
        write_atomically(target, methodcaller("write", b"".join(written + unreadable)))
    return {dataset: len(datasets[dataset]) for dataset in sorted(datasets)}


def _exported(root: Path, record: Record, earlier: set[bytes]) -> bytes | None:
    """The line of a record in an export. If its file has just become unreadable: the earlier line, if it has one."""
    file, identity = root / record.source, record.identity
    try:
        if record.source.startswith("runs/"):
            record = read(file)
            record.history = _thin(record.history) if record.stage == "trial" else {}
        values = record.to_json()
    except UNREADABLE as error:
        warnings.warn(f"{file} is not exported ({first_line(error)})", stacklevel=3)
        same = (line for line in earlier if identity[0].encode() in line and _identity(line) == identity)
        return next((line.rstrip() + b"\n" for line in same), None)
    values["confusion"] = {split: _sparse(matrix) for split, matrix in record.confusion.items()}
    text = json.dumps(values, separators=(",", ":")).encode()
    unsigned = text + b"\n"  # as exported before digests were introduced
    return unsigned if unsigned in earlier else _signed(text)


def select(records: Iterable[Record], rule: str = "val_loss") -> str | None:
    """The key that a named rule chooses among the records of one family: the first of `ranked`.

    If a family was never searched, the one key that all its trials share is chosen. None if nothing can be chosen.
    """
    done = [record for record in records if record.status == "done"]
    if best := ranked(done, rule):
        return best[0]
    keys = {record.key for record in done}
    return keys.pop() if len(keys) == 1 and all(record.stage == "trial" for record in done) else None


def ranked(records: Iterable[Record], rule: str = "val_loss") -> list[str]:
    """The keys of searched points from best to worst by a named rule, without those that could not be trained.

    `val_loss` (the papers' words): lowest validation loss. `val_metric`: lowest 1 - M on validation, hard predictions.
    Only search records count; several seeds of one point are averaged. Ties go to the lower `tie`, if a metric stopped
    the trials, then to the lower key.
    """
    choose("selection rule", rule, RULES)
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record.status == "done" and record.stage == "search":
            value, tie = getattr(record.best, rule), record.best.tie
            points.setdefault(record.key, []).append((math.nan if value is None else value, tie or 0.0))
    means = {
        key: tuple(math.fsum(column) / len(column) for column in zip(*rows, strict=True))
        for key, rows in points.items()
    }
    return sorted((key for key, mean in means.items() if math.isfinite(mean[0])), key=lambda key: (*means[key], key))


def _flat_config(config: Science) -> dict[str, object]:
    """A config as columns of a frame, shared by all trials of the setting."""
    row: dict[str, object] = {}
    for section, values in config.to_json().items():
        if isinstance(values, dict):
            row[section] = values.get("name")
            row |= {f"{section}.{name}": value for name, value in values.items() if name != "name"}
        else:
            row[section] = values
    return row


def _flatten(record: Record, config: Mapping[str, object]) -> dict[str, object]:
    """A record as a row of a frame; see `load` for the names."""
    names = ("key", "family", "stage", "seed", "status", "error", "epochs", "stopped", "seconds", "device", "git")
    row: dict[str, object] = {name: getattr(record, name) for name in names} | {**config}
    parts = ("val", "test") if record.stage == "trial" else ("val",)  # early searches stored test scores as well
    for part in parts:
        row |= {f"{part}.{name}": value for name, value in record.scores.get(part, {}).items()}
        for rule, decision in record.decisions.items():
            scores = decision.get("scores", {}).get(part, {})
            row |= {f"{rule}.{part}.{name}": value for name, value in scores.items()}
    row |= {f"best.{name}": value for name, value in record.best.to_json().items()}
    row |= {f"data.{name}": value for name, value in record.data.items()}
    confusion = {part: record.confusion[part] for part in parts if part in record.confusion}
    return row | {"confusion": confusion, "source": record.source}


def _dumps(record: Record) -> bytes:
    """One JSON object on three lines: the values; the history, which a query need not read; the digest."""
    values = record.to_json()
    history = values.pop("history")
    head, tail = (json.dumps(part, separators=(",", ":")) for part in (values, history))
    return _signed(f'{head[:-1]},\n"history":{tail}}}'.encode(), b"\n")


def _signed(text: bytes, between: bytes = b"") -> bytes:
    """A JSON object with its own digest at the end."""
    body = text[:-1] + b"," + between
    return body + checked.DIGEST + checked.digest(body) + b'"}\n'


def _record(content: bytes, whole: bool = False) -> tuple[Record, str]:
    """The record in a JSON text, and its config as text; ValueError if it is not a record, or its key is wrong."""
    values = checked.parse(content, whole)
    text, config, key, family = checked.identity(values)
    stored: dict[str, Any] = {name: values[name] for name in STORED if name in values}  # type: ignore[literal-required]
    stored |= {"config": config, "family": family, "key": key, "confusion": checked.confusion(values)}
    stored["best"] = Best(**stored["best"])
    return Record(**stored), text


def status(file: Path) -> str:
    """done, failed, newer (of a later version of east: neither read nor replaced), or unreadable, also if missing."""
    try:
        return _record(read_regular(file, MOST_BYTES))[0].status
    except NewerError:
        return "newer"
    except UNREADABLE:
        return "unreadable"


def _identity(line: bytes) -> tuple[str, int, str] | None:
    """Which trial a line of an export holds; None if it is not a record."""
    try:
        return _record(line)[0].identity
    except UNREADABLE:
        return None


def _runs(root: Path, index: Index, refused: Refused) -> Iterator[Record]:
    """The records of runs/; files that changed since the last scan are read again."""
    for file in run_files(root, refused):
        if rows := index.rows(file.source, file.stamp):
            yield Origin(root, file.source, rows[0]).record()
            continue
        try:
            content = read_regular(file.path, MOST_BYTES)
            record, text = _record(content)
            _check_place(record, file.source)
        except UNREADABLE as reason:
            refused.add(file.path, reason)
            continue
        row = _row(record, text)
        index.put(file.source, file.stamp, [row])
        record.source, record.history = file.source, {}
        yield record if len(content) <= KEPT_BYTES else Origin(root, file.source, row).record()


def _check_place(record: Record, source: str) -> None:
    """Check that a file is where its record belongs: a copied or renamed file is not another trial."""
    place = f"runs/{_below_runs(record.config, record.key, record.seed, record.stage)}"
    if source == place or source == f"runs/{_below_runs(record.config, record.key, record.seed, 'trial')}":
        return  # the second is the former name of a search record
    raise ValueError(f"it holds seed {record.seed}, which belongs in {place}")


def _exports(root: Path, index: Index, refused: Refused) -> Iterator[Record]:
    """The records of records/; files that changed since the last scan are read again, line by line."""
    for file in export_files(root, refused):
        rows = index.rows(file.source, file.stamp)
        if rows is None:
            rows, before = [], len(refused.lines)
            for offset, number, line in _numbered(file, refused):
                try:
                    record, text = _record(line)
                    rows.append(_row(record, text, offset, len(line)))
                except UNREADABLE as reason:
                    refused.add(f"{file.path}, line {number},", reason)
            if len(refused.lines) == before:  # otherwise the next scan must refuse them again
                index.put(file.source, file.stamp, rows)
        yield from (Origin(root, file.source, row).record() for row in rows)


def _numbered(file: RecordFile, refused: Refused) -> Iterator[tuple[int, int, bytes]]:
    """Offset, number and content of every non-blank line of a file."""
    offset = 0
    for number, line in enumerate(_lines(file, refused), 1):
        if line.strip():
            yield offset, number, line
        offset += len(line)


def _lines(file: RecordFile, refused: Refused | None = None) -> Iterator[bytes]:
    try:
        with open_regular(file.path) as stream:
            yield from iter(partial(stream.readline, MOST_BYTES), b"")
    except OSError as error:
        if refused:
            refused.add(file.path, error)


def _row(record: Record, config: str, offset: int = 0, length: int | None = None) -> IndexRow:
    indexed = {name: getattr(record, name) for name in INDEXED}
    return IndexRow(**indexed, config=config, offset=offset, length=length)


def _stored_matrices(matrices: Mapping[str, Any]) -> dict[str, Any]:
    """Matrices as a record stores them. Those of very many classes would make it too large to be read."""
    return {part: _sparse(matrix, DENSE_CLASSES) for part, matrix in matrices.items()}


def _sparse(matrix: Matrix, dense: int = EXPORTED_DENSE) -> Any:
    """A matrix as it is, or only its nonzero cells if it has more than `dense` classes."""
    if isinstance(matrix, Cells):
        return {"classes": len(matrix), "cells": matrix.cells}
    if len(matrix) <= dense:
        return matrix
    cells = [[i, j, count] for i, row in enumerate(matrix) for j, count in enumerate(row) if count]
    return {"classes": len(matrix), "cells": cells}


def _thin(history: Mapping[str, list]) -> dict[str, list]:
    """At most HISTORY_POINTS epochs, including the first and the last, to five digits."""
    epochs = max(map(len, history.values()), default=0)
    count = min(epochs, HISTORY_POINTS)
    kept = [round(i * (epochs - 1) / max(count - 1, 1)) for i in range(count)]
    thinned = {name: [values[i] for i in kept if i < len(values)] for name, values in history.items()}
    return plain(thinned, lambda x: float(f"{x:.5g}"))
