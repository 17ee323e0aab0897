"""URLs in tables: of pages of the app, and of commits on the repository's web site."""

from __future__ import annotations

import os
import re
from urllib.parse import urlencode

from flexq_bench.dashboard.settings import COMMIT_URL_VARIABLE, PLACE_OF_SHA

_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def commit_url(sha: str) -> str | None:
    """Return the URL of a commit by the app's template.

    None: no template was given, or it is not a commit of a git tree.
    """
    template = os.environ.get(COMMIT_URL_VARIABLE, "")
    if not template or not _SHA.fullmatch(sha):
        return None
    return template.replace(PLACE_OF_SHA, sha)


def page_address(page: str, **query: str) -> str:
    """Return the relative URL of a page. query: its parameters."""
    return f"{page}?{urlencode(query)}"
