"""A process that has imported what commands need and forks them: to start one takes no time, to kill it is real.

Each line of its input is a question in JSON: an object starts a command and is answered by its process id, a process id
is answered by the exit code of that command, or null while it runs.
"""

import json
import os
import runpy
import signal
import sys

from east import cli
from east.tasks import run  # noqa: F401 (and torch, which is the point)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            ended, status = os.waitpid(asked, os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            become(**asked)


def become(words: list[str], environment: dict[str, str], out: str, err: str) -> None:
    """Be the command that was asked for."""
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
