"""Tables of HTML, without sorting and search, for the page that opens first.

Streamlit's own tables load 1.2 MB of scripts once their data arrive, and are drawn on a canvas:
they took 40 % of the time until Home was painted.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st

from flexq_bench.dashboard.shared.spreadsheet import harmless_text
from flexq_bench.dashboard.shared.tables import is_sentence

Format = Callable[[Any], str]
"""Return a cell's value as HTML."""
STYLE = (
    ".static-table { overflow-x: auto }"
    ".static-table table { border-collapse: collapse; font-size: 0.875rem; margin: 0 }"
    ".static-table :is(th, td) { border-bottom: 1px solid #8884; padding: 0.3rem 0.7rem;"
    " text-align: left; vertical-align: middle; white-space: nowrap }"
    ".static-table .number { text-align: right }"
    ".static-table .sentence { min-width: 20rem; white-space: normal }"
    ".static-table a { color: inherit }"
)


def number(form: str) -> Format:
    """Format numbers like `{:+.2f} %`."""
    return lambda value: html.escape(form.format(value))


def link(text: str) -> Format:
    """Format addresses as links. text: of all of them, or a pattern whose group is the text."""

    def linked(address: str) -> str:
        match = re.search(text, address)
        shown = match[1] if match is not None and match.groups() else text
        return f'<a href="{html.escape(address)}">{html.escape(shown)}</a>'

    return linked


def image(text: str) -> Format:
    """Format `data:` URLs as images. text: what they show."""
    return lambda address: f'<img src="{html.escape(address)}" alt="{text}">' if address else ""


def draw_static_table(
    rows: Sequence[Mapping[str, Any]], title: str, formats: Mapping[str, Format] | None = None
) -> None:
    """Show a table without formulas (see spreadsheet.py); missing values are empty.

    title: names it for readers of the screen. formats: of columns; others are texts or numbers.
    """
    head = "".join(f'<th scope="col">{_escaped(name)}</th>' for name in rows[0])
    forms = formats or {}
    cells = ([_cell(value, forms.get(name)) for name, value in row.items()] for row in rows)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    st.html(
        f'<div class="static-table" role="region" tabindex="0" aria-label="{html.escape(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(value: Any, form: Format | None) -> str:
    if value is None or value != value:
        return "<td></td>"
    kind = "" if isinstance(value, str) else ' class="number"'
    kind = ' class="sentence"' if is_sentence(value) else kind
    return f"<td{kind}>{_escaped(value) if form is None else form(value)}</td>"


def _escaped(value: object) -> str:
    return html.escape(harmless_text(str(value)) if isinstance(value, str) else str(value))
