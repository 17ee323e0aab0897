"""Formats that several reports share: JUnit XML, and texts in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree import ElementTree

from flexq_bench.measure.worker_messages import printable

# Characters that XML 1.0 does not allow, even escaped.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MAX_CHARACTERS = 200  # of a text in Markdown
_LINK = re.compile(r":(?=//)|\.(?<=www\.)", re.IGNORECASE)  # where no sign marks one
_ESCAPES = str.maketrans(
    {"&": "&amp;", "<": "&lt;", ">": "&gt;"} | {sign: f"&#{ord(sign)};" for sign in "\\`*_[]|#@!"}
)


@dataclass(frozen=True, slots=True)
class JUnitCase:
    """A test case. tag: `error`, `failure` or `skipped`; empty: it passed."""

    group: str
    name: str
    tag: str = ""
    message: str = ""
    kind: str = ""
    detail: str = ""


def junit_xml(
    suite: str,
    totals: dict[str, int],
    properties: Iterable[tuple[str, str]],
    cases: Iterable[JUnitCase],
    system_out: str = "",
) -> str:
    """Format a test suite. totals: numbers of cases, by the attribute's name."""
    attributes = {name: str(count) for name, count in totals.items()}
    root = ElementTree.Element("testsuites", attributes)
    top = ElementTree.SubElement(root, "testsuite", {"name": suite, **attributes})
    table = ElementTree.SubElement(top, "properties")
    for name, value in properties:
        ElementTree.SubElement(table, "property", {"name": _xml(name), "value": _xml(value)})
    for case in cases:
        named = {"classname": _xml(case.group), "name": _xml(case.name)}
        element = ElementTree.SubElement(top, "testcase", named)
        if case.tag:
            reason = {"message": _xml(case.message)} | ({"type": case.kind} if case.kind else {})
            ElementTree.SubElement(element, case.tag, reason).text = _xml(case.detail)
    if system_out:
        ElementTree.SubElement(top, "system-out").text = _xml(system_out)
    ElementTree.indent(root)
    body = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}\n'


def _xml(text: str) -> str:
    return _FORBIDDEN.sub("", text)


def plain(text: str) -> str:
    """Escape Markdown, HTML and links, and shorten the text to one line."""
    flat = " ".join(text.split())
    return escaped(flat if len(flat) <= _MAX_CHARACTERS else f"{flat[: _MAX_CHARACTERS - 1]}…")


def escaped(text: str) -> str:
    """Escape Markdown, HTML and links of a text, on one line."""
    flat = " ".join(printable(text).split()).translate(_ESCAPES)
    return _LINK.sub(lambda sign: f"&#{ord(sign[0])};", flat)
