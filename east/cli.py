"""east-run: parse, dispatch, explain. Nothing heavy is imported before a task needs it, so --help answers at once.

Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted.
"""

import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from east.choices import CONF, ConfigError, choose, groups

DONE, FAILED, BAD_CONFIG, NO_DATA, INTERRUPTED = 0, 1, 2, 3, 130
SCIENCE = ("dataset", "split", "model", "loss", "annealing", "protocol", "hyper", "search")  # what makes a result
RESUME = "finished trials are kept; the same command goes on from here"

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
  study      study=soft_hard|balanced|gap|bias|all: checks of the method with a figure each

Groups (name=choice)
{groups}

Often used
  preset=paper|budget|lean|quick  how much of the protocol  trials=10 seed=0 hyper.lr=0.001 hyper.batch_size=256
  device=auto|cpu|cuda|mps   dry_run=true  the plan       dataset.limit=1000  a stratified part of the data
  results_dir=results        save_model=true              force=true  do again what is done; debug=true  tracebacks
  -m dataset=a,b loss=c,d    Hydra multirun               --config-dir DIR  your own configs, such as DIR/loss/mine.yaml
  --cfg job                  show the whole config        executor=processes|ray|submitit  cores, a cluster, SLURM

Shell completion: eval "$(east-run -sc install=bash)"   (also zsh, fish)
Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted
"""


def main() -> None:
    sys.path.append(os.getcwd())  # loss.metric=my_file.my_metric and model.target=my_file.Net, from where one works
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; return its exit code."""
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return DONE
    if "--version" in arguments:
        from east import __version__

        print(f"east {__version__}")
        return DONE
    flags, overrides = separated(arguments)

    def task() -> int:
        refuse_bare_words(overrides)
        return through_hydra(flags, overrides) if flags else dispatch(overrides)

    return guarded(task, "debug=true" in overrides)


def help_text() -> str:
    lines = [
        textwrap.fill(" ".join(files), 116, initial_indent=f"  {group:<10} ", subsequent_indent=" " * 13,
                      break_on_hyphens=False)
        for group, files in groups().items()
    ]  # fmt: skip
    return HELP.format(groups="\n".join(lines))


def separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags and the overrides; --config-dir becomes an override of our own, so that every task knows it."""
    flags, overrides, left = [], [], list(arguments)
    while left:
        word = left.pop(0)
        if word.partition("=")[0] in ("--config-dir", "-cd"):
            folder = word.partition("=")[2] or (left.pop(0) if left else "")
            overrides.append(f"config_dir='{Path(folder).resolve()}'")
        elif word.startswith("-"):
            flags += (
                [word, left.pop(0)] if word in ("--cfg", "-c", "--info", "-i", "--package", "-p") and left else [word]
            )
        else:
            overrides.append(word)
    return flags, overrides


def refuse_bare_words(overrides: Sequence[str]) -> None:
    """`east-run mammography` means `east-run dataset=mammography`, most likely."""
    for word in overrides:
        if "=" not in word and not word.startswith("~"):  # "~" is Hydra's sign for deleting
            choices = {"task": TASKS, **groups()}
            near = get_close_matches(word.lower(), [name for names in choices.values() for name in names], n=1)
            meant = [f"{group}={near[0]}" for group, names in choices.items() if near and near[0] in names]
            hint = f"did you mean {' or '.join(meant)}?" if meant else "such as dataset=mammography"
            raise ConfigError(f"{word!r}: expected name=value, {hint}")


def through_hydra(flags: list[str], overrides: list[str]) -> int:
    """Multirun, --info and completion are Hydra's own; each job of a sweep comes back to `dispatch`."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from east.experiment import settings

    if flags in (["--cfg", "job"], ["-c", "job"]):
        import yaml

        print(yaml.safe_dump(settings.settings(overrides), sort_keys=False, allow_unicode=True), end="")
        return DONE
    overrides = [line.input_line for line in settings.parsed(overrides)]  # quoted where Hydra needs it
    own, lines = settings.own_folder(overrides), overrides
    if {"-m", "--multirun"} & set(flags):
        ours = [line for line in overrides if not line.startswith("hydra")]
        for job in settings.sweep(ours) if not given(overrides, "hydra/sweeper") else ():
            settings.combinations(job)
        # "++": Hydra composes each job before we complete it, when sections such as `model` are not there yet.
        composed = groups(own)
        lines = [f"++{line}" if line in ours and line.partition("=")[0] not in composed else line for line in overrides]
    sys.argv = [sys.argv[0], *flags, *([f"--config-dir={own}"] if own else []), *lines]
    parent, codes = os.getpid(), [DONE]

    def carry_out(_composed: Any) -> None:
        job = [line.removeprefix("++") for line in HydraConfig.get().overrides.task]
        print(f"\n# {' '.join(job)}", flush=True)
        codes.append(guarded(lambda: dispatch(job), "debug=true" in job))
        if codes[-1] == INTERRUPTED:
            sys.exit(INTERRUPTED)
        if codes[-1] and os.getpid() != parent:
            raise RuntimeError(f"exit code {codes[-1]}")  # a launcher's process tells Hydra in no other way

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(carry_out)()
    except SystemExit as error:  # Hydra exits with 1 whatever the matter is, and has told it
        codes.append(DONE if not error.code else FAILED if isinstance(error.__context__, RuntimeError) else BAD_CONFIG)
    return max(codes)


def guarded(task: Callable[[], int], debug: bool) -> int:
    """Run a task; turn what goes wrong into a few lines and an exit code."""
    if debug:
        os.environ["EAST_DEBUG"] = "1"
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        return task()
    except KeyboardInterrupt as interruption:
        by = f" by {interruption}" if str(interruption) else ""
        print(f"\ninterrupted{by}: {RESUME}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (whoever read our output has gone)
        return DONE
    except Exception as error:
        if debug:
            raise
        if isinstance(error, ConfigError):
            print(f"config: {error}", file=sys.stderr)
            return BAD_CONFIG
        if type(error).__name__ == "DataError":  # its module is heavy
            print(f"data: {error}", file=sys.stderr)
            return NO_DATA
        kept = "" if isinstance(error, FileNotFoundError | NotADirectoryError) else f"{RESUME} "  # a path that is wrong
        print(f"{type(error).__name__}: {error}\n{kept}(debug=true shows a traceback)", file=sys.stderr)
        return FAILED


def dispatch(arguments: list[str]) -> int:
    """Find the task and hand over. A command that says neither what nor on what is the quickstart."""
    from east.experiment.executors import interruptible

    interruptible()
    said = {argument.partition("=")[0].partition(".")[0] for argument in arguments}
    if not said & {"task", "dataset", "datasets", "loss", "losses"}:
        arguments = ["losses=[f1,ce]", "dataset.imbalance=10", *arguments]
    return TASKS[choose("task", given(arguments, "task") or "run", TASKS)](arguments)


def given(arguments: Sequence[str], name: str) -> str | None:
    """The value typed for a key, if any."""
    found = [argument.partition("=")[2] for argument in arguments if argument.partition("=")[0] == name]
    return found[-1] if found else None


def without(arguments: Sequence[str], *names: str) -> list[str]:
    return [argument for argument in arguments if argument.partition("=")[0] not in names]


def task_run(arguments: list[str]) -> int:
    from east.experiment import scheduler, settings
    from east.reporting import summary

    configs = settings.combinations(arguments)
    print(summary.announcement(configs, arguments), flush=True)
    runs = [scheduler.Run.of(one) for one in configs]
    if configs[0]["dry_run"]:
        print(summary.plan(runs))
        return DONE
    failures = scheduler.carry_out(runs)
    text, complete = (summary.trials if configs[0]["task"] == "train" else summary.results)(runs, failures)
    print(text)
    return DONE if complete else FAILED


def task_train(arguments: list[str]) -> int:
    """One trial: the hyperparameters given or the protocol's, no search."""
    return task_run([*without(arguments, "search", "trials"), "search=none", "trials=1"])


def task_data(arguments: list[str]) -> int:
    from east import data
    from east.experiment import scheduler
    from east.experiment.settings import combinations, settings

    if given(arguments, "dataset") == "all":
        settings(without(arguments, "dataset"))
        print(data.catalogue_text(data.catalogue()))
        return DONE
    for config in combinations(arguments):
        loaded = scheduler.load(config["dataset"], config["data_dir"])
        print(data.describe_text(data.describe(loaded, **scheduler.fixed_split(config["split"]))))
        if config["split"]["seed"] == "trial":
            print("split.seed=trial: every trial has a split of its own; the sizes are those of split.seed=0")
    return DONE


def task_table(arguments: list[str]) -> int:
    from east.experiment.settings import settings
    from east.reporting import summary

    print(summary.table(settings(arguments), given(arguments, "preset")))
    return DONE


def task_reproduce(arguments: list[str]) -> int:
    """Run what a table lacks, or what dataset=… and loss=… leave of that, and render it."""
    from east.experiment import scheduler
    from east.experiment.settings import LISTS, settings
    from east.reporting import summary, tables

    config, table = settings(arguments), given(arguments, "table")
    if table in (None, "grid") or given(arguments, "protocol"):
        choices = ", ".join(name for name in tables.names() if name != "grid")
        raise ConfigError(f"task=reproduce takes a table=…, and that table's protocol. Choices: all, {choices}")
    preset = given(arguments, "preset") or ("paper" if table == "all" else tables.usual_preset(tables.spec(table)))
    options = {"preset": preset, "rule": config["selection"], "variant": config["variant"]}
    missing = tables.plan(table, config["results_dir"], **options)
    for group in LISTS:
        if names := named(arguments, group):
            missing = [run for run in missing if getattr(run, group) in names]
    rest = without(arguments, "task", "table", "preset", *LISTS, *LISTS.values())
    own = [word for word in rest if word.partition("=")[0].partition(".")[0] in SCIENCE]
    if own:
        print(f"note: with {' '.join(own)} trials fill no cell of the table; they are shown by themselves")
    wanted = []
    for run in missing:
        groups = [f"{group}={getattr(run, group)}" for group in ("dataset", "loss", "protocol")]
        wanted.append(settings([*rest, *groups, f"preset={preset}", *run.overrides]))
    runs, failures = summary.loadable(wanted)
    print(f"{table}: {len(missing)} runs are missing", flush=True)
    if runs:
        print(summary.plan(runs), flush=True)
    if not config["dry_run"]:
        failures += scheduler.carry_out(runs) if runs else []
        print(summary.results(runs, failures)[0] if own and runs else summary.table(config, preset))
    for line in failures:
        print(f"not done: {line}", file=sys.stderr)
    return FAILED if failures else DONE


def named(arguments: Sequence[str], group: str) -> list[str]:
    """What dataset=a or datasets=[a,b] name."""
    from east.experiment.settings import LISTS, parsed

    found = {line.key_or_group: line.value() for line in parsed(arguments)}
    return found.get(LISTS[group]) or ([found[group]] if group in found else [])


def task_records(arguments: list[str]) -> int:
    from east.experiment import records
    from east.experiment.settings import settings

    folder = settings(arguments)["results_dir"]
    counts = records.export(folder)
    for dataset, count in counts.items():
        print(f"{folder}/records/{dataset}.jsonl  {count} records")
    if not counts:
        print(f"no finished trials below {folder}/runs")
    return DONE


def task_report(arguments: list[str]) -> int:
    from east.experiment.settings import settings
    from east.reporting.pages import report

    print(report.write(settings(arguments)["results_dir"]))
    return DONE


def task_compare(arguments: list[str]) -> int:
    from east.tasks import compare

    return FAILED if compare.run(arguments) else DONE


def task_predict(arguments: list[str]) -> int:
    from east.experiment.settings import settings
    from east.training import saved

    config = settings(arguments)
    missing = [f"{name}=…" for name in ("checkpoint", "input", "output") if not config[name]]
    if missing:
        raise ConfigError(f"task=predict needs {' '.join(missing)}: a saved model, the rows to predict, and a new file")
    if Path(config["output"]).expanduser().exists() and not config["force"]:
        raise ConfigError(f"output={config['output']} exists already; force=true replaces it")
    rows = saved.predict_file(saved.load(config["checkpoint"], config["device"]), config["input"], config["output"])
    print(f"{rows:,} rows predicted: {config['output']}")
    return DONE


def task_study(arguments: list[str]) -> int:
    from east.experiment.settings import settings
    from east.tasks import study

    config = settings(arguments)
    if not config["study"]:
        raise ConfigError(f"task=study needs study=…: {', '.join(study.STUDIES)}, or all")
    names = list(study.STUDIES) if config["study"] == "all" else [choose("study", config["study"], study.STUDIES)]
    for name in names:
        for file in study.run(name, without(arguments, "task", "study", "results_dir", "debug"), config["results_dir"]):
            print(file, flush=True)
    return DONE


TASKS: dict[str, Callable[[list[str]], int]] = {
    "run": task_run,
    "train": task_train,
    "data": task_data,
    "table": task_table,
    "reproduce": task_reproduce,
    "records": task_records,
    "report": task_report,
    "compare": task_compare,
    "predict": task_predict,
    "study": task_study,
}

if __name__ == "__main__":
    main()
