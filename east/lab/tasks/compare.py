"""Which model for my data and my score? Cross-fit the candidates, choose out of fold, judge on test rows, save.

Candidates: logistic regression, gradient boosting, networks, two kinds of forest, and their stack, the mixture with the
lowest log-loss out of fold. Every row has probabilities by models that did not train on it. Candidate, mixture and
decision rule are chosen on rows that are not test rows; the test rows then say what to expect on new ones. The saved
model is the mean of all models of the winner, which together have seen every row.
"""

import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from east import decisions, metrics
from east.choices import ConfigError, choose, groups
from east.confusion import Confusion
from east.lab import bars, data, models
from east.lab.data.common import Part, assign, split_into
from east.lab.data.findings import Finding, equal_rows, findings, repeats_tied
from east.lab.experiment import candidates
from east.lab.experiment.candidates import STACK, Contest, Timetable, title
from east.lab.experiment.runs import load, split_options
from east.lab.experiment.scheduler import check_writable
from east.lab.files import result_folder
from east.lab.reporting import comparison, model_page, writers
from east.lab.reporting.comparison import Candidate, Comparison, DecidedRows, Measure
from east.lab.settings import compose
from east.lab.settings.command import Command
from east.lab.settings.settings import EnsembleSection, Settings
from east.lab.tasks import plan
from east.lab.training import crossfit, ensemble, saved
from east.lab.training.ensemble import NETWORKS, Component
from east.lab.training.population import Outcome, Trial

USUAL = ("constant", "logistic", "boosting", NETWORKS, "rf", "extratrees")  # the candidates of a table
SHOWN = ("name", "rows", "features", "balance", "positive", "imbalance", "split")
COLUMNS = 30  # columns of the data that are described one by one
FEW = 30  # test rows of the rarest class; with fewer, intervals are wide
RANKINGS = ("auc", "roc_auc", "auroc", "average_precision")


@dataclass(frozen=True)
class Score:
    """The score that candidates are judged by. measure: with 0 where the metric is undefined, as a user's may be."""

    name: str
    measure: Measure
    positive: bool  # whether it is of the positive class alone
    undefined: bool = False


@dataclass(frozen=True)
class Problem:
    """What is compared on which data.

    choosing, testing: bool [n], the rows that choose and that judge. notes: what to know of data and score.
    """

    settings: Settings
    loaded: data.Data
    contest: Contest
    choosing: Tensor
    testing: Tensor
    score: Score
    about: str
    notes: tuple[str, ...]


def main(command: Command, settings: Settings) -> int:
    """Describe, estimate, fit, judge and save, printing each result as soon as it is known."""
    started, typed = time.monotonic(), shlex.join(["east-run", *command.words])
    names, problem = described(command, settings)
    contest = problem.contest

    def left() -> float | None:
        return None if settings.minutes is None else 60 * settings.minutes - (time.monotonic() - started)

    with bars.bar("timing the candidates"):
        planned = Timetable.within(contest, names, left())
    print(f"\n{problem.score.name}: {announced(planned, settings)}", flush=True)
    if settings.dry_run:
        return 0
    check_writable(settings.results_dir)
    finished = dict(candidates.fitted(contest, planned, left(), settings.executor.name == "inline"))
    reasons = {name: reason for name, reason in finished.items() if isinstance(reason, str)}
    failed = [f"{title(name)}: {reason.splitlines()[0]}" for name, reason in reasons.items()]
    fitted = {name: made for name in names if isinstance(made := finished.get(name), Component)}
    if not fitted:
        raise RuntimeError(f"no candidate could be fitted: {'; '.join(failed)}")
    with bars.bar("judging the candidates"):
        result, weights = judged(problem, fitted)
        folder, shares = answer_folder(problem), weights[result.winner.name]
        save(problem, result.winner, ensemble.mixture(fitted, shares), folder)
        predict = predict_command(
            folder, problem.loaded.kind, trust=any("." in name and shares[name] for name in shares)
        )
        stacked = [f"{title(name)} {w:.0%}" for name, w in weights.get(title(STACK), {}).items() if w >= 0.005]
        notes = [*planned.notes, *failed, *([f"the stack: {', '.join(stacked)}"] if stacked else ())]
        every_note = [*notes, *problem.notes]
        model_page.write(folder, result, problem.loaded, contest.splits, problem.about, every_note, typed, predict)
    print("\n".join(["", writers.aligned(result.lines()), f"winner on {result.score}: {result.summary}"]))
    print(*(f"note: {note}" for note in notes), sep="\n")
    print(f"\nreport: {folder / 'report.html'}\n\npredict new rows:\n  {predict}")
    return 0


# Data and score


def described(command: Command, settings: Settings) -> tuple[list[str], Problem]:
    """Load, split and describe the data; the candidates and the problem. ConfigError or DataError for misfits."""
    if settings.split.seed == "trial" or settings.protocol.new_split or settings.split.folds:
        raise ConfigError(
            "task=compare judges all candidates on one split, in folds of its own: split.seed=trial, split.folds and "
            "protocol=btg do not fit"
        )
    if target := settings.model.options.get("target"):
        try:
            saved.check_custom(str(target))
        except data.DataError as error:
            raise ConfigError(f"task=compare saves its winner: {error}") from error
    loaded = load(settings.dataset, settings.data_dir)
    if loaded.kind == "graph":
        raise ConfigError("task=compare takes tables and images, no graphs")
    names = parse_candidates(settings.candidates, loaded.kind)
    score = parse_score(settings.score, settings.costs, loaded)
    found = [*findings(loaded)] if isinstance(loaded, data.Table) else []
    if isinstance(loaded, data.Table) and loaded.stratifiable and repeats_tied(loaded):
        loaded = replace(loaded, groups=torch.from_numpy(equal_rows(loaded)))
    if loaded.stratifiable and "split.stratify" not in command:
        settings = settings.but(split=settings.split.but(stratify=True))  # keeps rare classes in every part
    contest, test = arranged(command, settings, loaded)
    covered = torch.zeros_like(test)  # with a time, the oldest rows only train
    covered[np.concatenate([held for _, held in contest.folds])] = True
    about = data.describe(loaded, **split_options(settings.split))
    about["split"] = {"chosen on": int((covered & ~test).sum()), "tested on": int((covered & test).sum())}
    if loaded.name in ("csv", "images"):
        about["name"] = Path(loaded.path).name
    text = data.describe_text({name: about[name] for name in SHOWN})
    encoding = contest.splits.encoding
    print(text, *(f"  {line}" for line in (encoding.describe(COLUMNS) if encoding else ())), sep="\n", flush=True)
    notes = [*scarcity(loaded, test, score), *loaded.notes]
    if score.undefined:
        notes.append(f"{score.name} is undefined (0/0) if a class is never predicted; such a score counts as 0")
    with bars.bar("checking groups and times"):
        notes += with_effects(contest, found, loaded, score)
    for note in notes:
        print(f"note: {note}", flush=True)
    return names, Problem(settings, loaded, contest, covered & ~test, covered & test, score, text, tuple(notes))


def arranged(command: Command, settings: Settings, loaded: data.Data) -> tuple[Contest, Tensor]:
    """The contest on all rows, and which of them are test rows, bool [n]."""
    *_, test_rows = assign(loaded, **split_options(settings.split))
    everything = np.arange(len(loaded.labels))
    splits = split_into(loaded, (everything, everything[:0], np.sort(test_rows)))
    splits = models.for_network(splits, settings.model)
    section = settings.ensemble.but(folds=3 if len(everything) > candidates.MANY else settings.ensemble.folds)
    folds = ensemble.divided(section, splits.train, settings.seed)
    contest = Contest(command, splits, folds, ensemble.independent(splits.train), settings.device, settings.seed)
    return contest, torch.from_numpy(np.isin(everything, test_rows))


def with_effects(contest: Contest, found: Sequence[Finding], loaded: data.Data, score: Score) -> Iterator[str]:
    """The findings as sentences, with what a suggested group or time would change unless that takes long."""
    part, without = contest.splits.train, None
    raw = loaded.raw if isinstance(loaded, data.Table) else None
    for finding in found:
        column = None if raw is None or finding.column is None else raw[finding.column]
        tried = finding.kind in ("group", "time") and contest.rows <= candidates.MANY
        if not tried or column is None or column.hasnans:  # dataset.group and dataset.time refuse gaps
            yield finding.message
            continue
        values = torch.tensor(pd.factorize(column)[0] if finding.kind == "group" else column.to_numpy(float))
        other = replace(part, **{"groups" if finding.kind == "group" else "time": values})
        without = quick_score(contest, part, score) if without is None else without
        both = f"{without:.3f} without, {quick_score(contest, other, score):.3f} with it"
        yield f"{finding.message} (gradient boosting: {score.name} {both})"


def quick_score(contest: Contest, pool: Part, score: Score) -> float:
    """The score of gradient boosting, cross-fitted in three folds of the rows."""
    folds = ensemble.divided(EnsembleSection(folds=3), pool, contest.seed)
    p = torch.from_numpy(replace(contest, folds=folds).fit("boosting").held_out)
    rows = ~p.isnan().any(1)
    rule = decisions.expected(p[rows], score.measure, contest.splits.positive)
    return float(score.measure(Confusion.from_predictions(rule.decide(p[rows]), pool.labels[rows], p.shape[1])))


def scarcity(loaded: data.Data, test: Tensor, score: Score) -> Iterator[str]:
    """A note if few test rows are of some class; DataError if a part has none of the class that is scored."""
    counts = torch.bincount(loaded.labels[test], minlength=len(loaded.classes)).tolist()
    if score.positive and loaded.positive is not None:
        of_test, of_all = counts[loaded.positive], int((loaded.labels == loaded.positive).sum())
        if of_test in (0, of_all):
            raise data.DataError(
                f"{loaded.classes[loaded.positive]!r}: {of_test} of {of_all} rows are for testing, so "
                f"score={score.name} cannot be estimated. Add rows, or choose another score."
            )
    if min(counts) < FEW:
        rarest = loaded.classes[counts.index(min(counts))]
        yield f"rows of {rarest!r} among the test rows: {min(counts)}; expect wide intervals"


def parse_score(score: str | None, costs: Any, loaded: data.Data) -> Score:
    """The score of `score=…`: any name of METRICS, with or without its average (recall_macro), or a dotted path.

    Without an average, f1, recall and others are those of the positive class, or macro if there is none.
    """
    score = score or ("f1" if costs is None else "cost")
    if score in RANKINGS:
        raise ConfigError(
            f"score={score} is a ranking metric and cannot choose decisions; choose another score, such as f1 or mcc "
            "(AUROC and average precision are reported anyway)"
        )
    if score == "cost" and costs is None:
        raise ConfigError("score=cost needs costs=[[0,1],[10,0]] or costs=FILE, with true classes in rows")
    if score.endswith(("_pos", "_positive")) and loaded.positive is None:
        raise ConfigError(f"score={score} needs a positive class: two classes, or dataset.positive=…")
    names = np.array(loaded.classes, dtype=object)
    options = {"costs": cost_matrix(costs, len(names))} if score == "cost" else {}
    try:
        averaged = metrics.parse(score)[1].get("average", "positive") != "positive"
        positive = None if loaded.positive is None or averaged else names[loaded.positive]
        judge = crossfit.judge_for(score, options, positive, names, np.bincount(loaded.labels))
    except ValueError as error:
        raise ConfigError(f"score={score}: {error}") from error
    name = score if "." in score else judge.name
    of_positive = judge.parameters.get("average") == "positive"
    return Score(name, decisions.defined(judge.metric), of_positive, undefined(score, judge.metric, len(names)))


def undefined(score: str, measure: Measure, classes: int) -> bool:
    """True if a metric has no value where a class is never predicted; ConfigError if it is not a metric at all."""
    constant = (one_hot(torch.full((classes,), k), classes).double() for k in (0, classes - 1))
    try:
        values = [measure(Confusion.from_matrix(counts)) for counts in (torch.eye(classes).double(), *constant)]
        return any(bool(value.isnan().any()) for value in values)
    except Exception as error:  # it is the user's code
        raise ConfigError(
            f"score={score}: expected a function of a Confusion that returns a tensor; {type(error).__name__}: {error}"
        ) from error


def cost_matrix(costs: Any, classes: int) -> list[list[float]]:
    """Costs [d, d] as typed, or from a file of d lines with d numbers each."""
    try:
        matrix = np.loadtxt(costs, delimiter=",", ndmin=2) if isinstance(costs, str) else np.array(costs, dtype=float)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"costs={costs}: {error}") from error
    if matrix.shape != (classes, classes) or not np.isfinite(matrix).all():
        raise ConfigError(
            f"costs: expected {classes} rows of {classes} numbers, one row for each true class, got {matrix.tolist()}"
        )
    return matrix.tolist()


# Candidates


def parse_candidates(names: Sequence[str] | None, kind: str) -> list[str]:
    """The names of `candidates=[…]`: components of the stack, losses of networks, or classifiers by dotted path."""
    if names is None:
        return [name for name in USUAL if kind == "table" or name in ("constant", NETWORKS)]
    if not names:
        raise ConfigError(f"candidates=[]: expected at least one of {', '.join(USUAL)}")
    losses = [name for name in groups()["loss"] if not compose.is_classical(name)]
    for name in names:
        if "." in name:
            ensemble.estimator_named(name).unfitted(0)  # fails before training, if it does
        else:
            choose("candidate", name, [*USUAL, *losses], "rf" if "forest" in name else None)
        if kind != "table" and name not in ("constant", NETWORKS, *losses):
            raise ConfigError(f"candidates: {name} takes no {kind}s; networks do")
    return list(dict.fromkeys(("constant", *names)))  # so that there is an answer


def announced(planned: Timetable, settings: Settings) -> str:
    """The candidates and how long they take; more than a day must be confirmed."""
    listed = ", ".join(f"{title(name)} ({bars.duration(seconds)})" for name, seconds in planned.seconds.items())
    total = candidates.at_once(planned.seconds)
    line = f"{listed}; about {bars.duration(total)} on this machine, estimated from short fits of each"
    if settings.minutes is not None:
        return f"{line}, limited by minutes={settings.minutes:g}"
    if total > plan.MINUTE:
        line += f"; minutes={max(1, round(total / 240)):g} would stop it sooner"
    if total > plan.DAY:
        plan.confirm(line, settings.yes)
    return line


# Answer


def judged(problem: Problem, fitted: dict[str, Component]) -> tuple[Comparison, dict[str, dict[str, float]]]:
    """The judged candidates, and by title the weights of the components that each consists of."""
    part, measure, positive = problem.contest.splits.train, problem.score.measure, problem.loaded.positive
    labels, choosing = part.labels, problem.choosing
    every = np.stack([component.held_out for component in fitted.values()])
    share = torch.bincount(labels[choosing], minlength=every.shape[-1]) / choosing.sum()
    every[np.isnan(every).any(-1)] = share.numpy()  # rows that all trees of a small forest have drawn
    if "constant" in fitted:
        every[[*fitted].index("constant")] = share.numpy()  # its shares in the folds tell what was left out
    weights = {title(name): {name: 1.0} for name in fitted}
    mixed = [*every]
    if len(fitted) > 1:
        mixing = crossfit.mixture_weights(every[:, choosing, labels[choosing]])
        weights = {title(STACK): dict(zip(fitted, mixing.tolist(), strict=True))} | weights
        mixed = [np.tensordot(mixing, every, 1), *every]
    found, classes = [], tuple(problem.loaded.classes)
    for name, p in zip(weights, map(torch.from_numpy, mixed), strict=True):
        rule = decisions.expected(p[choosing], measure, positive)
        of_rows = ((rows, None if part.groups is None else part.groups[rows]) for rows in (choosing, problem.testing))
        halves = [DecidedRows(p[rows], labels[rows], rule, classes, positive, groups) for rows, groups in of_rows]
        found.append(Candidate(name, *halves))
    return comparison.compared(problem.score.name, measure, found), weights


def predict_command(folder: Path, kind: str, trust: bool = False) -> str:
    """The shell command that predicts new rows with the winner."""
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


def save(problem: Problem, winner: Candidate, mixture: ensemble.Mixture, folder: Path) -> None:
    """Save the winner with its decision rule to folder/model."""
    trial = Trial(problem.contest.config(NETWORKS), problem.settings.seed)
    outcome = Outcome(trial, fitted=mixture)
    model = saved.from_outcome(outcome, problem.loaded, problem.contest.splits)
    model.deciding(f"expected {problem.score.name}", winner.test.rule).save(folder / "model")
