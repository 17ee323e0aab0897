"""Table of the rows of `corruptions.py`, and the rows with a wrong verdict."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from output import say

from flexq_bench.accuracy.results import FULL_PRECISION
from flexq_bench.schemes.registry import without_cache

NOTHING_DONE = "none"  # the corruption that leaves a model as it is
_HEAD = (
    "| corruption | class | of | perplexity, % | worst text, % | mean KL | tokens | must fail "
    "| fails | exit code |\n"
    "| --- | --- | --- | ---: | ---: | ---: | ---: | --- | --- | ---: |"
)


class Verdicts:
    """Verdicts on rows; the undamaged row of a scheme comes before its damaged ones."""

    def __init__(self) -> None:
        self._undamaged: dict[str, list[str]] = {}  # limits that a scheme fails, by its name
        self._last: dict[tuple[str, str], Any] = {}  # effect of a corruption on a scheme

    def caught_by(self, row: dict[str, Any]) -> list[str]:
        """The limits that fail, and don't without the damage."""
        scheme = row["scheme"]
        without = () if row["corruption"] == NOTHING_DONE else self._undamaged.get(
            scheme, self._undamaged.get(without_cache(scheme), ())
        )  # fmt: skip
        return [name for name in row["fails"] if name not in without]

    def is_wrong(self, row: dict[str, Any]) -> bool:
        """Return True if a row was judged wrongly, or shows that its corruption does nothing."""
        scheme, corruption = row["scheme"], row["corruption"]
        if corruption == NOTHING_DONE:
            self._undamaged[scheme] = row["fails"]
            if scheme == FULL_PRECISION:
                return bool(row["fails"])
            return any(name.startswith("fidelity") for name in row["fails"])
        # Two sizes that differ in nothing: the model is computed past what was damaged.
        effect = row["kl"], row.get("perplexity_percent")
        is_idle = row["kl"] is not None and self._last.get((corruption, scheme)) == effect
        self._last[corruption, scheme] = effect
        return is_idle or (row["must_be_caught"] and not self.caught_by(row))


def print_table(rows: Iterator[dict[str, Any]]) -> int:
    """Print rows as they come; the exit code."""
    verdicts, wrong = Verdicts(), []
    say(_HEAD)
    for row in rows:
        is_wrong = verdicts.is_wrong(row)
        say(line_of(row, verdicts.caught_by(row)))
        if is_wrong:
            wrong.append(f"{row['corruption']}, {row['size']:g} of {row['scheme']}")
    say("; ".join([f"{len(wrong)} judged wrongly", *wrong]))
    return 1 if wrong else 0


def stored_rows(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """The rows of files that --out wrote, compressed or not."""
    for file in files:
        content = file.read_bytes()
        text = gzip.decompress(content) if file.suffix == ".gz" else content
        yield from map(json.loads, text.splitlines())


def line_of(row: dict[str, Any], caught_by: Sequence[str]) -> str:
    """A row of a Markdown table."""
    percent, kl, clean = row["perplexity_percent"], row["kl"], row["kl_of_scheme"]
    worst = row.get("worst_percent")
    more = f" ({100 * (kl / clean - 1):+.0f} %)" if kl is not None and clean else ""
    cells = (
        f"{row['corruption']}, {row['size']:g} {row['unit']}".rstrip(),
        row.get("kind", ""),
        f"`{row['scheme']}`",
        "" if percent is None else f"{percent:+.2f}",
        "" if worst is None else f"{worst:+.2f} {row.get('worst_text', '')}".rstrip(),
        "" if kl is None else f"{kl:.5f}{more}",
        f"{row['tokens']:,}",
        "yes" if row["must_be_caught"] else "no",
        ", ".join(_without_texts(caught_by)) or "nothing",
        str(row["exit_code"]),
    )
    return f"| {' | '.join(cells)} |"


def _without_texts(names: Sequence[str]) -> Iterator[str]:
    """Names of limits with the number of texts: `perplexity (3)` of `perplexity of code`, …"""
    kinds = Counter(name.rpartition(" of ")[0] or name for name in names)
    return (kind if count == 1 else f"{kind} ({count})" for kind, count in kinds.items())
