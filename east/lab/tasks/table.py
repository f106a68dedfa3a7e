"""task=table: render a table, or all tables of the papers, from the records."""

import warnings
from pathlib import Path
from typing import Any

from east.lab import bars
from east.lab.experiment import records
from east.lab.files import write_atomically
from east.lab.reporting import papers, plots, tables
from east.lab.reporting.catalogue import Catalogue
from east.lab.reporting.writers import WRITERS, answer
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings

MOST_DRAWN = 1000  # cells: of table=grid on many records, a figure would take minutes and show nothing


def main(command: Command, settings: Settings) -> int:
    with bars.bar("rendering"):
        rendered = text(settings, command.get("preset"))
    print(rendered)
    return 0


def text(settings: Settings, preset: str | None) -> str:
    """A table in the requested format; otherwise as text, after writing it as Markdown and its figure as SVG.

    `format=pdf` or `format=png` writes the figure in that format.
    """
    options: dict[str, Any] = {
        **{"rule": settings.selection, "variant": settings.variant, "preset": None if preset == "auto" else preset},
        **{"scanned": Catalogue(records.scan(settings.results_dir)), "config_dir": settings.config_dir},
    }
    built = [tables.build(name, **options) for name in tables.chosen(settings.table)]
    if settings.format in WRITERS:
        return WRITERS[settings.format](built)
    shown, folder = WRITERS["text"](built).rstrip(), Path(settings.results_dir) / "tables"
    try:
        for table in built:
            stem = table.spec.name if settings.variant == "clean" else f"{table.spec.name}_{settings.variant}"
            write_atomically(folder / f"{stem}.md", WRITERS["markdown"]([table]))
            small = table.spec.ranked or len(table.cells) <= MOST_DRAWN
            if small and any(cell.values for cell in table.cells):
                figure = folder.with_name("figures") / f"{stem}.{settings.format or 'svg'}"
                plots.save(plots.figure_of(table), figure)
        shown += f"\nwritten to {folder}, with figures in {folder.with_name('figures')}"
    except OSError as error:  # a table is printed even in a read-only folder
        warnings.warn(f"not written: {error}", stacklevel=2)
    if settings.table == "all":
        run, known = tables.cells_run(built), len(papers.cells())
        shown += f"\n{run} of the {known} published cells have been run ({settings.variant} variant)"
    return "\n\n".join([shown, *(answer(table) for table in built if table.spec.next)])
