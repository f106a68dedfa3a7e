"""What east-run says about a run: what it will do, what it costs, what came out."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from east.choices import ConfigError, choose
from east.data import DataError
from east.experiment import executors, protocols, records, scheduler
from east.experiment.scheduler import Run
from east.reporting import plots, tables, writers
from east.training.population import Trial

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
    """Runs whose data is here or can be fetched, with the classes they need, and a line for each of the others."""
    runs, failures = [], []
    for config in configs:
        try:
            runs.append(Run.of(config))
        except (DataError, ConfigError) as error:
            failures.append(f"{config['dataset']['name']} {config['loss']['name']}: {str(error).splitlines()[0]}")
    return runs, failures


def names(runs: Sequence[Run]) -> list[str]:
    """Names of runs, with as many of their settings as it takes to tell them apart."""
    alike: dict[str, list[Run]] = {}
    for run in runs:
        alike.setdefault(run.name, []).append(run)
    told = {name: iter(tables.labels(name, [run.plain for run in group])) for name, group in alike.items()}
    return [next(told[run.name]) for run in runs]


def plan(runs: Sequence[Run]) -> str:
    """Trials of each run, how many are done, and the time the rest will take by the speed measured so far."""
    lines, costs = [("run", "search", "trials", "estimate")], []
    ledger = scheduler.ledger_of(runs)
    known = speeds(ledger.found.values())
    for name, run in zip(names(runs), runs, strict=True):
        trials = protocols.trials(run.config)
        searches = protocols.planned(run.config) - trials
        done = Counter()
        for stage in run.stages(ledger):
            done[stage[0].stage] += len(stage) - len(ledger.missing(stage))
            if ledger.missing(stage):
                break
        todo = searches + trials - done.total()
        seconds = known.get(speed_key(run.plain))
        costs.append(0.0 if not todo else None if seconds is None else todo * seconds)
        searched = f"{done['search']} of {searches}" if searches else "none"
        lines.append((name, searched, f"{done['trial']} of {trials}", duration(costs[-1])))
    places = len(executors.slots(runs[0].config["device"]))
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


def speeds(found: Iterable[Mapping[str, Any]]) -> dict[tuple, float]:
    """Median seconds of the trials on record, by `speed_key`."""
    seconds: dict[tuple, list[float]] = {}
    for record in found:
        if record["seconds"] and record["status"] == "done":
            seconds.setdefault(speed_key(record["config"]), []).append(record["seconds"])
    return {key: median(values) for key, values in seconds.items()}


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def results(runs: Sequence[Run], failures: Sequence[str]) -> tuple[str, bool]:
    """A table of the runs with the published numbers beside them, its figure, what failed; and whether all is done."""
    config = runs[0].config
    found = {(record["key"], record["seed"]): record for record in records.scan(config["results_dir"])}
    keys = {records.key(run.chosen) for run in runs if run.chosen}
    spec = tables.spec("grid").changed(title="Results")
    shown = [whole(record) for record in found.values() if record["key"] in keys]
    built = tables.build(spec, config["results_dir"], found=shown, rule=config["selection"], preset="quick")
    named = list(zip(names(runs), runs, strict=True))
    lines = [f"{name}: {lack}" for name, run in named if (lack := shortfall(run, found))]
    complete = not lines
    lines = [f"chosen for {name}: {choice(run)}" for name, run in named if run.chosen and run.searched] + lines
    for name, run in named:
        matrices = matrices_of(run, found)
        lines += [f"{name}: {note}" for note in (unseen(matrices), collapse(run, matrices)) if note]
    if failures:
        lines.append(f"first reason: {failures[0]}")
    if built.cells:
        name = "-".join(["run", *sorted({figure_name(run) for run in runs})][:5])
        with shown_anyway():
            files = plots.save(plots.dots(built), Path(config["results_dir"]) / "figures" / name)
            lines = [f"figure: {files[0]}", *lines]
        lines = [writers.WRITERS["text"]([built], [tables.comparisons(built)]).rstrip(), *lines]
    return "\n".join(lines), complete


def figure_name(run: Run) -> str:
    """Data and loss; with a mark of the data where other data may have the same name."""
    dataset = run.plain["dataset"]
    shared = dataset["name"] in ("csv", "images") or dataset.get("limit") is not None
    return run.name.replace(" ", f"-{dataset['fingerprint'][:6]}-" if shared else "-")


@contextmanager
def shown_anyway() -> Iterator[None]:
    """Files that cannot be written, as in a read-only folder, are no reason not to print what would be in them."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"not written: {error}", stacklevel=3)


def choice(run: Run) -> str:
    """The point that the search has chosen."""
    values = run.chosen["hyper"] | {"r": run.chosen["annealing"].get("r")}
    return ", ".join(f"{name} {values[name]}" for name in protocols.grid(run.config)[0])


def whole(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tables leave out records of a part of the data; here they are shown, under a name that says what was done."""
    dataset = record["config"]["dataset"]
    limit, imbalance = dataset.get("limit"), dataset.get("imbalance")
    done = ([f"{limit} rows"] if limit else []) + ([f"imbalance {imbalance:g}"] if imbalance not in (None, 1) else [])
    if not done or dataset["name"] == "synthetic":
        return record
    renamed = dataset | {"name": f"{dataset['name']} ({', '.join(done)})", "limit": None}
    return record | {"config": record["config"] | {"dataset": renamed}}


def shortfall(run: Run, found: Mapping[tuple[str, int], Mapping]) -> str | None:
    """What a run still lacks."""
    if run.chosen is None:
        return "no trials, because its search is incomplete or no point of it could be trained"
    states = [found.get((records.key(trial.config), trial.seed), {}).get("status") for trial in run.trials]
    failed, missing = states.count("failed"), states.count(None)
    unsaved = sum(without_model(run, trial) for trial, state in zip(run.trials, states, strict=True) if state == "done")
    lacks = [f"of {len(states)} trials {failed} failed, {missing} missing"] if failed + missing else []
    return "; ".join([*lacks, f"{unsaved} of the models could not be saved"] if unsaved else lacks) or None


def without_model(run: Run, trial: Trial) -> bool:
    """Whether a model that was asked for is not there."""
    folder = scheduler.model_folder(trial, run.config["results_dir"])
    return run.config["save_model"] and not folder.exists()


def matrices_of(run: Run, found: Mapping[tuple[str, int], Mapping]) -> list[list[list[int]]]:
    """The confusion of the test rows by every trial that is done."""
    done = [found.get((records.key(trial.config), trial.seed), {}) for trial in run.trials]
    return [record["confusion"]["test"] for record in done if record.get("status") == "done"]


def unseen(matrices: Sequence[list[list[int]]]) -> str | None:
    """Whether some class is never tested."""
    missing = max((sum(not any(row) for row in matrix) for matrix in matrices), default=0)
    if not missing:
        return None
    return f"{missing} of {len(matrices[0])} classes have no test rows: try split.stratify=true, or more rows"


def collapse(run: Run, matrices: Sequence[list[list[int]]]) -> str | None:
    """How many trials have given up on all classes but one, as metric losses do where the others are rare."""
    tested = [matrix for matrix in matrices if sum(map(any, matrix)) > 1]
    one_class = sum(sum(map(any, zip(*matrix, strict=True))) == 1 for matrix in tested)
    if not one_class:
        return None
    advice = "try protocol.warmup=10, a lower hyper.lr or a larger hyper.batch_size"
    if run.plain["loss"].get("average") == "macro":
        advice += ", or loss.average=positive for a rare positive class"
    return f"{one_class} of {len(matrices)} trials predict one class only; {advice}"


def trials(runs: Sequence[Run], failures: Sequence[str]) -> tuple[str, bool]:
    """Scores of single trials; and whether all is done."""
    folder, lines, complete = runs[0].config["results_dir"], [], True
    found = {(record["key"], record["seed"]): record for record in records.scan(folder)}
    for run, trial in [(one, trial) for one in runs for trial in one.trials]:
        record, name = found.get((records.key(trial.config), trial.seed)), f"{run.name} seed {trial.seed}"
        if record is None or record["status"] == "failed":
            lines.append(f"{name} failed: {record['error'] if record else '; '.join(failures)}")
            complete = False
            continue
        scores = {score: value for score, value in record["scores"]["test"].items() if isinstance(value, float)}
        lines += [
            f"{name}: {record['epochs']} epochs, {record['stopped']}, {record['seconds']:.1f} s",
            f"  test   {'  '.join(f'{score} {value:.4f}' for score, value in scores.items())}",
            f"  record {folder}/{record['source']}",
        ]
        if without_model(run, trial):
            lines.append(f"{name}: the model could not be saved: {'; '.join(failures)}")
            complete = False
    return "\n".join(lines), complete


def table(config: Mapping[str, Any], preset: str | None) -> str:
    """Render a table into results_dir/tables in every format; return it as text, or in the format asked for."""
    name = config["table"]
    options = {
        "rule": config["selection"],
        "variant": config["variant"],
        "preset": preset if preset != "auto" else None,
    }
    found = records.scan(config["results_dir"])
    every = [n for n in tables.names() if tables.spec(n).paper] if name == "all" else [name]
    built = [tables.build(one, config["results_dir"], found=found, **options) for one in every]
    pairs = [tables.comparisons(one) for one in built]
    if config["format"]:
        return writers.WRITERS[choose("format", config["format"], writers.WRITERS)](built, pairs)
    text = writers.WRITERS["text"](built, pairs).rstrip()
    folder = Path(config["results_dir"]) / "tables"
    with shown_anyway():
        suffix = "" if config["variant"] == "clean" else f"_{config['variant']}"
        clean = [one.name for one in built if not suffix and tables.spec(one.name).paper]
        both = options | {"variant": "released"}
        released = {one: tables.build(one, config["results_dir"], found=found, **both) for one in clean}
        write_tables(folder, suffix, built, pairs, released)
        text += f"\nwritten to {folder} as {', '.join(FILES)}"
    return text


def write_tables(
    folder: Path,
    suffix: str,
    built: Sequence[tables.Table],
    pairs: Sequence[list[tables.Comparison]],
    released: Mapping[str, tables.Table],
) -> None:
    """Each table in every format, and its figure in the folder beside; `released` are the tables by released code."""
    folder.mkdir(parents=True, exist_ok=True)
    for one, compared in zip(built, pairs, strict=True):
        for form, ending in FILES.items():
            (folder / f"{one.name}{suffix}.{ending}").write_text(writers.WRITERS[form]([one], [compared]))
        if any(cell.values for cell in one.cells):
            figure = plots.figure_of(one, released.get(one.name))
            plots.save(figure, folder.with_name("figures") / f"{one.name}{suffix}")
