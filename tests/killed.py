"""east-run that kills itself with SIGKILL while it writes a file. For test_interruption.py:

    tests/killed.py KIND STEP ARGUMENTS…

KIND is the file: checkpoint, arrays or record. STEP is how far the first such file gets: half written, not
renamed, renamed. Checkpoints are written at once, not after a minute.
"""

import os
import signal
import sys
from collections.abc import Callable
from fnmatch import fnmatch

from east.lab import cli
from east.lab.training import engine

NAMES = {"checkpoint": "*.safetensors", "arrays": "*.npz", "record": "seed-*.json"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kind: str, step: str) -> None:
    """Die at this step of writing the next file of this kind. Files are flushed as temporary files, then renamed."""
    fsync = os.fsync

    def concerned(path: str | os.PathLike) -> bool:
        return fnmatch(os.path.basename(path), f".{NAMES[kind]}.*.tmp")

    def flushing(descriptor: int) -> None:
        if concerned(os.readlink(f"/proc/self/fd/{descriptor}")):
            os.truncate(descriptor, os.fstat(descriptor).st_size // 2)
            die()
        fsync(descriptor)

    def renaming(real: Callable) -> Callable:
        def rename(source: str | os.PathLike, target: str | os.PathLike) -> None:
            if not concerned(source):
                return real(source, target)
            if step == "renamed":
                real(source, target)
            return die()

        return rename

    if step == "half written":
        os.fsync = flushing
    else:
        os.replace, os.link = renaming(os.replace), renaming(os.link)


if __name__ == "__main__":
    _, kind, step, *words = sys.argv
    engine.CHECKPOINT_SECONDS = 0.0
    arm(kind, step)
    sys.exit(cli.run(words))
