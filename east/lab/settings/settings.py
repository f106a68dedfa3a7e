"""Every setting as a frozen, typed object: what each key may hold, and which values fit together.

Hydra composes plain mappings; these models check them once, and the rest of the code uses the typed objects. Unknown
keys are refused. `dataset`, `model` and `loss` also hold the options of their targets (`options`).
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from east.choices import ConfigError, choose, import_by_path, install_hint
from east.lab.settings import identity
from east.lab.settings.identity import Json, Open, Section, later

SEARCH_SEED = 1000  # of the first training at a grid point; records of a search are told apart by their stage
SEEDS = 2**32
DEVICES = ("auto", "cpu", "cuda", "mps")
EXTRAS = {"ray": "ray", "submitit": "slurm", "tensorboard": "tensorboard", "wandb": "wandb"}  # library -> its extra
LOGGERS = {"tensorboard": "east.lab.training.loggers.TensorBoard", "wandb": "east.lab.training.loggers.WandB"}

Kind: TypeAlias = Literal["table", "image", "graph"]
NETWORKS: dict[Kind, tuple[str, ...]] = {
    "table": ("mlp", "mlp_btg", "custom"),
    "image": ("darknet19", "tiny_darknet", "backbone", "mlp", "custom"),
    "graph": ("gnn", "custom"),
}
Names: TypeAlias = Annotated[tuple[str, ...], Field(strict=False)]
Numbers: TypeAlias = Annotated[tuple[float, ...], Field(strict=False)]
Schedule: TypeAlias = Literal["geometric", "linear", "cosine", "per_epoch", "none"]
SelectionRule: TypeAlias = Literal["val_loss", "val_metric"]  # how a search chooses
Point: TypeAlias = dict[str, float]  # of the grid: lr, dropout, batch_size, and r for a loss that anneals

Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=1e-12, le=1e3)]  # of learning
Dropout = Annotated[float, Field(ge=0, le=0.99)]
Cooling = Annotated[float, Field(ge=1e-3, le=0.999)]
Temperature = Annotated[float, Field(ge=1e-6, le=0.4)]
Values = Field(strict=False, min_length=1)
Distinct = AfterValidator(lambda values: tuple(dict.fromkeys(values)))  # a search trains each point once
Sizes: TypeAlias = Annotated[tuple[Count, ...], Values, Distinct]


class DatasetSection(Open):
    """Which data to use and how to read them. `fingerprint` identifies the rows that were loaded."""

    group = "dataset"
    name: str
    kind: Kind = "table"
    limit: int | None = Field(None, ge=3)
    fingerprint: str | None = None

    def to_json(self) -> dict[str, Json]:
        added = ("sheet", "header", "missing")  # options of dataset=csv that are younger than schema 1
        return {key: value for key, value in super().to_json().items() if value is not None or key not in added}

    @property
    def loader(self) -> str:
        """What reads the data: digits for the variant digits-rare, keel for each of its sets."""
        return self.name.partition("-")[0]

    @property
    def recorded(self) -> str:
        """The name of the loaded data, which records have: the loader's, and that of the set if there are several."""
        return f"{self.loader}-{self.options['set']}" if "set" in self.options else self.loader


def _three_shares(fractions: tuple[float, ...]) -> tuple[float, ...]:
    if len(fractions) != 3 or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ValueError("three positive numbers that add up to 1, for train, validation and test")
    return fractions


class Split(Section):
    """How rows are split into training, validation and test; seed=trial draws a new split for each trial."""

    seed: Annotated[int, Field(ge=0, lt=SEEDS)] | Literal["trial"] = 0
    fractions: Annotated[Numbers, AfterValidator(_three_shares)] = (0.64, 0.16, 0.2)
    stratify: bool = False
    folds: int | None = later(None, ge=2)  # early stopping of trial s ignores fold s mod folds of the validation rows

    def at(self, trial_seed: int) -> "Split":
        """The split of one trial."""
        return self.but(seed=trial_seed) if self.seed == "trial" else self


class ModelSection(Open):
    """The network. outputs=1 is a single logit for two classes; null gives one logit per class."""

    group = "model"
    name: str
    outputs: int | None = Field(None, ge=1)
    code: str | None = later(None)  # digest of the user's own code; set when a run starts, not typed


class LossSection(Open):
    """The loss, or the classical model that is fitted instead."""

    name: str
    target: str = Field(alias="_target_")
    trains: Literal["network", "classical"] = Field("network", exclude=True)
    has_temperature: bool | None = Field(None, exclude=True)  # null: only losses with the linear step have one
    code: str | None = later(None)  # as in ModelSection, of a target or a metric

    @property
    def anneals(self) -> bool:
        """True if the loss has a temperature for training to cool."""
        return self.options.get("step") == "linear" if self.has_temperature is None else self.has_temperature

    @property
    def classical(self) -> bool:
        return self.trains == "classical"

    @property
    def arguments(self) -> dict[str, Any]:
        """What the target is called with; `parameters` holds those of a user's metric, which no yaml file can list."""
        options = {name: value for name, value in self.options.items() if name != "parameters"}
        return options | (self.options.get("parameters") or {})


class AnnealingSection(Section):
    """The temperature schedule and the outer level of early stopping. Section 4, arXiv 2405.20954."""

    group = "annealing"
    name: str = "none"
    schedule: Schedule = "none"
    T0: Temperature | None = None  # null: the loss's temperature
    r: Cooling | None = 0.9
    T_min: Temperature = 1e-3
    patience: Count = 3
    delta: float = Field(1e-4, ge=0)
    outer: Literal["soft", "hard"] = "soft"
    keep_optimizer: bool = False


class Training(Section):
    """The part of a protocol that affects the result of a trial."""

    name: str
    optimizer: Literal["adam", "adamw"] = "adamw"
    patience: Count = 50
    stage_epochs: Count | None = None  # null: no limit
    max_epochs: Count = 5000
    val_reduce: Literal["split", "batch_mean"] = "split"
    warmup: int = later(0, ge=0)
    count: Literal["epochs", "steps"] = later("epochs")  # unit of the four lengths; steps are rounded up to epochs
    precision: Literal["float32", "bfloat16"] = later("float32")  # bfloat16: mixed precision, for images and graphs
    stop_by: str | None = later(None)  # null: the loss decides | loss | a metric, such as f1


class Hyper(Section):
    """Hyperparameters of one trial; null where the protocol decides."""

    group = "hyper"
    lr: Rate | None = None
    batch_size: Count | None = None
    dropout: Dropout | None = None
    weight_decay: float | None = Field(None, ge=0, le=1e3)
    clip: float | None = Field(None, ge=1e-12)
    average: float | None = later(None, gt=0, lt=1)  # decay of a running mean of the weights; null: no mean


class EnsembleSection(Section):
    """Several networks in one trial: mixed, alone or with other classifiers, or only the best of them is kept."""

    name: Literal["none", "networks", "stack", "best"] = "none"
    folds: int = Field(5, ge=2, le=100)
    repeats: Count = 2  # networks per fold
    components: Names = ("networks",)
    smooth: bool = later(False)  # out-of-fold probabilities as smooth as means of all networks
    lr: Numbers = later(())  # of name=best: a grid, whose best point on validation is kept
    dropout: Numbers = later(())
    code: str | None = later(None)  # as in ModelSection, of components by dotted path

    @property
    def members(self) -> int:
        """How many networks a trial trains."""
        if self.name == "none":
            return 1
        if self.name == "best":
            return len(self.points)
        return self.folds * self.repeats if "networks" in self.components else 0

    @property
    def points(self) -> list[dict[str, float]]:
        """The grid of name=best."""
        return [{"lr": lr, "dropout": dropout} for lr, dropout in product(self.lr, self.dropout)]


class Science(Section):
    """Everything that determines a trial's result besides its seed. `preset` and `decisions` are labels."""

    dataset: DatasetSection
    split: Split = Split()
    model: ModelSection
    loss: LossSection
    annealing: AnnealingSection = AnnealingSection()
    protocol: Training
    hyper: Hyper = Hyper()
    ensemble: EnsembleSection = EnsembleSection()
    preset: str | None = None
    decisions: Names = ()

    def to_json(self) -> dict[str, Json]:
        """What a record stores: the hashed sections, and the preset's name."""
        sections = {name: section.to_json() for name, section in self.sections.items()}
        return sections | ({"preset": self.preset} if self.preset else {})

    @property
    def sections(self) -> dict[str, Section]:
        """What is hashed."""
        names = identity.SECTIONS if self.ensemble.name == "none" else (*identity.SECTIONS, "ensemble")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def key(self) -> str:
        return identity.digest({name: section.hashed[0] for name, section in self.sections.items()})

    @cached_property
    def family(self) -> str:
        return identity.digest({name: section.hashed[1] for name, section in self.sections.items()})

    def with_grid_point(self, point: Mapping[str, float], epochs: int | None = None) -> "Science":
        """The same trial at a point of the grid, trained for at most `epochs` epochs."""
        moved = self.but(hyper=self.hyper.but(**{name: value for name, value in point.items() if name != "r"}))
        if "r" in point:
            moved = moved.but(annealing=self.annealing.but(r=point["r"]))
        if epochs is not None:
            moved = moved.but(protocol=self.protocol.but(max_epochs=epochs))
        return moved


class Grid(Section):
    """The values that a search tries."""

    lr: Annotated[tuple[Rate, ...], Values, Distinct]
    dropout: Annotated[tuple[Dropout, ...], Values, Distinct]
    r: Annotated[tuple[Cooling, ...], Values, Distinct]
    batch_size: dict[str, Sizes | dict[str, Sizes]]  # by dataset or kind of data, and optionally by loss

    def batch_sizes(self, dataset: str, kind: Kind, loss: str) -> tuple[int, ...]:
        """The sizes for this dataset, or else for its kind of data."""
        for name in (dataset, kind):
            by_loss = self.batch_size.get(name)
            sizes = by_loss.get(loss) if isinstance(by_loss, dict) else by_loss
            if sizes is not None:
                return sizes
        raise ConfigError(f"grid.batch_size: expected sizes for {kind!r} or {dataset!r}, got {sorted(self.batch_size)}")


class Protocol(Training):
    """What a paper prescribes."""

    decisions: Names = ()
    trials: Count = 10
    new_split: bool = False
    annealing: str = "none"
    search: str = "none"
    model: dict[Kind, str] = Field(default_factory=dict)
    hyper: dict[str, Any] = Field(default_factory=dict)  # values, or values by loss or kind of data
    grid: Grid

    def training(self) -> Training:
        """The part that affects the result of a trial."""
        names = Training.model_fields.keys() & self.model_fields_set
        return Training(**{name: getattr(self, name) for name in names})

    def hyperparameters(self, dataset: DatasetSection, loss: LossSection) -> dict[str, Any]:
        """The prescribed values for this loss, or else for this kind of data."""
        hyper = self.hyper.items()
        values = {name: v.get(loss.name, v.get(dataset.kind)) if isinstance(v, dict) else v for name, v in hyper}
        return {name: value for name, value in values.items() if value is not None}


class Preset(Section):
    """How much of a protocol to run."""

    name: str
    search: str | None = None  # null: the protocol's
    trials: Count | None = None
    model: dict[Kind, str] = Field(default_factory=dict)
    dataset: dict[str, dict[str, Any]] = Field(default_factory=dict)  # dataset -> options
    network: dict[str, dict[str, Any]] = Field(default_factory=dict)  # network -> options
    grid: Grid | None = None


class Search(Section):
    """How the grid is searched."""

    name: Literal["none", "grid", "halving"]
    equal_budget: bool = False
    factor: int = Field(3, ge=2, le=100)
    epochs: Count = 5
    rounds: int = Field(2, ge=1, le=10)


class Executor(Section):
    """Where the work runs; each kind uses the keys of its file in conf/executor."""

    name: Literal["auto", "inline", "processes", "ray", "submitit"]
    slots: int | None = Field(None, ge=1, le=1024)
    retries: int = Field(2, ge=0, le=100)
    address: str | None = None
    cpus: float = Field(1, gt=0)
    gpus: float = Field(0, ge=0)
    parallel: Count = 64
    cluster: str | None = None
    partition: str | None = None
    minutes: Count = 720
    slurm: dict[str, Any] = Field(default_factory=dict)


class Settings(Section):
    """One dataset and one loss under a protocol, and how to run them."""

    dataset: DatasetSection
    loss: LossSection
    protocol: Protocol
    model: ModelSection
    annealing: AnnealingSection
    search: Search
    ensemble: EnsembleSection
    executor: Executor
    preset: Preset
    split: Split
    hyper: Hyper

    task: str = "run"
    table: str = "grid"
    trials: int | None = Field(None, ge=1, le=1000)
    seed: int = Field(0, ge=0, lt=SEEDS)
    device: str = "auto"
    compile: bool = False
    logger: str = "none"
    results_dir: str = Field("results", min_length=1)
    data_dir: str | None = None
    force: bool = False
    dry_run: bool = False
    yes: bool = False
    save_model: bool = False
    debug: bool = False
    config_dir: str | None = None
    selection: SelectionRule = "val_loss"
    variant: Literal["clean", "released"] = "clean"
    format: Literal["markdown", "latex", "csv", "json", "text", "pdf", "png"] | None = None
    score: str | None = None
    candidates: Names | None = None
    costs: list[list[float]] | str | None = None
    minutes: float | None = Field(None, gt=0)
    keep: Names | Literal["all"] | None = None
    checkpoint: str | None = None
    input: str | None = None
    output: str | None = None
    safe_csv: bool = False
    trust: bool = False

    fixed: frozenset[str] = frozenset()  # hyperparameters that the user set, which are not searched

    @field_validator("candidates", "keep", mode="before")
    @classmethod
    def _wrap_single_name(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) and value not in ("", "all") else value

    @model_validator(mode="after")
    def _check_compatibility(self) -> Self:
        device = self.device.partition(":")[0]
        choose("device", device, DEVICES, "cuda" if device == "gpu" else None)
        if "." not in self.logger:
            choose("logger", self.logger, ["none", *LOGGERS])
        elif not callable(getattr(import_by_path(self.logger), "start", None)):
            raise ConfigError(f"logger={self.logger}: expected a class with the methods start, log and close")
        for library in (self.executor.name, self.logger):
            if library in EXTRAS and find_spec(library) is None:
                raise ConfigError(f"{library} is not installed: {install_hint(EXTRAS[library])}")
        if self.seed + self.trial_count > SEEDS:
            raise ConfigError(f"seed={self.seed} trials={self.trial_count}: expected seeds below 2^32")
        networks = NETWORKS[self.dataset.kind]
        if self.model.name not in networks and "target" not in self.model.options:
            raise ConfigError(
                f"model={self.model.name} does not take {self.dataset.kind} data; "
                f"choices for {self.dataset.name}: {', '.join(networks)}"
            )
        if self.model.options.get("target", "") is None:
            raise ConfigError(f"model={self.model.name} needs model.target=…, the dotted path of your network")
        if self.annealing.schedule != "none" and not self.loss.anneals:
            raise ConfigError(
                f"annealing={self.annealing.name} needs a loss with a temperature; {self.loss.name} has none"
            )
        return self

    def required(self, names: Sequence[str], meaning: str) -> list[str]:
        """The values of settings that the task cannot do without; ConfigError if one is missing."""
        missing = " ".join(f"{name}=…" for name in names if not getattr(self, name))
        if missing:
            raise ConfigError(f"task={self.task} needs {missing}: {meaning}")
        return [getattr(self, name) for name in names]

    @property
    def trial_count(self) -> int:
        """How many seeds to average over: the user's number, else the preset's, else the protocol's."""
        return self.trials or self.preset.trials or self.protocol.trials

    @property
    def seeds(self) -> range:
        return range(self.seed, self.seed + self.trial_count)

    @property
    def searched(self) -> bool:
        return self.search.name != "none"

    @property
    def axes(self) -> Grid:
        """What a search varies: the preset's grid, else the protocol's."""
        return self.preset.grid or self.protocol.grid

    def grid(self) -> list[Point]:
        """The points of the search: lr, dropout, batch_size, and r for a loss that anneals. Section 6.1, EAST.

        Hyperparameters that the user set are not searched.
        """
        axes: dict[str, tuple[float, ...]] = {"lr": self.axes.lr, "dropout": self.axes.dropout, "r": self.axes.r}
        axes["batch_size"] = self.axes.batch_sizes(self.dataset.name, self.dataset.kind, self.loss.name)
        cools = self.annealing.schedule != "none"
        axes = {name: values for name, values in axes.items() if name not in self.fixed and (cools or name != "r")}
        return [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]

    def science(self, name: str, fingerprint: str | None) -> Science:
        """What determines a trial's result. The loaded data are identified by their fingerprint."""
        model, annealing, protocol, hyper = self.model, self.annealing, self.protocol.training(), self.hyper
        if self.loss.classical:
            model, hyper = ModelSection(name=self.loss.name), Hyper()
            annealing, protocol = AnnealingSection(name="none", schedule="none"), Training(name=self.protocol.name)
        elif annealing.schedule == "none":
            annealing = AnnealingSection(name=annealing.name, schedule="none", T0=annealing.T0)
        return Science(
            dataset=self.dataset.but(name=name, fingerprint=fingerprint),
            split=self.split.but(seed="trial") if self.protocol.new_split else self.split,
            model=model,
            loss=self.loss,
            annealing=annealing,
            protocol=protocol,
            hyper=hyper,
            ensemble=self.ensemble,
            preset=self.preset.name,
            decisions=self.protocol.decisions,
        )
