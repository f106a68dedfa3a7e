"""Cost of the losses next to F.cross_entropy, forward and backward, in one run: ratios are what counts, not seconds.

    python scripts/bench_loss.py [--json out.json] [--cold] [--quick]

All are timed in turn, round after round, and a ratio is that of the medians, so that a busy moment meets all alike.
Peak memory is that of a fresh process. First of all a large tensor comes and goes, as activations do in training: until
then glibc gives freed memory back to the system after every step, and all losses are timed at asking for it again, page
by page. --cold leaves it so.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
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
}
SHAPES = ((1024, 2), (1024, 10), (1024, 257), (1024, 1000), (64, 100_000))
DENSE = (4, 21, 128, 128)  # segmentation
MOST_CLASSES_OF_NINE = 1000  # above, nine thresholds are not timed
ACTIVATIONS = 7_000_000  # floats: 28 MB, below the 32 MB up to which glibc learns from what is freed


def seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def batch(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Standard normal logits with classes in axis 1, and labels."""
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.randint(shape[1], (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(1))
    return logits, labels


def compare(shape: tuple[int, ...], rounds: int | None = None) -> list[dict]:
    """Ratios of all losses to cross-entropy on one batch; rounds for about ten seconds."""
    logits, labels = batch(shape)

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> float:
        logits.grad = None
        return seconds(lambda: loss(logits, labels).backward())

    few = shape[1] <= MOST_CLASSES_OF_NINE and len(shape) == 2
    losses = {name: make() for name, make in LOSSES.items() if few or name != "nine thresholds"}
    everyone = {"cross-entropy": F.cross_entropy, **losses}
    warm_up = sum(step(loss) + step(loss) for loss in everyone.values()) / 2
    times: dict[str, list[float]] = {name: [] for name in everyone}
    for _ in range(rounds or max(5, min(2000, int(10 / warm_up)))):
        for name, loss in everyone.items():
            times[name].append(step(loss))
    plain = median(times.pop("cross-entropy"))
    return [
        {"loss": name, "shape": list(shape), "ratio": median(own) / plain, "cross_entropy_ms": 1e3 * plain}
        for name, own in times.items()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the result to this file")
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
    rows, memory = [], []
    for shape in (*SHAPES, DENSE):
        for row in compare(shape, rounds=5 if arguments.quick else None):
            rows.append(row)
            print(f"{row['shape']!s:20}  {row['ratio']:6.2f} x cross-entropy  {row['loss']}", flush=True)
    for shape in (SHAPES[-1], DENSE):
        command = [sys.executable, __file__, "--memory", "f1", *map(str, shape)]
        growth = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        memory.append({"loss": "f1", "shape": list(shape), "logits": growth})
        print(f"{list(shape)!s:20}  peak memory {growth:.1f} times the logits  f1")
    if arguments.json:
        result = {"torch": torch.__version__, "threads": 1, "rows": rows, "memory": memory}
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
