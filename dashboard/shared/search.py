"""Search over kernels, models, shapes, commits and runs, from every page."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

import streamlit as st

from dashboard.shared.formatting import as_text, short_commit
from dashboard.shared.links import page_address
from db import queries
from db.engine import Database
from db.errors import DatabaseError, NotFoundError
from workloads.case import kernel_label
from workloads.models import load_catalog
from workloads.probes import is_probe

_MOST = 5  # of each kind
_COMMITS = 400  # newest, whose subjects are searched
_SHAPE = re.compile(r"(\d{2,6})\s*[x×, ]\s*(\d{2,6})")
_HEX = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """words: what it is. address: of the page that shows it."""

    words: str
    address: str


def search(database: Database, asked: str) -> list[SearchHit]:
    """Find what a search text may refer to, kernels first; empty: nothing matches."""
    words = asked.strip().lower()
    if len(words) < 2:
        return []
    with database.session() as session:
        series = [one for one in queries.series_names(session) if not is_probe(one.kernel)]
        commits = queries.recent_commits(session, limit=_COMMITS)
        runs = []
        if _HEX.fullmatch(words):
            commits += queries.recent_commits(session, limit=0, prefixes=[words])
            with suppress(NotFoundError):
                runs = [queries.run_by_uuid_prefix(session, words)]
    labels = {kernel_label(one.kernel, one.variant): one.kernel for one in series}
    found = [
        SearchHit(f"kernel {label}", page_address("kernels", kernel=kernel))
        for label, kernel in sorted(labels.items())
        if words in label.lower()
    ][:_MOST]
    found += [
        SearchHit(f"model {name}", page_address("leaderboard", model=name))
        for name in sorted(load_catalog())
        if words in name.lower()
    ][:_MOST]
    shape = _SHAPE.fullmatch(words)
    sizes = {(one.n, one.k) for one in series}
    if shape and (int(shape[1]), int(shape[2])) in sizes:
        n, k = shape[1], shape[2]
        found.append(SearchHit(f"shape {n} × {k}", page_address("history", shape=f"{n}x{k}")))
    matching = [row for row in commits if row.sha.startswith(words) or words in row.subject.lower()]
    found += [
        SearchHit(
            f"commit {short_commit(row.sha, dirty=False)} {row.subject}",
            page_address("compare", **{"kind": "commits", "head-commits": row.sha[:10]}),
        )
        for row in dict.fromkeys(matching)
    ][:_MOST]
    found += [
        SearchHit(f"run {run.uuid[:8]} of {run.suite}", page_address("results", run=run.uuid[:8]))
        for run in runs
    ]
    return found


def show_search(database: Database) -> None:
    """A field in the side bar, and links to what it finds."""
    asked = st.sidebar.text_input(
        "Search", placeholder="kernel, model, N × K, commit or run", max_chars=80, key="search"
    )
    if not asked:
        return
    try:
        found = search(database, asked)
    except DatabaseError:
        return  # the page says why nothing can be read
    for one in found:
        st.sidebar.markdown(f"[{as_text(one.words)}]({one.address})")
    if not found:
        st.sidebar.caption("Nothing is called so.")
