"""task=report: one HTML page with everything in a results folder."""

from east import display
from east.reporting.pages import report
from east.settings import compose
from east.settings.command import Command


def main(command: Command) -> int:
    settings = compose.settings(command)
    with display.activity("building the page"):
        file = report.write(settings.results_dir, config_dir=settings.config_dir)
    print(file)
    return 0
