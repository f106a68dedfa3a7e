"""`Settings`: every setting of a command, checked for type, range, choices and compatibility."""

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, field_validator, model_validator

from east.choices import ConfigError, choose, install_hint
from east.lab.settings.sections import (
    AnnealingSection,
    Cooling,
    Count,
    DatasetSection,
    Dropout,
    EnsembleSection,
    Hyper,
    Kind,
    LossSection,
    ModelSection,
    Names,
    Rate,
    Science,
    Section,
    Split,
    Training,
)

SEARCH_SEED = 1000  # of the first training at a grid point; records of a search are told apart by their stage
SEEDS = 2**32
DEVICES = ("auto", "cpu", "cuda", "mps")
NETWORKS: dict[Kind, tuple[str, ...]] = {
    "table": ("mlp", "mlp_btg", "custom"),
    "image": ("darknet19", "tiny_darknet", "mlp", "custom"),
    "graph": ("gnn", "custom"),
}
EXTRAS = {"ray": "ray", "submitit": "slurm", "tensorboard": "tensorboard"}  # library -> extra that installs it

Distinct = AfterValidator(lambda values: tuple(dict.fromkeys(values)))  # a search trains each point once
Sizes: TypeAlias = Annotated[tuple[Count, ...], Field(strict=False, min_length=1), Distinct]
SelectionRule: TypeAlias = Literal["val_loss", "val_metric"]  # how a search chooses
Point: TypeAlias = dict[str, float]  # of the grid: lr, dropout, batch_size, and r for a loss that anneals


class Grid(Section):
    """The values that a search tries."""

    lr: Annotated[tuple[Rate, ...], Field(strict=False, min_length=1), Distinct]
    dropout: Annotated[tuple[Dropout, ...], Field(strict=False, min_length=1), Distinct]
    r: Annotated[tuple[Cooling, ...], Field(strict=False, min_length=1), Distinct]
    batch_size: dict[str, Sizes | dict[str, Sizes]] = Field(
        description="sizes of at least 1 by dataset or kind of data, and optionally by loss, such as {table: [128,256]}"
    )

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
    seed: int = Field(0, ge=0, lt=SEEDS, description="a whole number of at least 0 and below 2^32")
    device: str = "auto"
    compile: bool = False
    tensorboard: bool = False
    results_dir: str = Field("results", min_length=1, description="a folder, such as results")
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
    candidates: Names | None = Field(None, description="a list such as [logistic,rf]")
    costs: list[list[float]] | str | None = Field(None, description="rows of numbers such as [[0,1],[10,0]], or a file")
    minutes: float | None = Field(None, gt=0)
    keep: Names | Literal["all"] | None = Field(None, description="all, or a list of columns such as [id]")
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
        for library in (self.executor.name, "tensorboard" if self.tensorboard else ""):
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
        grid = self.axes
        axes: dict[str, tuple[float, ...]] = {"lr": grid.lr, "dropout": grid.dropout, "r": grid.r}
        axes["batch_size"] = grid.batch_sizes(self.dataset.name, self.dataset.kind, self.loss.name)
        if self.annealing.schedule == "none":
            del axes["r"]
        axes = {name: values for name, values in axes.items() if name not in self.fixed}
        return [dict(zip(axes, point, strict=True)) for point in product(*axes.values())]

    def science(self, name: str, fingerprint: str | None) -> Science:
        """What determines a trial's result. The loaded data are identified by their fingerprint."""
        dataset = self.dataset.but(name=name, fingerprint=fingerprint)
        split = self.split.but(seed="trial") if self.protocol.new_split else self.split
        model, annealing, protocol, hyper = self.model, self.annealing, self.protocol.training(), self.hyper
        if self.loss.classical:
            model, hyper = ModelSection(name=self.loss.name), Hyper()
            annealing, protocol = AnnealingSection(name="none", schedule="none"), Training(name=self.protocol.name)
        elif annealing.schedule == "none":
            annealing = AnnealingSection(name=annealing.name, schedule="none", T0=annealing.T0)
        return Science(
            dataset=dataset,
            split=split,
            model=model,
            loss=self.loss,
            annealing=annealing,
            protocol=protocol,
            hyper=hyper,
            ensemble=self.ensemble,
            preset=self.preset.name,
            decisions=self.protocol.decisions,
        )
