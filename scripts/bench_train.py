"""How fast the engine trains: against a plain PyTorch loop, and against the bare matrix products of the same trials.

    python scripts/bench_train.py [--quick] [--json results.json]

The plain loop is a fair one: tensors in memory without a DataLoader, fused AdamW, validation after every epoch, the
best weights kept, one trial after another on one thread (more are slower on nets of this size). `per core` sets one
thread of the engine against it; `machine` has a process of one thread per core, as `east-run` deals out trials, and
counts the slowest. Darknet-19 is timed with and without the dense products on small maps. All contestants take turns
and the median of each counts; times are CPU seconds, so that waiting on a busy machine is not measured.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from east import models
from east.data.common import Part, Splits
from east.models.darknet import Convolution3x3
from east.settings.sections import Dataset, Hyper, Loss, Model, Science, Training
from east.training import engine, population

FEATURES = 30
MLP = Model(name="mlp", hidden=[512, 256, 128])
BTG = Model(name="mlp_btg", hidden=[32, 16])
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


def trial(model: Model, batch: int, epochs: int, seed: int) -> population.Trial:
    config = Science(
        dataset=Dataset(name="made_up"),
        model=model,
        loss=Loss(name="ce", target="east.losses.CrossEntropy"),
        protocol=Training(name="bench", patience=epochs, max_epochs=epochs),
        hyper=Hyper(lr=1e-3, batch_size=batch, dropout=DROPOUT[model.name], weight_decay=0.01),
    )
    return population.Trial(config, seed)


def by_the_engine(model: Model, batch: int, rows: int, epochs: int, seeds: list[int], classes: int = 2) -> float:
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


def plain(model: Model, batch: int, rows: int, epochs: int, seeds: list[int]) -> float:
    """Seconds for the same trials, one after another, in an ordinary loop."""
    torch.set_num_threads(1)
    splits = made_up(rows)
    started = time.process_time()
    for seed in seeds:
        torch.manual_seed(seed)
        net = models.build(model, (FEATURES,), 2, DROPOUT[model.name])
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
        best = float("inf")
        for _ in range(epochs):
            net.train()
            for index in torch.randperm(rows).split(batch)[: rows // batch]:
                optimizer.zero_grad()
                F.cross_entropy(net(splits.train.inputs[index]), splits.train.labels[index]).backward()
                optimizer.step()
            net.eval()
            with torch.no_grad():
                value = float(F.cross_entropy(net(splits.val.inputs), splits.val.labels))
            if value < best:
                best, _state = value, {name: tensor.clone() for name, tensor in net.state_dict().items()}
    return time.process_time() - started


def products(model: Model, batch: int, rows: int, epochs: int, trials: int) -> float:
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


def darknet(width: float, dense: bool, images: int = 128) -> float:
    """Seconds for one step's forward and backward pass of Darknet-19 on 32x32 images."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = models.build(Model(name="darknet19", width=width), (3, 32, 32), 10)
    for module in net.modules():
        if isinstance(module, Convolution3x3) and not dense:
            module.__class__ = nn.Conv2d
    inputs = torch.randn(images, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (images,))
    F.cross_entropy(net(inputs), labels).backward()  # the first step allocates
    started = time.process_time()
    F.cross_entropy(net(inputs), labels).backward()
    return time.process_time() - started


def medians_in_turns(rounds: int, **contestants) -> dict[str, float]:
    """The median time of each, over several rounds in which each has its turn."""
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(run())
    return {name: statistics.median(values) for name, values in times.items()}


def compare(pool, workers, rounds, model, batch, rows, epochs, trials=10) -> dict[str, float]:
    seeds, setting = list(range(trials)), (model, batch, rows, epochs)
    seconds = medians_in_turns(
        rounds,
        machine=lambda: spread(pool, workers, seeds, *setting),
        engine=lambda: by_the_engine(*setting, seeds),
        plain=lambda: plain(*setting, seeds),
        products=lambda: products(*setting, trials),
    )
    result = {
        "seconds": seconds,
        "per_core": seconds["plain"] / seconds["engine"],
        "machine": seconds["plain"] / seconds["machine"],
        "engine_over_products": seconds["engine"] / seconds["products"],
        "plain_over_products": seconds["plain"] / seconds["products"],
    }
    print(
        f"{'-'.join(map(str, model.options['hidden'])):12} batch {batch:5}, {trials} trials:"
        f" engine {result['per_core']:.2f}x as fast as the plain loop per core,"
        f" {result['machine']:.2f}x with {workers} cores against its one;"
        f" epoch {result['engine_over_products']:.2f}x its matrix products"
        f" (plain loop {result['plain_over_products']:.2f}x)",
        flush=True,
    )
    return result


def small_maps(rounds: int, width: float, images: int = 128) -> dict[str, float]:
    """Images per second of Darknet-19 with and without the dense products."""
    seconds = medians_in_turns(rounds, dense=lambda: darknet(width, True), ordinary=lambda: darknet(width, False))
    rates = {name: images / value for name, value in seconds.items()}
    print(
        f"darknet19, width {width}: {rates['dense']:.0f} images per second with dense products on small maps,"
        f" {rates['ordinary']:.0f} without: {rates['dense'] / rates['ordinary']:.1f}x",
        flush=True,
    )
    return rates


def growth(rounds: int, name: str, values: list[int], run) -> dict[str, float]:
    """Seconds at each value; how much dearer one more unit is at the end than at the start."""
    seconds = medians_in_turns(rounds, **{str(value): (lambda v=value: run(v)) for value in values})
    per_unit = [seconds[str(value)] / value for value in values]
    print(f"growth with {name:7}", ", ".join(f"{value}: {seconds[str(value)]:.2f} s" for value in values), end="; ")
    print(f"per unit {per_unit[-1] / per_unit[0]:.2f}x from {values[0]} to {values[-1]}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, few rows: a minute")
    parser.add_argument("--json", help="write all numbers here")
    arguments = parser.parse_args()
    rounds, rows, epochs = (1, 4096, 1) if arguments.quick else (3, 8192, 4)
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
    result["darknet19"] = {str(width): small_maps(rounds, width) for width in (1.0, 0.5)}
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
