"""Which records fill a cell of a table, and how they compare with the published number. Nothing here needs torch.

A cell finds the families of records that fit it, lets the selection rule choose one setting, and shows that setting's
trials: those of the fullest preset on record (fidelity.py).
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from east.choices import choose
from east.lab.experiment import records
from east.lab.reporting import papers, statistics
from east.lab.reporting.entries import Catalogue, Entry, Family, SplitSeed, point_of
from east.lab.reporting.fidelity import PRESETS, Options, Request, cooling_rates, searched_as, trained_as, usual_splits
from east.lab.settings.command import Command
from east.lab.settings.compose import PAPER_DATASETS
from east.lab.settings.settings import Settings

CUSTOM = "custom"  # training settings of no preset
MARKS = {
    "▽": "the paper's patience: Darknet-19 at half width in mixed precision, no search and at most 400 epochs.",
    "△": "half training: Darknet-19 at half width in mixed precision, no search and at most 30 epochs.",
    "†": "budget training: a smaller grid, a shorter patience and at most 300 epochs.",
    "¶": "lean training: a few points of the grid and at most 40 epochs.",
    "‡": "quick training: no search and at most 20 epochs.",
    "◇": "training settings of no preset.",
    "◊": "not searched over the whole grid.",
    "½": "searched over the whole grid by successive halving.",
    "+": "searched over the preset's grid and more points.",
    "≠": "searched over other points than the preset's grid.",
    "‖": "validation loss of the whole split, where the released code averages over batches.",
    "§": "the records hold several settings that fit; the one with the most trials is shown.",
}
PRESET_MARKS = {"patience": "▽", "half": "△", "budget": "†", "lean": "¶", "quick": "‡", CUSTOM: "◇"}
SEARCH_MARKS = {"part": "◊", "halving": "½", "wider": "+", "other": "≠"}

DECISION_PREFIXES = ("plugin_", "expected_")  # of scores under a rule other than argmax
# Scores -> the metric that a decision rule for them is made for.
TUNED_FOR = {"f1_pos": "f1", "f1_macro": "f1", "accuracy": "accuracy", "mcc": "mcc", "gmean": "gmean"}

summarize = lru_cache(maxsize=1 << 16)(statistics.summarize)  # a table asks for a cell's summary many times


@dataclass(kw_only=True)
class Cell(Request):
    """One number of a table: the runs it needs, the published number, and our trials."""

    block: str
    row: str
    column: str
    score: str  # "test.f1_pos", or "thresholds.test.f1_pos": the mean over decision thresholds
    position: int | None = None  # the class of a score that has one value per class
    published: papers.Published | None = None
    findings: list[str] = field(default_factory=list)
    trials: int | None = None  # how many the table needs
    values: dict[int, float] = field(default_factory=dict)  # seed -> score
    splits: dict[tuple[SplitSeed, int], float] = field(default_factory=dict)  # (split, seed) -> score, over splits
    constant: list[float] = field(default_factory=list)  # score of always predicting one class, trial by trial
    failed: int = 0
    capped: bool = False  # more than half of the trials ended at an epoch limit
    settings: int = 0  # how many families of records fit
    split: SplitSeed | None = None
    overlap: float = 0.0  # test rows / training rows, see statistics.t_interval
    rule: str = "val_loss"  # that selected the setting
    has_trials: bool = False  # whether its records hold finished trials, even if those lack this score
    command_preset: str = "paper"  # of the command that fills it
    preset: str | None = None  # that the records were trained by, judged by their values
    search: str | None = None  # "grid", "halving", "part", …, see searched_as; None: nothing to search
    is_ideal: bool = True  # trained with the settings of `ideal`
    rarest: int | None = None  # validation rows of the positive class, or of the rarest that has any
    key: str | None = None
    sources: list[str] = field(default_factory=list)
    commits: set[str] = field(default_factory=set)
    shorter: "dict[str, Cell]" = field(default_factory=dict)  # less full preset -> the cell filled from its records

    def trained_by(self, preset: str | None) -> "Cell | None":
        """This cell as trained by a preset; None if there is no such record."""
        return self if preset == self.preset else self.shorter.get(preset or "")

    @property
    def measure(self) -> str:
        """The score without its decision rule: a different rule does not make it a different measure."""
        row = f" of {self.row}" if self.score.endswith(".trained_for") else ""  # each row has its own metric
        return (self.score.partition(".")[2] if self.score.startswith(DECISION_PREFIXES) else self.score) + row

    @property
    def summary(self) -> statistics.Summary:
        return summarize(tuple(self.values.values()))

    @property
    def papers_protocol(self) -> bool:
        """Whether a network was trained, searched and split as the paper says, judged by the values in the records."""
        as_published = self.preset == "paper" and self.search in (None, "grid") and self.is_ideal
        return as_published and self.trains_networks and self.split == usual_splits(self)[0]

    @property
    def difference(self) -> float | None:
        mean = self.summary.mean
        return mean - self.published.mean if mean is not None and self.published else None

    @property
    def interval(self) -> statistics.Interval | None:
        """Interval of ours minus published; None with fewer than two trials, which have no spread."""
        return self._against_published(list(self.values.values()))

    @property
    def word(self) -> str | None:
        return statistics.verdict(self.interval) if self.interval else None

    @property
    def constant_word(self) -> str | None:
        """The verdict on always predicting one class; see `best_constant`."""
        interval = self._against_published(self.constant)
        return statistics.verdict(interval) if interval else None

    @property
    def ticked(self) -> bool:
        """Reproduced or close, and no constant prediction earns as good a verdict."""
        good = ("reproduced", "close")
        if self.word not in good:
            return False
        return self.constant_word not in good[: good.index(self.word) + 1]

    @property
    def marks(self) -> str:
        search = SEARCH_MARKS.get(self.search or "", "")
        others = ("" if self.is_ideal else "‖") + ("§" if self.settings > 1 else "")
        return PRESET_MARKS.get(self.preset or "", "") + search + others

    def _against_published(self, values: Sequence[float]) -> statistics.Interval | None:
        if len(values) < 2 or not self.published:
            return None
        return statistics.welch(values, self.published.mean, self.published.std)


@dataclass(frozen=True)
class ChosenSetting:
    """A family's chosen setting, and the scores of its trials that have the cell's score; none if all failed."""

    is_ideal: bool
    key: str
    values: dict[int, float]
    family: Family

    @property
    def order(self) -> tuple[bool, int, str]:
        return self.is_ideal, len(self.values), self.key

    @property
    def trials(self) -> list[Entry]:
        return [entry for entry in self.family if entry.key == self.key and entry.is_trial]

    @property
    def failed(self) -> int:
        return sum(not entry.done for entry in self.trials)


def fill(cell: Cell, catalogue: Catalogue, rule: str, accepted: Sequence[str]) -> None:
    """Put the trials of the selected setting into a cell: those of the fullest preset that has any."""
    cell.rule = rule
    by_preset: dict[str, list[Family]] = {}
    for family in catalogue.families.get((cell.recorded, cell.loss, cell.protocol), ()):
        if cell.family and family[0].family != cell.family:
            continue
        preset = trained_as(family[0], cell)
        if cell.family:  # listed however it was trained
            by_preset.setdefault(preset or CUSTOM, []).append(family)
        elif preset and preset in accepted and (settings := cell.composed(preset)):
            kept = _of_command(family, settings)
            by_preset.setdefault(preset, []).extend([kept] if kept else [])
    without_values: list[ChosenSetting] = []
    for preset in by_preset if cell.family else accepted:
        by_split: dict[SplitSeed, list[ChosenSetting]] = {}
        for family in by_preset.get(preset, ()):
            for candidate in _chosen_settings(family, cell, rule):
                if candidate.values:
                    by_split.setdefault(family[0].split, []).append(candidate)
                elif cell.family or family[0].split in usual_splits(cell):
                    without_values.append(candidate)
        splits = list(by_split) if cell.family else [split for split in usual_splits(cell) if split in by_split]
        if splits:
            cell.preset = preset
            _show(cell, splits[0], by_split, catalogue)
            return
    cell.is_ideal, cell.failed = max(((c.is_ideal, c.failed) for c in without_values), default=(True, 0))


def fill_shorter(cells: Sequence[Cell], catalogue: Catalogue) -> None:
    """Fill `shorter` for every less full preset in the column of a cell: like is compared with like."""
    columns: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.preset in PRESETS and cell.trains_networks:
            columns.setdefault((cell.block, cell.column), []).append(cell)
    for column in columns.values():
        presets = [preset for preset in PRESETS if any(cell.preset == preset for cell in column)]
        for cell in column:
            for preset in presets[presets.index(cell.preset or "") + 1 :]:
                shorter = replace(cell, values={}, splits={}, failed=0)
                fill(shorter, catalogue, cell.rule, [preset])
                if shorter.values:
                    cell.shorter = {**cell.shorter, preset: shorter}


def _of_command(family: Family, settings: Settings) -> Family:
    """The records of a family that a command makes: at the cooling rates that it may have, and without a search only
    those at its own point, if there are any; other points were set by hand."""
    rates = cooling_rates(settings)
    kept = [entry for entry in family if entry.sections["annealing"].get("r") in rates]
    if settings.searched:
        return kept
    point = point_of(settings.science(settings.dataset.recorded, None))
    return [entry for entry in kept if entry.point == point] or kept


def _chosen_settings(family: Family, cell: Cell, rule: str) -> Iterator[ChosenSetting]:
    """The setting that the rule chooses; of a family that is listed but was never searched, every setting."""
    key = records.select((entry.record for entry in family), rule)
    keys = [key] if key else []
    if key is None and not any(entry.done and not entry.is_trial for entry in family):
        tried = list(dict.fromkeys(entry.key for entry in family if entry.is_trial))
        none_done = not any(entry.done for entry in family)  # a rule chooses only among what succeeded
        keys = tried if cell.family else tried[:1] if none_done else []
    ideal = {tuple(name.split(".")): value for name, value in cell.ideal.items()}
    sections = family[0].sections
    is_ideal = all(sections[section].get(name) == value for (section, name), value in ideal.items())
    for key in keys:
        trials = [entry for entry in family if entry.key == key and entry.is_trial]
        values = {e.seed: value for e in trials if (value := e.value(cell.score, cell.position)) is not None}
        yield ChosenSetting(is_ideal, key, dict(sorted(values.items())), family)


def _show(
    cell: Cell, split: SplitSeed, by_split: Mapping[SplitSeed, list[ChosenSetting]], catalogue: Catalogue
) -> None:
    """Fill the cell from one split; `cell.splits` gets the scores on all splits."""
    best = {split: max(candidates, key=lambda candidate: candidate.order) for split, candidates in by_split.items()}
    shown = best[split]
    cell.split = split
    trials = shown.trials
    scored = [entry for entry in trials if entry.seed in shown.values]
    cell.key, cell.values, cell.is_ideal = shown.key, shown.values, shown.is_ideal
    cell.failed = shown.failed
    cell.settings = sum(candidate.is_ideal == shown.is_ideal for candidate in by_split[split])
    cell.rarest = min((entry.rarest for entry in scored if entry.rarest is not None), default=None)
    cell.capped = 2 * sum(entry.at_limit for entry in scored) > len(scored)
    cell.sources = sorted({entry.record.source for entry in trials})
    cell.commits = {entry.record.git for entry in trials if entry.record.git}
    cell.overlap = max((entry.overlap for entry in scored), default=0.0)
    cell.search = None if cell.family else searched_as(cell, cell.preset, shown.family, catalogue)
    cell.constant = best_constant(scored, cell) if cell.published else []
    # With a split per trial only those trials count: several trials of one split would give it more weight.
    if "trial" in best:
        cell.splits = {(seed, seed): value for seed, value in best["trial"].values.items()}
    elif len(best) > 1:
        cell.splits = {(split, seed): v for split, chosen in best.items() for seed, v in chosen.values.items()}


def best_constant(trials: Sequence[Entry], cell: Cell) -> list[float]:
    """The score of always predicting one class, trial by trial, for the class that comes closest to the paper.

    Not for the class that scores highest: if a paper publishes F1 0.00, the rival is "never positive".
    """
    name = cell.score.rpartition(".")[2]
    counts = [entry.actual for entry in trials if entry.actual]
    if not counts or not cell.published:
        return []
    scores = [[constant_score(name, c, k, cell.position) for c in counts] for k in range(len(counts[0]))]
    known = [[score for score in row if score is not None] for row in scores]
    published = cell.published.mean
    return min(known, key=lambda row: abs(sum(row) / max(len(row), 1) - published))


def constant_score(name: str, actual: Sequence[int], k: int, position: int | None = None) -> float | None:
    """A score of always predicting class k, given the test rows `actual` of each class; None for other scores.

    >>> constant_score("accuracy", [90, 10], 0), constant_score("f1_pos", [90, 10], 0)
    (0.9, 0.0)
    """
    share = actual[k] / sum(actual)
    fbeta = lambda beta: (1 + beta**2) * share / (1 + beta**2 * share)  # noqa: E731
    of_positive = {"f1_pos": 1, "f2_pos": 2, "f3_pos": 3}
    if name in of_positive:
        return fbeta(of_positive[name]) if k == 1 else 0.0
    if name in ("precision", "recall"):
        return (share if name == "precision" else float(actual[k] > 0)) if k == position else 0.0
    if name in ("balanced_accuracy", "auroc_thresholded"):
        return 1 / sum(count > 0 for count in actual) if actual[k] else 0.0
    return {"accuracy": share, "f1_macro": fbeta(1) / len(actual), "mcc": 0.0}.get(name)


def decided(score: str, decision: str) -> str:
    """The name of an argmax score under the decision rule made for it: "plugin" or "expected".

    >>> decided("test.f1_pos", "plugin")
    'plugin_f1.test.f1_pos'
    """
    made_for = TUNED_FOR[choose(f"score with the decision {decision}", score.removeprefix("test."), TUNED_FOR)]
    return f"{decision}_{made_for}.{score}"


def typed_command(cell: Cell) -> Command:
    """The command that fills a cell, without its preset."""
    return Command(cell.choices | cell.ideal | cell.axes)


def command(cell: Cell) -> str:
    """The command that fills a cell, as one types it in a shell."""
    automatic = "paper" if cell.dataset in PAPER_DATASETS else "quick"
    options: Options = {"preset": cell.command_preset} if cell.command_preset != automatic else {}
    options |= {"selection": cell.rule} if cell.rule != "val_loss" else {}
    folder = ["--config-dir", cell.config_dir] if cell.config_dir else []
    return shlex.join(["east-run", *folder, *typed_command(cell).but(options).words])
