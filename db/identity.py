"""Identities that are equal on any machine: hashes of content, and uuids of names."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from functools import cache
from typing import Any

from flexq_bench.db.records import LINEAR

_ENCODER = json.JSONEncoder(  # made once: `json.dumps` makes one in each call
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces. Raises ValueError on NaN and infinities."""
    return _ENCODER.encode(value)


def fingerprint(value: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def series_key(identity: Mapping[str, Any]) -> str:
    """Return the key of a series: the fingerprint of its identity (db.writer.series_identity).

    Operations came later: series of linear layers, and of benchmarks of no operation, have the keys
    that they had before, with the size 1 for none.
    """
    hashed = dict(identity)
    operation, parameters = hashed.pop("operation", LINEAR), hashed.pop("parameters", "")
    if not operation:
        hashed |= {name: hashed[name] or 1 for name in "mnk"}
    elif operation != LINEAR:
        hashed |= {"operation": operation, "parameters": parameters}
    return fingerprint(hashed)


def name_uuid(name: str, *, kind: str = "") -> str:
    """Return the uuid5 of a name. kind: names of different kinds never have the same uuid."""
    return str(uuid.uuid5(_namespace(kind), name))


@cache
def _namespace(kind: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"flexq-bench {kind}" if kind else "flexq-bench")


def content_uuid(content: str) -> str:
    """Return the uuid5 of a run that is identified by its content, without an origin of its own."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, content))
