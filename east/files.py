"""Writing files that nobody ever sees half written."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def write_atomically(target: Path, fill: Callable[[BinaryIO], object]) -> None:
    """`fill(file)` under a temporary name in the same folder, flushed to the disk, then renamed to `target`."""
    temporary = temporary_name(target)
    try:
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(target: Path) -> Path:
    """A hidden name beside `target` that no other process or call uses."""
    return target.with_name(f".{target.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
