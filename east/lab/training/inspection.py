"""Checks on a saved model before anything is computed with it: the files may come from anyone.

Every function raises ValueError with one sentence. Nothing is imported here, and no more memory is allocated than the
weights themselves take.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, NotRequired

import torch
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from east import decisions
from east.lab import models
from east.lab.data import Encoding
from east.lab.data.common import Kind
from east.lab.settings.sections import ModelSection
from east.lab.training.scores import StoredRule

MOST_CLASSES = 200_000
MOST_INPUTS = 10**8


class WrongDescriptionError(ValueError):
    """model.json describes a network that cannot exist."""


class About(TypedDict):
    """The content of model.json. Predictions need the required keys and, for tables, `encoding`; the rest is origin."""

    kind: Kind
    classes: Annotated[list[str], Field(min_length=2, max_length=MOST_CLASSES)]
    positive: Annotated[int, Field(ge=0)] | None
    inputs_shape: Annotated[list[Annotated[int, Field(ge=1, le=MOST_INPUTS)]], Field(min_length=1, max_length=3)]
    model: dict[str, JsonValue]
    rule: StoredRule | None
    encoding: NotRequired[Any]  # Encoding.from_json checks it
    decision: NotRequired[str]
    format: NotRequired[int]
    key: NotRequired[str]
    seed: NotRequired[int]
    config: NotRequired[dict[str, JsonValue]]
    versions: NotRequired[dict[str, str]]
    git: NotRequired[str | None]


About.__pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[attr-defined]
ADAPTER = TypeAdapter(About)


def checked_about(values: object) -> About:
    """The content of model.json, if its types and ranges are right and its decision rule fits its classes."""
    try:
        about = ADAPTER.validate_python(values)
    except ValidationError as error:
        raise ValueError(explained(error)) from None
    classes, positive, shape = about["classes"], about["positive"], about["inputs_shape"]
    if len(set(classes)) < len(classes):
        raise ValueError("classes: expected each name once")
    if positive is not None and positive >= len(classes):
        raise ValueError(f"positive: expected one of {len(classes)} classes, got number {positive}")
    if prod(shape) > MOST_INPUTS:
        raise ValueError(f"inputs_shape: expected at most {MOST_INPUTS:,} inputs, got {shape}")
    _check_rule(about["rule"], positive, len(classes))
    return about


def explained(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].replace('Input should be', 'expected')}"


def check_encoding(encoding: Encoding, inputs: int) -> None:
    """Columns must differ, and must have as many features as the model takes."""
    names = [column.name for column in encoding.columns]
    if len(set(names)) < len(names):
        raise ValueError("the encoding: expected each column once")
    if len(encoding.feature_names) != inputs:
        raise ValueError(f"the encoding: expected columns of {inputs} features, got {len(encoding.feature_names)}")


def _check_rule(rule: StoredRule | None, positive: int | None, count: int) -> None:
    """The rule must be finite and pick one of the `count` classes, tried on a row of equal probabilities."""
    try:
        numbers = torch.cat([torch.tensor(value, dtype=torch.float64).flatten() for value in (rule or {0: 0}).values()])
        if not numbers.isfinite().all():
            raise ValueError("its numbers are not finite")
        if any(len(value) != count for value in (rule or {}).values() if isinstance(value, list)):
            raise ValueError(f"expected {count} numbers")
        chosen = decisions.from_json(rule, positive).decide(torch.full((1, count), 1 / count))
        if not 0 <= int(chosen) < count:
            raise ValueError(f"it chooses class {int(chosen)} of {count}")
    except (ValueError, TypeError, RuntimeError, IndexError, OverflowError) as error:
        raise ValueError(f"rule: it does not fit {count} classes ({str(error).splitlines()[0]})") from None


def check_tensors(tensors: Mapping[str, Tensor], inputs_shape: Sequence[int], kind: str) -> None:
    """Numbers must be finite, and scaling must not divide by 0."""
    for name in ("mean", "std"):
        if name not in tensors:
            raise ValueError(f"expected a tensor {name!r}")
        width = 3 if kind == "image" else inputs_shape[-1]
        flat = tensors[name].ndim <= 1 and tensors[name].numel() in (1, width)
        if not (flat and tensors[name].is_floating_point()):
            raise ValueError(f"{name}: expected {width} numbers, got a tensor of shape {list(tensors[name].shape)}")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"{name}: expected finite numbers")
    for name in ("std", "net.projection.pixel_std"):
        if name in tensors and bool((tensors[name] == 0).any()):
            raise ValueError(f"{name.removeprefix('net.')}: expected no zeros, because inputs are divided by it")


def check_network(section: Mapping[str, JsonValue], state: Mapping[str, Tensor], shape: Sequence[int], d: int) -> None:
    """Weights must have the names and shapes of the described network, which is built without memory for this."""
    if any(isinstance(value, list) and len(value) > len(state) for value in section.values()):
        raise WrongDescriptionError("model: expected no more layers than there are weights")
    try:
        with torch.device("meta"):
            net = models.build(ModelSection.model_validate(section), shape, d)
    except ValidationError as error:
        raise WrongDescriptionError(f"model.{explained(error)}") from None
    except (ValueError, TypeError, RuntimeError) as error:
        raise WrongDescriptionError(str(error)) from error
    expected = net.state_dict()
    if expected.keys() != state.keys():
        different = sorted(expected.keys() ^ state.keys())
        raise ValueError(f"weights: they do not fit {type(net).__name__}; they differ in {different[0]!r}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape or tensor.is_floating_point() != expected[name].is_floating_point():
            raise ValueError(f"{name}: expected shape {list(expected[name].shape)}, got {list(tensor.shape)}")


def check_classical(state: Mapping[str, Tensor], inputs: int, d: int) -> int:
    """The number of features that a classical model's classifier sees; its tensors must fit inputs and classes."""
    present = state["present"]
    if present.dtype != torch.int64 or not torch.equal(present, present.unique()) or not 0 < len(present) <= d:
        raise ValueError("present: expected ascending numbers of classes, each once")
    if int(present[0]) < 0 or int(present[-1]) >= d:
        raise ValueError(f"present: expected numbers from 0 to {d - 1}")
    width = inputs
    shapes: dict[str, tuple[int, ...]] = {"present": (len(present),)}
    if "projection.axes" in state:
        width = state["projection.axes"].shape[-1]
        shapes |= {f"projection.{name}": (inputs,) for name in ("pixel_mean", "pixel_std")}
        shapes["projection.axes"] = (inputs, width)
    if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
        raise ValueError(f"expected tensors of the shapes {shapes}")
    return width
