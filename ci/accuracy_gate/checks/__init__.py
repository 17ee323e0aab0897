"""The checks of the accuracy gate, in the order of reports: a line here registers one."""

from __future__ import annotations

from typing import Any

from flexq_bench.ci.accuracy_gate.checks.agreement import AgreementCheck
from flexq_bench.ci.accuracy_gate.checks.artefacts import ArtefactsCheck
from flexq_bench.ci.accuracy_gate.checks.coverage import CoverageCheck
from flexq_bench.ci.accuracy_gate.checks.fidelity import FidelityCheck
from flexq_bench.ci.accuracy_gate.checks.kl import KlCheck
from flexq_bench.ci.accuracy_gate.checks.parity import ParityCheck
from flexq_bench.ci.accuracy_gate.checks.perplexity import PerplexityCheck
from flexq_bench.ci.accuracy_gate.checks.serving_path import ServingPathCheck
from flexq_bench.ci.accuracy_gate.checks.tail import TailCheck
from flexq_bench.ci.accuracy_gate.checks.task import TaskCheck
from flexq_bench.ci.accuracy_gate.checks.weights import WeightsCheck
from flexq_bench.ci.accuracy_gate.contract import Check

CHECKS: tuple[Check[Any], ...] = (
    PerplexityCheck(),
    TailCheck(),
    KlCheck(),
    AgreementCheck(),
    FidelityCheck(),
    CoverageCheck(),
    TaskCheck(),
    ArtefactsCheck(),
    WeightsCheck(),
    ParityCheck(),
    ServingPathCheck(),
)
