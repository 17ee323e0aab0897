"""The ingest API on both kinds of database."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "read_api"))

from posting import Poster

from flexq_bench.db import queries
from flexq_bench.db.records import Record

CSV = f"benchmark,value,commit\ngemm,21.4,{'a' * 40}\n"


def test_post_is_stored_once_corrected_once_and_audited(database):
    poster = Poster(database)
    _, secret = poster.token(rights="admin")

    answers = [
        poster.post(text, secret, key=key).content
        for text, key in ((CSV, "1"), (CSV, "1"), (CSV, "2"), (CSV.replace("21.4", "22.5"), "3"))
    ]
    refused = poster.post(CSV, secret, project="theirs")
    made = poster.post("", secret, path="/v1/tokens", name="nightly").content
    audit = poster.post("", secret, path="/v1/requests", method="GET").content["requests"]

    assert [(a["added"], a["replaced"]) for a in answers] == [(1, 0), (1, 0), (0, 0), (0, 1)]
    assert refused.status == 403
    assert poster.post(CSV.replace("21.4", "22.5"), made["secret"]).status == 200
    assert [entry["status"] for entry in audit] == [200, 403, 200, 200, 200]
    with database.session() as session:
        records = list(queries.stored_records(session, Record, queries.Filters()))
    assert [one.median_us for one in records] == [22.5]
