"""task=reproduce: run what a paper's table still needs, then render it."""

import sys

from east.choices import ConfigError, choose
from east.lab.experiment import records
from east.lab.experiment.ledger import Ledger
from east.lab.experiment.runs import Run
from east.lab.reporting import tables
from east.lab.settings import compose
from east.lab.settings.command import LISTS, Command
from east.lab.settings.settings import Settings
from east.lab.tasks import plan, run, table

# Sections that change results.
SCIENCE = ("dataset", "split", "model", "loss", "annealing", "protocol", "hyper", "search")


def main(command: Command, settings: Settings) -> int:
    """Run a table's missing trials, limited to dataset=… and loss=… if given, and render it."""
    name, folder = command.get("table"), command.get("config_dir")
    if name in (None, "grid"):
        choices = ", ".join(name for name in tables.names(folder) if name != "grid")
        raise ConfigError(f"task=reproduce needs table=…: all, {choices}")
    if "protocol" in command:
        raise ConfigError(f"protocol={command.get('protocol')}: table={name} has a protocol of its own; leave it out")
    preset = command.get("preset", "auto")
    if preset == "auto":
        preset = "paper" if name == "all" else tables.usual_preset(tables.spec(name, folder))
    options = {"rule": settings.selection, "variant": settings.variant, "config_dir": folder, "preset": preset}
    wanted = requested(command, settings.variant)
    overrides = command.without("task", "table", "preset", *LISTS, *LISTS.values())
    if changed := overrides.among(SCIENCE):
        words = " ".join(Command(changed).words)
        print(f"note: trials with {words} do not fill cells of the table; they are shown separately")
    scanned = records.scan(settings.results_dir)
    needed = [missing.command for missing in tables.plan(name, scanned=() if changed else scanned, **options)]
    needed = [cell for cell in needed if all(cell.get(group) in names for group, names in wanted.items())]
    print(f"{name}: {to_do(len(needed))}{', except for trials on record' if changed else ''}", flush=True)
    runs_settings = [compose.settings(cell.but(overrides.values).but(preset=preset)) for cell in needed]
    failures: list[str] = []
    runs: list[Run] = []
    ledger = Ledger(runs_settings[0] if runs_settings else settings, scanned)
    work = plan.made(runs_settings, failures=failures, ledger=ledger) if runs_settings else None
    if work and work.items and settings.dry_run:
        print(work.text())
    elif work and work.items:
        runs, failures = work.carry_out(failures)
    if not settings.dry_run:
        print(run.results(runs, ledger, failures)[0] if changed and runs else table.text(settings, preset))
    for line in failures:
        print(f"not done: {line}", file=sys.stderr)
    return 1 if failures else 0


def requested(command: Command, variant: str) -> dict[str, list[str]]:
    """The datasets and losses that a command limits its table to; ConfigError if the table has no such cells."""
    name, folder = command.get("table"), command.get("config_dir")
    wanted: dict[str, list[str]] = {}
    for plural, group in LISTS.items():
        if names := command.get(plural) or command.get(group):
            wanted[group] = [str(entry) for entry in (names if isinstance(names, list) else [names])]
    parts = tables.papers_tables() if name == "all" else [name]
    cells = [cell for part in parts for cell in tables.blank_cells(tables.spec(part, folder), variant)]
    for group, names in wanted.items():
        choices = {getattr(cell, group) for cell in cells}
        for entry in names:
            choose(f"{group} of table={name}", entry, choices)
    return wanted


def to_do(runs: int) -> str:
    return f"{runs} run{'s' if runs > 1 else ''} to do" if runs else "every run is done"
