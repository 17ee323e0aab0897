"""Reports of the performance gate: Markdown, JUnit XML, JSON."""

from __future__ import annotations

from ci.reports.headline import headline
from ci.reports.junit import junit
from ci.reports.machine_readable import as_json
from ci.reports.markdown import MARKER, markdown

__all__ = ["MARKER", "as_json", "headline", "junit", "markdown"]
