"""Commands for tests: tiny ones, and processes that can be killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Two epochs of a small network on a few images: what a command is made of, in a fraction of a second.
TINY = ["dataset=digits", "dataset.limit=120", "model.hidden=[8]", "protocol.max_epochs=2", "protocol.decisions=[]",
        "device=cpu", "preset=quick", "executor=inline"]  # fmt: skip


def record_files(folder: Path) -> dict[Path, str]:
    """The records below a folder, as text."""
    return {path: path.read_text() for path in sorted(Path(folder).rglob("seed-*.json"))}


def environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """For processes: this checkout on the path, one thread, a page of known width."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT), **(further or {})}


def start(*arguments: str | Path, script: Path | None = None) -> subprocess.Popen:
    """east-run in a process group of its own.

    A shell starts what runs in its background deaf to Ctrl-C, and children inherit that.
    """
    program = [str(script)] if script else ["-m", "east.cli"]
    return subprocess.Popen([sys.executable, *program, *map(str, arguments)], env=environment(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # fmt: skip


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
