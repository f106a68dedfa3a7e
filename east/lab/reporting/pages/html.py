"""Parts that all pages share: a self-contained document, and tables that scroll."""

from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent


def document(title: str, header: str, main: str, style: str = "", script: str = "") -> str:
    """A page without external requests; `header` and `main` are HTML, `style` is added to report.css."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{read('report.css')}{style}</style></head><body>"
        f"<header>{header}</header><main>{main}</main>{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def read(name: str) -> str:
    """A file of this folder."""
    return (HERE / name).read_text(encoding="utf-8")


def scrolling(label: str, inner: str) -> str:
    """A table that scrolls sideways on a narrow screen, also by keyboard."""
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}"><table>{inner}</table></div>'
