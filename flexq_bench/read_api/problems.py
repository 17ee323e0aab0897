"""Problem documents (RFC 9457): the body of every refusal."""

from __future__ import annotations

import json
from http import HTTPStatus

PROBLEM = "application/problem+json"


def problem(status: int, detail: str) -> bytes:
    """Return a problem document as JSON. `error` has the detail for clients of version 1.0."""
    title = HTTPStatus(status).phrase
    document = {"type": "about:blank", "title": title, "status": status}
    return json.dumps({**document, "detail": detail, "error": detail}).encode()
