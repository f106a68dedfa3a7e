"""task=report: one HTML page with everything that a results folder holds."""

from east.reporting.pages import report
from east.settings.command import Command
from east.settings.compose import settings


def main(command: Command) -> int:
    asked = settings(command)
    print(report.write(asked.results_dir, config_dir=asked.config_dir))
    return 0
