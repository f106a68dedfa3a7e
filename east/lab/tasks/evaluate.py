"""task=evaluate: score a saved model on labelled rows: all scores with intervals, confusion matrix, and a page."""

import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from east import decisions
from east.choices import printable
from east.lab import bars
from east.lab.data import files, images
from east.lab.data.common import DataError, shown
from east.lab.files import result_folder
from east.lab.reporting import model_page, writers
from east.lab.reporting.comparison import DecidedRows, drawn_scores, interval, with_interval
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.tasks.predict import probabilities_of_images, refuse_graphs
from east.lab.training import saved
from east.lab.training.evaluation import metric_of
from east.lab.training.saved import Model
from east.lab.training.scores import RANKED


def main(command: Command, settings: Settings) -> int:
    path, rows = settings.required(("checkpoint", "input"), "a saved model, and labelled rows")
    model = saved.load(path, settings.device, settings.trust)
    refuse_graphs(model)
    source = Path(rows).expanduser()
    part = labelled_images(model, source) if model.about.kind == "image" else labelled_rows(model, source)
    with bars.bar("scoring"):
        scores = with_intervals(part, first=(model.about.decision or "").removeprefix("expected "))
    checkpoint = Path(path).expanduser().resolve()
    model_name = checkpoint.parent.name if checkpoint.name == "model" else checkpoint.name  # a comparison's is "model"
    made_from = {"checkpoint": str(checkpoint), "input": str(source.resolve())}
    folder = result_folder(
        Path(settings.results_dir) / "evaluate", source.name.partition(".")[0], model_name, made_from
    )
    count, typed = len(part.labels), shlex.join(["east-run", *command.words])
    model_page.write_evaluation(folder, f"{model_name} on {source.name}: {count:,} rows", part, scores, typed)
    lines = [[name, *with_interval(*numbers)] for name, *numbers in scores.itertuples(index=False)]
    print(writers.aligned([["", "value", "95 % interval"], *lines]))
    print(f"\nconfusion matrix of {count:,} rows, true classes in rows\n{matrix(part)}")
    print(f"decides by: {decisions.rule_in_words(model.rule, part.classes)}\nreport: {folder / 'report.html'}")
    return 0


def labelled_rows(model: Model, source: Path) -> DecidedRows:
    """The model's decisions on a file with the training columns, including the target."""
    if source.is_dir():
        raise DataError(f"this model takes {model.about.kind}s: expected input=FILE, got the folder {source}")
    encoding = model.encoding
    if encoding.target is None:
        raise DataError("this model was not trained on a file, so no column holds its classes")
    frame = files.read(source, encoding)
    if encoding.target not in frame:
        raise DataError(f"{source}: expected the labels in a column {encoding.target!r}, as in training; it is missing")
    empty = frame[encoding.target].isna()
    if empty.any():
        count = "1 row" if empty.sum() == 1 else f"{empty.sum():,} rows"
        raise DataError(f"{source}: the label {encoding.target!r} is missing in {count}")
    labels = numbered(model, encoding.class_names(frame[encoding.target]), source)
    rows = frame.drop(columns=encoding.target).reset_index(drop=True)
    return scored_rows(model, model.predict_proba(frame), labels, rows)


def labelled_images(model: Model, source: Path) -> DecidedRows:
    """The model's decisions on images from one folder per class."""
    if not source.is_dir():
        raise DataError(f"this model takes images: expected input=FOLDER, got {source}")
    paths = images.image_files(source)
    names = [path.relative_to(source) for path in paths]
    labels = numbered(model, np.array([name.parts[0] for name in names], dtype=object), source)
    probabilities = np.concatenate([p for _, p in probabilities_of_images(model, paths)])
    return scored_rows(model, probabilities, labels, pd.DataFrame({"file": map(str, names)}))


def numbered(model: Model, names: np.ndarray, source: Path) -> torch.Tensor:
    """Class names as class numbers."""
    if not len(names):
        raise DataError(f"{source} has no rows")
    number = {name: k for k, name in enumerate(model.classes)}
    unknown = sorted({str(name) for name in names} - set(number))
    if unknown:
        known = ", ".join(shown(name, quoted=False) for name in model.classes[:10])
        raise DataError(f"{source}: the model does not know the class {shown(unknown[0])}; it knows {known}")
    return torch.tensor([number[str(name)] for name in names])


def scored_rows(model: Model, probabilities: np.ndarray, labels: torch.Tensor, frame: pd.DataFrame) -> DecidedRows:
    """The model's decisions on these rows."""
    p, classes = torch.from_numpy(probabilities), tuple(map(printable, model.classes))  # names may steer a terminal
    return DecidedRows(p, labels, model.rule, classes, model.about.positive, frame=frame)


def with_intervals(part: DecidedRows, first: str) -> pd.DataFrame:
    """The usual scores: score, value, and an interval (low, high) if it follows from the decisions.

    first: the score that the model was chosen by.
    """
    values = dict(sorted(part.scores().items(), key=lambda item: item[0] != first))
    frame = pd.DataFrame(values.items(), columns=["score", "value"]).assign(low=np.nan, high=np.nan)
    for k, name in enumerate(values):
        if name not in RANKED:
            samples = drawn_scores([part], metric_of(name, part.positive))
            frame.loc[k, ["low", "high"]] = np.concatenate(interval(samples, part.units[0]))
    return frame


def matrix(part: DecidedRows) -> str:
    """The confusion matrix as text; with many classes it is only in the report."""
    if len(part.classes) > model_page.MATRIX:
        return f"{len(part.classes)} classes: see the report"
    counts = part.confusion.matrix.round().long().tolist()
    rows = [[name, *map(str, row)] for name, row in zip(part.classes, counts, strict=True)]
    return writers.aligned([["", *part.classes], *rows])
