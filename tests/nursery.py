"""A fork server for tests that has already imported torch: commands start at once and are real processes to kill.

Each line of its input is JSON. An object starts a command; the answer is its process id. A process id asks for that
command's exit code; the answer is null while it runs.
"""

import json
import os
import runpy
import signal
import sys

from east.lab import cli
from east.lab.tasks import run  # noqa: F401 (and torch, which is the point)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            become(**request)


def become(words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Turn this forked process into the requested command."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in enumerate((os.devnull, out, err)):
        file = os.open(name, os.O_RDWR)
        os.dup2(file, number)
        os.close(file)
    if words[0].endswith(".py"):
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
        sys.exit()
    sys.argv = ["east-run", *words]
    cli.main()


if __name__ == "__main__":
    main()
