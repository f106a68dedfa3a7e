"""What a record may hold, as JSON: the types and bounds of its fields, and what is said of one that does not fit.

Records come from other people's disks and repositories. Every value has the type and the bounds given here, or the
record is refused with a reason.
"""

import json
import re
from typing import Annotated, Literal, NotRequired, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from east.choices import printable
from east.lab.settings.identity import SCHEMA
from east.lab.training.scores import Cells

MOST_CLASSES = 200_000
LARGEST = 1e100  # of any number, so that sums and squares stay finite
NAME = re.compile(r"\w[\w.-]{0,99}")
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError)  # what a bad file can raise

STRICT = ConfigDict(strict=True, extra="forbid")
PREFIXES = {"search": "search", "trial": "seed"}  # stage -> prefix of its files' names
STATUSES = ("done", "failed")
IN_ORDER = Field(union_mode="left_to_right")  # the first type that fits, which is faster than the best
Whole = Annotated[int, Field(ge=0, le=2**53)]
Real = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Finite: TypeAlias = Real | Annotated[int, Field(ge=-(2**53), le=2**53)]  # an int stays an int
TYPES = (
    "float",
    "int",
    "none",
    "str",
    "constrained-float",
    "constrained-int",
    "StoredCells",
    "StoredData",
)  # as pydantic names alternatives
StoredScores: TypeAlias = dict[str, Finite | list[Finite | None] | None]


class NewerError(ValueError):
    """A record of a later schema, which must be neither read nor overwritten."""


def _square(matrix: list[list[int]]) -> list[list[int]]:
    for row in matrix:
        if len(row) != len(matrix):
            raise ValueError(f"expected as many columns as rows, {len(matrix)}, got {len(row)}")
    return matrix


class StoredCells(TypedDict):
    """A matrix of many classes: [row, column, count] of each nonzero cell."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)]
    cells: list[Annotated[list[Whole], Field(min_length=3, max_length=3)]]


def _cells(stored: StoredCells) -> Cells:
    classes, cells = stored["classes"], stored["cells"]
    for i, j, _ in cells:
        if i >= classes or j >= classes:
            raise ValueError(f"expected cells of {classes} classes, got one at row {i}, column {j}")
    return Cells(classes, cells)


DenseMatrix = Annotated[list[list[Whole]], Field(min_length=1), AfterValidator(_square)]
DenseMatrices = Annotated[list[DenseMatrix], Field(min_length=1)]
SparseMatrix = Annotated[StoredCells, AfterValidator(_cells)]


class StoredDecision(TypedDict, total=False):
    """A decision rule other than argmax; a mean over thresholds has one matrix for each of them."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    rule: JsonValue
    at: list[Finite]
    confusion: dict[str, Annotated[DenseMatrix | SparseMatrix | DenseMatrices, IN_ORDER]]
    scores: dict[str, StoredScores]


class StoredBest(TypedDict, total=False):
    """The epoch that was kept; see Best. An early record has 1.0 for epoch 1."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    val_loss: Finite | None
    val_metric: Finite | None
    temperature: Finite | None
    epoch: Finite | None
    tie: Finite | None


class StoredData(TypedDict, total=False):
    """The data of a trial. positive: index of the positive class; where it is not given, 1 of two classes."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]
    name: str | None
    fingerprint: str | None
    sizes: dict[str, Whole] | list[Whole]
    index_hash: str | None
    positive: Whole | None


class StoredEnsemble(TypedDict):
    """How an ensemble came about; see Stacked."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    folds: Whole
    weights: dict[str, Finite]
    epochs: list[Whole]
    temperature: Finite
    confusion: dict[str, Annotated[DenseMatrix | SparseMatrix, IN_ORDER]]


class Stored(TypedDict):
    """The JSON of a record. A string in place of values names what is `Shared`; what is not given has its default."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    key: str
    config: dict[str, JsonValue]
    seed: Whole
    stage: Literal["search", "trial"]
    status: Literal["done", "failed"]
    schema: int
    data: NotRequired[StoredData | str]
    confusion: NotRequired[dict[str, Annotated[DenseMatrix | SparseMatrix, IN_ORDER]]]
    scores: NotRequired[dict[str, StoredScores]]
    decisions: NotRequired[dict[str, StoredDecision]]
    best: NotRequired[StoredBest]
    epochs: NotRequired[Whole]
    stopped: NotRequired[str | None]
    error: NotRequired[str | None]
    seconds: NotRequired[Annotated[Finite, Field(ge=0)] | None]
    device: NotRequired[str | None]
    versions: NotRequired[dict[str, str] | str]
    git: NotRequired[str | None]
    arrays: NotRequired[str | None]
    ensemble: NotRequired[StoredEnsemble]
    history: NotRequired[dict[str, list[Finite | None]]]
    digest: NotRequired[str]


STORED, DATA, VERSIONS = TypeAdapter(Stored), TypeAdapter(StoredData), TypeAdapter(dict[str, str])


def check_name(name: str) -> str:
    """A name that may become part of a path; ValueError for anything else."""
    if not NAME.fullmatch(name):
        raise ValueError(f"expected a plain name of letters, digits, '_', '-' and '.', got {shown(name)}")
    return name


def check_schema(schema: object) -> None:
    if isinstance(schema, int) and schema > SCHEMA:
        raise NewerError(f"expected schema {SCHEMA}, got {shown(schema)}; it comes from a newer version of east")
    if schema != SCHEMA:
        raise ValueError(f"expected schema {SCHEMA}, got {shown(schema)}")


def refuse_foreign(text: bytes) -> None:
    """Raise a clearer error if this is JSON of another kind, or a record of another version."""
    try:
        values = json.loads(text)
    except UNREADABLE:
        return
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    check_schema(values.get("schema"))


def explained(error: ValidationError) -> str:
    """What is wrong, in one line. Where a value has alternative types, the one that matched furthest counts."""
    first = max(error.errors(include_url=False), key=lambda details: (len(details["loc"]), "error" in details["type"]))
    if first["type"] == "json_invalid":
        return f"it is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}"
    parts = [str(part) for part in first["loc"]]
    place = ".".join(part for part in parts if "[" not in part and part not in TYPES)
    if first["type"] == "missing":
        missing = ", ".join(str(details["loc"][-1]) for details in error.errors() if details["type"] == "missing")
        return f"expected all fields of a record, missing: {missing}"
    if first["type"] == "extra_forbidden":
        return f"unknown field {shown(place)}"
    text = first["msg"].replace("Input should be", "expected").removeprefix("Value error, ")
    return f"{printable(place) + ': ' if place else ''}{text}, got {shown(first['input'])}"


def shown(value: object) -> str:
    """A value from a file for use in a message: short, and without control characters."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
