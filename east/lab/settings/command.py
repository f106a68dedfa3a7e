"""The command line, parsed once: names and values in the order they were typed.

Values follow Hydra's grammar, but paths are always text, and names that Hydra cannot parse, such as été, are quoted.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
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
PLAIN = re.compile(r"(?!(true|false|null|inf|nan)$)[a-z_/][\w./-]*( [\w./-]+)*", re.ASCII | re.IGNORECASE)  # no quotes


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
        return [f"{name}={typed(value)}" for name, value in self.items()]

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
        lists: dict[str, list[str]] = {}
        for name, group in LISTS.items():
            if name not in self:
                continue
            entries = self[name]
            if not (isinstance(entries, list) and entries):
                example = ",".join([*groups()[group]][:2])
                raise ConfigError(f"{name}: expected a list such as {name}=[{example}], got {entries!r}")
            if clash := self.among([group]).without("dataset.limit").words:
                raise ConfigError(f"{clash[0]}: `{group}` and `{group}.*` cannot be combined with {name}=[…]")
            lists[group] = list(dict.fromkeys(map(str, entries)))
        for combination in product(*lists.values()):
            yield self.without(*LISTS).but(dict(zip(lists, combination, strict=True)))


def parsed(words: Sequence[str]) -> Iterator[Override]:
    """The words as Hydra reads them."""
    choices: Any = SimpleNamespace(get_group_options=lambda group, **_: [*groups().get(group, ())])  # of loss=glob(f*)
    parser = OverridesParser.create(choices)
    for word in words:
        if any("\ud800" <= c <= "\udfff" for c in word):  # surrogates stand for bytes that are not UTF-8
            raise ConfigError(f"cannot read {printable(word)}: expected UTF-8; rename the file or folder")
        word = word.lstrip("+")  # adds a key, or sets one that may exist: every value is checked later
        name, _, value = word.partition("=")
        for_hydra = value == "null" or value.startswith(("'", '"', "[", "{")) or "${" in value
        if name in TEXTS and not for_hydra and (name in PATHS or value.isspace()):
            word = with_quotes(name, value)
        try:
            yield from parser.parse_overrides([word])
        except HydraException as error:
            if for_hydra or name not in TEXTS:
                hint = f"special characters need quotes inside the shell's quotes: \"{name}='…'\" or \"{name}=['…']\""
                raise ConfigError(f"cannot read {word}: expected name=value; {hint}") from error
            yield from parser.parse_overrides([with_quotes(name, value)])


def with_quotes(name: str, value: str) -> str:
    """A word with its value in quotes, or each value of a sweep. The delimiter "," is one text, ~ the home folder."""
    texts = value.split(",") if all(value.split(",")) else [value]
    return f"{name}=" + ",".join(quoted(os.path.expanduser(text) if name in PATHS else text) for text in texts)


def quoted(value: str) -> str:
    return QuotedString(value, Quote.single).with_quotes()


def refuse_syntax(override: Override) -> None:
    """Refuse Hydra's syntax for deleting, for sweeps and for Hydra itself, which means nothing in a single command."""
    line, name = override.input_line, override.key_or_group
    if override.is_delete():
        raise ConfigError(f"{line}: nothing can be deleted from the config; write {name}=null for no value")
    if name.startswith(("hydra.", "hydra/")) or name == "experiment":
        raise ConfigError(
            f"{line}: Hydra itself only runs sweeps (-m); results_dir=… is where a command writes, debug=true says "
            "more, and files of --config-dir DIR can be presets"
        )
    if override.is_sweep_override():
        quotes = f" or quotes: \"{name}='a, b'\"" if name in TEXTS else ""
        raise ConfigError(f"{line}: several values need -m, or a list: losses=[f1,ce] datasets=[adult,keel]{quotes}")


def jobs_of(words: Sequence[str]) -> list[list[str]]:
    """The words of each job of a sweep: `loss=f1,ce` is two jobs, and `loss=glob(f*)` may be several."""
    (jobs,) = BasicSweeper.split_arguments(list(parsed(words)), max_batch_size=None)
    return [list(job) for job in jobs]


def check_plugins(sweep: Mapping[str, str]) -> None:
    """ConfigError if a sweep names a known launcher or sweeper that is not installed."""
    for kind in ("launcher", "sweeper"):
        name = sweep.get(f"hydra/{kind}", "")
        distribution = f"hydra-{name.partition('_')[0]}-{kind}"
        try:
            if name in PLUGINS:
                version(distribution)
        except PackageNotFoundError as error:
            raise ConfigError(f"hydra/{kind}={name} needs {distribution}: {install_hint(PLUGINS[name])}") from error


def typed(value: Any) -> str:
    """A value as the command line takes it: parsing gives the same value.

    >>> typed("true"), typed("plain"), typed([0.1234567, "a, b"])
    ("'true'", 'plain', "[0.1234567,'a, b']")
    """
    match value:
        case Mapping():
            return "{" + ",".join(f"{_dict_key(key)}:{typed(item)}" for key, item in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(map(typed, value)) + "]"
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case str():
            return value if PLAIN.fullmatch(value) else quoted(value)
    return str(value) if isinstance(value, int) else repr(float(value))


def _dict_key(key: Any) -> str:
    """A key of a mapping; Hydra takes no quotes there."""
    return re.sub(r"[\\()\[\]{}:=,]|^\s|\s$", r"\\\g<0>", key) if isinstance(key, str) else typed(key)
