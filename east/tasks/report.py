"""task=report: one HTML page with everything that a results folder holds."""

from east.reporting.pages import report
from east.settings.command import Command
from east.settings.compose import settings


def main(command: Command) -> int:
    print(report.write(settings(command).results_dir))
    return 0
