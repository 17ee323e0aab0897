"""Speed-ups that papers state (published.toml): never mixed with what was measured here."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from workloads.errors import WorkloadError


@dataclass(frozen=True, slots=True)
class PublishedSpeedup:
    """baseline time / kernel time, averaged by the paper over a suite's layers at m tokens."""

    suite: str
    source: str
    hardware: str
    kernel: str
    baseline: str
    m: int
    speedup: float


@cache
def published_speedups(suite: str) -> tuple[PublishedSpeedup, ...]:
    """What papers state of a suite; empty: nothing. Raises WorkloadError if the file is damaged."""
    text = (resources.files("workloads") / "published.toml").read_text(encoding="utf-8")
    found = []
    for values in tomllib.loads(text).get("set", []):
        try:
            shared = {
                name: values[name] for name in ("suite", "source", "hardware", "kernel", "baseline")
            }
            rows = [(int(m), float(speedup)) for m, speedup in values["speedups"]]
        except (KeyError, TypeError, ValueError) as error:
            raise WorkloadError(f"published.toml: a set lacks or has a wrong {error}") from error
        if shared["suite"] == suite:
            found += [PublishedSpeedup(**shared, m=m, speedup=speedup) for m, speedup in rows]
    return tuple(found)
