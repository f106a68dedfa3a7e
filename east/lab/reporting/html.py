"""HTML for pages that need no network and no scripts. Everything is escaped unless it is called HTML."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import pandas as pd

STYLE = """
:root { color-scheme: light dark; }
body { max-width: 76rem; margin: 0 auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; }
div { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: left; border-bottom: 1px solid GrayText; }
th:first-child, td:first-child { position: sticky; left: 0; background: Canvas; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: .85rem; }
figure { display: inline-block; margin: 1rem 2rem 1rem 0; }
figure > * { max-width: 100%; background: white; color: black; }
"""


def document(title: str, sections: Mapping[str, str]) -> str:
    """A page with a section of HTML under each heading; sections without content are left out."""
    body = "".join(f"<h2>{escape(name)}</h2>{content}" for name, content in sections.items() if content)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>{body}</main></body></html>\n"
    )


def table(header: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table that scrolls sideways."""
    with pd.option_context("display.max_colwidth", None):
        frame = pd.DataFrame(lines, columns=pd.Index(header))
        inner = frame.to_html(index=False, border=0, justify="left")
    return f'<div tabindex="0">{inner}</div>'


def pre(text: str) -> str:
    return text and f"<pre>{escape(text)}</pre>"


def bullets(lines: Iterable[str]) -> str:
    """A list of HTML items."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return items and f"<ul>{items}</ul>"
