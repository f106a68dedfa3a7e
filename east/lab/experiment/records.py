"""One JSON file per trial: its settings, its scores, and what computed it. An existing file means the trial is done.

    results/runs/<dataset>/<loss>/<key>/seed-<n>.json     the record; then a line of history, and one with its digest
    results/runs/<dataset>/<loss>/<key>/seed-<n>.npz      validation and test probabilities and labels, written first
    results/runs/<dataset>/<loss>/<key>/search-<n>.json   the same for a training of the search; formerly seed-1000
    results/records/<dataset>.jsonl                       exported records, committed; they count as done too
    results/records/configs.jsonl                         what they share: sections of configs, data, versions

`key` is the hash of the scientific config, `family` the hash without what a search varies: the points of one grid are
one family. Files are written under a temporary name and renamed, so any number of processes may share a results folder.
Every record is checked when it is read (record.py); a bad one is skipped with a warning that names it.
"""

import gc
import hashlib
import io
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from east.choices import ConfigError, choose, printable
from east.lab.experiment.record import UNREADABLE, Batches, NewerError, Record, Shared, check_name, digest, parse
from east.lab.files import open_regular, read_regular, set_aside, write_atomically
from east.lab.settings.settings import Science, SelectionRule

if TYPE_CHECKING:
    import pandas as pd

RULES = get_args(SelectionRule)
PREFIXES = {"search": "search", "trial": "seed"}  # stage -> prefix of its files' names
SHARED = "records/configs.jsonl"
MOST_BYTES = 1 << 28  # a larger file, or line of an export, is not read
NAMED = 5  # damaged files that a command lists by name; it counts the others
DEPTH = 3  # runs/<dataset>/<loss>/<key>


def path(results_dir: str | Path, config: Science, seed: int, stage: str = "trial") -> Path:
    """The path of a trial's record, which need not exist."""
    return Path(results_dir) / _place(config, seed, stage)


def _place(config: Science, seed: int, stage: str) -> str:
    try:
        dataset, loss = (check_name(name) for name in (config.dataset.name, config.loss.name))
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    return f"runs/{dataset}/{loss}/{config.key}/{PREFIXES[stage]}-{int(seed)}.json"


def write(results_dir: str | Path, record: Record, arrays: Mapping | None = None, force: bool = False) -> Path:
    """Store a record, and `arrays` (name -> ndarray) beside it, which it names by their digest; return its path.

    A finished record is not overwritten (FileExistsError) unless `force` is set. A failed one always is, one of a newer
    version of east never; an unreadable one is renamed.
    """
    target = path(results_dir, record.config, record.seed, record.stage)
    before = status(target)
    if before == "newer":
        raise FileExistsError(f"{target} comes from a newer version of east and is not overwritten")
    if before == "done" and not force:
        raise FileExistsError(f"{target} exists and is done; force=true replaces it")
    if before == "unreadable":
        for file in filter(os.path.lexists, (target, target.with_suffix(".npz"))):
            set_aside(file)
    if arrays is not None:
        import numpy as np

        content = io.BytesIO()
        np.savez_compressed(content, **arrays)
        write_atomically(target.with_suffix(".npz"), content.getvalue())
        record = record.but(arrays=digest(content.getvalue()).decode())
    write_atomically(target, record.dumps(), replace=force or before == "failed")
    return target


def read(file: str | Path, whole: bool = True) -> Record:
    """The record in a file of runs/, by default with its history. ValueError or OSError if the file holds anything
    else, since a copied or renamed file is not another trial, or if the arrays beside it are not its own."""
    record = parse(read_regular(file, MOST_BYTES), Shared(), {}, whole=whole)
    _check_place(record, Path(file).as_posix())
    check_arrays(record, Path(file))
    return record


def check_arrays(record: Record, file: Path) -> None:
    """ValueError if the arrays beside a record are not those that it names. They may be deleted to save space."""
    stored = file.with_suffix(".npz")
    try:
        with open_regular(stored) as stream:
            found = hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16)).hexdigest()  # type: ignore[arg-type]
    except OSError:
        return
    if record.arrays not in (None, found):
        raise ValueError(f"{stored} has changed since its record was written")


def _check_place(record: Record, file: str) -> None:
    place, former = (_place(record.config, record.seed, stage) for stage in (record.stage, "trial"))
    if not f"/{file}".endswith((f"/{place}", f"/{former}")):
        raise ValueError(f"it holds seed {record.seed}, which belongs in {place}")


def status(file: Path) -> str:
    """Status of a trial: done, failed, missing, unreadable, or newer: written by a later version of east, so it is
    neither read nor replaced."""
    if not os.path.lexists(file):
        return "missing"
    try:
        return read(file, whole=False).status
    except NewerError:
        return "newer"
    except UNREADABLE:
        return "unreadable"


class ResultsFolder:
    """A results folder as it is read. It may hold anything: links, pipes, folders, damaged files."""

    def __init__(self, root: str | Path, whole: bool = False):
        """whole: read the records with their history."""
        self.root, self.whole = root, whole
        self.shared = Shared()
        self.batches: Batches = {}
        self.refused: list[str] = []  # a message for each file or line that is not a record
        self.unread: list[str] = []  # messages about exports that could not be read to their end
        self.kept: dict[str, list[bytes]] = {}  # lines of exports that are not records

    def records(self) -> list[Record]:
        """All records; runs take precedence over exports, done over failed. Warns of files that are not records."""
        found: dict[tuple[str, int, str], Record] = {}
        gc.disable()  # it would traverse all records again and again while they accumulate
        try:
            for record in (*self.runs(), *self.exports()):
                known = found.get(record.identity)
                if known is None or (known.status, record.status) == ("failed", "done"):
                    found[record.identity] = record
        finally:
            gc.freeze()  # nor does it have to later
            gc.enable()
        for message in self.refused[:NAMED]:
            warnings.warn(message, stacklevel=3)
        if (unnamed := len(self.refused) - NAMED) > 0:
            others = "1 other is not a record" if unnamed == 1 else f"{unnamed:,} others are not records"
            warnings.warn(f"{others} below {printable(str(self.root))}; skipped", stacklevel=3)
        return list(found.values())

    def runs(self) -> Iterator[Record]:
        for source in self.files("runs", DEPTH, ".json"):
            try:
                content = read_regular(f"{self.root}/{source}", MOST_BYTES)
                record = parse(content, self.shared, self.batches, source, self.whole)
                _check_place(record, source)
            except UNREADABLE as reason:
                self.refuse(source, reason)
                continue
            yield record

    def exports(self) -> Iterator[Record]:
        """The records of records/, line by line, once what they share is read."""
        for source in sorted(self.files("records", 0, ".jsonl"), key=lambda source: (source != SHARED, source)):
            for number, line in self.lines(source):
                try:
                    if source != SHARED:
                        yield parse(line, self.shared, self.batches, source, self.whole)
                    else:
                        self.shared.read(line)
                except UNREADABLE as reason:
                    self.refuse(f"{source}, line {number},", reason)
                    self.kept.setdefault(source, []).append(line.rstrip() + b"\n")

    def files(self, folder: str, depth: int, ending: str) -> Iterator[str]:
        """The files so many folders below this one, in order."""
        try:
            names = sorted(os.listdir(f"{self.root}/{folder}"))
        except NotADirectoryError:
            return
        except OSError as error:
            self.refuse(folder, error)
            return
        for name in names:
            source = f"{folder}/{name}"
            if name.startswith(".") or source == "runs/checkpoints":
                continue
            if depth:
                yield from self.files(source, depth - 1, ending)
            elif name.endswith(ending):
                yield source

    def lines(self, source: str) -> Iterator[tuple[int, bytes]]:
        """Number and content of every line of an export that is not blank."""
        try:
            with open_regular(f"{self.root}/{source}") as stream:
                for number, line in enumerate(iter(partial(stream.readline, MOST_BYTES), b""), 1):
                    if len(line) == MOST_BYTES:
                        raise OSError(f"line {number} has more than {MOST_BYTES:,} bytes")
                    if line.strip():
                        yield number, line
        except OSError as error:
            self.refuse(source, error)

    def refuse(self, source: str, reason: BaseException) -> None:
        """Note a file, a folder or a line of a file. Those that another process has just removed do not count."""
        place = f"{self.root}/{source}"
        why = (str(reason) or type(reason).__name__).partition("\n")[0]
        if isinstance(reason, FileNotFoundError) and not os.path.islink(place):
            return
        if isinstance(reason, OSError):  # without the path, which the message names anyway
            why = "it is a link that leads nowhere" if isinstance(reason, FileNotFoundError) else reason.strerror or why
            self.unread += [printable(f"{place} cannot be read ({why})")] if source.startswith("records") else []
        self.refused.append(printable(f"{place} is not a record ({why}); skipped"))


def scan(results_dir: str | Path) -> list[Record]:
    """All records, without their history. Files that are not records are skipped with a warning."""
    return ResultsFolder(results_dir).records()


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
    configs: dict[int, dict[str, object]] = {}  # seeds share theirs
    rows = []
    for record in scan(results_dir):
        config = configs.get(id(record.config)) or configs.setdefault(id(record.config), _flat_config(record.config))
        rows.append(_flatten(record, config))
    return pd.DataFrame(rows)


def _flat_config(config: Science) -> dict[str, object]:
    """A config as columns of a frame."""
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


def export(results_dir: str | Path) -> dict[str, int]:
    """Write all finished records to records/<dataset>.jsonl; return the number of records per dataset.

    One slim line per record in a fixed order, so that a commit shows only what is new. Earlier exports stay, at the end
    also lines that cannot be read, such as those of a newer version. Probabilities are not exported.
    """
    folder = ResultsFolder(results_dir, whole=True)
    found = folder.records()
    if folder.unread:
        raise OSError(f"{folder.unread[0]}. Nothing is exported, because its records would be lost.")
    datasets: dict[str, list[tuple[tuple, bytes]]] = {}
    for record in found:
        if record.status == "done":
            order = (record.config.loss.name, *record.identity)
            datasets.setdefault(record.config.dataset.name, []).append((order, record.slim(folder.shared)))
    contents = {SHARED: folder.shared.lines()} if datasets else {}  # first: the others refer to it
    contents |= {f"records/{dataset}.jsonl": [line for _, line in sorted(datasets[dataset])] for dataset in datasets}
    for source, lines in contents.items():
        content = b"".join([*lines, *sorted(folder.kept.get(source, ()))])
        write_atomically(Path(results_dir, source), content)
    return {dataset: len(datasets[dataset]) for dataset in sorted(datasets)}


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
    means = {key: tuple(math.fsum(column) / len(column) for column in zip(*rows, strict=True))
             for key, rows in points.items()}  # fmt: skip
    return sorted((key for key, mean in means.items() if math.isfinite(mean[0])), key=lambda key: (*means[key], key))
