"""Trained classifiers on disk: a folder of model.json, weights.safetensors and, for classical models, classifier.skops.

    model = east.load("results/models/csv-f1-0a1b2c3d4e5f-seed0")
    model.predict_proba(frame)

Nothing is pickled: loading a model runs no foreign code unless you say that you trust it. With trust, a custom network
(model=custom) is imported by name, and a classifier of any class is built. Weights and scaling are tensors; classes,
columns, encoding and decision rule are plain JSON.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from east import decisions
from east.choices import ConfigError, import_by_path
from east.lab import bars, data, models
from east.lab.data import files, images
from east.lab.data.common import DataError, Kind, Splits, Table
from east.lab.data.encoding import Numeric, typed_columns
from east.lab.files import read_regular, replace_folder, temporary_name
from east.lab.settings.sections import ModelSection, Science
from east.lab.training import inspection, untrusted
from east.lab.training.classical import Fitted, Projection
from east.lab.training.devices import pick_device
from east.lab.training.inspection import About
from east.lab.training.population import Outcome
from east.lab.training.provenance import provenance
from east.losses.inputs import two_or_more

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
ABOUT, WEIGHTS, CLASSIFIER = "model.json", "weights.safetensors", "classifier.skops"
MOST_BYTES = 1 << 28  # of model.json
ROWS = 4096  # of a table that pass through a network at once
FILE_ROWS = 50_000  # of a file in memory at once
ENDINGS = ("", ".csv", ".txt")  # of the file of predictions
SIGNED_NUMBER = re.compile(r"[+-]\d+([.,]\d+)*([eE][+-]?\d+)?")
IMAGES = 512  # of a folder in memory at once


@dataclass(frozen=True)
class Model:
    """A classifier of raw rows: it encodes and scales them as in training, and decides by its rule."""

    about: About  # the content of model.json
    tensors: dict[str, Tensor]  # `mean` and `std` of the inputs, and the state of `net` with names after "net."
    net: nn.Module
    device: torch.device

    def __repr__(self) -> str:
        names = ", ".join(self.classes[:6]) + (", …" if len(self.classes) > 6 else "")
        return f"Model({type(self.net).__name__} of {len(self.classes)} classes: {names})"

    @property
    def classes(self) -> list[str]:
        return self.about["classes"]

    @property
    def rule(self) -> decisions.Rule:
        """How probabilities become classes: argmax, or the rule chosen in training."""
        return decisions.from_json(self.about["rule"], self.about["positive"])

    @torch.no_grad()
    def predict_proba(self, rows: "pd.DataFrame | np.ndarray | Tensor") -> np.ndarray:
        """Probabilities [n, d] of raw rows: a frame with the columns of training, or an array of its features.

        Images: uint8 [n, 3, h, w]. Graphs: [n, nodes, f], which give [n, pairs, d].
        """
        inputs = self.inputs(rows)
        mean, std = self.tensors["mean"], self.tensors["std"]
        results = []
        for batch in inputs.split(ROWS if self.about["kind"] == "table" else 64):
            if batch.ndim == 2:  # in float64, unless the model's scaling is float32
                batch = ((batch.to(mean.dtype) - mean) / std).float()
            if self.about["kind"] == "image":
                batch = (batch.float() / 255 - mean[:, None, None]) / std[:, None, None]
            outputs = self.net(batch.to(self.device)).float()
            results.append((outputs if isinstance(self.net, Fitted) else two_or_more(outputs).softmax(-1)).cpu())
        result = torch.cat(results) if results else torch.zeros(0, len(self.classes))
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
        import pandas as pd

        if isinstance(rows, pd.DataFrame):
            if self.about["kind"] != "table":
                raise DataError(f"this model takes an array of {self.about['kind']}s, got a table")
            encoding = data.Encoding.from_json(self.about["encoding"])
            return torch.from_numpy(encoding.array(typed_columns(rows, encoding), np.float64))
        try:
            inputs = torch.tensor(rows) if isinstance(rows, np.ndarray) else torch.as_tensor(rows)
        except (TypeError, ValueError, RuntimeError):
            got = f"an array of type {rows.dtype}" if isinstance(rows, np.ndarray) else type(rows).__name__
            raise DataError(f"expected numbers, got {got}: pass a DataFrame with the columns of training") from None
        expected = self.about["inputs_shape"]
        if list(inputs.shape[1:]) != expected:
            raise DataError(f"expected rows of shape {expected}, got an array of shape {list(inputs.shape)}")
        if self.about["kind"] == "image" and inputs.dtype != torch.uint8:
            raise DataError(f"expected images of bytes (uint8), got {inputs.dtype}")
        if not inputs.isfinite().all():
            raise DataError("expected finite numbers; only a frame with named columns may have missing values")
        return inputs.to({"image": torch.uint8, "table": torch.float64, "graph": torch.float32}[self.about["kind"]])

    def deciding(self, name: str, rule: decisions.Rule) -> "Model":
        """The same classifier with another decision rule, called `name`."""
        return replace(self, about={**self.about, "decision": name, "rule": rule.to_json()})

    def save(self, folder: str | Path) -> Path:
        """Write the model; an existing folder is replaced as a whole, the last of several writers wins."""
        folder = Path(folder)
        temporary = temporary_name(folder)
        temporary.mkdir(parents=True)
        try:
            (temporary / WEIGHTS).write_bytes(save(self.tensors))  # save_file would make it unreadable to other users
            if isinstance(self.net, Fitted):
                (temporary / CLASSIFIER).write_bytes(untrusted.dump(self.net.estimator))
            about = {**self.about, "digest": digest(self.about, temporary)}
            (temporary / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        replace_folder(temporary, folder)
        return folder


def load(path: str | Path, device: str = "cpu", trust: bool = False) -> Model:
    """A saved model, ready to predict. Everything in its files is checked before anything is computed.

    trust: also load models that need foreign code: a custom network (model=custom), whose class is imported, or a
    classifier of another class than those of `loss=logistic`, boosting, rf and ccs, which is not checked.
    """
    folder = Path(path).expanduser()
    missing = [name for name in (ABOUT, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        hint = f"; did you mean {folder / 'model'}?" if (folder / "model" / ABOUT).is_file() else ""
        raise DataError(f"{folder} is not a saved model: expected a folder with {ABOUT} and {WEIGHTS}{hint}")
    file = folder / ABOUT
    try:
        values = json.loads(read_regular(file, MOST_BYTES))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            got = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"expected a model of format {FORMAT}, got {got!r}")
        stored = values.pop("digest", None)
        if stored not in (None, digest(values, folder)):
            raise ValueError("it or a file beside it has changed since it was written; if you changed it, delete the "
                             "line \"digest\"")  # fmt: skip
        about = inspection.checked_about(values)
        if "target" in about["model"] and not trust:  # even a class of east: its parameters could name anything
            raise ValueError(
                f"its network is the custom class {about['model']['target']!r}, and loading it would run its code; "
                "if you trust it, use trust=true, or east.load(…, trust=True)"
            )
        if about["kind"] == "table":
            inspection.check_encoding(data.Encoding.from_json(about.get("encoding")), prod(about["inputs_shape"]))
        file = folder / WEIGHTS
        tensors = load_file(file)
        inspection.check_tensors(tensors, about["inputs_shape"], about["kind"])
        state, classes, net = network_state(tensors), len(about["classes"]), None
        if (folder / CLASSIFIER).is_file():
            width = inspection.check_classical(state, prod(about["inputs_shape"]), classes)
            file = folder / CLASSIFIER
            projection = {name.removeprefix("projection."): tensor for name, tensor in state.items()}
            net = Fitted(untrusted.load(file, width, trust), classes, state["present"],
                         Projection(projection) if "axes" in projection else None)  # fmt: skip
        elif "target" not in about["model"]:
            inspection.check_network(about["model"], state, about["inputs_shape"], classes)
        model = assembled(about, tensors, device, net)
        row = np.zeros((1, *about["inputs_shape"]), np.uint8 if about["kind"] == "image" else np.float32)
        width = model.predict_proba(row).shape[-1]
        if width != len(about["classes"]):
            raise ValueError(f"expected a network of {len(about['classes'])} classes, got one of {width}")
    except Exception as error:  # a damaged file can make the libraries raise anything
        reason = (str(error) or type(error).__name__).splitlines()[0]
        where = folder / ABOUT if isinstance(error, inspection.WrongDescriptionError) else file
        raise DataError(f"{where}: {reason}") from error
    return model


def digest(about: Mapping[str, object], folder: Path) -> str:
    """A hash of all files of a model, to detect damage such as a flipped bit, not forgery. Early models have none."""
    state = hashlib.blake2b(digest_size=16)
    for path in (folder / WEIGHTS, folder / CLASSIFIER):
        if path.is_file():
            state.update(path.read_bytes())
    state.update(json.dumps(json.loads(json.dumps(about)), sort_keys=True).encode())
    return state.hexdigest()


def network_state(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the network among the tensors of a model."""
    return {name.removeprefix("net."): tensor for name, tensor in tensors.items() if name.startswith("net.")}


def from_outcome(outcome: Outcome, loaded: data.Data, splits: Splits) -> Model:
    """The model of a trial on the data `loaded`; its rule is argmax."""
    config = outcome.trial.config
    about = description(
        config,
        outcome.trial.seed,
        kind=splits.kind,
        classes=splits.classes,
        positive=splits.positive,
        inputs_shape=splits.train.inputs.shape[1:],
        encoding=(splits.encoding or numeric_encoding(loaded, splits)) if isinstance(loaded, Table) else None,
    )
    state = outcome.weights if outcome.fitted is None else outcome.fitted.state_dict()
    mean, std = splits.mean, splits.std
    if "projection.axes" in state:  # it standardises pixels itself, from bytes
        mean, std = torch.zeros(3), torch.full((3,), 1 / 255)
    tensors = {"mean": mean, "std": std} | {f"net.{name}": t.cpu() for name, t in state.items()}
    return assembled(about, {name: t.clone().contiguous() for name, t in tensors.items()}, "cpu", outcome.fitted)


def description(
    config: Science,
    seed: int,
    *,
    kind: Kind,
    classes: Sequence[str],
    positive: int | None,
    inputs_shape: Sequence[int],
    encoding: data.Encoding | None,
    decision: str = "argmax",
    rule: decisions.Rule | None = None,
) -> About:
    """The content of model.json."""
    return {
        "format": FORMAT,
        "kind": kind,
        "classes": list(classes),
        "positive": positive,
        "inputs_shape": list(inputs_shape),
        "encoding": encoding.to_json() if encoding else None,
        "model": config.model.to_json(),
        "decision": decision,
        "rule": rule.to_json() if rule else None,
        "key": config.key,
        "seed": seed,
        "config": config.to_json(),
        **provenance(),
    }


def assembled(about: About, tensors: Mapping[str, Tensor], device: str, net: nn.Module | None = None) -> Model:
    """The model of a description and its tensors. net: a classical model; None: a network, built from both."""
    if net is None:
        if "target" in about["model"]:
            check_custom(str(about["model"]["target"]))
        net = models.build(ModelSection.model_validate(about["model"]), about["inputs_shape"], len(about["classes"]))
        net.load_state_dict(network_state(tensors))
    chosen = pick_device(device)
    return Model(about, dict(tensors), net.eval().to(chosen), chosen)


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
    columns = [Numeric(name, median, False) for name, median in zip(table.columns, medians, strict=True)]
    return data.Encoding(tuple(columns), classes=table.classes, positive=table.positive)


def refuse_graphs(model: Model) -> None:
    """DataError for a model of graphs, which cannot be read from a file."""
    if model.about["kind"] == "graph":
        raise DataError("graphs have no file format here; use east.load(…).predict_proba(array)")


def predict_file(
    model: Model,
    source: str | Path,
    target: str | Path,
    keep: Sequence[str] | Literal["all"] | None = None,
    safe: bool = False,
) -> int:
    """Write a label and one probability per class for each row of a table or image of a folder; return the row count.

    A CSV file is read in parts, so it may be larger than memory. `target` appears when everything is done.
    keep: columns of the input to copy to the front of the output as they are written there, or "all".
    safe: put an apostrophe before text that a spreadsheet would read as a formula.
    """
    source, target = Path(source).expanduser(), Path(target).expanduser()
    if target.suffix.lower() not in ENDINGS:
        raise ConfigError(f"output={target}: predictions are written as CSV; expected a name that ends in .csv or .txt")
    refuse_graphs(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    done = 0
    try:
        with bars.bar(f"predicting {source.name}", None, "row") as bar:
            image = model.about["kind"] == "image"
            frames = image_predictions(model, source) if image else table_predictions(model, source, keep)
            for frame in frames:
                frame = escape_formulas(frame) if safe else frame
                frame.to_csv(temporary, mode="a" if done else "w", header=not done, index=False)
                done += len(frame)
                bar.update(len(frame))
        if not done:
            raise DataError(f"{source} has no rows")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return done


def escape_formulas(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The same table with an apostrophe before every text that begins like a formula: = + - @, tab or return.

    Numbers such as -1.5 are no formulas.
    """

    def escaped(value: object) -> object:
        risky = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        return f"'{value}" if risky and not SIGNED_NUMBER.fullmatch(str(value)) else value

    cells = frame.apply(lambda column: column if column.dtype.kind in "biuf" else column.map(escaped))
    return cells.rename(columns=escaped)


def table_predictions(
    model: Model, source: Path, keep: Sequence[str] | Literal["all"] | None = None
) -> Iterator["pd.DataFrame"]:
    """Predictions for a table, a portion of the file at a time."""
    done = 0
    encoding = data.Encoding.from_json(model.about["encoding"])
    decimals, text = encoding.decimals, encoding.text_columns
    if any(isinstance(column, Numeric) and column.decimal is None for column in encoding.columns):
        decimals = files.read_marked(source, encoding.delimiter, text, decimals, files.SAMPLE)[1]
    frames = files.portions(source, encoding.delimiter, FILE_ROWS, text=text, decimals=decimals)
    written = files.portions(source, encoding.delimiter, FILE_ROWS, as_written=True) if keep else repeat(None)
    for frame, kept in zip(frames, written, strict=False):
        try:
            predicted = as_frame(model, model.predict_proba(frame))
            yield predicted if kept is None or not keep else with_columns(predicted, kept, keep)
        except DataError as error:
            where = f" rows {done + 1} to {done + len(frame)}:" if done else ""
            raise DataError(f"{source}:{where} {error}") from None
        done += len(frame)


def image_predictions(model: Model, source: Path) -> Iterator["pd.DataFrame"]:
    """Predictions for the images below a folder, IMAGES at a time."""
    if not source.is_dir():
        raise DataError(f"this model takes images: expected input=FOLDER with images, got {source}")
    paths = images.find(source)
    size = model.about["inputs_shape"][-1]
    for k in range(0, len(paths), IMAGES):
        batch = paths[k : k + IMAGES]
        result = as_frame(model, model.predict_proba(images.decode(batch, size)))
        result.insert(0, "file", [str(path.relative_to(source)) for path in batch])
        yield result


def as_frame(model: Model, probabilities: np.ndarray) -> "pd.DataFrame":
    """Columns label, p_<class>, p_<class>, …; and `rule` if the label may differ from the most probable class."""
    import pandas as pd

    frame = pd.DataFrame(probabilities, columns=[f"p_{name}" for name in model.classes])
    frame.insert(0, "label", model.decide(probabilities))
    if model.about["rule"] is not None:
        frame.insert(1, "rule", decisions.explained(model.rule, model.classes))
    return frame


def with_columns(
    predicted: "pd.DataFrame", frame: "pd.DataFrame", keep: Sequence[str] | Literal["all"]
) -> "pd.DataFrame":
    """Predictions after the kept columns of the input, each once; those with the name of an output become input_…"""
    import pandas as pd

    frame = frame.rename(columns=str)
    columns = list(map(str, frame))
    names = columns if keep == "all" else list(dict.fromkeys(keep))
    missing = [name for name in names if name not in columns]
    if missing:
        available = ", ".join(columns[:20])
        raise DataError(f"keep: expected columns of the input, got {', '.join(missing)}; it has {available}")
    new_names: dict[str, str] = {}
    for name in names:
        new_name = name
        while new_name in predicted or (new_name != name and new_name in names):
            new_name = f"input_{new_name}"
        new_names[name] = new_name
    kept = frame[names].rename(columns=new_names)
    return pd.concat([kept.reset_index(drop=True), predicted.reset_index(drop=True)], axis=1)
