"""The record of a trial: its fields, their bounds, and its JSON.

Records come from other people's disks. Every value has the type and the bounds given here, or the record is refused
with a reason. Scores that follow from a stored confusion matrix are always computed from it.

A run's file has three lines: the values, the history, the digest of both. A line of an export is slim: it leaves out
those scores, and has the values that many records share by name (`Shared`).
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    with_config,
)
from typing_extensions import TypedDict

from east import metrics
from east.choices import printable
from east.lab.settings import identity
from east.lab.settings.identity import SCHEMA, json_types
from east.lab.settings.settings import Science
from east.lab.training.scores import (
    STRICT,
    Best,
    Finite,
    JudgedRule,
    LazyScores,
    Margins,
    MatrixBatch,
    Scores,
    Stacked,
    StoredMatrix,
    Whole,
)

NAME = re.compile(r"\w[\w.-]{0,99}")
SECTIONS = (*identity.SECTIONS, "ensemble")
HISTORY_POINTS = 40
DIGEST, HISTORY = b'"digest":"', b'"history":'
Batches: TypeAlias = dict[tuple[int, int | None], MatrixBatch]  # of many records, by classes and positive class


class NewerError(Exception):
    """A record of a later schema, which must be neither read nor overwritten."""


UNREADABLE = (NewerError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError)  # from bad files


class Shared(dict[str, str]):
    """JSON texts that many records share, each under its digest."""

    def __init__(self) -> None:
        self.values_of: dict[str, Any] = {}  # the checked values of a text

    def add(self, text: str) -> str:
        """The name of a text."""
        name = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
        self[name] = text
        return name

    def __missing__(self, name: str) -> str:
        raise ValueError(f"records/configs.jsonl has no {shown(name)}")

    def read(self, line: bytes) -> None:
        """Take a text from its line of a file; ValueError if it is not one."""
        content = line.decode().rstrip()
        if content != f'{{"id":"{self.add(content[29:-1])}","value":{content[29:-1]}}}':
            raise ValueError("expected an id and its value")

    def lines(self) -> list[bytes]:
        """Their lines, in the order of the texts."""
        return [f'{{"id":"{self.add(text)}","value":{text}}}\n'.encode() for text in sorted(self.values())]


def _shared(value: Any, check: Any, info: Any) -> Any:
    """Checked values, or those of a shared text: one object for all records that name it."""
    if not isinstance(value, str):
        return check(value)
    known = info.context.values_of
    if value not in known:
        known[value] = check(json.loads(info.context[value]))
    return known[value]


def _config(values: Any, info: Any) -> Any:
    if isinstance(values, Science):
        return values
    shared = {n: info.context[v] if isinstance(v, str) and n in SECTIONS else compact(v) for n, v in values.items()}
    return _science(tuple(shared.items()))


@lru_cache(maxsize=1 << 17)
def _science(texts: tuple[tuple[str, str], ...]) -> Science:
    """A config from its sections and labels as JSON; cached, since seeds share settings, and settings sections."""
    try:
        values = {name: _section(name, text) if name in SECTIONS else json.loads(text) for name, text in texts}
        config = Science.model_validate(values)
    except ValidationError as error:
        raise ValueError(explained(error)) from None
    for name in (config.dataset.name, config.loss.name):
        check_name(name)
    return config


@lru_cache(maxsize=1 << 14)
def _section(name: str, text: str) -> Any:
    return Science.model_fields[name].annotation.model_validate_json(text)  # type: ignore[union-attr]


def _schema(schema: int) -> int:
    if schema > SCHEMA:
        raise NewerError(f"expected schema {SCHEMA}, got {shown(schema)}; it comes from a newer version of east")
    if schema != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}")
    return schema


@with_config(ConfigDict(strict=True, extra="allow"))
class TrialData(TypedDict, total=False):
    """The data of a trial. positive: index of the positive class; where it is not given, 1 of two classes."""

    name: str | None
    fingerprint: str | None
    sizes: dict[str, Whole] | list[Whole]
    index_hash: str | None
    positive: Whole | None


@with_config(STRICT)
@dataclass
class Record:
    """Everything that is stored about one trial; missing numbers are None."""

    config: Annotated[Science, BeforeValidator(_config)]
    seed: Whole
    stage: Literal["search", "trial"] = "trial"  # tables never average search records
    data: Annotated[TrialData, WrapValidator(_shared)] = field(default_factory=TrialData)
    confusion: dict[str, StoredMatrix] = field(default_factory=dict)  # val, test: by argmax
    scores: Mapping[str, Scores] = field(default_factory=dict)  # val, test
    decisions: Mapping[str, JudgedRule] = field(default_factory=dict)  # other rules: thresholds, plugin_<metric>
    best: Best = field(default_factory=Best)
    epochs: Whole = 0
    stopped: str | None = None
    status: Literal["done", "failed"] = "done"
    error: str | None = None
    seconds: Annotated[Finite, Field(ge=0)] | None = None
    device: str | None = None
    versions: Annotated[dict[str, str], WrapValidator(_shared)] = field(default_factory=dict)
    git: str | None = None
    arrays: str | None = None  # digest of the file with its probabilities
    ensemble: Stacked | None = None
    schema: Annotated[int, AfterValidator(_schema)] = SCHEMA
    key: str = ""  # of `config`
    history: dict[str, list[Finite | None]] = field(default_factory=dict)  # by quantity, one entry per epoch
    source: str = field(default="", compare=False)  # the file it was read from, relative to results_dir

    def __post_init__(self) -> None:
        if self.key not in ("", self.config.key):
            raise ValueError(f"its config has the key {self.config.key}, but it says {shown(self.key)}")
        self.key = self.config.key

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def identity(self) -> tuple[str, int, str]:
        """Key, seed and stage, which identify a trial."""
        return self.key, self.seed, self.stage

    def but(self, **changes: Any) -> "Record":
        """A copy with other values."""
        return replace(self, **{"key": "", **changes})

    def to_json(self) -> dict[str, Any]:
        stored = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "source"}
        stored |= {"config": self.config.to_json(), "best": self.best.to_json()}
        for later in ("arrays", "ensemble"):
            if stored[later] is None:
                del stored[later]
        return json_types(stored)  # type: ignore[return-value]

    def dumps(self) -> bytes:
        """As a run's file."""
        return _signed(self.to_json(), "\n")

    def slim(self, shared: Shared) -> bytes:
        """As a line of an export, given a record that was read; adds to `shared`.

        A trial keeps a few epochs of its history, a search none.
        """
        rules = {name: {**rule, "scores": _stored(rule.get("scores", {}))} for name, rule in self.decisions.items()}
        history = _thin(self.history) if self.stage == "trial" else {}
        values = self.but(history=history, scores=_stored(self.scores), decisions=rules).to_json()
        named = {n: shared.add(compact(v)) if isinstance(v, dict) else v for n, v in values["config"].items()}
        named = {"config": named} | {n: shared.add(compact(values[n])) for n in ("data", "versions") if values[n]}
        return _signed(_given(values | named), " ")

    def score(self, batches: Batches) -> None:
        """Replace the scores that follow from matrices by what computes them when they are asked for."""

        def lazy(found: Any, stored: Scores, ranks: Scores | None = None) -> LazyScores:
            mean = isinstance(found, list) and not isinstance(found[0][0], int)
            matrices = found if mean else [found]
            classes = len(matrices[0])
            positive = self.data.get("positive", 1 if classes == 2 else None)
            if positive is not None and positive >= classes:
                raise ValueError(f"data.positive: expected one of {classes} classes, got {shown(positive)}")
            if any(len(matrix) != classes for matrix in matrices):
                raise ValueError(f"expected matrices of {classes} classes")
            batch = batches.setdefault((classes, positive), MatrixBatch(positive))
            return LazyScores(batch, matrices, mean, stored, ranks)

        argmax, decisions = dict(self.scores), dict(self.decisions)
        for part, matrix in self.confusion.items():
            score = argmax.get(part, {}).get("f1_pos")
            if len(matrix) > 2 and "positive" not in self.data and isinstance(score, float):  # an older record
                by_class = metrics.f1(Margins.of([matrix]), average="none")[0]
                self.data = {**self.data, "positive": int(np.abs(by_class - score).argmin())}
        argmax |= {part: lazy(matrix, argmax.get(part, {})) for part, matrix in self.confusion.items()}
        for name, rule in decisions.items():
            scores = dict(rule.get("scores", {}))
            for part, found in rule.get("confusion", {}).items():
                scores[part] = lazy(found, scores.get(part, {}), argmax.get(part, {}))
            decisions[name] = {**rule, "scores": scores}
        self.scores, self.decisions = argmax, decisions


RECORD = TypeAdapter(Record)


def parse(content: bytes, shared: Shared, batches: Batches, source: str = "", whole: bool = False) -> Record:
    """The record in a JSON text. ValueError if it is not a record, has changed since it was written, or contradicts
    itself; NewerError if a later version wrote it.

    A digest covers everything before it. whole: with the history, which is otherwise skipped.
    """
    body, mark, end = content.rpartition(DIGEST)
    if mark and end.rstrip() == digest(body) + b'"}':
        values = body if whole else body.rpartition(HISTORY)[0]
        content = (values if values[-1:].isspace() else body).rstrip(b", \n") + b"}"
    try:
        record = RECORD.validate_json(content, context=shared)
    except ValidationError as error:
        raise ValueError(explained(error)) from None
    record.source = source
    record.score(batches)
    return record


compact = json.JSONEncoder(separators=(",", ":")).encode


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()


def _signed(values: dict[str, Any], space: str) -> bytes:
    """A JSON object with its own digest, and a space before its last values: the history, which a query can skip."""
    history = compact(values.pop("history", {}))
    body = f'{compact(values)[:-1]},{space}"history":{history},{space}'.encode()
    return body + DIGEST + digest(body) + b'"}\n'


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that are None or empty, at any depth."""
    below = {name: _given(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in below.items() if value is not None and value != {}}


def _stored(scores: Mapping[str, Scores]) -> dict[str, Scores]:
    """The scores that do not follow from matrices."""
    return {part: of.stored if isinstance(of, LazyScores) else of for part, of in scores.items()}


def _thin(history: Mapping[str, list]) -> dict[str, list]:
    """At most HISTORY_POINTS epochs, including the first and the last, to five digits."""
    epochs = max(map(len, history.values()), default=0)
    count = min(epochs, HISTORY_POINTS)
    kept = [round(i * (epochs - 1) / max(count - 1, 1)) for i in range(count)]
    thinned = {name: [values[i] for i in kept if i < len(values)] for name, values in history.items()}
    return json_types(thinned, lambda x: float(f"{x:.5g}"))  # type: ignore[return-value]


def check_name(name: str) -> str:
    """A name that may become part of a path; ValueError for anything else."""
    if not NAME.fullmatch(name):
        raise ValueError(f"expected a plain name of letters, digits, '_', '-' and '.', got {shown(name)}")
    return name


def explained(error: ValidationError) -> str:
    """The most specific error in one line."""
    errors = error.errors(include_url=False)
    first = max(errors, key=lambda details: (len(details["loc"]), "error" in details["type"]))
    # Pydantic adds the names of alternative types to the path of a value.
    place = ".".join(str(part) for part in first["loc"] if re.fullmatch(r"[a-z0-9_]+", str(part)))
    text = first["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    if first["type"] == "missing":
        missing = ", ".join(str(details["loc"][-1]) for details in errors if details["type"] == "missing")
        return f"expected all fields of a record, missing: {missing}"
    if first["type"] == "json_invalid":
        return f"it is not JSON: {text.removeprefix('Invalid JSON: ')}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return "its content has changed since it was written" if place == "digest" else f"unknown field {shown(place)}"
    return f"{printable(place) + ': ' if place else ''}{text}, got {shown(first['input'])}"


def shown(value: object) -> str:
    """A value from a file for use in a message: short, and without control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
