"""Cost of MetricLoss next to F.cross_entropy, forward and backward, in one run: ratios are what counts, not seconds.

    python scripts/bench_loss.py [--metric f1] [--json out.json] [--cold]

Both are timed in turn, round after round; a ratio is the median over rounds. Peak memory is that of a fresh process.
First of all a large tensor comes and goes, as activations do in training: until then glibc gives freed memory back to
the system after every step, and both losses are timed at asking for it again, page by page. --cold leaves it so.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import east

SHAPES = ((1024, 2), (1024, 10), (1024, 257), (1024, 1000), (64, 100_000))

ACTIVATIONS = 7_000_000  # floats: 28 MB, below the 32 MB up to which glibc learns from what is freed


def seconds(step, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def compare(n: int, d: int, metric: str, rounds: int = 15) -> dict:
    """Ratio of the two losses on the same standard normal logits."""
    logits = torch.randn(n, d, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.randint(d, (n,), generator=torch.Generator().manual_seed(1))
    loss = east.MetricLoss(metric)

    def ours():
        logits.grad = None
        loss(logits, labels).backward()

    def cross_entropy():
        logits.grad = None
        F.cross_entropy(logits, labels).backward()

    ours(), cross_entropy()
    repeats = max(1, min(200, int(0.05 / seconds(cross_entropy, 3))))
    pairs = [(seconds(ours, repeats), seconds(cross_entropy, repeats)) for _ in range(rounds)]
    ratios = sorted(a / b for a, b in pairs)
    return {
        "n": n,
        "classes": d,
        "ratio": median(ratios),
        "quartiles": [ratios[rounds // 4], ratios[-1 - rounds // 4]],
        "cross_entropy_ms": 1e3 * median(b for _, b in pairs),
    }


def peak_memory(n: int, d: int, metric: str) -> float:
    """Growth of the peak resident memory by one forward and backward, in multiples of the logits (Linux)."""
    logits = torch.randn(n, d, requires_grad=True)
    labels = torch.randint(d, (n,))
    loss = east.MetricLoss(metric)
    loss(logits[:2, :1000], labels[:2] % 1000).backward()  # libraries are loaded before the count starts
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
    parser.add_argument("--metric", default="f1")
    parser.add_argument("--json", help="also write the result to this file")
    parser.add_argument("--cold", action="store_true", help="in a process that has never freed anything large")
    parser.add_argument("--memory", nargs=2, type=int, metavar=("N", "D"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(peak_memory(*arguments.memory, arguments.metric))
        return
    rows = []
    if not arguments.cold:
        torch.zeros(ACTIVATIONS)
    for n, d in SHAPES:
        row = compare(n, d, arguments.metric)
        rows.append(row)
        low, high = row["quartiles"]
        print(
            f"n={n:5d}  d={d:7d}  {row['ratio']:5.2f} x cross-entropy  (quartiles {low:.2f} to {high:.2f})", flush=True
        )
    n, d = SHAPES[-1]
    command = [sys.executable, __file__, "--metric", arguments.metric, "--memory", str(n), str(d)]
    rows[-1]["peak_memory"] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"peak memory at d={d}: {rows[-1]['peak_memory']:.1f} times the logits")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"torch": torch.__version__, "threads": 1, "metric": arguments.metric, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
