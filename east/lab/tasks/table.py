"""task=table: render a table, or all tables of the papers, from the records."""

import warnings
from pathlib import Path

from east.lab import bars
from east.lab.experiment import records
from east.lab.files import write_text
from east.lab.reporting import plots, tables, writers
from east.lab.reporting.entries import Catalogue
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
    catalogue = Catalogue(records.scan(settings.results_dir))
    names = tables.papers_tables() if settings.table == "all" else [settings.table]

    def build(name: str, variant: str) -> tables.ResultTable:
        return tables.build(
            name,
            settings.results_dir,
            rule=settings.selection,
            variant=variant,
            preset=None if preset == "auto" else preset,
            scanned=catalogue,
            config_dir=settings.config_dir,
        )

    built = [build(name, settings.variant) for name in names]
    pairs = [tables.comparisons(table) for table in built]
    if settings.format in writers.WRITERS:
        return writers.WRITERS[settings.format](built, pairs)
    shown, folder = writers.text(built, pairs).rstrip(), Path(settings.results_dir) / "tables"
    try:
        for table, compared in zip(built, pairs, strict=True):
            stem = table.name if settings.variant == "clean" else f"{table.name}_{settings.variant}"
            write_text(folder / f"{stem}.md", writers.markdown([table], [compared]))
            if any(cell.values for cell in table.cells):
                both = settings.variant == "clean" and table.name in tables.papers_tables()
                released = build(table.name, "released") if both else None  # a figure shows both loaders of Adult
                figure = plots.figure_of(table, released)
                plots.save(figure, folder.with_name("figures") / stem, [settings.format or "svg"])
        shown += f"\nwritten to {folder}, with figures in {folder.with_name('figures')}"
    except OSError as error:  # a table is printed even in a read-only folder
        warnings.warn(f"not written: {error}", stacklevel=2)
    answers = [f"{tables.answer(table) or ''}\nNext: {table.next}" for table in built if table.next]
    return "\n\n".join([shown, *answers])
