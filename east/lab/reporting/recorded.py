"""The cells of a table without rows: everything in the records, a block per dataset and a row per setting."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from east.lab.reporting import papers
from east.lab.reporting.cells import Cell
from east.lab.reporting.entries import Catalogue, Family
from east.lab.reporting.fidelity import PRESETS, VARIED
from east.lab.reporting.specs import POSITIVE, Spec
from east.lab.settings.command import text as typed
from east.lab.settings.identity import SECTIONS, Json
from east.lab.settings.sections import Science

Values: TypeAlias = Mapping[str, Json]  # dotted name -> value


def blank_cells(table: Spec, catalogue: Catalogue, accepted: Sequence[str]) -> Iterator[Cell]:
    """One row per family of records, limited to the table's `datasets`, `losses` and `families`.

    Different data get different blocks even if they share a name, such as two files of dataset=csv.
    """
    blocks: dict[str, dict[str | None, dict[str, list[Family]]]] = {}  # dataset -> its fingerprint -> loss -> families
    for names in sorted(catalogue.families, key=str):
        dataset, loss, _ = names
        for family in catalogue.families[names]:
            if _included(table, family, accepted):
                by_data = blocks.setdefault(dataset, {})
                by_loss = by_data.setdefault(family[0].config.dataset.fingerprint, {})
                by_loss.setdefault(loss, []).append(family)
    for dataset, by_data in blocks.items():
        for block, by_loss in zip(_data_labels(dataset, by_data), by_data.values(), strict=True):
            for loss, families in by_loss.items():
                yield from _rows(block, dataset, loss, families, table.scores)


def _included(table: Spec, family: Family, accepted: Sequence[str]) -> bool:
    if family[0].config.dataset.limit is not None:  # results on part of the data are not results on the dataset
        return False
    dataset, loss = family[0].config.dataset.name, family[0].config.loss.name
    filters = ((table.datasets, dataset), (table.losses, loss), (table.families, family[0].family))
    return _label(family) in accepted and all(names is None or name in names for names, name in filters)


def _label(family: Family) -> str | None:
    """The fullest preset that any of the trials was started with."""
    labels = {entry.label for entry in family if entry.label}
    return next((preset for preset in (*PRESETS, *sorted(labels)) if preset in labels), None)


def _data_labels(dataset: str, by_data: Mapping[str | None, Mapping[str, list[Family]]]) -> list[str]:
    """Distinct names for data that share a dataset's name: by the options that differ, else by fingerprint."""
    if len(by_data) == 1:
        return [dataset]
    sections = [next(iter(by_loss.values()))[0][0].sections["dataset"] for by_loss in by_data.values()]
    options = [{f"dataset.{n}": v for n, v in s.items() if n not in ("name", "fingerprint")} for s in sections]
    names = distinct_names(dataset, options)
    return names if len(set(names)) == len(names) else [f"{dataset}, data {str(mark)[:8]}" for mark in by_data]


def _rows(block: str, dataset: str, loss: str, families: Sequence[Family], scores: Sequence[str]) -> Iterator[Cell]:
    configs = [family[0].config for family in families]
    metrics = [f"metric {config.loss.options.get('metric')}" if loss == "metric" else loss for config in configs]
    names = labels(loss, configs) if len(set(metrics)) < len(metrics) else metrics
    for label, family in zip(names, families, strict=True):
        protocol = family[0].config.protocol.name
        has_trials = any(entry.is_trial and entry.done for entry in family)
        for name in scores:
            score = papers.score_of(None, dataset, loss, name)
            comparable = family[0].has_all_classes(dataset)
            published = papers.published_for(dataset, loss, protocol, score) if comparable else None
            yield Cell(
                block=block,
                row=label,
                column=name,
                dataset=dataset,
                loss=loss,
                protocol=protocol,
                family=family[0].family,
                has_trials=has_trials,
                score=score,
                position=POSITIVE if name in ("precision", "recall") else None,
                published=published,
                findings=papers.findings_of(published) if published else [],
            )


def labels(name: str, configs: Sequence[Science]) -> list[str]:
    """Names for several settings of one loss."""
    flat: list[Values] = []
    for config in configs:
        sections = {section: getattr(config, section).to_json() for section in SECTIONS}
        values = {
            f"{s}.{n}".removesuffix(".name"): value for s, found in sections.items() for n, value in found.items()
        }
        flat.append({"preset": config.preset} | values | dict.fromkeys(VARIED))
    return distinct_names(name, flat)


def distinct_names(name: str, settings: Sequence[Values]) -> list[str]:
    """The name, followed by as few of the values as it takes to tell the settings apart.

    >>> distinct_names("f1", [{"loss.step": "linear", "split.seed": 0}, {"loss.step": "none", "split.seed": 0}])
    ['f1, loss.step=linear', 'f1, loss.step=none']
    """
    names = [name] * len(settings)
    for key in dict.fromkeys(key for values in settings for key in values):
        suffixes = [f", {key}={typed(values[key], key)}" if values.get(key) is not None else "" for values in settings]
        longer = [label + suffix for label, suffix in zip(names, suffixes, strict=True)]
        if len(set(longer)) > len(set(names)):
            names = longer
    return names
