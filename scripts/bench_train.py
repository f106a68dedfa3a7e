"""How fast the engine trains: against a plain PyTorch loop, and against the bare matrix products of the same trials.

    python scripts/bench_train.py [--quick] [--json results.json]

The plain loop is what one writes first: nn.Module, DataLoader, AdamW, validation after every epoch, one trial after
another, with one thread (more are slower on nets of this size). The engine has a process of one thread per core, as
`east-run` deals out trials; its time is that of the slowest process. All contestants take turns and the best of each
counts; times are CPU seconds, so that waiting on a busy machine is not measured.
"""

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from east import models
from east.data.common import Part, Splits
from east.training import engine, population

FEATURES = 30
MLP = {"name": "mlp", "hidden": [512, 256, 128]}
BTG = {"name": "mlp_btg", "hidden": [32, 16]}
DROPOUT = {"mlp": 0.25, "mlp_btg": 0.5}


@cache
def made_up(rows: int, classes: int = 2) -> Splits:
    """`rows` training rows and a quarter of that for validation; a tenth of it for the final test."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for n in (rows, rows // 4, rows // 40):
        labels = torch.randint(0, classes, (n,), generator=generator)
        inputs = torch.randn(n, FEATURES, generator=generator) + labels[:, None] / classes
        parts.append(Part(inputs, labels, torch.arange(n)))
    names = tuple(map(str, range(classes)))
    positive = 1 if classes == 2 else None
    return Splits(*parts, names, "made_up", positive, "", str(rows), torch.zeros(FEATURES), torch.ones(FEATURES))


def trial(model: dict, batch: int, epochs: int, seed: int) -> population.Trial:
    config = {
        "dataset": {"name": "made_up", "kind": "table"},
        "split": {},
        "model": model,
        "loss": {"name": "ce", "_target_": "east.losses.CrossEntropy"},
        "annealing": {"name": "none", "schedule": "none"},
        "protocol": {"name": "bench", "optimizer": "adamw", "patience": epochs, "max_epochs": epochs},
        "hyper": {"lr": 1e-3, "batch_size": batch, "dropout": DROPOUT[model["name"]], "weight_decay": 0.01},
    }
    return population.Trial(config, seed)


def by_the_engine(model: dict, batch: int, rows: int, epochs: int, seeds: list[int], classes: int = 2) -> float:
    """Seconds to train the trials in this process, with one thread."""
    torch.set_num_threads(1)
    splits, trials = made_up(rows, classes), [trial(model, batch, epochs, seed) for seed in seeds]
    started = time.process_time()
    engine.train(trials, splits, device="cpu", progress=False)
    return time.process_time() - started


def spread(pool: ProcessPoolExecutor, workers: int, seeds: list[int], *arguments) -> float:
    """Seconds of the slowest worker, when the trials are dealt out."""
    jobs = [pool.submit(by_the_engine, *arguments, seeds[k::workers]) for k in range(workers)]
    return max(job.result() for job in jobs)


def plain(model: dict, batch: int, rows: int, epochs: int, seeds: list[int]) -> float:
    """Seconds for the same trials, one after another, in an ordinary loop."""
    torch.set_num_threads(1)
    splits = made_up(rows)
    started = time.process_time()
    for seed in seeds:
        torch.manual_seed(seed)
        net = models.build(model, (FEATURES,), 2, DROPOUT[model["name"]])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
        loader = DataLoader(
            TensorDataset(splits.train.inputs, splits.train.labels), batch, shuffle=True, drop_last=True
        )
        best = float("inf")
        for _ in range(epochs):
            net.train()
            for inputs, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(inputs), labels).backward()
                optimizer.step()
            net.eval()
            with torch.no_grad():
                value = float(F.cross_entropy(net(splits.val.inputs), splits.val.labels))
            if value < best:
                best, _state = value, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return time.process_time() - started


def products(model: dict, batch: int, rows: int, epochs: int, trials: int) -> float:
    """Seconds for the matrix products alone: forward, both gradients, and the forward pass of validation."""
    torch.set_num_threads(1)
    layers = [m for m in models.build(model, (FEATURES,), 2).modules() if isinstance(m, nn.Linear)]
    sizes = [layers[0].in_features, *(layer.out_features for layer in layers)]
    weights = [layer.weight.detach() for layer in layers]

    def forward(activations: list[torch.Tensor]) -> None:
        for x, w in zip(activations, weights, strict=False):
            torch.mm(x, w.T)

    steps, batches = [torch.randn(batch, s) for s in sizes], rows // batch
    checks = [torch.randn(1024, s) for s in sizes]
    started = time.process_time()
    for _ in range(epochs * trials):
        for _ in range(batches):
            forward(steps)
            for k, w in enumerate(weights):
                torch.mm(steps[k + 1].T, steps[k])
                if k:
                    torch.mm(steps[k + 1], w)
        for _ in range(rows // 4 // 1024):
            forward(checks)
    return time.process_time() - started


def best_in_turns(rounds: int, **contestants) -> dict[str, float]:
    """The shortest time of each, over several rounds in which each has its turn."""
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(run())
    return {name: min(values) for name, values in times.items()}


def compare(pool, workers, rounds, model, batch, rows, epochs, trials=10) -> dict[str, float]:
    seeds, setting = list(range(trials)), (model, batch, rows, epochs)
    seconds = best_in_turns(
        rounds,
        engine=lambda: spread(pool, workers, seeds, *setting),
        engine_one_process=lambda: by_the_engine(*setting, seeds),
        plain=lambda: plain(*setting, seeds),
        products=lambda: products(*setting, trials),
    )
    result = {
        "seconds": seconds,
        "faster_than_plain": seconds["plain"] / seconds["engine"],
        "one_process_faster_than_plain": seconds["plain"] / seconds["engine_one_process"],
        "engine_over_products": seconds["engine_one_process"] / seconds["products"],
        "plain_over_products": seconds["plain"] / seconds["products"],
    }
    print(
        f"{'-'.join(map(str, model['hidden'])):12} batch {batch:5}, {trials} trials:"
        f" engine {result['faster_than_plain']:.1f}x as fast as the plain loop on {workers} cores"
        f" ({result['one_process_faster_than_plain']:.1f}x on one);"
        f" epoch {result['engine_over_products']:.2f}x its matrix products"
        f" (plain loop {result['plain_over_products']:.2f}x)"
    )
    return result


def growth(rounds: int, name: str, values: list[int], run) -> dict[str, float]:
    """Seconds at each value; how much dearer one more unit is at the end than at the start."""
    seconds = best_in_turns(rounds, **{str(value): (lambda v=value: run(v)) for value in values})
    per_unit = [seconds[str(value)] / value for value in values]
    print(f"growth with {name:7}", ", ".join(f"{value}: {seconds[str(value)]:.2f} s" for value in values), end="; ")
    print(f"per unit {per_unit[-1] / per_unit[0]:.2f}x from {values[0]} to {values[-1]}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, few rows: a minute")
    parser.add_argument("--json", help="write all numbers here")
    arguments = parser.parse_args()
    rounds, rows, epochs = (1, 4096, 1) if arguments.quick else (3, 8192, 2)
    workers = os.cpu_count() or 1
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        spread(pool, workers, list(range(workers)), BTG, 128, 1024, 1)  # starts the workers
        by_the_engine(BTG, 128, 1024, 1, [0])
        result = {
            "cores": workers,
            "torch": torch.__version__,
            "mlp_128": compare(pool, workers, rounds, MLP, 128, rows, epochs),
            "mlp_1024": compare(pool, workers, rounds, MLP, 1024, rows, epochs),
            "btg_1024": compare(pool, workers, rounds, BTG, 1024, rows, 5 * epochs),
        }
    result["growth"] = {
        "trials": growth(rounds, "trials", [1, 10, 60], lambda n: by_the_engine(BTG, 128, rows, 1, list(range(n)))),
        "rows": growth(rounds, "rows", [rows, 4 * rows, 16 * rows], lambda n: by_the_engine(BTG, 1024, n, 1, [0])),
        "classes": growth(rounds, "classes", [10, 100, 1000], lambda n: by_the_engine(MLP, 256, rows, 1, [0], n)),
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
