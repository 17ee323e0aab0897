"""Load test of the read API: errors and the 95th percentile of response times.

Starts `flexq-bench serve-api` on a database. --readers clients send requests over loopback for
--seconds, each one request at a time with --pause seconds between two, some of them with the ETag
of their last response. With --unique no address is asked for twice, so that no response is cached:
pages of every list, each with another row to begin after. Prints requests, errors, percentiles, the
server's CPU time per request and its memory, and fails on an error or a 95th percentile of
--limit-ms or more:

    python benchmarks/dashboard/api_load.py large.sqlite
    python benchmarks/dashboard/api_load.py large.sqlite --unique --readers 40 --pause 1
    python benchmarks/dashboard/api_load.py large.sqlite --unique --readers 1 --pause 0
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "dashboard"))
from browsing import cpu_seconds, served

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


def unique_addresses(port: int) -> Iterator[str]:
    """Pages that differ, of each list in turn."""
    draw = random.Random(0)

    def read(path: str) -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    series = [one["id"] for one in read("/v1/series?limit=1000")["series"]]
    highest = read("/v1/series?limit=1")["total"]
    runs = [one["uuid"] for one in read("/v1/runs?limit=100")["runs"]]
    alerts = [one["id"] for one in read("/v1/alerts?state=all&limit=1000")["alerts"]] or [1]
    for number in itertools.count(1):
        run, after = draw.choice(runs), draw.randrange(1, max(highest - 100, 2))
        limit = draw.randrange(1, 101)
        yield f"/v1/series?limit={limit}&after={after}"
        yield f"/v1/series?kernel=flexq*&m=1&m={number}&limit={limit}"
        yield f"/v1/series/{draw.choice(series)}?limit={number % 1000 + 1}"
        yield f"/v1/results/latest?limit={limit}&after={after}"
        yield f"/v1/results/latest?kernel=*w6a6&limit={limit}&offset={number}"
        yield f"/v1/results/latest?project=*&since=2025-01-02&limit=100&after={after}"
        yield f"/v1/runs?limit={limit}&after={run}"
        yield f"/v1/runs?limit=100&offset={number}"
        yield f"/v1/runs/{run}/results?limit={limit}&offset={number}"
        yield f"/v1/runs/{run}?"[: -1 - number % 3]
        yield f"/v1/alerts?state=all&limit={limit}&offset={number % 7}"
        yield f"/v1/alerts/{draw.choice(alerts)}?limit={number % 1000 + 1}"
        yield f"/v1/nights?limit={limit}&offset={number}"
        yield f"/badge.json?of={number:07x}"


def repeated_addresses(number: int) -> Iterator[str]:
    yield from itertools.islice(itertools.cycle(PATHS), number % len(PATHS), None)


async def reader(
    addresses: Iterator[str],
    port: int,
    until: float,
    pause_s: float,
    waits: dict[str, list[float]],
) -> Counter[str]:
    """Read on one connection, add waits in ms by path, and return the count of each status."""
    statuses: Counter[str] = Counter()
    etags: dict[str, str] = {}
    streams = await asyncio.open_connection("127.0.0.1", port)
    for index, path in enumerate(addresses):
        if time.monotonic() >= until:
            break
        known = etags.get(path) if index % 2 else None
        start = time.perf_counter()
        try:
            status, etag = await _get(*streams, path, known)
        except (OSError, asyncio.IncompleteReadError, ValueError):
            statuses["broken"] += 1
            streams = await asyncio.open_connection("127.0.0.1", port)
            continue
        waits.setdefault(_kind(path), []).append(1e3 * (time.perf_counter() - start))
        statuses[status] += 1
        etags[path] = etag
        await asyncio.sleep(pause_s)
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


def _kind(path: str) -> str:
    parts = path.partition("?")[0].split("/")
    return "/".join("*" if re.search(r"\d\d|^\d", part) else part for part in parts)


def peak_memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) / 1024


async def load(
    port: int,
    addresses_of: Callable[[int], Iterator[str]],
    readers: int,
    seconds: float,
    pause_s: float,
) -> tuple[dict[str, list[float]], Counter[str]]:
    waits: dict[str, list[float]] = {}
    until = time.monotonic() + seconds
    statuses = await asyncio.gather(
        *(reader(addresses_of(i), port, until, pause_s, waits) for i in range(readers))
    )
    return waits, sum(statuses, Counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="a path or URL")
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds between two requests")
    parser.add_argument("--unique", action="store_true", help="ask for no address twice")
    parser.add_argument("--limit-ms", type=float, default=300.0, help="of the 95th percentile")
    options = parser.parse_args()
    with api_on(options.database) as (port, pid):
        unique = unique_addresses(port) if options.unique else None
        before = cpu_seconds([pid])
        waits_by_path, statuses = asyncio.run(
            load(
                port,
                lambda i: repeated_addresses(i) if unique is None else unique,
                options.readers,
                options.seconds,
                options.pause,
            )
        )
        waits = [wait for of_path in waits_by_path.values() for wait in of_path]
        spent_ms = 1e3 * (cpu_seconds([pid]) - before) / len(waits)
        memory = peak_memory_mib(pid)
    for path, of_path in sorted(waits_by_path.items()):
        middle, high = (float(np.percentile(of_path, p)) for p in (50, 95))
        sys.stdout.write(f"{path:28} {len(of_path):7,} {middle:6.0f} {high:6.0f} ms\n")
    middle, high = (float(np.percentile(waits, p)) for p in (50, 95))
    errors = sum(count for status, count in statuses.items() if status not in ("200", "304"))
    loads = " ".join(f"{average:.1f}" for average in os.getloadavg())
    sys.stdout.write(
        f"{options.readers} readers, {len(waits):,} requests, {errors} errors, median {middle:.0f} "
        f"ms, 95th percentile {high:.0f} ms; {spent_ms:.2f} ms of the server's CPU a request; peak "
        f"{memory:.0f} MiB; {dict(statuses)}; load {loads}\n"
    )
    sys.exit(int(errors > 0 or high >= options.limit_ms))


if __name__ == "__main__":
    main()
