"""Which model, loss and decision for my data and my score? Train the candidates, choose on validation, report on test.

Candidates: logistic regression, gradient boosting, a random forest, and a network trained on cross-entropy, on metric
cross-entropy and on EAST's loss of the score; each decides by argmax, by a rule tuned on validation (plug-in) and by
the best rule according to its own probabilities (expected). All see the same split, and reporting/comparison.py judges
them.
"""

import inspect
import math
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from east.lab.data.columns import tells_class
from east.lab.data.encoding import enumerated
from east.lab.experiment import budget, records
from east.lab.experiment.budget import OutOfTime
from east.lab.experiment.ledger import Ledger, model_folder
from east.lab.experiment.runs import Run, load, split_options
from east.lab.experiment.scheduler import carry_out, noting_saved_trials
from east.lab.files import result_folder
from east.lab.reporting import writers
from east.lab.reporting.comparison import FEW, Candidate, Comparison, Measure, judge, on_unseen_rows
from east.lab.reporting.pages import compare as page
from east.lab.reporting.specs import DECIDED
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.settings.identity import Json
from east.lab.settings.sections import DatasetSection, LossSection, Split
from east.lab.settings.settings import Settings
from east.lab.tasks.plan import DAY, confirm
from east.lab.training import saved
from east.lab.training.devices import pick_device
from east.lab.training.population import Trial

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
HIDDEN = [128, 64]  # smaller than the papers' network: as good on tables of this size, and faster
LEARNING_RATE = 0.003
RANKINGS = ("auc", "roc_auc", "auroc", "average_precision")
LONG = 60  # seconds; above this, suggest a time limit


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

    def notes(self, classes: int) -> list[str]:
        """A note if a metric of the user's own is undefined for a model that always predicts the same class."""
        if any(self.as_written(counts).isnan().any() for counts in extreme_counts(classes)):
            return [f"{self.name} is undefined (0/0) if a class is never predicted; such a score counts as 0"]
        return []


@dataclass(frozen=True)
class CandidatePlan:
    """A candidate to train: its name in `candidates=[…]`, its title, its run, and how long that takes here."""

    key: str
    title: str
    run: Run
    seconds: float = 0.0


@dataclass(frozen=True)
class Problem:
    """What is compared on which data: the command with its defaults, its settings, the data and their split, the score.

    names: of the candidates. about: the data in a few lines. checks: what the user should know of data and score.
    """

    command: Command
    settings: Settings
    loaded: data.Data
    splits: data.Splits
    score: Score
    names: tuple[str, ...]
    about: str
    checks: tuple[str, ...]

    @property
    def rarest(self) -> float:
        """Share of the rarest class."""
        labels = self.loaded.labels.flatten()
        return float(torch.bincount(labels, minlength=len(self.loaded.classes)).min()) / labels.numel()


def main(command: Command, _: Settings) -> int:
    """Describe, estimate, train, judge and save, printing each result as soon as it is known."""
    started, typed = time.monotonic(), shlex.join(["east-run", *command.words])
    problem = described(command)
    settings, loaded, splits = problem.settings, problem.loaded, problem.splits
    plans = planned_all(problem)
    if settings.dry_run:
        return 0
    with bars.bar("timing a few steps"):
        plans = [replace(p, seconds=budget.seconds(p.run, splits)) if needs_training(p.run) else p for p in plans]
    line = estimate(plans, settings.minutes)
    unlimited = settings.minutes is None and pick_device(settings.device).type == "cpu"
    if unlimited and sum(plan.seconds for plan in plans) > DAY:
        confirm(line, settings.yes)
    else:
        print(line, flush=True)
    folder = answer_folder(problem)  # fails before training, if it does
    deadline = None if settings.minutes is None else started + 60 * settings.minutes
    with new_models(settings.keep_models == "all") as models:
        plans, failures, notes = trained(plans, deadline, models)
        with bars.bar("judging the candidates"):
            result = compared(problem, plans, [*failures, *notes])
            models.discard(save(result, plans, folder))
            notes += [f"failed: {line}" for line in failures] + result.notes()
            winner = next(plan for plan in plans if plan.key == result.winner.key)
            predict = predict_command(folder, loaded.kind, needs_trust(winner))
            page.write(folder, result, loaded, splits, problem.about, [*problem.checks, *notes], typed, predict)
    print("\n".join(["", verdict(result), *(f"note: {note}" for note in notes)]))
    print(f"\nreport: {folder / 'report.html'}\n\npredict new rows:\n  {predict}")
    return 0


def described(command: Command) -> Problem:
    """Load, split and describe the data, and parse the score; ConfigError or DataError if something does not fit."""
    command, settings = checked(command)
    loaded = load(settings.dataset, settings.data_dir)
    if loaded.stratifiable and "split.stratify" not in command:
        command = command.but({"split.stratify": True})  # keeps rare classes in every part
    score = parse_score(settings.score, loaded)
    names = tuple(parse_candidates(settings.candidates, loaded.kind))
    split = compose.settings(command).split
    about, checks = overview(loaded, split), (*file_notes(loaded), *score.notes(len(loaded.classes)))
    splits = data.split(loaded, **split_options(split))
    print(description(about, loaded, splits), *(f"note: {note}" for note in checks), sep="\n", flush=True)
    refuse_without_positives(score.name, loaded, splits)
    return Problem(command, settings, loaded, splits, score, names, about, checks)


def planned_all(problem: Problem) -> list[CandidatePlan]:
    """The plans of all candidates; their titles are printed."""
    command, score, kind, rows = problem.command, problem.score, problem.loaded.kind, len(problem.splits.train)
    plans = [planned(name, command, score, kind, rows, problem.rarest) for name in problem.names]
    candidate_count = f"{len(plans)} candidates" if len(plans) > 1 else "1 candidate"
    print(f"\n{score.name}: {candidate_count}: {', '.join(plan.title for plan in plans)}", flush=True)
    return plans


def compared(problem: Problem, plans: Sequence[CandidatePlan], reasons: Sequence[str]) -> Comparison:
    """The judged candidates; RuntimeError with the reasons if there are none."""
    score, loaded, splits = problem.score, problem.loaded, problem.splits
    groups = {"val": splits.val.groups, "test": splits.test.groups}
    judged = candidates(plans, score.measure, loaded.positive, groups)
    if not judged:
        raise RuntimeError(f"no candidate could be trained: {'; '.join(reasons) or 'none has a record'}")
    return Comparison(score.name, score.measure, tuple(judged), tuple(loaded.classes), loaded.positive)


def checked(command: Command) -> tuple[Command, Settings]:
    """The command, with preset=compare unless it names another, and its settings; ConfigError if they do not fit."""
    if unusable := sorted({"loss", "losses", "datasets"} & set(command.values)):
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


def needs_trust(plan: CandidatePlan) -> bool:
    """Whether loading the model runs code from outside east: a network or library named in the command."""
    settings = plan.run.settings
    return "target" in settings.model.options or "library" in settings.loss.options


def predict_command(folder: Path, kind: str, trust: bool = False) -> str:
    """How to predict new rows with the winner: a command for a shell; Python for graphs, which have no file format."""
    if kind == "graph":
        return f'east.load("{folder / "model"}"{", trust=True" if trust else ""}).predict_proba(graphs)'
    rows = "new.csv" if kind == "table" else "FOLDER"
    values = {"task": "predict", "checkpoint": str(folder / "model"), "input": rows, "output": "predictions.csv"}
    return shlex.join(["east-run", *Command(values | ({"trust": True} if trust else {})).words])


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
    if average is None and "average" in inspect.signature(function).parameters:
        average = "macro" if loaded.positive is None else "positive"
    if average != "positive":
        return Score(f"{metric}_{average}" if average else metric, metric, average)
    if loaded.positive is None:
        raise ConfigError(
            f"score={metric}_positive needs a positive class: two classes, or dataset.positive=…; "
            f"or score={metric}_macro"
        )
    return Score(f"{metric}_positive", metric, average, None if loaded.positive == 1 else loaded.positive)


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


def extreme_counts(classes: int) -> Iterator[Confusion]:
    """Counts of a model that is always right, and of models that always predict the first or the last class."""
    yield Confusion.from_matrix(torch.eye(classes, dtype=torch.float64))
    for k in (0, classes - 1):
        yield Confusion.from_matrix(one_hot(torch.full((classes,), k), classes).double())


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


def planned(name: str, command: Command, score: Score, kind: str, rows: int, rarest: float = 0.5) -> CandidatePlan:
    """A candidate's run, with settings suited to the number of training rows.

    rarest: share of the rarest class.
    """
    extra: dict[str, Any] = {}
    classical = name in CLASSICAL
    if command.get("preset") == "compare":
        extra["trials"] = budget.seeds(rows, classical)
        if name == "rf" and rows > budget.MANY:
            extra |= {f"loss.{option}": value for option, value in budget.FOREST.items()}
        if not classical:
            extra["hyper.batch_size"] = budget.batch_size(rows, rarest)
        if "protocol.max_epochs" in command:  # the user's limit counts epochs
            extra["protocol.count"] = "epochs"
        if kind == "table" and not classical:
            extra |= {"hyper.lr": LEARNING_RATE} | ({} if "model" in command else {"model.hidden": HIDDEN})
            extra |= {"hyper.dropout": 0.0} if rows > budget.MANY else {}
    if "executor" not in command:
        extra["executor"] = "inline"  # candidates take turns, each with all cores
    extra = {option: value for option, value in extra.items() if option not in command}
    settings = compose.settings(command.but({**loss_of(name, score.metric), **extra}))
    if command.get("preset") == "compare" and not classical:
        settings = budget.equally_long(settings)
        if kind != "graph" and "split.folds" not in command:
            settings = budget.judged_apart(settings)
    title = f"{CANDIDATES[name]} {score.name}" if name == "east" else CANDIDATES[name]
    return CandidatePlan(name, title, Run.of(trained_for(settings, score)))


def loss_of(name: str, metric: str) -> dict[str, str]:
    """A candidate's loss, as command-line overrides."""
    if name == "east":
        return {"loss": LOSSES[metric]} if metric in LOSSES else {"loss": "metric", "loss.metric": metric}
    return {"loss": name}


def trained_for(settings: Settings, score: Score) -> Settings:
    """The settings with a metric loss trained for the score, and with probabilities kept."""
    loss = settings.loss
    if "metric" in loss.options:
        kept = {n: v for n, v in loss.options.items() if n not in ("metric", "average", "positive")}
        loss = LossSection(name=loss.name, _target_=loss.target, **kept, metric=score.metric, **score.parameters)
    return settings.but(loss=loss, save_model=False, keep_probabilities=True)


def overview(loaded: data.Data, split: Split) -> str:
    """The data in a few lines: rows, classes, split."""
    about = data.describe(loaded, **split_options(split))
    if loaded.name in ("csv", "images"):
        about["name"] = Path(loaded.path).name
    return data.describe_text({name: about[name] for name in SHOWN})


def file_notes(loaded: data.Data) -> list[str]:
    """What the user should check in a file: a guessed character set, similar classes, columns that tell the class."""
    if not isinstance(loaded, data.Table) or loaded.raw is None:
        return []
    labels = loaded.labels.numpy()
    telling = [column.name for column in loaded.raw.used if tells_class(column, labels)]
    notes = [loaded.file_note] if loaded.file_note else []
    alike = Counter(name.casefold() for name in loaded.classes)
    if similar := [name for name in loaded.classes if alike[name.casefold()] > 1]:
        notes.append(f"these classes differ only in capital letters: {enumerated(similar)}")
    if telling:
        notes.append(
            f"one column alone determines the class of every row: {enumerated(telling)}. If it is known only after the "
            "class (leakage), leave it out: dataset.drop=[…]"
        )
    return notes


def description(about: str, loaded: data.Data, splits: data.Splits) -> str:
    """The data described column by column, with notes on what limits the answer."""
    lines = [about]
    lines += [f"  {line}" for line in (splits.encoding.describe(COLUMNS) if splits.encoding else ())]
    refuse_single_unit(loaded, splits)
    for part, name in (("val", "validation"), ("test", "test")):
        counts = torch.bincount(getattr(splits, part).labels.flatten(), minlength=len(loaded.classes))
        rarest = int(counts.argmin())
        if counts[rarest] < FEW:
            few = {0: "no rows", 1: "only 1 row"}.get(int(counts[rarest]), f"only {int(counts[rarest])} rows")
            lines.append(f"note: {few} of {loaded.classes[rarest]!r} for {name}; expect wide intervals")
    return "\n".join(lines)


def refuse_single_unit(loaded: data.Data, splits: data.Splits) -> None:
    """DataError if validation has fewer than two rows, or groups of rows that belong together."""
    unit, total, left = "rows", len(loaded.labels), splits.val.labels.numel()
    if loaded.groups is not None and splits.val.groups is not None:
        unit, total, left = "groups", len(loaded.groups.unique()), len(splits.val.groups.unique())
    if left < 2:
        raise data.DataError(
            f"{loaded.name} has too few {unit} to compare: {total} leave {left} for validation. Expected at least 2, "
            "because a plug-in rule is tuned on some of them and judged on the others. split.fractions=[0.5,0.25,0.25] "
            "gives validation a larger share."
        )


def refuse_without_positives(score: str, loaded: data.Data, splits: data.Splits) -> None:
    """DataError if validation or test has no positives, so that every score of that class would be 0."""
    if not score.endswith("_positive") or loaded.positive is None:
        return
    total = int(loaded.labels.eq(loaded.positive).sum())
    for part, name in ((splits.val, "validation"), (splits.test, "test")):
        if not part.labels.eq(loaded.positive).any():
            raise data.DataError(
                f"{loaded.classes[loaded.positive]!r} has {total} {'row' if total == 1 else 'rows'}, none of them "
                f"for {name}: score={score} would be 0 for every candidate. Add rows, or choose another score."
            )


def needs_training(run: Run) -> bool:
    """Whether a run has anything left to train; always assumed of a run with a search."""
    ledger = Ledger(run.settings)  # no scan: only runs/ has the probabilities that a candidate needs
    return run.settings.searched or bool(ledger.missing(replace(run, chosen=run.science).trials))


def estimate(plans: Sequence[CandidatePlan], minutes: float | None) -> str:
    """How long it will take, and how to limit that."""
    total = sum(plan.seconds for plan in plans)
    if not total:
        return "everything is on record"
    text = f"about {bars.duration(total)} on this machine, estimated from a few steps of each"
    if minutes is not None:
        return f"{text}; limited by minutes={minutes:g}"
    return f"{text}; minutes={max(1, round(total / 240)):g} would stop it sooner" if total > LONG else text


class Turns:
    """The candidates in their order, and which one is running."""

    def __init__(self, plans: Sequence[CandidatePlan]):
        self.plans, self.at, self.since = plans, 0, time.monotonic()

    def __iter__(self) -> Iterator[CandidatePlan]:
        for number, plan in enumerate(self.plans):
            self.at, self.since = number, time.monotonic()
            yield plan

    def describe(self) -> str:
        running, *later = self.plans[self.at :]
        left = max(running.seconds - (time.monotonic() - self.since), 0) + sum(plan.seconds for plan in later)
        return f"{running.title} running, about {bars.duration(left)} left"


def cheapest_first(plans: Sequence[CandidatePlan]) -> list[CandidatePlan]:
    """The plans by cost. Networks cost about the same and stay in the order of CANDIDATES."""
    networks = min((plan.seconds for plan in plans if plan.key not in CLASSICAL), default=0.0)
    return sorted(plans, key=lambda plan: plan.seconds if plan.key in CLASSICAL else networks)


@contextmanager
def new_models(keep: bool) -> Iterator[set[Path]]:
    """A set for the folders of new models, which are deleted at the end of this block, however it ends, unless kept."""
    folders: set[Path] = set()
    try:
        yield folders
    finally:
        for folder in () if keep else folders:
            shutil.rmtree(folder, ignore_errors=True)


def trained(
    plans: Sequence[CandidatePlan], deadline: float | None, models: set[Path]
) -> tuple[list[CandidatePlan], list[str], list[str]]:
    """Train one plan after another; return the plans as executed, failures, and notes on what was cut short.

    models: gets the folders of the models that this saves; those of earlier commands are not among them.
    """
    done: list[CandidatePlan] = []
    failures: list[str] = []
    notes: list[str] = []
    turns = Turns(cheapest_first(plans))
    shown = bars.bar("candidates", len(plans), "candidate", turns.describe)
    with shown as progress, noting_saved_trials(lambda: done):
        for plan in turns:
            progress.update(turns.at - progress.n)
            left = math.inf if deadline is None else deadline - time.monotonic()
            run, share = plan.run, affordable_share(plan, left, first=not done)
            if not share:
                notes.append(
                    f"{plan.title} was not trained: it takes about {bars.duration(plan.seconds)}, more than is left"
                )
                continue
            if share < 1:
                run = budget.shorter(run, share)
                notes.append(f"{plan.title} was trained for {share:.0%} of the usual steps, to stop in time")
            run, saved_here = saving_models(run)
            try:
                with budget.stop_after(None if deadline is None else left):
                    failures += carry_out([run])
                done.append(replace(plan, run=run))
            except OutOfTime:
                notes.append(f"{plan.title} was stopped: time is up")
            # Not after an interruption: without its models, a rerun would train the finished trials of this plan again.
            models.update(saved_here)
    return done, failures, notes


def affordable_share(plan: CandidatePlan, left: float, first: bool) -> float:
    """The share of a plan's steps that can be trained in the seconds left; 0: none. Only networks can be shortened.

    first: whether no plan has been trained yet; such a one is tried even if it takes too long.
    """
    if left <= 0 or plan.seconds <= left:
        return float(left > 0)
    if plan.key in CLASSICAL or plan.run.settings.searched:
        return float(first)
    return next((share for share in budget.SHORTER if plan.seconds * share <= left), 0.0)


def saving_models(run: Run) -> tuple[Run, list[Path]]:
    """The run with its models saved, unless it is searched or on record; and the folders of those that are new."""
    save_model = not run.settings.searched and needs_training(run)
    trials = [Trial(run.science, seed) for seed in run.settings.seeds if save_model]
    folders = (model_folder(trial, run.settings.results_dir) for trial in trials)
    new = [folder for folder in folders if not folder.exists()]
    return replace(run, settings=run.settings.but(save_model=save_model)), new


def candidates(
    plans: Sequence[CandidatePlan],
    measure: Measure,
    positive: int | None,
    groups: Mapping[str, Tensor | None] | None = None,
) -> list[Candidate]:
    """A candidate per decision rule of every plan with finished trials, judged by the recorded probabilities."""
    rated = []
    for plan in sorted(plans, key=lambda plan: list(CANDIDATES).index(plan.key)):
        folder = plan.run.settings.results_dir
        files = {trial.seed: records.path(folder, trial.config, trial.seed) for trial in plan.run.trials}
        done = {s: f for s, f in files.items() if records.status(f) == "done" and f.with_suffix(".npz").exists()}
        arrays = {seed: records.arrays(file) for seed, file in done.items()}
        for decision in DECIDED if arrays else ():
            options = (decision, measure, positive, plan.run.science.split.folds, groups)
            judged = [judge(stored, seed, *options) for seed, stored in arrays.items()]
            rated.append(Candidate(plan.key, plan.title, decision, tuple(judged)))
    return on_unseen_rows(rated, measure)


def verdict(result: Comparison) -> str:
    """A table of test scores and differences to the winner, then the winner in one sentence."""
    winner = result.winner
    lines = [["", "validation", "test", "95 % interval", "winner minus this, on test"]]
    for k, candidate in enumerate(result.candidates):
        lead = result.lead(k)
        ahead = "winner" if k == result.best else f"{lead.value:+.3f}  {lead.low:+.3f} to {lead.high:+.3f}"
        lines.append([candidate.name, f"{candidate.validation:.3f}", *result.interval(k).cells, ahead])
    return "\n".join(
        [
            writers.aligned(lines),
            "plug-in: decision rule tuned on validation; expected: rule computed from the model's own probabilities\n"
            "networks: means over seeds; chosen on validation (plug-in cross-fitted), reported on test; "
            "intervals: bootstrap over test rows and seeds",
            f"winner on {result.score}: {winner.name}, test {result.interval(result.best)}; {result.standing}",
            *([f"the choice is uncertain: {result.uncertain}"] if result.uncertain else []),
        ]
    )


def answer_folder(problem: Problem) -> Path:
    """A folder such as my-f1_positive for my.csv, shared only by comparisons of the same data, classes and score."""
    dataset, parent = problem.settings.dataset, Path(problem.settings.results_dir) / "compare"
    return result_folder(parent, data_name(dataset, problem.loaded), problem.score.name, data_values(dataset))


def data_name(dataset: DatasetSection, loaded: data.Data) -> str:
    """The name of a user's file or folder without its ending, else of the dataset."""
    path = absolute_path(dataset)
    return (path.name.partition(".")[0] if path else "") or loaded.name


def data_values(dataset: DatasetSection) -> dict[str, Json]:
    """What identifies data and classes: a.csv and ./a.csv are the same file, a.csv in another folder is another."""
    path = absolute_path(dataset)
    return dataset.to_json() | ({"path": str(path)} if path else {})


def absolute_path(dataset: DatasetSection) -> Path | None:
    path = dataset.options.get("path")
    return Path(str(path)).expanduser().resolve() if path else None


def save(result: Comparison, plans: Sequence[CandidatePlan], folder: Path) -> Path:
    """Save the winner's best seed with its decision rule to folder/model; return its folder in results_dir/models."""
    winner, chosen = result.winner, result.winner.chosen
    plan = next(plan for plan in plans if plan.key == winner.key)
    settings = plan.run.settings
    kept = next(trial for trial in plan.run.trials if trial.seed == chosen.seed)
    source = model_folder(kept, settings.results_dir)
    if not source.exists():
        again = Run.of(settings.but(save_model=True, force=False, seed=chosen.seed, trials=1))
        if failures := carry_out([again]):
            raise RuntimeError(f"the winner could not be trained again to be saved: {failures[0]}")
    names = {"argmax": "argmax", "plugin": f"plug-in for {result.score}", "expected": f"expected {result.score}"}
    model = saved.load(source, trust=needs_trust(plan))
    model.deciding(names[winner.decision], chosen.rule).save(folder / "model")
    return source
