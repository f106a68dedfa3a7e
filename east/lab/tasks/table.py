"""task=table: render a table from the records, in every format, with its figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from east.lab import bars
from east.lab.experiment import records
from east.lab.files import write_text
from east.lab.reporting import plots, tables, writers
from east.lab.reporting.entries import Catalogue
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings
from east.lab.tasks.run import shown_anyway

FILES = {"markdown": "md", "latex": "tex", "csv": "csv", "json": "json"}


def main(command: Command, settings: Settings) -> int:
    with bars.bar("rendering"):
        rendered = text(settings, command.get("preset"))
    print(rendered)
    return 0


def text(settings: Settings, preset: str | None) -> str:
    """Render a table into results_dir/tables in every format; return it as text, or in the requested format."""
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
    if settings.format:
        return writers.WRITERS[settings.format](built, pairs)
    shown = writers.WRITERS["text"](built, pairs).rstrip()
    folder = Path(settings.results_dir) / "tables"
    with shown_anyway():
        papers = {table.name for table in built if settings.variant == "clean"} & {*tables.papers_tables()}
        released = {name: build(name, "released") for name in papers}  # a figure shows both loaders of Adult
        write(folder, "" if settings.variant == "clean" else f"_{settings.variant}", built, pairs, released)
        shown += f"\nwritten to {folder} as {', '.join(FILES)}, with a figure in {folder.with_name('figures')}"
    answers = [f"{tables.answer(table) or ''}\nNext: {table.next}" for table in built if table.next]
    return "\n\n".join([shown, *answers])


def write(
    folder: Path,
    suffix: str,
    built: Sequence[tables.ResultTable],
    pairs: Sequence[list[tables.RowPair]],
    released: Mapping[str, tables.ResultTable],
) -> None:
    """Each table in every format, and its figure in the sibling folder; `released`: tables of the released code."""
    for table, compared in zip(built, pairs, strict=True):
        for form, ending in FILES.items():
            content = writers.WRITERS[form]([table], [compared])
            write_text(folder / f"{table.name}{suffix}.{ending}", content)
        if any(cell.values for cell in table.cells):
            figure = plots.figure_of(table, released.get(table.name))
            plots.save(figure, folder.with_name("figures") / f"{table.name}{suffix}")
