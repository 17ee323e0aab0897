"""Kernels that are wrong on few inputs: which side is wrong is asked of the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from worker_inside import FAST, Inside

from flexq_bench import api
from flexq_bench.kernels import registry
from flexq_bench.measure import Meter
from flexq_bench.measure.ab import InterleaveRules
from flexq_bench.measure.ab.course import compare_cases
from flexq_bench.measure.ab.experiment import ABExperiment, Side, trusted_pair
from flexq_bench.measure.ab.judged_sides import JudgingDevice, judged_pair
from flexq_bench.measure.shared_tensors import Exchange
from flexq_bench.measure.telemetry import NoSensor
from flexq_bench.verdicts import CaseComparison, Verdict
from flexq_bench.workloads.case import Case
from flexq_bench.workloads.gemm import GemmWorkload

RULES = InterleaveRules(processes=5, placements=1, blocks=2, looks=1)
IsWrong = Callable[[int], object]  # by a number that depends on all elements of the activations
# The first inputs are those of the seed; whether the kernel is wrong there changes the course.
in_other_numbers = pytest.mark.parametrize("offset", [0, pytest.param(1, marks=pytest.mark.slow)])
RUNNING = SimpleNamespace(is_wrong=None)


def never(_: int) -> bool:
    return False


def digest(x: torch.Tensor) -> int:
    return int(x.contiguous().view(torch.int16).long().sum()) * 7919 % 1000003


@api.linear_kernel("rare", weight="fp16", backends=["cpu"])
def rare(x, w, out):
    out.copy_(x.float() @ w.float().T)
    if RUNNING.is_wrong(digest(x)):
        out[0] += 1


class OfSide(Inside):
    """A worker whose kernel is wrong where its side's is."""

    def __init__(self, is_wrong: IsWrong, secret: int) -> None:
        super().__init__(Meter("cpu", FAST))
        self._is_wrong, self._secret = is_wrong, secret

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        RUNNING.is_wrong = self._is_wrong
        return super().ask(what, **arguments)

    def check_identity(self) -> dict[str, Any]:
        self.reseed(self._secret)
        return super().ask("describe")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inside(ABExperiment):
    """rules_of: where a side's kernel is wrong, by its name."""

    wrong_in: dict[str, IsWrong]
    secrets: count[int]

    def worker(self, _stack: object, side: Side) -> Any:
        return OfSide(self.wrong_in[side.name], next(self.secrets))


@pytest.fixture(params=["judged", "trusted"])
def compared(request, tmp_path) -> Callable[[IsWrong, IsWrong], CaseComparison]:
    """Compare two kernels by the inputs on which each is wrong."""
    exchanged = {}
    for slot in ("base", "head"):
        (tmp_path / slot).mkdir()
        exchanged[slot] = Exchange(tmp_path / slot)
    judge = JudgingDevice(torch.device("cpu"), FAST, NoSensor(), exchanged)

    def judged(base: Case, head: Case) -> Any:
        return judged_pair(base, head, judge, believes_binary=False)

    def run(base: IsWrong, head: IsWrong) -> CaseComparison:
        experiment = _Inside(
            *(Side("base", Path("/")), Side("head", Path("/")), RULES, "cpu"),
            pair=judged if request.param == "judged" else trusted_pair,
            starts_ahead=False,
            wrong_in={"base": base, "head": head},
            secrets=count(1),
        )
        case = Case(kernel.spec.label, GemmWorkload(4, 32, 64), cache="hot")
        (found,) = compare_cases([(experiment, [(case, case)])])
        return found

    (kernel,) = rare.kernels()
    registry.add([kernel])
    yield run
    registry.remove([kernel.spec.label])


@in_other_numbers
def test_error_of_base_on_the_same_inputs_is_no_regression(compared, offset):
    def both(number: int) -> bool:
        return number % 3 == offset

    found = compared(both, both)

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert found.comparison.base_correct  # nothing is corrected, and head's times are not hidden
    assert "on the same inputs" in found.detail


@in_other_numbers
def test_new_rare_error_is_incorrect(compared, offset):
    found = compared(never, lambda number: number % 3 == offset)

    assert found.confirmation.verdict is Verdict.INCORRECT


@in_other_numbers
def test_error_of_base_excuses_none_on_other_inputs(compared, offset):
    found = compared(lambda number: number % 3 == offset, lambda number: number % 3 == 2)

    assert found.confirmation.verdict is Verdict.INCORRECT


@in_other_numbers
def test_base_is_corrected_where_head_is_right_on_its_inputs(compared, offset):
    found = compared(lambda number: number % 3 == offset, never)

    assert found.confirmation.verdict is Verdict.NO_DATA
    assert not found.comparison.base_correct
