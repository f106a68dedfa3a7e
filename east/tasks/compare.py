"""Which model, loss and decision for my data and my score? Train the candidates, choose on validation, report on test.

Candidates: logistic regression, gradient boosting, a random forest, and a network trained on cross-entropy, on metric
cross-entropy and on EAST's loss of the score; each decides by argmax, by a rule tuned on validation (plug-in) and by
the rule that its probabilities call for (expected). All see the same split. reporting/comparison.py judges them.
"""

import math
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch

from east import data, display, metrics
from east.choices import ConfigError, choose
from east.experiment import budget, records
from east.experiment.budget import OutOfTime
from east.experiment.ledger import model_folder
from east.experiment.runs import Run, load, split_options
from east.experiment.scheduler import carry_out, ledger_of, noting_saved_trials
from east.reporting import writers
from east.reporting.comparison import DECISIONS, FEW, Candidate, Comparison, Measure, judge, on_unseen_rows
from east.reporting.pages import compare as page
from east.settings import command as commands
from east.settings.command import Command
from east.settings.compose import settings
from east.settings.sections import Loss, Split
from east.settings.settings import Settings
from east.training import saved

LOSSES = {"f1": "f1", "accuracy": "accuracy", "mcc": "mcc"}  # metric -> its loss; all others use `metric`
CANDIDATES = {  # cheapest first; of the networks the one that conf/table/contest.yaml decided for
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
# The others run only when named: the answer must not depend on what is installed.
USUAL = ("logistic", "boosting", "rf", "ce", "metric_ce", "east")
CLASSICAL = ("logistic", "boosting", "rf", "xgboost", "lightgbm", "catboost")
SHOWN = ("name", "rows", "features", "balance", "positive", "imbalance", "split")
COLUMNS = 30  # described one by one
HIDDEN = [128, 64]  # smaller than the papers' net: as good on tables of this size, and faster
LEARNING_RATE = 0.003
RANKINGS = ("auc", "roc_auc", "auroc", "average_precision")
LONG = 60  # seconds; above this, suggest a time limit

Metric: TypeAlias = dict[str, Any]  # `metric`, and its parameters


@dataclass(frozen=True)
class Plan:
    """A candidate to train: its name in `candidates=[…]`, its title, its run, and how long that takes here."""

    key: str
    title: str
    run: Run
    seconds: float = 0.0


def main(command: Command) -> int:
    """Describe, estimate, train, judge and save, printing each result as soon as it is known."""
    started = time.monotonic()
    if {"loss", "losses", "datasets"} & set(command.values):
        given = ", ".join(sorted({"loss", "losses", "datasets"} & set(command.values)))
        raise ConfigError(
            f"task=compare does not take {given}: it compares models on one dataset=… by one score=…; "
            "candidates=[…] says which"
        )
    usual = command if "preset" in command else command.but(preset="compare")
    first = settings(usual)
    if first.split.seed == "trial" or first.protocol.new_split:
        raise ConfigError("task=compare judges all candidates on one split; split.seed=trial and protocol=btg use many")
    loaded = load(first.dataset, first.data_dir)
    if loaded.stratifiable and "split.stratify" not in command:
        usual = usual.but({"split.stratify": True})  # keeps rare classes in every part
    score, metric = wanted_score(first.score, loaded)
    names = wanted_candidates(first.candidates, loaded.kind)
    split = settings(usual).split
    print(description(loaded, split), flush=True)
    splits = data.split(loaded, **split_options(split))
    rarest = float(torch.bincount(loaded.labels.flatten(), minlength=len(loaded.classes)).min()) / loaded.labels.numel()
    refuse_without_positives(score, loaded, splits)
    plans = [planned(name, usual, metric, score, loaded.kind, len(splits.train), rarest) for name in names]
    several = f"{len(plans)} candidates" if len(plans) > 1 else "1 candidate"
    print(f"\n{score}: {several}: {', '.join(plan.title for plan in plans)}", flush=True)
    if first.dry_run:
        return 0
    with display.activity("timing a few steps"):
        plans = [replace(p, seconds=budget.seconds(p.run, splits)) if missing(p.run) else p for p in plans]
    print(estimate(plans, first.minutes), flush=True)
    left = None if first.minutes is None else started + 60 * first.minutes
    plans, failures, notes = trained(plans, left)
    measure = partial(metrics.resolve(metric["metric"]), **{n: v for n, v in metric.items() if n != "metric"})
    typed = shlex.join(["east-run", *(f"{name}={commands.text(value)}" for name, value in command.values.items())])
    with display.activity("judging the candidates"):
        found = candidates(plans, measure, loaded.positive)
        if not found:
            raise RuntimeError(
                f"no candidate could be trained: {'; '.join([*failures, *notes]) or 'none has a record'}"
            )
        result = Comparison(score, measure, tuple(found), tuple(loaded.classes), loaded.positive)
        folder = own_folder(first, loaded, score, typed)
        save(result, plans, folder, first.keep_models)
        notes += [f"failed: {line}" for line in failures] + result.notes()
        winner = next(plan for plan in plans if plan.key == result.winner.key)
        predict = predict_command(folder, loaded.kind, needs_trust(winner))
        page.write(folder, result, loaded, splits, notes, typed, predict)
    print("\n".join(["", verdict(result), *(f"note: {note}" for note in notes)]))
    print(f"\nreport: {folder / 'report.html'}\n\npredict new rows:\n  {predict}")
    return 0


def needs_trust(plan: Plan) -> bool:
    """Whether loading the model runs code from outside east: a network or library named in the command."""
    asked = plan.run.settings
    return "target" in asked.model.options or "library" in asked.loss.options


def predict_command(folder: Path, kind: str, trust: bool = False) -> str:
    if kind == "graph":
        return f'east.load("{folder / "model"}"{", trust=True" if trust else ""}).predict_proba(graphs)'
    rows = "new.csv" if kind == "table" else "FOLDER"
    command = f"east-run task=predict checkpoint={folder / 'model'} input={rows} output=predictions.csv"
    return f"{command} trust=true" if trust else command


def wanted_score(score: str | None, loaded: data.Data) -> tuple[str, Metric]:
    """The score's name, and the metric with its parameters.

    score: f1_positive (also f1_pos), f1_macro, f1 (whichever suits the data), a name in METRICS or a dotted path.
    """
    if score in (None, "f1"):
        score = "f1_macro" if loaded.positive is None else "f1_positive"
    if score in ("f1_positive", "f1_pos"):
        if loaded.positive is None:
            raise ConfigError(
                "score=f1_positive needs a positive class: two classes, or dataset.positive=…; or score=f1_macro"
            )
        chosen = {"metric": "f1", "average": "positive"}
        return "f1_positive", chosen if loaded.positive == 1 else {**chosen, "positive": loaded.positive}
    if score == "f1_macro":
        return score, {"metric": "f1", "average": "macro"}
    if score in RANKINGS:
        raise ConfigError(f"score={score} judges a ranking, not decisions, and is reported beside any score")
    if "." not in score:
        choose("score", score, [*metrics.METRICS, "f1_macro", "f1_positive"])
    if score == "cost":
        raise ConfigError("score=cost needs your costs: write a metric of your own, score=my_metrics.my_cost")
    metrics.resolve(score)
    return score, {"metric": score}


def wanted_candidates(asked: Sequence[str] | None, kind: str) -> list[str]:
    """Candidate names in the order of CANDIDATES; classical models cannot take graphs."""
    fitting = [name for name in CANDIDATES if kind != "graph" or name not in CLASSICAL]
    if asked is None:
        return [name for name in fitting if name in USUAL]
    if not asked:
        raise ConfigError(f"candidates=[]: expected at least one of {', '.join(fitting)}")
    for name in asked:
        words = name.lower().replace("_", " ")
        choose("candidate", name, fitting, next((key for key in fitting if words in CANDIDATES[key].lower()), None))
    return [name for name in fitting if name in asked]


def planned(name: str, command: Command, metric: Metric, score: str, kind: str, rows: int, rarest: float = 0.5) -> Plan:
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
    asked = settings(command.but({**loss_of(name, metric), **extra}))
    if command.get("preset") == "compare" and not classical:
        asked = budget.equally_long(asked)
        if kind != "graph" and "split.folds" not in command:
            asked = budget.judged_apart(asked)
    title = f"{CANDIDATES[name]} {score}" if name == "east" else CANDIDATES[name]
    return Plan(name, title, Run.of(aimed(asked, metric)))


def loss_of(name: str, metric: Metric) -> dict[str, Any]:
    """A candidate's loss, as command-line overrides."""
    if name == "east":
        of = metric["metric"]
        return {"loss": LOSSES[of]} if of in LOSSES else {"loss": "metric", "loss.metric": of}
    return {"loss": name}


def aimed(settings: Settings, metric: Metric) -> Settings:
    """Point a metric loss at the requested score, and keep probabilities."""
    loss = settings.loss
    if "metric" in loss.options:
        kept = {n: v for n, v in loss.options.items() if n not in ("metric", "average", "positive")}
        loss = Loss(name=loss.name, _target_=loss.target, **kept, **metric)
    return settings.but(loss=loss, save_model=False, keep_probabilities=True)


def description(loaded: data.Data, split: Split) -> str:
    """Describe the data column by column, with notes on what will limit the answer."""
    about = data.describe(loaded, **split_options(split))
    if loaded.name in ("csv", "images"):
        about["name"] = Path(loaded.path).name
    lines = [data.describe_text({name: about[name] for name in SHOWN})]
    splits = data.split(loaded, **split_options(split))
    lines += [f"  {line}" for line in (splits.encoding.describe(COLUMNS) if splits.encoding else ())]
    rows = splits.val.labels.numel()
    if rows < 2:
        raise data.DataError(
            f"{loaded.name} has too few rows to compare: {len(loaded.labels)} leave {rows} for validation, where a "
            "plug-in rule is tuned on some and judged on the others; expected at least 2."
        )
    for part, name in (("val", "validation"), ("test", "test")):
        counts = torch.bincount(getattr(splits, part).labels.flatten(), minlength=len(loaded.classes))
        rarest = int(counts.argmin())
        if counts[rarest] < FEW:
            few = {0: "no rows", 1: "only 1 row"}.get(int(counts[rarest]), f"only {int(counts[rarest])} rows")
            lines.append(f"note: {few} of {loaded.classes[rarest]!r} for {name}; expect wide intervals")
    return "\n".join(lines)


def refuse_without_positives(score: str, loaded: data.Data, splits: data.Splits) -> None:
    """Reject data without positives in validation or test, where every F1 would be 0."""
    if score != "f1_positive" or loaded.positive is None:
        return
    total = int(loaded.labels.eq(loaded.positive).sum())
    for part, name in ((splits.val, "validation"), (splits.test, "test")):
        if not part.labels.eq(loaded.positive).any():
            raise data.DataError(
                f"{loaded.classes[loaded.positive]!r} has {total} {'row' if total == 1 else 'rows'}, none of them "
                f"for {name}: score={score} would be 0 for every candidate. Get more of them, or choose another score."
            )


def missing(run: Run) -> bool:
    """Whether a run has anything left to train; assumed so if it starts with a search."""
    if run.settings.searched:
        return True
    return bool(ledger_of([run]).missing(replace(run, chosen=run.science).trials))


def estimate(plans: Sequence[Plan], minutes: float | None) -> str:
    """How long it will take, and what to do about it."""
    total = sum(plan.seconds for plan in plans)
    if not total:
        return "everything is on record"
    text = f"about {duration(total)} on this machine, measured on a few steps of each"
    if minutes is not None:
        return f"{text}; minutes={minutes:g} stops it in time"
    return f"{text}; minutes={max(1, round(total / 240)):g} would stop it sooner" if total > LONG else text


def duration(seconds: float) -> str:
    return f"{max(1, round(seconds))} s" if seconds < 100 else f"{round(seconds / 60)} minutes"


class Turns:
    """The display's line about the candidates: done, running, time left."""

    def __init__(self, plans: Sequence[Plan]):
        self.plans, self.at, self.since = plans, 0, time.monotonic()

    def taken(self) -> Iterator[Plan]:
        for number, plan in enumerate(self.plans):
            self.at, self.since = number, time.monotonic()
            yield plan

    def line(self) -> str:
        running, *later = self.plans[self.at :]
        left = max(running.seconds - (time.monotonic() - self.since), 0) + sum(plan.seconds for plan in later)
        done = f"{display.bar(self.at, len(self.plans))}{self.at} of {len(self.plans)} candidates done"
        return f"{done}, {running.title} running, about {duration(left)} left"


def in_turn(plans: Sequence[Plan]) -> list[Plan]:
    """Cheapest first. Networks cost about the same and stay in the order of CANDIDATES."""
    networks = min((plan.seconds for plan in plans if plan.key not in CLASSICAL), default=0.0)
    return sorted(plans, key=lambda plan: plan.seconds if plan.key in CLASSICAL else networks)


def trained(plans: Sequence[Plan], deadline: float | None) -> tuple[list[Plan], list[str], list[str]]:
    """Train one plan after another; return the plans as executed, failures, and what was cut short."""
    done: list[Plan] = []
    failures: list[str] = []
    cut: list[str] = []
    turns = Turns(in_turn(plans))
    with display.shown(turns), noting_saved_trials(lambda: done):
        for plan in turns.taken():
            left = math.inf if deadline is None else deadline - time.monotonic()
            run, share = plan.run, 1.0
            if plan.seconds > left and plan.key not in CLASSICAL and not run.settings.searched:
                share = next((s for s in budget.SHORTER if plan.seconds * s <= left), 0.0)
            if left <= 0 or not share or (plan.seconds > left and share == 1.0 and done):
                cut.append(f"{plan.title} was not trained: it takes about {duration(plan.seconds)}, and time is up")
                continue
            if share < 1:
                run = budget.shorter(run, share)
                cut.append(f"{plan.title} was trained for {share:.0%} of the usual steps, to stop in time")
            run = replace(run, settings=run.settings.but(save_model=not run.settings.searched and missing(run)))
            try:
                with budget.stop_after(None if deadline is None else left):
                    failures += carry_out([run])
            except OutOfTime:
                cut.append(f"{plan.title} was stopped: time is up")
                continue
            done.append(replace(plan, run=run))
    return done, failures, cut


def candidates(plans: Sequence[Plan], measure: Measure, positive: int | None) -> list[Candidate]:
    """All decision rules of every plan that has finished trials, judged from the recorded probabilities."""
    found = []
    for plan in sorted(plans, key=lambda plan: list(CANDIDATES).index(plan.key)):
        folder = plan.run.settings.results_dir
        done = records.done(folder)
        trials = [trial for trial in plan.run.trials if done.get((trial.config.key, trial.seed)) == "done"]
        files = {trial.seed: records.path(folder, trial.config, trial.seed) for trial in trials}
        arrays = {seed: records.arrays(file) for seed, file in files.items() if file.with_suffix(".npz").exists()}
        for decision in DECISIONS if arrays else ():
            folds = plan.run.science.split.folds
            judged = [judge(one, seed, decision, measure, positive, folds) for seed, one in arrays.items()]
            found.append(Candidate(plan.key, plan.title, decision, tuple(judged)))
    return on_unseen_rows(found, measure)


def verdict(result: Comparison) -> str:
    """A table of test scores and distances to the winner, then the winner in one sentence."""
    winner = result.winner
    lines = [["", "validation", "test", "95 % interval", "winner minus this, on test"]]
    for k, candidate in enumerate(result.candidates):
        at, lead = result.interval(k), result.lead(k)
        ahead = "winner" if k == result.best else f"{lead.value:+.3f}  {lead.low:+.3f} to {lead.high:+.3f}"
        scores = [f"{candidate.validation:.3f}", f"{at.value:.3f}", f"{at.low:.3f} to {at.high:.3f}"]
        lines.append([candidate.name, *scores, ahead])
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


def own_folder(asked: Settings, loaded: data.Data, score: str, typed: str) -> Path:
    """my-f1_positive for my.csv: only a later comparison of the same file, target and score replaces it."""
    path = asked.dataset.options.get("path")
    name = Path(str(path)).expanduser().resolve().name.partition(".")[0] if path else loaded.name
    for k in count(1):
        title = f"{name or loaded.name}-{score}" if k == 1 else f"{name or loaded.name}-{k}-{score}"
        folder = Path(asked.results_dir) / "compare" / re.sub(r"[^\w.-]+", "_", title)
        file = folder / "command.txt"
        if not file.is_file() or data_words(file.read_text(encoding="utf-8", errors="replace")) == data_words(typed):
            return folder
    raise AssertionError


def data_words(command: str) -> set[str]:
    """The parts of a command line that identify its data."""
    with suppress(ValueError):  # not one of our command lines
        return {word for word in shlex.split(command) if word.startswith(("dataset.path=", "dataset.target="))}
    return set()


def save(result: Comparison, plans: Sequence[Plan], folder: Path, keep_models: str) -> None:
    """The winner's best seed, with its decision rule, to folder/model; delete the others unless keep_models=all."""
    winner, chosen = result.winner, result.winner.chosen
    plan = next(plan for plan in plans if plan.key == winner.key)
    asked = plan.run.settings
    kept = next(trial for trial in plan.run.trials if trial.seed == chosen.seed)
    source = model_folder(kept, asked.results_dir)
    if not source.exists():
        carry_out([Run.of(asked.but(save_model=True, force=False, seed=chosen.seed, trials=1))])
    names = {"argmax": "argmax", "plugin": f"plug-in for {result.score}", "expected": f"expected {result.score}"}
    model = saved.load(source, trust=needs_trust(plan))
    model.deciding(names[winner.decision], chosen.rule).save(folder / "model")
    for other in plans:
        if keep_models == "all" or not other.run.settings.save_model:
            continue
        for trial in other.run.trials:
            if trial != kept:
                shutil.rmtree(model_folder(trial, asked.results_dir), ignore_errors=True)
