"""Decoding and serving in fresh processes, and what they find as records."""

from __future__ import annotations

import statistics
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from db.decode_records import DecodeRecord, ServingRecord
from db.records import CommitInfo, DeviceInfo, RunInfo
from flexq_bench.decode.case import PROTOCOL_VERSION, DecodeCase
from flexq_bench.decode.requests import Request
from flexq_bench.decode.worker import COMMAND
from flexq_bench.errors import UsageError
from flexq_bench.interleave.process import RefusedError, WorkerProcess
from flexq_bench.measure import Tuning
from flexq_bench.regress.bootstrap import hierarchical_interval
from workloads.models import Block, load_catalog
from workloads.schemes import get_scheme

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "flexq-bench")
_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 3600.0  # of one answer: a large model from disk takes minutes


@dataclass(frozen=True, slots=True)
class Setup:
    """processes: fresh ones that measure everything once each. device: as torch names it."""

    model: str
    schemes: tuple[str, ...]
    device: str
    kv_bits: int = 16
    processes: int = 1
    seed: int = 0
    tuning: Tuning = Tuning.REMEMBERED


@dataclass(slots=True)
class _Found:
    """Answers of the processes about one case; refused: why there are none."""

    answers: list[dict[str, Any]] = field(default_factory=list)
    loaded: dict[str, Any] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a worker tells of itself."""

    device: DeviceInfo
    environment: dict[str, str]


def cases_of(
    setup: Setup, batches: tuple[int, ...], prompt_tokens: int, new_tokens: tuple[int, ...]
) -> list[DecodeCase]:
    """Every combination, in the order in which they are measured."""
    return [
        DecodeCase(setup.model, scheme, batch, prompt_tokens, new, setup.kv_bits)
        for scheme, batch, new in product(setup.schemes, batches, new_tokens)
    ]


def decode_all(
    setup: Setup,
    cases: list[DecodeCase],
    run: RunInfo,
    commit: CommitInfo,
    on_answer: Callable[[str], None],
) -> Iterator[DecodeRecord]:
    """A record a case, once the last process has measured it. on_answer: called with a label.

    Raises UsageError if no case can be, WorkerError if a process dies.
    """
    found = {case: _Found() for case in cases}
    batches = sorted({case.batch for case in cases})
    capacity = max(case.prompt_tokens + case.new_tokens for case in cases)
    for number in range(setup.processes):
        with _worker(setup, number) as (worker, machine):
            for scheme in setup.schemes:
                mine = [case for case in cases if case.scheme == scheme]
                try:
                    loaded = worker.ask(
                        "load",
                        model=setup.model,
                        scheme=scheme,
                        batches=batches,
                        capacity=capacity,
                        kv_bits=setup.kv_bits,
                        tuning=setup.tuning.value,
                    )
                except RefusedError as error:
                    for case in mine:
                        found[case].refused = str(error)
                    continue
                for case in mine:
                    found[case].loaded = loaded
                    _ask_decode(worker, case, found[case])
                    on_answer(case.key)
                    if number == setup.processes - 1 and found[case].answers:
                        yield _decode_record(setup, case, found[case], machine, run, commit)
                worker.ask("unload")
            last = machine
    refused = [case for case in cases if not found[case].answers]
    if len(refused) == len(cases):
        raise UsageError(found[cases[0]].refused)
    for case in refused:
        yield _decode_record(setup, case, found[case], last, run, commit)


def serve_all(
    setup: Setup,
    requests: list[Request],
    lengths: str,
    limits: tuple[int, ...],
    memory_limit_bytes: int | None,
    run: RunInfo,
    commit: CommitInfo,
    on_answer: Callable[[str], None],
) -> Iterator[ServingRecord]:
    """A record a scheme and batch limit. Raises as decode_all."""
    capacity = max(request.length for request in requests)
    pairs = [[request.prompt_tokens, request.new_tokens] for request in requests]
    reasons: list[str] = []
    served = 0
    with _worker(setup, 0) as (worker, machine):
        for scheme, limit in product(setup.schemes, limits):
            of_model = {
                "model": setup.model,
                "scheme": scheme,
                "capacity": capacity,
                "kv_bits": setup.kv_bits,
            }
            found = _Found()
            slots = limit
            try:
                slots = worker.ask(
                    "slots",
                    **of_model,
                    batch_limit=limit,
                    memory_limit_bytes=memory_limit_bytes,
                )["slots"]
                found.loaded = worker.ask(
                    "load", **of_model, batches=[slots], tuning=setup.tuning.value
                )
                found.answers = [
                    worker.ask(
                        "serve",
                        slots=slots,
                        capacity=capacity,
                        kv_bits=setup.kv_bits,
                        requests=pairs,
                    )
                ]
                served += 1
            except RefusedError as error:
                found.refused = str(error)
                reasons.append(str(error))
            on_answer(f"serve {setup.model} {scheme} b{slots}")
            of_run = (machine, run, commit)
            what = (slots, memory_limit_bytes, requests, lengths)
            yield _serving_record(setup, scheme, limit, found, what, of_run)
    if not served:
        raise UsageError(reasons[0])


def serving_key(setup: Setup, scheme: str, limit: int, memory: int | None, requests: int) -> str:
    """The identity of one serving within a run."""
    within = "" if memory is None else f" m{memory}"
    return f"serve {setup.model} {scheme} kv{setup.kv_bits} b{limit}{within} r{requests}"


@contextmanager
def _worker(setup: Setup, number: int) -> Iterator[tuple[WorkerProcess, Machine]]:
    with WorkerProcess(
        "decode",
        _ROOT,
        device=setup.device,
        seed=setup.seed + number,
        timeout_s=_TIMEOUT_S,
        command=COMMAND,
    ) as worker:
        told = worker.ask("describe")
        yield worker, Machine(DeviceInfo(**told["device"]), told["environment"])


def _ask_decode(worker: WorkerProcess, case: DecodeCase, found: _Found) -> None:
    try:
        answer = worker.ask(
            "decode",
            batch=case.batch,
            prompt_tokens=case.prompt_tokens,
            new_tokens=case.new_tokens,
            kv_bits=case.kv_bits,
        )
    except RefusedError as error:
        found.refused = str(error)
    else:
        found.answers.append(answer)


def _decode_record(
    setup: Setup,
    case: DecodeCase,
    found: _Found,
    machine: Machine,
    run: RunInfo,
    commit: CommitInfo,
) -> DecodeRecord:
    answers = found.answers
    steps = [answer["step_ms"] for answer in answers if answer["step_ms"]]
    interval = hierarchical_interval(steps, seed=setup.seed) if steps else None
    medians = tuple(float(statistics.median(of_process)) for of_process in steps)
    joules = [answer["energy_j"] for answer in answers if answer["energy_j"] is not None]
    tokens = case.batch * case.new_tokens
    return DecodeRecord(
        **_shared(setup, case.scheme, case.key, found, machine, run, commit),
        batch=case.batch,
        prompt_tokens=case.prompt_tokens,
        new_tokens=case.new_tokens,
        prefill_ms=_median([answer["prefill_ms"] for answer in answers]),
        token_ms=interval.estimate if interval else None,
        token_ci_low_ms=interval.low if interval else None,
        token_ci_high_ms=interval.high if interval else None,
        token_p95_ms=float(np.percentile(np.concatenate(steps), 95)) if steps else None,
        process_medians_ms=medians,
        tokens_per_s=1000 * case.batch / interval.estimate if interval else None,
        steady_memory_bytes=_median_bytes(answers, "steady_bytes"),
        peak_memory_bytes=_median_bytes(answers, "peak_bytes"),
        energy_j_per_token=None if not joules else float(statistics.median(joules)) / tokens,
        parts=tuple(answers[-1]["parts"]) if answers else (),
    )


def _serving_record(
    setup: Setup,
    scheme: str,
    limit: int,
    found: _Found,
    what: tuple[int, int | None, list[Request], str],
    of_run: tuple[Machine, RunInfo, CommitInfo],
) -> ServingRecord:
    slots, memory, requests, lengths = what
    answer = found.answers[0] if found.answers else None
    new = sum(request.new_tokens for request in requests)

    def percentile(name: str, percent: int) -> float | None:
        values = answer[name] if answer else []
        return float(np.percentile(values, percent)) if values else None

    shared = _shared(
        setup, scheme, serving_key(setup, scheme, limit, memory, len(requests)), found, *of_run
    )
    shared["parameters"] = {**shared["parameters"], "slots": slots}
    return ServingRecord(
        **shared,
        batch_limit=limit,
        memory_limit_bytes=memory,
        requests=len(requests),
        prompt_tokens=sum(request.prompt_tokens for request in requests),
        new_tokens=new,
        lengths=lengths,
        tokens_per_s=new / answer["seconds"] if answer else None,
        latency_p50_s=percentile("latency_s", 50),
        latency_p95_s=percentile("latency_s", 95),
        latency_p99_s=percentile("latency_s", 99),
        token_p50_ms=percentile("token_ms", 50),
        token_p95_ms=percentile("token_ms", 95),
        steady_memory_bytes=answer["steady_bytes"] if answer else None,
    )


def _shared(
    setup: Setup,
    scheme: str,
    key: str,
    found: _Found,
    machine: Machine,
    run: RunInfo,
    commit: CommitInfo,
) -> dict[str, Any]:
    of_scheme, loaded = get_scheme(scheme), found.loaded
    block: Block = loaded.get("block", "llama")
    synthetic = loaded.get("is_synthetic", setup.model in load_catalog())
    return {
        "uuid": str(uuid.uuid5(_NAMESPACE, f"{run.uuid} {key}")),
        "case": key,
        "model": setup.model if synthetic else Path(setup.model).stem,
        "weights": "synthetic" if synthetic else str(setup.model),
        "scheme": scheme,
        "kernels": {name: of_scheme.kernel_of(block, name) for name in loaded.get("linears", ())},
        "backend": machine.device.backend,
        "kv_bits": setup.kv_bits,
        "protocol_version": PROTOCOL_VERSION,
        "status": "ok" if found.answers else "refused",
        "detail": "" if found.answers else found.refused,
        "weights_bytes": loaded.get("weights_bytes"),
        "parameters": {
            "seed": setup.seed,
            "tuning": setup.tuning.value,
            "processes": len(found.answers),
            "load_s": loaded.get("load_s"),
            "load_peak_bytes": loaded.get("load_peak_bytes"),
        },
        "created_at": datetime.now(UTC).isoformat(),
        "run": run,
        "commit": commit,
        "device": machine.device,
        "environment": machine.environment,
    }


def _median(values: list[float]) -> float | None:
    return float(statistics.median(values)) if values else None


def _median_bytes(answers: list[dict[str, Any]], name: str) -> int | None:
    known = [answer[name] for answer in answers if answer[name] is not None]
    return int(statistics.median(known)) if known else None
