"""Bars are redrawn on a terminal and in a notebook; a log gets plain lines."""

import io
import subprocess
import sys
import time

import pytest

from east.lab import bars
from tests.commands import environment


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "log"])
def test_bars_are_drawn_or_become_lines(stream, monkeypatch):
    assert bars.LOG <= 30, "as promised for logs"
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(bars, "REDRAW", 0.02)
    monkeypatch.setattr(bars, "LOG", 0.02)
    with bars.bar("training", 10, "trial", lambda: "3 running", start=2), bars.bar("decoding", 4, "image") as inner:
        inner.update(1)
        time.sleep(0.2)
        bars.say("failed: something")
    text = stream.getvalue()
    assert "failed: something\n" in text
    if stream.isatty():
        assert "\r" in text
        assert "training:  20%" in text
        assert "3 running" in text
        assert text.rpartition("\r")[0].rstrip("\r")[-5:].isspace(), "both bars are wiped out"
    else:
        assert {"training: 2/10 [00:00<?, 3 running]", "decoding: 1/4 [00:00<00:00]"} <= {*text.splitlines()}
        assert "\r" not in text


def test_bars_survive_a_closed_stream(monkeypatch):
    class Closed(io.StringIO):
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stderr", Closed())
    monkeypatch.setattr(bars, "LOG", 0.01)
    with bars.bar("training", 10, "trial") as shown:
        time.sleep(0.1)
        shown.update(1)


def test_a_notebook_gets_its_own_bars():
    """As tqdm.auto chooses them where IPython's kernel runs."""
    script = (
        "import sys, types; from tqdm import notebook\n"
        "auto = types.ModuleType('tqdm.auto'); auto.tqdm = notebook.tqdm_notebook; sys.modules['tqdm.auto'] = auto\n"
        "from east.lab import bars; assert bars.IN_NOTEBOOK"
    )
    assert subprocess.run([sys.executable, "-c", script], env=environment(), check=False).returncode == 0
