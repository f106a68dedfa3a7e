"""Seconds per epoch of AP-Perf and of btg_f1, measured in one run: only the ratio matters.

    python scripts/bench_apperf.py [--epochs 3] [--datasets cocktailparty mammography] [--json out.json]

Bridging the Gap reports 70 against 2.3 minutes for a whole training, each with its own batch size (20 and 1024). This
script compares both losses at batch 20, and also times btg_f1 at 1024. One thread; the losses take turns, and the
median over epochs counts. An epoch is training and validation by the engine. Numba compiles before the clock starts.
"""

import argparse
import json
from pathlib import Path
from statistics import median

import torch
import yaml

from east import losses
from east.lab import data
from east.lab.training.engine import train
from east.lab.training.population import Trial

CONF = Path(__file__).parent.parent / "conf"
RUNS = {"ap_perf": ("ap_perf", 20), "btg_f1": ("btg_f1", 20), "btg_f1_1024": ("btg_f1", 1024)}


def trial(loss: str, batch: int, dataset: str) -> Trial:
    """One epoch of Bridging the Gap's network."""
    config = {
        "dataset": {"name": dataset},
        "model": yaml.safe_load((CONF / "model" / "mlp_btg.yaml").read_text()),
        "loss": yaml.safe_load((CONF / "loss" / f"{loss}.yaml").read_text()),
        "annealing": {"name": "none", "schedule": "none"},
        "protocol": {"optimizer": "adam", "patience": 100, "stage_epochs": 1, "max_epochs": 1, "val_reduce": "split"},
        "hyper": {"lr": 3e-4, "batch_size": batch, "dropout": 0.5, "weight_decay": 0.0, "clip": None},
    }
    return Trial(config, seed=0)


def compare(dataset: str, epochs: int) -> dict:
    """Median seconds per epoch of each run on a dataset, and the ratios of AP-Perf to btg_f1."""
    splits = data.split(data.load(dataset))
    seconds: dict[str, list[float]] = {name: [] for name in RUNS}
    for _ in range(epochs):
        for name, (loss, batch) in RUNS.items():
            [outcome] = train([trial(loss, batch, dataset)], splits, device="cpu", progress=False)
            seconds[name].append(outcome.seconds)
    medians = {name: median(values) for name, values in seconds.items()}
    return {
        "dataset": dataset,
        "rows": splits.sizes["train"],
        "epochs": epochs,
        "seconds_per_epoch": medians,
        "ratio_batch_20": medians["ap_perf"] / medians["btg_f1"],
        "ratio_batch_1024": medians["ap_perf"] / medians["btg_f1_1024"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--datasets", nargs="+", default=["cocktailparty", "mammography"])
    parser.add_argument("--json", help="also write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    losses.APPerf()(torch.randn(20), torch.arange(20) % 2)  # makes numba compile
    rows = []
    for dataset in arguments.datasets:
        row = compare(dataset, arguments.epochs)
        rows.append(row)
        seconds = ", ".join(f"{name} {value:.3g} s" for name, value in row["seconds_per_epoch"].items())
        print(
            f"{dataset}: {row['ratio_batch_20']:.0f} x btg_f1 at batch 20, {row['ratio_batch_1024']:.0f} x at its own "
            f"1024  ({seconds} per epoch)",
            flush=True,
        )
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"torch": torch.__version__, "threads": 1, "published": 70 / 2.3, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
