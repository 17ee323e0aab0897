"""Decoding in fresh processes: records after each process, and what a resumed run measures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flexq_bench.db.records import CommitInfo
from flexq_bench.decode import measurement as measuring
from flexq_bench.decode.case import CachedScheme, Setup, read_scheme
from flexq_bench.decode.records import ServingCase
from flexq_bench.decode.requests import ServingRequest
from flexq_bench.errors import UsageError
from flexq_bench.measure.worker_process import RefusedError
from flexq_bench.runs.lifecycle import new_run
from flexq_bench.schemes.errors import QuantizeError

COMMIT = CommitInfo("a" * 40, None, 1, False, "A commit", "somebody", None)
SCHEMES = (CachedScheme("fp16"), CachedScheme("flexq-w6ax"))
SETUP = Setup("llama-7b", SCHEMES, "cpu", processes=3, long_processes=2)


class Workers:
    """Stands for worker processes. Steps take 1 ms and a thousandth more in each process."""

    def __init__(self, *, refused="", sku="CPU"):
        self.requests: list[tuple[int, str, int, int]] = []
        self.loaded: list[tuple[str, list[int]]] = []
        self.refused, self.sku = refused, sku
        self.started = -1

    def __call__(self, *_, **__):
        self.started += 1
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, what, **given):
        if what == "describe":
            device = dict.fromkeys(
                ("vbios", "power_limit_w", "ecc", "mig", "memory_bytes", "l2_bytes", "sm_count")
            )
            device |= {"uuid": "cpu", "sku": self.sku, "backend": "cpu", "compute_capability": None}
            return {"device": device, "environment": {}}
        if what == "check" and given["scheme"] == self.refused:
            raise RefusedError(f"decode: {self.refused} doesn't fit")
        if what == "load":
            self.loaded.append((given["scheme"], given["batches"]))
            self.scheme = given["scheme"]
            configs = {str(m): {"qkv_proj": {"warps": m}} for m in given["batches"]}
            loaded = {"is_synthetic": True, "weights_bytes": 1, "kernels": {}, "scheme_version": 2}
            return {**loaded, "configs": configs}
        if what == "decode":
            self.requests.append((self.started, self.scheme, given["batch"], given["new_tokens"]))
            parts = [{"part": "norm", "count": 1, "us": 2.0}] if given["profiled"] else []
            steps = [1 + self.started / 1000] * (given["new_tokens"] - 1)
            memory = {"steady_memory_bytes": 10**9, "peak_memory_bytes": None, "energy_j": None}
            memory |= {"cache_token_bytes": 1000}
            times = {"prefill_ms": 5.0, "step_ms": steps, "spent_s": {"decode": 0.5}}
            return {**times, "parts": parts, **memory}
        if what == "slots":
            return {"slots": given["batch_limit"]}
        if what == "serve":
            if given["slots"] == 100:
                raise RefusedError("decode: batch 100 ran out of GPU memory")
            lists = {name: [1.0, 2.0] for name in ("latency_s", "ttft_ms", "token_ms")}
            return {"seconds": 2.0, "steady_bytes": None, **lists}
        return {}


@pytest.fixture
def start(monkeypatch):
    def begin(**changes):
        workers = Workers(**changes)
        monkeypatch.setattr(measuring, "WorkerProcess", workers)
        return workers

    return begin


def decoded(setup=SETUP, new=(8,), before=None):
    cases = measuring.cases_of(setup, (1, 4), (15,), new)
    run = new_run("decode", "manual", [case.key for case in cases])
    return measuring.decode_all(setup, cases, run, COMMIT, before or {})


def test_record_is_updated_after_each_process(start):
    start()

    records = list(decoded())

    assert [len(r.processes) for r in records] == [1] * 4 + [2] * 4 + [3] * 4
    of_case = [record for record in records if record.case == records[0].case]
    assert len({record.uuid for record in of_case}) == 1
    assert of_case[-1].process_medians_ms == (1.0, 1.001, 1.002)
    assert of_case[-1].token_ms == pytest.approx(1.001)
    assert of_case[-1].parameters["processes"] == 3
    assert of_case[-1].parameters["spent_s"] == {"decode": 0.5}
    assert {r.batch: r.parameters["configs"] for r in records} == {
        batch: {"qkv_proj": {"warps": batch}} for batch in (1, 4)
    }
    # Only the first process looks at the parts of a step.
    assert all(record.parts == ({"part": "norm", "count": 1, "us": 2.0},) for record in records)


def test_long_decodes_use_fewer_processes_and_come_last(start):
    workers = start()

    last = {record.case: record for record in decoded(new=(1024, 128))}

    assert {r.new_tokens: len(r.processes) for r in last.values()} == {128: 3, 1024: 2}
    new_tokens = [
        new for number, scheme, _, new in workers.requests if (number, scheme) == (0, "fp16")
    ]
    assert new_tokens == [128, 128, 1024, 1024]


def test_brief_decodes_are_the_first_tokens_of_the_longest(start):
    workers = start()

    records = list(decoded(replace(SETUP, brief=True, processes=1, long_processes=1), (4, 8)))

    assert {new for *_, new in workers.requests} == {8}
    assert [r.new_tokens for r in records] == [8, 8, 4, 4] * 2
    longest, short = records[0], records[2]
    assert short.processes[0].step_ms == longest.processes[0].step_ms[:3]
    assert short.parameters["first_tokens_of"] == 8
    saved = longest.processes[0].steady_memory_bytes - short.processes[0].steady_memory_bytes
    assert saved == 4 * 1000


def test_resumed_run_measures_missing_processes_only(start):
    start()
    stopped = {}
    for record in decoded():
        stopped[record.case] = record
        if len(record.processes) == 2:
            break  # the second process had measured one case of four
    workers = start()

    last = {record.case: record for record in decoded(before=stopped)}

    assert [process for process, *_ in workers.requests] == [0] * 3 + [1] * 4
    assert [len(record.processes) for record in last.values()] == [3] * 4
    assert [p.number for p in last[record.case].processes] == [0, 1, 2]
    cases = measuring.cases_of(SETUP, (1, 4), (15,), (8,))
    assert measuring.count_missing(SETUP, cases, stopped) == 7
    assert list(decoded(before=last)) == []


def test_run_with_other_seed_or_device_is_not_resumed(start):
    start()
    before = {record.case: record for record in decoded(replace(SETUP, processes=1))}

    with pytest.raises(UsageError, match="was begun with seed 0, and this is 1"):
        list(decoded(replace(SETUP, seed=1), before=before))
    start(sku="NVIDIA H200")
    with pytest.raises(UsageError, match="was begun on CPU and this is NVIDIA H200"):
        list(decoded(before=before))


def test_refused_scheme_does_not_stop_the_others(start):
    workers = start(refused="fp16")

    records = list(decoded())

    assert [r.status for r in records][-2:] == ["refused", "refused"]
    assert records[-1].detail == "decode: fp16 doesn't fit"
    assert {scheme for _, scheme, *_ in workers.requests} == {"flexq-w6ax"}


def test_a_scheme_is_loaded_once_for_all_its_caches(start):
    workers = start()
    schemes = tuple(read_scheme(name, 16) for name in ("fp16", "flexq-w6ax+kv8", "flexq-w6ax+kv4"))

    last = {record.case: record for record in decoded(replace(SETUP, schemes=schemes))}

    of = [(r.scheme, r.kv_bits, r.batch) for r in last.values()]
    assert of[:2] == [("fp16", 16, 1), ("fp16", 16, 4)]
    assert of[2:] == [("flexq-w6ax", bits, batch) for bits in (8, 4) for batch in (1, 4)]
    assert [scheme for scheme, _ in workers.loaded] == ["fp16", "flexq-w6ax"] * 3


def test_scheme_suffix_overrides_the_cache_bits():
    assert read_scheme("fp16", 8) == CachedScheme("fp16", 8)
    assert read_scheme("flexq-w6ax+kv4", 8) == CachedScheme("flexq-w6ax", 4)
    assert read_scheme("atom-w4a4") == CachedScheme("atom-w4a4", 4)
    assert read_scheme("atom-w4a4", 16) == CachedScheme("atom-w4a4", 16)
    for text in ("fp16+kv12", "fp16+kv"):
        with pytest.raises(UsageError, match=r"16, 8 or 4 bits, got .*: write fp16\+kv8"):
            read_scheme(text, 16)
    with pytest.raises(UsageError, match="16, 8 or 4 bits, got 5: give --kv-bits 8"):
        read_scheme("fp16", 5)
    with pytest.raises(QuantizeError, match=r"no scheme 'fp17\+kv8'"):
        read_scheme("fp17+kv8", 16)


def test_refusal_of_all_cases_is_a_usage_error(start):
    start(refused="fp16")

    with pytest.raises(UsageError, match="fp16 doesn't fit"):
        list(decoded(replace(SETUP, schemes=SCHEMES[:1])))


def test_refused_batch_does_not_stop_the_others(start, monkeypatch):
    workers = start()
    ask = workers.ask

    def crowded(what, **given):
        if what == "check" and given["batch"] == 4:
            raise RefusedError("decode: batch 4 doesn't fit")
        return ask(what, **given)

    monkeypatch.setattr(workers, "ask", crowded)
    last = {record.case: record for record in decoded()}

    assert {(r.batch, r.status) for r in last.values()} == {(1, "ok"), (4, "refused")}


def served(limits, requests=100):
    wanted = tuple([ServingRequest(10, 20)] * requests)
    cases = [
        ServingCase(cached.scheme, limit, None, wanted, "made up", 512, cached.kv_bits)
        for cached in SETUP.schemes
        for limit in limits
    ]
    run = new_run("decode", "manual", [case.key(SETUP) for case in cases])
    return list(measuring.serve_all(SETUP, cases, run, COMMIT))


def test_a_scheme_is_loaded_once_for_all_its_servings(start):
    workers = start()

    records = served((8, 40))

    sizes = [40, 32, 8]
    assert workers.loaded == [("fp16", sizes), ("flexq-w6ax", sizes)]
    slots = [(r.scheme, r.parameters["slots"]) for r in records]
    assert slots == [(scheme, limit) for scheme in ("fp16", "flexq-w6ax") for limit in (8, 40)]
    assert [r.tokens_per_s for r in records] == [1000.0] * 4


def test_slots_do_not_exceed_requests(start):
    start()

    assert served((256,), requests=12)[0].parameters["slots"] == 12


def test_refused_serving_does_not_stop_the_others(start):
    start(refused="fp16")

    records = served((8, 256))

    assert [r.scheme for r in records] == ["fp16"] * 2 + ["flexq-w6ax"] * 2
    assert [r.status for r in records] == ["refused", "refused", "ok", "refused"]
    assert records[-1].detail == "decode: batch 100 ran out of GPU memory"
    start()
    with pytest.raises(UsageError, match="ran out of GPU memory"):
        served((256,))


def test_worker_gets_absolute_paths():
    setup = Setup("tiny-flexq", SCHEMES, "cpu", checkpoints={"w8a16": "cache/w8a16"})

    assert setup.weights_of("flexq-w6ax") == str(Path("tiny-flexq").absolute())
    assert setup.weights_of("w8a16") == str(Path("cache/w8a16").absolute())
    assert SETUP.weights_of("flexq-w6ax") == "llama-7b"
