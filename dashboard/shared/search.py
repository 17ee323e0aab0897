"""Search over kernels, models, layers, shapes, commits and runs, from every page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import streamlit as st

from flexq_bench.dashboard.shared.formatting import as_text, short_commit
from flexq_bench.dashboard.shared.links import page_address
from flexq_bench.dashboard.shared.model_places import places_in_models
from flexq_bench.dashboard.shared.project import current_project
from flexq_bench.db import queries
from flexq_bench.db.engine import Database
from flexq_bench.db.errors import DatabaseError, NotFoundError
from flexq_bench.db.queries import SeriesName
from flexq_bench.db.records import LINEAR
from flexq_bench.workloads.case import kernel_label
from flexq_bench.workloads.models import load_catalog
from flexq_bench.workloads.probes import is_probe

_MAX_HITS_PER_KIND = 5  # per kind
_MAX_COMMITS = 400  # newest commits whose subjects are searched
_SHAPE = re.compile(r"(\d{2,6})\s*[x×, ]\s*(\d{2,6})")
_TOKENS = re.compile(r"m=?(\d+)")
_HEX = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A search hit. words: its description. address: of its page."""

    words: str
    address: str


def search(database: Database, text: str) -> list[SearchHit]:
    """Search kernels, models, layers, shapes, commits and runs; empty: nothing matches."""
    words = text.strip().lower()
    if len(words) < 2:
        return []
    with database.session() as session:
        series = [s for s in queries.series_names(session) if not is_probe(s.kernel)]
        project = current_project(session)  # the linked page compares commits of this project
        commits = queries.recent_commits(session, limit=_MAX_COMMITS, project=project)
        runs = []
        if _HEX.fullmatch(words):
            commits += queries.recent_commits(session, limit=0, prefixes=[words], project=project)
            with suppress(NotFoundError):
                runs = [queries.run_by_uuid_prefix(session, words)]
    labels = {kernel_label(s.kernel, s.variant): s.kernel for s in series}
    hits = [
        SearchHit(f"kernel {label}", page_address("kernels", kernel=kernel))
        for label, kernel in sorted(labels.items())
        if words in label.lower()
    ][:_MAX_HITS_PER_KIND]
    hits += [
        SearchHit(f"model {name}", page_address("leaderboard", model=name))
        for name in sorted(load_catalog())
        if words in name.lower()
    ][:_MAX_HITS_PER_KIND]
    own = [s for s in series if s.project == project and s.operation == LINEAR]
    hits += [
        SearchHit(f"layer {name}, fastest kernels", page_address("leaderboard", **place))
        for name, place in _matching_layers(words.split(), own).items()
    ][:_MAX_HITS_PER_KIND]
    shape = _SHAPE.fullmatch(words)
    sizes = {(s.n, s.k) for s in series}
    if shape and (int(shape[1]), int(shape[2])) in sizes:
        n, k = shape[1], shape[2]
        hits.append(SearchHit(f"shape {n} × {k}", page_address("history", shape=f"{n}x{k}")))
    matching = [row for row in commits if row.sha.startswith(words) or words in row.subject.lower()]
    hits += [
        SearchHit(
            f"commit {short_commit(row.sha, dirty=False)} {row.subject}",
            page_address("compare", **{"kind": "commits", "head-commits": row.sha[:10]}),
        )
        for row in dict.fromkeys(matching)
    ][:_MAX_HITS_PER_KIND]
    hits += [
        SearchHit(f"run {run.uuid[:8]} of {run.suite}", page_address("results", run=run.uuid[:8]))
        for run in runs
    ]
    return hits


def _matching_layers(
    words: Sequence[str], series: Sequence[SeriesName]
) -> dict[str, dict[str, str]]:
    """Return the places of the Leaderboard, by description, that have every word of several.

    A word is a part of the name of a model, a layer or a GPU, or `m=8`.
    """
    tokens = [int(match[1]) for word in words if (match := _TOKENS.fullmatch(word))]
    names = [word for word in words if not _TOKENS.fullmatch(word)]
    if len(words) < 2 or len(tokens) > 1:
        return {}
    stored: dict[tuple[int, int], set[str]] = {}
    for s in series:
        if s.n is not None and s.k is not None and (not tokens or s.m in tokens):
            stored.setdefault((s.n, s.k), set()).add(s.gpu)
    found_places = {}
    for (model, layer), shapes in places_in_models(stored).items():
        for gpu in sorted(set().union(*(stored[shape] for shape in shapes))):
            all_names = f"{model} {layer} {gpu}".lower()
            if all(name in all_names for name in names):
                m = {"m": str(tokens[0])} if tokens else {}
                title = ", ".join((f"{model} {layer}", *(f"M = {t}" for t in tokens), gpu))
                found_places[title] = {"gpu": gpu, "model": model, "layer": layer} | m
    return found_places


def show_search(database: Database) -> None:
    """Show a search field in the sidebar, and links to its hits."""
    text = st.sidebar.text_input(
        "Search",
        placeholder="kernel, layer m=8, commit, run",
        max_chars=80,
        key="search",
    )
    if not text:
        return
    try:
        hits = search(database, text)
    except DatabaseError:
        return  # the page shows the error
    for hit in hits:
        st.sidebar.markdown(f"[{as_text(hit.words)}]({hit.address})")
    if not hits:
        st.sidebar.caption("No match.")
