"""A run: one dataset and one loss under a protocol, with its data loaded and its parts checked."""

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from east.choices import HERE, ConfigError, import_by_path
from east.lab import bars, data, models
from east.lab.data.common import assign, leave_out
from east.lab.settings.settings import DatasetSection, Science, Settings, Split
from east.lab.training.devices import pick_device
from east.lab.training.evaluation import check_decisions, metric_of
from east.lab.training.objective import build_loss, with_average
from east.lab.training.population import Trial
from east.lab.training.timing import Size


@dataclass
class Run:
    """The settings, the config of a trial before any search, and the `chosen` one once the search is on record."""

    settings: Settings
    science: Science
    size: Size
    notes: tuple[str, ...] = ()  # on how its files were read
    chosen: Science | None = None

    @classmethod
    def of(cls, settings: Settings) -> "Run":
        """Load the data and check that all parts fit together; ConfigError or DataError otherwise."""
        with bars.bar(f"loading {settings.dataset.name}"):
            loaded = load(settings.dataset, settings.data_dir)
        train, *_ = assign(loaded, **split_options(settings.split.at(0)))  # raises if they cannot be split this way
        check_parts(settings, loaded)
        science = settings.science(loaded.name, loaded.fingerprint)
        science = science.but(loss=with_average(science.loss, loaded.positive))
        digests = {section: code_digest(*paths) for section, paths in own_code(science).items()}
        science = science.but(**{name: getattr(science, name).but(code=code) for name, code in digests.items()})
        if file := models.weights_file(science.model):
            science = science.but(model=science.model.but(weights=str(file), code=weights_digest(file)))
        notes = (*loaded.notes, *models.notes(science.model, loaded.inputs.shape))
        noted = tuple(f"{loaded.name}: {note}" for note in notes)
        return cls(settings, science, Size.of(loaded, len(train)), noted)

    @property
    def name(self) -> str:
        return f"{self.science.dataset.name} {self.science.loss.name}"

    @property
    def trials(self) -> list[Trial]:
        """The trials of the final stage; none before the search has chosen a setting."""
        return [Trial(self.chosen, seed) for seed in self.settings.seeds] if self.chosen else []

    @property
    def checkpoints(self) -> Path:
        return Path(self.settings.results_dir) / "runs" / "checkpoints" / self.science.family


def load(dataset: DatasetSection, data_dir: str | None) -> data.Data:
    """The data of a dataset section. The last dataset is cached, since the next job usually needs it again."""
    options = json.dumps({**dataset.options, "limit": dataset.limit})
    return _load(dataset.loader, data_dir, options, state_of(dataset.options.get("path")))


@lru_cache(maxsize=1)
def _load(name: str, data_dir: str | None, options: str, state: tuple) -> data.Data:
    return data.load(name, data_dir, **json.loads(options))


def state_of(path: str | None) -> tuple[tuple[str, int, int], ...]:
    """Place, time and size of a file, or of all files in a folder: a notebook may change them between two runs."""
    if path is None:
        return ()
    place = Path(path).expanduser().absolute()
    states = [(str(entry), entry.stat()) for entry in (place, *sorted(place.rglob("*"))) if entry.exists()]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


def splits_of(loaded: data.Data, trials: Iterable[Trial]) -> list[data.Splits]:
    """The split of each trial: one for all seeds, or a new one for each. Trials with the same rows share them.

    With folds, early stopping ignores one of the validation rows.
    """

    @cache
    def split(section: Split, fold: int | None) -> data.Splits:
        splits = data.split(loaded, **split_options(section))
        return splits if section.folds is None or fold is None else leave_out(splits, section.folds, fold)

    splits = []
    for trial in trials:
        section = trial.config.split.at(trial.seed)
        its_split = split(section, trial.seed % section.folds if section.folds else None)
        splits.append(models.for_network(its_split, trial.config.model))
    return splits


def split_options(split: Split) -> dict[str, Any]:
    """A split section as keyword arguments of data.split."""
    return {"seed": split.seed, "fractions": split.fractions, "stratify": split.stratify}


_imported: dict[str, tuple[object, bytes]] = {}  # module -> its spec, and its file when it was first used here


def code_digest(*paths: str | None, edited: bool = False) -> str | None:
    """A digest of the files with the user's own code behind dotted paths, so that trials of changed code are new ones.

    Files are hashed as this process imported them; if one has been edited since, ConfigError unless `edited`. None for
    code of east and of installed packages.
    """
    own: list[bytes] = []
    for name in (str(path).rpartition(".")[0] for path in paths):
        module = sys.modules.get(name)
        file = Path(getattr(module, "__file__", None) or "")
        if not file.is_file() or HERE in file.resolve().parents or "site-packages" in file.parts:
            continue
        now, spec = file.read_bytes(), getattr(module, "__spec__", None)
        if name not in _imported or _imported[name][0] is not spec:  # importlib.reload makes a new spec
            _imported[name] = spec, now
        if _imported[name][1] != now and not edited:
            raise ConfigError(f"{file} has changed since it was imported. Restart Python to train with the new code.")
        own.append(_imported[name][1])
    return hashlib.blake2b(b"".join(own), digest_size=8).hexdigest() if own else None


def weights_digest(file: Path) -> str:
    """A digest of a file with pretrained weights."""
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()[:16]


def own_code(config: Science) -> dict[str, tuple[str | None, ...]]:
    """The dotted paths of a setting that may lead to the user's own code, by section."""
    of_loss = config.loss.target, config.loss.options.get("metric"), config.loss.options.get("target")
    return {"loss": of_loss, "model": (config.model.options.get("target"),), "ensemble": config.ensemble.components}


def check_code(config: Science) -> None:
    """ConfigError if this process would train with other code or weights than those in the trial's key."""
    if file := models.weights_file(config.model):
        if weights_digest(Path(file)) != config.model.code:
            raise ConfigError(f"{file} has changed since this command started. Rerun the command.")
        config = config.but(model=config.model.but(code=None))
    for section, paths in own_code(config).items():
        code = getattr(config, section).code
        own = [str(path) for path in paths if "." in str(path)]
        for path in own if code else ():
            import_by_path(path)
        if code and code_digest(*own, edited=True) != code:
            raise ConfigError(
                f"the code of {' or '.join(own)} has changed since this command started. Rerun the command."
            )


def check_parts(settings: Settings, loaded: data.Data) -> None:
    """Build network and loss once, so that a wrong name or a misfit with these data fails before any work."""
    count, model, loss = len(loaded.classes), settings.model, settings.loss
    try:
        check_decisions(settings.protocol.decisions, loaded.positive, count)
        if settings.ensemble.name != "none":
            from east.lab.training import ensemble

            ensemble.check_ensemble(settings.ensemble, loss, loaded.kind, settings.split)
        if loss.classical:
            from east.lab.training import classical

            classical.recipe_of(loss)
            return
        check_network(settings, loaded)
        built = build_loss(loss, loaded.classes, torch.arange(count), loaded.positive)
        built(torch.zeros(count, model.outputs or count), torch.arange(count))
        if settings.protocol.stop_by not in (None, "loss"):
            metric_of(settings.protocol.stop_by, loaded.positive)
    except TypeError as error:  # an argument of the wrong type, which Python's message does not name
        raise ConfigError(f"model={model.name} loss={loss.name}: {error}") from error
    except (ValueError, ImportError, RuntimeError, OSError) as error:
        raise ConfigError(str(error)) from error


def check_network(settings: Settings, loaded: data.Data) -> None:
    """Refuse a network without a logit per class (or a single one for two classes), or that could not be saved."""
    count, model, shape = len(loaded.classes), settings.model, loaded.inputs.shape[1:]
    device, target = planned_device(settings), model.options.get("target")
    if settings.dry_run:
        model = models.untrained(model)  # no downloads
    net = models.build(model, shape, count, settings.hyper.dropout or 0.0)
    if target and settings.save_model:
        from east.lab.training import saved

        try:
            saved.check_custom(target)
        except data.DataError as error:
            raise ConfigError(f"save_model=true: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():  # it is elsewhere
        return
    given = next((f"model.{n}={v}" for n, v in model.options.items() if n in ("target", "arch")), f"model={model.name}")
    rows = torch.zeros(2, *shape, device=device)
    try:
        with torch.no_grad():
            logits = net.to(device).eval()(rows)
    except Exception as error:  # it may be the user's code
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{given}: it fails for inputs {list(rows.shape)}; {reason}") from error
    found = list(logits.shape) if isinstance(logits, torch.Tensor) else [type(logits).__name__]
    if found[0] != 2 or found[-1] not in ((2, 1) if count == 2 else (count,)):
        raise ConfigError(
            f"{given}: expected logits [n, {count}], one for each class of {loaded.name}, got {found} for n=2; "
            f"its last layer must have `outputs` units, and model.outputs is {model.outputs or 'null'}"
        )


def planned_device(settings: Settings) -> torch.device:
    """The device of the trials. One of a cluster may not exist on this machine; its workers find it."""
    executor = settings.executor
    on_cluster = executor.name == "submitit" and executor.cluster != "local"
    if executor.gpus or (on_cluster and settings.device.startswith("cuda")):
        return torch.device("cuda")
    return pick_device(settings.device)
