"""task=report: one HTML page with everything in a results folder."""

from east.lab import bars
from east.lab.reporting.pages import report
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings


def main(_: Command, settings: Settings) -> int:
    with bars.bar("building the page"):
        file = report.write(settings.results_dir, config_dir=settings.config_dir)
    print(file)
    return 0
