"""Odd environments: no output, an ASCII locale. No traceback, and the right exit code."""

import subprocess
import sys

import pytest

from east.lab import cli
from tests.commands import TINY, environment, record_files, start

AS_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


def through_shell(script, *words, **variables):
    """Run a shell script in which "$@" is east-run with its arguments."""
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "east.lab.cli", *words]
    return subprocess.run(command, capture_output=True, check=False, env=environment(variables), timeout=300)


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("word, code", [("--help", cli.DONE), ("dataset=nowhere", cli.BAD_CONFIG)])
def test_closed_streams_cause_no_traceback(closed, word, code):
    answer = through_shell(f'exec "$@" {closed}', word)
    assert answer.returncode == code
    assert b"Traceback" not in answer.stderr


@pytest.mark.slow
def test_a_run_works_without_any_streams(tmp_path):
    """All three streams are None, as when nobody holds their other ends."""
    script = tmp_path / "silent.py"
    script.write_text(
        "import os, sys; from east.lab import cli\n"
        "for number in (0, 1, 2): os.close(number)\n"
        "sys.stdin = sys.stdout = sys.stderr = None\n"
        f"sys.argv = ['east-run', *{TINY!r}, 'results_dir={tmp_path}']; cli.main()\n"
    )
    process = start(script)
    process.communicate()
    assert process.returncode == cli.DONE
    assert len(record_files(tmp_path)) == 2
    assert all("Traceback" not in text for text in record_files(tmp_path).values())


def test_an_ascii_terminal_shows_question_marks():
    answer = through_shell('exec "$@"', "--help", **AS_ASCII)
    assert (answer.returncode, answer.stderr) == (cli.DONE, b"")
    assert b"(task=?;" in answer.stdout
    assert answer.stdout.isascii()


@pytest.mark.slow
def test_an_ascii_locale_does_not_change_how_files_are_read(tmp_path):
    """A table with non-ASCII letters is read, trained on and reported."""
    rows = [f"{'größer' if k % 3 else 'δ'},{k % 3 + k / 100},{'naïve' if k % 2 else '東'}" for k in range(90)]
    (tmp_path / "my.csv").write_text("\n".join(["größe,x,wörter", *rows]), encoding="utf-8")
    script = tmp_path / "ascii.py"
    small = [word for word in TINY if not word.startswith("dataset")]
    script.write_text(
        "import locale, sys; from east.lab import cli\n"
        "locale.setlocale(locale.LC_ALL, 'C'); assert locale.getencoding() != 'UTF-8'\n"
        "for stream in (sys.stdout, sys.stderr): stream.reconfigure(encoding='ascii')\n"
        "cli.usable_streams()\n"
        f"words = [*{small!r}, 'dataset.path={tmp_path}/my.csv', 'dataset.target=größe', 'trials=1']\n"
        f"codes = [cli.run([*words, 'results_dir={tmp_path}']), cli.run(['task=report', 'results_dir={tmp_path}'])]\n"
        "sys.exit(max(codes))\n",
        encoding="utf-8",
    )
    process = start(script)
    _, err = process.communicate()
    assert process.returncode == cli.DONE, err
    assert "Traceback" not in err
    assert "<h1" in (tmp_path / "report.html").read_text(encoding="utf-8")
