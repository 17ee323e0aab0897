"""Load test of the read API: errors and the 95th percentile of response times.

Starts `flexq-bench serve-api` on a database. --readers clients send requests over loopback for
--seconds, each one request at a time, some of them with the ETag of their last response. Prints
requests, errors, percentiles and the server's CPU time per request, and fails on an error or a 95th
percentile of 300 ms or more:

    python benchmarks/dashboard/api_load.py large.sqlite --readers 200 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))
from browsing import cpu_seconds, served

LIMIT_MS = 300.0
PATHS = (
    "/v1/status",
    "/v1/series?limit=50",
    "/v1/series/1",
    "/v1/alerts",
    "/v1/runs?limit=10",
    "/v1/results/latest?kernel=flexq-w6a6&limit=100",
    "/badge.svg",
    "/openapi.json",
)


@contextmanager
def api_on(database: str) -> Iterator[tuple[int, int]]:
    """The port and the process of the API, started and ended as a person does it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "flexq_bench.cli", "serve-api", "--db", database]
    with served([*command, "--port", str(port)], lambda: _listens(port)) as process:
        yield port, process.pid


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def reader(number: int, port: int, until: float, waits: list[float]) -> Counter[str]:
    """Read on one connection, add waits in ms, and return the count of each status."""
    statuses: Counter[str] = Counter()
    etags: dict[str, str] = {}
    streams = await asyncio.open_connection("127.0.0.1", port)
    index = number
    while time.monotonic() < until:
        path = PATHS[index % len(PATHS)]
        index += 1
        known = etags.get(path) if index % 2 else None
        start = time.perf_counter()
        try:
            status, etag = await _get(*streams, path, known)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            statuses["broken"] += 1
            streams = await asyncio.open_connection("127.0.0.1", port)
            continue
        waits.append(1e3 * (time.perf_counter() - start))
        statuses[status] += 1
        etags[path] = etag
        await asyncio.sleep(0.05)  # people and badges read, too
    streams[1].close()
    return statuses


async def _get(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, path: str, etag: str | None
) -> tuple[str, str]:
    lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"If-None-Match: {etag}"] if etag else []
    sink.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    await sink.drain()
    head = (await source.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
    await source.readexactly(int(headers.get("content-length", "0")))
    return head[0].split()[1], headers.get("etag", "")


async def load(port: int, readers: int, seconds: float) -> tuple[list[float], Counter[str]]:
    waits: list[float] = []
    until = time.monotonic() + seconds
    statuses = await asyncio.gather(*(reader(i, port, until, waits) for i in range(readers)))
    return waits, sum(statuses, Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="a path or URL")
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with api_on(options.database) as (port, pid):
        before = cpu_seconds([pid])
        waits, statuses = asyncio.run(load(port, options.readers, options.seconds))
        spent_ms = 1e3 * (cpu_seconds([pid]) - before) / len(waits)
    middle, high = (float(np.percentile(waits, p)) for p in (50, 95))
    errors = sum(count for status, count in statuses.items() if status not in ("200", "304"))
    loads = " ".join(f"{average:.1f}" for average in os.getloadavg())
    sys.stdout.write(
        f"{options.readers} readers, {len(waits):,} requests, {errors} errors, median {middle:.0f} "
        f"ms, 95th percentile {high:.0f} ms; {spent_ms:.2f} ms of the server's CPU a request; "
        f"{dict(statuses)}; load {loads}\n"
    )
    sys.exit(int(errors > 0 or high >= LIMIT_MS))


if __name__ == "__main__":
    main()
