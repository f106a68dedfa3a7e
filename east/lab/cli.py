"""east-run: parse, dispatch, explain. Nothing heavy is imported before a task needs it, so --help answers at once.

Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted.
"""

import argparse
import io
import os
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from east.choices import CONF, ConfigError, EscapedStream, choose, groups, names_a_file
from east.lab.tasks import TASKS

if TYPE_CHECKING:
    from east.lab.settings.command import Command
    from east.lab.settings.settings import Settings

DONE, FAILED, BAD_CONFIG, NO_DATA, INTERRUPTED = 0, 1, 2, 3, 130
QUICKSTART = {"task": "reproduce", "table": "quickstart"}  # for a command that names neither a task nor data
IMPORTING = (
    "logger",
    "loss.metric",
    "loss._target_",
    "loss.target",
    "model.target",
    "score",
    "candidates",
    "config_dir",
    "trust",
)

HELP = """\
east-run: train classifiers on the metric they are judged by, and reproduce the papers that propose it.

  east-run                                           quickstart: four methods for F1 on built-in data, 1-2 minutes
  east-run dataset=mammography loss=f1 preset=budget search, select, ten trials, beside the published number
  east-run dataset=adult 'losses=[f1,ce,mcc]'        several losses, one table; also 'datasets=[…]'
  east-run task=reproduce table=east_v2_1            run what a paper's table still needs, then show it
  east-run task=compare dataset.path=my.csv dataset.target=label score=f1 minutes=5
                                                     which model and loss for my data and my score?
Everything is resumable: rerun the same command to finish what is missing.

Tasks (task=…; with --help, the settings of that task)
{tasks}

Groups (name=choice)
{groups}

Often used
  preset=paper|budget|lean|quick  how much of the protocol  trials=10 seed=0 hyper.lr=0.001 hyper.batch_size=256
  device=auto|cpu|cuda|mps   dry_run=true  the plan       dataset.limit=1000  a stratified part of the data
  results_dir=results        save_model=true              force=true  redo finished trials; debug=true  tracebacks
  yes=true                   start plans of more than a day without asking
  -m dataset=a,b loss=c,d    Hydra multirun               --config-dir DIR  your own configs, such as DIR/loss/mine.yaml
  --cfg job                  show the whole config        executor=processes|ray|submitit  cores, a cluster, SLURM

Shell completion: eval "$(east-run -sc install=bash)"   (also zsh, fish)
Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted
"""


class Arguments(argparse.ArgumentParser):
    """The flags of a command line, and its other words. Flags that nobody knows are errors like any other."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("words", nargs="*")
        for names in (("-h", "--help"), ("--version",), ("-m", "--multirun"), ("-sc", "--shell-completion")):
            self.add_argument(*names, action="store_true")
        self.add_argument("-c", "--cfg", choices=["job"])
        self.add_argument("-p", "--package")
        self.add_argument("-cd", "--config-dir")
        self.add_argument("-r", "--run", "--resolve", action="store_true")  # as always

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; there is one config: --config-dir DIR adds files, --cfg job shows it")


def main() -> None:
    usable_streams()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # as in east-run --help | head -3; Python would try again on exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def usable_streams() -> None:
    """Send closed streams to /dev/null; print a question mark for characters that the terminal lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for as long as we run)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(words: Sequence[str]) -> int:
    """Carry out a command line and return its exit code."""
    with redirect_stdout(EscapedStream(sys.stdout)), redirect_stderr(EscapedStream(sys.stderr)):  # type: ignore[type-var]
        return guarded(lambda: respond(words), words)


def respond(arguments: Sequence[str]) -> int:
    """Help and version, a sweep, or a task."""
    flags = Arguments().parse_intermixed_args(arguments)
    words, folder = flags.words, flags.config_dir
    if flags.help:
        task = next((word.removeprefix("task=") for word in words if word.startswith("task=")), None)
        with suppress(BrokenPipeError):  # as in east-run --help | head -1
            print(help_of(task) if task else general_help(folder), end="")
        return DONE
    if flags.version:
        from east import __version__

        print(f"east {__version__}")
        return DONE
    refuse_bare_words(words)
    if flags.package and not flags.cfg:
        raise ConfigError(f"-p {flags.package} shows a part of the config: add --cfg job")
    if folder is not None:  # a setting, so that every task sees it
        from east.lab.settings.command import quoted

        words.append(f"config_dir={quoted(folder and os.path.abspath(folder))}")
    if flags.shell_completion:
        return through_hydra(["-sc", *words])
    if flags.cfg:
        return show_config(parse_command(words), flags.package)
    return multirun(words) if flags.multirun else dispatch(parse_command(words))


def general_help(folder: str | None) -> str:
    """Tasks, and the choices in conf/ and in the --config-dir folder."""
    fill = partial(textwrap.fill, width=116, subsequent_indent=" " * 13, break_on_hyphens=False)
    choices = (fill(f"  {group:<10} {' '.join(files)}") for group, files in groups(folder).items())
    tasks = (f"  {name:<10} {task.about}" for name, task in TASKS.items())
    return HELP.format(tasks="\n".join(tasks), groups="\n".join(choices))


def help_of(name: str) -> str:
    """A task, and the part of conf/config.yaml that it reads."""
    task = TASKS[choose("task", name, TASKS)]
    text = (CONF / "config.yaml").read_text(encoding="utf-8").replace('"yes": false', "yes: false  ")  # YAML's quotes
    settings = re.findall(r"^(?:  - )?((\w+):.*(?:\n +[\w#].*)*)", text, re.MULTILINE)
    lines = [text for text, setting in settings if setting in task.reads]
    return "\n".join([f"task={name}: {task.about}", "", *lines, "", "east-run --help lists the choices", ""])


def refuse_bare_words(words: Sequence[str]) -> None:
    """Reject words without "=": `east-run mammography` most likely means `east-run dataset=mammography`."""
    for word in words:
        if "=" not in word and not word.startswith("~"):  # "~" deletes a key in Hydra
            known: dict[str, Iterable[str]] = {"task": TASKS, **groups()}
            close = get_close_matches(word.lower(), [name for names in known.values() for name in names], n=1)
            guesses = [f"{group}={close[0]}" for group, names in known.items() if close and close[0] in names]
            guesses = [f"dataset.path={word}"] if names_a_file(word) else guesses
            hint = f"did you mean {' or '.join(guesses)}?" if guesses else "such as dataset=mammography"
            raise ConfigError(f"{word!r}: expected name=value, {hint}")


def parse_command(words: Sequence[str]) -> "Command":
    """The command line as one object. If it names code of the user's own, modules of the working directory are found.

    Other commands do not look there, since a local file could shadow an optional library.
    """
    from east.lab.settings.command import Command

    command = Command.parse(words)
    if any(name in ("config_dir", "trust") or "." in str(command[name]) for name in IMPORTING if name in command):
        sys.path += {os.getcwd()} - {*sys.path}
    return command


def dispatch(command: "Command") -> int:
    """Hand a command to its task; without a task or data, run the quickstart."""
    from east.lab import bars
    from east.lab.experiment.executors import interruptible

    interruptible()
    if not command.among(("task", "table", "dataset", "datasets", "loss", "losses")):
        command = command.but(QUICKSTART)
    command, settings = checked_command(command)
    name = settings[0].task
    if name in ("run", "train"):
        print(announcement(settings, command), flush=True)
    with bars.bar("starting"):
        task = import_module(f"east.lab.tasks.{'run' if name == 'train' else name}")
    return task.main(command, *settings)


def checked_command(command: "Command") -> "tuple[Command, list[Settings]]":
    """A command with the defaults of its task, and the settings of its runs; ConfigError for settings without effect.

    Mistakes are found before the task is imported, so that nobody waits for torch to be told of a typo.
    """
    from east.lab.settings.command import LISTS
    from east.lab.settings.compose import all_settings

    name = choose("task", str(command.get("task", "run")), TASKS)
    task = TASKS[name]
    for setting, value in command.items():
        first = setting.partition(".")[0]
        others = [f"task={other}" for other in TASKS if first in TASKS[other].reads]
        if value is not None and others and first not in task.reads:
            hint = f"did you mean {' or '.join(others)}?" if len(others) < 4 else "leave it out"
            raise ConfigError(f"{setting}={value}: task={name} does not read it; {hint}")
    command = command.but({setting: value for setting, value in task.sets.items() if setting not in command})
    lists = () if name in ("run", "train", "data") else LISTS  # others read datasets=[…] and losses=[…] themselves
    every = ("dataset",) if (name, command.get("dataset")) == ("data", "all") else ()
    settings = all_settings(command.without(*lists, *every))
    folder = settings[0].results_dir
    if task.only_reads and "results_dir" in command and not os.path.isdir(folder):
        raise ConfigError(f"results_dir={folder}: there is no such folder")
    return command, settings


def announcement(settings: "Sequence[Settings]", command: "Command") -> str:
    """One line before the work starts, with the defaults for what the user left open."""
    rows = [(s.dataset.name, s.loss.name, s.preset.name, s.search.name) for s in settings]
    datasets, losses, presets, searches = (", ".join(dict.fromkeys(names)) for names in zip(*rows, strict=True))
    auto = "" if command.get("preset", "auto") != "auto" else " (auto)"
    return f"{datasets}: {losses} | protocol={settings[0].protocol.name} preset={presets}{auto} search={searches}"


def show_config(command: "Command", package: str | None) -> int:
    """Print the composed config, or the part of it that --package names."""
    import yaml

    config: Any = checked_command(command)[1][0].model_dump(by_alias=True, mode="json", exclude={"fixed"})
    for name in package.split(".") if package else ():
        config = config[choose("package", name, config)]
    print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")
    return DONE


def multirun(words: Sequence[str]) -> int:
    """Let Hydra's launcher carry out a sweep: its jobs are checked and confirmed at once, and shown in one table.

    An optimising sweeper chooses its jobs one after another, and gets the validation score of each.
    """
    from east.lab.settings.command import check_plugins, jobs_of, parsed

    overrides = list(parsed(words))
    lines = [override.input_line or "" for override in overrides]  # quoted where Hydra needs it
    typed = {o.key_or_group: str(value) for o in overrides if (value := o.value()) is not None}
    check_plugins(typed)
    sweeper = typed.get("hydra/sweeper", "basic")
    jobs = jobs_of([line for line in lines if not line.startswith("hydra")]) if sweeper == "basic" else []
    training = confirmed(jobs)
    lines += ["yes=true"] if training else []
    logs = typed.get("hydra.sweep.dir", f"{typed.get('results_dir', 'results')}/sweeps")
    if typed.get("hydra/launcher", "").startswith("submitit"):
        print(f"what the jobs print goes to {logs}/.submitit", flush=True)
    if sweeper == "optuna" and "hydra.sweeper.direction" not in typed:
        lines.append("hydra.sweeper.direction=maximize")
    # "++": Hydra composes each job before we complete it, when sections such as `model` do not exist yet.
    folder = typed.get("config_dir")
    plain = ("hydra", *(f"{group}=" for group in groups(folder)))
    lines = [line if line.startswith(plain) else f"++{line}" for line in lines]
    code = through_hydra(["-m", *([f"--config-dir={folder}"] if folder else []), *lines])
    if training and code in (DONE, FAILED):
        from east.lab.tasks import plan
        from east.lab.tasks.run import results

        print(f"\n{results(plan.made(training))[0]}")
    best = Path(logs, "optimization_results.yaml")
    if sweeper != "basic" and not code and best.is_file():
        print("\n" + best.read_text(encoding="utf-8").replace("++", ""), end="")
    return code


def confirmed(jobs: Sequence[Sequence[str]]) -> "list[Settings]":
    """Check every job of a sweep, and confirm all that train at once; return the settings of those."""
    checked = [settings for job in jobs for settings in checked_command(parse_command(job))[1]]
    training = [settings for settings in checked if settings.task in ("run", "train") and not settings.dry_run]
    if training:
        from east.lab.tasks import plan

        plan.made(training).confirm()
    return training


def through_hydra(arguments: Sequence[str]) -> int:
    """Run Hydra's main function; `dispatch` carries out every job of a sweep."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    sys.argv = [sys.argv[0], *arguments]
    parent, codes = os.getpid(), [DONE]
    optimised = any(word.startswith("hydra/sweeper=") for word in arguments)

    def carry_out(_composed: object) -> float | None:
        job = [line.removeprefix("++") for line in HydraConfig.get().overrides.task]
        shown = " ".join(line for line in job if line.lower() != "yes=true")  # Hydra writes yes=True
        print(f"\n# {shown}", flush=True)
        codes.append(guarded(lambda: dispatch(parse_command(job)), job))
        if codes[-1] == INTERRUPTED:
            sys.exit(INTERRUPTED)
        if codes[-1] and os.getpid() != parent:
            raise RuntimeError(f"exit code {codes[-1]}")  # the only way to tell Hydra that a launcher's job failed
        if codes[-1] or not optimised:
            return None
        from east.lab.tasks.run import validation_score

        return validation_score(checked_command(parse_command(job))[1])

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(carry_out)()
    except SystemExit as error:  # Hydra exits with 1 for any error, after printing it
        codes.append(DONE if not error.code else FAILED if isinstance(error.__context__, RuntimeError) else BAD_CONFIG)
    return max(codes)


def guarded(task: Callable[[], int], words: Sequence[str]) -> int:
    """Run the task of a command line and return its exit code; print a few lines for an error."""
    error: BaseException
    debug = any(word.removeprefix("++").lower() == "debug=true" for word in words)
    if debug:
        os.environ["EAST_DEBUG"] = "1"
    warnings.showwarning = partial(warn, set())  # type: ignore[assignment]
    try:
        return task()
    except KeyboardInterrupt as interruption:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would print a traceback
        by = f" by {interruption}" if str(interruption) else ""
        error, code, text = interruption, INTERRUPTED, f"\nInterrupted{by}."
    except Exception as failure:
        if debug:
            raise
        error, code, text = failure, FAILED, f"{type(failure).__name__}: {failure}\n(debug=true shows a traceback)"
        if isinstance(failure, ConfigError):
            code, text = BAD_CONFIG, f"config: {failure}"
        elif type(failure).__name__ == "DataError":  # its module is heavy
            code, text = NO_DATA, f"data: {failure}"
        elif isinstance(failure, BrokenPipeError):
            text += "\nA pipe was closed before the command ended, as by | head -1. Rerun the same command to resume."
    with suppress(BrokenPipeError):  # as in east-run 2>&1 | head -1
        print(text, *getattr(error, "__notes__", ()), file=sys.stderr)  # the scheduler notes that trials are saved
    return code


def warn(already_shown: set[str], message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on its own line above the bars, each only once."""
    from east.lab import bars

    if str(message) not in already_shown:
        already_shown.add(str(message))
        bars.say(f"warning: {message}")


if __name__ == "__main__":
    main()
