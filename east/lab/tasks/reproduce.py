"""task=reproduce: run what a paper's table still needs, then render it."""

import sys

from east.choices import ConfigError, choose
from east.lab.experiment import records
from east.lab.experiment.ledger import Ledger
from east.lab.reporting import tables
from east.lab.settings import compose
from east.lab.settings.command import LISTS, Command
from east.lab.settings.settings import Settings
from east.lab.tasks import plan, run, table

SCIENCE = ("dataset", "split", "model", "loss", "annealing", "protocol", "hyper", "search")  # sections of results


def main(command: Command, settings: Settings) -> int:
    """Run a table's missing trials, limited to dataset=… and loss=… if given, and render it."""
    name, folder = command.get("table"), command.get("config_dir")
    if name in (None, "grid"):
        names = ", ".join(name for name in tables.names(folder) if name != "grid")
        raise ConfigError(f"task=reproduce needs table=…: all, {names}")
    if "protocol" in command:
        raise ConfigError(f"protocol={command['protocol']}: table={name} has a protocol of its own; leave it out")
    preset = command.get("preset", "auto")
    if preset == "auto":
        preset = "paper" if name == "all" else tables.usual_preset(tables.spec(name, folder))
    wanted = requested(command, settings.variant)
    overrides = command.without("task", "table", "preset", *LISTS, *LISTS.values())
    if changed := overrides.among(SCIENCE).words:
        print(f"note: trials with {' '.join(changed)} do not fill cells of the table; they are shown separately")
    scanned = records.scan(settings.results_dir)
    options = {"rule": settings.selection, "variant": settings.variant, "config_dir": folder, "preset": preset}
    needed = tables.plan(name, scanned=() if changed else scanned, **options)
    needed = [cell for cell in needed if all(cell.get(group) in names for group, names in wanted.items())]
    to_do = f"{len(needed)} run{'s' if len(needed) > 1 else ''} to do" if needed else "every run is done"
    print(f"{name}: {to_do}{', except for trials on record' if changed else ''}", flush=True)
    if needed and not scanned:
        print(f"note: there are no records in {settings.results_dir}; results_dir=… names a folder that has some")
    every = [compose.settings(cell.but(overrides).but(preset=preset)) for cell in needed]
    work = plan.made(every, Ledger(settings, scanned), lenient=True)
    if not settings.dry_run:
        work.carry_out()
        print(run.results(work)[0] if changed and work.runs else table.text(settings, preset))
    elif work.items:
        print(work.text())
    for line in work.failures:
        print(f"not done: {line}", file=sys.stderr)
    return 1 if work.failures else 0


def requested(command: Command, variant: str) -> dict[str, list[str]]:
    """The datasets and losses that a command limits its table to; ConfigError if the table has no such cells."""
    name, folder = command["table"], command.get("config_dir")
    cells = [cell for part in tables.chosen(name) for cell in tables.blank_cells(tables.spec(part, folder), variant)]
    wanted: dict[str, list[str]] = {}
    for plural, group in LISTS.items():
        if names := command.get(plural) or command.get(group):
            known = {getattr(cell, group) for cell in cells}
            entries = map(str, names if isinstance(names, list) else [names])
            wanted[group] = [choose(f"{group} of table={name}", entry, known) for entry in entries]
    return wanted
