"""What an ensemble costs: CPU seconds of ten networks, alone and with other classifiers, against one network.

    python scripts/bench_ensemble.py        two minutes; writes results/bench/ensemble.json

One network trains on the training rows of a split and stops by its loss, as the members do: 64-32, learning rate 0.003,
batch 128, dropout 0.25. Its time is a mean over three seeds. One thread; ratios are geometric means over datasets.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

from east.lab import data
from east.lab.settings.settings import (
    DatasetSection,
    EnsembleSection,
    Hyper,
    LossSection,
    ModelSection,
    Science,
    Training,
)
from east.lab.training import engine, ensemble
from east.lab.training.population import Trial

ROOT = Path(__file__).parents[1]
FORESTS = ("networks", "rf", "extratrees")
KINDS = {
    "networks": EnsembleSection(name="networks"),
    "networks and forests": EnsembleSection(name="stack", components=FORESTS),
    "stack": EnsembleSection(name="stack", components=(*FORESTS, "boosting", "logistic")),
}
SINGLE = Science(
    dataset=DatasetSection(name="keel"),
    model=ModelSection(name="mlp", hidden=[64, 32]),
    loss=LossSection(name="ce", target="east.losses.CrossEntropy"),
    protocol=Training(name="bench", patience=500, max_epochs=3000, count="steps"),
    hyper=Hyper(lr=0.003, batch_size=128, dropout=0.25, weight_decay=0.01),
)


def costs(name: str) -> dict[str, float]:
    """CPU seconds on a set of KEEL: of one network, and of each kind of ensemble."""
    splits = data.split(data.load("keel", set=name), stratify=True)
    for seed in range(4):  # the first warms up
        if seed == 1:
            started = time.process_time()
        engine.train([Trial(SINGLE, seed)], splits, device="cpu")
    seconds = {"one network": (time.process_time() - started) / 3}
    for kind, section in KINDS.items():
        started = time.process_time()
        ensemble.fit(Trial(SINGLE.but(ensemble=section), 0), splits, device="cpu")
        seconds[kind] = time.process_time() - started
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "results/bench/ensemble.json")
    parser.add_argument("--sets", nargs="+", default=["pima", "phoneme", "satimage"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds = {name: costs(name) for name in arguments.sets}
    ratios = {kind: [each[kind] / each["one network"] for each in seconds.values()] for kind in KINDS}
    means = {kind: math.exp(statistics.fmean(map(math.log, values))) for kind, values in ratios.items()}
    result = {
        "torch": torch.__version__,
        "seconds": seconds,
        "mean": means,
        "max": {k: max(v) for k, v in ratios.items()},
    }
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
