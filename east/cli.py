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
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from east.choices import CONF, ConfigError, choose, groups

if TYPE_CHECKING:
    from east.settings.command import Command

DONE, FAILED, BAD_CONFIG, NO_DATA, INTERRUPTED = 0, 1, 2, 3, 130
RESUME = "Finished trials are saved. Rerun the same command to resume."
QUICKSTART = {"task": "reproduce", "table": "quickstart"}  # what a command does that names no task and no data
IMPORTING = ("loss.metric", "loss._target_", "model.target", "score", "config_dir", "trust")  # name the user's code
TASKS = (
    *("run", "train", "data", "table", "reproduce", "records", "report"),
    *("compare", "predict", "evaluate", "export", "study"),
)

HELP = """\
east-run: train classifiers on the metric they are judged by, and reproduce the papers that propose it.

  east-run                                           quickstart: four ways to a high F1, embedded data, a minute
  east-run dataset=mammography loss=f1 preset=budget search, select, ten trials, beside the published number
  east-run dataset=adult 'losses=[f1,ce,mcc]'        several losses, one table; also 'datasets=[…]'
  east-run task=reproduce table=east_v2_1            run what a paper's table still needs, then show it
  east-run task=compare dataset=csv dataset.path=my.csv dataset.target=label score=f1_macro
                                                     which model and loss for my data and my score? minutes=5
Everything is resumable: rerun the same command to finish what is missing.

Tasks (task=…)
  run        search hyperparameters, select, train the trials, print a table (default)
  train      one trial with the given seed=…           data       fetch, verify and describe dataset=… or dataset=all
  table      render table=… or table=all from records  reproduce  run what table=… still needs, then render
  records    export records to results/records         report     one HTML page with everything
  compare    which model for dataset=… and score=…?    predict    checkpoint=… input=… output=… keep=[id]
  evaluate   checkpoint=… input=…: scores of a saved model on labelled rows
  export     checkpoint=… output=model.onnx            study      study=soft_hard|balanced|gap|bias|all

Groups (name=choice)
{groups}

Often used
  preset=paper|budget|lean|quick  how much of the protocol  trials=10 seed=0 hyper.lr=0.001 hyper.batch_size=256
  device=auto|cpu|cuda|mps   dry_run=true  the plan       dataset.limit=1000  a stratified part of the data
  results_dir=results        save_model=true              force=true  redo finished trials; debug=true  tracebacks
  -m dataset=a,b loss=c,d    Hydra multirun               --config-dir DIR  your own configs, such as DIR/loss/mine.yaml
  --cfg job                  show the whole config        executor=processes|ray|submitit  cores, a cluster, SLURM

Shell completion: eval "$(east-run -sc install=bash)"   (also zsh, fish)
Exit codes: 0 done, 1 failed, 2 bad config, 3 data not available, 130 interrupted
"""


def main() -> None:
    usable_streams()
    try:
        os.getcwd()
        code = run(sys.argv[1:])
    except FileNotFoundError:
        print("The working directory has been deleted. Change to a folder that exists.", file=sys.stderr)
        code = FAILED
    except KeyboardInterrupt:  # a second one, while the first was being answered
        code = INTERRUPTED
    sys.exit(code)


def usable_streams() -> None:
    """Output that was closed goes nowhere, and a terminal without our characters shows question marks instead."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (for as long as we run)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def run(arguments: Sequence[str]) -> int:
    """Carry out a command line; return its exit code."""
    flags, words = separated(arguments)
    if {"-h", "--help"} & set(flags):
        return guarded(lambda: show_help(words), debug=False)
    if "--version" in arguments:
        from east import __version__

        print(f"east {__version__}")
        return DONE
    return guarded(lambda: through_hydra(flags, words) if flags else dispatch(parse(words)), "debug=true" in words)


def show_help(words: Sequence[str]) -> int:
    """Tasks, examples, and what there is to choose from, in conf/ and in the folder of --config-dir."""
    folder = next((word.partition("=")[2].strip("'") for word in words if word.startswith("config_dir=")), None)
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
    """Hydra's flags and the rest; --config-dir becomes a value of our own, so that every task knows it."""
    flags, words, left = [], [], list(arguments)
    while left:
        word = left.pop(0)
        if word.partition("=")[0] in ("--config-dir", "-cd"):
            folder = word.partition("=")[2] or (left.pop(0) if left else "")
            words.append(f"config_dir='{Path(folder).resolve()}'")
        elif word.startswith("-"):
            takes_value = word in ("--cfg", "-c", "--info", "-i", "--package", "-p")
            flags += [word, left.pop(0)] if takes_value and left else [word]
        else:
            words.append(word)
    return flags, words


def parse(words: Sequence[str]) -> "Command":
    """The command line as one object."""
    from east.settings.command import Command

    refuse_bare_words(words)
    return Command.parse(words)


def refuse_bare_words(words: Sequence[str]) -> None:
    """`east-run mammography` means `east-run dataset=mammography`, most likely."""
    for word in words:
        if "=" not in word and not word.startswith("~"):  # "~" is Hydra's sign for deleting
            choices = {"task": TASKS, **groups()}
            near = get_close_matches(word.lower(), [name for names in choices.values() for name in names], n=1)
            meant = [f"{group}={near[0]}" for group, names in choices.items() if near and near[0] in names]
            hint = f"did you mean {' or '.join(meant)}?" if meant else "such as dataset=mammography"
            raise ConfigError(f"{word!r}: expected name=value, {hint}")


def dispatch(command: "Command") -> int:
    """Hand a command to its task. One that names neither a task nor data is the quickstart."""
    from east.experiment.executors import interruptible

    interruptible()
    if any(name in ("config_dir", "trust") or "." in str(command.get(name)) for name in IMPORTING if command.get(name)):
        import_from_here()
    if not command.sections & {"task", "dataset", "datasets", "loss", "losses"}:
        command = command.but({**QUICKSTART, **command.values})
    name = choose("task", str(command.get("task", "run")), TASKS)
    return import_module(f"east.tasks.{name}").main(command)


def import_from_here() -> None:
    """Let loss.metric=my_file.my_metric lead to my_file.py where one works, for whoever asks for such a thing alone.

    Otherwise a file there that is called like an optional library would run in its place.
    """
    with suppress(FileNotFoundError):  # the folder was deleted
        sys.path.append(os.getcwd())


def through_hydra(flags: list[str], words: list[str]) -> int:
    """Multirun, --info and completion are Hydra's own; each job of a sweep comes back to `dispatch`."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    from east.settings import command, compose

    refuse_bare_words(words)
    if flags in (["--cfg", "job"], ["-c", "job"]):
        import yaml

        shown = compose.settings(parse(words)).model_dump(by_alias=True, mode="json")
        print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), end="")
        return DONE
    typed = (override.input_line for override in command.parsed(words))
    lines = [line for line in typed if line is not None]  # quoted where Hydra needs it
    own = [line for line in lines if not line.startswith("hydra")]
    folders = (one.value() for one in command.parsed(own) if one.key_or_group == "config_dir")
    folder = next((str(value) for value in folders if value is not None), None)
    if {"-m", "--multirun"} & set(flags):
        for job in command.sweep(own) if not any(line.startswith("hydra/sweeper") for line in lines) else ():
            compose.all_settings(job)
        # "++": Hydra composes each job before we complete it, when sections such as `model` are not there yet.
        known = groups(folder)
        lines = [f"++{line}" if line in own and line.partition("=")[0] not in known else line for line in lines]
    sys.argv = [sys.argv[0], *flags, *([f"--config-dir={folder}"] if folder else []), *lines]
    parent, codes = os.getpid(), [DONE]

    def carry_out(_composed: object) -> None:
        job = [line.removeprefix("++") for line in HydraConfig.get().overrides.task]
        print(f"\n# {' '.join(job)}", flush=True)
        codes.append(guarded(lambda: dispatch(parse(job)), "debug=true" in job))
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
        deaf_to_further_interrupts()
        by = f" by {interruption}" if str(interruption) else ""
        print(f"\nInterrupted{by}. {RESUME}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (whoever read our output has gone)
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
        wrong_path = isinstance(error, FileNotFoundError | NotADirectoryError)
        print(
            f"{type(error).__name__}: {error}\n{'' if wrong_path else f'{RESUME} '}(debug=true shows a traceback)",
            file=sys.stderr,
        )
        return FAILED


def deaf_to_further_interrupts() -> None:
    """Whoever presses Ctrl-C twice gets the same answer, not a traceback from the middle of it."""
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
