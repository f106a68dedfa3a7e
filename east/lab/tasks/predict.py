"""task=predict: label the rows of a file, or a folder of images, with a saved model."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd

from east import decisions
from east.choices import ConfigError
from east.lab import bars
from east.lab.data import files, images
from east.lab.data.common import DataError
from east.lab.files import temporary_name
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.training import saved
from east.lab.training.saved import Model

FILE_ROWS, IMAGES = 50_000, 512  # of a file, of a folder: in memory at once
ENDINGS = ("", ".csv", ".txt")  # of the file of predictions
FORMULA = re.compile(r"(?![+-]\d+([.,]\d+)*([eE][+-]?\d+)?$)[=+\-@\t\r]")  # as spreadsheets read text; no numbers


def main(_: Command, settings: Settings) -> int:
    needs = ("checkpoint", "input", "output")
    checkpoint, *paths = settings.required(needs, "a saved model, the rows to predict, and a new file")
    source, target = (Path(path).expanduser() for path in paths)
    if source.resolve() == target.resolve():
        raise ConfigError(f"output={settings.output} is the input itself; write the predictions to another file")
    if target.exists() and not settings.force:
        raise ConfigError(f"output={settings.output} exists already; force=true replaces it")
    model = saved.load(checkpoint, settings.device, settings.trust)
    rows = predict_file(model, source, target, settings.keep, settings.safe_csv)
    print(f"{rows:,} rows predicted: {settings.output}")
    return 0


def predict_file(
    model: Model, source: Path, target: Path, keep: Sequence[str] | Literal["all"] | None = None, safe: bool = False
) -> int:
    """Write a label and one probability per class for each row of a table or image of a folder; return the row count.

    A CSV file is read in parts, so it may be larger than memory. `target` appears when everything is done.
    keep: columns of the input to copy to the front of the output as they are written there, or "all".
    safe: put an apostrophe before text that a spreadsheet would read as a formula.
    """
    if target.suffix.lower() not in ENDINGS:
        raise ConfigError(f"output={target}: predictions are written as CSV; expected a name that ends in .csv or .txt")
    refuse_graphs(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary, done = temporary_name(target), 0
    frames = image_predictions(model, source) if model.about.kind == "image" else table_predictions(model, source, keep)
    try:
        with bars.bar(f"predicting {source.name}", None, "row") as bar:
            for frame in frames:
                written = escape_formulas(frame) if safe else frame
                written.to_csv(temporary, mode="a" if done else "w", header=not done, index=False)
                done += len(frame)
                bar.update(len(frame))
        if not done:
            raise DataError(f"{source} has no rows")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return done


def refuse_graphs(model: Model) -> None:
    """DataError for a model of graphs, which cannot be read from a file."""
    if model.about.kind == "graph":
        raise DataError("graphs have no file format here; use east.load(…).predict_proba(array)")


def escape_formulas(frame: pd.DataFrame) -> pd.DataFrame:
    """The table with an apostrophe before every text that a spreadsheet would read as a formula."""

    def escaped(value: object) -> object:
        return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value

    cells = frame.apply(lambda column: column if column.dtype.kind in "biuf" else column.map(escaped))
    return cells.rename(columns=escaped)


def table_predictions(model: Model, source: Path, keep: Sequence[str] | str | None = None) -> Iterator[pd.DataFrame]:
    """Predictions for a table, a portion of the file at a time."""
    done = 0
    for written in files.portions(source, model.encoding, FILE_ROWS):
        frame = files.with_gaps(written, model.encoding)
        try:
            predicted = as_frame(model, model.predict_proba(frame))
            yield with_columns(predicted, written, keep) if keep else predicted
        except DataError as error:
            where = f" rows {done + 1} to {done + len(frame)}:" if done else ""
            raise DataError(f"{source}:{where} {error}") from None
        done += len(frame)


def image_predictions(model: Model, source: Path) -> Iterator[pd.DataFrame]:
    """Predictions for the images below a folder, a few at a time."""
    if not source.is_dir():
        raise DataError(f"this model takes images: expected input=FOLDER with images, got {source}")
    for paths, probabilities in probabilities_of_images(model, images.image_files(source)):
        result = as_frame(model, probabilities)
        result.insert(0, "file", [str(path.relative_to(source)) for path in paths])
        yield result


def probabilities_of_images(model: Model, paths: Sequence[Path]) -> Iterator[tuple[Sequence[Path], np.ndarray]]:
    """The probabilities of the images in these files, a few files at a time."""
    for k in range(0, len(paths), IMAGES):
        some = paths[k : k + IMAGES]
        yield some, model.predict_proba(images.decode(some, model.about.inputs_shape[-1]))


def as_frame(model: Model, probabilities: np.ndarray) -> pd.DataFrame:
    """Columns label, p_<class>, p_<class>, …; and `rule` if the label may differ from the most probable class."""
    frame = pd.DataFrame(probabilities, columns=[f"p_{name}" for name in model.classes])
    frame.insert(0, "label", model.decide(probabilities))
    if model.about.rule is not None:
        frame.insert(1, "rule", decisions.rule_in_words(model.rule, model.classes))
    return frame


def with_columns(predicted: pd.DataFrame, frame: pd.DataFrame, keep: Sequence[str] | str) -> pd.DataFrame:
    """Predictions after the kept columns of the input, each once; those with the name of an output become input_…"""
    frame = frame.rename(columns=str)
    columns = list(map(str, frame))
    names = columns if keep == "all" else list(dict.fromkeys(keep))
    if missing := [name for name in names if name not in columns]:
        some = ", ".join(columns[:20])
        raise DataError(f"keep: expected columns of the input, got {', '.join(missing)}; it has {some}")
    new_names = {}
    for name in names:
        new_names[name] = name
        while new_names[name] in predicted or (new_names[name] != name and new_names[name] in names):
            new_names[name] = f"input_{new_names[name]}"
    kept = frame[names].rename(columns=new_names).reset_index(drop=True)
    return kept.join(predicted.reset_index(drop=True))
