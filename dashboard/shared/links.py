"""Addresses in tables: of pages of the app, and of commits where the repository is kept."""

from __future__ import annotations

import os
import re
from urllib.parse import urlencode

from dashboard.settings import COMMIT_URL_VARIABLE, PLACE_OF_SHA

_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def commit_url(sha: str) -> str | None:
    """The address of a commit, made of the template that the app was started with.

    None: no template was given, or it is no commit of a git tree.
    """
    template = os.environ.get(COMMIT_URL_VARIABLE, "")
    if not template or not _SHA.fullmatch(sha):
        return None
    return template.replace(PLACE_OF_SHA, sha)


def page_address(page: str, **query: str) -> str:
    """The address of a page below the app's own, with what the page is to show."""
    return f"{page}?{urlencode(query)}"
