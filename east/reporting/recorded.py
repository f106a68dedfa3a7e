"""The cells of a table without rows: whatever the records hold, a block per dataset and a row per setting."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from east.reporting import papers
from east.reporting.cells import Cell, Entry, Ledger, on_command_line
from east.reporting.specs import POSITIVE, Spec
from east.settings.identity import SECTIONS

Family = list[Entry]


def blank_cells(table: Spec, ledger: Ledger, accepted: Sequence[str]) -> Iterator[Cell]:
    """One row per family of records, among `datasets`, `losses`, `families`.

    Data have a block of their own, even if they share a name, as two files of dataset=csv do.
    """
    blocks: dict[str, dict[str | None, dict[str, list[Family]]]] = {}  # dataset -> its fingerprint -> loss -> families
    for where in sorted(ledger.families, key=str):
        dataset, loss, _ = where
        for family in ledger.families[where]:
            if _wanted(table, family, accepted):
                by_data = blocks.setdefault(dataset, {})
                same = by_data.setdefault(family[0].section("dataset").get("fingerprint"), {})
                same.setdefault(loss, []).append(family)
    for dataset, by_data in blocks.items():
        for block, by_loss in zip(_data_labels(dataset, by_data), by_data.values(), strict=True):
            for loss, families in by_loss.items():
                yield from _rows(block, dataset, loss, families, table.scores)


def _wanted(table: Spec, family: Family, accepted: Sequence[str]) -> bool:
    first = family[0]
    asked = ((table.datasets, first.dataset), (table.losses, first.loss), (table.families, first.family))
    # A part of the data is no result of the dataset: a table has it only where it asks for that part.
    whole = first.section("dataset").get("limit") is None
    return whole and _label(family) in accepted and all(among is None or name in among for among, name in asked)


def _label(family: Family) -> str | None:
    """The fullest preset among those that the trials were started with."""
    labels = {entry.label for entry in family if entry.label}
    return next((preset for preset in ("paper", "budget", "lean", "quick", *sorted(labels)) if preset in labels), None)


def _data_labels(dataset: str, by_data: Mapping[str | None, Mapping[str, list[Family]]]) -> list[str]:
    """Names for the data behind one dataset's name: with the options that differ, else with their fingerprints."""
    if len(by_data) == 1:
        return [dataset]
    sections = [next(iter(by_loss.values()))[0][0].section("dataset") for by_loss in by_data.values()]
    options = [{n: v for n, v in section.items() if n not in ("name", "fingerprint")} for section in sections]
    named = labels(dataset, [{"dataset": section} for section in options])
    return named if len(set(named)) == len(named) else [f"{dataset}, data {str(mark)[:8]}" for mark in by_data]


def _rows(block: str, dataset: str, loss: str, families: Sequence[Family], scores: Sequence[str]) -> Iterator[Cell]:
    configs = [family[0].config for family in families]
    metrics = [config["loss"].get("metric") if loss == "metric" else loss for config in configs]
    named = labels(loss, configs) if len(set(metrics)) < len(metrics) else metrics
    for label, family in zip(named, families, strict=True):
        protocol = family[0].protocol
        tried = any(entry.is_trial and entry.done for entry in family)
        for name in scores:
            score = papers.score_of(None, dataset, loss, name)
            whole = family[0].has_all_classes(dataset)
            known = papers.published_for(dataset, loss, protocol, score) if whole else None
            yield Cell(
                block=block,
                row=label,
                column=name,
                dataset=dataset,
                loss=loss,
                protocol=protocol,
                family=family[0].family,
                tried=tried,
                score=score,
                position=POSITIVE if name in ("precision", "recall") else None,
                published=known,
                findings=papers.findings_of(known) if known else [],
            )


def labels(loss: str, configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names for several settings of one loss: as many of their values as it takes to tell them apart."""
    flat = []
    for config in configs:
        sections = [(name, config[name]) for name in SECTIONS if config.get(name) and name != "hyper"]
        values = {f"{s}.{n}".removesuffix(".name"): v for s, section in sections for n, v in section.items()}
        flat.append({"preset": config.get("preset")} | values | {"annealing.r": None})
    found = [loss] * len(flat)
    for name in dict.fromkeys(name for values in flat for name in values):
        more = [f", {name}={on_command_line(values[name])}" if values.get(name) is not None else "" for values in flat]
        longer = [label + word for label, word in zip(found, more, strict=True)]
        if len(set(longer)) > len(set(found)):
            found = longer
    return found
