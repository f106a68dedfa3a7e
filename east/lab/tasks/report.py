"""task=report: a page with the tables and figures of a results folder, and links to its comparisons and evaluations."""

import warnings
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

from east.lab.files import read_regular, write_text
from east.lab.reporting import html
from east.lab.settings.command import Command
from east.lab.settings.settings import Settings

MOST_BYTES = 1 << 24  # of a table
NOTHING = """east-run
east-run task=compare dataset.path=my.csv dataset.target=label
east-run task=table table=grid
east-run task=table table=all"""


def main(_: Command, settings: Settings) -> int:
    folder = Path(settings.results_dir)
    write_text(folder / "report.html", index(folder))
    print(folder / "report.html")
    return 0


def index(folder: Path) -> str:
    """The page. It shows what other tasks have written, and computes nothing."""
    sections = {
        "Comparisons": html.bullets(links(folder, "compare")),
        "Evaluations": html.bullets(links(folder, "evaluate")),
        "Tables": "".join(tables(folder)),
        "Figures": "".join(figures(folder)),
    }
    if not any(sections.values()):
        sections["Nothing here yet"] = f"<p>These commands write comparisons and tables:</p>{html.pre(NOTHING)}"
    return html.document("Results", sections)


def links(folder: Path, kind: str) -> Iterator[str]:
    """Links to the pages of comparisons or evaluations."""
    for file in sorted(folder.glob(f"{kind}/*/report.html")):
        yield f'<a href="{quote(file.relative_to(folder).as_posix())}">{escape(file.parent.name)}</a>'


def tables(folder: Path) -> Iterator[str]:
    """Each table, folded."""
    for file in sorted(folder.glob("tables/*.md")):
        try:
            text = read_regular(file, MOST_BYTES).decode()
        except (OSError, ValueError) as error:
            warnings.warn(f"{file} cannot be read ({error}); not shown", stacklevel=2)
            continue
        yield f"<details><summary>{escape(file.stem)}</summary>{html.from_markdown(text)}</details>"


def figures(folder: Path) -> Iterator[str]:
    """Each drawing as an image, in which browsers run no scripts and follow no links."""
    for file in sorted(folder.glob("figures/*.svg")):
        name, source = escape(file.stem), quote(file.relative_to(folder).as_posix())
        yield f'<figure><img src="{source}" alt="{name}" loading="lazy"><figcaption>{name}</figcaption></figure>'
