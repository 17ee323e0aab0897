"""Decoding and serving in fresh processes, with a record after every result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, Protocol, Self

from flexq_bench.db.records import (
    CommitInfo,
    DecodeRecord,
    DeviceInfo,
    ProcessDecode,
    RunInfo,
    ServingRecord,
)
from flexq_bench.decode.case import DecodeCase, Setup
from flexq_bench.decode.continuous_batching import step_sizes
from flexq_bench.decode.records import (
    MeasurementOrigin,
    ProcessResults,
    ServingCase,
    ServingResult,
    content_hash_of,
    decode_record,
    serving_record,
)
from flexq_bench.decode.worker import COMMAND
from flexq_bench.errors import UsageError
from flexq_bench.measure.rank_processes import RankProcesses
from flexq_bench.measure.worker_process import RefusedError, WorkerProcess

_ROOT = Path(__file__).resolve().parents[2]
_ADDED = frozenset(
    {"weights_bytes", "load_peak_bytes", "steady_memory_bytes", "peak_memory_bytes", "energy_j"}
)  # over the GPUs
_TIMEOUT_S = 3600.0  # per request: loading a large model from disk takes minutes


def cases_of(
    setup: Setup, batches: tuple[int, ...], prompts: tuple[int, ...], new_tokens: tuple[int, ...]
) -> list[DecodeCase]:
    """All combinations, in the order of measurement: short decodes first."""
    return [
        DecodeCase(setup.model, cached.scheme, batch, prompt, new, cached.kv_bits)
        for cached, new, prompt, batch in product(
            setup.schemes, sorted(new_tokens), prompts, batches
        )
    ]


def decode_all(
    setup: Setup,
    cases: Sequence[DecodeCase],
    run: RunInfo,
    commit: CommitInfo,
    before: Mapping[str, DecodeRecord],
) -> Iterator[DecodeRecord]:
    """Yield a case's updated record after each process that has measured it.

    before: earlier records of the run by case, whose processes are not repeated. Refused cases come
    last. Raises UsageError if all are refused, or `before` is of another GPU or other options;
    WorkerError if a process dies.
    """
    results = {case: _earlier_results(before.get(case.key)) for case in cases}
    for record in before.values():
        _check_options(setup, record)
    source: MeasurementOrigin | None = None
    for number in range(max(setup.process_count(case) for case in cases)):
        missing = [case for case in cases if _is_missing(setup, case, results[case], number)]
        if not missing:
            continue
        with _worker(setup, number) as (worker, device, environment):
            _check_device(device, before)
            source = MeasurementOrigin(run, commit, device, environment)
            for scheme in dict.fromkeys(case.scheme for case in missing):
                scheme_cases = [case for case in missing if case.scheme == scheme]
                fitting = [
                    case for case in scheme_cases if _fits(worker, setup, case, results[case])
                ]
                if not fitting:
                    continue
                try:
                    loaded = _load(worker, setup, fitting, sorted({c.batch for c in fitting}))
                except RefusedError as error:
                    for case in fitting:
                        results[case].refused = str(error)
                    continue
                whole: dict[tuple[int, int, int], DecodeCase] = {}  # a brief run's longest decodes
                for case in sorted(fitting, key=lambda c: -c.new_tokens if setup.brief else 0):
                    _check_weights(before.get(case.key), loaded)
                    results[case].loaded = loaded
                    setting = (case.batch, case.prompt_tokens, case.kv_bits)
                    longest = whole.get(setting)
                    if longest is not None:
                        results[case].take_first(case, longest, results[longest])
                    else:
                        _request_decode(
                            worker, case, results[case], number, device.uuid, brief=setup.brief
                        )
                    if results[case].processes:
                        if setup.brief:
                            whole.setdefault(setting, case)
                        yield decode_record(setup, case, results[case], source)
                worker.ask("unload")
    refused = [case for case in cases if results[case].refused and not results[case].processes]
    if len(refused) == len(cases):
        raise UsageError(results[cases[0]].refused)
    for case in refused:
        assert source is not None  # a process refused it
        yield decode_record(setup, case, results[case], source)


def count_missing(
    setup: Setup, cases: Sequence[DecodeCase], before: Mapping[str, DecodeRecord]
) -> int:
    """Number of missing measurements, counting each process of a case."""
    done = {case.key: len(before[case.key].processes) for case in cases if case.key in before}
    return sum(max(0, setup.process_count(case) - done.get(case.key, 0)) for case in cases)


def serve_all(
    setup: Setup, cases: Sequence[ServingCase], run: RunInfo, commit: CommitInfo
) -> Iterator[ServingRecord]:
    """Yield one record per case, by scheme. Raises as decode_all."""
    refused: list[str] = []
    with _worker(setup, 0) as (worker, device, environment):
        source = MeasurementOrigin(run, commit, device, environment)
        for scheme in dict.fromkeys(case.scheme for case in cases):
            scheme_cases = [case for case in cases if case.scheme == scheme]
            for served in _serve_scheme(worker, setup, scheme_cases):
                refused += [served.refused] if served.refused else []
                yield serving_record(setup, served, source)
    if len(refused) == len(cases):
        raise UsageError(refused[0])


def _serve_scheme(
    worker: _Asked, setup: Setup, cases: Sequence[ServingCase]
) -> Iterator[ServingResult]:
    slots: dict[ServingCase, int] = {}
    for case in cases:
        try:
            slots[case] = _slots(worker, setup, case)
        except RefusedError as error:
            yield ServingResult(case, case.batch_limit, refused=str(error))
    if not slots:
        return
    sizes = {size for slot_count in slots.values() for size in step_sizes(slot_count)}
    try:
        loaded = _load(worker, setup, list(slots), sorted(sizes, reverse=True))
    except RefusedError as error:
        for case, slot_count in slots.items():
            yield ServingResult(case, slot_count, refused=str(error))
        return
    for case, slot_count in slots.items():
        try:
            answer = worker.ask(
                "serve",
                slots=slot_count,
                capacity=case.capacity,
                kv_bits=case.kv_bits,
                requests=[[r.prompt_tokens, r.new_tokens] for r in case.requests],
                step_tokens=case.step_tokens,
            )
        except RefusedError as error:
            yield ServingResult(case, slot_count, loaded, refused=str(error))
        else:
            yield ServingResult(case, slot_count, loaded, answer)


def _slots(worker: _Asked, setup: Setup, case: ServingCase) -> int:
    """Number of concurrent sequences. Raises RefusedError if they don't fit."""
    arguments = _sequences(setup, case)
    most = min(case.batch_limit, len(case.requests))
    answer = worker.ask(
        "slots", **arguments, batch_limit=most, memory_limit_bytes=case.memory_limit
    )
    worker.ask("check", **arguments, batch=answer["slots"])
    return int(answer["slots"])


class _Asked(Protocol):
    """The interface of a worker."""

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]: ...


class _Together:
    """Processes of several GPUs as one worker: times of the first, and sums of what adds up."""

    def __init__(self, ranks: RankProcesses) -> None:
        self._ranks = ranks

    def __enter__(self) -> Self:
        self._ranks.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._ranks.__exit__(*details)

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Return the reply of the first rank, with sums; raises as RankProcesses."""
        replies = self._ranks.ask(what, **arguments)
        reply = replies[0]
        for name in _ADDED & reply.keys():
            values = [other[name] for other in replies]
            reply[name] = None if None in values else sum(values)
        if "device" in reply:
            uuids = [other["device"]["uuid"] for other in replies]
            sku = f"{len(replies)}x {reply['device']['sku']}"
            reply["device"] |= {"sku": sku, "uuid": "+".join(uuids)}
        return reply


@contextmanager
def _worker(setup: Setup, number: int) -> Iterator[tuple[_Asked, DeviceInfo, dict[str, str]]]:
    command, devices = (*COMMAND, "--seed", str(setup.seed + number)), setup.devices
    with (
        _Together(RankProcesses("decode", _ROOT, command, devices, timeout_s=_TIMEOUT_S))
        if setup.gpus > 1
        else WorkerProcess(
            "decode", _ROOT, (*command, "--device", setup.device), timeout_s=_TIMEOUT_S
        )
    ) as worker:
        answer = worker.ask("describe")
        yield worker, DeviceInfo(**answer["device"]), answer["environment"]


def _fits(worker: _Asked, setup: Setup, case: DecodeCase, result: ProcessResults) -> bool:
    try:
        worker.ask("check", **_sequences(setup, case), batch=case.batch)
    except RefusedError as error:
        result.refused = str(error)
        return False
    return True


def _sequences(setup: Setup, case: DecodeCase | ServingCase) -> dict[str, Any]:
    """Return the arguments of a request that say what a sequence of this case needs."""
    return {
        "model": setup.weights_of(case.scheme),
        "scheme": case.scheme,
        "capacity": case.capacity,
        "kv_bits": case.kv_bits,
    }


def _load(
    worker: _Asked,
    setup: Setup,
    cases: Sequence[DecodeCase | ServingCase],
    batches: list[int],
) -> dict[str, Any]:
    """Load the model for these cases of one scheme."""
    return worker.ask(
        "load",
        model=setup.weights_of(cases[0].scheme),
        scheme=cases[0].scheme,
        batches=batches,
        capacity=max(case.capacity for case in cases),
        tuning=setup.tuning.value,
        invariant=setup.invariant,
    )


def _request_decode(
    worker: _Asked,
    case: DecodeCase,
    result: ProcessResults,
    number: int,
    gpu: str,
    *,
    brief: bool,
) -> None:
    try:
        answer = worker.ask(
            "decode",
            batch=case.batch,
            prompt_tokens=case.prompt_tokens,
            new_tokens=case.new_tokens,
            kv_bits=case.kv_bits,
            profiled=not brief and not result.parts,
            powered=not brief,
        )
    except RefusedError as error:
        result.refused = str(error)
        return
    parts, result.spent_s = tuple(answer.pop("parts")), answer.pop("spent_s")
    result.logits_sha256 = answer.pop("logits_sha256", "")
    result.cache_token_bytes = answer.pop("cache_token_bytes", None)
    result.parts = result.parts or parts
    steps = tuple(answer.pop("step_ms"))
    result.processes.append(ProcessDecode(number=number, gpu=gpu, step_ms=steps, **answer))


def _is_missing(setup: Setup, case: DecodeCase, result: ProcessResults, number: int) -> bool:
    done = {process.number for process in result.processes}
    return number < setup.process_count(case) and number not in done and not result.refused


def _earlier_results(record: DecodeRecord | None) -> ProcessResults:
    if record is None or record.status != "ok":
        return ProcessResults()
    return ProcessResults(list(record.processes), record.parts)


def _check_options(setup: Setup, record: DecodeRecord) -> None:
    for name, current in (("seed", setup.seed), ("tuning", setup.tuning.value)):
        stored = record.parameters.get(name)
        if stored != current:
            raise UsageError(
                f"run {record.run.uuid[:8]} was begun with {name} {stored}, and this is {current}: "
                "give the same, or start a new run"
            )


def _check_weights(record: DecodeRecord | None, loaded: dict[str, Any]) -> None:
    if record is not None and record.content_hash != content_hash_of(loaded, record.kv_bits):
        raise UsageError(
            f"run {record.run.uuid[:8]} was begun with other weights under {record.scheme}: start "
            "a new run"
        )


def _check_device(device: DeviceInfo, before: Mapping[str, DecodeRecord]) -> None:
    for record in before.values():
        if record.device.sku != device.sku:
            raise UsageError(
                f"run {record.run.uuid[:8]} was begun on {record.device.sku} and this is "
                f"{device.sku}: pick it by --device, or start a new run"
            )
