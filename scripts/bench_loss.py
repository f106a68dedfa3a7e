"""Cost of the losses relative to a plain soft Dice and to F.cross_entropy, forward and backward: ratios of one run.

    python scripts/bench_loss.py [--json results/bench/loss.json] [--figure results/bench/loss.svg] [--cold] [--quick]
    python scripts/bench_loss.py --before CHECKOUT    times the losses of an older checkout as well

The losses take turns, round after round, and a ratio is that of the medians, so that a busy moment affects all alike.
A network layer is computed before each timed step, as in training, and every round has a new order, so that no loss
always inherits the caches and the memory of the same other one.

Before all timing, a large tensor is allocated and freed, as activations are in training. Until that happens, glibc
returns freed memory to the system after every step, and every loss pays to get it back, page by page. --cold skips it.

Peak memory is measured in a fresh process that returns freed memory to the system at once. Every ratio to the soft Dice
is printed with its limit, if it has one. The figure shows these ratios by number of classes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

import east

LOSSES = {
    "f1": lambda: east.MetricLoss("f1_macro"),
    "mcc": lambda: east.MetricLoss("mcc"),
    "accuracy": lambda: east.MetricLoss("accuracy"),
    "fbeta": lambda: east.MetricLoss("fbeta_macro", beta=2.0),
    "f1 of the positive class": lambda: east.MetricLoss("f1", average="positive"),
    "nine thresholds": lambda: east.MetricLoss("f1_macro", threshold=[k / 10 for k in range(1, 10)]),
    "metric cross-entropy: f1": lambda: east.MetricCrossEntropy("f1_macro"),
    "metric cross-entropy: mcc": lambda: east.MetricCrossEntropy("mcc"),
    "metric cross-entropy: gmean": lambda: east.MetricCrossEntropy("gmean"),
}
SHAPES = ((128, 2), (1024, 2), (1024, 10), (1024, 257), (1024, 1000), (64, 100_000))
DENSE = (4, 21, 128, 128)  # segmentation
MAX_CLASSES_OF_NINE = 1000  # nine thresholds are not timed with more classes
MEMORY_LIMITS = {SHAPES[-1]: 8, DENSE: 8}  # multiples of the logits
RELEASE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc returns memory at once
ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ACTIVATIONS = 7_000_000  # floats: 28 MB; glibc adapts its threshold to freed blocks of up to 32 MB


def seconds(step: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def soft_dice(logits: Tensor, labels: Tensor) -> Tensor:
    """What people write by hand: one line each for the softmax, one-hot labels, and sums."""
    p = logits.softmax(1)
    y = F.one_hot(labels, logits.shape[1]).movedim(-1, 1).to(p.dtype)
    samples = [axis for axis in range(p.ndim) if axis != 1]
    return 1 - (2 * (p * y).sum(samples) / (p.sum(samples) + y.sum(samples))).mean()


def limit(loss: str, shape: tuple[int, ...]) -> float | None:
    """How many soft Dices a loss may cost on a batch, with 15 % for noise; None if nothing is promised."""
    if loss == "nine thresholds" or len(shape) > 2 or shape[1] > MAX_CLASSES_OF_NINE:
        return None
    return 1.35 if loss.startswith("metric cross-entropy") and shape[1] == 2 else 1.15


def batch(shape: tuple[int, ...], device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """Standard normal logits with classes in axis 1, and labels."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(1))
    return logits.to(device).requires_grad_(), labels.to(device)


def compare(
    shape: tuple[int, ...], names: list[str], rounds: int | None = None, device: torch.device = CPU
) -> list[dict]:
    """Ratios of the named losses on one batch; by default as many rounds as fit into ten seconds."""
    logits, labels = batch(shape, device)
    hidden, weight = torch.randn(1024, 256, device=device), torch.randn(256, 256, device=device)

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> float:
        logits.grad = None
        torch.mm(hidden, weight).relu_()
        return seconds(lambda: loss(logits, labels).backward(), device)

    time_nine = shape[1] <= MAX_CLASSES_OF_NINE and len(shape) == 2
    losses = {name: LOSSES[name]() for name in names if time_nine or name != "nine thresholds"}
    contestants = {"cross-entropy": F.cross_entropy, "soft Dice": soft_dice, **losses}
    round_seconds = sum(step(loss) + step(loss) for loss in contestants.values()) / 2
    times: dict[str, list[float]] = {name: [] for name in contestants}
    random = Random(0)
    for _ in range(rounds or max(5, min(2000, int(10 / round_seconds)))):
        for name in random.sample(list(contestants), len(contestants)):
            times[name].append(step(contestants[name]))
    cross_entropy, dice = (median(times.pop(name)) for name in ("cross-entropy", "soft Dice"))
    return [
        {
            "loss": name,
            "shape": list(shape),
            "ratio": median(loss_times) / cross_entropy,
            "over_dice": median(loss_times) / dice,
            "limit": limit(name, shape),
            "cross_entropy_ms": 1e3 * cross_entropy,
            "dice_ms": 1e3 * dice,
        }
        for name, loss_times in times.items()
    ]


def peak_memory(shape: tuple[int, ...], name: str) -> float:
    """How much one forward and backward raises the peak resident memory, in multiples of the logits (Linux)."""
    logits, labels = batch(shape)
    loss = LOSSES[name]()
    loss(logits[:1], labels[:1]).backward()  # load libraries before measuring
    logits.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status_bytes("VmRSS")
    loss(logits, labels).backward()
    return (status_bytes("VmHWM") - before) / (logits.numel() * logits.element_size())


def status_bytes(field: str) -> int:
    """A field of this process's /proc status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def draw(rows: list[dict], path: Path) -> None:
    """Plot ratios to the soft Dice against the number of classes, one line per loss."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    flat = [row for row in rows if len(row["shape"]) == 2 and tuple(row["shape"]) != SHAPES[0]]
    for name in LOSSES:
        points = [(row["shape"][1], row["over_dice"]) for row in flat if row["loss"] == name]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.axhline(1, color="k", linestyle="--", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="cost / plain soft Dice, forward and backward")
    for axis, ticks in ((axes.xaxis, sorted({row["shape"][1] for row in flat})), (axes.yaxis, (0.25, 0.5, 1, 2, 4, 8))):
        axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.set_minor_formatter("")
    axes.legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def limit_note(value: float, allowed: float | None) -> str:
    return "" if allowed is None else f"  (limit {allowed:g}{'' if value <= allowed else ', exceeded'})"


def measure(names: list[str], shapes: tuple[tuple[int, ...], ...], rounds: int | None) -> tuple[list[dict], list[dict]]:
    """Measure and print ratios and peak memory; return the rows of both."""
    rows, memory = [], []
    for shape in shapes:
        for row in compare(shape, names, rounds):
            rows.append(row)
            note = limit_note(row["over_dice"], row["limit"])
            ratios = f"{row['over_dice']:6.2f} x soft Dice  {row['ratio']:6.2f} x cross-entropy"
            print(f"{row['shape']!s:20}  {ratios}  {row['loss']}{note}", flush=True)
    for shape in shapes[len(SHAPES) - 1 :]:  # the most classes, and images
        command = [sys.executable, __file__, "--memory", "f1", *map(str, shape)]
        run = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **RELEASE})
        growth = float(run.stdout)
        max_growth = MEMORY_LIMITS.get(shape)
        memory.append({"loss": "f1", "shape": list(shape), "logits": growth, "limit": max_growth})
        print(f"{list(shape)!s:20}  peak memory {growth:.1f} times the logits  f1{limit_note(growth, max_growth)}")
    return rows, memory


def measure_checkout(checkout: Path, quick: bool) -> dict:
    """The ratios of another checkout's losses, measured by this script in a process of its own."""
    print(f"before: {checkout}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "before.json")
        command = [sys.executable, __file__, "--flat", "--json", str(file), *(["--quick"] if quick else [])]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(checkout.resolve())})
        rows = json.loads(file.read_text())["rows"]
    commit = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return {"commit": subprocess.run(commit, capture_output=True, text=True).stdout.strip(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "results/bench/loss.json", help="where to write the result")
    parser.add_argument("--figure", type=Path, default=None, help="default: beside the result, as .svg")
    parser.add_argument("--cold", action="store_true", help="time a process that has never freed a large tensor")
    parser.add_argument("--quick", action="store_true", help="five rounds of each")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="a folder with an older version of east")
    parser.add_argument("--flat", action="store_true", help="without images, which old versions refuse")
    parser.add_argument("--memory", nargs="+", metavar=("LOSS", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(peak_memory(tuple(map(int, arguments.memory[1:])), arguments.memory[0]))
        return
    if not arguments.cold:
        torch.zeros(ACTIVATIONS)
    names = [name for name in LOSSES if hasattr(east, "MetricCrossEntropy") or "cross-entropy" not in name]
    shapes = SHAPES if arguments.flat else (*SHAPES, DENSE)
    rows, memory = measure(names, shapes, rounds=5 if arguments.quick else None)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"torch": torch.__version__, "threads": 1, "cold": arguments.cold, "rows": rows, "memory": memory}
    if arguments.before:
        result["before"] = measure_checkout(arguments.before, arguments.quick)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, arguments.figure or arguments.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
