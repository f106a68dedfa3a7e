"""What is going on right now, in one line: redrawn in place on a terminal, printed every half minute in a log.

    with display.activity("loading adult"):
        ...

A thread refreshes the line while any activity is open, so the clock moves even if the work reports nothing. Notebooks
count as logs.
"""

import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

REDRAW = 0.5  # seconds between two redraws on a terminal
FIRST, LOG = 5.0, 25.0  # seconds until the first line in a log, and between lines; the promise is one every 30
CLEAR = "\r\x1b[K"
BAR = re.compile(r"\[[#-]+\] ")  # left out of logs


class Line(Protocol):
    """Anything that can report its progress in one line. Called from a different thread than the work."""

    def line(self) -> str: ...


class Activity:
    """A named piece of work, with a bar if it has a `total`. pooch calls `update`, `reset` and `close`."""

    def __init__(self, name: str, total: float | None = None, unit: str = ""):
        self.name, self.total, self.unit = name, total, unit
        self.done: float = 0
        self.started = time.monotonic()

    def update(self, amount: float) -> None:
        self.done += amount

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        """The display closes activities itself."""

    def line(self) -> str:
        elapsed = duration(time.monotonic() - self.started)
        if not self.done:
            return f"{self.name} ({elapsed})"
        count = amount(self.done, self.unit)
        if self.total:
            count += f" of {amount(self.total, self.unit)}"
        return f"{self.name} {bar(self.done, self.total)}{count} ({elapsed})"


class Display:
    """The open activities, outermost first, and the thread that shows them."""

    def __init__(self) -> None:
        self.open: list[Line] = []
        self.lock = threading.RLock()
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.drawn = False

    def push(self, line: Line) -> None:
        with self.lock:
            self.open.append(line)
            if self.thread is None:
                self.ended = threading.Event()
                self.thread = threading.Thread(target=self._run, args=(self.ended, sys.stderr), daemon=True)
                self.thread.start()

    def pop(self, line: Line) -> None:
        with self.lock:
            self.open.remove(line)
            if self.open:
                return
            thread, self.thread = self.thread, None
            self.ended.set()
        if thread is not None:
            thread.join()

    def text(self) -> str:
        with self.lock:
            return " | ".join(line.line() for line in self.open)

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Print above the line."""
        with self.lock:
            if self.drawn:
                sys.stderr.write(CLEAR)
                self.drawn = False
            print(text, file=file or sys.stderr, flush=True)

    def _run(self, ended: threading.Event, stream: TextIO) -> None:
        terminal = stream.isatty()
        pause = REDRAW if terminal else FIRST
        while not ended.wait(pause):
            pause = REDRAW if terminal else LOG
            with self.lock:
                if ended.is_set():
                    break
                self._write(stream, terminal)
        with self.lock:
            if terminal and self.drawn:
                stream.write(CLEAR)
                stream.flush()
                self.drawn = False

    def _write(self, stream: TextIO, terminal: bool) -> None:
        try:
            text = self.text()
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                stream.write(f"{CLEAR}{text if len(text) <= width else text[: width - 1] + '…'}")
                self.drawn = True
            else:
                stream.write(f"{BAR.sub('', text)}\n")
            stream.flush()
        except (OSError, ValueError):  # nobody reads the stream any more; the work continues
            self.drawn = False


DISPLAY = Display()
say = DISPLAY.say


@contextmanager
def shown(line: Line) -> Iterator[Line]:
    """Show a line while the block runs."""
    DISPLAY.push(line)
    try:
        yield line
    finally:
        DISPLAY.pop(line)


@contextmanager
def activity(name: str, total: float | None = None, unit: str = "") -> Iterator[Activity]:
    """Show a named activity while the block runs; with a `total`, `update` moves a bar."""
    work = Activity(name, total, unit)
    with shown(work):
        yield work


def bar(done: float, total: float | None, width: int = 20) -> str:
    """The share that is done, as a bar; nothing without a total.

    >>> bar(1, 4, width=8)
    '[##------] '
    """
    if not total:
        return ""
    full = int(width * min(done / total, 1))
    return f"[{'#' * full}{'-' * (width - full)}] "


def amount(value: float, unit: str) -> str:
    """A count with its unit; bytes in megabytes.

    >>> amount(5e6, "B"), amount(5000, "images")
    ('5.0 MB', '5,000 images')
    """
    return f"{value / 1e6:.1f} MB" if unit == "B" else f"{value:,.0f} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Seconds in the unit that reads best.

    >>> [duration(s) for s in (5, 600, 20_000, 80_000, 200_000, 4e6)]
    ['5 s', '10 min', '5.6 h', '22 h', '2.3 days', '7 weeks']
    """
    for limit, size, places, name in (
        *((90, 1, 0, "s"), (5400, 60, 0, "min"), (48 * 3600, 3600, 1, "h")),
        *((14 * 86400, 86400, 1, "days"), (2 * 365 * 86400, 7 * 86400, 0, "weeks")),
    ):
        if seconds < limit:
            return f"{seconds / size:.{places if seconds < 10 * size else 0}f} {name}"
    return f"{seconds / (365 * 86400):.0f} years"
