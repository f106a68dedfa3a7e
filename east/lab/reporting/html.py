"""HTML for pages that need no network and no scripts. Everything is escaped unless it is called HTML."""

import re
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


def table(header: Sequence[str], lines: Sequence[Sequence[object]], plain: bool = True) -> str:
    """A table that scrolls sideways. plain: its cells are text, not HTML."""
    with pd.option_context("display.max_colwidth", None):
        frame = pd.DataFrame(lines, columns=pd.Index(header))
        inner = frame.to_html(index=False, border=0, justify="left", escape=plain)
    return f'<div tabindex="0">{inner}</div>'


def pre(text: str) -> str:
    return text and f"<pre>{escape(text)}</pre>"


def bullets(lines: Iterable[str]) -> str:
    """A list of HTML items."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return items and f"<ul>{items}</ul>"


def from_markdown(text: str) -> str:
    """Markdown as our tables use it: headings, tables, lists, code, bold and raised text."""
    text = escape(text, quote=False).replace(r"\|", "&#124;").replace(r"\*", "&#42;")
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"&lt;sup&gt;(.+?)&lt;/sup&gt;", r"<sup>\1</sup>", text)
    return "".join(map(_block, re.split(r"\n{2,}", text.strip())))


def _block(text: str) -> str:
    first, *others = text.splitlines() or [""]
    marks, _, title = first.partition(" ")
    if first.startswith("|"):
        header, _, *lines = ([cell.strip() for cell in line.strip()[1:-1].split("|")] for line in (first, *others))
        return table(header, [(line + [""] * len(header))[: len(header)] for line in lines], plain=False)
    if first.startswith("```"):
        return "<pre>{}</pre>".format("\n".join(others[:-1]))
    if first.startswith("- "):
        return bullets(line.removeprefix("- ") for line in (first, *others))
    if marks and not marks.strip("#"):
        return f"<h{len(marks) + 1}>{title}</h{len(marks) + 1}>" + (_block("\n".join(others)) if others else "")
    return f"<p>{text}</p>" if text else ""
