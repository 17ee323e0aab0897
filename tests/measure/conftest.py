"""A kernel with injected errors, and a meter that measures it in milliseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flexq_bench.kernels import registry
from flexq_bench.kernels.contract import (
    Config,
    KernelSpec,
    PackedOperand,
    Probe,
    ProbeResult,
)
from flexq_bench.kernels.errors import UnknownKernelError
from flexq_bench.kernels.formats import FP16
from flexq_bench.measure import PROTOCOL_CPU, Meter
from flexq_bench.measure.protocol import WarmUp
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

sys.path.insert(0, str(Path(__file__).parent))  # its helper `cheats`

from cheats import INT6, Honest


class FakeLinear(Honest):
    """A right W6A6 GEMM in float64. after(out, launches) may spoil what it wrote."""

    def __init__(self, after: Callable[[torch.Tensor, int], None] | None = None, **spec):
        super().__init__()
        fields = {"weight": INT6, "activation": INT6, "backend": "cpu", "summary": "fake"}
        self.spec = KernelSpec(name="fake", **{**fields, **spec})
        self.after = after
        self.weights_seen: list[int] = []
        self.configs_seen: list[Config | None] = []

    def gemm(self, x, w, out, *, bias=None, config=None):
        self.weights_seen.append(w.buffers["real"].data_ptr())
        self.configs_seen.append(config)
        super().gemm(x, w, out)
        if self.after is not None:
            self.after(out, self.launches)


class FakeProbe(Probe):
    """Counts how often it is set up."""

    def __init__(self, name: str, reads_weights: bool):
        self.spec = KernelSpec(
            name, "cpu", INT6, FP16, "fake", stages=("gemm",),
            reads_weights=reads_weights,
        )  # fmt: skip
        self.checks = 0

    def allocate(self, gemm, device, seed):
        return PackedOperand({"words": torch.zeros(gemm.n * gemm.k // 4)}, gemm.n, gemm.k)

    def launch(self, operand, config=None):
        operand.buffers["words"].add_(1)

    def check(self, operand, config=None):
        self.checks += 1
        return ProbeResult(exact=True)


@dataclass(frozen=True)
class Shelf:
    """The kernels a meter of these tests finds; a missing read probe has no floor."""

    kernels: dict[str, object]

    def resolve(self, label, backend):
        if label in self.kernels:
            return self.kernels[label]
        if label == "flexq-w6a6":
            return registry.resolve(label, backend)
        raise UnknownKernelError(f"no kernel {label!r}: there is fake")


FAST = replace(
    PROTOCOL_CPU,
    warm_up=WarmUp(0.0, 0.005, agreement=1.0),
    rewarm=WarmUp(0.0, 0.005, agreement=1.0),
    retune=WarmUp(0.0, 0.005, agreement=1.0),
    target_sample_us=50.0,
    batch_s=0.0005,
    min_device_s=0.0005,
    assumed_l2_bytes=1 << 16,
    ci_tolerance=1e9,
    budget_s=20.0,
    sustained=WarmUp(0.0, 0.005),
    sustained_s=0.001,
)


@pytest.fixture(autouse=True)
def no_choices_of_earlier_tests(tmp_path, monkeypatch):
    """Give each test an empty folder of tuning choices."""
    monkeypatch.setattr("flexq_bench.measure.tuning.tuning_folder", lambda: tmp_path / "tuning")


@pytest.fixture
def fake_linear():
    return FakeLinear


@pytest.fixture
def fake_probe():
    return FakeProbe


@pytest.fixture
def fast():
    return FAST


@pytest.fixture
def a_case():
    def build(m=2, n=64, k=256, kernel="fake", **fields):
        return Case(kernel, GemmWorkload(m, n, k), **fields)

    return build


@pytest.fixture
def a_meter():
    def build(
        kernel=None,
        *,
        protocol=FAST,
        probes=(),
        sensor=None,
        clock=None,
        seed=0,
        secret=1,
        **fields,
    ):
        shelf = {probe.spec.label: probe for probe in probes}
        if kernel is not None:
            shelf[kernel.spec.label] = kernel
        return Meter(
            "cpu",
            protocol,
            seed,
            sensor=sensor,
            clock=clock,
            secret=secret,
            resolve=Shelf(shelf).resolve,
            **fields,
        )

    return build
