"""The actor that measures, on the CPU of this machine and without Ray."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from flexq_bench.db.tuning import ChoiceInfo
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet import ray_workers as actor
from flexq_bench.fleet import shipped_kernels
from flexq_bench.fleet.node_program import unpacked
from flexq_bench.fleet.ray_actors import Actor
from flexq_bench.fleet.ray_cluster import Slot
from flexq_bench.fleet.ray_workers import MeterActor, RayWorkers
from flexq_bench.fleet.retry_policy import MAX_FAILURES
from flexq_bench.fleet.shipped_kernels import ship_kernels
from flexq_bench.fleet.timeouts import Times
from flexq_bench.kernels.autotune import TuningKey, TuningMemory
from flexq_bench.kernels.contract import Config
from flexq_bench.kernels.errors import SourceError
from flexq_bench.kernels.external.sources import KernelSource
from flexq_bench.measure import Tuning, external_kernels
from flexq_bench.runs import process_meter
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload


@dataclass(frozen=True, slots=True)
class Width(Config):
    width: int


KEY = TuningKey("k", 1, 1, 64, 64, "gemm", "cold", "A GPU", "software")
CANDIDATES = (Width(32), Width(64))


def test_worker_describes_itself_and_measures():
    worker = MeterActor("cpu", 0, Tuning.NONE)
    case = Case("cublas-fp16", GemmWorkload(1, 32, 32))

    report = worker.measure(case, ())

    assert report.measured.status in ("ok", "noisy")
    assert report.measured.extra["wall_s"] > 0
    assert worker.describe().worker.device.backend == "cpu"
    huge = Case("cublas-fp16", GemmWorkload(1 << 24, 1 << 24, 8))
    assert list(worker.memory_obstacles((case, huge))) == [huge.key]


def test_worker_refuses_a_gpu_with_other_processes(monkeypatch):
    monkeypatch.setattr(actor, "_RELEASE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(actor, "other_processes", lambda nvml: 2)

    with pytest.raises(InfrastructureError, match="2 other processes compute on"):
        MeterActor("cpu", 0, Tuning.NONE)


def test_gpus_without_any_worker_are_refused():
    workers = RayWorkers("an address", backend="cuda", seed=0)
    slots = [
        Slot(f"n{i}", f"n{i}", 0, "cuda", gpu) for i, gpu in enumerate(("A100", "A100", "H200"))
    ]
    workers._slots = tuple(slots)
    workers._actors[slots[0]] = Actor(slots[0], None, None, 0.0, uuid="ready")
    for slot in slots[1:]:
        failures = workers._failures_of(slot)
        failures.count, failures.reason = MAX_FAILURES, f"no build on {slot.host}"

    assert workers.refused_gpus == {"H200": "no build on n2"}


def test_offered_choice_is_used_without_timing():
    memory = TuningMemory()
    memory.offer(KEY, {"width": 64})

    chosen = memory.choose(KEY, CANDIDATES, lambda config: pytest.fail("it was timed"))

    assert chosen == Width(64)
    assert memory.chosen == {KEY: Width(64)}


def test_offer_that_is_no_candidate_is_ignored():
    for memory, offered in ((TuningMemory(), 16), (TuningMemory(fresh=True), 64)):
        memory.offer(KEY, {"width": offered})
        assert memory.choose(KEY, CANDIDATES, lambda config: config.width) == Width(32)


def test_received_choices_are_not_sent_back(monkeypatch):
    worker = MeterActor("cpu", 0, Tuning.NONE)
    memory = worker._meter.choices
    told = ChoiceInfo({name: getattr(KEY, name) for name in TuningKey.__slots__}, {"width": 64})

    def measure(meter, case):
        memory.choose(KEY, CANDIDATES, lambda config: config.width)
        memory.choose(other, CANDIDATES, lambda config: config.width)

    other = TuningKey("k", 1, 8, 64, 64, "gemm", "cold", "A GPU", "software")
    monkeypatch.setattr(process_meter, "measure_case", measure)

    report = worker.measure(Case("cublas-fp16", GemmWorkload(1, 32, 32)), (told,))

    assert [(choice.key["m"], choice.config) for choice in report.choices] == [(8, {"width": 32})]


def test_actor_measures_shipped_kernels_without_their_files(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXQ_BENCH_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "products.py").write_text("def product(x, w):\n    return x.float() @ w.float().T\n")
    (folder / "unrelated.py").write_text("raise RuntimeError\n")
    path = folder / "theirs.py"
    path.write_text(
        "from flexq_bench.api import linear_kernel\n"
        "from products import product\n"
        "@linear_kernel('dense', weight='fp16', backends=['cpu'])\n"
        "def dense(x, w, out):\n"
        "    out.copy_(product(x, w))\n"
    )
    monkeypatch.setattr(shipped_kernels, "parcel", in_memory)
    kernels = ship_kernels([KernelSource.parse(str(path))], None, None, Times())
    shutil.rmtree(folder)

    worker = MeterActor("cpu", 0, Tuning.NONE, kernels)
    try:
        report = worker.measure(Case("theirs.dense", GemmWorkload(1, 32, 32)), ())
        described = worker.describe().kernels
    finally:
        worker._measurer.__exit__(None, None, None)
        external_kernels.forget()

    assert report.measured.is_comparable, report.measured.detail  # ok, or noisy on a busy machine
    assert report.measured.source_hash
    assert described is not None
    assert described.labels == {"theirs": ("theirs.dense",)}
    assert not list((tmp_path / "cache").rglob("unrelated.py"))


def test_source_that_does_not_exist_is_refused_before_shipping(tmp_path):
    with pytest.raises(SourceError, match="there is no file"):
        ship_kernels([KernelSource.parse(str(tmp_path / "none.py"))], None, None, Times())


class Stored:
    """A parcel of this process."""

    def __init__(self, content: bytes) -> None:
        self.digest, self._content = hashlib.sha256(content).hexdigest(), content

    def unpacked(self, home: Path) -> Path:
        return unpacked(home, self.digest, lambda: self._content)


def in_memory(content: bytes) -> Stored:
    return Stored(content)
