"""The tasks of east-run, a module each (run also serves train): what each does, and which settings it reads."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

NETWORK = ("dataset", "protocol", "preset", "model", "annealing", "ensemble", "split", "hyper")
HERE = ("executor", "seed", "device", "data_dir", "dry_run", "yes")
TRAIN = (
    *("datasets", "losses", "loss", *NETWORK, *HERE),
    *("compile", "logger", "force", "save_model", "selection"),
)
RUN = (*TRAIN, "search", "trials")


class Task(NamedTuple):
    about: str
    reads: tuple[str, ...] = ()  # beside the settings that all tasks read
    only_reads: bool = False  # its results folder must exist
    sets: Mapping[str, Any] = MappingProxyType({})  # its own defaults


TASKS = {
    "run": Task("search hyperparameters, select, train the trials, print a table (default)", RUN),
    "train": Task("one trial with the given seed=…", TRAIN, sets={"search": "none", "trials": 1}),
    "data": Task("fetch, verify and describe dataset=… or dataset=all", ("dataset", "datasets", "split", "data_dir")),
    "compare": Task(
        "which model for dataset=… and score=…?",
        ("score", "costs", "candidates", "minutes", *NETWORK, *HERE),
        sets={"preset": "compare"},
    ),
    "reproduce": Task("run what table=… still needs, then render it", ("table", *RUN, "variant", "format")),
    "table": Task(
        "render table=… or table=all from records", ("table", "selection", "variant", "format", "preset"), True
    ),
    "records": Task("export records to results/records", only_reads=True),
    "report": Task("one HTML page with everything", only_reads=True),
    "predict": Task(
        "label new rows: checkpoint=… input=… output=… keep=[id]",
        ("checkpoint", "input", "output", "keep", "safe_csv", "trust", "device", "force"),
    ),
    "evaluate": Task("scores of a saved model on labelled rows", ("checkpoint", "input", "trust", "device")),
    "export": Task("a saved model as ONNX: output=model.onnx", ("checkpoint", "output", "trust", "force")),
    "study": Task("bias of small batches, simulated"),
}
