"""Database time of each page: sum of its queries, 95th percentile.

The time of a query includes reading and converting its rows; the dashboard's caches are cleared
before each view. Prints the table that docs/dashboard.md quotes, for a database that
benchmarks/db/fill.py made:

    python benchmarks/db/pages.py large.sqlite
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import streamlit as st
from made_up import identity
from streamlit.testing.v1 import AppTest

from flexq_bench.dashboard.database import keep_imports
from flexq_bench.dashboard.shared.noise import noise_of_file
from flexq_bench.db import queries
from flexq_bench.db.urls import ENVIRONMENT_VARIABLE

LIMIT_MS = 300.0
# Page: parameters of its link.
VIEWS: tuple[tuple[str, dict[str, str | list[str]]], ...] = (
    ("home", {}),
    ("leaderboard", {}),
    ("triage", {}),
    ("alert", {}),
    ("history", {}),
    ("history", {"kernel": "flexq-w6a6", "show": "% of read"}),
    ("history", {"kernel": "flexq-w6a6", "show": "relative to a release"}),
    ("measurement", {"uuid": identity("measurement", 10, 0)}),
    ("results", {}),
    ("compare", {}),
    ("kernels", {}),
    ("sweep", {}),
    ("paper", {}),
    ("accuracy", {}),
    ("decode", {}),
    ("fleet", {}),
)


@contextmanager
def timed_queries() -> Iterator[dict[str, float]]:
    """Seconds by query while the block runs; what one query asks of another counts once."""
    spent: dict[str, float] = defaultdict(float)
    named = {name: getattr(queries, name) for name in dir(queries)}
    plain = {name: f for name, f in named.items() if isinstance(f, FunctionType)}
    depth = 0

    def timed(name: str, query: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(query)
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal depth
            depth += 1
            start = time.perf_counter()
            try:
                return query(*arguments, **options)
            finally:
                depth -= 1
                if not depth:
                    spent[name] += time.perf_counter() - start

        return call

    try:
        for name, query in plain.items():
            setattr(queries, name, timed(name, query))
        yield spent
    finally:
        for name, query in plain.items():
            setattr(queries, name, query)


def view(page: str, link: dict[str, str | list[str]]) -> None:
    """Open a page once. Raises RuntimeError if it shows an error."""
    app = AppTest.from_string(
        f"from flexq_bench.dashboard.views.{page}.page import page\npage()", default_timeout=60
    )
    for name, value in link.items():
        app.query_params[name] = value
    app.run()
    problems = [*(box.message for box in app.exception), *(box.value for box in app.error)]
    if problems:
        raise RuntimeError(f"{page} {link}: {problems[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("database", help="a path or URL")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--page", help="this one alone")
    parser.add_argument("--by-query", action="store_true", help="also where the time goes")
    options = parser.parse_args()
    os.environ[ENVIRONMENT_VARIABLE] = options.database
    out = sys.stdout.write
    out("| page | link | median, ms | 95th percentile, ms | whole page, ms |\n")
    out("| --- | --- | ---: | ---: | ---: |\n")
    slow = False
    for page, link in VIEWS:
        if options.page not in (None, page):
            continue
        view(page, link)  # imports, the connection
        keep_imports()  # as the server does
        totals, walls, by_query = [], [], defaultdict(list)
        for _ in range(options.repetitions):
            st.cache_data.clear()
            noise_of_file.clear()
            with timed_queries() as spent:
                start = time.perf_counter()
                view(page, link)
                walls.append(1e3 * (time.perf_counter() - start))
            totals.append(1e3 * sum(spent.values()))
            for name, seconds in spent.items():
                by_query[name].append(1e3 * seconds)
        high = float(np.percentile(totals, 95))
        slow |= high > LIMIT_MS
        words = "&".join(f"{name}={value}" for name, value in link.items())
        found = f"{np.median(totals):.0f} | {high:.0f} | {np.median(walls):.0f}"
        out(f"| {page} | {words} | {found} |\n")
        if options.by_query:
            for name, times in sorted(by_query.items(), key=lambda item: -np.median(item[1])):
                out(f"    {name} {np.median(times):.1f}\n")
        sys.stdout.flush()
    sys.exit(int(slow))


if __name__ == "__main__":
    main()
