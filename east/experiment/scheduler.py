"""Plan, run what is missing, select, run the trials: the only module that puts the others together.

A run is a dataset, a loss, and what protocol and preset prescribe for them. Its search and its trials are just trials:
a resolved scientific config and a seed, each identified by a hash and recorded in one file. Whatever has a record is
done; the same command, issued again, does the rest.
"""

import json
import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from east import data, losses, models
from east.choices import ConfigError
from east.data.common import assign
from east.experiment import executors, protocols, records
from east.experiment.settings import trains_networks
from east.training import devices, engine, evaluation, population, saved
from east.training.population import Trial
from east.training.provenance import provenance

STACKED = ("dataset", "split", "model", "loss", "protocol")
PASSED_ON = ("results_dir", "data_dir", "device", "force", "save_model", "compile", "tensorboard")


@dataclass
class Run:
    """One dataset and one loss under a protocol: the complete config, and its scientific part before any search."""

    config: dict[str, Any]
    plain: dict[str, Any]
    chosen: dict[str, Any] | None = None  # the scientific config of the trials, once the search is on record

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Run":
        """A run whose data is there and whose parts fit together; ConfigError or DataError otherwise."""
        loaded = load(config["dataset"], config["data_dir"])
        assign(loaded, **fixed_split(config["split"]))  # refuses what these data cannot be split by
        check_parts(config, loaded)
        return cls(config, protocols.scientific(config, loaded.fingerprint, loaded.name))

    @property
    def name(self) -> str:
        return f"{self.plain['dataset']['name']} {self.plain['loss']['name']}"

    def stages(self, ledger: "Ledger") -> Iterator[list[Trial]]:
        """The search round by round, then the trials. What comes next is asked for when all before is on record.

        Ends early where a search is incomplete, because work was lost, or no point of it could be trained.
        """
        points = protocols.grid(self.config) if self.searched else [{}]
        for epochs, count in protocols.rungs(self.config):
            configs = [protocols.at(self.plain, point, epochs) for point in points[:count]]
            stage = [
                Trial(config, seed, "search") for config in configs for seed in protocols.search_seeds(self.config)
            ]
            yield stage
            if ledger.missing(stage):
                return
            position = {records.key(config): k for k, config in enumerate(configs)}
            points = [points[position[key]] for key in ledger.ranking(position, self.config["selection"])]
            if not points:
                return
        self.chosen = protocols.at(self.plain, points[0])
        yield self.trials

    @property
    def searched(self) -> bool:
        return self.config["search"]["name"] != "none"

    @property
    def trials(self) -> list[Trial]:
        """The trials of the final stage; none before the search has chosen."""
        return [Trial(self.chosen, seed) for seed in protocols.seeds(self.config)] if self.chosen else []

    @property
    def checkpoints(self) -> Path:
        return Path(self.config["results_dir"]) / "runs" / "checkpoints" / records.family(self.plain)


class Ledger:
    """What is on record in a results folder: `found` beforehand, the rest read from its file when it is asked for.

    With force=true only what this command has ended counts.
    """

    def __init__(self, config: Mapping[str, Any], found: Iterable[Mapping[str, Any]] = ()):
        self.results_dir, self.force, self.models = config["results_dir"], config["force"], config["save_model"]
        self.probabilities = config.get("probabilities", False)  # task=compare needs those of every trial
        self.found = {} if self.force else {(record["key"], record["seed"]): record for record in found}
        self.ended: set[tuple[str, int]] = set()

    def find(self, trial: Trial) -> Mapping[str, Any] | None:
        """The record of a trial, if it has a readable one."""
        identity = records.key(trial.config), trial.seed
        if identity not in self.found and (not self.force or identity in self.ended):
            with suppress(FileNotFoundError, *records.UNREADABLE):
                record = records.read(records.path(self.results_dir, trial.config, trial.seed))
                self.found[identity] = vars(record) | {"key": record.key}
        return self.found.get(identity)

    def missing(self, trials: Iterable[Trial]) -> list[Trial]:
        """Trials without a record, or without the model or the probabilities that this command needs.

        Failures are results too: the same trial would fail again.
        """

        def complete(trial: Trial) -> bool:
            record = self.find(trial)
            if record is None or record["status"] == "failed" or trial.stage == "search":
                return record is not None
            file = records.path(self.results_dir, trial.config, trial.seed)
            if self.probabilities and not file.with_suffix(".npz").exists():
                return False
            return not self.models or model_folder(trial, self.results_dir).exists()

        return [trial for trial in trials if not complete(trial)]

    def end(self, trials: Iterable[Trial]) -> None:
        self.ended |= {(records.key(trial.config), trial.seed) for trial in trials}

    def ranking(self, keys: Iterable[str], rule: str) -> list[str]:
        """Keys of searched points from best to worst; those that could not be trained are left out."""
        found = [r for r in self.found.values() if r["key"] in keys and r["stage"] == "search"]
        order = []
        while (best := records.select(found, rule)) is not None:
            order.append(best)
            found = [record for record in found if record["key"] != best]
        return order


def model_folder(trial: Trial, results_dir: str | Path) -> Path:
    """Where save_model keeps what the trial has trained."""
    name = f"{trial.config['dataset']['name']}-{trial.config['loss']['name']}"
    return Path(results_dir) / "models" / f"{name}-{records.key(trial.config)}-seed{trial.seed}"


def load(dataset: Mapping[str, Any], data_dir: str | None) -> data.Data:
    """The data of a config's dataset section; the last is kept, since the next job mostly wants the same."""
    name = dataset["name"].partition("-")[0]  # keel-abalone19 is set abalone19 of keel
    options = {key: dataset[key] for key in (*data.options(name), "limit") if key in dataset}
    return _load(name, data_dir, json.dumps(options))


@lru_cache(maxsize=1)
def _load(name: str, data_dir: str | None, options: str) -> data.Data:
    return data.load(name, data_dir, **json.loads(options))


def split(loaded: data.Data, trial: Trial) -> data.Splits:
    """The split of a trial: the same for all, or one for each seed."""
    wanted = dict(trial.config["split"])
    seed = wanted.pop("seed")
    return data.split(loaded, seed=trial.seed if seed == "trial" else seed, **wanted)


def fixed_split(split: Mapping[str, Any]) -> dict[str, Any]:
    """A config's split section with a number for its seed: 0 where every trial has its own."""
    return {**split, "seed": 0 if split["seed"] == "trial" else split["seed"]}


def check_parts(config: Mapping[str, Any], loaded: data.Data) -> None:
    """Build network and loss once: what does not exist, or does not fit these classes, is refused before any work."""
    if not trains_networks(config["loss"]):
        return
    count, model = len(loaded.classes), config["model"]
    if model.get("outputs") == 1 and count > 2:
        raise ConfigError(f"model={model['name']} has a single output, for two classes; {loaded.name} has {count}")
    try:
        devices.pick_device(config["device"])
        models.build(model, loaded.inputs.shape[1:], count, config["hyper"]["dropout"])
        loss = losses.build(config["loss"], loaded.classes, torch.arange(count), loaded.positive)
        loss(torch.zeros(count, model.get("outputs") or count), torch.arange(count))
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigError(str(error)) from error


def ledger_of(runs: Sequence[Run]) -> Ledger:
    return Ledger(runs[0].config, records.scan(runs[0].config["results_dir"]))


def carry_out(runs: Sequence[Run]) -> list[str]:
    """Search, select and train every run; return a line for each thing that went wrong, which is shown at once as well.

    All runs share one queue. The trials of one begin when its own search has ended, while others still search.
    """
    config = runs[0].config
    ledger, queue, left, failures = ledger_of(runs), deque(), Counter(), []
    executor = chosen_executor(runs)
    stages = [run.stages(ledger) for run in runs]
    bar = tqdm(total=sum(protocols.planned(run.config) for run in runs), unit="trial", smoothing=0, disable=None)

    def proceed(number: int) -> None:
        """Queue the next stage of a run that is not on record."""
        for stage in stages[number]:
            todo = ledger.missing(stage)
            bar.update(len(stage) - len(todo))
            if not bar.disable:  # the time left is estimated from what this command does
                bar.initial += len(stage) - len(todo)
            if todo:
                jobs = jobs_of(stage, todo, runs[number], executor)
                queue.extend({**job, "run": number} for job in jobs)
                left[number] = len(jobs)
                return
        if runs[number].chosen and not ledger.missing(runs[number].trials):
            shutil.rmtree(runs[number].checkpoints, ignore_errors=True)  # of groupings that never came back

    with bar:
        for number in range(len(runs)):
            proceed(number)
        if queue:
            check_writable(config["results_dir"])
        for job, result in executors.execute(run_job, queue, executor):
            if isinstance(result, executors.Lost):
                result = [f"{runs[job['run']].name}: {result.reason}"]
            else:
                ledger.end(Trial(**trial) for trial in job["trials"])
            failures += result
            for line in result:
                tqdm.write(f"failed: {line}", file=sys.stderr)
                check_writable(config["results_dir"])
            bar.update(len(job["trials"]))
            left[job["run"]] -= 1
            if not left[job["run"]]:
                proceed(job["run"])
    return failures


def check_writable(results_dir: str) -> None:
    """OSError now rather than after hours of training."""
    Path(results_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=results_dir) as file:
        file.write(bytes(1 << 16))


def chosen_executor(runs: Sequence[Run]) -> dict[str, Any]:
    """The executor with its slots. `auto` takes processes where they have enough work: to start one costs seconds."""
    config, executor = runs[0].config, dict(runs[0].config["executor"])
    if executor["name"] in ("auto", "processes"):
        available, wanted = executors.slots(config["device"]), executor.pop("slots")
        places = [available[k % len(available)] for k in range(wanted or len(available))]
        if executor["name"] == "auto":
            much = any(run.config["preset"]["name"] != "quick" for run in runs)
            executor["name"] = "processes" if much and len(places) > 1 else "inline"
        if executor["name"] == "processes":
            executor["slots"] = places
    if executor["name"] == "submitit":
        executor["folder"] = str(Path(config["results_dir"]).resolve() / "sweeps" / "submitit")
    return executor


def jobs_of(
    stage: Sequence[Trial], todo: Sequence[Trial], run: Run, executor: Mapping[str, Any]
) -> list[executors.Job]:
    """Trials that can be stacked, in portions: one population each, and small enough that every slot has work.

    The whole stage is cut, then what is done is left out: so a command that was interrupted finds its checkpoints.
    """
    config = run.config
    options = {name: config[name] for name in PASSED_ON} | {"progress": executor["name"] == "inline"}
    options |= {
        "probabilities": config.get("probabilities", False),
        "results_dir": str(Path(config["results_dir"]).resolve()),
        "checkpoints": str(run.checkpoints.resolve()),
    }
    places = len(executor.get("slots", ())) or (1 if executor.get("gpus") else executor.get("parallel", 1))
    device = torch.device("cuda") if executor.get("gpus") else devices.pick_device(config["device"])
    groups: dict[str, list[Trial]] = {}
    for trial in stage:
        alike = [trial.config[name] for name in STACKED]
        groups.setdefault(repr((alike, trial.config["hyper"].get("batch_size"))), []).append(trial)
    jobs = []
    for group in sorted(groups.values(), key=lambda g: g[0].config["hyper"].get("batch_size", 0)):  # longest first
        size = min(engine.population_size(group[0].config, device) or len(group), -(-len(group) // places))
        for k in range(0, len(group), size):
            members = [vars(trial) for trial in group[k : k + size] if trial in todo]
            if members:
                jobs.append({"trials": members, **options})
    return jobs


def run_job(job: executors.Job) -> list[str] | executors.Lost:
    """Train one population, record each of its trials, return a line for each that failed. Runs in any process."""
    trials = [Trial(**trial) for trial in job["trials"]]
    try:
        trials = Ledger(job).missing(trials)
        return train_and_keep(trials, job) if trials else []
    except Exception as error:  # whatever it is, the other jobs go on
        if os.environ.get("EAST_DEBUG"):
            traceback.print_exc()
        return executors.Lost(f"{type(error).__name__}: {error}")


def train_and_keep(trials: Sequence[Trial], job: executors.Job) -> list[str]:
    """A checkpoint goes when all of its trials are on record."""
    dataset = trials[0].config["dataset"]
    loaded = load(dataset, job["data_dir"])
    if loaded.fingerprint != dataset.get("fingerprint", loaded.fingerprint):
        raise data.DataError(f"{loaded.name} has changed since this command began: start it again")
    splits = [split(loaded, trial) for trial in trials]
    lines, left = [], iter(splits)
    for outcomes, checkpoint in trained(trials, splits, job):
        for outcome in outcomes:
            try:
                line = keep(outcome, loaded, next(left), job)
            except Exception as error:  # as when a disk is full; the others are kept all the same
                line = f"{loaded.name} {outcome.trial.config['loss']['name']}: {type(error).__name__}: {error}"
                checkpoint = None
            lines += [line] if line else []
        if checkpoint:
            checkpoint.unlink(missing_ok=True)
    return lines


def trained(
    trials: Sequence[Trial], splits: Sequence[data.Splits], job: executors.Job
) -> Iterator[tuple[list[population.Outcome], Path | None]]:
    if not trains_networks(trials[0].config["loss"]):
        from east.training import classical

        return (([classical.fit(t, s)], None) for t, s in zip(trials, splits, strict=True))
    return engine.train_in_turn(
        trials,
        splits,
        device=job["device"],
        checkpoint=Path(job["checkpoints"]),
        progress=job["progress"],
        tensorboard=Path(job["results_dir"]) / "tensorboard" if job["tensorboard"] else None,
        compile=job["compile"],
    )


def keep(outcome: population.Outcome, loaded: data.Data, splits: data.Splits, job: executors.Job) -> str | None:
    """Evaluate and record an outcome, save its model if asked to; the line that tells its failure, if it is one."""
    trial, judged, arrays = outcome.trial, {}, None
    if outcome.status == "done":
        decisions, own = trial.config["decisions"], None
        if trial.config["loss"]["name"] == "metric":  # which may be anyone's: no other score tells how it did
            loss = losses.build(trial.config["loss"], splits.classes, splits.train.labels, splits.positive)
            own = evaluation.validation_metric(loss, splits.positive)
        judged = evaluation.evaluate(outcome.probabilities, outcome.labels, splits.positive, decisions, own)
        arrays = {f"{part}_probabilities": values for part, values in outcome.probabilities.items()}
        arrays |= {f"{part}_labels": values for part, values in outcome.labels.items()}
    told = ("history", "best", "epochs", "stopped", "status", "error", "seconds")
    record = records.Record(
        config={name: value for name, value in trial.config.items() if name != "decisions"},
        seed=trial.seed,
        stage=trial.stage,
        data={name: getattr(splits, name) for name in ("name", "fingerprint", "sizes", "index_hash")},
        device=devices.describe_device(job["device"]) if trains_networks(trial.config["loss"]) else "cpu",
        **{name: getattr(outcome, name) for name in told},
        **provenance(),
        **judged,
    )
    with suppress(FileExistsError):  # another process was quicker; its result is the same
        records.write(job["results_dir"], record, arrays, force=job["force"])
    if outcome.status == "done" and trial.stage == "trial" and job["save_model"]:  # the result stays if this fails
        saved.of(outcome, loaded, splits).save(model_folder(trial, job["results_dir"]))
    if outcome.status == "failed":
        return f"{splits.name} {trial.config['loss']['name']} seed {trial.seed}: {outcome.error}"
    return None
