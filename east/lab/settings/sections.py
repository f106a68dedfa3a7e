"""The sections of a config as frozen, typed objects: what each key may hold, and what is part of a trial's identity.

Hydra composes plain mappings; these models check them once, and the rest of the code uses the typed objects. Unknown
keys are refused. `dataset`, `model` and `loss` also hold the options of their targets (`options`).

A record stores as JSON the values of a section that were set. A field declared with `later` was added after the first
records were written: it is stored, and enters the key, only if it differs from its default. A field with `exclude` is
never stored and never enters the key.
"""

from collections.abc import Mapping
from itertools import product
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.config import JsonDict

from east.lab.settings import identity
from east.lab.settings.identity import Json

Options: TypeAlias = Mapping[str, Any]  # of a target: whatever its signature accepts
Numbers: TypeAlias = Annotated[tuple[float, ...], Field(strict=False)]
Names: TypeAlias = Annotated[tuple[str, ...], Field(strict=False)]
Kind: TypeAlias = Literal["table", "image", "graph"]

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=1e-12, le=1e3)]  # of learning
Dropout = Annotated[float, Field(ge=0, le=0.99)]
Decay = Annotated[float, Field(ge=0, le=1e3)]  # of the weights
Norm = Annotated[float, Field(ge=1e-12)]
Share = Annotated[float, Field(gt=0, lt=1)]
Cooling = Annotated[float, Field(ge=1e-3, le=0.999)]
Schedule: TypeAlias = Literal["geometric", "linear", "cosine", "per_epoch", "none"]
Temperature = Annotated[float, Field(ge=1e-6, le=0.4)]


LATER: JsonDict = {"identity": "later"}


def later(default: Any, **constraints: Any) -> Any:
    """A field added after schema 1: part of a record and of its key only where it differs from its default."""
    return Field(default, json_schema_extra=LATER, **constraints)


class Section(BaseModel):
    """One part of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, populate_by_name=True, protected_namespaces=())

    def to_json(self) -> dict[str, Json]:
        """The values that were set, as a record stores and hashes them."""
        fields = type(self).model_fields.items()
        unchanged = {n for n, f in fields if f.json_schema_extra == LATER and getattr(self, n) == f.default}
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude=unchanged, warnings=False)

    def but(self, **changed: Any) -> Self:
        """The same section with other values."""
        return self.model_copy(update=changed)


class Open(Section):
    """A section that holds the options of its target besides the common keys."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> Options:
        return self.model_extra or {}


ADDED = ("sheet", "header", "missing")  # options of dataset=csv that are younger than schema 1


class DatasetSection(Open):
    """Which data to use and how to read them. `fingerprint` identifies the rows that were loaded."""

    name: str
    kind: Kind = "table"
    limit: int | None = Field(None, ge=3)
    fingerprint: str | None = None

    def to_json(self) -> dict[str, Json]:
        return {key: value for key, value in super().to_json().items() if value is not None or key not in ADDED}

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

    seed: Seed | Literal["trial"] = 0
    fractions: Annotated[Numbers, AfterValidator(_three_shares)] = (0.64, 0.16, 0.2)
    stratify: bool = False
    folds: int | None = later(None, ge=2)  # early stopping of trial s ignores fold s mod folds of the validation rows

    def at(self, trial_seed: int) -> "Split":
        """The split of one trial."""
        return self.but(seed=trial_seed) if self.seed == "trial" else self


class ModelSection(Open):
    """The network. outputs=1 is a single logit for two classes; null gives one logit per class."""

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
        """Whether the loss has a temperature for training to cool."""
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

    lr: Rate | None = None
    batch_size: Count | None = None
    dropout: Dropout | None = None
    weight_decay: Decay | None = None
    clip: Norm | None = None
    average: Share | None = later(None)  # decay of a running mean of the weights; null: no mean


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
        sections = {name: getattr(self, name).to_json() for name in identity.SECTIONS}
        if self.ensemble.name != "none":
            sections["ensemble"] = self.ensemble.to_json()
        return sections | ({"preset": self.preset} if self.preset else {})

    @property
    def key(self) -> str:
        return identity.key(self.to_json())

    @property
    def family(self) -> str:
        return identity.family(self.to_json())

    def with_grid_point(self, point: Mapping[str, float], epochs: int | None = None) -> "Science":
        """The same trial at a point of the grid, trained for at most `epochs` epochs."""
        moved = self.but(hyper=self.hyper.but(**{name: value for name, value in point.items() if name != "r"}))
        if "r" in point:
            moved = moved.but(annealing=self.annealing.but(r=point["r"]))
        if epochs is not None:
            moved = moved.but(protocol=self.protocol.but(max_epochs=epochs))
        return moved
