"""The cells of a table without rows: everything in the records, a block per dataset and a row per setting."""

from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from typing import Any

from east.lab.reporting import papers
from east.lab.reporting.catalogue import Catalogue, names_of
from east.lab.reporting.cells import Cell, chosen_settings, over_splits
from east.lab.reporting.labels import distinct_names, labels
from east.lab.reporting.specs import Spec
from east.lab.settings.identity import Json
from east.lab.settings.settings import DatasetSection, LossSection


def filled_cells(table: Spec, catalogue: Catalogue, **common: Any) -> Iterator[Cell]:
    """A row per family of records; results on part of the data are not results on the dataset.

    Different data get different blocks even if they share a name, such as two files of dataset=csv.
    """
    families = [family for family in catalogue.families if family[0].config.dataset.limit is None]
    families.sort(key=lambda family: names_of(family[0].config))
    data = [family[0].config.dataset for family in families]
    blocks = distinct_names([section.name for section in data], list(map(_options, data)))
    for block, members in groupby(sorted(zip(blocks, families, strict=True), key=itemgetter(0)), key=itemgetter(0)):
        own = [family for _, family in members]
        configs = [family[0].config for family in own]
        for row, family in zip(labels([_loss(c.loss) for c in configs], configs), own, strict=True):
            request = dict(zip(("dataset", "loss", "protocol"), names_of(family[0].config), strict=True))
            for column in table.scores:
                score = papers.score_of(None, request["dataset"], request["loss"], column)
                cell = Cell(block=block, row=row, column=column, request={**request}, score=score, **common)
                found = list(chosen_settings(family, cell, every=True))
                if scored := [trials for trials in found if trials.values]:
                    cell.trained[""] = over_splits(family[0].config.split.seed, scored)
                elif found:
                    cell.trained[""] = max(found, key=lambda trials: trials.failed)
                yield cell


def _options(data: DatasetSection) -> dict[str, Json]:
    values = {f"dataset.{name}": value for name, value in data.to_json().items() if name != "name"}
    return values | {"dataset.fingerprint": values.pop("dataset.fingerprint", None)}  # comes last


def _loss(loss: LossSection) -> str:
    return f"metric {loss.options.get('metric')}" if loss.name == "metric" else loss.name
