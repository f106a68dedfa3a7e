"""Which model, loss and decision for my data and my score? Train the candidates, choose on validation, report on test.

Candidates: logistic regression, gradient boosting, a random forest, and a network trained on cross-entropy, on metric
cross-entropy and on EAST's loss of the score; each decides by argmax, by a rule tuned on validation (plug-in) and by
the best rule according to its own probabilities (expected). All see the same split: `candidate` says what is trained,
`train` trains it, reporting/comparison.py judges it.
"""

import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from east import decisions, metrics
from east.choices import ConfigError, choose
from east.confusion import Confusion
from east.lab import bars, data
from east.lab.bars import duration
from east.lab.data.encoding import enumerated
from east.lab.data.findings import tells_class
from east.lab.experiment import budget, records
from east.lab.experiment.budget import OutOfTime
from east.lab.experiment.ledger import model_folder
from east.lab.experiment.runs import Run, load, split_options
from east.lab.experiment.scheduler import carry_out
from east.lab.files import result_folder
from east.lab.reporting import comparison, model_page, writers
from east.lab.reporting.comparison import FEW, Comparison, Measure, judge
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.settings.sections import LossSection
from east.lab.settings.settings import Settings
from east.lab.tasks import plan
from east.lab.training import saved

LOSSES = {"f1": "f1", "accuracy": "accuracy", "mcc": "mcc"}  # metric -> its loss; all others use `metric`
CANDIDATES = {  # cheapest first; among the networks, the winner of conf/table/contest.yaml first
    "logistic": "logistic regression",
    "boosting": "gradient boosting",
    "rf": "random forest",
    "metric_ce": "metric cross-entropy",
    "ce": "cross-entropy",
    "east": "EAST",
    "anyloss": "AnyLoss",
    "xgboost": "XGBoost",
    "lightgbm": "LightGBM",
    "catboost": "CatBoost",
}
# The others run only when named, so that the answer does not depend on what is installed.
USUAL = ("logistic", "boosting", "rf", "ce", "metric_ce", "east")
CLASSICAL = tuple(filter(compose.is_classical, CANDIDATES))
SHOWN = ("name", "rows", "features", "balance", "positive", "imbalance", "split")
COLUMNS = 30  # columns of the data that are described one by one
RANKINGS = ("auc", "roc_auc", "auroc", "average_precision")


@dataclass(frozen=True)
class Score:
    """The score that candidates are judged by: its name, a metric (a name or a dotted path) and its parameters."""

    name: str
    metric: str
    average: str | None = None
    positive: int | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        options = {"average": self.average, "positive": self.positive}
        return {name: value for name, value in options.items() if value is not None}

    @property
    def as_written(self) -> Measure:
        return partial(metrics.resolve(self.metric), **self.parameters)

    @property
    def measure(self) -> Measure:
        """The metric that ranks candidates: 0 where the user's is undefined."""
        return decisions.defined(self.as_written)


@dataclass(frozen=True)
class Problem:
    """What is compared on which data. notes: what the user should know of data and score."""

    command: Command
    settings: Settings
    loaded: data.Data
    splits: data.Splits
    score: Score
    about: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Contestant:
    """A candidate to train: its name in `candidates=[…]`, its title, and its part of the plan."""

    key: str
    title: str
    item: plan.Item

    @property
    def run(self) -> Run:
        assert self.item.run is not None  # the data have been loaded
        return self.item.run

    @property
    def finished(self) -> dict[int, Path]:
        """Seed -> record file of the trials whose probabilities are on record."""
        folder = self.run.settings.results_dir
        files = {trial.seed: records.path(folder, trial.config, trial.seed) for trial in self.run.trials}
        return {k: file for k, file in files.items() if records.status(file) == "done" and records.has_arrays(file)}

    @property
    def needs_trust(self) -> bool:
        """Whether loading the model runs code from outside east: a network or library named in the command."""
        settings = self.run.settings
        return "target" in settings.model.options or "target" in settings.loss.options


def main(command: Command, _: Settings) -> int:
    """Describe, estimate, train, judge and save, printing each result as soon as it is known."""
    started, typed = time.monotonic(), shlex.join(["east-run", *command.words])
    problem = described(*checked(command))
    settings, score = problem.settings, problem.score
    names = parse_candidates(settings.candidates, problem.loaded.kind)
    titles = [f"{CANDIDATES[name]} {score.name}" if name == "east" else CANDIDATES[name] for name in names]
    print(f"\n{score.name}: {len(names)} candidate{'s' if len(names) > 1 else ''}: {', '.join(titles)}", flush=True)
    work = plan.made([settings_of(name, problem) for name in names])
    contestants = [Contestant(*one) for one in zip(names, titles, work.items, strict=True)]
    if settings.dry_run:
        print(work.text())
        return 0
    costs = announced(work, settings)
    folder = answer_folder(problem)  # fails before training, if it does
    left = None if settings.minutes is None else 60 * settings.minutes - (time.monotonic() - started)
    notes: list[str] = []
    if left is not None:
        contestants, notes = within(left, contestants, costs, len(problem.splits.train))
    with new_models(contestants, settings.keep_models == "all") as models:
        failures, unfinished = trained(contestants, left)
        with bars.bar("judging the candidates"):
            result = judged(problem, contestants, [*failures, *unfinished])
            winner = next(contestant for contestant in contestants if contestant.key == result.winner.key)
            models.discard(save(result, winner, folder))
            notes += [*unfinished, *(f"failed: {line}" for line in failures), *result.notes()]
            predict = predict_command(folder, problem.loaded.kind, winner.needs_trust)
            every_note = [*problem.notes, *notes]
            model_page.write(folder, result, problem.loaded, problem.splits, problem.about, every_note, typed, predict)
    print("\n".join(["", verdict(result), *(f"note: {note}" for note in notes)]))
    print(f"\nreport: {folder / 'report.html'}\n\npredict new rows:\n  {predict}")
    return 0


def checked(command: Command) -> tuple[Command, Settings]:
    """The command, with preset=compare unless it names another, and its settings; ConfigError if they do not fit."""
    if unusable := sorted({"loss", "losses", "datasets"} & set(command)):
        raise ConfigError(
            f"task=compare does not take {', '.join(unusable)}: it compares models on one dataset=… by one score=…; "
            "candidates=[…] chooses the models"
        )
    command = command if "preset" in command else command.but(preset="compare")
    settings = compose.settings(command)
    unused = [name for name in ("protocol.patience", "protocol.stage_epochs", "annealing.patience") if name in command]
    if unused and settings.preset.name == "compare":
        raise ConfigError(
            f"{unused[0]}: task=compare trains all networks for the same number of steps, whatever their patience; "
            "set protocol.max_epochs=…, or choose preset=quick or preset=budget, which stop by patience"
        )
    if target := settings.model.options.get("target"):
        try:
            saved.check_custom(str(target))
        except data.DataError as error:
            raise ConfigError(f"task=compare saves its winner: {error}") from error
    if settings.split.seed == "trial" or settings.protocol.new_split:
        raise ConfigError("task=compare judges all candidates on one split; split.seed=trial and protocol=btg use many")
    return command, settings


# Data and score


def described(command: Command, settings: Settings) -> Problem:
    """Load, split and describe the data, and parse the score; ConfigError or DataError if something does not fit."""
    loaded = load(settings.dataset, settings.data_dir)
    if loaded.stratifiable and "split.stratify" not in command:
        command = command.but({"split.stratify": True})  # keeps rare classes in every part
        settings = settings.but(split=settings.split.but(stratify=True))
    score = parse_score(settings.score, loaded)
    parse_candidates(settings.candidates, loaded.kind)
    splitting = split_options(settings.split)
    about = data.describe(loaded, **splitting)
    if loaded.name in ("csv", "images"):
        about["name"] = Path(loaded.path).name
    text = data.describe_text({name: about[name] for name in SHOWN})
    splits, notes = data.split(loaded, **splitting), [*file_notes(loaded), *undefined(score, len(loaded.classes))]
    print(text, *(f"  {line}" for line in (splits.encoding.describe(COLUMNS) if splits.encoding else ())), sep="\n")
    print(*(f"note: {note}" for note in [*scarcity(loaded, splits), *notes]), sep="\n", flush=True)
    refuse_too_few(score, loaded, splits)
    return Problem(command, settings, loaded, splits, score, text, tuple(notes))


def file_notes(loaded: data.Data) -> list[str]:
    """What the user should check in a file: a guessed character set, similar classes, columns that tell the class."""
    if not isinstance(loaded, data.Table) or loaded.raw is None:
        return []
    notes = [loaded.file_note] if loaded.file_note else []
    alike = Counter(name.casefold() for name in loaded.classes)
    if similar := [name for name in loaded.classes if alike[name.casefold()] > 1]:
        notes.append(f"these classes differ only in capital letters: {enumerated(similar)}")
    labels = loaded.labels.numpy()
    if telling := [str(name) for name, values in loaded.raw.items() if tells_class(values, labels)]:
        notes.append(
            f"one column alone determines the class of every row: {enumerated(telling)}. If it is known only after the "
            "class (leakage), leave it out: dataset.drop=[…]"
        )
    return notes


def scarcity(loaded: data.Data, splits: data.Splits) -> Iterator[str]:
    """Notes on parts with few rows of some class."""
    for part, name in ((splits.val, "validation"), (splits.test, "test")):
        counts = torch.bincount(part.labels.flatten(), minlength=len(loaded.classes))
        count, rarest = int(counts.min()), loaded.classes[int(counts.argmin())]
        if count < FEW:
            few = {0: "no rows", 1: "only 1 row"}.get(count, f"only {count} rows")
            yield f"{few} of {rarest!r} for {name}; expect wide intervals"


def refuse_too_few(score: Score, loaded: data.Data, splits: data.Splits) -> None:
    """DataError if validation has fewer than two rows or groups, or if a part has no positives for a score of them."""
    unit, total, left = "rows", len(loaded.labels), splits.val.labels.numel()
    if loaded.groups is not None and splits.val.groups is not None:
        unit, total, left = "groups", len(loaded.groups.unique()), len(splits.val.groups.unique())
    if left < 2:
        raise data.DataError(
            f"{loaded.name} has too few {unit} to compare: {total} leave {left} for validation. Expected at least 2, "
            "because a plug-in rule is tuned on some of them and judged on the others. split.fractions=[0.5,0.25,0.25] "
            "gives validation a larger share."
        )
    for part, name in ((splits.val, "validation"), (splits.test, "test")):
        if score.average == "positive" and loaded.positive is not None and not part.labels.eq(loaded.positive).any():
            rows = int(loaded.labels.eq(loaded.positive).sum())
            raise data.DataError(
                f"{loaded.classes[loaded.positive]!r} has {rows} {'row' if rows == 1 else 'rows'}, none of them for "
                f"{name}: score={score.name} would be 0 for every candidate. Add rows, or choose another score."
            )


def parse_score(score: str | None, loaded: data.Data) -> Score:
    """The score of `score=…`: any name of METRICS, with or without its average (recall_macro), or a dotted path.

    Without an average, f1, recall and others are those of the positive class, or macro if there is none.
    """
    score = score or "f1"
    if score in RANKINGS:
        raise ConfigError(
            f"score={score} is a ranking metric and cannot choose decisions; choose another score, such as f1 or mcc "
            "(AUROC and average precision are reported anyway)"
        )
    if score == "cost":
        raise ConfigError("score=cost needs your costs: write a metric of your own, score=my_metrics.my_cost")
    if "." in score:
        return Score(score, checked_metric(score, len(loaded.classes)))
    try:
        function, parameters = metrics.parse(score)
    except ValueError:
        raise ConfigError(choose("score", score, [*metrics.METRICS, "f1_macro", "f1_positive"])) from None
    metric, average = function.__name__, parameters.get("average")
    if average is None and metrics.takes_average(function):
        average = "macro" if loaded.positive is None else "positive"
    if average == "positive" and loaded.positive is None:
        raise ConfigError(
            f"score={metric}_positive needs a positive class: two classes, or dataset.positive=…; "
            f"or score={metric}_macro"
        )
    positive = loaded.positive if average == "positive" and loaded.positive != 1 else None
    return Score(f"{metric}_{average}" if average else metric, metric, average, positive)


def checked_metric(path: str, classes: int) -> str:
    """The dotted path of the user's own metric, once it has been tried on a few confusion matrices."""
    for counts in extreme_counts(classes):
        try:
            value = metrics.resolve(path)(counts)
        except Exception as error:  # it is the user's code
            raise ConfigError(
                f"score={path}: expected a function of a Confusion; {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, Tensor):
            raise ConfigError(f"score={path}: expected a tensor, computed from the Confusion's counts, got {value!r}")
    return path


def undefined(score: Score, classes: int) -> list[str]:
    """A note if a metric of the user's own is undefined for a model that always predicts the same class."""
    if any(score.as_written(counts).isnan().any() for counts in extreme_counts(classes)):
        return [f"{score.name} is undefined (0/0) if a class is never predicted; such a score counts as 0"]
    return []


def extreme_counts(classes: int) -> Iterator[Confusion]:
    """Counts of a model that is always right, and of models that always predict the first or the last class."""
    yield Confusion.from_matrix(torch.eye(classes, dtype=torch.float64))
    for k in (0, classes - 1):
        yield Confusion.from_matrix(one_hot(torch.full((classes,), k), classes).double())


# Candidates


def parse_candidates(names: Sequence[str] | None, kind: str) -> list[str]:
    """The names of `candidates=[…]` in the order of CANDIDATES; classical models cannot take graphs."""
    fitting = [name for name in CANDIDATES if kind != "graph" or name not in CLASSICAL]
    if names is None:
        return [name for name in fitting if name in USUAL]
    if not names:
        raise ConfigError(f"candidates=[]: expected at least one of {', '.join(fitting)}")
    for name in names:
        words = name.lower().replace("_", " ")
        choose("candidate", name, fitting, next((key for key in fitting if words in CANDIDATES[key].lower()), None))
    return [name for name in fitting if name in names]


def settings_of(name: str, problem: Problem) -> Settings:
    """A candidate's settings, suited to the number of training rows."""
    command, score, rows = problem.command, problem.score, len(problem.splits.train)
    classical, ours = name in CLASSICAL, command.get("preset") == "compare"
    loss = {"loss": name}
    if name == "east":
        loss = (
            {"loss": LOSSES[score.metric]}
            if score.metric in LOSSES
            else {"loss": "metric", "loss.metric": score.metric}
        )
    extra: dict[str, Any] = {"executor": "inline"}  # candidates take turns, each with all cores
    if ours:
        labels = problem.loaded.labels.flatten()
        rarest = float(torch.bincount(labels, minlength=len(problem.loaded.classes)).min()) / labels.numel()
        extra |= budget.suited(name, classical, rows, rarest, problem.loaded.kind)
        extra |= {"protocol.count": "epochs"} if "protocol.max_epochs" in command else {}  # the user counts epochs
    chosen = set(command) | ({"model.hidden"} if "model" in command else set())
    extra = {option: value for option, value in extra.items() if option not in chosen}
    settings = compose.settings(command.but({**loss, **extra}))
    if ours and not classical:
        settings = budget.equally_long(settings, rows)
        if problem.loaded.kind != "graph" and "split.folds" not in command:
            settings = budget.judged_apart(settings)
    section = settings.loss
    if "metric" in section.options:
        kept = {n: v for n, v in section.options.items() if n not in ("metric", "average", "positive")}
        section = LossSection(
            name=section.name, _target_=section.target, **kept, metric=score.metric, **score.parameters
        )
    return settings.but(loss=section, save_model=False, keep_probabilities=True)


def announced(work: plan.Plan, settings: Settings) -> list[float]:
    """Print how long the candidates take and how to limit that; more than a day on a CPU must be confirmed."""
    costs = [cost or 0.0 for cost in work.costs]
    total = sum(costs)
    line = f"about {duration(total)} on this machine, estimated from a few steps of each"
    if not any(any(item.todo) for item in work.items):
        line = "everything is on record"
    elif settings.minutes is not None:
        line += f"; limited by minutes={settings.minutes:g}"
    elif total > plan.MINUTE:
        line += f"; minutes={max(1, round(total / 240)):g} would stop it sooner"
    if settings.minutes is None and total > plan.DAY and work.device.type == "cpu":
        plan.confirm(line, settings.yes)
    else:
        print(line, flush=True)
    return costs


def within(
    left: float, contestants: Sequence[Contestant], costs: Sequence[float], rows: int
) -> tuple[list[Contestant], list[str]]:
    """What fits into the seconds left, or else the cheapest one, and notes on what was shortened or left out.

    Only networks can be shortened. rows: of the training part.
    """
    kept, notes = [], []
    for contestant, seconds in zip(contestants, costs, strict=True):
        fixed = contestant.key in CLASSICAL or contestant.run.settings.searched
        share = next((share for share in budget.SHORTER[: 1 if fixed else None] if seconds * share <= left), None)
        if share is None:
            long = f"it takes about {duration(seconds)}, more than is left"
            notes.append(f"{contestant.title} was not trained: {long}")
            continue
        if share < 1:
            shorter = budget.shorter(contestant.run.settings, share, rows)
            contestant = replace(contestant, item=plan.made([shorter]).items[0])
            notes.append(f"{contestant.title} was trained for {share:.0%} of the usual steps, to stop in time")
        kept.append(contestant)
        left -= seconds * share
    return (kept, notes) if kept else ([contestants[costs.index(min(costs))]], notes)


def trained(contestants: Sequence[Contestant], left: float | None) -> tuple[list[str], list[str]]:
    """Train what is missing, for at most `left` seconds; return failures, and notes on what was not finished."""
    runs = [contestant.run for contestant in contestants if any(contestant.item.todo)]
    try:
        with budget.stop_after(left):
            return carry_out(runs) if runs else [], []
    except OutOfTime:
        return [], [f"{one.title} was stopped: time is up" for one in contestants if not one.finished]


@contextmanager
def new_models(contestants: Sequence[Contestant], keep: bool) -> Iterator[set[Path]]:
    """Let these contestants save their models, unless they are searched; delete what is new at the end unless `keep`.

    Yields the folders that will be deleted, whatever ends the block. Models that were there before are not among them.
    """
    runs = [one.run for one in contestants if any(one.item.todo) and not one.run.settings.searched]
    folders = {model_folder(trial, run.settings.results_dir) for run in runs for trial in run.trials}
    new = {folder for folder in folders if not folder.exists()}
    for run in runs:
        run.settings = run.settings.but(save_model=True)
    try:
        yield new
    finally:
        for folder in () if keep else new:
            shutil.rmtree(folder, ignore_errors=True)


# Answer


def judged(problem: Problem, contestants: Sequence[Contestant], reasons: Sequence[str]) -> Comparison:
    """The judged candidates; RuntimeError with the reasons if there are none."""
    score, loaded, splits = problem.score, problem.loaded, problem.splits
    groups = {"val": splits.val.groups, "test": splits.test.groups}
    candidates = []
    for one in contestants:
        if trials := {seed: records.arrays(file) for seed, file in one.finished.items()}:
            folds = one.run.science.split.folds
            candidates += judge(one.key, one.title, trials, folds, groups, score.measure, loaded.positive)
    if not candidates:
        raise RuntimeError(f"no candidate could be trained: {'; '.join(reasons) or 'none has a record'}")
    return comparison.compared(score.name, score.measure, candidates, tuple(loaded.classes), loaded.positive)


def verdict(result: Comparison) -> str:
    """A table of test scores and differences to the winner, then the winner in one sentence."""
    return "\n".join(
        [
            writers.aligned(result.lines()),
            "plug-in: decision rule tuned on validation; expected: rule computed from the model's own probabilities\n"
            "chosen on validation (plug-in cross-fitted), reported on test; intervals: bootstrap over test rows",
            f"winner on {result.score}: {result.summary}",
            *([f"the choice is uncertain: {result.uncertain}"] if result.uncertain else []),
        ]
    )


def predict_command(folder: Path, kind: str, trust: bool = False) -> str:
    """How to predict new rows with the winner: a command for a shell; Python for graphs, which have no file format."""
    if kind == "graph":
        return f'east.load("{folder / "model"}"{", trust=True" if trust else ""}).predict_proba(graphs)'
    rows = "new.csv" if kind == "table" else "FOLDER"
    values = {"task": "predict", "checkpoint": str(folder / "model"), "input": rows, "output": "predictions.csv"}
    return shlex.join(["east-run", *Command(values | ({"trust": True} if trust else {})).words])


def answer_folder(problem: Problem) -> Path:
    """A folder such as my-f1_positive for my.csv, shared only by comparisons of the same data, classes and score.

    a.csv and ./a.csv are the same file; a.csv in another folder is another.
    """
    dataset, name = problem.settings.dataset, problem.loaded.name
    made_from, path = dataset.to_json(), dataset.options.get("path")
    if path:
        absolute = Path(str(path)).expanduser().resolve()
        made_from, name = made_from | {"path": str(absolute)}, absolute.name.partition(".")[0] or name
    return result_folder(Path(problem.settings.results_dir) / "compare", name, problem.score.name, made_from)


def save(result: Comparison, winner: Contestant, folder: Path) -> Path:
    """Save the winner with its decision rule to folder/model; return its folder in results_dir/models."""
    chosen, settings = result.winner, winner.run.settings
    (trial,) = (trial for trial in winner.run.trials if trial.seed == chosen.seed)
    source = model_folder(trial, settings.results_dir)
    if not source.exists():
        again = Run.of(settings.but(save_model=True, force=False, seed=chosen.seed, trials=1))
        if failures := carry_out([again]):
            raise RuntimeError(f"the winner could not be trained again to be saved: {failures[0]}")
    names = {"argmax": "argmax", "plugin": f"plug-in for {result.score}", "expected": f"expected {result.score}"}
    saved.load(source, trust=winner.needs_trust).deciding(names[chosen.decision], chosen.rule).save(folder / "model")
    return source
