"""Names that people type: the valid choices, and suggestions for misspelt ones."""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

HERE = Path(__file__).resolve().parent
CONF = next(folder for folder in (HERE / "conf", HERE.parent / "conf") if (folder / "config.yaml").is_file())
DISTRIBUTION = "evaluation-aligned-training"  # this project's name on the package index


class ConfigError(ValueError):
    """The command cannot be run; the message says why and what would work."""


def choose(kind: str, name: str, choices: Iterable[str], meant: str | None = None) -> str:
    """Return `name` if it is one of `choices`; otherwise raise a ConfigError that suggests `meant`, or the closest one.

    >>> choose("metric", "f1", ["f1", "mcc"])
    'f1'
    """
    choices = [*choices]
    if name in choices:
        return name
    choices.sort()
    near = [meant] if meant else get_close_matches(str(name).lower(), choices, n=1)
    hint = f", did you mean {near[0]!r}?" if near else "."
    raise ConfigError(f"unknown {kind} {name!r}{hint} Choices: {', '.join(choices)}")


def names_a_file(word: str) -> bool:
    """Whether a word is an existing file, or has the extension of a table."""
    return Path(word).is_file() or Path(word).suffix in (".csv", ".tsv", ".gz", ".parquet", ".feather", ".xlsx")


def printable(text: str) -> str:
    """Text with unprintable characters escaped, for messages that quote a file or its name.

    >>> printable("two\\nlines")
    'two\\\\nlines'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# What steers a terminal: control characters but for newline and tab, and marks that change the direction of writing.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class EscapedStream:
    """A text stream that steers no terminal, whatever files, records and names of classes are quoted in its text.

    >>> print("red: \\x1b[31m", file=EscapedStream(sys.stdout))
    red: \\x1b[31m
    """

    def __init__(self, stream: TextIO):
        self._wrapped = stream  # the name by which tqdm knows two streams to be the same

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def write(self, text: str) -> int:
        self._wrapped.write(STEERING.sub(lambda found: ascii(found[0])[1:-1], text))
        return len(text)


def install_hint(extra: str) -> str:
    """The command that installs an optional dependency, also in a checkout that was installed with `pip install .`.

    >>> install_hint("ray")
    "pip install 'evaluation-aligned-training[ray]'"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def groups(user_folder: str | Path | None = None) -> dict[str, dict[str, Path]]:
    """Config group -> choice -> file, from conf/ and from a user's folder with the same layout."""
    if user_folder is not None and not os.path.isdir(user_folder):
        raise ConfigError(f"--config-dir: expected a folder such as one with loss/mine.yaml, got {str(user_folder)!r}")
    by_group = {group: dict(files) for group, files in _bundled().items()}
    for file in sorted(Path(user_folder).glob("*/*.yaml")) if user_folder else ():
        files = by_group.setdefault(file.parent.name, {})
        if file.stem in files:
            raise ConfigError(f"{file}: {file.parent.name}={file.stem} already exists; rename your file")
        files[file.stem] = file
    return by_group


@cache
def _bundled() -> dict[str, dict[str, Path]]:
    """The files of conf/, which do not change while a command runs."""
    by_group: dict[str, dict[str, Path]] = {}
    for file in sorted(CONF.glob("*/*.yaml")):
        by_group.setdefault(file.parent.name, {})[file.stem] = file
    return by_group


_importing: ContextVar[bool] = ContextVar("_importing", default=True)


@contextmanager
def without_imports() -> Iterator[None]:
    """Inside this block, dotted paths outside east are not imported, unless their module is already loaded.

    For reading records: they may come from anyone, and importing a module runs its code.
    """
    token = _importing.set(False)
    try:
        yield
    finally:
        _importing.reset(token)


def import_by_path(path: str) -> Any:
    """The object behind a dotted path such as package.module.Name; ConfigError if it does not exist."""
    module, _, name = str(path).rpartition(".")
    try:
        if not (_importing.get() or module.partition(".")[0] == "east" or module in sys.modules):
            raise ImportError("modules that a record names are not imported")
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot import {str(path)!r}: expected package.module.name; {error}") from error
