"""Every code block and command of README and docs/ runs, reduced in size; the site builds.

A command with `(hours)` in its comment is planned with dry_run=true. Of one with a word of ELSEWHERE, only its
arguments are checked. A Python block whose first line is `# name.py` becomes that file.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from east.lab import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INSTALLS = ("pip install", "uv pip install", "uvx ", "git clone", "docker ")  # already done before a test runs
# What a test does not have: clusters, pretrained weights, photographs.
ELSEWHERE = {"executor=ray", "executor=submitit", "model=backbone", "input=new_photos"}
SMALLER = {"trials": 1, "protocol.max_epochs": 1, "executor": "inline"}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def commands(text: str) -> list[tuple[str, str]]:
    """Command and comment of every line of a bash block."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [(line.partition(" #")[0].strip(), line.partition(" #")[2].strip()) for line in lines]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The reader's working directory, with the files that the pages mention."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["east-run"])
    monkeypatch.setenv("EAST_DATA_DIR", str(tmp_path / "cache"))  # empty: plans need no data
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("east.lab.training.timing.step_seconds", lambda *_: 0.01)  # and tests need no timing
    torch.manual_seed(0)
    x = torch.randn(240, 3)
    rows = [f"{a:.3f},{b:.3f},{c:.3f},{'yes' if a + b > 1.5 else 'no'}" for a, b, c in x.tolist()]
    Path("my.csv").write_text("\n".join(["a,b,c,label", *rows]) + "\n")
    new = (f"{k},{row.rpartition(',')[0]}" for k, row in enumerate(rows[:9]))
    Path("new.csv").write_text("\n".join(["id,a,b,c", *new]) + "\n")
    Path("labelled.csv").write_text(Path("my.csv").read_text())
    yield tmp_path
    for name in ("my_metrics", "my_nets", "my_logger"):
        sys.modules.pop(name, None)


def with_model(text: str, folder: Path) -> str:
    """Replace `results/models/…` by a model that the page has saved."""
    models = sorted((folder / "results" / "models").glob("*-f1-*"))  # a network, which every task accepts
    return text.replace("results/models/…", str(models[0])) if models else text


def carry_out(command: str, comment: str, folder: Path) -> None:
    words = shlex.split(with_model(command, folder))[1:]
    if ELSEWHERE & {*words}:
        cli.checked_command(cli.parse_command(words))
        return
    if "(hours)" in comment:
        words.append("dry_run=true")
    task = next((word.partition("=")[2] for word in words if word.startswith("task=")), "run")
    if task in ("run", "train", "compare") and not any(word.startswith("-") for word in words):
        ignored = {"trials"} if task in ("train", "compare") else set()
        given = {word.partition("=")[0] for word in words}
        words += [f"{name}={value}" for name, value in SMALLER.items() if name not in given | ignored]
    assert cli.run(words) == 0, command


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page, folder, capsys):
    namespace = {"__name__": "page"}
    for language, text in blocks(page):
        if language == "python":
            name = re.match(r"# (\w+\.py)\n", text)
            if name:
                (folder / name.group(1)).write_text(text)
            else:
                with torch.random.fork_rng():
                    exec(compile(with_model(text, folder), page.name, "exec"), namespace)
        elif language == "bash":
            for command, comment in commands(text):
                if not command.startswith(INSTALLS):
                    assert command.startswith("east-run"), f"{command}: expected east-run or an installation"
                    carry_out(command, comment, folder)
        else:
            pytest.fail(f"{page.name} has a block of {language!r}: expected python or bash")


def test_every_block_is_found():
    """A block that the pattern misses would never run."""
    for page in PAGES:
        fences = re.findall(r"^```\w+$", page.read_text(), re.MULTILINE)
        assert len(fences) == len(blocks(page)), page.name


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "MetricLoss" in (tmp_path / "api" / "index.html").read_text()


def test_the_figures_of_the_pages_are_committed_and_drawn_by_our_scripts():
    text = "".join(page.read_text() for page in PAGES)
    used = {*re.findall(r"(?<!results/)figures/(\w+\.svg)", text)}  # those of results are drawn by tasks
    drawn = set(re.findall(r'^        "(\w+)": ', (ROOT / "scripts" / "figures.py").read_text(), re.MULTILINE))
    measured = {"bench_loss", "bench_population"}  # by scripts/bench_loss.py and bench_train.py, on an idle machine
    assert {Path(name).stem for name in used} == drawn | measured
    assert all((ROOT / "docs" / "figures" / name).is_file() for name in used)


def test_the_headline_figure_shows_the_committed_numbers():
    """Its labels are the means in results/tables/plugin.md, which test_results.py checks against the records."""
    table = (ROOT / "results" / "tables" / "plugin.md").read_text(encoding="utf-8")
    means = set(re.findall(r"^\| (?:F1\\\*|CE|CE \+ plug-in) \| \**(\d\.\d{3})", table, re.MULTILINE))
    labels = re.findall(
        r">(\d\.\d{3})</text>", (ROOT / "docs" / "figures" / "headline.svg").read_text(encoding="utf-8")
    )
    assert len(labels) == 12
    assert set(labels) == means
