"""Cost of the losses next to F.cross_entropy, forward and backward, in one run: ratios are what counts, not seconds.

    python scripts/bench_loss.py [--json results/bench/loss.json] [--figure results/bench/loss.svg] [--cold] [--quick]

All are timed in turn, round after round, and a ratio is that of the medians, so that a busy moment meets all alike.
Before each of them a layer of a network is computed, as in training, and every round has an order of its own: none
always inherits the caches and the memory that the same other one has left. Peak
memory is that of a fresh process. First of all a large tensor comes and goes, as activations do in training: until
then glibc gives freed memory back to the system after every step, and all losses are timed at asking for it again,
page by page. --cold leaves it so.

Every ratio is printed with its limit, where there is one; the figure shows ratios over the number of classes.
"""

import argparse
import json
import subprocess
import sys
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
    "f1": lambda: east.MetricLoss("f1"),
    "mcc": lambda: east.MetricLoss("mcc"),
    "accuracy": lambda: east.MetricLoss("accuracy"),
    "fbeta": lambda: east.MetricLoss("fbeta", beta=2.0),
    "f1 of the positive class": lambda: east.MetricLoss("f1", average="positive"),
    "nine thresholds": lambda: east.MetricLoss("f1", threshold=[k / 10 for k in range(1, 10)]),
    "metric cross-entropy: f1": lambda: east.MetricCrossEntropy("f1"),
    "metric cross-entropy: mcc": lambda: east.MetricCrossEntropy("mcc"),
    "metric cross-entropy: gmean": lambda: east.MetricCrossEntropy("gmean"),
}
SHAPES = ((1024, 2), (1024, 10), (1024, 257), (1024, 1000), (64, 100_000))
DENSE = (4, 21, 128, 128)  # segmentation
MOST_CLASSES_OF_NINE = 1000  # above, nine thresholds are not timed
MEMORY_LIMITS = {SHAPES[-1]: 8, DENSE: 3}  # times the logits
MEMORY_RUNS = 3
ROOT = Path(__file__).resolve().parents[1]
ACTIVATIONS = 7_000_000  # floats: 28 MB, below the 32 MB up to which glibc learns from what is freed


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def limit(loss: str, shape: tuple[int, ...]) -> float | None:
    """The most cross-entropies that a loss may cost on a batch; None where nothing is promised."""
    classes = shape[1]
    if loss == "nine thresholds":
        return 12 if classes == 2 else 40 if classes >= 257 else None
    if loss.startswith("metric cross-entropy"):
        return {10: 4, 1000: 1.6}.get(classes)
    return 4 if classes <= 10 or len(shape) > 2 else 2.5


def batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Standard normal logits with classes in axis 1, and labels."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.randint(shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(1))
    return logits, labels


def compare(shape: tuple[int, ...], rounds: int | None = None) -> list[dict]:
    """Ratios of all losses to cross-entropy on one batch; rounds for about ten seconds."""
    logits, labels = batch(shape)

    hidden, weight = torch.randn(1024, 256), torch.randn(256, 256)

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> float:
        logits.grad = None
        torch.mm(hidden, weight).relu_()
        return seconds(lambda: loss(logits, labels).backward())

    few = shape[1] <= MOST_CLASSES_OF_NINE and len(shape) == 2
    losses = {name: make() for name, make in LOSSES.items() if few or name != "nine thresholds"}
    everyone = {"cross-entropy": F.cross_entropy, **losses}
    warm_up = sum(step(loss) + step(loss) for loss in everyone.values()) / 2
    times: dict[str, list[float]] = {name: [] for name in everyone}
    order = Random(0)
    for _ in range(rounds or max(5, min(2000, int(10 / warm_up)))):
        for name in order.sample(list(everyone), len(everyone)):
            times[name].append(step(everyone[name]))
    plain = median(times.pop("cross-entropy"))
    return [
        {
            "loss": name,
            "shape": list(shape),
            "ratio": median(spent) / plain,
            "limit": limit(name, shape),
            "cross_entropy_ms": 1e3 * plain,
        }
        for name, spent in times.items()
    ]


def peak_memory(shape: tuple[int, ...], name: str) -> float:
    """Growth of the peak resident memory by one forward and backward, in multiples of the logits (Linux)."""
    logits, labels = batch(shape)
    loss = LOSSES[name]()
    loss(logits[:1], labels[:1]).backward()  # libraries are loaded before the count starts
    logits.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    loss(logits, labels).backward()
    return (resident("VmHWM") - before) / (logits.numel() * logits.element_size())


def resident(field: str) -> int:
    """Bytes that the kernel counts for this process under a field of its status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def draw(rows: list[dict], path: Path) -> None:
    """Ratios over the number of classes, a line per loss; dashed: the limit of the metric losses."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    flat = [row for row in rows if len(row["shape"]) == 2]
    for name in LOSSES:
        points = [(row["shape"][1], row["ratio"]) for row in flat if row["loss"] == name]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    limits = sorted({(row["shape"][1], row["limit"]) for row in flat if row["loss"] == "f1"})
    axes.plot(*zip(*limits, strict=True), "k--", linewidth=0.8, label="limit of f1, mcc, accuracy, fbeta")
    axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="cost / cross-entropy, forward and backward")
    axes.legend(fontsize=7, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def within(value: float, most: float | None) -> str:
    return "" if most is None else f"  (limit {most:g}{'' if value <= most else ', exceeded'})"


def measured(rounds: int | None) -> tuple[list[dict], list[dict]]:
    """Rows of ratios and of peak memory, printed as they come."""
    rows, memory = [], []
    for shape in (*SHAPES, DENSE):
        for row in compare(shape, rounds):
            rows.append(row)
            words = f"{row['ratio']:6.2f} x cross-entropy  {row['loss']}{within(row['ratio'], row['limit'])}"
            print(f"{row['shape']!s:20}  {words}", flush=True)
    for shape in (SHAPES[-1], DENSE):
        command = [sys.executable, __file__, "--memory", "f1", *map(str, shape)]
        runs = [subprocess.run(command, check=True, capture_output=True, text=True) for _ in range(MEMORY_RUNS)]
        growth = min(float(run.stdout) for run in runs)  # fragmented memory only adds
        most = MEMORY_LIMITS.get(shape)
        memory.append({"loss": "f1", "shape": list(shape), "logits": growth, "limit": most})
        print(f"{list(shape)!s:20}  peak memory {growth:.1f} times the logits  f1{within(growth, most)}")
    return rows, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=ROOT / "results/bench/loss.json", help="where the result goes")
    parser.add_argument("--figure", type=Path, default=None, help="by default beside the result, as .svg")
    parser.add_argument("--cold", action="store_true", help="in a process that has never freed anything large")
    parser.add_argument("--quick", action="store_true", help="five rounds of each")
    parser.add_argument("--memory", nargs="+", metavar=("LOSS", "SHAPE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(peak_memory(tuple(map(int, arguments.memory[1:])), arguments.memory[0]))
        return
    if not arguments.cold:
        torch.zeros(ACTIVATIONS)
    rows, memory = measured(rounds=5 if arguments.quick else None)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    result = {"torch": torch.__version__, "threads": 1, "cold": arguments.cold, "rows": rows, "memory": memory}
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    draw(rows, arguments.figure or arguments.json.with_suffix(".svg"))


if __name__ == "__main__":
    main()
