"""task=data: fetch, verify and describe a dataset, or list them all."""

from east import data
from east.experiment.runs import load, split_options
from east.settings.command import Command
from east.settings.compose import all_settings, settings


def main(command: Command) -> int:
    if command.get("dataset") == "all":
        settings(command.without("dataset"))
        print(data.catalogue_text(data.catalogue()))
        return 0
    for asked in all_settings(command):
        loaded = load(asked.dataset, asked.data_dir)
        print(data.describe_text(data.describe(loaded, **split_options(asked.split.at(0)))))
        if asked.split.seed == "trial":
            print("split.seed=trial: every trial has a split of its own; the sizes are those of split.seed=0")
    return 0
