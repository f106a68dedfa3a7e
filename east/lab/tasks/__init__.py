"""The tasks of east-run, a module each: what each does, and which settings it reads beside those that all do."""

from typing import NamedTuple

SCIENCE = ("dataset", "loss", "protocol", "preset", "model", "annealing", "search", "ensemble", "split", "hyper")
WORK = (
    *("executor", "trials", "seed", "device", "compile", "tensorboard", "data_dir"),
    *("force", "dry_run", "save_model", "yes", "selection"),
)
TRAINING = ("datasets", "losses", *SCIENCE, *WORK)


def without(*names: str, of: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in of if name not in names)


class Task(NamedTuple):
    about: str
    reads: tuple[str, ...]
    only_reads: bool = False  # its results folder must exist
    module: str | None = None  # None: that of its name


TASKS = {
    "run": Task("search hyperparameters, select, train the trials, print a table (default)", TRAINING),
    "train": Task("one trial with the given seed=…", without("search", "trials", of=TRAINING), module="run"),
    "data": Task("fetch, verify and describe dataset=… or dataset=all", ("dataset", "datasets", "split", "data_dir")),
    "compare": Task(
        "which model for dataset=… and score=…?",
        ("score", "costs", "candidates", "minutes", *without("datasets", "losses", "loss", of=TRAINING)),
    ),
    "reproduce": Task("run what table=… still needs, then render it", ("table", *TRAINING, "variant", "format")),
    "table": Task(
        "render table=… or table=all from records", ("table", "selection", "variant", "format", "preset"), True
    ),
    "records": Task("export records to results/records", (), True),
    "report": Task("one HTML page with everything", (), True),
    "predict": Task(
        "label new rows: checkpoint=… input=… output=… keep=[id]",
        ("checkpoint", "input", "output", "keep", "safe_csv", "trust", "device", "force"),
    ),
    "evaluate": Task("scores of a saved model on labelled rows", ("checkpoint", "input", "trust", "device")),
    "export": Task("a saved model as ONNX: output=model.onnx", ("checkpoint", "output", "trust", "force")),
    "study": Task("bias of small batches, simulated", ()),
}
