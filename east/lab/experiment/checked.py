"""What a stored record must look like: every record is checked once, when it is read.

Records come from other people's disks and repositories. Each value has the type and range that the rest of the program
expects, or the record is refused with a reason.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from east.choices import printable
from east.lab.settings.identity import SCHEMA
from east.lab.settings.sections import Science
from east.lab.training.scores import DENSE_CLASSES, Cells, Matrix

MOST_CLASSES = 200_000
MOST_BYTES = 1 << 28  # a larger file is not read
NAME = re.compile(r"\w[\w.-]{0,99}")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError)  # what a bad file can raise


class NewerError(ValueError):
    """A record of a later schema, which must be neither read nor overwritten."""


Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)] | int  # an int stays an int
Whole = Annotated[int, Field(ge=0, le=2**53)]

CheckedMatrix: TypeAlias = list[list[Whole]]
CheckedScores: TypeAlias = dict[str, Finite | list[Finite | None] | None]
STRICT = ConfigDict(strict=True, extra="forbid")


class SparseMatrix(TypedDict):
    """A matrix of many classes as it is stored: [row, column, count] of each nonzero cell."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)]
    cells: list[Annotated[list[Whole], Field(min_length=3, max_length=3)]]


class StoredDecision(TypedDict, total=False):
    """A decision rule other than argmax."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    rule: JsonValue
    at: list[Finite]
    confusion: dict[str, CheckedMatrix | list[CheckedMatrix] | SparseMatrix]
    scores: dict[str, CheckedScores]


class StoredBest(TypedDict, total=False):
    """The epoch that was kept; see Best."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    val_loss: Finite | None
    val_metric: Finite | None
    temperature: Finite | None
    epoch: Finite | None  # 1.0 in early records, which must be exported as they are
    tie: Finite | None


class StoredEnsemble(TypedDict):
    """How an ensemble came about; see Stacked."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    folds: Whole
    weights: dict[str, Finite]
    epochs: list[Whole]
    temperature: Finite
    confusion: dict[str, CheckedMatrix | SparseMatrix]


class Stored(TypedDict):
    """The JSON of a record."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    key: str
    config: dict[str, JsonValue]
    seed: Whole
    stage: Literal["search", "trial"]
    data: dict[str, JsonValue]
    confusion: dict[str, CheckedMatrix | SparseMatrix]
    scores: dict[str, CheckedScores]
    decisions: dict[str, StoredDecision]
    best: StoredBest
    epochs: Whole
    stopped: str | None
    status: Literal["done", "failed"]
    error: str | None
    seconds: Annotated[Finite, Field(ge=0)] | None
    device: str | None
    versions: dict[str, str]
    git: str | None
    schema: int
    ensemble: NotRequired[StoredEnsemble]
    history: NotRequired[dict[str, list[Finite | None]]]
    digest: NotRequired[str]


ADAPTER = TypeAdapter(Stored)
DIGEST = b'"digest":"'


def parse(content: bytes, whole: bool = False, known: bool = False) -> Stored:
    """The JSON of one record. ValueError if it is not a record or has changed since it was written; NewerError if a
    later version wrote it.

    A digest covers everything before it. If it matches, or the content is `known` to have passed this check before,
    only the first line is read, without the history, unless the `whole` record is requested.
    """
    body, mark, end = content.rpartition(DIGEST)
    text = content
    if mark and end.rstrip() == digest(body) + b'"}':
        text = (body if whole else body.partition(b"\n")[0]).rstrip(b",\n") + b"}"
    elif known and b",\n" in content:
        text = content.partition(b",\n")[0] + b"}"
    try:
        values = ADAPTER.validate_json(text)
    except ValidationError as error:
        _refuse_foreign(text)
        raise ValueError(explained(error)) from None
    check_schema(values["schema"])
    if "digest" in values:
        raise ValueError("its content has changed since it was written")
    return values


def digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).hexdigest().encode()


def _refuse_foreign(text: bytes) -> None:
    """Raise a clearer error if this is JSON of another kind, or a record of another version."""
    try:
        values = json.loads(text)
    except UNREADABLE:
        return
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    check_schema(values.get("schema"))


def check_schema(schema: object) -> None:
    if isinstance(schema, int) and schema > SCHEMA:
        raise NewerError(f"expected schema {SCHEMA}, got {schema}; it comes from a newer version of east")
    if schema != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, got {shown(schema)}")


@lru_cache(maxsize=100_000)
def science(config: str) -> Science:
    """A config in JSON as a typed object; cached, since the seeds of one setting share it."""
    try:
        return Science.model_validate(json.loads(config))
    except ValidationError as error:
        raise ValueError(f"config.{explained(error)}") from None


def identity(values: Stored) -> tuple[str, Science, str, str]:
    """A record's config as JSON and typed, its key and its family; ValueError for a wrong key or an odd name."""
    text = json.dumps(values["config"])
    config, key, family = _identity(text)
    if values["key"] != key:
        raise ValueError(f"its config has the key {key}, but it says {shown(values['key'])}")
    for name in (config.dataset.name, config.loss.name):
        check_name(name)
    return text, config, key, family


@lru_cache(maxsize=100_000)
def _identity(config: str) -> tuple[Science, str, str]:
    typed = science(config)
    return typed, typed.key, typed.family


@lru_cache(maxsize=10_000)
def check_name(name: str) -> str:
    """A name that may become part of a path; ValueError for anything else."""
    if not NAME.fullmatch(name):
        raise ValueError(f"expected a plain name of letters, digits, '_', '-' and '.', got {shown(name)}")
    return name


def confusion(values: Stored) -> dict[str, Matrix]:
    """The matrices of a record, each square; those of its decisions are checked, and sparse ones replaced by Cells."""
    for rule, decision in values["decisions"].items():
        matrices: dict[str, Any] = decision.get("confusion", {})
        for split, matrix in matrices.items():
            if isinstance(matrix, Mapping):
                matrices[split] = _matrix(split, matrix)
                continue
            for of_threshold in _matrices(matrix):
                _check_square(rule, of_threshold)
    return {split: _matrix(split, matrix) for split, matrix in values["confusion"].items()}


def _matrices(stored: Any) -> Sequence[Matrix]:
    """The matrices of a decision: one per threshold, or a single one."""
    return stored if stored and stored[0] and type(stored[0][0]) is list else [stored]


def _matrix(split: str, matrix: Any) -> Matrix:
    if not isinstance(matrix, Mapping):
        _check_square(split, matrix)
        return matrix
    classes, cells = matrix["classes"], matrix["cells"]
    for i, j, _ in cells:
        if i >= classes or j >= classes:
            raise ValueError(f"confusion.{split} has a cell at row {i}, column {j}, but only {classes} classes")
    if classes > DENSE_CLASSES:
        return Cells(classes, cells)
    dense = [[0] * classes for _ in range(classes)]
    for i, j, count in cells:
        dense[i][j] = count
    return dense


def _check_square(split: str, matrix: Matrix) -> None:
    classes = len(matrix)
    for row in matrix:
        if len(row) != classes:
            raise ValueError(f"confusion.{split}: expected as many columns as rows, {classes}, got {len(row)}")


def actual(matrix: Matrix) -> list[int]:
    """How many rows each true class has."""
    if not isinstance(matrix, Cells):
        return [sum(row) for row in matrix]
    counts = [0] * len(matrix)
    for i, _, count in matrix.cells:
        counts[i] += count
    return counts


def explained(error: ValidationError) -> str:
    """What is wrong, in one line. Where a value has alternative types, the one that matched furthest counts."""
    first = max(error.errors(include_url=False), key=lambda details: len(details["loc"]))
    if first["type"] == "json_invalid":
        return f"it is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    parts = [str(part) for part in first["loc"]]
    place = ".".join(part for part in parts if "[" not in part and part not in ("float", "none", "SparseMatrix"))
    if first["type"] == "missing":
        missing = ", ".join(str(details["loc"][-1]) for details in error.errors() if details["type"] == "missing")
        return f"expected all fields of a record, missing: {missing}"
    if first["type"] == "extra_forbidden":
        return f"unknown field {shown(place)}"
    text = first["msg"].replace("Input should be", "expected")
    return f"{printable(place) + ': ' if place else ''}{text}, got {shown(first['input'])}"


def shown(value: object) -> str:
    """A value from a file for use in a message: short, and without control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
