"""east-run: parse, dispatch, explain. Nothing heavy is imported before a task needs it, so --help answers at once.

Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if (folder / "config.yaml").is_file())
DONE, FAILED, BAD_CONFIG, NO_DATA, INTERRUPTED = 0, 1, 2, 3, 130

HELP = """\
east-run: train classifiers on the metric they are judged by, and reproduce the papers that propose it.

  east-run                                           quickstart: embedded data, F1 against cross-entropy, a minute
  east-run dataset=mammography loss=f1 preset=budget search, select, ten trials, beside the published number
  east-run dataset=adult 'losses=[f1,ce,mcc]'        several losses, one table; also 'datasets=[…]'
  east-run task=reproduce table=east_v2_1            run what a paper's table still needs, then show it
  east-run task=compare dataset=csv dataset.path=my.csv dataset.target=label score=f1_macro
                                                     which loss for my data and my score?
Everything is resumable: the same command, issued again, does what is missing.

Tasks (task=…)
  run        search hyperparameters, select, train the trials, print a table (default)
  train      one trial with the given seed=…           data       fetch, verify and describe dataset=… or dataset=all
  table      render table=… or table=all from records  reproduce  run what table=… still needs, then render
  records    export records to results/records         report     one HTML page with everything
  compare    which loss for dataset=… and score=…?     predict    checkpoint=… input=… output=…

Groups (name=choice)
{groups}

Often used
  preset=paper|budget|quick  how much of the protocol     trials=10 seed=0 hyper.lr=0.001 hyper.batch_size=256
  device=auto|cpu|cuda|mps   dry_run=true  the plan       dataset.limit=1000  a stratified part of the data
  results_dir=results        save_model=true              force=true  do again what is done; debug=true  tracebacks
  -m dataset=a,b loss=c,d    Hydra multirun               --config-dir DIR  your own configs; --cfg job  show all

Shell completion: eval "$(east-run -sc install=bash)"
Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted
"""


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; return its exit code."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text())
        return DONE
    if "--version" in arguments:
        from east import __version__

        print(f"east {__version__}")
        return DONE
    if any(argument.startswith("-") for argument in arguments):
        return through_hydra()
    return guarded(lambda: dispatch(list(arguments)), "debug=true" in arguments)


def help_text() -> str:
    folders = sorted(folder for folder in CONF.iterdir() if folder.is_dir())
    lines = []
    for folder in folders:
        names = sorted(file.stem for file in folder.glob("*.yaml"))
        line = f"  {folder.name:<10} "
        for name in names:
            if len(line) + len(name) > 116:
                lines.append(line)
                line = " " * 13
            line += f"{name} "
        lines.append(line)
    return HELP.format(groups="\n".join(line.rstrip() for line in lines))


def through_hydra() -> int:
    """Multirun, --cfg, --info and completion are Hydra's own; each job of a sweep comes back to `dispatch`."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    worst = DONE

    def job(_config: Any) -> None:
        nonlocal worst
        overrides = [line for line in HydraConfig.get().overrides.task]
        print(f"\n# {' '.join(overrides)}", flush=True)
        worst = max(worst, guarded(lambda: dispatch(overrides), "debug=true" in overrides))
        if worst == INTERRUPTED:
            raise KeyboardInterrupt

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as error:  # Hydra's own errors, which exit with 1, are all about the config
        return BAD_CONFIG if error.code else DONE
    return worst


def guarded(task: Callable[[], int], debug: bool) -> int:
    """Run a task; turn what goes wrong into a few lines and an exit code."""
    from east.config import ConfigError

    if debug:
        os.environ["EAST_DEBUG"] = "1"
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        return task()
    except KeyboardInterrupt as interruption:
        print(f"\ninterrupted{f' by {interruption}' if str(interruption) else ''}: finished trials are kept; "
              "the same command goes on from here", file=sys.stderr)  # fmt: skip
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (whoever read our output has gone)
        return DONE
    except Exception as error:
        if debug:
            raise
        kind = {ConfigError: "config", ValueError: "config"}.get(type(error))
        if kind:
            code = BAD_CONFIG
        elif type(error).__name__ == "DataError":
            kind, code = "data", NO_DATA
        else:
            kind, code = type(error).__name__, FAILED
        print(f"{kind}: {error}", file=sys.stderr)
        if code == FAILED:
            print(
                "finished trials are kept; the same command goes on from here (debug=true shows a traceback)",
                file=sys.stderr,
            )
        return code


def dispatch(arguments: list[str]) -> int:
    """Find the task and hand over."""
    from east.choices import choose
    from east.config import TASKS
    from east.execution import interruptible

    interruptible()
    task = choose("task", given(arguments, "task") or ("run" if arguments else "quickstart"), (*TASKS, "quickstart"))
    return globals()[f"task_{task}"](arguments)


def given(arguments: Sequence[str], name: str) -> str | None:
    """The value typed for a key, if any."""
    found = [argument.partition("=")[2] for argument in arguments if argument.partition("=")[0] == name]
    return found[-1] if found else None


def without(arguments: Sequence[str], *names: str) -> list[str]:
    return [argument for argument in arguments if argument.partition("=")[0] not in names]


def common(arguments: Sequence[str]) -> dict[str, Any]:
    """Settings of a task that concerns no single dataset or loss."""
    from east.config import settings

    return settings(without(arguments, "table"))


def combinations(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """The settings of every dataset and loss that was asked for."""
    from east.config import ConfigError, groups, settings

    first = settings(arguments)
    lists = {"dataset": first["datasets"], "loss": first["losses"]}
    for group, names in lists.items():
        below = [argument for argument in arguments if argument.startswith((f"{group}.", f"{group}="))]
        if names is not None and below:
            raise ConfigError(
                f"{below[0]}: with {group}{'es' if group == 'loss' else 's'}=[…] say nothing else of the {group}"
            )
        for name in names or ():
            from east.choices import choose

            choose(group, name, groups()[group])
    rest = without(arguments, "datasets", "losses")
    datasets = [[f"dataset={name}"] for name in lists["dataset"] or ()] or [[]]
    losses = [[f"loss={name}"] for name in lists["loss"] or ()] or [[]]
    if datasets == losses == [[]]:
        return [first]
    return [settings([*rest, *dataset, *loss]) for dataset in datasets for loss in losses]


def task_quickstart(arguments: list[str]) -> int:
    return task_run(["losses=[f1,ce]", "dataset.imbalance=10", *arguments])


def task_run(arguments: list[str]) -> int:
    from east import experiment, summary

    configs = combinations(arguments)
    print(summary.announcement(configs, arguments), flush=True)
    runs = [experiment.Run.of(config) for config in configs]
    if configs[0]["dry_run"]:
        print(summary.plan(runs))
        return DONE
    failures = experiment.carry_out(runs)
    print(summary.results(runs, failures))
    return FAILED if failures else DONE


def task_train(arguments: list[str]) -> int:
    """One trial: the hyperparameters given or the protocol's, no search."""
    from east import experiment, summary
    from east.training import Trial

    configs = combinations([*without(arguments, "search"), "search=none"])
    print(summary.announcement(configs, arguments), flush=True)
    runs = [experiment.Run.of(config) for config in configs]
    trials = [Trial(run.plain, run.config["seed"]) for run in runs]
    failures = experiment.perform(trials, configs[0], "train", True)
    print(summary.trials(trials, configs[0]))
    return FAILED if failures else DONE


def task_data(arguments: list[str]) -> int:
    from east import data, experiment

    if given(arguments, "dataset") == "all":
        common(without(arguments, "dataset"))
        print(data.catalogue_text(data.catalogue()))
        return DONE
    for config in combinations(arguments):
        loaded = experiment.load(config["dataset"], config["data_dir"])
        print(data.describe_text(data.describe(loaded, **config["split"])))
    return DONE


def task_table(arguments: list[str]) -> int:
    from east import summary

    config = common(arguments)
    print(summary.table(wanted_table(arguments), config, given(arguments, "preset")))
    return DONE


def wanted_table(arguments: Sequence[str]) -> str:
    from east import tables
    from east.choices import choose

    return choose("table", given(arguments, "table") or "grid", ["all", *tables.names()])


def task_reproduce(arguments: list[str]) -> int:
    from east import experiment, summary, tables
    from east.config import settings

    table, config = wanted_table(arguments), common(arguments)
    preset = given(arguments, "preset") or "paper"
    wanted = tables.plan(
        table, config["results_dir"], preset=preset, rule=config["selection"], variant=config["variant"]
    )
    rest = without(arguments, "table", "task", "preset", "dataset", "loss", "protocol")
    runs = []
    for run in wanted:
        named = [f"dataset={run['dataset']}", f"loss={run['loss']}", f"protocol={run['protocol']}", f"preset={preset}"]
        runs.append(settings([*rest, *named, *run["overrides"]]))
    print(f"{table}: {len(wanted)} runs are missing", flush=True)
    runs, failures = summary.loadable(runs)
    if config["dry_run"]:
        print(summary.plan(runs))
        return DONE
    if runs:
        print(summary.plan(runs), flush=True)
        failures += experiment.carry_out(runs)
    print(summary.table(table, config, preset))
    for line in failures:
        print(f"not done: {line}", file=sys.stderr)
    return FAILED if failures else DONE


def task_records(arguments: list[str]) -> int:
    from east import records

    config = common(arguments)
    counts = records.export(config["results_dir"])
    for dataset, count in counts.items():
        print(f"{config['results_dir']}/records/{dataset}.jsonl  {count} records")
    if not counts:
        print(f"no finished trials below {config['results_dir']}/runs")
    return DONE


def task_report(arguments: list[str]) -> int:
    from east import report

    config = common(arguments)
    print(report.write(config["results_dir"]))
    return DONE
