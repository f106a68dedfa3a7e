"""task=records: export finished trials to results_dir/records, compact enough to commit."""

from east.lab.experiment import records
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings


def main(_: Command, settings: Settings) -> int:
    folder = settings.results_dir
    counts = records.export(folder)
    for dataset, count in counts.items():
        print(f"{folder}/records/{dataset}.jsonl  {count} records")
    if not counts:
        print(f"no finished trials in {folder}/runs")
    return 0
