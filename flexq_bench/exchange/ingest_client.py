"""Client of the ingest API: `python -m flexq_bench.exchange.ingest_client FILE --project acme`.

It needs only the standard library, so that a copy of this file is enough. The token is read from
$FLEXQ_BENCH_TOKEN, so that no list of processes shows it.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

TOKEN_VARIABLE = "FLEXQ_BENCH_TOKEN"
_PARAMETERS = ("project", "format", "commit", "branch", "device", "time", "occasion")
_TEMPORARY = (429, 502, 503, 504)
_MAX_WAIT_S = 60.0


def send(
    url: str, token: str, content: bytes, *, attempts: int = 6, timeout_s: float = 600, **of: str
) -> dict[str, Any]:
    """Send results, and return the server's answer; a lost answer is asked for again.

    of: project, format and other parameters of `POST /v1/results`. Raises urllib.error.HTTPError if
    the server refuses them, OSError if it can't be reached.
    """
    query = urllib.parse.urlencode(sorted(of.items()))
    key = hashlib.sha256(query.encode() + b"\0" + content).hexdigest()
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": key}
    headers["Content-Encoding"] = "gzip"
    packed = gzip.compress(content, mtime=0)
    target = f"{url.rstrip('/')}/v1/results?{query}"
    for attempt in range(attempts):
        request = urllib.request.Request(target, packed, headers, method="POST")
        wait = min(2.0**attempt, _MAX_WAIT_S)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            if error.code not in _TEMPORARY or attempt == attempts - 1:
                raise
            wait = min(float(error.headers.get("Retry-After") or wait), _MAX_WAIT_S)
        except (OSError, ValueError):  # unreachable, or the answer is cut off
            if attempt == attempts - 1:
                raise
        time.sleep(wait)
    raise ValueError("attempts is below 1")


def main() -> int:
    """Send files. Returns 0, 2 if results were refused, 5 if a file could not be sent."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8502")
    for name in _PARAMETERS:
        parser.add_argument(f"--{name}", required=name == "project")
    options = vars(parser.parse_args())
    of = {name: options[name] for name in _PARAMETERS if options[name] is not None}
    refused = 0
    for path in options["files"]:
        try:
            token = os.environ[TOKEN_VARIABLE]
            answer = send(options["url"], token, path.read_bytes(), filename=path.name, **of)
        except urllib.error.HTTPError as error:
            sys.stderr.write(f"{path}: {error.code}: {json.load(error).get('detail', '')}\n")
            return 5
        except (OSError, KeyError) as error:
            sys.stderr.write(f"{path}: not sent: {error!r}\n")
            return 5
        refused += answer.get("refused", 0)
        sys.stdout.write(f"{path}: {json.dumps(answer)}\n")
    return 2 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
