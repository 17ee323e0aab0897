"""Noise of stored series, estimated again only after something was stored."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from flexq_bench.dashboard.database import file_identity
from flexq_bench.db.engine import Database
from flexq_bench.results.stored_noise import StoredNoise, read_noise


def stored_noise(database: Database, series_ids: Iterable[int]) -> StoredNoise:
    """Return the noise of these series; of a SQLite file, as estimated since its last commit."""
    ids = sorted(set(series_ids))
    version = database.version()
    if version is None:
        return _read(database, ids)
    return noise_of_file(database, file_identity(database.path), version, " ".join(map(str, ids)))


@st.cache_resource(show_spinner=False, max_entries=32)
def noise_of_file(
    _database: Database, file: tuple[int, int] | None, version: int, ids: str
) -> StoredNoise:
    return _read(_database, [int(text) for text in ids.split()])


def _read(database: Database, ids: list[int]) -> StoredNoise:
    with database.session() as session:
        return read_noise(session, ids)
