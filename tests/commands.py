"""Commands for tests: tiny ones, and processes that can be killed."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Two epochs of a small network on a few digits: a complete command in a fraction of a second.
TINY = ["dataset=digits", "dataset.limit=120", "model.hidden=[8]", "protocol.max_epochs=2", "protocol.decisions=[]",
        "device=cpu", "preset=quick", "executor=inline"]  # fmt: skip


def record_files(folder: Path) -> dict[Path, str]:
    """Path -> text of the records below a folder."""
    return {path: path.read_text() for path in sorted(Path(folder).rglob("se*-*.json"))}


def count_records(folder: Path) -> int:
    """The number of trial records, for waiting: no file is read."""
    return sum(1 for _ in Path(folder).rglob("seed-*.json"))


def environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a process: this checkout on the path, one thread, a terminal of known width."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT), **(further or {})}


class Command:
    """east-run or a script as a process that can be killed, the leader of its own process group."""

    def __init__(self, nursery: subprocess.Popen, words: Sequence[str]):
        self.nursery, self.returncode = nursery, None
        self.out, self.err = (tempfile.NamedTemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        asked = {"words": words, "environment": environment(), "out": self.out.name, "err": self.err.name}
        self.pid = int(self._ask(asked))

    def _ask(self, question: object) -> str:
        self.nursery.stdin.write(json.dumps(question) + "\n")
        self.nursery.stdin.flush()
        return self.nursery.stdout.readline()

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = json.loads(self._ask(self.pid))
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait until it ends and return what it printed."""
        wait_for(lambda: self.poll() is not None, timeout)
        return self.out.read(), self.err.read()

    wait = communicate

    def send_signal(self, number: int) -> None:
        """Send a signal if the command is still running, as Popen does."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def nursery() -> subprocess.Popen:
    """The process that commands are forked from (see nursery.py); it ends with its input."""
    return subprocess.Popen([sys.executable, "-m", "tests.nursery"], env=environment(), cwd=ROOT, text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip


def start(*words: str | Path) -> Command:
    """Start east-run with these arguments, or a script if the first is its path."""
    return Command(nursery(), list(map(str, words)))


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    return [descendant for child in children_of(pid) for descendant in (child, *descendants(child))]


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
