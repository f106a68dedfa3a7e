"""How fast the engine trains, compared with a plain PyTorch loop and with the bare matrix products of the same trials.

    python scripts/bench_train.py [--quick]                   three to four minutes; --quick: one
    python scripts/bench_train.py --before CHECKOUT           the engine of an older checkout as well
    python scripts/bench_train.py --mammography [CHECKOUT …]  trials per core-hour with the paper's protocol

The plain loop is a fair one: tensors in memory without a DataLoader, fused AdamW, validation after every epoch, the
best weights kept, one trial after another on one thread (more threads are slower for networks of this size). `per core`
compares it with one thread of the engine. `machine` runs one single-threaded process per core, as `east-run` does, and
counts the slowest. Darknet-19 is timed with and without the dense products on small maps. All contestants take turns,
and the median of each counts. Times are CPU seconds, so that waiting on a busy machine is not measured.

--before and --mammography train through the command line, so that checkouts of any age can be compared: the current one
and the given folders, in turns, for a few epochs each; --mammography the paper's 60 grid points and ten trials.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from east.lab import models
from east.lab.data.common import Part, Splits
from east.lab.models.darknet import Convolution3x3
from east.lab.settings.settings import DatasetSection, Hyper, LossSection, ModelSection, Science, Training
from east.lab.training import engine, population

FEATURES = 30
MLP = ModelSection(name="mlp", hidden=[512, 256, 128])
BTG = ModelSection(name="mlp_btg", hidden=[32, 16])
DROPOUT = {"mlp": 0.25, "mlp_btg": 0.5}
ROOT = Path(__file__).parent.parent
SIZES = (1, 2, 3, 5, 10, 20)  # populations in the figure
GRID_POINTS, TRIALS = 60, 10  # of the paper's protocol on Mammography
TRIAL_EPOCHS = 500  # about what a trial of F1 or MCC takes on Mammography


@cache
def made_up(rows: int, classes: int = 2) -> Splits:
    """Random data: `rows` training rows, rows / 4 validation rows and rows / 40 test rows."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for n in (rows, rows // 4, rows // 40):
        labels = torch.randint(0, classes, (n,), generator=generator)
        inputs = torch.randn(n, FEATURES, generator=generator) + labels[:, None] / classes
        parts.append(Part(inputs, labels, torch.arange(n)))
    names = tuple(map(str, range(classes)))
    positive = 1 if classes == 2 else None
    return Splits(*parts, names, "made_up", positive, "", str(rows), torch.zeros(FEATURES), torch.ones(FEATURES))


def trial(model: ModelSection, batch: int, epochs: int, seed: int) -> population.Trial:
    config = Science(
        dataset=DatasetSection(name="made_up"),
        model=model,
        loss=LossSection(name="ce", target="east.losses.CrossEntropy"),
        protocol=Training(name="bench", patience=epochs, max_epochs=epochs),
        hyper=Hyper(lr=1e-3, batch_size=batch, dropout=DROPOUT[model.name], weight_decay=0.01),
    )
    return population.Trial(config, seed)


def by_the_engine(model: ModelSection, batch: int, rows: int, epochs: int, seeds: list[int], classes: int = 2) -> float:
    """Seconds to train the trials with the engine, in this process, with one thread."""
    torch.set_num_threads(1)
    splits, trials = made_up(rows, classes), [trial(model, batch, epochs, seed) for seed in seeds]
    started = time.process_time()
    engine.train(trials, splits, device="cpu", progress=False)
    return time.process_time() - started


def by_all_cores(pool: ProcessPoolExecutor, workers: int, seeds: list[int], *arguments) -> float:
    """Seconds of the slowest worker when the trials are distributed over the workers."""
    jobs = [pool.submit(by_the_engine, *arguments, seeds[k::workers]) for k in range(workers)]
    return max(job.result() for job in jobs)


def by_plain_loop(model: ModelSection, batch: int, rows: int, epochs: int, seeds: list[int]) -> float:
    """Seconds to train the same trials one after another in an ordinary PyTorch loop."""
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


def products(model: ModelSection, batch: int, rows: int, epochs: int, trials: int) -> float:
    """Seconds for the matrix products alone: forward, both gradients, and the forward pass on validation rows."""
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
    """Seconds for one forward and backward pass of Darknet-19 on 32x32 images."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = models.build(ModelSection(name="darknet19", width=width), (3, 32, 32), 10)
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
    """The median time of each contestant over several rounds; each runs once per round."""
    times = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(run())
    return {name: statistics.median(values) for name, values in times.items()}


def compare(pool, workers, rounds, model, batch, rows, epochs, trials=10) -> dict[str, float]:
    """Time and print one setting: engine, plain loop and matrix products."""
    seeds, setting = list(range(trials)), (model, batch, rows, epochs)
    seconds = medians_in_turns(
        rounds,
        machine=lambda: by_all_cores(pool, workers, seeds, *setting),
        engine=lambda: by_the_engine(*setting, seeds),
        plain=lambda: by_plain_loop(*setting, seeds),
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


def one_population(model: ModelSection, batch: int, rows: int, size: int) -> float:
    """Seconds per trial and epoch when `size` trials train as one population."""
    torch.set_num_threads(1)
    members = [(trial(model, batch, 1, seed), made_up(rows)) for seed in range(size)]
    started = time.process_time()
    engine.train_population(members, torch.device("cpu"))
    return (time.process_time() - started) / size


def population_sizes(rounds: int, rows: int, figure: Path) -> dict[str, dict[str, float]]:
    """Speed per trial for each population size, relative to training alone; draws the figure."""
    result = {}
    fig, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    for model, batch in ((MLP, 128), (MLP, 1024), (BTG, 1024)):
        runs = {str(p): (lambda p=p, m=model, b=batch: one_population(m, b, rows, p)) for p in SIZES}
        seconds = medians_in_turns(rounds, **runs)
        name = f"{'-'.join(map(str, model.options['hidden']))}, batch {batch}"
        speeds = {size: seconds["1"] / value for size, value in seconds.items()}
        result[name] = speeds
        print(
            f"{name:24} by population size:", ", ".join(f"{size}: {v:.2f}x" for size, v in speeds.items()), flush=True
        )
        axes.plot(SIZES, list(speeds.values()), marker="o", label=name)
    axes.set(xscale="log", xticks=SIZES, xticklabels=SIZES, xlabel="trials in a population", ylabel="speed per trial")
    axes.minorticks_off()
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(frameon=False)
    figure.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(figure)
    return result


def run_checkout(checkout: Path, words: list[str], epochs: int, records: int) -> float:
    """CPU seconds of `east-run` in a checkout when every trial stops after `epochs`."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*words, f"protocol.max_epochs={epochs}", "executor=inline", "device=cpu", f"results_dir={folder}"]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "EAST_DEBUG": "1"}
        command = [sys.executable, "-c", "from east.lab.cli import main; raise SystemExit(main())", *words]
        before = os.times()
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        after = os.times()
        written = len(list(Path(folder, "runs").rglob("se*-*.json")))
    if written != records:
        raise RuntimeError(f"{checkout}: expected {records} records, got {written}")
    return after.children_user + after.children_system - before.children_user - before.children_system


def epoch_seconds(
    checkouts: list[Path], words: list[str], records: int, lengths: tuple[int, int], rounds: int
) -> dict[str, tuple[float, float]]:
    """By commit: CPU seconds of one trial's first epoch with everything around it, and of each further epoch."""
    runs = {
        f"{checkout} {epochs}": (lambda c=checkout, e=epochs: run_checkout(c, words, e, records))
        for epochs in lengths
        for checkout in checkouts
    }
    seconds = medians_in_turns(rounds, **runs)
    result = {}
    for checkout in checkouts:
        short, long = (seconds[f"{checkout} {epochs}"] / records for epochs in lengths)
        commit = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        name = subprocess.run(commit, capture_output=True, text=True).stdout.strip()
        result[name] = (short, (long - short) / (lengths[1] - lengths[0]))
    return result


def per_core_hour(checkouts: list[Path]) -> dict[str, dict[str, float]]:
    """Trials of TRIAL_EPOCHS epochs per core-hour with the paper's protocol on Mammography."""
    words = ["dataset=mammography", "loss=f1", "preset=paper"]
    result = {}
    for name, (first, epoch) in epoch_seconds(checkouts, words, GRID_POINTS + TRIALS, (1, 5), rounds=1).items():
        trials = 3600 / (first + epoch * (TRIAL_EPOCHS - 1))
        result[name] = {"epoch_ms": 1e3 * epoch, "trials_per_core_hour": trials}
        print(
            f"Mammography at {name}: {1e3 * epoch:.0f} ms per trial and epoch over the grid, "
            f"{trials:.0f} trials of {TRIAL_EPOCHS} epochs per core-hour",
            flush=True,
        )
    return result


def before_and_after(checkout: Path) -> dict[str, dict[str, float]]:
    """Milliseconds per trial and epoch of an older checkout and of this one: ten trials of cross-entropy together."""
    result = {}
    for name, net, batch, lengths in (
        ("mlp_128", "mlp", 128, (3, 23)),
        ("mlp_1024", "mlp", 1024, (3, 23)),
        ("btg_1024", "mlp_btg", 1024, (1, 201)),
    ):
        words = ["dataset=mammography", "loss=ce", f"model={net}", "preset=paper", "search=none", "trials=10"]
        words += [f"hyper.batch_size={batch}", "hyper.lr=0.001", "protocol.patience=1000"]
        epochs = epoch_seconds([ROOT, checkout], words, TRIALS, lengths, rounds=1)
        result[name] = {commit: 1e3 * epoch for commit, (_, epoch) in epochs.items()}
        after, before = result[name].values()
        print(f"{name}: {before:.1f} ms per trial and epoch before, {after:.1f} now: {before / after:.2f}x", flush=True)
    return result


def growth(rounds: int, name: str, values: list[int], run) -> dict[str, float]:
    """Seconds at each value; prints how the cost per unit changes from the first value to the last."""
    seconds = medians_in_turns(rounds, **{str(value): (lambda v=value: run(v)) for value in values})
    per_unit = [seconds[str(value)] / value for value in values]
    print(f"growth with {name:7}", ", ".join(f"{value}: {seconds[str(value)]:.2f} s" for value in values), end="; ")
    print(f"per unit {per_unit[-1] / per_unit[0]:.2f}x from {values[0]} to {values[-1]}")
    return seconds


def speed(rounds: int, rows: int, epochs: int, figure: Path) -> dict:
    """Every measurement of the engine and of Darknet."""
    workers = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        by_all_cores(pool, workers, list(range(workers)), BTG, 128, 1024, 1)  # starts the workers
        by_the_engine(BTG, 128, 1024, 1, [0])
        result = {
            "cores": workers,
            "torch": torch.__version__,
            "mlp_128": compare(pool, workers, rounds, MLP, 128, rows, epochs),
            "mlp_1024": compare(pool, workers, rounds, MLP, 1024, rows, epochs),
            "btg_1024": compare(pool, workers, rounds, BTG, 1024, rows, 5 * epochs),
        }
    result["population_size"] = population_sizes(rounds, rows // 2, figure)
    result["darknet19"] = {str(width): small_maps(rounds, width) for width in (1.0, 0.5)}
    result["growth"] = {
        "trials": growth(rounds, "trials", [1, 10, 60], lambda n: by_the_engine(BTG, 128, rows, 1, list(range(n)))),
        "rows": growth(rounds, "rows", [rows, 4 * rows, 16 * rows], lambda n: by_the_engine(BTG, 1024, n, 1, [0])),
        "classes": growth(rounds, "classes", [10, 100, 1000], lambda n: by_the_engine(MLP, 256, rows, 1, [0], n)),
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, few rows: a minute")
    parser.add_argument("--json", type=Path, help="default: results/bench/train.json or mammography.json")
    parser.add_argument("--figure", type=Path, default=ROOT / "results/figures/bench_population.svg")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="compare with the engine of this checkout")
    parser.add_argument("--mammography", nargs="*", type=Path, metavar="CHECKOUT", help="trials per core-hour instead")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.mammography is None:
        rounds, rows, epochs = (1, 4096, 1) if arguments.quick else (3, 8192, 3)
        name, result = "train.json", speed(rounds, rows, epochs, arguments.figure)
        if arguments.before:
            result["before_and_after"] = before_and_after(arguments.before.resolve())
    else:
        checkouts = [ROOT, *(folder.resolve() for folder in arguments.mammography)]
        name, result = "mammography.json", per_core_hour(checkouts)
    file = arguments.json or ROOT / "results" / "bench" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
