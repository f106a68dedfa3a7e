"""Progress bars by tqdm: redrawn on a terminal and in a notebook; in a log, one plain line every half minute.

    with bar("decoding images", total=100, unit="image") as shown:
        shown.update(1)

A thread redraws each open bar, so the clock moves even if the work reports nothing.
"""

import io
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from tqdm.auto import tqdm
from tqdm.std import tqdm as text_bar

from east.choices import printable

IN_NOTEBOOK = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
REDRAW, LOG = 1.0, 25.0  # seconds between two redraws, and between two lines in a log, which promises one every 30
IN_LOG = "{desc}: {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
UNCOUNTED = "{desc} [{elapsed}{postfix}]"

tqdm.set_lock(threading.RLock())  # the bars are those of this process alone
tqdm.monitor_interval = text_bar.monitor_interval = 0  # the threads below do the same and more


@contextmanager
def bar(
    name: str, total: float | None = None, unit: str = "", describe: Callable[[], str] | None = None, start: int = 0
) -> Iterator[tqdm]:
    """Show a bar while the block runs. describe() gives the text behind it, and is called again at every redraw.

    start: how much was done before.
    """
    stream: TextIO = getattr(sys.stderr, "_wrapped", sys.stderr)  # a bar moves the cursor, which choices.py escapes
    closed = threading.Event()
    log = not (IN_NOTEBOOK or stream.isatty())
    shown = (text_bar if log else tqdm)(
        desc=printable(name),
        total=total,
        unit=unit,
        unit_scale=unit == "B",
        initial=start,
        smoothing=0,
        leave=False,
        dynamic_ncols=True,
        file=io.StringIO() if log else stream,
        delay=math.inf if log else 0,
        bar_format=UNCOUNTED if not (total or unit) else IN_LOG if log and total else None,
    )

    def redraw() -> None:
        while not closed.wait(LOG if log else REDRAW):
            with tqdm.get_lock(), suppress(OSError, ValueError):  # nobody reads the stream any more; the work continues
                if describe:
                    shown.set_postfix_str(describe(), refresh=False)
                if not closed.is_set():
                    print(shown, file=stream, flush=True) if log else shown.refresh()

    threading.Thread(target=redraw, daemon=True).start()
    try:
        yield shown
    finally:
        with tqdm.get_lock():
            closed.set()
            shown.close()


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
