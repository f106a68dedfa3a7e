"""Trained classifiers on disk: a folder of model.json, weights.safetensors and, for classical models, classifier.skops.

    model = east.load("results/models/csv-f1-0a1b2c3d4e5f-seed0")
    model.predict_proba(frame)

Nothing is pickled: loading a model runs no foreign code unless you say that you trust it. With trust, a custom network
(model=custom) is imported by name, and a classifier of any class is built. Weights and scaling are tensors; classes,
columns, encoding and decision rule are plain JSON.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZIP_DEFLATED

import numpy as np
import skops.io
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from east import decisions
from east.choices import import_by_path
from east.lab import data, models
from east.lab.data.columns import Numeric
from east.lab.data.common import DataError, Splits, Table
from east.lab.data.encoding import typed_columns
from east.lab.files import read_regular, replace_folder, temporary_name
from east.lab.settings.settings import Science
from east.lab.training import inspection
from east.lab.training.classical import Fitted, Projection
from east.lab.training.devices import pick_device
from east.lab.training.ensemble import Mixture, ScaledNetwork
from east.lab.training.inspection import TRUST, About
from east.lab.training.population import Outcome
from east.lab.training.provenance import provenance
from east.losses.inputs import two_or_more

if TYPE_CHECKING:
    import pandas as pd

ABOUT, WEIGHTS, CLASSIFIER = "model.json", "weights.safetensors", "classifier.skops"
MOST_BYTES = 1 << 28  # of model.json
MOST_REASON = 300  # characters of what another library says
PREDICTORS = (Fitted, Mixture)  # networks that give probabilities, not logits
ROWS = {"table": 4096, "image": 64, "graph": 64}  # that pass through a network at once
DTYPES = {"table": torch.float64, "image": torch.uint8, "graph": torch.float32}  # of raw inputs


@dataclass(frozen=True)
class Model:
    """A classifier of raw rows: it encodes and scales them as in training, and decides by its rule."""

    about: About
    net: nn.Module
    mean: Tensor  # of the inputs; those of a table of a file in float64
    std: Tensor
    device: torch.device  # of the network

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:6]) + (", …" if len(self.classes) > 6 else "")
        return f"Model({type(self.net).__name__} of {len(self.classes)} classes: {names})"

    @property
    def classes(self) -> list[str]:
        return self.about.classes

    @property
    def rule(self) -> decisions.Rule:
        """How probabilities become classes: argmax, or the rule chosen in training."""
        return decisions.from_json(self.about.rule, self.about.positive)

    @cached_property
    def encoding(self) -> data.Encoding:
        """How columns become features; only models of tables have one."""
        return data.Encoding.from_json(self.about.encoding)

    @torch.no_grad()
    def predict_proba(self, rows: "pd.DataFrame | np.ndarray | Tensor") -> np.ndarray:
        """Probabilities [n, d] of raw rows: a frame with the columns of training, or an array of its features.

        Images: uint8 [n, 3, h, w]. Graphs: [n, nodes, f], which give [n, pairs, d].
        """
        results = [torch.zeros(0, len(self.classes))]
        for batch in self.inputs(rows).split(ROWS[self.about.kind]):
            if batch.ndim == 2:  # in float64, unless the model's scaling is float32
                batch = ((batch.to(self.mean.dtype) - self.mean) / self.std).float()
            if self.about.kind == "image":
                batch = (batch.float() / 255 - self.mean[:, None, None]) / self.std[:, None, None]
            outputs = self.net(batch.to(self.device)).float()
            results.append((outputs if isinstance(self.net, PREDICTORS) else two_or_more(outputs).softmax(-1)).cpu())
        result = torch.cat(results[1:] or results)
        wrong = ~((result >= 0) & result.isfinite()) | ((result.sum(-1, keepdim=True) - 1).abs() > 1e-3)
        if wrong.any():
            row = int(wrong.flatten(1).any(1).nonzero()[0])
            raise DataError(f"row {row + 1}: the probabilities of this model are not finite or do not sum to 1")
        return result.numpy()

    def predict(self, rows: "pd.DataFrame | np.ndarray | Tensor") -> np.ndarray:
        """Names [n] of the classes that the decision rule picks."""
        return self.decide(self.predict_proba(rows))

    def decide(self, probabilities: np.ndarray) -> np.ndarray:
        """Class names of probabilities [..., d], by the model's rule."""
        return np.array(self.classes, dtype=object)[self.rule.decide(torch.from_numpy(probabilities)).numpy()]

    def inputs(self, rows: "pd.DataFrame | np.ndarray | Tensor") -> Tensor:
        """The rows as features before scaling, encoded as in training; DataError if something does not fit."""
        kind, shape = self.about.kind, self.about.inputs_shape
        import pandas as pd

        if isinstance(rows, pd.DataFrame):
            if kind != "table":
                raise DataError(f"this model takes an array of {kind}s, got a table")
            return self.encoding.features(typed_columns(rows, self.encoding), np.float64)
        try:
            inputs = torch.as_tensor(np.array(rows) if isinstance(rows, np.ndarray) else rows)
        except (TypeError, ValueError, RuntimeError):
            got = f"an array of type {rows.dtype}" if isinstance(rows, np.ndarray) else type(rows).__name__
            raise DataError(f"expected numbers, got {got}: pass a DataFrame with the columns of training") from None
        if list(inputs.shape[1:]) != shape:
            raise DataError(f"expected rows of shape {shape}, got an array of shape {list(inputs.shape)}")
        if kind == "image" and inputs.dtype != torch.uint8:
            raise DataError(f"expected images of bytes (uint8), got {inputs.dtype}")
        if not inputs.isfinite().all():
            raise DataError("expected finite numbers; only a frame with named columns may have missing values")
        return inputs.to(DTYPES[kind])

    def deciding(self, name: str, rule: decisions.Rule) -> "Model":
        """The same classifier with another decision rule, called `name`."""
        return replace(self, about=self.about.model_copy(update={"decision": name, "rule": rule.to_json()}))

    def save(self, folder: str | Path) -> Path:
        """Write the model; an existing folder is replaced as a whole, the last of several writers wins."""
        folder = Path(folder)
        tensors = {"mean": self.mean, "std": self.std} | {f"net.{n}": t for n, t in self.net.state_dict().items()}
        temporary = temporary_name(folder)
        temporary.mkdir(parents=True)
        try:
            content = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
            (temporary / WEIGHTS).write_bytes(content)  # save_file would make it unreadable to other users
            if estimators := [module.estimator for module in self.net.modules() if isinstance(module, Fitted)]:
                (temporary / CLASSIFIER).write_bytes(dumped(estimators))
            about = self.about.model_dump(mode="json")
            about["digest"] = digest(about, temporary)
            (temporary / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
            replace_folder(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder


def load(path: str | Path, device: str = "cpu", trust: bool = False) -> Model:
    """A saved model, ready to predict. Everything in its files is checked before anything is computed.

    trust: also load models that need foreign code: a custom network (model=custom), whose class is imported, or a
    classifier of another class than those of `loss=logistic`, boosting, rf and ccs, which is not checked.
    """
    folder = Path(path).expanduser()
    if not ((folder / ABOUT).is_file() and (folder / WEIGHTS).is_file()):
        hint = f"; did you mean {folder / 'model'}?" if (folder / "model" / ABOUT).is_file() else ""
        raise DataError(f"{folder} is not a saved model: expected a folder with {ABOUT} and {WEIGHTS}{hint}")
    with blaming(folder / ABOUT):
        about = About.model_validate(unchanged(folder))
        if (target := about.model.options.get("target")) and not trust:  # even of east: its parameters may name others
            raise ValueError(f"its network is the custom class {target!r}, and loading it would run its code; {TRUST}")
        classical, mixed = (folder / CLASSIFIER).is_file(), about.networks is not None
        count = int(not classical) if about.networks is None else about.networks
        nets = [without_weights(about) for _ in range(count)]
    with blaming(folder / WEIGHTS):
        tensors = load_file(folder / WEIGHTS)
        inspection.check_tensors(tensors, about)
        state = below("net.", tensors)
        shares = state.get("weights", torch.ones(1)) if mixed else torch.ones(1)
        states = [below(f"predictors.{k}.", state) for k in range(len(shares))] if mixed else [state]
        own = zip(nets, states[:count], strict=True)
        nets = [scaled(net, s, about) if mixed else with_weights(net, s) for net, s in own]
        classifiers = states[count:]
        widths = [inspection.check_classical(s, prod(about.inputs_shape), len(about.classes)) for s in classifiers]
    with blaming(folder / (CLASSIFIER if classical else WEIGHTS)):
        if classical:
            estimators = inspection.classifiers(folder / CLASSIFIER, min(widths), trust)
            for estimator, own_state in zip(estimators, classifiers, strict=True):
                axes = below("projection.", own_state)
                projection = Projection(**axes) if axes else None
                nets.append(Fitted(estimator, len(about.classes), own_state["present"], projection))
        net = Mixture(dict(zip(nets, shares.tolist(), strict=True))) if mixed else nets[0]
        model = made(about, net, tensors["mean"], tensors["std"], device)
        row = np.zeros((1, *about.inputs_shape), np.uint8 if about.kind == "image" else np.float32)
        width = model.predict_proba(row).shape[-1]
        if width != len(about.classes):
            raise ValueError(f"expected a network of {len(about.classes)} classes, got one of {width}")
    return model


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def unchanged(folder: Path) -> dict[str, Any]:
    """The content of model.json; ValueError if a file of the model has changed since it was written."""
    values = json.loads(read_regular(folder / ABOUT, MOST_BYTES))
    if values.pop("digest", None) not in (None, digest(values, folder)):
        raise ValueError("it or a file beside it has changed since it was written; if you changed it, delete the "
                         "line \"digest\"")  # fmt: skip
    return values


def is_intact(folder: Path) -> bool:
    """True if a model is saved there and complete: a crash may leave its name with a part of its files."""
    try:
        unchanged(folder)
        return (folder / WEIGHTS).stat().st_size > 0
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def blaming(file: Path) -> Iterator[None]:
    """Turn whatever is raised into a DataError of one line that names the file; a damaged one can raise anything."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:MOST_REASON] or type(error).__name__
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            place = "".join(f"{part}." for part in first["loc"])[:-1]
            reason = f"{place}: {first['msg']}" if place else first["msg"].removeprefix("Value error, ")
        raise DataError(f"{file}: {reason}") from error


def digest(about: Mapping[str, object], folder: Path) -> str:
    """A hash of all files of a model, to detect damage such as a flipped bit, not forgery. Early models have none."""
    state = hashlib.blake2b(digest_size=16)
    for path in (folder / WEIGHTS, folder / CLASSIFIER):
        if path.is_file():
            state.update(path.read_bytes())
    state.update(json.dumps(about, sort_keys=True).encode())
    return state.hexdigest()


def dumped(estimators: Sequence[Any]) -> bytes:
    """Fitted classifiers as a compressed skops file; one of them without a list, as in earlier files."""
    for estimator in estimators:
        vars(estimator).pop("_feature_subsample_rng", None)  # a random generator of boosting that predictions ignore
        vars(estimator).pop("oob_decision_function_", None)
    stored = estimators[0] if len(estimators) == 1 else [*estimators]
    return skops.io.dumps(stored, compression=ZIP_DEFLATED, compresslevel=1)


def from_outcome(outcome: Outcome, loaded: data.Data, splits: Splits) -> Model:
    """The model of a trial on the data `loaded`; its rule is argmax."""
    encoding = (splits.encoding or numeric_encoding(loaded, splits)) if isinstance(loaded, Table) else None
    about = description(
        outcome.trial.config,
        outcome.trial.seed,
        kind=splits.kind,
        classes=list(splits.classes),
        positive=splits.positive,
        inputs_shape=list(splits.train.inputs.shape[1:]),
        encoding=encoding.to_json() if encoding else None,
        rule=None,
    )
    net, mean, std = outcome.fitted, splits.mean, splits.std
    if net is None:
        net = with_weights(without_weights(about), outcome.weights)
    elif isinstance(net, Fitted) and net.projection:  # it standardises pixels itself, from bytes
        mean, std = torch.zeros(3), torch.full((3,), 1 / 255)
    return made(about, net, mean, std, "cpu")


def description(config: Science, seed: int, **fields: Any) -> About:
    """The content of model.json for a network trained with this config."""
    origin: dict[str, Any] = {"model": config.model, "key": config.key, "seed": seed, "config": config.to_json()}
    return About(format=1, **fields, **origin, **provenance())


def made(about: About, net: nn.Module, mean: Tensor, std: Tensor, device: str) -> Model:
    chosen = pick_device(device)
    if isinstance(net, Mixture):
        about = about.model_copy(update={"networks": len(net.networks)})
    return Model(about, net.eval().to(chosen), mean.cpu(), std.cpu(), chosen)


def without_weights(about: About) -> nn.Module:
    """The described network; a network of ours takes no memory yet."""
    if target := about.model.options.get("target"):
        check_custom(str(target))
        return models.build(about.model, about.inputs_shape, len(about.classes))
    with torch.device("meta"):
        return models.build(models.untrained(about.model), about.inputs_shape, len(about.classes))


def with_weights(net: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """The network with these weights, whose names and shapes must fit it."""
    net.load_state_dict(state, assign=True)
    return net.float()


def scaled(net: nn.Module, state: Mapping[str, Tensor], about: About) -> ScaledNetwork:
    """A network of an ensemble with its weights and its scaling."""
    net = with_weights(net, below("net.", state))
    inspection.check_scaling(state["mean"], state["std"], about.inputs_shape[-1])
    return ScaledNetwork(net, state["mean"], state["std"])


def check_custom(target: str) -> None:
    """DataError unless `target` is a network class: a saved model may not name just any callable."""
    expected = "expected a subclass of torch.nn.Module to save or load"
    try:
        network = import_by_path(target)
    except ValueError as error:
        raise DataError(f"model.target: {expected}; {error}") from error
    if not (isinstance(network, type) and issubclass(network, nn.Module)):
        raise DataError(f"model.target {target!r}: {expected}, got {network!r}")


def numeric_encoding(table: Table, splits: Splits) -> data.Encoding:
    """An encoding of a table of plain numbers, so that the model also takes frames with its columns."""
    medians = table.features[splits.train.index].median(0).values.tolist()
    columns = [Numeric(name=name, median=median) for name, median in zip(table.columns, medians, strict=True)]
    return data.Encoding(columns=tuple(columns), classes=table.classes, positive=table.positive)
