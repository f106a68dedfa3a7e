"""task=records: export finished trials to results_dir/records, compact enough to commit."""

from east.lab.experiment import records
from east.lab.settings import compose
from east.lab.settings.command import Command


def main(command: Command) -> int:
    folder = compose.settings(command).results_dir
    counts = records.export(folder)
    for dataset, count in counts.items():
        print(f"{folder}/records/{dataset}.jsonl  {count} records")
    if not counts:
        print(f"no finished trials in {folder}/runs")
    return 0
