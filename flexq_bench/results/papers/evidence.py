"""Stored results that published numbers are compared with, and their lookup."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from flexq_bench.db import queries
from flexq_bench.db.engine import Session
from flexq_bench.db.queries import SWEEP, DecodeRow, Filters, ResultRow, ScoreRow, ServingRow
from flexq_bench.measure.protocol import BRIEF_VERSIONS
from flexq_bench.stats.baseline import time_of
from flexq_bench.workloads.case import kernel_label, parse_kernel_label
from flexq_bench.workloads.published import published_papers

# GB/s, of the vendors' data sheets.
BANDWIDTHS = {
    "RTX 3090 Ti": 1008,
    "RTX 3070": 448,
    "RTX 4080": 717,
    "A100-40GB": 1555,
    "A800-40GB": 1555,
    "NVIDIA H100 80GB HBM3": 3352,
    "NVIDIA H200": 4800,
}
# Task of a paper -> its names in records, of lm-eval where that has it.
TASK_NAMES = {
    "wikitext2": ("wikitext2", "wikitext"),
    "ptb-new": ("ptb-new", "ptb"),
    "c4-new": ("c4-new", "c4"),
    "storycloze": ("storycloze_2016",),
    "mmlu-humanities": ("mmlu_humanities",),
    "mmlu-stem": ("mmlu_stem",),
    "mmlu-social": ("mmlu_social_sciences",),
    "mmlu-other": ("mmlu_other",),
    "mmlu-mean": ("mmlu",),
}
ZERO_SHOT = ("piqa", "arc_easy", "arc_challenge", "boolq", "hellaswag", "winogrande")
_PERCENT = 100.0


@dataclass(frozen=True)
class Evidence:
    """The newest results of each kind, of all GPUs.

    results: of kernels, of this repository's main line, or else of any checkout. decodes: with a
    16-bit cache unless the scheme has another.
    """

    results: Sequence[ResultRow] = ()
    decodes: Sequence[DecodeRow] = ()
    servings: Sequence[ServingRow] = ()
    scores: Sequence[ScoreRow] = ()
    _found: dict[tuple[str, ...], tuple[float, float] | None] = field(
        default_factory=dict, compare=False
    )

    @cached_property
    def gpus(self) -> list[str]:
        """GPUs with a time of a kernel or of a whole model."""
        return sorted({r.gpu for r in self.results} | {r.gpu for r in self.decodes})

    @cached_property
    def times(self) -> dict[tuple[str, str, str, int, int, int], ResultRow]:
        """GEMM times by GPU, label, cache mode, m, n, k."""
        return {
            (r.gpu, kernel_label(r.kernel, r.variant), r.cache, r.m, r.n, r.k): r
            for r in sorted(
                self.results,
                key=lambda r: (r.protocol_version < BRIEF_VERSIONS, r.accepted, r.created_at),
            )
            if r.stage == "gemm" and r.m and r.n and r.k and time_of(r) is not None
        }

    @cached_property
    def decoded(self) -> dict[tuple[str, str, str, int, int], DecodeRow]:
        """Decodes of batch 1 by GPU, model, scheme, tokens of the prompt and new tokens."""
        return {
            (r.gpu, r.model, r.scheme, r.prompt_tokens, r.new_tokens): r
            for r in sorted(self.decodes, key=lambda r: r.created_at)
            if r.batch == 1 and r.token_ms is not None and r.kv_bits == kv_bits_of(r.scheme)
        }

    @cached_property
    def models(self) -> Counter[str]:
        """Number of schemes that were evaluated of each model."""
        pairs = {(r.model, r.scheme) for r in self.scores}
        return Counter(model for model, _ in pairs)

    def score(self, model: str, scheme: str, task: str, metric: str) -> float | None:
        """Return the score of a task or, of `mean`, of all six zero-shot tasks; None: none.

        Of several texts of a task, or numbers of their tokens, it is the one with most schemes, so
        that all scores of a model and task compare.

        metric: perplexity, or accuracy in percent, normalized where a task defines it.
        """
        found = self.scored(model, scheme, task, metric)
        return None if found is None else found[0]

    def scored(self, model: str, scheme: str, task: str, metric: str) -> tuple[float, float] | None:
        """Return a score and its standard error, 0 if that is not known."""
        key = (model, scheme, task, metric)
        if key not in self._found:
            self._found[key] = self._scored(*key)
        return self._found[key]

    def _scored(
        self, model: str, scheme: str, task: str, metric: str
    ) -> tuple[float, float] | None:
        if task == "mean" and metric == "accuracy":
            parts = [self.scored(model, scheme, name, metric) for name in ZERO_SHOT]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            mean = sum(value for value, _ in known) / len(known)
            return mean, math.hypot(*(error for _, error in known)) / len(known)
        names = TASK_NAMES.get(task, (task,))
        wanted = ("acc_norm", "acc") if metric == "accuracy" else (metric,)
        scale = _PERCENT if metric == "accuracy" else 1.0
        for name in wanted:
            rows = [r for r in self._of_one_text(model, names, name) if _fits(r.scheme, scheme)]
            if rows:
                best = max(rows, key=lambda r: _preference(r, scheme))
                return scale * best.value, scale * (best.standard_error or 0.0)
        return None

    def _of_one_text(self, model: str, tasks: Sequence[str], metric: str) -> list[ScoreRow]:
        """Return the scores of the text, or of the questions, with results of most schemes."""
        texts: dict[tuple[str, int], list[ScoreRow]] = {}
        for r in self._by_model.get((model, metric), ()):
            if r.task in tasks:
                texts.setdefault((r.data_hash, r.n_items), []).append(r)
        return max(texts.values(), key=_schemes_and_time, default=[])

    @cached_property
    def _by_model(self) -> dict[tuple[str, str], list[ScoreRow]]:
        found: dict[tuple[str, str], list[ScoreRow]] = {}
        for r in self.scores:
            found.setdefault((r.model, r.metric), []).append(r)
        return found

    def of_shapes(
        self, gpu: str, labels: tuple[str, str], shapes: Iterable[tuple[int, int]], m: int | None
    ) -> Iterator[tuple[ResultRow, ResultRow]]:
        """Yield the cold times of two kernels at the same m and shape."""
        wanted = set(shapes)
        for (of, label, cache, rows, n, k), found in self.times.items():
            if (of, label, cache) != (gpu, labels[0], "cold") or (n, k) not in wanted:
                continue
            base = self.times.get((gpu, labels[1], "cold", rows, n, k))
            if m in (None, rows) and base is not None:
                yield found, base


def _schemes_and_time(rows: Sequence[ScoreRow]) -> tuple[int, datetime]:
    return len({r.scheme for r in rows}), max(r.created_at for r in rows)


def _fits(stored: str, wanted: str) -> bool:
    """Return True if two schemes differ at most in how long a learned scheme was trained."""
    return stored == wanted or re.sub(r"\[epochs=\d+\]$", "", stored) == wanted


def _preference(row: ScoreRow, scheme: str) -> tuple[bool, bool, int, datetime]:
    epochs = re.search(r"\[epochs=(\d+)\]$", row.scheme)
    trained = int(epochs[1]) if epochs else 0
    return row.through == "reference", row.scheme == scheme, trained, row.created_at


def kv_bits_of(scheme: str) -> int:
    """Return the bits of a scheme's KV cache, as its name says: Atom's and +kv4 have 4."""
    if match := re.search(r"(?:\+kv|kv_bits=)(\d+)", scheme):
        return int(match[1])
    return 4 if scheme.startswith("atom-") else 16


def read_evidence(session: Session) -> Evidence:
    """Read the results that any published number is compared with."""
    labels: set[str] = set()
    for paper in published_papers():
        cells = (cell for table in paper.table for cell in table.cells() if "kernel" in cell.at)
        labels.update(map(paper.kernel, cells))
        for statement in paper.statement:
            if statement.ours is not None and statement.ours.suite:
                ours = statement.ours
                labels.update((ours.kernel, ours.baseline, *ours.on_down))
    names = tuple(sorted({parse_kernel_label(label)[0] for label in labels if label}))
    filters = Filters(kernels=names, without_triggers=(SWEEP,), projects=("",))
    decoded = queries.decoded_models(session)
    main = queries.latest_results(session, filters)
    return Evidence(
        (*queries.latest_results_elsewhere(session, filters), *main),
        queries.latest_decodes(session),
        [row for model in decoded for row in queries.latest_servings(session, model=model)],
        queries.latest_scores(session, queries.scored_models(session)),
    )
