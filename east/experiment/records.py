"""One JSON file per trial: who it is, what it scored, where it came from. An existing file means: done.

    results/runs/<dataset>/<loss>/<key>/seed-<n>.json     the record; its last line is the history
    results/runs/<dataset>/<loss>/<key>/seed-<n>.npz      validation and test probabilities and labels, written first
    results/records/<dataset>.jsonl                       exported records, committed; they count as done as well

`key` is the hash of the scientific config, `family` the same without what a search varies: the points of one grid are
one family. Files are written under a temporary name and renamed: any number of processes may share a results folder.
"""

import json
import math
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

from east.choices import choose
from east.files import write_atomically
from east.settings.identity import SCHEMA, Json, plain
from east.settings.sections import Science
from east.training.scores import Decision, Matrix, Scores

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

STAGES = ("search", "trial")
STATUSES = ("done", "failed")
RULES = ("val_loss", "val_metric")
STALE_SECONDS = 24 * 3600
HISTORY_POINTS = 40


@dataclass
class Record:
    """Everything that is kept of one trial; absent numbers are None."""

    config: Science
    seed: int
    stage: str = "trial"  # or "search"; tables never average search records
    data: dict[str, Json] = field(default_factory=dict)  # name, fingerprint, sizes, index_hash
    confusion: dict[str, Matrix] = field(default_factory=dict)  # val, test: by argmax
    scores: dict[str, Scores] = field(default_factory=dict)  # val, test
    decisions: dict[str, Decision] = field(default_factory=dict)  # further rules: thresholds, plugin_<metric>
    best: dict[str, float | None] = field(default_factory=dict)  # val_loss, val_metric (1 - M), temperature, epoch
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
    key: str = field(default="", compare=False)  # those of `config`
    family: str = field(default="", compare=False)
    source: str = field(default="", compare=False)  # the file below results_dir that it was read from

    def __post_init__(self) -> None:
        choose("stage", self.stage, STAGES)
        choose("status", self.status, STATUSES)
        if self.schema != SCHEMA:
            raise ValueError(f"expected a record of schema {SCHEMA}, got schema {self.schema}")
        self.key, self.family = self.key or self.config.key, self.family or self.config.family

    def to_json(self) -> dict[str, Json]:
        stored = {name: getattr(self, name) for name in STORED} | {"config": self.config.to_json()}
        return plain(stored)

    def but(self, **changed: Any) -> "Record":
        """The same record with other values; its key and family follow its config."""
        if "config" in changed:
            changed = {"key": "", "family": ""} | changed
        return replace(self, **changed)


STORED = [f.name for f in fields(Record) if f.name not in ("family", "source")]
REQUIRED = set(STORED) - {"history"}
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)  # what text that is no record can end in


def path(results_dir: str | Path, config: Science, seed: int) -> Path:
    """Where the record of this trial lives, whether or not it exists."""
    dataset, loss = config.dataset.name, config.loss.name
    for name in (dataset, loss):
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ValueError(f"expected a plain name of letters, digits, '_', '-' and '.', got {name!r}")
    return Path(results_dir) / "runs" / dataset / loss / config.key / f"seed-{int(seed)}.json"


def write(results_dir: str | Path, record: Record, arrays: Mapping | None = None, force: bool = False) -> Path:
    """Store a record, and `arrays` (name -> ndarray) beside it; return its path.

    A record that is done stays, unless `force`: FileExistsError. A failed or unreadable one gives way, and one whose
    arrays were deleted, where there are new ones.
    """
    target = path(results_dir, record.config, record.seed)
    whole = arrays is None or target.with_suffix(".npz").exists()
    if not force and target.exists() and whole and _status(target) == "done":
        raise FileExistsError(f"{target} is done already; force=true replaces it")
    target.parent.mkdir(parents=True, exist_ok=True)
    if arrays is not None:
        import numpy as np

        write_atomically(target.with_suffix(".npz"), lambda file: np.savez_compressed(file, **arrays))
    write_atomically(target, lambda file: file.write(_dumps(record).encode()))
    _sweep(target.parent)
    return target


def read(file: str | Path) -> Record:
    """The record in a file, with its history. ValueError if the file holds anything else."""
    return _record(Path(file).read_text(encoding="utf-8"))


def arrays(file: str | Path) -> "dict[str, np.ndarray]":
    """The arrays stored beside the record in `file`."""
    import numpy as np

    with np.load(Path(file).with_suffix(".npz"), allow_pickle=False) as stored:
        return dict(stored)


def done(results_dir: str | Path) -> dict[tuple[str, int], str]:
    """(key, seed) -> "done" or "failed", of everything under runs/ and records/. A done record beats a failed one."""
    return {(record.key, record.seed): record.status for record in scan(results_dir)}


def scan(results_dir: str | Path) -> list[Record]:
    """All records; those of runs without their history.

    Files that are no records are named in a warning and skipped. Runs beat exports, done beats failed.
    """
    root = Path(results_dir)
    found: dict[tuple[str, int], Record] = {}
    for record in (*_runs(root), *_exports(root)):
        known = found.get((record.key, record.seed))
        if known is None or (known.status, record.status) == ("failed", "done"):
            found[record.key, record.seed] = record
    return list(found.values())


def load(results_dir: str | Path) -> "pd.DataFrame":
    """`scan` as a frame, one row per trial.

    Columns: key family stage seed status …, a section's name under the section (`dataset`, `loss`, `model`), its other
    values with a dot (`hyper.lr`), scores by split (`test.f1_pos`), those of further decision rules below the rule
    (`thresholds.test.f1_pos`), `best.val_loss`, `confusion` ({val, test}), and `source`, the file below `results_dir`.
    Records of a search show no test scores: settings are chosen on validation rows.
    """
    import pandas as pd

    found = scan(results_dir)
    alike = {(record.key, record.config.preset): record.config for record in found}  # the preset is not in the key
    configs = {which: _flat_config(config) for which, config in alike.items()}
    return pd.DataFrame([_flatten(record, configs[record.key, record.config.preset]) for record in found])


def export(results_dir: str | Path) -> dict[str, int]:
    """Write all that is done to records/<dataset>.jsonl; return the number of records per dataset.

    One line per record in a fixed order, so that a commit shows only what is new. What was exported before stays.
    Probabilities are left behind, and of the history a trial keeps 40 epochs at most, a search record none.
    """
    lines: dict[str, dict[tuple, str]] = {}
    for record in scan(results_dir):
        if record.status != "done":
            continue
        if record.source.startswith("runs/"):
            history = read(Path(results_dir) / record.source).history
            record.history = _thin(history) if record.stage == "trial" else {}
        values = record.to_json()
        values["confusion"] = {split: _sparse(matrix) for split, matrix in record.confusion.items()}
        order = (record.config.loss.name, record.key, record.seed)
        lines.setdefault(record.config.dataset.name, {})[order] = json.dumps(values, separators=(",", ":"))
    for dataset, by_order in lines.items():
        text = "".join(by_order[order] + "\n" for order in sorted(by_order))
        target = Path(results_dir) / "records" / f"{dataset}.jsonl"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, methodcaller("write", text.encode()))
    return {dataset: len(lines[dataset]) for dataset in sorted(lines)}


def select(records: Iterable[Record], rule: str = "val_loss") -> str | None:
    """The key that a named rule chooses among the records of one family.

    `val_loss` (the papers' words): lowest validation loss. `val_metric`: lowest 1 - M on validation, hard predictions.
    Only search records take part; several seeds of one point are averaged. Ties go to the lower `tie` where trials were
    stopped by a metric, then to the lower key. A family that was never searched has a choice if all its trials share
    one key. None where there is nothing to choose by.
    """
    choose("selection rule", rule, RULES)
    points: dict[str, list[tuple[float, float]]] = {}
    trials = set()
    for record in records:
        value, tie = record.best.get(rule), record.best.get("tie")
        if record.status == "done" and record.stage == "search":
            points.setdefault(record.key, []).append((math.nan if value is None else value, tie or 0.0))
        elif record.status == "done":
            trials.add(record.key)
    means = {
        name: tuple(math.fsum(column) / len(column) for column in zip(*rows, strict=True))
        for name, rows in points.items()
    }
    finite = {name: mean for name, mean in means.items() if math.isfinite(mean[0])}
    if finite:
        return min(finite, key=lambda name: (*finite[name], name))
    return trials.pop() if len(trials) == 1 and not points else None


def _flat_config(config: Science) -> dict[str, object]:
    """The settings as columns of a frame; the trials of one setting share them."""
    row: dict[str, object] = {}
    for section, values in config.to_json().items():
        if isinstance(values, dict):
            row[section] = values.get("name")
            row |= {f"{section}.{name}": value for name, value in values.items() if name != "name"}
        else:
            row[section] = values
    return row


def _flatten(record: Record, config: Mapping[str, object]) -> dict[str, object]:
    """One record as the row of a frame; see `load` for the names."""
    names = ("key", "family", "stage", "seed", "status", "error", "epochs", "stopped", "seconds", "device", "git")
    row: dict[str, object] = {name: getattr(record, name) for name in names} | {**config}
    parts = ("val", "test") if record.stage == "trial" else ("val",)  # early searches stored test scores as well
    for part in parts:
        row |= {f"{part}.{name}": value for name, value in record.scores.get(part, {}).items()}
        for rule, decision in record.decisions.items():
            scores = decision["scores"].get(part, {})
            row |= {f"{rule}.{part}.{name}": value for name, value in scores.items()}
    row |= {f"best.{name}": value for name, value in record.best.items()}
    row |= {f"data.{name}": value for name, value in record.data.items()}
    confusion = {part: record.confusion[part] for part in parts if part in record.confusion}
    return row | {"confusion": confusion, "source": record.source}


def _dumps(record: Record) -> str:
    """Two lines, one JSON object: the history comes last, so that a query need not read it."""
    values = record.to_json()
    history = values.pop("history")
    head, tail = (json.dumps(part, separators=(",", ":")) for part in (values, history))
    return f'{head[:-1]},\n"history":{tail}}}\n'


def _head(file: Path) -> Record:
    """A record without its history, from the first line of its file; ValueError if the file is cut off or foreign."""
    with open(file, "rb") as stream:
        line = stream.readline()
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - 2))
        if stream.read() != b"}\n" or not line.endswith(b",\n"):
            record = _record(file.read_text(encoding="utf-8"))
            record.history = {}
            return record
    return _record(line[:-2] + b"}")


def _record(text: str | bytes, source: str = "") -> Record:
    """The record in a JSON text; ValueError where it is none, or not under its own key."""
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    if values.get("schema") != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, got {values.get('schema')}")
    if missing := REQUIRED - values.keys():
        raise ValueError(f"expected all fields of a record, missing: {', '.join(sorted(missing))}")
    config, key, family = _identity(json.dumps(values["config"]))
    if values["key"] != key:
        raise ValueError(f"its config has the key {key}, but it says {values['key']}")
    given = {name: values[name] for name in STORED if name in values} | {"config": config, "family": family}
    given["confusion"] = {split: _dense(matrix) for split, matrix in values["confusion"].items()}
    return Record(**given, source=source)


@lru_cache(maxsize=100_000)
def _identity(config: str) -> tuple[Science, str, str]:
    """A config in JSON, typed, with its key and family: the seeds of one setting share the work."""
    science = Science.model_validate(json.loads(config))
    return science, science.key, science.family


def _status(file: Path) -> str:
    try:
        return _head(file).status
    except UNREADABLE:
        return "unreadable"


def _runs(root: Path) -> Iterator[Record]:
    for file in sorted((root / "runs").glob("*/*/*/*.json")):
        try:
            record = _head(file)
        except UNREADABLE as reason:
            warnings.warn(f"{file} is not a record ({_first_line(reason)}); skipped", stacklevel=4)
            continue
        record.source = file.relative_to(root).as_posix()
        yield record


def _exports(root: Path) -> Iterator[Record]:
    for file in sorted((root / "records").glob("*.jsonl")):
        source = file.relative_to(root).as_posix()
        with open(file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _record(line, source)
                except UNREADABLE as reason:
                    why = _first_line(reason)
                    warnings.warn(f"{file}, line {number}, is not a record ({why}); skipped", stacklevel=4)


def _first_line(reason: Exception) -> str:
    return str(reason).partition("\n")[0]


def _sparse(matrix: list[list[int]]) -> Any:
    """With many classes most cells are 0: only the others are exported."""
    if len(matrix) <= 16:
        return matrix
    cells = [[i, j, count] for i, row in enumerate(matrix) for j, count in enumerate(row) if count]
    return {"classes": len(matrix), "cells": cells}


def _dense(matrix: Any) -> list[list[int]]:
    if not isinstance(matrix, Mapping):
        return matrix
    dense = [[0] * matrix["classes"] for _ in range(matrix["classes"])]
    for i, j, count in matrix["cells"]:
        dense[i][j] = count
    return dense


def _thin(history: Mapping[str, list]) -> dict[str, list]:
    """At most HISTORY_POINTS epochs, the first and the last among them, to five digits."""
    epochs = max(map(len, history.values()), default=0)
    count = min(epochs, HISTORY_POINTS)
    kept = [round(i * (epochs - 1) / max(count - 1, 1)) for i in range(count)]
    thinned = {name: [values[i] for i in kept if i < len(values)] for name, values in history.items()}
    return plain(thinned, lambda x: float(f"{x:.5g}"))


def _sweep(folder: Path) -> None:
    """Remove what killed writers left behind, once it is too old to be anyone's work in progress."""
    for leftover in folder.glob(".*.tmp"):
        try:
            if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
                leftover.unlink()
        except FileNotFoundError:  # another writer was quicker
            continue
