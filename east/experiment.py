"""Plan, run what is missing, select, run the trials: the only module that puts the others together.

A run is a dataset, a loss, and what protocol and preset prescribe for them. Its search and its trials are just trials:
a resolved scientific config and a seed, each identified by a hash and recorded in one file. Whatever has a record is
done; the same command, issued again, does the rest.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from east import data, evaluation, execution, protocols, records, saving, training
from east.config import trains_networks
from east.training import Trial

STACKED = ("dataset", "split", "model", "loss", "protocol")


@dataclass
class Run:
    """One dataset and one loss under a protocol: the complete config, and its scientific part before any search."""

    config: dict[str, Any]
    plain: dict[str, Any]
    chosen: dict[str, Any] | None = None  # the scientific config of the trials, once it is known

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Run":
        loaded = load(config["dataset"], config["data_dir"])
        check_loss(config, loaded)
        plain = protocols.scientific(config, loaded.fingerprint, loaded.name)
        return cls(config, plain, plain if config["search"]["name"] == "none" else None)

    @property
    def searched(self) -> bool:
        return self.config["search"]["name"] != "none"

    @property
    def trials(self) -> list[Trial]:
        """The trials of the final stage; empty before the search has chosen."""
        return [Trial(self.chosen, seed) for seed in range(protocols.trials(self.config))] if self.chosen else []

    @property
    def name(self) -> str:
        return f"{self.plain['dataset']['name']} {self.plain['loss']['name']}"


def load(dataset: Mapping[str, Any], data_dir: str | None) -> data.Data:
    """The data of a config's dataset section."""
    known = data.options(dataset["name"].partition("-")[0])
    options = {name: value for name, value in dataset.items() if name in known}
    return data.load(dataset["name"].partition("-")[0], data_dir, limit=dataset["limit"], **options)


def split(loaded: data.Data, plain: Mapping[str, Any], seed: int) -> data.Splits:
    """The split of a trial: the same for all, or one for each seed."""
    wanted = plain["split"]
    number = seed if wanted["seed"] == "trial" else wanted["seed"]
    return data.split(loaded, seed=number, fractions=wanted["fractions"], stratify=wanted["stratify"])


def check_loss(config: Mapping[str, Any], loaded: data.Data) -> None:
    """Build the loss once: a class that does not exist, or too many for it, is refused before any work."""
    import torch

    from east import losses

    if trains_networks(config["loss"]):
        classes = len(loaded.classes)
        loss = losses.build(config["loss"], loaded.classes, torch.arange(classes))
        loss(torch.zeros(classes, classes), torch.arange(classes))


def carry_out(runs: Sequence[Run], *, shown: bool = True) -> list[str]:
    """Search, select and train every run; return one line for each trial that failed."""
    failures: list[str] = []
    searching = [run for run in runs if run.searched]
    for run in searching:
        failures += search(run, shown)
    failures += perform([trial for run in runs for trial in run.trials], runs[0].config, "trials", shown)
    return failures


def search(run: Run, shown: bool) -> list[str]:
    """Train the points of the grid and choose the scientific config of the trials."""
    points, failures = protocols.grid(run.config), []
    for epochs, keep in protocols.rungs(run.config):
        plain = run.plain
        if epochs is not None:
            plain = {**plain, "protocol": {**plain["protocol"], "max_epochs": epochs}}
        configs = {records.key(config): (config, point) for point in points for config in [protocols.at(plain, point)]}
        trials = [
            Trial(config, seed, "search")
            for config, _ in configs.values()
            for seed in protocols.search_seeds(run.config)
        ]
        failures += perform(trials, run.config, f"search {run.name}", shown)
        found = [r for r in records.scan(run.config["results_dir"]) if r["key"] in configs and r["stage"] == "search"]
        ranked = ranking(found, run.config["selection"])
        if not ranked:
            raise RuntimeError(
                f"no point of the search of {run.name} could be trained: {failures[0] if failures else ''}"
            )
        points = [configs[key][1] for key in ranked[: max(1, len(points) // keep)]]
    run.chosen = configs[ranked[0]][0]
    return failures


def ranking(found: list[dict], rule: str) -> list[str]:
    """Keys of search records from best to worst."""
    order = []
    while (key := records.select(found, rule)) is not None and found:
        order.append(key)
        found = [record for record in found if record["key"] != key]
    return order


def chosen_before(run: Run) -> bool:
    """Whether all of the search is on record; if so the run knows its trials without any work."""
    if not run.searched or run.config["search"]["name"] == "halving":
        return not run.searched
    configs = {records.key(c): c for c in (protocols.at(run.plain, point) for point in protocols.grid(run.config))}
    found = [r for r in records.scan(run.config["results_dir"]) if r["key"] in configs and r["stage"] == "search"]
    if len({record["key"] for record in found}) == len(configs):
        key = records.select(found, run.config["selection"])
        run.chosen = configs.get(key)
    return run.chosen is not None


def missing(trials: Iterable[Trial], config: Mapping[str, Any]) -> list[Trial]:
    """Trials without a record, or without the model that save_model asks for.

    Failures are results too: the same trial would fail again.
    """
    if config["force"]:
        return list(trials)
    done = records.done(config["results_dir"])

    def complete(trial: Trial) -> bool:
        status = done.get((records.key(trial.config), trial.seed))
        wanted = status == "done" and config["save_model"] and trial.stage == "trial"
        return status is not None and (not wanted or model_folder(trial, config["results_dir"]).exists())

    return [trial for trial in trials if not complete(trial)]


def model_folder(trial: Trial, results_dir: str | Path) -> Path:
    """Where save_model keeps what the trial has trained."""
    name = f"{trial.config['dataset']['name']}-{trial.config['loss']['name']}"
    return Path(results_dir) / "models" / f"{name}-{records.key(trial.config)}-seed{trial.seed}"


def perform(trials: Sequence[Trial], config: Mapping[str, Any], title: str, shown: bool) -> list[str]:
    """Run the trials that have no record; return a line for each that failed."""
    todo, failures = missing(trials, config), []
    if not todo:
        return failures
    executor = chosen_executor(config, todo)
    jobs = jobs_of(todo, config, executor)
    Path(config["results_dir"]).mkdir(parents=True, exist_ok=True)
    with tqdm(
        total=len(trials), initial=len(trials) - len(todo), desc=title, unit="trial", disable=None if shown else True
    ) as bar:
        for job, result in execution.execute(run_job, jobs, executor):
            if isinstance(result, execution.Lost):
                result = [f"{len(job['trials'])} trials lost: {result.reason}"]
            failures += result
            for line in result:
                tqdm.write(f"failed: {line}")
            bar.update(len(job["trials"]))
    return failures


def chosen_executor(config: Mapping[str, Any], todo: Sequence[Trial]) -> dict[str, Any]:
    """The executor with its slots; `auto` takes processes where more than one would have work."""
    executor = dict(config["executor"])
    if executor["name"] in ("auto", "processes"):
        available = execution.slots(config["device"])
        wanted = executor.pop("slots", None)
        places = [available[k % len(available)] for k in range(wanted)] if wanted else available
        if executor["name"] == "auto":
            executor["name"] = "processes" if len(places) > 1 and worth_processes(todo) else "inline"
        if executor["name"] == "processes":
            executor["slots"] = places
    if executor["name"] == "submitit":
        executor["folder"] = str(Path(config["results_dir"]) / "sweeps" / "submitit")
    return executor


def worth_processes(todo: Sequence[Trial]) -> bool:
    """Starting a process costs seconds: quick runs stay in this one."""
    return len(todo) > 1 and any(trial.config["preset"] != "quick" for trial in todo)


def jobs_of(todo: Sequence[Trial], config: Mapping[str, Any], executor: Mapping[str, Any]) -> list[execution.Job]:
    """Trials that can be stacked, in portions: one population each, and small enough that every slot has work."""
    groups: dict[str, list[Trial]] = {}
    for trial in todo:
        alike = {name: trial.config[name] for name in STACKED}
        groups.setdefault(repr((alike, trial.config["hyper"].get("batch_size"))), []).append(trial)
    places = len(executor.get("slots", ())) or 1
    options = {
        name: config[name]
        for name in ("results_dir", "data_dir", "device", "force", "save_model", "compile", "tensorboard")
    }
    options["progress"] = executor["name"] == "inline"
    jobs = []
    for group in groups.values():
        size = max(1, min(population_size(group[0], config["device"]), -(-len(group) // places)))
        for k in range(0, len(group), size):
            jobs.append({"trials": [vars(trial) for trial in group[k : k + size]], **options})
    return sorted(jobs, key=lambda job: job["trials"][0]["config"]["hyper"].get("batch_size", 0))  # longest first


def population_size(trial: Trial, device: str) -> int:
    hidden = trial.config["model"].get("hidden")
    if hidden is None:
        return 1
    if training.pick_device(device).type != "cpu":
        return 1_000_000
    return max(1, training.CACHE_BYTES // (4 * trial.config["hyper"]["batch_size"] * sum(hidden)))


def run_job(job: execution.Job) -> list[str]:
    """Train one population, record each of its trials, return a line for each that failed. Runs in any process."""
    try:
        trials = missing([Trial(**trial) for trial in job["trials"]], job)
        if not trials:
            return []
        loaded = load(trials[0].config["dataset"], job["data_dir"])
        splits = [split(loaded, trial.config, trial.seed) for trial in trials]
        results = zip(outcomes(trials, splits, job), splits, strict=True)
        return [line for outcome, own in results if (line := keep(outcome, loaded, own, job))]
    except Exception as error:  # whatever it is, the other jobs go on
        if os.environ.get("EAST_DEBUG"):
            raise
        first = job["trials"][0]["config"]
        return [f"{first['dataset']['name']} {first['loss']['name']}: {type(error).__name__}: {error}"]


def outcomes(trials: Sequence[Trial], splits: Sequence[data.Splits], job: execution.Job) -> Iterator[training.Outcome]:
    results = Path(job["results_dir"])
    if not trains_networks(trials[0].config["loss"]):
        from east import baselines

        yield from (baselines.fit(t, s, progress=job["progress"]) for t, s in zip(trials, splits, strict=True))
        return
    yield from training.train(
        trials,
        splits,
        device=job["device"],
        checkpoint=results / "runs" / "checkpoints",
        progress=job["progress"],
        tensorboard=results / "tensorboard" if job["tensorboard"] else None,
        compile=job["compile"],
    )


def keep(outcome: training.Outcome, loaded: data.Data, splits: data.Splits, job: execution.Job) -> str | None:
    """Evaluate and record an outcome, save its model if asked to; the line that tells its failure, if it is one."""
    trial = outcome.trial
    judged: dict[str, Any] = {}
    arrays: dict[str, Any] | None = None
    if outcome.status == "done":
        judged = evaluation.evaluate(outcome.probabilities, outcome.labels, splits.positive, trial.config["decisions"])
        arrays = {f"{part}_probabilities": values for part, values in outcome.probabilities.items()}
        arrays |= {f"{part}_labels": values for part, values in outcome.labels.items()}
    config = {name: value for name, value in trial.config.items() if name != "decisions"}
    record = records.Record(
        config=config,
        seed=trial.seed,
        stage=trial.stage,
        data={
            "name": splits.name,
            "fingerprint": splits.fingerprint,
            "sizes": splits.sizes,
            "index_hash": splits.index_hash,
        },
        history=outcome.history,
        best=outcome.best,
        epochs=outcome.epochs,
        stopped=outcome.stopped,
        status=outcome.status,
        error=outcome.error,
        seconds=outcome.seconds,
        device=training.describe_device(job["device"]) if outcome.weights else "cpu",
        **records.provenance(),
        **judged,
    )
    if outcome.status == "done" and trial.stage == "trial" and job["save_model"]:
        saving.of(outcome, loaded, splits).save(model_folder(trial, job["results_dir"]))
    with suppress(FileExistsError):  # another process was quicker; its result is the same
        records.write(job["results_dir"], record, arrays, force=job["force"])
    if outcome.status == "failed":
        return f"{splits.name} {trial.config['loss']['name']} seed {trial.seed}: {outcome.error}"
    return None
