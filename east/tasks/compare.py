"""Which loss for my data and my score? Train the candidates, choose on validation, report on test, save the winner.

Candidates: the EAST loss of the score, cross-entropy, AnyLoss of the score, a random forest; each deciding by argmax
and by plug-in, a threshold (or class weights) tuned for the score. All have the same split and their own seeds.

The winner is chosen on the validation rows and reported on the test rows, which nobody has seen. A plug-in rule is
tuned on validation, so its validation score would flatter it: it is cross-fitted instead, tuned on four fifths and
applied to the rest, five times. Networks also stop early on validation; the forest has no such advantage.
Intervals are 95 % bootstrap percentiles over test rows and seeds: what to expect of other rows of the same kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from east import data, metrics
from east.choices import ConfigError
from east.confusion import Confusion
from east.data.common import stratified
from east.experiment import records
from east.experiment.ledger import model_folder
from east.experiment.runs import Run, load, split_options
from east.experiment.scheduler import carry_out
from east.reporting import writers
from east.settings.command import Command
from east.settings.compose import settings
from east.settings.sections import Loss, Split
from east.settings.settings import Settings
from east.training import decisions, saved

LOSSES = {"f1": "f1", "accuracy": "accuracy", "mcc": "mcc"}  # metric -> its loss; any other metric's is `metric`
TITLES = {"ce": "cross-entropy", "anyloss": "AnyLoss", "rf": "random forest"}
FOLDS = 5
RESAMPLES = 1000
FEW = 30  # rows of the rarest class, below which scores are rough
SHOWN = ("name", "rows", "features", "balance", "positive", "imbalance", "split")
COLUMNS = 30  # that are described one by one
HIDDEN = [256, 128]  # a smaller net than the papers': no worse on tables of such sizes, in half the time
AT_ONCE = 1 << 24  # weights of a bootstrap that are in memory

Measure: TypeAlias = Callable[[Confusion], Tensor]
Metric: TypeAlias = dict[str, Any]  # `metric`, and its parameters


@dataclass(frozen=True)
class Judged:
    """One trial under a decision rule, by its validation and its test rows."""

    rule: decisions.Rule
    validation: float
    test: float
    predicted: Tensor  # int64 [n], of the test rows
    labels: Tensor


@dataclass(frozen=True)
class Candidate:
    """A loss with a decision rule."""

    run: Run
    title: str
    decision: str  # argmax | plugin
    trials: list[Judged]  # those that are done, and
    seeds: list[int]

    @property
    def name(self) -> str:
        return f"{self.title} + plug-in" if self.decision == "plugin" else self.title

    @property
    def validation(self) -> float:
        return float(np.mean([trial.validation for trial in self.trials]))

    @property
    def test(self) -> float:
        return float(np.mean([trial.test for trial in self.trials]))


def main(command: Command) -> int:
    """Describe, train, judge, save, and print each as it is known."""
    if {"loss", "losses", "datasets"} & set(command.values):
        raise ConfigError("task=compare takes one dataset=… and a score=…; the losses follow from the score")
    command = command if "preset" in command else command.but(preset="compare")
    first = settings(command)
    if first.split.seed == "trial" or first.protocol.new_split:
        raise ConfigError("task=compare judges all losses on one split; split.seed=trial and protocol=btg have many")
    loaded = load(first.dataset, first.data_dir)
    if loaded.stratifiable and "split.stratify" not in command:
        command = command.but({"split.stratify": True})  # a rare class must not be missing from a part
    if loaded.kind == "table" and not {"model", "model.hidden"} & set(command.values):
        command = command.but({"model.hidden": HIDDEN})
    score, metric = wanted_score(first.score, loaded)
    asked = [aimed(settings(command.but(loss)), metric) for loss in candidate_losses(metric, loaded.kind)]
    print(description(loaded, asked[0].split), flush=True)
    runs = [Run.of(one) for one in asked]
    print(f"\n{score}: {len(runs)} losses, {asked[0].trial_count} seeds each, preset={first.preset.name}", flush=True)
    if first.dry_run:
        return 0
    failures = carry_out(runs)
    measure = partial(metrics.resolve(metric["metric"]), **{n: v for n, v in metric.items() if n != "metric"})
    found = candidates(runs, measure, score, loaded.positive)
    if not found:
        raise RuntimeError(f"no candidate could be trained: {failures[0] if failures else 'none has a record'}")
    winner, text = verdict(found, measure, score, len(loaded.classes))
    folder = save(winner, score)
    print("\n".join(["", text, *collapses(found), f"saved: {folder}\n\npredict new rows:"]))
    if loaded.kind == "graph":
        print(f'  east.load("{folder}").predict_proba(graphs)')
    else:
        rows = "new.csv" if loaded.kind == "table" else "FOLDER"
        print(f"  east-run task=predict checkpoint={folder} input={rows} output=predictions.csv")
    return 1 if failures else 0


def wanted_score(score: str | None, loaded: data.Data) -> tuple[str, Metric]:
    """The score's name, and the metric with its parameters: f1_pos, f1_macro, a name of METRICS or a dotted path."""
    score = score or ("f1_macro" if loaded.positive is None else "f1_pos")
    if score == "f1_pos":
        if loaded.positive is None:
            raise ConfigError(
                "score=f1_pos needs a positive class: two classes, or dataset.positive=…; or score=f1_macro"
            )
        chosen = {"metric": "f1", "average": "positive"}
        return score, chosen if loaded.positive == 1 else {**chosen, "positive": loaded.positive}
    if score == "f1_macro":
        return score, {"metric": "f1", "average": "macro"}
    metrics.resolve(score)
    return score, {"metric": score}


def candidate_losses(metric: Metric, kind: str) -> list[dict[str, str]]:
    """What east-run would be told for each candidate loss; a forest takes no graphs."""
    name = metric["metric"]
    matched = {"loss": LOSSES[name]} if name in LOSSES else {"loss": "metric", "loss.metric": name}
    return [matched, {"loss": "ce"}, {"loss": "anyloss"}, *([{"loss": "rf"}] if kind != "graph" else [])]


def aimed(settings: Settings, metric: Metric) -> Settings:
    """Settings whose loss, if it is a metric's, is that of the score; models and probabilities are kept."""
    loss = settings.loss
    if "metric" in loss.options:
        kept = {n: v for n, v in loss.options.items() if n not in ("metric", "average", "positive")}
        loss = Loss(name=loss.name, _target_=loss.target, **kept, **metric)
    return settings.but(loss=loss, save_model=True, keep_probabilities=True)


def description(loaded: data.Data, split: Split) -> str:
    """What the data are, column by column, and what about them will limit the answer."""
    about = data.describe(loaded, **split_options(split))
    lines = [data.describe_text({name: about[name] for name in SHOWN})]
    splits = data.split(loaded, **split_options(split))
    lines += [f"  {line}" for line in (splits.encoding.describe(COLUMNS) if splits.encoding else ())]
    rows = splits.val.labels.numel()
    if rows < 2:
        raise data.DataError(
            f"{loaded.name} has too few rows to compare: {len(loaded.labels)} leave {rows} for validation, where a "
            "plug-in rule is tuned on some and judged on the others; expected at least 2."
        )
    for part in ("val", "test"):
        counts = torch.bincount(getattr(splits, part).labels.flatten(), minlength=len(loaded.classes))
        rarest = int(counts.argmin())
        if counts[rarest] < FEW:
            lines.append(
                f"note: only {int(counts[rarest])} rows of {loaded.classes[rarest]!r} for {part}; expect wide intervals"
            )
    return "\n".join(lines)


def candidates(runs: Sequence[Run], measure: Measure, score: str, positive: int | None) -> list[Candidate]:
    """Both decision rules of every run that has finished trials, judged from the recorded probabilities."""
    folder = runs[0].settings.results_dir
    done = records.done(folder)
    found = []
    for run in runs:
        trials = [trial for trial in run.trials if done.get((trial.config.key, trial.seed)) == "done"]
        files = {trial.seed: records.path(folder, trial.config, trial.seed) for trial in trials}
        seeds = [seed for seed, file in files.items() if file.with_suffix(".npz").exists()]
        arrays = [records.arrays(files[seed]) for seed in seeds]
        title = TITLES.get(run.science.loss.name, f"EAST {score}")
        for decision in ("argmax", "plugin") if seeds else ():
            judged = [judge(one, decision, measure, positive) for one in arrays]
            found.append(Candidate(run, title, decision, judged, seeds))
    return found


def judge(arrays: Mapping[str, np.ndarray], decision: str, measure: Measure, positive: int | None) -> Judged:
    """What a trial's probabilities are worth under a decision rule."""
    val, test, val_labels, test_labels = (
        torch.from_numpy(arrays[f"{part}_{kind}"]) for kind in ("probabilities", "labels") for part in ("val", "test")
    )
    if decision == "argmax":
        rule: decisions.Rule = decisions.Argmax()
        on_val = rule.decide(val)
    else:
        rule = decisions.tuned(val, val_labels, measure, positive)
        on_val = cross_fitted(val, val_labels, measure, positive)
    predicted = rule.decide(test)
    classes = val.shape[-1]
    validation = measure(Confusion.from_predictions(on_val, val_labels, classes))
    tested = measure(Confusion.from_predictions(predicted, test_labels, classes))
    return Judged(rule, float(validation), float(tested), predicted, test_labels)


def cross_fitted(probabilities: Tensor, labels: Tensor, measure: Measure, positive: int | None) -> Tensor:
    """Plug-in decisions [n], each by a rule that was tuned without its row."""
    random = np.random.RandomState(0)
    order = torch.from_numpy(stratified(labels.numpy(), len(labels), random))  # class by class, shuffled within
    fold = torch.empty_like(labels)
    fold[order] = torch.arange(len(labels)) % FOLDS
    decided = torch.empty_like(labels)
    for k in range(FOLDS):
        inside = fold == k
        rule = decisions.tuned(probabilities[~inside], labels[~inside], measure, positive)
        decided[inside] = rule.decide(probabilities[inside])
    return decided


def resampled(found: Sequence[Candidate], measure: Measure, classes: int) -> np.ndarray:
    """[candidates, RESAMPLES]: mean test scores, had test rows and seeds been drawn anew; the same rows for all."""
    trials = [trial for candidate in found for trial in candidate.trials]
    rows, random = len(trials[0].labels), np.random.default_rng(0)
    at_once = max(1, AT_ONCE // rows)
    scores = []
    for start in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - start)
        drawn = random.integers(rows, size=(count, rows)) + rows * np.arange(count)[:, None]
        weights = torch.from_numpy(np.bincount(drawn.ravel(), minlength=count * rows).reshape(count, rows)).double()
        scores.append(torch.stack([measure(weighted(trial, weights, classes)) for trial in trials]))
    values, result, first = torch.cat(scores, dim=1).numpy(), [], 0
    for candidate in found:
        own = values[first : first + len(candidate.trials)]
        result.append(np.take_along_axis(own, random.integers(len(own), size=own.shape), axis=0).mean(0))
        first += len(own)
    return np.array(result)


def weighted(trial: Judged, weights: Tensor, classes: int) -> Confusion:
    """The confusion [b] of the test rows, counted `weights` [b, n] times."""
    predicted, actual = (one_hot(index, classes).double() for index in (trial.predicted, trial.labels))
    cells = trial.labels * classes + trial.predicted

    def matrix() -> Tensor:
        counts = weights.new_zeros(len(weights), classes**2).index_add_(1, cells, weights)
        return counts.unflatten(-1, (classes, classes))

    return Confusion(
        weights @ (predicted * actual),
        weights @ actual,
        weights @ predicted,
        matrix,
    )


def verdict(found: Sequence[Candidate], measure: Measure, score: str, classes: int) -> tuple[Candidate, str]:
    """The winner on validation, and the table that says how it did on test, and how far ahead of whom."""
    samples = resampled(found, measure, classes)
    best = max(range(len(found)), key=lambda k: found[k].validation)
    winner = found[best]
    lines = [["", "validation", "test", "95 % interval", "winner's lead on test"]]
    behind = []
    for k, candidate in enumerate(found):
        low, high = np.quantile(samples[k], [0.025, 0.975])
        lead = "winner"
        if k != best:
            least, most = np.quantile(samples[best] - samples[k], [0.025, 0.975])
            lead = f"{winner.test - candidate.test:+.3f}  {least:+.3f} to {most:+.3f}"
            behind += [candidate.name] if least > 0 else []
        scores = [f"{candidate.validation:.3f}", f"{candidate.test:.3f}", f"{low:.3f} to {high:.3f}"]
        lines.append([candidate.name, *scores, lead])
    low, high = np.quantile(samples[best], [0.025, 0.975])
    others = len(found) - 1 - len(behind)
    clear = f"clearly ahead of {', '.join(behind)}" if behind else "not clearly ahead of any other"
    clear += f"; not clearly of the other {others}" if behind and others else ""
    seeds = f"means of {len(winner.trials)} seeds" if len(winner.trials) > 1 else "one seed"
    return winner, "\n".join(
        [
            writers.aligned(lines),
            f"{seeds}; chosen on validation (plug-in cross-fitted), reported on test; "
            "intervals: bootstrap over test rows and seeds",
            f"winner on {score}: {winner.name}, test {winner.test:.3f} ({low:.3f} to {high:.3f}); {clear}",
        ]
    )


def collapses(found: Sequence[Candidate]) -> list[str]:
    """A line for every metric loss that has given up on all classes but one, as they may where the others are rare."""
    notes = []
    for candidate in found:
        config, trials = candidate.run.science, candidate.trials
        one_class = sum(len(trial.predicted.unique()) == 1 for trial in trials)
        if one_class and candidate.decision == "argmax" and "metric" in config.loss.options:
            advice = "" if config.protocol.warmup else "; try protocol.warmup=10, cross-entropy first"
            notes.append(
                f"note: {candidate.name} predicts one class only in {one_class} of {len(trials)} trials{advice}"
            )
    return notes


def save(winner: Candidate, score: str) -> Path:
    """The winner's best seed on validation, with its decision rule; the folder."""
    k = max(range(len(winner.trials)), key=lambda k: winner.trials[k].validation)
    trial = next(trial for trial in winner.run.trials if trial.seed == winner.seeds[k])
    folder = model_folder(trial, winner.run.settings.results_dir)
    if winner.decision == "argmax":
        return folder
    model = saved.load(folder).deciding(f"plug-in for {score}", winner.trials[k].rule.to_json())
    return model.save(folder.with_name(f"{folder.name}-plugin_{score.replace('.', '_')}"))
