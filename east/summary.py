"""What east-run says about a run: what it will do, what it costs, what came out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from east import execution, experiment, plots, protocols, records, tables, writers
from east.choices import choose
from east.data import DataError
from east.experiment import Run
from east.training import Trial

FILES = {"markdown": "md", "latex": "tex", "csv": "csv", "json": "json"}


def announcement(configs: Sequence[Mapping[str, Any]], arguments: Sequence[str]) -> str:
    """One line before the work: what was decided where the user left it open."""
    presets = sorted({config["preset"]["name"] for config in configs})
    chosen = "" if any(a.startswith("preset=") and a != "preset=auto" for a in arguments) else " (auto)"
    first = configs[0]
    search = f"search={first['search']['name']}"
    datasets = ", ".join(dict.fromkeys(config["dataset"]["name"] for config in configs))
    losses = ", ".join(dict.fromkeys(config["loss"]["name"] for config in configs))
    return f"{datasets}: {losses} | protocol={first['protocol']['name']} preset={', '.join(presets)}{chosen} {search}"


def loadable(configs: Sequence[dict[str, Any]]) -> tuple[list[Run], list[str]]:
    """Runs whose data is here or can be fetched, and a line for each of the others."""
    runs, failures = [], []
    for config in configs:
        try:
            runs.append(Run.of(config))
        except DataError as error:
            failures.append(f"{config['dataset']['name']} {config['loss']['name']}: {str(error).splitlines()[0]}")
    return runs, failures


def plan(runs: Sequence[Run]) -> str:
    """Trials of each run, how many are done, and the time the rest will take by the speed measured so far."""
    lines = [("run", "search", "trials", "estimate")]
    known, costs = speeds(runs), []
    for run in runs:
        points, wanted = [], protocols.trials(run.config)
        if run.searched:
            points = [Trial(protocols.at(run.plain, p), s, "search")
                      for p in protocols.grid(run.config) for s in protocols.search_seeds(run.config)]  # fmt: skip
            experiment.chosen_before(run)
        open_points = len(experiment.missing(points, run.config))
        open_trials = len(experiment.missing(run.trials, run.config)) if run.trials else wanted
        seconds = known.get(speed_key(run.plain))
        todo = open_points + open_trials
        costs.append(0.0 if not todo else None if seconds is None else todo * seconds)
        searched = f"{len(points) - open_points} of {len(points)}" if points else "none"
        lines.append((run.name, searched, f"{wanted - open_trials} of {wanted}", duration(costs[-1])))
    places = len(execution.slots(runs[0].config["device"])) if runs else 1
    known_costs = [cost for cost in costs if cost is not None]
    total = f"{duration(sum(known_costs) / places)} on the {places} slots of this machine" if known_costs else "unknown"
    unknown = costs.count(None)
    if unknown:
        total += f", and {unknown} runs of unknown speed (a first trial tells)"
    return f"{writers.aligned(lines)}\ntime left: {total}"


def speed_key(config: Mapping[str, Any]) -> tuple:
    """Trials that take about as long: the same data and network under the same preset."""
    return (
        config["dataset"]["name"],
        config["dataset"].get("limit"),
        config["model"]["name"],
        config["protocol"]["name"],
        config["preset"],
    )


def speeds(runs: Sequence[Run]) -> dict[tuple, float]:
    """Median seconds of the trials on record, by `speed_key`."""
    found: dict[tuple, list[float]] = {}
    for folder in {run.config["results_dir"] for run in runs}:
        for record in records.scan(folder):
            if record["seconds"] and record["status"] == "done":
                found.setdefault(speed_key(record["config"]), []).append(record["seconds"])
    return {key: median(values) for key, values in found.items()}


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def results(runs: Sequence[Run], failures: Sequence[str]) -> str:
    """A table of the runs with the published numbers beside them, its figure, and what failed."""
    config = runs[0].config
    keys = {records.key(run.chosen) for run in runs if run.chosen}
    found = [record for record in records.scan(config["results_dir"]) if record["key"] in keys]
    spec = tables.spec("grid") | {"title": "Results"}
    built = tables.build(spec, config["results_dir"], found=found, rule=config["selection"], preset="quick")
    text = writers.WRITERS["text"]([built], [tables.comparisons(built)])
    target = (
        Path(config["results_dir"])
        / "figures"
        / "-".join(["run", *sorted({run.name.replace(" ", "-") for run in runs})][:5])
    )
    files = plots.save(plots.dots(built), target)
    lines = [text.rstrip(), f"figure: {files[0]}"]
    if failures:
        lines.append(f"{len(failures)} trials failed; the first: {failures[0]}")
    return "\n".join(lines)


def trials(done: Sequence[Trial], config: Mapping[str, Any]) -> str:
    """Scores of single trials."""
    wanted = {(records.key(trial.config), trial.seed) for trial in done}
    lines = []
    for record in records.scan(config["results_dir"]):
        if (record["key"], record["seed"]) in wanted:
            name = f"{record['config']['dataset']['name']} {record['config']['loss']['name']} seed {record['seed']}"
            if record["status"] == "failed":
                lines.append(f"{name}: failed: {record['error']}")
                continue
            scores = record["scores"]["test"]
            shown = {key: value for key, value in scores.items() if isinstance(value, float)}
            numbers = "  ".join(f"{key} {value:.4f}" for key, value in shown.items())
            lines += [
                f"{name}: {record['epochs']} epochs, {record['stopped']}, {record['seconds']:.1f} s",
                f"  test  {numbers}",
            ]
            lines.append(f"  record {config['results_dir']}/{record['source']}")
    return "\n".join(lines)


def table(name: str, config: Mapping[str, Any], preset: str | None) -> str:
    """Render a table into results_dir/tables in every format; return it as text, or in the format asked for."""
    options = {
        "rule": config["selection"],
        "variant": config["variant"],
        "preset": preset if preset != "auto" else None,
    }
    found = records.scan(config["results_dir"])
    every = [n for n in tables.names() if "paper" in tables.spec(n)] if name == "all" else [name]
    built = [tables.build(one, config["results_dir"], found=found, **options) for one in every]
    pairs = [tables.comparisons(one) for one in built]
    if config["format"]:
        return writers.WRITERS[choose("format", config["format"], writers.WRITERS)](built, pairs)
    folder = Path(config["results_dir"]) / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    suffix = "" if config["variant"] == "clean" else f"_{config['variant']}"
    for one, compared in zip(built, pairs, strict=True):
        for form, ending in FILES.items():
            (folder / f"{one.name}{suffix}.{ending}").write_text(writers.WRITERS[form]([one], [compared]))
    return f"{writers.WRITERS['text'](built, pairs).rstrip()}\nwritten to {folder} as {', '.join(FILES)}"
