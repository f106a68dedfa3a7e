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
import math
import os
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, get_args

from east.choices import ConfigError, choose, printable
from east.lab.experiment.folder import Refused, export_files, first_line, run_files
from east.lab.experiment.record import Batches, Record, Shared, parse
from east.lab.experiment.stored import PREFIXES, UNREADABLE, NewerError, check_name
from east.lab.files import open_regular, read_regular, set_aside, write_atomically
from east.lab.settings.settings import Science, SelectionRule
from east.lab.training.scores import Cells

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

RULES = get_args(SelectionRule)
SHARED = "configs.jsonl"
MOST_BYTES = 1 << 28  # a larger file is not read
MOST_ARRAY_BYTES = 1 << 33  # unpacked; a larger archive is not read


def path(results_dir: str | Path, config: Science, seed: int, stage: str = "trial") -> Path:
    """The path of this trial's record, whether or not it exists."""
    return Path(results_dir) / "runs" / _below_runs(config, config.key, seed, stage)


def _below_runs(config: Science, key: str, seed: int, stage: str) -> str:
    try:
        dataset, loss = (check_name(name) for name in (config.dataset.name, config.loss.name))
    except ValueError as error:
        raise ConfigError(f"name: {error}") from None
    return f"{dataset}/{loss}/{key}/{PREFIXES[stage]}-{int(seed)}.json"


def write(results_dir: str | Path, record: Record, arrays: Mapping | None = None, force: bool = False) -> Path:
    """Store a record, and `arrays` (name -> ndarray) beside it, which it names by their digest; return its path.

    A finished record is not overwritten (FileExistsError) unless `force` is set, or its arrays are missing or damaged
    and new ones are given. A failed one always is, one of a newer version of east never; an unreadable one is renamed.
    """
    target = path(results_dir, record.config, record.seed, record.stage)
    before = status(target)
    if before == "newer":
        raise FileExistsError(f"{target} comes from a newer version of east and is not overwritten")
    if not force and before == "done" and (arrays is None or has_arrays(target)):
        raise FileExistsError(f"{target} exists and is done; force=true replaces it")
    if before == "unreadable":
        set_aside(target)
    if arrays is not None:
        import numpy as np

        stored = target.with_suffix(".npz")
        write_atomically(stored, lambda file: np.savez_compressed(file, **arrays))
        with open_regular(stored) as file:
            record = record.but(arrays=_digest(file))
    write_atomically(target, methodcaller("write", record.dumps()), replace=force or before in ("done", "failed"))
    return target


def read(file: str | Path, whole: bool = True) -> Record:
    """The record in a file of runs/, by default with its history. ValueError or OSError if the file holds anything
    else: a copied or renamed file is not another trial."""
    record = parse(read_regular(Path(file), MOST_BYTES), Shared(), Batches(), whole)
    _check_place(record, Path(file).as_posix())
    return record


def _check_place(record: Record, file: str) -> None:
    place, former = (
        f"runs/{_below_runs(record.config, record.key, record.seed, stage)}" for stage in (record.stage, "trial")
    )
    if not f"/{file}".endswith((f"/{place}", f"/{former}")):
        raise ValueError(f"it holds seed {record.seed}, which belongs in {place}")


def status(file: Path) -> str:
    """The one answer to whether a trial is done: done, failed, missing, unreadable, or newer, that is of a later
    version of east, which is neither read nor replaced."""
    if not os.path.lexists(file):
        return "missing"
    try:
        return read(file, whole=False).status
    except NewerError:
        return "newer"
    except UNREADABLE:
        return "unreadable"


def arrays(file: str | Path) -> "dict[str, np.ndarray]":
    """The arrays stored beside the record in `file`; a ValueError that names them if they are not the record's."""
    import numpy as np

    stored = Path(file).with_suffix(".npz")
    try:
        with open_regular(stored) as stream:
            record = read(file, whole=False)
            if record.arrays not in (None, _digest(stream)):
                raise ValueError("it has changed since its record was written")
            with zipfile.ZipFile(stream) as archive:
                if sum(member.file_size for member in archive.infolist()) > MOST_ARRAY_BYTES:
                    raise ValueError(f"it unpacks to more than {MOST_ARRAY_BYTES:,} bytes")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as opened:
                loaded = dict(opened)
        _check_arrays(loaded, record)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged archive can raise nearly anything
        raise ValueError(f"{stored} cannot be read ({printable(first_line(error))})") from None
    return loaded


def _digest(stream: BinaryIO) -> str:
    found = hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16)).hexdigest()  # type: ignore[arg-type]
    stream.seek(0)
    return found


def _check_arrays(loaded: "Mapping[str, np.ndarray]", record: Record) -> None:
    """Check that probabilities [n, d] are from 0 to 1, and that with the labels [n] they give the record's matrix."""
    import numpy as np

    for part, matrix in record.confusion.items():
        probabilities, labels = (loaded.get(f"{part}_{name}") for name in ("probabilities", "labels"))
        if probabilities is None or labels is None:
            continue
        if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or labels.dtype.kind not in "iu":
            raise ValueError(f"{part}: expected probabilities [n, d] and labels [n]")
        if not ((probabilities >= -1e-6) & (probabilities <= 1 + 1e-6)).all():
            raise ValueError(f"{part}: expected probabilities from 0 to 1")
        classes = len(matrix)
        if probabilities.shape[1] != classes or not all(0 <= label < classes for label in np.unique(labels)[[0, -1]]):
            raise ValueError(f"{part}: expected labels of the {classes} classes")
        places, counts = np.unique(labels.astype(np.int64) * classes + probabilities.argmax(1), return_counts=True)
        if Cells(classes, np.stack((places // classes, places % classes, counts), 1).tolist()) != matrix:
            raise ValueError(f"{part}: expected the predictions that its record counts")


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
    """All records, without their history.

    Files that are not records are skipped with a warning. Runs take precedence over exports, done over failed.
    """
    root, refused = Path(results_dir), Refused()
    found = _found(root, Shared(), refused, refused, whole=False)
    refused.warn(root)
    return found


def _found(root: Path, shared: Shared, refused: Refused, in_exports: Refused, whole: bool) -> list[Record]:
    by_identity: dict[tuple[str, int, str], Record] = {}
    batches = Batches()
    gc.disable()  # it would traverse all records again and again while they accumulate
    try:
        for record in (*_runs(root, batches, refused, whole), *_exported(root, shared, batches, in_exports, whole)):
            known = by_identity.get(record.identity)
            if known is None or (known.status, record.status) == ("failed", "done"):
                by_identity[record.identity] = record
    finally:
        gc.freeze()  # nor does it have to later
        gc.enable()
    return list(by_identity.values())


def _runs(root: Path, batches: Batches, refused: Refused, whole: bool) -> Iterator[Record]:
    for file in run_files(root, refused):
        try:
            record = parse(read_regular(file.path, MOST_BYTES), Shared(), batches, whole)
            _check_place(record, file.source)
        except UNREADABLE as reason:
            refused.add(file.path, reason)
            continue
        record.source = file.source
        yield record


def _exported(root: Path, shared: Shared, batches: Batches, refused: Refused, whole: bool) -> Iterator[Record]:
    """The records of records/, line by line, once what they share is read."""
    files = {os.path.basename(file.path): file for file in export_files(root, refused)}
    if SHARED in files:
        for number, line in refused.lines_of(files[SHARED]):
            try:
                shared.read(line)
            except UNREADABLE as reason:
                refused.add_line(files[SHARED], number, line, reason)
    for file in (file for name, file in files.items() if name != SHARED):
        for number, line in refused.lines_of(file):
            try:
                record = parse(line, shared, batches, whole)
            except UNREADABLE as reason:
                refused.add_line(file, number, line, reason)
                continue
            record.source = file.source
            yield record


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

    One slim line per record in a fixed order, so that a commit shows only what is new. Earlier exports stay, at the end
    also lines that cannot be read, such as those of a newer version. Probabilities are not exported.
    """
    root, shared, refused, in_exports = Path(results_dir), Shared(), Refused(), Refused()
    found = _found(root, shared, refused, in_exports, whole=True)
    refused.warn(root)
    in_exports.warn(root)
    if in_exports.unread:
        raise OSError(f"{in_exports.unread[0]}. Nothing is exported, because its records would be lost.")
    datasets: dict[str, list[tuple[tuple, bytes]]] = {}
    for record in found:
        if record.status == "done":
            order = (record.config.loss.name, *record.identity)
            datasets.setdefault(record.config.dataset.name, []).append((order, record.slim(shared)))
    contents = {f"records/{SHARED}": shared.lines()} if datasets else {}  # first: the others refer to it
    contents |= {f"records/{dataset}.jsonl": [line for _, line in sorted(datasets[dataset])] for dataset in datasets}
    for source, lines in contents.items():
        content = b"".join([*lines, *sorted(in_exports.lines.get(source, ()))])
        write_atomically(root / source, methodcaller("write", content))
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
