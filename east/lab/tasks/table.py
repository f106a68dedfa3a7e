"""task=table: render a table, or all tables of the papers, from the records."""

import warnings
from pathlib import Path
from typing import Any

from east.lab import bars
from east.lab.experiment import records
from east.lab.files import write_text
from east.lab.reporting import papers, plots, tables, writers
from east.lab.reporting.catalogue import Catalogue
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings


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
        **{"rule": settings.selection, "preset": None if preset == "auto" else preset},
        **{"scanned": Catalogue(records.scan(settings.results_dir)), "config_dir": settings.config_dir},
    }
    names = tables.papers_tables() if settings.table == "all" else [settings.table]
    built = [tables.build(name, variant=settings.variant, **options) for name in names]
    if settings.format in writers.WRITERS:
        return writers.WRITERS[settings.format](built)
    shown, folder = writers.text(built).rstrip(), Path(settings.results_dir) / "tables"
    try:
        for table in built:
            stem = table.spec.name if settings.variant == "clean" else f"{table.spec.name}_{settings.variant}"
            write_text(folder / f"{stem}.md", writers.markdown([table]))
            if any(cell.values for cell in table.cells):
                both = settings.variant == "clean" and table.spec.paper  # a figure shows both loaders of Adult
                released = tables.build(table.spec.name, variant="released", **options) if both else None
                figure = plots.figure_of(table, released)
                plots.save(figure, folder.with_name("figures") / stem, [settings.format or "svg"])
        shown += f"\nwritten to {folder}, with figures in {folder.with_name('figures')}"
    except OSError as error:  # a table is printed even in a read-only folder
        warnings.warn(f"not written: {error}", stacklevel=2)
    if settings.table == "all":
        run, known = tables.cells_run(built), len(papers.cells())
        shown += f"\n{run} of the {known} published cells have been run ({settings.variant} variant)"
    return "\n\n".join([shown, *(writers.answer(table) for table in built if table.spec.next)])
