"""The command line, parsed once: names and values in the order they were typed.

Values follow Hydra's grammar, but paths are always text, and names that Hydra cannot parse, such as été, are quoted.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from types import SimpleNamespace
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from east.choices import ConfigError, groups, install_hint, printable

PATHS = ("dataset.path", "results_dir", "data_dir", "input", "output", "checkpoint", "config_dir")
TEXTS = (*PATHS, "dataset.target", "dataset.delimiter", "dataset.positive")  # any text, quoted for Hydra if necessary
PLUGINS = {"joblib": "joblib", "submitit_local": "slurm", "submitit_slurm": "slurm", "optuna": "optuna"}  # and extras
LISTS = {"datasets": "dataset", "losses": "loss"}  # name of a list -> what each entry is


class Command(dict[str, Any]):
    """What the user asked for: name -> value. If a name occurs twice, the last value counts."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Command":
        """One command from words such as `loss=f1`, `hyper.lr=0.01` or `hyper={lr: 0.01}`."""
        command = cls()
        for override in parsed(words):
            refuse_syntax(override)
            name, value = override.key_or_group, override.value()
            if isinstance(value, Mapping) and name in (*groups(), "hyper", "split"):
                command.update({f"{name}.{key}": item for key, item in value.items()})
            else:
                command[name] = value
        path = command.get("dataset.path")
        if path is None or {"dataset", "datasets"} & command.keys():
            return command
        return cls({"dataset": "images" if os.path.isdir(str(path)) else "csv", **command})

    @property
    def words(self) -> list[str]:
        """The command as one types it: parsing these words gives the same values."""
        return [f"{name}={typed(value, name)}" for name, value in self.items()]

    def but(self, values: Mapping[str, Any] | None = None, **plain: Any) -> "Command":
        """The same command with these values, which take precedence."""
        return Command({**self, **(values or {}), **plain})

    def without(self, *names: str) -> "Command":
        return Command({name: value for name, value in self.items() if name not in names})

    def among(self, sections: Sequence[str]) -> "Command":
        """The part of the command that sets these sections, such as `hyper` by hyper.lr=0.01."""
        return Command({name: value for name, value in self.items() if name.partition(".")[0] in sections})

    def each(self) -> Iterator["Command"]:
        """One command for every pair of losses=[f1,ce] datasets=[adult]; without such lists, just one."""
        lists = {group: self._list(name) for name, group in LISTS.items() if name in self}
        for entries in product(*lists.values()):
            yield self.without(*LISTS).but(dict(zip(lists, entries, strict=True)))

    def _list(self, name: str) -> list[str]:
        """The entries of losses=[…] or datasets=[…], each once."""
        entries, group = self[name], LISTS[name]
        if not (isinstance(entries, list) and entries):
            raise ConfigError(
                f"{name}: expected a list such as {name}=[{','.join([*groups()[group]][:2])}], got {entries!r}"
            )
        if clash := self.among([group]).without("dataset.limit").words:
            raise ConfigError(f"{clash[0]}: `{group}` and `{group}.*` cannot be combined with {name}=[…]")
        return list(dict.fromkeys(map(str, entries)))


def parsed(words: Sequence[str]) -> Iterator[Override]:
    """The words as Hydra reads them."""
    choices: Any = SimpleNamespace(get_group_options=lambda group, **_: [*groups().get(group, ())])  # of loss=glob(f*)
    parser = OverridesParser.create(choices)
    for word in words:
        if any("\ud800" <= c <= "\udfff" for c in word):  # surrogates stand for bytes that are not UTF-8
            raise ConfigError(f"cannot read {printable(word)}: expected UTF-8; rename the file or folder")
        word = word.lstrip("+")  # adds a key, or sets one that may exist: every value is checked later
        name, _, value = word.partition("=")
        written = value == "null" or value.startswith(("'", '"', "[", "{")) or "${" in value  # for Hydra
        if name in TEXTS and not written and (name in PATHS or value.isspace()):
            word = f"{name}={all_quoted(name, value)}"
        try:
            yield from parser.parse_overrides([word])
        except HydraException as error:
            if written or name not in TEXTS:
                raise ConfigError(unreadable(name, value)) from error
            yield from parser.parse_overrides([f"{name}={all_quoted(name, value)}"])


def all_quoted(name: str, value: str) -> str:
    """The texts of a sweep, each in quotes; the delimiter "," is one text. ~ is the home folder."""
    texts = value.split(",") if all(value.split(",")) else [value]
    return ",".join(quoted(os.path.expanduser(item) if name in PATHS else item) for item in texts)


def jobs_of(words: Sequence[str]) -> list[Command]:
    """One command per job of a sweep: `loss=f1,ce` is two jobs, and `loss=glob(f*)` may be several."""
    (jobs,) = BasicSweeper.split_arguments(list(parsed(words)), max_batch_size=None)
    return [Command.parse(job) for job in jobs]


def plugin(kind: str, typed: Mapping[str, str]) -> str | None:
    """The launcher or sweeper that a sweep names; ConfigError if it is a known one that is not installed."""
    name = typed.get(f"hydra/{kind}", "basic")
    distribution = f"hydra-{name.partition('_')[0]}-{kind}"
    if name in PLUGINS:
        try:
            version(distribution)
        except PackageNotFoundError as error:
            raise ConfigError(f"hydra/{kind}={name} needs {distribution}: {install_hint(PLUGINS[name])}") from error
    return None if name == "basic" else name


def quoted(value: str) -> str:
    return QuotedString(value, Quote.single).with_quotes()


def typed(value: Any, name: str | None = None) -> str:
    """A value as the command line takes it: parsing gives the same value. name: whose value it is; None inside a list.

    >>> typed("true"), typed("plain"), typed([0.1234567, "a, b"])
    ("'true'", 'plain', "[0.1234567,'a, b']")
    """
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_dict_key(key)}:{typed(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(typed, value)) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value if _reads_back(value, name) else quoted(value)
    return repr(float(value)) if isinstance(value, float) else str(value)


@cache
def _reads_back(value: str, name: str | None) -> bool:
    """Whether a text without quotes is read as this text, and not as a number, a list, a sweep or an error."""
    word = f"{name}={value}" if name else f"value=[{value}]"
    try:
        (override,) = parsed([word])
    except ConfigError:
        return False
    return override.value() == (value if name else [value])


def _dict_key(key: Any) -> str:
    """A key of a mapping; Hydra takes no quotes there."""
    return re.sub(r"[\\()\[\]{}:=,]|^\s|\s$", r"\\\g<0>", key) if isinstance(key, str) else typed(key)


def unreadable(name: str, value: str) -> str:
    """What to write instead of an override that Hydra cannot parse."""
    if not re.fullmatch(r"[\w./@+~-]+", name, re.ASCII):
        return f"cannot read {name}={value}: expected name=value, such as loss=f1"
    items = [quoted(item.strip("' \"")) for item in value.strip("[]").split(",")]
    fixed = f"[{','.join(items)}]" if value.startswith("[") else quoted(value.strip("' \""))
    return f'cannot read {name}={value}: special characters need quotes inside the shell\'s quotes: "{name}={fixed}"'


def refuse_syntax(override: Override) -> None:
    """Refuse Hydra's syntax for deleting, for sweeps and for Hydra itself, which means nothing in a single command."""
    line, name = override.input_line, override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{line}: nothing can be deleted from the config; write {name}=null for no value")
    if name.startswith(("hydra.", "hydra/")):
        raise ConfigError(
            f"{line}: Hydra itself only runs sweeps (-m); results_dir=… is where a command writes, debug=true says more"
        )
    if name == "experiment":
        raise ConfigError(f"{line}: there is no group of experiments; files of --config-dir DIR can be presets instead")
    if override.is_sweep_override() and name in TEXTS:
        raise ConfigError(f"{name}: several values need -m; a comma inside a value needs quotes: \"{name}='a, b'\"")
    if override.is_sweep_override():
        raise ConfigError(f"{line}: several values need -m, or a list: losses=[f1,ce] datasets=[adult,mammography]")
