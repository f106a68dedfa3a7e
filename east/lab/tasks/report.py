"""task=report: one HTML page with everything in a results folder."""

from east.lab import display
from east.lab.reporting.pages import report
from east.lab.settings import compose
from east.lab.settings.command import Command


def main(command: Command) -> int:
    settings = compose.settings(command)
    with display.activity("building the page"):
        file = report.write(settings.results_dir, config_dir=settings.config_dir)
    print(file)
    return 0
