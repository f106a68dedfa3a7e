"""task=evaluate: score a saved model on labelled rows: all scores with intervals, confusion matrix, and a page."""

import shlex
from dataclasses import dataclass
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
from east.lab.reporting.comparison import DecidedRows, drawn_rankings, drawn_scores, interval, with_interval
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.tasks.predict import probabilities_of_images, refuse_graphs
from east.lab.training import saved
from east.lab.training.evaluation import metric_of
from east.lab.training.saved import Model


@dataclass(frozen=True)
class Labelled:
    """Rows with known classes, as the model sees them. frame: the original rows, for the report."""

    probabilities: np.ndarray  # [n, d]
    labels: np.ndarray  # int64 [n]
    frame: pd.DataFrame


def main(command: Command, settings: Settings) -> int:
    path, rows = settings.required(("checkpoint", "input"), "a saved model, and labelled rows")
    model = saved.load(path, settings.device, settings.trust)
    refuse_graphs(model)
    source = Path(rows).expanduser()
    labelled = labelled_images(model, source) if source.is_dir() else labelled_rows(model, source)
    p, rule = torch.from_numpy(labelled.probabilities), model.rule
    part = DecidedRows(p, torch.from_numpy(labelled.labels), rule.decide(p))
    positive = model.about.positive
    with bars.bar("scoring"):
        scores = with_intervals(part, positive, first=(model.about.decision or "").removeprefix("expected "))
    checkpoint = Path(path).expanduser().resolve()
    model_name = checkpoint.parent.name if checkpoint.name == "model" else checkpoint.name  # a comparison's is "model"
    made_from = {"checkpoint": str(checkpoint), "input": str(source.resolve())}
    parent, name = Path(settings.results_dir) / "evaluate", source.name.partition(".")[0]
    folder = result_folder(parent, name, model_name, made_from)
    classes = tuple(map(printable, model.classes))  # class names of a downloaded model may hold control characters
    scored = model_page.Scored(part, rule, classes, positive, labelled.frame)
    typed = shlex.join(["east-run", *command.words])
    title = f"{model_name} on {source.name}: {len(labelled.labels):,} rows"
    model_page.write_evaluation(folder, title, scored, scores, typed)
    lines = [[name, *with_interval(*numbers)] for name, *numbers in scores.itertuples(index=False)]
    print(writers.aligned([["", "value", "95 % interval"], *lines]))
    print(f"\nconfusion matrix of {len(labelled.labels):,} rows, true classes in rows\n{matrix(scored)}")
    print(f"decides by: {decisions.rule_in_words(rule, classes)}\nreport: {folder / 'report.html'}")
    return 0


def labelled_rows(model: Model, source: Path) -> Labelled:
    """Read a file with the training columns, including the target."""
    if model.about.kind != "table":
        raise DataError(f"this model takes {model.about.kind}s: expected input=FOLDER, got {source}")
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
    return Labelled(model.predict_proba(frame), labels, frame.drop(columns=encoding.target).reset_index(drop=True))


def labelled_images(model: Model, source: Path) -> Labelled:
    """Read images from one folder per class."""
    if model.about.kind != "image":
        raise DataError(f"this model takes {model.about.kind}s: expected input=FILE, got the folder {source}")
    image_files = images.image_files(source)
    if not image_files:
        raise DataError(f"{source} has no images")
    paths = [file.relative_to(source) for file in image_files]
    labels = numbered(model, np.array([path.parts[0] for path in paths], dtype=object), source)
    probabilities = np.concatenate([p for _, p in probabilities_of_images(model, image_files)])
    return Labelled(probabilities, labels, pd.DataFrame({"file": [str(path) for path in paths]}))


def numbered(model: Model, names: np.ndarray, source: Path) -> np.ndarray:
    """Class names as class numbers."""
    if not len(names):
        raise DataError(f"{source} has no rows")
    number = {name: k for k, name in enumerate(model.classes)}
    unknown = sorted({str(name) for name in names} - set(number))
    if unknown:
        known = ", ".join(shown(name, quoted=False) for name in model.classes[:10])
        raise DataError(f"{source}: the model does not know the class {shown(unknown[0])}; it knows {known}")
    return np.array([number[str(name)] for name in names])


def with_intervals(part: DecidedRows, positive: int | None, first: str) -> pd.DataFrame:
    """The usual scores with their intervals: score, value, low, high. first: the one that the model was chosen by."""
    values = dict(sorted(part.scores(positive).items(), key=lambda item: item[0] != first))
    samples = drawn_rankings(part, positive) if "auroc" in values else {}
    samples |= {name: drawn_scores([part], metric_of(name, positive))[0] for name in values if name not in samples}
    rows = [(name, value, *interval(samples[name], part.units[0])) for name, value in values.items()]
    return pd.DataFrame(rows, columns=["score", "value", "low", "high"])


def matrix(scored: model_page.Scored) -> str:
    """The confusion matrix as text; with many classes it is only in the report."""
    if len(scored.classes) > model_page.MATRIX:
        return f"{len(scored.classes)} classes: see the report"
    counts = scored.part.confusion.matrix.round().long().tolist()
    rows = [[name, *map(str, row)] for name, row in zip(scored.classes, counts, strict=True)]
    return writers.aligned([["", *scored.classes], *rows])
