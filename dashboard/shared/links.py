"""Where a commit can be looked at: a URL template that whoever started the app gave."""

from __future__ import annotations

import os
import re

from dashboard.settings import COMMIT_URL_VARIABLE, PLACE_OF_SHA

_SHA = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")


def commit_url(sha: str) -> str | None:
    """The address of a commit; None: no template was given, or it is no commit of a git tree."""
    template = os.environ.get(COMMIT_URL_VARIABLE, "")
    if not template or not _SHA.fullmatch(sha):
        return None
    return template.replace(PLACE_OF_SHA, sha)
