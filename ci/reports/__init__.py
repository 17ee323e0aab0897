"""Reports of the performance gate: Markdown, JUnit XML, JSON."""

from __future__ import annotations

from flexq_bench.ci.reports.headline import headline
from flexq_bench.ci.reports.junit import junit
from flexq_bench.ci.reports.machine_readable import as_json
from flexq_bench.ci.reports.markdown import MARKER, markdown

__all__ = ["MARKER", "as_json", "headline", "junit", "markdown"]
