"""The cells of a table without rows: everything in the records, a block per dataset and a row per setting."""

import json
from collections.abc import Iterator, Mapping, Sequence

from east.lab.reporting import papers
from east.lab.reporting.catalogue import Catalogue, Family, names_of
from east.lab.reporting.cells import CUSTOM, PRESETS, Cell, chosen_settings, composed, over_splits
from east.lab.reporting.labels import distinct_names, labels
from east.lab.reporting.specs import POSITIVE, Spec


def filled_cells(table: Spec, catalogue: Catalogue, quickest: str, rule: str, config_dir: str | None) -> Iterator[Cell]:
    """One row per family of records, limited to the table's `datasets` and `losses`.

    Different data get different blocks even if they share a name, such as two files of dataset=csv.
    """
    included = (family for family in catalogue.families if _included(table, family, quickest))
    blocks: dict[str, dict[str | None, dict[str, list[Family]]]] = {}  # dataset -> its fingerprint -> loss -> families
    for family in sorted(included, key=lambda family: str(names_of(family.config))):
        dataset, loss, _ = names_of(family.config)
        by_data = blocks.setdefault(dataset, {})
        by_data.setdefault(family.config.dataset.fingerprint, {}).setdefault(loss, []).append(family)
    for dataset, by_data in blocks.items():
        for block, by_loss in zip(_data_labels(dataset, by_data), by_data.values(), strict=True):
            for families in by_loss.values():
                for label, family in zip(_row_labels(families), families, strict=True):
                    preset = trained_as(family, config_dir) or CUSTOM
                    for name in table.scores:
                        yield _filled(family, block, label, name, rule, preset, config_dir)


def _included(table: Spec, family: Family, quickest: str) -> bool:
    """True unless the table leaves it out; results on part of the data are not results on the dataset."""
    config = family.config
    filters = ((table.datasets, config.dataset.name), (table.losses, config.loss.name))
    if config.dataset.limit is not None or not all(names is None or name in names for names, name in filters):
        return False
    started = {record.config.preset for record in family.records} - {None, ""}
    fullest = min(map(PRESETS.index, started.intersection(PRESETS)), default=len(PRESETS))
    users = bool(started) and quickest == PRESETS[-1]  # the quickest includes users' presets
    return fullest <= PRESETS.index(quickest) or (fullest == len(PRESETS) and users)


def _data_labels(dataset: str, by_data: Mapping[str | None, Mapping[str, list[Family]]]) -> list[str]:
    """Distinct names for data that share a dataset's name: by the options that differ, else by fingerprint."""
    if len(by_data) == 1:
        return [dataset]
    sections = [next(iter(by_loss.values()))[0].config.dataset.to_json() for by_loss in by_data.values()]
    options = [{f"dataset.{n}": v for n, v in s.items() if n not in ("name", "fingerprint")} for s in sections]
    names = distinct_names(dataset, options)
    return names if len(set(names)) == len(names) else [f"{dataset}, data {str(mark)[:8]}" for mark in by_data]


def _row_labels(families: Sequence[Family]) -> list[str]:
    """Names for the settings of one loss."""
    configs = [family.config for family in families]
    loss = configs[0].loss.name
    metrics = [f"metric {config.loss.options.get('metric')}" if loss == "metric" else loss for config in configs]
    return labels(loss, configs) if len(set(metrics)) < len(metrics) else metrics


def _filled(family: Family, block: str, row: str, column: str, rule: str, preset: str, config_dir: str | None) -> Cell:
    dataset, loss, protocol = names_of(family.config)
    score = papers.score_of(None, dataset, loss, column)
    cell = Cell(
        block=block,
        row=row,
        column=column,
        request={"dataset": dataset, "loss": loss, "protocol": protocol},
        score=score,
        position=POSITIVE if column in ("precision", "recall") else None,
        published=papers.published_for(dataset, loss, protocol, score) if family.has_all_classes(dataset) else None,
        rule=rule,
        config_dir=config_dir,
        listed=family,
    )
    found = list(chosen_settings(family, cell))
    if scored := [trials for trials in found if trials.values]:
        cell.trained[preset] = over_splits(family.config.split.seed, scored)
    elif found:
        cell.trained[CUSTOM] = max(found, key=lambda trials: trials.failed)
    return cell


def trained_as(family: Family, config_dir: str | None) -> str | None:
    """The fullest preset that composes this protocol, schedule and network for the same data and loss."""
    config = family.config
    dataset = config.dataset.name.partition(" (")[0].partition("-")[0]  # "digits (120 rows)" and keel-abalone19
    parameters = {f"loss.{n}": v for n, v in config.loss.to_json().items() if n not in ("name", "_target_", "code")}
    request = {"dataset": dataset, "loss": config.loss.name, "protocol": config.protocol.name} | parameters
    for preset in (*PRESETS, *([config.preset] if config.preset else [])):
        if settings := composed(json.dumps(request), preset, config_dir):
            science = settings.science(config.dataset.name, None)
            model = science.model.but(code=config.model.code)
            same = config.but(protocol=science.protocol, annealing=science.annealing, model=model)
            if same.family == family.records[0].family:
                return preset
    return None
