"""Progress bars by tqdm: redrawn on a terminal and in a notebook; in a log, one plain line every half minute.

    with bar("decoding images", total=100, unit="image") as shown:
        shown.update(1)

A thread redraws the open bars, so the clock moves even if the work reports nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from tqdm.auto import tqdm
from tqdm.std import tqdm as text_bar

IN_NOTEBOOK = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
REDRAW = 1.0  # seconds between two redraws
FIRST, LOG = 5.0, 25.0  # seconds until the first line in a log, and between lines; the promise is one every 30
COUNTED = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
UNCOUNTED = "{desc} [{elapsed}{postfix}]"

tqdm.set_lock(threading.RLock())  # the bars are those of this process alone
tqdm.monitor_interval = text_bar.monitor_interval = 0  # the thread below does the same and more


class LogBar(text_bar):
    """A bar that is never drawn; its text is part of a line in a log."""

    def display(self, *_: Any, **__: Any) -> None:
        pass

    clear = display

    def __str__(self) -> str:
        return self.format_meter(**self.format_dict | ({"bar_format": COUNTED} if self.total else {}))


_open: dict[tqdm, Callable[[], str] | None] = {}  # outermost first, with what describes the state of the work
_all_closed = threading.Event()


@contextmanager
def bar(
    name: str, total: float | None = None, unit: str = "", describe: Callable[[], str] | None = None, start: int = 0
) -> Iterator[tqdm]:
    """Show a bar while the block runs. describe() gives the text behind it, and is called again at every redraw.

    start: how much was done before.
    """
    global _all_closed
    log = not (IN_NOTEBOOK or sys.stderr.isatty())
    look = {"file": sys.stderr, "leave": False, "dynamic_ncols": True, "smoothing": 0, "unit_scale": unit == "B"}
    form = None if total or unit else UNCOUNTED
    shown = (LogBar if log else tqdm)(
        desc=name, total=total, unit=unit, initial=start, bar_format=form, gui=log, **look
    )
    _open[shown] = describe
    if len(_open) == 1:
        _all_closed = threading.Event()
        threading.Thread(target=_redraw, args=(_all_closed, sys.stderr, log), daemon=True).start()
    try:
        yield shown
    finally:
        with tqdm.get_lock():
            del _open[shown]
            shown.close()
            if not _open:
                _all_closed.set()


def _redraw(all_closed: threading.Event, stream: TextIO, log: bool) -> None:
    pause = FIRST if log else REDRAW
    while not all_closed.wait(pause):
        pause = LOG if log else REDRAW
        with tqdm.get_lock(), suppress(OSError, ValueError):  # nobody reads the stream any more; the work continues
            for shown, describe in _open.items():
                if describe:
                    shown.set_postfix_str(describe(), refresh=False)
                shown.refresh()
            if log and not all_closed.is_set():
                print(*_open, sep=" | ", file=stream, flush=True)


def say(text: str, file: TextIO | None = None) -> None:
    """Print above the bars."""
    tqdm.write(text, file=file or sys.stderr)
    (file or sys.stderr).flush()


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
