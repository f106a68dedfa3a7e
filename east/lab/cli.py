"""east-run: parse, dispatch, explain. Nothing heavy is imported before a task needs it, so --help answers at once.

Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted.
"""

import io
import os
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from east.choices import CONF, ConfigError, choose, groups, names_a_file

if TYPE_CHECKING:
    from east.lab.settings.command import Command
    from east.lab.settings.settings import Settings

DONE, FAILED, BAD_CONFIG, NO_DATA, INTERRUPTED = 0, 1, 2, 3, 130
QUICKSTART = {"task": "reproduce", "table": "quickstart"}  # for a command that names neither a task nor data
# Settings that may name the user's own code.
IMPORTING = ("loss.metric", "loss._target_", "loss.target", "model.target", "score", "config_dir", "trust")
WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p")  # Hydra flags that take a value
FLAGS = (
    *("-h", "--help", "--version", "-m", "--multirun", "-r", "--run", *WITH_VALUE, "--resolve"),
    *("--hydra-help", "-sc", "--shell-completion", "--config-dir", "-cd"),
)
FROM_FILES = ("table", "records", "report", "predict", "evaluate", "export", "study")  # tasks without data or loss
ONLY_FOR = {  # settings that the default task does not read -> the tasks that do
    **dict.fromkeys(("score", "candidates", "minutes", "keep_models"), ("compare",)),
    **dict.fromkeys(("checkpoint", "input", "output", "keep", "safe_csv"), ("predict", "evaluate", "export")),
    "table": ("table", "reproduce"),
}
TASKS = (
    *("run", "train", "data", "table", "reproduce", "records", "report"),
    *("compare", "predict", "evaluate", "export", "study"),
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

Tasks (task=…)
  run        search hyperparameters, select, train the trials, print a table (default)
  train      one trial with the given seed=…           data       fetch, verify and describe dataset=… or dataset=all
  table      render table=… or table=all from records  reproduce  run what table=… still needs, then render
  records    export records to results/records         report     one HTML page with everything
  compare    which model for dataset=… and score=…?    predict    checkpoint=… input=… output=… keep=[id]
  evaluate   checkpoint=… input=…: scores of a saved model on labelled rows
  export     checkpoint=… output=model.onnx            study      bias of small batches, simulated

Groups (name=choice)
{groups}

Often used
  preset=paper|budget|lean|quick  how much of the protocol  trials=10 seed=0 hyper.lr=0.001 hyper.batch_size=256
  device=auto|cpu|cuda|mps   dry_run=true  the plan       dataset.limit=1000  a stratified part of the data
  results_dir=results        save_model=true              force=true  redo finished trials; debug=true  tracebacks
  yes=true                   start plans of more than a day on a CPU without asking
  -m dataset=a,b loss=c,d    Hydra multirun               --config-dir DIR  your own configs, such as DIR/loss/mine.yaml
  --cfg job                  show the whole config        executor=processes|ray|submitit  cores, a cluster, SLURM

Shell completion: eval "$(east-run -sc install=bash)"   (also zsh, fish)
Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted
"""


def main() -> None:
    usable_streams()
    try:
        os.getcwd()
    except FileNotFoundError:
        print("The working directory has been deleted. Change to a folder that exists.", file=sys.stderr)
        sys.exit(FAILED)
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # a second Ctrl-C while the first was being handled
        code = INTERRUPTED
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # as in east-run --help | head -3
        discard_output()
    sys.exit(code)


def usable_streams() -> None:
    """Send closed streams to /dev/null; print a question mark for characters that the terminal lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for as long as we run)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line and return its exit code."""
    return guarded(lambda: answer(arguments), arguments)


def last_value(name: str, words: Sequence[str]) -> str:
    """What the last name=… says, in lower case, or nothing; errors of the parser need to know before it has run."""
    split = (word.removeprefix("++").partition("=") for word in words)
    return ["", *(value.strip().lower() for word, _, value in split if word == name)][-1]


def prints_last(words: Sequence[str]) -> bool:
    """Whether a command has done its work before it prints, as help and task=table have."""
    flags = {word.partition("=")[0] for word in words} & {"-h", "--help", "--version", *WITH_VALUE}
    return bool(flags) or last_value("task", words) in (*FROM_FILES, "data")


def answer(arguments: Sequence[str]) -> int:
    """Help and version, Hydra's flags, or a task."""
    flags, words = separated(arguments)
    if {"-h", "--help"} & set(flags):
        return show_help(words)
    if "--version" in flags:
        from east import __version__

        print(f"east {__version__}")
        return DONE
    return through_hydra(flags, words) if flags else dispatch(parse(words))


def show_help(words: Sequence[str]) -> int:
    """Print tasks, examples and the choices in conf/ and in the --config-dir folder."""
    folder = next((parse([word]).get("config_dir") for word in words if word.startswith("config_dir=")), None)
    lines = [
        textwrap.fill(
            " ".join(files),
            116,
            initial_indent=f"  {group:<10} ",
            subsequent_indent=" " * 13,
            break_on_hyphens=False,
        )
        for group, files in groups(folder).items()
    ]
    print(HELP.format(groups="\n".join(lines)))
    return DONE


def separated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags, and the other words; --config-dir becomes a setting, so that every task sees it."""
    flags, words, queue = [], [], list(arguments)
    while queue:
        word = queue.pop(0)
        name, given, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            folder = value if given or not queue else queue.pop(0)
            if not folder:
                raise ConfigError(f"{name}: expected a folder such as one with loss/mine.yaml, got nothing")
            from east.lab.settings.command import quoted

            words.append(f"config_dir={quoted(str(Path(folder).resolve()))}")
        elif word.startswith("-"):
            flags.append(choose("flag", name, FLAGS))
            if value or (name in WITH_VALUE and queue):
                flags.append(value or queue.pop(0))
        else:
            words.append(word)
    return flags, words


def parse(words: Sequence[str]) -> "Command":
    """The command line as one object."""
    from east.lab.settings.command import Command

    refuse_bare_words(words)
    command = Command.parse(words)
    find_code_of(command)
    return command


def find_code_of(command: "Command") -> None:
    """Let loss.metric=my_file.my_metric import my_file.py from the working directory.

    Only for commands that name such code: otherwise a local file could shadow an optional library.
    """
    if any(name in ("config_dir", "trust") or "." in str(command.get(name)) for name in IMPORTING if command.get(name)):
        with suppress(FileNotFoundError):  # the folder was deleted
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())


def refuse_bare_words(words: Sequence[str]) -> None:
    """Reject words without "=": `east-run mammography` most likely means `east-run dataset=mammography`."""
    for word in words:
        if "=" not in word and not word.startswith("~"):  # "~" deletes a key in Hydra
            if names_a_file(word):
                raise ConfigError(f"{word!r}: expected name=value, did you mean dataset.path={word}?")
            choices = {"task": TASKS, **groups()}
            close = get_close_matches(word.lower(), [name for names in choices.values() for name in names], n=1)
            guesses = [f"{group}={close[0]}" for group, names in choices.items() if close and close[0] in names]
            hint = f"did you mean {' or '.join(guesses)}?" if guesses else "such as dataset=mammography"
            raise ConfigError(f"{word!r}: expected name=value, {hint}")


def dispatch(command: "Command") -> int:
    """Hand a command to its task; without a task or data, run the quickstart."""
    from east.lab import bars
    from east.lab.experiment.executors import interruptible

    interruptible()
    if "task" not in command:
        refuse_forgotten_task(command)
    if not command.sections & {"task", "dataset", "datasets", "loss", "losses"}:
        command = command.but({**QUICKSTART, **command.values})
    name = choose("task", str(command.get("task", "run")), TASKS)
    settings = checked(name, command)
    if name in ("run", "train"):
        print(announcement(settings, command), flush=True)
    with bars.bar("starting"):
        task = import_module(f"east.lab.tasks.{name}")
    return task.main(command, *settings)


def refuse_forgotten_task(command: "Command") -> None:
    """Reject `east-run score=mcc minutes=5`, which would ignore both and train something else for longer."""
    from east.lab.settings.command import text

    for name, value in command.values.items():
        if name in ONLY_FOR and value is not None:
            tasks = " or ".join(f"task={task}" for task in ONLY_FOR[name])
            raise ConfigError(f"{name}={text(value, name)}: did you mean {tasks}? Without task=… it has no effect")


def checked(task: str, command: "Command") -> "list[Settings]":
    """The settings of a command's runs, checked before its task is imported: typos fail without waiting for torch."""
    from east.lab.settings import command as commands
    from east.lab.settings import compose

    if task in FROM_FILES and (unread := command.among([*commands.LISTS, *commands.LISTS.values()])):
        raise ConfigError(f"{commands.Command(unread).words[0]}: task={task} takes no dataset or loss; leave it out")
    if task not in ("run", "train", "data"):  # these read datasets=[…] and losses=[…] themselves
        command = command.without(*commands.LISTS)
    if task == "data" and command.get("dataset") == "all":
        command = command.without("dataset")
    settings = compose.all_settings(command)
    folder = Path(settings[0].results_dir).expanduser()
    file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
    if file:
        raise ConfigError(f"results_dir={folder}: expected a folder, but {file} is a file")
    return settings


def announcement(settings: "Sequence[Settings]", command: "Command") -> str:
    """One line before the work starts, with the defaults for what the user left open."""
    presets = ", ".join(sorted({of_run.preset.name for of_run in settings}))
    auto = "" if command.get("preset", "auto") != "auto" else " (auto)"
    datasets = ", ".join(dict.fromkeys(of_run.dataset.name for of_run in settings))
    losses = ", ".join(dict.fromkeys(of_run.loss.name for of_run in settings))
    searches = ", ".join(dict.fromkeys(of_run.search.name for of_run in settings))
    how = f"protocol={settings[0].protocol.name} preset={presets}{auto} search={searches}"
    return f"{datasets}: {losses} | {how}"


def through_hydra(flags: list[str], words: list[str]) -> int:
    """Let Hydra handle multirun, --info and completion; each job of a sweep comes back to `dispatch`."""
    from east.lab.settings import command

    refuse_bare_words(words)
    sweeping = bool({"-m", "--multirun"} & set(flags))
    if shows_job(flags) and not sweeping:
        return show_config(flags, parse(words))
    typed = (override.input_line for override in command.parsed(words))
    lines = [line for line in typed if line is not None]  # quoted where Hydra needs it
    settings = [line for line in lines if not line.startswith("hydra")]
    folders = (override.value() for override in command.parsed(settings) if override.key_or_group == "config_dir")
    folder = next((str(value) for value in folders if value is not None), None)
    group_names = groups(folder)
    extra = []
    if sweeping and not any(line.startswith("hydra/sweeper") for line in lines):
        extra = confirmed(command.sweep(settings, group_names))
    if sweeping or {"--cfg", "-c", "--info", "-i"} & set(flags):
        # "++": Hydra composes each job before we complete it, when sections such as `model` do not exist yet.
        plain = [line for line in lines if line not in settings or line.partition("=")[0] in group_names]
        lines = [line if line in plain else f"++{line}" for line in lines]
    folder_flag = [f"--config-dir={folder}"] if folder else []
    return run_hydra([*flags, *folder_flag, *lines, *extra])


def shows_job(flags: Sequence[str]) -> bool:
    """Whether --cfg job is among the flags."""
    values = [value for flag, value in pairwise(flags) if flag in ("--cfg", "-c")]
    return "job" in [choose("--cfg", value, ("job", "hydra", "all")) for value in values]


def show_config(flags: Sequence[str], command: "Command") -> int:
    """Print the composed config, always resolved, or the part of it that --package names."""
    import yaml

    from east.lab.settings import compose

    config: Any = compose.settings(command).model_dump(by_alias=True, mode="json", exclude={"fixed"})
    package = next((value for flag, value in pairwise(flags) if flag in ("--package", "-p")), None)
    for name in package.split(".") if package else ():
        config = config[choose("package", name, config)]
    print(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), end="")
    return DONE


def confirmed(jobs: "Sequence[Command]") -> list[str]:
    """Check every job of a sweep and confirm all of them at once; return the extra overrides for each job."""
    from east.lab.settings import compose

    for job in jobs:
        find_code_of(job)
    training = [job for job in jobs if job.get("task", "run") in ("run", "train")]
    settings = [of_run for job in jobs for of_run in compose.all_settings(job)]
    if not training or settings[0].dry_run:
        return []
    from east.lab.tasks import plan

    def shorter(preset: str) -> "list[Settings]":
        return [of_run for job in training for of_run in compose.all_settings(job.but(preset=preset))]

    plan.made([of_run for job in training for of_run in compose.all_settings(job)], shorter).confirm()
    return ["++yes=true"]


def run_hydra(arguments: Sequence[str]) -> int:
    """Run Hydra's main function; `dispatch` carries out every job of a sweep."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    sys.argv = [sys.argv[0], *arguments]
    parent, codes = os.getpid(), [DONE]

    def dispatch_job(job: list[str]) -> int:
        shown = [line for line in job if line.lower() != "yes=true"]  # Hydra writes yes=True
        print(f"\n# {' '.join(shown)}", flush=True)
        return dispatch(parse(job))

    def carry_out(_composed: object) -> None:
        job = [line.removeprefix("++") for line in HydraConfig.get().overrides.task]
        codes.append(guarded(lambda: dispatch_job(job), job))
        if codes[-1] == INTERRUPTED:
            sys.exit(INTERRUPTED)
        if codes[-1] and os.getpid() != parent:
            raise RuntimeError(f"exit code {codes[-1]}")  # the only way to tell Hydra that a launcher's job failed

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(carry_out)()
    except SystemExit as error:  # Hydra exits with 1 for any error, after printing it
        codes.append(DONE if not error.code else FAILED if isinstance(error.__context__, RuntimeError) else BAD_CONFIG)
    return max(codes)


def guarded(task: Callable[[], int], words: Sequence[str]) -> int:
    """Run the task of a command line and return its exit code; print a few lines for an error."""
    debug = last_value("debug", words) == "true"
    if debug:
        os.environ["EAST_DEBUG"] = "1"
    warnings.showwarning = partial(warn, set())  # type: ignore[assignment]
    try:
        return task()
    except KeyboardInterrupt as interruption:
        ignore_interrupts()
        by = f" by {interruption}" if str(interruption) else ""
        print(f"\nInterrupted{by}.{noted(interruption)}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and output_is_closed():  # as in east-run | head -1
            return DONE if prints_last(words) else unfinished()
        if debug:
            raise
        return explained(error)


def output_is_closed() -> bool:
    """Whether nobody reads our output any more; if so, discard the rest. A worker's pipe may be broken instead."""
    try:
        print(flush=True)  # a flush alone succeeds: what could not be written is gone
    except BrokenPipeError:
        discard_output()
        return True
    return False


def discard_output() -> None:
    """Send what is still printed to /dev/null, including what Python flushes on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def unfinished() -> int:
    with suppress(BrokenPipeError):  # as in east-run 2>&1 | head -1
        print("stdout was closed. Rerun the same command to resume.", file=sys.stderr)
    return FAILED


def warn(already_shown: set[str], message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on its own line above the bars, each only once."""
    from east.lab import bars

    if str(message) not in already_shown:
        already_shown.add(str(message))
        bars.say(f"warning: {message}")


def explained(error: Exception) -> int:
    """Print what went wrong in a few lines; return the exit code."""
    if isinstance(error, ConfigError):
        print(f"config: {error}", file=sys.stderr)
        return BAD_CONFIG
    if type(error).__name__ == "DataError":  # its module is heavy
        print(f"data: {error}", file=sys.stderr)
        return NO_DATA
    print(f"{type(error).__name__}: {error}\n(debug=true shows a traceback){noted(error)}", file=sys.stderr)
    return FAILED


def noted(error: BaseException) -> str:
    """The scheduler's note that finished trials are saved, if there are any."""
    return "".join(f" {note}" for note in getattr(error, "__notes__", ()))


def ignore_interrupts() -> None:
    """Ignore a second Ctrl-C, which would print a traceback while the first is being handled."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
