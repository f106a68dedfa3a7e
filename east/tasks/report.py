"""task=report: one HTML page with everything that a results folder holds."""

from east import display
from east.reporting.pages import report
from east.settings.command import Command
from east.settings.compose import settings


def main(command: Command) -> int:
    asked = settings(command)
    with display.activity("building the page"):
        file = report.write(asked.results_dir, config_dir=asked.config_dir)
    print(file)
    return 0
