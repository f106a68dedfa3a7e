"""task=report: a page with the tables and figures of a results folder, and links to its comparisons and evaluations."""

import warnings
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

from east.lab.files import read_regular, write_atomically
from east.lab.reporting import html
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings

MOST_BYTES = 1 << 24  # of a table
LINK = '<a href="{link}">{folder}</a>'
FIGURE = '<figure><img src="{link}" alt="{name}" loading="lazy"><figcaption>{name}</figcaption></figure>'
NOTHING = """east-run
east-run task=compare dataset.path=my.csv dataset.target=label
east-run task=table table=grid
east-run task=table table=all"""


def main(_: Command, settings: Settings) -> int:
    folder = Path(settings.results_dir)
    write_atomically(folder / "report.html", index(folder))
    print(folder / "report.html")
    return 0


def index(folder: Path) -> str:
    """The page. It shows what other tasks have written, and computes nothing."""
    sections = {
        "Comparisons": html.bullets(linked(folder, "compare/*/report.html", LINK)),
        "Evaluations": html.bullets(linked(folder, "evaluate/*/report.html", LINK)),
        "Tables": "".join(tables(folder)),
        "Figures": "".join(linked(folder, "figures/*.svg", FIGURE)),  # an image runs no scripts and follows no links
    }
    if not any(sections.values()):
        sections["Nothing here yet"] = f"<p>These commands write comparisons and tables:</p>{html.pre(NOTHING)}"
    return html.document("Results", sections)


def linked(folder: Path, pattern: str, template: str) -> Iterator[str]:
    """HTML about each of these files: its address, its name, and the name of its folder."""
    for file in sorted(folder.glob(pattern)):
        link = quote(file.relative_to(folder).as_posix())
        yield template.format(link=link, name=escape(file.stem), folder=escape(file.parent.name))


def tables(folder: Path) -> Iterator[str]:
    """Each table, folded, as Markdown."""
    for file in sorted(folder.glob("tables/*.md")):
        try:
            text = read_regular(file, MOST_BYTES).decode()
        except (OSError, ValueError) as error:
            warnings.warn(f"{file} cannot be read ({error}); not shown", stacklevel=2)
            continue
        yield f"<details><summary>{escape(file.stem)}</summary>{html.pre(text)}</details>"
