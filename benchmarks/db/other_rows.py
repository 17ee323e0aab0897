"""Synthetic rows other than measurements: jobs, workers, and results of whole models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import made_up
import numpy as np
from sqlalchemy import update

from flexq_bench.db.engine import Session
from flexq_bench.db.fleet import (
    JobInfo,
    OffsetInfo,
    WorkerInfo,
    add_jobs,
    add_offsets,
    register_worker,
)
from flexq_bench.db.records import AccuracyRecord, DecodeRecord, GateLimit, GateRecord, RunInfo
from flexq_bench.db.releases import store_releases
from flexq_bench.db.store import add_records
from flexq_bench.db.tables import Job, Worker

RELEASE_EVERY = 20  # nights; then models are evaluated, too
SCHEMES = ("fp16", "flexq-w6ax", "w6a6", "w4a4", "smoothquant-w6a6", "abq-w4a8")
TASKS = ("piqa", "arc_easy", "arc_challenge", "boolq", "hellaswag", "winogrande")
MODELS = ("SmolLM2-135M", "llama-7b")
_SEGMENTS = 140
_QUESTIONS = 1000
_OF_RESULTS = ("status", "detail", "parameters")  # what gates have not
_MADE_UP: dict[str, Any] = {"environment": {"driver": "580.65"}, "parameters": {}}


def fill_fleet(session: Session, runs: Iterable[tuple[RunInfo, int]]) -> None:
    """A finished job for each case of each run, a worker a night and GPU, offsets of GPUs.

    runs: each with its night.
    """
    for run, night in runs:
        add_jobs(session, run.uuid, [JobInfo(case, expected_s=2.0) for case in run.plan])
        at = made_up.began(night)
        offsets = [OffsetInfo(made_up.device(gpu), 40, 0.001, -0.002, 0.004)
                   for gpu in made_up.GPUS]  # fmt: skip
        add_offsets(session, run.uuid, offsets, at=at)
        for gpu in made_up.GPUS:
            name = made_up.identity("worker", night, gpu)
            info = WorkerInfo(name, "host", night, made_up.device(gpu), _MADE_UP["environment"])
            register_worker(session, info, at=at)
    session.execute(update(Job).values(state="done", attempts=1))
    session.execute(update(Worker).values(state="stopped"))


def fill_models(session: Session, nights: int) -> None:
    """Releases, and what models scored, how they decoded and what gates said at each of them."""
    released = range(0, nights, RELEASE_EVERY)
    for night in released:
        add_records(session, _scores(night))
        add_records(session, _decodes(night))
        add_records(session, _gates(night))
    tags = {f"v1.{i}": made_up.commit(night).sha for i, night in enumerate(released)}
    store_releases(session, tags)


def _shared(kind: str, night: int) -> dict[str, Any]:
    name = made_up.identity(kind, night)
    at = made_up.began(night) + timedelta(hours=4)
    run = RunInfo(name, kind, "nightly", "complete", at.isoformat(), name)
    return _MADE_UP | {
        "run": run,
        "commit": made_up.commit(night),
        "device": made_up.device(made_up.GPUS[0]),
        "created_at": at.isoformat(),
        "status": "ok",
        "detail": "",
    }


def _scores(night: int) -> Iterator[AccuracyRecord]:
    rng = np.random.default_rng([4, night])
    hard = rng.normal(2.5, 0.5, _SEGMENTS)
    shared = _shared("accuracy", night) | {
        "model_hash": "made up",
        "task_version": "1",
        "data_hash": "made up",
        "seed": 0,
    }
    for model in MODELS:
        for i, scheme in enumerate(SCHEMES):
            nll = hard + 0.02 * i + rng.normal(0, 0.01, _SEGMENTS)
            yield AccuracyRecord(
                uuid=made_up.identity("perplexity", night, model, scheme), model=model,
                scheme=scheme, task="wikitext", metric="perplexity", direction="lower",
                value=float(np.exp(nll.mean())), standard_error=0.5, n_items=2048 * _SEGMENTS,
                values=tuple(nll.tolist()), **shared,
            )  # fmt: skip
            for task in TASKS:
                right = (rng.random(_QUESTIONS) < 0.6 - 0.01 * i).astype(float)
                yield AccuracyRecord(
                    uuid=made_up.identity("task", night, model, scheme, task), model=model,
                    scheme=scheme, task=task, metric="acc", direction="higher",
                    value=float(right.mean()), standard_error=0.015, n_items=_QUESTIONS,
                    values=tuple(right.tolist()), **shared,
                )  # fmt: skip


def _gates(night: int) -> Iterator[GateRecord]:
    shared = {k: v for k, v in _shared("accuracy", night).items() if k not in _OF_RESULTS}
    for model in MODELS:
        for i, scheme in enumerate(SCHEMES[1:], start=1):
            outcome, code = ("pass", 0) if i < 3 else ("regression", 1)
            change: Any = {"change": 2.0 * i, "low": 1.9 * i, "high": 2.1 * i, "unit": "%"}
            limits = tuple(
                GateLimit(f"perplexity of {text}", "+5 %", outcome, "", 12.0, 12.0 + 0.2 * i,
                          **change)
                for text in ("wikitext", "c4")
            )  # fmt: skip
            yield GateRecord(
                uuid=made_up.identity("gate", night, model, scheme), model=model,
                model_hash="made up", scheme=scheme, base="fp16", policy="made up",
                policy_version=1, policy_hash="made up", verdict=outcome, exit_code=code,
                limits=limits, **shared,
            )  # fmt: skip


def _decodes(night: int) -> Iterator[DecodeRecord]:
    shared = _shared("decode", night)
    for i, scheme in enumerate(SCHEMES):
        for batch in (1, 2, 4, 8, 16):
            for tokens in (128, 1024):
                ms = (10.0 - i) * (1 + 0.05 * batch)
                case = f"llama-7b {scheme} b{batch} n{tokens}"
                yield DecodeRecord(
                    uuid=made_up.identity("decode", night, case), case=case, model="llama-7b",
                    weights="synthetic", scheme=scheme, kernels={}, backend="cuda", kv_bits=16,
                    batch=batch, prompt_tokens=15, new_tokens=tokens, protocol_version=1,
                    prefill_ms=ms, token_ms=ms, token_ci_low_ms=0.99 * ms,
                    token_ci_high_ms=1.01 * ms, token_p95_ms=1.05 * ms, process_medians_ms=(),
                    tokens_per_s=1000 * batch / ms, weights_bytes=5 << 30,
                    steady_memory_bytes=6 << 30, peak_memory_bytes=7 << 30,
                    energy_j_per_token=None, parts=(), **shared,
                )  # fmt: skip
