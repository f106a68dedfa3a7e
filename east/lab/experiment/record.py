"""What is stored about one trial, how it becomes a text, and a text (stored.py) becomes a record again.

Scores that follow from a stored confusion matrix are always computed from it.

A run's file has three lines: the values, the history, the digest of both. A line of an export is slim: it leaves out
those scores, and has the values that many records share by name (`Shared`).
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import ValidationError

from east import metrics
from east.choices import choose, printable
from east.lab.experiment.stored import (
    DATA,
    PREFIXES,
    STATUSES,
    STORED,
    VERSIONS,
    Stored,
    check_name,
    check_schema,
    explained,
    refuse_foreign,
    shown,
)
from east.lab.settings import identity
from east.lab.settings.identity import SCHEMA, json_types
from east.lab.settings.settings import Science
from east.lab.training.scores import (
    DENSE_CLASSES,
    RANKED,
    Best,
    Cells,
    JudgedRule,
    LazyScores,
    Margins,
    Matrix,
    MatrixBatch,
    Scores,
    Stacked,
    nonzero,
)

EXPORTED_DENSE = 16  # classes; larger matrices are exported as cells
HISTORY_POINTS = 40
DIGEST, HISTORY = b'"digest":"', b'"history":'


@dataclass
class Record:
    """Everything that is stored about one trial; missing numbers are None."""

    config: Science
    seed: int
    stage: str = "trial"  # or "search"; tables never average search records
    data: dict[str, Any] = field(default_factory=dict)  # see StoredData
    confusion: dict[str, Matrix] = field(default_factory=dict)  # val, test: by argmax
    scores: Mapping[str, Scores] = field(default_factory=dict)  # val, test
    decisions: Mapping[str, JudgedRule] = field(default_factory=dict)  # other rules: thresholds, plugin_<metric>
    best: Best = field(default_factory=Best)
    epochs: int = 0
    stopped: str | None = None
    status: str = "done"
    error: str | None = None
    seconds: float | None = None
    device: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    git: str | None = None
    arrays: str | None = None  # digest of the file with its probabilities
    ensemble: Stacked | None = None
    schema: int = SCHEMA
    key: str = field(default="", compare=False)  # key and family of `config`
    family: str = field(default="", compare=False)
    history: dict[str, list] = field(default_factory=dict)  # one list per quantity, one entry per epoch
    source: str = field(default="", compare=False)  # the file it was read from, relative to results_dir

    def __post_init__(self) -> None:
        if self.stage not in PREFIXES or self.status not in STATUSES:
            choose("stage", self.stage, PREFIXES)
            choose("status", self.status, STATUSES)
        self.key, self.family = self.key or self.config.key, self.family or self.config.family

    @property
    def identity(self) -> tuple[str, int, str]:
        """Key, seed and stage, which identify a trial."""
        return self.key, self.seed, self.stage

    def but(self, **changes: Any) -> "Record":
        """A copy with other values; key and family follow a new config."""
        return replace(self, **({"key": "", "family": ""} if "config" in changes else {}) | changes)

    def to_json(self, dense: int = DENSE_CLASSES) -> dict[str, Any]:
        """As in a run's file. Matrices of more classes than `dense` would make it too large, and become cells."""
        stored = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("family", "source")}
        stored |= {"config": self.config.to_json(), "best": self.best.to_json()}
        stored["decisions"] = {rule: {**judged} for rule, judged in self.decisions.items()}
        for judged in (stored, *stored["decisions"].values()):
            if "confusion" in judged:
                judged["confusion"] = _sparse(judged["confusion"], dense)
            if "scores" in judged:
                judged["scores"] = {part: dict(of) for part, of in judged["scores"].items()}
        if self.ensemble:
            stored["ensemble"] = {**self.ensemble, "confusion": _sparse(self.ensemble["confusion"], dense)}
        for later in ("arrays", "ensemble"):
            if stored[later] is None:
                del stored[later]
        return json_types(stored)  # type: ignore[return-value]

    def dumps(self) -> bytes:
        """As a run's file."""
        return _signed(self.to_json(), "\n")

    def slim(self, shared: "Shared") -> bytes:
        """As a line of an export, given a record that was read; adds to `shared`.

        A trial keeps a few epochs of its history, a search none.
        """
        decisions = {
            rule: _given({**judged, "scores": _stored(judged.get("scores", {}), of_rule=True)})
            for rule, judged in self.decisions.items()
        }
        history = _thin(self.history) if self.stage == "trial" else {}
        kept = self.but(history=history, scores=_stored(self.scores), decisions=decisions)
        values = _given(kept.to_json(EXPORTED_DENSE))
        values["config"] = {
            name: shared.add(compact(value)) if isinstance(value, dict) else value
            for name, value in values["config"].items()
        }
        for name in values.keys() & {"data", "versions"}:
            values[name] = shared.add(compact(values[name]))
        values["best"] = _given(values["best"])
        return _signed(values, " ")


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != {}}


def _stored(scores: Mapping[str, Scores], of_rule: bool = False) -> dict[str, Scores]:
    """What of the scores follows neither from matrices nor, if they are of a rule, from those of argmax."""
    kept = {part: _given(of.stored if isinstance(of, LazyScores) else of) for part, of in scores.items()}
    unstored = RANKED if of_rule else ()
    return _given({part: {n: v for n, v in of.items() if n not in unstored} for part, of in kept.items()})


def _sparse(matrices: Mapping[str, Any], dense: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, matrix in matrices.items():
        many = len(matrix) > dense
        cells = matrix.cells if isinstance(matrix, Cells) else nonzero(matrix) if many else None
        found[part] = matrix if cells is None else {"classes": len(matrix), "cells": cells}
    return found


def _thin(history: Mapping[str, list]) -> dict[str, list]:
    """At most HISTORY_POINTS epochs, including the first and the last, to five digits."""
    epochs = max(map(len, history.values()), default=0)
    count = min(epochs, HISTORY_POINTS)
    kept = [round(i * (epochs - 1) / max(count - 1, 1)) for i in range(count)]
    thinned = {name: [values[i] for i in kept if i < len(values)] for name, values in history.items()}
    return json_types(thinned, lambda x: float(f"{x:.5g}"))  # type: ignore[return-value]


compact = json.JSONEncoder(separators=(",", ":")).encode


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()


def _signed(values: dict[str, Any], space: str) -> bytes:
    """A JSON object with its own digest, and a space before its last values: the history, which a query can skip."""
    history = compact(values.pop("history", {}))
    body = f'{compact(values)[:-1]},{space}"history":{history},{space}'.encode()
    return body + DIGEST + digest(body) + b'"}\n'


class Shared:
    """JSON texts that many records share, each under its digest."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, text: str) -> str:
        """The name of a text."""
        name = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        self.texts[name] = text
        return name

    def __getitem__(self, name: str) -> str:
        if name not in self.texts:
            raise ValueError(f"records/configs.jsonl has no {shown(name)}")
        return self.texts[name]

    def read(self, line: bytes) -> None:
        """Take a text from its line of a file; ValueError if it is not one."""
        content = line.decode().rstrip()
        if content != f'{{"id":"{self.add(content[29:-1])}","value":{content[29:-1]}}}':
            raise ValueError("expected an id and its value")

    def lines(self) -> list[bytes]:
        """Their lines, in the order of the texts."""
        named = sorted((text, name) for name, text in self.texts.items())
        return [f'{{"id":"{name}","value":{text}}}\n'.encode() for text, name in named]


class Batches(dict[tuple[int, int | None], MatrixBatch]):
    """The confusion matrices of several records by number of classes and positive class; each kind is scored at once.

    Where the positive class is not stated (-1), it is the second of two.
    """

    def __missing__(self, kind: tuple[int, int | None]) -> MatrixBatch:
        classes, positive = kind
        if positive is not None and positive >= classes:
            raise ValueError(f"data.positive: expected one of {classes} classes, got {shown(positive)}")
        if positive == -1:
            positive = 1 if classes == 2 else None
        return self.setdefault(kind, MatrixBatch(positive))


def parse(content: bytes, shared: Shared, batches: Batches, whole: bool = False) -> Record:
    """The record in a JSON text. ValueError if it is not a record, has changed since it was written, or contradicts
    itself; NewerError if a later version wrote it.

    A digest covers everything before it. whole: with the history, which is otherwise skipped.
    """
    body, mark, end = content.rpartition(DIGEST)
    text = content
    if mark and end.rstrip() == digest(body) + b'"}':
        values = body if whole else body.rpartition(HISTORY)[0]
        text = (values if values[-1:].isspace() else body).rstrip(b", \n") + b"}"
    try:
        stored = STORED.validate_json(text)
        check_schema(stored["schema"])
        if "digest" in stored:
            raise ValueError("its content has changed since it was written")
        return _record(stored, shared, batches, whole)
    except ValidationError as error:
        refuse_foreign(text)
        raise ValueError(explained(error)) from None


def _record(values: Stored, shared: Shared, batches: Batches, whole: bool) -> Record:
    stored: dict[str, Any] = dict(values)
    texts = (
        (n, shared[v] if isinstance(v, str) and n in SECTIONS else compact(v)) for n, v in values["config"].items()
    )
    config, key, family = _identified(tuple(texts))
    if key != stored["key"]:
        raise ValueError(f"its config has the key {key}, but it says {shown(stored['key'])}")
    for name in ("data", "versions"):
        if isinstance(stored.get(name), str):
            stored[name] = _checked(name, shared[stored[name]])
    stored |= {"config": config, "family": family, "best": Best(**stored.get("best", {}))}
    if not whole:
        stored.pop("history", None)
    record = Record(**stored)
    _check_range(record.scores)
    for judged in record.decisions.values():
        _check_range(judged.get("scores", {}))
    if record.confusion or record.decisions:
        _score(record, batches)
    return record


SECTIONS = (*identity.SECTIONS, "ensemble")


@lru_cache(maxsize=1 << 14)
def _checked(name: str, text: str) -> dict[str, Any]:
    """Data or versions; one object for all records that share them."""
    return dict((DATA if name == "data" else VERSIONS).validate_json(text))


@lru_cache(maxsize=1 << 17)
def _identified(texts: tuple[tuple[str, str], ...]) -> tuple[Science, str, str]:
    """A config with its key and family, from its sections and labels as JSON; cached, since seeds share settings."""
    try:
        sections = {name: _section(name, text) for name, text in texts if name in SECTIONS}
        typed = {name: section for name, (section, *_) in sections.items()}
        config = Science.model_validate(typed | {name: json.loads(text) for name, text in texts if name not in typed})
    except ValidationError as error:
        raise ValueError(f"config.{explained(error)}") from None
    for name in (config.dataset.name, config.loss.name):
        check_name(name)
    if sections.keys() != {*identity.SECTIONS}:
        return config, config.key, config.family
    key, family = (identity.digest({name: hashed[k] for name, hashed in sections.items()}) for k in (1, 2))
    return config, key, family


@lru_cache(maxsize=1 << 14)
def _section(name: str, text: str) -> tuple[Any, str, str]:
    """A section of a config, and what is hashed of it for the key and for the family; settings share most sections."""
    section = Science.model_fields[name].annotation.model_validate_json(text)  # type: ignore[union-attr]
    stored = section.to_json()
    return section, identity.hashed_text(name, stored, False), identity.hashed_text(name, stored, True)


def _check_range(scores: Mapping[str, Scores]) -> None:
    """Check that scores are from -1 to 1, but for one that a loss of the user's own was trained for."""
    for part, of in scores.items():
        for name, value in of.items():
            if isinstance(value, int | float) and abs(value) > 1 + 1e-6 and name != "trained_for":
                raise ValueError(f"scores.{printable(part)}.{printable(name)}: expected -1 to 1, got {shown(value)}")


def _score(record: Record, batches: Batches) -> None:
    """Replace the scores that follow from matrices by what computes them when they are asked for."""
    if "positive" not in record.data and (positive := _positive(record)) is not None:
        record.data = {**record.data, "positive": positive}
    positive, argmax = record.data.get("positive", -1), dict(record.scores)
    for part, matrix in record.confusion.items():
        argmax[part] = LazyScores(batches[len(matrix), positive], [matrix], False, argmax.get(part, {}))
    decisions: dict[str, JudgedRule] = {}
    for rule, judged in record.decisions.items():
        scores: dict[str, Scores] = dict(judged.get("scores", {}))
        for part, found in judged.get("confusion", {}).items():
            several = not isinstance(found, Cells) and isinstance(found[0][0], list)
            matrices: Any = found if several else [found]
            ranks = {} if several else record.scores.get(part, {})
            batch = batches[len(matrices[0]), positive]
            scores[part] = LazyScores(batch, matrices, several, scores.get(part, {}), ranks)
        decisions[rule] = {**judged, "scores": scores}
    record.scores, record.decisions = argmax, decisions


def _positive(record: Record) -> int | None:
    """The positive class of more than two, if the record has a score of it but does not say which it is."""
    for part, matrix in record.confusion.items():
        score = record.scores.get(part, {}).get("f1_pos")
        if isinstance(score, float) and len(matrix) > 2:
            c = Margins.of([matrix])
            return int(np.abs(metrics.f1(c, average="none")[0] - score).argmin())
    return None
