"""task=data: fetch, verify and describe a dataset, or list them all."""

from east.lab import data
from east.lab.experiment.runs import load, split_options
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings


def main(command: Command, *runs: Settings) -> int:
    if command.get("dataset") == "all":
        print(data.catalogue_text(data.datasets(command.get("config_dir"))))
        return 0
    for settings in runs:
        loaded = load(settings.dataset, settings.data_dir)
        print(data.describe_text(data.describe(loaded, **split_options(settings.split.at(0)))))
        if settings.split.seed == "trial":
            print("split.seed=trial: every trial has its own split; the sizes are those of split.seed=0")
    return 0
